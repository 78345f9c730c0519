"""What a run of Lightning's Trainer does, written down: each hook with what it could see, and each call of a logger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from samples import make_loader
from torch.utils.data import IterableDataset

HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_save_checkpoint",
    "on_exception",
    "on_test_batch_start",
    "on_test_batch_end",
]


class Trace(Callback):
    """Writes down each hook, with what a user could see in it. `reads`: the hooks in which the metrics are read; all by default."""

    def __init__(self, reads: list[str] | None = None) -> None:
        self.seen: list[Any] = []
        self.reads = reads

    def note(self, *what: Any) -> None:
        self.seen.append(what)


def _traced(hook: str) -> Callable[..., None]:
    def write(self: Trace, trainer: L.Trainer, module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        output = args[0] if hook.endswith("batch_end") else None
        shown = (
            {name: value.tolist() for name, value in output.items() if isinstance(value, torch.Tensor)}
            if isinstance(output, dict)
            else None
        )
        read = trainer.callback_metrics if self.reads is None or hook in self.reads else {}
        metrics = {name: float(value) for name, value in read.items()}
        progress = [vars(part).copy() for part in (loop.batch_progress.total, loop.batch_progress.current)]
        place = (trainer.global_step, trainer.current_epoch, loop.batch_idx, trainer.is_last_batch, loop._batches_that_stepped)
        self.note(hook, place, module._current_fx_name, shown, metrics, progress)

    write.__name__ = hook
    return write


for name in HOOKS:
    setattr(Trace, name, _traced(name))


class FullTrace(Trace):
    """Also the hooks around a pass, in which Lightning's tables of metrics change."""


OF_PASSES = ["on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_validation_epoch_start", "on_validation_epoch_end"]
for name in OF_PASSES:
    setattr(FullTrace, name, _traced(name))


class Memory(Logger):
    """A logger that writes into the trace, and nothing to the disk."""

    name, version = "memory", 0

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.trace.note("log", step, {name: float(value) for name, value in metrics.items()})

    def save(self) -> None:
        self.trace.note("save")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Stream(IterableDataset[Any]):
    """Five batches, and no length."""

    def __iter__(self) -> Any:
        yield from make_loader(own_generator=True)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.step


def hooked_sgd(params: Any, module: Any) -> Any:
    """SGD whose hooks write to the trace of the module."""
    optimizer = torch.optim.SGD(params, 1e-2, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: module.trace.note("before step", module.trainer.global_step))
    optimizer.register_step_post_hook(lambda *_: module.trace.note("after step", module.trainer.global_step))
    return optimizer
