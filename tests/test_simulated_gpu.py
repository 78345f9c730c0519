"""What runs on GPUs that are simulated, in processes of its own: torch looks for devices when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = {
    "the devices, runs and budgets": ["tests/simulated_gpu"],
    "states and copies": ["tests/unit/checkpoint/test_device_copy.py", "tests/unit/trainer/test_copies.py"],
    "several optimizers": ["tests/unit/trainer/test_several_optimizers.py"],
    "another accelerator": ["tests/simulated_gpu/test_runs.py", "-k", "every_precision or broken_off or another_device"],
}
FOLDERS = ("addons", "checkpoint", "data", "engine", "history", "loops", "optim", "run", "state", "tools", "trainer", "travel")
LONG = {
    "another accelerator, whole": ["tests/simulated_gpu/test_runs.py"],
    "jobs beside a plain loop": ["tests/unit/loops/test_random_jobs.py::test_a_random_job_ends_as_in_a_plain_loop"],
    "time travel": ["tests/unit/travel/test_time_travel_draws.py"],
    "interrupted runs": ["tests/faults/test_interrupted.py"],
    "what is long of two devices": ["-m", "long", "tests/simulated_gpu/test_ranks.py"],
    "what is long of skipped updates": ["-m", "long", "tests/simulated_gpu/test_skipped_updates.py"],
    "runs in two processes": ["tests/faults/test_multigpu.py"],
    **{f"unit tests of {folder}": [f"tests/unit/{folder}"] for folder in FOLDERS},
}


@pytest.mark.parametrize("part", [*PARTS, *(pytest.param(part, marks=pytest.mark.long) for part in LONG)])
def test_it_runs_on_simulated_gpus(part: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *(PARTS | LONG)[part]]
    environment = os.environ | {"NBTRAIN_TEST_DEVICE": "simulated-xpu" if part.startswith("another accelerator") else "simulated"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
