"""Bad input: what is given, and the text of the error."""

from __future__ import annotations

import copy
import logging
import pickle
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from samples import PLACE, Regress, make_loader, make_model, make_trainer, make_valid
from torch.nn.functional import mse_loss

from nbtrain import AddOnError, ConfigError, GradientClipAddon, NbtrainError, OptionError, StepError, Trainer
from nbtrain.optim.resolved_schedule import resolve_schedule


def _step(returned: Any) -> type[Trainer]:
    class Broken(Regress):
        def train_step(self, batch: Any) -> Any:
            return returned(super().train_step(batch)) if callable(returned) else returned

    return Broken


def _loss(make: Any) -> Any:
    return lambda out: {"loss": make(out["loss"])}


STEPS = {
    "None": (None, "All 5 batches of the training pass of epoch 1 were left out: the loader or the step gave None for each of them."),
    "no loss": ({"accuracy": 1.0}, "train_step returned {'accuracy'}, without 'loss'.\n  Broken.train_step, epoch 1, batch 1\n  Return"),
    "a tensor": (
        torch.zeros(()),
        'train_step returned Tensor, not a dict.\n  Broken.train_step, epoch 1, batch 1\n  Return {"loss": loss}.',
    ),
    "a float": ({"loss": 1.0}, "train_step returned its loss as float, which has no gradient."),
    "not scalar": (lambda out: {"loss": out["output"]}, "train_step returned a loss of shape (16, 1), not a scalar."),
    "detached": (_loss(torch.Tensor.detach), "train_step returned a loss without a gradient."),
    "complex": (
        _loss(lambda loss: torch.complex(loss, loss)),
        "train_step returned a complex loss.\n  Broken.train_step, epoch 1, batch 1",
    ),
    "a complex number": (
        lambda out: {**out, "z": torch.complex(out["loss"].detach(), torch.ones(()))},
        "train_step returned 'z' as a complex number.\n  Broken.train_step, epoch 1, batch 1",
    ),
    "text": (lambda out: {**out, "note": "good"}, "train_step returned 'note' as str, which is neither a number nor made of tensors."),
}


@pytest.mark.parametrize(("returned", "text"), STEPS.values(), ids=STEPS)
def test_step_output_that_cannot_be_used(returned: Any, text: str) -> None:
    trainer = make_trainer(_step(returned))
    with pytest.raises(StepError) as error:
        trainer.run(1, make_loader())
    assert str(error.value).startswith(text)
    assert (returned is None) == (trainer.result is not None) and trainer.mode == "train"  # a batch may be left out


def test_metric_names_that_change_between_batches() -> None:
    class Changing(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            out = super().train_step(batch)
            return out if self.counts.processed < 2 else {"loss": out["loss"]}

    with pytest.raises(StepError, match="the step's scalars changed between two batches: mae") as error:
        make_trainer(Changing).run(1, make_loader())
    assert error.value.__notes__ == ["nbtrain: epoch 1, batch 3"]


def test_metric_on_epoch_end_that_is_no_dict() -> None:
    class Wrong(Regress):
        def metric_on_epoch_end(self) -> Any:
            return [1.0]

    with pytest.raises(
        StepError, match="metric_on_epoch_end returned list, not a dict.\n  Wrong.metric_on_epoch_end, mode 'train', epoch 1"
    ):
        make_trainer(Wrong).run(1, make_loader())


def test_batch_that_the_step_cannot_unpack_is_described_below_the_users_own_frames() -> None:
    batches = [[x, y, y] for x, y in make_loader()]
    with pytest.raises(ValueError, match="too many values to unpack") as error:
        make_trainer().run(1, batches)
    shown = "".join(traceback.format_exception(error.value))
    assert "samples.py" in shown
    assert error.value.__notes__ == [
        "Regress.train_step, epoch 1, batch 1: the batch is list of 3 "
        f"([0]: Tensor (16, 8) float32{PLACE}, [1]: Tensor (16, 1) float32{PLACE}, [2]: Tensor (16, 1) float32{PLACE})",
        "The run has not begun, no weight has changed: correct it, then run the cell again.",
    ]


def test_error_in_a_loader_names_the_place() -> None:
    class Breaks:
        def __iter__(self) -> Any:
            yield from list(make_loader())[:2]
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone") as error:
        make_trainer().run(1, Breaks())
    assert any("epoch 1, batch" in note for note in error.value.__notes__)


SAMPLES = {
    "a tensor": (torch.zeros(4, 2), "Tensor (4, 2) float32"),
    "an array": (np.zeros((4, 2)), "ndarray"),
    "a frame": (pd.DataFrame({"a": [1.0]}), "DataFrame"),
    "a tuple": ((torch.zeros(4, 2), torch.zeros(4)), "tuple of 2 ([0]: Tensor (4, 2) float32, [1]: Tensor (4,) float32)"),
}


@pytest.mark.parametrize(("given", "what"), SAMPLES.values(), ids=SAMPLES)
def test_samples_are_no_loader(given: Any, what: str) -> None:
    remedy = "Give TensorLoader(x, y, batch_size=32); or, for batches, a list: [(x, y)]."
    calls = {"loader": lambda: make_trainer().run(1, given), "valid_loader": lambda: make_trainer().run(1, make_loader(), given)}
    for name, call in calls.items() | {("loader", lambda: make_trainer().evaluate(given))}:
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value) == f"{name} must be an iterable of batches, got {what}.\n  {remedy}"


CONSTRUCTOR = {
    "unknown keyword": ({"shedulr": 1}, OptionError, "Regress takes no argument 'shedulr'.\n  Did you mean 'scheduler'?"),
    "of the optimizer": ({"lr": 0.1}, OptionError, "Regress takes no argument 'lr'.\n  It is an argument of the optimizer:"),
    "of Lightning": (
        {"limit_val_batches": 2},
        OptionError,
        "Regress takes no argument 'limit_val_batches'.\n  It is an argument of Lightning's Trainer: lightning={'limit_val_batches': ...}.",
    ),
    "unknown mode": ({"mode": "tain"}, ConfigError, "mode must be 'train' or 'test', got 'tain'.\n  Did you mean 'train'?"),
    "no optimizer": ({"optimizer": None}, ConfigError, "Mode 'train' needs an optimizer."),
    "no such optimizer": (
        {"optimizer": "adam"},
        ConfigError,
        "optimizer must be an Optimizer, a function, a list, a dict or None, got 'adam'.",
    ),
    "factory of nothing": ({"optimizer": lambda params: None}, ConfigError, "The optimizer factory returned NoneType."),
    "no device": ({"device": "gpu9"}, ConfigError, "device='gpu9' is invalid."),
    "a device by its number": (
        {"device": 0},
        ConfigError,
        'device must be a string, a device or a list, got 0.\n  Name it: "cuda:0"; with MultiGPUAddon',
    ),
    "devices by their numbers": ({"device": [0, 1]}, ConfigError, 'device[0] must be a string or a device, got 0.\n  Name it: "cuda:0"'),
    "a device of another package": (
        {"device": "npu:1"},
        ConfigError,
        "device='npu:1' is invalid.\n  PyTorch learns of this device by `import torch_npu`",
    ),
    "missing device": ({"device": "cuda:99"}, ConfigError, "device='cuda:99' is not available: PyTorch sees"),
    "several devices": ({"device": ["cpu", "cpu"]}, ConfigError, "device=['cpu', 'cpu'] are 2 devices."),
    "monitor of unknown direction": ({"monitor": "val_fun"}, ConfigError, "monitor='val_fun': is higher or lower better?"),
    "monitor with a typing error": (
        {"monitor": "val_los"},
        ConfigError,
        "monitor='val_los': is higher or lower better?\n  Did you mean 'val_loss'? If not, give monitor_mode=",
    ),
    "unknown monitor_mode": ({"monitor_mode": "least"}, ConfigError, "monitor_mode must be 'min', 'max' or None, got 'least'."),
    "negative clip": ({"gradient_clip": -1.0}, ConfigError, "gradient_clip=-1.0 must be 0 or a positive number."),
    "a callback that resumes": (
        {"lightning": {"callbacks": [OnExceptionCheckpoint("somewhere")]}},
        ConfigError,
        "With OnExceptionCheckpoint, Lightning resumes from its checkpoint in each run, without nbtrain's knowledge.",
    ),
    "ours": ({"lightning": {"max_epochs": 3}}, OptionError, "lightning={...} takes no argument 'max_epochs'.\n  Use run(n_epoch=...)."),
    "Lightning knows not": (
        {"lightning": {"callback": 1}},
        OptionError,
        "lightning={...} takes no argument 'callback'.\n  Did you mean 'callbacks'?",
    ),
}


@pytest.mark.parametrize(("options", "kind", "text"), CONSTRUCTOR.values(), ids=CONSTRUCTOR)
def test_constructor_refuses(options: dict[str, Any], kind: type[NbtrainError], text: str) -> None:
    with pytest.raises(kind) as error:
        make_trainer(**options)
    assert str(error.value).startswith(text)


def test_unknown_keyword_is_a_type_error_and_wrong_value_a_value_error() -> None:
    with pytest.raises(TypeError):
        make_trainer(nonsense=1)
    with pytest.raises(ValueError):
        make_trainer(mode="nonsense")


def test_unknown_mode_in_toggle() -> None:
    with pytest.raises(ConfigError, match="mode must be 'train', 'test' or None, got 'valid'"):
        make_trainer().toggle("valid")


def test_model_that_is_no_module() -> None:
    with pytest.raises(ConfigError, match="model must be a Module, got a function."):
        Regress(make_model, device="cpu")


RUN: dict[str, tuple[tuple[Any, ...], str]] = {
    "empty loader": ((1, []), "The loader is empty: it has no batch."),
    "empty valid_loader": ((1, [1], []), "The valid_loader is empty: it has no batch."),
    "no iterable": ((1, 7), "loader must be an iterable, a dict, a LightningDataModule or a LightningModule, got 7."),
    "negative epochs": ((-1, [1]), "n_epoch=-1 must be an integer of at least 0."),
    "no number": ((1.5, [1]), "n_epoch must be an integer, got 1.5."),
}


@pytest.mark.parametrize(("arguments", "text"), RUN.values(), ids=RUN)
def test_run_refuses_before_anything_has_happened(arguments: Any, text: str) -> None:
    trainer = make_trainer()
    with pytest.raises(ConfigError) as error:
        trainer.run(*arguments)
    assert str(error.value).startswith(text) and trainer.counts.processed == 0 and trainer.result is None


def test_generator_works_once_and_then_says_so() -> None:
    trainer = make_trainer()
    generator = (batch for batch in list(make_loader()))
    trainer.run(1, generator)
    with pytest.raises(StepError, match="The loader gave no batch"):
        trainer.run(1, generator)


def test_optimizer_of_another_model() -> None:
    other = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="The optimizer has none of the parameters of Sequential"):
        make_trainer(optimizer=other).run(1, make_loader())


def test_monitor_that_never_appears() -> None:
    trainer = make_trainer(monitor="val_f1")
    with pytest.raises(ConfigError, match="monitor='val_f1' is not among this run's metrics: train_loss, train_mae."):
        trainer.run(1, make_loader())


class Half(Trainer):
    """Has a step for training alone."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}


NO_TRAIN_STEP = "Trainer has no train_step.\n  Write train_step(self, batch), which returns a dict with 'loss'."
NO_TEST_STEP = "Half has no test_step.\n  Write test_step(self, batch), which returns a dict of metrics."
UNWRITTEN: dict[str, tuple[Callable[[], Any], str]] = {
    "train_step": (lambda: make_trainer(Trainer).run(1, make_loader()), NO_TRAIN_STEP),
    "test_step of a validation": (lambda: make_trainer(Half).run(1, make_loader(), make_valid()), NO_TEST_STEP),
    "test_step of mode test": (lambda: make_trainer(Half, mode="test").run(1, make_valid()), NO_TEST_STEP),
    "test_step of evaluate": (lambda: make_trainer(Half).evaluate(make_valid()), NO_TEST_STEP),
    "test_step of predict": (lambda: make_trainer(Half).inference(make_valid()), NO_TEST_STEP),
    "both in check": (lambda: make_trainer(Trainer).check(next(iter(make_valid()))), NO_TRAIN_STEP),
}


@pytest.mark.parametrize(("run", "text"), UNWRITTEN.values(), ids=UNWRITTEN)
def test_step_that_is_not_written_is_refused(run: Callable[[], Any], text: str) -> None:
    with pytest.raises(StepError) as error:
        run()
    assert str(error.value) == text


def test_nothing_has_begun_where_a_step_is_not_written(tmp_path: Path) -> None:
    trainer = make_trainer(Half, save_path=tmp_path / "runs")
    with pytest.raises(StepError):
        trainer.run(1, make_loader(), make_valid())
    assert trainer.result is None and trainer.history.epochs == [] and not (tmp_path / "runs").exists()
    assert trainer.run(1, make_loader()).status == "completed"
    assert trainer.run(0, make_loader(), make_valid()).status == "completed"  # where nothing is validated, nothing is missing


def test_copies_of_a_trainer_lack_the_commands_of_addons_that_were_not_added() -> None:
    trainer = make_trainer()
    for copied in (copy.copy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert not any(hasattr(copied, command) for command in ("save_state", "load_state", "apply_average"))


def test_own_step_of_an_object_is_one() -> None:
    trainer = make_trainer(Half)
    trainer.test_step = trainer.train_step
    assert "val_loss" in trainer.run(1, make_loader(), make_valid()).metrics


SCHEDULES = {
    "no schedule": (3, "scheduler must be an LRScheduler, a ReduceLROnPlateau, a function, a list, a dict or None, got 3."),
    "a class": (torch.optim.lr_scheduler.StepLR, "StepLR can't step in a run.\n  Give scheduler=StepLR(optimizer, ...), which steps after"),
    "a partial": (
        partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        "partial can't step in a run.\n  Give scheduler=StepLR(optimizer, step_size=1),",
    ),
    "another class": (Half, "scheduler=<class 'test_bad_input.Half'> is not a schedule."),
    "an optimizer": (lambda optimizer, plan: optimizer, "The scheduler factory returned Adam, which is an optimizer."),
    "nothing": (lambda optimizer, plan: None, "The scheduler factory returned NoneType, which has no step()."),
    "no number": (lambda step: "fast", "scheduler(0) returned str, not a number."),
}


@pytest.mark.parametrize(("scheduler", "text"), SCHEDULES.values(), ids=SCHEDULES)
def test_scheduler_that_is_none(scheduler: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer(scheduler=scheduler).run(1, make_loader())
    assert str(error.value).startswith(text)


def test_scheduler_of_another_optimizer() -> None:
    optimizers = [torch.optim.SGD(make_model().parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ConfigError, match="StepLR belongs to another optimizer"):
        resolve_schedule(torch.optim.lr_scheduler.StepLR(optimizers[0], 1), optimizers[1], None)  # type: ignore[arg-type]


def test_addon_that_is_not_there() -> None:
    with pytest.raises(AddOnError, match=r"Regress has no GradientClipAddon.\n  Make it with Regress.add_on\(GradientClipAddon\)."):
        make_trainer()[GradientClipAddon]


def test_model_left_in_eval_mode_is_put_right_and_said() -> None:
    trainer = make_trainer(model=make_model().eval())
    events = []
    trainer.recorder.add(type("Sink", (), {"update": staticmethod(events.append)})())
    trainer.run(1, make_loader())
    assert trainer.model.training
    assert [e.data["text"] for e in events if e.kind == "note"] == ["Sequential was in eval mode; it is in train mode now."]


def test_lightning_is_quiet_and_its_logger_is_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    L.pytorch._logger.setLevel(logging.INFO)
    make_trainer().run(1, make_loader(), make_valid())
    assert capsys.readouterr() == ("", "")
    assert L.pytorch._logger.level == logging.INFO
