"""What a resumed run has beside its weights: optimizer states, attributes, generators, open metrics, phases.

Runs drawn at random from the same kinds are in tests/faults/test_interrupted.py.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from array import array
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from resume_cases import MODELS, OPTIMIZERS, SETTINGS, STEPS, Case, differences, outcome
from samples import Breaks, Broken, Regress, make_loader, make_model, make_trainer, make_valid, some, without_times
from torch import nn
from torch.ao import quantization
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nbtrain import AccumulationAddon, CheckpointError, EarlyStoppingAddon, LimitsAddon, StateManagerAddon, warmup_cosine
from nbtrain.checkpoint.files import ordered_names, read_checkpoint
from nbtrain.checkpoint.weights import load_weights
from nbtrain.optim.optimizer_state import load_optimizer

Saving = Regress.add_on(StateManagerAddon)


def kinds() -> dict[str, Case]:
    """Each kind once, beside plain ones."""
    found = {f"model: {name}": Case(model=name) for name in MODELS}
    found |= {f"bf16 weights and {name}": Case(model="bf16 weights", optimizer=name) for name in OPTIMIZERS}
    found |= {f"steps: {name}": Case(steps=name) for name in STEPS}
    found |= {f"setting: {name}": Case(setting=name, valid="in order") for name in SETTINGS}
    found["logging in double precision"] = Case(steps="logging", setting="double precision", breaks=(4,))
    return found | {"a dictionary and a factory": Case(setting="accumulation by a dictionary", schedule="one cycle", breaks=(11,))}


@pytest.mark.parametrize("name", some(kinds(), 3, ["logging in double precision"]))
def test_a_run_broken_off_in_mid_epoch_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    assert differences(kinds()[name], tmp_path) == []


# -- schedules
def interrupted(folder: Path, make: Any, breaks: int | None, n_epoch: int = 3) -> Any:
    """A run of what `make` returns, saved after each update: whole, or broken off and resumed with other random numbers."""
    for n, at in enumerate([None] if breaks is None else [breaks, None]):
        callbacks = [] if at is None else [Breaks(at)]
        trainer = make(save_path=folder, every_n_steps=1, keep_source=False, lightning={"callbacks": callbacks})
        torch.manual_seed(n + 1), random.seed(n + 1), np.random.seed(n + 1)
        with pytest.raises(Broken) if at is not None else nullcontext():
            trainer.run(n_epoch, make_loader(), resume="auto")
    return trainer


@pytest.mark.parametrize("breaks", [7, 12])
@pytest.mark.parametrize("windows", [{0: 2, 5: 4}, {0: 1, 3: 2, 6: 3}, {0: 4, 2: 1}])
def test_a_plan_counts_the_windows_of_the_whole_run(windows: dict[int, int], breaks: int, tmp_path: Path) -> None:
    plans: list[Any] = []

    def decay(optimizer: Any, plan: Any) -> Any:
        plans.append(plan.total_steps)
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, plan.total_steps)

    def make(**options: Any) -> Any:
        return make_trainer(Regress.add_on(StateManagerAddon, AccumulationAddon), accumulate=windows, scheduler=decay, **options)

    whole = interrupted(tmp_path / "whole", make, None)
    expected = outcome(whole)
    assert outcome(interrupted(tmp_path / "broken", make, breaks)) == expected
    made = [n for n in plans if n != 1000]  # without the trials, of which a resume compares the class
    assert made == [whole.counts.step] * 3 and whole.optimizer.param_groups[0]["lr"] == 0


def test_a_plan_counts_the_windows_of_lightnings_schedule_of_accumulation(tmp_path: Path) -> None:
    plans: list[Any] = []

    def constant(optimizer: Any, plan: Any) -> Any:
        plans.append(plan.total_steps)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    callbacks = [GradientAccumulationScheduler({0: 2, 1: 5})]
    trainer = make_trainer(scheduler=constant, lightning={"callbacks": callbacks})
    trainer.run(2, make_loader())
    trainer.run(1, make_loader())
    assert plans == [4, 1] and trainer.counts.step == 5


TENSOR_SCHEDULES: dict[str, Any] = {
    "LinearLR": lambda optimizer, plan: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=12),
    "OneCycleLR": lambda optimizer, plan: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=16),
    "warmup_cosine": warmup_cosine,
    "a function": lambda step: 0.1 * 0.9**step,
}


@pytest.mark.parametrize("name", TENSOR_SCHEDULES)
def test_a_learning_rate_in_a_tensor_is_resumed_in_the_same_tensor(name: str, tmp_path: Path) -> None:
    def make(**options: Any) -> Any:
        def optimizer(params: Any) -> Any:
            return torch.optim.Adam(params, lr=torch.tensor(0.02))

        return make_trainer(Saving, optimizer=optimizer, scheduler=TENSOR_SCHEDULES[name], **options)

    expected = outcome(interrupted(tmp_path / "whole", make, None))
    assert outcome(interrupted(tmp_path / "broken", make, 6)) == expected


# -- what can't be saved is said
class Opaque(nn.Module):
    """Each attribute of these has no plain form, but the last ones, which never change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.source, self.sparse = nn.Linear(8, 1), iter(range(9)), torch.eye(2).to_sparse()
        self.function, self.kind, self.width = torch.relu, nn.Linear, 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def notes(trainer: Any) -> list[str]:
    lines = map(json.loads, (trainer.run_dir / "events.jsonl").read_text().splitlines())
    return [line["data"]["text"] for line in lines if line["kind"] == "note"]


def test_what_can_not_be_saved_is_said_in_one_line_when_the_run_begins(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, model=Opaque(), keep_source=False)
    trainer.run(1, make_loader())
    trainer.run(1, make_loader())
    (note,) = notes(trainer)
    assert note == (
        "Resume is not exact here: Opaque.source is a range_iterator; Opaque.sparse is a Tensor, and is not saved. "
        "Give it state_dict and load_state_dict, or set it before you resume."
    )
    assert list(trainer.run_dir.glob("checkpoints/epoch=2*"))


class Cube(nn.Module):
    """Your own layer, with a function in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 1), torch.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Changing(Saving):
    """Its first step calls `change`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.found, self.items, self.loss, self.teacher, self.box = None, [], torch.relu, Cube(), SimpleNamespace(made=lambda: 1)
        self.part, self.change = self.model, lambda trainer: None

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.change(self)
        return super().train_step(batch)


LOST: dict[str, tuple[Any, str]] = {
    "a library's object": (lambda it: setattr(it, "found", re.compile("a")), "Changing.found got a Pattern"),
    "a standard container": (lambda it: setattr(it, "found", array("i", [1])), "Changing.found got a array"),
    "an iterator": (lambda it: setattr(it, "found", iter([1])), "Changing.found got a list_iterator"),
    "an item of a list": (lambda it: it.items.append(re.compile("a")), "Changing.items got a Pattern"),
    "a value within dicts": (lambda it: setattr(it, "found", {"a": {1: re.compile("a")}}), "Changing.found got a Pattern"),
    "another function": (lambda it: setattr(it, "loss", torch.tanh), "Changing.loss got another object"),
    "another layer": (lambda it: setattr(it, "part", it.model.layer), "Changing.part got another object"),
    "an attribute of the model": (lambda it: setattr(it.model, "found", re.compile("a")), "Cube.found got a Pattern"),
    "a function of the model": (lambda it: setattr(it.model, "function", torch.tanh), "Cube.function got another object"),
    "an attribute of a module beside": (lambda it: setattr(it.teacher, "found", re.compile("a")), "Changing.teacher.found got a Pattern"),
}
KEPT: dict[str, Any] = {
    "plain values": lambda it: setattr(it, "found", [1, Decimal("1.5"), {"a": torch.ones(1)}]),
    "the same function again": lambda it: setattr(it, "loss", torch.relu),
    "what it makes each time": lambda it: (setattr(it, "found", [*it.model.parameters()]), setattr(it, "part", it.model)),
    "a first function": lambda it: setattr(it, "found", lambda: 2),
}


@pytest.mark.parametrize("name", [*LOST, *KEPT])
def test_an_attribute_that_got_a_value_which_no_state_keeps_is_said(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(Changing, save_path=tmp_path, model=Cube(), keep_source=False)
    trainer.change, text = LOST.get(name) or (KEPT[name], "")
    trainer.run(2, make_loader())
    remedy = "Give it state_dict and load_state_dict, or set it before you resume."
    assert notes(trainer) == ([f"Resume is not exact here: {text} in the run, and is not saved. {remedy}"] if text else [])


class Augmented(Dataset[Any]):
    """Samples that are drawn."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, i: int) -> Any:
        return torch.rand(8), torch.rand(1)


@pytest.mark.parametrize(("before", "now"), [(2, 0), (0, 2), (0, 0)])
@pytest.mark.parametrize("epochs", [1, 0], ids=["between two epochs", "in mid-epoch"])
def test_another_number_of_workers_is_said_where_the_data_may_be_random(before: int, now: int, epochs: int, tmp_path: Path) -> None:
    def run(n_workers: int, dataset: Any, folder: Path, n_steps: int) -> Any:
        trainer = make_trainer(Regress.add_on(StateManagerAddon, LimitsAddon), save_path=folder, keep_source=False, max_steps=n_steps)
        trainer.run(2, DataLoader(dataset, 16, num_workers=n_workers), resume="auto")
        return [note for note in notes(trainer) if "number of workers" in note]

    for dataset, is_said in ((Augmented(), before != now), (TensorDataset(torch.ones(70, 8), torch.ones(70, 1)), False)):
        folder = tmp_path / type(dataset).__name__
        assert run(before, dataset, folder, 5 * epochs or 3) == []
        found = run(now, dataset, folder, 10)
        assert len(found) == is_said
        text = f"was saved with another number of workers: {before}, and {now} now, so that the random numbers of the samples differ"
        assert not is_said or text in found[0]


class Quantized(nn.Module):
    """An own module: `prepare_qat` gives it, too, the settings, a named tuple of classes with arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer, self.norm, self.out = quantization.QuantStub(), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.layer(self.into(x))))


def test_a_model_that_is_quantized_in_training_is_resumed_exactly_and_without_a_note(tmp_path: Path) -> None:
    def make(**options: Any) -> Any:
        torch.manual_seed(0)
        model = Quantized()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # pyright: ignore[reportAttributeAccessIssue]
        with warnings.catch_warnings():  # torch warns of the arguments that its own settings have
            warnings.simplefilter("ignore")
            return make_trainer(Saving, model=quantization.prepare_qat(model), **options)

    expected = outcome(interrupted(tmp_path / "whole", make, None))
    broken = interrupted(tmp_path / "broken", make, 6)
    assert outcome(broken) == expected
    assert not [note for note in notes(broken) if "exact" in note]


class Phase(Enum):
    WARM, HOT = 1, 2


@dataclass(frozen=True)
class Setting:
    n: int = 0


SETTING = Setting()
Recent = namedtuple("Recent", "value n")
CHANGES: dict[str, tuple[Any, Any]] = {
    "an enum": (Phase.WARM, Phase.HOT),
    "a path": (Path("a"), Path("b")),
    "a date": (date(2024, 1, 1), date(2024, 1, 2)),
    "a named tuple": (Recent(None, 0), Recent(torch.ones(2), 1)),
    "a counter that is new": (None, Counter("ab")),
    "an ordered dict": (OrderedDict(a=1, b=2), OrderedDict(b=1, a=2)),
    "a default dict": (None, defaultdict(list, {1: [2]})),
    "a frozen dataclass": (SETTING, Setting(3)),
    "a dict by enums": ({}, {Phase.HOT: 1}),
    "text of NumPy's": (np.array(["a"]), np.array(["bc"])),
}


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_of_the_model_keeps_its_type(name: str, save_format: str, tmp_path: Path) -> None:
    before, after = CHANGES[name]

    def made() -> Any:
        model: Any = make_model()
        model.extra = copy(before) if not isinstance(before, Setting) else before
        return make_trainer(Saving, save_path=tmp_path, model=model, save_format=save_format, keep_source=False)

    trainer = made()
    trainer.run_batch(next(iter(make_loader())))
    trainer.model.extra = after
    trainer.save_state()
    again = made()
    again.load_state()
    assert type(again.model.extra) is type(after) and repr(again.model.extra) == repr(after)
    assert Phase.WARM.value == 1 and SETTING.n == 0  # what others have too is not changed


class Failing(L.Callback):
    """Its state can't be made, or can't be stored."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.state, Exception):
            raise self.state
        return {"odd": self.state, "n": 1}


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("no"), RuntimeError("no"), MemoryError("no"), OSError("no")], ids=repr)
def test_training_continues_after_a_save_that_fails_in_any_way(error: Exception, tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, lightning={"callbacks": [Failing(error)]}, keep_source=False)
    assert trainer.run(2, make_loader()).status == "completed"
    assert [note for note in notes(trainer) if note.startswith("a checkpoint was not saved: ")]
    stopping = make_trainer(Saving, save_path=tmp_path, stop_on_save_error=True, lightning={"callbacks": [Failing(error)]})
    with pytest.raises(type(error)):
        stopping.run(2, make_loader())


def test_a_value_that_can_not_be_stored_is_named_once_and_the_rest_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, lightning={"callbacks": [Failing(object())]}, keep_source=False)
    trainer.run(2, make_loader())
    assert notes(trainer) == ["Resume is not exact here: callbacks.Failing.odd is of type object, which a checkpoint can't hold."]
    path = trainer.run_dir / "checkpoints" / "last.ckpt"
    assert read_checkpoint(path)["callbacks"]["Failing"] == {"n": 1}


class Lazy(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        if not hasattr(self, "noise"):
            self.noise = torch.Generator().manual_seed(1)
        return super().train_step(batch)


def test_a_generator_that_a_new_process_has_not_made_yet_is_said(tmp_path: Path) -> None:
    kind = Lazy.add_on(StateManagerAddon)
    with pytest.raises(Broken):
        make_trainer(kind, save_path=tmp_path, every_n_steps=1, lightning={"callbacks": [Breaks(3)]}).run(1, make_loader())
    again = make_trainer(kind, save_path=tmp_path, keep_source=False)
    again.run(1, make_loader(), resume="auto")
    assert any(note.startswith("Resume is not exact here: Lazy.noise is made after the run has begun") for note in notes(again))


def test_a_setting_that_was_changed_by_hand_is_not_changed_back(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        make_trainer(Saving, save_path=tmp_path, every_n_steps=1, lightning={"callbacks": [Breaks(3)]}).run(1, make_loader())
    model: Any = make_model()
    model[2].p = 0.1  # was 0.3, and has not changed in the run
    again = make_trainer(Saving, save_path=tmp_path, model=model)
    again.load_state()
    assert model[2].p == 0.1


# -- weights that fit, and that do not
class Versioned(nn.Linear):
    """Refuses weights without the version of its format, as some models of torchvision do."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_module_finds_its_version_in_what_it_loads() -> None:
    load_weights(Versioned(2, 1), dict(Versioned(2, 1).state_dict()))


class Renaming(nn.Linear):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.parametrize("by_hook", [True, False])
def test_a_module_that_renames_what_it_loads_decides_what_fits(by_hook: bool) -> None:
    def rename(module: nn.Module, state: Any, prefix: str, *args: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    model: Any = nn.Sequential(nn.Linear(2, 1) if by_hook else Renaming(2, 1))
    if by_hook:
        model[0].register_load_state_dict_pre_hook(rename)
    load_weights(model, {"0.kernel": torch.full((1, 2), 3.0), "0.bias": torch.zeros(1)})
    assert model[0].weight.tolist() == [[3.0, 3.0]]
    with pytest.raises(CheckpointError, match="not those of a Sequential: 0.other is unknown"):
        load_weights(model, {"0.kernel": torch.zeros(1, 2), "0.bias": torch.zeros(1), "0.other": torch.zeros(1)})


def test_states_of_a_parameter_whose_dtype_was_changed_are_cast_with_it() -> None:
    def made(dtype: torch.dtype) -> Any:
        weight = nn.Parameter(torch.ones(2, dtype=dtype))
        optimizer = torch.optim.Adam([weight])
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return weight, optimizer

    weight, optimizer = made(torch.bfloat16)
    load_optimizer(optimizer, made(torch.float32)[1].state_dict(), cast={id(weight)})
    assert optimizer.state[weight]["exp_avg"].dtype == torch.bfloat16


# -- several lines
def notebook(folder: Path, totals: tuple[int, ...], resume: str | None = "auto", sizes: Iterable[int] = repeat(70), **options: Any) -> Any:
    """Lines that train until there are so many epochs; without `resume`, with the number that each of them adds."""
    trainer = make_trainer(options.pop("kind", Saving), save_path=folder, **options)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    for before, n_epoch, n in zip((0, *totals), totals, sizes):
        trainer.run(n_epoch if resume else n_epoch - before, make_loader(n), make_valid(), resume=resume)
    return trainer


@pytest.mark.parametrize("totals", [(3,), (3, 5), (2, 5), (1, 2, 4)])
def test_a_notebook_of_several_lines_executed_again_changes_nothing(totals: tuple[int, ...], tmp_path: Path) -> None:
    expected = outcome(first := notebook(tmp_path, totals))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    again = notebook(tmp_path, totals)
    assert first.counts.epoch == totals[-1] and again.result.reason == f"all {totals[-1]} epochs were there: nothing to train"
    assert outcome(again) == expected
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"} == before


@pytest.mark.parametrize("breaks", [3, 12, 18, 27])
def test_lines_that_are_broken_off_anywhere_end_as_if_nothing_had_happened(breaks: int, tmp_path: Path) -> None:
    totals, sizes = (2, 3, 6), (70, 40, 100)  # each with a loader that differs from the one before
    expected = outcome(notebook(tmp_path / "plain", totals, None, sizes))
    with pytest.raises(Broken):
        notebook(tmp_path / "broken", totals, sizes=sizes, every_n_steps=1, lightning={"callbacks": [Breaks(breaks)]})
    assert outcome(notebook(tmp_path / "broken", totals, sizes=sizes, every_n_steps=1)) == expected


def test_a_line_after_a_run_without_resume_is_not_trained_once_more(tmp_path: Path) -> None:
    one = make_trainer(Saving, save_path=tmp_path)
    one.run(3, make_loader(), resume="auto")
    one.run(2, make_loader())
    two = make_trainer(Saving, save_path=tmp_path)
    result = two.run(3, make_loader(), resume="auto")
    assert result.reason == "5 epochs were there, 3 are requested: nothing to train; rewind(epoch=3) goes back"
    assert (two.counts.epoch, result.n_epochs, result.elapsed_s) == (5, 0, 0.0)


# -- early stopping
def test_more_patience_continues_a_run_that_was_ended(tmp_path: Path) -> None:
    options = {"kind": Regress.add_on(StateManagerAddon, EarlyStoppingAddon), "delta": 0.5}
    first = notebook(tmp_path, (20,), patience=1, **options)
    assert notebook(tmp_path, (20,), patience=3, **options).counts.epoch > first.counts.epoch


Stopping = Regress.add_on(StateManagerAddon, EarlyStoppingAddon, LimitsAddon)
EARLY: dict[str, dict[str, Any]] = {
    "our early stopping": {"patience": 1, "delta": 2.0},
    "our early stopping, and the best weights": {"patience": 1, "delta": 2.0, "restore_best": True},
    "our early stopping, saved now and then": {"patience": 1, "delta": 2.0, "every_n_epochs": 2, "save_best": False, "restore_best": True},
    "our early stopping, inside an epoch": {"patience": 2, "delta": 9.0, "val_every_n_steps": 2, "restore_best": True},
    "our early stopping, before min_epochs": {"patience": 1, "delta": 2.0, "monitor": "train_loss", "lightning": {"min_epochs": 6}},
    "patience": {"early": {"patience": 1, "min_delta": 2.0}},
    "no patience": {"early": {"patience": 0, "min_delta": 2.0}},
    "patience, before min_steps": {"early": {"patience": 1, "min_delta": 2.0}, "lightning": {"min_steps": 23}},
    "a threshold": {"early": {"stopping_threshold": 100.0}},
    "a threshold inside an epoch": {"early": {"stopping_threshold": 9.0, "check_on_train_epoch_end": False}, "val_every_n_steps": 3},
    "a divergence": {"early": {"divergence_threshold": 0.1}},
    "a divergence on Lightning's loops": {"early": {"divergence_threshold": 0.1}, "lean": False},
    "max_steps": {"max_steps": 10, "restore_best": True},
    "max_steps inside an epoch": {"max_steps": 8, "restore_best": True},
    "max_steps of Lightning inside an epoch": {"lightning": {"max_steps": 8}, "save_format": "safetensor"},
    "max_steps inside an epoch, the best at the end": {"max_steps": 8, "validate_on_save": True, "restore_best": True},
    "max_steps inside an epoch, no file of the best": {"max_steps": 8, "validate_on_save": True, "restore_best": True, "save_best": False},
    "max_steps inside an epoch on Lightning's loops": {"max_steps": 8, "validate_on_save": True, "lean": False},
    "max_steps inside an epoch, a save by steps": {"max_steps": 8, "every_n_steps": 4, "keep_last_n": 1},
    "all its epochs, and the best weights": {"n_epoch": 3, "restore_best": True, "val_every_n_steps": 2},
}


def stopped(folder: Path, options: dict[str, Any], seed: int = 0) -> Any:
    """The line of a notebook, in a new process."""
    options = {"patience": 99, **options}
    early, lean, n_epoch = options.pop("early", None), options.pop("lean", True), options.pop("n_epoch", 12)
    lightning = {**options.pop("lightning", {}), **({"callbacks": [EarlyStopping("val_loss", **early)]} if early else {})}
    trainer = make_trainer(Stopping, save_path=folder, keep_source=False, lightning=lightning, model=make_model(seed), **options)
    trainer.short_way = lean
    torch.manual_seed(1)
    trainer.run(n_epoch, make_loader(), make_valid(), resume="auto")
    return trainer


@pytest.mark.parametrize("name", EARLY)
def test_the_same_line_again_leaves_everything_as_the_run_that_has_ended_left_it(name: str, tmp_path: Path) -> None:
    first = stopped(tmp_path, EARLY[name])
    expected, rows = outcome(first), without_times(first.history.epochs)
    n, n_all = first.counts.epoch, EARLY[name].get("n_epoch", 12)
    why = f"ended at epoch {n} of {n_all} ({first.result.reason})" if n < n_all else f"all {n} epochs were there: nothing to train"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    for seed in (1, 2):
        again = stopped(tmp_path, EARLY[name], seed)
        assert (again.result.status, again.result.n_epochs, again.result.elapsed_s) == ("completed", 0, 0.0)
        assert again.result.reason == why
        assert again.result.best == first.result.best
        assert outcome(again) == expected and without_times(again.history.epochs) == rows
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"} == before


QUICK = ("our early stopping, inside an epoch", "a threshold", "max_steps inside an epoch, the best at the end")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in EARLY])
def test_a_kill_after_the_last_save_or_the_one_before_loses_neither_the_end_nor_its_row(name: str, tmp_path: Path) -> None:
    first = stopped(tmp_path / "first", EARLY[name])
    expected, rows = outcome(first), without_times(first.history.epochs)
    saves = ordered_names(first.run_dir / "checkpoints")
    for n in (len(saves), len(saves) - 1):
        if n == 0:
            continue
        folder = Path(shutil.copytree(tmp_path / "first", tmp_path / f"killed-{n}", symlinks=True))
        for name_of_later in saves[n:]:
            later = folder / "run-001" / "checkpoints" / name_of_later
            shutil.rmtree(later) if later.is_dir() else later.unlink()
        events = (folder / "run-001" / "events.jsonl").read_text().splitlines(keepends=True)
        last = max(i for i, line in enumerate(events) if '"kind":"epoch"' in line)
        (folder / "run-001" / "events.jsonl").write_text("".join(events[:last]))  # the last row was not written
        again = stopped(folder, EARLY[name], seed=1)
        assert outcome(again) == expected and without_times(again.history.epochs) == rows, n


def test_a_request_to_stop_before_min_epochs_is_kept_where_the_run_is_broken_off(tmp_path: Path) -> None:
    class Once(EarlyStopping):  # is content again before min_epochs
        def _evaluate_stopping_criteria(self, current: torch.Tensor) -> tuple[bool, str | None]:
            self.n = getattr(self, "n", 0) + 1
            self.stopping_reason = EarlyStoppingReason.STOPPING_THRESHOLD
            return self.n == 2, None

    def line(folder: Path, *callbacks: Any) -> Any:
        return notebook(folder, (9,), lightning={"min_epochs": 4, "callbacks": [Once("val_loss"), *callbacks]})

    expected = outcome(whole := line(tmp_path / "whole"))
    assert whole.counts.epoch == 4
    with pytest.raises(Broken):
        line(tmp_path / "broken", Breaks(17))
    assert outcome(line(tmp_path / "broken")) == expected


def test_a_phase_after_one_that_has_ended_inside_an_epoch_begins_where_that_one_ended(tmp_path: Path) -> None:
    def lines(folder: Path, n: int) -> Any:
        return notebook(folder, (6, 2)[:n], kind=Stopping, patience=2, delta=9.0, val_every_n_steps=2)

    expected = outcome(lines(tmp_path / "whole", 2))
    assert lines(tmp_path / "parts", 1).counts.step % 5 != 0
    assert outcome(lines(tmp_path / "parts", 2)) == expected


def test_another_threshold_continues_a_run_that_was_ended(tmp_path: Path) -> None:
    first = stopped(tmp_path, {"early": {"stopping_threshold": 100.0}, "n_epoch": 3})
    second = stopped(tmp_path, {"early": {"stopping_threshold": 0.0}, "n_epoch": 3})
    assert (first.counts.epoch, second.counts.epoch) == (1, 3)
