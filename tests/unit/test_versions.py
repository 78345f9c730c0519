"""`make versions`: rows are kept, in order of the versions; what fails is told from what passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import versions
from versions import Found, Pair


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "versions.md"
    path.write_text(f"before\n{versions.FIRST}\n{versions.LAST}\nafter\n")
    monkeypatch.setattr(versions, "PAGE", path)
    return path


def test_a_run_adds_its_rows_to_the_table(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([Found("1,000 passed, 2 skipped", "1.01 ×", "`a`"), Found("1 failed, 999 passed", "", "`b`"), Found("", "1.02 ×", "`c`")])
    monkeypatch.setattr(versions, "python_of", lambda torch: Path(torch))
    monkeypatch.setattr(versions, "measured", lambda python, lightning, only: (Pair(str(python), lightning), next(found)))
    assert versions.main(["--torch", "2.11.0", "--lightning", "2.6.4"]) == 0
    assert versions.main(["--torch", "2.9.1", "--lightning", "2.6.4"]) == 1
    assert versions.main(["--torch", "2.9.1", "--lightning", "2.6.4", "--only", "steps"]) == 0
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    assert [line for line in lines if line.startswith("| 2")] == [
        "| 2.9.1 | 2.6.4 | 1 failed, 999 passed | 1.02 × at `c` | `b` |",
        "| 2.11.0 | 2.6.4 | 1,000 passed, 2 skipped | 1.01 × | `a` |",
    ]


@pytest.mark.parametrize("tests", ["1 failed, 3 passed", "1 error", "pytest has not ended"])
def test_what_is_not_whole_has_failed(tests: str) -> None:
    assert Found(tests, "1.01 ×").failed and not Found("3 passed, 1 skipped", "").failed


def test_the_page_has_the_oldest_torch_and_one_that_is_newer_than_the_pinned() -> None:
    rows = versions.rows()
    tested = [pair for pair, found in rows.items() if found.tests]  # of others a step was timed
    numbers = [[int(part) for part in pair.torch.split(".")] for pair in tested]
    assert min(numbers)[:2] == [2, 9] and max(numbers) > [2, 13]
    assert not [pair for pair in tested if rows[pair].failed]
