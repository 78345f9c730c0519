"""A part that is added to the table in one line is saved, resumed, kept in memory, rewound, branched, sent to workers and brought back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from samples import Regress, make_loader, make_trainer, same_weights

from nbtrain import MultiGPUAddon, StateManagerAddon
from nbtrain.addons.multi_gpu import _pool
from nbtrain.state import memory
from nbtrain.state.parts import PARTS, Part


class Ticks:
    """A counter of a kind that no state holds by itself: an iterator."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Ticks:
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        PARTS["ticks"] = TICKS  # a worker process has the line, too


class Ticking(Regress):
    """Counts its training steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ticks = Ticks()

    def train_step(self, batch: Any) -> dict[str, Any]:
        next(self.ticks)
        return super().train_step(batch)


def _load(at: Any, value: int) -> None:
    at.trainer.ticks.n = value


TICKS = Part(lambda at: at.trainer.ticks.n, _load)


@pytest.fixture(autouse=True)
def line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "ticks", TICKS)


Saving = Ticking.add_on(StateManagerAddon)


class Fails(Saving):
    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.processed == 8:
            raise RuntimeError("the power went")
        return super().train_step(batch)


def test_part_is_saved_and_resumed_in_mid_epoch(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        make_trainer(Fails, save_path=tmp_path, every_n_steps=3).run(2, make_loader())
    resumed = make_trainer(Saving, save_path=tmp_path, every_n_steps=3)
    resumed.run(2, make_loader(), resume="auto")
    assert resumed.ticks.n == 10


def test_part_is_kept_in_memory_rewound_and_branched() -> None:
    trainer = make_trainer(Ticking, keep_states=True)
    trainer.run(2, make_loader())
    branch = trainer.branch(epoch=1)
    trainer.rewind(epoch=0)
    assert (trainer.ticks.n, branch.ticks.n) == (0, 5)
    trainer.rewind(epoch=0)
    trainer.run(1, make_loader())
    assert trainer.ticks.n == 5


@pytest.fixture
def workers() -> Iterator[None]:
    yield
    _pool().close()


@pytest.mark.long
@pytest.mark.usefixtures("workers")
def test_part_is_sent_to_workers_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(Ticking.add_on(MultiGPUAddon), device=["cpu", "cpu"])
    trainer.ticks.n = 100
    trainer.run(1, make_loader(64))
    assert trainer.ticks.n == 102  # each of the two ranks has two of the four batches


def test_state_for_both_places_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    dump = _CheckpointConnector.dump_checkpoint

    def counted(self: Any, **options: Any) -> Any:
        taken.append(self.trainer.current_epoch)
        return dump(self, **options)

    monkeypatch.setattr(_CheckpointConnector, "dump_checkpoint", counted)
    monkeypatch.setattr(memory, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # a slow copy is not held
    trainer = make_trainer(Saving, save_path=tmp_path, keep_states=True)
    trainer.run(3, make_loader())
    assert taken == [0, 0, 1, 2]  # the start, and the end of each epoch
    other = make_trainer(Saving, save_path=tmp_path)
    other.load_state()
    kept = trainer.states.memory.states[-1].taken.state
    assert same_weights(other.model, {name.removeprefix("model."): value for name, value in kept["state_dict"].items()})
