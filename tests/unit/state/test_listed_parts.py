"""Each optimizer, scheduler and callback of torch and Lightning is saved and resumed; a new one is tried by itself."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as callbacks
import numpy as np
import pytest
import torch
from resume_cases import outcome
from samples import Breaks, Broken, Regress, make_loader, make_model, make_trainer, make_valid, same_weights, some
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from nbtrain import StateManagerAddon

Saving = Regress.add_on(StateManagerAddon)
BREAKS = 8  # in the second of two epochs


def listed(module: Any, base: Any, without: set[str]) -> dict[str, Any]:
    """The public classes of a module that inherit from `base`."""
    found = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind) and issubclass(kind, base)}
    return {name: kind for name, kind in sorted(found.items()) if kind is not base and name[0] != "_" and name not in without}


def resumed(make: Callable[..., Any], folder: Path, save_format: str, breaks: int | None) -> Any:
    """What a whole run ends with, or one that was broken off after `breaks` batches, in mid-epoch, and resumed."""
    for n, at in enumerate([None] if breaks is None else [breaks, None]):
        trainer = make([] if at is None else [Breaks(at)], save_path=folder, every_n_steps=1, save_format=save_format, keep_source=False)
        torch.manual_seed(n + 1), random.seed(n + 1), np.random.seed(n + 1)
        with pytest.raises(Broken) if at is not None else nullcontext():
            trainer.run(2, make_loader(), make_valid(), resume="auto")
    return outcome(trainer)


def check(make: Callable[..., Any], folder: Path, save_format: str) -> None:
    warnings.simplefilter("ignore")
    expected = resumed(make, folder / "whole", save_format, None)
    found = resumed(make, folder / "broken", save_format, BREAKS)
    assert [part for part in expected if found[part] != expected[part]] == []


both_formats = pytest.mark.parametrize("save_format", ["ckpt", pytest.param("safetensor", marks=pytest.mark.long)])


# -- optimizers: what each is made with; one without an entry is made with lr=0.01
def matrices(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


OPTIMIZERS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "LBFGS": lambda kind, model: kind(model.parameters(), lr=0.01, max_iter=3),
    "Muon": lambda kind, model: kind(matrices(model), lr=0.01),
    "SGD": lambda kind, model: kind(model.parameters(), lr=0.01, momentum=0.9),
}


class Words(nn.Module):
    """A bag of words: the sign of each number is one."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(16, 1, mode="sum", sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bag((x > 0).long() + 2 * torch.arange(8, device=x.device))


@both_formats
@pytest.mark.parametrize("name", some(listed(torch.optim, Optimizer, set()), 2, ["SparseAdam"]))
def test_each_optimizer_of_torch_is_resumed_exactly(name: str, save_format: str, tmp_path: Path) -> None:
    kind, is_sparse = getattr(torch.optim, name), name == "SparseAdam"

    def make(given: list[Any], **options: Any) -> Any:
        torch.manual_seed(0)
        model = Words() if is_sparse else make_model()
        optimizer = OPTIMIZERS.get(name, lambda kind, model: kind(model.parameters(), lr=0.01))(kind, model)
        options |= {"nonfinite": "ignore"} if is_sparse else {}
        return make_trainer(Saving, model=model, optimizer=optimizer, lightning={"callbacks": given}, **options)

    check(make, tmp_path, save_format)


# -- schedulers: what each is made with; one without an entry is made with the optimizer alone
def sequential(kind: Any, optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.MultiStepLR(optimizer, [1, 2])]
    return kind(optimizer, parts, milestones=[1])


SCHEDULERS: dict[str, Callable[[Any, Any], Any]] = {
    "ChainedScheduler": lambda kind, o: kind([lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.MultiStepLR(o, [1, 2])], optimizer=o),
    "CosineAnnealingLR": lambda kind, o: kind(o, T_max=3),
    "CosineAnnealingWarmRestarts": lambda kind, o: kind(o, T_0=2),
    "CyclicLR": lambda kind, o: kind(o, 0.001, 0.01, step_size_up=2, cycle_momentum=False),
    "ExponentialLR": lambda kind, o: kind(o, 0.9),
    "LambdaLR": lambda kind, o: kind(o, lambda epoch: 0.9**epoch),
    "MultiStepLR": lambda kind, o: kind(o, [1, 2]),
    "MultiplicativeLR": lambda kind, o: kind(o, lambda epoch: 0.9),
    "OneCycleLR": lambda kind, o: kind(o, 0.02, total_steps=6),
    "SequentialLR": sequential,
    "StepLR": lambda kind, o: kind(o, 1),
    "ReduceLROnPlateau": lambda kind, o: kind(o, patience=0, threshold=0.5),
}


@both_formats
@pytest.mark.parametrize("name", some(listed(lr_scheduler, (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau), {"LRScheduler"}), 2))
def test_each_scheduler_of_torch_is_resumed_exactly(name: str, save_format: str, tmp_path: Path) -> None:
    kind = getattr(lr_scheduler, name)

    def make(given: list[Any], **options: Any) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scheduler = SCHEDULERS.get(name, lambda kind, optimizer: kind(optimizer))(kind, optimizer)
        return make_trainer(Saving, model=model, optimizer=optimizer, scheduler=scheduler, lightning={"callbacks": given}, **options)

    check(make, tmp_path, save_format)


# -- callbacks: what each is made with; one without an entry is made with nothing
class Thawing(callbacks.BaseFinetuning):
    """Freezes the first layer for an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.make_trainable(pl_module.model[0])


CALLBACKS: dict[str, Callable[[Any, Path], Any]] = {
    "BaseFinetuning": lambda kind, folder: Thawing(),
    "BatchSizeFinder": lambda kind, folder: kind(max_trials=1, init_val=16),
    "EarlyStopping": lambda kind, folder: kind("val_loss", patience=9),
    "GradientAccumulationScheduler": lambda kind, folder: kind({0: 1, 1: 2}),
    "LambdaCallback": lambda kind, folder: kind(on_train_start=lambda trainer, module: None),
    "ModelCheckpoint": lambda kind, folder: kind(folder, monitor="val_loss", save_last=True),
    "StochasticWeightAveraging": lambda kind, folder: kind(0.01, swa_epoch_start=1),
    "Timer": lambda kind, folder: kind(timedelta(hours=9)),
}
# Base classes, what needs more than a small run, and what saves or restores in ways that a resume can't
LEFT_OUT = {
    "BasePredictionWriter": "writes predictions",
    "BackboneFinetuning": "needs a model with a backbone: test_changed_by_callbacks tries what it does",
    "DeviceStatsMonitor": "needs a logger",
    "LearningRateMonitor": "needs a logger",
    "LearningRateFinder": "needs a module with an attribute for the rate: lr_find does the same",
    "ModelPruning": "replaces the parameters",
    "OnExceptionCheckpoint": "makes Lightning resume by itself: refused by name",
    "ProgressBar": "is that of Lightning, which is off",
    "RichModelSummary": "needs rich",
    "RichProgressBar": "needs rich",
    "SpikeDetection": "needs more batches",
    "TQDMProgressBar": "is that of Lightning, which is off",
    "ThroughputMonitor": "needs a logger",
}


@both_formats
@pytest.mark.parametrize("name", listed(callbacks, callbacks.Callback, set(LEFT_OUT) | {"Callback", "Checkpoint"}))
def test_each_callback_of_lightning_is_resumed_exactly(
    name: str, save_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind = getattr(callbacks, name)

    def make(given: list[Any], **options: Any) -> Any:
        one = CALLBACKS.get(name, lambda kind, folder: kind())(kind, tmp_path / "callback")
        return make_trainer(Saving, lightning={"callbacks": [one, *given], "logger": False}, **options)

    check(make, tmp_path, save_format)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as many have copied it: another optimizer steps, from the gradients of a second call of the closure.

    `late`: it climbs by the gradients of the update before, and calls the closure once.
    """

    def __init__(self, params: Any, base: Any, rho: float = 0.05, *, shares: bool = False, late: bool = False, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base, self.late = base(self.param_groups, **options), late
        self.param_groups = self.base.param_groups
        if shares:
            self.state = self.base.state

    def _with_gradient(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def climb(self) -> None:
        found = self._with_gradient()
        norm = torch.stack([p.grad.norm() for p in found]).norm() if found else 0
        for p in found:
            self.state[p]["old_p"] = p.clone()
            p.add_(p.grad * self.param_groups[0]["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        if not self.late:
            closure()
        self.climb()
        loss = closure()
        for p in self._with_gradient():
            p.data = self.state[p].get("old_p", p.data)
        self.base.step()
        return loss


@pytest.mark.parametrize(
    "options",
    [
        {"base": torch.optim.SGD, "lr": 0.05, "momentum": 0.9},
        {"base": torch.optim.Adam, "lr": 0.01},
        {"base": torch.optim.SGD, "lr": 0.05, "late": True},
        {"base": torch.optim.SGD, "lr": 0.05, "momentum": 0.9, "shares": True},
    ],
    ids=["momentum", "adam", "gradients of the update before", "one state for both"],
)
def test_an_optimizer_around_another_one_is_resumed_exactly(options: dict[str, Any], tmp_path: Path) -> None:
    def schedule(optimizer: Any, plan: Any) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda i: 0.9**i)

    def make(folder: Path) -> Any:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        saving = {"save_path": folder, "every_n_steps": 1, "keep_source": False, "keep_states": True}
        return make_trainer(Saving, model=model, optimizer=lambda p: SAM(p, **options), scheduler=schedule, **saving)

    loaders = make_loader(), make_valid()
    whole, broken, again = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "b")
    broken.lightning["callbacks"] = [Breaks(7)]
    for trainer, seed in ((whole, 1), (broken, 1), (again, 2)):
        torch.manual_seed(seed)
        with suppress(Broken):
            trainer.run(3, *(loaders if trainer is whole else (make_loader(), make_valid())), resume="auto")
    assert again.counts == whole.counts and same_weights(whole.model, again.model)
    whole.rewind(epoch=1)
    whole.run(2, *loaders)
    assert same_weights(whole.model, again.model)
