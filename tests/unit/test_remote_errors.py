"""Errors of a loader's worker process and of ranks: their class, their message, and where they were raised."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from samples import Regress, make_trainer, some
from torch.utils.data import DataLoader, Dataset

from nbtrain.distributed.worker import describe_failure, loads
from nbtrain.remote_errors import RemoteTraceback, remake


class BadRow(Exception):
    """Its constructor takes more than its text."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(file, line)
        self.file, self.line = file, line

    def __str__(self) -> str:
        return f"{self.file} is damaged\nin line {self.line}"


class Loud(Exception):
    """Its constructor changes the text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"!{text}!")


def raise_key() -> None:
    {}["label"]  # noqa: B018


def raise_chained() -> None:
    try:
        raise_key()
    except KeyError as error:
        raise ValueError("no label") from error


def raise_decode() -> None:
    b"\xff".decode("utf-8")


def raise_file() -> None:
    open("/no/such/x.png")


def raise_it(error: Exception) -> None:
    raise error


CASES: dict[str, Any] = {
    "missing": lambda: raise_it(FileNotFoundError("No such file: x.png")),
    "file": raise_file,
    "key": raise_key,
    "two arguments": lambda: raise_it(BadRow("x.csv", 3)),
    "other text": lambda: raise_it(Loud("stop")),
    "chained": raise_chained,
    "decode": raise_decode,
    "empty": lambda: raise_it(IndexError()),
    "runtime": lambda: raise_it(RuntimeError("Caught a cold.\nOriginal Traceback")),
}


IN_WORKERS = {"num_sanity_val_steps": 0}  # the check of test_step reads its batch in this process


class Rows(Dataset[Any]):
    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return CASES[self.name]()


def raised_here(name: str) -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011, B017
        CASES[name]()
    return raised.value


@pytest.mark.parametrize("name", some(CASES, 3))
def test_error_of_a_worker_is_what_the_dataset_has_raised(name: str) -> None:
    own = raised_here(name)
    trainer = make_trainer(Regress, log_bar=False, lightning=IN_WORKERS)
    with pytest.raises(type(own)) as raised:
        trainer.run(1, DataLoader(Rows(name), num_workers=1))
    assert str(raised.value) == str(own) and type(raised.value).__name__ == type(own).__name__
    cause = raised.value.__cause__
    assert isinstance(cause, RemoteTraceback) and cause.place == "DataLoader worker process 0"
    assert str(cause).startswith("raised in DataLoader worker process 0\n") and "in __getitem__\n" in str(cause)
    assert trainer.result is None  # the run has not begun


def test_attributes_of_known_errors_are_kept() -> None:
    trainer = make_trainer(Regress, log_bar=False, lightning=IN_WORKERS)
    with pytest.raises(FileNotFoundError) as file:
        trainer.run(1, DataLoader(Rows("file"), num_workers=1))
    assert (file.value.errno, file.value.filename) == (2, "/no/such/x.png")
    with pytest.raises(KeyError) as key:
        trainer.run(1, DataLoader(Rows("key"), num_workers=1))
    assert key.value.args == ("label",)


def bad_collate(samples: list[Any]) -> Any:
    return samples[9]


@pytest.mark.parametrize(
    "use", some(["run", "evaluate", "validate", "lightning's loops", "inference", "predict", "lr_find", "show_results"], 3)
)
def test_every_way_to_read_a_loader_raises_the_workers_own_error(use: str) -> None:
    trainer, others = make_trainer(Regress, log_bar=False, lightning=IN_WORKERS), multiprocessing.active_children()
    loader = DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 8)), 4, num_workers=1, collate_fn=bad_collate)
    if use == "lightning's loops":
        trainer.short_way = False
    with pytest.raises(IndexError) as raised:
        trainer.run(1, loader) if use in ("run", "lightning's loops") else getattr(trainer, use)(loader)
    assert str(raised.value) == "list index out of range"
    assert isinstance(raised.value.__cause__, RemoteTraceback) and "in bad_collate\n" in str(raised.value.__cause__)
    assert multiprocessing.active_children() == others  # each that is left holds up the process for 5 s when it is garbage


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("chained", "decode")])
def test_error_of_a_rank_is_the_same_after_the_way_to_its_parent(name: str) -> None:
    own = raised_here(name)
    own.__notes__ = ["a note"]
    failure = describe_failure(own, rank=1)
    assert failure.error is not None
    made = loads(failure.error)
    assert isinstance(made, type(own)) and str(made) == str(own) and made.__notes__ == ["a note"]
    assert failure.traceback.startswith("Traceback (most recent call last):\n") and failure.traceback.endswith("a note\n")


def test_remade_errors_can_be_pickled() -> None:
    made = remake(BadRow, "x.csv is damaged")
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, BadRow) and str(again) == str(made) == "x.csv is damaged"
    cause = pickle.loads(pickle.dumps(RemoteTraceback("raised", "rank 1", "Traceback", "less")))
    assert (str(cause), cause.place, cause.text) == ("raised\n  \nless", "rank 1", "Traceback")
