"""Views: strings compared whole, with a clock that is a number. One contract holds for all of them."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from typing import Any

import pytest
from drawn import Drawing
from views_of_runs import HEADER, row, run_events

from nbtrain.events import Event, Progress
from nbtrain.views import html, text
from nbtrain.views.notebook import open_view
from nbtrain.views.terminal import LogView, TerminalView


def board_after(events: list[Event]) -> text.Board:
    board = text.Board()
    for event in events:
        board.update(event)
    return board


# -- the board
def test_rates_leave_out_validation_and_time_left_counts_it() -> None:
    board = board_after(run_events()[:5])  # the second epoch's training is done
    assert board.speed.rate() == 4.0 and board.speed.rate("valid") == 4.0 and board.speed.samples_per_s == 128.0
    assert board.left_s == pytest.approx(0.5 + 1.5)  # this validation, and a whole epoch


def test_time_left_is_unknown_before_five_batches() -> None:
    assert board_after(run_events()[:2]).left_s is None


def test_time_left_is_unknown_without_a_length() -> None:
    events = run_events()
    events[0] = Event("start", events[0].progress, 0.0, HEADER | {"n_train_batches": None})
    assert board_after(events[:5]).left_s is None


def test_curve_is_bounded() -> None:
    board = board_after(run_events()[:1])
    block = {"values": {"train_loss": [0.5]}, "n": 1, "samples": 32, "lr": 1e-3}
    for step in range(1, 5000):
        board.update(Event("steps", Progress(phase="train", batch=step, step=step, elapsed_s=step), 0.0, block))
    assert 200 <= len(board.curve.points) <= 400 and board.curve.last_step == 4999


@pytest.mark.parametrize(("n_events", "end_step"), [(1, 18), (2, 18), (3, 18), (4, 18), (5, 18), (10, 18), (11, 18)])
def test_planned_end_of_a_run_is_known_from_its_start(n_events: int, end_step: int) -> None:
    board = board_after([replace(event, progress=replace(event.progress, step=event.progress.step or 6 * event.progress.epoch))
                         for event in run_events()[:n_events]])  # fmt: skip
    assert board.end_step == end_step


def test_end_of_a_run_is_unknown_without_a_length_and_is_where_it_has_ended() -> None:
    events = run_events()
    events[0] = Event("start", events[0].progress, 0.0, HEADER | {"n_train_batches": None})
    assert board_after(events[:5]).end_step is None and board_after(events).end_step == 18


def test_validations_of_the_monitored_loss_are_on_the_curve() -> None:
    events = run_events()
    assert board_after(events).curve.validations == [(6, 0.5), (12, 0.4), (18, 0.45)]
    valid = Event("valid", events[1].progress, 0.0, {"row": {"epoch": 1, "step": 4, "val_nll_loss": 0.7, "val_loss": 0.1}})
    events[0] = Event("start", events[0].progress, 0.0, HEADER | {"monitor": "val_nll_loss"})
    assert board_after([events[0], events[1], valid]).curve.validations == [(4, 0.7)]


def test_best_of_an_earlier_run_leaves_the_star_with_it() -> None:
    events = run_events()
    events[0] = Event("start", events[0].progress, 0.0, HEADER | {"best": row(9, 0.1, 0.1)})
    board = board_after(events)
    assert board.best["epoch"] == 9 and "★" not in text.table_text(board.rows, board.best)


# -- text
def test_record_as_text() -> None:
    assert text.record_text(board_after(run_events())) == (
        "Digits · SmallCNN · 12.3k params · cpu · run 1\n"
        "epoch  train_loss  val_loss     lr  time\n"
        "    1         0.5       0.5  0.001  1.5s\n"
        "    2         0.5       0.4  0.001  1.5s ★\n"
        "    3         0.5      0.45  0.001  1.5s\n"
        "✓ completed · 3 epochs · 00:04 · best val_loss 0.4 at epoch 2"
    )


def test_progress_line() -> None:
    board = board_after(run_events()[:5])
    assert text.progress_line(board) == "epoch 2/3 · 4/4 · 00:02 < 00:02 · 4 it/s · 128 samples/s · loss 0.5"


@pytest.mark.parametrize(
    ("value", "shown"), [(950, "950"), (999.9, "1k"), (2690, "2.69k"), (1.2e6, "1.2M"), (3.1e9, "3.1G"), (0.5, "0.5"), (12345, "12.3k")]
)
def test_counts(value: float, shown: str) -> None:
    assert text.format_count(value) == shown


def test_columns_stand_in_reading_order() -> None:
    rows = [{"time_s": 1.0, "lr": 0.1, "own": 1.0, "val_loss": 1.0, "train_loss": 1.0, "step": 3, "epoch": 1, "test_loss": 0.0}]
    assert text.column_names(rows) == ["epoch", "train_loss", "val_loss", "test_loss", "own", "lr", "time_s"]


# -- html
def test_nan_is_marked_by_a_sign_and_not_by_colour_alone() -> None:
    assert "⚠ NaN" in html.table_html([row(1, math.nan, 0.5)])


def test_table_is_accessible() -> None:
    table = html.table_html([row(1, 0.5, 0.5)])
    assert "<caption" in table and table.count('scope="col"') == 5 and table.count('scope="row"') == 1


def test_record_html_of_a_long_run_stays_small() -> None:
    board = board_after(run_events(tuple(1 / (i + 1) for i in range(200))))
    record = html.record_html(board)
    assert len(record) < 50_000 and record.count('scope="row"') == 25 and record.count("data:image/svg+xml") == 1


def svg_of(record: str) -> Drawing:
    return Drawing(b64decode(record.split("data:image/svg+xml;base64,")[1].split('"')[0]).decode())


def test_record_shows_steps_while_it_runs_and_where_it_had_few_epochs_and_then_panels() -> None:
    few, many = run_events(), run_events((0.5, 0.4, 0.3, 0.35, 0.36))
    titles = [svg_of(html.record_html(board_after(events))).words("strong title") for events in (few, many[:-1], many)]
    assert titles == [[], [], ["loss"]]
    assert "step" in svg_of(html.record_html(board_after(few))).words()


def test_record_of_a_run_without_training_loss_has_panels() -> None:
    events = [event for event in run_events() if event.kind != "steps"]
    assert svg_of(html.record_html(board_after(events))).words("strong title") == ["loss"]


def test_other_metrics_change_few_lines_of_a_record() -> None:
    one, other = (html.record_html(board_after(run_events((0.5, loss)))).splitlines() for loss in (0.4, 0.3))
    assert len(one) == len(other) and sum(a != b for a, b in zip(one, other)) <= 4
    assert html.record_html(board_after(run_events())) == html.record_html(board_after(run_events()))


def test_failure_keeps_the_table_and_names_the_place() -> None:
    board = board_after(run_events(status="failed", reason="ValueError at epoch 4, batch 2: <bad>"))
    record = html.record_html(board)
    assert "✗ failed · ValueError at epoch 4, batch 2: &lt;bad&gt;" in record and record.count('scope="row"') == 3


def test_figure_leaves_pyplot_alone() -> None:
    code = "import sys; from nbtrain.views import plots; plots.png(plots.curves([{'epoch': 1, 'train_loss': 0.5}])); "
    code += "print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# -- one contract for all views
VIEWS = {"terminal": lambda: TerminalView(io.StringIO()), "log": lambda: LogView(io.StringIO())}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("status", ["completed", "stopped", "interrupted", "failed"])
def test_every_view_takes_every_event_and_tells_how_the_run_ended(make: Any, status: str) -> None:
    view = make()
    events = run_events(status=status)
    events.insert(1, Event("note", events[0].progress, 0.0, {"text": "the model was in eval mode"}))
    events.insert(-1, Event("test", events[-1].progress, 4.5, {"row": {"step": 18, "test_loss": 0.3, "time_s": 0.1}}))
    for event in events:
        view.update(event)
    shown = view.stream.getvalue()
    assert status in shown and "note: the model was in eval mode" in shown and "test_loss" in shown


def test_view_of_a_pipe_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert isinstance(open_view(), LogView)


def test_view_of_a_terminal_in_ci_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_view(), TerminalView)
    monkeypatch.setenv("CI", "true")
    assert isinstance(open_view(), LogView)
