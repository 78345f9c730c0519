"""When a run ends, when it validates, and what a validation on its own leaves behind."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_modules import Lit
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights

from nbtrain import AccumulationAddon, EarlyStoppingAddon, LimitsAddon, StateManagerAddon, Trainer
from nbtrain.best import known_mode
from nbtrain.errors import ConfigError
from nbtrain.events import Plan

Early = Regress.add_on(EarlyStoppingAddon)
Limited = Regress.add_on(LimitsAddon)


class Scripted(Regress):
    """Its validations give the values of a script, as the metric that is monitored."""

    script: Iterable[float] = ()

    def metric_on_epoch_end(self) -> dict[str, Any] | None:
        return {self.monitor.removeprefix("val_"): next(self.values)} if self.mode == "test" else None


def run_script(monitor: str, script: list[float], *, lightning: dict[str, Any] | None = None, **options: Any) -> Any:
    trainer = make_trainer(Scripted.add_on(EarlyStoppingAddon), monitor=monitor, lightning=lightning, **options)
    trainer.values = iter(script)
    trainer.run(len(script), make_loader(), make_valid())
    return trainer


@pytest.mark.parametrize(
    ("monitor", "script", "options", "n_epochs"),
    [
        ("val_r2", [0.1, 0.2, 0.15, 0.3, 0.3, 0.2, 0.1], {"patience": 2}, 6),  # up; a tie is no improvement
        ("val_perplexity", [9, 8, 8.5, 7, 7, 8, 6], {"patience": 2}, 6),  # down
        ("val_mine", [1, 2, 3, 2], {"patience": 1, "monitor_mode": "max"}, 4),
        ("val_f1", [0.5, 0.5999, 0.61, 0.7, 0.75], {"patience": 2, "delta": 0.1}, 5),  # each step is small, two of them are not
        ("val_mse", [1.0, 0.95, 0.92, 0.1], {"patience": 2, "delta": 0.1}, 3),
        ("val_mse", [float("nan"), float("nan"), 1.0], {"patience": 2}, 2),
        ("val_mse", [3.0, 2.0, 1.0], {"patience": 1}, 3),
    ],
)
def test_run_ends_when_the_metric_has_not_improved(monitor: str, script: list[float], options: dict[str, Any], n_epochs: int) -> None:
    trainer = run_script(monitor, script, **options)
    assert len(trainer.history) == n_epochs
    assert trainer.result.status == ("stopped" if n_epochs < len(script) else "completed")


def test_reason_is_told() -> None:
    result = run_script("val_r2", [0.2, 0.1, 0.1, 0.1], patience=2).result
    assert (result.status, result.reason) == ("stopped", "val_r2 has not improved 2 times in a row")


@pytest.mark.parametrize(
    ("name", "mode"),
    [("pearson", "max"), ("spearman", "max"), ("accuracy", "max"), ("brier", "min"), ("brier_score_loss", "min"), ("perplexity", "min")],
)
def test_direction_of_a_known_metric_is_known(name: str, mode: str) -> None:
    assert known_mode(f"val_{name}") == mode


def test_each_validation_within_an_epoch_counts() -> None:
    trainer = run_script("val_r2", [0.3, 0.2, 0.1, 0.1, 0.1], patience=2, lightning={"val_check_interval": 1})
    assert (trainer.counts.step, len(trainer.history)) == (3, 1)  # in the first epoch, of five batches


def test_training_metric_is_watched_where_there_is_no_validation() -> None:
    trainer = make_trainer(Early, patience=2, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    trainer.model.eval()
    batches = [next(iter(make_loader(shuffle=False)))]
    trainer.model[2].p = 0.0  # without dropout each epoch has the same loss
    assert trainer.run(9, batches).reason == "train_loss has not improved 2 times in a row" and len(trainer.history) == 3


def test_best_weights_are_restored_when_asked_for() -> None:
    trainer = run_script("val_r2", [0.1, 0.5, 0.2, 0.3], patience=2, restore_best=True)
    plain = make_trainer()
    plain.run(2, make_loader(), make_valid())
    assert same_weights(trainer.model, plain.model) and trainer.result.best["epoch"] == 2
    assert not same_weights(run_script("val_r2", [0.1, 0.5, 0.2, 0.3], patience=2).model, plain.model)


def test_later_run_waits_anew_for_something_better_than_all_before() -> None:
    trainer = run_script("val_r2", [0.5, 0.4, 0.3, 0.2], patience=2)
    trainer.values = iter([0.45, 0.4, 0.6])
    assert trainer.run(3, make_loader(), make_valid()).status == "stopped" and len(trainer.history) == 5


def test_resumed_run_goes_on_waiting(tmp_path: Path) -> None:
    kind = Scripted.add_on(EarlyStoppingAddon, StateManagerAddon)

    def go(script: list[float], n_epoch: int, **run: Any) -> Any:
        trainer = make_trainer(kind, monitor="val_r2", patience=3, save_path=tmp_path)
        trainer.values = iter(script)
        trainer.run(n_epoch, make_loader(), make_valid(), **run)
        return trainer

    go([0.5, 0.4, 0.3], 3)
    assert len(go([0.2, 0.9], 5, resume="auto").history) == 4


# -- limits
def test_limit_of_steps_counts_updates_over_all_runs() -> None:
    trainer = make_trainer(Limited, max_steps=12)
    trainer.run(1, make_loader())
    assert trainer.run(5, make_loader()).reason == "max_steps=12" and trainer.counts.step == 12
    assert trainer.run(1, make_loader()).status == "stopped" and trainer.counts.step == 12  # nothing is left to do


def test_limits_of_batches_bound_both_passes() -> None:
    trainer = make_trainer(Limited, steps_per_epoch=3, max_val_steps=1)
    trainer.run(2, make_loader(), make_valid())
    assert trainer.counts.step == 6 and len(trainer.history.steps["valid"]) == 2


def test_limit_of_time_stops_at_the_next_batch() -> None:
    trainer = make_trainer(Limited, max_time=timedelta(microseconds=1))
    result = trainer.run(5, make_loader())
    assert (result.status, result.reason, trainer.counts.step) == ("stopped", "max_time is over", 1)


Windowed = Limited.add_on(AccumulationAddon)


ALONE = [(2, 1), (3, 2), (5, 1), (7, 2), (20, 3), (1, 1), (4, 5)]  # by how many steps, and by how many epochs
IN_WINDOWS = [(2, None), (3, 2)]
INTERVALS = [(*interval, None) for interval in ALONE]
INTERVALS += [(*interval, accumulate) for interval in IN_WINDOWS for accumulate in (2, 3, {0: 1, 1: 4})]


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(("steps", "epochs", "accumulate"), INTERVALS)
def test_validations_by_steps_count_updates_and_go_with_those_by_epochs(
    steps: int, epochs: int | None, accumulate: Any, sized: bool, lean: bool
) -> None:
    seen = Validations()
    kind, options = (Limited, {}) if accumulate is None else (Windowed, {"accumulate": accumulate})
    trainer = make_trainer(kind, val_every_n_steps=steps, val_every_n_epochs=epochs, lightning={"callbacks": [seen]}, **options)
    trainer.short_way = lean
    trainer.run(4, make_loader() if sized else Unsized(), make_valid())  # five batches an epoch
    ends = [row["step"] for row in trainer.history.epochs]
    due = {*range(steps, ends[-1] + 1, steps)} | set(ends[epochs - 1 :: epochs] if epochs else [])
    assert seen.updates == sorted(due)
    validated = {next(row["epoch"] for row in trainer.history.epochs if row["step"] >= step) for step in due}
    assert [row["epoch"] for row in trainer.history.epochs if "val_loss" in row] == sorted(validated)


@pytest.mark.parametrize(
    ("options", "n_epochs", "due"),
    [
        ({"accumulate": 2, "val_every_n_steps": 2}, 3, [2, 4, 6, 8]),  # of nine: each epoch of five batches ends with a window of one
        ({"val_every_n_steps": 2, "val_every_n_epochs": 1}, 2, [2, 4, 5, 6, 8, 10]),
    ],
    ids=["windows", "both intervals"],
)
def test_under_your_own_lightning_trainer_validations_by_steps_count_updates_too(options: Any, n_epochs: int, due: list[int]) -> None:
    seen = Validations()
    trainer = make_trainer(Windowed, **options)
    own = L.Trainer(max_epochs=n_epochs, **trainer.lightning_args())
    own.callbacks.append(seen)
    own.fit(trainer.as_lightning_module(), make_loader(), make_valid())
    assert seen.updates == due


class Validates(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize(("steps", "epochs", "due"), [(2, None, [2, 4, 6, 8, 10, 12]), (4, 1, [3, 4, 6, 8, 9, 12]), (5, 2, [5, 6, 10, 12])])
def test_validations_of_a_lightning_module_by_steps_count_updates(steps: int, epochs: Any, due: list[int], sized: bool) -> None:
    seen = Validations()
    lightning, options = {"callbacks": [seen], "accumulate_grad_batches": 2}, {"val_every_n_steps": steps, "val_every_n_epochs": epochs}
    trainer: Any = Trainer.add_on(LimitsAddon).from_lightning(Validates(), device="cpu", log_bar=False, lightning=lightning, **options)
    trainer.run(4, make_loader() if sized else Unsized(), make_valid())  # three updates an epoch
    assert seen.updates == due


class Validations(L.Callback):
    """After which updates there was a validation."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def on_validation_end(self, pl_trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not pl_trainer.sanity_checking:
            self.updates.append(pl_trainer.global_step)


class Unsized:
    def __iter__(self) -> Any:
        return iter(list(make_loader()))


def test_validation_before_training_is_the_baseline_and_changes_nothing() -> None:
    trainer = make_trainer(Limited, val_first=True)
    trainer.run(2, make_loader(), make_valid())
    plain = make_trainer(model=make_model())
    assert trainer.history.tests[0]["val_loss"] == plain.validate(make_valid())["loss"] and trainer.history.tests[0]["step"] == 0
    plain.run(2, make_loader(), make_valid())
    assert same_weights(trainer.model, plain.model)
    trainer.run(1, make_loader(), make_valid())
    assert len(trainer.history.tests) == 1 and len(trainer.history) == 3  # a later run has its baseline already


def test_schedule_knows_the_limit_of_steps() -> None:
    plans: list[Plan] = []

    def factory(optimizer: Any, plan: Plan) -> Any:
        plans.append(plan)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    trainer = make_trainer(Limited, max_steps=12, scheduler=factory)
    trainer.run(1, make_loader())
    trainer.run(5, make_loader())
    assert [plan.total_steps for plan in plans] == [5, 7]
    assert Plan(3, None, max_steps=9).total_steps == 9


IMPOSSIBLE: list[dict[str, Any]] = [
    *({"patience": 0}, {"patience": 1.5}, {"delta": -1}, {"delta": float("nan")}),
    *({"max_steps": 0}, {"max_val_steps": 0.5}, {"val_every_n_steps": 0, "val_every_n_epochs": 1}),
]


@pytest.mark.parametrize("options", IMPOSSIBLE, ids=str)
def test_impossible_patience_and_limits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_trainer(Limited.add_on(EarlyStoppingAddon), **options)


# -- a validation on its own
def test_validation_on_its_own_counts_no_epoch() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader(), make_valid())
    assert trainer.validate(make_valid())["loss"] == trainer.history.last["val_loss"] == trainer.history.tests[-1]["val_loss"]
    assert (trainer.mode, trainer.model.training, len(trainer.history), trainer.counts.epoch) == ("train", True, 1, 1)
