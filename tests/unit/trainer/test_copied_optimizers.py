"""A copy of a trainer trains as the trainer does, whatever its optimizers hold: hooks, other optimizers, values of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import make_loader, make_trainer, same_weights
from torch.optim import LBFGS, SGD, Optimizer


class Lookahead(Optimizer):
    """Wraps another optimizer, and every second time goes half of the way back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner, self.every = SGD(self.param_groups, lr=0.1, momentum=0.9), 2
        self.param_groups = self.inner.param_groups
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for p, slow in zip(self.param_groups[0]["params"], self.slow):
            p.lerp_(slow, 1 / self.every)
            slow.copy_(p)
        return loss


def halve(optimizer: Optimizer, args: Any, options: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad *= 0.5


def hooked(params: Any) -> Optimizer:
    optimizer = SGD(params, lr=0.1)
    optimizer.register_step_pre_hook(halve)
    return optimizer


def several(params: Any) -> list[Optimizer]:
    first, *others = params
    return [hooked([first]), Lookahead(others)]


KINDS: dict[str, Callable[[Any], Any]] = {
    "a hook": hooked,
    "one around another": Lookahead,
    "LBFGS": lambda params: LBFGS(params, lr=0.1, max_iter=3),
    "several": several,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))], ids=["copied", "pickled"])
def test_a_copy_trains_as_the_trainer_does(copied: Callable[[Any], Any], name: str) -> None:
    whole = make_trainer(optimizer=KINDS[name])
    whole.run(1, make_loader())
    other = copied(whole)
    for trainer in (whole, other):
        torch.manual_seed(3)
        trainer.run(1, make_loader())
    assert same_weights(whole.model, other.model)
