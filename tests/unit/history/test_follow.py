"""Runs seen from outside: followed as they are on, and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import make_loader, make_trainer, make_valid

from nbtrain import ConfigError, compare, load_run
from nbtrain.cli import main
from nbtrain.events import Event
from nbtrain.history.run_lock import SignOfLife
from nbtrain.library.follow import follow, recorded_events


class Kinds:
    """A view that keeps what kinds of events came, and says when an epoch was among them."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.saw_epoch = threading.Event()

    def update(self, event: Event) -> None:
        self.kinds.append(event.kind)
        if event.kind == "epoch":
            self.saw_epoch.set()


def test_a_run_that_is_on_is_followed_to_its_end(tmp_path: Path) -> None:
    trainer, view = make_trainer(save_path=tmp_path), Kinds()
    begun = threading.Event()

    class Waits:
        """The second epoch begins when the follower has seen the first."""

        def __iter__(self) -> Iterator[Any]:
            if begun.is_set():
                assert view.saw_epoch.wait(20)
            begun.set()
            yield from make_loader()

    running = threading.Thread(target=trainer.run, args=(2, Waits()))
    running.start()
    assert begun.wait(20)
    follow(recorded_events(tmp_path), view)
    running.join()
    assert [kind for kind in view.kinds if kind != "steps"] == ["start", "epoch", "epoch", "end"]


def test_following_a_run_that_was_killed_ends_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(save_path=tmp_path).run(1, make_loader())
    events = tmp_path / "run-001" / "events.jsonl"
    events.write_text("".join(line + "\n" for line in events.read_text().splitlines() if json.loads(line)["kind"] != "end"))
    code = "import sys, pathlib; from nbtrain.history.run_lock import RunLock; lock = RunLock(pathlib.Path(sys.argv[1]))"
    code += "; lock.take(); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(events.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert SignOfLife(events.parent).gone() == ""
        process.kill()
        process.wait()
        assert main(["follow", str(tmp_path)]) == 0
        assert f"interrupted · process {process.pid} has ended without a last word" in capsys.readouterr().out
        make_trainer().show(tmp_path)
        assert "has ended without a last word" in capsys.readouterr().out


def test_a_run_of_another_machine_is_given_up_after_ten_minutes_without_a_sign_of_life(tmp_path: Path) -> None:
    file, time_s = tmp_path / ".writer", [0.0]
    file.write_text(json.dumps({"pid": 1, "host": "gpu-3", "space": "other", "start": "5"}))
    os.utime(file, (1e6, 1e6))
    life = SignOfLife(tmp_path, clock=lambda: time_s[0], now=lambda: 1e6 + time_s[0])
    for at_s, touched_s in ((0, 0), (599, 0), (620, 619), (1200, 619)):  # a slow step, a pause, clocks that differ by an hour
        time_s[0] = at_s
        os.utime(file, (1e6 + touched_s, 1e6 + touched_s))
        assert life.gone() == ""
    time_s[0] = 1221
    assert life.gone().startswith("no sign of life from gpu-3 since ") and life.gone().endswith("or the machine sleeps or is cut off")
    first = SignOfLife(tmp_path, clock=lambda: time_s[0], now=lambda: 1e6 + 5000)
    assert first.gone() == ""  # its clock may be wrong
    time_s[0] += 91
    assert first.gone() != ""
    (tmp_path / ".writer").unlink()
    assert first.gone() == ""


def test_a_run_whose_file_grows_and_begins_again_is_followed(tmp_path: Path) -> None:
    make_trainer(save_path=tmp_path).run(2, make_loader())
    file = tmp_path / "run-001" / "events.jsonl"
    whole = file.read_bytes()
    pieces = [whole[:300], whole[:-20], whole]
    file.write_bytes(whole[:700])
    view = Kinds()
    follow(recorded_events(tmp_path), view, wait=lambda seconds: file.write_bytes(pieces.pop(0)) and None)
    assert pieces == [] and [kind for kind in view.kinds if kind in ("epoch", "end")] == ["epoch", "epoch", "end"]


def test_a_run_elsewhere_is_shown_by_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(save_path=tmp_path).run(1, make_loader())
    make_trainer().show(tmp_path)
    assert "✓ completed · 1 epoch" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="No run was recorded in '/nowhere'"):
        make_trainer().show(Path("/nowhere"))


def test_follow_shows_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(save_path=tmp_path)
    trainer.run(1, make_loader(), make_valid())
    trainer.run(1, make_loader(), make_valid())
    assert main(["follow", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Regress · Sequential") and lines[-1].startswith("✓ completed · 2 epochs · 00:00")
    assert main(["follow", str(tmp_path / "nowhere")]) == 2


def test_compare_prints_a_table_and_writes_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        make_trainer(save_path=tmp_path, seed=seed).run(2, make_loader(), make_valid())
    runs = [str(tmp_path / name) for name in ("run-001", "run-002")]
    for name, start in (("c.png", b"\x89PNG"), ("c.html", b"<!DOCTYPE html>")):
        assert main(["compare", *runs, "--output", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
        table = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in table[:3]] == ["run", "run-001", "run-002"]
        assert sum("★" in line for line in table) == 1
    assert main(["compare", runs[0], "--output", str(tmp_path / "c.svg")]) == 2


def test_a_comparison_holds_what_load_run_gives(tmp_path: Path) -> None:
    trainer = make_trainer(save_path=tmp_path)
    trainer.run(1, make_loader())
    assert compare(tmp_path).histories["run-001"].epochs == load_run(tmp_path).epochs == trainer.history.epochs
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare()


def test_runs_with_different_metrics_and_without_epochs_are_compared(tmp_path: Path) -> None:
    make_trainer(save_path=tmp_path / "a").run(1, make_loader())
    make_trainer(save_path=tmp_path / "b").run(0, make_loader())
    make_trainer(save_path=tmp_path / "c", mode="test").run(1, make_valid())
    comparison = compare(*(tmp_path / name for name in "abc"))
    assert len(comparison.table().splitlines()) == 4 and len(comparison.plot().axes) > 0
