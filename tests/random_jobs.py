"""Random jobs of training, done three times: by a plain PyTorch loop, the judge, and by nbtrain on its two ways.

    python tests/random_jobs.py 1000            # in `make compare`; the seeds 0 to 999
    python tests/random_jobs.py 1 --seed 417    # one of them again, with its settings and the first difference
    python tests/random_jobs.py 1000 --page     # and docs/plain_loop.md is written

Drawn are data that change between epochs and within one, samplers and loaders of every kind in sizes that come out even and not,
`set_epoch` wherever it may be, wrong lengths, batches that are None, steps that return None, validations with and without random numbers,
one optimizer or two, clipping, accumulation, schedules, hooks of optimizers and modules, what callbacks change in mid-epoch, and calls of
`evaluate` and others between runs. Compared are the batches that the steps see, the weights, the optimizers' states, the means of the
epochs, and the random numbers after it. `DECISIONS` is what nbtrain does otherwise than most plain loops, on purpose.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import proofs
import torch
from plain_loop import train
from samples import DEVICE
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from nbtrain import MultiOptimizerTrainer, TensorLoader, Trainer

PAGE = Path(__file__).parent.parent / "docs" / "plain_loop.md"


# -- data
class Rows(Dataset[Any]):
    """`n` rows of five numbers; `n` may change. Some kinds add the epoch that they are told, or noise."""

    def __init__(self, n: int, kind: str = "rows") -> None:
        self.n, self.kind, self.epoch = n, kind, 0
        self.x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.n:
            raise IndexError
        x = self.x[i]
        if self.kind == "noisy":
            x = x + 0.1 * torch.randn(5) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x + 0.01 * self.epoch, x.sum().reshape(1)


class EpochRows(Rows):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def _none_at_times(rows: list[Any]) -> Any:
    batch = default_collate(rows)
    return None if float(batch[0].sum()) % 1 < 0.25 else batch


class InTurn(Sampler[int]):
    """Begins elsewhere in each epoch that it is told."""

    def __init__(self, data: Rows) -> None:
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        n = len(self.data)
        return iter([(i + 3 * self.epoch) % n for i in range(n)])


class Uneven:
    """Batches of one, two, three ... rows; more of them in later epochs, if it is told the epoch."""

    def __init__(self, data: Rows) -> None:
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _batches(self) -> list[list[int]]:
        return [[(i * i + k) % len(self.data) for k in range(i)] for i in range(1, 5 + self.epoch)]

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())


class Stream(IterableDataset[Any]):
    """The rows one after the other, with a length that is `off`, or none; it may clean up after the last one."""

    def __init__(self, data: Rows) -> None:
        self.data, self.cleaned = data, 0

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self.data)):
            yield self.data[i]
        self.cleaned += 1

    def set_epoch(self, epoch: int) -> None:
        self.data.epoch = epoch


class SizedStream(Stream):
    off = 0

    def __len__(self) -> int:
        return len(self.data) + self.off


class ByHand:
    """Batches from a class of one's own."""

    def __init__(self, data: Rows, size: int, collate: Any) -> None:
        self.data, self.size, self.collate = data, size, collate

    def __iter__(self) -> Iterator[Any]:
        n = len(self.data)
        return (self.collate([self.data[i] for i in range(at, min(at + self.size, n))]) for at in range(0, n, self.size))


class SizedByHand(ByHand):
    off = 0

    def __len__(self) -> int:
        return max(1, -(-len(self.data) // self.size) + self.off)


class ToldByHand(ByHand):
    def set_epoch(self, epoch: int) -> None:
        self.data.epoch = epoch


class Around:
    """A loader around another: "eager" reads a whole pass in `__iter__`, and "empty" adds a batch without rows."""

    def __init__(self, loader: Any, kind: str) -> None:
        self.data, self.kind = loader, kind

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.data)) if self.kind == "eager" else self._with_empty()

    def _with_empty(self) -> Iterator[Any]:
        for i, batch in enumerate(self.data):
            yield batch
            if not i:
                yield [item[:0] for item in batch]


class SizedAround(Around):
    def __len__(self) -> int:
        return len(self.data) + (self.kind == "empty")


def _around(loader: Any, kind: str) -> Any:
    try:
        len(loader)
    except TypeError:
        return Around(loader, kind)
    return SizedAround(loader, kind)


def _with(kind: type, **attributes: Any) -> type:
    return type(kind.__name__, (kind,), attributes)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


_Make = Callable[[Rows, int, Any], Any]  # of the data, the size of a batch and the collate function


def _sampled(sampler: Callable[[Rows], Any]) -> _Make:
    return lambda data, size, collate: DataLoader(data, size, sampler=sampler(data), collate_fn=collate)


def _loader(**options: Any) -> _Make:
    return lambda data, size, collate: DataLoader(data, size, collate_fn=collate, **options)


def _streamed(kind: type, off: int = 0, **options: Any) -> _Make:
    return lambda data, size, collate: DataLoader(_with(kind, off=off)(data), size, collate_fn=collate, **options)


def _of_tensors(**options: Any) -> _Make:
    """For nbtrain a TensorLoader; for the plain loop the DataLoader that it stands for."""

    def make(data: Rows, size: int, collate: Any) -> Any:
        x = data.x[: data.n]
        kind: Any = torch.utils.data.TensorDataset
        own = {"generator": _generator(), **options}
        return (TensorLoader(x, x.sum(1, keepdim=True), batch_size=size, **own), DataLoader(kind(x, x.sum(1, keepdim=True)), size, **own))

    return make


LOADERS: dict[str, _Make] = {
    "in order": _loader(),
    "shuffled": _loader(shuffle=True),
    "shuffled, drop_last": _loader(shuffle=True, drop_last=True),
    "own generator": lambda data, size, collate: DataLoader(data, size, shuffle=True, generator=_generator(), collate_fn=collate),
    "own generator, drop_last": lambda data, size, collate: DataLoader(
        data, size, shuffle=True, generator=_generator(), drop_last=True, collate_fn=collate
    ),
    "with replacement": _sampled(lambda data: RandomSampler(data, replacement=True, num_samples=20)),
    "weighted": _sampled(lambda data: WeightedRandomSampler([1.0 + i % 3 for i in range(data.n)], 24)),
    "subset sampler": _sampled(lambda data: SubsetRandomSampler(range(0, data.n, 2))),
    "distributed sampler": _sampled(lambda data: DistributedSampler(data, 1, 0, seed=3)),
    "sampler with set_epoch": _sampled(InTurn),
    "batch sampler with set_epoch": lambda data, size, collate: DataLoader(data, batch_sampler=Uneven(data), collate_fn=collate),  # pyright: ignore
    "batch sampler of a sampler with set_epoch": lambda data, size, collate: DataLoader(
        data, batch_sampler=BatchSampler(InTurn(data), size, False), collate_fn=collate
    ),
    "batch sampler, drop_last": lambda data, size, collate: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data), size, True), collate_fn=collate
    ),
    "subset of data": lambda data, size, collate: DataLoader(Subset(data, range(data.n)), size, shuffle=True, collate_fn=collate),
    "joined data": lambda data, size, collate: DataLoader(ConcatDataset([data, Rows(8)]), size, collate_fn=collate),
    "stream": _streamed(Stream),
    "stream, drop_last": _streamed(Stream, drop_last=True),
    "stream with a length": _streamed(SizedStream),
    "stream with too large a length": _streamed(SizedStream, 20),
    "stream with too small a length": _streamed(SizedStream, -9),
    "by hand": lambda *args: ByHand(*args),
    "by hand with a length": lambda *args: SizedByHand(*args),
    "by hand with too large a length": lambda *args: _with(SizedByHand, off=2)(*args),
    "by hand with too small a length": lambda *args: _with(SizedByHand, off=-1)(*args),
    "by hand with set_epoch": lambda *args: ToldByHand(*args),
    "list of batches": lambda *args: list(ByHand(*args)),
    "TensorLoader": _of_tensors(shuffle=True),
    "TensorLoader, drop_last": _of_tensors(shuffle=True, drop_last=True),
}

# -- what is trained
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 0.02),
    "AdamW, groups": lambda model: torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.001}],
        0.02,
    ),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 0.05),
}


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    middle = {"plain": nn.Identity(), "dropout": nn.Dropout(0.3), "batch norm": nn.BatchNorm1d(8)}[kind]
    return nn.Sequential(nn.Linear(5, 8), middle, nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)


def make_beside() -> nn.Module:
    """A teacher beside the model, whose batch norm follows the training data alone."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).to(DEVICE)


class Two(nn.ModuleDict):
    """Two parts, whose outputs are added."""

    def forward(self, x: Tensor) -> Tensor:
        return self["a"](x) + self["b"](x)


class Rates:
    """A schedule by hand, for the plain loop: the rate of update `n`, from 0, whatever was set meanwhile if it `rules`."""

    def __init__(self, optimizer: Any, *, rules: bool) -> None:
        self.optimizer, self.n = optimizer, 0
        self.put()
        if rules:
            optimizer.register_step_pre_hook(self.put)

    def step(self) -> None:
        self.n += 1
        self.put()

    def put(self, *args: Any) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of(self.n)


def rate_of(step: int) -> float:
    return 0.05 * 0.9**step


class OneAhead:
    """Reads `loader` one batch ahead, for the plain loop."""

    def __init__(self, loader: Any, most: int | None) -> None:
        self.data, self.most = loader, most

    def __iter__(self) -> Iterator[Any]:
        batches = islice(self.data, self.most)
        ahead = next(batches, self)
        while ahead is not self:
            batch, ahead = ahead, next(batches, self)
            yield batch


class Work:
    """One run's data, model and optimizer, made anew from the settings, and what its steps see."""

    def __init__(self, settings: dict[str, Any], *, ours: bool) -> None:
        _seed()
        self.settings, self.seen, self.ours = settings, list[Any](), ours
        self.beside: Any = None
        self.means, self.weights = dict[str, list[float]](), dict[str, list[int]]()  # of an epoch's batches, by phase
        self.data = (EpochRows if settings["told"] else Rows)(settings["n"], settings["data"])
        self.valid_data = Rows(20)
        collate = _none_at_times if settings["none"] else default_collate
        made = LOADERS[settings["loader"]](self.data, settings["size"], collate)
        self.loader = made[0 if ours else 1] if isinstance(made, tuple) else made
        if settings["workers"]:
            self.loader = DataLoader(self.data, settings["size"], shuffle=True, num_workers=1, persistent_workers=True, collate_fn=collate)
        if settings["around"]:
            self.loader = _around(self.loader, settings["around"])
        self.valid = self.make_valid()
        if settings["beside"]:
            self.beside = make_beside()
        model: Any = make_model(settings["net"])
        self.net, self.layer, self.middle, self.last = model, model[0], model[1], model[3]
        if settings["frozen"]:
            model[1].eval()
        self.optimizer, self.scale = OPTIMIZERS[settings["optimizer"]](model), 1.0
        self.other: Any = None  # the optimizer of a second part
        self.model: Any = model
        if settings["two"]:
            self.model = Two({"a": model, "b": make_model("plain")})
            self.other = torch.optim.SGD(self.model["b"].parameters(), 0.02, momentum=0.5)
        if settings["hook"]:
            HOOKS[settings["hook"]](self)

    def make_valid(self) -> Any:
        kind = self.settings["valid"]
        if kind is None:
            return None
        return DataLoader(self.valid_data, 8, shuffle=kind == "shuffled", collate_fn=_none_at_times if kind == "none" else default_collate)

    def loss_of(self, model: Any, batch: Any) -> Tensor | None:
        phase = "train" if model.training else "valid"
        x, y = (item.to(DEVICE) for item in batch)
        self.seen.append((phase, len(x), float(x.double().sum())))
        if self.settings["skips"] in (phase, "both") and float(x.sum()) % 1 > 0.7:
            return None
        if phase == "valid" and self.settings["valid"] == "draws":
            x = x + torch.rand(1, device=DEVICE) + random.random()
        if self.other is None:
            output = model(x)
        else:
            b = model["b"](x)
            output = model["a"](x) + (b.detach() if phase == "train" else b)
        if self.beside is not None:
            output = output + 0.1 * self._ask_beside(x, phase).mean(1, keepdim=True)
        self.output = output
        loss = mse_loss(output, y) if len(x) else (output - y).sum()
        loss = loss * (self.scale if phase == "train" else 1.0)
        self.means.setdefault(phase, []).append(loss.item())
        self.weights.setdefault(phase, []).append(len(x))
        return loss

    @torch.no_grad()
    def _ask_beside(self, x: Tensor, phase: str) -> Tensor:
        if self.ours:
            return self.beside(x)
        self.beside.train(phase == "train")
        return self.beside(x)

    def other_loss_of(self, model: Any, batch: Any) -> Tensor:
        """The loss of the second part, when the first has taken its step."""
        x, y = (item.to(DEVICE) for item in batch)
        loss = mse_loss(model["a"](x).detach() + model["b"](x), y)
        self.means["train"][-1] += loss.item()
        return loss

    # -- what changes the work in an epoch
    def begin(self, epoch: int) -> None:
        """At the beginning of an epoch."""
        self.means, self.weights = {}, {}
        if epoch and self.settings["grows"] in ("grows", "shrinks"):
            self.data.n += 8 if self.settings["grows"] == "grows" else -5
        if epoch and self.settings["grows"] == "valid grows":
            self.valid_data.n += 8
        self.change(epoch, 0)

    def after(self, epoch: int, n: int) -> None:
        """After batch `n` of an epoch, from 1."""
        if self.settings["grows"] == "in mid-epoch" and n == 2:
            self.data.n += 8
        self.change(epoch, n)

    def change(self, epoch: int, n: int) -> None:
        """What is changed after batch `n` of an epoch; 0: before the epoch, and so before a run, between two, or in a hook."""
        change = self.settings["change"]
        if change is not None and (epoch, n) == tuple(self.settings["change_at"]):
            (CHANGES | SPOILS)[change](self)
        if self.settings["mode"] and (epoch, n) == tuple(self.settings["change_at"]):
            self.middle.eval()

    def averages(self) -> dict[str, float]:
        """The means of the epoch over its samples."""
        return {
            phase: sum(a * n for a, n in zip(values, self.weights[phase])) / sum(self.weights[phase])
            for phase, values in self.means.items()
        }

    def outcome(self, epochs: list[dict[str, float]]) -> dict[str, Any]:
        state = [self.optimizer.state_dict(), self.other and self.other.state_dict()]
        return {
            "seen": self.seen,
            "weights": {name: value.tolist() for name, value in self.model.state_dict().items()},
            "beside": [value.tolist() for value in self.beside.state_dict().values()] if self.beside is not None else [],
            "optimizer": repr(state),
            "epochs": epochs,
            "random": [torch.rand(2).tolist(), torch.rand(2, device=DEVICE).tolist(), random.random(), float(np.random.rand())],
            "modes": [part.training for part in self.model.modules()],
        }


def _scale_gradients(work: Work) -> None:
    def scale(optimizer: Any, *args: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad *= 0.5

    work.optimizer.register_step_pre_hook(scale)


def _shrink_weights(work: Work) -> None:
    @torch.no_grad()
    def shrink(*args: Any) -> None:
        for p in work.model.parameters():
            p *= 0.99

    work.optimizer.register_step_post_hook(shrink)


HOOKS: dict[str, Callable[[Work], Any]] = {
    "before the step": _scale_gradients,
    "after the step": _shrink_weights,
    "forward": lambda work: work.layer.register_forward_hook(lambda module, args, output: output + 0.1 * torch.rand(1, device=DEVICE)),  # pyright: ignore
    "backward": lambda work: work.layer.register_full_backward_hook(lambda *args: None),  # pyright: ignore
    "tensor": lambda work: work.layer.weight.register_hook(lambda grad: 0.5 * grad),  # pyright: ignore
}


def _set_rate(work: Work) -> None:
    for group in work.optimizer.param_groups:
        group["lr"] = 0.001


def _new_layer(work: Work) -> None:
    """Another module in the place of the last one, which the optimizer gets as another group."""
    new = nn.Linear(work.last.in_features, work.last.out_features).to(DEVICE)
    work.net[3] = work.last = new
    work.optimizer.add_param_group({"params": [*new.parameters()], "lr": 0.05})


def _set_decay(work: Work) -> None:
    for group in work.optimizer.param_groups:
        group["weight_decay"] = 0.1


CHANGES: dict[str, Callable[[Work], Any]] = {
    "rate": _set_rate,
    "frozen layer": lambda work: work.layer.requires_grad_(False),  # pyright: ignore
    "new weights": lambda work: nn.init.constant_(work.last.weight, 0.3),  # pyright: ignore
    "scale of the loss": lambda work: setattr(work, "scale", 0.3),
    "seed": lambda work: torch.manual_seed(9),
    "hook of the optimizer": _scale_gradients,
    "hook of a module": HOOKS["forward"],
    "another layer": _new_layer,
    "weight decay": _set_decay,
    "no state of the optimizer": lambda work: work.optimizer.state.clear(),
    "another group": lambda work: work.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, device=DEVICE))], "lr": 0.1}),
}

SPOILS: dict[str, Callable[[Work], Any]] = {"loss that is not finite": lambda work: setattr(work, "scale", float("nan"))}


# -- the three ways
_Usual = Callable[[Work], dict[str, Any]]  # options of the plain loop


def by_hand(settings: dict[str, Any], usual: _Usual | None = None) -> dict[str, Any]:
    """The plain loop; with the options `usual`, as most people write it."""
    work, epochs, done = Work(settings, ours=False), [], 0
    schedule: dict[str, Any] = {}
    if settings["schedule"] == "epoch":
        schedule["each_epoch"] = torch.optim.lr_scheduler.StepLR(work.optimizer, 1, 0.7)
    if settings["schedule"] == "update":
        schedule["each_update"] = Rates(work.optimizer, rules=usual is None)
    ahead = usual is None and not hasattr(work.loader, "__len__")
    if isinstance(work.loader, DataLoader):
        ahead = usual is None and isinstance(work.loader.dataset, IterableDataset) and not hasattr(work.loader.dataset, "__len__")
    loader = OneAhead(work.loader, settings["most"]) if ahead else work.loader
    _seed()
    for n in settings["runs"]:
        options = {name: settings[name] for name in ("accumulate", "clip", "most")} | schedule
        options |= {"valid": work.valid, "begin": work.begin, "after": work.after}
        if settings["accumulate"] > 1:
            options["size_of"] = lambda batch: len(batch[0])
        if work.other is not None:
            options["others"] = [(work.model["b"], work.other, work.other_loss_of)]
        options |= usual(work) if usual is not None else {}
        for _ in train(work.model, work.optimizer, work.loss_of, loader, range(done, done + n), **options):
            epochs.append(work.averages())
        done += n
    if settings["schedule"] == "update" and usual is None:
        schedule["each_update"].put()  # what was set after the last update is set again, too
    return work.outcome(epochs)


class Job(Trainer):
    work: Work

    def train_step(self, batch: Any) -> Any:
        loss = self.work.loss_of(self.model, batch)
        return None if loss is None else {"loss": loss, "output": self.work.output}

    test_step = train_step


class TwoJob(MultiOptimizerTrainer):
    work: Work

    def train_step_a(self, batch: Any) -> Any:
        return {"loss": self.work.loss_of(self.model, batch)}

    def train_step_b(self, batch: Any) -> Any:
        return {"loss": self.work.other_loss_of(self.model, batch)}

    test_step = Job.test_step


class Follows(L.Callback):
    """Does in hooks what the plain loop does between its lines. The first epoch of a run begins before the run."""

    def __init__(self, work: Work) -> None:
        self.work, self.has_begun = work, False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.has_begun:
            self.has_begun = False
        else:
            self.work.begin(trainer.current_epoch)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.work.after(trainer.current_epoch, batch_idx + 1)


BETWEEN: dict[str, Callable[[Any, Work], Any]] = {
    "evaluate": lambda trainer, work: trainer.evaluate(_others()),
    "evaluate, shuffled": lambda trainer, work: trainer.evaluate(DataLoader(Rows(20, "noisy"), 8, shuffle=True)),
    "validate": lambda trainer, work: trainer.validate(_others()),
    "predict": lambda trainer, work: trainer.predict(torch.zeros(2, 5)),
    "inference": lambda trainer, work: trainer.inference(_others()),
    "mode test": lambda trainer, work: (trainer.toggle("test"), trainer.run(1, _others()), trainer.toggle("train")),
    "summary": lambda trainer, work: trainer.summary([torch.zeros(2, 5), torch.zeros(2, 1)]),
}


def _others() -> Any:
    return DataLoader(Rows(20), 8)


def by_nbtrain(settings: dict[str, Any], *, short: bool) -> dict[str, Any]:
    work = Work(settings, ours=True)
    follows = Follows(work)
    lightning: dict[str, Any] = {"callbacks": [follows]}
    if settings["accumulate"] > 1:
        lightning["accumulate_grad_batches"] = settings["accumulate"]
    if settings["most"] is not None:
        lightning["limit_train_batches"] = settings["most"]
    options: dict[str, Any] = {"gradient_clip": settings["clip"], "log_bar": False, "device": DEVICE, "lightning": lightning}
    if settings["schedule"] == "epoch":
        options["scheduler"] = torch.optim.lr_scheduler.StepLR(work.optimizer, 1, 0.7)
    if settings["schedule"] == "update":
        options["scheduler"] = rate_of
    trainer: Any = Job(work.model, optimizer=work.optimizer, **options) if work.other is None else None
    if trainer is None:
        trainer = TwoJob(work.model, optimizers={"a": lambda params: work.optimizer, "b": lambda params: work.other}, **options)
    trainer.work, trainer.short_way = work, short
    if work.beside is not None:
        trainer.beside = work.beside
    _seed()
    for i, n in enumerate(settings["runs"]):
        n_seen = len(work.seen)
        if i and settings["between"]:
            BETWEEN[settings["between"]](trainer, work)
            del work.seen[n_seen:]
        work.begin(sum(settings["runs"][:i]))
        follows.has_begun = True
        trainer.run(n, work.loader, work.valid)
    names = {"train": "train_loss", "valid": "val_loss"}
    rows = [{phase: row[name] for phase, name in names.items() if name in row} for row in trainer.history.epochs]
    return work.outcome(rows)


def _seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


# -- settings
USUAL: dict[str, Any] = {
    **{
        "n": 40,
        "size": 16,
        "data": "rows",
        "told": False,
        "loader": "shuffled",
        "grows": None,
        "none": False,
        "skips": None,
        "valid": None,
    },
    **{
        "net": "plain",
        "frozen": False,
        "optimizer": "SGD",
        "two": False,
        "hook": None,
        "schedule": None,
        "clip": 0.0,
        "accumulate": 1,
        "most": None,
    },
    **{"change": None, "change_at": [0, 1], "runs": [2], "between": None},
    **{"around": None, "beside": False, "mode": False, "workers": False},
}


def draw(seed: int) -> dict[str, Any]:
    """The settings of one job: plain values that say all of it."""
    rng = random.Random(seed)
    rare = lambda share, values: rng.choice(values) if rng.random() < share else None  # noqa: E731
    settings: dict[str, Any] = {
        "n": rng.choice([32, 48, 40, 33, 17, 16]),
        "size": rng.choice([8, 16]),
        "data": rng.choice(["rows", "rows", "noisy"]),
        "told": rng.random() < 0.3,
        "loader": rng.choice(list(LOADERS)),
        "grows": rare(0.4, ["grows", "shrinks", "in mid-epoch", "valid grows"]),
        "none": rng.random() < 0.2,
        "skips": rare(0.2, ["train", "valid", "both"]),
        "valid": rare(0.6, ["in order", "shuffled", "draws", "none"]),
        "net": rng.choice(["plain", "dropout", "batch norm"]),
        "optimizer": rng.choice(list(OPTIMIZERS)),
        "frozen": rng.random() < 0.1,
        "two": rng.random() < 0.1,
        "hook": rare(0.3, list(HOOKS)),
        "schedule": rare(0.4, ["epoch", "update"]),
        "clip": rare(0.3, [0.05]) or 0.0,
        "accumulate": rare(0.3, [2, 3]) or 1,
        "most": rare(0.2, [1, 2]),
        "change": rare(0.4, list(CHANGES)),
        "change_at": [rng.choice([0, 1]), rng.choice([1, 2])],
        "runs": rng.choice([[2], [3], [1, 2], [1, 1, 1]]),
        "between": rare(0.5, list(BETWEEN)),
    }
    settings |= {
        "around": rare(0.3, ["eager", "empty"]),
        "beside": rng.random() < 0.2,
        "mode": rng.random() < 0.2,
        "workers": rng.random() < 0.05,
    }
    if rng.random() < 0.3:  # before an epoch
        settings["change_at"][1] = 0
    if settings["workers"]:  # which keep the data that they began with
        settings |= {"loader": "shuffled", "grows": None, "told": False}
    if settings["two"] and settings["around"] == "empty":
        settings["around"] = None  # the mean loss of the second part is none
    if settings["around"] == "empty":
        settings |= {"loader": rng.choice(["in order", "shuffled", "by hand with a length"]), "none": False, "skips": None}
    if (
        settings["grows"] == "in mid-epoch"
    ):  # before the last batch: after that, torch's RandomSampler adds one, and nbtrain's epoch has ended
        settings["n"] = max(settings["n"], 48)
    if settings["two"]:  # they take turns: one update each, and a rate of its own
        settings |= {
            "accumulate": 1,
            "schedule": None,
            "skips": None,
            "change": None if settings["change"] in ("another group", "another layer") else settings["change"],
        }
    if settings["accumulate"] > 1:
        settings["change"] = None  # a plain loop makes the update of a short last window after all batches, and so after your code
    return settings


# -- comparison
_LEFT_OUT, _EMPTY = "were left out", "The loader is empty"  # a pass without a batch ends the run, or it does not begin, see `DECISIONS`


def difference(settings: dict[str, Any]) -> dict[str, str]:
    """Where nbtrain differs from the plain loop first, by loop; empty where it does not. Both may raise, as for a batch norm of one row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, str] = {}
        phases = ["train", *(["valid"] if settings["valid"] else [])]
        try:
            plain = by_hand(settings)
        except (ValueError, IndexError, AssertionError) as error:
            plain = {"error": str(error)}
        for name, short in (("short way", True), ("whole way", False)):
            try:
                ours = by_nbtrain(settings, short=short)
            except Exception as error:
                has_no_batch = any(text in str(error) for text in (_LEFT_OUT, _EMPTY))
                if "error" not in plain and not (has_no_batch and any(len(means) < len(phases) for means in plain["epochs"])):
                    found[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            for part, value in plain.items():
                if text := _first_difference(value, ours.get(part, "no error")):
                    found[name] = f"{part}{text}"
                    break
        return found


def _first_difference(plain: Any, ours: Any) -> str:
    if isinstance(plain, list) and isinstance(ours, list):
        if len(plain) != len(ours):
            return f": {len(plain)} and {len(ours)}"
        return next((f"[{i}]{text}" for i, pair in enumerate(zip(plain, ours)) if (text := _first_difference(*pair))), "")
    if isinstance(plain, dict) and isinstance(ours, dict):
        if plain.keys() != ours.keys():
            return f": {list(plain)} and {list(ours)}"
        return next((f"[{name}]{text}" for name, value in plain.items() if (text := _first_difference(value, ours[name]))), "")
    same = math.isclose(plain, ours, rel_tol=1e-5) if isinstance(plain, float) and isinstance(ours, float) else plain == ours
    return "" if same else f": {str(plain)[:150]} and {str(ours)[:150]}"


def shrink(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with as much as possible as usual, that still make a difference."""
    for name, value in settings.items():
        if value != USUAL[name] and difference(simpler := settings | {name: USUAL[name]}):
            return shrink(simpler)
    return settings


def unusual(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value != USUAL[name]}


# -- what nbtrain does otherwise than most plain loops, on purpose
@dataclass(frozen=True)
class Decision:
    """In `job` a usual loop, the judge with the options `usual`, ends otherwise than nbtrain; the judge does not.

    Or nbtrain raises an error with the words `raises`.
    """

    title: str
    text: str
    job: dict[str, Any]
    usual: _Usual = lambda work: {}
    raises: str = ""


DECISIONS = [
    Decision(
        "A validation leaves the random numbers as they were",
        "A run trains the same with a `valid_loader` and without. In most loops its loader, and what the model draws, moves the global "
        "random numbers of the next epoch. The plain loop that is equal restores those of torch, Python and NumPy after its validation.",
        {"net": "dropout", "valid": "shuffled"},
        lambda work: {"restore": False},
    ),
    Decision(
        "Accumulated gradients are those of one big batch",
        "A batch of a window counts by its samples, and a window that ends with its epoch is divided by what it has. Most loops divide "
        "each loss by the batches of a full window. The plain loop that is equal weighs each loss by its samples.",
        {"n": 33, "accumulate": 3},
        lambda work: {"size_of": lambda batch: 1},
    ),
    Decision(
        "Every `set_epoch` of a loader is called",
        "That of the loader, its samplers and datasets, before each pass; the next run continues the count. Most loops forget it, "
        "and read the same order in each epoch. The plain loop that is equal calls it.",
        {"told": True, "loader": "distributed sampler"},
        lambda work: {"tell": lambda loader, epoch: None},
    ),
    Decision(
        "A layer that you have put into eval mode stays there",
        "Frozen statistics of a batch norm stay frozen. Most call `model.train()` in each epoch, which ends that. The plain loop that "
        "is equal restores the modes after its validation, and calls `model.train()` never.",
        {"net": "batch norm", "frozen": True},
        lambda work: {"begin": lambda epoch: (work.begin(epoch), work.model.train())},
    ),
    Decision(
        "A schedule that is a function rules the rate",
        "With `scheduler=lambda step: ...` each update has the rate of its step. In a loop that sets the next rate after an update, a rate "
        "that your code sets meanwhile is used once. `trainer.set(lr=...)` scales the schedule.",
        {"schedule": "update", "change": "rate"},
        lambda work: {},
    ),
    Decision(
        "A loader without a length is read one batch ahead",
        "So its last batch is known, as with Lightning. Where its data and your step both draw random numbers in the main process, they "
        "draw in another order than in most loops. The plain loop that is equal reads one batch ahead, too. "
        "A loader that makes its batches with the model, as in reinforcement learning, needs a `__len__`: "
        "then it is read after each update.",
        {"loader": "stream", "data": "noisy", "net": "dropout"},
        lambda work: {},
    ),
    Decision(
        "A pass of which every batch was left out ends the run",
        "A batch that a collate function gives as None, or for which the step returns None, is left out. Where none is left, "
        "most loops continue without a word.",
        {"none": True, "most": 1},
        raises=_LEFT_OUT,
    ),
    Decision(
        "A run over an empty loader is refused",
        "Its data has shrunk to nothing, or to less than a batch with `drop_last=True`. Most loops train zero batches without a word. "
        "An epoch that becomes empty within a run is an epoch, and is noted.",
        {"n": 17, "loader": "shuffled, drop_last", "grows": "shrinks", "runs": [1, 1, 1]},
        raises=_EMPTY,
    ),
    Decision(
        "A loss that is not finite ends the run",
        "Most loops continue, and end with weights that are not numbers. `nonfinite=` chooses otherwise.",
        {"change": "loss that is not finite"},
        raises="The training loss is nan",
    ),
]
_HEAD = """# Beside a plain PyTorch loop

The judge of training is a loop of plain PyTorch, `tests/plain_loop.py`, which reads a loader until it ends and knows nothing of nbtrain and
Lightning. `make compare` draws jobs at random and does each three times: by that loop, and by nbtrain the
short way and by the public calls of Lightning's strategy and precision.
Of {n:,} jobs drawn for this page, {n_different} had another result than the plain loop. Compared are the batches that the steps see,
the weights and the optimizer's state bit for bit, the means of the epochs, and the random numbers after the run.

{made}

| drawn | jobs |
| --- | --- |
"""
_NAMES = {
    "loader": "the loader",
    "data": "the data",
    "told": "data with `set_epoch`",
    "grows": "what changes in the data",
    "none": "None from a collate function",
    "skips": "a step that returns None, in",
    "valid": "the validation",
    "net": "the net",
    "frozen": "a layer in eval mode",
    "optimizer": "the optimizer",
    "two": "two optimizers",
    "hook": "a hook",
    "schedule": "a schedule, by",
    "clip": "clipping",
    "accumulate": "batches of an update",
    "most": "a limit of batches",
    "change": "changed in mid-epoch",
    "between": "called between two runs",
    "around": "a loader that reads at once, or has a batch without rows",
    "beside": "a module beside the model",
    "mode": "a layer put into eval mode in a run",
    "workers": "persistent workers",
    "runs": "epochs of each run",
    "change_at": "epoch and batch of the change, 0: before its first",
}


def decisions() -> list[str]:
    """The part of the page on what differs by decision."""
    lines = ["## What differs by decision", "", "In these a loop as most people write it ends otherwise; each is tested on both loops.", ""]
    return [*lines, *(f"- **{decision.title}.** {decision.text}" for decision in DECISIONS), ""]


def page(source: str, n: int, n_different: int, drawn: dict[str, Counter[str]]) -> str:
    """docs/plain_loop.md."""
    words = {"None": "none", "False": "no", "True": "yes", "0.0": "no"}
    rows = [
        f"| {name} | {'; '.join(f'{words.get(value, value)}: {count}' for value, count in sorted(values.items()))} |"
        for name, values in drawn.items()
    ]
    return _HEAD.format(made=proofs.line("compare", source), n=n, n_different=n_different or "none") + "\n".join([*rows, "", *decisions()])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("n", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--page", action="store_true", help="write docs/plain_loop.md")
    args, source = parser.parse_args(), proofs.source()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    n_different, drawn = 0, {name: Counter[str]() for name in _NAMES.values()}
    for seed in range(args.seed, args.seed + args.n):
        settings = draw(seed)
        for name, shown in _NAMES.items():
            drawn[shown][str(settings[name])] += 1
        if different := difference(settings):
            settings = shrink(settings)
            different = difference(settings)
        if different or args.n == 1:
            print(f"seed {seed}: {unusual(settings)}", *(f"\n  {name}: {text}" for name, text in different.items()), flush=True)
        n_different += bool(different)
    print(f"{args.n} jobs, {n_different} differ from the plain loop.")
    if args.page:
        PAGE.write_text(page(source, args.n, n_different, drawn), encoding="utf-8")
    return 1 if n_different else 0


if __name__ == "__main__":
    sys.exit(main())
