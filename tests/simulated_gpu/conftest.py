"""What the tests of this folder share: they run where the devices are loaded, in the process that tests/test_simulated_gpu.py starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit/addons"))  # the addons with their options are those of test_addons

KIND = os.environ.get("NBTRAIN_TEST_DEVICE", "")
SIMULATED = KIND.startswith("simulated")
if KIND != "simulated":  # by another name, and on a real device in `make gpu`, there are the runs alone
    collect_ignore_glob = ["test_[!r]*", "test_ranks.py"] if KIND in ("cuda", "simulated-xpu") else ["test_*"]


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
