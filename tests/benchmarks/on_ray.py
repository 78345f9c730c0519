"""What RayAddon costs: seconds until the first batch beside torchrun, a step beside that of a plain loop, and how late its events arrive.

    PYTHONPATH=.:tests .venv-cluster/bin/python tests/benchmarks/on_ray.py

A Ray cluster of two nodes that this machine pretends to be, and two workers on it. They train as `scaling` does: an MLP on the CPU, with
gloo. Between two epochs of 300 steps, the same workers make 300 of a plain DistributedDataParallel loop. So both have the same neighbours:
Ray's processes, and that of the notebook, which a real cluster has elsewhere. Of each the last 250 count, as wall time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from ray_nodes import two_nodes
from scaling import N_PROCESSES, SIZES, Classify, WallClock, make_net, plain_ddp
from tables import Claim, Row, Table, main
from torch.utils.data import DataLoader, TensorDataset
from workload import BATCH_SIZE, adam, make_data

from nbtrain import MultiGPUAddon, RayAddon

BLOCK, STEADY, N_BLOCKS = 300, 250, 6
BOUNDS = {83: 1.1, 980: 1.02}  # of a step, by width: what a run does beside a step of 2 ms is 4 % of it


class BlockClock(WallClock):
    """Reads the time at each forward; at the first of each block, steps of the plain loop come before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.began_s = width, 0.0
        self.ratios: list[float] = []  # what a step took, of a plain one

    def tick(self) -> None:
        self.began_s = self.began_s or time.time()
        if self.reads_s and len(self.reads_s) % BLOCK == 0:
            plain_ddp(self.width, BLOCK, clock := WallClock())
            self.ratios.append(block_s(self) / block_s(clock))
        super().tick()


class Written(L.Callback):
    """Rank 0 writes what its clock has, because the model does not come back with it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            clock = pl_module.owner.model.clock
            self.path.write_text(" ".join(map(str, (clock.began_s, *clock.ratios))))


def block_s(clock: WallClock) -> float:
    """The seconds of the last steps, without the first ones of their block."""
    return clock.reads_s[-1] - clock.reads_s[-STEADY]


class Delays:
    """How long after they were emitted the events of a run arrive here, in s."""

    def __init__(self) -> None:
        self.found_s: list[float] = []

    def update(self, event: Any) -> None:
        if event.kind == "steps":
            self.found_s.append(time.time() - event.time_s)


@dataclass(frozen=True)
class Found:
    """Seconds from the call to the first batch; the time of a step, of that of the plain loop, by block; the events' delays in s."""

    start_s: float
    ratios: tuple[float, ...] = ()
    delays_s: tuple[float, ...] = ()


def ours(addon: Any, width: int, n_blocks: int, **options: Any) -> Found:
    data = TensorDataset(*make_data(BLOCK * N_PROCESSES))  # an epoch is a block, because rows of more data are found less fast
    with tempfile.TemporaryDirectory() as folder:
        path, delays = Path(folder) / "found", Delays()
        callbacks = {"callbacks": [Written(path)]}
        trainer = Classify.add_on(addon)(make_net(width, BlockClock(width)), optimizer=adam, lightning=callbacks, log_bar=False, **options)
        trainer.recorder.add(delays)
        began_s = time.time()
        trainer.run(n_blocks + 1, DataLoader(data, BATCH_SIZE, shuffle=True))
        first_s, *ratios = map(float, path.read_text().split())
    return Found(first_s - began_s, tuple(ratios), tuple(delays.found_s))


def rank(path: Path, width: int) -> None:
    """A process of torchrun."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    began_s = time.time()
    plain_ddp(width, 1, WallClock())
    if torch.distributed.get_rank() == 0:
        path.write_text(f"{began_s}")


def torchrun(width: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        path, began_s = Path(folder) / "found", time.time()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", N_PROCESSES, __file__, path, width]
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return Found(float(path.read_text()) - began_s)


def row(name: str, width: int, rays: list[Found], here: list[Found], torchruns: list[Found]) -> Row:
    ratios, delays_s = (sorted(value for found in rays for value in getattr(found, what)) for what in ("ratios", "delays_s"))
    late = f"{1000 * median(delays_s):.0f} ms, {1000 * delays_s[len(delays_s) * 95 // 100]:.0f} ms"
    middle = f"{ratios[len(ratios) // 4]:.2f} to {ratios[len(ratios) * 3 // 4]:.2f}"
    step = Claim("{:.2f} ×", median(ratios), BOUNDS[width])
    return Row((name, *map(again, (rays, here, torchruns)), step, middle, late))


def again(found: list[Found]) -> str:
    """The first time, and the median of the others."""
    return f"{found[0].start_s:.1f} s, then {median(each.start_s for each in found[1:] or found):.1f} s"


def table(n_rounds: int, only: set[str]) -> Table:
    rows = []
    with two_nodes() as cluster:
        on_ray = {"workers": N_PROCESSES, "gpus_per_worker": 0, "address": cluster.address}
        for name, (width, _) in list(SIZES.items())[:2]:
            if not only or name in only:
                rays = [ours(RayAddon, width, N_BLOCKS, **on_ray) for _ in range(n_rounds)]
                here = [ours(MultiGPUAddon, width, 1, device=["cpu"] * N_PROCESSES) for _ in range(n_rounds)]
                rows.append(row(name, width, rays, here, [torchrun(width) for _ in range(n_rounds)]))
    columns = (
        "model",
        "first batch on Ray",
        "with MultiGPUAddon",
        "with torchrun",
        "a step on Ray, plain DDP = 1",
        "half of the blocks",
        "events' delay: median, 95 %",
    )
    note = (
        "Seconds from the call of `run`, or from the start of torchrun, to the first batch. The first call on Ray connects to the "
        "cluster; each starts its processes. Those of MultiGPUAddon stay. A delay is that from an event in a worker until the view has it."
    )
    return Table("Two workers on Ray", columns, tuple(rows), note)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    if "RANK" in os.environ:
        rank(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main(table, 3)
