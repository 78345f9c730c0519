"""Small runs whose saved states are kept in `fixtures/saved_before`, one of each kind that a run can save.

All numbers are small multiples of powers of two, so that they are exact on any machine: an L1 loss, whose gradient is a sign, SGD with a
momentum of 1/2, and masks that are drawn as integers. Kinds with Adam or a moving average are compared with a
tolerance, as are two that another processor rounded otherwise in the last bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from samples import without_times
from torch import Tensor, nn
from torch.nn.functional import l1_loss
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nbtrain import (
    AccumulationAddon,
    EarlyStoppingAddon,
    EMAAddon,
    MicroBatchAddon,
    MultiGPUAddon,
    MultiOptimizerTrainer,
    NonFiniteAddon,
    SeededLoader,
    StateManagerAddon,
    TensorLoader,
    Trainer,
    TrainHook,
    WarmUpScheduler,
)

LR = 1 / 16


# -- data and models
class Data(Dataset[Any]):
    """`n` samples of 4 integers, and 2 integers to predict."""

    def __init__(self, n: int = 16, shift: int = 0) -> None:
        self.n, self.shift = n, shift

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        i = index + self.shift
        x = [float((i * 7 + j * 3 + i * j) % 5 - 2) for j in range(4)]
        return torch.tensor(x), torch.tensor([x[0] + x[1], x[2] - x[3] + 1])


def exact(module: nn.Module) -> nn.Module:
    """`module` with quarters as its weights."""
    with torch.no_grad():
        for n, parameter in enumerate(module.parameters()):
            values = torch.arange(parameter.numel()).reshape(parameter.shape)
            parameter.copy_((values * 5 + n) % 7 - 3).div_(4)
    return module


def linear() -> nn.Module:
    return exact(nn.Linear(4, 2))


class Layer(nn.Module):
    """Keeps its argument, as a configuration needs it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.layer = width, exact(nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Tied(nn.Module):
    """Two layers with one weight, and a configuration as models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 4}
        self.first, self.second, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.second.weight = self.first.weight
        self.register_buffer("n_seen", torch.zeros((), dtype=torch.int64))
        exact(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n_seen += len(x)
        return self.head(self.second(self.first(x).sign()).sign())


def batches(n: int = 16, *, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(Data(n), 4, shuffle=shuffle, **options)


def with_generator() -> DataLoader[Any]:
    return batches(generator=torch.Generator().manual_seed(3))


def in_batches() -> TensorLoader:
    return TensorLoader(TensorDataset(*map(torch.stack, zip(*(Data()[i] for i in range(16))))), batch_size=4, shuffle=True)


def pairs() -> DataLoader[Any]:
    return DataLoader(Data(), 2, shuffle=True)


def valid() -> DataLoader[Any]:
    return DataLoader(Data(8, shift=5), 4)


# -- trainers
class Fit(Trainer):
    """Draws numbers of all three kinds in each training step."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return self.test_step((x * torch.randint(0, 2, x.shape) + random.randint(0, 1) + np.random.randint(0, 2), y))

    def test_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        output = self.model(x)
        return {"loss": l1_loss(output, y), "output": output}


class Measured(Fit):
    """Reads the tensors of an epoch, and sets the learning rate on its way."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.progress_checker.get_step() == 2:
            self.set(lr=LR)  # twice what the schedule has there
        return super().train_step(batch)

    def metric_on_epoch_end(self) -> dict[str, Any] | None:
        log = self.log_train if self.mode == "train" else self.log_test
        return {"largest": torch.cat(log["output"]).max()}


class Rounded(Fit):
    """For a model of 16 bits."""

    def test_step(self, batch: Any) -> dict[str, Any]:
        return super().test_step((batch[0].bfloat16(), batch[1].bfloat16()))


class Careful(Fit):
    """The memory is full with more than 2 samples, and the loss of a step is not finite."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        found = super().train_step(batch)
        return found | {"loss": found["loss"] * float("inf")} if self.progress_checker.get_step() == 2 else found


class Pair(MultiOptimizerTrainer):
    """A layer for each optimizer."""

    def train_step_first(self, batch: Any) -> dict[str, Any]:
        return {"loss": l1_loss(self.model["first"](batch[0]), batch[1])}

    def train_step_second(self, batch: Any) -> dict[str, Any]:
        return {"loss": l1_loss(self.model["second"](batch[0] + torch.randint(0, 2, batch[0].shape)), batch[1])}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": l1_loss(self.model["first"](batch[0]) + self.model["second"](batch[0]), batch[1])}


class Plain(Fit):
    """Draws nothing: Lightning saves no random numbers."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return self.test_step(batch)


class Still(TrainHook):
    """A hook, so that a configuration names one."""

    def after_optimizer_step(self, trainer: Any) -> None:
        pass


def make(kind: type[Trainer], folder: Path, model: nn.Module | None = None, **options: Any) -> Any:
    model = model or linear()
    options = {"device": "cpu", "log_bar": False, "save_path": folder, "keep_source": False} | options
    if "optimizers" not in options:
        options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5))
    return kind.add_on(StateManagerAddon)(model, **options)


def plateau(folder: Path) -> Any:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
    options = {"keep_source": True, "monitor_mode": "max"}  # the first epoch is the best one
    return make(Fit, folder, model, optimizer=optimizer, scheduler=scheduler, **options)


def measured(folder: Path) -> Any:
    return make(Measured, folder, scheduler=lambda optimizer, plan: LambdaLR(optimizer, lambda i: 2.0**-i), every_n_steps=1)


def tied(folder: Path) -> Any:
    model = Tied().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 4)
    options = {"ema_decay": 0.5, "save_format": "safetensor"}
    return make(Rounded.add_on(EMAAddon), folder, model, optimizer=optimizer, scheduler=WarmUpScheduler(optimizer, 4), **options)


def in_memory(folder: Path) -> Any:
    return make(Fit, folder, save_format="safetensor", every_n_steps=1)


def all_addons(folder: Path) -> Any:
    kind = Careful.add_on(EMAAddon, AccumulationAddon, NonFiniteAddon, MicroBatchAddon, EarlyStoppingAddon)
    addons = {"ema_decay": 0.5, "accumulate": 2, "nonfinite": "skip", "auto_micro_batch": True, "patience": 1, "delta": 100.0}
    return make(kind, folder, every_n_steps=1, save_best=False, **addons)


def two_optimizers(folder: Path) -> Any:
    model = nn.ModuleDict({"first": linear(), "second": linear()})
    first = torch.optim.Adam(model["first"].parameters(), lr=LR)
    second = torch.optim.SGD(model["second"].parameters(), lr=LR, momentum=0.5)
    schedulers = {"first": StepLR(first, 1, 0.5), "second": StepLR(second, 1, 0.25)}
    return make(Pair, folder, model, optimizers={"first": first, "second": second}, schedulers=schedulers)


def two_ranks(folder: Path) -> Any:
    model = exact(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    options = {"device": ["cpu", "cpu"], "strategy": "fsdp2", "save_type": "deduped", "every_n_steps": 1}
    return make(Fit.add_on(MultiGPUAddon), folder, model, **options)


# -- the kinds
@dataclass(frozen=True)
class Kind:
    """A run of three epochs, and which of its checkpoints is kept, by its name without suffix."""

    make: Callable[[Path], Any]
    loader: Callable[[], Any] = batches
    valid: Callable[[], Any] | None = valid
    keep: tuple[str, ...] = ("epoch=1-step=4",)
    tolerance: float = 0.0  # of what the run comes to; what is loaded is always exact
    has_record: bool = False  # is the rest of the run folder kept, too?

    def run(self, trainer: Any, **options: Any) -> Any:
        return trainer.run(3, self.loader(), self.valid() if self.valid is not None else None, **options)


KINDS = {
    "ckpt_at_epoch_end": Kind(plateau, keep=("epoch=1-step=4", "epoch=2-step=8"), has_record=True),
    "ckpt_in_mid_epoch": Kind(measured, keep=("epoch=1-step=6",), tolerance=1e-5),
    "safetensor_at_epoch_end": Kind(tied, tolerance=1e-2),
    "safetensor_in_mid_epoch": Kind(in_memory, in_batches, valid=None, keep=("epoch=0-step=3",)),
    "all_addons": Kind(all_addons, lambda: SeededLoader(Data(18), 4), keep=("epoch=1-step=4",), tolerance=1e-5),
    "two_optimizers": Kind(two_optimizers, with_generator, valid=None, tolerance=1e-5),
    "two_ranks_in_mid_epoch": Kind(two_ranks, pairs, valid=None, keep=("epoch=0-step=2",), tolerance=1e-5),
}


def seed(number: int) -> None:
    """The global random numbers."""
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return list(map(plain, value)) if isinstance(value, (list, tuple)) else value


def loaded(trainer: Any) -> dict[str, Any]:
    """What a trainer has of a state that it has loaded."""
    found = {
        "weights": trainer.model.state_dict(),
        "best_weights": trainer.best_weights,
        "optimizer": without_groups(trainer.optimizer.state_dict()),
        "lr": [group["lr"] for group in trainer.optimizer.param_groups],
        "at": [trainer.progress_checker.get_epoch(), trainer.progress_checker.get_step()],
        "epochs": without_times(trainer.history.epochs),
        "best": without_times([trainer.history.best] if trainer.history.best else []),
        "marks": [text for _, text in trainer.history.marks],
        "losses": [trainer.get_loss_history("train"), trainer.get_loss_history("test")],
        "metrics": [trainer.train_metrics, trainer.test_metrics],
    }
    return plain(found)


def without_groups(state: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer has for each parameter, without its options."""
    return {name: without_groups(item) if isinstance(item, dict) else item for name, item in state.items() if name != "param_groups"}


def finished(trainer: Any) -> dict[str, Any]:
    """What it has when its run is over, and the random numbers that come next."""
    found = {
        "result": [trainer.result.status, trainer.result.reason, trainer.result.last.path.name],
        "log": [trainer.log_train["loss"], trainer.log_test["loss"] if len(trainer.log_test) else []],
        "random": [torch.randint(0, 2**31, (3,)), random.randint(0, 2**31), int(np.random.randint(0, 2**31))],
    }
    return loaded(trainer) | plain(found)
