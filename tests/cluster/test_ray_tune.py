"""Sweeps on a real Ray cluster of two nodes, which this machine pretends to be: trials, pruning, an interrupt, errors, a lost process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import tune
from ray_nodes import two_nodes
from samples import Regress, make_loader, make_model, make_trainer, make_valid

import nbtrain
from nbtrain import ConfigError, sweep

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes() as made:
        yield made.address


def make(lr: float) -> Any:
    return make_trainer(seed=1, model=make_model(), optimizer=partial(torch.optim.Adam, lr=lr))


def run_here(lr: float, n_epoch: int = 3) -> Any:
    trainer = make(lr)
    trainer.run(n_epoch, make_loader(), make_valid())
    return trainer


def test_trials_are_runs_as_here_and_the_best_weights_come_back(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep(make, {"lr": [0.1, 0.001]}, 3, make_loader(), make_valid(), address=address)
    here = [run_here(lr) for lr in (0.1, 0.001)]
    by_lr = {entry.settings["lr"]: entry for entry in found}
    assert [entry.status for entry in found] == ["completed"] * 2 and found.errors == {} and sorted(by_lr) == ["0.001", "0.1"]
    best = min(here, key=lambda trainer: trainer.history.best["val_loss"])
    assert found.best is not None and found.best.best["val_loss"] == best.history.best["val_loss"]
    assert found.best_values == {"lr": 0.1 if best is here[0] else 0.001}
    assert all(torch.equal(found.best_weights[name], tensor) for name, tensor in best.best_weights.items())
    assert "trial 1 · lr 0." in capsys.readouterr().out and len(nbtrain.runs()[-2:]) == 2
    assert all(entry.card.board.epochs[-1]["epoch"] == 3 for entry in found)


def test_a_scheduler_of_tune_ends_worse_trials_which_are_marked(address: str) -> None:
    scheduler = tune.schedulers.ASHAScheduler(max_t=6, grace_period=1, reduction_factor=2)
    space = {"lr": tune.grid_search([0.05, 1e-7, 1e-8, 1e-9])}
    found = sweep(make, space, 6, make_loader(), make_valid(), address=address, scheduler=scheduler, cpus_per_trial=4 / 2)
    pruned = [entry for entry in found if entry.tags == ("pruned",)]
    assert pruned and all(entry.status == "stopped" and entry.card.board.progress.epoch < 6 for entry in pruned)
    assert found.best is not None and found.best.status == "completed" and found.best.settings["lr"] == "0.05"
    assert "pruned" in repr(found) and found.best_weights is not None


def test_an_interrupt_ends_the_sweep_which_returns_what_it_has_found(address: str, tmp_path: Path) -> None:
    class Slow(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.epoch == 2:
                (tmp_path / str(os.getpid())).touch()
            time.sleep(0.02)
            return super().train_step(batch)

    def make_slow(lr: float) -> Any:
        return make_trainer(Slow, model=make_model(), optimizer=partial(torch.optim.Adam, lr=lr))

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    found = sweep(make_slow, {"lr": [0.1, 0.01]}, 100_000, make_loader(), make_valid(), address=address)
    assert [(entry.status, entry.card.board.reason, entry.tags) for entry in found] == [("stopped", "with the sweep", ())] * 2
    assert found.best_weights is not None and found.best is not None


def test_the_error_of_a_trial_is_its_own_and_the_others_continue(address: str) -> None:
    class Raising(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            raise LookupError("no step")

    def make_one(kind: str) -> Any:
        return make_trainer(Raising if kind == "bad" else Regress)

    found = sweep(make_one, {"kind": ["bad", "good"]}, 1, make_loader(), make_valid(), address=address)
    ((name, error),) = found.errors.items()
    assert isinstance(error, LookupError) and 'raise LookupError("no step")' in str(error.__cause__)
    assert {entry.settings["kind"]: entry.status for entry in found} == {"bad": "failed", "good": "completed"}
    with pytest.raises(LookupError, match="no step"):
        sweep(make_one, {"kind": ["bad"]}, 1, make_loader(), make_valid(), address=address)


def test_a_lost_trial_begins_again(address: str, tmp_path: Path) -> None:
    class Dying(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.epoch == 1 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step(batch)

    found = sweep(lambda seed: make_trainer(Dying, seed=seed), {"seed": [1]}, 3, make_loader(), make_valid(), address=address)
    assert found[0].status == "completed" and found[0].note == "was lost, and began again" and (tmp_path / "died").exists()
    here = make_trainer(seed=1)
    here.run(3, make_loader(), make_valid())
    assert found[0].best["val_loss"] == here.history.best["val_loss"]


def test_what_a_sweep_can_not_do_is_said_before_a_trial(address: str) -> None:
    arguments = (1, make_loader(), make_valid())
    population = tune.schedulers.PopulationBasedTraining(hyperparam_mutations={"lr": [0.1]})
    with pytest.raises(ConfigError, match="PopulationBasedTraining is not taken"):
        sweep(make, {"lr": [0.1]}, *arguments, scheduler=population, address=address)
    with pytest.raises(ConfigError, match=r"room for 0 of 1 trials: each needs 8 CPU.\n  Its nodes have .*\n  Give less for each trial"):
        sweep(make, {"lr": [0.1]}, *arguments, cpus_per_trial=8, address=address)
    with pytest.raises(ConfigError, match="The trainer has monitor='val_loss', and the sweep 'train_loss'"):
        sweep(make, {"lr": [0.1]}, *arguments, monitor="train_loss", address=address)
