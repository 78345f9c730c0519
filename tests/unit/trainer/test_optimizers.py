"""Optimizers of others: closures that are called several times or never, groups without a learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import DEVICE, Regress, make_loader, make_model, make_trainer, make_valid, on_device, same_weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer

from nbtrain import AccumulationAddon, ConfigError, GradientClipAddon, SystemMonitorAddon, Trainer
from nbtrain.variants.multi_optimizer import MultiOptimizerTrainer


class SAM(Optimizer):
    """Sharpness-aware minimization, as its users write it: two gradients a step, the second one at other weights."""

    def __init__(self, params: Any, rho: float = 0.05, lr: float = 0.01) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure()
        [group] = self.param_groups
        pushed = [(p, group["rho"] * p.grad / p.grad.norm().clamp(min=1e-12)) for p in group["params"]]
        for p, push in pushed:
            p += push
        closure()
        for p, push in pushed:
            p -= push
            p -= group["lr"] * p.grad
        return loss


class Rate(Optimizer):
    """Plain descent whose learning rate has another name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rate": 0.01})

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["rate"] * p.grad
        return loss


class Deaf(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class Closed(SGD):
    def step(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().step()


def first_losses(make: Any) -> tuple[nn.Module, list[float]]:
    """A plain loop of 3 epochs: the loss of each batch before its update."""
    model = make_model().to(DEVICE)
    optimizer, losses, loader = make(model.parameters()), [], make_loader(own_generator=True)
    for _ in range(3):
        for x, y in on_device(loader):
            seen: list[float] = []

            def closure(x: Any = x, y: Any = y, seen: list[float] = seen) -> Any:
                with torch.enable_grad():
                    optimizer.zero_grad()
                    loss = mse_loss(model(x), y)
                    loss.backward()
                seen.append(loss.item())
                return loss.detach()

            optimizer.step(closure)
            losses.append(seen[0])
    return model, losses


REPEATING = {"SAM": SAM, "LBFGS": lambda p: torch.optim.LBFGS(p, 0.01, max_iter=3)}


@pytest.mark.parametrize("clip", [0.0, 1e6])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", REPEATING)
def test_closures_that_are_called_several_times_make_one_row(name: str, lean: bool, clip: float) -> None:
    loader = make_loader(own_generator=True)
    model, losses = first_losses(REPEATING[name])
    trainer = make_trainer(optimizer=REPEATING[name], gradient_clip=clip)
    trainer.short_way = lean
    seen: list[float] = []
    for _ in range(3):
        trainer.run(1, loader)
        seen += trainer.log_train["loss"]
        assert {len(column) for column in trainer.log_train.values()} == {len(loader)}
    assert trainer.counts.processed == len(losses) == 15 and list(trainer.history.steps["train"].steps) == list(range(1, 16))
    assert seen == losses
    assert same_weights(trainer.model, model)


@pytest.mark.parametrize("name", REPEATING)
def test_a_single_batch_returns_what_its_step_returned_before_the_update(name: str) -> None:
    trainer, batch = make_trainer(optimizer=REPEATING[name]), next(iter(make_loader(shuffle=False)))
    trainer.model[2].p = 0.0  # the dropout
    expected = mse_loss(make_model().eval()(batch[0]), batch[1])
    assert torch.allclose(trainer.run_batch(batch)["loss"], expected)


@pytest.mark.parametrize("lean", [False, True])
def test_each_turn_of_several_optimizers_makes_one_entry(lean: bool) -> None:
    class Two(MultiOptimizerTrainer):
        def train_step_a(self, batch: Any) -> Any:
            return {"loss": self.model["a"](batch).square().mean()}

        def train_step_b(self, batch: Any) -> Any:
            return {"loss": self.model["b"](batch).square().mean()}

        def test_step(self, batch: Any) -> Any:
            return self.train_step_a(batch)

    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    trainer = Two(model, DEVICE, optimizers={"a": REPEATING["LBFGS"], "b": SAM}, gradient_clip=1e6, log_bar=False)
    trainer.short_way = lean
    trainer.run(1, [torch.ones(4, 2)] * 3)
    assert {name: len(column) for name, column in trainer.log_train.items()} == dict.fromkeys(
        ["loss_a", "loss_b", "loss", "grad_norm_a", "grad_norm_b"], 3
    )


@pytest.mark.parametrize("name", REPEATING)
def test_several_gradients_a_step_are_refused_in_a_window_of_batches(name: str) -> None:
    trainer = make_trainer(Regress.add_on(AccumulationAddon), optimizer=REPEATING[name], accumulate=2)
    with pytest.raises(ConfigError, match="calls its closure several times an update"):
        trainer.run(1, make_loader())


@pytest.mark.parametrize(("kind", "match"), [(Deaf, "has not called its closure"), (Closed, "takes no closure")])
def test_a_step_without_its_closure_is_refused(kind: Any, match: str) -> None:
    trainer = make_trainer(optimizer=lambda params: kind(params, lr=0.1))
    with pytest.raises(ConfigError, match=match):
        trainer.run(1, make_loader())


@pytest.mark.parametrize("lean", [False, True])
def test_groups_without_a_learning_rate_are_recorded_without_one(lean: bool, tmp_path: Path) -> None:
    trainer = make_trainer(Regress.add_on(SystemMonitorAddon), optimizer=Rate, save_path=tmp_path)
    trainer.short_way = lean
    trainer.run(2, make_loader(), make_valid())
    assert "lr" not in trainer.history.last and trainer.history.last["train_loss"] > 0
    with pytest.raises(ConfigError, match="Rate has no option 'lr': its groups have rate"):
        trainer.lr_find(make_loader())


@pytest.mark.parametrize("scheduler", [lambda step: 0.1, lambda optimizer, plan: torch.optim.lr_scheduler.ConstantLR(optimizer)])
def test_a_schedule_needs_a_learning_rate(scheduler: Any) -> None:
    trainer: Trainer = make_trainer(optimizer=Rate, scheduler=scheduler)
    with pytest.raises(ConfigError, match="Rate has no option 'lr'"):
        trainer.run(1, make_loader())


def test_hooks_of_a_repeating_optimizer_get_each_gradient() -> None:
    norms: list[int] = []
    trainer = make_trainer(Regress.add_on(GradientClipAddon), optimizer=SAM, hooks={"before_optimizer_step": lambda *args: norms.append(1)})
    trainer.run(1, make_loader())
    assert len(norms) == 2 * 5


class Bare(Optimizer):
    """Wraps another optimizer, and doesn't call `super().__init__`, as DPOptimizer of opacus."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "clipped": {"gradient_clip": 0.5},
    "the public way": {"short_way": False},
    "accumulated": {"lightning": {"accumulate_grad_batches": 2}},
    "non-finite updates left out": {"nonfinite": "skip"},
    "restored": {"keep_states": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_has_not_called_its_base_trains_as_the_one_it_wraps(way: str) -> None:
    def trained(wrap: Any) -> Trainer:
        options = dict(WAYS[way])
        short_way = options.pop("short_way", True)
        trainer = make_trainer(optimizer=lambda params: wrap(SGD(params, lr=0.05, momentum=0.9)), **options)
        trainer.short_way = short_way
        trainer.run(2, make_loader(), make_valid())
        if way == "restored":
            trainer.rewind(epoch=1)
            trainer.run(1, make_loader())
        return trainer

    assert same_weights(trained(Bare).model, trained(lambda inner: inner).model)
