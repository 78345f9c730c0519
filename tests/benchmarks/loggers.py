"""What a logger costs: the CPU time of its threads, and the time that the run spends on making its points, a step; and the system's view.

Two runs are further from each other than a logger is from none, so it is not found in their difference: within one run the threads
beside the one that trains are measured, and so is every call of `StepPoints`, which hands the points over, or of the callback that looks
at the system. A client's own processes, such as wandb's, are not in it. Neither are the first 200 steps, in which clients connect. A
point comes every 50 batches, as by default.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from contenders import Work, make_ours
from features import logger_addon, tracker
from measure import settle
from tables import Claim, Row, Table, main
from workload import Job

N_STEPS, N_LEFT_OUT = 4000, 200
LOGGERS: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "Weights & Biases": partial(logger_addon, "WandBLoggerAddon"),
    "Neptune": partial(logger_addon, "NeptuneLoggerAddon"),
    "a training log in CSV": partial(tracker, "csv"),
    "TensorBoard": partial(tracker, "tensorboard"),
    "the system's view": partial(logger_addon, "SystemMonitorAddon"),
}
MAX_US, MAX_PERCENT = 20, 1  # of a logger; of the system's view
# By module: the callback that does the work, and the methods that run in each step or now and then
TIMED = {
    "nbtrain.addons.loggers": ("StepPoints", ("on_train_batch_end", "update")),
    "nbtrain.addons.system": ("_Monitor", ("on_train_batch_start", "on_train_batch_end")),
}


def measured(name: str, n_steps: int = N_STEPS, n_left_out: int = N_LEFT_OUT) -> tuple[float, float, float]:
    """µs a step of the thread that trains, of all others, and of the callbacks of `TIMED`, which are in the first."""
    import lightning as L

    spent_s = 0.0
    reads: list[tuple[float, float, float]] = []

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            nonlocal spent_s
            start_s = time.perf_counter()
            method(*args)
            spent_s += time.perf_counter() - start_s

        return call

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
            if batch_idx in (n_left_out, n_steps - 1):
                own_s = time.thread_time()
                reads.append((own_s, time.process_time() - own_s, spent_s))

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for module, (callback, methods) in TIMED.items():
            kind = getattr(importlib.import_module(module), callback)
            for method in methods:
                patch.setattr(kind, method, timed(getattr(kind, method)))
        job = Job(Path(folder), n_steps)
        make_ours(job, Work(addons=LOGGERS[name], callbacks=lambda: [Watch()])).run(1, job.loader())
    first, last = reads
    own, others, points = ((b - a) / (n_steps - 1 - n_left_out) * 1e6 for a, b in zip(first, last))
    return own, others, points


def _alone(name: str) -> tuple[float, float, float]:
    """`measured` in a process of its own, whose output is dropped."""
    settle(os.devnull)
    return measured(name)


def row(name: str, rounds: list[tuple[float, float, float]]) -> Row:
    own, others, points = (median(values) for values in zip(*rounds))
    cells = name, f"{others:.1f}", f"{points:.1f}", f"{others + points:.1f}", f"{(others + points) / own:.1%}"
    if name == "none":
        return Row(cells)
    if name == "the system's view":
        return Row(cells, (Claim("≤ {} % of a step", 100 * points / own, MAX_PERCENT),))
    return Row(cells, (Claim("≤ {} µs", others + points, MAX_US),))


def table(n_rounds: int, only: set[str]) -> Table:
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in LOGGERS if not only or name in only}
    for _ in range(n_rounds):
        for name, found in rounds.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append(pool.apply(_alone, (name,)))
    rows = tuple(row(name, found) for name, found in rounds.items())
    columns = "with", "its threads", "its callback", "in all", "of a step"
    return Table("Loggers and the system's view: what they add to a step, in µs", columns, rows)


if __name__ == "__main__":
    main(table, 3)
