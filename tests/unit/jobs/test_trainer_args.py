"""A run from a configuration: the fields, the grammar of overrides, and the command line from start to exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import lightning as L
import pytest
import torch
from samples import SEED, make_trainer, same_weights, without_times
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler

from nbtrain import ConfigError, ModelTrainer, StateManagerAddon, TrainerArgs, compare, load_run
from nbtrain.checkpoint.files import read_checkpoint
from nbtrain.cli import main
from nbtrain.config.document import literal
from nbtrain.config.schema import Precision, Settings, describe_fields, shown_fields
from nbtrain.engine import precision
from nbtrain.examples.mlp import MLP, SimpleDataset
from nbtrain.rng import seed_all

ONE = ["-f", "seed.yaml", "--compute_config.plan_ngpus", "1", "--compute_config.runtime_ngpus", "1"]
QUIET = [*ONE, "--enable_progress_bar=false", "--seed", "0"]
SMALL = [*QUIET, "--model.args.nlayers=2"]
FAST = [*SMALL, "--checkpoint.no_save", "--dataset.train_args.size=16"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "seed.yaml").write_text(SEED)
    return tmp_path


def read(*overrides: str) -> TrainerArgs:
    return TrainerArgs.from_cli(["-f", "seed.yaml", *overrides])


# -- the seed's file
def test_the_seeds_file_runs_on_one_device(folder: Path) -> None:
    assert main(["fit", *QUIET]) == 0
    (run,) = (folder / "checkpoints").iterdir()
    saved = {path.stem.partition("-step=")[2] for path in (run / "checkpoints").glob("epoch=*-step=*")}
    assert saved == {str(step) for step in range(1, 11)}
    assert TrainerArgs.from_yaml(run / "config.yaml") == TrainerArgs.from_cli(QUIET)


def test_the_seeds_file_as_it_is_printed_exits_with_2_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "-f", "seed.yaml"]) == 2
    assert "compute_config.runtime_ngpus is 100, and this machine has" in capsys.readouterr().err


def test_its_limit_by_updates_is_kept() -> None:
    job = TrainerArgs.from_cli(FAST).build()
    job.run()
    assert (job.n_epoch, job.trainer.counts.step) == (4, 8)  # 16 samples are two updates an epoch
    limited = TrainerArgs.from_cli([*FAST, "--max_train_steps=5"]).build()
    limited.run()
    assert (limited.n_epoch, limited.trainer.counts.step) == (3, 5)


def test_a_run_equals_one_written_by_hand() -> None:
    job = TrainerArgs.from_cli([*FAST, "--global_batch_size!", "--max_train_steps!", "--max_epochs=2"]).build()
    job.run()
    seed_all(0)
    model, data = MLP(16, 2), SimpleDataset(16, 16)
    trainer = ModelTrainer(model, device="cpu", log_bar=False, optimizer=lambda params: Adam(params, lr=0.01), seed=0)
    trainer.run(2, DataLoader(data, 2, sampler=DistributedSampler(data, 1, 0)))
    assert same_weights(job.trainer.model, trainer.model)


def test_a_plan_refuses_what_a_run_refuses_and_says_that_bf16_is_mixed() -> None:
    for policy in ("banana", "fsdp"):
        with pytest.raises(ConfigError, match=f"pas_policy is '{policy}', which is unknown here"):
            TrainerArgs.from_cli([*FAST, f"--pas_policy={policy}"]).plan()
    assert "precision: bf16 is mixed precision; bf16-true is for weights too" in TrainerArgs.from_cli([*FAST, "--precision=bf16"]).plan()


def test_two_runs_differ_by_the_option_that_differs() -> None:
    for lr in ("0.1", "0.2"):
        assert main(["fit", *FAST, "--optimizer.args.lr", lr, "--checkpoint.save_dir", f"grid/{lr}", "--checkpoint.no_save=false"]) == 0
    rows = [line.split()[:2] for line in compare("grid/0.1", "grid/0.2").table().splitlines()]
    assert rows == [["run", "lr"], ["0.1/run-001", "0.1"], ["0.2/run-001", "0.2"]]


def test_how_a_split_model_is_saved_is_an_option_of_the_addon() -> None:
    assert TrainerArgs.from_cli(QUIET).build().trainer[StateManagerAddon].save_type == "deduped"
    assert TrainerArgs.from_cli([*QUIET, "--checkpoint.save_type!"]).build().trainer[StateManagerAddon].save_type == "sharded"


# -- going on
def test_a_finished_run_is_not_run_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *SMALL])
    (run,) = (folder / "checkpoints").iterdir()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    capsys.readouterr()
    assert main(["resume", str(run)]) == 0
    assert capsys.readouterr().out == f"1 epoch was there: nothing to train · checkpoints/{run.name}\n"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"} == before


@pytest.mark.parametrize("saving", [[], ["--checkpoint.every_n_train_steps!"]])
def test_a_run_at_its_limit_goes_on_under_a_higher_one(folder: Path, saving: list[str]) -> None:
    short, whole = [*SMALL, *saving, "--max_train_steps=5"], TrainerArgs.from_cli([*SMALL, *saving, "--max_train_steps=15"]).build()
    whole.trainer.save_path = "whole"
    whole.run()  # more than an epoch of 13 updates
    assert main(["fit", *short]) == 0
    run = folder / "checkpoints" / "run-001"
    assert main(["resume", "checkpoints", "--max_train_steps=15"]) == 0
    assert without_times(load_run(run).epochs) == without_times(whole.trainer.history.epochs)
    weights = read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"]
    assert all(torch.equal(weights[f"model.{name}"], value) for name, value in whole.trainer.model.state_dict().items())


STATEFUL = """
from torch.utils.data import DataLoader


class Numbered(DataLoader):
    \"\"\"Knows where it is, and says so when it is told.\"\"\"

    n_given = n_done = 0

    def __iter__(self):
        n_done, self.n_done = self.n_done, 0
        for self.n_given, batch in enumerate(super().__iter__(), start=1):
            if self.n_given > n_done:
                yield batch

    def state_dict(self):
        return {"n_given": self.n_given % len(self)}  # the end of a pass is the beginning of the next one

    def load_state_dict(self, state):
        print("went to", state["n_given"])
        self.n_done = state["n_given"]
"""


def test_a_stateful_loader_is_asked_where_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "numbered.py").write_text(STATEFUL)
    loader = ["--dataloader.type=numbered.Numbered"]
    whole = TrainerArgs.from_cli([*SMALL, *loader]).build()
    whole.trainer.save_path = "whole"
    whole.run()
    main(["fit", *SMALL, *loader, "--max_train_steps=5"])
    capsys.readouterr()
    assert main(["resume", "checkpoints/run-001", "--max_train_steps=10"]) == 0
    assert "went to 20\n" in capsys.readouterr().out
    assert without_times(load_run("checkpoints/run-001").epochs) == without_times(whole.trainer.history.epochs)


def test_resume_from_last_begins_afresh_where_nothing_was_saved() -> None:
    result = TrainerArgs.from_cli([*SMALL, "--checkpoint.resume_from", "last", "--max_train_steps=1"]).run()
    assert result is not None and result.status in ("completed", "stopped")


def test_resume_wants_a_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("nbtrain: No run was recorded in 'nowhere'.\n")


# -- the other commands
def test_validate_and_predict_take_the_best_weights(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *SMALL, "--max_train_steps=2"])
    capsys.readouterr()
    assert main(["validate", *SMALL]) == 0
    weights, loss = capsys.readouterr().out.splitlines()
    assert weights.startswith("weights: epoch=") and loss.startswith("loss: 0.")
    assert main(["predict", *SMALL, "-o", "out.pt"]) == 0
    assert [tuple(output.shape) for output in torch.load("out.pt")] == [(2,)] * 5


def test_predict_says_what_the_model_must_return(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bare.py").write_text(
        "from nbtrain.examples.mlp import MLP\n\n\nclass Bare(MLP):\n"
        "    def forward(self, batch):\n        return super().forward(batch)['loss']\n"
    )
    assert main(["predict", *FAST, "--model.type=bare.Bare", "-o", "out.pt"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "nbtrain: Bare returned a loss, and no output to predict with.",
        '  Let its forward return (loss, output), or a mapping with "loss" and "output".',
    ]


def test_of_several_processes_of_a_machine_the_first_one_tells_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, said in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["fit", *FAST, "--max_epoch=1"]) == 2
        assert ("There is no field max_epoch." in capsys.readouterr().err) is said


def test_weights_of_another_model_are_named_with_their_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *SMALL, "--max_train_steps=1"])
    capsys.readouterr()
    assert main(["validate", *SMALL, "--model.args.dim=8"]) == 1
    (state,) = (folder / "checkpoints" / "run-001" / "checkpoints").glob("epoch=0-step=1.ckpt")
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"  {state}",
        "  Use the configuration of that run, or --checkpoint.resume_from with another state.",
    ]


def test_a_file_without_f_is_told_how_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "seed.yaml"]) == 2
    assert main(["fit", "-f", "seed.yaml", "more"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "nbtrain: 'seed.yaml' is unexpected.",
        "  Give a configuration with -f: -f seed.yaml.",
        "nbtrain: 'more' is unexpected.",
        "  Give a notebook, or -f and a file.",
    ]


def test_the_state_at_max_train_steps_is_validated(folder: Path) -> None:
    main(["fit", *SMALL, "--checkpoint.every_n_train_steps!", "--max_train_steps=3"])
    assert "val_loss" in load_run("checkpoints/run-001").epochs[-1].metrics


@pytest.mark.long
@pytest.mark.parametrize("use_zero", [True, False])
def test_torchrun_starts_it_as_a_module(folder: Path, use_zero: bool) -> None:
    words = [
        *SMALL,
        "--compute_config.runtime_ngpus=2",
        f"--compute_config.use_zero={str(use_zero).lower()}",
        f"--checkpoint.save_type={'deduped' if use_zero else 'merged'}",
        "--max_train_steps=2",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "nbtrain"]
    subprocess.run([*torchrun, "fit", *words], check=True, timeout=600)
    (state,) = (folder / "checkpoints/run-001/checkpoints").glob("epoch=0-step=2*")
    assert len(list(state.glob("rank-*.safetensors"))) == (2 if use_zero else 0)
    said = subprocess.run([*torchrun, "validate", *words], check=True, timeout=600, stdout=subprocess.PIPE, text=True).stdout
    best = min(load_run("checkpoints/run-001").validations, key=lambda row: row["val_loss"])
    assert said.count(f"weights: epoch=0-step={best['step']}") == said.count("loss: ") == 1


def test_test_without_test_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *FAST]) == 2
    assert "There is no data for 'test': dataset.test_args is empty." in capsys.readouterr().err


def test_print_config_shows_all_fields_and_runs_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL, "--print-config"]) == 0
    (folder / "printed.yaml").write_text(capsys.readouterr().out)
    assert TrainerArgs.from_yaml("printed.yaml").to_dict() == TrainerArgs.from_cli(SMALL).to_dict()
    assert not (folder / "checkpoints").exists()


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  --checkpoint.save_type sharded|deduped|merged = 'sharded'" in lines
    assert set(describe_fields()) <= set(lines) and "  --compute_config.use_zero BOOL = false" in lines
    assert "  --precision fp32|fp16|bf16|16-mixed|bf16-mixed|16-true|bf16-true|none or DICT" in lines
    ignored = " ".join(lines)
    assert all(f"--{name}" in ignored for name in shown_fields(Settings) if not is_dataclass(getattr(Settings(), name)))


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict", "plan", "resume", "sweep", "export"])
def test_help_explains_each_option_of_its_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    for option in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*[^\] ]*(?: [A-Z][A-Z.,]*)?", usage):
        assert f"\n  {option} " in rest, option
    assert ("\nfields:\n" in rest) == (command != "export")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["nbtrain", "co"], ["completion", "compare"]),
        (["nbtrain", "fit", "--checkpoint.save_d"], ["--checkpoint.save_dir"]),
        (["nbtrain", "fit", "-f", "run"], []),  # files
        (["nbtrain", "show", "--seed"], []),
    ],
)
def test_completion_knows_commands_and_fields(typed: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion"])
    words = f"COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; _nbtrain; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", capsys.readouterr().out + words], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


def test_compile_mode_prints_the_plan_and_trains_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMALL, "--run_mode", "compile"]) == 0
    assert capsys.readouterr().out == (
        "ModelTrainer, nbtrain.examples.mlp.MLP, torch.optim.Adam\n"
        "1 device\n"
        "2 × 1 × 4 accumulated = 8 samples an update\n"
        "at most 4 epochs or 10 updates\n"
        "ignored, because no code is generated here: compute_config.constant_folding\n"
    )
    assert not (folder / "checkpoints").exists()


def quits(folder: Path, command: str, signum: int, *options: str) -> subprocess.CompletedProcess[str]:
    """`nbtrain` with a `command` whose run sends its process group `signum` in its tenth batch, as a terminal does."""
    (folder / "quits.py").write_text(
        "import os\n\n\ndef hook(signum):\n    import lightning as L\n\n    class Quit(L.Callback):\n"
        "        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):\n"
        "            if batch_idx == 9:\n                os.killpg(os.getpgrp(), signum)\n\n    return Quit()\n"
    )
    callback = ["--lightning.callbacks.0.__type", "quits.hook", "--lightning.callbacks.0.signum", str(int(signum))]
    program = [sys.executable, "-c", "import sys; from nbtrain.cli import main; sys.exit(main())", command, *SMALL, *callback, *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(program, env=environment, capture_output=True, text=True, start_new_session=True)


@pytest.mark.long
def test_ctrl_c_ends_the_runs_of_a_sweep_and_the_others_do_not_begin(folder: Path) -> None:
    done = quits(folder, "sweep", signal.SIGINT, "--seed", "1,2", "-o", "out")
    assert (done.returncode, done.stdout) == (130, "seed=1: interrupted\n"), done.stderr
    assert done.stderr == "nbtrain: the sweep was interrupted, and nbtrain resume DIR continues each of its runs\n"
    assert [path.name for path in (folder / "out").iterdir()] == ["seed=1"]


@pytest.mark.long
@pytest.mark.parametrize(("signum", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 143)])
def test_a_run_that_a_signal_ends_is_saved_and_goes_on_exactly(folder: Path, signum: int, code: int) -> None:
    done = quits(folder, "fit", signum)
    assert done.returncode == code, done.stderr
    if signum == signal.SIGINT:
        saved = "checkpoints/run-001/checkpoints/epoch=0-step=3.ckpt"  # of the open window's last batch
        assert done.stderr.splitlines()[-1] == f"nbtrain: stopped at epoch 1, batch 13 · state saved in {saved}"
        assert "Traceback" not in done.stderr
    (run,) = (folder / "checkpoints").iterdir()
    assert load_run(run).epochs == []
    assert main(["resume", str(run), "--lightning!"]) == 0
    whole = TrainerArgs.from_cli([*SMALL, "--checkpoint.save_dir=whole"]).build()
    whole.run()
    assert without_times(load_run(run).epochs) == without_times(whole.trainer.history.epochs)


def test_an_error_of_the_users_code_is_no_bad_configuration(folder: Path) -> None:
    (folder / "broken_data.py").write_text("def data(): raise OSError('no disk')\n")
    with pytest.raises(OSError, match="no disk") as caught:
        main(["fit", *FAST, "--dataset!", "--dataset.type", "broken_data.data"])
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["nbtrain: dataset.train_args, --dataset.type"]


# -- overrides
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--max_epochs", "2"], {"max_epochs": 2}),
        (["--max-epochs=2"], {"max_epochs": 2}),
        (["--seed", "1", "--seed", "2"], {"seed": 2}),
        (["--enable-progress-bar"], {"enable_progress_bar": True}),
        (["--enable_progress_bar", "FALSE"], {"enable_progress_bar": False}),
        (["--max_epochs!"], {"max_epochs": None}),
        (["--max_epochs", "None"], {"max_epochs": None}),
        (["--model.args!", "--model.args.dim=3"], {"model": {"type": "nbtrain.examples.mlp.MLP", "args": {"dim": "3"}}}),
        (["--optimizer.args.lr", "-1"], {"optimizer": {"type": "torch.optim.Adam", "args": {"lr": "-1"}}}),
        (["--log.0.type", "CSVLogger"], {"log": [{"type": "CSVLogger"}]}),
        (["--vars.x", "$(model.args.dim)"], {"vars": {"x": 16}}),
        (["--vars.x", "d${model.args.dim}"], {"vars": {"x": "d16"}}),
        (["--vars.x", "$$(model.args.dim)"], {"vars": {"x": "$$(model.args.dim)"}}),
        (["--vars.x", "$$y"], {"vars": {"x": "$$y"}}),
        (["--global_batch_size", "1e1"], {"global_batch_size": 10}),
        (["--vars.x=a=b"], {"vars": {"x": "a=b"}}),
        (["--vars", "{'x': 3}"], {"vars": {"x": 3}}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_overrides(overrides: list[str], expected: dict[str, Any]) -> None:
    found = {**Settings().__dict__, **read(*overrides).to_dict()}
    plain = TrainerArgs.from_dict({name: found[name] for name in expected}).to_dict()
    assert plain == TrainerArgs.from_dict(expected).to_dict()


def test_a_literal_reference_survives_the_round_trip() -> None:
    args = read("--vars.x", "$$(model.args.dim)")
    assert args.vars == {"x": "$(model.args.dim)"}
    assert TrainerArgs.from_dict(args.to_dict()) == args


def test_a_reference_follows_an_override() -> None:
    args = read("--dataset.train_args.dim", "$(model.args.dim)", "--model.args.dim", "32")
    assert args.dataset.train_args["dim"] == "32"


def test_a_reference_falls_back_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBTRAIN_TEST_DATA", "/data")
    assert read("--vars.root", "${NBTRAIN_TEST_DATA}/train").vars == {"root": "/data/train"}


def test_later_files_win_and_delete(folder: Path) -> None:
    (folder / "more.yaml").write_text("model:\n  args!: {dim: 3}\nmax_train_steps!:\n")
    args = TrainerArgs.from_yaml("seed.yaml", "more.yaml")
    assert (args.model.args, args.max_train_steps, args.max_epochs) == ({"dim": 3}, None, 4)


NUMBERS = {
    "compute_config.plan_ngpus": 1,
    "compute_config.runtime_ngpus": 1,
    "compute_config.zero_ngroups": 1,
    "checkpoint.every_n_train_steps": None,
    "checkpoint.every_n_epochs": None,
    "checkpoint.keep_last_n_checkpoints": None,
    "micro_batch_size": 1,
    "global_batch_size": None,
    "grad_accumulation_steps": None,
    "max_epochs": None,
    "max_train_steps": None,
    "max_val_steps": None,
    "val_every_n_train_steps": None,
    "val_every_n_epochs": 1,
    "seed": None,
}


@pytest.mark.parametrize(("name", "default"), NUMBERS.items())
def test_a_number_has_its_default_and_its_smallest_value(name: str, default: int | None) -> None:
    def given(value: int) -> dict[str, Any]:
        section, _, field = name.rpartition(".")
        return {section: {field: value}} if section else {field: value}

    least, read_back = 0 if name == "seed" else 1, attrgetter(name)
    assert read_back(Settings()) == default
    assert read_back(TrainerArgs.from_dict(given(least))) == least
    with pytest.raises(ConfigError, match=f"^{name}: expected {least} or more, got {least - 1}"):
        TrainerArgs.from_dict(given(least - 1))


# -- parts
def test_values_are_guessed_unless_a_type_is_given(folder: Path) -> None:
    (folder / "parts.py").write_text("seen = {}\ndef data(**given):\n    seen.update(given)\n    raise KeyError\n")
    given = ["--a=1e-4", "--b=[1,2]", "--c=true", "--d=adam", "--e.__value_type=str", "--e.value=1", "--f.__value_type=function"]
    given += ["--f.value=math.sqrt", "--g.__type=fractions.Fraction", "--g.numerator=3", "--h=$!(self)"]
    given += ["--i.__value_type=textwrap.dedent", "--i.value=  text", "--j=$!(vars.one)", "--k=$!(vars.one)"]
    overrides = [f"--dataset.train_args.{text[2:]}" for text in given]
    one = ["--vars.one.__type=fractions.Fraction", "--vars.one.numerator=1"]
    args = TrainerArgs.from_cli([*FAST, "--dataset!", "--dataset.type=parts.data", *one, *overrides])
    with pytest.raises(KeyError):
        args.run()
    import math
    from fractions import Fraction

    import parts  # pyright: ignore[reportMissingImports]

    expected = {"a": 1e-4, "b": [1, 2], "c": True, "d": "adam", "e": "1", "f": math.sqrt, "g": Fraction(3), "h": args}
    assert parts.seen == expected | {"i": "text", "j": Fraction(1), "k": Fraction(1)}
    assert parts.seen["j"] is parts.seen["k"]


def test_schedules_step_by_update_or_by_epoch() -> None:
    by_step = ["--lr_scheduler.type=torch.optim.lr_scheduler.StepLR", "--lr_scheduler.args.step_size=1", "--lr_scheduler.args.gamma=0.5"]
    for interval, lr in (("step", 0.01 / 2**4), ("epoch", 0.01 / 2**2)):
        job = TrainerArgs.from_cli([*FAST, "--max_epochs=2", *by_step, f"--lr_scheduler.interval={interval}"]).build()
        job.run()
        assert job.trainer.optimizer is not None and job.trainer.optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_a_trainer_of_ones_own_and_addons_have_their_options(folder: Path) -> None:
    (folder / "own.py").write_text(
        "from nbtrain import Trainer\n\n\nclass Own(Trainer):\n"
        "    def train_step(self, batch):\n        return {'loss': self.model(batch)['loss'] * 2}\n"
    )
    own = ["--trainer.type=own.Own", "--trainer.args.monitor=train_loss", "--addons.0.type=PrefetchAddon"]
    job = TrainerArgs.from_cli([*FAST, *own]).build()
    job.valid_loader = None
    job.run()
    assert (job.trainer.title, job.trainer.monitor) == ("Own", "train_loss")


def test_clipping_reaches_the_trainer() -> None:
    assert TrainerArgs.from_cli([*FAST, "--optimizer.clip_gnorm=0.5"]).build().trainer.given["gradient_clip"] == 0.5


@pytest.mark.parametrize("name", [*get_args(Precision), "{'param': 'bf16', 'buffer': 'bf16', 'input': 'bf16'}"])
def test_a_precision_in_a_file_means_what_it_means_in_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_why_not", lambda name, device: "")  # fp16 on the CPU
    found = TrainerArgs.from_cli([*FAST, "--precision", name]).build().trainer.precision
    given = None if name == "none" else literal(name)
    in_python = make_trainer(precision=given).precision
    assert (found.dtypes if isinstance(given, dict) else found) == (in_python.dtypes if isinstance(given, dict) else in_python)


def test_parameters_buffers_and_inputs_have_dtypes_of_their_own() -> None:
    job = TrainerArgs.from_cli([*FAST, "--precision", "{'param': 'bf16', 'input': 'bf16'}", "--max_train_steps=1"]).build()
    job.trainer.model.register_buffer("mean", torch.zeros(3))
    job.run()
    assert {p.dtype for p in job.trainer.model.parameters()} == {torch.bfloat16} and job.trainer.model.mean.dtype == torch.float32


COUNTS = """\
from nbtrain import AggregatedOutputs


def count(outputs, group):
    return AggregatedOutputs(sum(output["loss"] for output in outputs), len(outputs), num_tokens=16 * len(outputs))
"""


@pytest.mark.parametrize(("reduction", "divisor"), [("mean", 4), ("sum", 1), ("per-token-mean", 64)])
def test_the_gradient_of_an_update_is_reduced_as_it_is_said(reduction: str, divisor: int, folder: Path) -> None:
    (folder / "tokens.py").write_text(COUNTS)
    how = ["--optimizer!", "--optimizer.type=torch.optim.SGD", "--optimizer.args.lr=1.0", f"--optimizer.grad_reduction={reduction}"]
    how += ["--optimizer.loss_reduction=sum", "--max_train_steps=1"]
    how += ["--optimizer.aggregate_outputs_fn=tokens.count"] if reduction == "per-token-mean" else []
    job = TrainerArgs.from_cli([*FAST, *how, "--dataset.train_args.size=8"]).build()
    seed_all(0)
    model, data = MLP(16, 2), SimpleDataset(16, 8)
    losses = [model({"data": data.data[i : i + 2], "target": (data.data[i : i + 2].sum(1) > 0).float()})["loss"] for i in range(0, 8, 2)]
    expected = [p - g for p, g in zip(model.parameters(), torch.autograd.grad(sum(losses) / divisor, list(model.parameters())))]
    job.run()
    for found, wanted in zip(job.trainer.model.parameters(), expected):
        torch.testing.assert_close(found, wanted)
    assert job.trainer.history.epochs[0]["train_window_loss"] == pytest.approx(float(sum(losses).detach()), rel=1e-5)  # pyright: ignore


def test_the_short_window_at_the_end_of_an_epoch_is_no_smaller_update() -> None:
    sgd = ["--optimizer!", "--optimizer.type=torch.optim.SGD", "--optimizer.args.lr=1.0", "--max_epochs=1", "--dataset.train_args.size=2"]
    one = TrainerArgs.from_cli([*FAST, *sgd, "--global_batch_size=8"]).build()
    other = TrainerArgs.from_cli([*FAST, *sgd, "--global_batch_size=2"]).build()
    one.run(), other.run()
    assert same_weights(one.trainer.model, other.trainer.model)


def test_validation_has_at_most_so_many_steps() -> None:
    job = TrainerArgs.from_cli([*FAST, "--max_val_steps=1", "--max_train_steps=2"]).build()
    job.run()
    assert len(job.trainer.history.steps["valid"]["val_loss"]) == 4  # of 5 batches as many as an update has


class Validations(L.Callback):
    """After which updates there was a validation."""

    def __init__(self) -> None:
        self.updates: list[int] = []

    def on_validation_end(self, pl_trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not pl_trainer.sanity_checking:
            self.updates.append(pl_trainer.global_step)


@pytest.mark.parametrize(
    ("epochs", "updates"), [("1", [2, 4, 5, 6, 8, 10]), ("2", [2, 4, 6, 8, 10]), ("null", [2, 4, 6, 8, 10]), (None, [2, 4, 5, 6, 8, 10])]
)
def test_validations_by_steps_and_by_epochs_are_nnscalers(epochs: str | None, updates: list[int]) -> None:
    """Five updates an epoch; as in nnScaler, the default is to validate after each epoch."""
    given = [f"--val_every_n_epochs={epochs}"] if epochs is not None else []
    lengths = ["--dataset.train_args.size=40", "--max_train_steps=10", "--max_epochs=2", "--val_every_n_train_steps=2"]
    job, seen = TrainerArgs.from_cli([*FAST, *lengths, *given]).build(), Validations()
    job.trainer.lightning["callbacks"].append(seen)
    job.run()
    assert seen.updates == updates


def test_without_a_sampler_the_loader_shuffles() -> None:
    given = ["--dataset_sampler.type=null", "--dataloader.train_args.shuffle=true", "--dataloader.val_args.shuffle=false"]
    job = TrainerArgs.from_cli([*FAST, *given]).build()
    samplers = [type(loader.sampler).__name__ for loader in (job.loader, job.valid_loader)]  # pyright: ignore[reportAttributeAccessIssue]
    assert samplers == ["RandomSampler", "SequentialSampler"]


def test_automatic_arguments_are_ignored_and_that_is_said() -> None:
    job = TrainerArgs.from_cli([*FAST, "--dataset_sampler.train_args.rank=7", "--dataset_sampler.train_args.seed=3"]).build()
    assert job.notes[1] == "ignored, because it is given automatically: dataset_sampler.train_args.rank"
    assert (job.loader.sampler.rank, job.loader.sampler.seed) == (0, 3)  # pyright: ignore[reportAttributeAccessIssue]


def test_objects_of_python_are_written_by_their_names() -> None:
    args = TrainerArgs.from_dict({"model": {"type": MLP, "args": {"dim": 2}}})
    assert args.to_yaml() == "model:\n  type: nbtrain.examples.mlp.MLP\n  args:\n    dim: 2\n"
    with pytest.raises(ConfigError, match="can't be imported by name"):
        TrainerArgs.from_dict({"model": {"type": lambda: MLP(2, 1)}}).to_yaml()


def test_the_run_folder_says_why_it_has_no_configuration() -> None:
    args = TrainerArgs.from_cli([*SMALL, "--dataset.train_args.size=16", "--max_epochs=1"]).to_dict()
    args["model"] |= {"type": lambda dim, nlayers: MLP(dim, nlayers)}
    job = TrainerArgs.from_dict(args).build()
    job.run()
    assert job.trainer.run_dir is not None
    first, *rest = (job.trainer.run_dir / "config.yaml").read_text().splitlines()
    assert "can't be imported by name" in first and rest and all(line.startswith("# ") for line in (first, *rest))


def test_a_word_of_the_command_line_that_stands_alone_is_named() -> None:
    with pytest.raises(ConfigError, match="^'seed.yaml' is unexpected"):
        TrainerArgs.from_cli(["seed.yaml"])


# -- hooks
HOOKS = """\
from nbtrain import TrainHook


class Count(TrainHook):
    def __init__(self, start):
        self.n = start

    def after_optimizer_step(self, trainer):
        self.n += 1


def clipped(trainer, gnorm):
    trainer.norm = float(gnorm)


def wants_more(trainer, gnorm, idx): ...
"""


def test_hook_is_a_class_with_its_arguments(folder: Path) -> None:
    (folder / "counting.py").write_text(HOOKS)
    job = TrainerArgs.from_cli([*FAST, "--hook.type=counting.Count", "--hook.args.start=10"]).build()
    job.run()
    assert job.trainer.given["hooks"].n == 10 + job.trainer.counts.step > 10


def test_hook_is_functions_by_the_names_of_their_moments(folder: Path) -> None:
    (folder / "clipping.py").write_text(HOOKS)
    plain = TrainerArgs.from_cli([*FAST, "--optimizer.clip_gnorm=1.0"]).to_dict()
    args = TrainerArgs.from_dict(plain | {"hook": {"after_gnorm_clip": "clipping.clipped", "after_setup": None}})
    job = args.build()
    job.run()
    assert job.trainer.norm > 0 and TrainerArgs.from_dict(args.to_dict()) == args


def test_slips_in_hook_are_named_together(folder: Path) -> None:
    (folder / "slips.py").write_text(HOOKS)
    names = {"after_gnrom_clip": "slips.clipped", "after_gnorm_clip": "slips.wants_more", "on_epoch_end": "slips.nothing"}
    with pytest.raises(ConfigError) as caught:
        TrainerArgs.from_cli([*FAST, *(f"--hook.{name}={function}" for name, function in names.items())]).build()
    text = str(caught.value)
    assert "There is no hook 'after_gnrom_clip'." in text and "Did you mean 'after_gnorm_clip'?" in text
    assert "The hook after_gnorm_clip (wants_more) has unknown arguments: 'idx'." in text and "slips has no 'nothing'" in text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--pas_policy=tp", "--compute_config.plan_ngpus=2"], "pas_policy is 'tp', and nothing says how layers are split."),
        (
            ["--compute_config.use_zero=true", "--compute_config.zero_ngroups=3"],
            "zero_ngroups is 3, and must be a divisor of runtime_ngpus 4",
        ),
    ],
)
def test_what_can_not_be_spread_over_the_devices_is_told(given: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.jobs.validate.n_cores", lambda: 4)
    with pytest.raises(ConfigError, match=re.escape(text)):
        TrainerArgs.from_cli([*FAST, "--trainer.args.device=cpu", "--compute_config.runtime_ngpus=4", *given]).build()
