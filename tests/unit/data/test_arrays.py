"""NumPy arrays and frames of pandas in a TensorLoader and in `predict`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from samples import make_data, make_trainer

from nbtrain import ConfigError, TensorLoader


def make_arrays() -> tuple[np.ndarray, np.ndarray]:
    x, y = make_data().tensors
    return x.double().numpy(), y.double().numpy()


def listed(loader: Any) -> list[Any]:
    return [[part.tolist() for part in (batch.values() if isinstance(batch, dict) else batch)] for batch in loader]


def test_arrays_and_frames_give_the_batches_of_tensors() -> None:
    x, y = make_arrays()
    expected = listed(TensorLoader(make_data(), batch_size=16))
    names = [f"x{i}" for i in range(8)]
    assert listed(TensorLoader(x, y, batch_size=16)) == expected
    assert listed(TensorLoader({"x": x, "y": pd.DataFrame(y)}, batch_size=16)) == expected
    assert listed(TensorLoader(pd.DataFrame(x, columns=names), pd.DataFrame(y), batch_size=16)) == expected


def test_decimals_become_the_default_dtype_and_integers_stay() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})
    (batch,) = TensorLoader(frame, frame["a"], np.array([True, False]), batch_size=2)
    assert [part.dtype for part in batch] == [torch.float32, torch.int64, torch.bool]


def test_a_frame_of_numbers_and_booleans_is_numeric() -> None:
    frame = pd.DataFrame({"a": [0.5, 1.5], "b": [True, False], "c": pd.array([3, None], dtype="Int64")})
    (batch,) = TensorLoader(frame, frame[["b"]], batch_size=2)
    assert torch.equal(batch[0].nan_to_num(-1), torch.tensor([[0.5, 1.0, 3.0], [1.5, 0.0, -1.0]])) and batch[1].dtype == torch.bool
    (batch,) = TensorLoader(pd.DataFrame({"a": [7, 8], "b": [True, False]}), batch_size=2)
    assert batch[0].tolist() == [[7, 1], [8, 0]] and batch[0].dtype == torch.int64


@pytest.mark.parametrize("dtype", ["f4", "f8", "i2", "i8"])
def test_an_array_in_the_byte_order_of_another_machine_has_its_values(dtype: str) -> None:
    for order in "<>":
        (batch,) = TensorLoader(np.arange(4).astype(order + dtype), batch_size=4)
        assert batch[0].tolist() == [0, 1, 2, 3]


def test_a_batch_can_be_changed_without_the_array() -> None:
    array = np.zeros((4, 2), dtype=np.float32)
    array.setflags(write=False)
    for batch in TensorLoader(array, batch_size=2):
        batch[0] += 1
    assert array.sum() == 0


def test_a_trainer_trains_on_arrays_and_predicts_arrays_and_frames() -> None:
    x, y = make_arrays()
    trainer = make_trainer()
    trainer.run(1, TensorLoader(x, y, batch_size=16, shuffle=True))
    expected = trainer.predict(torch.from_numpy(x).float())
    assert torch.equal(trainer.predict(x), expected) and torch.equal(trainer.predict(pd.DataFrame(x)), expected)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (pd.DataFrame({"a": [1.0], "city": ["Seoul"]}), "Column 'city' must be numeric."),
        (np.array(["a"]), "A ndarray of <U1 must be numeric."),
    ],
)
def test_what_has_no_numbers_is_refused(value: Any, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TensorLoader(value)
    remedy = "Leave it out, or encode it: frame['city'].astype('category').cat.codes; fill what is missing."
    assert str(caught.value) == f"{what}\n  {remedy}"
