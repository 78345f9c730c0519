"""Runs drawn at random, broken off after some batches and resumed in a new trainer, end bit for bit as the ones that were not.

`NBTRAIN_FAULT_CASES` says how many are drawn. A tenth of them is killed in a process of its own instead.
"""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from resume_cases import Case, draw, outcome
from samples import Breaks, Broken

N_CASES = int(os.environ.get("NBTRAIN_FAULT_CASES", "12"))


def differences(case: Case, folder: Path) -> list[str]:
    """Run the case twice, once broken off. Returns the parts that differ in the end."""
    whole = case.make(folder / "whole", seed=1, callbacks=[])
    case.run(whole)
    expected, found = outcome(whole), broken(case, folder / "broken")
    return [part for part in expected if found[part] != expected[part]]


def broken(case: Case, folder: Path) -> dict[str, Any]:
    """Run to the end in several trainers. Each begins with other random numbers, unless nothing was saved before it."""
    for n, breaks in enumerate((*case.breaks, 0)):
        saved = any(folder.glob("run-*/checkpoints/epoch=*"))
        trainer = case.make(folder, seed=7 + n if saved else 1, callbacks=[Breaks(breaks)] if breaks else [])
        try:
            case.run(trainer, resume="auto")
            break
        except Broken:
            continue
    return outcome(trainer)


@pytest.mark.parametrize("seed", range(N_CASES))
def test_a_run_drawn_at_random_is_resumed_exactly(seed: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    case = draw(random.Random(seed))
    assert differences(case, tmp_path) == [], case
