"""Runs whose model, metrics and addons are drawn from a seed: what monitors, loggers and views may meet."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from nbtrain import (
    EMAAddon,
    GradientClipAddon,
    GradientStatsAddon,
    LoggersAddon,
    NeptuneLoggerAddon,
    StateManagerAddon,
    SystemMonitorAddon,
    Trainer,
    WandBLoggerAddon,
)

# -- names
SCRIPTS = [
    "정확도",
    "손실",
    "دقة",
    "خسارة",
    "точность",
    "é",
    "e\u0301",
    "🎯",
    "👩‍🔬",
    "가" * 300,
    "x\u202ey",
    "a\u00a0b",
    "\ufeffa",
    "\ud83d",
]
ALIKE = [
    "a",
    "A",
    "_a",
    "__a",
    "/a",
    "a/",
    "a/b",
    "a//b",
    "a/./b",
    "a/../b",
    "a_b",
    "a b",
    "a.b",
    "a-b",
    "a:b",
    "a|b",
    "a;b",
    "a\\b",
    "#a",
    "@a",
]
ALIKE += ["a\tb", "a\nb", "a\r\nb", "{a}", "`a`", "a/b/c", "train_a", "val_a", "train/a", "n" * 300, "n" * 299 + "m", "n" * 249]
SIGNS = [
    "50%",
    "top%5d",
    "%s",
    "it's",
    '"q"',
    "$x_1$",
    "$\\frac{",
    "\\x1b",
    "\x1b[31m",
    "x,y",
    "<b>&amp;",
    " ",
    "\x00",
    "[0]",
    "=1+1",
    "*",
    "0",
    "nan",
    "None",
]
TAKEN = [
    "loss_step",
    "loss_epoch",
    "a_step",
    "a_epoch",
    "step",
    "epoch",
    "lr",
    "time",
    "time_s",
    "timestamp",
    "run",
    "project",
    "metrics",
    "best",
]
TAKEN += ["_step", "_runtime", "samples_per_s", "grad_norm", "ram_gb", "skipped"]
NAMES = [*SCRIPTS, *ALIKE, *SIGNS, *TAKEN]
LAYERS = ["층", "طبقة", "😀", "a b", "a/b", "a_b", "A", "a", "50%", "$x", "<i>", "x" * 200, "\n", "lr", "loss"]

# -- values
DTYPES = [getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "bool", "uint8")]
DTYPES += [getattr(torch, name) for name in ("uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")]
FORMS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "int": int,
    "bool": bool,
    "Fraction": Fraction,
    **{f"np.{kind.__name__}": kind for kind in (np.float16, np.float32, np.float64, np.int64, np.uint8, np.bool_)},
    **{str(dtype): lambda value, dtype=dtype: torch.tensor(value).to(dtype) for dtype in DTYPES},
    "with a gradient": lambda value: torch.tensor(value, requires_grad=True) * 1,
    "view": lambda value: torch.tensor([value, 0.0])[0],
}
SPECIAL = [math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-300, 1e-40, -0.0, 2**63, 2**70, 10**400, -(10**400), Fraction(10**400, 3)]


def as_form(value: Any, form: str) -> Any:
    """`value` in one of FORMS; unchanged where that can't hold it."""
    with suppress(OverflowError, ValueError, RuntimeError, TypeError), np.errstate(all="ignore"):
        return FORMS[form](value)
    return value


# -- models
class Odd(nn.Module):
    """Its output is not what a monitor of activations expects."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return {"empty output": x[:0], "integer output": x.long(), "complex output": x + 0j, "no output": None}[self.kind]


def _with(name: str, tensor: Tensor, *, grad: bool = True) -> nn.Module:
    part = nn.Module()
    part.register_parameter(name, nn.Parameter(tensor, requires_grad=grad))
    return part


def _buffer(tensor: Tensor) -> nn.Module:
    part = nn.Module()
    part.register_buffer("n", tensor)
    return part


PARTS: dict[str, Callable[[str], nn.Module]] = {
    "sparse": lambda name: nn.Embedding(7, 3, sparse=True),
    "complex": lambda name: _with(name, torch.randn(3, dtype=torch.complex64)),
    "empty complex": lambda name: _with(name, torch.randn(0, dtype=torch.complex64)),
    "empty": lambda name: _with(name, torch.empty(0)),
    "scalar": lambda name: _with(name, torch.tensor(1.0)),
    "bfloat16": lambda name: _with(name, torch.ones(3, dtype=torch.bfloat16)),
    "float64": lambda name: _with(name, torch.ones(3, dtype=torch.float64)),
    "integer buffer": lambda name: _buffer(torch.tensor(3)),
    "bool buffer": lambda name: _buffer(torch.tensor([True])),
    "integer": lambda name: _with(name, torch.tensor([1, 2]), grad=False),
    "unused": lambda name: nn.Linear(4, 1),
    "unused empty": lambda name: _with(name, torch.empty(0)),
    "frozen": lambda name: nn.Linear(4, 1).requires_grad_(False),
    "nested": lambda name: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)),
    **{kind: lambda name, kind=kind: Odd(kind) for kind in ("empty output", "integer output", "complex output", "no output")},
}


class Net(nn.Module):
    """Adds a number of each of its parts to a linear layer's output."""

    def __init__(self, parts: dict[str, str]) -> None:
        super().__init__()
        self.main, self.parts = nn.Linear(4, 1), parts
        for layer, kind in parts.items():
            self.add_module(layer, PARTS[kind](layer))

    def forward(self, x: Tensor) -> Tensor:
        out = self.main(x)
        for layer, kind in self.parts.items():
            part: Any = self._modules[layer]
            if kind == "sparse":
                out = out + part((x[:, 0] * 10).long().abs() % 7).mean(1, keepdim=True)
            elif kind in ("frozen", "nested"):
                out = out + part(x)
            elif isinstance(part, Odd):
                part(x)
            elif kind in ("complex", "empty complex", "empty", "scalar", "bfloat16", "float64"):
                out = out + next(part.parameters()).abs().sum().float()
        return out


# -- cases
N_EPOCHS, SPECIAL_EPOCH = 3, 1  # and the epoch whose values are special


@dataclass(frozen=True)
class Case:
    """A run. Its metrics by name: of the steps, of `metric_on_epoch_end`, and logged by a callback."""

    parts: dict[str, str]
    steps: dict[str, str]  # the form of their values
    special: dict[str, Any]
    whole: list[str]
    logged: list[str]
    addons: list[type[Any]]
    options: dict[str, Any]
    loaders: list[str]  # the names of the validation's, if there are several
    every: int
    encoding: str  # of what the view writes to
    has_picture: bool  # of its curves, which takes longer than the run
    seed: int

    def number(self, name: str, first: float, epoch: int) -> Any:
        """What the steps return under `name` in an epoch; `first` is their number of the first name in the first epoch."""
        usual = first + 10 * list(self.steps).index(name) + epoch
        return as_form(self.special.get(name, usual) if epoch == SPECIAL_EPOCH else usual, self.steps[name])


def drawn(seed: int) -> Case:
    chance = random.Random(seed)
    layers = chance.sample(LAYERS, chance.randint(1, 6))
    steps = {name: chance.choice(list(FORMS)) for name in chance.sample(NAMES, chance.randint(3, 9)) if name != "loss"}
    options: dict[str, Any] = {"nonfinite": chance.choice(["raise", "skip", "stop", "ignore"])}
    choices: list[tuple[type[Any], dict[str, Any]]] = [
        (GradientStatsAddon, {"stats_every_n_steps": 1, "stats_depth": chance.choice([1, 2])}),
        (GradientClipAddon, {"gradient_clip": 1.0, "gradient_clip_algorithm": chance.choice(["norm", "value"])}),
        (SystemMonitorAddon, {"throughput": True}),
        (EMAAddon, {}),
        (StateManagerAddon, {}),
    ]
    addons: list[type[Any]] = []
    for addon, its_options in choices:
        if chance.random() < 0.5:
            addons.append(addon)
            options |= its_options
    return Case(
        parts={layer: chance.choice(list(PARTS)) for layer in layers},
        steps=steps,
        special={name: chance.choice(SPECIAL) for name in steps if chance.random() < 0.5},
        whole=[name for name in chance.sample(NAMES, chance.randint(0, 4)) if name not in steps],
        logged=[name for name in chance.sample(NAMES, chance.randint(0, 4)) if name not in ("train_a", "val_a")],
        addons=addons,
        options=options,
        loaders=chance.sample(["쉬움", "a/b", "a_b", "0", "x" * 100], 2) if chance.random() < 0.3 else [],
        every=chance.choice([1, 2, 50]),
        encoding=chance.choice(["utf-8", "ascii", "cp1252"]),
        has_picture=seed % 3 == 0,
        seed=seed,
    )


class Logs(L.Callback):
    """Logs numbers of the case with Lightning's `log`, each second one also by step."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_train_batch_end(self, pl_trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        for i, name in enumerate(self.case.logged):
            pl_module.log(name, 2000.0 + 10 * i + pl_trainer.current_epoch, on_step=bool(i % 2), on_epoch=True)


class Drawn(Trainer):
    case: Case

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": (self.model(batch[0]) ** 2).mean(), **self.numbers(1.0)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": (self.model(batch[0]) ** 2).mean(), **self.numbers(5.0)}

    def numbers(self, first: float) -> dict[str, Any]:
        return {name: self.case.number(name, first, self.train_state.counts.epoch) for name in self.case.steps}

    def metric_on_epoch_end(self) -> dict[str, Any]:
        first = 1000.0 if self.mode == "train" else 1005.0
        return {name: first + 10 * i + self.train_state.counts.epoch for i, name in enumerate(self.case.whole)}


def make_drawn(case: Case, folder: Path, trackers: list[str]) -> Any:
    """The trainer of a case, which logs to `trackers`."""
    torch.manual_seed(case.seed)
    web = [name for name in trackers if name in ("wandb", "neptune")]
    addons = [*case.addons, LoggersAddon, *({"wandb": WandBLoggerAddon, "neptune": NeptuneLoggerAddon}[name] for name in web)]
    options = case.options | {"loggers": [name for name in trackers if name not in web]}
    if web:
        options |= {"web_logger": {name: {"mode": "offline"} for name in web}, "log_figures": case.has_picture}
    net = Net(case.parts)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.001)
    kind = type("Drawn", (Drawn,), {"case": case}).add_on(*addons)
    lightning = {"callbacks": [Logs(case)], "log_every_n_steps": case.every}
    return kind(net, device="cpu", optimizer=optimizer, save_path=folder, keep_source=False, lightning=lightning, **options)


def run_drawn(trainer: Any) -> Any:
    """Run it: three batches an epoch, with a validation of two. Returns the result."""
    generator = torch.Generator().manual_seed(trainer.case.seed)
    data = [(torch.randn(5, 4, generator=generator),) for _ in range(3)]
    loaders = trainer.case.loaders
    return trainer.run(N_EPOCHS, data, dict.fromkeys(loaders, data[:1]) if loaders else data[:2])
