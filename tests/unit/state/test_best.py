"""The best is the best of all validations: in the history, in the weights that are kept, in the checkpoints and in the table."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid, same_weights, some, without_times

from nbtrain import EarlyStoppingAddon, EMAAddon, LimitsAddon, StateManagerAddon
from nbtrain.best import is_better
from nbtrain.checkpoint.atomic import point_to
from nbtrain.checkpoint.files import SaveFormat, read_checkpoint
from nbtrain.checkpoint.store import find_checkpoint
from nbtrain.events import Event
from nbtrain.history.run_folder import load_run, read_events
from nbtrain.views.text import Board, record_text, table_text


class Scripted(Regress):
    """Its validations give the values of a script as `val_score`."""

    values: Iterable[float] = ()

    def metric_on_epoch_end(self) -> dict[str, Any] | None:
        return {"score": next(iter(self.values))} if self.mode == "test" else None


class Watch(L.Callback):
    """Keeps the weights that each validation has seen."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Any]] = []

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        owner: Any = pl_module.owner
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.weights.append(lists(owner.model.state_dict()))

    def best(self, values: list[float], mode: Any) -> dict[str, Any]:
        """The weights of the best of the `values` that the validations gave."""
        found = -1
        for i, value in enumerate(values[: len(self.weights)]):
            if is_better(value, values[found] if found >= 0 else None, mode):
                found = i
        return self.weights[found]


def lists(weights: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in weights.items()}


WAYS: dict[str, dict[str, Any]] = {
    "each epoch": {},
    "every second batch": {"lightning": {"val_check_interval": 2}},
    "half an epoch": {"lightning": {"val_check_interval": 0.5}},
    "every three batches over the epochs": {"val_every_n_steps": 3},
    "every second epoch": {"val_every_n_epochs": 2},
    "before the training": {"val_first": True},
    "before the training and by batches": {"val_first": True, "lightning": {"val_check_interval": 2}},
    "before a save by steps": {"every_n_steps": 2, "validate_on_save": True},
    "in windows": {"lightning": {"val_check_interval": 2, "accumulate_grad_batches": 2}},
    "across windows": {"lightning": {"val_check_interval": 1, "accumulate_grad_batches": 2}},
    "across windows, with an average": {"ema": True, "lightning": {"val_check_interval": 1, "accumulate_grad_batches": 2}},
    "with an average": {"ema": True, "lightning": {"val_check_interval": 2}},
    "with a sanity check": {"lightning": {"val_check_interval": 2, "num_sanity_val_steps": 1}},
}


def script(seed: int | str, n: int = 60) -> list[float]:
    chance = random.Random(seed)
    return [chance.choice([0.1, 0.2, 0.3, 0.5, 0.8, 0.9, math.nan]) for _ in range(n)]


def build(folder: Path, way: dict[str, Any], values: Sequence[float], *, lean: bool = True, seed: int = 0, **more: Any) -> Any:
    options: dict[str, Any] = {"monitor_mode": "min"} | way | more
    lightning = dict(options.pop("lightning", {}))
    addons: list[Any] = [StateManagerAddon, EarlyStoppingAddon, LimitsAddon] + [EMAAddon] * options.pop("ema", False)
    options |= {"lightning": lightning | {"callbacks": [watch := Watch()]}, "save_path": folder, "monitor": "val_score", "patience": 99}
    torch.manual_seed(seed)
    trainer = make_trainer(Scripted.add_on(*addons), **options)
    trainer.values, trainer.script, trainer.watch, trainer.short_way = iter(values), list(values), watch, lean
    return trainer


def check_best(trainer: Any, mode: str) -> None:
    """Everything that keeps the best has that of the best validation."""
    history, expected = trainer.history, trainer.watch.best(trainer.script, mode)
    values = [row["val_score"] for row in history.validations if not math.isnan(row["val_score"])]
    assert history.best["val_score"] == (min if mode == "min" else max)(values) == trainer.result.best["val_score"]
    assert lists(trainer.best_weights) == expected
    folder = trainer.run_dir / "checkpoints"
    assert history.best.path == (folder / "best.ckpt").resolve()
    state = read_checkpoint(folder / "best.ckpt")["state_dict"]
    assert lists({name.removeprefix("model."): value for name, value in state.items()}) == expected
    starred = [line for line in repr(history).splitlines() if "★" in line]
    assert len(starred) == 1 and f"{history.best['val_score']:.4g}" in starred[0].split()
    assert noted_of_best(trainer) == []


def noted_of_best(trainer: Any) -> list[str]:
    """What is said of `best` where it is looked for."""
    notes: list[str] = []
    assert find_checkpoint(trainer.save_path, "best", notes.append) is not None
    return notes


@pytest.mark.parametrize("lean", some([True, False], 2))
@pytest.mark.parametrize("mode", some(["min", "max"], 2))
@pytest.mark.parametrize("way", some(WAYS, 2))
def test_best_is_that_of_all_validations(way: str, mode: str, lean: bool, tmp_path: Path) -> None:
    trainer = build(tmp_path, WAYS[way], script(way), lean=lean, monitor_mode=mode)
    trainer.run(4, make_loader(), make_valid())
    scores = [row["val_score"] for row in trainer.history.validations]
    assert str(scores) == str(trainer.script[: len(scores)]) and len(scores) == len(trainer.watch.weights) > 1
    check_best(trainer, mode)


@pytest.mark.parametrize("symlinks", some([True, False], 2))
@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_best_of_another_epoch_than_that_of_the_record_is_said(save_format: SaveFormat, symlinks: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_format": save_format, "symlink_best_and_last": symlinks}
    trainer = build(tmp_path, options, [0.5, 0.2, 0.9, 0.8])
    trainer.run(4, make_loader(), make_valid())
    folder, suffix = trainer.run_dir / "checkpoints", ".ckpt" if save_format == "ckpt" else ""
    assert noted_of_best(trainer) == []
    for epoch in (1, 3):
        point_to(folder / f"best{suffix}", folder / f"epoch={epoch}-step={5 * epoch}{suffix}", copy=not symlinks)
        said = f"best{suffix} holds the state after {epoch} epochs; the record says that epoch 2 is the best."
        assert noted_of_best(trainer) == [said]
    other = build(tmp_path, options, [0.9])
    other.run(4, make_loader(), make_valid(), resume="best")
    assert said in (other.run_dir / "events.jsonl").read_text()


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_a_file_of_another_epoch_in_place_of_the_best_one_is_not_taken_for_it(save_format: SaveFormat, tmp_path: Path) -> None:
    trainer = build(tmp_path, {"save_format": save_format}, [0.5, 0.2, 0.9])
    trainer.run(3, make_loader(), make_valid())
    folder, suffix = trainer.run_dir / "checkpoints", ".ckpt" if save_format == "ckpt" else ""
    point_to(folder / f"epoch=2-step=10{suffix}", folder / f"epoch=1-step=5{suffix}", copy=True)
    other = build(tmp_path, {"save_format": save_format}, [0.9])
    other.run(4, make_loader(), make_valid(), resume="auto")
    said = f"the best weights are lost: epoch=2-step=10{suffix} holds the state after 1 epochs and 5 updates."
    assert said in (other.run_dir / "events.jsonl").read_text()


@pytest.mark.parametrize(("values", "step"), [([0.5, 0.2, 0.9, 0.8], 4), ([0.2, 0.5, 0.9, 0.8], 2)])
def test_losses_of_one_epoch_give_the_least_of_them(values: list[float], step: int, tmp_path: Path) -> None:
    trainer = build(tmp_path, {"lightning": {"val_check_interval": 2}}, values, restore_best=True)
    trainer.run(2, make_loader(64), make_valid())  # an epoch has two and two updates
    best = trainer.history.best
    assert (best["val_score"], best["epoch"], best["step"], "train_loss" in best) == (0.2, 1, step, step == 4)
    assert [row["val_score"] for row in trainer.history.epochs] == [values[1], 0.8]  # after the last batch of each epoch
    assert lists(trainer.model.state_dict()) == trainer.watch.weights[step // 2 - 1] == lists(trainer.best_weights)


@pytest.mark.parametrize("way", some(["every second batch", "before the training", "across windows", "across windows, with an average"], 2))
@pytest.mark.parametrize("seed", some(range(3), 3))
def test_resumed_run_has_the_best_of_the_uninterrupted_one(way: str, seed: int, tmp_path: Path) -> None:
    values = script(f"{way} {seed}")
    whole = build(tmp_path / "whole", WAYS[way], values)
    whole.run(3, make_loader(), make_valid())
    saves = [path for path in sorted((whole.run_dir / "checkpoints").glob("epoch=*-step=*")) if not path.is_symlink()]
    for path in saves[:-1]:
        again = build(tmp_path / "again", WAYS[way], (), seed=5)
        n_seen = read_checkpoint(path)["nbtrain"]["history"]["journal"]["rows"]["validations"]
        again.values = iter(values[n_seen:])
        again.run(3, make_loader(), make_valid(), resume=path)
        assert str(without_times(again.history.validations)) == str(without_times(whole.history.validations)), path.name
        assert str(without_times([again.history.best])) == str(without_times([whole.history.best])), path.name
        assert lists(again.model.state_dict()) == lists(whole.model.state_dict()), path.name
        assert lists(again.best_weights) == lists(whole.best_weights), path.name


@pytest.mark.parametrize("way", some(WAYS, 3))
def test_views_and_the_read_run_have_the_same_best(way: str, tmp_path: Path) -> None:
    trainer = build(tmp_path, WAYS[way], script(way, 99))
    trainer.run(2, make_loader(), make_valid())
    trainer.run(2, make_loader(), make_valid())
    read, board = load_run(trainer.run_dir), Board()
    for event in read_events(trainer.run_dir):
        board.update(event)
    best = trainer.history.best
    assert str(dict(read.best or {})) == str(dict(best)) == str(dict(board.best or {}))
    assert str(read.epochs) == str(trainer.history.epochs) and str(read.validations) == str(trainer.history.validations)
    starred = [line for line in record_text(board).splitlines() if line.endswith("★")]
    assert len(starred) == 1 and f"{best['val_score']:.4g}" in starred[0]


def test_validate_now_can_be_the_best(tmp_path: Path) -> None:
    class Now(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                pl_module.owner.validate_now()

    trainer = build(tmp_path, {}, [0.3, 0.5, 0.4, 0.2, 0.6, 0.7][1:])
    trainer.lightning["callbacks"].append(Now())
    trainer.run(2, make_loader(), make_valid())
    assert [row["val_score"] for row in trainer.history.validations] == [0.5, 0.4, 0.2, 0.6]
    assert (trainer.history.best["val_score"], trainer.history.best["epoch"]) == (0.2, 2)
    check_best(trainer, "min")


def test_evaluations_beside_a_run_are_never_the_best(tmp_path: Path) -> None:
    trainer = build(tmp_path, {}, [0.5, 0.4, 0.1, 0.1, 0.3])
    trainer.run(2, make_loader(), make_valid())
    trainer.validate(make_valid())
    trainer.evaluate(make_valid())
    assert trainer.history.best["val_score"] == 0.4 and len(trainer.history.validations) == 2
    trainer.run(1, make_loader(), make_valid())
    board = Board()
    for event in read_events(trainer.run_dir):
        board.update(event)
    assert trainer.history.best["val_score"] == 0.3 == (board.best or {})["val_score"]


def test_training_metric_is_that_of_an_epoch(tmp_path: Path) -> None:
    trainer = make_trainer(monitor="train_loss", lightning={"val_check_interval": 2})
    trainer.run(3, make_loader(), make_valid())
    assert trainer.history.best is min(trainer.history.epochs, key=lambda row: row["train_loss"])


def test_metric_that_a_callback_logs_counts_in_each_validation(tmp_path: Path) -> None:
    class Logs(L.Callback):
        values = iter([0.5, 0.2, 0.9, 0.8])

        def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pl_module.log("val_mine", next(self.values))

    options = {
        "monitor": "val_mine",
        "monitor_mode": "min",
        "lightning": {"val_check_interval": 2, "callbacks": [Logs()], "num_sanity_val_steps": 0},
    }
    trainer = make_trainer(**options)
    trainer.run(2, make_loader(), make_valid())
    assert [row["val_mine"] for row in trainer.history.validations] == pytest.approx([0.5, 0.2, 0.9, 0.8])
    assert trainer.history.best["val_mine"] == pytest.approx(0.2)


def test_run_of_an_earlier_version_is_read_with_the_rows_of_its_epochs(tmp_path: Path) -> None:
    trainer = build(tmp_path, {}, [0.5, 0.2, 0.9])
    trainer.run(3, make_loader(), make_valid())
    file = trainer.run_dir / "events.jsonl"
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines() if Event.from_json(line).kind != "valid"))
    read = load_run(trainer.run_dir)
    assert [row["val_score"] for row in read.validations] == [0.5, 0.2, 0.9] and (read.best or {})["epoch"] == 2
    state = trainer.history.state_dict()
    del state["validations"]
    read.load_state_dict(state)
    assert len(read.validations) == 3 and (read.best or {})["epoch"] == 2
    assert "★" in table_text(read.epochs, read.best)


def test_plateau_waits_for_a_validation_and_never_takes_the_training_loss() -> None:
    taken: list[float] = []

    class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            taken.append(float(metrics))
            super().step(metrics)

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = make_trainer(
        Regress.add_on(LimitsAddon), model=model, optimizer=optimizer, scheduler=Plateau(optimizer), val_every_n_epochs=2
    )
    trainer.run(4, make_loader(), make_valid())
    assert taken == [row["val_loss"] for row in trainer.history.validations]


@pytest.mark.parametrize("monitor", ["train_loss", "train_mae", "val_loss"])
def test_best_weights_of_a_training_metric_are_copied_where_each_epoch_is_validated_too(monitor: str) -> None:
    trainer = make_trainer(monitor=monitor, monitor_mode="min")
    trainer.run(1, make_loader(), make_valid())
    assert trainer.best_weights is not None and same_weights(trainer.model, trainer.best_weights)
