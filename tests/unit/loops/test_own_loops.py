"""nbtrain's loop, where a drawn configuration does not look: what is due when, what runs out, where an epoch begins."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import SingleDeviceStrategy
from samples import ONE_DEVICE, Regress, make_loader, make_trainer, make_valid, same_weights
from torch import nn
from torch.nn.functional import mse_loss

from nbtrain.errors import StepError
from nbtrain.loops.own_loops import unknown_version, use_own_loops
from nbtrain.loops.training import OwnEpochLoop


# -- what is due
def validates(kind: type[_TrainingEpochLoop], drawn: dict[str, Any]) -> bool:
    """Whether this kind of loop validates in a place that was drawn."""
    pl_trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    loop: Any = kind(pl_trainer)
    loop.validates = True
    loop.batch_progress.current.ready, loop.batch_progress.total.ready = drawn["n_in_epoch"], drawn["n_in_run"]
    loop.batch_progress.is_last_batch = drawn["is_last"]
    loop.trainer = SimpleNamespace(
        enable_validation=True,
        should_stop=False,
        current_epoch=drawn["epoch"],
        fit_loop=pl_trainer.fit_loop,
        check_val_every_n_epoch=drawn["every_n_epochs"],
        val_check_batch=drawn["every_n_batches"],
        limit_train_batches=1.0,
        _val_check_time_interval=None,
    )
    pl_trainer.fit_loop.epoch_progress.current.completed = drawn["epoch"]
    return any(loop.find_validation()) if isinstance(loop, OwnEpochLoop) else loop._should_check_val_fx(None)


def test_a_validation_is_due_when_lightning_validates() -> None:
    rng, n_due = random.Random(0), 0
    for _ in range(400):
        n_in_epoch = rng.randint(1, 12)
        drawn = {
            "n_in_epoch": n_in_epoch,
            "n_in_run": n_in_epoch + 12 * rng.randint(0, 3),
            "is_last": rng.random() < 0.3,
            "epoch": rng.randint(0, 5),
            "every_n_epochs": rng.choice([None, 1, 1, 2, 3]),
            "every_n_batches": rng.choice([math.inf, 1, 2, 3, 5, 12]),
        }
        due = validates(OwnEpochLoop, drawn)
        n_due += due
        assert due == validates(_TrainingEpochLoop, drawn), drawn
    assert 100 < n_due < 300


# -- what callbacks see
def test_metrics_of_a_validation_are_there_in_all_hooks_of_its_end_and_in_the_first_one() -> None:
    seen: list[tuple[str, float]] = []
    hooks = ("on_validation_epoch_end", "on_validation_end")
    looks = {name: lambda t, m, name=name: seen.append((name, float(t.callback_metrics["val_loss"]))) for name in hooks}
    trainer = make_trainer(lightning={"callbacks": [LambdaCallback(**looks)], "num_sanity_val_steps": 0})
    trainer.run(3, make_loader(), make_valid())
    assert seen == [(name, pytest.approx(row["val_loss"])) for row in trainer.history.epochs for name in hooks]


class Reads(L.Callback):
    """Reads the metrics in one hook only: what was read before may be what is read then."""

    def __init__(self, hook: str) -> None:
        self.seen: list[dict[str, float]] = []
        setattr(self, hook, self.read)

    def read(self, trainer: Any, *args: Any, **options: Any) -> None:
        metrics = trainer.callback_metrics
        self.seen.append({name: round(float(metrics[name]), 5) for name in ("train_loss", "val_loss") if name in metrics})


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


LOOKED_AT = ["on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_batch_end"]
LOOKED_AT += ["on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"]


@pytest.mark.parametrize("val_check_interval", [1.0, 2])
@pytest.mark.parametrize("hook", LOOKED_AT)
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


# -- what runs out
class RunsOut(Regress):
    """Reads a second loader in a step, or leaves that to a callback: it has two batches."""

    where = "train_step"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.unlabelled = iter(range(2))

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.where == "train_step":
            next(self.unlabelled)
        return super().train_step(batch)

    def test_step(self, batch: Any) -> dict[str, Any]:
        if self.where == "test_step":
            next(self.unlabelled)
        return super().test_step(batch)


HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end", "on_validation_batch_end")
HOOKS += ("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end")


@pytest.mark.parametrize("where", ["train_step", "test_step", *HOOKS])
def test_a_stop_iteration_of_the_user_is_an_error_and_no_end_of_an_epoch(where: str) -> None:
    source = iter(range(1))
    callbacks = [LambdaCallback(**{where: lambda *args: next(source)})] if where in HOOKS else []  # pyright: ignore[reportArgumentType]
    trainer = make_trainer(type("RunsOutThere", (RunsOut,), {"where": where}), lightning={"callbacks": callbacks})
    with pytest.raises(StepError, match="ran out in " + ("a hook" if callbacks else where)):
        trainer.run(3, make_loader(), make_valid(48))


# -- updates
class Few(list[Any]):
    """Batches whose length counts one too many."""

    def __len__(self) -> int:
        return super().__len__() + 1


@pytest.mark.parametrize("kind", [list, Few])
def test_the_pass_for_batch_norm_makes_no_update_wherever_its_end_is_known(kind: type[list[Any]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    averages = StochasticWeightAveraging(0.1, swa_epoch_start=1)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "log_bar": False}
    trainer = Regress(model, "cpu", lightning={"callbacks": [averages]}, **options)
    trainer.run(2, kind(make_loader(48)))
    assert trainer.counts.step == 6
    average: Any = averages._average_model
    assert same_weights(dict(model.named_parameters()), dict(average.model.named_parameters()))


class Accumulates(SingleDeviceStrategy):
    """Adds gradients up by itself, as DeepSpeed's engine does: it is called for each batch, and updates the weights in each second one."""

    handles_gradient_accumulation = True
    n_calls = 0

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        self.n_calls += 1
        if self.n_calls % 2 == 0:
            return super().optimizer_step(optimizer, closure, model, **options)
        return closure()


def test_gradients_add_up_in_a_strategy_that_accumulates_by_itself() -> None:
    found: list[Any] = []
    for options in ({}, {"strategy": Accumulates(device=torch.device(ONE_DEVICE))}):
        trainer = make_trainer()
        pl_trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=2, **trainer.lightning_args() | options)
        use_own_loops(pl_trainer)
        pl_trainer.fit(trainer.as_lightning_module(), make_loader(64), make_valid())
        found.append(trainer.model)
    assert same_weights(*found)


# -- where it begins, and where it does not run
def test_an_epoch_begins_where_the_loop_is_told() -> None:
    indices: list[int] = []
    trainer = make_trainer(lightning={"callbacks": [LambdaCallback(on_train_batch_start=lambda t, m, b, i: indices.append(i))]})
    pl_trainer = L.Trainer(max_epochs=2, **trainer.lightning_args())
    use_own_loops(pl_trainer).start_at = 3
    pl_trainer.fit(trainer.as_lightning_module(), make_loader(), make_valid())
    assert indices == [3, 4, 0, 1, 2, 3, 4]


def test_an_unknown_lightning_runs_its_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[Any] = []
    look = LambdaCallback(on_train_end=lambda t, m: loops.append(t.fit_loop.epoch_loop))
    for version in (L.__version__, "2.7.0"):
        monkeypatch.setattr(L, "__version__", version)
        make_trainer(lightning={"callbacks": [look]}).run(1, make_loader())
    assert unknown_version() == "2.7.0" and [isinstance(loop, OwnEpochLoop) for loop in loops] == [True, False]
