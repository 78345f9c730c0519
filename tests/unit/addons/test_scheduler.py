"""Learning rates from run to run: a new run, a rate set between two runs, and a run that continues with another length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback
from samples import Regress, make_loader, make_model, make_trainer, some
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)  # fmt: skip

from nbtrain import AccumulationAddon, StateManagerAddon, warmup_cosine
from nbtrain.errors import ConfigError

FACTORIES: dict[str, Callable[..., Any]] = {
    "cosine": lambda o, plan: CosineAnnealingLR(o, plan.total_steps),
    "one cycle": lambda o, plan: OneCycleLR(o, 0.02, plan.total_steps),
    "lambda": lambda o, plan: LambdaLR(o, lambda i: 1 - i / plan.total_steps),
    "warm-up": lambda o, plan: SequentialLR(o, [LinearLR(o, 0.1, 1, 3), CosineAnnealingLR(o, plan.total_steps - 3)], [3]),
    "polynomial": lambda o, plan: PolynomialLR(o, plan.total_steps, 2.0),
    "exponential": lambda o, plan: ExponentialLR(o, 0.97),
    "steps": lambda o, plan: StepLR(o, 4, 0.5),
    "ours": warmup_cosine,
}


class Rates(Callback):
    """Records the learning rate of each batch; raises after `last` batches."""

    def __init__(self, last: int | None = None) -> None:
        self.seen: list[float] = []
        self.last = last

    def on_train_batch_start(self, pl_trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if len(self.seen) == self.last:
            raise SystemExit
        self.seen.append(float(pl_trainer.optimizers[0].param_groups[0]["lr"]))


class Notes:
    """Collects what a record says about plans of schedules."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def update(self, event: Any) -> None:
        if event.kind == "note" and any(word in event.data["text"] for word in ("plan", "factory", "rises")):
            self.seen.append(event.data["text"])


def make(schedule: Any, *, last: int | None = None, kind: Any = Regress, **options: Any) -> Any:
    trainer = make_trainer(kind, scheduler=schedule, lightning={"callbacks": [Rates(last)]}, seed=0, **options)
    trainer.recorder.add(Notes())
    return trainer


def rates(trainer: Any) -> list[float]:
    return trainer.lightning["callbacks"][0].seen


def notes(trainer: Any) -> list[str]:
    return next(sink.seen for sink in trainer.recorder.sinks if isinstance(sink, Notes))


def rates_of(schedule: Any, n_epochs: int) -> list[float]:
    trainer = make(schedule)
    trainer.run(n_epochs, make_loader())
    return rates(trainer)


@pytest.mark.parametrize("name", FACTORIES)
def test_each_run_has_a_new_schedule_of_a_factory(name: str) -> None:
    trainer = make(FACTORIES[name])
    trainer.run(2, make_loader())
    trainer.run(2, make_loader())
    assert rates(trainer) == rates_of(FACTORIES[name], 2) * 2 and max(rates(trainer)) > 0


@pytest.mark.parametrize("name", some(FACTORIES, 2))
@pytest.mark.parametrize("n_epochs", [1, 2, 3])
def test_a_resumed_run_with_another_length_follows_the_schedule_of_that_length(name: str, n_epochs: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": Regress.add_on(StateManagerAddon), "save_path": tmp_path, "every_n_steps": 1}
    with pytest.raises(SystemExit):
        make(FACTORIES[name], last=4, **options).run(2, make_loader(), resume="auto")
    again = make(FACTORIES[name], **options)
    again.run(n_epochs, make_loader(), resume="auto")
    assert rates(again) == rates_of(FACTORIES[name], n_epochs)[4:]
    expected = f"The schedule was planned for 10 updates, and the run now has {5 * n_epochs}: it follows the new plan from here on."
    assert notes(again) == ([] if n_epochs == 2 else [expected])


@pytest.mark.parametrize("name", FACTORIES)
def test_a_branch_that_goes_beyond_the_plan_follows_a_longer_one(name: str) -> None:
    trainer = make(FACTORIES[name], keep_states=True)
    trainer.run(2, make_loader())
    branch = trainer.branch(epoch=1)
    branch.run(3, make_loader())
    assert rates(branch)[-15:] == rates_of(FACTORIES[name], 4)[5:]


def test_a_branch_on_a_longer_schedule_keeps_the_factor_that_was_set_by_hand() -> None:
    trainer = make(FACTORIES["lambda"], keep_states=True)
    trainer.run(2, make_loader())
    branch = trainer.branch(epoch=1, lr=0.0025)  # half of the schedule's
    branch.run(3, make_loader())
    assert rates(branch)[-15:] == pytest.approx([rate / 2 for rate in rates_of(FACTORIES["lambda"], 4)[5:]])


@pytest.mark.parametrize("name", some(sorted(set(FACTORIES) - {"one cycle"}), 2))
@pytest.mark.parametrize("n_before", [0, 1])
def test_a_rate_set_between_two_runs_is_the_initial_rate_of_the_next_schedule(name: str, n_before: int) -> None:
    trainer = make(FACTORIES[name])
    for _ in range(n_before):
        trainer.run(1, make_loader())
    trainer.set(lr=0.005)  # half of the optimizer's
    trainer.run(1, make_loader())
    assert rates(trainer)[-5:] == pytest.approx([rate / 2 for rate in rates_of(FACTORIES[name], 1)]) and not notes(trainer)


def test_a_factory_that_sets_its_own_rates_says_so_after_one_was_set_by_hand() -> None:
    trainer = make(FACTORIES["one cycle"])
    trainer.run(1, make_loader())
    trainer.set(lr=0.005)
    trainer.run(1, make_loader())
    assert notes(trainer) == ["The scheduler factory sets its own learning rates, so the one that was set by hand is not used."]


def test_a_rate_set_between_two_runs_scales_a_function() -> None:
    trainer = make(lambda step: 0.1 / (1 + step))
    trainer.run(1, make_loader())
    trainer.set(lr=0.05)
    trainer.run(1, make_loader())
    assert rates(trainer)[5:] == pytest.approx([0.05 * 6 / (1 + step) for step in range(5, 10)])


def make_with_instance(make_schedule: Callable[[Any], Any], **options: Any) -> Any:
    optimizer = torch.optim.SGD((model := make_model()).parameters(), lr=0.1)
    return make(make_schedule(optimizer), model=model, optimizer=optimizer, **options)


def test_a_rate_set_between_two_runs_scales_an_instance() -> None:
    trainer = make_with_instance(lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)))
    trainer.run(1, make_loader())
    trainer.set(lr=0.1)  # twice the schedule's
    trainer.run(2, make_loader())
    assert [row["lr"] for row in trainer.history.epochs] == pytest.approx([0.1, 0.1, 0.2 / 3])


def test_a_schedule_that_continues_at_zero_names_the_way_to_have_another() -> None:
    trainer = make_with_instance(lambda optimizer: CosineAnnealingLR(optimizer, 1))
    trainer.run(1, make_loader())
    with pytest.raises(ConfigError, match="The learning rate is 0 here, so its schedule can't be scaled.\n  Give a factory"):
        trainer.set(lr=0.1)


def test_a_cosine_that_rises_again_is_noted() -> None:
    trainer = make_with_instance(lambda optimizer: CosineAnnealingLR(optimizer, 2))
    trainer.run(2, make_loader())
    assert not notes(trainer)
    trainer.run(1, make_loader())
    assert notes(trainer) == [
        "CosineAnnealingLR has T_max=2, and this run goes to step 3: its learning rate rises again. "
        "A factory gets the length of each run: scheduler=lambda optimizer, plan: ..."
    ]


def test_a_schedule_that_can_not_step_as_often_is_refused_before_the_first_batch() -> None:
    trainer = make_with_instance(lambda optimizer: OneCycleLR(optimizer, 0.02, total_steps=2))
    trainer.run(2, make_loader())
    n_seen = len(rates(trainer))
    with pytest.raises(ConfigError, match="OneCycleLR ends after 2 steps, and this run needs 3.\n  Use total_steps=3. A factory"):
        trainer.run(1, make_loader())
    assert len(rates(trainer)) == n_seen


IN_UPDATES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "in updates": (lambda o: CosineAnnealingLR(o, 6), []),
    "in batches": (lambda o: CosineAnnealingLR(o, 10), ["CosineAnnealingLR: 10 steps planned, 6 updates come."]),
    "an epoch of batches": (lambda o: LinearLR(o, 0.1, total_iters=10), ["LinearLR: 10 steps planned, 6 updates come."]),
    "in a row": (
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 8)], [2]),
        ["SequentialLR: 10 steps planned, 6 updates come."],
    ),
    "longer than this run": (lambda o: CosineAnnealingLR(o, 12), []),
}


@pytest.mark.parametrize("name", IN_UPDATES)
def test_a_schedule_by_batch_steps_once_an_update_and_a_length_in_batches_is_noted(name: str) -> None:
    make_schedule, expected = IN_UPDATES[name]
    options = {"kind": Regress.add_on(AccumulationAddon), "accumulate": 2, "scheduler_step_on_batch": True}
    trainer = make_with_instance(make_schedule, **options)
    trainer.run(2, make_loader())
    assert trainer.scheduler.last_epoch == trainer.current_step == 6
    assert [note.partition(" It steps")[0] for note in notes(trainer)] == expected


def test_a_saved_schedule_keeps_its_count_where_that_was_of_batches(tmp_path: Path) -> None:
    def make_saved(**options: Any) -> Any:
        options |= {"kind": Regress.add_on(AccumulationAddon, StateManagerAddon), "accumulate": 2, "save_path": tmp_path}
        return make_with_instance(lambda o: OneCycleLR(o, 0.1, total_steps=20), scheduler_step_on_batch=True, **options)

    def count_batches(trainer: Any) -> None:
        trainer.scheduler.last_epoch = 5

    make_saved(hooks={"on_epoch_end": count_batches}).run(1, make_loader())
    again = make_saved()
    again.run(2, make_loader(), resume="auto")
    assert again.scheduler.last_epoch == 5 + 3


@pytest.mark.parametrize("make_schedule", [lambda o: LinearLR(o, 0.1, total_iters=4), lambda o: ConstantLR(o, 0.5, total_iters=3)])
def test_a_warm_up_by_batch_ends_before_its_run_as_in_torch(make_schedule: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule, expected = make_schedule(optimizer), []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    trainer = make_with_instance(make_schedule, scheduler_step_on_batch=True)
    trainer.run(2, make_loader())
    assert rates(trainer) == expected and not notes(trainer)


@pytest.mark.parametrize("make_schedule", [lambda o: PolynomialLR(o, 7), lambda o: LinearLR(o, 1.0, 0.0, total_iters=7)])
def test_a_schedule_that_is_at_zero_before_the_end_is_noted(make_schedule: Callable[[Any], Any]) -> None:
    trainer = make_with_instance(make_schedule, scheduler_step_on_batch=True)
    trainer.run(2, make_loader())
    name = type(trainer.scheduler).__name__
    assert notes(trainer)[0].startswith(f"{name} has total_iters=7, and this run goes to step 10: its learning rate is 0 from there on.")


@pytest.mark.parametrize("step", [5, 7])
def test_a_schedule_by_batches_has_its_length_after_a_rewind(step: int) -> None:
    optimizer = torch.optim.SGD((model := make_model()).parameters(), lr=0.1)
    schedule = OneCycleLR(optimizer, 0.02, total_steps=10)
    trainer = make(schedule, model=model, optimizer=optimizer, scheduler_step_on_batch=True, keep_states=True)
    trainer.run(2, make_loader())
    expected = rates(trainer)[step:10]
    trainer.rewind(step=step)
    trainer.run(1, make_loader())
    assert rates(trainer)[-len(expected) :] == expected and trainer.history.epochs[-1]["epoch"] == 2


@pytest.mark.parametrize("name", ["lambda", "one cycle"])
def test_a_schedule_ends_with_its_run_where_a_resumed_one_has_longer_or_shorter_epochs(name: str, tmp_path: Path) -> None:
    """With other batches, or as many for each of other processes: what was trained before counts as it was."""
    options: dict[str, Any] = {"kind": Regress.add_on(StateManagerAddon), "save_path": tmp_path}
    for size, n_batches in ((16, 5), (32, 3)):
        with pytest.raises(SystemExit):
            make(FACTORIES[name], last=n_batches, **options).run(4, make_loader(batch_size=size), resume="auto")
    again = make(FACTORIES[name], **options)
    again.run(4, make_loader(batch_size=8), resume="auto")
    (planned,) = notes(again)
    assert planned.startswith("The schedule was planned for 14 updates, and the run now has 26:") and again.counts.step == 26
    expected = make(FACTORIES[name])
    expected.run(1, make_loader(26, batch_size=1))
    assert rates(again) == rates(expected)[8:]
