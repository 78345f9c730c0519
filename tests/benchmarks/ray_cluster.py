"""What RayAddon costs beside torchrun: seconds until the first batch, a step, and how late its events arrive.

    PYTHONPATH=.:tests .venv-cluster/bin/python tests/benchmarks/ray_cluster.py

A Ray cluster of two nodes that this machine pretends to be, and two workers on it. They train as `scaling` does: an MLP on the CPU, with
gloo. The plain loop under torchrun and the run on Ray take turns. A step is the window of 100 at the 20th percentile, of wall time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from ray.cluster_utils import Cluster
from scaling import N_PROCESSES, N_STEPS, WIDTHS, Classify, WallClock, make_net, plain_ddp
from tables import Claim, Row, Table, main
from torch.utils.data import DataLoader, TensorDataset
from workload import BATCH_SIZE, adam, make_data

from nbtrain import MultiGPUAddon, RayAddon

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_log_monitor": False}


class Written(L.Callback):
    """Rank 0 writes when its first batch began, in seconds since 1970, and the steps a second."""

    def __init__(self, path: Path) -> None:
        self.path, self.first_s = path, 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.first_s = self.first_s or time.time()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(f"{self.first_s} {pl_module.owner.model.clock.steps_per_s}")


class Delays:
    """How long after they were emitted the events of a run arrive here, in s."""

    def __init__(self) -> None:
        self.found_s: list[float] = []

    def update(self, event: Any) -> None:
        if event.kind == "steps":
            self.found_s.append(time.time() - event.time_s)


def ours(addon: Any, width: int, **options: Any) -> tuple[float, float, list[float]]:
    """Seconds from the call to the first batch, steps a second, and the events' delays, of a run that `addon` starts."""
    data = TensorDataset(*make_data(N_STEPS * N_PROCESSES))
    with tempfile.TemporaryDirectory() as folder:
        path, delays = Path(folder) / "found", Delays()
        callbacks = {"callbacks": [Written(path)]}
        trainer = Classify.add_on(addon)(make_net(width, WallClock()), optimizer=adam, lightning=callbacks, log_bar=False, **options)
        trainer.sinks.append(delays)
        began_s = time.time()
        trainer.run(1, DataLoader(data, BATCH_SIZE, shuffle=True))
        first_s, steps_per_s = map(float, path.read_text().split())
    return first_s - began_s, steps_per_s, delays.found_s


def rank(path: Path, width: int) -> None:
    """A process of the plain loop."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    first_s = time.time()
    plain_ddp(width, N_STEPS, clock := WallClock())
    if torch.distributed.get_rank() == 0:
        path.write_text(f"{first_s} {clock.steps_per_s}")


def plain(width: int) -> tuple[float, float]:
    """Seconds from the start of torchrun to the first batch, and steps a second."""
    with tempfile.TemporaryDirectory() as folder:
        path, began_s = Path(folder) / "found", time.time()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", N_PROCESSES, __file__, path, width]
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        first_s, steps_per_s = map(float, path.read_text().split())
    return first_s - began_s, steps_per_s


def row(name: str, rounds: list[Any]) -> Row:
    starts, delays = [ray[0] for _, ray, _ in rounds], [s for _, ray, _ in rounds for s in ray[2]]
    ratio = median(ray[1] / plain[1] for plain, ray, _ in rounds)
    claim = Claim("{:.2f} ×", ratio, 0.98, at_least=True)
    local, torchrun = ([found[i][0] for found in rounds] for i in (2, 0))
    seconds = (starts[0], median(starts[1:]), local[0], median(local[1:]), median(torchrun))
    return Row((name, *(f"{s:.1f}" for s in seconds), claim, f"{1000 * median(delays):.0f} ms"))


def table(n_rounds: int, only: set[str]) -> Table:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "no_monitor": True})
    cluster.add_node(**NODE)
    on_ray = {"workers": N_PROCESSES, "gpus_per_worker": 0, "address": cluster.address}
    rows = []
    for name, width in WIDTHS.items():
        if not only or name in only:
            rounds = [
                (plain(width), ours(RayAddon, width, **on_ray), ours(MultiGPUAddon, width, device=["cpu"] * N_PROCESSES))
                for _ in range(n_rounds)
            ]
            rows.append(row(name, rounds))
    columns = (
        "model",
        "first batch on Ray, s",
        "again",
        "MultiGPUAddon, s",
        "again",
        "torchrun, s",
        "steps/s, of torchrun",
        "events' delay",
    )
    note = "Seconds from the call of `run`, or from the start of torchrun. Ray starts processes for each run; the first one connects."
    return Table("Two workers on Ray", columns, tuple(rows), note)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    if "RANK" in os.environ:
        rank(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main(table, 3)
