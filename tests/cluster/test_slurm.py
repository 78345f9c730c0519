"""Submitted runs on a real SLURM of this machine: `make cluster`. A test run starts its own munged, slurmctld and slurmd, and ends them.

It needs the packages munge, slurmctld, slurmd and slurm-client, and the rights of root: slurmd starts processes of users. One machine
has no second node, no GPU and no accounting here, so those are not tried.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import Regress, make_loader, make_trainer, make_valid, same_weights

from nbtrain import CheckpointError, ConfigError, MultiGPUAddon, WorkerError, submitted_jobs
from nbtrain.cluster.jobs import JobHandle

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0,requeue_delay=0
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
KillWait=60
JobRequeue=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs={n_cores} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=closed Nodes=ALL MaxTime=INFINITE State=DOWN
PartitionName=grace Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=600
PartitionName=abrupt Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=cancelled Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=600
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Gated(Regress):
    """Waits in its eighth step for a file, and leaves one when it was requested to stop there."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.step == 7 and self.save_path is not None:
            rank = getattr(self.world, "number", 0)
            (Path(self.save_path) / f"at-{rank}").touch()
            while not (Path(self.save_path) / "gate").exists():
                time.sleep(0.01)
                if self.control.is_stopping:
                    (Path(self.save_path) / f"stopping-{rank}").touch()
        return super().train_step(batch)


class Paced(Gated):
    """Takes longer for a step than ranks take to agree on a request."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        time.sleep(0.1)
        return super().train_step(batch)


def until(condition: Callable[[], bool], describe: Callable[[], str] = str, limit_s: float = 240) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, describe()
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="session", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A SLURM with one node, this machine, for the tests here."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    assert not missing, f"{', '.join(missing)}: apt-get install munge slurmctld slurmd slurm-client"
    folder = tmp_path_factory.mktemp("slurm")
    for above in (folder, *folder.parents[:2]):
        above.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname()
    text = CONFIGURATION.format(folder=folder, host=host, ports=(free_port(), free_port()), n_cores=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "spool").mkdir()
    (folder / "state").mkdir()
    os.environ |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munge = [f"--socket={folder}/munge.socket", f"--key-file={key}", f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log"]
    commands = (
        ["munged", "--foreground", "--force", *munge, f"--seed-file={folder}/munged.seed"],
        ["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")],
        ["slurmd", "-D", "-N", host, "-f", str(folder / "slurm.conf")],
    )
    daemons = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}.out", "w") as output:
                daemons.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
            if command[0] == "munged":
                until((folder / "munge.socket").exists)
        said = lambda: "\n".join(file.read_text() for file in folder.glob("*.out"))  # noqa: E731
        until(lambda: "idle" in subprocess.run(["sinfo", "-h", "-p", "debug", "-o", "%t"], capture_output=True, text=True).stdout, said, 60)
        yield folder
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def is_at_gate(handle: JobHandle, folder: Path, n_ranks: int) -> Callable[[], bool]:
    def reached() -> bool:
        assert handle.is_on, f"{handle}\n{handle.log()}"
        return all((folder / f"at-{rank}").exists() for rank in range(n_ranks))

    return reached


def restarts(handle: JobHandle) -> int:
    """How often SLURM has put the job back into the queue."""
    shown = subprocess.run(["scontrol", "show", "job", handle.info.id], capture_output=True, text=True, check=True)
    return int(shown.stdout.partition("Restarts=")[2].split()[0])


def preempt(handle: JobHandle) -> None:
    """Submit a job that needs the node, to a partition whose jobs preempt those of others."""
    script = ["--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=true"]
    subprocess.run(["sbatch", *script], check=True, capture_output=True)


def reach_limit(handle: JobHandle) -> None:
    """SLURM sends the signal by itself, after 60 to 90 s."""


ENDS: dict[str, tuple[Callable[[JobHandle], None], dict[str, Any]]] = {
    "time limit": (reach_limit, {"time": 2, "signal_delay_s": 30}),
    "preemption with a grace time": (preempt, {"partition": "grace"}),
    "preemption without a grace time": (preempt, {"partition": "abrupt"}),
    "preemption of a mode that cancels": (preempt, {"partition": "cancelled"}),
}


@pytest.mark.parametrize("kind", ENDS)
def test_job_that_slurm_ends_is_queued_again_and_ends_as_a_run_here(kind: str, tmp_path: Path) -> None:
    end, options = ENDS[kind]
    trainer = make_trainer(Gated, seed=0)
    handle = trainer.submit(3, make_loader(), make_valid(), save_path=tmp_path, **options)
    until(is_at_gate(handle, tmp_path, 1))
    assert handle.status == "running" and handle.node == socket.gethostname() and len(submitted_jobs()) == 1
    end(handle)
    until((tmp_path / "stopping-0").exists, handle.log)
    (tmp_path / "gate").touch()
    until(lambda: handle.status.startswith(("pending", "completed")), handle.log)
    assert handle.wait(timeout_s=300).status == "completed" and restarts(handle) >= 1 and "The `srun` command" not in handle.log()
    here = make_trainer(seed=0)
    here.run(3, make_loader(), make_valid())
    assert same_weights(trainer.model, here.model)


def test_cancelled_job_does_not_come_back_and_continues_here(tmp_path: Path) -> None:
    trainer = make_trainer(Gated, seed=0)
    handle = trainer.submit(3, make_loader(), make_valid(), partition="grace", save_path=tmp_path)
    until(is_at_gate(handle, tmp_path, 1))
    handle.cancel()
    until((tmp_path / "stopping-0").exists, handle.log)
    (tmp_path / "gate").touch()
    until(lambda: not handle.is_on, handle.log)
    assert handle.wait().status == "interrupted" and restarts(handle) == 0 and trainer.counts.step == 8
    trainer.run(2, make_loader(), make_valid())
    here = make_trainer(seed=0)
    here.run(3, make_loader(), make_valid())
    assert same_weights(trainer.model, here.model)


def in_two_processes(n_epoch: int, n_samples: int = 70) -> Any:
    """A trainer that has trained in two processes of this one's."""
    here = make_trainer(Regress.add_on(MultiGPUAddon), device=["cpu", "cpu"], seed=0)
    here.run(n_epoch, make_loader(n_samples), make_valid())
    return here


def test_two_processes_pause_change_and_stop_at_the_same_batch_and_resume_together(tmp_path: Path) -> None:
    trainer = make_trainer(Gated, seed=0)
    handle = trainer.submit(3, make_loader(), make_valid(), tasks_per_node=2, partition="grace", save_path=tmp_path)
    until(is_at_gate(handle, tmp_path, 2))
    handle.pause()
    handle.set(weight_decay=0.0)
    until((handle.run_dir / "job" / "commands.at").exists)
    time.sleep(2.5)  # the other rank has read them too
    (tmp_path / "gate").touch()
    until(lambda: handle.status == "paused", handle.log)
    preempt(handle)  # a signal ends the pause
    until(lambda: handle.status.startswith("pending") or not handle.is_on, handle.log)
    assert handle.wait(timeout_s=300).status == "completed" and restarts(handle) == 1, handle.log(1)
    assert "weight_decay 0 → 0" in [text for _, text in trainer.history.marks]
    assert same_weights(trainer.model, in_two_processes(3).model)


def test_job_of_two_processes_that_was_stopped_in_an_epoch_is_brought_here_and_resumed_by_two(tmp_path: Path) -> None:
    data = make_loader(640), make_valid()
    trainer = make_trainer(Paced, seed=0)
    handle = trainer.submit(2, *data, tasks_per_node=2, save_path=tmp_path)
    until(is_at_gate(handle, tmp_path, 2))
    handle.stop()
    until((handle.run_dir / "job" / "commands.at").exists)
    time.sleep(2.5)  # the other rank has read it too
    (tmp_path / "gate").touch()
    assert handle.wait(timeout_s=300).status == "stopped", handle.log(1)
    assert trainer.result is not None and trainer.result.history is trainer.history and trainer.counts.step < 20
    with pytest.raises(CheckpointError, match=r"Resume it with as many processes, as by submit\(..., tasks_per_node=2\), or"):
        trainer.run(2, *data)
    two = make_trainer(Regress.add_on(MultiGPUAddon), device=["cpu", "cpu"], seed=0)
    handle.load(two)
    two.run(2, *data)
    again = trainer.submit(2, *data, tasks_per_node=2, save_path=tmp_path)
    assert again.wait(timeout_s=300).status == "completed", again.log(1)
    whole = in_two_processes(2, 640)
    assert same_weights(trainer.model, whole.model) and same_weights(two.model, whole.model)


def test_what_slurm_refuses_is_raised_with_its_reason(tmp_path: Path) -> None:
    trainer = make_trainer()
    with pytest.raises(ConfigError, match="SLURM has no partition 'debu'.\n  Did you mean 'debug'"):
        trainer.submit(1, make_loader(), partition="debu", save_path=tmp_path)
    with pytest.raises(ConfigError, match="The job was refused: Invalid generic resource"):
        trainer.submit(1, make_loader(), gpus_per_node=4, save_path=tmp_path)
    assert not list(tmp_path.glob("run-*"))


def test_job_that_never_starts_says_why_and_is_cancelled(tmp_path: Path) -> None:
    handle = make_trainer().submit(1, make_loader(), partition="closed", save_path=tmp_path)
    until(lambda: handle.status == "pending: PartitionDown", lambda: handle.status)
    with pytest.raises(TimeoutError, match="the job is still pending: PartitionDown"):
        handle.wait(timeout_s=0.1)
    handle.cancel()
    until(lambda: not handle.is_on, lambda: handle.status)
    assert handle.status == "cancelled"
    with pytest.raises(WorkerError, match="The job ended before its run began: cancelled"):
        handle.wait()
