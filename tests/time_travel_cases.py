"""Runs drawn at random, and places in them, to which a trainer goes back: kinds of `resume_cases` without files."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from resume_cases import LOADERS, MODELS, SETTINGS, VALID_LOADERS, Case, draw, outcome
from torch import Tensor

from nbtrain import ConfigError

N_EPOCHS = 3
_OF_FILES = ("save_format", "save_best", "save_weights")


class Seen(L.Callback):
    """Keeps a copy of each training batch, by the step that it becomes."""

    def __init__(self) -> None:
        self.batches: dict[int, Any] = {}

    def on_train_batch_start(self, pl_trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = pl_module.owner.train_state.counts.step + 1
        self.batches[step] = apply_to_collection(batch, Tensor, lambda tensor: tensor.detach().clone())

    def __deepcopy__(self, memo: Any) -> Seen:
        return Seen()


@dataclass
class Journey:
    """A case, its trainer and its loaders, and where to go back to."""

    case: Case
    chance: random.Random

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        model = MODELS[self.case.model]()
        addons, options = SETTINGS[self.case.setting]()
        lean = options.pop("lean", True)
        self.seen = Seen()
        options = {name: value for name, value in options.items() if name not in _OF_FILES}
        lightning = {**options.pop("lightning", {}), "callbacks": [self.seen]}
        made = {"lightning": lightning, "log_bar": False, "nonfinite": "ignore", "keep_states": True} | options
        self.trainer: Any = self.case.made(model, addons, made)
        self.trainer.short_way = lean
        self.loaders = LOADERS[self.case.loader](), VALID_LOADERS[self.case.valid]()
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.trainer.run(N_EPOCHS, *self.loaders)
        if self.chance.random() < 0.5:  # what lies between is trained again
            states = self.trainer.states.memory
            while len(states.states) > 1:
                states.states.pop()

    def disturb(self) -> None:
        """Draw random numbers, as a person would by other cells."""
        assert float(torch.rand(3).sum()) + random.random() + np.random.rand() >= 0

    def place(self) -> dict[str, int]:
        """A place of the run: an epoch, or a step."""
        if self.chance.random() < 0.4:
            return {"epoch": self.chance.randrange(N_EPOCHS)}
        return {"step": self.chance.randrange(self.trainer.counts.step)}

    def go(self, move: Any) -> Any:
        """`move` to a place that is between two batches. Returns what it does."""
        while True:
            place = self.place()
            try:
                return move(**place)
            except ConfigError as error:
                assert "is within a batch, which makes the updates" in str(error), error

    def finish(self, trainer: Any) -> dict[str, Any]:
        """Train to the end, and say all that must be equal."""
        trainer.run(N_EPOCHS - trainer.counts.epoch, *self.loaders)
        return outcome(trainer)


def journey(seed: int) -> tuple[Journey, dict[str, Any]]:
    """A run drawn by `seed`, and what it ends with."""
    case = draw(random.Random(seed))
    expected = outcome(Journey(case, random.Random(seed)).trainer)
    return Journey(case, random.Random(seed)), expected
