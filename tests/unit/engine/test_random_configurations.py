"""Configurations drawn at random run alike on Lightning's own loops and on the lean ones. `make compare` draws a thousand."""

from __future__ import annotations

import pytest
from random_configurations import CALLBACKS, LOADERS, OPTIMIZERS, SCHEDULES, difference, draw


@pytest.mark.parametrize("seed", range(40))
def test_a_random_configuration_runs_alike_on_both_loops(seed: int) -> None:
    different, _, _ = difference(draw(seed))
    assert different == "", f"seed {seed}"


def test_a_thousand_seeds_hold_every_kind() -> None:
    drawn = [draw(seed) for seed in range(1000)]
    assert {settings["loader"] for settings in drawn} == set(LOADERS)
    assert {settings["module"]["optimizer"] for settings in drawn} == set(OPTIMIZERS)
    assert {settings["module"]["schedule"] for settings in drawn} == {None, *SCHEDULES}
    assert {name for settings in drawn for name in settings["callbacks"]} == set(CALLBACKS)
    assert len({name for settings in drawn for name in settings["trainer"]}) == 17
