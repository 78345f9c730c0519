"""Jobs of two processes drawn at random end as their judge ends them: a doubled batch, or torch's DDP. `make compare` draws 300."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from plain_distributed_loop import LOADERS, differences, draw

from nbtrain.addons.multi_gpu import _pool

SEEDS = [2, 3, 4, 5, 8, 13, 18, 19, 36]  # 19 from a cell


@pytest.fixture(scope="module")
def texts() -> Iterator[dict[int, str]]:
    yield differences({seed: draw(seed) for seed in SEEDS})
    _pool().close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_job_of_two_processes_ends_as_its_judge(seed: int, texts: dict[int, str]) -> None:
    assert texts[seed] == ""


def test_three_hundred_jobs_hold_every_kind() -> None:
    drawn = [draw(seed) for seed in range(300)]
    kinds = {"loader": set(LOADERS), "ranks": {2, 3}, "cut": {None, "two to two", "two to one", "one to two"}, "workers": {0, 1, 2}}
    for name, values in kinds.items():
        assert {settings[name] for settings in drawn} == values
