"""One batch of a loader, read without a pass over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from samples import make_data, make_loader, make_valid, random_numbers, same_content
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbtrain import SeededLoader, TaskLoader, TensorLoader
from nbtrain.data.first_batch import first_batch
from nbtrain.data.resumable_loader import ValidLoader


class Once(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a pass was begun")


class Counted(Dataset[Any]):
    def __init__(self) -> None:
        self.n_read, self.rng = 0, np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        self.n_read += 1
        return torch.full((8,), float(index)) + self.rng.random(), torch.zeros(1)

    def __len__(self) -> int:
        return 10


def _generator() -> Iterator[Any]:
    raise AssertionError("a pass was begun")
    yield


class AsObject:
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a pass was begun")


UNREAD: dict[str, Callable[[], Any]] = {
    "a generator": _generator,
    "an iterator": lambda: iter([1]),
    "an iterable dataset": lambda: DataLoader(Once(), batch_size=2),
    "an object": AsObject,
    "a sampler that is an iterator": lambda: DataLoader(Counted(), batch_sampler=iter([[0], [1]])),  # type: ignore[arg-type]
    "several loaders": lambda: [make_valid(), make_valid()],
    "a dataset that workers prepare": lambda: DataLoader(Counted(), 2, num_workers=1, worker_init_fn=lambda i: None),
}


@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD)
def test_loader_that_gives_its_batches_to_a_pass_alone_is_left_alone(make: Callable[[], Any]) -> None:
    assert first_batch(make()) == []


def _first(n: int) -> list[torch.Tensor]:
    return [tensor[:n] for tensor in make_data().tensors]


READ: dict[str, Callable[[], Any]] = {
    "a DataLoader": make_valid,
    "shuffled": lambda: make_loader(own_generator=True),
    "with workers": lambda: make_loader(num_workers=2, persistent_workers=True),
    "a batch sampler": lambda: DataLoader(make_data(), batch_sampler=[list(range(16)), [3]]),
    "a TensorLoader": lambda: TensorLoader(*make_data().tensors, batch_size=16),
    "a SeededLoader": lambda: SeededLoader(make_data(), 16, num_workers=2),
    "a list": lambda: [_first(16), _first(3)],
    "one whose place is kept": lambda: ValidLoader(make_valid()),
}


@pytest.mark.parametrize("make", READ.values(), ids=READ)
def test_first_batch_is_read_without_workers_and_random_numbers(make: Callable[[], Any]) -> None:
    loader = make()
    generator = getattr(loader, "generator", None)
    state = None if generator is None else generator.get_state()
    numbers = random_numbers()
    (batch,) = first_batch(loader)
    assert all(map(torch.equal, batch, _first(16)))
    assert same_content(list(random_numbers().values()), list(numbers.values())) and (
        state is None or torch.equal(state, generator.get_state())
    )
    assert getattr(loader, "_iterator", None) is None


def test_tensor_loader_that_shuffles_keeps_its_order_and_its_place() -> None:
    def made() -> TensorLoader:
        return TensorLoader(torch.arange(8), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))

    loader, other = made(), made()
    state = made()
    iterator = iter(state)
    next(iterator)
    for one in (loader, other):
        one.load_state_dict(state.state_dict())
    first_batch(loader)
    assert [b[0].tolist() for b in loader] == [b[0].tolist() for b in other]


def test_dataset_is_as_before() -> None:
    dataset = Counted()
    loader = DataLoader(dataset, 4)
    state = dataset.rng.bit_generator.state
    (batch,) = first_batch(loader)
    assert len(batch[0]) == 4 and dataset.n_read == 0 and dataset.rng.bit_generator.state == state


def test_batch_of_a_task_has_its_name() -> None:
    (task,) = first_batch(TaskLoader({"a": make_valid(), "b": make_valid()}))
    assert task.name == "a" and torch.equal(task.batch[0], _first(16)[0])
