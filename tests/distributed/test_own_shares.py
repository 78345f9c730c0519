"""Whose share is it: each sample of an epoch is read once, however a loader divides its data. What they draw is shown by drawn jobs."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from samples import make_trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from nbtrain import ConfigError, MultiGPUAddon, Trainer
from nbtrain.data.resumable_loader import loader_place
from nbtrain.distributed.rank_loader import RankLoader
from nbtrain.distributed.worker import Rank
from nbtrain.distributed.worker_pool import Launch, Pool
from nbtrain.history.run_folder import read_events

TWO = ["cpu", "cpu"]
DATA = TensorDataset(torch.randn(96, 8), torch.arange(96))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def read(pool: Pool, make: Callable[[int], Any], n_ranks: int = 2, data: Any = "auto", n_epochs: int = 1) -> list[Any]:
    """The samples that each rank reads of the loader that `make(rank)` returns there, and what is said; or the error of the first one."""

    def payload(rank: Rank) -> Any:
        loader = RankLoader(make(rank.number), rank.number, rank.world_size, data=data)
        found = []
        for _ in range(n_epochs):
            found.append([int(i) for _, ids in loader for i in ids])
        return found if n_epochs > 1 else found[0], loader.said

    with Launch(payload, n_ranks, pool=pool) as running:
        return running.wait()


class RankStream(IterableDataset[Any]):
    """Splits itself by rank, as webdataset's split_by_node does. `n`: samples of each rank."""

    def __init__(self, *n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank()
        for i in range(self.n[rank]):
            yield torch.zeros(8), i * len(self.n) + rank


class RankSampler(torch.utils.data.Sampler[int]):
    """Looks for its rank when it is read, so that the objects of all ranks are the same."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), 96, 2))

    def __len__(self) -> int:
        return 48


def of_subset(rank: int) -> Any:
    return DataLoader(Subset(DATA, range(rank, 96, 2)), 8)


def of_tensors(rank: int) -> Any:
    return DataLoader(TensorDataset(DATA.tensors[0][rank::2], DATA.tensors[1][rank::2]), 8)


def of_batches(rank: int) -> Any:
    return [(DATA.tensors[0][i : i + 8], DATA.tensors[1][i : i + 8]) for i in range(8 * rank, 96, 16)]


def of_stream(rank: int) -> Any:
    return DataLoader(RankStream(48, 48), 8)


@pytest.mark.parametrize("make", [of_subset, of_tensors, of_stream])
def test_other_data_in_each_process_are_its_own_share(make: Any, pool: Pool) -> None:
    (first, said), (second, _) = read(pool, make)
    assert len(first) == len(second) == 48 and sorted(first + second) == list(range(96))
    assert said == (["Each process has other data: they are read as they are."] if make is of_stream else [OWN])


OWN = "2 processes have separate data, 48 and 48 samples: they are read as they are."


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_same_data_are_dealt(shuffle: bool, pool: Pool) -> None:
    (first, said), (second, _) = read(pool, lambda rank: DataLoader(DATA, 8, shuffle=shuffle), n_epochs=2)
    assert all(sorted(first[i] + second[i]) == list(range(96)) for i in range(2)) and not said


def test_a_sampler_that_was_made_once_gets_the_rank_of_each_process(pool: Pool) -> None:
    (first, said), (second, _) = read(pool, lambda rank: DataLoader(DATA, 8, sampler=DistributedSampler(DATA, num_replicas=2, rank=0)))
    assert sorted(first + second) == list(range(96)) and said == [OWN]


def test_a_sampler_of_torch_divides_samples_that_are_all_the_same(pool: Pool) -> None:
    data = TensorDataset(torch.ones(16, 8), torch.ones(16))  # as in a first try
    (first, said), (second, _) = read(pool, lambda rank: DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0)))
    assert len(first) == len(second) == 8 and said == [OWN.replace("48", "8")]


class Share(IterableDataset[Any]):
    """Says for how many processes it divides its samples, which are all the same."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(8), 1.0)] * (96 // self.world_size))


def test_a_stream_that_says_its_rank_is_kept_also_where_its_samples_are_all_the_same(pool: Pool) -> None:
    (first, _), (second, _) = read(pool, lambda rank: DataLoader(Share(0, 2), 8))
    assert len(first) == len(second) == 48


def test_how_much_is_read_is_said_once_where_it_is_not_all(pool: Pool) -> None:
    (_, said), _ = read(pool, lambda rank: DataLoader(DATA, 8, sampler=range(16 * rank, 16 * rank + 16)), data="own", n_epochs=2)
    assert said == [OWN.replace("48 and 48", "16 and 16"), "The first epoch has read 32 of 96 samples."]
    (_, said), _ = read(pool, lambda rank: DataLoader(DATA, 10, shuffle=True, drop_last=True, num_workers=1), n_epochs=2)
    assert said == ["The first epoch has read 90 of 96 samples."]


def test_a_sampler_for_another_number_of_processes_is_refused(pool: Pool) -> None:
    with pytest.raises(ConfigError, match=r"DistributedSampler divides the data for 4 processes, and 2 read them\.\n  Make it for as many"):
        read(pool, lambda rank: DataLoader(DATA, 8, sampler=DistributedSampler(DATA, num_replicas=4, rank=0)))


def test_what_looks_the_same_and_reads_other_data_is_refused_until_a_word_is_said(pool: Pool) -> None:
    def make(rank: int) -> Any:
        return DataLoader(DATA, 8, sampler=RankSampler())

    with pytest.raises(ConfigError, match=r'(?s)other batches of data that look the same\..*data="own"'):
        read(pool, make)
    (first, said), (second, _) = read(pool, make, data="own")
    assert sorted(first + second) == list(range(96)) and said == [OWN]


def test_data_that_only_some_share_are_refused_until_a_word_is_said(pool: Pool) -> None:
    def make(rank: int) -> Any:
        return DataLoader(Subset(DATA, range(min(rank, 1), 96, 2)), 8)

    with pytest.raises(
        ConfigError,
        match=r'(?s)The first and the last sample are the same in some processes, and others in the rest: 0 \| 1, 2\..*data="deal"',
    ):
        read(pool, make, n_ranks=3)


class Files(Dataset[Any]):
    """Reads these files, here numbers. `place`: what differs between processes that have the same."""

    def __init__(self, files: list[Path], place: str = "") -> None:
        self.files, self.place, self.kinds = files, place, np.array(["a", "b"])[::-1]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Any:
        return torch.zeros(8), int(self.files[i].name)


FILES = [Path("data", str(i)) for i in range(96)]


def test_an_attribute_that_differs_does_not_make_a_share_of_the_same_data(pool: Pool) -> None:
    (first, said), (second, _) = read(pool, lambda rank: DataLoader(Files(FILES, f"cuda:{rank}"), 8))
    assert sorted(first + second) == list(range(96)) and not said


class Wraps(Dataset[Any]):
    """Reads another dataset, under a name of its own, or a table that can't be compared. `noise`: random numbers of its own."""

    def __init__(self, rows: Any, noise: Any = None) -> None:
        self.rows, self.noise = rows, noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        x, number = self.rows[i]
        return x if self.noise is None else x + float(self.noise.random()), number


@pytest.mark.parametrize("form", [lambda share: share, UserList], ids=["a dataset", "a table"])
def test_a_share_inside_of_a_dataset_is_found(form: Any, pool: Pool) -> None:
    (first, said), (second, _) = read(pool, lambda rank: DataLoader(Wraps(form(Subset(DATA, range(rank, 96, 2)))), 8))
    assert sorted(first + second) == list(range(96)) and said == [OWN]


def test_a_dataset_with_random_numbers_without_a_seed_is_dealt(pool: Pool) -> None:
    (first, said), (second, _) = read(pool, lambda rank: DataLoader(Wraps(UserList(DATA), np.random.default_rng()), 8))
    assert sorted(first + second) == list(range(96)) and not said


def test_other_files_in_each_process_are_its_own_share(pool: Pool) -> None:
    (first, said), (second, _) = read(pool, lambda rank: DataLoader(Files(FILES[rank::2]), 8))
    assert sorted(first + second) == list(range(96)) and said == [OWN]


def test_what_says_it_is_divided_and_is_not_is_refused(pool: Pool) -> None:
    def make(rank: int) -> Any:
        sampler: Any = torch.utils.data.SequentialSampler(DATA)
        sampler.rank, sampler.num_replicas = 0, 2  # noted for a log, or used when it was made, once for all
        return DataLoader(DATA, 8, sampler=sampler)

    with pytest.raises(ConfigError, match=r'the same batches of data that look divided\.\n  Say whose data they are: data="own"'):
        read(pool, make)


def test_whose_data_they_are_is_in_no_saved_place(pool: Pool) -> None:
    def payload(rank: Rank) -> Any:
        loader = RankLoader(of_stream(rank.number), rank.number, rank.world_size)
        before = loader_place(loader)
        list(loader)
        return before["values"] == loader_place(loader)["values"]

    with Launch(payload, 2, pool=pool) as running:
        assert running.wait() == [True, True]


def test_a_stream_that_ends_early_in_one_process_ends_the_epoch_for_all(pool: Pool) -> None:
    (first, said), (second, _) = read(pool, lambda rank: DataLoader(RankStream(48, 32), 8))
    assert len(first) == len(second) == 32
    assert said[1:] == ["A process has read its last batch before the others: the epoch ends for all."]


class Turns(IterableDataset[Any]):
    """A stream that is the same in all processes at first, and later in another order in one of them, or longer."""

    def __init__(self, n: int = 96, more: int = 0) -> None:
        self.n, self.more = n, more

    def __iter__(self) -> Iterator[Any]:
        is_other = dist.get_rank() == 1
        for i in range(self.n + self.more * is_other):
            yield torch.zeros(8), i ^ 1 if is_other and not self.more and i > 48 else i


def test_a_dealt_stream_that_goes_on_otherwise_in_one_process_is_refused_at_its_end(pool: Pool) -> None:
    text = r'(?s)have read other batches than process 0: process 1, where each takes its share of one stream\..*data="own"'
    with pytest.raises(ConfigError, match=text):
        read(pool, lambda rank: DataLoader(Turns(), 8))
    (first, _), (second, _) = read(pool, lambda rank: DataLoader(Turns(), 8), data="deal")
    assert len(first) == len(second) == 48


def test_a_dealt_stream_that_is_longer_in_one_process_ends_with_an_error() -> None:
    trainer = make_trainer(Counts.add_on(MultiGPUAddon), model=torch.nn.Linear(8, 1), device=TWO)
    with pytest.raises(ConfigError, match=r"have more batches, where each takes its share of one stream\.\n  process 0 is at the end"):
        trainer.run(1, DataLoader(Turns(more=32), 8))


class Counts(Trainer):
    def train_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).mean(), "ids": batch[1].float()}

    def metric_on_epoch_end(self) -> Any:
        return {"distinct": len(set(torch.cat(self.log_train["ids"]).tolist()))}


def test_what_is_kept_is_said_once_in_the_record(tmp_path: Path) -> None:
    kind = Counts.add_on(MultiGPUAddon)
    trainer = make_trainer(kind, model=torch.nn.Linear(8, 1), device=TWO, save_path=tmp_path, keep_source=False)
    trainer.run(2, DataLoader(RankStream(48, 48), 8))
    assert [row["train_distinct"] for row in trainer.history.epochs] == [96, 96]
    texts = [event.data["text"] for event in read_events(trainer.run_dir) if event.kind == "note"]
    assert texts == ["Each process has other data: they are read as they are."]
