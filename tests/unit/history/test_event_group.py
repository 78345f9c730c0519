"""The events of short epochs reach the run folder in groups, and whoever reads it finds whole lines without a gap."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from samples import make_loader, make_trainer, make_valid

from nbtrain.events import Event, Progress
from nbtrain.history.event_group import EventGroup
from nbtrain.history.history import History
from nbtrain.history.run_folder import RunFolder, load_run
from nbtrain.library.follow import follow, recorded_events


def epoch(n: int) -> Event:
    return Event("epoch", Progress(epoch=n), data={"row": {"epoch": n, "step": n, "processed": n, "train_loss": 1 / n}})


class Groups:
    """An EventGroup on a clock that stands, and what it has passed on."""

    def __init__(self) -> None:
        self.now_s, self.seen = 0.0, list[list[int]]()
        self.group = EventGroup(lambda events: self.seen.append([e.progress.epoch for e in events]), every_s=0.2, clock=lambda: self.now_s)

    def at(self, now_s: float, event: Event) -> None:
        self.now_s = now_s
        self.group.update(event)


def test_short_epochs_are_passed_on_five_times_a_second() -> None:
    groups = Groups()
    for n in range(1, 1001):
        groups.at(n / 1000, epoch(n))
    groups.group.flush()
    assert [n for group in groups.seen for n in group] == list(range(1, 1001))
    assert 5 <= len(groups.seen) <= 8


def test_long_epochs_and_what_is_no_number_are_passed_on_at_once() -> None:
    groups = Groups()
    for n in range(1, 6):
        groups.at(n * 10.0, epoch(n))
        assert groups.seen[-1] == [n]
    groups.at(50.01, epoch(6))
    assert groups.seen[-1] == [5]
    groups.at(50.02, Event("note", Progress(epoch=6), data={"text": "a note"}))
    assert groups.seen[-1] == [6, 6]


def test_what_is_held_back_comes_without_another_event() -> None:
    seen: list[int] = []
    group = EventGroup(lambda events: seen.extend(e.progress.epoch for e in events), every_s=0.05)
    for n in range(1, 4):
        group.update(epoch(n))
    deadline = time.monotonic() + 20
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen == [1, 2, 3]


def test_nothing_is_held_back_where_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Timer) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 does

    monkeypatch.setattr(threading.Timer, "start", refuse)
    groups = Groups()
    for n in range(1, 4):
        groups.at(n / 1000, epoch(n))
    assert [n for group in groups.seen for n in group] == [1, 2, 3]


def test_what_fails_in_the_timer_is_raised_at_the_next_event() -> None:
    def broken(events: list[Event]) -> None:
        if any(event.progress.epoch == 2 for event in events):
            raise OSError("no room")

    group = EventGroup(broken, every_s=0.05)
    group.update(epoch(1))
    group.update(epoch(2))
    deadline = time.monotonic() + 20
    while group._error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(OSError, match="no room"):
        group.update(epoch(3))


def test_a_folder_removed_between_two_groups_has_every_row_once(tmp_path: Path) -> None:
    history, path = History(), tmp_path / "run-001"
    path.mkdir()
    folder = RunFolder(path, history)

    def add(*numbers: int) -> None:
        for n in numbers:
            history.update(epoch(n))
        folder.update_all([epoch(n) for n in numbers])

    folder.update(Event("start", Progress(), data={"monitor": "val_loss", "monitor_mode": "min"}))
    add(1, 2)
    (path / "events.jsonl").unlink()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        add(3, 4)
    add(5)
    assert [row["epoch"] for row in load_run(path).epochs] == [1, 2, 3, 4, 5]


def test_run_folder_holds_a_beginning_of_the_history_at_any_moment(tmp_path: Path) -> None:
    seen: list[int] = []

    class Looks(L.Callback):
        def on_train_epoch_end(self, pl_trainer: Any, pl_module: Any) -> None:
            if pl_trainer.current_epoch % 10 == 9:
                rows = load_run(tmp_path).epochs
                assert rows == pl_module.owner.history.epochs[: len(rows)]
                seen.append(len(rows))

    trainer = make_trainer(save_path=tmp_path, lightning={"callbacks": [Looks()]})
    trainer.run(100, make_loader(16), make_valid(16))
    assert seen == sorted(seen) and len(seen) == 10
    recorded = load_run(tmp_path)
    assert recorded.epochs == trainer.history.epochs and recorded.validations == trainer.history.validations
    assert all(recorded.steps[phase].state_dict() == trainer.history.steps[phase].state_dict() for phase in ("train", "valid"))
    shown: list[Event] = []

    class Shown:
        def update(self, event: Event) -> None:
            shown.append(event)

    follow(recorded_events(tmp_path), Shown())
    assert [event.progress.epoch for event in shown if event.kind == "epoch"] == list(range(1, 101)) and shown[-1].kind == "end"


def test_a_checkpoint_is_not_ahead_of_the_run_folder(tmp_path: Path) -> None:
    behind: list[tuple[int, int]] = []

    class Saves(L.Callback):
        def on_train_epoch_end(self, pl_trainer: Any, pl_module: Any) -> None:
            if pl_trainer.current_epoch in (3, 17):
                pl_trainer.save_checkpoint(tmp_path / "now.ckpt")
                behind.append((len(load_run(tmp_path).epochs), len(pl_module.owner.history)))

    make_trainer(save_path=tmp_path, lightning={"callbacks": [Saves()]}).run(20, make_loader(16))
    assert behind == [(3, 3), (17, 17)]  # callbacks of a user come before the epoch's row


_ENDLESS = """
import torch
from nbtrain import Trainer

class Short(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

trainer = Short(torch.nn.Linear(4, 1), device="cpu", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), save_path=__FOLDER__, log_bar=False)
trainer.run(10**6, [torch.ones(8, 4)])
"""


@pytest.mark.long
def test_rows_of_a_killed_run_of_short_epochs_are_without_a_gap(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _ENDLESS.replace("__FOLDER__", repr(str(tmp_path)))])
    file, deadline = tmp_path / "run-001" / "events.jsonl", time.monotonic() + 120
    while (not file.exists() or file.stat().st_size < 200_000) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    history = load_run(tmp_path)
    assert [row["epoch"] for row in history.epochs] == list(range(1, len(history) + 1)) and len(history) > 100
    assert list(history.steps["train"].steps) == list(range(1, len(history.steps["train"]) + 1))
