"""A run in marimo: its cell's output while it runs, a log's lines that stay."""

from __future__ import annotations

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
from views_of_runs import run_events

from nbtrain.events import Event, Shown
from nbtrain.views import html
from nbtrain.views.cell_runs import show_below
from nbtrain.views.marimo import MarimoView, marimo_output
from nbtrain.views.terminal import LogView


def test_output_is_the_record_with_bars_until_the_run_is_over_and_the_log_stays() -> None:
    outputs: list[str] = []
    view, log = MarimoView(outputs.append, io.StringIO()), LogView(io.StringIO())
    for event in run_events():
        view.update(event)
        log.update(event)
    assert outputs[-1] == html.record_html(view.log.board) and "<progress" in outputs[-2]
    assert view.log.stream.getvalue() == log.stream.getvalue()


def test_output_is_replaced_twice_a_second_at_most() -> None:
    outputs: list[str] = []
    view = MarimoView(outputs.append, io.StringIO())
    first = run_events()[1]
    for i in range(1000):
        view.update(Event("steps", first.progress, i / 100, first.data))
    assert len(outputs) == 20


def test_a_picture_outside_of_a_run_is_below_the_cell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cell: list[str] = []
    output = SimpleNamespace(append=cell.append)
    marimo = SimpleNamespace(running_in_notebook=lambda: True, output=output, Html=str)
    monkeypatch.setitem(sys.modules, "marimo", marimo)
    show_below(Shown("note", "text", {"text": "hello", "n_cut": 0}, 0, 0, 0))
    assert len(cell) == 1 and "hello" in cell[0] and capsys.readouterr().out == ""


def test_there_is_no_output_of_a_cell_where_marimo_does_not_run() -> None:
    assert marimo_output() is None


def test_an_app_that_is_run_as_a_script_has_a_log(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("marimo")
    app = "import marimo\napp = marimo.App()\n@app.cell\ndef _():\n    from nbtrain.views.notebook import open_view\n"
    app += "    print(type(open_view()).__name__)\napp.run()\n"
    (tmp_path / "app.py").write_text(app)
    done = subprocess.run([sys.executable, "app.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "LogView"
