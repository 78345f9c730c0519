"""Small real things for tests: data, a model that draws random numbers, trainers, and the plain loop they are compared with."""

from __future__ import annotations

import os
import random
from collections.abc import Container, Iterable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from simulated_gpu import KINDS
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nbtrain import Trainer
from nbtrain.rng import random_state

DEVICE = os.environ.get("NBTRAIN_TEST_DEVICE", "cpu")  # "cuda" in `make gpu`
DEVICE = KINDS.get(DEVICE, DEVICE)
ONE_DEVICE = DEVICE if DEVICE == "cpu" else f"{DEVICE}:0"  # "cuda" is all of them to the MultiGPUAddon
PLACE = "" if DEVICE == "cpu" else f" on {ONE_DEVICE}"  # of a tensor, in a message


class Regress(Trainer):
    """Predicts one number; records the loss and the mean absolute error."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        output = self.model(x)
        return {"loss": mse_loss(output, y), "mae": (output - y).abs().mean(), "output": output, "label": y}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self.train_step(batch)


def make_model(seed: int = 0) -> nn.Module:
    """A net with dropout, so that every batch draws random numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def make_data(n: int = 70, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def make_loader(n: int = 70, *, batch_size: int = 16, shuffle: bool = True, own_generator: bool = False, **options: Any) -> DataLoader[Any]:
    """Five batches of 16, the last one short. Without a generator of its own the loader draws from the global one."""
    generator = torch.Generator().manual_seed(2) if own_generator else None
    return DataLoader(make_data(n), batch_size, shuffle=shuffle, generator=generator, **options)


def make_valid(n: int = 40) -> DataLoader[Any]:
    """Three batches in order; its iterator still draws a seed from the global generator."""
    return make_loader(n, shuffle=False)


def make_trainer(kind: type[Trainer] = Regress, **options: Any) -> Any:
    options = {"device": DEVICE, "log_bar": False, "optimizer": lambda params: torch.optim.Adam(params, lr=1e-2)} | options
    model = options.pop("model", None)
    return kind(make_model() if model is None else model, **options)  # a compiled model may have no truth value


def plain_loop(
    n_epoch: int, loader: Any, valid_loader: Any = None, clip: float = 0.0, schedule: Any = None
) -> tuple[nn.Module, list[float]]:
    """What everybody would write by hand. Returns the model and the mean training loss of each epoch."""
    model = make_model().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for _ in range(n_epoch):
        model.train()
        total, n = 0.0, 0
        for batch in loader:
            x, y = (item.to(DEVICE) for item in batch)
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            total, n = total + loss.item() * len(x), n + len(x)
        losses.append(total / n)
        if scheduler:
            scheduler.step()
        if valid_loader is not None:
            with isolate_rng(), torch.no_grad():
                model.eval()
                for x, y in valid_loader:
                    mse_loss(model(x.to(DEVICE)), y.to(DEVICE))
    return model, losses


def on_device(batches: Any) -> list[Any]:
    """What a plain loop does with its batches."""
    return [[part.to(DEVICE) for part in batch] for batch in batches]


def same_content(left: Any, right: Any) -> bool:
    """Whether two nests of dicts, lists, tensors, arrays and values are equal bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_content(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_content, left, right))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left.cpu(), right.cpu())
    return bool(np.array_equal(np.asarray(left), np.asarray(right)))


def random_numbers() -> dict[str, Any]:
    """The state of every generator of this process, as `same_content` compares it."""
    state = random_state()
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def same_weights(a: nn.Module | dict[str, torch.Tensor], b: nn.Module | dict[str, torch.Tensor]) -> bool:
    """Equal bit for bit, on whatever devices?"""
    left, right = (weights.state_dict() if isinstance(weights, nn.Module) else weights for weights in (a, b))

    return left.keys() == right.keys() and all(torch.equal(left[name].cpu(), right[name].cpu()) for name in left)


_TIMES = {
    "time_s",
    "wait_share",
    "samples_per_s",
    "tokens_per_s",
    "ram_gb",
    "gpu_gb",
    "gpu_held_gb",
    "train_memory_peak_gb",
    "train_step_time_s",
    "train_wait_share",
    "train_samples_per_s",
    "train_tokens_per_s",
}


def without_times(rows: list[Any]) -> list[dict[str, Any]]:
    """The rows without what is never the same twice."""
    return [{name: value for name, value in row.items() if name not in _TIMES} for row in rows]


class Broken(RuntimeError):
    pass


def some(values: Iterable[Any], every: int, always: Container[Any] = (), first: int = 0) -> list[Any]:
    """`values` as parameters of which `make test` takes each `every`-th one from `first` and those of `always`, and `make faults` all."""
    return [
        value if i % every == first or value in always else pytest.param(value, marks=pytest.mark.long) for i, value in enumerate(values)
    ]


class Augmented(Dataset[Any]):
    """Samples that are changed with all three kinds of random numbers."""

    def __init__(self) -> None:
        self.data = make_data()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        return x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * np.random.rand(), y


class Breaks(L.Callback):
    """Breaks a run off after `n` batches, as a crash would."""

    def __init__(self, n: int) -> None:
        self.n = n

    def on_train_batch_end(self, *args: Any) -> None:
        self.n -= 1
        if self.n == 0:
            self.end()

    def end(self) -> None:
        raise Broken


# The configuration of nnScaler's document, as it stands there
SEED = """\
compute_config:
  plan_ngpus: 4
  runtime_ngpus: 100
  constant_folding: true
  use_zero: true
  use_end2end: true

run_mode: run
pas_policy: autodist
micro_batch_size: 2
global_batch_size: 8
max_epochs: 4
max_train_steps: 10

model:
  type: nbtrain.examples.mlp.MLP
  args:
    dim: 16
    nlayers: 16

optimizer:
  type: torch.optim.Adam
  args:
    lr: 0.01

dataset:
  type: nbtrain.examples.mlp.SimpleDataset
  train_args:
    dim: 16
    size: 100
  val_args:
    dim: 16
    size: 10

checkpoint:
  keep_last_n_checkpoints: 30
  every_n_train_steps: 1
  save_type: deduped
"""
