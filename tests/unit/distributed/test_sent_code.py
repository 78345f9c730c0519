"""What a run in other processes gets of changed code: what has changed, and nothing else; copies here keep their code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from cells import RunCell, in_main
from samples import DEVICE

from nbtrain import WorkerError
from nbtrain.code.sent_code import OwnCopies, Redefined, SentCode, unpack
from nbtrain.distributed.worker_pool import pickled

CELL = """
SCALE, options, found, place = 2.0, {"p": [0.1], "names": {"a"}}, [], SimpleNamespace(lr=1.0)


class Limits:
    most, least = 3, 1

    def clip(self, x):
        return min(x, self.most)


class Counter:
    n = 0

    def __call__(self):
        self.n += 1


counter = Counter()


def scaled(x):
    return SCALE * x


def step(x):
    global n
    n += 1
    counter()
    found.append(x)
    return Limits().clip(scaled(x)) + options["p"][0] + place.lr


n = 0
"""


@pytest.fixture
def notebook() -> Iterator[RunCell]:
    with in_main() as run:
        run("", SimpleNamespace=SimpleNamespace)
        yield run


def code_of(names: dict[str, Any]) -> list[Any]:
    return [names[name] for name in ("step", "scaled", "Limits", "Counter")]


def changed(notebook: RunCell, text: str) -> set[str]:
    names = notebook(CELL)
    sent = SentCode(code_of(names))
    notebook(text)
    data = sent.pack(code_of(names), [], {}, steps=None, holds_steps=False)
    assert sent.pack(code_of(names), [], {}, steps=None, holds_steps=False) is None
    return set(_apart(data).names["__main__"]) if data is not None else set()


def _apart(data: bytes) -> Redefined:
    """What `data` has for a process with another `__main__`."""
    return unpack(data, [FunctionType(_apart.__code__, {"__name__": "__main__"})], [])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("SCALE = 3.0", {"SCALE"}),
        ("SCALE = 2", {"SCALE"}),
        ("SCALE = 2.0", set()),
        ("options['p'][0] = 0.2", {"options"}),
        ("options['names'].add('b')", {"options"}),
        ("options = {'p': [0.1], 'names': {'a'}}", {"options"}),
        ("place.lr = 2.0", {"place"}),
        ("counter.n = 5", {"counter"}),
        ("Limits.most = 4", {"Limits"}),
        ("Limits.clip = lambda self, x: x", {"Limits"}),
        ("scaled.__defaults__ = (1.0,)", {"scaled"}),
        ("scaled.__code__ = (lambda x: x).__code__", {"scaled"}),
        ("def scaled(x):\n    return SCALE * x", {"scaled"}),
        ("other = 1\ndef step(x):\n    return other", {"step", "other"}),
        ("not_read = 1", set()),
    ],
)
def test_what_has_changed_is_sent(notebook: RunCell, text: str, names: set[str]) -> None:
    assert changed(notebook, text) == names


def test_what_the_other_process_has_counted_stays(notebook: RunCell) -> None:
    """In one process: what is unpacked goes into another namespace, and the class that is there gets what has changed."""
    names = notebook(CELL)
    sent, main = SentCode(code_of(names)), names["Limits"]
    there = {name: names[name] for name in ("SCALE", "options", "place", "Limits", "scaled")}
    there |= {"__name__": "__main__", "n": 7, "found": [1], "counter": lambda: None}
    step_there = FunctionType(names["step"].__code__, there)
    notebook(
        "class Limits:\n    most = 5\n    def clip(self, x):\n        return -x\n" + CELL[CELL.index("def step") : CELL.index("\n\nn = 0")]
    )
    names["n"], names["found"] = 0, names["found"]
    data = sent.pack(code_of(names), [], {}, steps=None, holds_steps=False)
    assert data is not None
    unpack(data, [step_there], [])
    assert there["step"].__globals__ is there and there["Limits"] is not main
    assert there["step"](1.0) == -2.0 + 0.1 + 1.0 and (there["n"], there["found"], names["n"]) == (8, [1, 1.0], 0)


def test_the_model_that_new_code_names_is_that_of_the_other_process(notebook: RunCell) -> None:
    names = notebook("def step(x):\n    return x", net=torch.nn.Linear(1, 1))
    sent, theirs = SentCode([names["step"]]), torch.nn.Linear(1, 1)
    notebook("def step(x):\n    return net(x) + net.weight.sum() + weight.sum()", weight=names["net"].weight)
    held = [(("layer", ""), names["net"]), (("parameter", "weight"), names["net"].weight)]
    data = sent.pack([names["step"]], held, {}, steps=None, holds_steps=False)
    assert data is not None
    there: dict[str, Any] = {"__name__": "__main__"}
    unpack(data, [FunctionType(_apart.__code__, there)], [(("layer", ""), theirs), (("parameter", "weight"), theirs.weight)])
    assert there["net"] is theirs and there["weight"] is theirs.weight


def test_tensors_of_a_device_arrive_on_the_cpu(notebook: RunCell) -> None:
    names = notebook("def step(x):\n    return x * weights", weights=torch.ones(2, device=DEVICE))
    sent = SentCode([names["step"]])
    notebook("", weights=torch.tensor([1.0, 2.0], device=DEVICE), layer=torch.nn.Linear(1, 1).to(DEVICE))
    notebook("def step(x):\n    return layer(x) * weights")
    data = sent.pack([names["step"]], [], {}, steps=None, holds_steps=False)
    assert data is not None
    found = _apart(data).names["__main__"]
    assert found["weights"].device.type == "cpu" and found["weights"].tolist() == [1.0, 2.0]
    assert {part.device.type for part in found["layer"].parameters()} == {"cpu"} and found["layer"].weight.requires_grad


def test_what_cannot_be_sent_is_named_and_is_sent_later(notebook: RunCell) -> None:
    names = notebook(CELL)
    sent = SentCode(code_of(names))
    notebook("options = {'guard': guard}", guard=Lock())
    with pytest.raises(WorkerError, match=r"^options\['guard'\] \(lock\) can't be sent to the worker processes"):
        sent.pack(code_of(names), [], {}, steps=None, holds_steps=False)
    notebook("options = {'p': [0.3]}")
    data = sent.pack(code_of(names), [], {}, steps=None, holds_steps=False)
    assert data is not None and _apart(data).names == {"__main__": {"options": {"p": [0.3]}}}


MODULE = """
SCALE = {scale}
n = 0
class Base:
    pass
class Kind(Base):
    def value(self):
        return SCALE * {times}
def scaled(x):
    return SCALE * x * {times}
"""


def test_a_module_that_was_loaded_again_is_sent_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "of_a_user.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(scale: int, times: int, make: Callable[[Any], Any] = importlib.reload) -> Any:
        file.write_text(MODULE.format(scale=scale, times=times))
        importlib.invalidate_caches()
        return make(sys.modules.get("of_a_user"))

    module = load(1, 1, lambda _: importlib.import_module("of_a_user"))
    sent, before = SentCode([module.scaled, module.Kind]), dict(vars(module))
    load(2, 3)
    after = dict(vars(module))
    data = sent.pack([module.scaled, module.Kind], [], {}, steps=None, holds_steps=False)
    vars(module).update(before)  # as another process has it
    module.n = 9
    assert data is not None
    unpack(data, [], [])
    assert module.scaled(1) == 6 and module.Kind().value() == 6 and module.n == 9
    assert module.scaled is not after["scaled"] and module.scaled.__globals__ is vars(module)
    monkeypatch.delitem(sys.modules, "of_a_user")


def test_a_copy_in_this_process_has_the_same_functions_and_classes(notebook: RunCell) -> None:
    names = notebook(CELL)
    weights = torch.ones(4)
    value = {"counter": names["counter"], "step": names["step"], "kind": names["Counter"], "views": (weights, weights[:2])}
    copies = OwnCopies(value)
    first, second = copies.make(), copies.make()
    for copy in first, second:
        assert copy["step"] is names["step"] and type(copy["counter"]) is copy["kind"] is names["Counter"]
        assert copy["counter"] is not names["counter"] and copy["views"][0] is not weights
    first["views"][0][0] = 5.0
    assert first["views"][1][0] == 5.0 and second["views"][1][0] == weights[0] == 1.0
    with pytest.raises(WorkerError, match=r"^.*guard.* \(lock\) can't be sent to its copy in this process"):
        OwnCopies(SimpleNamespace(guard=Lock()))


def test_what_cannot_be_sent_is_named_though_it_refers_to_what_holds_it() -> None:
    held = SimpleNamespace(guard=Lock())
    holder = SimpleNamespace(rows=[held])
    vars(held)["holder"] = holder
    with pytest.raises(WorkerError, match=r"^SimpleNamespace\.rows\[0\]\.guard \(lock\) can't be sent to the job"):
        pickled(holder, "the job")
