"""Random jobs of two processes, or three, done twice: by nbtrain, and by one of two judges, as people write them.

    python tests/plain_distributed_loop.py 300             # in `make compare`; the seeds 0 to 299
    python tests/plain_distributed_loop.py --seed 17       # one of them again, with its settings and the first difference

The judge of data that nbtrain deals is a plain loop in one process with the batches of all ranks as one; that of data in shares, one for
each process, is torch's DistributedDataParallel with as many gloo processes, whose gradients are averaged without weights. Nine of ten
jobs run in processes with torchrun's variables, which stay for many jobs; the tenth from this process, as from a cell, in workers that
are kept. One of 20 has three ranks. Drawn are loaders of every kind, accumulation, clipping, an average of the weights, metrics, two
optimizers, schedules, early stopping, several validation sets, and resumes, by as many ranks, by more, or in one process.

Compared are the weights, the means and metrics of each epoch, and the samples that it has read, as a multiset. A loader may draw numbers
for its samples: no two draws of a run are the same, and a run that was stopped and resumed reads the same samples with the same draws.
All is computed in float64, and compared to 1e-6: the order in which gradients are added differs, and Adam divides by small ones. A resume
by two ranks, too, is compared bit for bit; the sum of three gradients depends on the buckets, which torch makes anew in a process that
begins.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from plain_loop import evaluate, tell_epoch, train
from random_jobs import OPTIMIZERS, Rates, rate_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from nbtrain import EarlyStoppingAddon, EMAAddon, MetricsAddon, MultiGPUAddon, StateManagerAddon, TensorLoader, Trainer
from nbtrain.addons.multi_gpu import _pool
from nbtrain.distributed.worker_pool import Launch

DRAWS = ("torch", "random", "NumPy")


# -- data
def rows(n: int, seed: int = 1) -> TensorDataset:
    """Inputs, targets, and the number of each row, from 100 * `seed`."""
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.3 * x[:, :1] ** 2, torch.arange(n) + 100 * seed)


def numbers(draws: bool) -> Tensor:
    """A number of each kind, drawn for a sample."""
    values = [float(torch.rand((), dtype=torch.float64)), random.random(), float(np.random.rand())] if draws else [0.0] * 3
    return torch.tensor(values, dtype=torch.float64)


class Rows(Dataset[Any]):
    """Rows, with their draws. `epoch` is set before each pass, and moves the inputs."""

    def __init__(self, data: Any, *, draws: bool = False) -> None:
        self.data, self.draws, self.epoch = data, draws, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        x, y, number = self.data[i]
        return x + 0.01 * self.epoch, y, number, numbers(self.draws)


class EpochRows(Rows):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Table:
    """Rows in a form that nbtrain can't look into, as a table of pandas."""

    __slots__ = ("rows",)

    def __init__(self, data: TensorDataset) -> None:
        self.rows = data

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class Uneven:
    """Batches of one, two, three ... rows: the last rounds have fewer batches than ranks, or more samples for one of them."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[(i * i + k) % self.n for k in range(i)] for i in range(1, 8)])

    def __len__(self) -> int:
        return 7


class Stream(IterableDataset[Any]):
    """Rows one after the other, split by worker. `buffer`: a shuffle buffer, which draws as it goes. `by_rank`: split by rank, too.

    `extra`: rows that only the second rank has.
    """

    def __init__(self, data: Dataset[Any], *, buffer: int = 1, by_rank: bool = False, extra: int = 0) -> None:
        self.data: Any = data
        self.buffer, self.by_rank, self.extra = buffer, by_rank, extra

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        indices = list(range(len(self.data)))
        if self.by_rank:
            rank, n_ranks = rank_of_this()
            indices = indices[: len(indices) - self.extra][rank::n_ranks] + (indices[len(indices) - self.extra :] if rank == 1 else [])
        held: list[int] = []
        for i in indices[first::every]:
            held.append(i)
            if len(held) >= self.buffer:
                yield self.data[held.pop(random.randrange(len(held)) if self.buffer > 1 else 0)]
        if self.buffer > 1:
            random.shuffle(held)
        yield from (self.data[i] for i in held)

    def set_epoch(self, epoch: int) -> None:
        tell_epoch(self.data, epoch)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.data)


def columns(data: TensorDataset) -> tuple[Tensor, ...]:
    return *data.tensors, torch.zeros(len(data), 3, dtype=torch.float64)


def rank_of_this() -> tuple[int, int]:
    """The rank of this process, also in a worker of its loader, which is forked."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class RankSampler(Sampler[int]):
    """Looks for its rank when it is read, so that the objects of all ranks are the same."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        rank, n_ranks = rank_of_this()
        return iter(range(rank, self.n, n_ranks))

    def __len__(self) -> int:
        return self.n // rank_of_this()[1]


class ByHand:
    """Batches from a class of one's own. `first`, `every`: which of them."""

    def __init__(self, data: Any, size: int, first: int = 0, every: int = 1) -> None:
        self.data, self.size, self.first, self.every = data, size, first, every

    def __iter__(self) -> Iterator[Any]:
        n = len(self.data)
        for at in range(self.first * self.size, n, self.every * self.size):
            yield default_collate([self.data[i] for i in range(at, min(at + self.size, n))])


class SizedByHand(ByHand):
    def __len__(self) -> int:
        return len(range(self.first * self.size, len(self.data), self.every * self.size))


def none_at_times(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    return None if float(batch[0].sum()) % 1 < 0.25 else batch


def with_empty(batches: list[Any], at: int) -> list[Any]:
    """The batches, and one without rows."""
    return [*batches[:at], [part[:0] for part in batches[0]], *batches[at:]]


class Maker:
    """Makes the loaders of a job. `rank` of `n_ranks`: for shares that are made in each process."""

    def __init__(self, settings: dict[str, Any], rank: int = 0, n_ranks: int = 1) -> None:
        self.settings, self.rank, self.n_ranks = settings, rank, n_ranks
        self.n, self.size = settings["n"], settings["size"]
        self.plain = rows(self.n)
        self.data = (EpochRows if settings["set_epoch"] else Rows)(self.plain, draws=settings["draws"])

    @property
    def options(self) -> dict[str, Any]:
        workers = self.settings["workers"]
        options: dict[str, Any] = {"num_workers": workers, "collate_fn": none_at_times if self.settings["none"] else default_collate}
        if workers:
            options |= {"persistent_workers": self.settings["persistent"]}
        return options

    def loader(self, data: Any = None, **options: Any) -> DataLoader[Any]:
        return DataLoader(self.data if data is None else data, **({"batch_size": self.size} | self.options | options))

    def own_generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(2)

    @property
    def generator(self) -> torch.Generator | None:
        """Of the order; where samples draw in the main process, too, those of a rank are not those of one process."""
        return self.own_generator() if self.settings["draws"] and not self.settings["workers"] else None

    def make(self) -> Any:
        return LOADERS[self.settings["loader"]](self)

    def share(self) -> TensorDataset:
        return TensorDataset(*(part[self.rank :: self.n_ranks] for part in self.plain.tensors))

    def batches(self) -> list[Any]:
        return list(ByHand(Rows(self.plain), self.size))

    def valid(self) -> dict[str, Any]:
        """The validation sets by name, at most two."""
        kind, data = self.settings["valid"], rows(20, 2)
        if kind is None:
            return {}
        if kind == "two":
            return {"a": DataLoader(Rows(data), 3), "b": DataLoader(Rows(rows(7, 3)), 2)}
        if kind == "own":
            share = Subset(data, range(self.rank, 20, self.n_ranks)) if self.n_ranks > 1 else data
            return {"": DataLoader(Rows(share), 4)}  # pyright: ignore[reportArgumentType]
        return {"": DataLoader(Rows(data), 3, shuffle=kind == "shuffled", num_workers=self.settings["workers"])}


# What nbtrain deals: all processes make the same
DEALT: dict[str, Callable[[Maker], Any]] = {
    "in order": lambda make: make.loader(),
    "shuffled": lambda make: make.loader(shuffle=True, generator=make.generator),
    "shuffled, drop_last": lambda make: make.loader(shuffle=True, drop_last=True, generator=make.generator),
    "own generator": lambda make: make.loader(shuffle=True, generator=make.own_generator()),
    "weighted": lambda make: make.loader(
        sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(make.n)], 30, generator=make.own_generator())
    ),
    "uneven batches": lambda make: DataLoader(make.data, batch_sampler=Uneven(make.n), **make.options),  # pyright: ignore
    "stream": lambda make: make.loader(Stream(make.data)),
    "stream with a length": lambda make: make.loader(SizedStream(make.data)),
    "stream, drop_last": lambda make: make.loader(Stream(make.data), drop_last=True),
    "stream with a shuffle buffer": lambda make: make.loader(Stream(make.data, buffer=8)),
    "stream with a length and a shuffle buffer": lambda make: make.loader(SizedStream(make.data, buffer=8)),
    "by hand": lambda make: ByHand(make.data, make.size),
    "by hand with a length": lambda make: SizedByHand(make.data, make.size),
    "list of batches": lambda make: make.batches(),
    "list of batches, one empty": lambda make: with_empty(make.batches(), 2),
    "TensorLoader": lambda make: TensorLoader(*columns(make.plain), batch_size=make.size, shuffle=True),
}
# What divides itself, also where it was made once
DIVIDED: dict[str, Callable[[Maker], Any]] = {
    "DistributedSampler": lambda make: make.loader(sampler=DistributedSampler(make.data, make.n_ranks, make.rank, seed=3)),
    "DistributedSampler, drop_last": lambda make: make.loader(
        sampler=DistributedSampler(make.data, make.n_ranks, make.rank, drop_last=True, shuffle=False), drop_last=True
    ),
    "DistributedSampler of rank 0": lambda make: make.loader(sampler=DistributedSampler(make.data, make.settings["ranks"], 0, seed=3)),
    "stream by rank": lambda make: make.loader(Stream(make.data, by_rank=True)),
    "stream by rank with a shuffle buffer": lambda make: make.loader(Stream(make.data, by_rank=True, buffer=8)),
    "stream by rank, uneven": lambda make: make.loader(Stream(make.data, by_rank=True, extra=12)),
    "sampler by rank": lambda make: make.loader(sampler=RankSampler(make.n)),
}
# Shares that each process makes
MADE: dict[str, Callable[[Maker], Any]] = {
    "subset by rank": lambda make: make.loader(
        Subset(make.data, range(make.rank, make.n, make.n_ranks)), shuffle=True, generator=make.generator
    ),
    "tensors by rank": lambda make: make.loader(Rows(make.share(), draws=make.settings["draws"])),
    "table by rank": lambda make: make.loader(Rows(Table(make.share()), draws=make.settings["draws"])),
    "list of batches by rank": lambda make: make.batches()[make.rank :: make.n_ranks],
    "list of batches by rank, one empty": lambda make: with_empty(make.batches()[make.rank :: make.n_ranks], make.rank),
    "by hand by rank": lambda make: ByHand(make.data, make.size, make.rank, make.n_ranks),
    "by hand by rank with a length": lambda make: SizedByHand(make.data, make.size, make.rank, make.n_ranks),
    "TensorLoader by rank": lambda make: TensorLoader(*columns(make.share()), batch_size=make.size, shuffle=True),
}
LOADERS = DEALT | DIVIDED | MADE
DOUBLED = ("in order", "shuffled", "own generator", "weighted", "TensorLoader")  # with the doubled batch in one process
BY_WORD = ("sampler by rank", "by hand by rank with a length")  # they look the same in all processes: data="own" says what they are
OWN_ORDER = ("stream by rank with a shuffle buffer",)  # each rank draws its order: no other run has it


# -- what is trained
class Both:
    """Two optimizers on one loss, for the judges."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_optimizers(settings: dict[str, Any], model: Any) -> list[Any]:
    if settings["optimizer"] == "two":
        return [torch.optim.SGD(model[0].parameters(), 0.05, momentum=0.5), torch.optim.Adam(model[2].parameters(), 0.02)]
    return [OPTIMIZERS[settings["optimizer"]](model)]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The mean over the rows, 0 for a batch without rows."""
    return (model(batch[0]) - batch[1]).square().sum() / max(1, len(batch[0]))


def squared(label: Any, output: Any) -> float:
    """A metric that is no mean over batches."""
    return float(np.sqrt(((label - output) ** 2).mean()))


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


# -- nbtrain
class Job(Trainer):
    """Keeps which samples the ranks have read in each epoch, with their draws. May stop itself at its step `stop_at`, in one rank alone."""

    n_steps, stop_at, stops = 0, 0, "both"

    def train_step(self, batch: Any) -> Any:
        self.n_steps += 1
        if self.n_steps == self.stop_at and (self.stops == "both" or rank_of_this()[0] == 1):
            self.stop()
        return {"loss": loss_of(self.model, batch), "read": torch.cat([batch[2][:, None], batch[3]], 1)}

    def test_step(self, batch: Any) -> Any:
        return {"loss": loss_of(self.model, batch), "output": self.model(batch[0]), "label": batch[1]}

    def metric_on_epoch_end(self) -> Any:
        if self.mode == "train":
            self.read = [*getattr(self, "read", []), torch.cat(list(self.log_train["read"])).tolist()]
        return {}


def make_trainer(settings: dict[str, Any], n_ranks: int, folder: Path | None) -> Any:
    """`n_ranks`: from a cell; 0 for the ranks that were started."""
    addons = [MultiGPUAddon] if n_ranks != 1 else []
    options: dict[str, Any] = {"gradient_clip": settings["clip"], "log_bar": False, "lightning": {}}
    options["device"] = ["cpu"] * n_ranks if n_ranks > 1 else "cpu"
    if settings["word"] and n_ranks != 1:
        options["data"] = {"train": settings["word"]}
    if settings["accumulate"] > 1:
        options["lightning"] |= {"accumulate_grad_batches": settings["accumulate"]}
    if settings["ema"]:
        addons.append(EMAAddon)
        options["ema_decay"] = 0.8
    if settings["metrics"]:
        addons.append(MetricsAddon)
        options["metrics"] = {"squared": squared}
    if settings["early"] is not None:
        addons.append(EarlyStoppingAddon)
        options |= {"patience": 1, "delta": settings["early"]}
    if folder is not None:
        addons.append(StateManagerAddon)
        options |= {"save_path": folder, "keep_source": False}
    model = make_model()
    optimizers = make_optimizers(settings, model)
    if settings["schedule"] == "epoch":
        options["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.7)
    if settings["schedule"] == "update":
        options["scheduler"] = rate_of
    return Job.add_on(*addons)(model, optimizer=optimizers if len(optimizers) > 1 else optimizers[0], **options)


def outcome(trainer: Any) -> dict[str, Any]:
    names = lambda row: [name for name in row if name == "train_loss" or name.startswith(("val_loss", "val_squared"))]  # noqa: E731
    rows = [{name: row[name] for name in names(row)} for row in trainer.history.epochs]
    weights = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
    return {"weights": weights, "epochs": rows, "read": getattr(trainer, "read", []), "status": str(trainer.result.status)}


# -- the judges
class Rounds:
    """For one process: the batches of `n` ranks as one."""

    def __init__(self, loader: Any, n: int) -> None:
        self.data, self.n = loader, n

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.data)
        while found := list(itertools.islice(batches, self.n)):
            kept = [batch for batch in found if batch is not None]
            yield [torch.cat(parts) for parts in zip(*kept)] if kept else None


class Average:
    """A moving average of the weights, for the judges."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.n = model, 0
        self.average = make_model()
        optimizer.register_step_post_hook(self.add)

    @torch.no_grad()
    def add(self, *args: Any) -> None:
        share = 1 - min(0.8, (1 + self.n) / (10 + self.n)) if self.n else 1.0
        for mean, value in zip(self.average.parameters(), self.model.parameters()):
            mean.lerp_(value, share)
        self.n += 1


class Judge:
    """What both judges have in common: the model, the optimizers and schedules, the validation and when to stop."""

    def __init__(self, settings: dict[str, Any], model: nn.Module) -> None:
        self.settings, self.model = settings, model
        parts = make_optimizers(settings, model)
        self.optimizer: Any = Both(parts) if len(parts) > 1 else parts[0]
        self.average = Average(model, parts[-1]) if settings["ema"] else None
        self.each_epoch = torch.optim.lr_scheduler.StepLR(parts[0], 1, 0.7) if settings["schedule"] == "epoch" else None
        self.rates = [Rates(part, rules=True) for part in parts] if settings["schedule"] == "update" else []
        self.best, self.epochs = math.inf, list[dict[str, float]]()
        self.read: list[list[list[float]]] = []

    def step(self) -> None:
        """After an update."""
        for rates in self.rates:
            rates.step()

    def begin(self, *args: Any) -> None:
        self.losses, self.sizes = list[float](), list[int]()
        self.read.append([])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        self.losses.append(loss.item())
        self.sizes.append(len(batch[0]))
        self.read[-1] += torch.cat([batch[2][:, None], batch[3]], 1).tolist()
        return loss

    def end(self, sets: dict[str, Any]) -> bool:
        """Validate after an epoch. Returns whether to stop."""
        losses, sizes = (sum(values, []) for values in zip(*gathered((self.losses, self.sizes))))
        gather = gathered if self.settings["valid"] == "own" else lambda value: [value]
        row = {"train_loss": mean(losses, sizes)}
        model = self.average.average if self.average is not None and self.average.n else self.model
        found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in sets}
        for name, loader in sets.items():
            evaluate(model, lambda net, batch, name=name: keep(found[name], net, batch), loader, len(self.epochs), tell_epoch, True)
        found = {name: sum(parts, []) for name, parts in zip(found, zip(*gather(list(found.values()))))}
        if sets:
            found = {"": sum(found.values(), []), **({f"/{name}": values for name, values in found.items()} if len(sets) > 1 else {})}
        for name, values in found.items():
            n = sum(size for _, size, _ in values)
            row[f"val_loss{name}"] = sum(loss * size for loss, size, _ in values) / n
            if self.settings["metrics"]:
                row[f"val_squared{name}"] = math.sqrt(sum(square for _, _, square in values) / n)
        self.epochs.append(row)
        if self.settings["early"] is None:
            return False
        value = row.get("val_loss", row["train_loss"])
        if value + self.settings["early"] >= self.best:
            return True
        self.best = value
        return False

    def outcome(self) -> dict[str, Any]:
        weights = {name: value.tolist() for name, value in self.model.state_dict().items()}
        return {"weights": weights, "epochs": self.epochs, "read": self.read}


def keep(found: list[tuple[float, int, float]], model: nn.Module, batch: Any) -> Tensor:
    loss = loss_of(model, batch)
    found.append((loss.item(), len(batch[0]), float((model(batch[0]) - batch[1]).square().sum())))
    return loss


def mean(values: list[float], sizes: list[int]) -> float:
    return sum(value * n for value, n in zip(values, sizes)) / sum(sizes)


def by_one(settings: dict[str, Any], n_ranks: int) -> dict[str, Any]:
    """One process with the doubled batch."""
    is_doubled = settings["loader"] in DOUBLED and not settings["none"]
    maker = Maker(settings | {"size": settings["size"] * n_ranks} if is_doubled else settings)
    loader, sets = maker.make() if is_doubled else Rounds(maker.make(), n_ranks), maker.valid()
    judge = Judge(settings, make_model())
    options = {name: settings[name] for name in ("accumulate", "clip")}
    if settings["accumulate"] > 1:
        options["size_of"] = lambda batch: len(batch[0])
    options |= {"begin": judge.begin, "each_update": judge, "each_epoch": judge.each_epoch}
    seed()
    for _ in train(judge.model, judge.optimizer, judge.loss, loader, range(settings["epochs"]), **options):
        if judge.end(sets):
            break
    return judge.outcome()


def by_ddp(settings: dict[str, Any], rank: int, n_ranks: int) -> dict[str, Any]:
    """This rank of torch's DistributedDataParallel: gradients are averaged over the ranks, whatever the sizes of their batches."""
    kind = "DistributedSampler" if settings["loader"] == "DistributedSampler of rank 0" else settings["loader"]
    maker = Maker(settings | {"loader": kind}, rank, n_ranks)
    loader, sets, accumulate = maker.make(), maker.valid(), settings["accumulate"]
    judge = Judge(settings, make_model())
    model = DistributedDataParallel(judge.model)
    parameters = list(judge.model.parameters())

    def update(factor: float) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= factor
        if settings["clip"]:
            nn.utils.clip_grad_norm_(parameters, settings["clip"])
        judge.optimizer.step()
        judge.optimizer.zero_grad()
        judge.step()

    seed()
    for epoch in range(settings["epochs"]):
        judge.begin()
        tell_epoch(loader, epoch)
        batches, n_rounds, n_samples = iter(loader), 0, 0
        while total(int((batch := next(batches, END)) is not END)) == n_ranks:  # until the first of the ranks has none
            n_counted = total(int(batch is not None))
            if n_counted == 0:
                continue
            loss = judge.loss(model, batch) if batch is not None else model(torch.zeros(1, 5).double()).sum() * 0.0
            size = len(batch[0]) if batch is not None else 0
            n_rounds, n_samples = n_rounds + 1, n_samples + total(size)
            (loss if accumulate == 1 else loss * size).backward()
            if accumulate == 1:
                update(n_ranks / n_counted)
            elif n_rounds == accumulate:
                update(n_ranks / n_samples)  # a window is one big batch, as in one process
                n_rounds, n_samples = 0, 0
        if n_rounds and accumulate > 1:
            update(n_ranks / n_samples)
        if judge.each_epoch is not None:
            judge.each_epoch.step()
        if judge.end(sets):
            break
    found = judge.outcome()
    return found | {"read": [sum(parts, []) for parts in zip(*gathered(found["read"]))]}


END = object()


def total(n: int) -> int:
    return sum(gathered(n))


def gathered(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- jobs
USUAL: dict[str, Any] = {
    **{"launch": "torchrun", "ranks": 2, "loader": "shuffled", "n": 40, "size": 8, "set_epoch": False, "draws": False, "none": False},
    **{"workers": 0, "persistent": False, "word": None, "valid": None, "epochs": 2, "optimizer": "Adam", "accumulate": 1, "clip": 0.0},
    **{"ema": False, "metrics": False, "early": None, "schedule": None, "cut": None, "at": 0.5, "stops": "both"},
}


def draw(number: int) -> dict[str, Any]:
    """The settings of one job: plain values that say all of it."""
    rng = random.Random(number)
    rare = lambda share, values: rng.choice(values) if rng.random() < share else None  # noqa: E731
    launch = "cell" if number % 10 == 9 else "torchrun"
    kinds = [DEALT, DIVIDED] if launch == "cell" else [DEALT, DEALT, DIVIDED, MADE]
    loader = rng.choice(list(rng.choice(kinds)))
    settings: dict[str, Any] = {
        "launch": launch,
        "ranks": 3 if number % 25 == 7 or number % 100 == 49 else 2,
        "loader": loader,
        "n": rng.choice([40, 48, 36, 24] if loader in DIVIDED | MADE else [40, 48, 33, 17, 25]),
        "size": rng.choice([4, 8]),
        "set_epoch": rng.random() < 0.3,
        "draws": rng.random() < 0.4,
        "none": rng.random() < 0.15,
        "workers": rare(0.35, [1, 2]) or 0,
        "persistent": rng.random() < 0.5,
        "word": rare(0.1, ["own" if loader in DIVIDED | MADE else "deal"]),
        "valid": rare(0.7, ["in order", "shuffled", "two", "own"]),
        "epochs": rng.choice([1, 2, 3]),
        "optimizer": rng.choice([*OPTIMIZERS, "two"]),
        "accumulate": rare(0.3, [2, 3]) or 1,
        "clip": rare(0.3, [0.05, 0.5]) or 0.0,
        "ema": rng.random() < 0.2,
        "metrics": rng.random() < 0.3,
        "early": rare(0.2, [0.0, 0.1, 1e9]),
        "schedule": rare(0.3, ["epoch", "update"]),
        "cut": rare(0.6, ["two to two", "two to one", "one to two"]) if loader in DOUBLED else rare(0.3, ["two to two"]),
        "at": round(rng.random(), 2),
        "stops": rng.choice(["both", "rank 1"]),
    }
    return fitting(settings)


def fitting(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without what can't be together."""
    loader, changes = settings["loader"], dict[str, Any]()
    if loader in BY_WORD:
        changes["word"] = "own"
    if not isinstance(Maker(settings).make(), DataLoader):
        changes |= {"workers": 0, "none": False}
    if loader.startswith(("TensorLoader", "list of batches")):
        changes |= {"set_epoch": False, "draws": False}
    if settings["launch"] == "cell" and settings["valid"] == "own":
        changes["valid"] = "in order"  # a share is made in each process
    if settings["ranks"] == 3 and loader in DIVIDED | MADE and settings["n"] == 40:
        changes["n"] = 48
    if loader in OWN_ORDER:
        changes |= {"early": None, "none": False}
    if "batches by rank" in loader or "by hand by rank" in loader:
        changes["n"] = 48  # as many batches for each
    if settings["optimizer"] == "two" and settings["clip"]:
        changes["clip"] = 0.0
    if settings["persistent"] and settings["workers"] and settings["cut"]:
        changes["set_epoch"] = False  # no epoch arrives in workers that are kept: their copies of the data are those of the first one
        if settings["draws"] or "shuffle buffer" in loader:
            changes["persistent"] = False  # docs/resume.md: their random numbers depend on all that they have read
    if settings["cut"] in ("two to one", "one to two"):
        changes |= {"epochs": 3, "early": None}  # from the end of an epoch: in mid-epoch it is refused
        changes["none"] = False  # which batches are left out depends on their size
    return settings | changes


# -- a job by nbtrain, in the process of a rank, or from a cell
def run(settings: dict[str, Any], n_ranks: int, folder: Path | None, *, rank: int = 0, **options: Any) -> Any:
    """The trainer of a run. `n_ranks`: those that this process begins; 0: it is a rank itself, one of two. `stop_at`: one of its steps."""
    stop_at = options.pop("stop_at", 0)
    is_one = n_ranks == 1
    n_all = settings["ranks"]
    made = Maker(settings | {"size": settings["size"] * n_all} if is_one else settings, rank, 1 if is_one else n_all)
    sets = made.valid()
    trainer = make_trainer(settings, n_ranks, folder)
    trainer.stop_at, trainer.stops = stop_at, "both" if is_one else settings["stops"]
    seed()
    trainer.run(settings["epochs"], made.make(), sets if len(sets) > 1 else sets.get(""), **options)
    return trainer


def run_cut(settings: dict[str, Any], n_ranks: int, folder: Path, *, rank: int = 0) -> dict[str, Any]:
    """What a whole run ends with; and another one is begun in `folder`: it is stopped at a step, or has one epoch for other ranks."""
    if settings["cut"] == "one to two":
        run(settings | {"epochs": 1}, n_ranks, folder, rank=rank)
        return {}
    whole = run(settings, n_ranks, None, rank=rank)
    if settings["cut"] == "two to one":
        run(settings | {"epochs": 1}, n_ranks, folder, rank=rank)
    elif settings["cut"] is not None and whole.n_steps > 1:
        run(settings, n_ranks, folder, rank=rank, stop_at=1 + int(settings["at"] * (whole.n_steps - 2)))
    return outcome(whole)


def by_ranks(settings: dict[str, Any], folder: Path, *, rank: int = 0) -> dict[str, Any]:
    """What nbtrain does in two ranks; `folder` is where the run was stopped that they resume, if it is there."""
    n_ranks = 0 if settings["launch"] == "torchrun" else settings["ranks"]
    found = run_cut(settings, n_ranks, folder, rank=rank) if settings["cut"] != "one to two" else {}
    if settings["cut"] in ("two to two", "one to two") and folder.exists():
        found["resumed"] = outcome(run(settings, n_ranks, folder, rank=rank, resume="auto"))
    return found


# -- comparison
def difference(settings: dict[str, Any], expected: dict[str, Any], found: dict[str, Any]) -> str:
    """Where the runs of nbtrain differ first from the judge's, and from each other; empty where they do not."""
    if "error" in found:
        return found["error"]
    resumed = found.get("resumed")
    runs = {name: one for name, one in (("", found), ("resumed, ", resumed)) if one and "weights" in one}
    for name, one in runs.items():
        if text := _beside(settings, expected, one) or (_repeated(one["read"]) if settings["draws"] else ""):
            return name + text
    if settings["cut"] == "two to two" and resumed is not None:
        for part, value in (("epochs", found["epochs"]), ("weights", found["weights"]), ("read", found["read"][-len(resumed["read"]) :])):
            if value != resumed[part] and (settings["ranks"] == 2 or _first(value, resumed[part])):
                return f"{part} of the whole run and of the resumed one: {_first(value, resumed[part])}"
    return ""


def _beside(settings: dict[str, Any], expected: dict[str, Any], found: dict[str, Any]) -> str:
    if len(expected["epochs"]) != len(found["epochs"]):
        return f"{len(expected['epochs'])} epochs, and {len(found['epochs'])}"
    for epoch, (own, other) in enumerate(zip(reversed(expected["read"]), reversed(found["read"]))):
        counts = [Counter(int(row[0]) for row in rows) for rows in (own, other)]
        if counts[0] != counts[1]:
            missed, more = sorted((counts[0] - counts[1]).elements()), sorted((counts[1] - counts[0]).elements())
            return f"read {epoch} epochs before the end: {missed} were missed, {more} too many"
    if settings["loader"] in OWN_ORDER:
        return ""
    return next((f"{part}{text}" for part in ("epochs", "weights") if (text := _first(expected[part], found[part]))), "")


def _repeated(read: list[list[list[float]]]) -> str:
    rows = list(itertools.chain(*read))
    for kind, column in zip(DRAWS, list(zip(*rows))[1:]):
        if n := len(column) - len(set(column)):
            return f"{n} of {len(column)} draws of {kind} are the same as another"
    return ""


def _first(own: Any, other: Any) -> str:
    """The first difference of two nests."""
    if isinstance(own, dict) and isinstance(other, dict):
        if own.keys() != other.keys():
            return f": {list(own)} and {list(other)}"
        return next((f"[{name}]{text}" for name, value in own.items() if (text := _first(value, other[name]))), "")
    if isinstance(own, list) and isinstance(other, list):
        if len(own) != len(other):
            return f": {len(own)} and {len(other)}"
        return next((f"[{i}]{text}" for i, pair in enumerate(zip(own, other)) if (text := _first(*pair))), "")
    return "" if own == other or math.isclose(own, other, rel_tol=1e-6, abs_tol=1e-9) else f": {own} and {other}"


# -- many jobs
def rank_main(folder: Path, numbers: list[int]) -> None:
    """A rank of the pair: the jobs one after the other."""
    rank = int(os.environ["RANK"])
    quiet()
    for number in numbers:
        settings = settings_of(folder, number)
        try:
            found = by_ranks(settings, folder / f"runs-{number}", rank=rank)
            if settings["loader"] in DIVIDED | MADE:
                found["judge"] = by_ddp(settings, rank, settings["ranks"])
        except BaseException:
            (folder / f"{number}.error-{rank}").write_text(end_of_traceback())
            os._exit(1)  # the other one waits for this one, if it has not failed, too
        if rank == 0:
            write(folder / f"{number}.json", found)


def write(path: Path, value: Any) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(value))
    path.with_suffix(".tmp").replace(path)


def settings_of(folder: Path, number: int) -> dict[str, Any]:
    return json.loads((folder / f"{number}.settings").read_text())


def start_ranks(folder: Path, numbers: list[int], n_ranks: int) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    started = []
    for rank in range(n_ranks):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "GROUP_RANK": 0}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "judge", "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        with open(folder / f"output-{rank}", "ab") as output:
            command = [sys.executable, __file__, "--ranks", str(folder), *map(str, numbers)]
            started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True))
    return started


def by_torchrun(folder: Path, numbers: list[int], n_ranks: int) -> None:
    """Do the jobs in `n_ranks` processes, which stay for `PER_START` of them; after an error, or a job that does not end, in new ones."""
    left = numbers
    while left:
        ranks = start_ranks(folder, left[:PER_START], n_ranks)
        deadline, n_left = time.monotonic() + LONGEST_S, len(left)
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
            left = [number for number in left if not (folder / f"{number}.json").exists()]
            if any(rank.poll() not in (None, 0) for rank in ranks):
                deadline = min(deadline, time.monotonic() + 3)  # the other one ends by itself, or waits for ever
            elif len(left) < n_left:
                deadline, n_left = time.monotonic() + LONGEST_S, len(left)
        is_whole = [rank.poll() for rank in ranks] == [0] * n_ranks
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        left = [number for number in left if not (folder / f"{number}.json").exists()]
        if not is_whole and left:
            errors = {int(path.name.partition(".")[0]): path.read_text() for path in folder.glob("*.error-*")}
            for number, text in (errors or {left[0]: f"it did not end in {LONGEST_S} s"}).items():
                write(folder / f"{number}.json", {"error": text})
            left = [number for number in left if not (folder / f"{number}.json").exists()]


def with_judge(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The job from a cell, in workers that this process starts, and keeps."""
    found = by_ranks(settings, folder)
    if settings["loader"] in DIVIDED:
        with Launch(lambda rank: by_ddp(settings, rank.number, rank.world_size), settings["ranks"], pool=_pool()) as running:
            found["judge"] = running.wait()[0]
    return found


def in_this_process(settings: dict[str, Any], folder: Path, number: int) -> str:
    """What of a job remains when its ranks have ended, and where it differs."""
    runs, file = folder / f"runs-{number}", folder / f"{number}.json"
    found = with_judge(settings, runs) if settings["launch"] == "cell" else json.loads(file.read_text())
    if settings["cut"] == "two to one" and runs.exists():
        found["resumed"] = outcome(run(settings, 1, runs, resume="auto"))
    return difference(settings, found.get("judge") or by_one(settings, settings["ranks"]), found)


def differences(jobs: dict[int, dict[str, Any]]) -> dict[int, str]:
    """Do the jobs, and compare them with the judges. Where they differ first, by the number of the job; empty where they do not."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        quiet()
        folder = Path(name)
        for number, settings in jobs.items():
            (folder / f"{number}.settings").write_text(json.dumps(settings))
            if settings["cut"] == "one to two":
                run_cut(settings, 1, folder / f"runs-{number}")
        for n_ranks in sorted({settings["ranks"] for settings in jobs.values()}):
            these = [number for number, settings in jobs.items() if settings["launch"] == "torchrun" and settings["ranks"] == n_ranks]
            by_torchrun(folder, these, n_ranks)
        texts = {}
        for number, settings in jobs.items():
            try:
                texts[number] = in_this_process(settings, folder, number)
            except Exception:
                texts[number] = end_of_traceback()
        return texts


def end_of_traceback() -> str:
    return "".join(traceback.format_exc().splitlines(True)[-6:])


PER_START = 40  # processes keep what a run leaves: groups of gloo, and threads of loaders
LONGEST_S = 180  # for one job, on a busy machine


def quiet() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def kind_of(settings: dict[str, Any]) -> str:
    return f"{'shares' if settings['loader'] in DIVIDED | MADE else 'dealt'}, {settings['launch']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("n", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, help="one of them again")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--ranks", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        rank_main(Path(args.ranks[0]), [int(number) for number in args.ranks[1:]])
        return 0
    quiet()
    numbers = [args.seed] if args.seed is not None else list(range(args.first, args.first + args.n))
    n_different, kinds = 0, Counter[str]()
    for at in range(0, len(numbers), PER_START):
        jobs = {number: draw(number) for number in numbers[at : at + PER_START]}
        for number, text in differences(jobs).items():
            kinds[kind_of(jobs[number])] += 1
            if text or args.seed is not None:
                unusual = {name: value for name, value in jobs[number].items() if value != USUAL[name]}
                print(f"seed {number}: {unusual}\n  {text or 'no difference'}", flush=True)
            n_different += bool(text)
    print(f"{len(numbers)} jobs, {n_different} differ from the judge; {dict(kinds)}")
    return 1 if n_different else 0


if __name__ == "__main__":
    sys.exit(main())
