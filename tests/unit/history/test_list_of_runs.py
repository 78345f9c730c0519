"""The runs of this session and of a folder: what is listed, noted, deleted and written to a page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid

import nbtrain
from nbtrain import StateManagerAddon
from nbtrain.cli import main
from nbtrain.errors import ConfigError
from nbtrain.history.differences import differences, kept
from nbtrain.history.run_folder import read_events
from nbtrain.library.compare import compare
from nbtrain.library.recorded_run import show
from nbtrain.library.runs import Runs, runs


def sgd(lr: float) -> Any:
    return lambda params: torch.optim.SGD(params, lr=lr)


def train(folder: Path | None, lr: float = 0.1, n_epoch: int = 2, kind: type[Any] = Regress) -> Any:
    trainer = make_trainer(kind, optimizer=sgd(lr), save_path=folder)
    trainer.run(n_epoch, make_loader(), make_valid())
    return trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    for lr in (0.1, 0.01):
        train(path, lr)
    return path


def test_a_folder_of_runs_is_listed_with_what_differs(folder: Path) -> None:
    found = nbtrain.runs(folder)
    assert [run.name for run in found] == ["run-001", "run-002"] and [run.settings["lr"] for run in found] == ["0.1", "0.01"]
    assert found.best is min(found, key=lambda run: run.best["val_loss"]) and found[0].status == "completed"
    assert repr(found).splitlines()[0].split()[:3] == ["run", "lr", "val_loss"]
    assert found[0].history.epochs == nbtrain.load_run(folder / "run-001").epochs


def test_the_list_is_a_frame_and_a_sequence(folder: Path) -> None:
    found = runs(folder)
    assert list(found.df["lr"]) == [0.1, 0.01] and list(found.df["val_loss"]) == [run.best["val_loss"] for run in found]
    assert isinstance(found[1:], Runs) and len(found[1:]) == 1


def test_runs_are_selected_by_what_the_frame_says_and_by_their_places(folder: Path) -> None:
    found = runs(folder)
    assert found[found.df.lr < 0.05].entries == found[[1]].entries == found[np.array([1])].entries == [found[1]]
    assert found[[run.status == "completed" for run in found]].entries == found.entries and len(found[[]]) == 0
    with pytest.raises(ConfigError, match="1 truth values select from 2 runs"):
        found[[True]]
    with pytest.raises(ConfigError, match="not selected by str"):
        found[found.df.run]
    with pytest.raises(ConfigError, match="not selected by str"):
        found["run-001"]  # pyright: ignore[reportArgumentType]
    for choose in (lambda: found[2], lambda: found[[0, -3]]):
        with pytest.raises(IndexError, match="There is no run -?[23]: there are 2, from 0 to 1."):
            choose()


def test_a_run_that_goes_on_in_its_folder_is_one_of_the_session(tmp_path: Path) -> None:
    class Continued(Regress):
        pass

    trainer = train(tmp_path / "runs", kind=Continued)
    trainer.run(1, make_loader(), make_valid())
    train(None, kind=Continued)
    listed = lambda: [run for run in nbtrain.runs() if run.card.board.header["title"] == "Continued"]  # noqa: E731
    entry, other = listed()
    assert entry.folder == trainer.run_dir and [row["epoch"] for row in entry.card.board.epochs] == [1, 2, 3]
    assert entry.best["val_loss"] == trainer.history.best["val_loss"]
    entry.delete()
    assert [run.name for run in listed()] == [other.name] == ["Continued 3"]


def test_a_run_is_called_by_its_folder_in_the_list_its_lines_and_its_record(folder: Path) -> None:
    found = runs(folder)
    names = ["run-001", "run-002"]
    assert [line.split()[0] for line in repr(found).splitlines()[1:]] == names == list(found.df.run)
    assert re.findall(r'aria-label="(?:best · )?run (run-\d+), lr', found._repr_html_()) == names
    assert re.findall(r" · (run-\d+) · lr ", found._repr_html_()) == names, "the record of a line"
    assert re.search(r" · run-002( · |\n)", show(folder / "run-002")) and repr(found[1]).splitlines()[1].startswith("run-002")


def test_runs_of_two_folders_have_the_folders_before_their_names(tmp_path: Path) -> None:
    class Twice(Regress):
        pass

    for name in "ab":
        train(tmp_path / name, kind=Twice)
    assert [run.name for run in nbtrain.runs()][-2:] == ["a/run-001", "b/run-001"]


def test_time_epochs_and_best_are_those_of_the_whole_run(tmp_path: Path) -> None:
    trainer = train(tmp_path, n_epoch=4)
    for n_epoch in (6, 2):
        trainer.run(n_epoch, make_loader(), make_valid())
    ends = [event.progress.elapsed_s for event in read_events(trainer.run_dir) if event.kind == "end"]
    trainer.evaluate(make_valid())
    (found,) = runs(tmp_path)
    assert len(ends) == 3 and found.card.board.total_s == pytest.approx(sum(ends), rel=1e-2) == runs(tmp_path).df["time_s"][0]
    assert found.settings["n_epoch"] == "12" and found.best == trainer.history.best
    train(tmp_path, n_epoch=4)
    assert [line.split()[:2] for line in compare(*(tmp_path / f"run-00{i}" for i in (1, 2))).table().splitlines()] == [
        ["run", "n_epoch"], ["run-001", "12"], ["run-002", "4"],
    ]  # fmt: skip


def test_runs_of_this_session_need_no_folder_and_an_evaluation_is_a_column() -> None:
    class Session(Regress):
        pass

    trainers = [train(None, lr, kind=Session) for lr in (0.1, 0.01)]
    trainers[0].evaluate(make_valid())
    found = trainers[0].runs
    assert [run.settings["lr"] for run in found] == ["0.1", "0.01"]
    assert found[0].card.tests["test_loss"] == trainers[0].history.tests[-1]["test_loss"]
    assert [run.best["val_loss"] for run in found] == [trainer.history.best["val_loss"] for trainer in trainers]
    assert [run.name for run in nbtrain.runs()][-2:] == ["Session 1", "Session 2"]
    with pytest.raises(ConfigError, match="no run folder"):
        found[0].history


def test_what_was_set_by_hand_is_what_differs(tmp_path: Path) -> None:
    trainer = train(tmp_path / "a", 0.1, 1, kind=Regress.add_on(StateManagerAddon))
    branch = trainer.branch("best")
    for other, options in ((branch, {"lr": 0.01, "momentum": 0.5}), (trainer, {"lr": 0.3})):
        other.set(**options)
        other.run(1, make_loader(), make_valid())
    assert {run.settings["lr"] for run in runs(tmp_path / "a")} == {"0.01", "0.3"}  # none of them the one that made the optimizer
    again = make_trainer(optimizer=sgd(0.1), save_path=tmp_path / "b")
    again.set(momentum=0.9)
    again.run(1, make_loader(), make_valid())
    plain = train(tmp_path / "b", 0.1, 1)
    assert differences(kept(plain.run_dir), kept(again.run_dir)) == ["momentum none → 0.9"]


def test_a_trainer_lists_its_save_path(folder: Path) -> None:
    trainer = make_trainer(Regress, save_path=folder)
    assert [run.name for run in trainer.runs] == ["run-001", "run-002"]


def test_a_note_and_tags_are_kept_in_the_run_folder(folder: Path) -> None:
    run = runs(folder)[0]
    run.note, run.tags = "too slow", ("base", "v1")
    again = runs(folder)[0]
    assert (again.note, again.tags) == ("too slow", ("base", "v1")) and "base too slow" in repr(again).replace("v1 ", "")
    run.note, run.tags = "", ()
    with pytest.raises(ConfigError, match="note must be a text"):
        run.note = 3  # type: ignore[assignment]


def test_deleting_a_run_removes_its_folder_and_no_other(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "runs"))
    runs(copy)[0].delete()
    assert [path.name for path in copy.iterdir()] == ["run-002"]
    (copy / "run-003").symlink_to(copy / "run-002")
    with pytest.raises(ConfigError, match="not a run folder"):
        runs(copy / "run-003")[0].delete()


def test_points_of_a_sweep_are_listed_by_their_folders(folder: Path, tmp_path: Path) -> None:
    for name, number in (("lr=0.1", "001"), ("lr=0.01", "002")):
        shutil.copytree(folder / f"run-{number}", tmp_path / name / "run-001")
    assert [run.name for run in runs(tmp_path)] == ["lr=0.01", "lr=0.1"]


def test_the_page_needs_no_other_host_and_equal_runs_give_equal_pages(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder), "--output", str(tmp_path / "a.html")]) == 0
    runs(folder).save(tmp_path / "b.html")
    page = (tmp_path / "a.html").read_text()
    assert page == (tmp_path / "b.html").read_text() and "<script" not in page
    assert "what differs from run-001" in page and "0.1 → 0.01" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert str(tmp_path / "a.html") in capsys.readouterr().out


@pytest.mark.parametrize("path", ["missing", "empty"])
def test_a_folder_without_a_run_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="No run was recorded"):
        runs(tmp_path / path)
    with pytest.raises(ConfigError, match="can't be written"):
        Runs([]).save(tmp_path / "missing" / "a.html")
