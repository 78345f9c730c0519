"""Runs that are interrupted where their state changes, in two lives, end bit for bit as the ones that are not.

`NBTRAIN_FAULT_CASES` says how many are drawn; 100 and more end with a table. Each pair of moments comes in its turn; what trains, how
long it has trained and how it is interrupted is drawn. Each fourth draw is a session: `-k session` selects them. Where more than 60 are
drawn, the newest checkpoint of a quarter is damaged before it is resumed.
Left out: several processes and devices, which tests/distributed has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from interruptions import CHANGES, SESSION_CHANGES, Interruption, SessionCase, drawn, interrupted, run_life
from resume_cases import Case

ROOT = Path(__file__).parents[2]
N_CASES = int(os.environ.get("NBTRAIN_FAULT_CASES", "8"))


@pytest.mark.parametrize("seed", [pytest.param(n, id=f"session-{n}" if n % 4 == 3 else str(n)) for n in range(N_CASES)])
def test_a_run_interrupted_in_two_lives_ends_as_the_one_that_was_not(
    seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    case, moments, chance = drawn(seed, session=seed % 4 == 3)
    # What a bit means depends on the times in the file, and `make test` is to be the same each time
    if N_CASES > 60 and chance.random() < 0.25:
        case = replace(case, flips=chance.randrange(10**6))
    found, ends = interrupted(case, moments, chance, tmp_path)
    drawn_parts = {field.name: getattr(case, field.name) for field in fields(case)}
    record_property("drawn", drawn_parts | {"ends": [(end.at, end.how) for end in ends]})
    assert found == [], (case, ends)


@pytest.mark.parametrize(
    "case",
    [
        Case(schedule="a function", valid="in order"),
        pytest.param(Case(schedule="a function", valid="in order", setting="Lightning's own loops"), marks=pytest.mark.long),
        Case(schedule="by epoch", valid="in order", who="LightningModule"),
        Case(valid="in order", who="LightningModule by hand"),
        Case(schedule="a function", valid="in order", who="Trainer by hand"),
        SessionCase(schedule="a function", valid="in order"),
    ],
)
def test_every_change_of_a_state_is_watched(case: Case, tmp_path: Path) -> None:
    run_life(case, tmp_path, 1, Interruption("logged", 7, "error"), tmp_path / "first.json")
    seen = run_life(case, tmp_path, 1, None, tmp_path / "second.json")["counts"]
    without = {"gradients"} if "by hand" in case.who else set()
    assert CHANGES.keys() - without | (SESSION_CHANGES.keys() if isinstance(case, SessionCase) else {"run begun"}) == seen.keys()


def test_the_page_on_resume_names_the_moments() -> None:
    page = (ROOT / "docs/resume.md").read_text()
    (rows,) = re.findall(r"^\| Just after .*?\n\n", page, re.DOTALL | re.MULTILINE)
    assert ", ".join(re.findall(r"^\| ([a-z, ]+) \|", rows, re.MULTILINE)).split(", ") == [*CHANGES, *SESSION_CHANGES]
