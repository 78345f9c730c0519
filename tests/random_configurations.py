"""Random configurations of Lightning's Trainer, each on its own loops and on the lean ones: everything that can be seen is the same.

    python tests/random_configurations.py 1000            # `make compare`: half an hour; the seeds 0 to 999
    python tests/random_configurations.py 150 --short     # many epochs of one batch
    python tests/random_configurations.py 1 --seed 417    # one of them again, with its settings and the first difference

Drawn are the module (what its step takes and returns, what it logs, its hooks), the net, optimizer and schedule, loaders, callbacks, and
the Trainer's limits, intervals, accumulation and precision. Compared are the trace of the hooks with what each could see, what loggers get,
the loops' counters, metrics, weights, optimizer states, rates, checkpoints, random numbers, errors, and a second run from a checkpoint of
the first.
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
from samples import make_data, make_loader, make_valid
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, RandomSampler
from torchmetrics import MeanMetric
from traced import Memory, StopAt, Stream, Trace, hooked_sgd

from nbtrain.loops.lean_loops import use_lean_loops


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


def _own_zero_grad(params: Any, module: Any) -> Any:
    optimizer = torch.optim.Adam(params, 1e-2)
    zero_grad = optimizer.zero_grad

    def noted(*args: Any, **kwargs: Any) -> None:
        module.trace.note("zero_grad", module.trainer.global_step)
        zero_grad(*args, **kwargs)

    optimizer.zero_grad = noted
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "SGD": lambda params, module: torch.optim.SGD(params, 1e-2),
    "momentum": lambda params, module: torch.optim.SGD(params, 1e-2, momentum=0.9, nesterov=True),
    "Adam": lambda params, module: torch.optim.Adam(params, 1e-2),
    "AdamW, two groups": lambda params, module: torch.optim.AdamW(
        [{"params": params[:2]}, {"params": params[2:], "lr": 1e-3, "weight_decay": 0.0}], 1e-2
    ),
    "NAdam": lambda params, module: torch.optim.NAdam(params, 1e-2),
    "ASGD": lambda params, module: torch.optim.ASGD(params, 1e-2),
    "Adagrad": lambda params, module: torch.optim.Adagrad(params, 1e-2),
    "LBFGS": lambda params, module: torch.optim.LBFGS(params, 0.01, max_iter=3),
    "hooks": hooked_sgd,
    "own zero_grad": _own_zero_grad,
    "no_grad step": lambda params, module: NoGradStep(params, 1e-2),
    "late grad": lambda params, module: LateGrad(params, 1e-2),
    "two evaluations": lambda params, module: Twice(params, 1e-2),
    "no rate": lambda params, module: NoRate(params),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 7),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=200, cycle_momentum=False),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
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
    """Adds hooks to the optimizer, or a callback, in mid-epoch."""

    def __init__(self, trace: Trace, what: str) -> None:
        self.trace, self.what = trace, what

    def on_train_batch_end(self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and self.what:
            trace, what = self.trace, self.what
            self.what = ""
            if what == "callback":
                trainer.callbacks.append(LambdaCallback(on_train_batch_start=lambda t, m, b, i: trace.note("late", i)))
            else:
                trainer.optimizers[0].register_step_pre_hook(lambda *_: trace.note("late hook", trainer.global_step))


class Raises(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_zero_grad(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("raised on purpose")


class Skips(Callback):
    """Ends its epoch before one batch."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> Any:
        pl_module.__dict__["skip_from"] = 3


CALLBACKS: dict[str, Callable[[Trace, Path, int], Any]] = {
    "early stopping": lambda trace, folder, n: EarlyStopping("v", patience=n % 3, min_delta=0.5),
    "early stopping in training": lambda trace, folder, n: EarlyStopping(
        "loss_seen", patience=1, strict=False, check_on_train_epoch_end=True
    ),
    "checkpoints by step": lambda trace, folder, n: ModelCheckpoint(
        folder, filename="s={step}", every_n_train_steps=1 + n % 5, save_top_k=-1, auto_insert_metric_name=False
    ),
    "best by v": lambda trace, folder, n: ModelCheckpoint(folder, filename="v={epoch}-{step}", monitor="v", save_top_k=2, save_last=True),
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
    "skips": lambda trace, folder, n: Skips(),
    "lambda": lambda trace, folder, n: LambdaCallback(on_before_optimizer_step=lambda t, m, o: trace.note("lambda", len(o.param_groups))),
}
_NEED_THE_STEP_VALUE = "best by a step's value"


# -- modules
class Sub(torch.Tensor):
    """A tensor subclass."""


class Drawn(L.LightningModule):
    """A module as the settings say. `trace` gets what it sees."""

    trace: Trace

    def __init__(self, settings: dict[str, Any], trace: Trace) -> None:
        super().__init__()
        self.settings, self.net, self.mean, self.seen = settings, _net(settings["net"]), MeanMetric(), MeanMetric()
        self.skip_from: int | None = settings["skip_from"]
        object.__setattr__(self, "trace", trace)
        signatures: dict[str, Any] = {
            "batch": lambda batch: self._train(batch, 0),
            "args": lambda *args: self._train(args[0], args[1]),
            "keywords": lambda batch, **kw: self._train(batch, kw.get("batch_idx", 0)),
        }
        if settings["signature"] in signatures:
            self.__dict__["training_step"] = signatures[settings["signature"]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._train(batch, batch_idx)

    def _train(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        loss = mse_loss(output, batch[1].to(output.dtype))
        self._log_all(self.settings["logs"], loss, batch_idx)
        returns = self.settings["returns"]
        if returns == "none sometimes" and batch_idx % 3 == 2:
            return None
        if returns == "subclass":
            return loss.as_subclass(Sub)
        return {"loss": loss, "extra": output.detach().mean(), "count": 3} if returns == "dict" else loss

    def _log_all(self, logs: list[dict[str, Any]], loss: torch.Tensor, batch_idx: int) -> None:
        for i, log in enumerate(logs):
            if log["when"] == "odd" and batch_idx % 2 == 0 or log["when"] == "first" and batch_idx > 0:
                continue
            options = {name: value for name, value in log.items() if name not in ("kind", "when")}
            if log["kind"] == "metric":
                self.mean.update(loss.detach())
                options.pop("reduce_fx")
                self.log(f"m{i}", self.mean, **options)
            else:
                value = {"loss": loss, "float": 0.5 + batch_idx, "int": batch_idx, "twice": 2 * loss.detach()}[log["kind"]]
                self.log(f"m{i}", value, **options)

    def on_train_epoch_start(self) -> None:
        self.seen.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.skip_from is not None and batch_idx >= self.skip_from else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            self.seen.update(outputs["loss"].float())

    def on_train_epoch_end(self) -> None:
        self.log("loss_seen", self.seen.compute() if self.seen.update_called else 0.0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        output = self.net(batch[0])
        loss = mse_loss(output, batch[1].to(output.dtype))
        self.log("v", loss, add_dataloader_idx=False) if dataloader_idx == 0 else self.log("w", loss)
        if self.settings["validation_logs_steps"]:
            self.log("v_of_step", loss, on_step=True, on_epoch=True)
        return loss if self.settings["validation_returns"] else None

    def configure_optimizers(self) -> Any:
        settings = self.settings
        optimizer = OPTIMIZERS[settings["optimizer"]](list(self.net.parameters()), self)
        if settings["schedule"] is None:
            return optimizer
        scheduler: dict[str, Any] = {"scheduler": SCHEDULES[settings["schedule"]](optimizer)}
        scheduler |= {"interval": settings["schedule_interval"], "frequency": settings["schedule_frequency"]}
        return {"optimizer": optimizer, "lr_scheduler": scheduler | {"monitor": "v", "strict": False}}


class WithHooks(Drawn):
    """The hooks around a step, too."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.trace.note("module", "on_before_zero_grad", self.global_step)

    def on_after_backward(self) -> None:
        self.trace.note("module", "on_after_backward", self.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.net[0].weight.grad  # pyright: ignore
        if gradient is not None:
            self.log("gradient", gradient.float().norm(), on_step=True)


# -- settings
def _draw_log(rng: random.Random) -> dict[str, Any]:
    log = {"kind": rng.choice(["loss", "twice", "float", "int", "metric"]), "when": rng.choice(["always", "always", "odd", "first"])}
    step, epoch = rng.choice([(step, epoch) for step in (None, True, False) for epoch in (None, True, False) if step is not False or epoch])
    log |= {"on_step": step, "on_epoch": epoch}
    log |= {
        "prog_bar": rng.random() < 0.3,
        "logger": rng.random() < 0.8,
        "reduce_fx": rng.choice(["mean", "mean", "mean", "max", "min", "sum"]),
    }
    return log | {"batch_size": rng.choice([None, None, 1, 5])}


def _draw_module(rng: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {"hooks": rng.random() < 0.3, "net": rng.choice(["dropout", "batch norm", "layer norm"])}
    settings |= {"returns": rng.choice(["loss", "loss", "dict", "none sometimes", "subclass"])}
    settings |= {"signature": rng.choice(["index", "index", "index", "batch", "args", "keywords"])}
    settings |= {"skip_from": rng.choice([None] * 7 + [2]), "logs": [_draw_log(rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))]}
    settings |= {"validation_logs_steps": rng.random() < 0.3, "validation_returns": rng.random() < 0.3}
    settings |= {"optimizer": rng.choice([*OPTIMIZERS, "Adam", "SGD", "momentum"])}
    schedules = [None] if settings["optimizer"] == "no rate" else [None, None, *SCHEDULES]
    settings |= {"schedule": rng.choice(schedules), "schedule_interval": rng.choice(["step", "epoch"])}
    return settings | {"schedule_frequency": rng.choice([1, 1, 2, 3])}


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
        "precision": (0.25, ["bf16-mixed", "bf16-true", "64-true", "16-true"]),
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
    module = _draw_module(rng)
    if "averaged weights" in callbacks and module["net"] == "batch norm":
        module["net"] = "dropout"  # Lightning makes an update in the pass for batch norm, with the gradients of the epoch before
    trainer = _draw_trainer(rng)
    changes = _draw_changes(random.Random(f"changes {seed}"))
    if {"stop", "early stopping", "stops"} & {*callbacks, *changes}:
        # A window that is open at the stop is finished, and a whole epoch is validated where any is: not so with Lightning's loop
        trainer.pop("accumulate_grad_batches", None)
        if trainer.get("check_val_every_n_epoch", 1) is not None:
            trainer.pop("val_check_interval", None)
        callbacks = [name for name in callbacks if name != "accumulation that changes"]
    if {"accumulates", "by hand"} & changes.keys():  # in an open window, in which Lightning's loop keeps old gradients, or its old end
        trainer.pop("accumulate_grad_batches", None)
    loader = rng.choice([*LOADERS, "shuffled", "shuffled"])
    if loader == "without length" and trainer.get("limit_train_batches") == 7:  # its epoch ends before, and is validated then
        trainer.pop("limit_train_batches")
    return {
        "module": module,
        "loader": loader,
        "valid": rng.choice([0, 1, 1, 1, 2]),
        "n_valid": 40,
        "callbacks": {name: rng.randrange(8) for name in callbacks},
        "logger": rng.random() < 0.6,
        "trainer": trainer,
        "more_epochs": rng.choice([0, 0, 1, 2]),
        "changes": changes,
    }


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


def _trainer(settings: dict[str, Any], trace: Trace, folder: Path, lean: bool, **more: Any) -> tuple[L.Trainer, Any]:
    callbacks = [CALLBACKS[name](trace, folder, n) for name, n in settings["callbacks"].items()]
    callbacks += [Sets(trace, kind, abs(n), validating=n < 0) for kind, n in settings["changes"].items()]
    options = {"num_sanity_val_steps": 0} | settings["trainer"] | more
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    pl_trainer = L.Trainer(
        accelerator="cpu",
        logger=Memory(trace) if settings["logger"] else False,
        callbacks=[trace, *callbacks],
        enable_checkpointing=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    return pl_trainer, use_lean_loops(pl_trainer) if lean else None


def _fit(settings: dict[str, Any], folder: Path, lean: bool, **more: Any) -> tuple[dict[str, Any], str]:
    """One `fit`: all that could differ, and why the lean loop stood aside."""
    trace = Trace()
    path = more.pop("ckpt_path", None)
    kind = WithHooks if settings["module"]["hooks"] else Drawn
    error, pl_trainer, loop = "", None, None
    module = kind(settings["module"], trace)
    torch.manual_seed(3)
    random.seed(3)
    try:
        pl_trainer, loop = _trainer(settings, trace, folder, lean, **more)
        valid = [make_valid(settings["n_valid"]) for _ in range(settings["valid"])]
        pl_trainer.fit(module, LOADERS[settings["loader"]](), valid or None, ckpt_path=path)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    seen: dict[str, Any] = {"trace": trace.seen}
    seen |= {"weights": module.state_dict(), "random": [torch.rand(3), random.random()]}
    if pl_trainer is not None:
        seen |= {
            "loops": str(pl_trainer.fit_loop.state_dict()),
            "metrics": pl_trainer.callback_metrics,
            "logged": pl_trainer.logged_metrics,
        }
        seen |= {"bar": pl_trainer.progress_bar_metrics, "steps": pl_trainer.global_step}
        seen |= {"optimizer": [optimizer.state_dict() for optimizer in pl_trainer.optimizers]}
    plain = {name: _plain(value, folder) for name, value in seen.items()} | {"error": error.replace(str(folder), "")}
    return plain, loop.stood_aside if loop is not None else ""


def run(settings: dict[str, Any], folder: Path, lean: bool) -> tuple[dict[str, Any], str]:
    """A run, and a second one from a checkpoint of the first where the settings say so."""
    folder.mkdir(parents=True)
    seen, aside = _fit(settings, folder, lean)
    seen["checkpoints"] = _checkpoints(folder)
    if settings["more_epochs"] and seen["checkpoints"]:
        path = folder / sorted(seen["checkpoints"])[settings["more_epochs"] * 5 % len(seen["checkpoints"])]
        (folder / "more").mkdir()
        more, _ = _fit(
            settings,
            folder / "more",
            lean,
            ckpt_path=path,
            max_epochs=settings["trainer"]["max_epochs"] + settings["more_epochs"],
            max_steps=-1,
        )
        seen |= {f"resumed {name}": value for name, value in more.items()}
    return seen, aside


def difference(settings: dict[str, Any]) -> tuple[str, str, str]:
    """Where the two differ first (empty: nowhere), why the lean loop stood aside, and the error that Lightning raised.

    What nbtrain refuses, because Lightning computes something else than what was asked for, is not compared. Nor are the tables of metrics
    after an error: with the lean loop they hold what the failed batch had logged, with Lightning's what the batch before had.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock, _ = run(settings, Path(folder) / "stock", lean=False)
        lean, aside = run(settings, Path(folder) / "lean", lean=True)
    if lean["error"].startswith("ConfigError: "):
        return "", lean["error"].partition("\n")[0], stock["error"]
    for run_ in ("", "resumed "):
        for part in ("metrics", "logged", "bar") if stock.get(f"{run_}error") else ():
            stock.pop(f"{run_}{part}", None)
    for part, value in stock.items():
        if (other := lean.get(part)) != value:
            return f"{part}: {_first_difference(value, other)}", aside, stock["error"]
    return "", aside, stock["error"]


def _first_difference(stock: Any, lean: Any) -> str:
    if isinstance(stock, list) and isinstance(lean, list):
        pairs = [*zip(stock, lean), *([(stock[len(lean)], "nothing")] if len(stock) > len(lean) else [])]
        pairs += [("nothing", lean[len(stock)])] if len(lean) > len(stock) else []
        at, (one, other) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        return f"[{at}] {_first_difference(one, other)}"
    if isinstance(stock, dict) and isinstance(lean, dict):
        name = next(name for name in [*stock, *lean] if stock.get(name) != lean.get(name))
        return f"[{name}] {_first_difference(stock.get(name), lean.get(name))}"
    return f"Lightning {str(stock)[:400]}\n      lean {str(lean)[:400]}"


USUAL: dict[str, Any] = {
    "module": _draw_module(random.Random(0))
    | {"hooks": False, "net": "dropout", "returns": "loss", "signature": "index", "skip_from": None, "logs": [], "optimizer": "SGD"}
    | {"validation_logs_steps": False, "validation_returns": False, "schedule": None},
    "loader": "shuffled",
    "valid": 1,
    "n_valid": 40,
    "callbacks": {},
    "logger": False,
    "trainer": {"max_epochs": 2},
    "more_epochs": 0,
    "changes": {},
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
    found, asides, errors = 0, Counter[str](), Counter[str]()
    for seed in range(args.seed, args.seed + args.n):
        settings = draw_short(seed) if args.short else draw(seed)
        text, aside, error = difference(settings)
        asides[aside] += 1
        errors[error[:90]] += 1
        if text:
            settings = shrink(settings)
            text, aside, error = difference(settings)
        if text or args.n == 1:
            print(f"seed {seed}: {unusual(settings)}\n  not lean: {aside!r}; raised: {error!r}\n  {text or 'no difference'}", flush=True)
        found += bool(text)
    print(f"{args.n} configurations, {found} differ. Lean: {asides.pop('', 0)}; not: {dict(asides)}. Raised on both: {dict(errors)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
