"""One thread for each process: two test workers, kernels and commands share the cores, and OpenMP's waiting threads would starve them.

And a headless Chromium, for the tests that look at what people see, and kernels that start at once, for those that care for other things.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("CI must have chromium: .ci/run installs it")
        pytest.skip("no chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"])
        yield browser
        browser.close()


def script(name: str) -> ModuleType:
    """The program docs/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def warm_kernel() -> Iterator[Any]:
    """A kernel spec: its kernels start in a tenth of a second."""
    with script("execute").warm_kernels() as kernel:
        yield kernel
