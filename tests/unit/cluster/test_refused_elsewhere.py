"""What can't run elsewhere is refused at once, in words that say what to do: the texts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import make_loader, make_trainer

import nbtrain
from nbtrain.cluster.command_file import make_folder
from nbtrain.cluster.jobs import JobHandle
from nbtrain.cluster.ray_cluster import check_node, check_room, looker, own_versions
from nbtrain.cluster.submit import JobInfo, check_environment

INFO = JobInfo("slurm", "digits", 1, 1, {}, [], ".", id="7")
NODES = [{"Alive": True, "Resources": {"CPU": 8.0}}] * 2


def submit(**options: Any) -> Callable[[Path], Any]:
    return lambda folder: make_trainer().submit(1, make_loader(), **{"cluster": "local", "save_path": folder, **options})


def unpicklable(folder: Path) -> None:
    trainer = make_trainer()
    trainer.model[0].guard = threading.Lock()
    trainer.submit(1, make_loader(), cluster="local", save_path=folder)


def waiting(folder: Path) -> None:
    """A job that never starts; a script is SLURM's squeue here."""
    make_folder(folder)
    INFO.write(folder)
    squeue = folder / "squeue"
    squeue.write_text("#!/bin/sh\necho 'PENDING|QOSMaxGRESPerUser|'\n")
    squeue.chmod(0o755)
    JobHandle(folder).wait(timeout_s=0.0)


def versions(folder: Path) -> None:
    check_environment(replace(INFO, environment=own_versions() | {"torch": "1.0"}))


def node(**found: Any) -> Callable[[Path], Any]:
    return lambda folder: check_node({"node": "gpu-3", "versions": own_versions(), "problem": ""} | found, str(folder))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no SLURM": (
        submit(cluster="slurm"),
        "SLURM is not here: sbatch is not found.\n  Submit from a login node of the cluster;",
    ),
    "GPUs": (submit(gpus_per_node=99), "gpus_per_node=99: this machine has "),
    "nodes": (submit(nodes=2), "nodes=2: cluster='local' is this machine alone.\n  Give tasks_per_node."),
    "time": (submit(time="soon"), "time='soon' is not a time limit.\n  Give hours, minutes and seconds: \"4:00:00\"."),
    "option": (submit(partion="gpu"), "submit takes no option 'partion'.\n  Did you mean 'partition'?"),
    "no folder": (submit(save_path=None), 'A submitted run needs a folder that all nodes see.\n  Give save_path="runs", on a disk'),
    "read-only": (
        submit(save_path="/proc/runs"),
        "save_path='/proc/runs' can't hold a run folder: No such file or directory.\n",
    ),
    "pickle": (unpicklable, "trainer.model.0.guard (lock) can't be sent to the job: "),
    "versions": (versions, "The environment is another one: torch "),
    "never starts": (waiting, "the job is still pending: QOSMaxGRESPerUser after 0.0 s"),
    "no job": (
        lambda folder: JobHandle(folder),
        "{folder!r} is not the run folder of a job.\n  Give the run folder of a job",
    ),
    "room": (
        lambda folder: check_room(NODES, 5, {"CPU": 4.0}),
        "The Ray cluster has room for 4 of 5 workers: each needs 4 CPU.\n  Its nodes have 8 CPUs and 0 GPUs, ",
    ),
    "Ray's GPUs": (lambda folder: check_room(NODES, 1, {"GPU": 1.0}), "The Ray cluster has room for 0 of 1 workers: each needs 1 GPU."),
    "Ray's versions": (node(versions=own_versions() | {"torch": "1.0"}), "The node gpu-3 has torch 1.0; this process has torch "),
    "Ray's disk": (
        node(problem="Permission denied"),
        "The node gpu-3 can't use the run folder: Permission denied.\n  {folder}\n  Give",
    ),
    "shards, not shared": (
        lambda folder: check_node(looker()(str(folder), "seen"), str(folder), has_shards=True),
        f"The node {socket.gethostname()} can't use the run folder: each rank writes its shard",
    ),
    "URL": (
        lambda folder: make_trainer(save_path="s3://bucket/runs"),
        "save_path='s3://bucket/runs' is a URL, and a run folder must be on a file system.\n  Give a path, such as that of a disk on",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_can_not_run_elsewhere_is_refused_in_words_that_say_what_to_do(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    call, words = REFUSED[kind]
    with pytest.raises((nbtrain.NbtrainError, TimeoutError)) as caught:
        call(tmp_path)
    assert str(caught.value).startswith(words.replace("{folder!r}", repr(str(tmp_path))).replace("{folder}", str(tmp_path)))
    assert not list(tmp_path.glob("run-*"))
