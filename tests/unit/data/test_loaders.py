"""Loaders: equal to a DataLoader's batches bit for bit, exact when they go on, a batch ahead; and batches of every shape."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import make_data, make_model, make_trainer, same_weights
from torch import Generator, Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset

from nbtrain.data.batch import tensors
from nbtrain.data.prefetch import CudaCopies, Prefetcher, prefetch
from nbtrain.data.seeded_loader import SeededLoader
from nbtrain.data.tensor_loader import TensorLoader, suggest_loader
from nbtrain.errors import CheckpointError, ConfigError, OptionError
from nbtrain.rng import derive_seed


def equal(left: Any, right: Any) -> bool:
    """Are two lists of batches equal, bit for bit, and laid out alike?"""
    a, b = list(tensors(left)), list(tensors(right))
    return len(a) == len(b) and all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a, b))


# -- TensorLoader against DataLoader
N_SAMPLES = [64, 70]  # a last batch of 16, and a short one


def both(n: int, own: bool, **options: Any) -> Iterator[Any]:
    """A DataLoader, and a TensorLoader of the same data, each with what it draws from as new."""
    for kind in (DataLoader, TensorLoader):
        torch.manual_seed(5)
        yield kind(make_data(n), batch_size=16, generator=Generator().manual_seed(3) if own else None, **options)


@pytest.mark.parametrize("n", N_SAMPLES)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_and_random_states_equal_those_of_a_dataloader(n: int, own: bool, shuffle: bool, drop_last: bool) -> None:
    def trace(loader: Any) -> list[Tensor]:
        """The batches of three passes, and after each of them where the random numbers are."""
        seen = []
        for n_batches in (len(loader) + 1, len(loader), 2):  # to the end; as Lightning, which does not ask for the end; and a part
            batches = iter(loader)
            for _ in range(n_batches):
                seen += [*next(batches, []), torch.get_rng_state(), *([loader.generator.get_state()] if own else [])]
                torch.rand(3)  # dropout
        return seen

    traces = [trace(loader) for loader in both(n, own, shuffle=shuffle, drop_last=drop_last)]
    assert equal(*traces)


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_tensors_in_another_layout_are_laid_out_as_a_dataloader_does(shuffle: bool) -> None:
    images = torch.randn(6, 3, 4, 4).to(memory_format=torch.channels_last)
    data = TensorDataset(images, torch.randn(5, 6).t(), torch.zeros(6, dtype=torch.uint8), torch.zeros(6, dtype=torch.bool))
    stock, fast = (list(kind(data, batch_size=4, shuffle=shuffle, generator=Generator())) for kind in (DataLoader, TensorLoader))
    assert [type(batch) for batch in fast] == [list, list] and equal(stock, fast)


def test_a_batch_may_be_changed_in_place() -> None:
    x = torch.zeros(4)
    for shuffle in (False, True):
        for (batch,) in TensorLoader(x, batch_size=4, shuffle=shuffle):
            batch += 1
    assert x.sum() == 0


def test_a_dict_of_tensors_gives_dicts() -> None:
    batches = [{name: part.tolist() for name, part in batch.items()} for batch in TensorLoader({"x": torch.arange(3)}, batch_size=2)]
    assert batches == [{"x": [0, 1]}, {"x": [2]}]


def test_a_device_has_the_batches() -> None:
    (batch,) = TensorLoader(torch.zeros(2, 3), device="meta", pin_memory=True)
    assert batch[0].device.type == "meta" and batch[0].shape == (2, 3)


def test_each_batch_is_pinned_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 100)
    assert [x.tolist() for (x,) in TensorLoader(torch.arange(3), batch_size=2, pin_memory=True)] == [[100, 101], [102]]
    assert next(iter(TensorLoader(torch.zeros(2, device="meta"), pin_memory=True)))[0].device.type == "meta"  # only what is on the CPU


def test_two_iterators_of_one_loader_do_not_disturb_each_other() -> None:
    loader = TensorLoader(torch.arange(8), batch_size=4)
    assert [(a.tolist(), b.tolist()) for (a,) in loader for (b,) in loader][1] == ([0, 1, 2, 3], [4, 5, 6, 7])


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


GIVE = "Give tensors with a row for each sample, a dict of them, or a TensorDataset."


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((), {}, f"TensorLoader was given nothing.\n  {GIVE}"),
        (({},), {}, f"TensorLoader was given nothing.\n  {GIVE}"),
        ((torch.tensor(1),), {}, f"TensorLoader was given a Tensor without rows.\n  {GIVE}"),
        ((Doubled(torch.zeros(2)),), {}, f"TensorLoader was given a Doubled.\n  {GIVE}"),
        ((torch.zeros(2), torch.zeros(3)), {}, "The tensors have different lengths: 2, 3.\n  Make them equal."),
        ((torch.zeros(2), torch.zeros(2, device="meta")), {}, "The tensors have different devices: cpu, meta.\n  Make them equal."),
        ((torch.zeros(2),), {"batch_size": 0}, "batch_size must be a positive integer, got 0.\n  Give the number of samples in a batch."),
    ],
)
def test_what_is_no_set_of_samples_is_refused(given: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TensorLoader(*given, **options)
    assert str(caught.value) == message


# -- going on in the middle of a pass
@pytest.mark.parametrize("n", N_SAMPLES)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("restore_first", [False, True])
def test_a_tensor_loader_goes_on_at_any_batch(n: int, own: bool, shuffle: bool, restore_first: bool) -> None:
    def make() -> TensorLoader:
        return TensorLoader(make_data(n), batch_size=16, shuffle=shuffle, generator=Generator().manual_seed(3) if own else None)

    def follow(loader: TensorLoader, batches: Iterator[Any]) -> list[Tensor]:
        """The rest of this pass, with dropout between its batches, the next pass, and where all random numbers are then."""
        seen = []
        for batch in chain(batches, loader):
            seen += [*batch, torch.rand(2)]
        return [*seen, torch.get_rng_state(), (Generator() if loader.generator is None else loader.generator).get_state()]

    for k in range(1, 4):
        torch.manual_seed(5)
        loader = make()
        list(loader)
        batches = iter(loader)
        for _ in range(k):
            next(batches), torch.rand(2)
        state, dropout = loader.state_dict(), torch.get_rng_state()
        expected = follow(loader, batches)

        torch.manual_seed(99)
        other = make()
        other.load_state_dict(state)
        assert equal([other.state_dict()["source"]], [state["source"]])  # a state taken before the first batch is the one that came in
        if restore_first:
            torch.set_rng_state(dropout)
        iter(other)  # Lightning makes a second iterator in later epochs
        batches = iter(other)
        torch.set_rng_state(dropout)
        assert equal(expected, follow(other, batches))


@pytest.mark.parametrize("own", [False, True])
def test_between_passes_a_tensor_loader_goes_on_with_the_next(own: bool) -> None:
    loader = TensorLoader(torch.arange(8), batch_size=4, shuffle=True, generator=Generator().manual_seed(3) if own else None)
    list(loader)
    state, rng = loader.state_dict(), torch.get_rng_state()
    expected = list(loader)
    loader.load_state_dict(state)
    torch.set_rng_state(rng)
    assert state["position"] == 0 and equal(expected, list(loader))


def test_the_batches_before_the_place_are_not_read() -> None:
    class Rows(Tensor):
        """Counts how often rows are taken."""

        n_taken = 0

        def index_select(self, *args: Any) -> Any:
            Rows.n_taken += 1
            return super().index_select(*args)

    loader = TensorLoader(torch.arange(8).as_subclass(Rows), batch_size=2, shuffle=True)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    loader.load_state_dict(loader.state_dict())
    Rows.n_taken = 0
    assert len(list(loader)) == 1 and Rows.n_taken == 1


def test_the_state_of_another_loader_is_refused() -> None:
    state = TensorLoader(torch.zeros(8), batch_size=4).state_dict()
    with pytest.raises(CheckpointError) as caught:
        TensorLoader(torch.zeros(9), batch_size=2, shuffle=True, generator=Generator()).load_state_dict(state)
    assert str(caught.value) == (
        "This TensorLoader is not the one that was saved: n_samples was 8 and is 9, batch_size was 4 and is 2, "
        "shuffle was False and is True, own_generator was False and is True.\n"
        "  Make it as it was, or begin a new run with the saved weights."
    )
    with pytest.raises(CheckpointError, match="^This SeededLoader is not the one that was saved: seed was None and is 7.\n"):
        SeededLoader(range(8), 4, shuffle=False, seed=7).load_state_dict(state)


# -- in Lightning
class DropoutGoesOn(L.Callback):
    """Keeps torch's global random numbers with each checkpoint, and restores them before the first batch."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state(), "devices": torch.cuda.get_rng_state_all()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict

    def on_train_start(self, *args: Any) -> None:
        if self.saved is not None:
            torch.set_rng_state(self.saved["rng"])
            torch.cuda.set_rng_state_all(self.saved["devices"])


def fit(loader: Any, *, n_epoch: int = 3, ckpt_path: Any = None, callbacks: Any = ()) -> torch.nn.Module:
    trainer = make_trainer(model=make_model())
    options = trainer.lightning_args() | {"max_epochs": n_epoch, "enable_checkpointing": bool(callbacks), "callbacks": list(callbacks)}
    L.Trainer(**options).fit(trainer.as_lightning_module(), loader, ckpt_path=ckpt_path)
    return trainer.model


quiet = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`", "ignore:.*exists and is not empty")


@quiet
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("n", N_SAMPLES)
def test_lightning_ends_with_the_weights_of_a_dataloader(own: bool, n: int) -> None:
    assert same_weights(*(fit(loader) for loader in both(n, own, shuffle=True)))


@quiet
@pytest.mark.parametrize(("kind", "n"), [("own generator", 64), ("own generator", 70), ("global", 70), ("seeded", 70)])
def test_lightning_goes_on_at_any_batch(kind: str, n: int, tmp_path: Any) -> None:
    def make() -> Any:
        if kind == "seeded":
            return SeededLoader(make_data(n), 16)
        return TensorLoader(make_data(n), batch_size=16, shuffle=True, generator=Generator() if kind == "own generator" else None)

    def keep() -> list[Any]:
        return [DropoutGoesOn(), ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)]

    expected = fit(make(), callbacks=keep())
    per_epoch = len(make())
    for step in (1, per_epoch - 1, per_epoch, per_epoch + 2):
        assert same_weights(expected, fit(make(), ckpt_path=tmp_path / f"step={step}.ckpt", callbacks=keep()))


@pytest.mark.parametrize("own", [False, True])
def test_run_ends_with_the_weights_of_a_dataloader(own: bool) -> None:
    models = []
    for loader in both(70, own, shuffle=True):
        trainer = make_trainer(model=make_model())
        trainer.run(2, loader)
        trainer.run(1, loader)
        models.append(trainer.model)
    assert same_weights(*models)


# -- suggestions
def test_a_loader_over_tensors_gets_a_suggestion() -> None:
    loader = DataLoader(make_data(), 16, shuffle=True, drop_last=True, generator=Generator())
    text = "TensorLoader(dataset, ...) with the same options gives the same batches as this DataLoader over a TensorDataset, in less time."
    assert suggest_loader(loader) == suggest_loader(DataLoader(make_data(), 16)) == text


DATA = make_data()


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, 16, num_workers=1),
        DataLoader(DATA, 16, collate_fn=list),
        DataLoader(DATA, batch_size=None),
        DataLoader(DATA, 16, sampler=range(70)),
        DataLoader(DATA, 16, sampler=RandomSampler(DATA, replacement=True)),
        DataLoader(DATA, 16, sampler=RandomSampler(DATA, num_samples=7)),
        DataLoader(DATA, 16, sampler=RandomSampler(DATA, generator=Generator())),  # the DataLoader's own is another
        DataLoader(DATA, 16, sampler=RandomSampler(range(69), num_samples=70)),
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 16, False)),
        DataLoader(Doubled(*DATA.tensors), 16),
        DataLoader(list(DATA), 16),  # type: ignore[arg-type]
        TensorLoader(DATA),
        [1, 2],
    ],
    ids=lambda loader: type(loader).__name__,
)
def test_nothing_is_suggested_where_batches_could_differ(loader: Any) -> None:
    assert suggest_loader(loader) is None


# -- SeededLoader
class Noisy(Dataset[Tensor]):
    """Its samples are their index and what Python, NumPy and torch draw."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def mixed(samples: list[Tensor]) -> Tensor:
    """Batches that draw a weight."""
    return torch.stack(samples) * torch.rand(())


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_seeded_loader_goes_on_at_any_batch_with_any_number_of_workers(n_workers: int) -> None:
    loader = SeededLoader(Noisy(), 3, seed=7, collate_fn=mixed)
    passes = [list(loader) for _ in range(3)]
    assert len({float(batch.sum()) for batches in passes for batch in batches}) == 12
    for position in range(4) if n_workers == 0 else [2]:
        other = SeededLoader(Noisy(), 3, seed=7, collate_fn=mixed, num_workers=n_workers)
        other.load_state_dict(loader.state_dict() | {"epoch": 1, "position": position})
        assert len(other) == 4
        assert equal([*other, *other], [*passes[1][position:], *passes[2]])


def test_the_place_of_a_seeded_loader_counts_what_was_handed_out() -> None:
    loader = SeededLoader(Noisy(), 3, num_workers=1, prefetch_factor=4)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 0)
    places = [(loader.state_dict()["epoch"], loader.state_dict()["position"]) for _ in loader]
    assert places == [(0, 1), (0, 2), (0, 3), (1, 0)]  # after the last one it is the next pass


def test_an_epoch_that_is_set_goes_before_the_count() -> None:
    def indices(loader: SeededLoader) -> list[int]:
        return [int(row[0]) for batch in loader for row in batch]

    loader = SeededLoader(Noisy(), 3)
    epochs = [indices(loader) for _ in range(4)]
    loader.set_epoch(1)
    assert indices(loader) == epochs[1] and indices(loader) == epochs[2]
    loader.set_epoch(2)  # once more
    assert indices(loader) == epochs[2]
    loader.load_state_dict(loader.state_dict() | {"epoch": 3, "position": 2})
    loader.set_epoch(3)  # Lightning says it again when it goes on
    assert indices(loader) == epochs[3][6:]


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_seeded_loader_leaves_the_random_numbers_alone(n_workers: int) -> None:
    def states() -> list[Any]:
        return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]

    before = states()
    assert [len(batch) for batch in SeededLoader(Noisy(), 3, drop_last=True, num_workers=n_workers)] == [3, 3, 3]
    assert states() == before


def test_an_error_in_the_dataset_leaves_the_random_numbers_alone_too() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Tensor:
            raise OSError("no such image")

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="no such image"):
        list(SeededLoader(Broken()))
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert derive_seed(0, 1, 2) == derive_seed(np.int64(0), 1, 2) == 17160956342638568639


def test_without_shuffling_a_seeded_loader_gives_what_a_dataloader_gives() -> None:
    assert equal(list(SeededLoader(make_data(), 16, shuffle=False)), list(DataLoader(make_data(), 16)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"persistent_workers": True},
            ConfigError,
            "SeededLoader does not support persistent_workers: it starts its workers for each epoch.\n  Leave persistent_workers out.",
        ),
        ({"prefetch": 2}, OptionError, "SeededLoader has no option 'prefetch'.\n  Did you mean 'prefetch_factor'?"),
        (
            {"dataset": iter([1])},
            ConfigError,
            "A list_iterator has no length and indices.\n  Give a map-style dataset, or use a DataLoader.",
        ),
    ],
)
def test_what_a_seeded_loader_can_not_do_is_refused(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as caught:
        SeededLoader(**({"dataset": Noisy()} | options))
    assert str(caught.value) == message


# -- a batch ahead
class Diary:
    """Copies that write down what is done; so does the loader below."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self, batch: Any) -> Any:
        self.lines.append(f"start {batch}")
        return batch

    def finish(self, batch: Any) -> Any:
        self.lines.append(f"finish {batch}")
        return batch


def failing() -> Iterator[str]:
    yield "a"
    yield "b"
    raise OSError("no such image")


def test_the_next_copy_is_started_before_a_batch_is_used() -> None:
    diary = Diary()
    for batch in Prefetcher(iter("abc"), diary):
        diary.lines.append(f"use {batch}")
    expected = "start a, start b, finish a, use a, start c, finish b, use b, finish c, use c"
    assert ", ".join(diary.lines) == expected


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_a_prefetcher_gives_all_batches_and_has_the_length(n: int) -> None:
    loader = Prefetcher(list(range(n)), Diary())
    assert len(loader) == n and list(loader) == list(loader) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_prefetcher_holds_no_batch_that_it_has_handed_out(n: int) -> None:
    batches = iter(Prefetcher((torch.zeros(1) for _ in range(n)), Diary()))
    assert [weakref.ref(next(batches))() for _ in range(n)] == [None] * n


def test_without_a_length_a_prefetcher_has_none() -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(Prefetcher(iter("abc"), Diary()))


def test_an_error_in_the_loader_comes_after_the_batches_before_it() -> None:
    used = []
    with pytest.raises(OSError, match="no such image") as caught:
        for batch in Prefetcher(failing(), Diary()):
            used.append(batch)
    assert used == ["a", "b"] and caught.traceback[-1].name == "failing"


def test_a_loop_may_be_left_early() -> None:
    closed = []

    def loader() -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            closed.append(True)

    for batch in Prefetcher(loader(), Diary()):
        if batch == 1:
            break
    assert closed == [True]


@pytest.mark.parametrize("n", N_SAMPLES)
@pytest.mark.parametrize("own", [False, True])
def test_a_prefetcher_keeps_the_place_of_what_was_handed_out(n: int, own: bool) -> None:
    def make() -> TensorLoader:
        return TensorLoader(make_data(n), batch_size=16, shuffle=True, generator=Generator() if own else None)

    def states(loader: Any) -> list[Any]:
        torch.manual_seed(0)
        return [loader.state_dict() for _ in loader] + [loader.state_dict()]

    expected, seen = states(make()), states(Prefetcher(make(), Diary()))
    for left, right in zip(expected, seen, strict=True):
        assert {**left, "source": 0} == {**right, "source": 0} and equal([left["source"]], [right["source"]])
    torch.manual_seed(0)
    batches = list(make())
    loader = Prefetcher(make(), Diary())
    loader.load_state_dict(seen[1])
    assert equal(list(loader), batches[2:])


def test_lightning_tells_the_epoch_to_the_loader_behind_a_prefetcher() -> None:
    loader = SeededLoader(Noisy(), 3)
    _set_sampler_epoch(Prefetcher(loader, Diary()), 5)
    assert loader.state_dict()["epoch"] == 5 and Prefetcher([1], Diary()).sampler is None


def test_a_loader_without_a_state_has_an_empty_one() -> None:
    loader = Prefetcher([1, 2], Diary())
    loader.load_state_dict(loader.state_dict())
    assert loader.state_dict() == {} and list(loader) == [1, 2]


def test_on_the_cpu_the_loader_is_not_changed() -> None:
    loader = make_data()
    assert prefetch(loader, "cpu") is loader


class Recorded(Tensor):
    """A tensor that is copied by a stand-in for CUDA."""

    diary: list[str]

    def pin_memory(self, *args: Any) -> Recorded:
        self.diary.append("pin")
        return self

    def to(self, *args: Any, **kwargs: Any) -> Recorded:
        self.diary.append(f"copy {kwargs}")
        return self

    def record_stream(self, stream: Any) -> None:
        self.diary.append(f"record on {stream}")


def test_a_copy_waits_for_the_current_stream_and_the_current_stream_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    diary: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            diary.append(f"{self} waits for {other}")

        def __enter__(self) -> None:
            diary.append(f"on {self}")

        def __exit__(self, *args: Any) -> None:
            diary.append("back")

        def __str__(self) -> str:
            return self.name

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(Recorded, "diary", diary, raising=False)
    copies = CudaCopies(torch.device("cpu"), Stream("side"))  # type: ignore[arg-type]
    batch = copies.finish(copies.start({"x": torch.zeros(2).as_subclass(Recorded), "name": "a"}))
    expected = "side waits for main, on side, pin, copy {}, back, main waits for side, record on main"
    assert batch["name"] == "a" and ", ".join(diary) == expected
