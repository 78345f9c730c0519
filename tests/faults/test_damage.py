"""Bits flipped at random in what a run has saved: every reader returns the very same values, or raises a CheckpointError.

`NBTRAIN_FLIPS` says how many damaged files each reader gets.
"""

from __future__ import annotations

import os
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import damage, places
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_content

from nbtrain import StateManagerAddon
from nbtrain.checkpoint.files import newest_valid
from nbtrain.checkpoint.weights import read_weights
from nbtrain.errors import CheckpointError

N_FLIPS = int(os.environ.get("NBTRAIN_FLIPS", "24"))
Saving = Regress.add_on(StateManagerAddon)


@pytest.fixture(scope="module", params=["ckpt", "safetensor"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest checkpoint of a run, which is also the best one."""
    trainer = make_trainer(Saving, save_path=tmp_path_factory.mktemp("runs"), save_format=request.param)
    result = trainer.run(2, make_loader(), make_valid())
    return result.last.path


def damaged(whole: Path, folder: Path, seed: int) -> Iterator[Path]:
    """Copies of `whole`, each with another damage, beside the journal of its history."""
    copy = folder / whole.name
    shutil.copy(whole.with_name("history.jsonl"), folder)
    for number in range(N_FLIPS):
        rng = random.Random(f"{seed} {number} {whole.suffix}")
        if copy.is_dir():
            shutil.rmtree(copy)
        shutil.copytree(whole, copy) if whole.is_dir() else shutil.copy(whole, copy)
        damage(rng.choice(places(copy)), rng)
        yield copy


def resumed(path: Path) -> Any:
    trainer = make_trainer(Saving, model=make_model(7), save_path=path.parent / "other")
    trainer.load_state(path)
    state = trainer.train_state
    return [trainer.model.state_dict(), trainer.optimizer.state_dict(), state.counts, state.history.state_dict(), state.best_weights]


def applied(path: Path) -> Any:
    trainer = make_trainer(model=make_model(7))
    trainer.apply_weights(path)
    return trainer.model.state_dict()


def applied_file(path: Path) -> Any:
    """As `applied`, by the path of the weights in a folder."""
    return applied(path / "model.safetensors" if path.is_dir() else path)


def loaded(path: Path) -> Any:
    return Regress.load_from_checkpoint(path, model=make_model(7), device="cpu", log_bar=False).model.state_dict()


def newest(path: Path) -> Any:
    """What `resume="auto"` takes, which skips what is damaged."""
    found = newest_valid(path.parent)
    if found.path is None:
        raise found.skipped[0]
    try:
        return resumed(found.path)
    except CheckpointError as error:
        raise AssertionError("it passes for valid") from error


READERS: dict[str, Callable[[Path], Any]] = {
    "resume": resumed, "apply_weights": applied, "apply_weights of a file": applied_file,
    "read_weights": read_weights, "load_from_checkpoint": loaded, "auto": newest,
}  # fmt: skip


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_damaged_checkpoint_is_read_as_it_was_or_refused(read: Callable[[Path], Any], checkpoint: Path, tmp_path: Path) -> None:
    expected, refused = read(checkpoint), 0
    for copy in damaged(checkpoint, tmp_path, seed=list(READERS.values()).index(read)):
        try:
            found = read(copy)
        except CheckpointError as error:
            assert copy.name in str(error)
            refused += 1
        else:
            assert same_content(found, expected)
    assert refused > N_FLIPS // 4


def test_a_record_that_is_marked_as_a_folder_is_refused_by_every_reader(tmp_path: Path) -> None:
    """torch does not read such a record, and returns memory with whatever was in it."""
    result = make_trainer(Saving, save_path=tmp_path).run(1, make_loader(), make_valid())
    path = result.last.path
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\x01\x02", 0, raw.index(b"archive/data/0", directory))
    raw[at + 38] ^= 0x10
    path.write_bytes(raw)
    for read in READERS.values():
        with pytest.raises(CheckpointError, match="its record 'archive/data/0' is marked as a folder"):
            read(path)
