"""Moments between two hooks that few runs have: a pass without a batch, an error behind a step, a batch that is None or does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights
from torch import nn

from nbtrain import AccumulationAddon, ConfigError, LimitsAddon, OutOfMemory, StateManagerAddon
from nbtrain.errors import CheckpointError

Saving = Regress.add_on(StateManagerAddon)


def plain_model() -> nn.Module:
    """Without dropout, so that a batch that is computed again gives the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


# -- an error behind the step
REPEATED = ("on_train_step_start", "before_zero_grad", "on_backward_end", "before_optimizer_step")
BEHIND = ("on_train_step_end", "on_step_end")
UPDATING = ("after_optimizer_step", "on_optimizer_step_end")  # whether the weights have moved is not known


@pytest.mark.parametrize("hook", [*REPEATED, *BEHIND, *UPDATING])
def test_the_state_after_an_error_of_a_hook_goes_on_as_a_run_without_it(hook: str, tmp_path: Any) -> None:
    calls: list[int] = []

    def fails(*args: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 8:  # epoch 2, batch 3
            raise ValueError("boom")

    loaders = make_loader(own_generator=True), make_valid()
    whole = make_trainer(Saving, model=plain_model(), save_path=tmp_path / "whole")
    whole.run(2, *loaders)
    failed = make_trainer(Saving, model=plain_model(), save_path=tmp_path / "failed", hooks={hook: fails})
    with pytest.raises(ValueError, match="boom"):
        failed.run(2, make_loader(own_generator=True), make_valid())
    path = failed.run_dir / "after-error.ckpt"
    assert path.exists() == (hook not in UPDATING)
    if not path.exists():
        return
    inexact = "(exact unless it had drawn random numbers or changed a buffer)"
    how = f"begins with the batch that failed {inexact}" if hook in REPEATED else "continues with the next batch"
    assert f"The state after the error is in after-error.ckpt: resume from it {how}." in (failed.run_dir / "events.jsonl").read_text()
    resumed = make_trainer(Saving, model=plain_model(), save_path=tmp_path / "failed")
    resumed.run(2, make_loader(own_generator=True), make_valid(), resume=path)
    assert same_weights(resumed.model, whole.model) and resumed.counts == whole.counts
    assert resumed.history.steps["train"].state_dict() == whole.history.steps["train"].state_dict()
    assert [row.metrics for row in resumed.history.epochs] == [row.metrics for row in whole.history.epochs]


def test_the_state_after_an_error_at_the_end_of_an_epoch_is_not_resumed(tmp_path: Any) -> None:
    class Fails(Saving):
        def metric_on_epoch_end(self, *args: Any) -> Any:
            raise ValueError("boom")

    failed = make_trainer(Fails, model=plain_model(), save_path=tmp_path)
    with pytest.raises(ValueError, match="boom"):
        failed.run(1, make_loader())
    with pytest.raises(CheckpointError, match="was saved after an error at the end of an epoch or in its validation, and can't be resumed"):
        make_trainer(Saving, model=plain_model(), save_path=tmp_path).load_state(failed.run_dir / "after-error.ckpt")


class Raises(torch.autograd.Function):
    """What passes its input on, and fails in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("boom")


class Breaks(Regress):
    """Fails in the backward pass of the call `fails_at` of its step."""

    fails_at = -1
    n_calls = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.n_calls += 1
        output = super().train_step(batch)
        if self.n_calls == self.fails_at:
            output["loss"] = Raises.apply(output["loss"])
        return output


class Short:
    """Batches of which there are fewer than its length says."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches) + 2

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_a_window_whose_gradients_are_lost_makes_no_update_at_the_end_of_an_unannounced_epoch() -> None:
    trainer = make_trainer(Breaks.add_on(AccumulationAddon), model=plain_model(), accumulate=4, on_error="pause")
    trainer.fails_at = 6
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run(1, Short([*make_loader(96, shuffle=False)]))
    trainer.resume(skip=True)
    assert trainer.counts.step == 1 and trainer.counts.left_out == 1


def test_a_batch_is_not_left_out_where_the_optimizer_has_moved_the_weights() -> None:
    trainer = make_trainer(Breaks, model=plain_model(), optimizer=lambda p: torch.optim.LBFGS(p, max_iter=4), on_error="pause")
    trainer.fails_at = 3
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run(1, [*make_loader(32, shuffle=False)])
    with pytest.raises(ConfigError, match="LBFGS calls its closure several times an update, and has moved the weights"):
        trainer.resume(skip=True)


# -- what hooks get
def test_hooks_get_the_loss_in_the_last_pass_of_weight_averaging_too() -> None:
    seen: list[set[str]] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(set(outputs))

    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trainer = make_trainer(model=model, lightning={"callbacks": [StochasticWeightAveraging(0.1, 1), Looks()]})
    trainer.run(3, make_loader())
    assert len(seen) == 20 and all("loss" in names for names in seen)


def test_sets_that_are_read_together_are_one() -> None:
    class Together(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            output = super().test_step(batch[0])
            self.log("both", output["loss"] + super().test_step(batch[1])["loss"])
            return output

    seen: list[set[str]] = []

    class Looks(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(set(trainer.callback_metrics))

    trainer = make_trainer(Together, lightning={"callbacks": [Looks()]})
    trainer.run(1, make_loader(), CombinedLoader([make_valid(), make_valid()], "max_size_cycle"))
    assert "both" in seen[-1] and not [name for name in seen[-1] if "dataloader_idx" in name]


# -- no batch, and one that does not fit
def test_a_validation_without_a_batch_leaves_the_random_numbers_of_the_training() -> None:
    valid = [*make_valid()]

    class Empties(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            valid[:] = [] if trainer.current_epoch == 1 else [*make_valid()]

    found = []
    for loader in (valid, None):
        torch.manual_seed(3)
        trainer = make_trainer(model=make_model(), lightning={"callbacks": [Empties()]})
        torch.manual_seed(3)
        trainer.run(4, make_loader(own_generator=True), loader)
        found.append(trainer)
    assert same_weights(found[0].model, found[1].model)


def test_a_validation_in_the_last_pass_of_weight_averaging_leaves_the_random_numbers_of_the_training() -> None:
    """In that pass, which makes no update, Lightning knows of no validation by `val_every_n_epochs`."""
    drawn = []
    for loader in (make_valid(), None):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        options = {"val_every_n_steps": 4, "val_every_n_epochs": 2, "lightning": {"callbacks": [StochasticWeightAveraging(0.1, 1)]}}
        trainer = make_trainer(Regress.add_on(LimitsAddon), model=model, **options)
        torch.manual_seed(3)
        trainer.run(3, make_loader(own_generator=True), loader)
        drawn.append((trainer, torch.rand(3).tolist()))
    assert drawn[0][1] == drawn[1][1] and same_weights(drawn[0][0].model, drawn[1][0].model)


def test_a_batch_that_does_not_fit_on_its_way_to_the_device_is_the_one_that_is_named() -> None:
    class Large:
        def to(self, device: Any, **options: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    small = next(iter(make_loader()))
    with pytest.raises(OutOfMemory) as caught:
        make_trainer().run(1, [small, Large()])
    assert "epoch 1, batch 2" in str(caught.value)


def test_a_run_that_is_resumed_before_a_batch_of_none_counts_what_was_left_out(tmp_path: Any) -> None:
    batches: list[Any] = [*make_loader(96, shuffle=False)]
    batches[1] = batches[3] = None
    kind = Saving.add_on(LimitsAddon)
    whole = make_trainer(kind, model=make_model(), save_path=tmp_path / "whole")
    whole.run(1, batches)
    cut = make_trainer(kind, model=make_model(), save_path=tmp_path / "cut", max_steps=2)
    cut.run(1, batches)
    resumed = make_trainer(kind, model=make_model(), save_path=tmp_path / "cut", max_steps=100)
    resumed.run(1, batches, resume="auto")
    assert resumed.counts == whole.counts and resumed.counts.left_out == 2
    assert same_weights(resumed.model, whole.model)
    assert resumed.history.epochs[-1].metrics == whole.history.epochs[-1].metrics
