"""Kills are tried on two file systems."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(params=["disk", "shared memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
    elif not SHARED_MEMORY.is_dir():
        pytest.skip("this system has no /dev/shm")
    else:
        path = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
        yield path
        shutil.rmtree(path)
