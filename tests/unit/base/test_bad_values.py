"""A value of the right type that can't be meant is refused by its name, before anything runs; the next one is one line here."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Regress, make_data, make_loader, make_trainer, make_valid

import nbtrain
from nbtrain import AddOnBase, EarlyStoppingAddon, LimitsAddon, StateManagerAddon, TrainerArgs, addons
from nbtrain.cli import main
from nbtrain.errors import ConfigError, NbtrainError

X, ZERO, HUGE = torch.zeros(3, 8), "a\0b", 2**70
Limited, Stopped, Saved = (Regress.add_on(addon) for addon in (LimitsAddon, EarlyStoppingAddon, StateManagerAddon))
DURATION = 'must be a positive timedelta or a string "days:hours:minutes:seconds", got'


def run(kind: Any = Regress, n_epoch: Any = 1, **options: Any) -> None:
    make_trainer(kind, **options).run(n_epoch, make_loader(20), make_valid(10))


TABLE: dict[str, tuple[Callable[[Any], Any], list[Any], str]] = {  # a call, bad values, and what the error begins with
    "n_epoch": (lambda v: run(n_epoch=v), [HUGE, -1, math.nan], "n_epoch"),
    "max_time": (lambda v: run(Limited, max_time=v), ["1h", "", "1:00", timedelta(0), -timedelta(1)], f"max_time {DURATION}"),
    "Lightning's max_time": (lambda v: run(lightning={"max_time": v}), ["1h", timedelta(0)], f"lightning['max_time'] {DURATION}"),
    "max_steps": (lambda v: run(Limited, max_steps=v), [HUGE, 0], "max_steps"),
    "save_path": (lambda v: run(save_path=v), [ZERO, Path(ZERO), ""], "save_path"),
    "compare_with": (lambda v: make_trainer(compare_with=v), [ZERO, Path(ZERO)], "compare_with must be"),
    "monitor": (lambda v: make_trainer(monitor=v, monitor_mode="min"), [ZERO], "monitor must be a string"),
    "gradient_clip": (lambda v: run(gradient_clip=v), [math.nan, -1.0], "gradient_clip"),
    "seed": (lambda v: make_trainer(seed=v), [HUGE, math.nan], "seed"),
    "patience": (lambda v: run(Stopped, patience=v), [HUGE, -1], "patience"),
    "delta": (lambda v: run(Stopped, delta=v), [math.nan], "delta"),
    "resume": (lambda v: make_trainer(Saved, save_path="r").run(1, make_loader(), resume=v), [ZERO], "resume must be"),
    "save_model": (lambda v: make_trainer().save_model(v), [ZERO, Path(ZERO)], "filename must be"),
    "apply_weights": (lambda v: make_trainer().apply_weights(v), [ZERO], "filename must be"),
    "to_config": (lambda v: make_trainer().to_config(v), [ZERO], "path must be"),
    "predict": (lambda v: make_trainer().predict(v), [None, math.nan, 3, object()], "x must be a tensor, an array, a batch"),
    "check": (lambda v: make_trainer().check(v), [None], "batch must be a batch, got None"),
    "summary": (lambda v: make_trainer().summary(v), [None], "batch must be a batch, got None"),
    "predict's batch_size": (lambda v: make_trainer().predict(make_data(), batch_size=v), [0, -1, HUGE], "batch_size must be"),
    "evaluate's batch_size": (lambda v: make_trainer().evaluate(make_data(), batch_size=v), [0, -1], "batch_size must be a positive"),
    "inference's batch_size": (lambda v: make_trainer().inference(make_data(), batch_size=v), [0], "batch_size must be a positive"),
    "lr_find's end": (lambda v: make_trainer().lr_find(make_loader(), end=v), [0.0, -1.0, math.inf, 1e308], "From start=1e-07 to end="),
    "lr_find's n_batches": (lambda v: make_trainer().lr_find(make_loader(), n_batches=v), [0, -1, 2**62], "n_batches="),
    "set(lr)": (lambda v: make_trainer().set(lr=v), [math.nan, math.inf, -1.0], "lr"),
    "rewind": (lambda v: make_trainer(keep_states=True).rewind(step=v), [HUGE, math.nan], "step"),
    "replay": (lambda v: make_trainer(keep_states=True).replay(v), [HUGE, math.nan], "step"),
}  # fmt: skip
CASES = [(name, value) for name, (_, values, _) in TABLE.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name} {value!r:.20}" for name, value in CASES])
def test_a_value_that_can_not_be_meant_is_refused_by_name(name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, _, begin = TABLE[name]
    with pytest.raises(NbtrainError) as caught:
        call(value)
    assert str(caught.value).startswith(begin), str(caught.value)
    assert not list(tmp_path.iterdir())


def _numeric_options() -> dict[str, type[AddOnBase] | None]:
    """The options that are numbers, each with its addon; None for those of a trainer."""
    kinds = [kind for name in addons.__all__ if isinstance(kind := getattr(addons, name), type) and issubclass(kind, AddOnBase)]
    found = {field.name: kind for kind in kinds if kind is not nbtrain.RayAddon for field in fields(kind) if _is_number(field.type)}
    return {**found, **{p.name: None for p in inspect.signature(nbtrain.Trainer).parameters.values() if _is_number(p.annotation)}}


def _is_number(hint: Any) -> bool:
    return any(word in str(hint) for word in ("int", "float")) and "Callable" not in str(hint)


NUMERIC = _numeric_options()
NUMBERS = [0, -1, 2**62, 2**64, 1e308, math.nan, math.inf, True, "3"]


@pytest.mark.parametrize("name", NUMERIC)
def test_number_works_or_is_refused_by_the_name_of_its_option(name: str, tmp_path: Path) -> None:
    kind = NUMERIC[name]
    made = Regress if kind is None else Regress.add_on(kind)
    save = {"save_path": tmp_path} if kind is StateManagerAddon else {}
    refused = []
    for value in NUMBERS:
        try:
            make_trainer(made, **{**save, name: value}).run(1, make_loader(20), None)
        except NbtrainError as error:
            refused.append(value)
            assert name in str(error).partition("\n")[0], error
    assert "3" in refused or name == "freeze"  # where it is the name of a part


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e400", str(HUGE)])
@pytest.mark.parametrize("field", ["max_epochs", "seed"])
def test_a_number_in_a_file_that_is_none_is_refused_by_its_line(field: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"micro_batch_size: 2\n{field}: {value}\n")
    with pytest.raises(ConfigError, match=rf"{field}: expected a whole number, got .*\n.*run.yaml:2"):
        TrainerArgs.from_yaml(tmp_path / "run.yaml")


def test_an_option_that_is_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--devices", "1", "--devices", "2"], ["-o", "a", "-o", "b"]):
        assert main(["predict", "-f", "run.yaml", *given]) == 2
        assert f"{given[0]} is given twice." in capsys.readouterr().err


def test_a_later_file_says_which_values_of_an_earlier_one_it_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (tmp_path / f"{name}.yaml" for name in "abc")
    first.write_text(
        "model: {type: nbtrain.examples.mlp.MLP}\nmax_epochs: 1\nseed: 1\n"
        "optimizer: {type: torch.optim.Adam, args: {lr: 0.1}}\ndataset: {type: nbtrain.examples.mlp.SimpleDataset}\n"
    )
    second.write_text("max_epochs: 2\nseed: 1\nmicro_batch_size: 2\noptimizer: {args: {lr: 0.2}}\n")
    third.write_text("val_every_n_epochs: 2\n")
    main(["plan", "-f", str(first), "-f", str(second), "-f", str(third)])
    said = [line for line in capsys.readouterr().err.splitlines() if "replace" in line]
    assert said == ["nbtrain: of several files the later ones win: they replace max_epochs, optimizer.args.lr."]
