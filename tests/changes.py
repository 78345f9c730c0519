"""What people set in mid-epoch on Lightning's trainer, its strategy, its module and its callbacks, to be obeyed from the next batch on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from traced import Memory, Trace

_Setter = Callable[[Any, Any, Trace], None]  # of the trainer, its module and the trace


def _set(name: str, value: Any) -> _Setter:
    """On the trainer."""
    return lambda trainer, module, trace: setattr(trainer, name, value)


def _noted(whose: Callable[[Any, Any], Any], name: str) -> _Setter:
    """Sets the method `name` of an object, where the trace sees its calls."""

    def put(trainer: Any, module: Any, trace: Trace) -> None:
        item = whose(trainer, module)
        own = getattr(item, name)

        def noted(*args: Any, **options: Any) -> Any:
            trace.note("set", name)
            return own(*args, **options)

        setattr(item, name, noted)

    return put


def _of_module(name: str) -> _Setter:
    return _noted(lambda trainer, module: module, name)


def _of_strategy(name: str) -> _Setter:
    return _noted(lambda trainer, module: trainer.strategy, name)


def _of_precision(name: str) -> _Setter:
    return _noted(lambda trainer, module: trainer.strategy.precision_plugin, name)


def _of_callback(name: str) -> _Setter:
    return _noted(lambda trainer, module: trainer.callbacks[0], name)


def _halves(trainer: Any, module: Any, trace: Trace) -> None:
    own = module.training_step
    module.training_step = lambda batch, batch_idx: own(batch, batch_idx) / 2


def _by_hand(trainer: Any, module: Any, trace: Trace) -> None:
    def step(batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(mse_loss(module.net(batch[0]), batch[1]))
        optimizer.step()

    module.automatic_optimization, module.training_step = False, step


def _other_optimizer(trainer: Any, module: Any, trace: Trace) -> None:
    trainer.optimizers = [torch.optim.SGD(module.net.parameters(), 0.02, momentum=0.5)]


def _schedule(kind: Callable[[Any], Any], **options: Any) -> _Setter:
    def add(trainer: Any, module: Any, trace: Trace) -> None:
        config = LRSchedulerConfig(kind(trainer.optimizers[0]), interval="step", **options)
        trainer.strategy.lr_scheduler_configs = [*trainer.strategy.lr_scheduler_configs, config]

    return add


def _append_schedule(trainer: Any, module: Any, trace: Trace) -> None:
    trainer.lr_scheduler_configs.append(LRSchedulerConfig(StepLR(trainer.optimizers[0], 1, 0.7), interval="epoch"))


def _late(trace: Trace) -> Callback:
    return LambdaCallback(
        **{
            name: lambda *args, name=name: trace.note("late", name)
            for name in ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end", "on_validation_batch_end")
        }
    )


CHANGES: dict[str, _Setter] = {
    "clips": _set("gradient_clip_val", 0.01),
    "clips no longer": _set("gradient_clip_val", None),
    "clips values": lambda trainer, module, trace: vars(trainer).update(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "accumulates": _set("accumulate_grad_batches", 2),
    "logs each step": _set("log_every_n_steps", 1),
    "validates no more": _set("limit_val_batches", 0),
    "validates less often": _set("check_val_every_n_epoch", 3),
    "validates each batch": _set("val_check_batch", 1),
    "other optimizer": _other_optimizer,
    "schedule": _schedule(lambda optimizer: StepLR(optimizer, 1, 0.5)),
    "schedule, appended": _append_schedule,
    "plateau": _schedule(
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=10.0), reduce_on_plateau=True, monitor="v", strict=False
    ),
    "no schedules": lambda trainer, module, trace: trainer.lr_scheduler_configs.clear(),
    "logger": lambda trainer, module, trace: setattr(trainer, "loggers", [Memory(trace)]),
    "halves the loss": _halves,
    "by hand": _by_hand,
    **{f"module.{name}": _of_module(name) for name in ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")},
    **{f"module.{name}": _of_module(name) for name in ("on_before_zero_grad", "on_after_backward", "on_train_batch_start")},
    **{f"module.{name}": _of_module(name) for name in ("transfer_batch_to_device", "validation_step", "on_validation_batch_start")},
    **{f"callback.{name}": _of_callback(name) for name in ("on_before_backward", "on_train_batch_end", "on_validation_batch_start")},
    **{f"strategy.{name}": _of_strategy(name) for name in ("optimizer_step", "backward", "training_step", "validation_step")},
    **{f"precision.{name}": _of_precision(name) for name in ("convert_input", "optimizer_step", "backward")},
    "optimizer.step": _noted(lambda trainer, module: trainer.optimizers[0], "step"),
    "optimizer.zero_grad": _noted(lambda trainer, module: trainer.optimizers[0], "zero_grad"),
    "callback": lambda trainer, module, trace: trainer.callbacks.append(_late(trace)),
    "callback, before others": lambda trainer, module, trace: trainer.callbacks.insert(0, _late(trace)),
    "other callbacks": lambda trainer, module, trace: setattr(trainer, "callbacks", [trace, _late(trace)]),
    "stops": _set("should_stop", True),
    "fewer steps": lambda trainer, module, trace: setattr(trainer.fit_loop.epoch_loop, "max_steps", 9),
}


class Sets(Callback):
    """Makes the change `kind` at the end of the `n`-th batch, or at that of the `n`-th batch of validations."""

    def __init__(self, trace: Trace, kind: str, n: int, *, validating: bool = False) -> None:
        self.trace, self.change, self.n, self.validating = trace, CHANGES[kind], n, validating

    def _count(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.n -= 1
        if self.n == 0:
            self.change(trainer, module, self.trace)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if not self.validating:
            self._count(trainer, pl_module)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if self.validating:
            self._count(trainer, pl_module)
