"""Data for small recipes, and the comparison: what nbtrain trains has the weights of the plain loop, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


def net(n_in: int = 8, n_out: int = 1, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, width), nn.Tanh(), nn.Linear(width, n_out))


def batches(n: int = 6, size: int = 10) -> Batches:
    """Batches of eight numbers and their sum."""
    generator = torch.Generator().manual_seed(5)
    return [(x, x.sum(1, keepdim=True)) for x in torch.randn(n, size, 8, generator=generator)]


def classes(n: int = 6, size: int = 10) -> Batches:
    """Batches of eight numbers and one of three classes."""
    return [(x, (y[:, 0] > -1).long() + (y[:, 0] > 1).long()) for x, y in batches(n, size)]


def equal(ours: Callable[[Any], Any], plain: Callable[[Any], Any], make: Callable[[], nn.Module] = net) -> None:
    """Train a model of `make` by each; from the same random numbers they must end with the same weights, other than the first ones."""
    weights = []
    for train in (ours, plain, None):
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(1)
        if train is not None:
            train(model)
        weights.append(model.state_dict())
    a, b, start = weights
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert not all(torch.equal(b[name], start[name]) for name in b)
