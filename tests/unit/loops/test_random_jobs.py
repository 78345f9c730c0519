"""Jobs drawn at random end as a plain PyTorch loop ends them, by the short way and by the whole one. `make compare` draws a thousand."""

from __future__ import annotations

import logging

import pytest
from random_jobs import (
    BETWEEN,
    CHANGES,
    DECISIONS,
    HOOKS,
    LOADERS,
    OPTIMIZERS,
    PAGE,
    USUAL,
    Decision,
    by_hand,
    by_nbtrain,
    decisions,
    difference,
    draw,
)
from samples import DEVICE

from nbtrain import ConfigError, StepError


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.parametrize("seed", [*range(60), 71])  # 71: an update by a batch that was left out
def test_a_random_job_ends_as_in_a_plain_loop(seed: int) -> None:
    assert difference(draw(seed)) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("decision", DECISIONS, ids=[decision.title for decision in DECISIONS])
def test_what_differs_from_most_plain_loops_is_decided(decision: Decision) -> None:
    job = USUAL | decision.job
    if not decision.raises:
        # on a GPU, the dropout does not draw from the generator of the data
        is_same = DEVICE != "cpu" and decision.title == "A loader without a length is read one batch ahead"
        assert difference(job) == {} and (by_hand(job, decision.usual)["weights"] == by_hand(job)["weights"]) == is_same
        return
    by_hand(job)
    for short in (True, False):
        with pytest.raises((ConfigError, StepError), match=decision.raises):
            by_nbtrain(job, short=short)


def test_the_page_holds_the_list_of_decisions() -> None:
    assert "\n".join(decisions()) in PAGE.read_text(encoding="utf-8")


def test_a_thousand_jobs_hold_every_kind() -> None:
    drawn = [draw(seed) for seed in range(1000)]
    for name, kinds in {"loader": LOADERS, "optimizer": OPTIMIZERS, "hook": HOOKS, "change": CHANGES, "between": BETWEEN}.items():
        assert {settings[name] for settings in drawn} - {None} == set(kinds)
    assert {name for settings in drawn for name, value in settings.items() if value != USUAL[name]} == set(USUAL)
