"""What training and evaluation share: who listens to a hook, how a batch comes to the device, and how its step is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import lightning as L
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor

from ..data.batch import is_out_of_memory, out_of_memory
from ..engine.precision import CastPrecision
from ..engine.step_module import StepModule
from ..private.lightning_parts import OneStreamDDP, averages_models
from .ddp_step import find_ddp_step

# %% auto #0
__all__ = ["hooks_of", "call_hooks", "Listeners", "is_plain", "Ways", "explain_full_memory", "has_profiler"]

Hook = Callable[..., Any]


# -- hooks
def hooks_of(pl_trainer: L.Trainer, name: str, callbacks: Sequence[L.Callback]) -> list[Hook]:
    """The methods `name` of those callbacks that have one of their own, in their class or set on the instance, as LambdaCallback does."""
    plain = getattr(L.Callback, name)
    found = [item for item in callbacks if getattr(type(item), name, None) is not plain or name in vars(item)]
    hooks = [(item, getattr(item, name)) for item in found]
    hooks = [(item, hook) for item, hook in hooks if getattr(hook, "__func__", None) is not plain and callable(hook)]
    return [labelled(pl_trainer, f"[Callback]{type(item).__name__}.{name}", hook) for item, hook in hooks]


def own_hook(pl_trainer: L.Trainer, name: str, item: L.LightningModule | Strategy) -> Hook | None:
    """The hook `name` of the module or the strategy; None where there is none, or the one that does nothing."""
    plain = getattr(L.LightningModule if isinstance(item, L.LightningModule) else Strategy, name, None)
    hook = getattr(item, name, None)
    if not callable(hook) or getattr(hook, "__func__", None) is plain:
        return None
    return labelled(pl_trainer, f"[{type(item).__name__}].{name}", hook)


def has_profiler(pl_trainer: L.Trainer) -> bool:
    """Whether the user has given a profiler."""
    return type(pl_trainer.profiler) is not PassThroughProfiler  # pyright: ignore[reportAttributeAccessIssue]


def labelled(pl_trainer: L.Trainer, label: str, function: Hook) -> Hook:
    """`function` under a label of the user's profiler, if there is one."""
    if not has_profiler(pl_trainer):
        return function
    profiler: Any = pl_trainer.profiler  # pyright: ignore[reportAttributeAccessIssue]

    @wraps(function)
    def profiled(*args: Any, **options: Any) -> Any:
        with profiler.profile(label):
            return function(*args, **options)

    return profiled


def call_hooks(pl_trainer: L.Trainer, name: str, callbacks: Sequence[L.Callback] | None = None, *, others: bool = True) -> None:
    """Call the hook `name`, which has no arguments: of the callbacks (by default the trainer's), and of the `others`, module and strategy."""
    module = pl_trainer.lightning_module
    names = vars(module)
    before, names["_current_fx_name"] = names["_current_fx_name"], name
    for hook in hooks_of(pl_trainer, name, pl_trainer.callbacks if callbacks is None else callbacks):  # pyright: ignore[reportAttributeAccessIssue]
        hook(pl_trainer, module)
    for item in (module, pl_trainer.strategy) if others else ():
        if (hook := own_hook(pl_trainer, name, item)) is not None:
            hook()
    names["_current_fx_name"] = before


class Listeners:
    """Who listens to the hooks `names` of a batch: callbacks in their order, then the module, then the strategy.

    `hooks` has those names that somebody listens to. A name without listeners costs nothing: `if name in listeners.hooks`.
    """

    def __init__(self, pl_trainer: L.Trainer, names: Sequence[str]) -> None:
        self.pl_trainer, self.module, self.names = pl_trainer, pl_trainer.lightning_module, names
        self.hooks: dict[str, tuple[list[Hook], Hook | None, Hook | None]] = {}
        self._look_up()

    def _look_up(self) -> None:
        pl_trainer, callbacks = self.pl_trainer, self.pl_trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        items = [*callbacks, self.module]
        self._attributes = [vars(item) for item in items]
        hiding = [(vars(item), name) for item in items for name in self.names if name in vars(item)]
        self._hiding, self._hidden = [own for own, _ in hiding], [name for _, name in hiding]
        self._known = self._read()
        self.hooks.clear()
        for name in self.names:
            of_callbacks = hooks_of(pl_trainer, name, callbacks)
            of_module, of_strategy = own_hook(pl_trainer, name, self.module), own_hook(pl_trainer, name, pl_trainer.strategy)
            if of_callbacks or of_module is not None or of_strategy is not None:
                self.hooks[name] = of_callbacks, of_module, of_strategy

    def _read(self) -> list[Any]:
        return [*self.pl_trainer.callbacks, *map(len, self._attributes), *map(dict.get, self._hiding, self._hidden)]  # pyright: ignore

    def refresh(self) -> None:
        """Between two batches: look them up again if callbacks were added or removed, or a hook was set on a callback or the module."""
        if self._read() != self._known:
            self._look_up()

    def call(self, name: str, *args: Any) -> Any:
        """Call those who listen to `name`, a key of `hooks`; returns what the module's hook returned."""
        of_callbacks, of_module, of_strategy = self.hooks[name]
        names = vars(self.module)
        before, names["_current_fx_name"] = names["_current_fx_name"], name
        for hook in of_callbacks:
            hook(self.pl_trainer, self.module, *args)
        answer = of_module(*args) if of_module is not None else None
        if of_strategy is not None:
            of_strategy(*args)
        names["_current_fx_name"] = before
        return answer


# -- ways
def _is_as_made(part: Any, kinds: tuple[type[Any], ...]) -> bool:
    """Whether `part` is of one of these classes itself, and nothing that was set on it hides a method."""
    kind = type(part)
    return kind in kinds and not any(name[0] != "_" and callable(getattr(kind, name, None)) for name in vars(part))


def is_plain(pl_trainer: L.Trainer) -> bool:
    """Whether strategy, precision and Lightning's clipping add nothing to `loss.backward(); optimizer.step()`: then these are called."""
    strategy, precision = pl_trainer.strategy, pl_trainer.precision_plugin
    has_plain_strategy = _is_as_made(strategy, (SingleDeviceStrategy, DDPStrategy, OneStreamDDP)) and not averages_models(strategy)
    has_plain_precision = _is_as_made(precision, (Precision, MixedPrecision, HalfPrecision, CastPrecision))
    has_plain_precision = has_plain_precision and getattr(precision, "scaler", None) is None
    return has_plain_strategy and has_plain_precision and not pl_trainer.gradient_clip_val


_CONTEXTS = {"training_step": "train_step_context", "validation_step": "val_step_context", "test_step": "test_step_context"}


class Ways:
    """How a batch comes to the device and how the step `name` is called: as `strategy` and `precision` do, by the short way if they add nothing."""

    def __init__(self, pl_trainer: L.Trainer, name: str) -> None:
        module = pl_trainer.lightning_module
        assert isinstance(module, StepModule)
        self.pl_trainer, self.module, self.strategy, self.precision = pl_trainer, module, pl_trainer.strategy, pl_trainer.precision_plugin
        self.is_short = module.owner.short_way and is_plain(pl_trainer)
        self.converts = None if type(self.precision) is Precision else self.precision.convert_input
        device = self.strategy.root_device
        self._device = None if device.type == "cpu" else device
        own = vars(module)
        is_own_transfer = not ({"on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"} & own.keys())
        self._moves_whole = not is_own_transfer or getattr(pl_trainer, "datamodule", None) is not None or not self.is_short
        self.step = labelled(pl_trainer, f"[Strategy]{type(self.strategy).__name__}.{name}", self._find_step(name))

    def _find_step(self, name: str) -> Callable[..., Any]:
        if not self.is_short:
            return getattr(self.strategy, name)
        if self.strategy.model is not self.module:
            return find_ddp_step(self.strategy, name)
        if type(self.precision) is Precision:
            return getattr(self.module, name)
        step, context = getattr(self.module, name), getattr(self.precision, _CONTEXTS[name])

        def in_precision(*args: Any) -> Any:
            with context():
                return step(*args)

        return in_precision

    def move(self, batch: Any, loader_index: int = 0) -> Any:
        """The batch on the device. A list or dict that is there already is copied: a step may pop from it, and the next epoch read it again."""
        if self.converts is not None:
            batch = self.converts(batch)
        kind = type(batch)
        tensors = batch.values() if kind is dict else (batch,) if kind is Tensor else batch
        if self._moves_whole or (kind is not tuple and kind is not list and kind is not dict and kind is not Tensor):
            return self._move_whole(batch, loader_index)
        device = self._device
        for item in tensors:
            # In the middle of a step `tensor.device` costs 4 µs and `tensor.is_cpu` nothing
            if type(item) is not Tensor or not (item.is_cpu if device is None else item.device == device):
                return self._move_whole(batch, loader_index)
        return batch.copy() if kind is dict or kind is list else batch

    def _move_whole(self, batch: Any, loader_index: int) -> Any:
        batch = self.module._on_before_batch_transfer(batch, dataloader_idx=loader_index)
        return self.strategy.batch_to_device(batch, dataloader_idx=loader_index)


# -- errors
@contextmanager
def explain_full_memory(loop: Any) -> Iterator[None]:
    """Raises OutOfMemory where a batch was too large for the device; for a BatchSizeFinder, which looks for it, the error as it is."""
    try:
        yield
    except RuntimeError as error:
        pl_trainer = loop.trainer
        if not is_out_of_memory(error) or not pl_trainer.callbacks:  # a trial of the finder has none
            raise
        place = f"epoch {pl_trainer.current_epoch + 1}, batch {loop.batch_progress.current.ready}"
        raise out_of_memory(error, loop._results.batch, pl_trainer.strategy.root_device, place) from error
