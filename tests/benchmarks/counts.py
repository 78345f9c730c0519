"""How many calls of functions a step, an epoch, a run takes, beside the same lines in a plain loop: no stopwatch, so any machine may judge.

Counted are the calls that `cProfile` sees in the thread of the training: those of functions written in Python, and those of built-in
ones such as `len` or a tensor's method, each 1. A step, and an epoch, is the difference between a long and a short training, so that
what a training sets up is left out. A run is the whole call, on a trainer that has made some, as in a notebook. The figures change
with the versions of Python, torch and Lightning, and with little else: the garbage collector, which calls finalizers, is off, and the
environment, of which a run looks at each variable, is a small one.
"""

from __future__ import annotations

import contextlib
import cProfile
import gc
import logging
import math
import os
import pstats
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import calls
import epochs
import torch
from tables import Claim, Row, Table, main
from torch import Tensor
from torch.nn.functional import cross_entropy

BOUNDS = {  # over the plain loop
    "a step": 30,
    "a batch of an evaluation": 42,
    "an epoch of one batch": 625,
    "an epoch of one batch, with a validation": 1_215,
    "predict(x)": 910,
    "run_batch(batch)": 7_900,
    "evaluate([batch])": 8_450,
    "run(1, [batch])": 13_960,
}
MODULE_BOUND = 0  # a step of a LightningModule, over Lightning's own
TRAINER_BOUND = 395  # a `lightning.Trainer` as each run makes it
SHORT, LONG = 70, 140  # epochs, or batches
COLUMNS = ("what", "plain loop", "nbtrain", "over it")
NOTE = (
    "Calls of Python and built-in functions, in the thread of the training, as cProfile counts them. "
    "The single calls are those of a trainer that has made some before. Of them Lightning's `fit` and `test`, with the hooks of nbtrain in "
    "them, take 5,200 of run_batch, 3,800 of evaluate and 6,000 of run: they set up, check and clean up, also where a trainer is kept. "
    "Looking for newer code takes 1,900 of each, since within one cell a constant may get another value; what `nbtrain.runs()` "
    "compares, 2,600 of run, since it is described before the steps can change it."
)


def n_calls(call: Callable[[], Any]) -> int:
    """How many calls of functions `call` makes."""
    profile = cProfile.Profile()
    gc.collect()
    gc.disable()
    try:
        profile.runcall(call)
    finally:
        gc.enable()
    stats: Any = pstats.Stats(profile)
    return stats.total_calls - 1  # the profile's own `disable`


def n_each(train: Callable[[int], Any]) -> float:
    """How many calls an epoch, or a step, of `train` takes. The first training imports and fills caches."""
    train(2)
    short, long = (n_calls(partial(train, n)) for n in (SHORT, LONG))
    return (long - short) / (LONG - SHORT)


class Batches:
    """A loader of the same batch, `n_batches` times: a list of them would be searched for code before a run."""

    def __init__(self, n_batches: int) -> None:
        self.n_batches = n_batches

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return repeat(calls.make_batch(), self.n_batches)


def plain_steps(n_batches: int) -> None:
    model = calls.make_model()
    optimizer = torch.optim.Adam(model.parameters())
    for inputs, classes in Batches(n_batches):
        loss = cross_entropy(model(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def untimed(trainer: Any) -> Any:
    """`trainer`, whose record is written at the end of a pass only: else also five times a second, as long as that takes here."""
    trainer.recorder.every_s = math.inf
    return trainer


def our_steps(n_batches: int) -> None:
    untimed(calls.make_ours()).run(1, Batches(n_batches))


def our_epochs(n_epochs: int, valid: bool) -> None:
    untimed(calls.make_ours()).run(n_epochs, [calls.make_batch()], [calls.make_batch()] if valid else None)


def plain_evaluation(n_batches: int) -> None:
    model = calls.make_model().eval()
    with torch.no_grad():
        for inputs, classes in Batches(n_batches):
            cross_entropy(model(inputs), classes)


def our_evaluation(n_batches: int) -> None:
    untimed(calls.make_ours()).evaluate(Batches(n_batches))


def make_module() -> Any:
    """A LightningModule that logs nothing."""
    import lightning as L

    class Classify(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = calls.make_model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    return Classify()


def stock_steps(n_batches: int) -> None:
    """Lightning's own loop, without its bar, loggers and files."""
    import lightning as L

    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, **epochs.OFF)
    trainer.fit(make_module(), Batches(n_batches))


def module_steps(n_batches: int) -> None:
    from nbtrain import Trainer

    untimed(Trainer.from_lightning(make_module(), device="cpu", log_bar=False)).run(1, Batches(n_batches))


def single_calls() -> dict[str, tuple[int, int]]:
    """The calls of the plain loop and of nbtrain, by name."""
    plain, ours = calls.plain(), calls.ours()
    found = dict[str, tuple[int, int]]()
    for name in plain:
        for _ in range(3):
            plain[name](), ours[name]()
        found[name] = n_calls(plain[name]), n_calls(ours[name])
    return found


def made_trainers() -> tuple[int, int]:
    """The calls in which Lightning, and nbtrain in a run, make a `lightning.Trainer` with the same arguments."""
    import lightning as L

    from nbtrain.run.lightning_trainer import make_pl_trainer, quiet

    arguments = calls.make_ours().lightning_args()
    with quiet():
        for make in (L.Trainer, make_pl_trainer):
            make(**arguments)
        return n_calls(lambda: L.Trainer(**arguments)), n_calls(lambda: make_pl_trainer(**arguments))


def row(name: str, base: float, ours: float, bound: float) -> Row:
    return Row((name, f"{base:,.0f}", f"{ours:,.0f}", Claim("{:+,}", round(ours - base), bound)))


def table(n_rounds: int, only: set[str]) -> Table:
    """One round is enough: the figures are the same in each."""
    torch.set_num_threads(1)
    pairs: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
        "a step": (plain_steps, our_steps),
        "a batch of an evaluation": (plain_evaluation, our_evaluation),
        "an epoch of one batch": (lambda n: epochs.plain(n, False), lambda n: our_epochs(n, False)),
        "an epoch of one batch, with a validation": (lambda n: epochs.plain(n, True), lambda n: our_epochs(n, True)),
    }
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with ExitStack() as around:
            around.enter_context(patch.dict(os.environ, {"PATH": "/usr/bin", "HOME": str(Path.home())}, clear=True))
            around.enter_context(contextlib.redirect_stdout(around.enter_context(open(os.devnull, "w"))))
            around.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            found = {name: (n_each(plain), n_each(ours)) for name, (plain, ours) in pairs.items()} | single_calls()
            stock, module = n_each(stock_steps), n_each(module_steps)
            lightnings, made = made_trainers()
    finally:
        logging.disable(before)
    rows = [row(name, *found[name], bound) for name, bound in BOUNDS.items()]
    rows.append(row("a step of a LightningModule, beside Lightning's loop", stock, module, MODULE_BOUND))
    made_row = Claim("{:,.0f}", made, TRAINER_BOUND)
    rows.append(Row(("making a lightning.Trainer, beside Lightning's way", f"{lightnings:,.0f}", made_row)))
    step, _, epoch, validated = (round(found[name][1] - found[name][0]) for name in pairs)
    says = f"Which calls nbtrain adds to a plain loop: {step:,} a step, {epoch:,} an epoch, {validated:,} with a validation."
    return Table("Python calls", COLUMNS, tuple(rows), NOTE, says)


if __name__ == "__main__":
    main(table, 1)
