"""Whatever is a link in a stranger's run folder, a run that continues there writes nothing outside of the folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import ConfigError, LoggersAddon, MetricsAddon, StateManagerAddon
from nbtrain.history.run_files import kept_id
from nbtrain.history.run_folder import read_events
from nbtrain.jobs.trainer_args import _KeepConfig
from nbtrain.loggers.addon import source_files

Kept = Regress.add_on(StateManagerAddon, LoggersAddon, MetricsAddon)


def build(save_path: Path) -> Any:
    keeper = _KeepConfig()
    keeper.text = "max_epochs: 1\n"
    trainer = make_trainer(Kept, save_path=save_path, loggers=["csv", "tensorboard"], lightning={"callbacks": [keeper]})
    keeper.trainer = trainer
    return trainer


def run(trainer: Any, n_epoch: int, **given: Any) -> None:
    trainer.run(n_epoch, make_loader(20), make_valid(10), **given)
    trainer.save_metrics("train")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders with every file that a run writes."""
    root = tmp_path_factory.mktemp("whole") / "runs"
    trainer = build(root)
    run(trainer, 1)
    (trainer.run_dir / "checkpoints" / "superseded").touch()
    return root


def names_in(root: Path) -> list[str]:
    """The files and folders of the run, but for the checkpoint that it continues from."""
    folder = root / "run-001"
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return [name for name in names if "epoch=" not in name and ".tfevents" not in name]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def link_out(path: Path, outside: Path, *, is_there: bool) -> None:
    """Replace a file or a folder by a link to what was in it; if it should not be there, the link leads nowhere yet."""
    target = outside / path.name
    if is_there and not path.is_symlink():
        path.rename(target)
    else:
        path.unlink() if not path.is_dir() or path.is_symlink() else shutil.rmtree(path)
    path.symlink_to(target)


WRITTEN = {"config.yaml", "curves.svg", "history.csv", "provenance.json", "source/steps.py", "train_results.json", ".writer"}
WRITTEN |= {"checkpoints/history.jsonl", "checkpoints/superseded", "checkpoints/last.ckpt", "checkpoints/best.ckpt"}
REFUSED = {".lock", "events.jsonl", "training_log.csv", "tensorboard", "tensorboard/hparams.yaml"}  # appended to, or another library's


@pytest.mark.long
@pytest.mark.parametrize("is_there", [True, pytest.param(False, marks=pytest.mark.long)], ids=["to a file", "to nowhere"])
def test_no_link_in_a_run_folder_is_followed_by_what_a_run_writes(whole: Path, tmp_path: Path, is_there: bool) -> None:
    assert {*names_in(whole)} - {"git.diff"} == WRITTEN | REFUSED | {"checkpoints", "source"}
    for linked in (*([name] for name in (*sorted(REFUSED), "checkpoints", "source")), sorted(WRITTEN)):
        there = tmp_path / linked[-1].replace("/", "+")
        shutil.copytree(whole, there / "runs", symlinks=True)
        (there / "outside").mkdir()
        for name in linked:
            link_out(there / "runs" / "run-001" / name, there / "outside", is_there=is_there)
        before = contents(there / "outside")
        trainer = build(there / "runs")
        checkpoint = next((there / "runs" / "run-001").glob("checkpoints/epoch=*"), "auto")
        try:
            trainer.run(2, make_loader(20), make_valid(10), resume=checkpoint)
            trainer.save_metrics("train")
        except ConfigError as error:
            assert linked[0] in REFUSED and str(error).startswith(linked[0])
            assert "is not written: it is a link that leads out of the run folder" in str(error)
        else:
            assert linked[0] not in REFUSED
            notes = [event.data["text"] for event in read_events(trainer.run_dir) if event.kind == "note"]
            assert linked[0] == "checkpoints" or any("The source of this run was not kept" in text for text in notes)
        assert contents(there / "outside") == before, linked


def test_a_link_is_neither_sent_to_a_service_nor_taken_for_its_id(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "runs", symlinks=True)
    folder = tmp_path / "runs" / "run-001"
    (tmp_path / "mine.py").write_text("mine")
    (folder / "source" / "other.py").symlink_to(tmp_path / "mine.py")
    (folder / "tracker-id").symlink_to(tmp_path / "mine.py")
    trainer = build(tmp_path / "runs")
    trainer.origin.open(folder)
    assert "source/steps.py" in source_files(trainer) and "source/other.py" not in source_files(trainer)
    with pytest.raises(ConfigError, match="tracker-id is not read"):
        kept_id(folder, "tracker-id", "new")
    assert kept_id(folder, "other-id", "new") == kept_id(folder, "other-id", "newer") == "new"
