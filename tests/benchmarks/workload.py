"""What every contender trains: the data, the model, and the clock that the model's forward ticks.

An MLP 32→64→2 on batches of 32 from a TensorDataset, with Adam, on one CPU thread: about as small as a model gets, because what
is measured is not the model. At 50 ms a step nobody would notice the slowest of the contenders.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

N_FEATURES, BATCH_SIZE, LR = 32, 32, 1e-3
WINDOW, WARM_UP = 100, 200  # steps


@dataclass(frozen=True)
class Sample:
    """One measured call of a contender."""

    step_us: float  # CPU, of the window of 100 steps at the 20th percentile: the steady state, without the machine's hiccups
    mean_us: float  # CPU, of all windows: what is done now and then counts too, and so do the hiccups
    cpu_s: float = 0.0  # of the whole call, with set-up and end
    wall_s: float = 0.0


class Clock:
    """Reads the CPU time at every hundredth forward. The first 200 steps are left out, and so is what follows the last window."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.n = 0
        self.reads_s: list[float] = []

    def tick(self) -> None:
        if not self.n % WINDOW:
            self.reads_s.append(time.process_time())
        self.n += 1

    def sample(self) -> Sample:
        reads_s = self.reads_s[WARM_UP // WINDOW :]
        windows_us = sorted((after - before) / WINDOW * 1e6 for before, after in zip(reads_s, reads_s[1:]))
        return Sample(windows_us[len(windows_us) // 5], mean(windows_us))


class Mlp(nn.Module):
    """The model. A step begins with its forward, so that one place ticks for all tools."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.layers = nn.Sequential(nn.Linear(N_FEATURES, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.tick()
        return self.layers(x)


@cache
def make_data(n_batches: int) -> tuple[Tensor, Tensor]:
    """Features of shape (n, 32) and classes of shape (n,)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n_batches * BATCH_SIZE, N_FEATURES, generator=generator)
    return x, (x @ torch.randn(N_FEATURES, generator=generator) > 0).long()


@dataclass(frozen=True)
class Job:
    """What a contender is asked to do. Everything it needs is made from here, seeded, so that all do the same."""

    folder: Path  # where it may write
    n_steps: int = 2000
    n_epochs: int = 1
    n_valid: int = 100  # batches, for those who validate
    clock: Clock = field(default_factory=Clock)

    def model(self) -> Mlp:
        torch.manual_seed(0)
        return Mlp(self.clock)

    def data(self) -> tuple[Tensor, Tensor]:
        return make_data(self.n_steps)

    def generator(self) -> torch.Generator:
        """For a loader that shuffles: one that drew from the global generator would depend on what the tool draws."""
        return torch.Generator().manual_seed(2)

    def loader(self) -> DataLoader[Any]:
        # At its end RandomSampler draws from its generator once more, and Lightning never asks a sized loader for its end: with a
        # generator of its own the second epoch would have another order there
        generator = self.generator() if self.n_epochs == 1 else None
        return DataLoader(TensorDataset(*self.data()), BATCH_SIZE, shuffle=True, generator=generator)

    def ordered_loader(self, n_batches: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*(part[: n_batches * BATCH_SIZE] for part in self.data())), BATCH_SIZE, generator=self.generator())

    def short(self) -> Job:
        """The same for 20 steps, to see whether two contenders do the same."""
        return replace(self, n_steps=20, n_valid=5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LR)


@dataclass(frozen=True)
class Trained:
    """What a contender has to show: the model, and the mean loss and accuracy of the last epoch as the tool itself tracked them."""

    model: nn.Module | None
    loss: float
    accuracy: float
