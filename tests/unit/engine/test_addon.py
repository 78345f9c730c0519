"""What nbtrain asks of addons, each answered by an addon that a user writes in a few lines."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from samples import Regress, make_loader, make_model, make_trainer

from nbtrain import AddOnBase, ConfigError, MultiOptimizerTrainer


class Manual(Regress):
    automatic_optimization = False


class Alternating(MultiOptimizerTrainer, Regress):
    def train_step_0(self, batch: Any) -> dict[str, Any]:
        return super().train_step(batch)


class Bare(AddOnBase):
    excludes = frozenset({"by_hand", "several_optimizers"})


def test_addon_is_refused_where_it_does_not_work() -> None:
    with pytest.raises(ConfigError, match=r"Manual has automatic_optimization = False, which does not work with Bare\."):
        make_trainer(Manual.add_on(Bare))
    with pytest.raises(ConfigError, match=r"Several optimizers can't train with Bare\."):
        Alternating.add_on(Bare)(make_model(), "cpu", optimizers={"0": torch.optim.Adam})
    assert make_trainer(Regress.add_on(Bare)).run(1, make_loader()).status == "completed"


class Zeroed(L.Callback):
    """Makes all gradients zero."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class ZeroAddon(AddOnBase):
    shapes_updates = True

    def callbacks(self, trainer: Any) -> list[L.Callback]:
        return [Zeroed()]


class OtherAddon(ZeroAddon):
    shapes_updates = False


def _plain_model() -> torch.nn.Module:
    first, relu, _, last = make_model()
    return torch.nn.Sequential(first, relu, last)


def test_learning_rates_are_tried_with_the_addons_that_change_gradients() -> None:
    kinds = {"none": Regress, "zero": Regress.add_on(ZeroAddon), "other": Regress.add_on(OtherAddon)}
    trainers = {name: make_trainer(kind, model=_plain_model()) for name, kind in kinds.items()}
    loader = make_loader(shuffle=False)
    losses = {name: trainer.lr_find(loader, n_batches=20).losses for name, trainer in trainers.items()}
    assert losses["other"] == losses["none"] != losses["zero"]
    assert losses["zero"][:5] == losses["zero"][5:10]  # nothing is learned
