"""A step is an optimizer update: one number for one moment, in the history, views, files and trackers, and for time travel."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import DEVICE, Regress, make_data, make_loader, make_trainer, same_weights
from torch import nn
from torch.utils.data import DataLoader
from tracker_files import tensorboard_log, wandb_series

from nbtrain import AccumulationAddon, LoggersAddon, MultiOptimizerTrainer, StateManagerAddon, WandBLoggerAddon, load_run
from nbtrain.views.curve import step_axis


def long_validation() -> DataLoader[Any]:
    """Ten times the batches of an epoch of training."""
    return DataLoader(make_data(50, seed=3), 1)


def run(kind: Any = Regress, n_epochs: int = 2, valid: Any = None, **options: Any) -> Any:
    trainer = make_trainer(kind, log_bar=True, **options)
    trainer.run(n_epochs, make_loader(), valid)
    return trainer


def of_rows(trainer: Any) -> list[tuple[int, int]]:
    return [(row["epoch"], row["step"]) for row in trainer.history.epochs]


# -- the axis
def test_all_of_the_axis_is_training_and_a_validation_stands_at_the_step_before_it() -> None:
    trainer = run(valid=long_validation())
    curve = trainer.view.board.curve
    assert [point.step for point in curve.points] == list(range(1, 11)) and [step for step, _ in curve.validations] == [5, 10]
    axis = step_axis(curve, trainer.view.board.end_step, 2, ())
    assert (axis.start, axis.end, axis.epochs) == (0, 10, ((0, 0.0), (5, 1), (10, 2)))
    assert of_rows(trainer) == [(1, 5), (2, 10)] and set(trainer.history.steps["valid"].steps) == {5, 10}
    assert [row["step"] for row in trainer.history.validations] == [5, 10]


@pytest.mark.parametrize("every_s", [0.2, 0.0], ids=["events of several batches", "an event for each batch"])
def test_batches_of_a_window_share_its_step_and_are_one_point(every_s: float) -> None:
    trainer = make_trainer(Regress.add_on(AccumulationAddon), accumulate=3, log_bar=True)
    trainer.recorder.every_s = every_s
    trainer.run(2, make_loader(), long_validation())
    table, curve = trainer.history.steps["train"], trainer.view.board.curve
    assert list(table.steps) == [1, 1, 1, 2, 2, 3, 3, 3, 4, 4] and of_rows(trainer) == [(1, 2), (2, 4)]
    losses = table["train_loss"]
    means = [sum(part) / len(part) for part in (losses[:3], losses[3:5], losses[5:8], losses[8:])]
    assert [point.step for point in curve.points] == [1, 2, 3, 4] and [p.mean for p in curve.points] == pytest.approx(means)
    assert [step for step, _ in curve.validations] == [2, 4] and trainer.current_step == 4


def test_validations_within_a_window_stand_at_the_newest_update() -> None:
    every_batch = {"val_check_interval": 1, "check_val_every_n_epoch": None}
    kind, valid = Regress.add_on(AccumulationAddon), DataLoader(make_data(4, seed=3), 4)
    trainer = run(kind, accumulate=2, lightning=every_batch, n_epochs=1, valid=valid)
    assert [row["step"] for row in trainer.history.validations] == [0, 1, 1, 2, 3]
    assert list(trainer.history.steps["train"].steps) == [1, 1, 2, 2, 3]


def test_a_turn_of_several_optimizers_is_one_step() -> None:
    class Two(MultiOptimizerTrainer):
        def train_step_first(self, batch: Any) -> dict[str, Any]:
            return {"loss": (self.model["first"](batch[0]) - batch[1]).square().mean()}

        def train_step_second(self, batch: Any) -> dict[str, Any]:
            return {"loss": (self.model["second"](batch[0]) - batch[1]).square().mean()}

        def test_step(self, batch: Any) -> dict[str, Any]:
            return self.train_step_first(batch)

    parts = nn.ModuleDict({name: nn.Linear(8, 1) for name in ("first", "second")})
    optimizers = {name: lambda params: torch.optim.SGD(params, lr=0.01) for name in parts}
    trainer = Two(parts, DEVICE, optimizers=optimizers, log_bar=False)
    trainer.run(2, make_loader(), long_validation())
    assert of_rows(trainer) == [(1, 5), (2, 10)] and list(trainer.history.steps["train"].steps) == list(range(1, 11))
    assert trainer.current_step == 10


# -- files and trackers
@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(("accumulate", "ends"), [(1, [5, 10]), (3, [2, 4])])
def test_files_trackers_and_checkpoints_have_the_numbers_of_the_history(accumulate: int, ends: list[int], tmp_path: Path) -> None:
    kind = Regress.add_on(LoggersAddon, WandBLoggerAddon, StateManagerAddon, AccumulationAddon)
    trackers = {"loggers": ["csv", "tensorboard"], "web_logger": {"wandb": {"mode": "offline", "project": "one-clock"}}}
    lightning = {"log_every_n_steps": 1}
    trainer = run(kind, valid=long_validation(), save_path=tmp_path, accumulate=accumulate, lightning=lightning, **trackers)
    steps = list(range(1, ends[-1] + 1))
    log, series, folder = tensorboard_log(trainer.run_dir), wandb_series(trainer.run_dir), trainer.run_dir
    for name, expected in (("train_loss_step", steps), ("val_loss", ends), ("train_loss", ends)):
        assert [event.step for event in log.Scalars(name)] == expected
        assert [step for step, _ in series[name.replace("_", "/", 1)]] == expected
    with open(folder / "training_log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == steps and [int(row["step"]) for row in rows if row["val_loss"]] == ends
    with open(folder / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == ends and "processed" not in rows[0]
    saved = {path.name for path in (folder / "checkpoints").glob("epoch=*")}
    assert saved == {f"epoch={epoch}-step={step}.ckpt" for epoch, step in enumerate(ends, start=1)}
    read = load_run(folder)
    assert read.epochs == trainer.history.epochs
    assert all(list(read.steps[phase].steps) == list(trainer.history.steps[phase].steps) for phase in ("train", "valid"))


def test_an_event_of_an_older_run_is_read_in_updates(tmp_path: Path) -> None:
    trainer = run(valid=long_validation(), save_path=tmp_path)
    events = [json.loads(line) for line in (trainer.run_dir / "events.jsonl").read_text().splitlines()]
    for event in events:  # as they were written: `step` counted batches, `update` the updates
        progress, row = event["progress"], event["data"].get("row")
        progress["update"], progress["step"] = progress["step"], progress.pop("processed")
        if row is not None:
            row["step"] = row.pop("processed")
        event["data"].pop("steps", None)
    older = tmp_path / "older"
    older.mkdir()
    (older / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    read = load_run(older)
    assert read.epochs == trainer.history.epochs and read.validations == trainer.history.validations
    assert all(list(read.steps[phase].steps) == list(trainer.history.steps[phase].steps) for phase in ("train", "valid"))


# -- resume, and back in time
def saving(folder: Path, **options: Any) -> Any:
    kind = Regress.add_on(StateManagerAddon, AccumulationAddon)
    return make_trainer(kind, save_path=folder, accumulate=2, every_n_steps=2, **options)


def test_a_resumed_run_has_the_steps_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole = saving(tmp_path / "whole")
    whole.run(3, make_loader(own_generator=True), long_validation())
    again = saving(tmp_path / "again")
    again.run(3, make_loader(own_generator=True), long_validation(), resume=whole.run_dir / "checkpoints" / "epoch=1-step=4.ckpt")
    assert same_weights(whole.model, again.model)
    for phase in ("train", "valid"):
        assert list(again.history.steps[phase].steps) == list(whole.history.steps[phase].steps)
    assert of_rows(again) == of_rows(whole) == [(1, 3), (2, 6), (3, 9)]
    assert list(load_run(again.run_dir).steps["train"].steps) == list(whole.history.steps["train"].steps)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_rewind_to_a_step_is_the_state_right_after_that_update(step: int) -> None:
    after: dict[int, dict[str, torch.Tensor]] = {}

    class Kept(Regress.add_on(AccumulationAddon)):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, Any]:
            after.setdefault(self.counts.step, {name: value.clone() for name, value in self.model.state_dict().items()})
            return super().train_step(batch)

    trainer = make_trainer(Kept, accumulate=2, keep_states=True)
    trainer.run(2, make_loader(), long_validation())
    expected = dict(after[step])
    found = trainer.rewind(step=step)
    assert (found.step, trainer.counts.step, trainer.current_step) == (step, step, step)
    assert all(torch.equal(value, expected[name]) for name, value in trainer.model.state_dict().items() if "num_batches" not in name)


def test_replay_and_blame_take_all_batches_of_a_window() -> None:
    trainer = make_trainer(Regress.add_on(AccumulationAddon), accumulate=3, keep_states=True)
    trainer.run(2, make_loader(), long_validation())
    replay, losses = trainer.replay(step=3), trainer.history.steps["train"]["train_loss"]
    assert replay.place == "epoch 2, batch 3" and replay.loss == losses[7]
    n_samples = sum(len(batch[0]) for batch in list(make_loader())[:3])
    assert f"of {n_samples} samples of step 3" in repr(trainer.blame(step=3, n=2)) + trainer.blame(step=3, n=2).title


def test_the_batch_of_a_window_whose_loss_is_not_finite_is_the_one_that_is_shown() -> None:
    class Bad(Regress.add_on(AccumulationAddon)):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, Any]:
            found = super().train_step(batch)
            return found | {"loss": found["loss"] * (float("nan") if self.progress_checker.get_step() == 2 else 1.0)}

    trainer = make_trainer(Bad, accumulate=3, keep_states=True, nonfinite="ignore", log_bar=True)
    trainer.run(1, make_loader())
    assert trainer.replay(step=1).place == "epoch 1, batch 2"
    assert "the loss is nan at step 1" in trainer.view.board.advice.lines[0]
