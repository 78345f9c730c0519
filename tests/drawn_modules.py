"""LightningModules drawn by seed, with drawn options of Lightning's Trainer, to compare `from_lightning` with Lightning alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning_modules import Lit, drawn
from samples import make_loader


class Unsized:
    """A loader without a length, of batches that may end with a shorter one."""

    def __init__(self, n_samples: int, batch_size: int) -> None:
        self.loader = make_loader(n_samples, batch_size=batch_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def _callbacks(draw: random.Random, by_hand: bool) -> Callable[[], list[Callback]]:
    kinds: dict[str, Callable[[], Callback]] = {
        "stops early": lambda: EarlyStopping("train_loss", patience=1, mode="min", check_on_train_epoch_end=True),
        "rates": lambda: LearningRateMonitor("step"),
        "rates by epoch": lambda: LearningRateMonitor("epoch"),
    }
    if not by_hand:
        kinds["windows"] = lambda: GradientAccumulationScheduler({0: 1, 1: 3})
        kinds["averages"] = lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=1)
    names = draw.sample([*kinds], draw.randint(0, 2))
    return lambda: [kinds[name]() for name in names]


def drawn_job(seed: int) -> tuple[Callable[[], Lit], dict[str, Any]]:
    """A function that makes a module, and the options of its runs: of `difference`, which makes those that can be called."""
    make, options = drawn(seed)
    draw, module = random.Random(f"job {seed}"), make()
    by_hand, validates = not module.automatic_optimization, options["valid"]() is not None
    n_samples, size, sized = draw.choice((20, 37, 40)), draw.choice((4, 8)), draw.random() < 0.7
    options["loader"] = lambda: make_loader(n_samples, batch_size=size) if sized else Unsized(n_samples, size)
    options["callbacks"] = _callbacks(draw, by_hand)
    makes_windows = any(isinstance(callback, GradientAccumulationScheduler) for callback in options["callbacks"]())
    if not by_hand and not makes_windows:
        options["accumulate_grad_batches"] = draw.choice((1, 2, 3, 4))
    if draw.random() < 0.2:
        options["limit_train_batches"] = 3
    elif validates and draw.random() < 0.4:
        options["val_check_interval"] = draw.choice((2, 3))
    if draw.random() < 0.2:
        options["max_steps"] = draw.randint(3, 12)
    if draw.random() < 0.2:
        options["min_steps"] = draw.randint(3, 12)
    return make, options
