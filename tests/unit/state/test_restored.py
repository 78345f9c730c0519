"""Until the next run has reached its first batch, a restored state is the state: it can be saved, loaded, rewound and interrupted again."""

from __future__ import annotations

import signal
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning_modules import Lit
from resume_cases import outcome
from samples import DEVICE, Breaks, Broken, Regress, make_data, make_loader, make_model, make_trainer, make_valid, some
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torchdata.stateful_dataloader import StatefulDataLoader

from nbtrain import AccumulationAddon, EMAAddon, MultiOptimizerTrainer, SeededLoader, StateManagerAddon, Trainer
from nbtrain.rng import seed_all

Saving = Regress.add_on(StateManagerAddon)


class Noisy(Saving):
    """Its loss depends on the random numbers, and so on where in the epoch it goes on."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        found = super().train_step(batch)
        return {**found, "loss": found["loss"] * torch.rand(())}


def weights(trainer: Any) -> list[Any]:
    return [value.tolist() for value in trainer.model.state_dict().values()] + [trainer.history.epochs[-1]["train_loss"]]


# -- interrupted again between a resume and its first batch, whatever trains
class Two(MultiOptimizerTrainer):
    """A net for each optimizer."""

    def train_step_a(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model["a"](batch[0]), batch[1]) * torch.rand(())}

    def train_step_b(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model["b"](batch[0]), batch[1])}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model["a"](batch[0]) + self.model["b"](batch[0]), batch[1])}


class Scheduled(Lit):
    """With a rate that falls at each update."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 2, 0.7), "interval": "step"}}


def averaging(**options: Any) -> Any:
    return make_trainer(Noisy.add_on(EMAAddon), ema_decay=0.9, **options)


def accumulating(**options: Any) -> Any:
    options["lightning"] = {**options["lightning"], "val_check_interval": 2}
    return make_trainer(Noisy.add_on(AccumulationAddon), accumulate={0: 1, 2: 2}, **options)


def of_several(**options: Any) -> Any:
    own = {"a": lambda params: torch.optim.Adam(params, lr=1e-2), "b": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9)}
    model = nn.ModuleDict({"a": make_model(), "b": make_model(1)})
    return Two.add_on(StateManagerAddon)(model, device=DEVICE, log_bar=False, optimizers=own, **options)


def of_a_module(**options: Any) -> Any:
    return Trainer.add_on(StateManagerAddon).from_lightning(Scheduled(), device=DEVICE, log_bar=False, **options)


WHO = {"averages": averaging, "accumulation": accumulating, "several optimizers": of_several, "a LightningModule": of_a_module}
OVER = {
    "a DataLoader": make_loader,
    "torchdata": lambda: StatefulDataLoader(make_data(), 16, shuffle=True),
    "seeded": lambda: SeededLoader(make_data(), 16),
}


class Acts(L.Callback):
    """Does something in a hook."""

    def __init__(self, **acts: Any) -> None:
        self.acts = acts

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.acts.get("setup", lambda trainer: None)(pl_module.owner)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.acts.get("start", lambda trainer: None)(pl_module.owner)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.acts.get("batch", lambda trainer: None)(pl_module.owner)


def fail(trainer: Any) -> None:
    raise Broken


def sigterm(trainer: Any) -> None:
    signal.raise_signal(signal.SIGTERM)


AGAIN: dict[str, Any] = {
    "loaded and saved": None,
    "an error in setup": {"setup": fail},
    "stopped at the start": {"start": lambda trainer: trainer.stop()},
    "SIGTERM at the start": {"start": sigterm},
    "saved at the start, then an error": {"start": lambda trainer: trainer.save_state(), "batch": fail},
}


@pytest.mark.parametrize(
    "case", some(list(product(WHO, OVER, AGAIN)), 7, [("a LightningModule", "a DataLoader", "loaded and saved")]), ids=", ".join
)
def test_run_that_ends_again_between_its_resume_and_its_first_batch_is_resumed(case: tuple[str, str, str], tmp_path: Path) -> None:
    who, over, again = case

    def make(folder: str, seed: int, *callbacks: L.Callback) -> Any:
        made = WHO[who](save_path=tmp_path / folder, every_n_steps=2, lightning={"callbacks": list(callbacks)}, keep_source=False)
        seed_all(seed)
        return made

    def run(trainer: Any) -> Any:
        trainer.run(3, OVER[over](), make_valid(), resume="auto")
        return trainer

    whole = outcome(run(make("whole", 1)))
    with pytest.raises(Broken):
        run(make("broken", 1, Breaks(8)))
    if again == "loaded and saved":
        between = make("broken", 2)
        assert between.load_state() == between.save_state()  # over the file that it was loaded from
    else:
        with suppress(Broken, SystemExit):
            run(make("broken", 2, Acts(**AGAIN[again])))
    found = outcome(run(make("broken", 3)))
    assert [name for name in whole if found[name] != whole[name]] == []


@pytest.mark.parametrize("keep_states", [True, False], ids=["in memory", "on disk"])
def test_state_after_a_rewind_into_an_epoch_is_saved(tmp_path: Path, keep_states: bool) -> None:
    trainer = make_trainer(Noisy, save_path=tmp_path, every_n_steps=7, seed=0, keep_states=keep_states)
    trainer.run(3, make_loader())
    uninterrupted = weights(trainer)
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
    trainer.recorder.note = lambda text, **_: notes.append(text)
    trainer.run(1, make_loader())
    text = "Resume is not exact here: the optimizer trains 1 parameter outside of the model, which no state has."
    assert [note for note in notes if note.startswith("Resume")] == ([text] if is_outside else [])
