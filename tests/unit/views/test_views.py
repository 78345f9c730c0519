"""Views: strings compared whole, with a clock that is a number. One contract holds for all of them."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from typing import Any

import pytest

from nbtrain.events import Event, Progress
from nbtrain.views import html, plots, text
from nbtrain.views.notebook import open_view

HEADER = {
    "title": "Digits", "model": "SmallCNN", "n_params": 12_345, "device": "cpu", "precision": None,
    "monitor": "val_loss", "monitor_mode": "min", "best": None, "n_train_batches": 4, "n_valid_batches": 2,
}  # fmt: skip


def row(epoch: int, loss: float, val_loss: float) -> dict[str, Any]:
    return {"epoch": epoch, "step": 6 * epoch, "train_loss": loss, "val_loss": val_loss, "lr": 1e-3, "time_s": 1.5}


def run_events(val_losses: tuple[float, ...] = (0.5, 0.4, 0.45), status: str = "completed", reason: str = "") -> list[Event]:
    """A run of four training and two validation batches an epoch, 1.5 s each epoch."""
    n, events = len(val_losses), [Event("start", Progress(n_epochs=len(val_losses)), 0.0, HEADER)]
    for epoch, val_loss in enumerate(val_losses):
        at = {"epoch": epoch, "n_epochs": n}
        s = 1.5 * epoch
        train = {"values": {"train_loss": [0.5] * 4}, "n": 4, "samples": 128, "lr": 1e-3}
        valid = {"values": {"val_loss": [val_loss] * 2}, "n": 2, "samples": 64, "lr": 1e-3}
        events += [
            Event("steps", Progress(phase="train", batch=4, n_batches=4, step=6 * epoch + 4, elapsed_s=s + 1, **at), s + 1, train),
            Event("steps", Progress(phase="valid", batch=2, n_batches=2, step=6 * epoch + 6, elapsed_s=s + 1.5, **at), s + 1.5, valid),
            Event("epoch", Progress(epoch=epoch + 1, n_epochs=n, elapsed_s=s + 1.5), s + 1.5, {"row": row(epoch + 1, 0.5, val_loss)}),
        ]
    end = Progress(epoch=n, n_epochs=n, elapsed_s=1.5 * n)
    return [*events, Event("end", end, 1.5 * n, {"status": status, "reason": reason})]


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


def test_time_left_is_known_from_the_second_batch_on() -> None:
    start, block = run_events()[0], {"values": {"train_loss": [0.5]}, "n": 1, "samples": 32, "lr": 1e-3}
    steps = [
        Event("steps", Progress(phase="train", n_epochs=3, batch=n, n_batches=4, step=n, elapsed_s=n), float(n), block) for n in (1, 2)
    ]
    assert board_after([start, steps[0]]).left_s is None
    assert board_after([start, *steps]).left_s == 3 * (4 + 2) - 2  # a validation batch is taken for one of training until there is one


def test_clock_goes_on_in_a_long_step_and_time_left_goes_down() -> None:
    board = board_after(run_events()[:2])
    before = board.elapsed_s, board.left_s
    board.place.waited_s = 0.25
    assert (board.elapsed_s, board.left_s) == (before[0] + 0.25, before[1] - 0.25)
    board.update(run_events()[2])
    assert board.place.waited_s == 0.0


def test_epoch_bar_never_goes_back() -> None:
    board, seen = text.Board(), []
    for event in run_events():
        board.update(event)
        seen.append(board.progress.epoch + board.place.epoch_part)
    assert seen == [0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]


def test_time_left_is_unknown_without_a_length() -> None:
    events = run_events()
    events[0] = Event("start", events[0].progress, 0.0, HEADER | {"n_train_batches": None})
    assert board_after(events[:5]).left_s is None


def test_curve_is_bounded() -> None:
    board = board_after(run_events()[:1])
    block = {"values": {"train_loss": [0.5]}, "n": 1, "samples": 32, "lr": 1e-3}
    for step in range(1, 5000):
        board.update(Event("steps", Progress(phase="train", batch=step, step=step, elapsed_s=step), 0.0, block))
    assert 200 <= len(board.curve) <= 401 and html.curve_svg(board.curve).split('points="')[1].split('"')[0].count(",") <= 201


def test_best_of_an_earlier_run_leaves_the_star_with_it() -> None:
    events = run_events()
    events[0] = Event("start", events[0].progress, 0.0, HEADER | {"best": row(9, 0.1, 0.1)})
    board = board_after(events)
    assert board.best["epoch"] == 9 and "★" not in text.table_text(board.rows, board.best)


# -- text
def test_record_as_text() -> None:
    assert text.record_text(board_after(run_events())) == (
        "Digits · SmallCNN · 12.3k params · cpu · run 1 · lr 0.001\n"
        "epoch  train_loss  val_loss  time\n"
        "    1         0.5      0.50  1.5s\n"
        "    2         0.5      0.40  1.5s ★\n"
        "    3         0.5      0.45  1.5s\n"
        "✓ completed · 3 epochs · 00:04 · best val_loss 0.4 at epoch 2"
    )


def test_progress_line() -> None:
    board = board_after(run_events()[:5])
    assert text.progress_line(board) == "epoch 2/3 · 4/4 · 00:02 < 00:02 · 4 it/s · 128 samples/s · loss 0.5"


def test_terminal_rewrites_one_line_and_adds_a_row_an_epoch() -> None:
    view = text.TerminalView(io.StringIO(), width=60)
    for event in run_events((0.5,)):
        view.update(event)
    assert view.stream.getvalue() == (
        "\rDigits · SmallCNN · 12.3k params · cpu · run 1\x1b[K\n"
        "\repoch 1/1 · 4/4 · 00:01 < 00:00 · 4 it/s · 128 samples/s · \x1b[K"
        "\repoch 1/1 · valid 2/2 · 00:01 < 00:00 · 4 it/s · 128 sample\x1b[K"
        "\r epoch  train_loss   val_loss         lr       time\x1b[K\n"
        "\r     1         0.5        0.5      0.001       1.5s ★\x1b[K\n"
        "\r✓ completed · 1 epoch · 00:01 · best val_loss 0.5 at epoch 1\x1b[K\n"
    )


def test_terminal_is_rewritten_five_times_a_second_at_most() -> None:
    view = text.TerminalView(io.StringIO())
    for i in range(1000):
        block = {"values": {"train_loss": [0.5]}, "n": 1, "samples": 1, "lr": 0.1}
        view.update(Event("steps", Progress(phase="train", step=i, elapsed_s=i / 100), i / 100, block))
    assert view.stream.getvalue().count("\r") <= 50


def test_log_has_a_line_an_epoch_and_one_a_minute() -> None:
    view = text.LogView(io.StringIO(), every_s=1.2)
    for event in run_events((0.5, 0.4)):
        view.update(event)
    assert view.stream.getvalue() == (
        "Digits · SmallCNN · 12.3k params · cpu · run 1\n"
        "epoch 1/2 · valid 2/2 · 00:01 < 00:01 · 4 it/s · 128 samples/s · loss 0.5\n"
        "epoch 1/2 · train_loss 0.5 · val_loss 0.5 · lr 0.001 · time 1.5s ★\n"
        "epoch 2/2 · valid 2/2 · 00:03 < 00:00 · 4 it/s · 128 samples/s · loss 0.5\n"
        "epoch 2/2 · train_loss 0.5 · val_loss 0.4 · lr 0.001 · time 1.5s ★\n"
        "✓ completed · 2 epochs · 00:03 · best val_loss 0.4 at epoch 2\n"
    )


@pytest.mark.parametrize(
    ("value", "shown"), [(950, "950"), (999.9, "1k"), (2690, "2.69k"), (1.2e6, "1.2M"), (3.1e9, "3.1G"), (0.5, "0.5"), (12345, "12.3k")]
)
def test_counts(value: float, shown: str) -> None:
    assert text.format_count(value) == shown


def test_columns_stand_in_reading_order() -> None:
    rows = [{"time_s": 1.0, "lr": 0.1, "own": 1.0, "val_loss": 1.0, "train_loss": 1.0, "step": 3, "epoch": 1, "test_loss": 0.0}]
    assert text.column_names(rows) == ["epoch", "train_loss", "val_loss", "test_loss", "own", "lr", "time_s"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.5, 0.4, 0.45], ["0.50", "0.40", "0.45"]),
        ([2.3, 0.0012], ["2.3000", "0.0012"]),
        ([1e-3, 1e-5], ["0.00100", "0.00001"]),
        ([1.0, 2.0], ["1", "2"]),
        ([1e-8, 0.5], ["1.00e-08", "5.00e-01"]),
        ([math.nan, math.inf, 0.25], ["nan", "inf", "0.25"]),
    ],
)
def test_values_of_a_column_have_the_same_decimals(values: list[float], shown: list[str]) -> None:
    assert [f"{value:{text.number_format(values)}}" for value in values] == shown


def test_table_of_a_live_run_has_twelve_lines_at_most_and_keeps_the_best() -> None:
    board = board_after(run_events((0.5, 0.1, *(0.4 for _ in range(498))))[:-1])
    lines = text.record_text(board).splitlines()[2:-1]
    assert len(lines) == 12 and lines[:3] == ["… 1 earlier epoch", lines[1], "… 489 epochs"] and lines[1].endswith(" ★")


def test_summary_says_what_this_run_did() -> None:
    events = run_events()
    events[0] = Event("start", Progress(n_epochs=3, epoch=2), 0.0, HEADER)
    assert text.summary_line(board_after(events)) == "✓ completed · 1 epoch, 3 in all · 00:04 · best val_loss 0.4 at epoch 2"


def test_loader_without_a_length_has_the_time_so_far_and_a_rate() -> None:
    events = run_events()
    events[0] = Event("start", events[0].progress, 0.0, HEADER | {"n_train_batches": None})
    assert text.progress_line(board_after(events[:2])) == "epoch 1/3 · 4/4 · 00:01 · 4 it/s · 128 samples/s · loss 0.5"


# -- html
def test_titles_stand_under_train_and_val_and_a_fixed_rate_in_the_header_only() -> None:
    record = html.record_html(board_after(run_events()))
    assert re.findall(r"<th scope=\"colgroup\"[^>]*>([^<]+)</th>", record) == ["train", "val"]
    assert re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", record) == ["epoch", "loss", "loss", "time"]
    assert record.count("lr 0.001") == 1


def test_columns_beyond_the_width_are_folded_and_counted() -> None:
    wide = [{"epoch": 1, "train_loss": 0.5, **{f"val_metric_{i}": 0.25 for i in range(20)}, "val_loss": 0.5, "time_s": 1.0}]
    table = html.table_html(wide)
    heads = re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", table)
    assert f"+ {24 - len(heads)} columns: history.df" in table and heads[-2:] == ["loss", "time"] and "metric_<wbr>0" in heads


def test_live_record_says_when_it_was_drawn_and_the_last_one_does_not() -> None:
    live, events = html.LiveRecord("nbtrain-1", "15:32:10"), run_events()
    assert "as of 15:32:10 · trainer.show() shows it live" in html.record_html(board_after(events[:-1]), live=live)
    assert html.record_html(board_after(events), live=live) == html.record_html(board_after(events))  # the same in every execution


def test_record_of_a_run_of_500_epochs_is_a_small_message() -> None:
    board = board_after(run_events(tuple(1 / (i + 1) for i in range(500)))[:-1])
    assert len(html.record_html(board)) < 12_000 and html.record_html(board).count('scope="row"') == 9


def test_nan_is_marked_by_a_sign_and_not_by_colour_alone() -> None:
    assert "⚠ NaN" in html.table_html([row(1, math.nan, 0.5)])


def test_table_is_accessible() -> None:
    table = html.table_html([row(1, 0.5, 0.5)])
    assert "<caption" in table and table.count('scope="col"') == 5 and table.count('scope="row"') == 1


def test_record_html_of_a_long_run_stays_small() -> None:
    board = board_after(run_events(tuple(1 / (i + 1) for i in range(200))))
    record = html.record_html(board, plots.png(plots.curves(board.rows, board.best)))
    assert len(record) < 50_000 and record.count('scope="row"') == 25


def test_failure_keeps_the_table_and_names_the_place() -> None:
    board = board_after(run_events(status="failed", reason="ValueError at epoch 4, batch 2: <bad>"))
    record = html.record_html(board)
    assert "✗ failed · ValueError at epoch 4, batch 2: &lt;bad&gt;" in record and record.count('scope="row"') == 3


def test_figure_leaves_pyplot_alone() -> None:
    code = "import sys; from nbtrain.views import plots; plots.png(plots.curves([{'epoch': 1, 'train_loss': 0.5}])); "
    code += "print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# -- one contract for all views
VIEWS = {"terminal": lambda: text.TerminalView(io.StringIO()), "log": lambda: text.LogView(io.StringIO())}


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
    assert isinstance(open_view(), text.LogView)


def test_view_of_a_terminal_in_ci_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("os.get_terminal_size", lambda: __import__("os").terminal_size((99, 24)))
    monkeypatch.delenv("CI", raising=False)
    assert open_view().width == 99  # type: ignore[attr-defined]
    monkeypatch.setenv("CI", "true")
    assert isinstance(open_view(), text.LogView)
