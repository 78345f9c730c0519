"""The programs in docs/ as modules, and which of many cases a commit takes."""

from __future__ import annotations

import importlib.util
import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def script(name: str) -> ModuleType:
    """The program docs/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def documented() -> dict[str, Any]:
    """What has a page in the reference: the public names, and the classes of what they return."""
    return script("make_reference").THINGS


def by_commit(n: int) -> int:
    """A number below `n`, by the commit: what a change has broken is found by one of the next, and a commit has the same cases again."""
    root = Path(__file__).parent.parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    return int(found or "0", 16) % n
