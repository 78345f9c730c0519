"""A Ray cluster whose nodes share no disk with the notebook: on each, another file system hides the folder of the runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from samples import Regress, make_loader, make_trainer, make_valid, same_weights, without_times

from nbtrain import ConfigError, MultiGPUAddon, RayAddon, StateManagerAddon

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
HIDE = "mount -t tmpfs none {folder} && exec {ray} start --address={address} --num-cpus=1 --object-store-memory=100000000 --block"


def until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the nodes have not in common."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """A head without room for workers, and two nodes with room for one."""
    assert os.geteuid() == 0 and shutil.which("unshare"), "as root: each node gets a mount of its own"
    head = {"num_cpus": 0, "object_store_memory": 80 * 2**20, "include_log_monitor": False, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    command = HIDE.format(folder=runs, ray=Path(sys.executable).with_name("ray"), address=cluster.address)
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        ray.init(cluster.address, logging_level="ERROR")
        for n in (2, 3):  # one after the other, because both take the first socket that is free
            nodes.append(subprocess.Popen(["unshare", "--mount", "sh", "-c", command], start_new_session=True))
            until(lambda n=n: sum(node["Alive"] for node in ray.nodes()) == n)
        yield cluster.address
    finally:
        ray.shutdown()
        for node in nodes:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        cluster.shutdown()


class Dying(Regress):
    """Its process is killed in the eighth step, once."""

    once = ""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.once and self.counts.step == 7 and self.module.global_rank == 0:
            file = Path(self.once) / "died"
            if not file.exists():
                file.touch()
                time.sleep(2.5)  # a folder is sent every second
                os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)


def fit(trainer: Any) -> Any:
    torch.manual_seed(4)
    assert trainer.run(3, make_loader(batch_size=8), make_valid()).status == "completed"
    return trainer


def files(trainer: Any) -> list[str]:
    return sorted(path.relative_to(trainer.run_dir).as_posix() for path in trainer.run_dir.rglob("*"))


def test_a_run_has_the_files_of_one_here_also_where_rank_0_was_lost(address: str, runs: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": 1, "every_n_steps": 2}
    here = fit(make_trainer(Dying.add_on(MultiGPUAddon, StateManagerAddon), device=["cpu", "cpu"], save_path=tmp_path / "here", **options))
    where = {"workers": 2, "gpus_per_worker": 0, "address": address}
    there = make_trainer(Dying.add_on(RayAddon, StateManagerAddon), **where, save_path=runs / "there", **options)
    there.once = str(tmp_path)
    fit(there)
    assert (tmp_path / "died").exists() and "continues from epoch=1-step=6.ckpt" in there.history.marks[0][1]
    assert (there.run_dir / "events.jsonl").read_text().count("does not share the disk of the run folder") == 1
    assert same_weights(here.model, there.model) and without_times(here.history.epochs) == without_times(there.history.epochs)
    assert files(there) == files(here)
    assert [row.path.name for row in there.history.epochs] == [row.path.name for row in here.history.epochs]
    links = [{path.name: os.readlink(path) for path in trainer.run_dir.rglob("*.ckpt") if path.is_symlink()} for trainer in (here, there)]
    assert links[0] == links[1] and links[0].keys() == {"best.ckpt", "last.ckpt"}
    there.load_state()
    assert same_weights(here.model, there.model)


def test_shards_are_refused(address: str, runs: Path) -> None:
    trainer = make_trainer(
        Regress.add_on(RayAddon, StateManagerAddon),
        workers=2, gpus_per_worker=0, address=address, save_path=runs / "shards", strategy="fsdp2", save_type="sharded",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="can't use the run folder: each rank writes its shard, and the node does not share the disk"):
        trainer.run(1, make_loader(batch_size=8), make_valid())
