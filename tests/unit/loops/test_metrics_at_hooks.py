"""What a callback reads from `trainer.callback_metrics` at a hook is what it reads there with a LightningModule of the same steps."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid
from torch import nn
from torch.nn.functional import mse_loss

NAMES = ("train_loss", "val_loss")


class Reads(L.Callback):
    """Reads the metrics in one hook only: what was read before may be what is read then."""

    def __init__(self, hook: str) -> None:
        self.seen: list[dict[str, float]] = []
        setattr(self, hook, self.read)

    def read(self, trainer: Any, *args: Any, **options: Any) -> None:
        self.seen.append({name: round(float(trainer.callback_metrics[name]), 5) for name in NAMES if name in trainer.callback_metrics})


class Module(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 1e-2)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


@pytest.mark.parametrize("val_check_interval", [1.0, 2])
@pytest.mark.parametrize(
    "hook",
    [
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_batch_end",
        "on_validation_epoch_end",
        "on_validation_end",
        "on_train_epoch_end",
    ],
)
def test_a_callback_reads_the_metrics_of_lightning(hook: str, val_check_interval: Any) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    of_lightning, ours = Reads(hook), Reads(hook)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    quiet |= {"max_epochs": 2, "accelerator": "cpu", "val_check_interval": val_check_interval, "num_sanity_val_steps": 1}
    L.Trainer(**quiet, callbacks=[of_lightning]).fit(Module(_net()), make_loader(own_generator=True), make_valid())
    options: dict[str, Any] = {"callbacks": [ours], "val_check_interval": val_check_interval}
    trainer = make_trainer(Regress, model=_net(), device="cpu", lightning=options)
    trainer.run(2, make_loader(own_generator=True), make_valid())
    assert ours.seen == of_lightning.seen
