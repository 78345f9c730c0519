"""Every builtin exception, wherever your code raises it: it ends the run and is raised as it is; a StopIteration is named."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from samples import make_trainer
from torch import nn

from nbtrain import StepError, Trainer
from nbtrain.addons.hooks import HooksAddon
from nbtrain.errors import RunStopped

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "UnicodeDecodeError": ("utf-8", b"x", 0, 1, "x"),
    "UnicodeEncodeError": ("utf-8", "x", 0, 1, "x"),
    "UnicodeTranslateError": ("x", 0, 1, "x"),
    "BaseExceptionGroup": ("x", [ValueError()]),
    "ExceptionGroup": ("x", [ValueError()]),
}
NAMES = [
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__name__ == name
]
BATCHES = [torch.full((2, 3), float(i)) for i in range(3)]


class Raises:
    """Raises in one place, once."""

    def __init__(self, place: str, error: BaseException) -> None:
        self.place, self.error, self.is_due = place, error, True

    def at(self, place: str) -> None:
        if place == self.place and self.is_due:
            self.is_due = False
            raise self.error


class Net(nn.Linear):
    due: Raises

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.due.at("forward")
        return super().forward(x)


class Descent(torch.optim.SGD):
    due: Raises

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        def inside() -> Any:
            self.due.at("closure")
            return closure()

        return super().step(inside)


class Loader:
    def __init__(self, due: Raises) -> None:
        self.due = due

    def __len__(self) -> int:
        return len(BATCHES)

    def __iter__(self) -> Iterator[Any]:
        return map(self.read, BATCHES)

    def read(self, batch: torch.Tensor) -> torch.Tensor:
        if batch is BATCHES[1]:
            self.due.at("loader")
        return batch


class Calls(L.Callback):
    def __init__(self, due: Raises) -> None:
        self.due = due

    def on_train_batch_start(self, *args: Any) -> None:
        self.due.at("callback")

    def on_validation_batch_end(self, *args: Any) -> None:
        self.due.at("callback in a validation")


class Steps(Trainer):
    due: Raises

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.due.at("train_step")
        return {"loss": self.model(batch).square().mean()}

    def test_step(self, batch: Any) -> dict[str, Any]:
        self.due.at("test_step")
        return {"loss": self.model(batch).square().mean(), "output": batch}

    def metric_on_epoch_end(self) -> dict[str, float]:
        self.due.at("metric_on_epoch_end")
        return {}


def make(due: Raises) -> Any:
    model = Net(3, 1)
    model.due = due
    optimizer = Descent(model.parameters(), lr=0.01)
    optimizer.due = due
    trainer = make_trainer(
        Steps.add_on(HooksAddon), model=model, optimizer=optimizer, hooks={"after_optimizer_step": lambda trainer: due.at("hook")},
        lightning={"callbacks": [Calls(due)], "num_sanity_val_steps": 0},
    )  # fmt: skip
    trainer.due = due
    return trainer


PLACES = ("train_step", "test_step", "forward", "metric_on_epoch_end", "hook", "callback", "callback in a validation", "closure", "loader")


def check(name: str, due: Raises, call: Any) -> None:
    """Check what `call` raises, and that the place is named for a StopIteration."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    error = caught.value
    if name == "StopIteration":
        assert isinstance(error, StepError) and "next(...) ran out in" in str(error) and error.__cause__ is due.error, due.place
    elif name == "KeyboardInterrupt":
        assert isinstance(error, (KeyboardInterrupt, RunStopped)), due.place
    else:
        assert error is due.error or error.__cause__ is due.error, due.place


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_of_your_code_is_the_error_of_the_run_in_each_place(name: str) -> None:
    due = Raises("", getattr(builtins, name)(*_ARGUMENTS.get(name, ("x",))))
    trainer, loader = make(due), Loader(due)
    for place in PLACES:
        due.place, due.is_due, step = place, True, trainer.current_step
        if place == "loader" and name == "StopIteration":  # ends a `for` loop
            trainer.run(1, loader, BATCHES[:1])
            assert trainer.current_step == step + 1
        else:
            check(name, due, lambda: trainer.run(1, loader, BATCHES[:1]))
    due.is_due = False
    assert trainer.run(1, loader, BATCHES[:1]).status == "completed"


@pytest.mark.parametrize("name", ["Exception", "StopIteration", "SystemExit", "GeneratorExit"])
def test_an_exception_in_an_evaluation_or_a_prediction_is_raised(name: str) -> None:
    for call in ("evaluate", "predict", "inference", "validate"):
        due = Raises("test_step", getattr(builtins, name)("x"))
        trainer = make(due)
        loader = [(batch,) for batch in BATCHES] if call == "predict" else BATCHES
        check(name, due, lambda: getattr(trainer, call)(loader if call != "predict" else Own(loader)))  # noqa: B023


class Own:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


OF_MODULE = ("training_step", "validation_step", "on_train_batch_start", "on_train_epoch_start", "on_validation_batch_end")


@pytest.mark.parametrize("name", ["Exception", "StopIteration", "SystemExit", "GeneratorExit"])
def test_an_exception_in_a_lightning_module_is_the_error_of_the_run(name: str) -> None:
    for place in OF_MODULE:
        due = Raises(place, getattr(builtins, name)("x"))

        class Lit(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 1)

            def training_step(self, batch: Any) -> Any:
                due.at("training_step")  # noqa: B023
                return self.layer(batch).mean()

            def validation_step(self, batch: Any) -> Any:
                due.at("validation_step")  # noqa: B023

            def on_train_batch_start(self, *args: Any) -> None:
                due.at("on_train_batch_start")  # noqa: B023

            def on_train_epoch_start(self) -> None:
                due.at("on_train_epoch_start")  # noqa: B023

            def on_validation_batch_end(self, *args: Any) -> None:
                due.at("on_validation_batch_end")  # noqa: B023

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        options = {"num_sanity_val_steps": 0}
        trainer = Trainer.from_lightning(Lit(), device="cpu", log_bar=False, lightning=options)
        check(name, due, lambda: trainer.run(2, BATCHES, BATCHES))  # noqa: B023
        due.is_due = False
        assert trainer.run(1, BATCHES, BATCHES).status == "completed"
