"""OmniGenBench's keys, over rows of every kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nbtrain.history.history import result_of
from nbtrain.variants.model_trainer import label_key, prediction_of

TRAINED = {"epoch": 1, "train_loss": 0.9}
VALIDATED = {"epoch": 2, "train_loss": 0.5, "val_loss": 0.7}
ROWS: Any = SimpleNamespace(epochs=[TRAINED, VALIDATED], tests=[{"test_f1": 0.1}, {"test_f1": 0.2}, {"epoch": 3}], best=VALIDATED)
NOTHING: Any = SimpleNamespace(epochs=[], tests=[], best=None)


@pytest.mark.parametrize(
    ("key", "found", "of_nothing"),
    [
        ("best_valid", {"eval_loss": 0.7}, {}),
        ("valid", [{"eval_loss": 0.7}], []),
        ("test", {"test_f1": 0.2}, {}),
        ("train_metrics_history", [{"epoch": 1, "train_loss": 0.9}, {"epoch": 2, "train_loss": 0.5}], []),
    ],
)
def test_a_key_is_made_of_the_rows(key: str, found: Any, of_nothing: Any) -> None:
    assert result_of(key, ROWS) == found and result_of(key, NOTHING) == of_nothing


def test_another_key_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="best_train"):
        result_of("best_train", ROWS)


def test_labels_and_predictions_are_found_in_the_order_of_their_names() -> None:
    assert label_key({"y": 1, "labels": 2}) == "labels" and label_key([1, 2]) is None and label_key({"x": 1}) is None
    assert prediction_of({"prediction": 1, "logits": 2}) == 2 and prediction_of({"logits": None}) is None
