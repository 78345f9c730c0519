"""The judge: a training loop of plain PyTorch, which does what people do, and knows nothing of nbtrain and Lightning.

It reads a loader until the loader ends, whatever its length says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, Any], "Tensor | None"]  # None: the batch is left out
Tell = Callable[[Any, int], None]  # tells a loader the epoch


def tell_epoch(loader: Any, epoch: int) -> None:
    """Call each `set_epoch` in the chain of a loader, once."""
    known, parts = set[int](), [loader]
    for part in parts:  # which grows meanwhile
        if part is None or id(part) in known:
            continue
        known.add(id(part))
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
        parts += [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset", "data")]
        parts += getattr(part, "datasets", ())


def update(model: nn.Module, optimizer: Optimizer, factor: float, clip: float, schedule: Any) -> None:
    for parameter in model.parameters():
        if factor != 1 and parameter.grad is not None:
            parameter.grad *= factor  # a window that ends with its epoch, or whose batches are not of one size
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    if schedule is not None:
        schedule.step()


def _cuda_states() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


@torch.no_grad()
def evaluate(model: nn.Module, loss_of: Loss, loader: Iterable[Any], epoch: int, tell: Tell, restore: bool) -> list[float]:
    """The losses of a validation, which leaves the modes of the model as they were, and, with `restore`, the random numbers."""
    modes = [(part, part.training) for part in model.modules()]
    torch_state, cuda_states, python_state, numpy_state = torch.get_rng_state(), _cuda_states(), random.getstate(), np.random.get_state()
    model.eval()
    tell(loader, epoch)
    losses = [loss_of(model, batch) for batch in loader if batch is not None]
    for part, training in modes:
        part.training = training
    if restore:
        torch.set_rng_state(torch_state)
        torch.cuda.set_rng_state_all(cuda_states)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    return [loss.item() for loss in losses if loss is not None]


def train(
    model: nn.Module, optimizer: Optimizer, loss_of: Loss, loader: Iterable[Any], epochs: Iterable[int], *,
    valid: Iterable[Any] | None = None, accumulate: int = 1, clip: float = 0.0, most: int | None = None,
    each_update: Any = None, each_epoch: Any = None,
    begin: Callable[[int], None] = lambda epoch: None, after: Callable[[int, int], None] = lambda epoch, n: None,
    size_of: Callable[[Any], int] = lambda batch: 1, tell: Tell = tell_epoch, restore: bool = True,
    others: Iterable[tuple[nn.Module, Optimizer, Callable[[nn.Module, Any], Tensor]]] = (),
) -> Iterator[tuple[list[float], list[float]]]:  # fmt: skip
    """Train for `epochs`, numbers from 0; yields the losses of training and validation of each.

    `most`: batches of an epoch. `each_update`, `each_epoch`: schedules. `begin` and `after`: your code at an epoch's begin, after a batch.
    `size_of`: the samples of a batch, where accumulated gradients are to be those of one big batch. `others`: parts of the model with an
    optimizer and a loss of their own, which take their turn on each batch.
    """
    unit = 0  # samples of the first batch
    for epoch in epochs:
        begin(epoch)
        tell(loader, epoch)
        losses, sizes = list[float](), list[int]()  # of the epoch's batches, of those of the open window
        for n, batch in enumerate(loader, 1):
            if batch is not None and (loss := loss_of(model, batch)) is not None:
                sizes.append(size_of(batch))
                unit = unit or sizes[0]
                (loss / accumulate * (sizes[-1] / unit)).backward()
                losses.append(loss.item())
                if len(sizes) == accumulate:
                    update(model, optimizer, accumulate * unit / sum(sizes), clip, each_update)
                    sizes = []
                for part, own, its_loss_of in others:
                    its_loss_of(model, batch).backward()
                    update(part, own, 1.0, clip, None)
            after(epoch, n)
            if n == most:
                break
        if sizes:
            update(model, optimizer, accumulate * unit / sum(sizes), clip, each_update)
        if each_epoch is not None:
            each_epoch.step()
        yield losses, evaluate(model, loss_of, valid, epoch, tell, restore) if valid is not None else []
