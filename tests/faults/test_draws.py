"""Runs drawn at random, broken off after some batches and resumed in a new trainer, end bit for bit as the ones that were not.

`NBTRAIN_FAULT_CASES` says how many are drawn; 50 and more end with a table of what was drawn. A tenth of them is killed in a separate
process instead. Where more than 12 are drawn, the newest checkpoint of a quarter is damaged before it is resumed. Left out: several
processes and devices, which tests/distributed has, and what a run says that it can't resume exactly.
"""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from children import CONTEXT
from resume_cases import Case, differences, draw, flip
from samples import Breaks

N_CASES = int(os.environ.get("NBTRAIN_FAULT_CASES", "12"))


class Dies(Breaks):
    """Kills its process after `n` batches, also while a checkpoint is written."""

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def noted(record_property: Callable[[str, object], None]) -> Callable[[Case], Case]:
    """Notes a case for the table."""

    def note(case: Case) -> Case:
        if N_CASES <= 12:  # what a bit means depends on the times in the file, and `make test` is to be the same each time
            case = replace(case, flips=None)
        record_property("drawn", {field.name: getattr(case, field.name) for field in fields(case)})
        return case

    return note


def run_in_process(case: Case, folder: Path) -> None:
    warnings.simplefilter("ignore")
    case.run(case.make(folder, seed=1, callbacks=[Dies(case.breaks[0])]), resume="auto")


@pytest.mark.parametrize("seed", [seed for seed in range(N_CASES) if seed % 10 != 9])
def test_a_run_drawn_at_random_is_resumed_exactly(seed: int, tmp_path: Path, noted: Callable[[Case], Case]) -> None:
    warnings.simplefilter("ignore")
    case = noted(draw(random.Random(seed)))
    assert differences(case, tmp_path) == [], case


@pytest.mark.parametrize("seed", range(9, N_CASES, 10))
def test_a_run_drawn_at_random_is_resumed_exactly_after_a_kill(seed: int, tmp_path: Path, noted: Callable[[Case], Case]) -> None:
    warnings.simplefilter("ignore")
    case = noted(draw(random.Random(seed)))
    process = CONTEXT.Process(target=run_in_process, args=(case, tmp_path / "broken"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    flip(case, tmp_path / "broken")
    assert differences(replace(case, breaks=case.breaks[1:]), tmp_path) == [], case
