"""`replay(step).debug()` names the first module whose output is not finite, whatever the model looks like, or what else is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_trainer
from torch import Tensor, nn

from nbtrain.travel.replay import Diagnosis

BAD_STEP = 3


class Overflow(nn.Module):
    """Passes on what `inner` makes of its input; in its `bad_call`-th call that is divided by zero, which no module does."""

    def __init__(self, inner: nn.Module | None = None, bad_call: int = BAD_STEP) -> None:
        super().__init__()
        self.inner, self.bad_call = inner if inner is not None else nn.Identity(), bad_call
        self.n_calls: Tensor
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return self.inner(x) / (self.n_calls != self.bad_call)


class Between(Overflow):
    """The division is in the forward of the whole model, between two of its modules."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class Twice(nn.Module):
    """Calls one module twice in each step: its second call is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = Overflow(bad_call=2 * BAD_STEP), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(self.shared(x)))


class InDicts(nn.Module):
    """Its submodules are in a list, and the model's parts take and return dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 8), Overflow(), nn.Linear(8, 1)])

    def forward(self, x: Tensor) -> Tensor:
        found = {"x": x}
        for part in self.parts:
            found = {"x": part(found["x"])}
        return found["x"]


def in_a_row(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *middle, nn.Linear(8, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "in a row": (lambda: in_a_row(Overflow()), "1", "its input is finite"),
    "nested": (lambda: in_a_row(nn.Sequential(nn.ReLU(), nn.Sequential(Overflow()))), "1.1.0", "its input is finite"),
    "at the end of a block": (lambda: in_a_row(Overflow(nn.Linear(8, 8))), "1", "its input is finite"),
    "at the end of the model": (lambda: nn.Sequential(nn.Linear(8, 8), Overflow(nn.Linear(8, 1))), "1", "its input is finite"),
    "between modules": (Between, "head", "its input is not finite either"),
    "called twice": (Twice, "shared", "its input is finite"),
    "in a list": (InDicts, "parts.1", "its input is finite"),
}


def diagnosis(kind: Any = Regress, model: nn.Module | None = None, loader: Any = None) -> Diagnosis:
    torch.manual_seed(0)
    trainer = make_trainer(kind, model=model, keep_states=True, nonfinite="ignore")
    trainer.run(1, loader or make_loader())
    return trainer.replay(BAD_STEP).debug()


@pytest.mark.parametrize("name", MODELS)
def test_first_module_whose_output_is_not_finite_is_named(name: str) -> None:
    make, module, text = MODELS[name]
    found = diagnosis(model=make())
    assert found.module == module and text in str(found)
    assert str(found).startswith(f"The output of {module} (")


def test_a_loss_that_alone_is_not_finite_names_no_module() -> None:
    class Bad(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            found = super().train_step(batch)
            return found | {"loss": found["loss"] / (self.counts.step != BAD_STEP - 1)}

    assert diagnosis(Bad) == Diagnosis("The outputs of all modules are finite, and the loss is not: look at how train_step computes it.")


class Steep(nn.Module):
    """Adds zero, as the root of zero, whose gradient is infinite in the third step; where it is `multiplied` by zero, it is no number."""

    def __init__(self, multiplied: bool) -> None:
        super().__init__()
        self.multiplied, self.shift = multiplied, nn.Parameter(torch.ones(1))
        self.n_calls: Tensor
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        zero = self.shift * 0 if self.multiplied else self.shift - self.shift.detach()
        return x + (zero + (self.n_calls != BAD_STEP)).sqrt()


def test_a_gradient_that_alone_is_not_a_number_names_the_operation() -> None:
    found = diagnosis(model=in_a_row(Steep(multiplied=True)))
    assert found.module == "" and str(found).startswith("The loss is finite, and the backward pass is not: Function 'MulBackward0'")


def test_a_gradient_that_alone_is_infinite_names_its_module() -> None:
    assert diagnosis(model=in_a_row(Steep(multiplied=False))) == Diagnosis("The gradient of 1 is not finite.", "1")


def test_a_replay_tells_what_is_not_a_number_from_what_a_layer_does_not_have() -> None:
    model = in_a_row(nn.ReLU(), Steep(multiplied=False))
    trainer = make_trainer(model=model, keep_states=True, nonfinite="ignore")
    trainer.run(1, make_loader())
    replayed = trainer.replay(BAD_STEP)
    linear, relu, steep, _ = ([str(value) for value in layer.row.values()][5:] for layer in replayed.layers)
    assert relu == ["–", "–", "–"] and steep == ["inf", "nan", "nan"] and "nan" not in linear
    assert replayed.gradients["2"] == float("inf") and replayed.updates.keys() == {"0", "2", "3"}


def test_a_batch_that_is_not_finite_is_named_before_all_modules() -> None:
    loader = [(x.clone(), y) for x, y in make_loader(shuffle=False)]
    loader[BAD_STEP - 1][0][2, 3] = torch.inf
    assert diagnosis(loader=loader) == Diagnosis("The batch has 1 value that is not finite.")
