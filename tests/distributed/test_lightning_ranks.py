"""`from_lightning` in two processes: as `lightning.Trainer(strategy="ddp")`, and everything comes back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_rank import MODULES, OPTIONS, make_kind
from samples import Regress, make_loader, make_trainer, make_valid, same_weights, some
from test_worlds import finish, free_port, start
from torch.utils.data import DataLoader, IterableDataset

from nbtrain import MultiGPUAddon, StateManagerAddon, Trainer
from nbtrain.distributed.rank_loader import sampled_share
from nbtrain.errors import WorkerError
from nbtrain.events import Event

PROGRAM = Path(__file__).with_name("lightning_rank.py")


def make_lit(module: L.LightningModule, *addons: Any, **options: Any) -> Any:
    return Trainer.add_on(MultiGPUAddon, *addons).from_lightning(module, device=["cpu", "cpu"], log_bar=False, seed=3, **options)


class Notes(list[str]):
    """A sink of the notes in a record."""

    def update(self, event: Event) -> None:
        if event.kind == "note":
            self.append(event.data["text"])


@pytest.mark.long
def test_what_a_module_of_a_cell_keeps_comes_back_from_the_ranks() -> None:
    kind = make_kind("by hand")  # a class in a function is pickled as one in a cell is
    whole, parts = kind(), kind()
    make_lit(whole, **OPTIONS["by hand"]).run(2, make_loader(), make_valid())
    trainer, notes = make_lit(parts, **OPTIONS["by hand"]), Notes()
    trainer.recorder.add(notes)
    for _ in range(2):
        trainer.run(1, make_loader(), make_valid())
    assert same_weights(whole, parts)
    assert whole.ranks == parts.ranks == [[0.0, 1.0]] * 2 and parts.hparams["epoch"] == 1 and parts.seen == 6
    assert [row["lr"] for row in trainer.history.epochs] == pytest.approx([0.01 * 0.9**3, 0.01 * 0.9**6])
    alone = "val_alone is the mean of rank 0 alone, over its share of the data: log it with sync_dist=True for the mean of all."
    assert notes.count(alone) == 2  # once in each run
    assert not any(text.startswith(("val_loss", "The processes")) for text in notes)


def test_random_numbers_that_differ_between_ranks_are_noted() -> None:
    trainer, notes = make_lit(make_kind("draws")()), Notes()
    trainer.recorder.add(notes)
    trainer.run(1, make_loader())
    assert "The processes end an epoch with different random numbers. A second run and a resume begin with those of rank 0." in notes


@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_state_between_two_runs_resumes_exactly(name: str, tmp_path: Path) -> None:
    def make() -> Any:
        return make_lit(make_kind(name)(), StateManagerAddon, save_path=tmp_path, **OPTIONS[name])

    trainer = make()
    trainer.run(1, make_loader(own_generator=True), make_valid())
    path = trainer.save_state()
    trainer.run(1, make_loader(own_generator=True), make_valid())
    again = make()
    again.load_state(path)
    again.run(1, make_loader(own_generator=True), make_valid())
    assert same_weights(trainer.model, again.model) and again.history.epochs[-1]["epoch"] == 2


@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_run_that_was_stopped_in_an_epoch_resumes_exactly(name: str, tmp_path: Path) -> None:
    class Stops(L.Callback):
        def on_train_batch_end(self, pl_trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_trainer.should_stop = pl_trainer.current_epoch == 1 and batch_idx == 0

    def make(folder: str, *callbacks: Any) -> Any:
        lightning = OPTIONS[name].get("lightning", {}) | {"callbacks": list(callbacks)}
        return make_lit(make_kind(name)(), StateManagerAddon, **OPTIONS[name] | {"save_path": tmp_path / folder, "lightning": lightning})

    whole = make("whole")
    whole.run(3, make_loader(), make_valid())
    assert make("cut", Stops()).run(3, make_loader(), make_valid()).status == "stopped"
    again = make("cut")
    again.run(3, make_loader(), make_valid(), resume="auto")
    assert same_weights(whole.model, again.model)
    assert [row["val_loss"] for row in again.history.epochs] == [row["val_loss"] for row in whole.history.epochs]


def launched(how: str, name: str, folder: Path) -> dict[str, Any]:
    """What a program ended with in two processes of torchrun, or of SLURM's variables."""
    file, port = folder / f"{how}-{name}.pt", str(free_port())
    if how == "slurm":
        tasks = []
        for number in range(2):
            slurm = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": str(number), "LOCALID": str(number), "NODEID": "0", "JOB_ID": "7"}
            variables = {f"SLURM_{key}": value for key, value in slurm.items()} | {"SLURM_JOB_NAME": "train", "MASTER_ADDR": "127.0.0.1"}
            tasks.append(start([sys.executable, PROGRAM, how, name, file], MASTER_PORT=port, **variables))
        assert finish(*tasks) == [0, 0]
    else:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", port]
        assert finish(start([sys.executable, *torchrun, PROGRAM, how, name, file])) == [0]
    return torch.load(file)


def by_two_ranks(name: str) -> Any:
    """The trainer of a notebook's run, with the random numbers of the programs."""
    trainer = make_lit(make_kind(name)(), **OPTIONS[name])
    torch.manual_seed(7)
    trainer.seed = None
    trainer.run(3, make_loader(), make_valid())
    return trainer


@pytest.mark.parametrize("name", some(MODULES, len(MODULES), first=MODULES.index("windows")))
def test_two_ranks_do_what_lightnings_trainer_does(name: str, tmp_path: Path) -> None:
    trainer, plain = by_two_ranks(name), launched("lightning", name, tmp_path)
    assert same_weights(trainer.model, plain["weights"])
    row, logged = trainer.history.epochs[-1], ("val_loss", "val_alone", "train_mean")
    assert [row[key] for key in logged] == [plain["metrics"][key] for key in logged]


@pytest.mark.long
@pytest.mark.parametrize("how", ["torchrun", "slurm"])
@pytest.mark.parametrize("name", MODULES)
def test_launched_ranks_do_what_those_of_a_notebook_do(how: str, name: str, tmp_path: Path) -> None:
    assert same_weights(by_two_ranks(name).model, launched(how, name, tmp_path)["weights"])


def test_launched_ranks_of_which_one_stops_resume_exactly(tmp_path: Path) -> None:
    assert same_weights(by_two_ranks("windows").model, launched("stopped", "windows", tmp_path)["weights"])


def test_module_that_can_not_be_pickled_is_named() -> None:
    module = make_kind("plain")()
    module.rows = (i for i in range(3))
    with pytest.raises(WorkerError, match=r"rows \(generator\) can't be sent to the worker processes"):
        make_lit(module).run(1, make_loader())


def test_trainer_of_a_class_from_add_on_resumes_exactly_from_a_state_between_two_runs(tmp_path: Path) -> None:
    class Cell(Regress.add_on(StateManagerAddon, MultiGPUAddon)):  # pyright: ignore[reportGeneralTypeIssues]
        """In a cell, a class of a class from add_on is pickled with all of it."""

    def make() -> Any:
        return make_trainer(Cell, device=["cpu", "cpu"], seed=3, save_path=tmp_path, scheduler=lambda step: 1e-2 * 0.9**step)

    trainer, loader, valid = make(), make_loader(own_generator=True), make_loader(40, own_generator=True)
    trainer.run(1, loader, valid)
    path = trainer.save_state()
    trainer.run(1, loader, valid)
    again = make()
    again.load_state(path)
    assert again.save_state() == path  # with the places of the loaders, which it has not read yet
    again.run(1, make_loader(own_generator=True), make_loader(40, own_generator=True))
    assert same_weights(trainer.model, again.model)
    assert again.history.epochs[-1]["val_loss"] == trainer.history.epochs[-1]["val_loss"]


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_of_a_loader_are_those_of_lightning(shuffle: bool) -> None:
    said: list[str] = []
    shares = [sampled_share(DataLoader(range(5), 2), number, 2, shuffle=shuffle, note=said.append) for number in range(2)]
    read = [[int(i) for batch in share for i in batch] for share in shares]
    assert sorted(set(read[0] + read[1])) == list(range(5)) and list(map(len, read)) == [3, 3] and list(map(len, shares)) == [2, 2]
    twice = "A DistributedSampler reads 1 of the samples twice, so that all 2 processes have equally many."
    assert said == ([] if shuffle else [twice] * 2) and (shuffle or read == [[0, 2, 4], [1, 3, 0]])
    shares[0].sampler.set_epoch(1)
    assert ([int(i) for batch in shares[0] for i in batch] == read[0]) is not shuffle


def test_shares_of_several_loaders_and_of_streams() -> None:
    said: list[str] = []
    loader = CombinedLoader({"a": DataLoader(range(4)), "b": DataLoader(Numbers())}, "min_size")
    share = sampled_share(loader, 1, 2, shuffle=False, note=said.append)
    assert [{key: int(value) for key, value in batch.items()} for batch, _, _ in share] == [{"a": 1, "b": 0}, {"a": 3, "b": 1}]
    assert said == ["Each of the 2 processes reads all of a Numbers, as under Lightning, unless it yields a share by rank."]
