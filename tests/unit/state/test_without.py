"""What was saved continues, and `without=` names what stays as it is given here: each name beside a run that never had another value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from samples import Breaks, Broken, Regress, make_loader, make_model, make_trainer, make_valid
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from nbtrain import ConfigError, EarlyStoppingAddon, StateManagerAddon
from nbtrain.history.run_folder import read_events

Saving = Regress.add_on(StateManagerAddon)
Stopping = Regress.add_on(StateManagerAddon, EarlyStoppingAddon)


def make(folder: Path, kind: Any = Saving, *, lr: float = 0.01, momentum: float = 0.0, schedule: Any = None, **options: Any) -> Any:
    """A trainer with SGD; `schedule` makes an instance for its optimizer."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    options |= {"scheduler": schedule(optimizer)} if schedule is not None else {}
    options["lightning"] = {"callbacks": [*options.get("lightning", {}).get("callbacks", ()), Rates()]}
    return make_trainer(kind, model=model, optimizer=optimizer, save_path=folder, keep_source=False, seed=1, **options)


def breaks_off(folder: Path, n: int, **options: Any) -> None:
    """A run of 4 epochs that fails after `n` batches."""
    with pytest.raises(Broken):
        run(make(folder, lightning={"callbacks": [Breaks(n)]}, **options), 4)


def run(trainer: Any, n_epoch: int, **options: Any) -> Any:
    return trainer.run(n_epoch, make_loader(), make_valid(), resume="auto", **options)


def notes(trainer: Any) -> list[str]:
    return [event.data["text"] for event in read_events(trainer.run_dir) if "without=" in event.data.get("text", "")]


class Rates(L.Callback):
    """Keeps the rate of each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(round(trainer.optimizers[0].param_groups[0]["lr"], 9))


def rates(trainer: Any) -> list[float]:
    """Those of the batches that this trainer has trained."""
    return next(callback.seen for callback in trainer.lightning["callbacks"] if isinstance(callback, Rates))


def test_a_rate_that_was_edited_is_noted_and_taken_by_its_name(tmp_path: Path) -> None:
    run(make(tmp_path), 1)
    trainer = make(tmp_path, lr=0.001)
    run(trainer, 2)
    assert rates(trainer)[-1] == 0.01
    assert notes(trainer) == ["lr was 0.01 and is 0.001 here: 0.01 is used. without=('lr',) takes 0.001"]
    again = make(tmp_path, lr=0.001)  # what goes on is still the saved one
    run(again, 3)
    assert rates(again)[-1] == 0.01 and len(notes(again)) == 2
    taken = make(tmp_path, lr=0.001)
    run(taken, 4, without=("lr",))
    assert rates(taken)[-1] == 0.001 and len(notes(taken)) == 2
    last = make(tmp_path, lr=0.001)
    run(last, 5)
    assert rates(last)[-1] == 0.001 and len(notes(last)) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": lambda optimizer: StepLR(optimizer, 1, 0.5)},
        {"scheduler": lambda optimizer, plan: CosineAnnealingLR(optimizer, plan.total_steps)},
    ],
    ids=["an instance", "a factory"],
)
def test_a_schedule_goes_on_from_the_rate_that_is_taken(options: dict[str, Any], tmp_path: Path) -> None:
    breaks_off(tmp_path / "edited", 12, **options)
    trainer, whole = make(tmp_path / "edited", lr=0.002, **options), make(tmp_path / "whole", lr=0.002, **options)
    run(trainer, 4, without=("lr",))
    run(whole, 4)
    assert rates(trainer)[-5:] == pytest.approx(rates(whole)[-5:])


def test_a_schedule_begins_again_for_the_epochs_that_are_left(tmp_path: Path) -> None:
    def factory(optimizer: Any, plan: Any) -> Any:
        plans.append(plan.n_epochs)
        return StepLR(optimizer, 5, 0.5)

    plans: list[int] = []
    options = {"scheduler": factory}
    run(make(tmp_path, **options), 2)
    trainer = make(tmp_path, lr=0.008, **options)
    run(trainer, 4, without=("schedule",))
    assert plans[-1] == 2 and rates(trainer)[0] == 0.008 and notes(trainer) == []
    last = make(tmp_path, lr=0.008, **options)
    run(last, 6)
    assert plans[-1] == 4  # of the schedule that began at epoch 2


def test_an_argument_of_a_schedule_that_was_edited_is_noted(tmp_path: Path) -> None:
    run(make(tmp_path, schedule=lambda optimizer: StepLR(optimizer, 1, 0.5)), 2)
    trainer = make(tmp_path, schedule=lambda optimizer: StepLR(optimizer, 1, 0.9))
    run(trainer, 3)
    assert notes(trainer) == ["gamma was 0.5 and is 0.9 here: 0.5 is used. without=('schedule',) takes 0.9"]
    assert rates(trainer)[-1] == 0.0025
    taken = make(tmp_path, schedule=lambda optimizer: StepLR(optimizer, 1, 0.9))
    run(taken, 5, without=("schedule",))
    assert rates(taken)[0] == 0.01 and rates(taken)[-1] == 0.009


def test_a_length_that_was_edited_with_the_number_is_followed(tmp_path: Path) -> None:
    run(make(tmp_path / "short", schedule=lambda optimizer: CosineAnnealingLR(optimizer, 2)), 2)
    trainer = make(tmp_path / "short", schedule=lambda optimizer: CosineAnnealingLR(optimizer, 4))
    run(trainer, 4)
    whole = make(tmp_path / "long", schedule=lambda optimizer: CosineAnnealingLR(optimizer, 4))
    run(whole, 4)
    assert rates(trainer) == pytest.approx(rates(whole)[10:]) and not notes(trainer)
    assert "it follows the new plan" in (trainer.run_dir / "events.jsonl").read_text()


def test_one_cycle_follows_its_new_number_of_steps(tmp_path: Path) -> None:
    n, options = len(make_loader()), {"scheduler_step_on_batch": True}

    def one_cycle(n_epoch: int) -> Any:
        return lambda optimizer: OneCycleLR(optimizer, 0.01, total_steps=n_epoch * n + 1)

    run(make(tmp_path, schedule=one_cycle(2), **options), 2)
    trainer = make(tmp_path, schedule=one_cycle(4), **options)
    run(trainer, 4)
    expected = make(tmp_path / "whole", schedule=one_cycle(4), **options)
    run(expected, 4)
    assert rates(trainer) == pytest.approx(rates(expected)[2 * n :])


def test_an_optimizer_that_is_left_out_begins_with_an_empty_state(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    trainer = make(tmp_path, momentum=0.0)
    trainer.load_state(without=("optimizer",))
    assert not trainer.optimizer.state and trainer.optimizer.param_groups[0]["momentum"] == 0.0
    run(trainer, 3)
    assert trainer.counts.epoch == 3


def test_an_option_of_the_optimizer_is_taken_by_its_name(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    trainer = make(tmp_path, momentum=0.5)
    run(trainer, 3, without=("momentum",))
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5 and trainer.optimizer.state and not notes(trainer)


def test_an_open_epoch_begins_again_without_its_place(tmp_path: Path) -> None:
    breaks_off(tmp_path, 8, every_n_steps=1)
    trainer = make(tmp_path, every_n_steps=1)
    run(trainer, 4, without=("place",))
    assert (trainer.counts.epoch, trainer.current_step) == (4, 4 * 5 + 2)


@pytest.mark.parametrize("is_addon", [True, False], ids=["the addon", "Lightning's callback"])
def test_patience_begins_again(is_addon: bool, tmp_path: Path) -> None:
    kind = Stopping if is_addon else Saving
    stop = EarlyStopping("train_loss", patience=2, min_delta=10.0)
    options: dict[str, Any] = {"patience": 2, "delta": 10.0} if is_addon else {"lightning": {"callbacks": [stop]}}
    trainer = make(tmp_path, kind, **options)
    assert run(trainer, 9).n_epochs == 3
    assert "ended at epoch 3 of 9" in run(trainer, 9).reason
    assert run(trainer, 9, without=("early_stopping",)).n_epochs == 2
    assert trainer.counts.epoch == 5


def test_lightnings_patience_that_was_edited_is_noted(tmp_path: Path) -> None:
    run(make(tmp_path, lightning={"callbacks": [EarlyStopping("train_loss", patience=4, min_delta=10.0)]}), 2)
    trainer = make(tmp_path, lightning={"callbacks": [EarlyStopping("train_loss", patience=7, min_delta=10.0)]})
    run(trainer, 20)
    assert notes(trainer) == ["patience was 4 and is 7 here: 4 is used. without=('early_stopping',) takes 7"]
    assert trainer.counts.epoch == 5


def test_a_name_that_stands_for_nothing_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(ConfigError) as error:
        run(trainer, 2, without=("rl",))
    assert str(error.value) == "without='rl' stands for nothing that is restored here.\n  Did you mean 'lr'?"
    with pytest.raises(ConfigError) as error:
        run(trainer, 2, without="lr")
    assert str(error.value) == "without must be a Collection, got 'lr'.\n  Give a tuple: without=('lr',)."
    with pytest.raises(ConfigError, match="leaves out a part of what resume= restores"):
        trainer.run(2, make_loader(), without=("lr",))
    run(trainer, 2)
    with pytest.raises(ConfigError, match=r"this one has trained or was restored since.*\n.*Make a new trainer"):
        run(trainer, 3, without=("schedule",))


def test_rates_that_one_schedule_cannot_follow_are_refused(tmp_path: Path) -> None:
    def groups(*lrs: float) -> Any:
        model = make_model()
        parts = list(model.parameters())
        optimizer = torch.optim.SGD([{"params": parts[:1], "lr": lrs[0]}, {"params": parts[1:], "lr": lrs[1]}])
        return make_trainer(Saving, model=model, save_path=tmp_path, optimizer=optimizer, scheduler=StepLR(optimizer, 1))

    run(groups(0.1, 0.01), 1)
    with pytest.raises(ConfigError, match="different factors"):
        run(groups(0.1, 0.02), 2, without=("lr",))
    trainer = groups(0.2, 0.02)
    run(trainer, 2, without=("lr",))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.002, 0.0002])


# -- rates that were set by hand, schedules that begin again, and what is refused
def test_a_rate_that_was_set_by_hand_is_the_saved_one(tmp_path: Path) -> None:
    options = {"schedule": lambda optimizer: StepLR(optimizer, 100)}
    trainer = make(tmp_path, **options)
    run(trainer, 1)
    trainer.set(lr=0.004)
    run(trainer, 2)
    again = make(tmp_path, lr=0.004, **options)
    run(again, 3)
    assert rates(again)[-1] == 0.004 and notes(again) == []
    other = make(tmp_path, **options)
    run(other, 4)
    assert notes(other) == ["lr was 0.004 and is 0.01 here: 0.004 is used. without=('lr',) takes 0.01"]
    taken = make(tmp_path, lr=0.02, **options)
    run(taken, 5, without=("lr",))
    assert rates(taken)[-1] == 0.02


def test_a_new_run_of_a_restored_trainer_begins_with_the_rate_that_is_taken(tmp_path: Path) -> None:
    options = {"scheduler": lambda optimizer, plan: CosineAnnealingLR(optimizer, plan.total_steps)}
    run(make(tmp_path, **options), 1)
    trainer = make(tmp_path, lr=0.002, **options)
    trainer.load_state(without=("lr",))
    trainer.run(1, make_loader())
    assert rates(trainer)[0] == 0.002


def test_a_schedule_of_another_class_begins_again_from_the_rate_that_is_taken(tmp_path: Path) -> None:
    breaks_off(tmp_path, 12, scheduler=lambda optimizer, plan: CosineAnnealingLR(optimizer, plan.total_steps))
    trainer = make(tmp_path, lr=0.002, scheduler=lambda optimizer, plan: StepLR(optimizer, 100))
    run(trainer, 4, without=("lr",))
    assert set(rates(trainer)) == {0.002}


class Points(StepLR):
    """A schedule with an argument that can't be compared."""

    def __init__(self, optimizer: Any, points: torch.Tensor) -> None:
        self.points = points
        super().__init__(optimizer, 100)


def test_an_argument_that_cannot_be_compared_is_left_alone(tmp_path: Path) -> None:
    run(make(tmp_path, schedule=lambda optimizer: Points(optimizer, torch.ones(3))), 1)
    trainer = make(tmp_path, schedule=lambda optimizer: Points(optimizer, torch.zeros(3)))
    run(trainer, 2)
    assert notes(trainer) == [] and trainer.counts.epoch == 2


def test_an_optimizer_that_is_left_out_takes_its_schedule_along(tmp_path: Path) -> None:
    run(make(tmp_path, schedule=lambda optimizer: StepLR(optimizer, 1, 0.5)), 2)
    trainer = make(tmp_path, schedule=lambda optimizer: StepLR(optimizer, 1, 0.5))
    run(trainer, 4, without=("optimizer",))
    assert rates(trainer)[0] == 0.01 and rates(trainer)[-1] == 0.005


def test_a_trainer_that_was_rewound_reads_no_checkpoint(tmp_path: Path) -> None:
    trainer = make(tmp_path, keep_states=True)
    run(trainer, 2)
    trainer.rewind(epoch=1)
    with pytest.raises(ConfigError, match="continues with what it has in memory, and reads no checkpoint"):
        run(trainer, 3, without=("early_stopping",))


def test_a_function_sets_the_rate_itself(tmp_path: Path) -> None:
    run(make(tmp_path, scheduler=lambda step: 0.01), 1)
    trainer = make(tmp_path, lr=0.5, scheduler=lambda step: 0.01)
    assert run(trainer, 1).n_epochs == 0
    with pytest.raises(ConfigError, match=r"without='lr' stands for nothing"):
        run(make(tmp_path, lr=0.5, scheduler=lambda step: 0.01), 2, without=("lr",))


def test_a_finished_line_is_not_told_to_take_what_it_takes(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    assert run(make(tmp_path, lr=0.5), 2, without=("lr",)).reason == "all 2 epochs were there: nothing to train"


def test_an_import_with_an_unknown_name_writes_no_folder(tmp_path: Path) -> None:
    torch.save({"model": make_model().state_dict()}, tmp_path / "old.pt")
    with pytest.raises(ConfigError, match="Did you mean 'lr'"):
        make(tmp_path / "runs").import_run(tmp_path / "old.pt", epoch=1, without=("rl",))
    assert not (tmp_path / "runs" / "run-001").exists()


def test_an_import_takes_what_is_given_here_with_without(tmp_path: Path) -> None:
    old = torch.optim.SGD(make_model().parameters(), lr=0.1, momentum=0.9)
    torch.save({"model": make_model().state_dict(), "optimizer": old.state_dict(), "epoch": 1}, tmp_path / "old.pt")
    rates = []
    for without in ((), ("lr",)):
        trainer = make(tmp_path / "runs", lr=0.5)
        trainer.import_run(tmp_path / "old.pt", epoch=1, without=without)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.5]


def test_a_schedule_that_is_shorter_than_its_place_is_refused_with_its_length(tmp_path: Path) -> None:
    run(make(tmp_path, scheduler_step_on_batch=True, schedule=lambda optimizer: OneCycleLR(optimizer, 0.01, total_steps=40)), 3)
    trainer = make(tmp_path, scheduler_step_on_batch=True, schedule=lambda optimizer: OneCycleLR(optimizer, 0.01, total_steps=10))
    with pytest.raises(ConfigError, match="OneCycleLR ends after 10 steps"):
        run(trainer, 4)
