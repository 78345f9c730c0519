"""What is counted and drawn in your objects: checks, checkpoints, places in loaders and worker processes treat each kind alike."""

from __future__ import annotations

import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import Breaks, Broken, Regress, make_loader, make_model, make_trainer
from torch import nn
from torch.utils.data import DataLoader, Sampler
from torchmetrics import MeanMetric
from torchmetrics.functional import mean_squared_error

from nbtrain import AddOnBase, ConfigError, StateManagerAddon
from nbtrain.base.operation import unchanged
from nbtrain.data.loader_state import LoaderState, why_not_exact
from nbtrain.distributed.worker import dumps, loads
from nbtrain.loops.kept_objects import objects_of
from nbtrain.objects.search import Search
from nbtrain.state.attribute_state import AttributeState
from nbtrain.state.replica import load_replica_state, take_state


class Plain:
    def __init__(self) -> None:
        self.n, self.seen = 0, [0.0]

    def add(self) -> None:
        self.n += 1
        self.seen.append(0.5)


class Slots:
    __slots__ = ("n", "seen")

    def __init__(self) -> None:
        self.n, self.seen = 0, [0.0]

    add = Plain.add


@dataclass
class Data:
    n: int = 0
    seen: list[float] = field(default_factory=list)

    add = Plain.add


class Stated:
    """Decides itself what is saved."""

    def __init__(self) -> None:
        self.n, self.opaque = 0, iter(range(9))

    def add(self) -> None:
        self.n += 1

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.register_buffer("seen", torch.zeros(2))

    def add(self) -> None:
        self.n += 1
        self.seen += 1


class Cursor:
    """An iterator with its place in an attribute."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n


Recent = namedtuple("Recent", "values n")


def append(values: Any) -> None:
    values.append(1)


def count(values: Any) -> None:
    values[0] += 1


def read_all(item: Any) -> str:
    return repr(vars(item))


# by name: what makes the object, what changes it in place, and what to compare
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a list": (lambda: [0.0], append, list),
    "a list of counts": (lambda: [0], count, list),
    "a long list": (lambda: [0] * 5_000, count, list),
    "a dict": (lambda: {"n": 0}, lambda d: d.update(n=1, m=2), dict),
    "a dict of lists": (lambda: {"n": [0]}, lambda d: append(d["n"]), str),
    "a counter": (lambda: Counter(a=1), lambda c: c.update(a=1), str),
    "an ordered dict": (lambda: OrderedDict(a=1), lambda c: c.update(a=2), str),
    "a default dict": (lambda: defaultdict(int, a=1), lambda c: c.update(a=2), str),
    "a set": (lambda: {0}, lambda s: s.add(1), set),
    "a deque": (lambda: deque([0]), append, list),
    "a tuple of lists": (lambda: ([0], [1]), lambda t: append(t[0]), str),
    "a named tuple": (lambda: Recent([0], 1), lambda t: append(t.values), str),
    "a tensor": (lambda: torch.zeros(3), lambda t: t.add_(1), torch.Tensor.tolist),
    "a large tensor": (lambda: torch.zeros(300, 300), lambda t: t.add_(1), torch.Tensor.tolist),
    "an array": (lambda: np.zeros(3), count, np.ndarray.tolist),
    "a large array": (lambda: np.zeros(90_000), count, np.ndarray.tolist),
    "an object": (Plain, Plain.add, read_all),
    "an object in a list": (lambda: [Plain()], lambda o: o[0].add(), lambda o: read_all(o[0])),
    "an object with slots": (Slots, Slots.add, lambda o: (o.n, o.seen)),
    "a dataclass": (Data, Data.add, read_all),
    "an object with a state_dict": (Stated, Stated.add, lambda o: o.n),
    "an iterator with attributes": (Cursor, next, read_all),
    "a module": (Counting, Counting.add, lambda m: (m.n, m.seen.tolist())),
    "a metric": (MeanMetric, lambda m: m.update(2.0), lambda m: (m.mean_value.tolist(), m.weight.tolist())),
    "torch's generator": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(2, generator=g), lambda g: g.get_state().tolist()),
    "NumPy's generator": (lambda: np.random.default_rng(3), lambda g: g.random(), lambda g: str(g.bit_generator.state)),
    "NumPy's old generator": (lambda: np.random.RandomState(3), lambda g: g.rand(), lambda g: str(g.get_state())),
    "a bit generator": (lambda: np.random.PCG64(3), lambda g: g.random_raw(), lambda g: str(g.state)),
    "Python's generator": (lambda: random.Random(3), lambda g: g.random(), lambda g: g.getstate()),
    "an iterator": (lambda: iter(range(9)), next, lambda i: i.__reduce__()[2]),
    "the system's random numbers": (random.SystemRandom, lambda g: g.random(), lambda g: random.random()),
}
SAID = ("an iterator", "the system's random numbers")


class Keeps(AddOnBase):
    def __post_init__(self) -> None:
        self.kept: Any = None


class Counts(Regress):
    kept: Any = None


class Order(Sampler[int]):
    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __len__(self) -> int:
        return 1


def place_of(trainer: Any, owner: str) -> Any:
    return {"trainer": trainer, "model": trainer.model, "addon": trainer[Keeps]}[owner]


def made(kind: str, owner: str) -> Any:
    trainer = make_trainer(Counts.add_on(Keeps), model=make_model())
    place_of(trainer, owner).kept = KINDS[kind][0]()
    return trainer


@pytest.mark.parametrize("owner", ["trainer", "model", "addon"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_of_any_kind_is_restored_saved_and_brought_back_or_that_is_said(kind: str, owner: str) -> None:
    _, change, read = KINDS[kind]
    trainer, state, whole = made(kind, owner), AttributeState(), AttributeState(whole=True)
    kept = place_of(trainer, owner).kept
    said = state.begin(trainer)
    if kind in SAID:
        assert f".kept is a {type(kept).__name__}" in said
        return
    before, first, weights = read(kept), loads(dumps(whole.state_dict(trainer))), deepcopy(trainer.model.state_dict())
    with unchanged(trainer):
        change(kept)
        after = read(kept)
    assert said == "" and place_of(trainer, owner).kept is kept and read(kept) == before != after
    change(kept)
    saved, sent = loads(dumps(state.state_dict(trainer))), loads(dumps(take_state(trainer, ())))
    resumed, received = made(kind, owner), made(kind, owner)
    resumed.model.load_state_dict(trainer.model.state_dict())  # the rest of a checkpoint
    assert AttributeState().load_state_dict(resumed, saved) == ""
    load_replica_state(received, (), sent)
    assert read(place_of(resumed, owner).kept) == read(place_of(received, owner).kept) == after
    trainer.model.load_state_dict(weights)
    whole.load_state_dict(trainer, first)
    assert read(place_of(trainer, owner).kept) == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_place_in_a_loader_holds_an_object_of_any_kind_or_that_is_said(kind: str) -> None:
    make, change, read = KINDS[kind]
    loaders = [DataLoader(range(1), sampler=Order(make())) for _ in range(2)]
    state, again = map(LoaderState, loaders)
    if kind in (*SAID, "an object with a state_dict"):  # whose other attributes are part of a loader
        assert any("sampler.kept" in reason for reason in why_not_exact(state.first))
        return
    assert why_not_exact(state.first) == []
    change(loaders[0].sampler.kept)
    again.put(loads(dumps(state.take())))
    assert read(loaders[1].sampler.kept) == read(loaders[0].sampler.kept)


class Tree:
    """An object that others refer to, in a circle."""

    def __init__(self, depth: int, parent: Any = None) -> None:
        self.parent, self.n = parent, 0
        self.children = [Tree(depth - 1, self) for _ in range(3)] if depth else []


def test_a_circle_of_objects_is_said_where_it_can_not_be_saved() -> None:
    trainer, state = made("a list", "trainer"), AttributeState()
    tree = trainer.kept = Tree(4)
    assert state.begin(trainer) == "Counts.kept is a Tree"
    with unchanged(trainer):
        tree.children[0].n = 5
    assert tree.children[0].n == 0


def test_a_counter_of_a_class_is_restored_saved_and_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counts, "n_calls", 0, raising=False)
    trainer, state = made("a list", "trainer"), AttributeState()
    state.begin(trainer)
    with unchanged(trainer):
        Counts.n_calls += 1
    assert Counts.n_calls == 0
    Counts.n_calls += 2
    saved, sent = state.state_dict(trainer), take_state(trainer, ())
    for load in (lambda: AttributeState().load_state_dict(trainer, saved), lambda: load_replica_state(trainer, (), sent)):
        Counts.n_calls = 0  # as in another process
        load()
        assert Counts.n_calls == 2


def test_torch_modules_give_no_false_alarm() -> None:
    modules = {
        name: kind for name, kind in vars(nn).items() if isinstance(kind, type) and issubclass(kind, nn.Module) and name[:4] != "Lazy"
    }
    tried = {name: module for name, kind in modules.items() if (module := constructed(kind)) is not None}
    assert len(tried) > 100 and {"LSTM", "GRU", "BatchNorm2d", "TransformerEncoderLayer", "MultiheadAttention"} <= tried.keys()
    for name, module in tried.items():
        trainer = make_trainer(Counts, model=nn.Sequential(nn.Linear(2, 2), module))
        assert (name, AttributeState().begin(trainer)) == (name, "")


def constructed(kind: Any) -> nn.Module | None:
    """A module of the class, with the first of some arguments that it takes; None if it takes none of them."""
    layers = nn.TransformerEncoderLayer(2, 1), nn.TransformerDecoderLayer(2, 1)
    for arguments in ((), (2,), (2, 2), (2, 2, 2), ([2],), (layers[0], 2), (layers[1], 2), (4, 8, [2])):
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kind(*arguments)
    return None


class OwnLSTM(nn.LSTM):
    pass


def test_a_class_that_inherits_from_an_lstm_gives_no_false_alarm() -> None:
    assert AttributeState().begin(make_trainer(Counts, model=nn.Sequential(OwnLSTM(2, 2), nn.Linear(2, 2)))) == ""


class CountAddon(AddOnBase):
    """Counts batches, and looks at each second one."""

    step_size: int = 2

    def __post_init__(self) -> None:
        self.n_seen, self.losses = 0, [0.0]

    def wrap_step(self, trainer: Any, step: Any) -> Any:
        def counted(batch: Any) -> Any:
            found = step(batch)
            self.n_seen += 1
            self.losses.append(float(found["loss"].detach()))
            return found

        return counted


class StatedAddon(CountAddon):
    """Decides itself what is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n_seen, "newest": self.losses[-2:]}

    def load_state_dict(self, state: Any) -> None:
        self.n_seen, self.losses = state["n"], [0.0] * (state["n"] - 1) + state["newest"]


ADDONS = [CountAddon, StatedAddon]


@pytest.mark.parametrize("addon", ADDONS)
def test_an_addon_counts_on_after_a_resume(addon: Any, tmp_path: Path) -> None:
    def make(**lightning: Any) -> Any:
        kind = Regress.add_on(addon, StateManagerAddon)
        return make_trainer(kind, save_path=tmp_path, every_n_steps=1, keep_source=False, lightning=lightning)

    with pytest.raises(Broken):
        make(callbacks=[Breaks(8)]).run(3, make_loader(), resume="auto")
    trainer = make()
    trainer.run(3, make_loader(), resume="auto")
    assert trainer[addon].n_seen == 15 and len(trainer[addon].losses) == 16
    assert "not exact" not in (trainer.run_dir / "events.jsonl").read_text()


@pytest.mark.parametrize("addon", ADDONS)
def test_an_addon_counts_on_after_a_rewind_and_in_a_branch(addon: Any) -> None:
    trainer, loader = make_trainer(Regress.add_on(addon), keep_states=True), make_loader()
    trainer.run(3, loader)
    trainer.rewind(epoch=1)
    assert trainer[addon].n_seen == 5 and len(trainer[addon].losses) == 6
    trainer.run(1, loader)
    branch = trainer.branch(epoch=1)
    assert branch[addon].n_seen == 5
    branch.run(2, loader)
    assert (branch[addon].n_seen, trainer[addon].n_seen) == (15, 10)


@pytest.mark.parametrize("addon", ADDONS)
def test_an_addon_is_restored_after_a_check_and_brought_back_from_a_worker(addon: Any) -> None:
    trainer = make_trainer(Regress.add_on(addon))
    with unchanged(trainer):
        trainer[addon].n_seen += 1
        trainer[addon].losses.append(1.0)
    assert (trainer[addon].n_seen, trainer[addon].losses) == (0, [0.0])
    replica = loads(dumps(trainer))
    replica.run(1, make_loader())
    load_replica_state(trainer, [], loads(dumps(take_state(replica, []))))
    assert trainer[addon].n_seen == 5 and trainer[addon].losses[-1] == replica[addon].losses[-1]


def test_a_state_of_an_addon_that_is_no_dict_is_refused_before_the_first_batch(tmp_path: Path) -> None:
    class NumberAddon(CountAddon):
        def state_dict(self) -> Any:
            return self.n_seen

    trainer = make_trainer(Regress.add_on(NumberAddon, StateManagerAddon), save_path=tmp_path)
    with pytest.raises(ConfigError, match=r"^NumberAddon.state_dict returned int, expected a dict\."):
        trainer.run(1, make_loader())
    assert trainer.counts.processed == 0


def test_the_functions_of_libraries_are_not_searched() -> None:
    class Uses(Counts):
        def test_step(self, batch: Any) -> Any:
            return mean_squared_error(batch, make_model())

    found = [path for path, _ in Search(objects_of(make_trainer(Uses)))]
    inside = [path.rpartition(".")[2] for path in found if path.startswith("Uses.test_step.make_model.")]
    assert "Uses.test_step.mean_squared_error" in found and inside == ["torch", "nn"]
    assert not [path for path in found if path.startswith("Uses.test_step.mean_squared_error.")]
