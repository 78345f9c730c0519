"""Small jobs that use much of nbtrain, each as a digest of all its numbers: what a change must leave as it is, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from samples import Breaks, Broken, Regress, make_data, make_loader, make_trainer, make_valid, without_times
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ConstantLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from nbtrain import (
    AccumulationAddon,
    EMAAddon,
    FreezeAddon,
    LoggersAddon,
    MetricsAddon,
    MultiOptimizerTrainer,
    RunPaused,
    StateManagerAddon,
    Trainer,
)


def digest(values: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(value.detach().cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()[:16]


def _all_of(trainer: Trainer, *more: Any) -> str:
    return digest([*trainer.model.state_dict().values(), without_times(trainer.history.epochs), trainer.current_step, *more])


def _batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def _warm_up(optimizer: Optimizer, plan: Any) -> SequentialLR:
    return SequentialLR(optimizer, [ConstantLR(optimizer), StepLR(optimizer, 1)], [2])


def saved(folder: Path) -> str:
    """Trained with clipping, a schedule, windows and averages; broken off in mid-epoch, resumed, evaluated, and used."""
    kind = Regress.add_on(StateManagerAddon, EMAAddon, AccumulationAddon, FreezeAddon, LoggersAddon, MetricsAddon)

    def made(**more: Any) -> Any:
        schedule = {"scheduler": _warm_up, "gradient_clip": 0.5, "seed": 3}
        addons = {"accumulate": 2, "freeze": {"0": 1}, "every_n_steps": 1, "loggers": ["csv", "tensorboard"], "metrics": MeanSquaredError()}
        return make_trainer(kind, model=_batch_norm(), save_path=folder, **schedule, **addons, **more)

    with suppress(Broken):
        made(lightning={"callbacks": [Breaks(8)]}).run(2, make_loader(), make_valid())
    trainer = made()
    trainer.run(2, make_loader(), make_valid(), resume="auto")
    return _all_of(trainer, trainer.evaluate(make_valid()), trainer.predict(make_data().tensors[0]))


def plain(folder: Path) -> str:
    """Trained without anything more, paused, continued, and rewound."""
    pauses = [7]  # not an attribute, which a rewind would restore

    class Pauses(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.progress_checker.get_step() in pauses:
                pauses.clear()
                self.pause()
            return super().train_step(batch)

    trainer = make_trainer(Pauses, scheduler=lambda o, plan: OneCycleLR(o, 0.1, 20), keep_states=True, save_path=folder)
    with suppress(RunPaused):
        trainer.run(2, make_loader(own_generator=True), make_valid(), background=True).wait()
    trainer.resume()
    trainer.rewind(epoch=1)
    trainer.run(1, make_loader(own_generator=True), make_valid())
    return _all_of(trainer, trainer.run_batch(next(iter(make_valid()))), trainer.inference(make_valid()))


class Lit(BoringModel):
    """Logs its losses, of steps and of epochs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("double", 2 * loss.item(), prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self(batch).square().mean())


def module(folder: Path) -> str:
    """A LightningModule, under nbtrain; with nbtrain's loops, too, which Lightning's stand for."""
    found = list[Any]()
    for is_lean in (False, True):
        torch.manual_seed(0)
        trainer: Any = Trainer.from_lightning(Lit(), device="cpu", log_bar=False, save_path=folder)
        trainer.short_way = is_lean
        rows: Any = torch.arange(640.0).view(20, 32) / 640
        loader = DataLoader(rows, 4)
        trainer.run(2, loader, loader)
        found.append(_all_of(trainer, trainer.evaluate(loader)))
    return digest(found)


class Two(MultiOptimizerTrainer):
    """Two optimizers, which step in turn."""

    def train_step_first(self, batch: Any) -> dict[str, Any]:
        model: Any = self.model
        return {"loss": mse_loss(model["second"](model["first"](batch[0])), batch[1])}

    def train_step_second(self, batch: Any) -> dict[str, Any]:
        return self.train_step_first(batch)


def two(folder: Path) -> str:
    """Two optimizers."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(8, 4), "second": nn.Linear(4, 1)})
    trainer: Any = Two(model, "cpu", optimizers={"first": partial(SGD, lr=0.01), "second": Adam}, log_bar=False, save_path=folder)
    trainer.run(2, make_loader())
    return _all_of(trainer)


JOBS: dict[str, Callable[[Path], str]] = {"saved": saved, "plain": plain, "module": module, "two": two}
