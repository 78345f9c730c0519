"""Submitted runs, with submitit's local executor: what is sent, commands, an interruption that resumes exactly, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samples import SEED, Regress, make_loader, make_trainer, make_valid, same_weights, without_times

import nbtrain
from nbtrain import CheckpointError, ConfigError, MultiGPUAddon, OptionError, StateManagerAddon, WorkerError, submitted_jobs
from nbtrain.cli import main
from nbtrain.cluster.command_file import CommandFile, make_folder, send
from nbtrain.cluster.jobs import JobHandle
from nbtrain.cluster.ray_cluster import own_versions
from nbtrain.cluster.submit import JobInfo, SubmittedRun, minutes, new_info
from nbtrain.rng import keep_random
from nbtrain.views.text import Board


class Gated(Regress):
    """Waits in two of its steps for a file, so that a test knows where the run is."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        at = self.counts.step
        if at in (2, 12) and self.save_path is not None:
            (Path(self.save_path) / f"at-{at}").touch()
            while not (Path(self.save_path) / f"gate-{at}").exists():
                time.sleep(0.01)
        return super().train_step(batch)


Gated.__module__ = Gated.train_step.__module__ = "__main__"  # as a class of a cell: its code is sent


def until(handle: JobHandle, condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 200
    while not condition():
        assert handle.is_on and time.monotonic() < end_s, handle.log()
        time.sleep(0.05)


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_run_elsewhere_is_paused_changed_found_again_and_interrupted_and_ends_as_one_that_ran_here(
    tmp_path: Path, state_home: None, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(Gated, seed=0)
    handle = trainer.submit(3, make_loader(), make_valid(), cluster="local", save_path=tmp_path, name="my job")
    until(handle, (tmp_path / "at-2").exists)
    handle.pause()
    until(handle, lambda: handle.status == "pausing")
    (tmp_path / "gate-2").touch()
    until(handle, lambda: handle.status == "paused")
    with pytest.raises(nbtrain.RunPaused, match="is paused at epoch 1, batch 4\n  handle.resume"):
        handle.wait()

    (found,) = submitted_jobs()  # reads only files, as a new kernel does
    assert (found.name, found.status, found.node, found.run_dir) == ("my_job", "paused", os.uname().nodename, tmp_path / "run-001")
    assert found.since == handle.since and "paused · epoch 1, batch 4" in repr(found) and "paused" in repr(submitted_jobs(tmp_path))
    with pytest.raises(OptionError, match="Did you mean 'weight_decay'"):
        handle.set(weight_decai=0.0)
    found.set(weight_decai=0.0)
    found.set(weight_decay=0.0)
    found.save_state()
    until(handle, lambda: "epoch=0-step=3.ckpt" in os.listdir(tmp_path / "run-001" / "checkpoints"))
    found.resume()
    until(handle, (tmp_path / "at-12").exists)

    started = json.loads((tmp_path / "run-001" / "job" / "started.json").read_text())
    os.kill(started["pid"], signal.SIGUSR2)  # as before the time limit
    (tmp_path / "gate-12").touch()
    result = handle.wait(timeout_s=200)
    assert result.status == handle.status == found.status == "completed" and trainer.result is result and trainer.run_dir == handle.run_dir
    assert "Requeued job" in handle.log() and handle.log().count("Starting with") == 2

    with keep_random():
        after = make_trainer(seed=0)
        after.run(3, make_loader(), make_valid())
        assert same_weights(trainer.model, after.model)
        after.run(1, make_loader(), make_valid())
    assert without_times(trainer.history.epochs) == without_times(after.history.epochs[:3])
    assert "weight_decay 0 → 0" in [text for _, text in trainer.history.marks]
    board = Board()
    for line in (handle.run_dir / "events.jsonl").read_text().splitlines():
        board.update(nbtrain.events.Event.from_json(line))
    assert "Adam has no option 'weight_decai'." in board.notes
    found.show()
    assert "completed" in capsys.readouterr().out
    trainer.run(1, make_loader(), make_valid())  # continues, with the random numbers of the job's end
    assert same_weights(trainer.model, after.model) and len(trainer.history.epochs) == 4


@pytest.mark.long
def test_job_in_another_environment_fails_with_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path)
    info = JobInfo("local", "other", 1, 1, own_versions() | {"torch": "1.0"}, ["/no/such/folder"], str(tmp_path), id="1")
    info.write(tmp_path)
    with pytest.raises(ConfigError, match="The environment is another one"):
        SubmittedRun(tmp_path)()
    handle = JobHandle(tmp_path)
    assert handle.status == "failed" and handle.result is None
    what = f"torch {own_versions()['torch']} here, 1.0 in the notebook; /no/such/folder is not here."
    with pytest.raises(WorkerError, match="ConfigError: The environment is another one: " + what):
        handle.wait()
    with pytest.raises(ConfigError, match="The job is over: failed"):
        handle.pause()
    handle.show()
    assert "✗ failed · ConfigError: The environment is another one: " in capsys.readouterr().out


def test_configuration_is_submitted_from_the_command_line(
    tmp_path: Path, state_home: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start_here(run_dir: Path, payload: bytes, scheduler: Any, name: str) -> None:
        make_folder(run_dir)
        (run_dir / "job" / "payload.pkl").write_bytes(payload)
        new_info(scheduler, name).write(run_dir)
        SubmittedRun(run_dir)()

    monkeypatch.setattr("nbtrain.cluster.jobs.start", start_here)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(SEED)
    fields = ["--compute_config.plan_ngpus=1", "--compute_config.runtime_ngpus=1", "--model.args.nlayers=2", "--dataset.train_args.size=16"]
    assert main(["submit", "run.yaml", "--cluster", "local", "--name", "night", "--seed", "0", *fields]) == 0
    assert "JobHandle(night, job" in capsys.readouterr().out
    (job,) = submitted_jobs()
    assert (
        job.status == "completed" and job.result is not None and job.result.last["epoch"] == 4 and job.run_dir.parent.name == "checkpoints"
    )
    assert main(["submit", "run.yaml", "--nodes", "two"]) == 2
    assert "--nodes must be a number; got two." in capsys.readouterr().err


REFUSED = {
    "slurm": ({}, "SLURM is not here: sbatch is not found"),
    "option": ({"partion": "gpu"}, "submit takes no option 'partion'.\n  Did you mean 'partition'"),
    "nodes": ({"cluster": "local", "nodes": 2}, "nodes=2: cluster='local' is this machine alone"),
    "GPUs": ({"cluster": "local", "gpus_per_node": 99}, "gpus_per_node=99: this machine has"),
    "time": ({"cluster": "local", "time": "soon"}, "time='soon' is not a time limit"),
    "folder": ({"cluster": "local", "save_path": None}, "A submitted run needs a folder that all nodes see"),
    "read-only": ({"cluster": "local", "save_path": "/proc/runs"}, "can't hold a run folder"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_be_submitted_is_refused_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    options, words = REFUSED[kind]
    with pytest.raises(ConfigError) as caught:
        make_trainer().submit(1, make_loader(), **{"save_path": tmp_path, **options})
    assert words in str(caught.value) and list(tmp_path.iterdir()) == []


class Stopping(Regress):
    """Stops after its seventh step, once."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.step == 7 and self.history.last is not None and not self.origin.is_restored and self.save_path is not None:
            self.control.stop()
        return super().train_step(batch)


def begun_here(tmp_path: Path) -> Any:
    """A trainer in the middle of epoch 2, as another process has saved it."""
    kind = Stopping.add_on(StateManagerAddon)
    assert make_trainer(kind, seed=0, save_path=tmp_path / "here").run(3, make_loader(), make_valid()).status == "stopped"
    trainer = make_trainer(Regress.add_on(StateManagerAddon), seed=0, save_path=tmp_path / "here")
    trainer.load_state()
    return trainer


def test_epoch_that_a_job_began_continues_here_in_as_many_processes_and_is_shown_in_others(tmp_path: Path) -> None:
    run_dir = begun_here(tmp_path).run_dir
    make_folder(run_dir)
    JobInfo("local", "far", 1, 1, {}, [], ".", host="elsewhere", id="7").write(run_dir)
    two = make_trainer(Regress.add_on(MultiGPUAddon), device=["cpu", "cpu"], seed=0)
    JobHandle(run_dir).load(two)
    assert two.counts.step == 8 and two.history.last is not None
    with pytest.raises(CheckpointError, match=r"another number of processes: 1, and 2 now.*\n.*\n  load_state\(path\) shows what it has"):
        two.run(2, make_loader(), make_valid())
    one = make_trainer(seed=0)
    JobHandle(run_dir).load(one)
    assert same_weights(one.model, two.model)
    one.run(2, make_loader(), make_valid())
    whole = make_trainer(seed=0)
    whole.run(3, make_loader(), make_valid())
    assert same_weights(one.model, whole.model) and without_times(one.history.epochs) == without_times(whole.history.epochs)


def test_epoch_that_one_process_began_is_not_submitted_to_two(tmp_path: Path) -> None:
    trainer = begun_here(tmp_path)
    what = r"another number of processes: 1, and 2 now.*\n.*\n.*Resume it with as many processes, as by submit\(..., tasks_per_node=1\)"
    with pytest.raises(CheckpointError, match=what):
        trainer.submit(2, make_loader(), cluster="local", tasks_per_node=2, save_path=tmp_path / "jobs")
    assert not (tmp_path / "jobs").exists()


@pytest.mark.long
def test_run_that_was_stopped_here_continues_as_a_job_and_then_here_again(tmp_path: Path, state_home: None) -> None:
    trainer = begun_here(tmp_path)
    handle = trainer.submit(2, make_loader(), make_valid(), cluster="local", save_path=tmp_path / "jobs")
    assert handle.wait().status == "completed" and trainer.counts.epoch == 3
    trainer.run(1, make_loader(), make_valid())
    with keep_random():
        whole = make_trainer(seed=0)
        whole.run(3, make_loader(), make_valid())
        whole.run(1, make_loader(), make_valid())
    assert same_weights(whole.model, trainer.model)
    assert without_times(whole.history.epochs) == without_times(trainer.history.epochs)


def test_job_whose_scheduler_does_not_answer_is_on_as_long_as_its_process_gives_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(save_path=tmp_path).run(1, make_loader())
    monkeypatch.setenv("PATH", str(tmp_path))
    run_dir = tmp_path / "run-001"
    events, job = run_dir / "events.jsonl", make_folder(run_dir)
    events.write_text("".join(line + "\n" for line in events.read_text().splitlines() if json.loads(line)["kind"] != "end"))
    JobInfo("slurm", "far", 1, 1, {}, [], ".", host="login", id="7").write(run_dir)
    assert JobHandle(run_dir).status == "pending: SLURM does not answer"
    (job / "started.json").write_text("{}")
    (run_dir / ".writer").write_text(json.dumps({"pid": 1, "host": "gpu-3", "space": "other"}))
    assert JobHandle(run_dir).status == "running"
    JobInfo("local", "far", 1, 1, {}, [], ".", host="login", id="7").write(run_dir)
    handle = JobHandle(run_dir)
    assert handle.status == "running"
    with pytest.raises(ConfigError, match=r"The job runs on login.\n  Cancel it there; handle.stop\(\) reaches it"):
        handle.cancel()
    handle.stop()
    for limit in ("_SILENT_S", "_CHECK_S"):
        monkeypatch.setattr(f"nbtrain.history.run_lock.{limit}", 0.0)
    handle = JobHandle(run_dir)
    handle.show()
    assert handle.status == "failed" and "no sign of life from gpu-3 since" in str(handle.error)
    assert "interrupted · The job ended without a result (no sign of life from gpu-3" in capsys.readouterr().out


def test_value_that_can_not_be_sent_is_named(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.model.lock = threading.Lock()
    with pytest.raises(WorkerError, match=r"trainer.model.lock \(lock\) can't be sent to the job|lock.* \(lock\) can't be sent to the job"):
        trainer.submit(1, make_loader(), cluster="local", save_path=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_submitit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.cluster.submit.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install submitit"):
        make_trainer().submit(1, make_loader(), cluster="local", save_path=tmp_path)


def test_commands_are_read_once_and_only_from_the_owners_folder(tmp_path: Path) -> None:
    run_dir, notes = tmp_path / "run-001", list[str]()
    run_dir.mkdir(mode=0o777)
    run_dir.chmod(0o777)
    job = make_folder(run_dir)
    assert [oct(folder.stat().st_mode & 0o777) for folder in (run_dir, job)] == ["0o755", "0o700"]
    file, reader = job / "commands.jsonl", CommandFile(run_dir, notes.append)
    assert reader.new() == []
    send(run_dir, "set", lr=0.1)
    send(run_dir, "stop")
    assert reader.new() == [("set", {"lr": 0.1}), ("stop", {})] and reader.new() == []
    with pytest.raises(ConfigError, match="set: .*not JSON serializable"):
        send(run_dir, "set", lr=object())
    with file.open("a") as stream:
        stream.write('{"do": "paus", "options": {}}\n{"do": "stop", "options": {"now": 1}}\n[]\nimport os\n{"do": "sto')
    assert reader.new() == []
    assert notes == [
        "'paus' is not a command. Did you mean 'pause'?",
        "A line of commands.jsonl is not a command, and is left out.",
    ]
    for path, mode in ((file, 0o620), (job, 0o702), (run_dir, 0o775)):
        before = path.stat().st_mode
        path.chmod(mode)
        reader = CommandFile(run_dir, notes.append)
        assert reader.new() == [] and "others may write to it" in notes[-1]
        path.chmod(before)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert CommandFile(run_dir, notes.append).new() == [] and notes[-1] == "commands.jsonl is not read: it is a link."
    job.rename(tmp_path / "job")
    job.symlink_to(tmp_path / "job")
    assert CommandFile(run_dir, notes.append).new() == [] and notes[-1] == "job is not read: it is not a folder."
    with pytest.raises(ConfigError, match="is not a folder"):
        send(run_dir, "stop")


def test_files_of_another_user_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path)
    send(tmp_path, "stop")
    owner = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    notes: list[str] = []
    assert CommandFile(tmp_path, notes.append).new() == [] and f"belongs to another user (number {owner})" in notes[0]
    assert len(submitted_jobs(tmp_path.parent)) == 0


def test_time_limits_are_those_of_sbatch() -> None:
    assert [minutes(limit) for limit in ("4:00:00", "90", "30:30", "1-0", "1-2:03", 7)] == [240, 90, 31, 1440, 1563, 7]
    for wrong in ("0", 0, "1:2:3:4", "-5", float("inf")):
        with pytest.raises(ConfigError, match="time="):
            minutes(wrong)
