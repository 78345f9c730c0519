"""Jobs that the package of an earlier commit saves and that of this tree resumes, and the other way round, end as if never cut off.

`make compare` draws more of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import before
import pytest
from across_job import LOADERS, OPTIMIZERS, SCHEDULES, WHO
from resume_across import Packages, difference, draw, first_difference, unusual

LIMITS = {"val_every_n_steps", "val_every_n_epochs", "max_steps", "steps_per_epoch", "max_val_steps", "val_first"}


@pytest.fixture(scope="module")
def packages() -> Iterator[Packages]:
    with Packages() as found:
        yield found


@pytest.mark.parametrize("seed", range(12))
def test_a_job_saved_by_one_package_is_resumed_by_the_other(seed: int, packages: Packages) -> None:
    settings = draw(seed)
    assert difference(settings, packages)[0] == "", f"seed {seed}: {unusual(settings)}"


def test_300_seeds_hold_every_kind() -> None:
    drawn = [draw(seed) for seed in range(300)]
    kinds = {"who": WHO, "loader": LOADERS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "averages": (None, "SWA", "EMA")}
    for name, values in kinds.items():
        assert {settings[name] for settings in drawn} == set(values)
    assert {name for settings in drawn for name in settings["limits"]} == LIMITS


def test_a_difference_is_shown_with_its_place() -> None:
    assert first_difference({"a": [1, 2], "b": 3}, {"a": [1, 5], "b": 4}) == "[a][1]: expected 2\n      found 5"
    assert first_difference([1, 2], [1]) == ": 2 of them, not 1" and first_difference({"a": 1}, {"a": 1}) == ""


def test_a_history_without_the_commit_is_said() -> None:
    with pytest.raises(RuntimeError, match="The package of 00000000 is made from git, which has it in a whole clone"):
        before.folder_of("0" * 40)
