"""What is set in mid-epoch on the trainer, its module or its callbacks counts from the next batch on."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import pytest
import torch
from changes import CHANGES, Sets
from lightning_modules import Lit
from random_configurations import USUAL, difference, make
from samples import Regress, make_loader, make_trainer, make_valid, same_weights
from traced import Trace

from nbtrain import Trainer

_LOGS = {"kind": "loss", "when": "always", "on_step": True, "on_epoch": True, "prog_bar": False, "logger": True, "reduce_fx": "mean"}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.parametrize("when", ["training", "validation"])
@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_set_in_mid_epoch_counts_from_the_next_batch_on(kind: str, when: str) -> None:
    steps = USUAL["steps"] | {"logs": [_LOGS | {"batch_size": None}]}
    trainer = {"max_epochs": 2, "log_every_n_steps": 3}
    changes = {kind: 2 if when == "training" else -1}
    callbacks = {"lambda": 0} if kind == "callbacks removed" else {}
    settings = USUAL | {"changes": changes, "callbacks": callbacks, "logger": True, "trainer": trainer, "steps": steps}
    assert difference(settings)[0] == ""


def test_hooks_that_are_set_without_a_logger_count_from_the_next_batch_on() -> None:
    changes = {"module.on_validation_batch_start": 3, "module.on_before_zero_grad": 2}
    assert difference(USUAL | {"changes": changes, "trainer": {"max_epochs": 2, "val_check_interval": 0.25}})[0] == ""


def test_steps_that_make_their_updates_have_no_windows_so_a_stop_ends_them_at_once() -> None:
    steps = make(USUAL | {"steps": USUAL["steps"] | {"who": "by hand"}}, Trace())
    accumulates, stops = Sets(Trace(), "accumulates", 2), Sets(Trace(), "stops", 3)
    steps.lightning = {"callbacks": [accumulates, stops]}
    steps.run(1, make_loader(96))
    assert steps.counts.processed == 3


class Adds(L.Callback):
    """Adds a callback in one hook of the second batch."""

    def __init__(self, hook: str) -> None:
        self.seen: list[tuple[str, int]] = []
        setattr(self, hook, self.add)

    def add(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 1 and not any(isinstance(callback, Added) for callback in trainer.callbacks):
            trainer.callbacks.append(Added(self.seen))


OF_A_BATCH = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_train_batch_end")


class Added(L.Callback):
    def __init__(self, seen: list[tuple[str, int]]) -> None:
        for name in OF_A_BATCH:
            setattr(self, name, lambda trainer, *args, name=name: seen.append((name, trainer.fit_loop.epoch_loop.batch_idx)))


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_train_batch_end", "train_step"])
def test_a_callback_that_is_added_in_a_batch_is_called_from_the_next_one_on(hook: str) -> None:
    adds = Adds(hook)

    class Steps(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if hook == "train_step":
                adds.add(self.module.trainer)  # pyright: ignore[reportOptionalMemberAccess]
            return super().train_step(batch)

    make_trainer(Steps, lightning={"callbacks": [adds]}).run(1, make_loader(48), make_valid(16))
    assert adds.seen == [(name, 2) for name in OF_A_BATCH]


class SetsOnItself(Lit):
    """Sets a method on itself at the end of its second batch, and another in its place at that of the fourth."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.n = name, 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.n += 1
        if self.n in (2, 4):
            n, own = self.n, getattr(type(self), self.name)

            def noted(*args: Any, **options: Any) -> Any:
                self.seen.append((n, self.global_step))
                return own(self, *args, **options)

            setattr(self, self.name, noted)


@pytest.mark.parametrize("name", ["training_step", "optimizer_step", "on_before_backward", "optimizer_zero_grad", "on_train_batch_start"])
def test_what_a_module_sets_on_itself_counts_as_with_lightning(name: str) -> None:
    own = SetsOnItself(name)
    torch.manual_seed(3)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    L.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(own, make_loader(96))  # pyright: ignore[reportArgumentType]
    module = SetsOnItself(name)
    trainer: Any = Trainer.from_lightning(module, log_bar=False, device="cpu")
    torch.manual_seed(3)
    trainer.run(1, make_loader(96))
    assert module.seen == own.seen == [(2, 2), (2, 3), (4, 4), (4, 5)] and same_weights(module, own)
