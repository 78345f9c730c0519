"""Two ranks by the short way, and by the public calls of Lightning's strategy and precision: the same weights, metrics and counts."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from samples import Regress, make_loader, make_trainer, make_valid, same_weights, without_times
from torch import nn

from nbtrain import MultiGPUAddon
from nbtrain.loops.batch_ways import is_plain


class Watched(Regress):
    """Its metrics say whether the short way could be taken."""

    def metric_on_epoch_end(self) -> dict[str, Any]:
        return {"plain": is_plain(self.module.trainer)}


def make_normed() -> nn.Module:
    """With batch norm, whose buffers rank 0 gives to the others, and dropout, which differs by rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"lightning": {"accumulate_grad_batches": 2}},
    "clipping and bf16": {"gradient_clip": 0.1, "precision": "bf16"},
    "validation in mid-epoch": {"lightning": {"val_check_interval": 2}},
    "a schedule": {"scheduler": lambda step: 1e-2 * 0.9**step},
    "early stopping": {"lightning": {"callbacks": [EarlyStopping("val_loss", patience=1, min_delta=1e9)]}},
    "limited batches": {"lightning": {"limit_train_batches": 3, "limit_val_batches": 1}},
    "unused parameters": {"strategy": "ddp_find_unused_parameters_true"},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_the_same_on_both_ways(case: str) -> None:
    ended = []
    for is_short in (True, False):
        kind = type("Watched", (Watched,), {"short_way": is_short, "__module__": __name__})
        trainer = make_trainer(kind.add_on(MultiGPUAddon), model=make_normed(), device=["cpu", "cpu"], seed=1, **deepcopy(CASES[case]))
        trainer.run(3, make_loader(batch_size=8), make_valid())
        assert all(row.pop("train_plain") and row.pop("val_plain") for row in trainer.history.epochs)
        ended.append(trainer)
    assert same_weights(ended[0].model, ended[1].model)
    assert without_times(ended[0].history.epochs) == without_times(ended[1].history.epochs)
    assert vars(ended[0].counts) == vars(ended[1].counts)
