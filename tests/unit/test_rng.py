"""Random numbers are restored exactly, also where the generators are only looked at."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from nbtrain.rng import _PYTHON, keep_random, random_state, set_random_state


def draw(kind: int) -> Any:
    """A number of one of the generators, with or without a spare one that is kept for the next call."""
    kinds = random.random, lambda: random.gauss(0, 1), numpy.random.rand, numpy.random.randn, lambda: float(torch.rand(()))
    return kinds[kind]()


def plain_state() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def set_plain_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])


def as_text(state: tuple[Any, ...]) -> str:
    return repr((state[0], [part.tolist() if isinstance(part, numpy.ndarray) else part for part in state[1]], state[2].tolist()))


@pytest.mark.parametrize("seed", range(20))
def test_states_are_those_of_the_generators_whatever_was_drawn_and_restored(seed: int) -> None:
    choices = random.Random(seed)
    kept: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
    with keep_random():
        for _ in range(60):
            match choices.randrange(5):
                case 0:
                    kept.append((random_state(), plain_state()))
                case 1 if kept:
                    state, plain = choices.choice(kept)
                    set_random_state(state)
                    assert as_text(plain_state()) == as_text(plain)
                case 2 if kept:
                    set_plain_state(choices.choice(kept)[1])  # by other means
                case 3:
                    random.seed(choices.randrange(3))
                    numpy.random.seed(choices.randrange(3))
                case _:
                    draw(choices.randrange(5))


def test_python_generator_is_looked_at_where_it_lies() -> None:
    before = _PYTHON.look()
    assert before is not None and before == _PYTHON.look()
    with keep_random():
        random.random()
        assert _PYTHON.look() != before


def test_state_is_read_once_while_nothing_is_drawn() -> None:
    with keep_random():
        random.seed(1)  # without a spare number
        numpy.random.seed(1)
        first, second = random_state(), random_state()
        assert first["python"] is second["python"] and first["numpy"] is second["numpy"]
        random.random()
        assert random_state()["python"] != first["python"]


def test_state_of_a_file_has_lists() -> None:
    with keep_random():
        state = random_state()
        version, words, spare = state["python"]
        expected = random.random()
        set_random_state({**state, "python": [version, list(words), spare]})
        assert random.random() == expected
