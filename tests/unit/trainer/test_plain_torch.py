"""What a trainer does, beside a plain PyTorch loop: random numbers, the user's batches, hooks of optimizers, clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from samples import DEVICE, Regress, make_loader, make_model, make_trainer, make_valid, on_device, plain_loop, same_weights
from torch import nn
from torch.nn.functional import mse_loss

from nbtrain import MultiOptimizerTrainer
from nbtrain.loops.own_loops import use_own_loops
from nbtrain.rng import random_state

BOTH = pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock"])


def make(*, lean: bool, kind: Any = Regress, **options: Any) -> Any:
    trainer = make_trainer(kind, **options)
    trainer.short_way = lean
    return trainer


def run_in_mode_test(trainer: Any) -> None:
    trainer.toggle("test")
    trainer.run(1, make_valid())
    trainer.toggle("train")


BATCH = next(iter(make_loader(own_generator=True)))
PASSES: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda trainer: trainer.evaluate(make_valid()),
    "mode test": run_in_mode_test,
    "validate": lambda trainer: trainer.validate(make_valid()),
    "inference": lambda trainer: trainer.inference(make_valid()),
    "predict": lambda trainer: trainer.predict(torch.zeros(2, 8)),
    "run_batch": lambda trainer: (trainer.toggle("test"), trainer.run_batch(BATCH), trainer.toggle("train")),
}


@pytest.mark.parametrize("name", PASSES)
@BOTH
def test_a_pass_that_trains_nothing_leaves_the_random_numbers_of_the_training(name: str, lean: bool) -> None:
    trainer = make(lean=lean)
    trainer.run(1, make_loader())
    before = random_state()
    PASSES[name](trainer)
    after = random_state()
    assert torch.equal(before["torch"], after["torch"]) and before["python"] == after["python"]
    assert all(np.array_equal(a, b) for a, b in zip(before["numpy"], after["numpy"]))
    trainer.run(1, make_loader())
    assert same_weights(trainer.model, plain_loop(2, make_loader())[0])


class Pops(Regress):
    """Takes the label out of its batch, and puts a draft into it."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        y = batch.pop("y" if isinstance(batch, dict) else -1)
        return {"loss": mse_loss(self.model(batch["x"] if isinstance(batch, dict) else batch[0]), y)}


@pytest.mark.parametrize("as_dict", [True, False])
@BOTH
def test_a_step_that_pops_from_its_batch_leaves_a_list_of_batches_as_it_was(lean: bool, as_dict: bool) -> None:
    batches: list[Any] = [{"x": x, "y": y} if as_dict else [x, y] for x, y in make_loader(own_generator=True)]
    trainer = make(lean=lean, kind=Pops, model=make_model())
    trainer.run(2, batches, batches)
    assert all(len(batch) == 2 for batch in batches)
    assert same_weights(trainer.model, plain_loop(2, [(b["x"], b["y"]) if as_dict else b for b in batches])[0])


class NeedsClosure(torch.optim.SGD):
    """An optimizer of your own: it calls its closure, and more than once."""

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is not None
        loss = closure()
        super().step()
        closure()
        super().step()
        return loss


class Own(torch.optim.SGD):
    """An optimizer of your own that takes no notice of its closure."""

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().step(closure)


class OneStepLBFGS(torch.optim.LBFGS):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, max_iter=1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, Own, OneStepLBFGS, NeedsClosure])
@BOTH
def test_a_hook_before_the_optimizers_step_sees_the_gradients_of_this_update(kind: Any, lean: bool) -> None:
    def clipping(model: nn.Module) -> Any:
        optimizer = kind(model.parameters(), lr=0.05)
        seen: list[float] = []

        def clip(*args: Any) -> None:
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))

        optimizer.register_step_pre_hook(clip)
        return optimizer, seen

    loader = [(x, y) for x, y in make_loader(own_generator=True)]
    model = make_model().to(DEVICE)
    optimizer, seen = clipping(model)
    trainer = make(lean=lean, model=model, optimizer=optimizer)
    trainer.run(2, loader)

    plain = make_model().to(DEVICE)
    optimizer, expected = clipping(plain)
    for x, y in on_device(loader) * 2:
        first: list[Any] = []

        def closure(x: Any = x, y: Any = y, first: list[Any] = first) -> Any:
            if first:  # what was computed before the step is the closure's first answer
                return first.pop()
            optimizer.zero_grad()
            loss = mse_loss(plain(x), y)
            loss.backward()
            return loss

        first.append(closure())
        optimizer.step(closure)
    assert seen == expected and same_weights(model, plain)


class Parts(MultiOptimizerTrainer):
    model: Any

    def train_step_a(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.model["b"](self.model["a"](x)), y)}

    train_step_b = train_step_a


def test_a_hook_of_one_of_several_optimizers_sees_the_gradients_of_its_turn() -> None:
    loader, norms = [*make_loader(own_generator=True)], list[float]()
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(4, 1)}))
    model, plain = models[0], models[1].to(DEVICE)
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"}
    optimizers["b"].register_step_pre_hook(lambda *args: norms.append(float(nn.utils.clip_grad_norm_(model["b"].parameters(), 0.1))))
    Parts(model, DEVICE, optimizers=optimizers, log_bar=False).run(1, loader)
    expected = list[float]()
    steps = {name: torch.optim.SGD(plain[name].parameters(), lr=0.1) for name in "ab"}
    for x, y in on_device(loader):
        for name in "ab":
            plain.zero_grad()
            mse_loss(plain["b"](plain["a"](x)), y).backward()
            if name == "b":
                expected.append(float(nn.utils.clip_grad_norm_(plain["b"].parameters(), 0.1)))
            steps[name].step()
    assert norms == expected and same_weights(model, plain)


@pytest.mark.parametrize("several", [True, False])
@BOTH
def test_clipping_in_another_order_of_the_parameters_equals_torchs_over_the_models(lean: bool, several: bool) -> None:
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        biases, weights = ([p for n, p in model.named_parameters() if n.endswith(end)] for end in ("bias", "weight"))
        return torch.optim.SGD([{"params": biases}, {"params": weights}] if several else biases + weights, lr=0.1)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)), nn.Linear(8, 1))
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)), nn.Linear(8, 1))
    plain.to(DEVICE).load_state_dict(model.state_dict())
    loader = [*make_loader(own_generator=True)]
    trainer = make(lean=lean, model=model, optimizer=groups(model), gradient_clip=0.05)
    trainer.run(3, loader)
    optimizer, norms = groups(plain), []
    for x, y in on_device(loader) * 3:
        optimizer.zero_grad()
        mse_loss(plain(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        optimizer.step()
    assert same_weights(model, plain)
    assert trainer.history.steps["train"]["train_grad_norm"] == norms


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_an_evaluation_of_nothing_raises_as_lightnings_does(verb: str) -> None:
    def error(*, own: bool) -> str:
        pl_trainer = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator=DEVICE, devices=1)
        if own:
            use_own_loops(pl_trainer)
        module = make(lean=True).as_lightning_module()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            getattr(pl_trainer, verb)(module, None)
        return f"{type(caught.value).__name__}: {caught.value}"

    assert error(own=True) == error(own=False)


class Slope(Regress):
    """Evaluates how steep the model is, as a physics-informed net does."""

    def test_step(self, batch: Any) -> dict[str, Any]:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.model(x).sum(), x)
        return {"loss": slope.square().mean()}


class WithGradients(Slope):
    test_step = torch.enable_grad()(Slope.test_step)


@BOTH
def test_an_evaluation_that_needs_gradients_says_how_and_has_those_of_a_plain_loop(lean: bool) -> None:
    for call in (lambda trainer: trainer.run(1, make_loader(), make_valid()), lambda trainer: trainer.evaluate(make_valid())):
        with pytest.raises(RuntimeError, match="element 0") as caught:
            call(make(lean=lean, kind=Slope))
        assert "An evaluation computes no gradients: write @torch.enable_grad() above test_step." in caught.value.__notes__
    trainer = make(lean=lean, kind=WithGradients)
    trainer.run(1, make_loader(), make_valid())
    recorded, expected, n = trainer.evaluate(make_valid())["loss"], 0.0, 0
    trainer.model.eval()
    for x, _ in on_device(make_valid()):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(trainer.model(x).sum(), x)
        expected, n = expected + slope.square().mean().item() * len(x), n + len(x)
    assert trainer.history.last["val_loss"] == recorded == pytest.approx(expected / n, rel=1e-6)
    assert all(p.grad is None for p in trainer.model.parameters())
