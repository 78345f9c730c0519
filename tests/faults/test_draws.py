"""Runs drawn at random, broken off after some batches and resumed in a new trainer, end bit for bit as the ones that were not.

`NBTRAIN_FAULT_CASES` says how many are drawn. A tenth of them is killed in a process of its own instead.
"""

from __future__ import annotations

import os
import random
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from children import CONTEXT
from resume_cases import Case, differences, draw

N_CASES = int(os.environ.get("NBTRAIN_FAULT_CASES", "12"))


class Dies(L.Callback):
    """Kills its process after `n` batches, also while a checkpoint is written."""

    def __init__(self, n: int) -> None:
        self.n = n

    def on_train_batch_end(self, *args: Any) -> None:
        self.n -= 1
        if self.n == 0:
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
