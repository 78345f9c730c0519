"""A trial of the steps leaves every kind of model as it was: what is counted, measured and drawn in it, and buffers that grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from resume_cases import MODELS
from samples import Regress, make_loader, make_trainer, make_valid, some

from nbtrain import Trainer

TRIALS = {
    "check": lambda trainer, batch: trainer.check(batch),
    "summary": lambda trainer, batch: trainer.summary(batch),
    "lr_find": lambda trainer, batch: trainer.lr_find([batch] * 10, n_batches=10),
}


def make(kind: str, steps: type[Trainer] = Regress, **options: Any) -> Any:
    torch.manual_seed(0)
    return make_trainer(steps, model=MODELS[kind](), **options)


def ran(trainer: Any) -> list[Any]:
    """The weights, buffers and extra states that a run ends with; a resumed run goes on."""
    torch.manual_seed(1)
    trainer.run(1, make_loader(), make_valid()) if trainer.control.state != "paused" else trainer.resume()
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in trainer.model.state_dict().values()]


@pytest.mark.filterwarnings("ignore")  # of torch.ao
@pytest.mark.parametrize("kind", some(MODELS, 2))
def test_run_after_a_trial_ends_as_a_run_without_one(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    batch, expected = next(iter(make_loader())), ran(make(kind))
    for name, trial in TRIALS.items():
        trainer = make(kind)
        trial(trainer, batch)
        assert ran(trainer) == expected, name


class Fails(Regress):
    """Fails once, after the forward pass of a batch."""

    at = -1

    def train_step(self, batch: Any) -> dict[str, Any]:
        output = super().train_step(batch)
        if self.model.training and self.counts.step == self.at:
            type(self).at = -1
            raise ZeroDivisionError
        return output


@pytest.mark.filterwarnings("ignore")  # of torch.ao
@pytest.mark.parametrize("at", [0, 1, 3])
def test_run_whose_buffers_grow_continues_after_an_error_as_if_there_had_been_none(at: int) -> None:
    expected = ran(make("observers", Fails))
    trainer = make("observers", Fails, on_error="pause")
    Fails.at = at
    with pytest.raises(ZeroDivisionError):
        ran(trainer)
    assert trainer.control.state == "paused" and ran(trainer) == expected
