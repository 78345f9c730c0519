"""Monitors, loggers and views never end a run, and never merge what the history keeps apart: drawn models, names and values.

`NBTRAIN_FAULT_CASES` says how many are drawn. Each tracker is read back: it has each series of the history once, with its own values.
Left out: services, which need an account.
"""

from __future__ import annotations

import csv
import io
import math
import os
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from drawn_logs import N_EPOCHS, SPECIAL_EPOCH, Case, drawn, make_drawn, run_drawn
from tracker_files import SERIES, Series

from nbtrain import load_run
from nbtrain.engine.meter import as_float, snapshot
from nbtrain.events import OWN_COLUMNS, Event
from nbtrain.history.history import History
from nbtrain.history.run_folder import read_events
from nbtrain.views import html, text
from nbtrain.views.marimo import MarimoView
from nbtrain.views.terminal import LogView, TerminalView

N_CASES = int(os.environ.get("NBTRAIN_FAULT_CASES", "3"))
ENDS = [3 * epoch for epoch in range(1, N_EPOCHS + 1)]  # the newest update at the end of each epoch
Known = dict[int, str]  # the values of a series by step, in four digits


pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key of the user's is used."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)


def shown(value: float) -> str:
    return f"{value + 0.0:.4g}"  # 0 for -0


def same(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)


def as_text(name: str) -> str:
    """A name as UTF-8 can hold it."""
    return name.encode(errors="backslashreplace").decode()


def trackers_of(seed: int) -> list[str]:
    """TensorBoard always, and one of the slower ones in turn."""
    return ["csv", "tensorboard", ("trackio", "mlflow", "wandb", "neptune")[seed % 4]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's, of SQLAlchemy
@pytest.mark.parametrize("seed", range(N_CASES))
def test_a_drawn_run_completes_and_its_history_trackers_and_views_keep_its_metrics_apart(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, trackers = drawn(seed), trackers_of(seed)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=case.encoding))
    if not case.has_picture:
        monkeypatch.setattr(History, "plot", lambda self: None)
        monkeypatch.setattr("nbtrain.views.plots.png", lambda figure: b"")
    trainer = make_drawn(case, tmp_path / f"runs-{seed}", trackers)  # trackio has one database for a process
    assert run_drawn(trainer).status == "completed"
    events = list(read_events(trainer.run_dir))
    notes = [event.data["text"] for event in events if event.kind == "note"]
    check_history(case, trainer.history)
    check_files(trainer.history, trainer.run_dir)
    check_views(trainer.history, events)
    for tracker in trackers[1:]:  # the columns of a training log are fixed
        said = [note for note in notes if tracker in note or note.startswith("Callbacks and loggers")]
        check_tracker(expected(case, trainer.history), SERIES[tracker](trainer.run_dir), said)


def check_history(case: Case, history: History) -> None:
    """Each drawn metric has a column with its own values."""
    assert len(history.epochs) == N_EPOCHS
    for epoch, row in enumerate(history.epochs):
        for name in case.steps:
            for column, first in ((f"train_{name}", 1.0), (f"val_{name}", 5.0)):
                assert shown(row[column]) == shown(as_float(snapshot(case.number(name, first, epoch)))), (column, epoch)
                table = history.steps["train" if first == 1.0 else "valid"]
                assert shown(table[column][3 * epoch if first == 1.0 else 2 * epoch]) == shown(row[column])
        for i, name in enumerate(case.whole):
            assert (row[f"train_{name}"], row[f"val_{name}"]) == (1000.0 + 10 * i + epoch, 1005.0 + 10 * i + epoch)
        for i, name in enumerate(case.logged):
            if name not in OWN_COLUMNS:
                assert row[name] == 2000.0 + 10 * i + epoch


def check_files(history: History, folder: Path) -> None:
    """The record in the run folder has what the history has, and so has its table."""
    read = load_run(folder)
    assert [list(row) for row in read.epochs] == [list(row) for row in history.epochs]
    assert all(same(a[name], b[name]) for a, b in zip(read.epochs, history.epochs) for name in a)
    for phase, table in history.steps.items():
        assert read.steps[phase].columns.keys() == table.columns.keys()
        assert all(same(a, b) for name in table.columns for a, b in zip(read.steps[phase][name], table[name]))
    with open(folder / "history.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row, written in zip(history.epochs, rows, strict=True):
        assert {as_text(name): str(value) for name, value in row.items() if name != "processed"} == {
            name: value for name, value in written.items() if value
        }
    assert ElementTree.parse(folder / "curves.svg").getroot().tag.endswith("svg")


class Page(HTMLParser):
    """The texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_views(history: History, events: list[Event]) -> None:
    """The tables have a column for each metric, and each view shows the run to its end."""
    row = history.epochs[-1]
    head = text.table_text(history.epochs).split("\n")[0]
    left = Counter(text.titles(text.column_names(history.epochs)))
    assert all(head.count(title) >= n for title, n in left.items()) and len(left) >= len(row) - 3  # "\\x1b" is also how "\x1b" is shown
    board, pages, stream = text.Board(), list[str](), io.StringIO()
    views = [TerminalView(io.StringIO(), 60), TerminalView(io.StringIO(), 200, 0.0, colour=True), LogView(stream, 0.0)]
    for event in events:
        board.update(event)
        for view in (*views, MarimoView(pages.append, io.StringIO(), 0.0)):
            view.update(event)
        assert Page(html.record_html(board)).texts and text.record_text(board)
    assert "✓ completed" in stream.getvalue() and pages
    for name in row:
        if name not in ("step", "processed"):
            assert text.titles([name])[0] in stream.getvalue()


def expected(case: Case, history: History) -> list[Known]:
    """The series that a tracker must have: of each metric its values at the ends of epochs, and the means of its points."""
    names = [name for name in history.epochs[0] if name.startswith(("train_", "val_"))]
    names += [f"{name}_epoch" if i % 2 else name for i, name in enumerate(case.logged) if i % 2 or name not in OWN_COLUMNS]
    found = [dict(zip(ENDS, (row[name] for row in history.epochs))) for name in names]
    every = case.every
    table, ends = history.steps["train"], sorted({*range(every, 10, every), *ENDS})
    for name in table.columns:
        values = {last: table[name][first:last] for first, last in zip([0, *ends], ends)}
        known = {step: [v for v in found if not math.isnan(v)] if name != "train_loss" else found for step, found in values.items()}
        found.append({step: sum(values) / len(values) for step, values in known.items() if values})
    return [{step: shown(value) for step, value in series.items()} for series in found]


def ordinary(series: Known) -> tuple[tuple[int, str], ...]:
    """The part of a series that has no special values."""
    return tuple(sorted((step, value) for step, value in series.items() if (step - 1) // 3 != SPECIAL_EPOCH))


def check_tracker(wanted: list[Known], found: Series, said: list[str]) -> None:
    """A tracker has each series once; values that it can't hold are said."""
    twice = [name for name, points in found.items() if len({step for step, _ in points}) < len(points)]
    assert set(twice) <= {"epoch"}  # Lightning logs it with each entry
    has = [{step: shown(float(value)) for step, value in points} for points in found.values()]
    lacks = Counter(map(ordinary, wanted)) - Counter(map(ordinary, has))
    assert not lacks, (lacks, sorted(found))
    values = Counter((step, value) for series in wanted for step, value in series.items())
    lost = values - Counter((step, value) for series in has for step, value in series.items())
    assert not lost or said, lost
