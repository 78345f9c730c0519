"""What can't be read of an object within reach of a run is a leaf: it never ends the run, and none of its code is run."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest.mock import MagicMock, Mock

import pandas  # noqa: F401  has classes of Cython
import pytest
import torch
from samples import Regress, make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nbtrain.code.redefined import read_code
from nbtrain.data.epoch import with_epoch
from nbtrain.data.loader_state import LoaderState
from nbtrain.objects.search import Search
from nbtrain.objects.walk import MOST_OBJECTS, Walk, attributes_of

LIBRARIES = [module for name, module in list(sys.modules.items()) if name.startswith("_cython")]
CYTHON = next(kind for module in LIBRARIES for kind in vars(module).values() if isinstance(kind, type) and type(kind) is type)


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(f"{name} was read")


class AnswersAnything:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class AnswersItself:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnswersItself()


class Reads:
    @property
    def __dict__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise AssertionError("__dict__ was read")


class Computes:
    @property
    def dataset(self) -> Any:
        raise AssertionError("a property was called")

    def __len__(self) -> int:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError

    def __eq__(self, other: object) -> bool:
        raise AssertionError


class Mapped(dict[str, int]):
    def _raise(self, *args: Any) -> Any:
        raise AssertionError

    __len__ = __iter__ = __getitem__ = items = values = keys = _raise


class Unnamed:
    def __repr__(self) -> str:
        raise AssertionError("its repr was asked for")


ODD = {
    "a key without a name": lambda: {Unnamed(): [1]},
    "a class of Cython": lambda: CYTHON,
    "answers anything": AnswersAnything,
    "answers itself": AnswersItself,
    "a mock": Mock,
    "a magic mock": MagicMock,
    "a mock of a module": lambda: Mock(spec=nn.Module),
    "a dict that raises": Reads,
    "a property": Computes,
    "a dict of a subclass": lambda: Mapped(a=1),
    "a class that raises": lambda: type.__call__(Meta, "Odd", (), {}),
    "an object of that": lambda: type.__call__(type.__call__(Meta, "Odd", (), {})),
}


class Data(Dataset[Any]):
    def __init__(self, odd: Any = None) -> None:
        self.x, self.odd = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), odd

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.x[i]


class Fit(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch).square().mean()}

    test_step = train_step


@pytest.mark.parametrize("on_error", ["raise", "pause"])
@pytest.mark.parametrize("where", ["dataset", "list", "trainer"])
@pytest.mark.parametrize("kind", ODD)
def test_a_run_completes_with_an_object_that_can_not_be_read(kind: str, where: str, on_error: str) -> None:
    odd = ODD[kind]()
    children: Any = odd._mock_children if kind in ("a mock", "a magic mock") else {}
    n_children = len(children)
    trainer: Any = make_trainer(Fit, model=nn.Linear(3, 1), on_error=on_error)
    if where == "trainer":
        trainer.odd = odd
    data = Data({"dataset": odd, "list": [odd]}.get(where))
    assert trainer.run(1, DataLoader(data, 3), DataLoader(data, 3)).status == "completed"
    assert len(children) <= n_children + 5  # a mock makes one for each name


@pytest.mark.parametrize("kind", ODD)
def test_an_object_that_can_not_be_read_is_a_leaf_of_each_walk(kind: str) -> None:
    odd = ODD[kind]()
    for search in (Search([("odd", odd)]), Search([("odd", odd)], libraries=True)):
        assert len(list(search)) <= 10 and search.is_whole
    assert with_epoch(DataLoader(Data(odd), 3)) == []
    state = LoaderState(DataLoader(Data(odd), 3))
    state.put(state.take())


def test_slots_and_attributes_are_read_without_their_code() -> None:
    class Slots:
        __slots__ = ("__dict__", "__hidden", "unset")

        def __init__(self) -> None:
            self.__hidden, self.n = 1, 2

        @property
        def computed(self) -> Any:
            raise AssertionError

    assert attributes_of(Slots()) == {"_Slots__hidden": 1, "n": 2}


def test_a_walk_ends_and_says_so() -> None:
    walk = Walk()
    walk.add([[] for _ in range(200)])
    assert len(list(walk)) == 201 and walk.is_whole
    walk = Walk()
    walk.add([[[] for _ in range(200)] for _ in range(200)])
    assert len(list(walk)) == MOST_OBJECTS and not walk.is_whole


def test_the_code_of_a_list_of_functions_is_found_and_a_list_of_batches_is_not_walked_through() -> None:
    space: dict[str, Any] = {}
    for i in range(300):
        exec(f"def transform_{i}(x): return x + {i}", space)
    transforms = [space[f"transform_{i}"] for i in range(300)]

    class Steps(Fit):
        def train_step(self, batch: Any) -> dict[str, Any]:
            for transform in self.transforms:
                batch = transform(batch)
            return super().train_step(batch)

    trainer: Any = make_trainer(Steps, model=nn.Linear(3, 1))
    trainer.transforms = transforms[:64]
    assert {"transform_0", "transform_63"} <= read_code(trainer).roots["train"].keys()
    trainer.transforms = transforms
    assert "transform_299" in read_code(trainer).roots["train"]

    calls = {}
    for n in (1, 1000):
        batches = [(torch.zeros(2, 3), torch.zeros(2, 1)) for _ in range(n)]
        calls[n] = n_calls(partial(read_code, trainer, (batches, None)))
    assert calls[1000] < calls[1] + 1000  # less than one call for a batch


def n_calls(function: Any) -> int:
    """The number of Python calls in it."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    function()  # what is cached
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_batch_of_a_trainer_without_state_of_its_own_takes_few_calls() -> None:
    from nbtrain.loops.step_snapshot import StepSnapshot

    snapshot = StepSnapshot(make_trainer(Regress))
    assert n_calls(snapshot.take) < 20
