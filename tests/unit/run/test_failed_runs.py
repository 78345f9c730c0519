"""A run that an error has paused is dropped when its trainer can't be reached any more, and not before."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from samples import DEVICE
from torch import nn

from nbtrain import Trainer
from nbtrain.run.failed_runs import drop_unreachable, end_paused, keep_watch


class Fit(Trainer):
    misses = False

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.processed:
            raise self.not_there if self.misses else ZeroDivisionError
        return {"loss": self.model(batch).mean()}


def failed_run(kind: type[Fit] = Fit) -> tuple[Fit, threading.Thread]:
    """A trainer whose run an error has paused, and the run's thread."""
    trainer = kind(nn.Linear(2, 1), DEVICE, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), log_bar=False, on_error="pause")
    with pytest.raises((ZeroDivisionError, AttributeError)):
        trainer.run(1, [torch.ones(4, 2)] * 2)
    keep_watch(trainer)
    assert trainer.handle is not None
    return trainer, trainer.handle.thread


def test_failed_run_is_kept_while_a_running_function_holds_its_trainer() -> None:
    trainer, thread = failed_run()
    drop_unreachable()
    assert thread.is_alive() and trainer.failure is not None
    assert end_paused(trainer) == "epoch 1, batch 2"
    assert not thread.is_alive() and trainer.failure is None


class Misses(Fit):
    misses = True


@pytest.mark.parametrize("kind", [Fit, Misses])  # the error of a missing attribute finds the nearest name when it is shown
def test_failed_run_ends_when_its_trainer_is_gone(kind: type[Fit]) -> None:
    thread = failed_run(kind)[1]
    gc.collect()
    drop_unreachable()
    thread.join(60)
    assert not thread.is_alive()
