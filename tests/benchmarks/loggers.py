"""What a logger costs a step: the CPU time of its threads, and the time that the run spends on its points; the system's view; `self.log`.

Two runs are further from each other than a logger is from none, so it is not found in their difference: within one run the threads
beside the one that trains are measured, and so is every call of `StepPoints`, which hands the points over, of the callback that looks
at the system, or of `log`. A client's own processes, such as wandb's, are not in it. Neither are the first 200 steps, in which clients
connect. A point comes every 50 batches, as by default.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from contenders import Work, make_ours
from measure import settle
from tables import Claim, Row, Table, main
from workload import Job

N_STEPS, N_LEFT_OUT = 4000, 200


def logger_addon(name: str) -> list[Any]:
    """The addon called `name`, which stays offline."""
    import nbtrain

    os.environ["WANDB_MODE"] = "offline"
    return [getattr(nbtrain, name)]


def tracker(name: str) -> list[Any]:
    """LoggersAddon with the tracker called `name`, on this disk."""
    from nbtrain import LoggersAddon

    class Tracker(LoggersAddon):
        def __post_init__(self) -> None:
            self.loggers = [name]
            super().__post_init__()

    return [Tracker]


def logging_callback() -> list[Any]:
    """A user's callback that logs in each batch."""
    import lightning as L

    class Logs(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.log("mine", outputs["loss"].detach())

    return [Logs()]


@dataclass(frozen=True)
class Watched:
    """What is added to a run, and its share of the thread that trains: these methods of this class of this module."""

    addons: Callable[[], list[Any]] = list
    callbacks: Callable[[], list[Any]] = list
    timed: tuple[str, str, tuple[str, ...]] = ("nbtrain.loggers.step_points", "StepPoints", ("on_train_batch_end", "update"))
    max_us: float | None = 20
    max_percent: float | None = None  # of a step


MONITOR = "nbtrain.addons.system_monitor", "_Monitor", ("on_train_batch_start", "on_train_batch_end")
WATCHED = {
    "nothing": Watched(max_us=None),
    "Weights & Biases": Watched(partial(logger_addon, "WandBLoggerAddon")),
    "Neptune": Watched(partial(logger_addon, "NeptuneLoggerAddon")),
    "a training log in CSV": Watched(partial(tracker, "csv")),
    "TensorBoard": Watched(partial(tracker, "tensorboard")),
    "the system's view": Watched(partial(logger_addon, "SystemMonitorAddon"), timed=MONITOR, max_us=None, max_percent=1),
    "a user's self.log": Watched(callbacks=logging_callback, timed=("nbtrain.engine.step_module", "StepModule", ("log",)), max_us=15),
}


def measured(name: str, n_steps: int = N_STEPS, n_left_out: int = N_LEFT_OUT) -> tuple[float, float, float]:
    """µs a step of the thread that trains, of all others, and of what is timed, which is in the first."""
    import lightning as L

    watched, spent_s = WATCHED[name], 0.0
    reads: list[tuple[float, float, float]] = []

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            nonlocal spent_s
            start_s = time.perf_counter()
            method(*args, **options)
            spent_s += time.perf_counter() - start_s

        return call

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
            if batch_idx in (n_left_out, n_steps - 1):
                own_s = time.thread_time()
                reads.append((own_s, time.process_time() - own_s, spent_s))

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        module, name_of_kind, methods = watched.timed
        kind = getattr(importlib.import_module(module), name_of_kind)
        for method in methods:
            patch.setattr(kind, method, timed(getattr(kind, method)))
        job = Job(Path(folder), n_steps)
        make_ours(job, Work(addons=watched.addons, callbacks=lambda: [Watch(), *watched.callbacks()])).run(1, job.loader())
    first, last = reads
    own, others, calls = ((b - a) / (n_steps - 1 - n_left_out) * 1e6 for a, b in zip(first, last))
    return own, others, calls


def _alone(name: str) -> tuple[float, float, float]:
    """`measured` in a process of its own, whose output is dropped."""
    settle(os.devnull)
    return measured(name)


def _shown(figure: float) -> str:
    return f"{round(figure, 1) + 0.0:.1f}"  # -0.0 is 0.0


def row(name: str, rounds: list[tuple[float, float, float]]) -> Row:
    own, others, calls = (median(values) for values in zip(*rounds))
    cost, watched, share = others + calls, WATCHED[name], 100 * (others + calls) / own
    in_all = Claim("{:.1f}", cost, watched.max_us) if watched.max_us is not None else _shown(cost)
    percent = Claim("{:.1f} %", share, watched.max_percent) if watched.max_percent is not None else f"{_shown(share)} %"
    return Row((name, _shown(others), _shown(calls), in_all, percent), bar=cost)


def table(n_rounds: int, only: set[str]) -> Table:
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WATCHED if not only or name in only}
    for _ in range(n_rounds):
        for name, found in rounds.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found.append(pool.apply(_alone, (name,)))
    return shown([row(name, found) for name, found in rounds.items()])


def shown(rows: list[Row]) -> Table:
    dearest = max(rows, key=lambda row: row.bar or 0)
    says = f"What a logger or monitor adds to each step: {dearest.bar or 0:.1f} µs at most ({dearest.cells[0]})."
    columns = "with", "µs in its threads", "µs in its calls", "µs in all", "of a step"
    return Table("Loggers and monitors", columns, tuple(rows), "Bars show µs in all.", says)


if __name__ == "__main__":
    main(table, 3)
