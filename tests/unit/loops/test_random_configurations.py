"""A trainer's steps in configurations drawn at random run alike on Lightning's own loops and on nbtrain's; `make compare` draws 1,000."""

from __future__ import annotations

import pytest
from changes import CHANGES
from random_configurations import CALLBACKS, LOADERS, OPTIMIZERS, SCHEDULES, USUAL, WHO, difference, draw, draw_short


# 28: several sets in the check before epoch 1. 141: one set there, read only in `on_sanity_check_end`. 492: a stop without a validation
@pytest.mark.parametrize("seed", [*range(24), 28, 141, 492])
def test_a_random_configuration_runs_alike_on_both_loops(seed: int) -> None:
    different, _ = difference(draw(seed))
    assert different == "", f"seed {seed}"


@pytest.mark.parametrize("seed", range(8))
def test_random_short_epochs_run_alike_on_both_loops(seed: int) -> None:
    different, _ = difference(draw_short(seed))
    assert different == "", f"seed {seed}"


def test_a_validation_after_a_restored_epoch_is_whole() -> None:
    saves = {"best by a step's value": 7, "logs": 0}  # after the last batch of the epoch, before its validation
    settings = USUAL | {"loader": "by hand", "callbacks": saves, "more_epochs": 1}
    assert difference(settings | {"trainer": {"max_epochs": 1, "val_check_interval": 4}})[0] == ""


def test_a_thousand_seeds_hold_every_kind() -> None:
    drawn = [draw(seed) for seed in range(1000)]
    steps = [settings["steps"] for settings in drawn]
    assert {one["who"] for one in steps} == set(WHO) and {one["optimizer"] for one in steps} == set(OPTIMIZERS)
    assert {one["schedule"] for one in steps} == {None, *SCHEDULES}
    assert {settings["loader"] for settings in drawn} == set(LOADERS)
    assert {name for settings in drawn for name in settings["callbacks"]} == set(CALLBACKS)
    assert {name for settings in drawn for name in settings["changes"]} == set(CHANGES)
    assert len({name for settings in drawn for name in settings["trainer"]}) == 16
