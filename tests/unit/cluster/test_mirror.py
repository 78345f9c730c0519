"""Runs that are mirrored to a store: resumed on another disk exactly, followed and commanded from there, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from samples import Regress, make_loader, make_trainer, make_valid, same_weights, without_times

import nbtrain
from nbtrain import ConfigError, OptionError, StateManagerAddon
from nbtrain.cluster import mirror as mirror_module
from nbtrain.cluster.jobs import _actions

URL = "memory://commanded"
Saving = Regress.add_on(StateManagerAddon)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(mirror_module, "_EVERY_S", 0.05)
    return fsspec.filesystem("memory")


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def copied(store: Any, run_dir: Path, root: str = "mirrored") -> bool:
    """Whether all checkpoints, each as a whole, and the whole record are in the store."""
    paths = [path for path in (run_dir / "checkpoints").iterdir() if not path.is_symlink() and not path.name.startswith(".")]
    local = {path.name: path.stat().st_size for path in paths}
    there = {name.rpartition("/")[2]: store.size(name) for name in store.glob(f"/{root}/{run_dir.name}/checkpoints/*")}
    record = f"/{root}/{run_dir.name}/events.jsonl"
    return local.items() <= there.items() and store.exists(record) and store.cat_file(record) == (run_dir / "events.jsonl").read_bytes()


class Stopping(Saving):
    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.processed == 6 and not self.resumed:
            self.control.stop()
        return super().train_step(batch)


def test_a_run_resumes_from_the_store_on_another_disk_exactly(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, mirrors = mirror_module._Mirror.start, list[Any]()
    monkeypatch.setattr(mirror_module._Mirror, "start", lambda mirror: (mirrors.append(mirror), start(mirror)))
    whole = make_trainer(Saving, save_path=tmp_path / "whole", seed=1)
    whole.run(3, make_loader(), make_valid())
    here = make_trainer(Stopping, save_path=tmp_path / "here", seed=1)
    nbtrain.mirror(here, "memory://mirrored")
    assert here.run(3, make_loader(), make_valid(), resume="auto").status == "stopped"
    mirrors[0].update()  # from now on it has nothing to copy: this store shows half a file while that is written again
    assert copied(store, here.run_dir)
    there = make_trainer(Saving, save_path=tmp_path / "there", seed=1)
    nbtrain.mirror(there, "memory://mirrored")
    assert there.run(3, make_loader(), make_valid(), resume="auto").status == "completed" and there.run_dir.name == "run-001"
    assert same_weights(whole.model, there.model) and whole.counts == there.counts
    assert without_times(whole.history.epochs) == without_times(there.history.epochs)
    until(lambda: copied(store, there.run_dir))
    assert (there.run_dir / "checkpoints" / "best.ckpt").exists()
    with pytest.raises(ConfigError, match="The store has more of run-001 than save_path.\n  .*\n  Give an empty save_path to continue"):
        nbtrain.mirror(make_trainer(Saving, save_path=tmp_path / "here"), "memory://mirrored")


def test_commands_in_the_store_reach_a_run_that_is_on(store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, seed=1)
    nbtrain.mirror(trainer, URL)
    handle = trainer.run(100_000, make_loader(), make_valid(), background=True)
    until(lambda: store.exists("/commanded/run-001/events.jsonl") and store.exists("/commanded/run-001/.writer"))
    assert json.loads(store.cat_file("/commanded/run-001/.writer"))["beat_s"] <= time.time()
    actions = _actions(URL)
    actions["pause"]()
    until(lambda: handle.status == "paused")
    nbtrain.command(URL, "set", weight_decai=0.0)
    nbtrain.command(URL, "set", lr=0.002)
    store.pipe_file("/commanded/run-001/job/1.json", b"import os")
    actions["save"]()
    actions["continue"]()
    until(lambda: len(trainer.history.marks) == 2)
    actions["stop"]()
    assert handle.wait().status == "stopped" and trainer.optimizer.param_groups[0]["lr"] == 0.002
    until(lambda: copied(store, trainer.run_dir, "commanded"))
    text = store.cat_file("/commanded/run-001/events.jsonl").decode()
    assert "Adam has no option 'weight_decai'." in text and "A line of commands.jsonl is not a command" in text
    assert not store.glob("/commanded/run-001/job/*.json")
    trainer.show(URL)
    assert "stopped" in capsys.readouterr().out


def test_what_can_not_be_mirrored_or_commanded_is_refused_at_once(store: Any, tmp_path: Path) -> None:
    url = "memory://refused"
    with pytest.raises(ConfigError, match="A mirrored run needs a folder on this machine"):
        nbtrain.mirror(make_trainer(), url)
    with pytest.raises(ConfigError, match="'s4://bucket' can't be written: Protocol not known: s4"):
        nbtrain.mirror(make_trainer(save_path=tmp_path), "s4://bucket")
    with pytest.raises(ConfigError, match="'file:///proc/runs' can't be written: "):
        nbtrain.mirror(make_trainer(save_path=tmp_path), "file:///proc/runs")
    make_trainer(Saving, save_path=tmp_path / "a").run(1, make_loader())
    store.put(str(tmp_path / "a" / "run-001"), "/refused/run-001", recursive=True)
    with pytest.raises(ConfigError, match="The run in 'memory://refused' takes no commands"):
        nbtrain.command(url, "stop")
    assert _actions(url) == {} and _actions("memory://nowhere") == {}
    store.pipe_file("/refused/run-001/.mirror", b"a key")
    with pytest.raises(ConfigError, match="The store's run run-001 is not that of save_path"):
        nbtrain.mirror(make_trainer(save_path=tmp_path / "a"), url)
    with pytest.raises(OptionError, match="stop takes no options"):
        nbtrain.command(url, "stop", lr=1.0)


def test_a_store_that_fails_is_noted_once_and_the_run_goes_on(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, seed=1)
    nbtrain.mirror(trainer, "memory://fails")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no route to the store")

    monkeypatch.setattr(type(store), "pipe_file", fail)
    handle = trainer.run(100_000, make_loader(), background=True)
    until(lambda: "The run is not mirrored: no route to the store" in (trainer.run_dir / "events.jsonl").read_text())
    time.sleep(0.3)
    monkeypatch.undo()
    until(lambda: store.exists("/fails/run-001/events.jsonl"))
    trainer.stop()
    assert handle.wait().status == "stopped"
    assert (trainer.run_dir / "events.jsonl").read_text().count("is not mirrored") == 1


def test_a_store_writes_no_file_outside_of_the_run(store: Any, tmp_path: Path) -> None:
    store.pipe_file("/hostile/run-001/events.jsonl", b"")
    store.store["/hostile/run-001/../../../evil"] = store.store["/hostile/run-001/events.jsonl"]
    with pytest.raises(ConfigError, match=r"/hostile/run-001/\.\./\.\./\.\./evil is outside of the run\.\n"):
        nbtrain.mirror(make_trainer(Saving, save_path=tmp_path / "runs"), "memory://hostile")
    assert not list(tmp_path.rglob("evil")) and not list((tmp_path / "runs").glob("*"))


def test_a_folder_is_not_mirrored_onto_itself(tmp_path: Path) -> None:
    for url in (str(tmp_path), tmp_path.as_uri()):
        with pytest.raises(ConfigError, match="is the save_path itself"):
            nbtrain.mirror(make_trainer(Saving, save_path=tmp_path), url)
