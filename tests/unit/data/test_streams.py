"""Endless streams, datasets with `set_epoch`, and how many samples a run that is resumed in mid-epoch reads, for each kind of loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from samples import Breaks, Broken, Regress, make_trainer, same_weights
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from nbtrain import SeededLoader, StateManagerAddon
from nbtrain.addons.limits import LimitsAddon
from nbtrain.data.continued_loader import ContinuedLoader
from nbtrain.data.epoch import keeps_epoch
from nbtrain.data.loader import BatchList, LoaderWrapper, as_loader
from nbtrain.data.resumable_loader import why_read_again
from nbtrain.history.run_folder import read_events

N, BATCH_SIZE = 64, 4


def sample(i: int) -> tuple[Tensor, Tensor]:
    x = torch.full((8,), i / N)
    return x, x.sum(0, keepdim=True)


class Log(list[int]):
    """What was read in this process. It is not a part of the loader's state, as no object of `logging` is."""

    __module__ = "logging"


class Read:
    """The samples that were read in this process."""

    def __init__(self) -> None:
        self.indices: list[int] = Log()

    def get(self, i: int) -> tuple[Tensor, Tensor]:
        self.indices.append(i)
        return sample(i)


class Indexed(Read, Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.get(i)


class Augmented(Indexed):
    """Adds noise from the global random numbers of this process."""

    def __getitem__(self, i: int) -> Any:
        x, y = self.get(i)
        return x + 0.1 * torch.rand(8), y


class Stream(Read, IterableDataset[Any]):
    """Samples in an order by epoch, without a state."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self, epoch: int) -> list[int]:
        return torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).tolist()

    def __iter__(self) -> Iterator[Any]:
        return map(self.get, self.order(self.epoch))


class Hosted(Stream):
    """As a streaming dataset of Hugging Face: its state has the epoch, and holds for a pass of that epoch alone."""

    def __init__(self) -> None:
        super().__init__()
        self._state: dict[str, Any] = {"epoch": 0, "place": 0}
        self._start: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        first = self._start["place"] if self._start is not None and self._start["epoch"] == self.epoch else 0
        self._state = {"epoch": self.epoch, "place": first}
        for i in self.order(self.epoch)[first:]:
            self._state["place"] += 1
            yield self.get(i)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = self._state = dict(state)


class Shuffling:
    """A step of such a dataset's pipeline. Of `inner` it reads `buffer_size` samples before it gives the first."""

    def __init__(self, inner: Any, buffer_size: int) -> None:
        self.ex_iterable, self.buffer_size = inner, buffer_size


class Buffered(Hosted):
    """As after `shuffle`, with a buffer that is not in its state: what was in it is lost where a state is loaded."""

    buffer_size = 8

    def __init__(self) -> None:
        super().__init__()
        self._ex_iterable = SimpleNamespace(ex_iterable=Shuffling([], self.buffer_size))

    def __iter__(self) -> Iterator[Any]:
        live = super().__iter__()
        buffer = list(islice(live, self.buffer_size))
        for i, item in enumerate(live):
            yield buffer[i % self.buffer_size]
            buffer[i % self.buffer_size] = item
        yield from buffer


class ByShards(Buffered):
    """As after `shuffle(buffer_size=1)`."""

    buffer_size = 1

    def __iter__(self) -> Iterator[Any]:
        return Hosted.__iter__(self)


class NoisyHosted(Hosted):
    """Adds noise from the global random numbers, which a batch that is read ahead draws early."""

    def get(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().get(i)
        return x + 0.1 * torch.rand(8), y


class ByArguments(Stream):
    """As mosaic's and litdata's datasets: their state needs to know what their loader has read."""

    def state_dict(self, n_samples: int) -> dict[str, Any]:
        return {"n": n_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class StatefulLoader:
    """As the loaders of torchdata, litdata and mosaic: a loader with a state, which continues once where it was loaded."""

    def __init__(self, *, sized: bool) -> None:
        self.dataset, self.place, self.n_passes, self._loaded = Indexed(), 0, 0, False
        if sized:
            self.__class__ = SizedStatefulLoader if type(self) is StatefulLoader else type(self)

    def __iter__(self) -> Iterator[Any]:
        if not self._loaded:
            self.place = 0
        self._loaded = False
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.n_passes)).tolist()
        while self.place < N:
            rows = order[self.place : self.place + BATCH_SIZE]
            self.place += BATCH_SIZE
            batch = [torch.stack(parts) for parts in zip(*map(self.dataset.get, rows))]
            if self.place == N:
                self.n_passes += 1
                yield batch
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place % N, "n_passes": self.n_passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.n_passes, self._loaded = state["place"], state["n_passes"], True


class SizedStatefulLoader(StatefulLoader):
    def __len__(self) -> int:
        return N // BATCH_SIZE


class AskedLater(SizedStatefulLoader):
    """As litdata's loader: its state may be asked for in a pass, and not between a load and the pass that continues."""

    def __init__(self) -> None:
        super().__init__(sized=True)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self._loaded = False
            yield batch

    def state_dict(self) -> dict[str, Any]:
        self._loaded = False
        return super().state_dict()


def stock(dataset: Any, **options: Any) -> DataLoader[Any]:
    shuffle = {} if isinstance(dataset, IterableDataset) else {"shuffle": True}
    return DataLoader(dataset, BATCH_SIZE, **shuffle, **options)


AT, IN_FLIGHT = 11, BATCH_SIZE  # batches before the run breaks off; what Lightning reads ahead where there is no length
LEFT = N - AT * BATCH_SIZE
# by name: the loader, and how many samples a resumed run reads of the 64 of the epoch, of which 20 are left
KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "a DataLoader": (lambda: stock(Indexed()), LEFT),
    "a DataLoader with random augmentation": (lambda: stock(Augmented()), LEFT),
    "a DataLoader with a generator": (lambda: stock(Indexed(), generator=torch.Generator().manual_seed(3)), LEFT),
    "a SeededLoader": (lambda: SeededLoader(Augmented(), BATCH_SIZE), LEFT),
    "a stream without a state": (lambda: stock(Stream()), N),
    "a stream with a state": (lambda: stock(Hosted()), LEFT),
    "a stream with a state and random augmentation": (lambda: stock(NoisyHosted()), LEFT),
    "a stream whose state is without its buffer": (lambda: stock(Buffered()), N),
    "a stream that shuffles its shards": (lambda: stock(ByShards()), LEFT),
    "a loader that is not asked before a pass": (AskedLater, LEFT),
    "a loader with a state and a length": (lambda: StatefulLoader(sized=True), LEFT),
    "a loader with a state and no length": (lambda: StatefulLoader(sized=False), LEFT),
}


def make(folder: Path, seed: int, n: int = 0, **options: Any) -> Any:
    kind = Regress.add_on(StateManagerAddon, LimitsAddon)
    lightning = {"callbacks": [Breaks(n)]} if n else {}
    trainer = make_trainer(kind, save_path=folder, every_n_steps=1, keep_source=False, lightning=lightning, **options)
    torch.manual_seed(seed)
    return trainer


def notes(trainer: Any) -> list[str]:
    return [event.data["text"] for event in read_events(trainer.run_dir) if event.kind == "note"]


def resumed(folder: Path, loader: Callable[[], Any], n_epoch: int, at: int, **options: Any) -> tuple[Any, Any, Any]:
    """A whole run, one that is broken off and resumed, and the loader of that one."""
    whole = make(folder / "whole", 1, **options)
    whole.run(n_epoch, loader())
    with pytest.raises(Broken):
        make(folder / "broken", 1, at, **options).run(n_epoch, loader(), resume="auto")
    again, last = make(folder / "broken", 2, **options), loader()
    again.run(n_epoch, last, resume="auto")
    return whole, again, last


@pytest.mark.parametrize("name", KINDS)
def test_run_that_is_resumed_in_mid_epoch_reads_what_is_left(name: str, tmp_path: Path) -> None:
    kind, n_read = KINDS[name]
    whole, again, loader = resumed(tmp_path, kind, 1, AT + 1)
    assert same_weights(whole.model, again.model)
    assert len(loader.dataset.indices) == n_read
    assert sorted(loader.dataset.indices) == list(range(N)) or len(set(loader.dataset.indices)) == LEFT


def test_what_is_read_again_is_said_with_the_remedy(tmp_path: Path) -> None:
    _, again, _ = resumed(tmp_path, lambda: stock(Stream()), 1, AT + 1)
    what = "Stream has no state; with state_dict and load_state_dict it is read from where it was"
    assert f"Resuming reads 11 batches of this epoch again: {what}." in notes(again)


def test_epochs_after_a_resume_read_a_stream_with_a_state_from_its_beginning(tmp_path: Path) -> None:
    whole, again, loader = resumed(tmp_path, lambda: stock(Hosted()), 3, 16 + AT + 1)
    assert same_weights(whole.model, again.model)
    assert [len(loader.dataset.indices), loader.dataset.epoch] == [LEFT + N, 2]


def test_a_stream_with_a_state_is_validated_whole_after_a_resume(tmp_path: Path) -> None:
    for name, n, at in ("whole", 3, 0), ("broken", 3, 2 * 16 + 5):
        trainer = make(tmp_path / name, 1, at)
        if at:
            with pytest.raises(Broken):
                trainer.run(n, stock(Hosted()), stock(Hosted()), resume="auto")
            trainer = make(tmp_path / name, 2)
        valid = stock(Hosted())
        trainer.run(n, stock(Hosted()), valid, resume="auto")
    assert len(valid.dataset.indices) - N in (0, 2 * BATCH_SIZE)  # the check of two batches that Lightning makes before a run
    assert len(trainer.history.validations) == 3


def test_a_rate_test_leaves_a_stream_with_a_state_where_it_was() -> None:
    loader = stock(Hosted())
    trainer = make_trainer(Regress)
    trainer.lr_find(loader, n_batches=10)
    before = len(loader.dataset.indices)
    trainer.run(1, loader)
    assert loader.dataset.indices[before:] == Stream().order(0)


def test_why_a_pass_is_read_again() -> None:
    states = "torchdata's StatefulDataLoader saves it there"
    assert why_read_again(stock(Hosted(), num_workers=2)) == f"Hosted has its state in worker processes; {states}"
    workers = "its workers may draw random numbers; SeededLoader, or num_workers=0, reads nothing again"
    assert why_read_again(stock(Indexed(), num_workers=2)) == workers
    assert why_read_again(stock(TensorDataset(torch.zeros(8)), num_workers=2)) == ""
    assert why_read_again(stock(TensorDataset(torch.zeros(8)), num_workers=2, persistent_workers=True)) == workers
    assert why_read_again(stock(ByArguments())).startswith("ByArguments has no state")
    assert why_read_again(stock(Buffered(), num_workers=2)).startswith("the buffer in which its dataset shuffles is not in")
    assert why_read_again({1, 2}) == "set has no state; with state_dict and load_state_dict it is read from where it was"
    assert why_read_again(StatefulLoader(sized=False)) == why_read_again(as_loader([1, 2])) == why_read_again(range(3)) == ""
    assert why_read_again(BatchList(stock(Stream()))).startswith("Stream has no state")


def test_workers_of_a_fixed_dataset_begin_at_the_batch_of_a_resume(tmp_path: Path) -> None:
    data = TensorDataset(*(torch.stack(parts) for parts in zip(*map(sample, range(N)))))
    whole, again, _ = resumed(tmp_path, lambda: stock(data, num_workers=1), 1, AT + 1)
    assert same_weights(whole.model, again.model) and not any("of this epoch again" in text for text in notes(again))


# -- endless streams
class Endless(Stream):
    def __iter__(self) -> Iterator[Any]:
        return (self.get(i % N) for i in count())


class EndlessHosted(Hosted):
    def order(self, epoch: int) -> list[int]:
        return [i % N for i in range(1000)]


def test_an_endless_stream_continues_where_the_epoch_before_has_ended() -> None:
    for n_epochs in [[3], [1, 1, 1], [2, 1]]:
        loader = stock(Endless())
        trainer = make_trainer(Regress.add_on(LimitsAddon), steps_per_epoch=2)
        for n in n_epochs:
            trainer.run(n, loader)
        assert loader.dataset.indices == list(range(24))


def test_a_loader_with_a_length_begins_anew_in_each_epoch() -> None:
    loader = DataLoader(Indexed(), BATCH_SIZE)
    make_trainer(Regress.add_on(LimitsAddon), steps_per_epoch=2).run(2, loader)
    assert loader.dataset.indices == 2 * list(range(8))


@pytest.mark.parametrize(("n_steps", "ends"), [(10, [10, 16, 26, 32]), (8, [8, 16, 24, 32])], ids=["within an epoch", "with an epoch"])
def test_an_epoch_ends_with_its_stream_and_the_next_one_begins_it_again(n_steps: int, ends: list[int]) -> None:
    loader = stock(Stream())
    trainer = make_trainer(Regress.add_on(LimitsAddon), steps_per_epoch=n_steps)
    trainer.run(4, loader)
    assert [row["step"] for row in trainer.history.epochs] == ends
    assert loader.dataset.indices == Stream().order(0) + Stream().order(1)


@pytest.mark.parametrize("at", [4, 7, 8])  # within an epoch of three batches, or at its end
@pytest.mark.parametrize("kind", [Endless, EndlessHosted])
def test_a_resumed_run_continues_an_endless_stream(kind: type[Stream], at: int, tmp_path: Path) -> None:
    whole, again, loader = resumed(tmp_path, lambda: stock(kind()), 4, at, steps_per_epoch=3)
    assert same_weights(whole.model, again.model)
    first = 0 if kind is Endless else (at - 1) * BATCH_SIZE
    assert loader.dataset.indices == list(range(first, 12 * BATCH_SIZE))


def test_a_pause_within_an_endless_stream_loses_no_batch() -> None:
    stream = ContinuedLoader(count())  # type: ignore[arg-type]
    assert [list(islice(stream, 2)), list(islice(stream, 3))] == [[0, 1], [2, 3, 4]]


# -- set_epoch
def test_a_dataset_with_set_epoch_gets_the_epoch() -> None:
    loader = stock(Stream())
    trainer = make_trainer(Regress)
    trainer.run(2, loader)
    trainer.run(1, loader)
    assert loader.dataset.indices == Stream().order(0) + Stream().order(1) + Stream().order(2)


@pytest.mark.parametrize(("workers", "persistent", "expected"), [(0, False, False), (1, False, False), (1, True, True)])
def test_persistent_workers_miss_set_epoch(workers: int, persistent: bool, expected: bool) -> None:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    assert keeps_epoch(DataLoader(Stream(), BATCH_SIZE, **options)) is expected
    assert keeps_epoch(LoaderWrapper(DataLoader(Stream(), BATCH_SIZE, **options))) is expected
    assert not keeps_epoch(DataLoader(TensorDataset(torch.zeros(4)), **options)) and not keeps_epoch([1])
