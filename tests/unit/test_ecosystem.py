"""`make ecosystem`: jobs say what they show and need, a failure is a row with its reason, and the page lists each job."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "ecosystem"
PAGE = Path(__file__).parents[2] / "docs" / "ecosystem.md"
eco: Any = SimpleNamespace(**runpy.run_path(str(FOLDER / "__main__.py"), run_name="ecosystem"))
JOBS = sorted(FOLDER.glob("with_*.py"))


def job(folder: Path, code: str) -> Any:
    path = folder / "with_it.py"
    path.write_text(f'"""Shows it"""\n\n# dependencies = ["it[all]>=2", "other"]\n\n{code}\n')
    return eco.read_job(path)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_is_short_and_says_what_it_shows(path: Path) -> None:
    found = eco.read_job(path)
    assert found.library and 10 <= found.n_lines <= 60 and len(found.shows) <= 140
    assert "assert " in path.read_text()


def test_the_page_has_a_row_for_each_job() -> None:
    assert set(re.findall(r"\| `(with_\w+\.py)` \|", PAGE.read_text())) == {path.name for path in JOBS}


def test_a_job_is_read(tmp_path: Path) -> None:
    found = job(tmp_path, "x = 1\n\n# a comment\nassert x")
    assert (found.library, found.shows, found.n_lines) == ("it", "Shows it", 2)
    (tmp_path / "with_it.py").write_text('"""Shows it"""\n# dependencies = ["rich"]\n# no-deps = ["it"]\nx = 1')
    assert eco.read_job(tmp_path / "with_it.py").library == "it"
    (tmp_path / "with_it.py").write_text("x = 1")
    with pytest.raises(ValueError, match="with_it.py needs a docstring and a line such as"):
        eco.read_job(tmp_path / "with_it.py")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("assert 1", ""),
        ("assert 1 == 2, 'not learned'", "AssertionError: not learned"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("import os; os._exit(3)", "exit code 3"),
        ("while True: pass", "not finished after 0.5 s"),
    ],
)
def test_a_job_that_fails_says_why(code: str, reason: str, tmp_path: Path) -> None:
    limit = 0.5 if "while" in code else 60
    assert eco.run_job(job(tmp_path, code), Path(sys.executable), limit) == reason


def test_a_failure_is_a_row_and_is_counted(tmp_path: Path) -> None:
    found = job(tmp_path, "assert 1")
    rows = [eco.row(found, eco.Outcome("2.1", 3.4, "")), eco.row(found, eco.Outcome("", 0.2, "ValueError: a|b"))]
    assert rows[0] == "| it | 2.1 | Shows it | yes | `with_it.py` | 1 | 3 |"
    assert "| **no**: ValueError: a¦b |" in rows[1]
    page = eco.page(rows, "`0ba6fc70`, 2026-11-22")
    assert "1 of 2 jobs did what they show" in page and "\nMade by `make ecosystem` at commit `0ba6fc70`, 2026-11-22.\n" in page
