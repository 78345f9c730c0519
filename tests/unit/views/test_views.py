"""Views: strings compared whole, with a clock that is a number. One contract holds for all of them."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from drawn import Drawing
from views_of_runs import HEADER, row, run_events

from nbtrain.events import Event, Progress, cut_of
from nbtrain.views import html, text
from nbtrain.views.notebook import NotebookView, open_view
from nbtrain.views.terminal import LogView, RowWriter, TerminalView


def board_after(events: list[Event]) -> text.Board:
    board = text.Board()
    for event in events:
        board.update(event)
    return board


def with_header(**header: Any) -> list[Event]:
    """The events of the usual run, whose header says something else."""
    start, *others = run_events()
    return [replace(start, data=HEADER | header), *others]


# -- the board
def test_rates_leave_out_validation_and_time_left_counts_it() -> None:
    board = board_after(run_events()[:5])  # the second epoch's training is done
    assert board.speed.rate() == 4.0 and board.speed.rate("valid") == 4.0 and board.speed.samples_per_s == 128.0
    assert board.left_s == pytest.approx(0.5 + 1.5)  # this validation, and a whole epoch


def test_time_left_is_known_from_the_second_batch_on() -> None:
    start, block = run_events()[0], {"values": {"train_loss": [0.5]}, "n": 1, "samples": 32, "lr": 1e-3}
    steps = [
        Event("steps", Progress(phase="train", n_epochs=3, batch=n, n_batches=4, step=n, processed=n, elapsed_s=n), float(n), block)
        for n in (1, 2)
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
    assert board_after(with_header(n_train_batches=None)[:5]).left_s is None


@pytest.mark.parametrize("n_events", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize(("more", "end_step"), [({}, 12), ({"max_steps": 15}, 12), ({"max_steps": 13}, 12), ({"accumulate": None}, None)])
def test_planned_end_of_a_run_is_known_from_its_start(n_events: int, more: dict[str, Any], end_step: int | None) -> None:
    assert board_after(with_header(**more)[:n_events]).end_step == end_step


def test_planned_end_counts_updates_and_ends_at_the_greatest_one() -> None:
    for more, end_step in (({"accumulate": 3}, 6), ({"accumulate": 4}, 3), ({"max_steps": 5}, 5), ({"accumulate": 2, "max_steps": 50}, 6)):
        assert board_after(with_header(**more)[:1]).end_step == end_step


def test_end_of_a_run_is_unknown_without_a_length_and_is_where_it_has_ended() -> None:
    events = with_header(n_train_batches=None)
    assert board_after(events[:5]).end_step is None and board_after(events).end_step == 12


def test_validations_of_the_monitored_loss_are_on_the_curve() -> None:
    assert board_after(run_events()).curve.validations == [(4, 0.5), (8, 0.4), (12, 0.45)]
    start, steps, *_ = with_header(monitor="val_nll_loss")
    valid = Event("valid", steps.progress, 0.0, {"row": {"epoch": 1, "step": 4, "processed": 6, "val_nll_loss": 0.7, "val_loss": 0.1}})
    assert board_after([start, steps, valid]).curve.validations == [(4, 0.7)]


def test_best_of_an_earlier_run_leaves_the_star_with_it() -> None:
    board = board_after(with_header(best=row(9, 0.1, 0.1)))
    assert board.best["epoch"] == 9 and "★" not in text.table_text(board.rows, board.best)


# -- text
def test_record_as_text() -> None:
    assert text.record_text(board_after(run_events())) == (
        "Digits · SmallCNN · 12.3k params · cpu · lr 0.001\n"
        "epoch  train_loss  val_loss  time\n"
        "    1         0.5      0.50  1.5s\n"
        "    2         0.5      0.40  1.5s ★\n"
        "    3         0.5      0.45  1.5s\n"
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
    lines = [line for line in text.record_text(board).splitlines()[2:-1] if not line.startswith("tip: ")]
    assert len(lines) == 12 and lines[:3] == ["… 1 earlier epoch", lines[1], "… 489 epochs"] and lines[1].endswith(" ★")


def test_summary_says_what_this_run_did_and_all_its_parts_if_they_were_read() -> None:
    part = continued_board(run_events())
    assert text.summary_line(part) == "✓ completed · 3 epochs, 5 in all · 00:04 · best val_loss 0.3 at epoch 2"
    whole = continued_board(run_events(), whole=True)
    assert text.summary_line(whole) == "✓ completed · 5 epochs · 00:07 · best val_loss 0.3 at epoch 2"


def test_evaluation_has_neither_epochs_nor_a_best_one() -> None:
    progress = Progress(n_epochs=3, epoch=3, elapsed_s=4.0)
    tested = Event("test", progress, 4.0, {"row": {"step": 9, "test_loss": 0.5, "time_s": 4.0}})
    header = HEADER | {"best": {"epoch": 2, "step": 6, "val_loss": 0.4}}
    board = board_after([Event("start", progress, 0.0, header), tested, Event("end", progress, 4.0, {"status": "completed", "reason": ""})])
    assert text.summary_line(board) == "✓ completed · 00:04"
    assert ">Metrics of the test</caption>" in html.record_html(board)


def test_loader_without_a_length_has_the_time_so_far_and_a_rate() -> None:
    events = with_header(n_train_batches=None)
    assert text.progress_line(board_after(events[:2])) == "epoch 1/3 · 4/4 · 00:01 · 4 it/s · 128 samples/s · loss 0.5"


def test_epochs_that_differ_in_the_sixth_digit_are_told_apart_and_the_best_stays_in_sight() -> None:
    events = run_events(tuple(0.69 - 0.1 * (i == 2) - 2e-6 * i for i in range(2000)))
    for board in (board_after(events), board_after(events[:-1])):
        lines = text.record_text(board).splitlines()
        newest = [line.split()[2] for line in lines if re.match(r" *(19\d\d|2000)\b", line)]
        assert len(set(newest)) == len(newest) >= 9 and any(line.endswith(" ★") and line.split()[0] == "3" for line in lines)
        assert text.best_words(board.best, "val_loss", board.epochs) == "best val_loss 0.589996 at epoch 3"
    live, log = TerminalView(io.StringIO(), width=200), LogView(io.StringIO(), every_s=0)
    for event in events[:30]:
        live.update(event), log.update(event)
    assert all(view.stream.getvalue().count("· best val_loss 0.589996 at epoch 3") > 5 for view in (live, log))


def test_metric_that_is_always_nan_or_appears_late_keeps_its_column() -> None:
    wide = [{"epoch": e, **{f"train_metric_{i}": 0.5 for i in range(20)}, "val_nan": math.nan} for e in (1, 2, 3)]
    wide[2] |= {"val_late": 0.5}
    table = html.table_html(wide)
    assert ", … · history.df" in table and ">nan<" in table and ">late<" in table
    head, _, line = RowWriter().lines(wide[2], 60, "val_loss", rows=wide)
    many = [wide[0], *[wide[2] | {"epoch": e} for e in range(2, 90)]]
    assert "val_late" in text.make_table(many, max_width=60, is_live=True).names
    assert head.split()[-2:] == ["val_nan", "val_late"] and line.split()[-2:] == ["NaN", "0.5"]


# -- the past of a run
def continued_board(events: list[Event], n_past: int = 2, *, whole: bool = False) -> text.Board:
    """A run that goes on after `n_past` epochs of an earlier part, which is only known, or read as well."""
    past = board_after(run_events((0.5, 0.3, *[0.4] * (n_past - 2))))
    best = past.best

    def later(event: Event) -> Event:
        p, row = event.progress, event.data.get("row")
        counts = {"step": p.step + 4 * n_past, "processed": p.processed + 6 * n_past}
        place = replace(p, run=2, epoch=p.epoch + n_past, n_epochs=p.n_epochs + n_past, **counts)
        if row is not None:
            row = {**row, "epoch": row["epoch"] + n_past, "step": row["step"] + 4 * n_past, "processed": row["processed"] + 6 * n_past}
        return replace(event, progress=place, data={**event.data, **({"row": row} if row else {}), "best": best})

    board = past if whole else text.Board(find_past=lambda: text.Past(past.curve, past.epochs))
    for event in events:
        board.update(later(event))
    return board


def test_record_shows_the_past_that_it_goes_on_from() -> None:
    assert text.record_text(continued_board(run_events((0.35,)), n_past=5)) == (
        "Digits · SmallCNN · 12.3k params · cpu · lr 0.001\n"
        "epoch  train_loss  val_loss  time\n"
        "… 1 earlier epoch\n"
        "    2         0.5      0.30  1.5s ★\n"
        "… 2 epochs\n"
        "    5         0.5      0.40  1.5s\n"
        "── continued ──\n"
        "    6         0.5      0.35  1.5s\n"
        "✓ completed · 1 epoch, 6 in all · 00:01 · best val_loss 0.3 at epoch 2"
    )


def test_rate_that_was_another_in_the_past_has_its_column() -> None:
    board = continued_board(run_events((0.35,)))
    board.past[0]["lr"] = 0.01
    title, head, *_ = text.record_text(board).splitlines()
    assert title.endswith("· cpu") and head.split()[-2:] == ["lr", "time"]


def test_terminal_and_log_of_a_resumed_run_begin_with_its_past() -> None:
    for view in (TerminalView(io.StringIO(), width=80, colour=False), LogView(io.StringIO())):
        past = board_after(run_events((0.5, 0.3, 0.4)))
        view.board.find_past = lambda past=past: text.Past(past.curve, past.epochs)
        begun = Progress(run=1, epoch=3, n_epochs=5, step=12, processed=18)
        view.update(Event("start", begun, 0.0, HEADER | {"resumed": True, "best": past.best}))
        lines = [line.removesuffix("\x1b[K") for line in view.stream.getvalue().splitlines() if line]
        assert lines[3:] == ["    2         0.5       0.3  0.001  1.5s ★", "    3         0.5       0.4  0.001  1.5s", "── continued ──"]


def test_live_record_shows_the_past_from_its_start_and_the_one_after_a_long_run_its_panels() -> None:
    start, many = html.record_html(continued_board(run_events()[:1])), html.record_html(continued_board(run_events((0.2,) * 5)))
    assert svg_of(start).points("train past") and start.count("opacity:.65") == 2 and "border-top" in start
    drawing = svg_of(many)
    assert drawing.points("val past")[-1] == drawing.points("val")[0] and drawing.words()[-1].startswith("by epoch · continued")


def test_rounds_of_a_session_and_evaluations_cut_nothing() -> None:
    begun = Progress(n_epochs=3, epoch=1)
    starts = {"second": HEADER | {"round": 2}, "first": HEADER | {"round": 1}, "resumed": HEADER | {"round": 2, "resumed": True}}
    assert [name for name, header in starts.items() if cut_of(Event("start", begun, 0.0, header)) is None] == ["second"]
    assert cut_of(Event("start", Progress(n_epochs=3, epoch=3), 0.0, HEADER)) is None


# -- the numbers that move
def blocks() -> list[Event]:
    """Ten batches of an epoch, three of its validation, and two of the next epoch."""
    at = {"n_epochs": 2, "n_batches": 10}
    values = [
        ("train", 0, 4, {"train_loss": [0.5] * 4, "train_acc": [0.25, 0.75, 0.5, 0.5], "train_bad": [math.nan] * 4}),
        ("train", 0, 10, {"train_loss": [0.5] * 6, "train_acc": [1.0] * 6, "train_bad": [math.nan] * 6}),
        ("valid", 0, 3, {"val_loss": [0.25] * 3, "val_acc": [0.5, 1.0, math.nan]}),
        ("train", 1, 2, {"train_loss": [0.5] * 2, "train_acc": [0.125] * 2, "train_bad": [math.nan] * 2}),
    ]
    events = [Event("start", Progress(n_epochs=2), 0.0, HEADER)]
    for i, (phase, epoch, batch, found) in enumerate(values):
        place: Any = Progress(phase=phase, epoch=epoch, batch=batch, step=i + 1, processed=i + 1, elapsed_s=i + 1.0, **at)
        events.append(
            Event("steps", place, i + 1.0, {"values": found, "n": len(found[f"{phase[:5].replace('valid', 'val')}_loss"]), "samples": 1})
        )
    row = {"epoch": 1, "step": 3, "processed": 3, "train_loss": 0.5, "train_acc": 0.8, "val_loss": 0.25, "val_acc": 0.75}
    return [*events[:4], Event("epoch", Progress(epoch=1, n_epochs=2, elapsed_s=4.0), 4.0, {"row": row}), events[4]]


def test_each_metric_moves_with_the_batches_in_its_own_place() -> None:
    board, shown = text.Board(), []
    for event in blocks():
        board.update(event)
        lines = [re.findall(r">(\w*)</span> (?:<[^>]*>)?(?:⚠ )?([\w.]+)", line) for line in html.numbers_html(board).splitlines()]
        shown.append([" ".join(map(" ".join, line)) for line in lines])
    train, valid = "loss 0.5000 acc 0.8000 bad NaN", "loss 0.2500 acc 0.7500"
    assert shown == [
        ["", ""], ["loss 0.5000 acc 0.5000 bad NaN", ""], [train, ""], [train, valid], [train, valid],
        ["loss 0.5000 acc 0.1250 bad NaN", valid],
    ]  # fmt: skip


def test_live_record_stands_still_while_its_numbers_come() -> None:
    heights, board = set(), text.Board()
    for event in blocks():
        board.update(event)
        places = re.findall(r"width:(\d+)ch", html.numbers_html(board).splitlines()[0])
        heights.add((html.head_height(board), html.numbers_html(board).count("height:20px"), *places[:1]))
    assert len({height[:2] for height in heights}) == 1 and len({height[2:] for height in heights if height[2:]}) == 1


def test_text_views_have_the_metrics_beside_the_loss_and_those_of_the_validation_while_it_is_on() -> None:
    view, log = TerminalView(io.StringIO(), width=79, colour=False), LogView(io.StringIO(), every_s=0.5)
    for event in blocks():
        view.update(event), log.update(event)
    lines = [line.rstrip("\x1b[K") for line in view.stream.getvalue().split("\r") if " · " in line][1:]
    assert [line.split("loss ")[-1] for line in lines] == ["0.5 · acc 0.5", "0.5 · acc 0.8", "0.25 · val_acc 0.75", "0.5 · acc 0.125"]
    assert "loss 0.5 · acc 0.5 · bad NaN\n" in log.stream.getvalue() and "loss 0.5 · val_loss 0.25 · val_acc 0.75" in log.stream.getvalue()


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
    assert f"+ {24 - len(heads)} columns: metric_" in table and ", … · history.df" in table
    assert heads[-2:] == ["loss", "time"] and "metric_<wbr>0" in heads


def test_live_record_says_when_it_was_drawn_and_the_last_one_does_not() -> None:
    live, events = html.LiveRecord("nbtrain-1", "15:32:10"), run_events()
    record = html.record_html(board_after(events[:-1]), live=live)
    assert "▶ running at 15:32:10<" in record and "the whole record will be here when the run ends" in record
    assert html.record_html(board_after(events), live=live) == html.record_html(board_after(events))  # the same in every execution


def test_a_pause_is_amber_and_a_note_of_two_lines_has_two() -> None:
    events = run_events()
    board = board_after(events[:4])
    assert "#ffc107" not in html.record_html(board)
    board.update(Event("state", events[3].progress, 0.0, {"state": "paused"}))
    board.update(Event("note", events[3].progress, 0.0, {"text": "first\nsecond"}))
    record = html.record_html(board)
    assert re.search(r"background:#ffc107[^>]*>‖ paused</span>", record) and "note: first\nsecond" in text.record_text(board)
    assert re.search(r"white-space:pre-line[^>]*>note: first\nsecond<", record)


def test_the_best_value_stands_in_the_status_and_in_the_table_of_a_record_only() -> None:
    events = run_events((0.5, 0.4321, 0.45, 0.46, 0.47, 0.48))
    record = html.record_html(board_after(events))
    assert record.count("0.4321") == 2 and not any("0.4321" in words for words in svg_of(record).words())


def test_a_record_is_called_by_its_folder_and_without_one_by_its_start() -> None:
    start, *others = run_events()
    at_s = datetime(2026, 1, 2, 14, 5).timestamp()
    board = board_after([replace(start, time_s=at_s), *(replace(event, time_s=at_s + 60) for event in others)])
    assert "· started 14:05 ·" in text.title_line(board)
    board.name = "run-007"
    assert (
        "· run-007 ·" in text.record_text(board) and "· run-007 ·" in html.record_html(board) and "started" not in text.record_text(board)
    )


def test_record_of_a_run_that_was_resumed_after_a_crash_has_each_epoch_once() -> None:
    events = run_events((0.5, 0.4, 0.3))
    crashed = next(i for i, event in enumerate(events) if event.kind == "epoch" and event.data["row"]["epoch"] == 2)
    saved = next(i for i, event in enumerate(events) if event.kind == "epoch")  # the checkpoint
    resumed = Event("start", replace(events[saved].progress, step=4, processed=6), 0.0, {**events[0].data, "resumed": True})
    board = board_after([*events[: crashed + 1], resumed, *events[saved + 1 :]])
    spent = text.record_text(board).replace("00:06", "00:04")  # the lost epoch took time
    assert spent == text.record_text(board_after(events)) != text.record_text(board)


def test_record_of_a_resumed_run_does_not_say_that_it_is_fresh() -> None:
    start, *_ = events = run_events((0.5, 0.4))
    fresh = Event("note", start.progress, 0.0, {"text": "so this is a fresh run", "until_resumed": True})
    other, resumed = (Event("note", start.progress, 0.0, {"text": text}) for text in ("the data are new", "resumed from 1.ckpt"))
    again = Event("start", start.progress, 0.0, {**start.data, "resumed": True})
    assert board_after([start, fresh, other, *events[1:]]).notes == ["so this is a fresh run", "the data are new"]
    assert board_after([start, fresh, other, again, resumed, *events[1:]]).notes == ["the data are new", "resumed from 1.ckpt"]


def test_record_that_goes_on_from_a_saved_state_keeps_the_diffs_of_its_changes_before() -> None:
    events = run_events((0.5, 0.4, 0.3))
    at = next(event for event in events if event.kind == "epoch").progress
    changes = [Event("mark", replace(at, processed=n), 0.0, {"text": f"changed {diff}", "diff": diff}) for n, diff in ((6, "a"), (9, "b"))]
    board = board_after([events[0], *changes, Event("start", replace(at, processed=6), 0.0, {**events[0].data, "resumed": True})])
    assert list(board.diffs.values()) == ["a"] and "changed a" in html.record_html(board)


def test_record_of_a_run_of_500_epochs_is_a_small_message() -> None:
    board = board_after(run_events(tuple(1 / (i + 1) for i in range(500)))[:-1])
    assert len(html.record_html(board)) < 25_000 and html.record_html(board).count('scope="row"') == 9


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


def test_view_of_a_terminal_in_ci_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_view(), TerminalView)
    monkeypatch.setenv("CI", "true")
    assert isinstance(open_view(), LogView)


def test_first_step_is_drawn_at_once_and_the_next_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    view = NotebookView(live=False)
    view._last_s = 10.0  # the start was drawn
    monkeypatch.setattr(view, "_draw", lambda: drawn.append(view._record.time_s))
    for time_s in (10.01, 10.02, 10.15, 10.21):
        data = {"values": {"train_loss": [0.5]}, "n": 1, "samples": 8, "lr": 1e-3}
        view.update(Event("steps", Progress(phase="train", batch=1, n_epochs=1, elapsed_s=time_s), time_s, data))
    assert drawn == [10.01, 10.21]
