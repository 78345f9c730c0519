"""Statistics of gradients and activations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from samples import Regress, make_data, make_loader, make_model, make_trainer, same_weights
from torch.nn.functional import mse_loss

from nbtrain import ConfigError, GradientStatsAddon


def test_statistics_are_those_of_the_batch_and_the_training_is_not_touched() -> None:
    trainer = make_trainer(Regress.add_on(GradientStatsAddon), model=make_model().eval(), stats_every_n_steps=3)
    plain, model = make_trainer(model=make_model()), make_model()
    x, y = make_data(64).tensors
    model[2].p = plain.model[2].p = trainer.model[2].p = 0.0
    for one in (trainer, plain):
        one.run(1, list(zip(x.split(16), y.split(16))))
    assert same_weights(plain.model, trainer.model)
    hidden = model[0](x[:16])
    mse_loss(model(x[:16]), y[:16]).backward()
    steps = trainer.history.steps["train"]
    norm = torch.cat([p.grad.flatten() for p in model[0].parameters()]).norm()
    assert steps["train_grad_norm.0"][0] == pytest.approx(norm.item(), rel=1e-5)
    assert steps["train_act_std.0"][0] == pytest.approx(hidden.std().item(), rel=1e-5)
    assert steps["train_act_zeros.1"][0] == pytest.approx((hidden <= 0).float().mean().item())
    assert [math.isnan(value) for value in steps["train_grad_norm.0"]] == [False, True, True, False]
    assert "train_grad_norm.1" not in steps.columns and not trainer.model[0]._forward_hooks


def test_depth_chooses_the_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)), torch.nn.Linear(4, 1))
    trainer = make_trainer(Regress.add_on(GradientStatsAddon), model=model, stats_depth=2)
    trainer.run(1, make_loader())
    assert {name for name in trainer.history.last if name.startswith("train_grad_norm")} == {
        f"train_grad_norm.{name}" for name in ("0.0", "0.1", "1")
    }


def test_hooks_are_gone_after_an_error() -> None:
    class Fails(Regress.add_on(GradientStatsAddon)):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, Any]:
            raise RuntimeError("no")

    trainer = make_trainer(Fails)
    with pytest.raises(RuntimeError):
        trainer.run(1, make_loader())
    assert not any(part._forward_hooks for part in trainer.model.modules())
    with pytest.raises(ConfigError, match="stats_depth=0"):
        make_trainer(Regress.add_on(GradientStatsAddon), stats_depth=0)
