"""Until the next run has reached its first batch, a restored state is the state: it can be saved, loaded, rewound and interrupted again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from samples import Regress, make_loader, make_trainer

from nbtrain import StateManagerAddon

Saving = Regress.add_on(StateManagerAddon)


class Noisy(Saving):
    """Its loss depends on the random numbers, and so on where in the epoch it goes on."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        found = super().train_step(batch)
        return {**found, "loss": found["loss"] * torch.rand(())}


class Fails(Noisy):
    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.step == 8:
            raise RuntimeError("the power went")
        return super().train_step(batch)


def weights(trainer: Any) -> list[Any]:
    return [value.tolist() for value in trainer.model.state_dict().values()] + [trainer.history.epochs[-1]["train_loss"]]


@pytest.fixture
def uninterrupted(tmp_path: Path) -> list[Any]:
    trainer = make_trainer(Noisy, save_path=tmp_path / "whole", seed=0)
    trainer.run(3, make_loader())
    return weights(trainer)


def interrupted(folder: Path) -> None:
    with pytest.raises(RuntimeError):
        make_trainer(Fails, save_path=folder, every_n_steps=3, seed=0).run(3, make_loader())


def test_state_that_was_loaded_in_mid_epoch_is_saved_again(tmp_path: Path, uninterrupted: list[Any]) -> None:
    interrupted(tmp_path)
    between = make_trainer(Noisy, save_path=tmp_path, every_n_steps=3)
    between.load_state()
    saved = between.save_state()  # over the file that it was loaded from
    assert saved is not None and saved.name == "epoch=1-step=6.ckpt"
    again = make_trainer(Noisy, save_path=tmp_path, every_n_steps=3)
    again.run(3, make_loader(), resume="auto")
    assert weights(again) == uninterrupted


class Stop(L.Callback):
    """Asks for the end of the run before its first batch."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.owner.stop()  # pyright: ignore[reportCallIssue]


def test_run_that_ends_between_its_resume_and_its_first_batch_is_resumed(tmp_path: Path, uninterrupted: list[Any]) -> None:
    interrupted(tmp_path)
    stopped = make_trainer(Noisy, save_path=tmp_path, every_n_steps=3, lightning={"callbacks": [Stop()]})
    stopped.run(3, make_loader(), resume="auto")
    again = make_trainer(Noisy, save_path=tmp_path, every_n_steps=3)
    again.run(3, make_loader(), resume="auto")
    assert weights(again) == uninterrupted


@pytest.mark.parametrize("keep_states", [True, False], ids=["in memory", "on disk"])
def test_state_after_a_rewind_into_an_epoch_is_saved(tmp_path: Path, uninterrupted: list[Any], keep_states: bool) -> None:
    trainer = make_trainer(Noisy, save_path=tmp_path, every_n_steps=7, seed=0, keep_states=keep_states)
    trainer.run(3, make_loader())
    trainer.rewind(step=7)
    trainer.save_state()
    again = make_trainer(Noisy, save_path=tmp_path, every_n_steps=7)
    again.run(3, make_loader(), resume="last")
    assert weights(again) == uninterrupted


@pytest.mark.parametrize("is_outside", [True, False])
def test_parameters_that_are_trained_outside_of_the_model_are_noted(tmp_path: Path, is_outside: bool) -> None:
    scale = torch.nn.Parameter(torch.ones(()))
    trainer = make_trainer(Saving, save_path=tmp_path)
    if is_outside:
        trainer.optimizer.add_param_group({"params": [scale]})
    notes: list[str] = []
    trainer.recorder.note = notes.append
    trainer.run(1, make_loader())
    text = "Resume is not exact here: the optimizer trains 1 parameter outside of the model, which no state has."
    assert notes == ([text] if is_outside else [])
