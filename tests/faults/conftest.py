"""Kills are tried on two file systems; what was drawn at random is shown in a table at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found if getattr(report, "when", "") == "call"]
    drawn = [(dict(report.user_properties)["drawn"], report) for report in reports if "drawn" in dict(report.user_properties)]
    if len(drawn) < 50:
        return
    killed = sum("after_a_kill" in report.nodeid for _, report in drawn)
    damaged, failed = sum(case["flips"] is not None for case, _ in drawn), sum(report.failed for _, report in drawn)
    terminalreporter.section("runs drawn at random")
    terminalreporter.line(f"{len(drawn)} runs, {killed} killed, {damaged} with a damaged checkpoint: {failed} differ from the unbroken one")
    for part in ("model", "optimizer", "schedule", "loader", "valid", "steps", "setting", "every"):
        counts = Counter(case[part] for case, _ in drawn)
        terminalreporter.line(f"{part}: {', '.join(f'{name} {n}' for name, n in sorted(counts.items(), key=str))}")
