"""A process that saves in a loop is killed at moments of chance: nothing finished is lost, nothing that is there is damaged.

`NBTRAIN_KILLS` says how many kills there are in all, half of them in each of two file systems.
"""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from children import CONTEXT

from nbtrain.checkpoint.atomic import clean_leftovers, point_to
from nbtrain.checkpoint.files import newest_valid, read_checkpoint, write_checkpoint
from nbtrain.checkpoint.snapshot import snapshot

KILLS = int(os.environ.get("NBTRAIN_KILLS", "10"))


def state_at(step: int) -> dict[str, Any]:
    """1 MB in which every number is the step."""
    weights = {f"model.{i}": torch.full((25_000,), float(step)) for i in range(4)}
    return {"state_dict": weights, "optimizer_states": [{"m": torch.full((150_000,), float(step))}], "global_step": step}


def save_forever(folder: Path, step: int, finished: Connection) -> None:
    """Keeps the last two files, one folder that is replaced again and again, and a pointer."""
    while True:
        taken = snapshot(state_at(step))
        write_checkpoint(taken, folder / f"step-{step}.ckpt")
        point_to(folder / "last.ckpt", folder / f"step-{step}.ckpt")
        (folder / f"step-{step - 2}.ckpt").unlink(missing_ok=True)
        write_checkpoint(taken, folder / "last", "safetensor")
        finished.send(step)
        step += 1


def is_whole(path: Path) -> bool:
    state = read_checkpoint(path)
    tensors = [*state["state_dict"].values(), state["optimizer_states"][0]["m"]]
    return len(tensors) == 5 and all(bool((tensor == state["global_step"]).all()) for tensor in tensors)


def kill_while_saving(folder: Path, step: int, after_s: float) -> int:
    """Let a process save from `step` on, and kill it some time after its first save. Returns the last step that it finished."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=save_forever, args=(folder, step, theirs))
    process.start()
    theirs.close()
    step = ours.recv()
    time.sleep(after_s)  # the moment of the kill, not a wait for anything
    process.kill()
    process.join()
    try:
        while True:
            step = ours.recv()
    except EOFError:
        return step


def test_nothing_finished_is_lost_and_nothing_is_damaged_by_kills(folder: Path) -> None:
    chance = random.Random(0)
    step, n_leftovers = 1, 0
    for _ in range(KILLS // 2):
        finished = kill_while_saving(folder, step, chance.uniform(0, 0.15))
        n_leftovers += len(clean_leftovers(folder))
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        assert all(is_whole(path) for path in folder.iterdir())
        assert read_checkpoint(folder / "last")["global_step"] >= finished
        assert read_checkpoint(folder / "last.ckpt")["global_step"] >= finished
        newest = newest_valid(folder)
        assert newest.path is not None and newest.skipped == ()
        step = finished + 1
    assert n_leftovers > 0 or KILLS < 10, "no kill came while a file was written: the test shows nothing"
