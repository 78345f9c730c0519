"""A piece that is added to the trainer's state in one place is saved, resumed, pickled, sent to workers, brought back and restored."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import MultiGPUAddon, StateManagerAddon
from nbtrain.addons.multi_gpu import _pool
from nbtrain.distributed.worker import dumps, loads
from nbtrain.engine.train_state import TrainState
from nbtrain.history.history import History
from nbtrain.state.replica import load_replica_state, take_state


@pytest.fixture(autouse=True)
def counted_coffees(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line more in the one place."""
    init = TrainState.__init__

    def with_coffees(self: Any, history: History) -> None:
        init(self, history)
        self.n_coffees, self.cups = 0, []

    monkeypatch.setattr(TrainState, "__init__", with_coffees)


class Thirsty(Regress):
    """Drinks a coffee in each training step, and in each test step two."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return self._drink(batch, 1)

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self._drink(batch, 2)

    def _drink(self, batch: Any, n: int) -> dict[str, Any]:
        state: Any = self.train_state
        state.n_coffees += n
        state.cups.append(n)
        return Regress.train_step(self, batch)


def coffees(trainer: Any) -> tuple[int, int]:
    return trainer.train_state.n_coffees, len(trainer.train_state.cups)


Saving = Thirsty.add_on(StateManagerAddon)


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_new_piece_is_saved_and_restored(save_format: str, tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, save_format=save_format)
    trainer.run(2, make_loader())
    other = make_trainer(Saving, save_path=tmp_path, save_format=save_format)
    other.load_state()
    assert coffees(trainer) == coffees(other) == (10, 10)


class Fails(Saving):
    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.processed == 8:
            raise RuntimeError("the power went")
        return super().train_step(batch)


def test_new_piece_is_resumed_in_mid_epoch(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        make_trainer(Fails, save_path=tmp_path, every_n_steps=3).run(2, make_loader())
    resumed = make_trainer(Saving, save_path=tmp_path, every_n_steps=3)
    resumed.run(2, make_loader(), resume="auto")
    assert coffees(resumed) == (10, 10)


def test_new_piece_is_pickled() -> None:
    trainer = make_trainer(Thirsty)
    trainer.run(1, make_loader())
    assert coffees(pickle.loads(pickle.dumps(trainer))) == (5, 5)


def test_new_piece_comes_back_from_a_replica() -> None:
    trainer = make_trainer(Thirsty)
    replica = loads(dumps(trainer))
    replica.run(1, make_loader())
    state = trainer.train_state
    load_replica_state(trainer, [], loads(dumps(take_state(replica, []))))
    assert coffees(trainer) == (5, 5) and trainer.train_state is state


@pytest.fixture
def workers() -> Iterator[None]:
    yield
    _pool().close()


@pytest.mark.long
@pytest.mark.usefixtures("workers")
def test_new_piece_is_sent_to_workers_and_comes_back() -> None:
    trainer = make_trainer(Thirsty.add_on(MultiGPUAddon), device=["cpu", "cpu"])
    trainer.train_state.n_coffees, trainer.train_state.cups = 100, [100]
    trainer.run(1, make_loader(64))
    assert coffees(trainer) == (102, 3)  # each of the two ranks has two of the four batches


def test_learning_rate_test_leaves_no_trace_in_a_new_piece() -> None:
    trainer = make_trainer(Thirsty)
    trainer.run(1, make_loader())
    trainer.lr_find(make_loader(), n_batches=10)
    assert coffees(trainer) == (5, 5)


def test_evaluation_in_a_pause_leaves_no_trace_in_a_new_piece() -> None:
    trainer = make_trainer(Thirsty)
    handle = trainer.run(50, make_loader(), background=True)
    trainer.pause()
    before = coffees(trainer)
    trainer.evaluate(make_valid())
    after = coffees(trainer)
    trainer.stop()
    handle.join()
    assert before == after
