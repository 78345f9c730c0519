"""A disk that is full and a folder that is read-only cost one save each, and no run; a save in flight outlives the training."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from children import CONTEXT

from nbtrain.checkpoints import SaveFormat, Writer, read_checkpoint

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
    if os.geteuid() == 0:  # modes mean nothing to root
        os.setuid(NOBODY)
    writer = Writer()
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
