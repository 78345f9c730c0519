"""A run folder has one writer: a second run is refused, whoever it belongs to, and everything that comes one after the other goes on."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import lightning as L
import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import ConfigError, StateManagerAddon, load_run
from nbtrain.library.recorded_run import show

Saving = Regress.add_on(StateManagerAddon)
HELD = r"^run-001 is being written to by another run: of this process, since 20.*\n  .*run-001\n  Wait until that run ends, or"


class Once(L.Callback):
    """Calls a function once, in the second batch."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.function is not None:
            function, self.function = self.function, lambda: None
            function()


def notes(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line["data"]["text"] for line in lines if line["kind"] == "note"]


def test_a_second_run_in_the_same_folder_is_refused_while_one_is_on(tmp_path: Path) -> None:
    make_trainer(Saving, save_path=tmp_path).run(1, make_loader(), make_valid())
    seen: list[str] = []

    def start_others() -> None:
        other = make_trainer(Saving, save_path=tmp_path)
        weights, began = other.model.state_dict()["0.weight"].clone(), other.run_dir
        with pytest.raises(ConfigError, match=HELD):
            other.run(3, make_loader(), make_valid(), resume="auto")
        assert torch.equal(other.model.state_dict()["0.weight"], weights) and other.run_dir is began and other.counts.epoch == 0
        assert make_trainer(Saving, save_path=tmp_path).load_state().parent.name == "checkpoints"  # may be looked at
        seen.extend([other.run(1, make_loader(), make_valid()).run_dir.name, show(tmp_path / "run-001")])

    first = make_trainer(Saving, save_path=tmp_path, lightning={"callbacks": [Once(start_others)]})
    result = first.run(3, make_loader(), make_valid(), resume="auto")
    assert result.status == "completed" and seen[0] == "run-002" and "✓" not in seen[1]
    assert len(load_run(tmp_path / "run-001").epochs) == 3
    again = make_trainer(Saving, save_path=tmp_path / "run-001" / "..")
    again.load_state(result.last.path)
    assert again.run(1, make_loader(), make_valid()).run_dir.resolve() == first.run_dir.resolve()  # it is free again


def test_runs_one_after_the_other_have_the_folder(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path)
    trainer.run(1, make_loader(), make_valid())
    trainer.run(1, make_loader(), make_valid(), background=True).wait()

    def fail() -> None:
        raise RuntimeError("broken")

    broken = make_trainer(Saving, save_path=tmp_path, lightning={"callbacks": [Once(fail)]})
    broken.load_state()
    with pytest.raises(RuntimeError, match="broken"):
        broken.run(1, make_loader(), make_valid())
    other = make_trainer(Saving, save_path=tmp_path)
    other.load_state()
    assert other.run(1, make_loader(), make_valid()).run_dir.name == "run-001"
    trainer.toggle("test")
    assert trainer.run(1, make_valid()).status == "completed"


def paused(tmp_path: Path) -> tuple[Any, Any]:
    """A trainer whose run is paused in its second epoch, with its first one saved, and the run's handle."""
    trainer = make_trainer(Saving, save_path=tmp_path)
    trainer.run(1, make_loader(), make_valid())
    trainer = make_trainer(Saving, save_path=tmp_path, lightning={"callbacks": [Once(lambda: trainer.pause())]})
    handle = trainer.run(3, make_loader(), make_valid(), resume="auto", background=True)
    assert trainer.control.wait_settled(20) and handle.status == "paused"
    return trainer, handle


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_run_that_was_paused_goes_on_in_its_folder(is_emptied: bool, tmp_path: Path) -> None:
    """Also where the locked file was emptied, as filelock did before 4.2.11 when it took the lock."""
    _, handle = paused(tmp_path)
    if is_emptied:
        (tmp_path / "run-001" / ".lock").write_text("")
    handle.resume()
    assert handle.wait(20).run_dir.name == "run-001" and len(load_run(tmp_path).epochs) == 3


@pytest.mark.parametrize("is_over", [True, False])
def test_a_paused_run_whose_folder_another_run_has_taken_leaves_it_alone(is_over: bool, tmp_path: Path) -> None:
    trainer, handle = paused(tmp_path)

    def proceed() -> None:
        handle.resume()
        what = "was continued by" if is_over else "is being written to by"
        with pytest.raises(ConfigError, match=f"run-001 {what} another run: of this process"):
            handle.wait(20)

    other = make_trainer(Saving, save_path=tmp_path, lightning={"callbacks": [] if is_over else [Once(proceed)]})
    other.run(3, make_loader(), make_valid(), resume="auto")
    if is_over:
        proceed()
    whole = load_run(tmp_path / "run-001")
    assert [row["epoch"] for row in whole.epochs] == [1, 2, 3] and whole.epochs == other.history.epochs
    assert trainer.run_dir.name == "run-002" and (trainer.run_dir / "after-error.ckpt").exists()
    assert not (tmp_path / "run-001" / "after-error.ckpt").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")], ids=["NFS", "FUSE"])
def test_a_folder_without_locks_is_noted_once(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "_acquire", fail)
    result = make_trainer(save_path=tmp_path).run(1, make_loader())
    assert result.status == "completed"
    (note,) = [note for note in notes(result.run_dir) if "locked" in note]
    assert note.startswith("run-001 can't be locked, so a second run could write to it: ")


@pytest.mark.parametrize("content", ["", "rubbish", "[]", '{"pid": 1}', '{"pid": "\\u001b[2J", "host": 3, "since": []}'])
def test_a_lock_whose_file_is_damaged_is_refused_all_the_same(content: str, tmp_path: Path) -> None:
    lock = filelock.FileLock(tmp_path / ".lock", thread_local=False)
    lock.acquire()
    (tmp_path / ".writer").write_text(content)
    trainer = make_trainer(save_path=tmp_path)
    trainer.origin.open(tmp_path)
    with pytest.raises(ConfigError, match=r"is being written to by another run: of"):
        trainer.run(1, make_loader())
    lock.release()
    assert trainer.run(1, make_loader()).status == "completed"
