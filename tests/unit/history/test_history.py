"""History, run folder, result, and what a step leaves in a meter."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights, without_times

from nbtrain import ConfigError, History, StateManagerAddon, Trainer, load_run
from nbtrain.best import best_row
from nbtrain.engine.meter import Meter
from nbtrain.events import Event, MonitorMode, Progress
from nbtrain.history.history import StepTable
from nbtrain.history.run_folder import open_run_folder
from nbtrain.library.drawn_history import past_of
from nbtrain.library.recorded_run import show
from nbtrain.views import text
from nbtrain.views.svg import COLOURS


def test_history_lives_across_runs(tmp_path: Path) -> None:
    trainer = make_trainer()
    history = trainer.history
    trainer.run(2, make_loader(), make_valid())
    trainer.run(1, make_loader(), make_valid())
    assert trainer.history is history and [row["epoch"] for row in history.epochs] == [1, 2, 3]
    assert [(row["step"], row["processed"]) for row in history.epochs] == [(5, 8), (10, 16), (15, 24)]
    assert list(history.steps["train"].steps) == list(range(1, 16))
    assert list(history.steps["valid"].steps) == [5, 5, 5, 10, 10, 10, 15, 15, 15]
    assert list(history.steps["train"].processed) == [1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 17, 18, 19, 20, 21]


def test_csv_has_the_rows(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.run(2, make_loader(), make_valid())
    with open(trainer.history.to_csv(tmp_path / "history.csv"), newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "step", "train_loss", "train_mae", "val_loss", "val_mae", "lr", "time_s"]
    assert [float(row["val_loss"]) for row in rows] == [row["val_loss"] for row in trainer.history.epochs]


def test_data_frame_has_the_rows_with_their_steps_and_no_count_of_batches() -> None:
    trainer = make_trainer()
    trainer.run(2, make_loader(), make_valid())
    frame = trainer.history.df
    assert frame["train_loss"].tolist() == [row["train_loss"] for row in trainer.history.epochs]
    assert list(frame["step"]) == [5, 10] and "processed" not in frame


def test_data_frame_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install pandas"):
        History().df


def test_reprs_say_something() -> None:
    trainer = make_trainer()
    assert repr(trainer) == f"Regress(Sequential with 161 params on {trainer.device} · mode train)"
    assert repr(trainer.history) == "History(empty)" and "nothing was run" in trainer.history._repr_html_()
    result = trainer.run(2, make_loader(), make_valid())
    assert re.fullmatch(
        rf"Regress\(Sequential with 161 params on {trainer.device} · mode train · 2 epochs done · best val_loss \S+ at epoch 2\)",
        repr(trainer),
    )
    assert re.fullmatch(r"RunResult\(completed · 2 epochs · 00:0\d · best val_loss \S+ at epoch 2\)", repr(result))
    assert repr(trainer.run(1, make_loader(), make_valid())).startswith("RunResult(completed · 1 epoch, 3 in all · 00:0")
    assert "<table" in trainer._repr_html_() and "<table" in trainer.history._repr_html_() and "★" in repr(trainer.history)


# -- the best
def test_history_shows_the_epoch_that_is_under_way_with_what_is_there() -> None:
    history = History()

    def steps(last: int, epoch: int, *losses: float) -> None:
        values = {"n": len(losses), "values": {"train_loss": list(losses)}}
        history.update(Event("steps", Progress(1, "train", epoch, 3, step=last, processed=last), 0.0, values))

    steps(2, 0, 3.0, 1.0)
    assert repr(history) == "   epoch  train_loss\n1 so far           2"
    assert "1 so far" in history._repr_html_() and history.epochs == [] and history.best is None
    history.update(Event("valid", Progress(1, "train", 0, 3), 0.0, {"row": {"epoch": 1, "step": 2, "processed": 2, "val_loss": 1.5}}))
    assert history._under_way == {"epoch": "1 so far", "step": 2, "train_loss": 2.0, "val_loss": 1.5}
    steps(3, 0, 2.0)
    row = {"epoch": 1, "step": 3, "processed": 3, "train_loss": 2.0, "val_loss": 1.5}
    history.update(Event("epoch", Progress(1, "idle", 1, 3), 0.0, {"row": row}))
    assert history._under_way is None and "so far" not in repr(history)
    steps(5, 1, 1.0, 0.5)
    assert history._under_way == {"epoch": "2 so far", "step": 5, "train_loss": 0.75}
    assert repr(history).splitlines()[-1].split()[:3] == ["2", "so", "far"]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("validates_from", [0, 5])
def test_the_best_that_is_kept_is_the_best_of_all_rows(mode: MonitorMode, validates_from: int) -> None:
    chance, history = random.Random(0), History("val_loss", mode)
    for epoch in range(1, 41):
        row = {"epoch": epoch, "step": epoch, "processed": epoch, "train_loss": chance.choice([1.0, 2.0, 3.0, math.nan])}
        if epoch > validates_from and epoch % 3:
            row["val_loss"] = math.nan if epoch < 9 else chance.choice([1.0, 2.0, 3.0, math.nan])
        history.update(Event("epoch", Progress(), data={"row": row}))
        if epoch == 20:
            resumed = {"monitor": "val_loss", "monitor_mode": mode, "resumed": True}
            history.update(Event("start", Progress(step=14, processed=14, epoch=14), data=resumed))
        best = best_row(history.epochs, "val_loss", mode)
        assert history.best is best and history._last_is_best is (best is history.epochs[-1])
    history.monitor = "train_loss"
    assert history.best is best_row(history.epochs, "train_loss", mode)


def _measured() -> History:
    """Steps 1 to 6 of two epochs, with a test and a mark after each epoch."""
    history = History()
    for epoch in (1, 2):
        at, now = Progress(phase="train", epoch=epoch, step=3 * epoch, processed=3 * epoch), {"step": 3 * epoch, "processed": 3 * epoch}
        history.update(Event("steps", at, data={"n": 3, "values": {"train_loss": [epoch + i / 4 for i in range(3)]}}))
        history.update(Event("epoch", at, data={"row": {"epoch": epoch, **now, "train_loss": float(-epoch)}}))
        history.update(Event("test", at, data={"row": {**now, "test_loss": float(epoch)}}))
        history.marks.append((at, f"mark {epoch}"))
    return history


def test_what_was_measured_past_a_step_is_forgotten_and_the_step_itself_is_kept() -> None:
    history = _measured()
    assert history.best is history.epochs[1]
    history.drop_after(3, 1)
    assert ([row["step"] for row in history.epochs], [row["test_loss"] for row in history.tests]) == ([3], [1.0])
    assert [text for _, text in history.marks] == ["mark 1"] and history.best is history.epochs[0]
    assert (list(history.steps["train"].steps), history.steps["train"]["train_loss"]) == ([1, 2, 3], [1.0, 1.25, 1.5])


def test_tests_and_marks_are_in_the_state() -> None:
    one, two = _measured(), History()
    two.load_state_dict(one.state_dict())
    assert two.tests == one.tests and two.marks == one.marks and two.state_dict() == one.state_dict()


def test_history_becomes_what_its_state_was_made_of() -> None:
    one, two = History(), History()
    one.update(Event("steps", Progress(phase="train", step=3, processed=3), data={"n": 3, "values": {"loss": [0.1, math.nan, 5e-324]}}))
    one.update(Event("epoch", Progress(), data={"row": {"epoch": 1, "step": 3, "processed": 3, "train_loss": 0.1}}))
    two.update(Event("epoch", Progress(), data={"row": {"epoch": 1, "step": 3, "processed": 3, "train_loss": 0.05}}))
    assert two._last_is_best
    two.load_state_dict(one.state_dict())
    assert two.state_dict() == one.state_dict() and two.best is two.epochs[0]
    assert two.steps["train"]["loss"][::2] == [0.1, 5e-324] and list(two.steps["train"].steps) == [1, 2, 3]


# -- rows by step
def test_step_table_is_thinned_evenly() -> None:
    table = StepTable(max_rows=100)
    for start in range(1, 10_000, 7):
        table.add(start, range(start, start + 7), {"loss": [float(start + i) for i in range(7)]})
    steps = list(table.steps)
    assert 50 <= len(steps) <= 100 and len({b - a for a, b in zip(steps, steps[1:])}) == 1
    assert table["loss"] == [float(step) for step in steps]


def test_metric_that_comes_later_is_nan_before() -> None:
    table = StepTable()
    table.add(1, [1, 2], {"a": [1.0, 2.0]})
    table.add(3, [3], {"b": [3.0]})
    assert table["a"][:2] == [1.0, 2.0] and math.isnan(table["a"][2])
    assert [math.isnan(v) for v in table["b"]] == [True, True, False]


# -- meters
def test_meter_counts_only_batches_that_have_a_metric() -> None:
    meter = Meter()
    for i in range(4):
        meter.add({"loss": torch.tensor(float(i))}, 1)
        if i % 2:
            meter.amend("norm", torch.tensor(10.0))
    assert meter.means() == {"loss": 1.5, "norm": 10.0}
    block, samples = meter.take()
    assert samples == [1, 1, 1, 1] and [math.isnan(v) for v in block["norm"]] == [True, False, True, False]


def test_meter_amends_a_batch_that_a_reader_has_flushed() -> None:
    meter = Meter()
    meter.add({"loss": 1.0}, 1)
    assert meter.log == {"loss": [1.0]}
    meter.amend("norm", 2.0)
    assert meter.means() == {"loss": 1.0, "norm": 2.0} and meter.take() == ({"loss": [1.0], "norm": [2.0]}, [1])


def test_blocks_that_were_flushed_by_a_look_at_the_log_are_taken_as_one() -> None:
    """Else each would be counted from the newest step."""
    meter = Meter()
    for loss in (1.0, 2.0):
        meter.add({"loss": loss}, 4)
        assert meter.log["loss"][-1] == loss
    meter.amend("norm", 3.0)
    values, samples = meter.take()
    assert (str(values), samples) == ("{'loss': [1.0, 2.0], 'norm': [nan, 3.0]}", [4, 4])


def test_meter_mixes_dtypes_and_keeps_float64() -> None:
    meter = Meter()
    value = 1.0 + 1e-12
    meter.add(
        {"a": torch.tensor(value, dtype=torch.float64), "b": torch.tensor(3), "c": torch.tensor(0.5, dtype=torch.bfloat16), "d": True}, 2
    )
    assert meter.means() == {"a": value, "b": 3.0, "c": 0.5, "d": 1.0}


# -- the run folder
def test_run_folder_holds_the_run(tmp_path: Path) -> None:
    model = make_model()
    trainer = make_trainer(model=model, save_path=tmp_path)
    result = trainer.run(3, make_loader(), make_valid())
    folder = tmp_path / "run-001"
    assert result.run_dir == folder
    names = {p.name for p in folder.iterdir()} - {"git.diff"}  # there is one where the working folder is a changed repository
    kept = {"best.safetensors", "curves.svg", "events.jsonl", "history.csv", "last.safetensors"}
    assert names == kept | {".lock", ".writer", "checkpoints", "provenance.json", "source"}
    assert same_weights(model, load_file(folder / "last.safetensors"))
    assert result.best.path == folder / "best.safetensors" and same_weights(trainer.best_weights, load_file(result.best.path))


def test_every_trainer_opens_a_folder_of_its_own_and_keeps_to_it(tmp_path: Path) -> None:
    one, two = make_trainer(save_path=tmp_path), make_trainer(save_path=tmp_path)
    for trainer in (one, two, one):
        trainer.run(1, make_loader())
    assert (one.run_dir.name, two.run_dir.name) == ("run-001", "run-002")
    assert len(load_run(one.run_dir).epochs) == 2 and len(load_run(two.run_dir).epochs) == 1


def test_without_save_path_nothing_touches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_trainer().run(1, make_loader(), make_valid())
    assert list(tmp_path.iterdir()) == []


def test_newest_run_is_found_by_number(tmp_path: Path) -> None:
    for number in (2, 999, 1000):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        (folder / "events.jsonl").write_text(Event("epoch", Progress(), data={"row": {"epoch": number}}).to_json() + "\n")
    assert load_run(tmp_path).epochs == [{"epoch": 1000}]
    assert open_run_folder(tmp_path).name == "run-1001"


def test_events_of_a_killed_run_are_read_up_to_the_last_whole_line(tmp_path: Path) -> None:
    trainer = make_trainer(save_path=tmp_path)
    trainer.run(2, make_loader())
    file = trainer.run_dir / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]) + lines[-1][:20])
    assert load_run(tmp_path).epochs == trainer.history.epochs


def test_save_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't hold a run folder"):
        make_trainer(save_path=tmp_path / "file").run(1, make_loader())


def test_failed_run_is_recorded_with_its_place(tmp_path: Path) -> None:
    class Fails(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.step == 7:
                raise ZeroDivisionError("by zero")
            return super().train_step(batch)

    trainer = make_trainer(Fails, save_path=tmp_path)
    with pytest.raises(ZeroDivisionError):
        trainer.run(2, make_loader())
    end = json.loads((trainer.run_dir / "events.jsonl").read_text().splitlines()[-1])
    assert end["data"] == {"status": "failed", "reason": "ZeroDivisionError at epoch 2, batch 3: by zero"}
    assert (trainer.result.status, trainer.result.reason) == ("failed", end["data"]["reason"])
    assert len(trainer.history.steps["train"]) == 7  # what was measured before the failure is there


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(8, 8)
            self.b = torch.nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).sum(1, keepdim=True)

    trainer = make_trainer(model=Tied(), save_path=tmp_path)
    result = trainer.run(1, make_loader())
    Tied().load_state_dict(load_file(result.best.path))


class Gone(Callback):
    """Removes everything in a folder when the second epoch begins."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            while self.root.exists():
                shutil.rmtree(self.root, ignore_errors=True)  # a save may be writing there


@pytest.mark.parametrize("kind", [Regress, Regress.add_on(StateManagerAddon)])
def test_a_run_folder_that_is_removed_in_mid_run_is_said_and_made_again(kind: type[Trainer], tmp_path: Path) -> None:
    root = tmp_path / "runs"
    trainer = make_trainer(kind, save_path=root, keep_source=False, lightning={"callbacks": [Gone(root)]})
    with pytest.warns(UserWarning, match="The run folder was removed while the run was on. It was created again"):
        trainer.run(4, make_loader(), make_valid())
    read = load_run(trainer.run_dir)
    assert without_times(read.epochs) == without_times(trainer.history.epochs) and len(read) == 4
    assert list(read.steps["train"].steps) == list(trainer.history.steps["train"].steps)
    assert "note: The run folder was removed" in show(trainer.run_dir) and (trainer.run_dir / "history.csv").exists()
    assert trainer.result.last.path.exists()


def test_a_relative_save_path_is_of_the_folder_where_the_trainer_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path="runs")
    again = make_trainer(Regress.add_on(StateManagerAddon), save_path=Path("runs"))
    assert "runs" not in repr(trainer)
    monkeypatch.chdir(tmp_path / "b")
    trainer.run(2, make_loader())
    monkeypatch.chdir(tmp_path)
    again.run(3, make_loader(), resume="auto")
    assert trainer.run_dir == again.run_dir == tmp_path / "a" / "runs" / "run-001" and not list((tmp_path / "b").iterdir())
    assert again.counts.epoch == 3 and repr(again.result).endswith("a/runs/run-001)")


# -- the past of a run
def _second(folder: Path) -> Any:
    trainer = make_trainer(log_bar=True)
    for _ in range(2):
        trainer.run(2, make_loader(), make_valid())
    return trainer


def _resumed(folder: Path) -> Any:
    for n_epoch, resume in ((2, None), (4, "last")):
        trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=folder, log_bar=True)
        trainer.run(n_epoch, make_loader(), make_valid(), resume=resume)
    return trainer


def _rewound(folder: Path) -> Any:
    trainer = make_trainer(keep_states=True, log_bar=True)
    trainer.run(4, make_loader(), make_valid())
    trainer.rewind(epoch=2)
    trainer.run(2, make_loader(), make_valid())
    return trainer


def _branched(folder: Path) -> Any:
    trainer = make_trainer(keep_states=True, log_bar=True)
    trainer.run(3, make_loader(), make_valid())
    branch = trainer.branch(epoch=2)
    branch.run(2, make_loader(), make_valid())
    return branch


@pytest.mark.parametrize("make", [_second, _resumed, _rewound, _branched])
def test_run_that_goes_on_shows_its_past_in_its_record_and_in_the_plot(
    tmp_path: Path, make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(tmp_path)
    board, history = trainer.view.board, trainer.history
    assert [row["epoch"] for row in board.past] == [1, 2] and [row["epoch"] for row in board.rows] == [3, 4]
    assert board.curve.cut[0].step == 10 and board.curve.past[-1].step == 10 and board.curve.points[0].step == 11
    assert "── continued ──\n    3 " in text.record_text(board)
    for shown in (history, load_run(trainer.run_dir)) if trainer.run_dir else (history,):
        assert shown.cut[0].step == 10 and shown.cut[1] == "continued"
        axes = shown.plot().axes[0]
        (faint,) = [line.get_xydata() for line in axes.lines if line.get_color() == COLOURS["light"]["train"] and line.get_alpha() == 0.4]
        solid = max(
            (line.get_xydata() for line in axes.lines if line.get_color() == COLOURS["light"]["train"] and line.get_alpha() is None),
            key=len,
        )
        assert tuple(faint[-1]) == tuple(solid[0]) and faint[-1][0] == 10 and "continued" in axes.texts[0].get_text()


def test_first_run_and_an_evaluation_after_it_have_no_cut() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader(), make_valid())
    trainer.evaluate(make_valid())
    assert trainer.history.cut is None and past_of(trainer.history).rows == trainer.history.epochs
