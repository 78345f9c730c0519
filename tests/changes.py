"""What a callback may change within an epoch, which counts from the next batch on: the list of docs/hooks.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, LambdaCallback
from traced import Trace

_Setter = Callable[[Any, Any, Trace], None]  # of Lightning's trainer, its module and the trace


def _set(name: str, value: Any) -> _Setter:
    """On the trainer."""
    return lambda trainer, module, trace: setattr(trainer, name, value)


def _hook(name: str) -> _Setter:
    """Sets the hook `name` on the module."""

    def put(trainer: Any, module: Any, trace: Trace) -> None:
        own = getattr(module, name)

        def noted(*args: Any, **options: Any) -> Any:
            trace.note("set", name)
            return own(*args, **options)

        setattr(module, name, noted)

    return put


def _rate(trainer: Any, module: Any, trace: Trace) -> None:
    for group in trainer.optimizers[0].param_groups:
        if "lr" in group:
            group["lr"] = 0.003


# A list of callbacks that is set is another one: what is appended while its callbacks are called is called at once by Lightning
def _add(trainer: Any, module: Any, trace: Trace) -> None:
    names = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end", "on_validation_batch_end")
    trainer.callbacks = [*trainer.callbacks, LambdaCallback(**{name: lambda *args, name=name: trace.note("late", name) for name in names})]


def _add_first(trainer: Any, module: Any, trace: Trace) -> None:
    trainer.callbacks = [LambdaCallback(on_train_batch_end=lambda *args: trace.note("first")), *trainer.callbacks]


def _remove(trainer: Any, module: Any, trace: Trace) -> None:
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, LambdaCallback)]


CHANGES: dict[str, _Setter] = {
    "rate": _rate,
    "stops": _set("should_stop", True),
    "clips": _set("gradient_clip_val", 0.01),
    "clips no longer": _set("gradient_clip_val", None),
    "clips values": lambda trainer, module, trace: vars(trainer).update(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "accumulates": _set("accumulate_grad_batches", 2),
    "callback": _add,
    "callback, before others": _add_first,
    "callbacks removed": _remove,
    **{f"module.{name}": _hook(name) for name in ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")},
    **{f"module.{name}": _hook(name) for name in ("on_train_batch_start", "on_validation_batch_start")},
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
