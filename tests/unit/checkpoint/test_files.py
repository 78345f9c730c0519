"""Checkpoints: every value comes back bit for bit, damage and malice are refused by name, writing waits for nobody."""

from __future__ import annotations

import copy
import enum
import functools
import io
import json
import math
import os
import pickle
import random
import struct
import sys
import tarfile
import tempfile
import threading
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import lightning as L
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save, save_file
from torch import Tensor, nn

from nbtrain.checkpoint.atomic import clean_leftovers, point_to, written
from nbtrain.checkpoint.files import (
    SaveFormat,
    Writer,
    newest_valid,
    read_checkpoint,
    read_counts,
    verify_checkpoint,
    verify_weights,
    write_checkpoint,
)
from nbtrain.checkpoint.snapshot import plain, snapshot
from nbtrain.checkpoint.store import CheckpointStore
from nbtrain.checkpoint.weights import load_weights, read_weights
from nbtrain.errors import CheckpointError

FORMATS: tuple[SaveFormat, ...] = ("ckpt", "safetensor")
both_formats = pytest.mark.parametrize("save_format", FORMATS)


def identical(a: Any, b: Any) -> bool:
    """The same types, and the same bits?"""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad and a.stride() == b.stride()
        return (
            same
            and a.detach().contiguous().view(-1).view(torch.uint8).tolist() == b.detach().contiguous().view(-1).view(torch.uint8).tolist()
        )
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, (complex, datetime, timezone, deque)) and not isinstance(a, np.generic) and repr(a) != repr(b):
        return False
    if is_dataclass(a) and not isinstance(a, type):
        return all(identical(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, dict):
        return list(map(type, a)) == list(map(type, b)) and list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b


def store(state: dict[str, Any], path: Path, save_format: SaveFormat, **options: Any) -> Path:
    return write_checkpoint(snapshot(state), path, save_format, **options)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Odd(nn.Module):
    pass


@dataclass
class Pair:
    left: Any
    right: Any = None


@dataclass(frozen=True)
class Fixed:
    """Its constructor is not called again."""

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", self.n + 1)


Point = namedtuple("Point", "x")
NAN_WITH_BITS = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
VALUES = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63, -(2**64), 3**1000],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, NAN_WITH_BITS, 1 / 3],
    "text": ["", "ü \u2028 \x00", "\ud800", "$tensor"],
    "tuples": ((), (1,), [(2, (3,))], {"a": ()}),
    "keys": {1: "int", "1": "str", 1.5: "float", None: "none", (0, "a"): "tuple", True + 1: "two"},
    "bool keys": {True: 1, False: 0},
    "keys like tags": {"$tensor": "x", "$": {"$dict": []}, "plain": {"$tuple": 1}},
    "ordered": OrderedDict(b=1, a=OrderedDict()),
    "nested": {"a": [{"b": ({"c": [None]},)}]},
    "dtypes": [torch.float32, torch.bfloat16, torch.int64, torch.bool],
    "devices": [torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")],
    "sizes": [torch.Size([2, 3]), torch.Size([])],
    "bytes": [b"", b"\x00\xff", bytes(range(256))],
    "python rng": random.Random(0).getstate(),
    "numpy scalars": [np.float64(0.1), np.float32(-0.0), np.int8(-1), np.bool_(True), np.uint64(2**64 - 1), np.float16(1)],
    "numpy arrays": [np.arange(6).reshape(2, 3).T, np.zeros((0, 2)), np.array(1.5), np.array([True]), np.arange(5, dtype=np.uint16)],
    "numpy rng": {"bit": np.random.MT19937(0).state, "pcg": np.random.PCG64(0).state},
    "torch rng": torch.Generator().manual_seed(3).get_state(),
    "tensors": [torch.tensor([0.1, -0.0, math.inf, math.nan]), torch.tensor(3), torch.zeros(0, 4), torch.tensor([], dtype=torch.bool)],
    "kinds": [torch.ones(3, dtype=dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16)],
    "more kinds": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.uint16)],
    "channels last": torch.arange(48.0).reshape(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "requires grad": [torch.ones(2, requires_grad=True), torch.ones(2)],
    "names that read the same": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 0: torch.ones(2), "0": torch.ones(3)},
    "a name of the format": {"__metadata__": torch.ones(1)},
    "complex tensors": [torch.tensor([1 + 2j], dtype=torch.complex128), torch.ones(2, 3, dtype=torch.complex128).t()],
    "complex": [1 + 2j, complex(-0.0, math.inf)],
    "sets": [{1, "a", (2, None)}, frozenset({1.5}), set(), {frozenset({1}), Colour.RED}],
    "deques": [deque([1, [2]], maxlen=4), deque()],
    "counters": [Counter("abba"), Counter({(1, "a"): -2, Colour.RED: 0.5})],
    "defaultdicts": [defaultdict(int, a=1), defaultdict(list, {Level.LOW: [torch.ones(1)]}), defaultdict(None, b=2)],
    "enums": [Colour.RED, Level.LOW, Right.READ | Right.WRITE, {"level": Level.LOW}],
    "keys of other kinds": [{Colour.RED: 1}, OrderedDict({b"": 1, (1, b"a"): 2}), {Path("a"): {date(2024, 1, 1): 1}}],
    "named tuples": [Point(1), Point([Point(torch.ones(1))])],
    "dataclasses": [Pair(1, Pair(Colour.RED, {2})), Fixed(1)],
    "dates": [date(2024, 2, 29), datetime(2024, 2, 29, 1, 2, 3, 4, fold=1), time(1, 2), timedelta(days=-1, microseconds=3)],
    "time zones": [datetime(2024, 1, 1, tzinfo=timezone.utc), timezone(timedelta(hours=5), "east"), time(1, tzinfo=timezone.utc)],
    "paths": [Path("runs") / "ü", PurePosixPath("/a"), PureWindowsPath("c:/a")],
    "ranges": [range(3), range(9, 0, -2)],
    "byte arrays": [bytearray(b"ab")],
    "exact numbers": [Decimal("1.50"), Fraction(1, 3), UUID(int=3), slice(1, None, 2)],
    "numpy text and dates": [np.array(["a", "bc"]), np.str_("x"), np.array([b"a"]), np.datetime64("2024-02-29T01"), np.timedelta64(3, "D")],
    "wide numpy numbers": [np.array([1 + 2j]), np.complex64(1j)],
}


@both_formats
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_value_comes_back_bit_for_bit(value: Any, save_format: SaveFormat, tmp_path: Path) -> None:
    state = {"callbacks": {"Mine": value}, "epoch": 1}
    assert identical(read_checkpoint(store(state, tmp_path / "c", save_format)), state)


@both_formats
def test_value_at_the_top_comes_back(save_format: SaveFormat, tmp_path: Path) -> None:
    state = {"__metadata__": torch.ones(2), "": np.float32(2), "state_dict": {}}
    assert identical(read_checkpoint(store(state, tmp_path / "c", save_format)), state)


@both_formats
def test_slice_is_stored_without_the_rest_of_its_memory(save_format: SaveFormat, tmp_path: Path) -> None:
    state = {"mine": [torch.zeros(1_000_000)[3:5], torch.zeros(1).expand(4)]}
    found = read_checkpoint(store(state, tmp_path / "c", save_format))
    assert [value.tolist() for value in found["mine"]] == [[0, 0], [0, 0, 0, 0]]
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 10_000


UNSTORABLE = {
    "object": (object(), "callbacks.Mine.thing is of type object"),
    "lock": ([1, threading.Lock()], "callbacks.Mine.thing.1 is of type lock"),
    "module": (Odd(), "callbacks.Mine.thing is of type Odd"),
    "function": (len, "callbacks.Mine.thing is of type builtin_function_or_method"),
    "made of an object": (Counter({object(): 1}), "callbacks.Mine.thing.0.0 is of type object"),
    "defaultdict of a function": (defaultdict(lambda: 1), "callbacks.Mine.thing is of type defaultdict"),
    "enum made in a function": (enum.Enum("Made", "A").A, "callbacks.Mine.thing is of type Made"),  # type: ignore[attr-defined]
    "key": ({object: 1}, "callbacks.Mine.thing.0.0 is of type type"),
    "numpy objects": (np.array([object()]), "callbacks.Mine.thing is a numpy value of dtype object"),
    "sparse": (torch.eye(2).to_sparse(), "callbacks.Mine.thing is a sparse, quantized or meta tensor"),
    "meta": (torch.ones(2, device="meta"), "callbacks.Mine.thing is a sparse, quantized or meta tensor"),
    "large int": (2**2000, "callbacks.Mine.thing is an int of more than 2000 bits"),
    "deep": (functools.reduce(lambda inner, _: [inner], range(200), 0), "callbacks.Mine.thing is nested deeper than 100 levels"),
}


@both_formats
@pytest.mark.parametrize(("value", "text"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_value_that_cannot_be_stored_is_left_out_and_named(value: Any, text: str, save_format: SaveFormat, tmp_path: Path) -> None:
    taken = snapshot({"callbacks": {"Mine": {"thing": value, "n": 1}}, "epoch": 2})
    assert taken.left_out == (f"{text}, which a checkpoint can't hold",)
    path = write_checkpoint(taken, tmp_path / "c", save_format)
    assert identical(read_checkpoint(path), {"callbacks": {"Mine": {"n": 1}}, "epoch": 2})


@pytest.mark.parametrize("part", ["state_dict", "optimizer_states"])
def test_tensor_of_the_model_or_the_optimizer_that_cannot_be_stored_is_an_error(part: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{part}.w is a sparse, quantized or meta tensor, which a checkpoint can't hold."):
        snapshot({part: {"w": torch.eye(2).to_sparse()}})


def test_list_that_holds_itself_is_named() -> None:
    ring: list[Any] = []
    ring.append(ring)
    (text,) = snapshot({"mine": ring}).left_out
    assert text.startswith("mine.0.0") and text.endswith("is nested deeper than 100 levels, which a checkpoint can't hold")


@both_formats
def test_class_that_is_not_loaded_is_neither_imported_nor_called(save_format: SaveFormat, tmp_path: Path) -> None:
    taken = snapshot({"mine": [Colour.RED, Point(1), Pair(1, 2)]})

    def renamed(value: Any) -> Any:
        return [renamed(item) for item in value] if isinstance(value, list) else "antigravity" if value == __name__ else value

    path = write_checkpoint(replace(taken, state={"mine": renamed(taken.state["mine"])}), tmp_path / "c", save_format)
    assert read_checkpoint(path) == {"mine": ["RED", (1,), {"left": 1, "right": 2}]}
    assert "antigravity" not in sys.modules


# -- hyper-parameters
@dataclass
class Options:
    path: Path
    level: Level = Level.LOW


PLAIN: dict[str, tuple[Any, Any]] = {  # what is given, and what becomes of it
    "dataclass": (Options(Path("a/b")), {"path": "a/b", "level": 1}),
    "enum": (Colour.RED, "red"),
    "function": (nn.functional.relu, "torch.nn.functional.relu"),
    "class": (nn.ReLU, "torch.nn.modules.activation.ReLU"),
    "module": (Odd(), "test_files.Odd"),
    "partial": (functools.partial(max, 1), "functools.partial"),
    "array": (np.array([0.1, 0.2]), [0.1, 0.2]),
    "numpy scalar": (np.float32(0.5), 0.5),
    "set": (frozenset({"b", "a"}), ["a", "b"]),
    "keys": ({Colour.RED: 1, 2: "two"}, {"red": 1, 2: "two"}),
    "named tuple": (Point(1), (1,)),
    "dtype": (torch.float32, torch.float32),
    "ordered": (OrderedDict(a=1), {"a": 1}),
}


def test_hyper_parameters_become_plain_data() -> None:
    given = {name: pair[0] for name, pair in PLAIN.items()}
    assert plain(given) == {name: pair[1] for name, pair in PLAIN.items()}


@both_formats
def test_hyper_parameters_of_any_kind_load_again(save_format: SaveFormat, tmp_path: Path) -> None:
    state = {"hyper_parameters": {"path": Path("a"), "act": nn.ReLU}, "datamodule_hyper_parameters": {"colour": Colour.RED}}
    path = store(state, tmp_path / "c", save_format)
    expected = {
        "hyper_parameters": {"path": "a", "act": "torch.nn.modules.activation.ReLU"},
        "datamodule_hyper_parameters": {"colour": "red"},
    }
    assert read_checkpoint(path) == expected


# -- weights for other tools
class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.head.weight = self.embed.weight


def state_of(model: nn.Module) -> dict[str, Any]:
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {"state_dict": weights | {"metric.total": torch.ones(2)}, "epoch": 1}


@both_formats
def test_tied_weights_are_stored_once_and_are_tied_when_read(save_format: SaveFormat, tmp_path: Path) -> None:
    state = state_of(Tied())
    found = read_checkpoint(store(state, tmp_path / "c", save_format))
    assert identical(found, state)
    assert found["state_dict"]["model.embed.weight"].data_ptr() == found["state_dict"]["model.head.weight"].data_ptr()


def test_other_tools_load_the_weights_of_a_folder(tmp_path: Path) -> None:
    model = Tied()
    folder = store(state_of(model), tmp_path / "c", "safetensor", config={"hidden": 3, "path": Path("a")})
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == model.state_dict().keys() - {"head.weight"}
    for load in (lambda m: load_model(m, folder / "model.safetensors"), lambda m: load_weights(m, read_weights(folder))):
        other = Tied(seed=1)
        load(other)
        assert identical(dict(other.state_dict()), dict(model.state_dict()))
    assert json.loads((folder / "config.json").read_text()) == {"hidden": 3, "path": "a"}


def test_bare_module_takes_the_weights_of_a_folder(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    folder = store(state_of(model), tmp_path / "c", "safetensor")
    other = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    other.load_state_dict(load_file(folder / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))


class Module(L.LightningModule):
    def __init__(self, width: int = 4, act: Any = nn.functional.relu) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def lightning_trainer(max_epochs: int) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(max_epochs=max_epochs, accelerator="cpu", callbacks=[L.pytorch.callbacks.EarlyStopping("x", strict=False)], **quiet)


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers", "ignore:.*Early stopping conditioned on metric")
@pytest.mark.filterwarnings("ignore:.*exists and is not empty", "ignore:`isinstance")
def test_plain_lightning_trainer_goes_on_from_the_file(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), batch_size=4)
    whole = Module()
    lightning_trainer(4).fit(whole, loader)
    first = lightning_trainer(2)
    first.fit(Module(), loader)
    dump = first._checkpoint_connector.dump_checkpoint(weights_only=False)
    path = store(dump | {"nbtrain": {"score": np.float64(0.5), "when": (1, 2)}}, tmp_path / "c.ckpt", "ckpt")
    second, resumed = lightning_trainer(4), Module()
    second.fit(resumed, loader, ckpt_path=path)
    assert second.current_epoch == 4 and identical(dict(resumed.state_dict()), dict(whole.state_dict()))
    assert identical(dict(Module.load_from_checkpoint(path, act=None).state_dict()), dict(first.lightning_module.state_dict()))
    assert identical(read_checkpoint(path)["nbtrain"], {"score": np.float64(0.5), "when": (1, 2)})


def test_a_file_of_lightning_is_read(tmp_path: Path) -> None:
    torch.save({"state_dict": {"model.a": torch.ones(2)}, "epoch": 2}, tmp_path / "theirs.ckpt")
    assert identical(read_checkpoint(tmp_path / "theirs.ckpt"), {"state_dict": {"model.a": torch.ones(2)}, "epoch": 2})


# -- damaged and malicious
STATE = {
    "state_dict": {"model.weight": torch.arange(6.0).reshape(2, 3), "model.bias": torch.ones(2)},
    "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 3), 0.5)}}}],
    "epoch": 3,
}
RAN = Path(tempfile.gettempdir()) / f"nbtrain-pickle-ran-{os.getpid()}"  # a pickle that runs makes it


class Bomb:
    """Unpickled, it calls `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def _cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = path / name if name else path
        file.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])

    return damage


def _flip(name: str, at: float | bytes) -> Callable[[Path], None]:
    """Flip a bit at a fraction of the file, or in the first byte of some text in it."""

    def damage(path: Path) -> None:
        file = path / name if name else path
        raw = bytearray(file.read_bytes())
        raw[raw.index(at) if isinstance(at, bytes) else int(at * len(raw))] ^= 1
        file.write_bytes(raw)

    return damage


def _reseal(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change what state.json says, with a right checksum: what a stranger could do."""

    def damage(path: Path) -> None:
        content = json.loads((path / "state.json").read_bytes())["content"]
        changed = change(content)
        text = changed if isinstance(changed, bytes) else json.dumps(content).encode()
        (path / "state.json").write_bytes(b'{"crc32": "%08x", "content": %s}\n' % (zlib.crc32(text), text))

    return damage


def _replace(name: str, raw: bytes) -> Callable[[Path], None]:
    """Put another file in, with its right checksum."""

    def change(path: Path) -> None:
        (path / name).write_bytes(raw)
        _reseal(lambda c: c["files"].update({name: {"size": len(raw), "crc32": f"{zlib.crc32(raw):08x}"}}))(path)

    return change


def _put(key: str, value: Any) -> Callable[[Path], None]:
    return _reseal(lambda content: content["state"].update({key: value}))


def _swap(path: Path) -> None:
    a, b = path / "model.safetensors", path / "tensors.safetensors"
    a.rename(path / "x"), b.rename(a), (path / "x").rename(b)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _file_in_place_of(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return damage


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        raw = pickle.dumps(Bomb(os.system, f"touch {RAN}"))
        info = tarfile.TarInfo("pickle")
        info.size = len(raw)
        archive.addfile(info, io.BytesIO(raw))


def _zip_of(pickled: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, raw in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}.items():
                archive.writestr(f"archive/{name}", raw)

    return damage


def _saved(value: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(value, path, **options)


def _text(path: Path) -> None:
    path.write_text("hello")


HEADER = struct.pack("<Q", 2**60) + b"{}"
BAD_SHAPE = save({"weight": torch.ones(6), "bias": torch.ones(2)}).replace(b"[6]", b"[7]")
PKL = b"\x80\x02c"
NOT_WHOLE = "NAME is cut off or damaged: its SIZE bytes are not a whole zip archive."
NO_CONTENT = "NAME does not have the content of a checkpoint."
OBJECTS = "c.ckpt holds Python objects ({}), which are not unpickled."
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (_cut("", 0), "c.ckpt is empty."),
    "cut early": (_cut("", 0.01), NOT_WHOLE),
    "cut in the middle": (_cut("", 0.5), NOT_WHOLE),
    "cut at the end": (_cut("", 0.999), NOT_WHOLE),
    "a bit in a tensor": (
        _flip("", struct.pack("<f", 0.5) * 6),
        "c.ckpt is damaged: the checksum of its record 'archive/data/3' does not match.",
    ),
    "a bit in the values": (_flip("", b"state_dict"), "c.ckpt is damaged: the checksum of its record 'archive/data.pkl' does not match."),
    "a bit in the directory": (_flip("", b"PK\x01\x02"), NOT_WHOLE),
    "text": (_text, NOT_WHOLE),
    "an empty folder": (_to_folder, "c.ckpt holds no state.json: it is not a checkpoint, or an incomplete one."),
    "another zip": (_zip_of(b""), NO_CONTENT),
    "a list": (_saved([1, 2]), "c.ckpt holds a list, not the dict of a checkpoint."),
    "a tensor": (_saved(torch.ones(2)), "c.ckpt holds a Tensor, not the dict of a checkpoint."),
    "os.system": (_saved(Bomb(os.system, f"touch {RAN}")), OBJECTS.format("posix.system")),
    "eval": (_saved(Bomb(eval, f"open('{RAN}', 'w')")), OBJECTS.format("eval")),
    "nested": (_saved({"state_dict": {"a": [Bomb(exec, f"open('{RAN}', 'w')")]}}), OBJECTS.format("exec")),
    "as a key": (_saved({"epoch": 1, (Bomb(os.mkdir, str(RAN)),): 2}), OBJECTS.format("posix.mkdir")),
    "getattr": (_saved({"a": Bomb(getattr, "", "join")}), OBJECTS.format("getattr")),
    "legacy pickle": (_saved({"a": Bomb(os.system, f"touch {RAN}")}, _use_new_zipfile_serialization=False), NOT_WHOLE),
    "tar": (_tar, NOT_WHOLE),
    "bare pickle": (lambda path: path.write_bytes(pickle.dumps(Bomb(os.system, f"touch {RAN}"))), NOT_WHOLE),
    "a class in the pickle": (_zip_of(PKL + b"subprocess\nPopen\n."), OBJECTS.format("subprocess.Popen")),
    "a cut pickle": (_zip_of(b"\x80\x02}q"), NO_CONTENT),
    "a newer version": (
        _saved({"epoch": 1, "nbtrain_checkpoint": {"version": 2, "views": []}}),
        "c.ckpt is of version 2; this nbtrain reads version 1.",
    ),
    "a header of another kind": (_saved({"epoch": 1, "nbtrain_checkpoint": [1]}), NO_CONTENT),
    "a view of no tensor": (_saved({"epoch": 1, "nbtrain_checkpoint": {"version": 1, "views": [(("epoch",), "array")]}}), NO_CONTENT),
}
WEIGHTS, TENSORS, JSON = "model.safetensors", "tensors.safetensors", "state.json"
SEAL = "state.json is cut off or damaged: its checksum does not match."
LISTED = "state.json lists invalid files, or not all: "
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no state.json": (lambda p: (p / JSON).unlink(), "c holds no state.json: it is not a checkpoint, or an incomplete one."),
    "no weights": (lambda p: (p / WEIGHTS).unlink(), "model.safetensors is missing."),
    "no tensors": (lambda p: (p / TENSORS).unlink(), "tensors.safetensors is missing."),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json is missing."),
    "a folder for a file": (_file_in_place_of(WEIGHTS), "model.safetensors is missing."),
    "a folder for state.json": (_file_in_place_of(JSON), "c holds no state.json: it is not a checkpoint, or an incomplete one."),
    "empty state.json": (_cut(JSON, 0), SEAL),
    "cut state.json": (_cut(JSON, 0.5), SEAL),
    "state.json without its last byte": (_cut(JSON, 0.999), SEAL),
    "a bit in state.json": (_flip(JSON, 0.5), SEAL),
    "a bit in its checksum": (_flip(JSON, 0.02), SEAL),
    "text for state.json": (lambda p: (p / JSON).write_text("hello"), SEAL),
    "cut weights": (_cut(WEIGHTS, 0.5), "model.safetensors has 96 bytes, not 192."),
    "cut tensors": (_cut(TENSORS, 0), "tensors.safetensors has 0 bytes, not 212."),
    "a bit in the weights": (_flip(WEIGHTS, 0.95), "model.safetensors is damaged: its checksum does not match."),
    "a bit in the weights' header": (_flip(WEIGHTS, 0.1), "model.safetensors is damaged: its checksum does not match."),
    "a bit in the tensors": (_flip(TENSORS, 0.95), "tensors.safetensors is damaged: its checksum does not match."),
    "a bit in the config": (_flip("config.json", 0.5), "config.json is damaged: its checksum does not match."),
    "swapped files": (_swap, "model.safetensors has 212 bytes, not 192."),
    "the weights of another": (
        lambda p: save_file({"weight": torch.zeros(2, 3), "bias": torch.ones(2)}, p / WEIGHTS, {"format": "pt"}),
        "model.safetensors is damaged: its checksum does not match.",
    ),
    "a newer version": (_reseal(lambda c: c.update(version=2)), "state.json is of version 2; this nbtrain reads version 1."),
    "no version": (_reseal(lambda c: c.pop("version")), "state.json is of version None; this nbtrain reads version 1."),
    "no list of files": (_reseal(lambda c: c.pop("files")), NO_CONTENT),
    "no state": (_reseal(lambda c: c.pop("state")), NO_CONTENT),
    "a state that is a list": (_reseal(lambda c: c.update(state=[])), "c holds a list, not the dict of a checkpoint."),
    "no JSON": (_reseal(lambda c: b"{"), NO_CONTENT),
    "a JSON list": (_reseal(lambda c: b"[]"), NO_CONTENT),
    "deep nesting": (_reseal(lambda c: b"[" * 100_000 + b"]" * 100_000), NO_CONTENT),
    "a key twice": (_reseal(lambda c: b'{"version": 1, "version": 1}'), "state.json has a key twice."),
    "a path that leads out": (
        _reseal(lambda c: c["files"].update({"../outside": {"size": 1, "crc32": "00000000"}})),
        LISTED + "'../outside', 'config.json', 'model.safetensors', 'tensors.safetensors'.",
    ),
    "an absolute path": (
        _reseal(lambda c: c["files"].update({"/etc/passwd": c["files"].pop(WEIGHTS)})),
        LISTED + "'/etc/passwd', 'config.json', 'tensors.safetensors'.",
    ),
    "a file that is not listed": (_reseal(lambda c: c["files"].pop(TENSORS)), LISTED + "'config.json', 'model.safetensors'."),
    "a tensor that is not there": (_put("x", {"$tensor": "y"}), "state.json names the tensor 'y', which is in no file."),
    "a path for a tensor": (_put("x", {"$weight": "../y"}), "state.json names the tensor '../y', which is in no file."),
    "an unknown tag": (_put("x", {"$pickle": "gASV"}), NO_CONTENT),
    "two tags": (_put("x", {"$tuple": [], "$dict": []}), NO_CONTENT),
    "a function for a dtype": (_put("x", {"$dtype": "load"}), NO_CONTENT),
    "a dtype that is none": (_put("x", {"$dtype": "__dict__"}), NO_CONTENT),
    "a device that is none": (_put("x", {"$device": "toaster"}), NO_CONTENT),
    "a key that can't be one": (_put("x", {"$dict": [[[], 1]]}), NO_CONTENT),
    "a float that is none": (_put("x", {"$float": "zz"}), NO_CONTENT),
    "an order that is none": (_put("x", {"$permuted": [{"$weight": "bias"}, [7]]}), NO_CONTENT),
    "a huge header": (_replace(WEIGHTS, HEADER), "model.safetensors is not a complete safetensors file."),
    "an empty file of tensors": (_replace(TENSORS, b""), "tensors.safetensors is not a complete safetensors file."),
    "wrong shapes": (_replace(WEIGHTS, BAD_SHAPE), "model.safetensors is not a complete safetensors file."),
}
REMEDY = 'Use another checkpoint of the run: resume="auto", or its run folder, finds the newest valid one.'


def refused(path: Path) -> str:
    """The text of the error of reading, without what is the same for all."""
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(path)
    assert not RAN.exists()
    what, where, remedy = str(error.value).split("\n  ")
    assert (where, remedy) == (str(path), REMEDY)
    return what.replace("(builtins.", "(")  # torch 2.6 names the module too


@pytest.mark.parametrize(("damage", "text"), FILES.values(), ids=FILES)
def test_bad_file_is_refused(damage: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    path = store(STATE, tmp_path / "c.ckpt", "ckpt")
    damage(path)
    assert refused(path) == text.replace("NAME", "c.ckpt").replace("SIZE", str(path.stat().st_size))


@pytest.mark.parametrize(("damage", "text"), FOLDERS.values(), ids=FOLDERS)
def test_bad_folder_is_refused(damage: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    path = store(STATE, tmp_path / "c", "safetensor", config={"hidden": 3})
    damage(path)
    assert refused(path) == text.replace("NAME", "c")


@both_formats
def test_no_flipped_bit_passes_unseen(save_format: SaveFormat, tmp_path: Path) -> None:
    """A bit anywhere is refused, or (in the padding and the dates of a zip archive) changes nothing that is read."""
    path = store({"state_dict": {"model.a": torch.ones(2)}, "epoch": 3, "x": np.float32(2)}, tmp_path / "c", save_format)
    whole = read_checkpoint(path)
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        raw = file.read_bytes()
        for at in range(0, len(raw), 1 if save_format == "safetensor" else 7):
            file.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :])
            try:
                found = read_checkpoint(path)
            except CheckpointError:
                continue
            assert save_format == "ckpt" and identical(found, whole)
        file.write_bytes(raw)


def test_missing_checkpoint_and_addresses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path / "none.ckpt")
    remedy = "Give the path of a .ckpt file or of a checkpoint's folder."
    assert str(error.value) == f"There is no checkpoint {str(tmp_path / 'none.ckpt')!r}.\n  {remedy}"
    with pytest.raises(CheckpointError) as error:
        read_checkpoint("https://example.com/a.ckpt")
    remedy = "Download it first: torch.hub.download_url_to_file(url, path)."
    assert str(error.value) == f"'https://example.com/a.ckpt' is an address, not a file.\n  {remedy}"


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.ckpt")
    for read in (read_checkpoint, verify_checkpoint):
        with pytest.raises(CheckpointError, match="is neither a file nor a folder"):
            read(tmp_path / "c.ckpt")
    assert newest_valid(tmp_path).path is None and newest_valid(tmp_path).skipped == ()


def test_weights_that_were_swapped_beside_their_checksum_are_refused(tmp_path: Path) -> None:
    """By the path of the folder and by that of the file; the weights of another tool beside its own state.json are read."""
    path = store(STATE, tmp_path / "c", "safetensor")
    save_file({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, path / WEIGHTS, {"format": "pt"})
    for given in (path, path / WEIGHTS):
        with pytest.raises(CheckpointError, match=r"^model.safetensors is damaged: its checksum does not match\."):
            read_weights(given)
    (path / JSON).write_text('{"step": 3}')
    assert read_weights(path)["bias"].tolist() == [0, 0]


def test_torch_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(2)}, tmp_path / "new.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("old.pt", "new.pt"):
        assert read_weights(tmp_path / name)["weight"].tolist() == [1, 1]


def test_link_within_a_folder_to_a_device_is_not_read(tmp_path: Path) -> None:
    path = store(STATE, tmp_path / "c", "safetensor")
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).symlink_to("/dev/zero")
    assert refused(path) == "model.safetensors is missing."


# -- files
@both_formats
def test_checkpoint_is_replaced_whole(save_format: SaveFormat, tmp_path: Path) -> None:
    for epoch in range(3):
        path = store({"epoch": epoch}, tmp_path / "c", save_format)
        assert read_checkpoint(path) == {"epoch": epoch}
    other: SaveFormat = "ckpt" if save_format == "safetensor" else "safetensor"
    assert read_checkpoint(store({"epoch": 9}, tmp_path / "c", other)) == {"epoch": 9}
    assert list(tmp_path.iterdir()) == [path]


def test_file_has_checksums_where_a_user_has_turned_them_off(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        verify_checkpoint(store({"epoch": 1}, tmp_path / "c.ckpt", "ckpt"))
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)


@both_formats
def test_failed_save_leaves_the_old_one(save_format: SaveFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store({"epoch": 1}, tmp_path / "c", save_format)

    def fail(self: Path, target: Path) -> Path:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CheckpointError) as error:
        store({"epoch": 2}, path, save_format)
    assert str(error.value) == f"c could not be written: Input/output error.\n  {path}\n  Make room, or give another folder."
    assert read_checkpoint(path) == {"epoch": 1} and list(tmp_path.iterdir()) == [path]


def test_newest_whole_checkpoint_is_found_and_the_others_are_told(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "none").path is None and newest_valid(tmp_path).path is None
    paths = [store({"epoch": i}, tmp_path / f"c{i}.ckpt", "ckpt" if i % 2 else "safetensor") for i in range(4)]
    for time_s, path in enumerate(paths):
        os.utime(path / JSON if path.is_dir() else path, (time_s, time_s))
    assert newest_valid(tmp_path).path == paths[3] and newest_valid(tmp_path).skipped == ()
    paths[3].write_bytes(paths[3].read_bytes()[:-9])
    (paths[2] / JSON).unlink()
    os.utime(paths[3], (9, 9)), os.utime(paths[2], (8, 8))
    point_to(tmp_path / "last.ckpt", paths[3])
    (tmp_path / "logs").mkdir()
    found = newest_valid(tmp_path)
    assert found.path == paths[1]
    assert [str(error).split("\n")[0] for error in found.skipped] == [
        f"c3.ckpt is cut off or damaged: its {paths[3].stat().st_size} bytes are not a whole zip archive.",
        "c2.ckpt holds no state.json: it is not a checkpoint, or an incomplete one.",
    ]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths whose files were opened or asked for their size and times."""
    found: list[str] = []
    for module, name in ((os, "stat"), (os, "lstat"), (io, "open")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, *args, real=real, **options: found.append(str(path)) or real(path, *args, **options))
    return found


@both_formats
def test_newest_of_many_is_found_by_its_name(save_format: SaveFormat, tmp_path: Path, looked_at: list[str]) -> None:
    suffix = ".ckpt" if save_format == "ckpt" else ""
    for step in range(10_000):
        os.close(os.open(tmp_path / f"epoch={step // 100}-step={step}{suffix}", os.O_CREAT))
    newest = store({"epoch": 100}, tmp_path / f"epoch=100-step=10000{suffix}", save_format)
    os.utime(newest, (1, 1))
    looked_at.clear()
    assert newest_valid(tmp_path).path == newest
    assert len(looked_at) < 40


def test_old_ones_of_many_are_removed_by_their_names(tmp_path: Path, looked_at: list[str]) -> None:
    for step in range(5000):
        os.close(os.open(tmp_path / f"epoch=0-step={step}.ckpt", os.O_CREAT))
    kept = CheckpointStore(keep_last_n=2)
    removed = []
    for step in range(5000, 5010):
        path = store({"epoch": 0}, tmp_path / f"epoch=0-step={step}.ckpt", "ckpt")
        looked_at.clear()
        removed.append(len(kept.settle(path, best=tmp_path / "epoch=0-step=17.ckpt" if step == 5000 else None)))
        assert len(looked_at) - 2 * removed[-1] < 100  # of those that go: a folder or a file?
    assert max(removed) <= 1000 and sum(removed) == 5007
    assert sorted(path.name for path in tmp_path.glob("epoch=*")) == [f"epoch=0-step={n}.ckpt" for n in (17, 5008, 5009)]


@both_formats
def test_pointer_is_a_link_that_moves_with_its_folder(save_format: SaveFormat, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for epoch in range(2):
        point_to(tmp_path / "a" / "best", store({"epoch": epoch}, tmp_path / "a" / f"c{epoch}", save_format))
        assert read_checkpoint(tmp_path / "a" / "best") == {"epoch": epoch}
    (tmp_path / "a").rename(tmp_path / "b")
    assert (tmp_path / "b" / "best").is_symlink() and read_checkpoint(tmp_path / "b" / "best") == {"epoch": 1}
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["best", "c0", "c1"]


# -- leftovers
def leftover(target: Path, kind: str, *, host: str | None = None, pid: int | None = None, token: str | None = None) -> Path:
    """What a process leaves; without arguments this one's own."""
    with written(target) as temp:
        own = temp.name.removeprefix(f".{target.name}.").removesuffix(".tmp").split("-")
        temp.touch()
    target.unlink()
    parts = [str(part) if part is not None else mine for part, mine in zip((host, pid, token), own)]
    path = target.with_name(f".{target.name}.{'-'.join(parts)}.{kind}")
    path.mkdir()
    (path / "state.json").write_text("half")
    return path


DEAD = 2**22 + 1  # more than any process id of Linux


def test_leftovers_of_killed_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    mine = leftover(tmp_path / "a", "tmp")
    parents = leftover(tmp_path / "b", "tmp", pid=os.getppid())
    elsewhere = leftover(tmp_path / "c", "tmp", host="00000000", pid=DEAD)
    killed = leftover(tmp_path / "d", "tmp", pid=DEAD)
    before = leftover(tmp_path / "e", "tmp", token="00000000")
    old = leftover(tmp_path / "f", "tmp", host="00000000")
    os.utime(old, (0, 0))
    user = tmp_path / ".notes.tmp"
    user.touch()
    assert clean_leftovers(tmp_path) == [killed, before, old] and clean_leftovers(tmp_path / "none") == []
    assert sorted(tmp_path.iterdir()) == sorted([mine, parents, elsewhere, user])


def test_folder_that_was_moved_aside_comes_back_where_nothing_replaced_it(tmp_path: Path) -> None:
    aside = leftover(tmp_path / "c", "old", pid=DEAD)
    replaced = leftover(tmp_path / "d", "old", pid=DEAD)
    (tmp_path / "d").mkdir()
    assert clean_leftovers(tmp_path) == [aside, replaced]
    assert sorted(tmp_path.iterdir()) == [tmp_path / "c", tmp_path / "d"]
    assert (tmp_path / "c" / "state.json").exists() and not (tmp_path / "d" / "state.json").exists()


# -- snapshots and the writer
def test_snapshot_follows_no_change_and_uses_its_memory_again() -> None:
    weight, log = torch.ones(3), [1]
    first = snapshot({"w": weight, "log": log, "requires": weight.clone().requires_grad_()})
    copy = first.state["w"]
    weight.zero_(), log.append(2)
    assert copy.tolist() == [1, 1, 1] and first.state["log"] == [1]
    second = snapshot({"w": weight, "log": log, "requires": torch.zeros(3)}, into=first)
    assert second.state["w"] is copy and copy.tolist() == [0, 0, 0]
    assert not second.state["requires"].requires_grad
    third = snapshot({"w": torch.ones(4)}, into=second)
    assert third.state["w"].tolist() == [1, 1, 1, 1]


def test_weights_that_are_untied_get_memory_of_their_own() -> None:
    tied = torch.ones(2)
    first = snapshot({"a": tied, "b": tied})
    assert first.state["a"] is first.state["b"]
    second = snapshot({"a": torch.ones(2), "b": torch.zeros(2)}, into=first)
    assert second.state["a"].tolist() == [1, 1] and second.state["b"].tolist() == [0, 0]
    third = snapshot({"b": tied, "a": tied}, into=second)
    fourth = snapshot({"a": torch.ones(2), "b": torch.zeros(2)}, into=third)
    assert fourth.state["a"].tolist() == [1, 1] and fourth.state["b"].tolist() == [0, 0]


def test_snapshot_of_tensors_from_inference_mode_and_with_lazy_conjugates() -> None:
    with torch.inference_mode():
        metric = torch.ones(2)
    conjugate = torch.tensor([1 + 2j]).conj()
    first = snapshot({"m": metric, "c": conjugate})
    assert snapshot({"m": metric, "c": conjugate}, into=first).state["c"].tolist() == [1 - 2j]


@both_formats
def test_writer_writes_while_the_training_goes_on(save_format: SaveFormat, tmp_path: Path) -> None:
    writer, weight, written_paths = Writer(), torch.zeros(1000), []
    for step in range(5):
        weight += 1
        writer.save({"w": weight, "step": step}, tmp_path / f"c{step}", save_format, then=written_paths.append)
        weight += 0.5  # while it is written
        weight -= 0.5
    writer.wait()
    assert writer.take_errors() == []
    assert written_paths == [tmp_path / f"c{step}" for step in range(5)]
    assert [read_checkpoint(path)["w"].unique().item() for path in written_paths] == [1, 2, 3, 4, 5]


def test_one_save_is_in_flight_at_most(tmp_path: Path) -> None:
    writer, gates, order = Writer(), {"a.ckpt": threading.Event(), "b.ckpt": threading.Event()}, []

    def hold(path: Path) -> None:
        gates[path.name].wait()
        order.append(path.name)

    writer.save({"epoch": 1}, tmp_path / "a.ckpt", then=hold)
    assert not writer._done.is_set()
    threading.Timer(0.05, gates["a.ckpt"].set).start()
    writer.save({"epoch": 2}, tmp_path / "b.ckpt", then=hold)
    assert order == ["a.ckpt"]
    gates["b.ckpt"].set()
    writer.wait()
    assert order == ["a.ckpt", "b.ckpt"]


def test_a_save_whose_folder_is_removed_meanwhile_says_so_and_the_next_one_works(tmp_path: Path) -> None:
    writer, folder = Writer(), tmp_path / "checkpoints"
    state = {"nbtrain": {"history": {"journal": {"file": "history.jsonl"}}}}
    writer.save(state, folder / "c.ckpt")
    writer.wait()
    (error,) = writer.take_errors()
    assert (
        str(error) == f"c.ckpt could not be written: its folder was removed.\n  {folder / 'c.ckpt'}\n  Save again, which makes the folder."
    )
    writer.save({"epoch": 2}, folder / "c.ckpt")
    writer.wait()
    assert writer.take_errors() == [] and read_checkpoint(folder / "c.ckpt") == {"epoch": 2}


def test_failed_save_is_told_when_asked_and_the_next_one_works(tmp_path: Path) -> None:
    writer = Writer()
    (tmp_path / "file").touch()
    writer.save({"epoch": 1}, tmp_path / "file" / "c.ckpt")
    writer.save({"epoch": 2}, tmp_path / "c.ckpt", then=lambda path: point_to(tmp_path / "file" / "last", path))
    with pytest.raises(CheckpointError, match="^state_dict.w is a sparse"):
        writer.save({"state_dict": {"w": torch.eye(2).to_sparse()}}, tmp_path / "d.ckpt")
    writer.save({"epoch": 3}, tmp_path / "d.ckpt")
    writer.wait()
    assert [str(error).split("\n")[0] for error in writer.take_errors()] == [
        "c.ckpt could not be written: File exists.",
        "last could not be written: File exists.",
    ]
    assert writer.take_errors() == []
    assert read_checkpoint(tmp_path / "d.ckpt") == {"epoch": 3} and read_checkpoint(tmp_path / "c.ckpt") == {"epoch": 2}


def test_a_zip_bomb_is_refused_before_anything_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, laid_over = tmp_path / "packed.ckpt", tmp_path / "over.ckpt"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    with zipfile.ZipFile(laid_over, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 16))
        for number in range(4):  # further names of the same bytes
            again = copy.copy(archive.filelist[0])
            again.filename = again.orig_filename = f"archive/{number}"
            archive.filelist.append(again)
            archive._didModify = True
    monkeypatch.setattr(zipfile.ZipFile, "testzip", pytest.fail)
    monkeypatch.setattr(torch, "load", pytest.fail)
    for path, what in ((packed, "its record 'archive/data.pkl' is compressed"), (laid_over, "its records are larger than the file")):
        for read in (read_checkpoint, verify_checkpoint, verify_weights, read_counts):
            with pytest.raises(CheckpointError, match=what):
                read(path)
