"""Runs drawn at random go back to a place drawn at random, and end bit for bit as they have ended: rewound, replayed, branched."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from samples import some
from time_travel_cases import journey

N_CASES = 210


@pytest.mark.parametrize("seed", some(range(0, N_CASES, 3), 10))
def test_a_rewound_run_ends_as_it_has_ended(seed: int) -> None:
    warnings.simplefilter("ignore")
    here, expected = journey(seed)
    place: Any = here.go(here.trainer.rewind)
    here.disturb()
    found = here.finish(here.trainer)
    assert [part for part in expected if found[part] != expected[part]] == [], (here.case, place)
