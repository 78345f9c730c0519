"""Events, progress, and which value is better."""

from __future__ import annotations

import json
import math

import pytest

from nbtrain.best import is_better, known_mode
from nbtrain.events import Event, Plan, Progress


def test_event_survives_json_with_every_kind_of_float() -> None:
    values = {"train_loss": [0.1, math.nan, math.inf, -math.inf, 1e-300]}
    event = Event(
        "steps", Progress(run=2, phase="train", step=5, n_batches=None), 12.5, {"values": values, "n": 5, "samples": 80, "lr": 0.1}
    )
    back = Event.from_json(event.to_json())
    assert repr(back) == repr(event)


@pytest.mark.parametrize(
    ("progress", "place"),
    [
        (Progress(phase="train", epoch=1, batch=4, n_batches=10), "epoch 2, batch 5"),
        (Progress(phase="train", epoch=1, batch=10, n_batches=10), "epoch 2, after batch 10"),
        (Progress(phase="train", epoch=1, batch=10), "epoch 2, batch 11"),
        (Progress(phase="valid", epoch=1, batch=3, n_batches=5), "epoch 2, validation batch 4"),
        (Progress(phase="valid", epoch=1, batch=5, n_batches=5), "epoch 2, after validation batch 5"),
        (Progress(phase="test", batch=3, n_batches=4), "test batch 4"),
        (Progress(phase="test", batch=4, n_batches=4), "test, after batch 4"),
    ],
)
def test_place_names_the_next_batch_or_the_last_one_of_a_pass(progress: Progress, place: str) -> None:
    assert progress.place == place


def test_json_of_events_is_strict() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    row = {"epoch": 1, "train_loss": math.nan}
    json.loads(Event("epoch", Progress(), 0.0, {"row": row}).to_json(), parse_constant=refuse)


@pytest.mark.parametrize("line", ["", "{", "[]", '{"kind": "end"}', '{"kind": "end", "progress": {"speed": 1}}'])
def test_line_that_is_no_event(line: str) -> None:
    with pytest.raises(ValueError):
        Event.from_json(line)


@pytest.mark.parametrize(
    ("value", "best", "mode", "expected"),
    [
        (1.0, None, "min", True),
        (1.0, 2.0, "min", True),
        (1.0, 1.0, "min", False),
        (1.0, 2.0, "max", False),
        (3.0, 2.0, "max", True),
        (math.nan, None, "max", False),
        (math.nan, 1.0, "min", False),
        (-math.inf, 1.0, "min", True),
    ],
)
def test_is_better(value: float, best: float | None, mode: str, expected: bool) -> None:
    assert is_better(value, best, mode) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("val_loss", "min"),
        ("loss", "min"),
        ("train_acc", "max"),
        ("test_f1", "max"),
        ("val_r2", "max"),
        ("val_mse", "min"),
        ("val_brier_score", "min"),
    ],
)
def test_direction_of_exact_names(name: str, mode: str) -> None:
    assert known_mode(name) == mode


@pytest.mark.parametrize("name", ["val_r2_loss", "style_loss", "val_lossy", "accuracy_gap", "x"])
def test_direction_is_never_guessed_from_a_part_of_a_name(name: str) -> None:
    assert known_mode(name) is None


def test_plan_counts_the_short_last_window_and_may_be_unbounded() -> None:
    assert Plan(3, 5, accumulate=4).total_steps == 6
    assert Plan(3, None).total_steps is None
