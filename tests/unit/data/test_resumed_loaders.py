"""A run over a loader of any kind, broken off and resumed by the same program, reads the samples of an unbroken run: or the record says so.

`loader_kinds` has the kinds.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from loader_kinds import LOADERS, SAID, TASKS, by_batches, make_dataset, nested
from samples import Breaks, Broken, Regress, make_trainer, same_weights, some
from torch.utils.data import DataLoader, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from nbtrain import StateManagerAddon
from nbtrain.addons import state_manager
from nbtrain.data.resumable_loader import ResumableLoader
from nbtrain.data.task_loader import Task
from nbtrain.history.run_folder import read_events
from nbtrain.rng import random_state

NOTE = "Resume is not exact here"


class Diary(Regress):
    """Keeps what it has read, and after which update."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        batch = batch.batch if isinstance(batch, Task) else batch
        diary = vars(self).setdefault("diary", {})
        diary.setdefault((self.counts.step, self.mode), []).append(batch[0].tolist())
        return super().train_step(batch)


def make(folder: Path, seed: int, n: int = 0, **options: Any) -> Any:
    lightning = options.pop("lightning", {}) | {"callbacks": [Breaks(n)] if n else []}
    options = {"save_path": folder, "every_n_steps": 2, "keep_source": False, "lightning": lightning} | options
    trainer = make_trainer(Diary.add_on(StateManagerAddon), **options)
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    return trainer


def notes(trainer: Any) -> list[str]:
    return list(dict.fromkeys(event.data["text"] for event in read_events(trainer.run_dir) if event.kind == "note"))


def check(
    folder: Path, loader: Callable[[], Any], valid: Callable[[], Any] = lambda: None, *, at: int, said: str = "", **options: Any
) -> None:
    """A run that breaks after `at` batches and is resumed, beside one that does not: equal, and without a note; or with one."""
    warnings.simplefilter("ignore")
    whole = make(folder / "whole", 1, **options)
    whole.run(3, loader(), valid())
    broken = make(folder / "broken", 1, n=at, **options)
    with pytest.raises(Broken):
        broken.run(3, loader(), valid(), resume="auto")
    again = make(folder / "broken", 2, **options)
    again.run(3, loader(), valid(), resume="auto")
    if not said:
        assert {key: rows for key, rows in again.diary.items() if rows != whole.diary[key]} == {}
        assert same_weights(whole.model, again.model)
        assert [text for text in notes(whole) + notes(again) if NOTE in text] == []
    else:
        assert [said in text for text in notes(whole) if NOTE in text] == [True], notes(whole)
        assert [said in text for text in notes(broken) if NOTE in text] == [True], notes(broken)


EACH = ("torchdata, two workers, a dataset that draws", "loader whose state is a place in a pass")


def quick(names: Iterable[str], every: int) -> list[Any]:
    """As `some`, and the slow ones are left to `make faults` too: those with workers wait half a minute for their end."""
    names = list(names)
    taken = [name for name in names if "workers" not in name and "12,000 objects" not in name and "torchdata" not in name][::every]
    taken += [name for name in names if name in EACH or ("torchdata" in name and "workers" not in name)][::2]
    return [name if name in taken else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", quick(LOADERS | TASKS, 20))
def test_resumed_run_reads_the_samples_of_an_unbroken_one_or_says_so(name: str, tmp_path: Path) -> None:
    for at in (9,) if "workers" in name else (7, 9):  # the newest save is at the end of an epoch, or two batches into one
        check(tmp_path / str(at), (LOADERS | TASKS)[name], at=at, said=SAID.get(name, ""))


@pytest.mark.parametrize("seed", some(range(8), 4))
def test_resumed_run_over_random_nested_samplers_matches_an_unbroken_one(seed: int, tmp_path: Path) -> None:
    check(tmp_path, by_batches(lambda: nested(seed)), at=random.Random(seed).choice([5, 7, 9, 11, 15]))


EXACT_BETWEEN_PASSES = ("lazy sampler with global random numbers", "stream with global noise", "torchdata, nodes")
VALID = [name for name in LOADERS if "two workers" not in name]


@pytest.mark.parametrize("name", quick(VALID, 24))
def test_validation_loader_continues_after_a_resume_as_it_would_have(name: str, tmp_path: Path) -> None:
    def train() -> DataLoader[Any]:
        return DataLoader(make_dataset(), 4)

    at = 9 if "workers" in name else random.Random(name).choice([7, 10, 15])
    options = {"lightning": {"val_check_interval": 3}} if "workers" not in name else {}
    check(tmp_path, train, LOADERS[name], at=at, said="" if name in EXACT_BETWEEN_PASSES else SAID.get(name, ""), **options)


@pytest.mark.parametrize("name", some(["TensorLoader with a generator", "SeededLoader", "shuffled by a generator", "torchdata"], 3))
@pytest.mark.parametrize("which", ["train", "val"])
def test_resumed_run_whose_passes_a_limit_cuts_matches_an_unbroken_one(name: str, which: str, tmp_path: Path) -> None:
    loaders = (LOADERS[name], lambda: None) if which == "train" else (lambda: DataLoader(make_dataset(), 4), LOADERS[name])
    for at in (5, 6, 9) if which == "train" else (7, 9):
        check(tmp_path / str(at), *loaders, at=at, lightning={f"limit_{which}_batches": 4})


def test_a_dataset_that_draws_in_several_ranks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_manager, "n_readers", lambda trainer: 2)
    said = {}
    for name in ("dataset with a generator of torch", "dataset with a generator, two workers", "sampler with a generator of torch"):
        trainer = make(tmp_path / name, 1)
        trainer.run(1, LOADERS[name]())
        said[name] = [text for text in notes(trainer) if NOTE in text]
    first, *others = said.values()
    assert others == [[], []] and first == [
        f"{NOTE}: Noisy draws from a generator in each rank, and at the end of an epoch one place is saved for all."
    ]


def test_several_validation_loaders_continue(tmp_path: Path) -> None:
    def valid() -> list[Any]:
        return [LOADERS["sampler with a generator of NumPy's"](), LOADERS["sampler that counts"]()]

    check(tmp_path, LOADERS["shuffled"], valid, at=9)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("name", ["SeededLoader", "TensorLoader with a generator", "shuffled by a generator", "torchdata"])
def test_a_pass_after_a_cut_one_is_resumed_where_batches_were_read_ahead(name: str, ahead: int) -> None:
    torch.manual_seed(0)
    loader = ResumableLoader(LOADERS[name]())
    for n_cut in random.Random(f"{name} {ahead}").sample(range(1, 5), 2):
        deque(islice(loader, n_cut), maxlen=0)
    batches = iter(loader)
    deque(islice(batches, 2), maxlen=0)
    rest = list(islice(batches, ahead))
    state, generators = loader.place(2), random_state()
    rest += list(batches)
    torch.manual_seed(1)
    again = ResumableLoader(LOADERS[name]())
    again.resume_at(state, generators)
    assert [batch[0].tolist() for batch in again] == [batch[0].tolist() for batch in rest]


class Mode(Enum):
    PLAIN = "plain"
    NOISY = "noisy"


def test_a_dataset_that_uses_an_enumeration_is_restored(tmp_path: Path) -> None:
    class Modal(torch.utils.data.Dataset[Any]):
        mode, modes = Mode.NOISY, Mode

        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> Any:
            x = torch.full((8,), i / 20)
            return x + 0.1 * torch.rand(8) * (self.mode is self.modes.NOISY), x.sum(0, keepdim=True)

    check(tmp_path, lambda: DataLoader(Modal(), 4, shuffle=True), lambda: DataLoader(Modal(), 4), at=7)


class Uncopied(Sampler[int]):
    """Holds its pass, which can't be copied."""

    def __init__(self) -> None:
        self.live: Any = None

    def __iter__(self) -> Iterator[int]:
        self.live = (index for index in torch.randperm(8).tolist())
        return self.live


def test_a_sampler_that_can_not_be_copied_in_a_pass_is_said() -> None:
    loader = ResumableLoader(DataLoader(list(range(8)), sampler=Uncopied()))
    assert loader.why_not_exact() == []
    next(iter(loader))
    assert any("its order can't be checked, because a copy of the loader fails: cannot pickle" in said for said in loader.why_not_exact())


def test_the_pass_that_lightning_notes_down_in_a_loader_is_not_part_of_its_place() -> None:
    with _replace_dunder_methods(DataLoader, "dataset"):  # an error in a hook that makes a loader leaves Lightning's patch in place
        loader = StatefulDataLoader(list(range(8)), shuffle=True)
        resumable = ResumableLoader(loader)
        for _ in range(2):
            next(iter(resumable))
    assert "__pl_attrs_record" in vars(loader)
    assert resumable.why_not_exact() == []
