"""What the tests of this folder share: they run where the devices are loaded, in the process that tests/test_simulated_gpu.py starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit/addons"))  # the addons with their options are those of test_addons

ON = {  # the tests by what torch calls the devices: XPUs, or a real device in `make gpu`, where there are the runs alone
    "simulated": ("test_*",),
    "simulated-xpu": ("test_runs.py",),
    "cuda": ("test_runs.py", "test_skipped_updates.py"),
}
KIND = os.environ.get("NBTRAIN_TEST_DEVICE", "")
SIMULATED = KIND.startswith("simulated")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.name.startswith("test_")
    return True if is_test and not any(collection_path.match(pattern) for pattern in ON.get(KIND, ())) else None


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
