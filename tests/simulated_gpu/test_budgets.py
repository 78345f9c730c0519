"""What a step asks of a device, in numbers that are the same on every machine: at most two launches more than a plain loop, and no wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_calls
import pytest
import torch
from samples import Regress, make_data, make_trainer
from simulated_gpu.counts import Counts, counted
from test_addons import ADDONS

from nbtrain import AddOnBase

FEW, MANY = 6, 14  # batches
MORE = 2  # launches a step


def by_step(epoch: Callable[[int], Any]) -> Counts:
    """What a batch of `epoch(n_batches)` asks for: the difference of two epochs, so that what an epoch asks once is not counted."""
    epoch(FEW)
    with counted() as few:
        epoch(FEW)
    with counted() as many:
        epoch(MANY)
    difference = many - few
    return Counts(*(value / (MANY - FEW) for value in vars(difference).values()))


def ours(what: str) -> Callable[[list[Any]], None]:
    """As of the benchmark; the display is shown at the beginning and the end alone, however slow the machine is."""
    return gpu_calls.ours(what, every_s=math.inf)


@pytest.mark.parametrize("what", gpu_calls.WAYS)
def test_a_step_asks_for_what_a_plain_loop_asks_for(what: str) -> None:
    batches = gpu_calls.make_batches(MANY)
    theirs = by_step(lambda n, epoch=gpu_calls.plain(what): epoch(batches[:n]))
    found = by_step(lambda n, epoch=ours(what): epoch(batches[:n]))
    assert found.launches <= theirs.launches + MORE and found.waits <= 0, (theirs, found)
