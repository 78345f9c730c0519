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
    if len(drawn) < 100:
        return
    failed, damaged = sum(report.failed for _, report in drawn), sum(case["flips"] is not None for case, _ in drawn)
    terminalreporter.section("runs interrupted where their state changes, in two lives")
    terminalreporter.line(f"{len(drawn)} runs, {damaged} with a damaged checkpoint: {failed} differ from the one that was not interrupted")
    ends = Counter(end for case, _ in drawn for end in case["ends"])
    hows = sorted({how for _, how in ends})
    terminalreporter.line(f"{'':20}" + "".join(f"{how:>12}" for how in hows))
    for moment in dict.fromkeys(moment for moment, _ in ends):
        terminalreporter.line(f"{moment:20}" + "".join(f"{ends[moment, how]:12}" for how in hows))
    for part in ("who", "model", "optimizer", "schedule", "loader", "valid", "steps", "setting", "every", "rewinds", "branches"):
        counts = Counter(case[part] for case, _ in drawn)
        terminalreporter.line(f"{part}: {', '.join(f'{name} {n}' for name, n in sorted(counts.items(), key=str))}")
