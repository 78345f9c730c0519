"""Cells of a notebook: code with a separate file name each, in one namespace."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

_CELLS = count(1)
# Steps in a cell, and with ten times the loss: `change_after` batches, or by another cell
FIT = """
import time
import torch
from nbtrain import Trainer

TIMES, n_batches = 1.0, 0


def distance(output, y):
    return TIMES * (output - y).square().mean()


class Fit(Trainer):
    change_after = 10**9

    def train_step(self, batch):
        global n_batches
        n_batches += 1
        time.sleep(0.02)
        x, y = batch
        times = 10.0 if self.counts.processed >= self.change_after else 1.0
        return {"loss": times * distance(self.model(x), y), "n": float(n_batches)}

    def test_step(self, batch):
        x, y = batch
        return {"loss": (self.model(x) - y).square().mean()}
"""
NEW_STEP = FIT[FIT.index("class Fit") :].replace("10.0 if self.counts.processed >= self.change_after else 1.0", "10.0")


def cell(text: str, namespace: dict[str, Any]) -> None:
    """Execute a cell."""
    name = f"<ipython-input-{next(_CELLS)}-test>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), namespace)


class RunCell(Protocol):
    """Executes a cell, and returns the namespace of all."""

    def __call__(self, text: str, /, **names: Any) -> dict[str, Any]: ...


@contextmanager
def in_main() -> Iterator[RunCell]:
    """Cells in `__main__`, as those of a kernel are: other processes can't import what they define. Their names are removed at the end."""
    main = vars(sys.modules["__main__"])
    before = dict(main)

    def run(text: str, /, **names: Any) -> dict[str, Any]:
        main.update(names)
        cell(text, main)
        return main

    yield run
    main.clear()
    main.update(before)
