"""Files of nnScaler: fields without effect are named, other spellings translated, and the help shows both after nbtrain's fields."""

from __future__ import annotations

import re
from collections import UserDict, UserList
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from nbtrain import ConfigError, TrainerArgs
from nbtrain.cli import main
from nbtrain.compat.config_fields import describe_accepted
from nbtrain.config.compute_plan import device_batches, plan_compute
from nbtrain.config.document import Problems
from nbtrain.config.schema import Settings, describe_fields, shown_fields

IGNORED = {"gen_savedir": "./gen", "gen_reuse": "moo", "broadcast_strategy": "none", "instance_name": "a", "tracing_from_weights": "w.pt"}
IGNORED |= {"dummy_sample_gen_fn": "a.make"}
IGNORED_COMPUTE = {
    "constant_folding": True,
    "trace_strategy": "cpu",
    "inference_only": True,
    "use_async_reducer": True,
    "reducer_bucket_cap_mb": 25.0,
    "max_bucket_size_bytes": 1000,
    "zero_use_reduce_scatter": True,
    "pas_config": {"a": 1},
    "user_config": {"b": 2},
}


def checked(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        TrainerArgs.from_dict(data).check()
    return str(caught.value)


def test_fields_about_generated_code_are_accepted_and_named() -> None:
    debug = {"check_gradient_sync_cross_devices": False}
    args = TrainerArgs.from_dict({**IGNORED, "compute_config": IGNORED_COMPUTE, "debug": debug, "max_epochs": 1})
    names = [*IGNORED, *(f"compute_config.{name}" for name in IGNORED_COMPUTE), "debug.check_gradient_sync_cross_devices"]
    assert args.plan().splitlines()[-1] == f"ignored, because no code is generated here: {', '.join(names)}"
    assert args.compute_config.pas_config == {"a": 1} and TrainerArgs(gen_reuse="moo").gen_reuse == "moo"
    assert TrainerArgs.from_dict(args.to_dict()) == args


def test_fields_of_newer_versions_within_a_section_are_named_too() -> None:
    data = {
        "checkpoint": {"serializer": "torch", "slow_fs": True, "resume_from": {"checkpoint": "last", "with_merged": True}},
        "log": {"async_logging": True, "logs": [{"type": "CSVLogger", "args": {"save_dir": "logs"}}]},
        "precision": {"param": "bf16", "grad": "none"},
        "max_epochs": 1,
    }
    args = TrainerArgs.from_dict(data)
    names = "checkpoint.serializer, checkpoint.slow_fs, checkpoint.resume_from.with_merged, log.async_logging, precision.grad"
    assert args.plan().splitlines()[-1] == f"ignored, because no code is generated here: {names}"
    assert args.checkpoint.resume_from == "last" and args.log[0].type == "CSVLogger" and args.precision == {"param": "bf16"}


def test_a_function_that_converts_is_read_and_an_unknown_field_of_a_resume_is_refused() -> None:
    saving = TrainerArgs.from_dict({"checkpoint": {"resume_from": {"checkpoint": "a.pt", "convert_fn": "a.b"}}, "max_epochs": 1}).checkpoint
    assert (saving.resume_from, saving.convert_fn) == ("a.pt", "a.b")
    text = checked({"checkpoint": {"resume_from": {"chekpoint": "last"}}})
    assert text == "There is no field checkpoint.resume_from.chekpoint.\n  Give checkpoint: last."


@pytest.mark.parametrize("name", ["TensorBoardLogger", "nnscaler.cli.loggers.tensorboard.TensorBoardLogger"])
def test_their_block_of_a_logger_is_that_of_lightnings(name: str) -> None:
    args = TrainerArgs.from_dict({"log": [{"type": name, "args": {"name": "a", "root_dir": "runs"}}], "max_epochs": 1})
    assert args.log[0].type == "TensorBoardLogger" and args.log[0].args == {"name": "a", "save_dir": "runs"}


def test_number_of_devices_is_that_of_the_processes_where_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    read = lambda data: TrainerArgs.from_dict(data).compute_config.runtime_ngpus  # noqa: E731
    assert [read({}), read({"compute_config": {"plan_ngpus": 2}}), read({"compute_config": {"runtime_ngpus": 2}})] == [4, 4, 2]


def test_a_sample_for_each_device_that_shares_a_copy() -> None:
    args = TrainerArgs.from_dict({"compute_config": {"plan_ngpus": 2, "runtime_ngpus": 2}, "max_epochs": 1, "precision": "bf16"})
    assert device_batches(args, plan_compute(args, 2, Problems()), problems := Problems()) == (1, 1) and not problems.found
    assert args.plan().splitlines()[-2:] == [
        "2 devices share a copy of the model, and each needs a sample: an update has 2 per copy",
        "precision: bf16 is mixed precision; bf16-true is for weights too, as in nnScaler",
    ]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_is_said_for_a_file_of_any_kind(precision: str) -> None:
    plan = TrainerArgs.from_dict({"max_epochs": 1, "precision": precision}).plan()
    assert plan.endswith(f"precision: {precision} is mixed precision; {precision}-true is for weights too, as in nnScaler")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pas_policy": "banana"}, "pas_policy is 'banana', which is unknown here."),
        ({"pas_policy": "fsdp"}, "pas_policy is 'fsdp', which is unknown here."),
        ({"compute_config": {"runtime_ngpus": 3, "plan_ngpus": 2}}, "compute_config.runtime_ngpus is 3, and must be a multiple of"),
        ({"micro_batch_size": 4, "global_batch_size": 10}, "micro_batch_size 4 × 1 copy of the model = 4, and global_batch_size 10"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(given: dict[str, Any], text: str) -> None:
    args = TrainerArgs.from_dict({"max_epochs": 1, **given})
    for reads in (args.plan, args.check):
        with pytest.raises(ConfigError, match=re.escape(text)):
            reads()


class Mapped(UserDict[str, Any]):
    """A mapping that is not a dict, as OmegaConf's are."""


def test_any_mapping_is_a_configuration() -> None:
    plain = {"max_epochs": 2, "log": [{"type": "CSVLogger", "args": {"save_dir": "a"}}]}
    given = Mapped({**plain, "log": UserList([Mapped(plain["log"][0])])})  # type: ignore[index]
    assert TrainerArgs.from_dict(given) == TrainerArgs.from_dict(plain)


def test_a_mapping_in_the_place_of_a_number_is_told_the_type() -> None:
    assert checked({"max_epochs": {0: 8}}) == "max_epochs: expected a whole number, got {0: 8}."


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
    assert shown_fields(TrainerArgs).keys() - shown_fields(Settings).keys() == IGNORED.keys() | {
        "debug",
        "log_progress_every_n_train_steps",
    }
