"""Random configurations of a trainer's steps, on Lightning's own loops and on nbtrain's: everything that can be seen is the same.

    python tests/random_configurations.py 1000            # `make compare`: half an hour; the seeds 0 to 999
    python tests/random_configurations.py 150 --short     # many epochs of one batch
    python tests/random_configurations.py 1 --seed 417    # one of them again, with its settings and the first difference

Drawn are the steps (what they return and log), the net, optimizer and schedule, loaders, callbacks, what these change in mid-epoch, and
the limits, intervals, accumulation and precision of a run. Each is done by a stock `lightning.Trainer` with `as_lightning_module()`, and by
one whose loops were replaced. Compared are the trace of the hooks with what each could see, what loggers get, the loops' counters,
metrics, history, weights, optimizer states, rates, checkpoints, random numbers and errors.
What nbtrain does otherwise than Lightning on purpose is not drawn: `draw` says where. The judge of that is a plain loop, `random_jobs`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import lightning as L
import torch
from changes import CHANGES, Sets
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from samples import make_data, make_loader, make_valid, without_times
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, RandomSampler
from traced import HOOKS, OF_PASSES, FullTrace, Memory, StopAt, Stream, Trace

from nbtrain import MultiOptimizerTrainer, Trainer
from nbtrain.loops.own_loops import use_own_loops


# -- nets and optimizers
def _net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    middle = {"dropout": nn.Dropout(0.3), "batch norm": nn.BatchNorm1d(16), "layer norm": nn.LayerNorm(16)}[kind]
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), middle, nn.Linear(16, 1))


class NoGradStep(torch.optim.SGD):
    """Calls its closure as many optimizers of others do: under `no_grad`, and with gradients where it is called."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


class LateGrad(torch.optim.SGD):
    """Calls its closure under `no_grad`, and leaves it to the closure to turn gradients on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        super().step()
        return loss


class Twice(torch.optim.SGD):
    """Two evaluations a step, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        closure()
        super().step()
        return loss


class NoRate(torch.optim.Optimizer):
    """Its groups have no `lr`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"size": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["size"] * p.grad
        return loss


def _noted(optimizer: Any, trace: Trace, name: str) -> Any:
    """`optimizer`, whose method `name` writes to the trace."""
    own = getattr(optimizer, name)

    def noted(*args: Any, **options: Any) -> Any:
        trace.note(name)
        return own(*args, **options)

    setattr(optimizer, name, noted)
    return optimizer


def _hooked(params: Any, trace: Trace) -> Any:
    """SGD with a hook after its step. Before a step, a trainer's own gradients are there: Lightning's are not yet."""
    optimizer = torch.optim.SGD(params, 1e-2, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: trace.note("after step"))
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "SGD": lambda params, trace: torch.optim.SGD(params, 1e-2),
    "momentum": lambda params, trace: torch.optim.SGD(params, 1e-2, momentum=0.9, nesterov=True),
    "Adam": lambda params, trace: torch.optim.Adam(params, 1e-2),
    "AdamW, two groups": lambda params, trace: torch.optim.AdamW(
        [{"params": params[:2]}, {"params": params[2:], "lr": 1e-3, "weight_decay": 0.0}], 1e-2
    ),
    "NAdam": lambda params, trace: torch.optim.NAdam(params, 1e-2),
    "ASGD": lambda params, trace: torch.optim.ASGD(params, 1e-2),
    "Adagrad": lambda params, trace: torch.optim.Adagrad(params, 1e-2),
    "LBFGS": lambda params, trace: torch.optim.LBFGS(params, 0.01, max_iter=3),
    "hooks": _hooked,
    "own zero_grad": lambda params, trace: _noted(torch.optim.Adam(params, 1e-2), trace, "zero_grad"),
    "no_grad step": lambda params, trace: NoGradStep(params, 1e-2),
    "late grad": lambda params, trace: LateGrad(params, 1e-2),
    "two evaluations": lambda params, trace: Twice(params, 1e-2),
    "no rate": lambda params, trace: NoRate(params),
}
SCHEDULES: dict[str, Callable[[Any], dict[str, Any]]] = {  # options of the trainer
    "step": lambda optimizer: {"scheduler": StepLR(optimizer, 2, 0.5)},
    "exponential, by batch": lambda optimizer: {"scheduler": ExponentialLR(optimizer, 0.9), "scheduler_step_on_batch": True},
    "cosine": lambda optimizer: {"scheduler": CosineAnnealingLR(optimizer, 7)},
    "plateau": lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)},
    "factory": lambda optimizer: {"scheduler": lambda optimizer, plan: LambdaLR(optimizer, lambda i: 1 / (1 + i))},
    "function": lambda optimizer: {"scheduler": lambda step: 0.01 * 0.95**step},
}


# -- loaders
class Sized:
    """Batches by hand."""

    def __init__(self, n: int, length: int) -> None:
        self.n, self.length = n, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        x, y = make_data(8 * self.n).tensors
        for i in range(self.n):
            yield x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": make_loader,
    "own generator": lambda: make_loader(own_generator=True),
    "in order, whole batches": lambda: make_loader(64, shuffle=False),
    "one batch": lambda: make_loader(16),
    "replacement": lambda: DataLoader(make_data(70), 16, sampler=RandomSampler(make_data(70), replacement=True, num_samples=50)),
    "without length": lambda: DataLoader(Stream(), batch_size=None),
    "by hand": lambda: Sized(4, 4),
}  # of wrong lengths a plain loop is the judge: Lightning cuts there


# -- callbacks
class Logs(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("of_callback", float(batch_idx), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("val_of_callback", float(trainer.global_step))


class Wrapped(Callback):
    """Sets a hook on itself, with `functools.wraps`."""

    def __init__(self, trace: Trace) -> None:
        @wraps(self.on_train_batch_start)
        def noted(*args: Any) -> None:
            trace.note("wrapped", args[-1])

        self.__dict__["on_train_batch_start"] = noted


class Late(Callback):
    """Adds a hook to the optimizer, or a callback, in mid-epoch."""

    def __init__(self, trace: Trace, what: str) -> None:
        self.trace, self.what = trace, what

    def on_train_batch_end(self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and self.what:
            trace, what = self.trace, self.what
            self.what = ""
            if what == "callback":
                trainer.callbacks.append(LambdaCallback(on_train_batch_start=lambda t, m, b, i: trace.note("late", i)))
            else:
                trainer.optimizers[0].register_step_post_hook(lambda *_: trace.note("late hook", trainer.global_step))


class Raises(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_zero_grad(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("raised on purpose")


class Skips(Callback):
    """Ends its epochs before a batch, with the hook of the module for that."""

    def __init__(self, index: int) -> None:
        self.index = index

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        vars(pl_module)["on_train_batch_start"] = lambda batch, batch_idx: -1 if batch_idx >= self.index else None


class LogsGradients(Callback):
    """The hooks around a step."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.trace.note("before zero_grad", trainer.global_step)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trace.note("after backward", trainer.global_step)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        gradient = next(pl_module.parameters()).grad
        if gradient is not None:
            pl_module.log("gradient", gradient.float().norm(), on_step=True)


CALLBACKS: dict[str, Callable[[Trace, Path, int], Any]] = {
    "early stopping": lambda trace, folder, n: EarlyStopping("val_loss", patience=n % 3, min_delta=0.5),
    "early stopping in training": lambda trace, folder, n: EarlyStopping(
        "train_loss", patience=1, strict=False, check_on_train_epoch_end=True
    ),
    "checkpoints by step": lambda trace, folder, n: ModelCheckpoint(
        folder, filename="s={step}", every_n_train_steps=1 + n % 5, save_top_k=-1, auto_insert_metric_name=False
    ),
    "best by val_loss": lambda trace, folder, n: ModelCheckpoint(
        folder, filename="v={epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True
    ),
    "best by a step's value": lambda trace, folder, n: ModelCheckpoint(
        folder, filename="u={step}", monitor="of_callback_step", every_n_train_steps=2, save_top_k=2
    ),
    "last at the end of training": lambda trace, folder, n: ModelCheckpoint(folder, filename="e={epoch}", save_on_train_epoch_end=True),
    "rates": lambda trace, folder, n: LearningRateMonitor("step" if n % 2 else "epoch"),
    "accumulation that changes": lambda trace, folder, n: GradientAccumulationScheduler({0: 1 + n % 2, 1: 2 + n % 3}),
    "averaged weights": lambda trace, folder, n: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1 + n % 2),
    "EMA": lambda trace, folder, n: EMAWeightAveraging(decay=0.9),
    "logs": lambda trace, folder, n: Logs(),
    "stop": lambda trace, folder, n: StopAt(3 + n),
    "late callback": lambda trace, folder, n: Late(trace, "callback"),
    "late hook": lambda trace, folder, n: Late(trace, "hook"),
    "wrapped": lambda trace, folder, n: Wrapped(trace),
    "raises": lambda trace, folder, n: Raises(2 + n),
    "skips": lambda trace, folder, n: Skips(2 + n % 2),
    "logs gradients": lambda trace, folder, n: LogsGradients(trace),
    "lambda": lambda trace, folder, n: LambdaCallback(on_before_optimizer_step=lambda t, m, o: trace.note("lambda", len(o.param_groups))),
}
_NEED_THE_STEP_VALUE = "best by a step's value"


# -- steps
class Sub(torch.Tensor):
    """A tensor subclass."""


class Drawn(Trainer):
    """Steps as the settings say."""

    drawn: dict[str, Any]

    def train_step(self, batch: Any) -> Any:
        return self._with_more(self._loss(batch))

    def _loss(self, batch: Any) -> torch.Tensor:
        output = self.model(batch[0])
        loss = mse_loss(output, batch[1].to(output.dtype))
        assert self.module is not None
        self._log_all(loss, self.module.trainer.fit_loop.epoch_loop.batch_idx)
        return loss

    def _with_more(self, loss: torch.Tensor) -> dict[str, Any]:
        more: dict[str, dict[str, Any]] = {
            "loss": {},
            "numbers": {"twice": 2 * loss.detach(), "count": 3},
            "tensors": {"output": loss.detach().repeat(4), "label": torch.zeros(4)},
            "subclass": {"twice": (2 * loss.detach()).as_subclass(Sub)},
        }
        return {"loss": loss, **more[self.drawn["returns"]]}

    def _log_all(self, loss: torch.Tensor, batch_idx: int) -> None:
        for i, log in enumerate(self.drawn["logs"]):
            if log["when"] == "odd" and batch_idx % 2 == 0 or log["when"] == "first" and batch_idx > 0:
                continue
            value = {"loss": loss.detach(), "float": 0.5 + batch_idx, "int": batch_idx, "twice": 2 * loss.detach()}[log["kind"]]
            self.log(f"m{i}", value, **{name: value for name, value in log.items() if name not in ("kind", "when")})

    def test_step(self, batch: Any) -> dict[str, Any]:
        output = self.model(batch[0])
        loss = mse_loss(output, batch[1].to(output.dtype))
        if self.drawn["validation_logs_steps"]:
            self.log("v_of_step", loss, on_step=True, on_epoch=True)
        return self._with_more(loss)


class ByHand(Drawn):
    """Steps its optimizer by hand, in each batch: Lightning counts a batch without a step as one."""

    automatic_optimization = False

    def train_step(self, batch: Any) -> dict[str, Any]:
        loss = self._loss(batch)
        optimizer: Any = self.optimizer
        optimizer.zero_grad()
        self.backward(loss)
        optimizer.step(lambda: loss)
        return self._with_more(loss)


class InTurn(MultiOptimizerTrainer):
    """Two parts, each with an optimizer: the second one predicts what the first one leaves."""

    drawn: dict[str, Any]
    _log_all, _with_more = Drawn._log_all, Drawn._with_more

    def train_step_first(self, batch: Any) -> dict[str, Any]:
        output = self.model["first"](batch[0])  # pyright: ignore[reportIndexIssue]
        loss = mse_loss(output, batch[1].to(output.dtype))
        assert self.module is not None
        self._log_all(loss, self.module.trainer.fit_loop.epoch_loop.batch_idx)
        return self._with_more(loss)

    def train_step_second(self, batch: Any) -> dict[str, Any]:
        rest = batch[1] - self.model["first"](batch[0])  # pyright: ignore[reportIndexIssue]
        output = self.model["second"](batch[0])  # pyright: ignore[reportIndexIssue]
        return self._with_more(mse_loss(output, rest.to(output.dtype)))

    def test_step(self, batch: Any) -> dict[str, Any]:
        output = self.model["first"](batch[0]) + self.model["second"](batch[0])  # pyright: ignore[reportIndexIssue]
        return self._with_more(mse_loss(output, batch[1].to(output.dtype)))


WHO = {"one optimizer": Drawn, "by hand": ByHand, "two optimizers": InTurn}


def make(settings: dict[str, Any], trace: Trace) -> Any:
    """The trainer whose steps are trained."""
    steps, options = settings["steps"], {"device": "cpu", "log_bar": False, **settings["options"]}
    net, make_optimizer = _net(steps["net"]), OPTIMIZERS[steps["optimizer"]]
    kind: Any = WHO[steps["who"]]
    if kind is InTurn:
        parts = nn.ModuleDict({"first": net, "second": _net("dropout")})
        second = torch.optim.SGD(parts["second"].parameters(), 1e-2, momentum=0.5)
        trainer = InTurn(parts, optimizers={"first": make_optimizer(list(net.parameters()), trace), "second": second}, **options)
    else:
        optimizer = make_optimizer(list(net.parameters()), trace)
        schedule = SCHEDULES[steps["schedule"]](optimizer) if steps["schedule"] else {}
        trainer = kind(net, optimizer=optimizer, **schedule, **options)
    trainer.drawn = steps
    return trainer


# -- settings
def _draw_log(rng: random.Random) -> dict[str, Any]:
    log = {"kind": rng.choice(["loss", "twice", "float", "int"]), "when": rng.choice(["always", "always", "odd", "first"])}
    step, epoch = rng.choice([(step, epoch) for step in (None, True, False) for epoch in (None, True, False) if step is not False or epoch])
    log |= {"on_step": step, "on_epoch": epoch}
    log |= {
        "prog_bar": rng.random() < 0.3,
        "logger": rng.random() < 0.8,
        "reduce_fx": rng.choice(["mean", "mean", "mean", "max", "min", "sum"]),
    }
    return log | {"batch_size": rng.choice([None, None, 1, 5])}


def _draw_steps(rng: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "who": rng.choice(["one optimizer"] * 4 + list(WHO)),
        "net": rng.choice(["dropout", "batch norm", "layer norm"]),
    }
    settings |= {"returns": rng.choice(["loss", "loss", "numbers", "tensors", "subclass"])}
    settings |= {"logs": [_draw_log(rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))]}
    settings |= {"validation_logs_steps": rng.random() < 0.3}
    settings |= {"optimizer": rng.choice([*OPTIMIZERS, "Adam", "SGD", "momentum"])}
    schedules = [None] if settings["optimizer"] == "no rate" else [None, None, *SCHEDULES]
    return settings | {"schedule": rng.choice(schedules)}


def _draw_trainer(rng: random.Random) -> dict[str, Any]:
    """Arguments of Lightning's Trainer. Each is left out more often than not."""
    choices: dict[str, tuple[float, list[Any]]] = {
        "max_steps": (0.2, [3, 7, 8, 11]),
        "min_epochs": (0.1, [2]),
        "min_steps": (0.1, [4, 9]),
        "limit_train_batches": (0.3, [1, 2, 3, 4, 0.5, 7]),
        "limit_val_batches": (0.2, [0, 1, 2, 0.5]),
        "val_check_interval": (0.3, [1, 2, 3, 0.25, 0.5]),
        "check_val_every_n_epoch": (0.2, [2, None]),
        "accumulate_grad_batches": (0.3, [2, 3, 4]),
        "log_every_n_steps": (0.7, [0, 1, 2, 3]),
        "gradient_clip_val": (0.1, [0.1]),
        "overfit_batches": (0.08, [2, 0.5]),
        "num_sanity_val_steps": (0.3, [1, 2]),
        "detect_anomaly": (0.05, [True]),
        "inference_mode": (0.1, [False]),
        "reload_dataloaders_every_n_epochs": (0.1, [1]),
    }
    found = {name: rng.choice(values) for name, (share, values) in choices.items() if rng.random() < share}
    if found.get("check_val_every_n_epoch", 1) is None and not isinstance(found.get("val_check_interval"), int):
        found["val_check_interval"] = rng.choice([4, 7])
    return {"max_epochs": rng.choice([1, 2, 3, 4])} | found


def draw_short(seed: int) -> dict[str, Any]:
    """The same case with many epochs of a batch or a few, and a validation of one batch."""
    rng, settings = random.Random(f"short {seed}"), draw(seed)
    trainer = settings["trainer"] | {"max_epochs": rng.choice([5, 8, 12])}
    if trainer.get("check_val_every_n_epoch", 1) is not None:
        trainer.pop("val_check_interval", None)
    return settings | {"trainer": trainer, "loader": rng.choice(["one batch", "one batch", "by hand"]), "n_valid": 16}


def draw(seed: int) -> dict[str, Any]:
    """The settings of one case: plain values that say all of it."""
    rng = random.Random(seed)
    callbacks = rng.sample(list(CALLBACKS), rng.choice([0, 1, 1, 2, 3, 4]))
    if _NEED_THE_STEP_VALUE in callbacks and "logs" not in callbacks:
        callbacks.append("logs")
    steps = _draw_steps(rng)
    if "averaged weights" in callbacks and steps["net"] == "batch norm":
        steps["net"] = "dropout"  # Lightning makes an update in the pass for batch norm, with the gradients of the epoch before
    trainer = _draw_trainer(rng)
    changes = _draw_changes(random.Random(f"changes {seed}"))
    if {"stop", "early stopping", "early stopping in training", "stops"} & {*callbacks, *changes}:
        # A window that is open at the stop is finished, and a whole epoch is validated where any is: not so with Lightning's loop
        trainer.pop("accumulate_grad_batches", None)
        trainer.pop("val_check_interval", None)
        if trainer.get("check_val_every_n_epoch", 1) is None:
            trainer.pop("check_val_every_n_epoch")
        callbacks = [name for name in callbacks if name != "accumulation that changes"]
    if steps["who"] == "by hand":  # it has no windows: Lightning refuses them at the start, and counts by them where they come later
        changes.pop("accumulates", None)
    if "accumulates" in changes or steps["who"] != "one optimizer":  # an open window with Lightning's old gradients, or what is refused
        trainer.pop("accumulate_grad_batches", None)
    loader = rng.choice([*LOADERS, "shuffled", "shuffled"])
    if loader == "without length" and trainer.get("limit_train_batches") == 7:  # its epoch ends before, and is validated then
        trainer.pop("limit_train_batches")
    return {
        "steps": steps,
        "loader": loader,
        "valid": rng.choice([0, 1, 1, 1, 2]),
        "n_valid": 40,
        "callbacks": {name: rng.randrange(8) for name in callbacks},
        "logger": rng.random() < 0.6,
        "options": _draw_options(rng),
        "trainer": trainer,
        "changes": changes,
        "reads": _draw_reads(random.Random(f"reads {seed}")),
    }


def _draw_reads(rng: random.Random) -> list[str] | None:
    """The hooks in which a callback reads the metrics; None: all. What it has read at one hook may be what it reads at the next."""
    return None if rng.random() < 0.5 else rng.sample([*HOOKS, *OF_PASSES], rng.choice([1, 1, 2, 3]))


def _draw_options(rng: random.Random) -> dict[str, Any]:
    """Arguments of nbtrain's trainer."""
    choices = {"precision": (0.25, ["bf16", "bf16-true", "64-true"]), "gradient_clip": (0.15, [0.1])}
    return {name: rng.choice(values) for name, (share, values) in choices.items() if rng.random() < share}


def _draw_changes(rng: random.Random) -> dict[str, int]:
    """What a callback sets, and at the end of which batch of the training; below 0, of the validations."""
    kinds = rng.sample(list(CHANGES), rng.choice([0, 0, 1, 1, 2, 3]))
    # Where a window's length changes within a window, Lightning's loop keeps old gradients
    return {kind: 2 if kind == "accumulates" else rng.choice([1, 2, 3, 4, 6, 7, 8, 11, -1, -2, -4]) for kind in kinds}


# -- a run
def _plain(value: Any, folder: Path) -> Any:
    """`value` as something that `==` compares, without the folder's name and what tells the time."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, dict):
        return {str(key).replace(str(folder), ""): _plain(item, folder) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, folder) for item in value]
    text = repr(value).replace(str(folder), "")
    return text.partition(" at 0x")[0]


def _checkpoints(folder: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(folder.glob("*.ckpt")):
        found[path.name] = _plain(torch.load(path, weights_only=False), folder)
    return found


def _pl_trainer(settings: dict[str, Any], trainer: Any, trace: Trace, folder: Path, own: bool) -> L.Trainer:
    callbacks = [CALLBACKS[name](trace, folder, n) for name, n in settings["callbacks"].items()]
    callbacks += [Sets(trace, kind, abs(n), validating=n < 0) for kind, n in settings["changes"].items()]
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    arguments = trainer.lightning_args() | {
        "logger": Memory(trace) if settings["logger"] else False,
        "callbacks": [trace, *callbacks],
        "enable_checkpointing": saves,
        "default_root_dir": folder,
    }
    pl_trainer = L.Trainer(**(arguments | settings["trainer"]))
    if own:
        use_own_loops(pl_trainer)
    return pl_trainer


def _fit(settings: dict[str, Any], folder: Path, own: bool) -> dict[str, Any]:
    """One `fit`: all that could differ."""
    trace, error = FullTrace(settings["reads"]), ""
    trainer: Any = None
    pl_trainer: Any = None
    _seed()
    try:
        trainer = make(settings, trace)
        module = trainer.as_lightning_module()
        _seed()
        pl_trainer = _pl_trainer(settings, trainer, trace, folder, own)
        valid = [make_valid(settings["n_valid"]) for _ in range(settings["valid"])]
        pl_trainer.fit(module, LOADERS[settings["loader"]](), valid or None)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    seen: dict[str, Any] = {"trace": trace.seen, "random": [torch.rand(3), random.random()]}
    if pl_trainer is not None:
        history = trainer.history
        seen |= {
            "loops": str(pl_trainer.fit_loop.state_dict()),
            "metrics": pl_trainer.callback_metrics,
            "logged": pl_trainer.logged_metrics,
            "bar": pl_trainer.progress_bar_metrics,
            "steps": pl_trainer.global_step,
            "weights": trainer.model.state_dict(),
            "optimizer": trainer.optimizer_states(),
            "counts": trainer.counts,
            "epochs": _rounded(without_times(history.epochs)),
            "validations": _rounded(without_times(history.validations)),
            "rows": {phase: {name: list(table[name]) for name in table.columns} for phase, table in history.steps.items()},
        }
    return {"error": error.replace(str(folder), ""), **{name: _plain(value, folder) for name, value in seen.items()}}


def _rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose means are compared: their last digit depends on when the batches were added up, which a clock decides."""
    return [{name: f"{value:.12g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows]


def _seed() -> None:
    torch.manual_seed(3)
    random.seed(3)


def run(settings: dict[str, Any], folder: Path, own: bool) -> dict[str, Any]:
    """A run, with its checkpoints."""
    folder.mkdir(parents=True)
    seen = _fit(settings, folder, own)
    seen["checkpoints"] = _checkpoints(folder)
    return seen


def difference(settings: dict[str, Any]) -> tuple[str, str]:
    """Where the two differ first, empty where they don't, and the error that Lightning raised.

    What nbtrain refuses, because Lightning computes something else than what was asked for, is not compared. Nor are the tables of metrics
    after an error: with nbtrain's loop they hold what the failed batch had logged, with Lightning's what the batch before had.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = run(settings, Path(folder) / "stock", own=False)
        own = run(settings, Path(folder) / "own", own=True)
    if own["error"].startswith("ConfigError: "):
        return "", stock["error"]
    for part in ("metrics", "logged", "bar") if stock["error"] else ():
        stock.pop(part)
    for part, value in stock.items():
        if (other := own.get(part)) != value:
            return f"{part}: {_first_difference(value, other)}", stock["error"]
    return "", stock["error"]


def _first_difference(stock: Any, own: Any) -> str:
    if isinstance(stock, list) and isinstance(own, list):
        pairs = [*zip(stock, own), *([(stock[len(own)], "nothing")] if len(stock) > len(own) else [])]
        pairs += [("nothing", own[len(stock)])] if len(own) > len(stock) else []
        at, (one, other) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        return f"[{at}] {_first_difference(one, other)}"
    if isinstance(stock, dict) and isinstance(own, dict):
        name = next(name for name in [*stock, *own] if stock.get(name) != own.get(name))
        return f"[{name}] {_first_difference(stock.get(name), own.get(name))}"
    return f"Lightning {str(stock)[:400]}\n      nbtrain {str(own)[:400]}"


USUAL: dict[str, Any] = {
    "steps": {
        "who": "one optimizer",
        "net": "dropout",
        "returns": "loss",
        "logs": [],
        "validation_logs_steps": False,
        "optimizer": "SGD",
        "schedule": None,
    },
    "loader": "shuffled",
    "valid": 1,
    "n_valid": 40,
    "callbacks": {},
    "logger": False,
    "options": {},
    "trainer": {"max_epochs": 2},
    "changes": {},
    "reads": None,
}


def _simpler(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part, value in settings.items():
        if not isinstance(value, dict):
            yield settings | {part: USUAL[part]}
            continue
        for name in value:
            rest = {other: item for other, item in value.items() if other != name}
            yield settings | {part: rest | ({name: USUAL[part][name]} if name in USUAL[part] else {})}


def shrink(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with as much as possible as usual, that still make a difference."""
    for simpler in _simpler(settings):
        if simpler != settings and difference(simpler)[0]:
            return shrink(simpler)
    return settings


def unusual(settings: dict[str, Any]) -> dict[str, Any]:
    """What is not as usual in `settings`."""
    found: dict[str, Any] = {}
    for part, value in settings.items():
        usual = USUAL[part]
        if isinstance(value, dict):
            value, usual = {name: item for name, item in value.items() if name not in usual or item != usual[name]}, {}
        if value != usual:
            found[part] = value
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("n", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--short", action="store_true", help="short epochs")
    args = parser.parse_args()
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found, errors = 0, Counter[str]()
    for seed in range(args.seed, args.seed + args.n):
        settings = draw_short(seed) if args.short else draw(seed)
        text, error = difference(settings)
        errors[error.partition("\n")[0][:90]] += 1
        if text:
            settings = shrink(settings)
            text, error = difference(settings)
        if text or args.n == 1:
            print(f"seed {seed}: {unusual(settings)}\n  raised: {error!r}\n  {text or 'no difference'}", flush=True)
        found += bool(text)
    print(f"{args.n} configurations, {found} differ. Raised on both: {dict(errors)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
