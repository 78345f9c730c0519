"""Schedules against their closed forms, alone, in chains, in runs, and across a saved state."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from lightning import Callback
from samples import Regress, make_loader, make_trainer, make_valid
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from nbtrain import StateManagerAddon
from nbtrain.errors import ConfigError
from nbtrain.events import Plan
from nbtrain.optim.resolved_schedule import FunctionSchedule, Schedule
from nbtrain.optim.schedulers import check_stepping
from nbtrain.schedules import (
    CosineAnnealingScheduler,
    SchedulerBase,
    SchedulerChain,
    WarmUpScheduler,
    get_combined_lr_scheduler,
    get_lr_scheduler,
    get_multi_step_lr_scheduler,
    warmup_cosine,
)
from nbtrain.tools.schedule_plot import learning_rates, plot_schedule, plot_schedules


def make_optimizer(*rates: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates or (1.0,)])


def follow(optimizer: torch.optim.Optimizer, scheduler: SchedulerBase, n: int) -> list[float]:
    """The rates of the first group in `n` steps."""
    rates = []
    for _ in range(n):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("eta_min", [0.0, 0.03])
@pytest.mark.parametrize("base", [0.1, 3e-4 + 0.07])
@pytest.mark.parametrize("total", [1, 7, 10])
def test_warm_up_rises_between_its_exact_ends_and_holds(base: float, total: int, eta_min: float) -> None:
    optimizer = make_optimizer(base)
    rates = follow(optimizer, WarmUpScheduler(optimizer, total, eta_min), total + 5)
    assert rates[0] == eta_min and rates[total:] == [base] * 5
    assert all(a < b for a, b in itertools.pairwise(rates[: total + 1]))
    assert rates == pytest.approx([eta_min + (base - eta_min) * min(k / total, 1) for k in range(total + 5)], abs=1e-15)


@pytest.mark.parametrize("eta_min", [0.0, 0.03])
@pytest.mark.parametrize("total", [1, 7, 10])
def test_cosine_falls_between_its_exact_ends_and_holds(total: int, eta_min: float) -> None:
    optimizer = make_optimizer(0.1)
    rates = follow(optimizer, CosineAnnealingScheduler(optimizer, total, eta_min), total + 5)
    assert rates[0] == 0.1 and rates[total:] == [eta_min] * 5
    assert all(a > b for a, b in itertools.pairwise(rates[: total + 1]))
    theirs = make_optimizer(0.1)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, total, eta_min)
    assert rates[:total] == pytest.approx(follow(theirs, reference, total), abs=1e-15)  # type: ignore[arg-type]


def test_chain_hands_over_without_a_jump_and_each_step_of_a_part_comes_once() -> None:
    optimizer = make_optimizer()
    parts = WarmUpScheduler(optimizer, 4), CosineAnnealingScheduler(optimizer, 4, 0.5), CosineAnnealingScheduler(optimizer, 2)
    chain = SchedulerChain(*parts)
    assert (chain.total_iters, chain.next_iters) == (10, [4, 8])
    rates = follow(optimizer, chain, 12)
    cosine = [0.5 + 0.25 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, *cosine, 1.0, 0.5, 0, 0], abs=1e-15)


def test_chains_are_chained() -> None:
    one, other = make_optimizer(), make_optimizer()
    nested = SchedulerChain(SchedulerChain(WarmUpScheduler(one, 3), CosineAnnealingScheduler(one, 4)), WarmUpScheduler(one, 2))
    flat = SchedulerChain(WarmUpScheduler(other, 3), CosineAnnealingScheduler(other, 4), WarmUpScheduler(other, 2))
    assert follow(one, nested, 12) == follow(other, flat, 12)


def test_groups_keep_their_own_rates_and_a_rate_in_a_tensor_stays_one() -> None:
    optimizer = make_optimizer(1.0, torch.tensor(0.1))
    tensor = optimizer.param_groups[1]["lr"]
    follow(optimizer, WarmUpScheduler(optimizer, 4), 2)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[1]["lr"] is tensor
    assert float(tensor) == pytest.approx(0.05)


@pytest.mark.parametrize("n", [0, 3, 4, 6, 11])
def test_chain_goes_on_from_its_state(n: int) -> None:
    def make() -> tuple[torch.optim.Optimizer, SchedulerChain]:
        optimizer = make_optimizer(0.3)
        return optimizer, SchedulerChain(WarmUpScheduler(optimizer, 4), CosineAnnealingScheduler(optimizer, 5))

    optimizer, chain = make()
    follow(optimizer, chain, n)
    state, groups = chain.state_dict(), optimizer.state_dict()
    other, resumed = make()
    resumed.load_state_dict(state)
    other.load_state_dict(groups)
    assert follow(other, resumed, 12) == follow(optimizer, chain, 12)
    assert not [value for value in state.values() if isinstance(value, (torch.Tensor, SchedulerBase, tuple))]  # plain values: no pickle


def test_what_is_no_chain_is_refused() -> None:
    optimizer = make_optimizer()
    with pytest.raises(ConfigError, match="drive different optimizers"):
        SchedulerChain(WarmUpScheduler(optimizer, 2), WarmUpScheduler(make_optimizer(), 2))
    with pytest.raises(ConfigError, match=r"must be a SchedulerBase, got a LinearLR"):
        SchedulerChain(torch.optim.lr_scheduler.LinearLR(optimizer))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="given nothing"):
        SchedulerChain()
    with pytest.raises(ConfigError, match=r"^total_iters must be a positive integer, got 0\.\n  Give the number of steps\.$"):
        WarmUpScheduler(optimizer, 0)
    with pytest.raises(TypeError, match="abstract"):
        SchedulerBase(optimizer, 3)  # type: ignore[abstract]


def test_the_exponential_schedule_has_tlamas_values() -> None:
    """exp(-3 r) of the way, where the document's own has it; the last rate from `max_steps` on."""
    rate = get_lr_scheduler(1.0, 0.1, 2, 10, "exponential")
    exact = [0.5, 1.0, *(0.1 + 0.9 * math.exp(-3 * n / 8) for n in range(8)), 0.1, 0.1]
    assert [rate(step) for step in range(12)] == pytest.approx(exact, abs=1e-15)
    assert rate(9) == pytest.approx(0.165, abs=1e-3)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_function_is_continuous_at_its_seams_and_ends_at_its_last_rate(kind: Any) -> None:
    rate = get_lr_scheduler(0.5, 0.01, 10, 1000, kind)
    rates = [rate(step) for step in range(1100)]
    assert rates[:10] == [0.5 * (step + 1) / 10 for step in range(10)] and rates[10] == 0.5
    assert rates[1000:] == [0.01] * 100 and all(a > b for a, b in itertools.pairwise(rates[10:1001]))
    assert max(abs(a - b) for a, b in itertools.pairwise(rates[10:])) < 0.5 * 4 / 990  # no step is longer than the steepest slope


def test_functions_agree_with_their_formulas() -> None:
    r = 0.25
    cosine, linear, exponential = (get_lr_scheduler(1.0, 0.2, 0, 100, kind)(25) for kind in ("cosine", "linear", "exponential"))
    assert cosine == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * r)) / 2, abs=1e-15) and linear == pytest.approx(0.8, abs=1e-15)
    assert exponential == pytest.approx(0.2 + 0.8 * math.exp(-3 * r), abs=1e-15)
    assert get_lr_scheduler(1.0, None, 0, 10, final_div_factor=25)(10) == 0.04


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0.1, 10, 10), "warmup_steps=10 don't fit into max_steps=10.\n  Give 0 <= warmup_steps < max_steps."),
        ((1.0, None, 1, 10), "The last rate of the schedule is missing.\n  Give min_lr, or final_div_factor."),
        (
            (1.0, 0.1, 1, 10, "cosine", 25),
            "min_lr=0.1 and max_lr / final_div_factor = 0.04 are two last rates.\n"
            "  Give min_lr=None to use the second, as tlama-core does; or leave final_div_factor out.",
        ),
        ((1.0, None, 1, 10, "cosine", 0), "final_div_factor=0 must be a number of at least 1.\n  Give 25, for example."),
        ((1.0, 2.0, 1, 10), "The last rate 2.0 is not between 0 and max_lr=1.0.\n  Give 0 <= min_lr <= max_lr."),
        ((1.0, 0.1, 1, 10, "cosin"), "decay_type must be 'cosine', 'linear' or 'exponential', got 'cosin'.\n  Did you mean 'cosine'?"),
    ],
)
def test_function_that_contradicts_itself_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_lr_scheduler(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("low", [0.0, 1.0])
def test_last_rate_may_be_nothing_or_the_highest(low: float) -> None:
    assert get_lr_scheduler(1.0, low, 1, 10)(10) == low


def test_milestones_are_shares_of_the_run() -> None:
    rate = get_multi_step_lr_scheduler(1.0, 2, 10, {0.9: 0.1, 0.7: 0.316})
    assert [rate(step) for step in range(11)] == [0.5, 1, 1, 1, 1, 1, 1, 0.316, 0.316, 0.1, 0.1]
    assert get_multi_step_lr_scheduler(1.0, 0, 1000, {0.1234: 0.5})(123) == 1.0  # rounded up: the share is not reached before


@pytest.mark.parametrize("share", [0, 1, 1.5, 80])
def test_milestone_that_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError) as caught:
        get_multi_step_lr_scheduler(1.0, 2, 10, {share: 0.1})
    assert str(caught.value) == f"milestones must be shares of the run, got [{share}].\n  Give numbers between 0 and 1."


def test_ranges_count_their_own_steps_and_the_last_value_is_held() -> None:
    rate = get_combined_lr_scheduler({(3, 6): lambda step: 10.0 + step, (0, 3): lambda step: float(step)})
    assert [rate(step) for step in range(8)] == [0, 1, 2, 10, 11, 12, 12, 12]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 3), (4, 6)], "The range (4, 6) leaves a gap.\n  Let a range begin at 3, and end after it."),
        ([(0, 3), (2, 6)], "The range (2, 6) overlaps another.\n  Let a range begin at 3, and end after it."),
        ([(1, 3)], "The range (1, 3) leaves a gap.\n  Let a range begin at 0, and end after it."),
        ([(0, 3), (3, 3)], "The range (3, 3) is empty.\n  Let a range begin at 3, and end after it."),
        ([], "There must be at least one schedule to combine.\n  Give {(0, 100): schedule, (100, 500): other}."),
    ],
)
def test_gaps_and_overlaps_are_refused(ranges: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_combined_lr_scheduler({bounds: lambda step: 0.1 for bounds in ranges})
    assert str(caught.value) == message


def test_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=rate, foreach=False)
    FunctionSchedule(optimizer, lambda step: 0.25 / (step + 1)).step()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.125  # a captured graph reads it where it is


def test_function_that_returns_no_rate_is_told_what_it_should_be() -> None:
    with pytest.raises(TypeError, match="int is not an Optimizer") as raised:
        FunctionSchedule(make_optimizer(), lambda optimizer: StepLR(optimizer, 1))  # type: ignore[arg-type, return-value]
    assert "a factory takes two, (optimizer, plan)" in raised.value.__notes__[0]
    with pytest.raises(ConfigError) as caught:
        FunctionSchedule(make_optimizer(), lambda step: None)  # type: ignore[arg-type, return-value]
    assert str(caught.value) == (
        "scheduler(0) returned NoneType, not a number.\n  A function of one argument is step -> lr; a factory takes two, (optimizer, plan)."
    )


def test_instance_is_not_drawn() -> None:
    with pytest.raises(ConfigError) as caught:
        learning_rates(WarmUpScheduler(make_optimizer(), 3), 5)  # type: ignore[arg-type]
    assert str(caught.value) == "To draw this WarmUpScheduler would use it up.\n  Give a factory: lambda optimizer, plan: ..."


def test_factory_fits_the_run_it_is_asked_for() -> None:
    trainer = make_trainer(scheduler=partial(warmup_cosine, warmup=0.2, eta_min=1e-3), lightning={"accumulate_grad_batches": 2})
    trainer.run(10, make_loader())  # 5 batches: 3 updates an epoch, 6 of 30 rise
    rates = trainer.history.steps["train"]["train_loss"], trainer.optimizer.param_groups[0]["lr"]
    assert len(rates[0]) == 50 and rates[1] == 1e-3


def test_factory_says_what_it_misses() -> None:
    optimizer = make_optimizer()
    with pytest.raises(ConfigError) as caught:
        warmup_cosine(optimizer, Plan(3, None))
    assert str(caught.value) == (
        "warmup_cosine must know how long the run is, and the loader has no length.\n  Give a step -> lr function."
    )
    with pytest.raises(ConfigError) as caught:
        warmup_cosine(optimizer, Plan(3, 5), warmup=1.0)
    assert str(caught.value) == "warmup must be a share of the run, got 1.0.\n  Give a number from 0 to below 1."
    assert isinstance(warmup_cosine(optimizer, Plan(1, 1)), CosineAnnealingScheduler)  # no room for a warm-up


def test_warm_up_may_be_left_out_begins_at_the_lowest_rate_and_leaves_room_to_fall() -> None:
    assert learning_rates(partial(warmup_cosine, warmup=0), 3)[0] == 1.0
    rates = learning_rates(partial(warmup_cosine, warmup=0.99, eta_min=0.25), 5)
    assert rates == [0.25, 0.4375, 0.625, 0.8125, 1.0]


def test_schedule_goes_on_under_a_factor_as_it_would_without() -> None:
    plain, scaled = make_optimizer(), make_optimizer()
    one = Schedule(torch.optim.lr_scheduler.ExponentialLR(plain, 0.5), "epoch")
    other = Schedule(torch.optim.lr_scheduler.ExponentialLR(scaled, 0.5), "epoch", factor=4.0)
    scaled.param_groups[0]["lr"] *= 4.0
    for _ in range(3):
        for optimizer, schedule in ((plain, one), (scaled, other)):
            optimizer.step()
            schedule.step()
        assert scaled.param_groups[0]["lr"] == 4.0 * plain.param_groups[0]["lr"]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_plateau_is_asked_where_there_is_a_metric(factor: float) -> None:
    optimizer = make_optimizer()
    schedule = Schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5), "epoch", factor=factor)
    for metric in (1.0, None, None, 2.0):  # it would count a missing one as no better
        schedule.step(metric)
    assert optimizer.param_groups[0]["lr"] == 0.5 and schedule.scheduler.last_epoch == 2


def test_drawn_rates_are_those_that_a_run_would_have() -> None:
    assert learning_rates(lambda step: 1.0 / (step + 1), 3) == [1.0, 0.5, 1 / 3]
    assert learning_rates(partial(warmup_cosine, warmup=0.5), 4, lr=2.0) == pytest.approx([0, 1, 2, 1])
    figure = plot_schedules({"a": warmup_cosine, "b": lambda step: 0.1}, 20)
    assert [line.get_label() for line in figure.axes[0].lines] == ["a", "b"] and figure.axes[0].get_legend() is not None
    assert plot_schedule(warmup_cosine, 20).axes[0].get_legend() is None
    with pytest.raises(ConfigError, match="would use it up"):
        plot_schedule(WarmUpScheduler(make_optimizer(), 3), 4)


class EpochScheduler:
    """A scheduler that is told the epoch, as timm's are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + epoch)

    def state_dict(self) -> dict[str, Any]:
        return {}


class TorchEpochScheduler(torch.optim.lr_scheduler.LambdaLR):
    """A torch scheduler that is told the epoch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.is_made = False
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch: int) -> None:  # type: ignore[override]
        pass

    def _initial_step(self) -> None:
        pass


def _wrapping(kind: str) -> str:
    return (
        f"{kind}.step needs 'epoch', and a run calls step() alone. Give a function of the update, scheduler=lambda step: lr; or wrap it in "
        "a class whose step() counts and calls inner.step(count), and give scheduler=lambda optimizer, plan: Counted(inner)."
    )


def test_scheduler_whose_step_needs_the_epoch_is_refused_when_the_trainer_is_made() -> None:
    made: list[Any] = []

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(params, lr=0.1))
        return made[-1]

    model = torch.nn.Linear(8, 1)
    with pytest.raises(ConfigError) as error:
        make_trainer(model=model, optimizer=optimizer, scheduler=EpochScheduler(optimizer(model.parameters())))
    what = "scheduler must be an LRScheduler, a ReduceLROnPlateau, a function, a list, a dict or None, got an EpochScheduler."
    assert str(error.value) == f"{what}\n  {_wrapping('EpochScheduler')}"
    with pytest.raises(ConfigError) as error:
        make_trainer(model=model, optimizer=made[0], scheduler=TorchEpochScheduler(made[0]))
    assert str(error.value) == f"TorchEpochScheduler can't step in a run.\n  {_wrapping('TorchEpochScheduler')}"


def test_scheduler_of_a_factory_whose_step_needs_the_epoch_is_refused_before_the_first_batch() -> None:
    trainer = make_trainer(scheduler=lambda optimizer, plan: EpochScheduler(optimizer))
    with pytest.raises(ConfigError) as error:
        trainer.run(1, make_loader())
    assert str(error.value) == f"EpochScheduler can't step in a run.\n  {_wrapping('EpochScheduler')}"
    assert trainer.counts.processed == 0


def test_scheduler_wrapped_as_the_error_says_steps() -> None:
    class Counted:
        def __init__(self, inner: EpochScheduler) -> None:
            self.inner, self.n = inner, 0

        def step(self) -> None:
            self.n += 1
            self.inner.step(self.n)

    trainer = make_trainer(scheduler=lambda optimizer, plan: Counted(EpochScheduler(optimizer)))
    trainer.run(1, make_loader())
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1 / 6
    plateau = make_trainer()
    plateau = make_trainer(
        model=plateau.model,
        optimizer=plateau.optimizer,
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(plateau.optimizer),
    )
    assert plateau.run(1, make_loader()).status == "completed"


def test_pictures_of_schedules_show_themselves_in_a_notebook() -> None:
    for figure in (plot_schedule(warmup_cosine, 20), plot_schedules({"a": warmup_cosine, "b": lambda step: 0.1}, 20)):
        shown, _ = DisplayFormatter().format(figure)
        assert shown["image/png"].startswith(b"\x89PNG") and shown["text/plain"].startswith("<Figure size")


# -- schedulers that are given counts, as timm's are
class Counted:
    """The essential trait of timm's: `step(epoch, metric)` and `step_update(num_updates, metric)`, one of which changes the rate."""

    def __init__(self, optimizer: Any, lr: float, *, in_epochs: bool) -> None:
        self.optimizer, self.lr, self.in_epochs = optimizer, lr, in_epochs
        self.seen: list[Any] = []

    def _set(self, t: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr / (1 + t)

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.seen.append((epoch, metric))
        if self.in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.in_epochs:
            self._set(num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lr = state_dict["lr"]


@pytest.mark.parametrize("in_epochs", [True, False])
def test_a_scheduler_that_is_given_counts_steps_as_in_its_own_loop(in_epochs: bool) -> None:
    made: list[Counted] = []

    def factory(optimizer: Any, plan: Any) -> Counted:
        made.append(Counted(optimizer, 0.1, in_epochs=in_epochs))
        return made[-1]

    trainer = make_trainer(scheduler=factory)
    trainer.run(3, make_loader(), make_valid())
    rows = trainer.history.epochs
    used = [0, 1, 2] if in_epochs else [4, 9, 14]  # the count at the epoch's last update
    assert [row["lr"] for row in rows] == pytest.approx([0.1 / (1 + t) if t else 0.01 for t in used])
    assert made[0].seen == [(i + 1, row["val_loss"]) for i, row in enumerate(rows)]


def test_a_scheduler_that_is_given_counts_resumes_exactly(tmp_path: Any) -> None:
    def make() -> Any:
        schedule = lambda optimizer, plan: Counted(optimizer, 0.1, in_epochs=False)  # noqa: E731
        return make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path, seed=0, scheduler=schedule, every_n_steps=1)

    class Dies(Callback):
        def on_train_batch_end(self, pl_trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if pl_trainer.global_step == 8:
                raise SystemExit

    first = make()
    first.lightning["callbacks"] = [Dies()]
    with pytest.raises(SystemExit):
        first.run(2, make_loader(), resume="auto")
    again = make()
    again.run(2, make_loader(), resume="auto")
    assert again.history.epochs[-1]["lr"] == pytest.approx(0.1 / 10)


def test_an_instance_that_is_given_counts_is_refused_with_the_line_that_works() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ConfigError) as caught:
        check_stepping(Counted(optimizer, 0.1, in_epochs=True))
    assert str(caught.value) == (
        "Counted can't step in a run.\n"
        "  Give a factory: scheduler=lambda optimizer, plan: Counted(optimizer, ...), whose length is plan.n_epochs."
    )


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"max_steps": 7}, {"limit_train_batches": 3}])
def test_one_cycle_has_the_steps_of_the_plan(options: dict[str, Any]) -> None:
    trainer = make_trainer(lightning=options, scheduler=lambda o, plan: OneCycleLR(o, 3e-3, total_steps=plan.total_steps))
    trainer.run(3, make_loader())
    assert trainer.history.epochs[-1]["lr"] == pytest.approx(3e-3 / 25 / 1e4)  # the last update has the last rate
    trainer.run(2, make_loader())  # a new cycle, or with max_steps nothing more
