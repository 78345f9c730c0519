"""However an operation ends, what it changed is put back, and ■ ends it with one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from operations import ENDS, OPERATIONS, PAGE, TRAINING_ENDS, changed, trained, training_words, words
from samples import Broken, make_trainer, some
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.regression import MeanSquaredError

from nbtrain import RunStopped
from nbtrain.base.operation import Operation

EXPECTED = {"done": type(None), "■": RunStopped, "■■": RunStopped, "error": Broken}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_changed_is_put_back(name: str, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, when_done, always = OPERATIONS[name]
    found, error = changed(name, end)
    assert type(error) is EXPECTED[end]
    assert sorted(found) == sorted(when_done) if end == "done" else set(found) <= set(always)
    if isinstance(error, RunStopped):
        assert str(error).endswith("are as before") and "\n" not in str(error)
    (row,) = (line.split("|")[2:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |"))
    assert row[list(ENDS).index(end)].strip() == words(found), "run `python tests/operations.py`"


@pytest.mark.parametrize("end", some(TRAINING_ENDS, 2))
@pytest.mark.parametrize("name", ["run", "resume"])
def test_training_that_ended_early_goes_on_as_if_it_had_not(name: str, end: str, tmp_path: Path) -> None:
    found = training_words(*trained(name, end, tmp_path))
    assert found.endswith("bit for bit")
    (row,) = (line.split("|")[2:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |"))
    assert row[list(TRAINING_ENDS).index(end)].strip() == found, "run `python tests/operations.py`"


def test_modules_in_attributes_of_the_trainer_are_on_the_device_of_the_model() -> None:
    """A device that every machine has stands for a GPU; `make gpu` has one."""
    trainer: Any = make_trainer(device="cpu")
    trainer.errors = MetricCollection([MeanSquaredError()])
    trainer.weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    trainer.device = torch.device("meta")
    Operation(trainer, "check", "test").begin()
    assert trainer.errors["MeanSquaredError"].device.type == trainer.weighted.weight.device.type == "meta"
    trainer.device = torch.device("cpu")
    Operation(trainer, "check", "test").begin()
    assert trainer.weighted.weight.device.type == "meta", "what you have put on another device stays there"
