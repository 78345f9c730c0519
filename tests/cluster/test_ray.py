"""Runs on a real Ray cluster of two nodes, which this machine pretends to be: the weights of a run here, commands, faults."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import ray
import torch
from cells import FIT, NEW_STEP, in_main
from ray.cluster_utils import Cluster
from ray_nodes import NODE, two_nodes
from samples import Regress, make_data, make_loader, make_model, make_trainer, make_valid, same_weights, without_times
from torch.utils.data import DataLoader

from nbtrain import ConfigError, MultiGPUAddon, RayAddon, StateManagerAddon, Trainer, WorkerError

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_nodes() as made:
        yield made


Where = Callable[..., dict[str, Any]]


@pytest.fixture
def where(cluster: Cluster) -> Where:
    """The options of a RayAddon for the cluster."""
    return lambda **options: {"workers": 2, "gpus_per_worker": 0, "cpus_per_worker": 2, "address": cluster.address} | options


def steps(self: Any, batch: Any) -> dict[str, Any]:
    x, y = batch
    output = self.model(x)
    return {"loss": ((output - y) ** 2).mean(), "output": output, "label": y}


def cell_class(pace_s: float = 0.0, scale: float = 1.0) -> type[Trainer]:
    """A class that no module has, as one of a notebook's cell."""

    class Cell(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            time.sleep(pace_s)
            found = steps(self, batch)
            return found | {"loss": found["loss"] * scale}

        def test_step(self, batch: Any) -> dict[str, Any]:
            return steps(self, batch)

    Cell.__module__ = "__main__"
    return Cell


def fit(kind: Any, n_epoch: int = 3, **options: Any) -> Any:
    trainer = make_trainer(kind, seed=1, **options)
    torch.manual_seed(4)
    trainer.run(n_epoch, make_loader(batch_size=8), make_valid())
    return trainer


def until(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 90
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_class_of_a_cell_trains_as_in_two_processes_of_this_machine(where: Where, tmp_path: Path) -> None:
    on_ray = fit(cell_class().add_on(RayAddon, StateManagerAddon), **where(), save_path=tmp_path / "ray")
    here = fit(cell_class().add_on(MultiGPUAddon, StateManagerAddon), device=["cpu", "cpu"], save_path=tmp_path / "here")
    assert same_weights(on_ray.model, here.model) and on_ray.counts == here.counts
    assert without_times(on_ray.history.epochs) == without_times(here.history.epochs)
    assert on_ray.optimizer.state_dict()["state"].keys() == here.optimizer.state_dict()["state"].keys()
    saved = [sorted(path.name for path in (tmp_path / name / "run-001" / "checkpoints").iterdir()) for name in ("ray", "here")]
    assert saved[0] == saved[1] and on_ray.result.best.path.exists()
    for trainer in on_ray, here:  # go on with what came back
        torch.manual_seed(5)
        trainer.run(1, make_loader(batch_size=8), make_valid())
    assert same_weights(on_ray.model, here.model) and on_ray.counts.epoch == 4


def test_commands_reach_all_workers_after_the_same_batch(where: Where, tmp_path: Path) -> None:
    kind = cell_class(0.02).add_on(RayAddon, StateManagerAddon)
    trainer = make_trainer(kind, **where(), save_path=tmp_path, seed=1)
    handle = trainer.run(2000, make_loader(batch_size=8), make_valid(), background=True)
    until(lambda: trainer.counts.processed > 2 or not handle.is_on)
    trainer.pause()
    step = trainer.counts.processed
    time.sleep(0.5)
    assert handle.status == "paused" and trainer.counts.processed == step
    trainer.set(lr=0.002)
    trainer.validate_now()
    trainer.save_state()
    trainer.resume(background=True)
    until(lambda: len(trainer.history.marks) >= 3)
    assert trainer.stop().status == handle.wait().status == "stopped"
    marks = [text.partition(":")[0] for _, text in trainer.history.marks]
    assert marks[0].endswith("→ 0.002") and sorted(marks[1:]) == ["the state was saved", "validated"]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.002 and trainer.counts.processed >= step
    assert len(list((tmp_path / "run-001" / "checkpoints").glob("epoch=*"))) >= 2


class Stopping(Regress):
    """Stops in the fifth step of a run that is not resumed, within its epoch: ranks exchange a request at least every 50 ms."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        time.sleep(0.06)
        if self.counts.processed == 8 and not self.origin.is_restored:
            self.control.stop()
        return super().train_step(batch)


def test_a_run_that_was_stopped_here_continues_on_ray_and_then_in_one_process(where: Where, tmp_path: Path) -> None:
    whole = fit(Regress.add_on(MultiGPUAddon), device=["cpu", "cpu"])
    options: dict[str, Any] = {"save_path": tmp_path, "seed": 1}
    loaders = make_loader(batch_size=8), make_valid()
    here = make_trainer(Stopping.add_on(MultiGPUAddon, StateManagerAddon), device=["cpu", "cpu"], **options)
    torch.manual_seed(4)
    assert here.run(3, *loaders, resume="auto").status == "stopped" and here.counts.epoch == 1
    on_ray = make_trainer(Regress.add_on(RayAddon, StateManagerAddon), **where(), **options)
    on_ray.run(3, *loaders, resume="auto")
    assert same_weights(whole.model, on_ray.model) and whole.counts == on_ray.counts
    assert without_times(whole.history.epochs) == without_times(on_ray.history.epochs)
    one = make_trainer(Regress.add_on(StateManagerAddon), **options)
    one.run(4, *loaders, resume="auto")
    assert one.counts.epoch == 4 and one.run_dir == on_ray.run_dir == here.run_dir
    text = (tmp_path / "run-001" / "events.jsonl").read_text()
    assert text.count("another number of processes") == 1 and "2, and 1 now, so that an update takes 1 batch instead of 2." in text


class Dying(Regress):
    """In rank 1, ends its process in the middle of epoch 2, once: in the folder `once` a file says that it was."""

    once: Any = None

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.once is not None and self.counts.processed == 9 and self.module.global_rank == 1:
            mark = Path(self.once, "died")
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)


@pytest.mark.parametrize("saves", [True, False])
def test_a_killed_worker_begins_again_and_the_weights_are_those_of_an_undisturbed_run(where: Where, tmp_path: Path, saves: bool) -> None:
    kind = Dying.add_on(RayAddon, StateManagerAddon) if saves else Dying.add_on(RayAddon)
    options = where(cpus_per_worker=1) | ({"save_path": tmp_path / "runs", "every_n_steps": 2} if saves else {})
    whole = fit(Dying.add_on(MultiGPUAddon), device=["cpu", "cpu"])
    trainer = make_trainer(kind, seed=1, **options)
    trainer.once = str(tmp_path)
    torch.manual_seed(4)
    result = trainer.run(3, make_loader(batch_size=8), make_valid())
    assert result.status == "completed" and (tmp_path / "died").exists()
    assert same_weights(whole.model, trainer.model) and whole.counts == trainer.counts
    assert without_times(whole.history.epochs) == without_times(trainer.history.epochs)
    ((at, mark),) = trainer.history.marks
    if saves:
        assert mark == "Rank 1 was lost: its process or its node has ended. The run continues from epoch=1-step=6.ckpt." and at.step == 6
    else:
        assert mark == "Rank 1 was lost: its process or its node has ended. The run begins again." and at.step == 0


DYING_STEP = NEW_STEP.replace(
    "        global n_batches\n",
    """        global n_batches
        if self.counts.processed == dies_at and self.module.global_rank == 1 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
""",
)


@pytest.mark.parametrize("every_n_steps", [1, 1000, None])
def test_new_steps_are_used_by_all_workers_and_by_those_that_ray_starts_again(
    where: Where, tmp_path: Path, every_n_steps: int | None
) -> None:
    """What a lost worker has trained is trained again with the new steps, from the newest checkpoint: of a batch, of an epoch, or none."""
    options, saves = where(), every_n_steps is not None
    options |= {"save_path": tmp_path / "runs", "every_n_steps": every_n_steps} if saves else {}
    with in_main() as notebook:
        kind = notebook(FIT, os=os, signal=signal, once=tmp_path / "died")["Fit"].add_on(RayAddon, *[StateManagerAddon] * saves)
        trainer = make_trainer(kind, seed=1, **options)
        torch.manual_seed(4)
        handle = trainer.run(6, make_loader(batch_size=8), make_valid(), background=True)
        until(lambda: trainer.counts.processed > 6)
        trainer.pause()
        place = trainer.counts.processed
        notebook(DYING_STEP, dies_at=place + 1)
        trainer.told = [place]
        trainer.resume(background=True)
        assert handle.wait().status == "completed" and (tmp_path / "died").exists()
        marks = trainer.history.marks
        begins = marks[-1][0].processed
        notebook(FIT + f"\nFit.change_after = {min(place, begins)}")
        whole = fit(notebook("")["Fit"].add_on(MultiGPUAddon), 6, device=["cpu", "cpu"])
    assert same_weights(whole.model, trainer.model) and whole.counts == trainer.counts and trainer.told == [place]
    assert "Rank 1 was lost" in marks[-1][1] and marks[0][1].startswith("train_step changed") is saves and len(marks) == 1 + saves, marks
    assert begins >= place if every_n_steps == 1 else begins < place  # the checkpoint of an epoch is older than the change


def test_a_lost_node_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(cluster: Cluster, where: Where, tmp_path: Path) -> None:
    cluster.add_node(**NODE)
    whole = fit(cell_class().add_on(MultiGPUAddon), 6, device=["cpu", "cpu"])
    trainer = make_trainer(cell_class(0.05).add_on(RayAddon, StateManagerAddon), seed=1, **where(), save_path=tmp_path, every_n_steps=2)
    torch.manual_seed(4)
    handle = trainer.run(6, make_loader(batch_size=8), make_valid(), background=True)
    until(lambda: trainer.counts.step >= 7)
    free = ray._private.state.available_resources_per_node()
    busy = next(node for node in cluster.worker_nodes if free[node.node_id].get("CPU", 0) < 2)
    cluster.remove_node(busy, allow_graceful=False)
    assert handle.wait().status == "completed"
    assert same_weights(whole.model, trainer.model) and "The run continues from epoch=" in trainer.history.marks[0][1]


@pytest.mark.parametrize("saves", [True, False])
def test_fewer_workers_continue_without_the_lost_node_if_they_may(cluster: Cluster, where: Where, tmp_path: Path, saves: bool) -> None:
    cluster.add_node(**NODE)
    kind = cell_class(0.05).add_on(RayAddon, StateManagerAddon) if saves else cell_class(0.05).add_on(RayAddon)
    options = {"save_path": tmp_path, "every_n_steps": 2} if saves else {}
    n = 1 + len(cluster.worker_nodes)
    trainer = make_trainer(kind, seed=1, **where(workers=n, min_workers=n - 1), **options)
    handle = trainer.run(10, make_loader(batch_size=4), make_valid(), background=True)
    until(lambda: trainer.counts.epoch == 1 and trainer.counts.processed > 10)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    assert handle.wait().status == "completed" and trainer.counts.epoch == 10
    ((at, mark),) = trainer.history.marks
    found = re.search(rf"continues from epoch=(\d)-step=\d+\.ckpt with {n - 1} of {n} workers: an update takes {n - 1} batch", mark)
    assert found if saves else f"The run begins again with {n - 1} of {n} workers: an update takes {n - 1} batch" in mark, mark
    n_epochs = int(found[1]) if found else 0
    assert at.step == n_epochs * -(-18 // n) and 10 > n_epochs >= saves  # batches of 4 of 70 samples
    assert trainer.counts.step == at.step + (10 - n_epochs) * -(-18 // (n - 1))
    assert trainer[RayAddon].workers == n and _all_is_given_back()


def test_the_error_of_a_step_has_its_rank_and_frames_and_is_not_tried_again(where: Where) -> None:
    class Raising(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.processed == 2 and self.module.global_rank == 1:
                raise LookupError("no third step")
            return super().train_step(batch)

    trainer = make_trainer(Raising.add_on(RayAddon), **where(cpus_per_worker=1))
    with pytest.raises(LookupError, match="no third step") as raised:
        trainer.run(1, make_loader(batch_size=8))
    notes = "\n".join(raised.value.__notes__)
    assert "epoch 1, batch 3" in notes and "nbtrain: raised in rank 1" in notes
    assert 'raise LookupError("no third step")' in str(raised.value.__cause__) and trainer.counts.step == 2


def test_a_worker_that_is_lost_too_often_ends_the_run(where: Where, tmp_path: Path) -> None:
    trainer = make_trainer(Dying.add_on(RayAddon), **where(cpus_per_worker=1, max_restarts=0))
    trainer.once = str(tmp_path)
    with pytest.raises(WorkerError, match=r"^Rank 1 was lost: its process or its node has ended\."):
        trainer.run(3, make_loader(batch_size=8), make_valid())
    assert trainer.result.status == "failed" and _all_is_given_back()


def _all_is_given_back() -> bool:
    until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
    return True


def test_what_a_cluster_has_not_is_said_before_the_first_batch(where: Where) -> None:
    data = DataLoader(make_data(), 8)
    with pytest.raises(ConfigError, match=r"room for 0 of 2 workers: each needs 2 CPU and 1 GPU.\n  Its nodes have 2 CPUs and 0 GPUs"):
        make_trainer(Regress.add_on(RayAddon), **where(gpus_per_worker=1)).run(1, data)
    with pytest.raises(ConfigError, match=r"room for \d of 50 workers: each needs 2 CPU.\n"):
        make_trainer(Regress.add_on(RayAddon), **where(workers=50)).run(1, data)
    model = make_model()
    model.guard = Lock()
    with pytest.raises(WorkerError, match=r"guard.* \(lock\) can't be sent to the worker processes"):
        make_trainer(Regress.add_on(RayAddon), model=model, **where()).run(1, data)
    ray.shutdown()
    with pytest.raises(ConfigError, match="No Ray cluster answers at 127.0.0.1:9.*\n  Start one with `ray start --head`"):
        make_trainer(Regress.add_on(RayAddon), **where(address="127.0.0.1:9")).run(1, data)
