"""Which states of a run are in memory when it is over, paused or stopped: what is promised of runs with very short epochs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from samples import Regress, make_loader, make_trainer

from nbtrain.trainer import state_keeper


def keeping(kind: Any = Regress, **options: Any) -> Any:
    return make_trainer(kind, keep_states=True, **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless a test moves it."""
    now = [0.0]
    monkeypatch.setattr(state_keeper, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def take_s(monkeypatch: pytest.MonkeyPatch, now: list[float], seconds: float) -> None:
    """Let each copy of a state take `seconds`."""
    take = state_keeper.take_state

    def slow(*args: Any, **options: Any) -> Any:
        now[0] += seconds
        return take(*args, **options)

    monkeypatch.setattr(state_keeper, "take_state", slow)


def test_of_a_thousand_epochs_of_one_batch_the_start_and_the_last_three_are_held(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    take_s(monkeypatch, clock, 0.001)  # while the epochs take no time at all: no state is ever due
    trainer = keeping()
    trainer.run(1000, [next(iter(make_loader()))])
    assert [state.epoch for state in trainer.kept_states.states] == [0, 998, 999, 1000]
    for epoch in (1000, 999, 998, 0):
        assert trainer.rewind(epoch=epoch).n_recomputed == 0
    assert trainer.counts.epoch == 0


def test_states_that_are_slowly_copied_stay_within_their_share_at_the_end_too(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    take_s(monkeypatch, clock, 0.5)
    trainer = keeping()
    trainer.run(4, make_loader())
    assert [state.epoch for state in trainer.kept_states.states] == [0]


def test_a_state_is_taken_after_each_two_hundred_times_what_states_took(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    take_s(monkeypatch, clock, 0.5)

    class Slow(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            clock[0] += 4.0
            return super().train_step(batch)

    trainer = keeping(Slow)
    trainer.run(12, make_loader())  # 20 s each: the second state is due after 100 s, the third after 200 s
    assert [state.epoch for state in trainer.kept_states.states] == [0, 5, 10]


def test_the_epoch_that_a_callback_ends_a_run_with_is_held(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    take_s(monkeypatch, clock, 0.001)

    class Enough(L.Callback):
        def on_train_epoch_end(self, pl_trainer: L.Trainer, pl_module: Any) -> None:
            pl_trainer.should_stop = pl_module.owner.counts.epoch >= 5

    trainer = keeping(lightning={"callbacks": [Enough()]})
    trainer.run(50, make_loader())
    assert [state.epoch for state in trainer.kept_states.states] == [0, trainer.counts.epoch]
    assert trainer.rewind(epoch=trainer.counts.epoch).n_recomputed == 0


@pytest.mark.parametrize("ends", [False, True])
def test_the_place_of_a_pause_and_of_a_stop_by_hand_is_held(monkeypatch: pytest.MonkeyPatch, clock: list[float], ends: bool) -> None:
    take_s(monkeypatch, clock, 0.5)

    class Halting(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.step == 7:
                (self.stop if ends else self.pause)()
            return super().train_step(batch)

    trainer = keeping(Halting)
    handle = trainer.run(4, make_loader(), background=True)
    handle.join() if ends else trainer.control.wait_settled()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    states = [(state.epoch, state.batch) for state in trainer.kept_states.states]
    assert trainer.rewind(step=8).n_recomputed == 0
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert states == [(0, None), (1, 3)]
