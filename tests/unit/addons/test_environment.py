"""Runs that are equal bit for bit, and the process they run in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from samples import Augmented, Regress, make_loader, make_model, make_trainer, without_times
from torch.utils.data import DataLoader

from nbtrain import EnvironmentAddon


def test_two_runs_with_workers_are_equal_bit_for_bit() -> None:
    outcomes = []
    for before in (1, 2):
        model = make_model()
        torch.manual_seed(before), np.random.seed(before)
        trainer = make_trainer(Regress.add_on(EnvironmentAddon), model=model, seed=9, deterministic=True)
        trainer.run(2, DataLoader(Augmented(), 16, shuffle=True, num_workers=2))
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        outcomes.append((weights, without_times(trainer.history.epochs)))
    assert outcomes[0] == outcomes[1]


def test_deterministic_algorithms_are_on_in_the_run_only() -> None:
    class Looks(Regress.add_on(EnvironmentAddon)):  # type: ignore[misc]
        fails = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            assert torch.are_deterministic_algorithms_enabled()
            if self.fails:
                raise RuntimeError("no")
            return super().train_step(batch)

    trainer = make_trainer(Looks, deterministic=True)
    trainer.run(1, make_loader())
    assert not torch.are_deterministic_algorithms_enabled()
    trainer.fails = True
    with pytest.raises(RuntimeError, match="no"):
        trainer.run(1, make_loader())
    assert not torch.are_deterministic_algorithms_enabled()


def test_init_env_fn_is_called_once_after_seeding() -> None:
    calls = []
    trainer = make_trainer(Regress.add_on(EnvironmentAddon), seed=3, init_env_fn=lambda owner: calls.append((owner, torch.initial_seed())))
    trainer.run(1, make_loader())
    trainer.run(1, make_loader())
    assert calls == [(trainer, 3)]
