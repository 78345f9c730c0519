"""A LightningModule runs on Lightning's loops: the same numbers, hooks and logs as without nbtrain, in no more calls; and what it keeps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from drawn_modules import drawn_job
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning_modules import Lit, difference
from samples import make_loader, make_valid, same_weights, some, without_times
from torch.nn.functional import mse_loss

from nbtrain import AccumulationAddon, StateManagerAddon, Trainer
from nbtrain.errors import ConfigError, OutOfMemory
from nbtrain.run.lightning_trainer import quiet


@pytest.mark.filterwarnings(
    "ignore:`training_step` returned `None`",
    "ignore:.*SWA",
    "ignore:.*Swapping scheduler",
    "ignore:.*the hooks will not be called on every batch",
)
@pytest.mark.parametrize("seed", some(range(200), 20))
def test_a_drawn_job_is_as_under_lightning_alone(seed: int) -> None:
    make, options = drawn_job(seed)
    assert difference(make, **options) == "", f"seed {seed}"


class Plain(L.LightningModule):
    """`n_ended`: the batches whose last hook was called, which is the module's own."""

    def __init__(self, seed: int = 0, *, logs: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net, self.logs, self.n_ended = torch.nn.Linear(8, 1), logs, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse_loss(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Validates(Plain):
    def on_train_batch_end(self, *args: Any) -> None:
        self.n_ended += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Batches(list[Any]):
    """One loader: of a list itself, Lightning makes several."""


def batches(sizes: list[int]) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return Batches((torch.randn(n, 8, generator=generator), torch.randn(n, 1, generator=generator)) for n in sizes)


def by_lightning(module: L.LightningModule, loader: Any, **options: Any) -> None:
    silent: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with quiet():
        L.Trainer(max_epochs=1, accelerator="cpu", **silent, **options).fit(module, loader)


def make(module: L.LightningModule, *addons: Any, **options: Any) -> Any:
    return Trainer.add_on(*addons).from_lightning(module, device="cpu", log_bar=False, **options)


def test_the_loops_are_lightnings_own() -> None:
    trainer, kinds = make(Validates()), list[type]()

    class Looks(L.Callback):
        def on_train_end(self, pl_trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            loop = pl_trainer.fit_loop
            kinds.extend(map(type, (loop, loop.epoch_loop, loop.epoch_loop.val_loop)))

    trainer.lightning["callbacks"] = [Looks()]
    trainer.run(1, make_loader(), make_valid())
    assert kinds == [_FitLoop, _TrainingEpochLoop, _EvaluationLoop]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [[4] * 4, [4] * 5, [4, 4, 4, 2], [3, 1, 4, 1, 5, 2, 6]])
def test_gradients_are_accumulated_as_by_lightning(sizes: list[int], n: int) -> None:
    alone, ours, by_addon = Plain(), Plain(), Plain()
    by_lightning(alone, batches(sizes), accumulate_grad_batches=n)
    make(ours, lightning={"accumulate_grad_batches": n}).run(1, batches(sizes))
    make(by_addon, AccumulationAddon, accumulate=n).run(1, batches(sizes))
    assert same_weights(alone, ours) and same_weights(alone, by_addon)


REFUSED: dict[str, dict[str, Any]] = {
    "accumulate={...}": {"accumulate": {0: 1, 2: 4}},
    "grad_reduction='sum'": {"accumulate": 2, "grad_reduction": "sum"},
    "loss_reduction": {"accumulate": 2, "loss_reduction": "mean"},
    "aggregate_outputs_fn": {"accumulate": 2, "aggregate_outputs_fn": lambda outputs, group: None},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lightning_can_not_do_with_a_window_is_refused_before_the_run(name: str) -> None:
    trainer = make(Plain(), AccumulationAddon, **REFUSED[name])
    with pytest.raises(ConfigError, match="a LightningModule accumulates gradients as Lightning does") as error:
        trainer.run(1, batches([4, 4]))
    assert str(error.value).startswith(f"{name}: ") and trainer.counts.step == 0


class Counted(list[Any]):
    """Batches, between which the calls of Python functions are counted: those of 20 steps."""

    n = 0

    def __iter__(self) -> Any:
        for i, batch in enumerate(super().__iter__()):
            if i == 10:
                self.n = 0  # a run walks over a list before it trains
                sys.setprofile(self._count)
            if i == 30:
                sys.setprofile(None)
            yield batch

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        self.n += event == "call"


@pytest.mark.parametrize("logs", [False, True])
def test_a_step_makes_no_more_calls_than_under_lightning_alone(logs: bool) -> None:
    before, alone, ours = sys.getprofile(), Counted(batches([4] * 40)), Counted(batches([4] * 40))
    try:
        by_lightning(Plain(logs=logs), alone)
        trainer = make(Plain(logs=logs), advice=False)
        trainer.recorder.every_s = 1e9  # the steps are shown by time
        trainer.run(1, ours)
    finally:
        sys.setprofile(before)
    assert 0 < ours.n <= alone.n


class Stops(L.Callback):
    def __init__(self, at: int = 1) -> None:
        self.at = at

    def on_train_batch_end(self, pl_trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_trainer.current_epoch == 1 and batch_idx == self.at:
            pl_trainer.should_stop = True


def run_or_resume(folder: Path, seed: int, lightning: dict[str, Any], **options: Any) -> Any:
    """A trainer after three epochs, of which those that the folder has are not trained again."""
    trainer = make(Validates(seed), StateManagerAddon, save_path=folder, lightning=lightning, **options)
    torch.manual_seed(seed)
    trainer.run(3, make_loader(), make_valid(), resume="auto")
    return trainer


ENDS: dict[str, dict[str, Any]] = {"should_stop": {"callbacks": [Stops()]}, "max_steps": {"max_steps": 7}}


@pytest.mark.parametrize("options", [{}, *({"every_n_steps": n} | more for n in (1, 2) for more in ({}, {"validate_on_save": True}))])
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ended_within_an_epoch_goes_on_as_if_it_had_not(end: str, options: dict[str, Any], tmp_path: Path) -> None:
    whole = run_or_resume(tmp_path / "whole", 1, {}, **options)
    cut = run_or_resume(tmp_path / "cut", 1, ENDS[end], **options)
    assert cut.current_step == 7
    again = run_or_resume(tmp_path / "cut", 2, {}, **options)
    assert same_weights(whole.model, again.model) and again.model.n_ended == whole.model.n_ended == 15
    assert without_times(again.history.epochs) == without_times(whole.history.epochs)
    assert without_times(again.history.validations) == without_times(whole.history.validations)


def test_a_stop_in_the_last_batch_of_an_epoch_adds_no_validation(tmp_path: Path) -> None:
    often: dict[str, Any] = {"val_check_interval": 2}
    whole, cut = run_or_resume(tmp_path / "whole", 1, often), run_or_resume(tmp_path / "cut", 1, often | {"callbacks": [Stops(4)]})
    assert cut.current_step == 10 and len(cut.history.validations) == 4
    again = run_or_resume(tmp_path / "cut", 2, often)
    assert same_weights(whole.model, again.model) and again.counts == whole.counts
    assert without_times(again.history.validations) == without_times(whole.history.validations)


def test_a_window_that_a_stop_drops_is_trained_again(tmp_path: Path) -> None:
    windows: dict[str, Any] = {"accumulate_grad_batches": 2}
    whole, cut = run_or_resume(tmp_path / "whole", 1, windows), run_or_resume(tmp_path / "cut", 1, windows | {"callbacks": [Stops(2)]})
    assert cut.result.status == "stopped" and cut.counts.step == 4
    again = run_or_resume(tmp_path / "cut", 1, windows)
    assert same_weights(whole.model, again.model) and without_times(again.history.epochs) == without_times(whole.history.epochs)


def test_a_run_is_validated_between_two_batches() -> None:
    class Asks(L.Callback):
        def on_train_batch_end(self, pl_trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if pl_trainer.global_step == 2:
                trainer.control.submit(lambda at: found.append(trainer.validate_now()), whole=True)

    found: list[Any] = []
    trainer = make(Validates(), lightning={"callbacks": [Asks()]})
    trainer.run(1, make_loader(), make_valid())
    assert [row["step"] for row in trainer.history.validations] == [2, 5]
    assert found == [{"val_loss": trainer.history.validations[0]["val_loss"]}]


def test_a_batch_too_large_for_the_memory_is_named() -> None:
    class Full(Lit):
        def backward(self, loss: Any, *args: Any, **options: Any) -> None:
            raise RuntimeError("MPS backend out of memory")

    with pytest.raises(OutOfMemory, match=r"(?s)The memory of cpu is full.*epoch 1, batch 1: the batch is"):
        make(Full()).run(1, make_loader())
