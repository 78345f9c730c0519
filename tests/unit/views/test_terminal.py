"""Views of a terminal and of a log: whole screens of a pseudo-terminal compared, at several widths, with a clock that is a number."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import make_loader, make_model, make_trainer
from views_of_runs import HEADER, run_events

from nbtrain.events import Event, Progress
from nbtrain.views.terminal import LogView, RowWriter, TerminalView, block_bar, has_colour, stream_view, wrapped
from nbtrain.views.text import text_width


class Terminal:
    """A pseudo-terminal: `stream` is what a program writes to, `screen` what is seen."""

    def __init__(self, columns: int) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self._received = b""
        self.resize(columns)

    def resize(self, columns: int) -> None:
        self.columns = columns
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def received(self) -> str:
        while select.select([self._master], [], [], 0)[0]:
            self._received += os.read(self._master, 65536)
        return self._received.decode()

    @property
    def screen(self) -> str:
        """The lines as a terminal of this width shows them, without colours."""
        lines, column = [""], 0
        for piece in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.|\n", re.sub(r"\x1b\[\d+m", "", self.received())):
            if piece == "\r":
                column = 0
            elif piece == "\n":
                lines.append("")
            elif piece == "\x1b[K":
                lines[-1] = lines[-1][:column]
            else:
                assert len(piece) == 1 and text_width(lines[-1][:column]) < self.columns, "a line is wrapped by the terminal"
                lines[-1] = lines[-1][:column] + piece + lines[-1][column + 1 :]
                column += 1
        return "\n".join(lines)

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    opened: list[Terminal] = []

    def make(columns: int) -> Terminal:
        opened.append(Terminal(columns))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


METRICS = {"train_loss": 0.5, "train_acc": 0.75, "val_loss": 0.4375, "val_acc": 0.8125, "val_f1": 0.8}
ROW = {"epoch": 1, "step": 600, **METRICS, "lr": 1e-3, "time_s": 9.5}
HEAD = HEADER | {"device": "cuda:0", "precision": "bf16-mixed", "n_train_batches": 500, "n_valid_batches": 100}


def show_an_epoch_and_a_half(view: Any) -> None:
    """An epoch with a row, and half of the next, at 100 batches a second."""
    values = {"train_loss": [0.5] * 250, "train_acc": [0.75] * 250}
    block = {"values": values, "n": 250, "samples": 8000, "lr": 1e-3}

    def here(epoch: int, batch: int, elapsed_s: float, phase: Any = "train") -> Progress:
        n_batches = 100 if phase == "valid" else 500
        n = 600 * epoch + batch
        return Progress(phase=phase, epoch=epoch, n_epochs=10, batch=batch, n_batches=n_batches, step=n, processed=n, elapsed_s=elapsed_s)

    valid = {"values": {"val_loss": [0.4375] * 100}, "n": 100, "samples": 3200}
    view.update(Event("start", Progress(n_epochs=10), 0.0, HEAD))
    view.update(Event("steps", here(0, 250, 2.5), 2.5, block))
    view.update(Event("steps", here(0, 500, 5.0), 5.0, block))
    view.update(Event("steps", here(0, 100, 6.0, "valid"), 6.0, valid))
    view.update(Event("epoch", Progress(epoch=1, n_epochs=10, elapsed_s=6.0, step=600, processed=600), 6.0, {"row": ROW}))
    note = "the loader's workers are started again at each epoch: persistent_workers=True keeps them"
    view.update(Event("note", here(1, 0, 6.0), 6.0, {"text": note}))
    view.update(Event("steps", here(1, 250, 8.5), 8.5, block))


SCREENS = {
    40: """Digits · SmallCNN · 12.3k params ·
  cuda:0 · bf16-mixed
 epoch  train_loss   val_loss
+ 5 columns: acc, f1, lr, …
     1         0.5     0.4375 ★
note: the loader's workers are started
  again at each epoch:
  persistent_workers=True keeps them
epoch 2/10 · 250/500 · loss 0.5""",
    80: """Digits · SmallCNN · 12.3k params · cuda:0 · bf16-mixed
 epoch  train_loss  train_acc   val_loss    val_acc     val_f1         lr
+ 1 column: time
     1         0.5       0.75     0.4375     0.8125        0.8      0.001 ★
note: the loader's workers are started again at each epoch:
  persistent_workers=True keeps them
epoch 2/10 · |██▌  | 250/500 · 00:08 < 00:51 · loss 0.5 · acc 0.75""",
    120: """Digits · SmallCNN · 12.3k params · cuda:0 · bf16-mixed
 epoch  train_loss  train_acc   val_loss    val_acc     val_f1         lr       time
     1         0.5       0.75     0.4375     0.8125        0.8      0.001       9.5s ★
note: the loader's workers are started again at each epoch: persistent_workers=True keeps them
epoch 2/10 · |███████       | 250/500 · 00:08 < 00:51 · 100 it/s · 3.2k samples/s · loss 0.5 · acc 0.75""",
    145: """Digits · SmallCNN · 12.3k params · cuda:0 · bf16-mixed
 epoch  train_loss  train_acc   val_loss    val_acc     val_f1         lr       time
     1         0.5       0.75     0.4375     0.8125        0.8      0.001       9.5s ★
note: the loader's workers are started again at each epoch: persistent_workers=True keeps them
epoch 2/10 · |██▌  | 250/500 · 00:08 < 00:51 · 100 it/s · 3.2k samples/s · loss 0.5 · acc 0.75 · best val_loss 0.4375 at epoch 1""",
}


@pytest.mark.parametrize("columns", SCREENS)
def test_screen_of_a_terminal(terminal: Any, columns: int) -> None:
    shown = terminal(columns)
    show_an_epoch_and_a_half(TerminalView(shown.stream))
    assert shown.screen == SCREENS[columns]


@pytest.mark.parametrize("columns", [20, 33, 57, 61, 79, 99, 150])
def test_no_line_is_wider_than_the_terminal(terminal: Any, columns: int) -> None:
    shown = terminal(columns)
    view = TerminalView(shown.stream)
    view.update(Event("start", Progress(n_epochs=10_000), 0.0, HEAD | {"title": "D"}))
    values = {f"train_metric_{i}": [0.123456] for i in range(20)} | {"train_loss": [1.234e-05]}
    at: dict[str, Any] = {"phase": "train", "epoch": 8_999, "n_epochs": 10_000, "n_batches": 10_000}
    for batch in (1, 10, 100, 9_999, 10_000):
        place = Progress(batch=batch, step=batch, processed=batch, elapsed_s=batch / 7, **at)
        view.update(Event("steps", place, batch / 7, {"values": values, "n": 1, "samples": 1, "lr": 0.1}))
        assert shown.screen.splitlines()[-1].startswith("epoch 9000/10000")


def test_parts_of_the_line_do_not_come_and_go_while_numbers_grow(terminal: Any) -> None:
    for columns in range(40, 140, 7):
        shown, seen = terminal(columns), set()
        view = TerminalView(shown.stream)
        view.update(Event("start", Progress(n_epochs=2), 0.0, HEAD))
        for batch in range(10, 500, 60):
            place = Progress(phase="train", n_epochs=2, batch=batch, n_batches=500, step=batch, processed=batch, elapsed_s=float(batch))
            view.update(Event("steps", place, float(batch), {"values": {"train_loss": [1 / batch]}, "n": 10, "samples": 9, "lr": 0.1}))
            seen.add(re.sub(r"[\d.:█▏▎▍▌▋▊▉ –]+|e-\d+", "", shown.screen.splitlines()[-1]))
        assert len(seen) == 1


def test_a_terminal_that_is_resized_is_used_at_the_next_line(terminal: Any) -> None:
    shown = terminal(120)
    view = TerminalView(shown.stream)
    show_an_epoch_and_a_half(view)
    place = Progress(phase="train", epoch=1, n_epochs=10, batch=300, n_batches=500, step=900, processed=900, elapsed_s=9.0)
    shown.resize(40)
    view.update(Event("steps", place, 9.0, {"values": {"train_loss": [0.5]}, "n": 50, "samples": 1600, "lr": 1e-3}))
    assert shown.received().rpartition("\r")[2] == "epoch 2/10 · 300/500 · loss 0.5\x1b[K"
    assert view.width == 40


def test_width_of_what_is_no_terminal_is_80() -> None:
    assert TerminalView(io.StringIO()).width == 80


def test_wide_characters_take_two_cells(terminal: Any) -> None:
    row = {"epoch": 1, "train_損失": 0.5, "val_정확도": 0.25}
    head, line = RowWriter().lines(row, 60, "val_loss")
    assert (head, line) == (" epoch  train_損失  val_정확도", "     1         0.5        0.25")
    assert text_width(head) == text_width(line)
    shown = terminal(30)
    TerminalView(shown.stream).update(Event("start", Progress(n_epochs=1), 0.0, HEAD | {"title": "手書き数字の分類", "model": None}))
    assert shown.screen == "手書き数字の分類 ·\n  12.3k params · cuda:0 ·\n  bf16-mixed\n"


def test_wrapped_text_keeps_its_words_and_its_lines() -> None:
    assert wrapped("one two three\nfour", 8) == "one two\n  three\nfour"
    assert wrapped("runs/a-long-name-of-a-folder", 10) == "runs/a-long-name-of-a-folder"


@pytest.mark.parametrize(
    ("fraction", "bar"), [(0, "|    |"), (1 / 32, "|▏   |"), (0.5, "|██  |"), (0.99, "|███▉|"), (1, "|████|"), (7, "|████|")]
)
def test_bar_is_exact_to_an_eighth_of_a_cell(fraction: float, bar: str) -> None:
    assert block_bar(fraction, 6) == bar


# -- colour
@pytest.mark.parametrize(
    ("environment", "on_terminal", "in_file"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),  # no-color.org: where it is not an empty string
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_colours_follow_the_environment(terminal: Any, environment: dict[str, str], on_terminal: bool, in_file: bool) -> None:
    assert has_colour(terminal(80).stream, environment) is on_terminal
    assert has_colour(io.StringIO(), environment) is in_file


def end(status: str) -> Event:
    return Event("end", Progress(epoch=1, n_epochs=1, elapsed_s=6.0), 6.0, {"status": status, "reason": ""})


def test_the_best_row_a_failure_a_pause_and_a_nan_have_colours(terminal: Any) -> None:
    shown = terminal(80)
    view = TerminalView(shown.stream)
    view.update(Event("start", Progress(n_epochs=2), 0.0, HEADER))
    view.update(Event("epoch", Progress(epoch=1, n_epochs=2), 1.0, {"row": {"epoch": 1, "val_loss": 0.5, "train_loss": float("nan")}}))
    view.update(Event("state", Progress(epoch=1, n_epochs=2), 1.0, {"state": "paused"}))
    view.update(end("failed"))
    text = shown.received()
    assert "     1  \x1b[31m       NaN\x1b[39m        0.5 \x1b[32m★\x1b[39m\x1b[K" in text
    assert "\r\x1b[33m‖ paused\x1b[39m\x1b[K" in text
    assert "\r\x1b[31m✗ failed\x1b[39m · 1 epoch · 00:06 · best val_loss 0.5 at epoch 1\x1b[K" in text
    assert set(re.findall(r"\x1b\[(\d+)m", text)) <= {"31", "32", "33", "39"}


def test_nothing_is_coloured_where_no_color_is_set(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = terminal(80)
    show_an_epoch_and_a_half(view := TerminalView(shown.stream))
    view.update(end("failed"))
    assert set(re.findall(r"\x1b\[[^A-Za-z]*[A-Za-z]", shown.received())) == {"\x1b[K"}


# -- validations inside an epoch
def events_with_inner_validation() -> list[Event]:
    """A validation after two of four batches, and one at the end of the epoch."""
    at = {"n_epochs": 1, "n_batches": 4}
    block = {"values": {"train_loss": [0.5] * 2}, "n": 2, "samples": 64, "lr": 1e-3}
    half = Progress(phase="train", batch=2, step=4, processed=4, elapsed_s=1.0, **at)
    whole = Progress(phase="train", batch=4, step=8, processed=8, elapsed_s=2.0, **at)
    row = {"epoch": 1, "step": 8, "train_loss": 0.5, "val_loss": 0.4, "lr": 1e-3, "time_s": 2.0}
    return [
        Event("start", Progress(n_epochs=1), 0.0, HEADER),
        Event("valid", half, 1.0, {"row": {"epoch": 1, "step": 4, "val_loss": 0.3}}),
        Event("mark", half, 1.0, {"text": "the state was saved"}),
        Event("steps", whole, 2.0, block),
        Event("valid", whole, 2.0, {"row": {"epoch": 1, "step": 8, "val_loss": 0.4}}),
        Event("epoch", Progress(epoch=1, n_epochs=1, step=8, processed=8, elapsed_s=2.0), 2.0, {"row": row}),
        end("completed"),
    ]


def test_log_has_a_line_for_a_validation_inside_an_epoch() -> None:
    view = LogView(io.StringIO())
    for event in events_with_inner_validation():
        view.update(event)
    assert view.stream.getvalue() == (
        "Digits · SmallCNN · 12.3k params · cpu\n"
        "✎ epoch 1, batch 3: the state was saved\n"
        "epoch 1, batch 2/4: val_loss 0.3 ★\n"
        "epoch 1/1 · train_loss 0.5 · val_loss 0.4 · lr 0.001 · time 2.0s\n"
        "✓ completed · 1 epoch · 00:06 · best val_loss 0.3 at epoch 1\n"
    )


def test_terminal_has_a_line_for_a_validation_inside_an_epoch() -> None:
    view = TerminalView(io.StringIO(), colour=False)
    for event in events_with_inner_validation():
        view.update(event)
    assert "\repoch 1, batch 2/4: val_loss 0.3 ★\x1b[K\n" in view.stream.getvalue()
    assert view.stream.getvalue().count("0.4") == 1  # the row of the epoch, and no line beside it


# -- as before: one line, a row an epoch, a log
def test_terminal_rewrites_one_line_and_adds_a_row_an_epoch() -> None:
    view = TerminalView(io.StringIO(), width=70, colour=False)
    for event in run_events((0.5,)):
        view.update(event)
    assert view.stream.getvalue() == (
        "\rDigits · SmallCNN · 12.3k params · cpu\x1b[K\n"
        "\repoch 1/1 · 4/4 · 00:01 < 00:00 · 4 it/s · loss 0.5\x1b[K"
        "\repoch 1/1 · |██████| valid 2/2 · 00:01 < 00:00 · val_loss 0.5\x1b[K"
        "\r epoch  train_loss   val_loss         lr       time\x1b[K\n"
        "\r     1         0.5        0.5      0.001       1.5s ★\x1b[K\n"
        "\r✓ completed · 1 epoch · 00:01 · best val_loss 0.5 at epoch 1\x1b[K\n"
    )


def test_terminal_is_rewritten_five_times_a_second_at_most() -> None:
    view = TerminalView(io.StringIO())
    for i in range(1000):
        block = {"values": {"train_loss": [0.5]}, "n": 1, "samples": 1, "lr": 0.1}
        view.update(Event("steps", Progress(phase="train", step=i, processed=i, elapsed_s=i / 100), i / 100, block))
    assert view.stream.getvalue().count("\r") <= 50


def test_log_has_a_line_an_epoch_and_one_a_minute() -> None:
    view = LogView(io.StringIO(), every_s=1.2)
    for event in run_events((0.5, 0.4)):
        view.update(event)
    assert view.stream.getvalue() == (
        "Digits · SmallCNN · 12.3k params · cpu\n"
        "epoch 1/2 · valid 2/2 · 00:01 < 00:01 · 4 it/s · 128 samples/s · loss 0.5 · val_loss 0.5\n"
        "epoch 1/2 · train_loss 0.5 · val_loss 0.5 · lr 0.001 · time 1.5s ★\n"
        "epoch 2/2 · valid 2/2 · 00:03 < 00:00 · 4 it/s · 128 samples/s · loss 0.5 · val_loss 0.4 · best val_loss 0.5 at epoch 1\n"
        "epoch 2/2 · train_loss 0.5 · val_loss 0.4 · lr 0.001 · time 1.5s ★\n"
        "✓ completed · 2 epochs · 00:03 · best val_loss 0.4 at epoch 2\n"
    )


@pytest.mark.parametrize(("environment", "kind"), [({}, TerminalView), ({"CI": "true"}, LogView), ({"TERM": "dumb"}, LogView)])
def test_view_of_a_terminal_is_a_log_in_ci_and_where_a_line_cannot_be_rewritten(terminal: Any, environment: Any, kind: Any) -> None:
    assert type(stream_view(terminal(80).stream, environment)) is kind
    assert type(stream_view(io.StringIO(), environment)) is LogView


@pytest.mark.parametrize(
    ("encoding", "end"), [("ascii", "+ completed - 3 epochs"), ("cp1252", "+ completed - 3 epochs"), ("utf-8", "✓ completed · 3 epochs")]
)
def test_a_stream_whose_encoding_lacks_a_sign_gets_another(encoding: str, end: str) -> None:
    written = io.BytesIO()
    view = LogView(io.TextIOWrapper(written, encoding=encoding))
    for event in run_events():
        view.update(event)
    assert written.getvalue().decode(encoding).splitlines()[-1].startswith(end)


def test_a_stream_that_is_closed_ends_no_run() -> None:
    stream = io.StringIO()
    for view in (LogView(stream), TerminalView(stream, 80)):
        stream.close()
        for event in run_events():
            view.update(event)
        assert view.board.status == "completed"


class WriteOnly:
    """What a research script puts in place of sys.stdout."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise RuntimeError("the disk of the log is full")


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [lambda: None, WriteOnly, Broken, _closed], ids=["none", "write only", "broken", "closed"])
def test_no_stream_in_place_of_stdout_ends_a_run(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make()
    trainer = make_trainer(log_bar=True)
    monkeypatch.setattr("sys.stdout", stream)
    result = trainer.run(2, make_loader())
    monkeypatch.undo()
    assert result.status == "completed"
    if isinstance(stream, WriteOnly):
        assert "epoch 2/2 · train_loss" in stream.text


def test_a_view_that_fails_ends_no_run_and_the_notes_go_to_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, row: Any) -> None:
        raise RuntimeError("no frontend listens")

    monkeypatch.setattr(LogView, "_row", fail)
    trainer = make_trainer(log_bar=True, hooks={"on_epoch_start": lambda trainer: trainer.recorder.note(f"{trainer.current_epoch}")})
    assert trainer.run(2, make_loader()).status == "completed"
    assert [record.message for record in caplog.records] == [
        "The run is no longer shown: RuntimeError: no frontend listens",
        "1",
    ]


def test_notes_of_runs_without_a_bar_go_to_the_log_each_once(caplog: pytest.LogCaptureFixture) -> None:
    model = type("Logged", (torch.nn.Sequential,), {})(make_model())  # no other test has logged its name
    for _ in range(2):
        make_trainer(model=model.eval(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).run(1, make_loader())
    said = "Logged was in eval mode; it is in train mode now."
    assert [(r.name, r.levelname) for r in caplog.records if r.message == said] == [("nbtrain", "WARNING")]
