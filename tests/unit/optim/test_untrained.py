"""What a run leaves as it is without an error is noted, and what is meant to stay is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LinearLR

from nbtrain import AccumulationAddon, Trainer

BATCHES = list(torch.ones(12, 4, 3))


class Fit(Trainer):
    """Two layers, of which the second may be of another object than the first, and a loss that may have weights."""

    weight: Any = 1.0
    after: Callable[[Any], None] = lambda self: None

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": (self.model[1](self.model[0](batch)).mean() * self.weight - 1).square() + self.more()}

    def more(self) -> Any:
        return 0.0


class ByHand(Fit):
    automatic_optimization = False

    def train_step(self, batch: Any) -> dict[str, Any]:
        output = super().train_step(batch)
        self.backward(output["loss"])
        self.optimizer.step()
        self.after()
        self.optimizer.zero_grad()
        return output


def make(kind: type[Trainer] = Fit, optimizer: Any = None, own: Any = None, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = (lambda model: SGD(model.parameters(), 0.1)) if optimizer is None else optimizer
    made = kind(model, "cpu", optimizer=optimizer(model), log_bar=False, **options)
    vars(made).update(own or {})
    return made


def notes(trainer: Any, n_epoch: int = 1) -> list[str]:
    seen: list[str] = []
    sink = type("Sink", (), {"update": staticmethod(lambda event: seen.append(event.data["text"]) if event.kind == "note" else None)})()
    trainer.recorder.add(sink)
    assert trainer.run(n_epoch, BATCHES).status == "completed"
    trainer.recorder.remove(sink)
    return seen


def at_zero(model: nn.Module) -> Any:
    return SGD([{"params": part.parameters(), "lr": 0.0} for part in model.children()], 0.1)


NO_OPTIMIZER = "In no optimizer, though the loss has a gradient for them: {}. They keep their values."
AT_ZERO = "lr was 0 in all {} updates: the optimizer has changed no weight."


def test_an_epoch_at_a_rate_of_zero_is_noted_once_at_its_end() -> None:
    trainer = make(scheduler=lambda optimizer, plan: LinearLR(optimizer, 1.0, 0.0, total_iters=plan.total_steps // 4))
    assert notes(trainer, 4) == [AT_ZERO.format(12)] and trainer.history.epochs[0]["train_loss"] > 0


@pytest.mark.parametrize("kind", [Fit, ByHand])
def test_groups_that_are_all_at_zero_are_noted_by_the_updates_that_were_made(kind: type[Trainer]) -> None:
    assert notes(make(kind, at_zero)) == [AT_ZERO.format(12)]


def test_windows_count_as_updates() -> None:
    trainer = make(Fit.add_on(AccumulationAddon), at_zero, accumulate=5)
    assert notes(trainer) == [AT_ZERO.format(3)]  # the last one ends with the epoch


def test_the_weights_of_a_loss_in_no_optimizer_are_noted() -> None:
    assert notes(make(own={"weight": nn.Parameter(torch.ones(()))})) == [NO_OPTIMIZER.format("weight")]


def test_a_head_that_was_replaced_is_noted_with_the_optimizer_of_the_old_one() -> None:
    trainer = make()
    assert not notes(trainer)
    trainer.model[1] = nn.Linear(2, 5)
    lost = "The optimizer has parameters of no module of the model or the trainer, as of a head that was replaced, "
    assert notes(trainer) == [NO_OPTIMIZER.format("1.weight, 1.bias"), f"{lost}and trains nothing with them: of shape (1, 2), (1,)."]


def test_a_loss_that_reaches_no_weight_is_noted_in_the_first_epoch_alone() -> None:
    class Detached(Fit):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model(batch).detach().mean() * self.weight}

    own = {"weight": torch.ones((), requires_grad=True)}
    said = [NO_OPTIMIZER.format("weight"), "No gradient has reached a weight that the optimizer trains."]
    assert notes(make(Detached, own=own), 2) == said


class Unused(Fit):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model[0](batch).square().mean()}


class UpdatedByHand(Fit):
    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.weight.grad is not None:
            self.weight.data -= 0.1 * self.weight.grad
            self.weight.grad = None
        return super().train_step(batch)


class OwnOptimizer(ByHand):
    def after(self) -> None:
        self.own_optimizer.step()
        self.own_optimizer.zero_grad()


def with_own_optimizer() -> Any:
    weight = nn.Parameter(torch.ones(()))
    return make(OwnOptimizer, own={"weight": weight, "own_optimizer": SGD([weight], 0.1)})


def frozen(model: Any) -> Any:
    model[0].requires_grad_(False)
    return SGD(model[1].parameters(), 0.1)


QUIET: dict[str, Callable[[], Any]] = {
    "plain": make,
    "by hand": lambda: make(ByHand),
    "unused": lambda: make(Unused, lambda model: SGD(model[0].parameters(), 0.1)),
    "unused in the optimizer": lambda: make(Unused),
    "frozen": lambda: make(optimizer=frozen),
    "an optimizer of the class": with_own_optimizer,
    "updated by hand": lambda: make(UpdatedByHand, own={"weight": nn.Parameter(torch.ones(()))}),
    "a warm-up from zero": lambda: make(scheduler=lambda optimizer, plan: LambdaLR(optimizer, lambda step: float(step > 10))),
    "one group at zero": lambda: make(
        optimizer=lambda m: SGD([{"params": m[0].parameters(), "lr": 0.0}, {"params": m[1].parameters()}], 0.1)
    ),
    "a rate that is a tensor": lambda: make(optimizer=lambda m: torch.optim.Adam(m.parameters(), torch.tensor(0.1))),
    "no rate": lambda: make(optimizer=lambda m: torch.optim.Adafactor(m.parameters())),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_meant_is_not_noted(name: str) -> None:
    assert not notes(QUIET[name](), 2)
