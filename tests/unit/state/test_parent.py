"""A run that continues from a checkpoint of another run: that one is only read, and the new run records where it comes from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from samples import Breaks, Broken, Regress, make_loader, make_trainer, make_valid, same_weights, without_times

from nbtrain import CheckpointError, EarlyStoppingAddon, LimitsAddon, StateManagerAddon
from nbtrain.history.differences import read_record
from nbtrain.history.run_folder import load_run
from nbtrain.library.follow import follow, recorded_events
from nbtrain.library.recorded_run import show
from nbtrain.views.text import Board

Saving = Regress.add_on(StateManagerAddon)


def contents(folder: Path) -> dict[str, Any]:
    """Everything in a folder that a write would change."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        data = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = data, path.lstat().st_mtime_ns, path.lstat().st_mode
    return found


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run of six epochs in each format."""
    made = {}
    for save_format in ("ckpt", "safetensor"):
        made[save_format] = make_trainer(Saving, save_path=tmp_path_factory.mktemp(save_format), save_format=save_format, every_n_steps=3)
        made[save_format].run(6, make_loader(), make_valid())
    return made


def memory_copy(path: Path) -> str:
    """The URL of a copy of a folder of checkpoints, of which this is one."""
    files = fsspec.filesystem("memory")
    files.put(str(path.parent), f"/{path.parent.parent.parent.name}/checkpoints", recursive=True)
    return f"memory://{path.parent.parent.parent.name}/checkpoints/{path.name}"


WAYS: dict[str, Callable[[Path], str | Path]] = {
    "path": lambda path: path,
    "text": str,
    "relative": lambda path: Path(os.path.relpath(path)),
    "link to the best": lambda path: next(path.parent.glob("best*")),
    "link to the last": lambda path: next(path.parent.glob("last*")),
    "file URL": lambda path: f"file://{path}",
    "memory URL": memory_copy,
}


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
@pytest.mark.parametrize("way", WAYS)
def test_run_from_a_checkpoint_of_another_run_is_a_new_run_and_changes_nothing_there(
    baselines: dict[str, Any], way: str, save_format: str, tmp_path: Path
) -> None:
    baseline = baselines[save_format]
    before = contents(baseline.run_dir.parent)
    resume = WAYS[way](next((baseline.run_dir / "checkpoints").glob("epoch=4-step=20*")))
    trainer = make_trainer(Saving, save_path=tmp_path / "mine", keep_last_n=1, save_format=save_format, every_n_steps=4)
    trainer.run(7, make_loader(), make_valid(), resume=resume)
    assert contents(baseline.run_dir.parent) == before
    assert trainer.run_dir == tmp_path / "mine" / "run-001" and trainer.result.last.path.parent.parent == trainer.run_dir
    assert [row["epoch"] for row in trainer.history.epochs] == [1, 2, 3, 4, 5, 6, 7] and trainer.best_weights is not None
    parent = resume if "://" in str(resume) else str(Path(resume).resolve())
    record = read_record(trainer.run_dir)
    assert record is not None and record["runs"][0]["parent"] == parent
    text = show(trainer.run_dir).replace("\n", "")
    assert f"note: This is a new run, and continues from {parent}" in text and "parent" in text


def test_history_of_the_parent_until_the_checkpoint_belongs_to_the_new_run(baselines: dict[str, Any], tmp_path: Path) -> None:
    baseline = baselines["ckpt"]
    path = baseline.run_dir / "checkpoints" / "epoch=3-step=18.ckpt"
    whole = make_trainer(Saving, save_path=tmp_path / "whole", every_n_steps=3)
    whole.run(6, make_loader(), make_valid())
    trainer = make_trainer(Saving, save_path=tmp_path / "mine", every_n_steps=3)
    trainer.run(6, make_loader(), make_valid(), resume=path)
    read, first = load_run(trainer.run_dir), load_run(baseline.run_dir)
    for history in (read, trainer.history):
        assert without_times(history.epochs) == without_times(first.epochs)
        assert without_times(history.validations) == without_times(first.validations)
        assert {phase: list(table.steps) for phase, table in history.steps.items()} == {p: list(t.steps) for p, t in first.steps.items()}
        assert history.steps["train"]["train_loss"] == first.steps["train"]["train_loss"]
    board = Board()
    follow(recorded_events(trainer.run_dir), board)  # pyright: ignore[reportArgumentType]
    assert [row["epoch"] for row in board.rows] == [1, 2, 3, 4, 5, 6] and board.status == "completed"
    assert same_weights(trainer.model, baseline.model)


@pytest.mark.parametrize("kind", ["load_state", "the same trainer", "a copied checkpoint", "after an error"])
def test_other_ways_to_a_foreign_checkpoint_change_nothing_there(baselines: dict[str, Any], kind: str, tmp_path: Path) -> None:
    path = baselines["ckpt"].run_dir / "checkpoints" / "epoch=5-step=25.ckpt"
    if kind == "a copied checkpoint":
        path = Path(shutil.copy2(path, tmp_path / "state.ckpt"))
    if kind == "after an error":
        path = Path(shutil.copy2(path, tmp_path / "after-error.ckpt"))
    before = contents(path.parent if path.parent != tmp_path else path)
    trainer = make_trainer(Saving, save_path=tmp_path / "mine", keep_last_n=1)
    if kind == "the same trainer":
        trainer.run(2, make_loader())
    own = contents(tmp_path / "mine") if kind == "the same trainer" else {}
    if kind == "load_state":
        trainer.load_state(path)
        trainer.save_state()
        trainer.run(1, make_loader())
    else:
        trainer.run(6, make_loader(), resume=path)
    assert contents(path.parent if path.parent != tmp_path else path) == before
    assert trainer.run_dir.name == ("run-002" if own else "run-001") and trainer.counts.epoch == 6
    assert {name: value for name, value in contents(tmp_path / "mine").items() if name in own and name != "."} == {
        name: value for name, value in own.items() if name != "."
    }


def test_read_only_input_is_enough_for_a_run_that_saves_elsewhere(
    baselines: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(baselines["ckpt"].run_dir.parent, tmp_path / "input", symlinks=True)
    paths = [tmp_path / "input", *(tmp_path / "input").rglob("*")]
    for path in paths:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    before = contents(tmp_path / "input")
    try:
        last = tmp_path / "input" / "run-001" / "checkpoints" / "last.ckpt"
        with pytest.raises(Broken):
            callbacks = {"callbacks": [Breaks(7)]}
            make_trainer(Saving, save_path=tmp_path / "working", lightning=callbacks).run(9, make_loader(), make_valid(), resume=last)
        trainer = make_trainer(Saving, save_path=tmp_path / "working", keep_last_n=2)
        trainer.run(9, make_loader(), make_valid(), resume="auto")  # the first part of the new run is its own
        assert trainer.result.status == "completed" and trainer.counts.epoch == 9 and trainer.run_dir.name == "run-001"
        assert load_run(trainer.run_dir).epochs[0]["epoch"] == 1 and len(load_run(trainer.run_dir)) == 9
        assert (trainer.run_dir / "checkpoints" / "last.ckpt").resolve().name == "epoch=9-step=45.ckpt"
        assert contents(tmp_path / "input") == before
    finally:
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)


def test_finished_run_of_another_folder_writes_nothing(baselines: dict[str, Any], tmp_path: Path) -> None:
    before = contents(baselines["ckpt"].run_dir)
    trainer = make_trainer(Saving, save_path=tmp_path / "mine")
    result = trainer.run(6, make_loader(), make_valid(), resume=baselines["ckpt"].run_dir / "checkpoints" / "last.ckpt")
    assert result.reason == "all 6 epochs were there: nothing to train" and result.run_dir is None and not (tmp_path / "mine").exists()
    assert contents(baselines["ckpt"].run_dir) == before


def test_checkpoint_of_the_own_folder_is_continued_there(tmp_path: Path) -> None:
    make_trainer(Saving, save_path=tmp_path / "mine").run(2, make_loader())
    trainer = make_trainer(Saving, save_path=os.path.relpath(tmp_path / "mine"))
    trainer.run(3, make_loader(), resume=tmp_path / "mine" / "run-001" / "checkpoints" / "last.ckpt")
    assert trainer.run_dir.resolve() == tmp_path / "mine" / "run-001" and len(list((tmp_path / "mine").iterdir())) == 1
    assert "new run" not in (trainer.run_dir / "events.jsonl").read_text()


def test_run_folder_that_is_linked_into_the_own_folder_is_only_read(tmp_path: Path) -> None:
    other = make_trainer(Saving, save_path=tmp_path / "other")
    other.run(2, make_loader())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run-001").symlink_to(other.run_dir)
    before = contents(other.run_dir)
    trainer = make_trainer(Saving, save_path=tmp_path / "mine", keep_last_n=1)
    trainer.run(3, make_loader(), resume="auto")
    assert contents(other.run_dir) == before and trainer.run_dir.name == "run-002" and trainer.counts.epoch == 3


def test_missing_url_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no file 'memory://nowhere/last.ckpt'"):
        make_trainer(Saving, save_path=tmp_path).run(1, make_loader(), resume="memory://nowhere/last.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_validations_before_and_inside_epochs_and_tests_are_inherited(tmp_path: Path) -> None:
    kind = Regress.add_on(StateManagerAddon, EarlyStoppingAddon, LimitsAddon)
    options = {"val_every_n_steps": 2, "val_first": True, "patience": 99}
    first = make_trainer(kind, save_path=tmp_path / "first", **options)
    first.run(3, make_loader(), make_valid())
    second = make_trainer(kind, save_path=tmp_path / "second", **options)
    second.load_state(first.run_dir / "checkpoints" / "last.ckpt")
    second.run(1, make_loader(), make_valid())
    read = load_run(second.run_dir)
    for name in ("epochs", "validations", "tests"):
        assert without_times(getattr(read, name)) == without_times(getattr(second.history, name)), name
    assert read.best == second.history.best
