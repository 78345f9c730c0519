"""What is added in one place, a field of the trainer's state or a line of the table of parts, goes wherever a state goes.

It is saved, resumed, kept in memory, rewound, branched, pickled, sent to workers, brought back and restored.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from samples import Breaks, Broken, Regress, make_loader, make_trainer, make_valid, same_weights

from nbtrain import MultiGPUAddon, StateManagerAddon
from nbtrain.addons.multi_gpu import _pool
from nbtrain.distributed.worker import dumps, loads
from nbtrain.engine.train_state import TrainState
from nbtrain.history.history import History
from nbtrain.state import memory
from nbtrain.state.parts import PARTS, Part
from nbtrain.state.replica import load_replica_state, take_state


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


def _load(at: Any, value: int) -> None:
    at.trainer.ticks.n = value


TICKS = Part(lambda at: at.trainer.ticks.n, _load)


@pytest.fixture(autouse=True)
def added_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line more in the table, and one in the trainer's state."""
    monkeypatch.setitem(PARTS, "ticks", TICKS)
    init = TrainState.__init__

    def with_coffees(self: Any, history: History) -> None:
        init(self, history)
        self.n_coffees, self.cups = 0, []

    monkeypatch.setattr(TrainState, "__init__", with_coffees)


class Counting(Regress):
    """Ticks and drinks a coffee in each training step, and drinks two in each test step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ticks = Ticks()

    def train_step(self, batch: Any) -> dict[str, Any]:
        next(self.ticks)
        return self._drink(batch, 1)

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self._drink(batch, 2)

    def _drink(self, batch: Any, n: int) -> dict[str, Any]:
        state: Any = self.train_state
        state.n_coffees += n
        state.cups.append(n)
        return Regress.train_step(self, batch)


def counted(trainer: Any) -> tuple[int, int, int]:
    return trainer.ticks.n, trainer.train_state.n_coffees, len(trainer.train_state.cups)


Saving = Counting.add_on(StateManagerAddon)


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_new_piece_is_saved_and_restored(save_format: str, tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, save_format=save_format)
    trainer.run(2, make_loader())
    other = make_trainer(Saving, save_path=tmp_path, save_format=save_format)
    other.load_state()
    assert counted(trainer) == counted(other) == (10, 10, 10)


def test_new_piece_is_resumed_in_mid_epoch(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        make_trainer(Saving, save_path=tmp_path, every_n_steps=3, lightning={"callbacks": [Breaks(8)]}).run(2, make_loader())
    resumed = make_trainer(Saving, save_path=tmp_path, every_n_steps=3)
    resumed.run(2, make_loader(), resume="auto")
    assert counted(resumed) == (10, 10, 10)


def test_new_piece_is_kept_in_memory_rewound_and_branched() -> None:
    trainer = make_trainer(Counting, keep_states=True)
    trainer.run(2, make_loader())
    branch = trainer.branch(epoch=1)
    trainer.rewind(epoch=0)
    assert (counted(trainer), counted(branch)) == ((0, 0, 0), (5, 5, 5))
    trainer.rewind(epoch=0)
    trainer.run(1, make_loader())
    assert counted(trainer) == (5, 5, 5)


def test_new_piece_is_pickled() -> None:
    trainer = make_trainer(Counting)
    trainer.run(1, make_loader())
    assert counted(pickle.loads(pickle.dumps(trainer))) == (5, 5, 5)


def test_new_piece_comes_back_from_a_replica() -> None:
    trainer = make_trainer(Counting)
    replica = loads(dumps(trainer))
    replica.run(1, make_loader())
    state = trainer.train_state
    load_replica_state(trainer, [], loads(dumps(take_state(replica, []))))
    assert counted(trainer) == (5, 5, 5) and trainer.train_state is state


@pytest.fixture
def workers() -> Iterator[None]:
    yield
    _pool().close()


@pytest.mark.long
@pytest.mark.usefixtures("workers")
def test_new_piece_is_sent_to_workers_and_comes_back() -> None:
    trainer = make_trainer(Counting.add_on(MultiGPUAddon), device=["cpu", "cpu"])
    trainer.ticks.n, trainer.train_state.n_coffees, trainer.train_state.cups = 100, 100, [100]
    trainer.run(1, make_loader(64))
    assert counted(trainer) == (102, 102, 3)  # each of the two ranks has two of the four batches


def test_learning_rate_test_leaves_no_trace_in_a_new_piece() -> None:
    trainer = make_trainer(Counting)
    trainer.run(1, make_loader())
    trainer.lr_find(make_loader(), n_batches=10)
    assert counted(trainer) == (5, 5, 5)


def test_evaluation_in_a_pause_leaves_no_trace_in_a_new_piece() -> None:
    trainer = make_trainer(Counting)
    handle = trainer.run(50, make_loader(), background=True)
    trainer.pause()
    before = counted(trainer)
    trainer.evaluate(make_valid())
    after = counted(trainer)
    trainer.stop()
    handle.join()
    assert before == after


def test_state_for_both_places_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    dump = _CheckpointConnector.dump_checkpoint

    def counted_dump(self: Any, **options: Any) -> Any:
        taken.append(self.trainer.current_epoch)
        return dump(self, **options)

    monkeypatch.setattr(_CheckpointConnector, "dump_checkpoint", counted_dump)
    monkeypatch.setattr(memory, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # a slow copy is not held
    trainer = make_trainer(Saving, save_path=tmp_path, keep_states=True)
    trainer.run(3, make_loader())
    assert taken == [0, 0, 1, 2]  # the start, and the end of each epoch
    other = make_trainer(Saving, save_path=tmp_path)
    other.load_state()
    kept = trainer.states.memory.states[-1].taken.state
    assert same_weights(other.model, {name.removeprefix("model."): value for name, value in kept["state_dict"].items()})
