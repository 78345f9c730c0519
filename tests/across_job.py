"""A job of training as settings say, done to its end, or cut off and resumed. It is imported by two packages, so it has public names only.

What is drawn are the kinds below, by name. `life` is one process's share of a job: `resume_across` has it done by one package or the other.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from nbtrain import (
    AccumulationAddon,
    EarlyStoppingAddon,
    EMAAddon,
    LimitsAddon,
    MultiOptimizerTrainer,
    SeededLoader,
    StateManagerAddon,
    TensorLoader,
    Trainer,
)


# -- data
class Rows(Dataset[Any]):
    """`n` rows of five numbers with random noise, and a number to predict."""

    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x = self.x[i]
        return x + 0.1 * torch.randn(5) + 0.1 * random.random() + 0.1 * float(np.random.rand()), x.sum().reshape(1)


def _in_memory(n: int) -> TensorDataset:
    x = Rows(n).x
    return TensorDataset(x, x.sum(1, keepdim=True))


class Stream(IterableDataset[Any]):
    """Rows one after the other, without a length."""

    def __init__(self, n: int) -> None:
        self.data = Rows(n)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


def none_at_times(rows: list[Any]) -> Any:
    """A batch, or None for about a quarter of them."""
    batch = default_collate(rows)
    return None if float(batch[1].sum()) % 1 < 0.25 else batch


LOADERS: dict[str, Callable[[int, int, Any], Any]] = {  # of the number of rows, the size of a batch and the collate function
    "shuffled": lambda n, size, collate: DataLoader(_in_memory(n), size, shuffle=True, collate_fn=collate),
    "noisy": lambda n, size, collate: DataLoader(Rows(n), size, shuffle=True, collate_fn=collate),
    "in order": lambda n, size, collate: DataLoader(_in_memory(n), size, collate_fn=collate),
    "own generator": lambda n, size, collate: DataLoader(
        Rows(n), size, shuffle=True, generator=torch.Generator().manual_seed(2), collate_fn=collate
    ),
    "seeded samples": lambda n, size, collate: SeededLoader(Rows(n), size, collate_fn=collate),
    "of tensors": lambda n, size, collate: TensorLoader(_in_memory(n), batch_size=size, shuffle=True),
    "without length": lambda n, size, collate: DataLoader(Stream(n), size, collate_fn=collate),
}
VALID_LOADERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda collate: None,
    "in order": lambda collate: DataLoader(_in_memory(20), 8, collate_fn=collate),
    "shuffled": lambda collate: DataLoader(Rows(20), 8, shuffle=True, collate_fn=collate),
}


# -- models, optimizers and schedules
def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    middle = {"plain": nn.Identity(), "dropout": nn.Dropout(0.3), "batch norm": nn.BatchNorm1d(8)}[kind]
    return nn.Sequential(nn.Linear(5, 8), middle, nn.Tanh(), nn.Linear(8, 1))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda params: torch.optim.SGD(params, 0.02, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, 0.02),
    "AdamW, groups": lambda params: torch.optim.AdamW(
        [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim < 2], "lr": 0.001}], 0.02
    ),
}
SCHEDULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "none": lambda optimizer: {},
    "each epoch": lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.7)},
    "each batch": lambda optimizer: {"scheduler": StepLR(optimizer, 2, 0.9), "scheduler_step_on_batch": True},
    "cosine": lambda optimizer: {"scheduler": CosineAnnealingLR(optimizer, 3)},
    "plateau": lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)},
    "factory": lambda optimizer: {"scheduler": lambda optimizer, plan: LambdaLR(optimizer, lambda i: 1 / (1 + i / plan.total_steps))},
    "function": lambda optimizer: {"scheduler": lambda step: 0.02 * 0.95**step},
}


# -- steps
class Steps(Trainer):
    """Predicts one number. `skips`: the phases in which it leaves some batches out. `seen`: what it was called with."""

    skips: str | None
    seen: list[Any]

    def loss_of(self, output: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": mse_loss(output, y), "mae": (output - y).abs().mean()}

    def see(self, phase: str, batch: Any) -> bool:
        """Notes the batch. Returns whether it is left out."""
        x, y = batch
        self.seen.append([phase, float(x.double().sum())])
        return self.skips in (phase, "both") and float(y.sum()) % 1 > 0.7

    def train_step(self, batch: Any) -> dict[str, Any] | None:
        if self.see("train", batch):
            return None
        return self.loss_of(self.model(batch[0]), batch[1])

    def test_step(self, batch: Any) -> dict[str, Any] | None:
        if self.see("valid", batch):
            return None
        return self.loss_of(self.model(batch[0]), batch[1])


class ByHand(Steps):
    """Steps its optimizer in each second batch that it does not leave out, on the gradients of both."""

    automatic_optimization = False
    n_waiting = 0

    def train_step(self, batch: Any) -> dict[str, Any] | None:
        found = super().train_step(batch)
        if found is None:
            return None
        self.backward(found["loss"])
        self.n_waiting += 1
        if self.n_waiting == 2:
            self.optimizer.step()  # pyright: ignore[reportOptionalMemberAccess]
            self.optimizer.zero_grad()  # pyright: ignore[reportOptionalMemberAccess]
            self.n_waiting = 0
        return found


class InTurn(MultiOptimizerTrainer):
    """Two parts, each with an optimizer: the second one predicts what the first one leaves."""

    skips: str | None
    seen: list[Any]
    see = Steps.see

    def train_step_first(self, batch: Any) -> dict[str, Any] | None:
        if self.see("train", batch):
            return None
        return {"loss": mse_loss(self.model["first"](batch[0]), batch[1])}  # pyright: ignore[reportIndexIssue]

    def train_step_second(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.model["second"](x), y - self.model["first"](x))}  # pyright: ignore[reportIndexIssue]

    def test_step(self, batch: Any) -> dict[str, Any] | None:
        if self.see("valid", batch):
            return None
        x, y = batch
        return {"loss": mse_loss(self.model["first"](x) + self.model["second"](x), y)}  # pyright: ignore[reportIndexIssue]


WHO = ("one optimizer", "by hand", "two optimizers")


# -- what is seen, and what ends a life
class Memory(Logger):
    """Keeps what a logger gets, with the step it is given."""

    name, version = "memory", 0

    def __init__(self, entries: list[Any]) -> None:
        super().__init__()
        self.entries = entries

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.entries.append([step, {name: float(value) for name, value in sorted(metrics.items())}])

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Cut(RuntimeError):
    """Ends a life as a crash would."""


class Watches(L.Callback):
    """Notes the counters after each batch, and ends the life after the `at`-th one. `told`: what is seen of the life, by where."""

    def __init__(self, told: dict[str, list[Any]], how: str | None = None, at: int = 0) -> None:
        self.told, self.how, self.at = told, how, at
        self.n_until_cut: dict[str, int] = {}
        self.trainer: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        steps = [trainer.global_step, loop._batches_that_stepped, loop.batch_progress.total.ready]
        self.told["batches"].append([trainer.current_epoch, batch_idx, trainer.is_last_batch, *steps])
        if self.how is None or len(self.told["batches"]) != self.at:
            return
        self.n_until_cut = {name: len(entries) for name, entries in self.told.items()}
        if self.how == "error":
            raise Cut
        if self.how == "stop":
            self.trainer.stop()
        else:
            trainer.should_stop = True


# -- a job
def make(settings: dict[str, Any], folder: Path, watches: Watches) -> Any:
    """The trainer of a job, with the same weights in each process."""
    addons: list[Any] = [StateManagerAddon]
    options: dict[str, Any] = {"save_path": folder, "keep_source": False, "log_bar": False, "every_n_steps": settings["every"]}
    callbacks: list[Any] = [watches]
    if settings["accumulate"] != 1:
        addons.append(AccumulationAddon)
        accumulate = settings["accumulate"]
        options["accumulate"] = {int(update): n for update, n in accumulate.items()} if isinstance(accumulate, dict) else accumulate
    if limits := {name: value for name, value in settings["limits"].items() if value is not None}:
        addons.append(LimitsAddon)
        options |= limits
    if settings["early stopping"] == "nbtrain":
        addons.append(EarlyStoppingAddon)
        options |= {"patience": 1, "delta": 0.3}
    if settings["early stopping"] == "Lightning":
        monitor = "train_loss" if settings["valid"] == "none" else "val_loss"
        callbacks.append(EarlyStopping(monitor, patience=1, min_delta=0.3, check_on_train_epoch_end=settings["valid"] == "none"))
    if settings["averages"] == "SWA":
        callbacks.append(StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2))
    if settings["averages"] == "EMA":
        addons.append(EMAAddon)
        options["ema_decay"] = 0.9
    lightning = {"callbacks": callbacks, "logger": Memory(watches.told["logged"]), "log_every_n_steps": settings["log every"]}
    options |= {"gradient_clip": settings["clip"], "validate_on_save": settings["validates on save"], "lightning": lightning}
    trainer: Any = _of_kind(settings, addons, options)
    trainer.skips, trainer.seen = settings["skips"], watches.told["seen"]
    watches.trainer = trainer
    return trainer


def _of_kind(settings: dict[str, Any], addons: list[Any], options: dict[str, Any]) -> Any:
    model, make_optimizer, schedule = make_model(settings["net"]), OPTIMIZERS[settings["optimizer"]], SCHEDULES[settings["schedule"]]
    if settings["who"] == "two optimizers":
        parts = nn.ModuleDict({"first": model, "second": make_model("dropout")})
        optimizers: dict[str, Any] = {"first": make_optimizer(list(parts["first"].parameters()))}
        optimizers["second"] = torch.optim.Adam(parts["second"].parameters(), 0.01)
        schedules = {"first": StepLR(optimizers["first"], 1, 0.5), "second": StepLR(optimizers["second"], 2, 0.9)}
        more = {"optimizers": optimizers, "schedulers": None if settings["schedule"] == "none" else schedules}
        return InTurn.add_on(*addons)(parts, "cpu", **more, **options)
    optimizer = make_optimizer(list(model.parameters()))
    kind: Any = ByHand if settings["who"] == "by hand" else Steps
    return kind.add_on(*addons)(model, "cpu", optimizer=optimizer, **schedule(optimizer), **options)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def life(settings: dict[str, Any], folder: str, end: dict[str, Any] | None) -> dict[str, Any]:
    """Do the job in `folder` from where it is, to its end or until `end`. Returns all that must be equal, as plain values and text."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    resumes = any(Path(folder).glob("run-*/checkpoints/epoch=*"))
    told: dict[str, list[Any]] = {"seen": [], "batches": [], "logged": []}
    watches = Watches(told, **end or {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(settings, Path(folder), watches)
        _seed(9 if resumes else 1)
        collate = none_at_times if settings["none"] else default_collate
        loader = LOADERS[settings["loader"]](settings["n"], settings["size"], collate)
        found: dict[str, Any] = {"error": ""}
        try:
            result = trainer.run(settings["n_epoch"], loader, VALID_LOADERS[settings["valid"]](collate), resume="auto")
            found["status"] = [result.status, result.reason]
        except Cut:
            pass
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]  # what to do is said in other words today
    found |= {"told": told, "n_until_cut": watches.n_until_cut}
    if end is None:
        found["outcome"] = outcome(trainer, Path(folder))
    return found


_TIMES = ("time_s", "wait_share", "samples_per_s", "tokens_per_s")


def outcome(trainer: Any, folder: Path) -> dict[str, Any]:
    """How a job ends, as text that shows all digits."""
    history = trainer.history
    rows = {"epochs": history.epochs, "validations": history.validations, "best": [history.best]}
    found: dict[str, Any] = {
        name: [{key: _rounded(value) for key, value in (row or {}).items() if not key.endswith(_TIMES)} for row in table]
        for name, table in rows.items()
    }
    found |= {"steps": {phase: _text({name: list(table[name]) for name in table.columns}) for phase, table in history.steps.items()}}
    found |= {"weights": _text(trainer.model.state_dict()), "best weights": _text(trainer.best_weights)}
    found |= {"optimizer": _text(trainer.optimizer_states()), "counts": repr(trainer.counts)}
    found |= {"random": repr([torch.rand(3).tolist(), random.random(), float(np.random.rand())])}
    if trainer.run_dir is not None and (last := Path(trainer.run_dir, "checkpoints", "last.ckpt")).exists():
        saved = torch.load(last, weights_only=False)
        saved["callbacks"].get("_Step", {}).get("begin", {}).pop("scheduled", None)  # which the package of before has, too
        found |= {"loops": _text(saved["loops"]), "callbacks": _text(saved["callbacks"]), "saved weights": _text(saved["state_dict"])}
        found |= {"schedules": _text(saved["lr_schedulers"])}
    return found


def _rounded(value: Any) -> str:
    """A number of a row; the last digit of a mean depends on when its batches were added up, which a clock decides."""
    return f"{value:.12g}" if isinstance(value, float) else repr(value)


def _text(value: Any) -> Any:
    """`value` with everything as text, and each text where a person can find it."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        return {str(key): _text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_text(item) for item in value]
    return repr(value).partition(" at 0x")[0]


if __name__ == "__main__":
    sys.exit("This module is imported by tests/resume_across.py.")
