"""Runs drawn at random, broken off after some batches and resumed in a new trainer, end bit for bit as the ones that were not.

`NBTRAIN_FAULT_CASES` says how many are drawn. A tenth of them is killed in a process of its own instead.
"""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path

import pytest
from resume_cases import differences, draw

N_CASES = int(os.environ.get("NBTRAIN_FAULT_CASES", "12"))


@pytest.mark.parametrize("seed", range(N_CASES))
def test_a_run_drawn_at_random_is_resumed_exactly(seed: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    case = draw(random.Random(seed))
    assert differences(case, tmp_path) == [], case
