"""An error in a LightningModule's step pauses the run of `from_lightning`; repaired, it equals Lightning's own run, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning_modules import Lit, by_lightning
from samples import DEVICE, make_loader, make_valid, some, without_times

from nbtrain import Trainer
from nbtrain.errors import ConfigError, StepError


class Whole(Lit):
    """Logs, counts and evaluates; `fault` is called in its steps."""

    fault: Callable[[str], None] = staticmethod(lambda place: None)  # pyright: ignore[reportAssignmentType]

    def __init__(self, seed: int = 0, lr: float = 1e-2) -> None:
        super().__init__(seed, lr)
        self.n_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fault("before")
        self.n_seen += len(batch[0])
        loss = self.loss(batch) * torch.rand(())
        self.log("train_loss", loss)
        self.log("scale", loss * 2, on_step=False, on_epoch=True)
        self.mse(self(batch[0]), batch[1])
        self.log("mse", self.mse, on_step=False, on_epoch=True)
        self.fault("after")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.fault("valid")
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.fault("after valid")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Raises:
    """Raises at call number `at` of `place`, once."""

    left = 0  # of the class: an object that the module holds is restored after an error

    def __init__(self, place: str, at: int) -> None:
        self.place = place
        Raises.left = at

    def __call__(self, place: str) -> None:
        if place == self.place:
            Raises.left -= 1
            if Raises.left == -1:
                raise ZeroDivisionError(place)


def make(module: Any, callbacks: Any = (), **options: Any) -> Any:
    lightning = {"callbacks": list(callbacks), "num_sanity_val_steps": 0}
    return Trainer.from_lightning(module, log_bar=False, lightning=lightning, **{"device": DEVICE, "on_error": "pause"} | options)


def state(module: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()} | {"n_seen": module.n_seen}


@pytest.fixture(autouse=True)
def no_waiting_runs() -> Iterator[None]:
    yield
    Whole.fault = staticmethod(lambda place: None)  # pyright: ignore[reportAttributeAccessIssue]


FAULTS = [("before", 0), ("after", 0), ("after", 7), ("before", 12), ("valid", 1), ("after valid", 4)]


@pytest.mark.parametrize("fault", some(FAULTS, 2))
def test_repaired_run_equals_lightnings_own(fault: tuple[str, int]) -> None:
    place, at = fault
    plain = by_lightning(Whole(), 3, make_loader(own_generator=True), make_valid())
    unbroken = make(Whole(), on_error="raise")
    torch.manual_seed(7)
    unbroken.run(3, make_loader(own_generator=True), make_valid())
    module = Whole()
    module.fault = Raises(place, at)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = make(module)
    torch.manual_seed(7)
    with pytest.raises(ZeroDivisionError):
        trainer.run(3, make_loader(own_generator=True), make_valid())
    assert trainer.control.state == "paused" and trainer.failure.what in ("training_step", "validation_step")
    assert trainer.resume().status == "completed"
    assert state(plain) == state(unbroken.model) == state(trainer.model)
    assert without_times(trainer.history.epochs) == without_times(unbroken.history.epochs)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # Lightning's, for a batch that is left out
def test_skipped_batch_leaves_the_weights_as_they_were() -> None:
    whole = list(make_loader(own_generator=True, shuffle=False))

    class Bad(Whole):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if float(batch[0].sum()) == float(whole[1][0].sum()):
                raise ValueError("a bad batch")
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

    trainer = make(Bad())
    with pytest.raises(ValueError, match="a bad batch"):
        trainer.run(1, whole)
    before = state(trainer.model)
    seen = []

    class Looks(L.Callback):
        def on_train_batch_end(self, pl_trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                seen.append(state(trainer.model))

    trainer.module.trainer.callbacks.append(Looks())
    assert trainer.resume(skip=True).status == "completed"
    assert seen == [before] and state(trainer.model) != before


REDEFINED = """
class Fixed(Whole):
    def training_step(self, batch, batch_idx):
        {line}
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.n_ends = {n}
"""


def define(line: str, n: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    space: dict[str, Any] = {"Whole": Whole, "__name__": __name__}
    exec(REDEFINED.format(line=line, n=n), space)
    monkeypatch.setattr(sys.modules[__name__], "Fixed", space["Fixed"], raising=False)
    return space["Fixed"]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_module_that_is_defined_again_is_used_with_its_steps_and_hooks(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = define("raise ValueError('wrong')", 1, monkeypatch)()
    trainer = make(module)
    with pytest.raises(ValueError, match="wrong"):
        trainer.run(2, make_loader(own_generator=True))
    fixed = define("pass", 2, monkeypatch)
    assert trainer.resume(*([fixed] if by_name else [])).status == "completed"
    assert type(module) is fixed and module.n_ends == 2 and len(trainer.history.epochs) == 2


def test_a_new_definition_that_fails_too_leaves_the_run_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    first = define("raise ValueError('wrong')", 1, monkeypatch)
    module = first()
    trainer = make(module)
    with pytest.raises(ValueError, match="wrong"):
        trainer.run(1, make_loader())
    with pytest.raises(KeyError):
        trainer.resume(define("raise KeyError('also wrong')", 2, monkeypatch))
    assert type(module) is not first and trainer.control.state == "paused"
    assert trainer.resume(define("pass", 3, monkeypatch)).status == "completed" and module.n_ends == 3


def test_a_loss_that_is_not_finite_pauses_before_its_update() -> None:
    class Diverges(Whole):
        factor = float("nan")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (self.factor if self.global_step == 2 else 1.0)

    trainer = make(Diverges(), device="cpu")  # another device would have to be waited for
    with pytest.raises(Exception, match="The training loss is nan"):
        trainer.run(1, make_loader())
    assert trainer.control.state == "paused" and trainer.model.global_step == 2
    trainer.model.factor = 1.0
    assert trainer.resume().status == "completed"


def test_a_class_of_another_kind_is_refused_and_the_run_stays_paused() -> None:
    module = Whole()
    module.fault = Raises("before", 1)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = make(module)
    with pytest.raises(ZeroDivisionError):
        trainer.run(1, make_loader())
    with pytest.raises(ConfigError, match="is not a LightningModule.\n  Give the class of your module"):
        trainer.resume(Trainer)
    assert trainer.control.state == "paused" and trainer.resume().status == "completed"


# -- what a LightningModule's first batch or its signature shows
WRONG: dict[str, tuple[Any, str]] = {
    "without a loss": ({"acc": 1.0}, "training_step returned {'acc'}, without 'loss'."),
    "a number": (1.0, "training_step returned its loss as float, which has no gradient."),
    "a number in a dict": ({"loss": 1.0}, "training_step returned its loss as float, which has no gradient."),
}


@pytest.mark.parametrize(("returned", "text"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("on_error", ["raise", "pause"])
def test_training_step_without_a_loss_has_the_sentence_of_a_train_step(returned: Any, text: str, on_error: str) -> None:
    class Wrong(Whole):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.rand(1)
            return returned

    module = Wrong()
    trainer, before, random = make(module, on_error=on_error), state(module), torch.get_rng_state()
    with pytest.raises(StepError) as error:
        trainer.run(2, list(make_loader(own_generator=True)), make_valid())
    assert str(error.value).startswith(f"{text}\n  Wrong.training_step, epoch 1, batch 1\n")
    assert state(module) == before and trainer.counts.step == 0
    assert on_error == "raise" or torch.equal(random, torch.get_rng_state())


def test_step_of_a_module_that_needs_more_than_lightning_gives_is_refused_before_the_run() -> None:
    class Wrong(Whole):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
            return self.loss(batch)

    trainer = make(Wrong())
    with pytest.raises(StepError) as error:
        trainer.run(1, make_loader())
    assert str(error.value).startswith("Wrong.training_step(batch, batch_idx, optimizer_idx) can't be called with the batch")
    assert trainer.train_state.run == 0 and trainer.control.state == "idle"
