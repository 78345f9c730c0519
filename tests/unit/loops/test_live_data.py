"""Data that changes while it is read: an epoch ends where its loader ends, and equals a plain loop's, on both kinds of loops."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_modules import Lit
from plain_loop import train
from samples import DEVICE, Regress, make_model, make_trainer, same_weights, some
from torch.nn.functional import mse_loss
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    default_collate,
)  # fmt: skip

from nbtrain import AccumulationAddon, SeededLoader, StateManagerAddon, TaskLoader, TensorLoader, Trainer
from nbtrain.errors import StepError

BOTH = pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock"])


def sample(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, generator=torch.Generator().manual_seed(i))
    return x, x.sum(0, keepdim=True)


class Growing(Dataset[Any]):
    """A replay buffer; each sample has noise of the global random numbers, as an augmentation draws it."""

    def __init__(self, n: int, noise: float = 0.0) -> None:
        self.items, self.noise = [sample(i) for i in range(n)], noise

    def grow(self, n: int) -> None:
        self.items += [sample(i) for i in range(len(self.items), len(self.items) + n)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        x, y = self.items[i]
        return x + self.noise * torch.randn(8) if self.noise else x, y


class Stream(IterableDataset[Any]):
    """`n` batches a pass, drawn from the global random numbers, where its length is `says`; it cleans up after its last one."""

    def __init__(self, says: int, *n: int) -> None:
        self.says, self.n, self.n_passes, self.n_closed = says, n, 0, 0

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        n = self.n[min(self.n_passes, len(self.n) - 1)]
        self.n_passes += 1
        for _ in range(n):
            x = torch.randn(4, 8) + random.random()
            yield x, x.sum(1, keepdim=True)
        self.n_closed += 1


class Steps:
    """A loader of your own: `n[epoch]` batches of fixed numbers, and a length that says `says`."""

    def __init__(self, says: int, *n: int) -> None:
        self.says, self.n, self.n_passes = says, n, 0

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[Any]:
        n = self.n[min(self.n_passes, len(self.n) - 1)]
        self.n_passes += 1
        for i in range(n):
            pairs = [sample(4 * i + k) for k in range(4)]
            yield torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


class MoreLater(Sampler[list[int]]):
    """A curriculum: two more batches in each epoch, which its length says too late, or not at all."""

    def __init__(self, *, is_honest: bool) -> None:
        self.is_honest, self.n = is_honest, 1

    def __len__(self) -> int:
        return self.n if self.is_honest else 2

    def __iter__(self) -> Iterator[list[int]]:
        self.n += 2
        yield from ([4 * i + k for k in range(4)] for i in range(self.n))


@dataclass
class Case:
    """What a case trains on, and what its code changes: called by a callback of ours, and by the plain loop."""

    loader: Any
    valid: Any = None
    begin: Callable[[int], None] = lambda epoch: None
    after: Callable[[int, int], None] = lambda epoch, n: None
    options: dict[str, Any] = field(default_factory=dict)


def growing(batch_size: int = 4, noise: float = 0.0, valid: bool = False, first: int = 1, n: int = 8, **options: Any) -> Case:
    data, own = Growing(n, noise), options.pop("accumulate", 1)
    loader, valid_data = DataLoader(data, batch_size, shuffle=True, **options), Growing(6)

    def begin(epoch: int) -> None:
        data.grow(8 if epoch >= first else 0)
        valid_data.grow(3 if epoch >= first else 0)

    return Case(loader, DataLoader(valid_data, 4) if valid else None, begin, options={"accumulate": own} if own > 1 else {})


def grows_within(per_batch: int) -> Case:
    data = Growing(16)
    loader = DataLoader(data, 4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(2)))
    return Case(loader, after=lambda epoch, n: data.grow(per_batch))


def appended() -> Case:
    batches = [*DataLoader(Growing(8), 4)]
    return Case(batches, after=lambda epoch, n: batches.append(batches[0]) if len(batches) < 3 + epoch else None)


def with_samplers(sampler: Any, *, valid: bool = False, n: int = 60, noise: float = 0.0) -> Case:
    return Case(DataLoader(Growing(n, noise), batch_sampler=sampler), DataLoader(Growing(6), 4) if valid else None)


def own_generator(n: int, **options: Any) -> Case:
    x, y = map(torch.stack, zip(*map(sample, range(n))))
    generator = torch.Generator().manual_seed(4)
    loader = TensorLoader(x, y, batch_size=8, shuffle=True, generator=generator, **options)
    return Case(loader)


CASES: dict[str, Callable[[], Case]] = {
    "a growing dataset": growing,
    "a dataset that grows before the first epoch": lambda: growing(first=0),
    "a growing dataset with augmentation and validation": lambda: growing(batch_size=3, noise=0.1, valid=True),
    "a growing dataset in windows": lambda: growing(batch_size=2, accumulate=3),
    "a growing dataset with its own generator": lambda: growing(generator=torch.Generator().manual_seed(2)),
    "a dataset that grows in each batch": lambda: grows_within(1),
    "a dataset that grows by a batch in each batch": lambda: grows_within(3),
    "a list that grows": appended,
    "a batch sampler with more batches later": lambda: with_samplers(MoreLater(is_honest=True), valid=True),
    "a batch sampler whose length stays": lambda: with_samplers(MoreLater(is_honest=False), valid=True),
    "a batch sampler whose length stays, with augmentation": lambda: with_samplers(MoreLater(is_honest=False), noise=0.1),
    "a stream with more than it says": lambda: Case(DataLoader(Stream(2, 3, 5), batch_size=None), DataLoader(Growing(6), 4)),
    "a stream with fewer than it says": lambda: Case(DataLoader(Stream(9, 3, 5), batch_size=None), DataLoader(Growing(6), 4)),
    "a stream with what it says": lambda: Case(DataLoader(Stream(4, 4), batch_size=None), DataLoader(Growing(6), 4)),
    "a loader with more than it says": lambda: Case(Steps(2, 3, 5), DataLoader(Growing(6), 4)),
    "a loader with fewer than it says": lambda: Case(Steps(9, 5, 3), DataLoader(Growing(6), 4)),
    "a loader with fewer, in windows": lambda: Case(Steps(9, 5, 3), DataLoader(Growing(6), 4), options={"accumulate": 2}),
    "a loader with more, in windows": lambda: Case(Steps(2, 5, 7), DataLoader(Growing(6), 4), options={"accumulate": 3}),
    "a stream with fewer, in windows": lambda: Case(DataLoader(Stream(9, 5, 3), batch_size=None), options={"accumulate": 2}),
    "a stream with more, in windows": lambda: Case(DataLoader(Stream(2, 5, 7), batch_size=None), options={"accumulate": 3}),
    "a validation with more than it says": lambda: Case(DataLoader(Growing(8), 4), Steps(1, 3, 5)),
    "a validation with fewer than it says": lambda: Case(DataLoader(Growing(8), 4), Steps(9, 3, 5)),
    "two loaders at a time": lambda: Case(CombinedLoader([Steps(1, 3, 5), Steps(2, 2)], "max_size_cycle")),
    "a TensorLoader that comes out even": lambda: own_generator(48),
    "a TensorLoader that drops its last": lambda: own_generator(50, drop_last=True),
}


class Tells(L.Callback):
    """Calls the code of a case where a callback of a user would."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.n_batches: list[int] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.case.begin(trainer.current_epoch)
        self.n_batches.append(0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.n_batches[-1] += 1
        self.case.after(trainer.current_epoch, batch_idx + 1)


class TwoAtATime(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return super().train_step(tuple(map(torch.cat, zip(*batch))) if isinstance(batch[0], (list, tuple)) else batch)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y = map(torch.cat, zip(*batch)) if isinstance(batch[0], (list, tuple)) else batch
    return mse_loss(model(x.to(DEVICE)), y.to(DEVICE))


def plain(case: Case, n_epoch: int) -> tuple[Any, list[Any]]:
    loader, model = case.loader, make_model().to(DEVICE)
    if isinstance(loader, CombinedLoader):
        loader = Together(loader)
    if type(loader) is TensorLoader:
        tensors, cut = loader._tensors, loader._batching
        data = torch.utils.data.TensorDataset(*tensors)
        loader = DataLoader(data, cut.batch_size, shuffle=True, drop_last=cut.drop_last, generator=loader.generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    random.seed(5)
    passes = train(
        model, optimizer, loss_of, loader, range(n_epoch), valid=case.valid, begin=case.begin, after=case.after,
        accumulate=case.options.get("accumulate", 1),
    )  # fmt: skip
    return model, list(passes)


class Together:
    """The batches of a CombinedLoader alone."""

    def __init__(self, loaders: CombinedLoader) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in iter(self.loaders))


def notes_of(trainer: Any) -> list[str]:
    """The notes of its runs, as they come."""
    notes: list[str] = []
    trainer.recorder.add(SimpleNamespace(update=lambda event: notes.append(event.data["text"]) if event.kind == "note" else None))
    return notes


def ours(case: Case, n_epoch: int, *, lean: bool, lightning: dict[str, Any] | None = None, **options: Any) -> tuple[Any, list[int]]:
    kind, tells = TwoAtATime, Tells(case)
    if case.options.get("accumulate"):
        kind, options = kind.add_on(AccumulationAddon), {"accumulate": case.options["accumulate"], **options}
    trainer = make_trainer(kind, lightning={"callbacks": [tells]} | (lightning or {}), **options)
    trainer.short_way, trainer.notes = lean, notes_of(trainer)
    torch.manual_seed(5)
    random.seed(5)
    trainer.run(n_epoch, case.loader, case.valid)
    assert trainer.result.status == "completed"
    return trainer, tells.n_batches


@BOTH
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")  # torch's, which a plain loop gives too
@pytest.mark.parametrize("name", CASES)
def test_an_epoch_ends_where_its_loader_ends(name: str, lean: bool) -> None:
    model, passes = plain(CASES[name](), 3)
    trainer, n_batches = ours(CASES[name](), 3, lean=lean)
    assert n_batches == [len(losses) for losses, _ in passes]
    assert same_weights(trainer.model, model)
    assert trainer.history.validations == [] or [len(valid) for _, valid in passes][-1] > 0
    if any(valid for _, valid in passes):
        assert len(trainer.history.validations) == 3


@BOTH
def test_a_loader_that_gives_more_than_its_length_is_said_once(lean: bool) -> None:
    told = [text for text in ours(Case(Steps(2, 4, 4), Steps(2, 3)), 2, lean=lean)[0].notes if "has given more" in text]
    assert told == [
        f"A loader of length 2 has given more batches than that: it is read until it ends. If it never ends, give LimitsAddon({limit}=...)."
        for limit in ("steps_per_epoch", "max_val_steps")
    ]
    assert not [text for text in ours(growing(valid=True), 3, lean=lean)[0].notes if "has given more" in text]
    cut = ours(Case(Steps(2, 4)), 2, lean=lean, lightning={"limit_train_batches": 2})[0]
    assert not [text for text in cut.notes if "has given more" in text]


def test_an_endless_loader_is_noted_at_its_first_batch_beyond_the_length() -> None:
    class Endless:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Any]:
            return itertools.repeat((torch.ones(2, 8), torch.ones(2, 1)))

    class Leaves(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            n_notes.append(len(notes))
            if len(n_notes) == 5:
                self.stop()
            return super().train_step(batch)

    trainer, n_notes = make_trainer(Leaves), list[int]()
    notes = notes_of(trainer)
    trainer.run(1, Endless())
    assert n_notes == [0, 0, 0, 1, 1]


# -- an epoch is resumed in the data that it had
class ByEpoch(Growing):
    """A curriculum: 8 more samples in each epoch."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__(40, noise)
        self.n_seen = 8
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.n_seen = 8 * (epoch + 1)
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.n_seen


RESUMED: dict[str, Callable[[], Case]] = {
    "a curriculum": lambda: Case(DataLoader(ByEpoch(), 4, shuffle=True), DataLoader(Growing(6), 4)),
    "a curriculum with augmentation": lambda: Case(DataLoader(ByEpoch(0.1), 3, shuffle=True)),
    "a stream with more than it says": lambda: Case(DataLoader(Stream(2, 4), batch_size=None), DataLoader(Growing(6), 4)),
    "a stream with fewer than it says": lambda: Case(DataLoader(Stream(9, 4), batch_size=None), DataLoader(Growing(6), 4)),
    "a loader with more than it says": lambda: Case(Steps(2, 4), DataLoader(Growing(6), 4)),
    "a loader with fewer than it says": lambda: Case(Steps(9, 4), DataLoader(Growing(6), 4)),
    "SeededLoader": lambda: Case(SeededLoader(ByEpoch(0.1), 4)),
    "TaskLoader": lambda: Case(TaskLoader({"a": DataLoader(ByEpoch(), 4, shuffle=True), "b": SeededLoader(Growing(8), 4)})),
}


class Tasks(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return super().train_step(getattr(batch, "batch", batch))


@pytest.mark.parametrize("lean", [True, pytest.param(False, marks=pytest.mark.long)], ids=["lean", "stock"])
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("name", some(RESUMED, 2))
def test_a_resume_reads_on_in_the_epoch_as_it_was(name: str, lean: bool, tmp_path: Any) -> None:
    def run(resume: Any = None) -> Any:
        case = RESUMED[name]()
        trainer = make_trainer(Tasks.add_on(StateManagerAddon), save_path=tmp_path, every_n_steps=1, keep_last_n=None)
        trainer.short_way = lean
        torch.manual_seed(5)
        random.seed(5)
        trainer.run(3, case.loader, case.valid, resume=resume)
        return trainer

    whole = run()
    paths = sorted(tmp_path.glob("**/epoch=*.ckpt"))
    assert len(paths) > 4
    for path in paths[1::3]:
        resumed = run(resume=path)
        assert same_weights(resumed.model, whole.model), path.name
        rows = [[{k: v for k, v in row.items() if k != "time_s"} for row in trainer.history.epochs] for trainer in (whole, resumed)]
        assert rows[0] == rows[1], path.name
        assert not any("another loader" in events.read_text() for events in tmp_path.glob("*/events.jsonl")), path.name


# -- the number of the epoch
class Told:
    """Something in a loader that wants the number of the epoch."""

    def __init__(self, **held: Any) -> None:
        self.epochs: list[int] = []
        vars(self).update(held)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class ToldDataset(Told, Growing):
    def __init__(self) -> None:
        Growing.__init__(self, 8)
        Told.__init__(self)


class ToldSampler(Told, Sampler[Any]):
    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


class ToldCollate(Told):
    def __call__(self, samples: list[Any]) -> Any:
        return default_collate(samples)


class ToldLoader(Told, DataLoader[Any]):
    def __init__(self, *args: Any, **options: Any) -> None:
        Told.__init__(self)
        DataLoader.__init__(self, *args, **options)


def told_loader(found: list[Any]) -> Any:
    """A loader, and in `found` all in it that have a `set_epoch`."""
    data = [ToldDataset(), ToldDataset()]
    inner = ToldSampler(source=range(8))
    sampler = ToldSampler(source=BatchSampler(inner, 4, drop_last=False))
    collate = ToldCollate()
    loader = ToldLoader(ConcatDataset([Subset(data[0], range(4)), data[1]]), batch_sampler=sampler, collate_fn=collate)
    found += [*data, inner, sampler, collate, loader]
    return loader


@BOTH
def test_everything_in_a_loader_gets_the_number_of_each_epoch_once(lean: bool, tmp_path: Any) -> None:
    def made(folder: str) -> tuple[Any, Any, Any, list[Any], list[Any]]:
        found, of_valid = list[Any](), list[Any]()
        trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path / folder, every_n_steps=3)
        trainer.short_way = lean
        return trainer, told_loader(found), told_loader(of_valid), found, of_valid

    trainer, loader, valid, found, of_valid = made("whole")
    trainer.run(3, loader, valid)
    assert [part.epochs for part in (*found, *of_valid)] == [[0, 1, 2]] * 12
    trainer.evaluate(valid)
    trainer.run(1, loader)
    assert [part.epochs[3:] for part in (*found, *of_valid)] == [[3]] * 12
    resumed, loader, valid, found, _ = made("resumed")
    resumed.run(3, loader, valid, resume=next(tmp_path.glob("whole/**/epoch=1-step=3.ckpt")))  # in mid-epoch, with what it was told
    assert [part.epochs for part in found] == [[0, 1, 2]] * 6


def test_each_of_several_loaders_gets_the_number() -> None:
    parts: list[list[Any]] = [[] for _ in range(3)]
    trainer = make_trainer(TwoAtATime)
    trainer.run(2, CombinedLoader([told_loader(parts[0]), told_loader(parts[1])], "min_size"), {"a": told_loader(parts[2])})
    assert [part.epochs for found in parts for part in found] == [[0, 1]] * 18


# -- an epoch of no batches
@BOTH
def test_an_epoch_of_no_batches_is_an_epoch(lean: bool) -> None:
    """A stream has nothing new in the second epoch; a module skips the epoch before its first batch."""
    loader = Steps(2, 2, 0, 2)
    trainer, n_batches = ours(Case(loader, DataLoader(Growing(6), 4)), 3, lean=lean)
    assert n_batches == [2, 0, 2] and len(trainer.history.epochs) == len(trainer.history.validations) == 3
    assert "train_loss" not in trainer.history.epochs[1] and "val_loss" in trainer.history.epochs[1]
    assert [text for text in trainer.notes if "no batch" in text] == ["The train pass of epoch 2 had no batch."]
    model, _ = plain(Case(Steps(2, 2, 0, 2), DataLoader(Growing(6), 4)), 3)
    assert same_weights(trainer.model, model)


class Skips(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 1 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@BOTH
def test_a_hook_may_skip_a_whole_epoch(lean: bool) -> None:
    trainer = Trainer.from_lightning(Skips(), device="cpu", log_bar=False)
    trainer.short_way = lean
    assert trainer.run(3, DataLoader(Growing(8), 4)).status == "completed"
    assert [("train_loss" in row) for row in trainer.history.epochs] == [True, False, True]


def test_a_loader_that_gives_nothing_at_all_is_an_error() -> None:
    with pytest.raises(StepError, match="The loader gave no batch"):
        make_trainer().run(2, Steps(2, 0))


# -- what is planned by a length
def test_a_plan_of_a_schedule_that_no_longer_holds_is_said_once() -> None:
    def one_cycle(optimizer: Any, plan: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4 * plan.total_steps)

    case = growing()
    trainer, _ = ours(case, 3, lean=True, scheduler=one_cycle)
    assert [text for text in trainer.notes if "schedule" in text] == [
        "Epoch 3 has 4 batches, and the schedule was planned for 2 in each: OneCycleLR follows its old plan. "
        "A function step -> lr needs no plan."
    ]
    assert not [text for text in ours(growing(), 3, lean=True, scheduler=lambda step: 0.1)[0].notes if "schedule" in text]


@BOTH
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3, 8]),  # at the end of an epoch, wherever that is
        ({"val_check_interval": 0.5}, [1, 2, 3, 4, 5, 6, 7, 8]),  # half of 2 batches, which both epochs are expected to have
        ({"val_check_interval": 2}, [2, 5, 7]),
    ],
)
def test_a_validation_within_an_epoch_counts_batches(options: dict[str, Any], expected: list[int], lean: bool) -> None:
    seen: list[int] = []

    class Validated(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if not trainer.sanity_checking:
                seen.append(trainer.global_step)

    trainer = make_trainer(lightning=options | {"callbacks": [Validated()]})
    trainer.short_way = lean
    trainer.run(2, Steps(2, 3, 5), DataLoader(Growing(6), 4))
    assert seen == expected


class Halves(Lit):
    """Halves its rate after each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


@BOTH
def test_the_row_of_an_epoch_has_the_same_rate_where_its_end_is_known_late(lean: bool) -> None:
    def rates(loader: Any) -> list[float]:
        trainer = make_trainer(scheduler=lambda optimizer, plan: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        trainer.short_way = lean
        trainer.run(3, loader)
        return [row["lr"] for row in trainer.history.epochs]

    known = rates([(torch.randn(4, 8), torch.randn(4, 1))] * 3)
    assert rates(DataLoader(Stream(9, 3), batch_size=None)) == known and len(set(known)) == 3


def test_what_lightning_leaves_out_after_a_loader_that_ends_before_its_length_is_noted() -> None:
    trainer: Any = Trainer.from_lightning(Halves(), device="cpu", log_bar=False)
    notes = notes_of(trainer)
    trainer.run(3, DataLoader(Stream(9, 3), batch_size=None))
    assert [row["lr"] for row in trainer.history.epochs] == [0.01] * 3
    assert notes == [
        "The loader has ended after 3 batches, and its length is 9: Lightning neither validates after such an epoch nor steps a schedule "
        "by epoch. Give the loader its true length, or none."
    ]
