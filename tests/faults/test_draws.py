"""Runs drawn at random, broken off after some batches and resumed in a new trainer, end bit for bit as the ones that were not.

`NBTRAIN_FAULT_CASES` says how many are drawn. A tenth of them is killed in a separate process instead.
"""

from __future__ import annotations

import os
import random
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from children import CONTEXT
from resume_cases import Case, differences, draw
from samples import Breaks

N_CASES = int(os.environ.get("NBTRAIN_FAULT_CASES", "12"))


class Dies(Breaks):
    """Kills its process after `n` batches, also while a checkpoint is written."""

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def run_in_process(case: Case, folder: Path) -> None:
    warnings.simplefilter("ignore")
    case.run(case.make(folder, seed=1, callbacks=[Dies(case.breaks[0])]), resume="auto")


@pytest.mark.parametrize("seed", [seed for seed in range(N_CASES) if seed % 10 != 9])
def test_a_run_drawn_at_random_is_resumed_exactly(seed: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    case = draw(random.Random(seed))
    assert differences(case, tmp_path) == [], case


@pytest.mark.parametrize("seed", range(9, N_CASES, 10))
def test_a_run_drawn_at_random_is_resumed_exactly_after_a_kill(seed: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    case = draw(random.Random(seed))
    process = CONTEXT.Process(target=run_in_process, args=(case, tmp_path / "broken"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert differences(replace(case, breaks=case.breaks[1:]), tmp_path) == [], case
