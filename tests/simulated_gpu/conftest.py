"""What the tests of this folder share: they run where the devices are loaded, in the process that tests/test_simulated_gpu.py starts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if os.environ.get("NBTRAIN_TEST_DEVICE") != "simulated":
    collect_ignore_glob = ["test_*"]


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Each test begins with devices that are at rest. What it leaves unordered, nothing else hears of."""
    from simulated_gpu.torch_names import devices

    devices().simulated_forget()
    yield
    devices().simulated_forget()
