"""What earlier versions of nbtrain have saved is loaded bit for bit, and a run goes on from it as if nothing had happened.

`fixtures/saved_before` was written by the nbtrain of before its modules became packages, `fixtures/saved_with_history` by that of before a
state had its place in a journal instead of its history; `fixtures/make_saved.py` says how. Only public names are used here, as in the code
of those who have such files.
"""

from __future__ import annotations

import csv
import json
import math
import os
import runpy
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import saved_kinds as kinds
import torch
from samples import some

from nbtrain import Trainer, TrainerArgs, load_run

SAVED = Path(__file__).parent.parent / "fixtures" / "saved_before"
LATER = SAVED.with_name("saved_with_history")
OTHERS = ("weights", "lightning_checkpoint", "job", "config_with_names_of_modules")
RUN = Path("saves") / "run-001"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore")
    return tmp_path


def take(name: str, root: Path = SAVED) -> dict[str, Any]:
    """Copy a fixture into the working folder, its files older the smaller their names are: git keeps no times. Returns what is expected."""
    shutil.copytree(root / name, ".", symlinks=True, dirs_exist_ok=True)
    for n, path in enumerate(sorted(path for path in Path().rglob("*") if not path.is_symlink())):
        os.utime(path, (1e9 + n, 1e9 + n))
    expected = Path("expected.json")
    return json.loads(expected.read_text()) if expected.exists() else {}


def differences(found: Any, expected: Any, tolerance: float = 0.0, where: str = "") -> list[str]:
    """Where `found` is not as expected. It may have more than is expected: what later versions add.

    The steps of the rows that are expected count batches, validations included, which is their `processed` now.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        expected = {"processed" if name == "step" and "epoch" in expected else name: value for name, value in expected.items()}
        inner = [differences(found.get(name, "nothing"), value, tolerance, f"{where}.{name}") for name, value in expected.items()]
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        inner = [differences(a, b, tolerance, f"{where}[{i}]") for i, (a, b) in enumerate(zip(found, expected))]
    else:
        is_number = isinstance(found, (int, float)) and isinstance(expected, (int, float))
        alike = found == pytest.approx(expected, rel=tolerance, abs=tolerance) if is_number else found == expected
        alike = alike or (where.endswith(".train_loss") and expected == math.inf)  # of a pass in which an update was skipped
        return [] if alike else [f"{where}: {found!r}, not {expected!r}"]
    return [text for texts in inner for text in texts]


def saved(name: str, root: Path = Path()) -> Path:
    """The checkpoint of a kind."""
    return next((root / RUN / "checkpoints").glob(f"{kinds.KINDS[name].keep[-1]}*"))


def test_each_saved_kind_is_tested_and_no_file_of_it_is_ignored_by_git() -> None:
    assert {path.name for path in SAVED.iterdir()} == {*kinds.KINDS, *OTHERS} and {path.name for path in LATER.iterdir()} == {*kinds.KINDS}
    ignored = (SAVED.parent.parent.parent / ".gitignore").read_text().split()
    parts = {part for root in (SAVED, LATER) for path in root.rglob("*") for part in path.relative_to(root).parts}
    assert not any(Path(part).match(pattern.rstrip("/")) for part in parts for pattern in ignored)


@pytest.mark.parametrize("root", [SAVED, LATER], ids=lambda root: root.name)
@pytest.mark.parametrize("name", kinds.KINDS)
def test_state_is_loaded_bit_for_bit(name: str, root: Path) -> None:
    expected = take(name, root)["loaded"]
    kinds.seed(3)
    trainer = kinds.KINDS[name].make(Path("saves"))
    trainer.load_state(saved(name))
    assert differences(kinds.loaded(trainer), expected) == []


@pytest.mark.parametrize("resume", [*some(["auto", "path", "last", "best"], 2), "auto, saved later"])
@pytest.mark.parametrize("name", some(kinds.KINDS, 2))
def test_run_goes_on_and_ends_as_the_one_that_was_not_broken_off(name: str, resume: str) -> None:
    resume, _, is_later = resume.partition(",")
    kind, expected = kinds.KINDS[name], take(name, LATER if is_later else SAVED)["finished"]
    kinds.seed(3)
    trainer = kind.make(Path("saves"))
    kind.run(trainer, resume=saved(name) if resume == "path" else resume)
    assert differences(kinds.finished(trainer), expected, kind.tolerance) == []
    assert trainer.run_dir == RUN.resolve() or trainer.run_dir == RUN


@pytest.mark.parametrize("name", some(kinds.KINDS, 2))
def test_run_from_its_beginning_does_what_it_did_and_saves_under_the_same_names(name: str) -> None:
    kind, expected = kinds.KINDS[name], take(name)["finished"]
    kinds.seed(1)
    trainer = kind.make(Path("again"))
    kind.run(trainer)
    assert differences(kinds.finished(trainer), expected, kind.tolerance) == []
    old, new = (names(contents(path), depth=3) for path in (saved(name), next(Path("again").rglob(saved(name).name))))
    without_adapter = {name for name in old if "HFCallback[" not in name}  # callbacks of transformers had an adapter
    assert without_adapter - new == {"/nbtrain/counts/update"}  # `step` now


def contents(path: Path) -> dict[str, Any]:
    """What is in a checkpoint of either format."""
    file = Trainer.merge_checkpoint(path, path.with_name("whole.pt")) if path.is_dir() else path
    return torch.load(file, weights_only=True)


def names(value: Any, depth: int, where: str = "") -> set[str]:
    if not isinstance(value, dict) or depth == 0:
        return {where}
    return {where}.union(*(names(item, depth - 1, f"{where}/{name}") for name, item in value.items()))


@pytest.mark.parametrize("resume", ["best", "last"])
@pytest.mark.parametrize("name", ["ckpt_at_epoch_end", "safetensor_at_epoch_end"])
def test_link_may_be_a_copy(name: str, resume: str) -> None:
    kind, expected = kinds.KINDS[name], take(name)["finished"]
    for link in [path for path in (RUN / "checkpoints").iterdir() if path.is_symlink()]:
        target = link.resolve()
        link.unlink()
        shutil.copytree(target, link) if target.is_dir() else shutil.copy2(target, link)
    kinds.seed(3)
    trainer = kind.make(Path("saves"))
    kind.run(trainer, resume=resume)
    assert differences(kinds.finished(trainer), expected, kind.tolerance) == []


@pytest.mark.parametrize("name", kinds.KINDS)
def test_weights_are_taken_out_of_a_state(name: str) -> None:
    expected = take(name)["loaded"]
    trainer = kinds.KINDS[name].make(Path("others"))
    prefixed = kinds.plain(contents(saved(name))["state_dict"])
    kind = type(trainer)
    options = {"optimizers": {}} if name == "two_optimizers" else {}
    other = kind.load_from_checkpoint(saved(name), model=trainer.model, device="cpu", save_path="others", **options)
    assert {f"model.{name}": value for name, value in kinds.plain(other.model.state_dict()).items()} == prefixed
    if name not in ("all_addons", "safetensor_at_epoch_end"):  # in these the averages stand for the weights
        assert kinds.plain(other.model.state_dict()) == expected["weights"]


# -- the rest of a run folder
def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """What `python -m nbtrain` returns."""
    monkeypatch.setattr(sys, "argv", ["nbtrain", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("nbtrain", run_name="__main__")
    return int(ended.value.code or 0)


def test_recorded_run_is_read_and_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    expected = take("ckpt_at_epoch_end")["finished"]
    history = load_run("saves")
    assert differences(kinds.without_times(history.epochs), expected["epochs"]) == []
    assert history.steps["train"]["train_loss"] == expected["losses"][0] and history.steps["valid"]["val_loss"] == expected["losses"][1]
    assert [row["step"] for row in history.epochs] == [4, 8, 12] and list(history.steps["train"].steps) == list(range(1, 13))
    old, new = (
        list(csv.DictReader(text.splitlines())) for text in ((RUN / "history.csv").read_text(), history.to_csv("again.csv").read_text())
    )
    assert [row | {"step": ["6", "12", "18"][i]} for i, row in enumerate(new)] == old and len(old) == 3  # it counted batches
    assert command(monkeypatch, "show", RUN) == 0
    shown = capsys.readouterr().out
    words = ("make_saved.py", "ReduceLROnPlateau", "Source (source/steps.py)", "def train_step(self, batch: Any)")
    assert [text for text in words if text not in shown] == []
    assert command(monkeypatch, "diff", RUN, RUN) == 0 and "Nothing else differs." in capsys.readouterr().out
    assert command(monkeypatch, "compare", RUN, RUN, "--output", "compared.html") == 0


def test_job_goes_on_from_its_run_folder_and_its_configuration_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = take("job")["finished"]
    assert command(monkeypatch, "resume", RUN, "--max_train_steps=12") == 0
    assert command(monkeypatch, "fit", "-f", "job.yaml", "--checkpoint.save_dir=others") == 0
    for folder in ("saves", "others"):
        weights = torch.load(Path(folder) / "run-001" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        assert kinds.plain(weights) == expected


def test_configuration_that_names_modules_of_nbtrain_is_built_and_trains() -> None:
    take("config_with_names_of_modules")
    job = TrainerArgs.from_yaml("config.yaml").build()
    job.run()
    assert job.trainer.result.status == "completed" and len(job.trainer.history) == 1


# -- weights alone
def test_files_of_weights_are_applied() -> None:
    expected = take("weights")
    files = {"model.pt": "last", "model.safetensors": "last", "run-001/last.safetensors": "last", "run-001/best.safetensors": "best"}
    for file, which in files.items():
        trainer = kinds.Fit(torch.nn.Linear(4, 2), "cpu", mode="test")
        trainer.apply_weights(Path("saves") / file)
        assert kinds.plain(trainer.model.state_dict()) == expected[which]


def test_checkpoint_of_a_lightning_trainer_is_loaded_by_both() -> None:
    expected, path = take("lightning_checkpoint"), Path("saves") / "plain.ckpt"
    loaded = kinds.Plain.load_from_checkpoint(path, model=torch.nn.Linear(4, 2), device="cpu")
    assert kinds.plain(loaded.model.state_dict()) == expected["loaded"]
    model = torch.nn.Linear(4, 2)
    ours = kinds.Plain(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=kinds.LR, momentum=0.5), log_bar=False)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    theirs = L.Trainer(max_epochs=3, accelerator="cpu", **options)
    theirs.fit(ours.as_lightning_module(), kinds.batches(shuffle=False), kinds.valid(), ckpt_path=path)
    assert kinds.plain(model.state_dict()) == expected["finished"]
