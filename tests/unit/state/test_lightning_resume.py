"""A LightningModule in `from_lightning` is resumed exactly: all forms of schedules, metrics logged as objects, hooks of an epoch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from resume_cases import exact
from samples import DEVICE, make_loader, make_model, make_valid, some, without_times
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from nbtrain import StateManagerAddon, Trainer


class Lit(L.LightningModule):
    """Logs metrics as objects, some of them in some batches, and counts in its hooks."""

    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net: Any = make_model()
        self.schedule = schedule
        self.mse, self.first, self.val_mse = MeanSquaredError(), MeanAbsoluteError(), MeanSquaredError()
        self.both = MetricCollection([MeanAbsoluteError(), MeanSquaredError()], prefix="both_")
        self.n_begun, self.n_ended, self.hidden = 0, 0, torch.zeros(1, device=DEVICE)

        self.rates: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.n_begun, self.hidden = self.n_begun + 1, torch.zeros(1, device=DEVICE)

    def on_train_batch_end(self, *args: Any) -> None:  # after the hooks of all callbacks
        self.n_ended += 1

    def loss(self, batch: Any, i: int) -> torch.Tensor:
        x, y = batch
        output = self.net(x) + 0.1 * self.hidden + 0.01 * self.n_ended
        self.hidden = 0.5 * self.hidden + output.detach().mean()
        loss = mse_loss(output, y)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("mse", self.mse(output, y) * 0 + loss, on_step=True, on_epoch=True)
        self.log("mse_object", self.mse, on_step=True, on_epoch=True)
        self.first.update(output, y)
        if i == 0:
            self.log("first", self.first, on_step=False, on_epoch=True)
        self.both.update(output, y)
        self.log_dict(self.both, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_mse.update(self.net(batch[0]), batch[1])
        self.log("val_mse", self.val_mse)

    def configure_optimizers(self) -> Any:
        return self.schedule(Adam(self.parameters(), lr=1e-2))


class ByHand(Lit):
    """Steps its optimizer and its schedules by hand."""

    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        super().__init__(schedule)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch, batch_idx))
            optimizer.step()
        for scheduler in self._schedulers():
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()

    def on_train_epoch_end(self) -> None:
        for scheduler in self._schedulers():
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(self.trainer.callback_metrics["val_mse"])

    def _schedulers(self) -> list[Any]:
        found: Any = self.lr_schedulers() or []
        return found if isinstance(found, list) else [found]


class Halves(ByHand):
    """Trains each half of the net with its own optimizer and schedule."""

    def configure_optimizers(self) -> Any:
        a, b = Adam(self.net[0].parameters(), lr=1e-2), SGD(self.net[3].parameters(), lr=1e-2, momentum=0.9)
        return [a, b], [StepLR(a, 2, 0.9), {"scheduler": plateau(b), "monitor": "val_mse"}]


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.7)


def one(scheduler: Any, **options: Any) -> dict[str, Any]:
    return {"optimizer": scheduler.optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "a plateau of a validation": lambda o: one(plateau(o), monitor="val_mse", strict=False),
    "a plateau of a training metric": lambda o: one(plateau(o), monitor="mse_object_epoch"),
    "a plateau by step": lambda o: one(plateau(o), monitor="mse", interval="step"),
    "a plateau by every second step": lambda o: one(plateau(o), monitor="val_mse", interval="step", frequency=2, strict=False),
    "a plateau by every second epoch": lambda o: one(plateau(o), monitor="val_mse", frequency=2, strict=False),
    "by step": lambda o: one(CosineAnnealingLR(o, 40), interval="step"),
    "by every third step": lambda o: one(ExponentialLR(o, 0.9), interval="step", frequency=3),
    "by every second epoch": lambda o: one(ExponentialLR(o, 0.9), frequency=2),
    "one cycle": lambda o: one(OneCycleLR(o, 0.05, total_steps=40), interval="step"),
    "by step, and a plateau": lambda o: (
        [o],
        [{"scheduler": ExponentialLR(o, 0.97), "interval": "step"}, {"scheduler": plateau(o), "monitor": "val_mse", "strict": False}],
    ),
    "by epoch, and a plateau": lambda o: ([o], [StepLR(o, 1, 0.9), {"scheduler": plateau(o), "monitor": "val_mse", "strict": False}]),
    "none": lambda o: o,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    ", validated within the epoch": {"val_check_interval": 2},
    ", validated every second epoch": {"check_val_every_n_epoch": 2},
    ", accumulated": {"accumulate_grad_batches": 2},
}
CASES = {f"{name}{setting}": (Lit, name, options) for name in SCHEDULES for setting, options in SETTINGS.items()}
CASES |= {f"by hand: {name}": (ByHand, name, {}) for name in SCHEDULES}
CASES |= {f"by hand, two optimizers{setting}": (Halves, "none", SETTINGS[setting]) for setting in [*SETTINGS][:2]}


def make(kind: type[Lit], schedule: str, folder: Path, seed: int, **lightning: Any) -> Any:
    torch.manual_seed(0)
    module = kind(SCHEDULES[schedule])
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    options = {"device": DEVICE, "log_bar": False, "keep_source": False, "every_n_steps": 1, "monitor": "mse_epoch", "monitor_mode": "min"}
    return Trainer.add_on(StateManagerAddon).from_lightning(module, save_path=folder, lightning=lightning, **options)


def outcome(trainer: Any) -> dict[str, Any]:
    history, module = trainer.history, trainer.model
    return {
        "weights": exact(module.state_dict()),
        "optimizers and schedules": exact(trainer.configured.state_dict()),
        "rates": module.rates,
        "counted in hooks": (module.n_begun, module.n_ended, exact(module.hidden)),
        "epochs": repr(without_times(history.epochs)),
        "validations": repr(without_times(history.validations)),
        "steps": repr({phase: {name: list(table[name]) for name in table.columns} for phase, table in history.steps.items()}),
        "counts": repr(trainer.counts),
        "random": torch.rand(3).tolist(),
    }


@pytest.mark.parametrize("name", some(CASES, 15, first=1))
def test_module_is_resumed_at_any_save_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    kind, schedule, setting = CASES[name]
    whole = make(kind, schedule, tmp_path / "whole", 1, **setting)
    whole.run(3, make_loader(), make_valid())
    expected, of_epochs = outcome(whole), [row.path for row in whole.history.epochs]
    within = [path for path in sorted((whole.run_dir / "checkpoints").glob("epoch=*-step=*")) if path not in of_epochs]
    for path in (of_epochs[0], random.Random(name).choice(within)):
        again = make(kind, schedule, tmp_path / "again", 2, **setting)
        again.run(3, make_loader(), make_valid(), resume=path)
        resumed = outcome(again)
        assert [part for part in expected if resumed[part] != expected[part]] == [], path.name
