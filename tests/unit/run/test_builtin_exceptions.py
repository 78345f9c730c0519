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

    def setup(self, *args: Any, **options: Any) -> None:
        self.due.at("setup")

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
    hooks = {"after_optimizer_step": lambda trainer: due.at("hook")}
    trainer = make_trainer(
        Steps.add_on(HooksAddon), model=model, optimizer=optimizer, hooks=hooks,
        lightning={"callbacks": [Calls(due)], "num_sanity_val_steps": 0},
    )  # fmt: skip
    trainer.due = due
    return trainer


SIGNS = ("Exception", "StopIteration", "SystemExit", "GeneratorExit")
BEFORE = ("setup",)  # a loop
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
    for place in (*BEFORE, *PLACES) if name in SIGNS else PLACES:
        due.place, due.is_due, step = place, True, trainer.current_step
        if place == "loader" and name == "StopIteration":  # ends a `for` loop
            trainer.run(1, loader, BATCHES[:1])
            assert trainer.current_step == step + 1
        else:
            check(name, due, lambda: trainer.run(1, loader, BATCHES[:1]))
    due.is_due = False
    assert trainer.run(1, loader, BATCHES[:1]).status == "completed"


@pytest.mark.parametrize("name", SIGNS)
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


OF_MODULE = [  # each is called in a run of one epoch, and of a validation
    "training_step", "validation_step", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end",
    "on_train_epoch_end", "on_before_batch_transfer", "on_after_batch_transfer", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start",
    "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end",
]  # fmt: skip
OF_CALLBACK = [name for name in OF_MODULE if hasattr(L.Callback, name)]


def raising(base: type[Any], name: str, due: Raises) -> Any:
    """A class whose method `name` raises what is due, and then does what that of `base` does."""
    inner = getattr(base, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        due.at(name)
        return inner(self, *args, **options)

    return type("Raising", (base,), {name: method})()


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", SIGNS)
def test_an_exception_of_a_lightning_module_or_a_callback_beside_it_is_the_error_of_the_run(name: str) -> None:
    for base, places in ((Lit, OF_MODULE), (L.Callback, OF_CALLBACK)):
        for place in places if name == "StopIteration" else places[:2]:
            due = Raises(place, getattr(builtins, name)("x"))
            made = raising(base, place, due)
            module, callbacks = (made, []) if base is Lit else (Lit(), [made])
            options = {"num_sanity_val_steps": 0, "callbacks": callbacks}
            trainer = Trainer.from_lightning(module, device="cpu", log_bar=False, lightning=options)
            check(name, due, lambda: trainer.run(2, BATCHES, BATCHES))  # noqa: B023
            due.is_due = False
            assert trainer.run(1, BATCHES, BATCHES).status == "completed"


class Reads(Lit):
    """Its step reads the batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.layer(next(dataloader_iter)[0]).mean()


class Cuts(Lit):
    """Ends each epoch before its second batch, as Lightning lets it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx else None


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.parametrize(("kind", "n_steps"), [(Reads, 6), (Cuts, 2)])
def test_what_ends_an_epoch_of_lightnings_is_no_error(kind: type[Lit], n_steps: int) -> None:
    trainer = Trainer.from_lightning(kind(), device="cpu", log_bar=False)
    assert trainer.run(2, BATCHES).status == "completed" and trainer.current_step == n_steps
