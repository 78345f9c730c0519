"""Statistics of gradients and activations, and the speed of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from samples import Regress, make_data, make_loader, make_model, make_trainer, make_valid, same_weights
from torch.nn.functional import mse_loss

from nbtrain import ConfigError, GradientStatsAddon, ThroughputAddon


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


def test_speed_is_that_of_the_clock_without_validations() -> None:
    now = [0.0]

    class Ticking(Regress.add_on(ThroughputAddon)):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, Any]:
            now[0] += 3.0
            return super().train_step(batch)

        def test_step(self, batch: Any) -> dict[str, Any]:
            now[0] += 100.0
            return Regress.train_step(self, batch)

    class Waiting:
        def __iter__(self) -> Any:
            for x, y in make_loader(64):
                now[0] += 1.0
                yield x, y

    trainer = make_trainer(Ticking, count_tokens=lambda batch: batch[0].numel(), lightning={"val_check_interval": 2})
    trainer[ThroughputAddon].clock = lambda: now[0]
    trainer.run(2, list(make_loader(64)), make_valid())
    row = trainer.history.last
    assert (row["train_samples_per_s"], row["train_step_time_s"], row["train_data_wait"]) == (64 / 12, 3.0, 0.0)
    assert row["train_tokens_per_s"] == 8 * row["train_samples_per_s"]
    trainer = make_trainer(Ticking)
    trainer[ThroughputAddon].clock = lambda: now[0]
    trainer.run(1, Waiting())
    assert trainer.history.last["train_data_wait"] == pytest.approx(0.25, abs=0.06) and "train_tokens_per_s" not in trainer.history.last
