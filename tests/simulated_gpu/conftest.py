"""What the tests of this folder share: they run where the devices are loaded, in the process that tests/test_simulated_gpu.py starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit/addons"))  # the addons with their options are those of test_addons

SIMULATED = os.environ.get("NBTRAIN_TEST_DEVICE") == "simulated"
if not SIMULATED:  # runs end on a real device, in `make gpu`, as on the CPU but for rounding
    collect_ignore_glob = ["test_[!r]*", "test_ranks.py"] if os.environ.get("NBTRAIN_TEST_DEVICE") == "cuda" else ["test_*"]


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Each test begins with devices that are at rest. What it leaves unordered, nothing else hears of."""
    if not SIMULATED:
        yield
        return
    from simulated_gpu.torch_names import devices

    devices().simulated_forget()
    yield
    devices().simulated_forget()
