"""Loaders of all kinds, each as a named factory: what shuffles, draws, counts or keeps a place in some way.

`LOADERS[name]` makes the same new loader at each call, as a script does that is started again. `SAID` are those whose resume can't be
exact, with a word of what the record says. Batches are `(x, y)` of 22 samples, 4 in a batch; `x` has 8 columns, the first is the index.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torchdata.nodes import Batcher, Loader, Mapper, MapStyleWrapper
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from nbtrain import SeededLoader, TaskLoader, TensorLoader

N, BATCH_SIZE = 22, 4
MODULE_RNG = np.random.default_rng(0)


def make_tensors(n: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    x[:, 0] = torch.arange(n) / n
    return x, x.sum(1, keepdim=True)


def make_dataset(n: int = N) -> TensorDataset:
    return TensorDataset(*make_tensors(n))


def order_by(rng: Any) -> list[int]:
    """A permutation, drawn from a generator of any kind."""
    if isinstance(rng, torch.Generator):
        return torch.randperm(N, generator=rng).tolist()
    if isinstance(rng, random.Random):
        return rng.sample(range(N), N)
    return [int(i) for i in rng.permutation(N)]


def noise(rng: Any) -> float:
    if isinstance(rng, torch.Generator):
        return torch.rand((), generator=rng).item()
    return float(rng.random() if hasattr(rng, "random") else rng.random_sample())


RNGS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "NumPy's": lambda: np.random.default_rng(3),
    "RandomState": lambda: np.random.RandomState(3),
    "Python's": lambda: random.Random(3),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(3)),
}


# -- samplers
def without_replacement(draw: Callable[[], float]) -> Iterator[int]:
    """All indices, each chosen by a `draw` in [0, 1)."""
    left = list(range(N))
    while left:
        yield left.pop(int(draw() * len(left)))


class Sized(Sampler[int]):
    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return N


class Draws(Sized):
    """Draws an order from `rng`."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(self.rng))


class Lazy(Draws):
    """Draws index after index, without replacement."""

    def __iter__(self) -> Iterator[int]:
        return without_replacement(lambda: noise(self.rng))


class Inside(Sized):
    """The generator is in a dict in a list."""

    def __init__(self, rng: Any) -> None:
        self.parts = [{"rng": rng}, "text"]

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(self.parts[0]["rng"]))  # type: ignore[index]


class Slots:
    __slots__ = ("rng",)

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(self.rng))


class FromFunction(Sized):
    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw())


def closure() -> FromFunction:
    rng = np.random.default_rng(4)
    return FromFunction(lambda: order_by(rng))


class FromModule(Sized):
    def __iter__(self) -> Iterator[int]:
        return iter(_module_order())


def _module_order() -> list[int]:
    return order_by(MODULE_RNG)


def from_module() -> FromModule:
    globals()["MODULE_RNG"] = np.random.default_rng(0)
    return FromModule()


class OfClass(Sized):
    rng: Any = None

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(self.rng))


def of_class() -> OfClass:
    OfClass.rng = np.random.default_rng(0)
    return OfClass()


class Counts(Sized):
    """Shuffles by seed and a count of its passes, which nothing sets."""

    def __init__(self, seed: int = 0, *, at_end: bool = False) -> None:
        self.seed, self.n_passes, self.at_end = seed, 0, at_end

    def __iter__(self) -> Iterator[int]:
        self.n_passes += not self.at_end
        yield from order_by(random.Random(1000 * self.seed + self.n_passes))
        self.n_passes += self.at_end


class CountsInDict(Sized):
    def __init__(self) -> None:
        self.state = {"epoch": 0}

    def __iter__(self) -> Iterator[int]:
        self.state["epoch"] += 1
        return iter(order_by(random.Random(self.state["epoch"])))


class CountsInArrays(Sized):
    """Counts in a tensor, in an array that a list has too, and in a scalar of NumPy."""

    def __init__(self) -> None:
        self.epoch, self.seen = torch.zeros((), dtype=torch.long), np.zeros(3, dtype=np.int64)
        self.both, self.scalar = [self.seen], np.int32(0)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.both[0][1] += 2
        self.scalar = np.int32(self.scalar + 3)
        return iter(order_by(random.Random(int(self.epoch + self.seen[1] + self.scalar))))


class CountsOnClass(Sized):
    n_passes = 0

    def __init__(self) -> None:
        CountsOnClass.n_passes = 0  # as in another process

    def __iter__(self) -> Iterator[int]:
        CountsOnClass.n_passes += 1
        return iter(order_by(random.Random(self.n_passes)))


class Deep(Sized):
    """Its generator is behind thousands of other objects."""

    def __init__(self) -> None:
        self.objects = [[[object()] for _ in range(100)] for _ in range(60)]
        self.objects[-1][-1] = [[[[random.Random(3)]]]]

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(self.objects[-1][-1][0][0][0][0]))


class SetEpoch(Sized):
    """Lightning sets its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(random.Random(self.epoch)))


class Shuffles(Sized):
    """Shuffles what it keeps, in place."""

    def __init__(self, order: Any) -> None:
        self.order, self.rng = order, np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        return (int(i) % N for i in self.order[:N])


class KeepsIterator(Sized):
    def __init__(self, indices: Iterator[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.indices, N)


def endless() -> Iterator[int]:
    for epoch in itertools.count():
        yield from order_by(random.Random(epoch))


class System(Sized):
    def __init__(self) -> None:
        self.rng = random.SystemRandom()

    def __iter__(self) -> Iterator[int]:
        return iter(order_by(self.rng))


class Drawn(Sized):
    """Draws index after index from the global random numbers, without replacement."""

    def __iter__(self) -> Iterator[int]:
        return without_replacement(lambda: torch.rand(()).item())


class Over(Sized):
    """Another sampler's order, shifted by a draw."""

    def __init__(self, inner: Any, rng: Any) -> None:
        self.inner, self.source = inner, rng

    def __iter__(self) -> Iterator[int]:
        shift = int(noise(self.source) * N)
        return ((i + shift) % N for i in self.inner)


class Batches:
    """A batch sampler that draws the order of its batches; `draws` has its generator."""

    def __init__(self, inner: Any, rng: Any) -> None:
        self.inner, self.draws = inner, rng

    def __len__(self) -> int:
        return -(-N // BATCH_SIZE)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.inner)
        batches = [order[i : i + BATCH_SIZE] for i in range(0, N, BATCH_SIZE)]
        first = int(noise(self.draws) * len(batches))
        yield from batches[first:] + batches[:first]


def nested(seed: int) -> Any:
    """A batch sampler around samplers, of kinds of chance and with generators of chance."""
    chance = random.Random(seed)

    def rng() -> Any:
        return RNGS[chance.choice(list(RNGS))]()

    kinds: list[Callable[[], Any]] = [lambda: Draws(rng()), lambda: Lazy(rng()), lambda: Inside(rng()), lambda: Slots(rng())]
    kinds += [closure, lambda: Counts(chance.randrange(9), at_end=chance.random() < 0.5), CountsInDict, lambda: Shuffles(list(range(N)))]
    inner = chance.choice(kinds)()
    for _ in range(chance.randrange(3)):
        inner = Over(inner, rng())
    return Batches(inner, rng())


def by_sampler(make: Callable[[], Any], **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(make_dataset(), BATCH_SIZE, sampler=make(), **options)


def by_batches(make: Callable[[], Any], **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(make_dataset(), batch_sampler=make(), **options)


# -- datasets
class Noisy(Dataset[Any]):
    """Adds noise from the generator that it keeps."""

    def __init__(self, rng: Any) -> None:
        self.data, self.chance = make_dataset(), rng

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        return x + noise(self.chance), y


class NoisyGlobal(Noisy):
    def __init__(self) -> None:
        super().__init__(None)

    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        return x + torch.rand(()) + random.random() + np.random.rand(), y


class NoisyModule(Noisy):
    def __init__(self) -> None:
        globals()["MODULE_RNG"] = np.random.default_rng(0)
        super().__init__(None)

    def __getitem__(self, i: int) -> Any:
        x, y = self.data[i]
        return x + noise(MODULE_RNG), y


class Hardens(Noisy):
    """Each read is a little harder."""

    n_reads = 0

    def __init__(self) -> None:
        super().__init__(None)

    def __getitem__(self, i: int) -> Any:
        self.n_reads += 1
        x, y = self.data[i]
        return x * (1 + 0.01 * self.n_reads), y


class MakesLate(Noisy):
    """Makes its generator, or an iterator, when it reads its first sample."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(None)
        self.make, self.made = make, None

    def __getitem__(self, i: int) -> Any:
        if self.made is None:
            self.made = self.make()
        x, y = self.data[i]
        return x + (0.01 * next(self.made) if isinstance(self.made, Iterator) else noise(self.made)), y


class Collate:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return x + noise(self.rng), y


def collate(samples: list[Any], rng: Any) -> Any:
    return Collate(rng)(samples)


# -- streams and loaders without a length
class Stream(IterableDataset[Any]):
    """A pass draws its order from `rng`, or from a seed and the count of passes."""

    def __init__(self, rng: Any = None) -> None:
        self.rng, self.n_passes = rng, 0

    def __iter__(self) -> Iterator[Any]:
        self.n_passes += 1
        data = make_dataset()
        for i in order_by(self.rng or random.Random(self.n_passes)):
            yield data[i]


class Buffered(Stream):
    """A shuffle buffer, which draws index after index."""

    def __iter__(self) -> Iterator[Any]:
        data, buffer = make_dataset(), []
        for i in range(N):
            buffer.append(i)
            if len(buffer) > 6:
                yield data[buffer.pop(int(noise(self.rng) * len(buffer)))]
        while buffer:
            yield data[buffer.pop(int(noise(self.rng) * len(buffer)))]


class GlobalOrder(Stream):
    def __iter__(self) -> Iterator[Any]:
        data = make_dataset()
        for i in torch.randperm(N).tolist():
            yield data[i]


class GlobalNoise(Stream):
    def __iter__(self) -> Iterator[Any]:
        for x, y in make_dataset():
            yield x + torch.rand(()), y


class Same(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter(make_dataset())


class StreamSetEpoch(IterableDataset[Any]):
    """A sampler sets its epoch, as Lightning does for a loader with one."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        data = make_dataset()
        for i in order_by(random.Random(self.epoch)):
            yield data[i]


class Plain:
    """Batches of a plain class. It counts its passes, or draws from `rng`."""

    def __init__(self, rng: Any = None) -> None:
        self.rng, self.n_passes = rng, 0

    def __iter__(self) -> Iterator[Any]:
        self.n_passes += 1
        order = order_by(self.rng or random.Random(self.n_passes))
        x, y = make_tensors()
        for i in range(0, N, BATCH_SIZE):
            yield x[order[i : i + BATCH_SIZE]], y[order[i : i + BATCH_SIZE]]


class PlainSized(Plain):
    def __len__(self) -> int:
        return -(-N // BATCH_SIZE)


class PlainSetEpoch(Plain):
    """Without a length; Lightning sets its epoch, before the first batch is read."""

    epoch, batch_sampler = 0, None

    @property
    def sampler(self) -> PlainSetEpoch:
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.rng = random.Random(self.epoch)
        return super().__iter__()


class ShufflesBatches:
    """A loader that shuffles its list of batches in place."""

    def __init__(self) -> None:
        self.batches, self.rng = list(PlainSized()), random.Random(0)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.rng.shuffle(self.batches)
        return iter(self.batches)


# -- loaders with a state
class Placed(IterableDataset[Any]):
    """A stream in an order by pass, each worker its share; its state is its place, also at the end of a pass."""

    n_passes = n_read = 0

    def __init__(self) -> None:
        self.is_loaded = False

    def __iter__(self) -> Iterator[Any]:
        self.n_read, self.is_loaded = self.n_read if self.is_loaded else 0, False
        worker, data = get_worker_info(), make_dataset()
        order = order_by(random.Random(self.n_passes))
        order = order if worker is None else order[worker.id :: worker.num_workers]
        while self.n_read < len(order):
            self.n_read += 1
            yield data[order[self.n_read - 1]]
        self.n_passes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"n_read": self.n_read, "n_passes": self.n_passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_read, self.n_passes, self.is_loaded = state["n_read"], state["n_passes"], True


class PlacedNoisy(Noisy):
    """An indexed dataset whose state is that of its generator."""

    def state_dict(self) -> dict[str, Any]:
        return {"chance": self.chance.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chance.set_state(state["chance"])


class Continues:
    """A loader whose state is the batches that it has read of a pass: after all of them, the pass that it continues has none."""

    n_passes = n_read = 0
    loaded: int | None = None

    def __len__(self) -> int:
        return -(-N // BATCH_SIZE)

    def __iter__(self) -> Iterator[Any]:
        self.n_passes += self.loaded is None
        first, self.loaded = self.loaded or 0, None
        order, (x, y) = order_by(random.Random(self.n_passes)), make_tensors()
        for i in range(first, len(self)):
            rows, self.n_read = order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE], i + 1
            yield x[rows], y[rows]

    def state_dict(self) -> dict[str, Any]:
        return {"n_passes": self.n_passes, "n_read": self.n_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_passes, self.loaded = state["n_passes"], state["n_read"]


def stateful(dataset: Callable[[], Any] = make_dataset, **options: Any) -> Callable[[], StatefulDataLoader[Any]]:
    """Makes torchdata's loader."""

    def make() -> StatefulDataLoader[Any]:
        made = dataset()
        own = {name: value() if callable(value) else value for name, value in options.items()}
        shuffle = None if "sampler" in own or isinstance(made, IterableDataset) else True
        return StatefulDataLoader(made, BATCH_SIZE, shuffle=shuffle, **own)

    return make


def nodes() -> Any:
    samples = MapStyleWrapper(make_dataset(), RandomSampler(range(N), generator=RNGS["torch"]()))  # pyright: ignore[reportArgumentType]
    return Loader(Mapper(Batcher(samples, BATCH_SIZE, drop_last=False), default_collate))


# -- all of them
def shuffled(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or make_dataset(), BATCH_SIZE, shuffle=True, **options)


def tasks(rng: Callable[[], Any]) -> TaskLoader:
    return TaskLoader({"a": by_sampler(lambda: Draws(rng()))(), "b": shuffled(generator=RNGS["torch"]()), "c": PlainSized()})


WORKERS: dict[str, Any] = {"num_workers": 2}
STAYING: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}

LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "shuffled by a generator": lambda: shuffled(generator=RNGS["torch"]()),
    "weighted": by_sampler(lambda: WeightedRandomSampler(torch.ones(N).tolist(), N, generator=RNGS["torch"]())),
    **{f"sampler with a generator of {name}": by_sampler(lambda make=make: Draws(make())) for name, make in RNGS.items()},
    **{f"lazy sampler with {name}": by_sampler(lambda make=make: Lazy(make())) for name, make in list(RNGS.items())[:2]},
    "lazy sampler, two workers": by_sampler(lambda: Lazy(RNGS["NumPy's"]()), **WORKERS),
    "generator in a dict in a list": by_sampler(lambda: Inside(RNGS["Python's"]())),
    "generator in a slot": by_sampler(lambda: Slots(RNGS["NumPy's"]())),
    "generator in a closure": by_sampler(closure),
    "generator of a module": by_sampler(from_module),
    "generator of a class": by_sampler(of_class),
    "sampler that counts": by_sampler(Counts),
    "sampler that counts at the end": by_sampler(lambda: Counts(at_end=True)),
    "sampler that counts in a dict": by_sampler(CountsInDict),
    "sampler that counts in arrays": by_sampler(CountsInArrays),
    "sampler that counts on its class": by_sampler(CountsOnClass),
    "sampler with a generator behind 12,000 objects": by_sampler(Deep),
    "sampler with set_epoch": by_sampler(SetEpoch),
    "sampler that shuffles a short list in place": by_sampler(lambda: Shuffles(list(range(N)))),
    "sampler that shuffles a long list in place": by_sampler(lambda: Shuffles(list(range(50 * N)))),
    "sampler that shuffles a very long list in place": by_sampler(lambda: Shuffles(list(range(5_000 * N)))),
    "sampler that shuffles a short array in place": by_sampler(lambda: Shuffles(np.arange(N))),
    "sampler that shuffles an array in place": by_sampler(lambda: Shuffles(np.arange(50 * N))),
    "sampler that keeps an iterator": by_sampler(lambda: KeepsIterator(endless())),
    "sampler that keeps a cycle": by_sampler(lambda: KeepsIterator(itertools.cycle(order_by(random.Random(0)) + list(range(7))))),
    "sampler with random numbers of the system": by_sampler(System),
    "lazy sampler with global random numbers": by_sampler(Drawn),
    "batch sampler": by_batches(lambda: Batches(Draws(RNGS["NumPy's"]()), RNGS["torch"]())),
    "batch sampler, two workers": by_batches(lambda: Batches(Counts(), RNGS["Python's"]()), **WORKERS),
    "nested samplers": by_batches(lambda: Batches(Over(Lazy(RNGS["RandomState"]()), RNGS["torch"]()), RNGS["Python's"]())),
    **{f"dataset with a generator of {name}": (lambda make=make: shuffled(Noisy(make()))) for name, make in RNGS.items()},
    "dataset with a generator, two workers": lambda: shuffled(Noisy(RNGS["torch"]()), **WORKERS),
    "dataset with a generator of a module": lambda: shuffled(NoisyModule()),
    "dataset with global random numbers": lambda: shuffled(NoisyGlobal()),
    "dataset that counts its reads": lambda: shuffled(Hardens()),
    "dataset that makes a generator late": lambda: shuffled(MakesLate(RNGS["NumPy's"])),
    "dataset that makes an iterator late": lambda: shuffled(MakesLate(itertools.count)),
    "dataset that calls a generator function late": lambda: shuffled(MakesLate(endless)),
    "collate with a generator": lambda: shuffled(collate_fn=Collate(RNGS["NumPy's"]())),
    "partial collate with a generator": lambda: shuffled(collate_fn=partial(collate, rng=RNGS["Python's"]())),
    "stream with a generator": lambda: DataLoader(Stream(RNGS["NumPy's"]()), BATCH_SIZE),
    "stream that counts": lambda: DataLoader(Stream(), BATCH_SIZE),
    "stream that counts, two workers": lambda: DataLoader(Stream(), BATCH_SIZE, **WORKERS),
    "stream with a shuffle buffer": lambda: DataLoader(Buffered(RNGS["Python's"]()), BATCH_SIZE),
    "stream with a global order": lambda: DataLoader(GlobalOrder(), BATCH_SIZE),
    "stream with global noise": lambda: DataLoader(GlobalNoise(), BATCH_SIZE),
    "stream that is the same": lambda: DataLoader(Same(), BATCH_SIZE),
    "plain iterable with a generator": lambda: Plain(RNGS["NumPy's"]()),
    "plain iterable that counts": Plain,
    "plain iterable with set_epoch": PlainSetEpoch,
    "plain iterable with a length": PlainSized,
    "loader that shuffles its batches in place": ShufflesBatches,
    "list of batches": lambda: list(PlainSized()),
    "loader whose state is a place in a pass": Continues,
    "torchdata": stateful(),
    "torchdata, a generator": stateful(generator=RNGS["torch"]),
    "torchdata, a sampler that counts": stateful(sampler=Counts),
    "torchdata, its sampler for ranks": stateful(sampler=lambda: StatefulDistributedSampler(make_dataset(), 1, 0)),
    "torchdata, a dataset that draws": stateful(NoisyGlobal),
    "torchdata, a dataset that counts its reads": stateful(Hardens),
    "torchdata, a dataset with a state": stateful(lambda: PlacedNoisy(RNGS["torch"]())),
    "torchdata, a stream with a state": stateful(Placed),
    "torchdata, a stream that counts": stateful(Stream),
    "torchdata, nodes": nodes,
    "torchdata, two workers": stateful(**WORKERS),
    "torchdata, two workers, a dataset that draws": stateful(NoisyGlobal, **WORKERS),
    "torchdata, two workers, a dataset that draws, every 3 steps": stateful(NoisyGlobal, snapshot_every_n_steps=3, **WORKERS),
    "torchdata, two workers, every 3 steps": stateful(snapshot_every_n_steps=3, **WORKERS),
    "torchdata, two workers, a dataset with a state": stateful(lambda: PlacedNoisy(RNGS["torch"]()), **WORKERS),
    "torchdata, two workers, a stream with a state": stateful(Placed, **WORKERS),
    "torchdata, persistent workers": stateful(**STAYING),
    "torchdata, persistent workers, a dataset that draws": stateful(NoisyGlobal, **STAYING),
    "TensorLoader": lambda: TensorLoader(*make_tensors(), batch_size=BATCH_SIZE, shuffle=True),
    "TensorLoader with a generator": lambda: TensorLoader(*make_tensors(), batch_size=BATCH_SIZE, shuffle=True, generator=RNGS["torch"]()),
    "SeededLoader": lambda: SeededLoader(NoisyGlobal(), BATCH_SIZE),
    "persistent workers, shuffled": lambda: shuffled(**STAYING),
    "persistent workers, a generator": lambda: shuffled(generator=RNGS["torch"](), **STAYING),
    "persistent workers, a sampler that counts": by_sampler(Counts, **STAYING),
    "persistent workers, in order": lambda: DataLoader(make_dataset(), BATCH_SIZE, **STAYING),
    "persistent workers, a dataset that draws": lambda: shuffled(NoisyGlobal(), **STAYING),
}
TASKS: dict[str, Callable[[], Any]] = {
    **{f"tasks with a generator of {name}": (lambda make=make: tasks(make)) for name, make in list(RNGS.items())[:2]},
    "tasks of SeededLoaders": lambda: TaskLoader({"a": SeededLoader(NoisyGlobal(), 4, seed=1), "b": SeededLoader(NoisyGlobal(), 5)}),
    "tasks that are cut": lambda: TaskLoader({"a": by_sampler(Counts)(), "b": shuffled(generator=RNGS["torch"]())}, {"a": 2, "b": 1}, 7),
    "a task with persistent workers": lambda: TaskLoader({"a": shuffled(**STAYING), "b": PlainSized()}),
}
SAID = {
    "sampler that shuffles a very long list in place": "sampler.order",
    "sampler with a generator behind 12,000 objects": "10,000 objects",
    "sampler that keeps an iterator": "sampler.indices",
    "sampler that keeps a cycle": "sampler.indices",
    "sampler with random numbers of the system": "sampler.rng",
    "dataset that makes a generator late": "dataset.made is made after the run has begun",
    "dataset that makes an iterator late": "dataset.made is made after the run has begun",
    "dataset that calls a generator function late": "dataset.made is made after the run has begun",
    "lazy sampler with global random numbers": "Drawn",
    "stream with global noise": "global random numbers",
    "loader that shuffles its batches in place": "batches",
    "persistent workers, a dataset that draws": "persistent workers",
    "torchdata, persistent workers, a dataset that draws": "persistent workers",
    "torchdata, two workers, a dataset with a state": "the random numbers of the loader's workers",
    "torchdata, two workers, a stream with a state": "the random numbers of the loader's workers",
    "torchdata, nodes": "the nodes of the Loader",
}
