"""With every addon on, runs stay on the lean loops, end as on Lightning's own, and hold nothing of a batch when the next comes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from samples import Regress, make_loader, make_trainer, make_valid, same_weights, without_times
from test_addons import ADDONS

from nbtrain import SAMAddon, Trainer
from nbtrain.loops.batch_ways import is_plain

EveryAddon = Regress.add_on(*ADDONS)


class Users(Callback):
    """What a user may bring: it listens to each batch, and here it also looks whether the short way could be taken."""

    def __init__(self) -> None:
        self.n_batches = 0
        self.plain: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.n_batches += 1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.plain.append(is_plain(trainer))


def run(folder: Path, kind: type[Trainer], *, addons: Iterable[Any] = ADDONS, lean: bool = True, **options: Any) -> tuple[Any, Users]:
    users = Users()
    lightning = {"accumulate_grad_batches": 4, "callbacks": [EarlyStopping("val_loss", patience=9), users]}
    options |= {name: value for addon in addons for name, value in ADDONS[addon](folder).items()}
    trainer = make_trainer(kind, lightning=lightning, **options)
    trainer.short_way = lean
    torch.manual_seed(3)
    trainer.run(3, make_loader(), make_valid())
    return trainer, users


@pytest.mark.parametrize("precision", [None, pytest.param("bf16", marks=pytest.mark.long)])
def test_every_addon_together_has_the_same_outcome_on_both_ways(precision: str | None, tmp_path: Path) -> None:
    lean, users = run(tmp_path / "lean", EveryAddon, precision=precision)
    stock, others = run(tmp_path / "stock", EveryAddon, precision=precision, lean=False)
    assert users.plain == others.plain == [True] * 3
    assert users.n_batches == others.n_batches == 15
    assert same_weights(lean.model, stock.model) and without_times(lean.history.epochs) == without_times(stock.history.epochs)


class _Marker:
    pass


class _Marked(torch.autograd.Function):
    """Passes a tensor through; the marker lives as long as the graph."""

    @staticmethod
    def forward(ctx: Any, x: Any, marker: _Marker) -> Any:
        ctx.marker = marker
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Watched(Regress):
    """Looks in each step what is alive of the one before."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.refs: dict[str, weakref.ref[Any]] = {}
        self.alive: list[list[str]] = []

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.alive.append([name for name, ref in self.refs.items() if ref() is not None])
        marker = _Marker()
        found = super().train_step(batch)
        found = {name: _Marked.apply(value, marker) for name, value in found.items()}
        self.refs = {name: weakref.ref(value) for name, value in found.items()}
        self.refs |= {"x": weakref.ref(batch[0]), "y": weakref.ref(batch[1]), "graph": weakref.ref(marker)}
        return found


@pytest.mark.parametrize("n_addons", [0, len(ADDONS) - 1])
def test_nothing_of_a_step_is_alive_in_the_next(n_addons: int, tmp_path: Path) -> None:
    addons = [addon for addon in ADDONS if addon is not SAMAddon][:n_addons]  # which calls train_step twice for a batch
    gc.disable()  # it is gone at once, without a collector
    try:
        trainer, _ = run(tmp_path, Watched.add_on(*addons), addons=addons)
    finally:
        gc.enable()
    assert trainer.alive == [[]] * 24  # five training batches and three of validation, three times
    assert "output" not in trainer.log_train and len(trainer.log_train["mae"]) == 5  # a float for each batch is what is kept
