"""Data that changes while it is read: an epoch ends where its loader ends, and equals a plain loop's, on both kinds of loops."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from plain_loop import train
from samples import Regress, make_model, make_trainer, same_weights
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from nbtrain import AccumulationAddon, SeededLoader, StateManagerAddon, TaskLoader, TensorLoader

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
    return mse_loss(model(x), y)


def plain(case: Case, n_epoch: int) -> tuple[Any, list[Any]]:
    loader, model = case.loader, make_model()
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


def ours(case: Case, n_epoch: int, *, lean: bool, **options: Any) -> tuple[Any, list[int]]:
    kind, tells = TwoAtATime, Tells(case)
    if case.options.get("accumulate"):
        kind, options = kind.add_on(AccumulationAddon), {"accumulate": case.options["accumulate"], **options}
    trainer = make_trainer(kind, lightning={"callbacks": [tells]}, **options)
    trainer.lean_loops = lean
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


@BOTH
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_reads_on_in_the_epoch_as_it_was(name: str, lean: bool, tmp_path: Any) -> None:
    def run(resume: Any = None) -> Any:
        case = RESUMED[name]()
        trainer = make_trainer(Tasks.add_on(StateManagerAddon), save_path=tmp_path, every_n_steps=1, keep_last_n=None)
        trainer.lean_loops = lean
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
