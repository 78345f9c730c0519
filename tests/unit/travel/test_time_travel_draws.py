"""Runs drawn at random go back to a place drawn at random, and end bit for bit as they have ended: rewound, replayed, branched."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from resume_cases import exact
from samples import some
from time_travel_cases import Journey, journey

N_CASES = 210


def _differences(here: Journey, trainer: Any, expected: dict[str, Any]) -> list[str]:
    here.disturb()
    found = here.finish(trainer)
    return [part for part in expected if found[part] != expected[part]]


@pytest.mark.parametrize("seed", some(range(0, N_CASES, 3), 10))
def test_a_rewound_run_ends_as_it_has_ended(seed: int) -> None:
    warnings.simplefilter("ignore")
    here, expected = journey(seed)
    place: Any = here.go(here.trainer.rewind)
    assert _differences(here, here.trainer, expected) == [], (here.case, place)


@pytest.mark.parametrize("seed", some(range(1, N_CASES, 3), 10))
def test_a_branch_without_changes_ends_as_its_parent(seed: int) -> None:
    warnings.simplefilter("ignore")
    here, expected = journey(seed)
    made: Any = here.go(here.trainer.branch)
    assert _differences(here, made, expected) == [], (here.case, made.origin.fork)


@pytest.mark.parametrize("seed", some(range(2, N_CASES, 3), 10))
def test_a_replayed_step_gets_the_batch_that_was_trained_on_and_leaves_the_run_as_it_is(seed: int) -> None:
    warnings.simplefilter("ignore")
    here, expected = journey(seed)
    step = here.chance.choice(sorted(here.seen.batches))
    found = here.trainer.replay(step)
    assert exact(list(found.batch)) == exact(list(here.seen.batches[step])), (here.case, step)
    table = here.trainer.history.steps["train"]
    name = "train_loss" if here.case.who in ("Trainer", "Trainer by hand") else "mean_step"
    if name in table.columns:  # several optimizers log theirs by other names
        losses = dict(zip(table.steps, table[name]))  # a batch may make several updates: it has the last one
        assert repr(found.loss) == repr(losses[min(n for n in losses if n >= step)]), (here.case, step)
    place: Any = here.go(here.trainer.rewind)
    assert _differences(here, here.trainer, expected) == [], (here.case, place)
