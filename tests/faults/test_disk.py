"""A disk that is full and a folder that is read-only cost one save each, and no run; a save in flight outlives the training."""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from children import CONTEXT
from lightning.pytorch.callbacks import Callback
from samples import Regress, make_loader, make_trainer, without_times

from nbtrain import StateManagerAddon, load_run
from nbtrain.checkpoint.files import SaveFormat, Writer, read_checkpoint
from nbtrain.history.run_folder import read_events

NOBODY = 65534


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a process of its own, whose limits and user it may change."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_send, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


def _send(answers: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    answers.send(function(*arguments))


def save_large_then_small(folder: Path, save_format: SaveFormat) -> list[str]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as on a full disk a write fails, instead of a signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    writer = Writer()
    writer.save({"w": torch.ones(1_000_000), "epoch": 1}, folder / "a", save_format)
    writer.save({"w": torch.ones(10), "epoch": 2}, folder / "b", save_format)
    writer.wait()
    return [str(error) for error in writer.take_errors()]


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_full_disk_fails_one_save_and_leaves_nothing_half_written(save_format: SaveFormat, tmp_path: Path) -> None:
    (error,) = in_child(save_large_then_small, tmp_path, save_format)
    reason, where, remedy = error.split("\n  ")
    assert reason.startswith("a could not be written: ") and "File too large" in reason
    assert (where, remedy) == (str(tmp_path / "a"), "Make room, or give another folder.")
    assert [path.name for path in tmp_path.iterdir()] == ["b"] and read_checkpoint(tmp_path / "b")["epoch"] == 2


def save_as_nobody(folder: Path) -> list[str]:
    os.chdir(folder)  # its parents are closed to others
    writer = Writer()
    # One that works and one that fails import all that a save needs: another user can't where the repository's parents are closed too
    for name in ("before.ckpt", "before.ckpt/a.ckpt"):
        writer.save({"epoch": 0}, name)
    writer.wait()
    assert len(writer.take_errors()) == 1
    (folder / "before.ckpt").unlink()
    if os.geteuid() == 0:  # modes mean nothing to root
        os.setuid(NOBODY)
    for name in ("closed/a.ckpt", "open/a.ckpt"):
        writer.save({"epoch": 1}, name)
    writer.wait()
    return [str(error) for error in writer.take_errors()]


def test_read_only_folder_fails_one_save(tmp_path: Path) -> None:
    for name, mode in (("closed", 0o555), ("open", 0o777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    tmp_path.chmod(0o755)
    assert in_child(save_as_nobody, tmp_path) == [
        "a.ckpt could not be written: Permission denied.\n  closed/a.ckpt\n  Make room, or give another folder."
    ]
    assert list((tmp_path / "closed").iterdir()) == [] and read_checkpoint(tmp_path / "open" / "a.ckpt") == {"epoch": 1}


def save_and_leave(folder: Path) -> None:
    Writer().save({"w": torch.ones(1_000_000)}, folder / "a.ckpt")


def test_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    in_child(save_and_leave, tmp_path)
    assert read_checkpoint(tmp_path / "a.ckpt")["w"].sum() == 1_000_000


class FullForAnEpoch(Callback):
    """In the second epoch no file can grow."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        keeper: Any = trainer.checkpoint_callbacks[0]
        keeper.disk.writer.wait()
        limit = 1 if trainer.current_epoch == 1 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def run_through_a_full_disk(folder: Path) -> tuple[str, list[str], list[Any]]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    options: dict[str, Any] = {"save_path": folder, "log_bar": False, "lightning": {"callbacks": [FullForAnEpoch()]}}
    trainer = make_trainer(Regress.add_on(StateManagerAddon), **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = trainer.run(3, make_loader())
    return result.status, [str(warning.message) for warning in told], without_times(trainer.history.epochs)


def test_run_goes_on_while_the_disk_is_full_and_all_that_was_measured_is_written(tmp_path: Path) -> None:
    status, told, epochs = in_child(run_through_a_full_disk, tmp_path)
    assert (status, told) == ("completed", ["run-001 can't be written to: File too large. The run continues."])
    assert without_times(load_run(tmp_path).epochs) == epochs and len(epochs) == 3
    notes = [event.data["text"] for event in read_events(tmp_path / "run-001") if event.kind == "note"]
    assert notes == ["a checkpoint was not saved: epoch=2-step=10.ckpt could not be written: File too large."]
    found = sorted(path.name for path in (tmp_path / "run-001" / "checkpoints").iterdir())
    assert found == ["best.ckpt", "epoch=1-step=5.ckpt", "epoch=3-step=15.ckpt", "history.jsonl", "last.ckpt"]
