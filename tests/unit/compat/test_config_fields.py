"""Files of nnScaler: fields without effect are named, other spellings translated, and the help shows both after nbtrain's fields."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from nbtrain import ConfigError, TrainerArgs
from nbtrain.cli import main
from nbtrain.compat.config_fields import describe_accepted
from nbtrain.config.schema import Settings, describe_fields, shown_fields

IGNORED = {"gen_savedir": "./gen", "gen_reuse": "moo", "broadcast_strategy": "none", "instance_name": "a", "tracing_from_weights": "w.pt"}
IGNORED_COMPUTE = {
    "constant_folding": True,
    "trace_strategy": "cpu",
    "inference_only": True,
    "use_async_reducer": True,
    "pas_config": {"a": 1},
    "user_config": {"b": 2},
}


def checked(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        TrainerArgs.from_dict(data).check()
    return str(caught.value)


def test_fields_about_generated_code_are_accepted_and_named() -> None:
    args = TrainerArgs.from_dict({**IGNORED, "compute_config": IGNORED_COMPUTE, "max_epochs": 1})
    names = [*IGNORED, *(f"compute_config.{name}" for name in IGNORED_COMPUTE)]
    assert args.plan().splitlines()[-1] == f"ignored, because no code is generated here: {', '.join(names)}"
    assert args.compute_config.pas_config == {"a": 1} and TrainerArgs(gen_reuse="moo").gen_reuse == "moo"
    assert TrainerArgs.from_dict(args.to_dict()) == args


def test_the_core_knows_none_of_them() -> None:
    ours = " ".join(describe_fields())
    assert not [name for name in (*IGNORED, *IGNORED_COMPUTE, "use_end2end") if name in ours]


def test_a_field_without_effect_still_has_its_type() -> None:
    text = "compute_config.constant_folding: expected true or false, got 'much'."
    assert checked({"compute_config": {"constant_folding": "much"}}) == text


def test_steps_that_are_not_whole_are_refused() -> None:
    text = "compute_config.use_end2end is false, but nbtrain only trains whole steps."
    assert text in checked({"compute_config": {"use_end2end": False}})


@pytest.mark.parametrize(("theirs", "ours"), [("pt", "ckpt"), ("safetensors", "safetensor")])
def test_the_format_of_checkpoints_has_one_spelling(theirs: str, ours: str) -> None:
    args = TrainerArgs.from_dict({"checkpoint": {"format": theirs, "save_dir": "runs"}})
    assert args == TrainerArgs.from_dict({"checkpoint": {"save_format": ours, "save_dir": "runs"}})
    assert "format" not in args.to_dict()["checkpoint"] and args.checkpoint.save_format == ours


def test_the_other_spelling_is_accepted_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("checkpoint:\n  save_dir: runs\n")
    args = TrainerArgs.from_cli(["-f", str(tmp_path / "run.yaml"), "--checkpoint.format", "safetensors"])
    assert args.checkpoint.save_format == "safetensor"


SLIPS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({"format": "zip"}, "checkpoint.format: expected pt or safetensors, got 'zip'."),
    "no value": ({"format": None}, "checkpoint.format: expected pt or safetensors, got None."),
    "a list": ({"format": ["pt"]}, "checkpoint.format: expected pt or safetensors, got ['pt']."),
    "our value": ({"format": "ckpt"}, "checkpoint.format: expected pt or safetensors, got 'ckpt'."),
    "their value": ({"save_format": "safetensors"}, "checkpoint.save_format: expected ckpt or safetensor, got 'safetensors'."),
    "both": (
        {"format": "pt", "save_format": "ckpt"},
        "checkpoint.format and checkpoint.save_format are both given.\n  Leave one of them out.",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_a_spelling_is_named(slip: str) -> None:
    section, text = SLIPS[slip]
    assert checked({"checkpoint": section}) == text


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict", "plan", "resume", "sweep"])
def test_help_shows_our_fields_first_and_theirs_in_a_section(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    ours, _, theirs = capsys.readouterr().out.partition("\n\nfields:\n")[2].partition("\n\nfields of nnScaler, accepted too:\n")
    assert ours.splitlines() == describe_fields() and theirs.splitlines() == describe_accepted()
    shown = " ".join(theirs.split())
    assert all(f"--{name}" in shown for name in ("checkpoint.format", *IGNORED, *(f"compute_config.{name}" for name in IGNORED_COMPUTE)))


def test_every_field_is_in_one_of_the_two_sections() -> None:
    args, shown = TrainerArgs(), " ".join([*describe_fields(), *describe_accepted()])
    assert all(f"--{name}" in shown for name in shown_fields(TrainerArgs) if not is_dataclass(getattr(args, name)))
    assert shown_fields(TrainerArgs).keys() - shown_fields(Settings).keys() == IGNORED.keys()
