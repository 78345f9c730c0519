"""After an error in a step your objects are as before its batch, whatever their kind; what is too large to copy is named."""

from __future__ import annotations

import random
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from samples import Regress, make_loader, make_model, make_trainer
from torch import nn

from nbtrain.loops.step_snapshot import Snapshot, StepSnapshot
from nbtrain.rng import random_state


@dataclass
class Seen:
    n: int = 0
    values: list[int] = field(default_factory=list)

    def add(self) -> None:
        self.n += 1
        self.values.append(self.n)


class Slots:
    __slots__ = ("_n", "__secret", "values")

    def __init__(self) -> None:
        self._n, self.__secret = 0, [0]

    def add(self) -> None:
        self._n += 1
        self.__secret[0] += 1
        self.values = [self._n]  # not there at first

    def __repr__(self) -> str:
        return repr((self._n, self.__secret, getattr(self, "values", None)))


class Uncopied(Seen):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("can't be copied")


class Guarded(dict[str, int]):
    """Its methods would do something else."""

    def __init__(self) -> None:
        super().__init__(n=0)
        self.n_set = 0

    def __setitem__(self, key: str, value: int) -> None:
        self.n_set += 1
        super().__setitem__(key, value)

    def add(self) -> None:
        self["n"] += 1
        self["more"] = self.pop("more", 0) + 1


class Numbers(list[int]):
    def append(self, item: int) -> None:
        super().append(item)
        self.newest = item

    def __repr__(self) -> str:
        return f"{list(self)} {vars(self)}"


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.norm = 0, nn.BatchNorm1d(1)
        self.register_buffer("mean", torch.zeros(1))

    def add(self) -> None:
        self.n += 1
        self.mean += 1
        self.norm(torch.rand(4, 1))


def count(item: Any) -> None:
    item["n"] += 1


def move(item: OrderedDict[str, int]) -> None:
    item.move_to_end("a")
    item["c"] = item.pop("c", 0) + 1


def draw(item: Any) -> None:
    item.random()


def replace(item: dict[str, Any]) -> None:
    item["inner"] = [*item["inner"], 1]
    item["inner"].append(2)


def add(item: Any) -> None:
    item.add()


def nested() -> dict[str, Any]:
    inner: dict[str, Any] = {"a": {"n": [0, {"b": Counter()}]}}
    inner["itself"] = inner
    return inner


def count_nested(item: Any) -> None:
    item["itself"]["a"]["n"][0] += 1
    item["a"]["n"][1]["b"].update("xy")


def state_of(item: Any) -> str:
    """What is in an object, for a comparison."""
    if isinstance(item, nn.Module):
        return repr((item.n, {name: value.tolist() for name, value in item.state_dict().items()}))
    if isinstance(item, random.Random):
        return repr(item.getstate())
    if isinstance(item, np.random.Generator):
        return repr(item.bit_generator.state)
    if isinstance(item, np.random.RandomState):
        return repr(item.get_state())
    return repr(vars(item)) + repr(dict.items(item)) if isinstance(item, Guarded) else repr(item)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Counter": (lambda: Counter(n=0), count),
    "defaultdict": (lambda: defaultdict(int), count),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), move),
    "UserDict": (lambda: UserDict(n=0), count),
    "dict of 200": (lambda: {"n": 0} | {str(i): i for i in range(200)}, count),
    "dict in dicts": (nested, count_nested),
    "dict of a subclass": (Guarded, add),
    "list of 200": (lambda: [0] * 200, lambda item: item.__setitem__(100, item[100] + 1)),
    "list that is cleared": (lambda: [1, 2], lambda item: item.clear()),
    "list of a subclass": (Numbers, lambda item: item.append(1)),
    "list that is replaced": (lambda: {"inner": []}, replace),
    "list in a tuple": (lambda: ([],), lambda item: item[0].append(1)),
    "list of 100,000 that grows": (lambda: [0] * 100_000, lambda item: item.append(1)),
    "deque": (lambda: deque([1, 2, 3], maxlen=3), lambda item: item.append(4)),
    "set of 200": (lambda: set(range(200)), lambda item: item.add(len(item))),
    "array": (lambda: np.zeros(3), lambda item: item.__iadd__(1)),
    "array of objects": (lambda: np.array([None, "a"], object), lambda item: item.__setitem__(0, "b")),
    "tensor": (lambda: [torch.zeros(3)], lambda item: item[0].add_(1)),
    "random.Random": (lambda: random.Random(0), draw),
    "NumPy's generator": (lambda: np.random.default_rng(0), draw),
    "NumPy's old generator": (lambda: np.random.RandomState(0), lambda item: item.rand()),
    "dataclass": (Seen, add),
    "dataclass that can't be copied": (Uncopied, add),
    "dataclasses in a list": (lambda: [Seen(), Seen()], lambda item: item[1].add()),
    "namespace": (lambda: SimpleNamespace(n=0), lambda item: setattr(item, "n", item.n + 1)),
    "slots": (Slots, add),
    "module in a list": (Averages, add),
}


class Counting(Regress):
    """Counts in `counted`, and fails once in its second batch."""

    left = 1  # of the class: an object of the trainer would be restored

    def train_step(self, batch: Any) -> dict[str, Any]:
        output = super().train_step(batch)
        item, change = self.counted
        change(item[0])
        self.n += 1
        if self.n == 2 and type(self).left:
            type(self).left -= 1
            raise ZeroDivisionError
        return output


def counted(kind: str, owner: str, *, fails: bool) -> tuple[Any, Any, str]:
    """Train one epoch. Returns what counted, before and after it, and what was lost at the error."""
    make, change = KINDS[kind]
    Counting.left, lost = int(fails), ""
    torch.manual_seed(0)
    trainer: Any = make_trainer(Counting, model=make_model(), on_error="pause")
    trainer.n, item = 0, make()
    holder = [item] if owner == "trainer" else SimpleNamespace(held={"a": [item]}).held["a"]
    trainer.counted = holder, change
    if owner == "model":
        trainer.model.held = Seen(values=holder)
    try:
        trainer.run(1, make_loader())
    except ZeroDivisionError:
        lost = trainer.failure.lost
        trainer.resume()
    assert trainer.n == len(make_loader()) and trainer.counted[0][0] is item
    return item, trainer, lost


@pytest.mark.parametrize("owner", ["trainer", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_tried_again_counts_once_in_an_object_of_any_kind(kind: str, owner: str) -> None:
    item, *_ = counted(kind, owner, fails=False)
    again, _, lost = counted(kind, owner, fails=True)
    assert state_of(item) == state_of(again)
    assert lost == ("not restored: trainer.counted[0][0] (a list of 100,001 items)" if "100,000" in kind else "")


def snapshot_of(**held: Any) -> tuple[Any, StepSnapshot]:
    trainer: Any = make_trainer(Regress)
    vars(trainer).update(held)
    snapshot = StepSnapshot(trainer)
    snapshot.take()
    return trainer, snapshot


def test_an_object_that_two_names_share_stays_one() -> None:
    one: Counter[str] = Counter()
    held: dict[str, Any] = {"one": one, "two": [one]}
    _, snapshot = snapshot_of(held=held)
    held["one"]["n"] += 1
    held["two"][0] = Counter()
    assert snapshot.restore() == "" and held["one"] is held["two"][0] and held["one"] == Counter()


def test_what_is_made_in_the_middle_of_a_pass_is_restored_too() -> None:
    trainer, snapshot = snapshot_of(held={})
    trainer.held["late"] = Counter(n=1)
    snapshot.take()
    trainer.held["late"]["n"] += 1
    assert snapshot.restore() == "" and trainer.held == {"late": Counter(n=1)}


def test_what_is_too_large_to_copy_is_named_if_it_has_changed() -> None:
    held = {"seen": dict.fromkeys(range(20_000), 0), "vocabulary": dict.fromkeys(range(20_000), 0)}
    trainer, snapshot = snapshot_of(bank=torch.zeros(2**20 + 1), table=np.zeros(2**19 + 1), words=iter("ab"), **held)
    trainer.seen[0] = 1
    trainer.bank += 1
    trainer.table[0] = 1
    lost = snapshot.restore()
    assert lost.startswith("not restored: ") and "trainer.seen (a dict of 20,000 items)" in lost and "and 1 more" in lost
    assert "vocabulary" not in lost
    trainer, snapshot = snapshot_of(bank=torch.zeros(2**20 + 1))
    trainer.bank += 1
    assert snapshot.restore() == "not restored: trainer.bank (a Tensor of 4 MB)"
    trainer, snapshot = snapshot_of(words=iter("ab"))
    next(trainer.words)
    assert snapshot.restore() == "not restored: trainer.words (a str_ascii_iterator)"


def test_the_objects_of_earlier_batches_are_not_kept() -> None:
    trainer, snapshot = snapshot_of(newest=torch.zeros(3))
    first = weakref.ref(trainer.newest)
    for _ in range(2):
        trainer.newest = torch.zeros(3)
        snapshot.take()
    assert first() is None


def test_a_callback_that_fails_is_restored_with_what_it_holds() -> None:
    held = SimpleNamespace(counts={"a": Counter()}, seen=[0] * 20_000)
    snapshot = Snapshot(torch.device("cpu"), [("SimpleNamespace", vars(held), frozenset())], [held])
    snapshot.take()
    before = random_state()
    held.counts["a"]["n"] += 1
    held.seen[0] = torch.rand(()).item()
    assert snapshot.restore() == "not restored: SimpleNamespace.seen (a list of 20,000 items)"
    assert held.counts == {"a": Counter()} and repr(random_state()) == repr(before)


def test_what_lies_beyond_the_limit_of_a_walk_is_named() -> None:
    _, snapshot = snapshot_of(seen=[Seen() for _ in range(4_000)])
    assert snapshot.restore() == ""
    _, snapshot = snapshot_of(seen=[Seen() for _ in range(6_000)])  # each with a list
    assert snapshot.restore() == "not restored: what is farther away than 10,000 objects"
