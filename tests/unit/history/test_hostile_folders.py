"""A run folder that is damaged or comes from a stranger: everything that reads it shows what is whole, or raises an nbtrain error."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from samples import make_loader, make_trainer, make_valid

from nbtrain import ConfigError, compare, load_run
from nbtrain.cli import main
from nbtrain.errors import NbtrainError
from nbtrain.events import Event
from nbtrain.history.run_folder import read_events, read_history
from nbtrain.library.follow import follow, recorded_events
from nbtrain.library.recorded_run import diff, show
from nbtrain.library.runs import Runs, runs
from nbtrain.views import html, text
from nbtrain.views.terminal import LogView, TerminalView

N_DRAWS = int(os.environ.get("NBTRAIN_FLIPS", "24"))
SECRET = "the content of a file outside"
ESCAPES = "\x1b[2J\x1b]0;title\x07\r\x9b31m\u202egpj.exe\u2066\u200e\x00\x7f\ud800"
MARKUP = "<script>alert(1)</script>\" onload='alert(2)'"
Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = make_trainer(save_path=tmp_path_factory.mktemp("runs"))
    trainer.run(2, make_loader(), make_valid())
    return trainer.run_dir


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def write_lines(folder: Path, lines: list[Any]) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def each(kind: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the events of a kind."""

    def do(folder: Path) -> None:
        lines = lines_of(folder)
        for line in lines:
            if kind in (line["kind"], "all"):
                change(line)
        write_lines(folder, lines)

    return do


def data(kind: str, **values: Any) -> Change:
    return each(kind, lambda line: line["data"].update(values))


def row(**values: Any) -> Change:
    return each("epoch", lambda line: line["data"]["row"].update(values))


def progress(**values: Any) -> Change:
    return each("all", lambda line: line["progress"].update(values))


def add(*lines: Any) -> Change:
    """Add lines behind the first one, as JSON or as bytes."""
    raw = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)

    def do(folder: Path) -> None:
        first, rest = (folder / "events.jsonl").read_bytes().split(b"\n", 1)
        (folder / "events.jsonl").write_bytes(first + b"\n" + raw + rest)

    return do


def record(**values: Any) -> Change:
    """Change fields of provenance.json; None deletes one."""

    def do(folder: Path) -> None:
        content = json.loads((folder / "provenance.json").read_text()) | values
        kept = {name: value for name, value in content.items() if value is not None or name not in values}
        (folder / "provenance.json").write_text(json.dumps(kept))

    return do


def replaced(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def linked(name: str, target: str) -> Change:
    """A link in place of a file. `outside`: a file beside the run folder."""

    def do(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(str(folder.parent / "outside") if target == "outside" else target)

    return do


def fifo(name: str) -> Change:
    def do(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return do


def folder_for(name: str) -> Change:
    def do(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return do


def renamed(name: str) -> Change:
    return lambda folder: folder.rename(folder.with_name(name))


NOTE = {"kind": "note", "progress": {}, "time_s": 0, "data": {"text": f"{ESCAPES}{MARKUP}"}}
MARK = NOTE | {"kind": "mark"}
SOURCES = {"source": {"values": {}, "definitions": [], "no_source": []}}
TRIES: dict[str, Change] = {
    "a note and a mark with escapes": add(NOTE, MARK),
    "a title with escapes": data("start", title=ESCAPES, model=MARKUP, device="a\nb\tc"),
    "a metric with escapes": row(**{f"val_{ESCAPES}": 1.0, f"train_{MARKUP}": 2.0, "val_a\nb": 1.0}),
    "a metric with formulas": row(**{"val_$\\frac$": 1.0, "val_$": 2.0, "_": 3.0}),
    "a metric without a name": row(**{"": 1.0}),
    "a reason with escapes": data("end", reason=ESCAPES + MARKUP),
    "a monitor with escapes": data("start", monitor=f"val_{ESCAPES}"),
    "an unknown mode": data("start", monitor_mode="up"),
    "a monitor that is a list": data("start", monitor=["val_loss"]),
    "no monitor": each("start", lambda line: line["data"].pop("monitor")),
    "a best that is text": data("start", best="me"),
    "a best with infinity": data("start", best={"epoch": 1, "step": 1, "val_loss": "inf"}),
    "a number of batches with markup": progress(n_batches=MARKUP),
    "huge counts": progress(epoch=2**62, n_epochs=2**62, step=2**62, batch=2**62, n_batches=1),
    "larger counts": progress(epoch=10**400),
    "negative counts": progress(epoch=-1, step=-5),
    "no number for a time": progress(elapsed_s="NaN"),
    "a time that never ends": progress(elapsed_s=1e308),
    "more digits than Python reads": add(b'{"kind":"note","progress":{"step":' + b"9" * 5000 + b'},"data":{"text":""}}'),
    "huge values": row(train_loss=1e308, val_loss=-1e308, lr=10**18),
    "values without end": row(train_loss=10**400, time_s=10**30),
    "NaN everywhere": row(train_loss="nan", val_loss=float("nan"), lr="inf", time_s="-inf"),
    "an epoch that is text": row(epoch="one"),
    "an epoch that is a fraction": row(epoch=1.5),
    "no epoch": each("epoch", lambda line: line["data"]["row"].pop("epoch")),
    "no step": each("all", lambda line: line["data"].get("row", {}).pop("step", None)),
    "a row that is a list": each("epoch", lambda line: line["data"].update(row=[1, 2])),
    "a value that is a dict": row(val_loss={"a": 1}),
    "a value that is text": row(val_loss="good"),
    "a missing value": row(val_loss=None),
    "a time that is text": row(time_s="1 s"),
    "blocks of a wrong length": data("steps", n=10**12),
    "blocks of text": data("steps", values={"train_loss": ["a"] * 5}),
    "blocks that are numbers": data("steps", values=3),
    "no samples": each("steps", lambda line: line["data"].pop("samples")),
    "an unknown state": add({"kind": "state", "progress": {}, "data": {"state": "flying"}}),
    "an unknown end": data("end", status="won"),
    "an unknown kind": add({"kind": ["start"], "progress": {}}, {"kind": "party", "progress": {}, "data": {}}),
    "data that is a list": each("all", lambda line: line.update(data=[])),
    "a progress that is text": each("all", lambda line: line.update(progress="far")),
    "unknown fields": each("all", lambda line: line.update(more=1)),
    "lines of other JSON": add(1, None, [], {}, "text", [[1]]),
    "deep nesting": add(b"[" * 100_000, b'{"kind":"note","progress":{},"data":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}"),
    "a header that is nested": data("start", title=json.loads("[" * 500 + "]" * 500)),
    "binary rubbish": add(bytes(range(256)), b"\xff\xfe", b"\x00" * 4096),
    "a huge line": add(b"x" * 2_000_000, json.dumps(NOTE | {"data": {"text": "y" * 1_000_000}}).encode()),
    "a folder that is cut off": lambda folder: replaced("events.jsonl", (folder / "events.jsonl").read_bytes()[:900])(folder),
    "no events": replaced("events.jsonl", b""),
    "rubbish alone": replaced("events.jsonl", bytes(range(256)) * 4),
    "events that are a folder": folder_for("events.jsonl"),
    "events that are a pipe": fifo("events.jsonl"),
    "events that are a device": linked("events.jsonl", "/dev/zero"),
    "events that lie outside": linked("events.jsonl", "outside"),
    "events in a ring": linked("events.jsonl", "events.jsonl"),
    "a record that is cut off": lambda folder: replaced("provenance.json", (folder / "provenance.json").read_bytes()[:100])(folder),
    "a record of bytes": replaced("provenance.json", bytes(range(256))),
    "a record that is a list": replaced("provenance.json", b"[1]"),
    "a record that is deep": replaced("provenance.json", b'{"arguments":' * 100_000),
    "a record that is nested": record(arguments={"a": json.loads("[" * 800 + "]" * 800)}),
    "a record that is empty": replaced("provenance.json", b"{}"),
    "a record without fields": record(versions=None, command=None, git=None, runs=None),
    "a record of wrong types": record(command="ls", versions=[1], git="main", runs={"a": 1}, arguments=3, seed=[], python=3, device=None),
    "sources of wrong types": record(sources={"source": {"values": [], "no_source": {}}}),
    "sources that are no dicts": record(sources=[1, 2], runs=[1]),
    "no sources": record(sources={}),
    "a record with escapes": record(arguments={ESCAPES: MARKUP}, command=[ESCAPES], git={"commit": ESCAPES, "branch": ESCAPES, "dirty": 1}),
    "git of wrong types": record(git={"commit": 5, "branch": {}, "dirty": []}),
    "a record that is a pipe": fifo("provenance.json"),
    "a record that lies outside": linked("provenance.json", "outside"),
    "source with escapes": replaced("source/steps.py", ESCAPES.encode("utf-8", "surrogatepass") + b"\xff\xfe"),
    "source that lies outside": linked("source/steps.py", "outside"),
    "source in a ring": linked("source/steps.py", "steps.py"),
    "source that is a pipe": fifo("source/steps.py"),
    "source that is missing": lambda folder: shutil.rmtree(folder / "source"),
    "source by a path that leads out": record(sources={"../../elsewhere": SOURCES["source"]}),
    "source by an absolute path": record(sources={"/etc": SOURCES["source"]}),
    "source by no path": record(sources={"a\x00b": SOURCES["source"], "x" * 300: SOURCES["source"]}),
    "a folder with escapes": renamed("run-001\x1b[2J\u202e<b>$"),
}


class Stopped(Exception):
    pass


def stop(seconds: float) -> None:
    raise Stopped


def followed(folder: Path, view: Callable[[io.StringIO], Any]) -> str:
    stream = io.StringIO()
    try:
        follow(recorded_events(folder), view(stream), wait=stop)
    except Stopped:
        pass
    shown = stream.getvalue()
    return shown.replace("\r", "").replace("\x1b[K", "")  # what the terminal view writes itself


def board_of(folder: Path) -> text.Board:
    board = text.Board()
    for event in read_events(folder):
        board.update(event)
    return board


def loaded(folder: Path) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = load_run(folder)
    return "\n".join([repr(history), *(str(warning.message) for warning in caught)])


def listed(*folders: Path) -> Runs:
    return Runs(run for folder in folders for run in runs(folder))


READERS: dict[str, Callable[[Path, Path], str]] = {
    "show": lambda folder, other: show(folder),
    "diff": lambda folder, other: diff(folder, other) + diff(other, folder),
    "follow in a terminal": lambda folder, other: followed(folder, TerminalView),
    "follow in a log": lambda folder, other: followed(folder, LogView),
    "compare": lambda folder, other: repr(compare(folder, other)),
    "load_run": lambda folder, other: loaded(folder),
    "the record": lambda folder, other: text.record_text(board_of(folder)),
    "the record as HTML": lambda folder, other: html.record_html(board_of(folder)) + html.status_html(board_of(folder)),
    "several runs": lambda folder, other: repr(listed(folder, other)),
    "several runs as HTML": lambda folder, other: listed(folder, other)._repr_html_(),
    "a comparison as HTML": lambda folder, other: compare(folder, other)._repr_html_() + read_history(folder)._repr_html_(),
}  # fmt: skip
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    (tmp_path / "outside").write_text(SECRET)
    (tmp_path.parent / "elsewhere").mkdir(exist_ok=True)
    (tmp_path.parent / "elsewhere" / "steps.py").write_text(SECRET)
    return Path(shutil.copytree(whole, tmp_path / "run-001"))


class Obeyed(HTMLParser):
    """Collects what a browser would obey: elements that nbtrain never writes, and attributes with code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag] if tag in ("script", "b") else [name for name, _ in attrs if name.startswith("on")]


def obeyed_markup(page: str) -> list[str]:
    parser = Obeyed()
    parser.feed(page)
    parser.close()
    return parser.found


def test_markup_that_a_browser_obeys_is_found() -> None:
    assert obeyed_markup(f"<i>{MARKUP}</i>") == ["script"] and obeyed_markup(f'<i title="{MARKUP}">') == ["onload"]
    assert obeyed_markup(f'<i title="{escape(MARKUP)}">{escape(MARKUP)}</i>') == []


def check(name: str, folder: Path, other: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph|Attempt|overflow|invalid value|No artists")  # of matplotlib
        try:
            shown = READERS[name](folder, other)
        except NbtrainError as error:
            assert SECRET not in str(error)
            return
    assert CONTROL.findall(shown) == [] and SECRET not in shown
    assert "HTML" not in name or not obeyed_markup(shown)


@pytest.mark.parametrize("name", TRIES)
def test_a_hostile_run_folder_is_shown_or_refused(name: str, folder: Path, whole: Path) -> None:
    TRIES[name](folder)
    (found,) = (path for path in folder.parent.iterdir() if path.name.startswith("run-"))
    file = found / "events.jsonl"
    is_changed = found != folder or not file.is_file() or file.is_symlink() or file.read_bytes() != (whole / "events.jsonl").read_bytes()
    for reader in READERS if is_changed else ("show", "diff"):
        check(reader, found, whole)


NASTY: list[Any] = [
    None, True, -1, 0, 2**62, 2**64, 10**30, 0.5, 1e308, float("nan"), float("-inf"),
    "", "nan", ESCAPES, MARKUP, "../..", [], [None], {}, {"a": {}},
]  # fmt: skip


def change_somewhere(value: Any, rng: random.Random) -> Any:
    """`value` with one of the values in it replaced, left out or under another key."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return rng.choice(NASTY)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    chance = rng.random()
    if chance < 0.1 and isinstance(value, dict):
        return {name: item for name, item in value.items() if name != key}
    if chance < 0.2 and isinstance(value, dict):
        return value | {rng.choice([ESCAPES, MARKUP, "", "step"]): value[key]}
    value = value.copy()
    value[key] = change_somewhere(value[key], rng)
    return value


def change_at_random(folder: Path, rng: random.Random) -> None:
    """Some values of the records are others, or some bits of the files."""
    if rng.random() < 0.5:
        name = rng.choice(["events.jsonl", "provenance.json", "source/steps.py"])
        raw = bytearray((folder / name).read_bytes())
        for _ in range(rng.choice([1, 2, 30])):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.2 else raw)
        return
    write_lines(folder, [change_somewhere(line, rng) if rng.random() < 0.3 else line for line in lines_of(folder)])
    content = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps(change_somewhere(content, rng) if rng.random() < 0.7 else content))


def test_run_folders_that_are_changed_at_random_are_shown_or_refused(folder: Path, whole: Path) -> None:
    for seed in range(N_DRAWS):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        change_at_random(folder, random.Random(seed))
        for reader in READERS if seed % 20 == 0 else [name for name in READERS if "comparison" not in name]:  # it draws a figure
            check(reader, folder, whole)


def test_what_is_damaged_is_said_in_one_line_and_the_rest_is_shown(folder: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(b"rubbish", {"kind": "party"})(folder)
    record(git=3, runs=None)(folder)
    (folder / "source" / "steps.py").unlink()
    lines = show(folder).splitlines()
    said = f"note: 2 of {len(lines_of(whole)) + 2} lines of events.jsonl are damaged and left out; the first is line 2."
    assert said in lines and "  damaged  3" in lines
    assert lines[1].startswith("Regress · Sequential") and "Origin" in lines and lines[-1] == "source/steps.py is missing."
    assert said.replace("note: ", "note: a: ") in diff(folder, whole).splitlines()
    assert repr(compare(folder)).splitlines()[-1] == said.replace("note: ", "note: run-001: ")
    with pytest.warns(UserWarning, match="2 of .* lines of events.jsonl are damaged"):
        assert load_run(folder).epochs == load_run(whole).epochs
    assert main(["follow", str(folder)]) == 0
    followed = capsys.readouterr().out.splitlines()
    assert [line for line in followed if "damaged" in line] == [f"note: line {n} of events.jsonl is damaged, and left out." for n in (2, 3)]
    assert followed[-1].startswith("✓ completed")


def test_a_record_that_is_damaged_is_said_by_show_and_diff(folder: Path, whole: Path) -> None:
    (folder / "provenance.json").write_text("{")
    assert "note: provenance.json is damaged: it is not JSON." in show(folder).splitlines()
    assert "note: b: provenance.json is damaged: it is not JSON." in diff(whole, folder).splitlines()


def test_errors_of_the_command_line_show_escapes_as_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a\x1b[2J" / "run-001"
    run.mkdir(parents=True)
    (tmp_path / "outside").write_text("{}")
    (run / "events.jsonl").symlink_to(tmp_path / "outside")
    assert main(["show", str(run.parent)]) == 2
    shown = capsys.readouterr().err
    assert "events.jsonl is not read: it leads out of the run folder." in shown and "a\\x1b[2J" in shown and "\x1b" not in shown


NO_RUN = {
    "too long": ("x" * 300, "can't be read: File name too long"),
    "with a zero": ("a\x00b", r"'a\\x00b'"),
    "missing": ("nowhere", "No run was recorded in 'nowhere'"),
    "empty": ("", "No run was recorded in"),
}


@pytest.mark.parametrize(("path", "said"), NO_RUN.values(), ids=NO_RUN)
def test_a_path_that_is_none_is_refused(path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for read in (show, compare, load_run):
        with pytest.raises(ConfigError, match=said):
            read(path)


def test_an_event_of_a_stranger_never_has_other_types() -> None:
    good = {"kind": "note", "progress": {}, "time_s": 0, "data": {"text": "a"}}
    assert Event.from_json(json.dumps(good)).data == {"text": "a"}
    for change in (
        {"time_s": "now"},
        {"data": {"text": 3}},
        {"data": None},
        {"progress": {"run": 1.5}},
        {"progress": {"phase": "lunch"}},
        {"kind": "end"},
    ):
        with pytest.raises(ValueError, match="not an event"):
            Event.from_json(json.dumps(good | change))
