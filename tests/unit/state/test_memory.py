"""Which states of a run are in memory when it is over, paused or stopped: what is promised of runs with very short epochs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from samples import Regress, make_loader, make_model, make_trainer, same_weights
from torch import Tensor, nn

from nbtrain import CheckpointError, StateManagerAddon
from nbtrain.state import memory


def keeping(kind: Any = Regress, **options: Any) -> Any:
    return make_trainer(kind, keep_states=True, **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless a test moves it."""
    now = [0.0]
    monkeypatch.setattr(memory, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def take_s(monkeypatch: pytest.MonkeyPatch, now: list[float], seconds: float) -> None:
    """Let each copy of a state take `seconds`."""
    take = memory.keep

    def slow(*args: Any, **options: Any) -> Any:
        now[0] += seconds
        return take(*args, **options)

    monkeypatch.setattr(memory, "keep", slow)


def test_of_a_thousand_epochs_of_one_batch_the_start_and_the_last_three_are_held(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    take_s(monkeypatch, clock, 0.001)  # while the epochs take no time at all: no state is ever due
    trainer = keeping()
    trainer.run(1000, [next(iter(make_loader()))])
    assert [state.epoch for state in trainer.states.memory.states] == [0, 998, 999, 1000]
    for epoch in (1000, 999, 998, 0):
        assert trainer.rewind(epoch=epoch).n_recomputed == 0
    assert trainer.counts.epoch == 0


def timed(clock: list[float], step_s: float, score: Callable[[int], float] = float) -> type[Regress]:
    """Steps that take so long, and have a score by their epoch."""

    class Timed(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            clock[0] += step_s
            return super().train_step(batch) | {"score": torch.tensor(float(score(self.counts.epoch)))}

    return Timed


@pytest.mark.parametrize(
    ("step_s", "held"),
    [
        (0.0, [0]),  # no state is due, also at the end
        (4.0, [0, 5, 10, 15, 18, 19, 20]),  # 20 s an epoch: one is due after 100 s, 200 s, …; the last three have their own share
        (20.0, [*range(21)]),
    ],
)
def test_a_state_is_taken_after_each_two_hundred_times_what_states_took(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], step_s: float, held: list[int]
) -> None:
    take_s(monkeypatch, clock, 0.5)
    trainer = keeping(timed(clock, step_s))
    trainer.run(20, make_loader())
    assert [state.epoch for state in trainer.states.memory.states] == held


def test_the_best_epoch_is_held_where_better_ones_are_rare(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    take_s(monkeypatch, clock, 0.5)
    trainer = keeping(timed(clock, 4.0, lambda epoch: epoch == 42), monitor="train_score", monitor_mode="max")
    trainer.run(50, make_loader())
    assert trainer.history.best["epoch"] == 43
    assert [state.epoch for state in trainer.states.memory.states] == [0, 5, 10, 15, 20, 25, 30, 35, 40, 43, 45, 48, 49, 50]
    assert trainer.rewind("best").n_recomputed == 0


def test_copies_take_one_percent_of_a_run_whose_epochs_all_are_better(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    take_s(monkeypatch, clock, 0.5)
    trainer = keeping(timed(clock, 4.0), monitor="train_score", monitor_mode="max")
    trainer.run(200, make_loader())
    now_s = clock[0]
    taken = trainer.states.memory.states
    assert 0.9 * now_s / 100 < 0.5 * len(taken) <= now_s / 100
    assert [state.epoch for state in trainer.states.memory.states[-3:]] == [198, 199, 200]


def test_the_epoch_that_a_callback_ends_a_run_with_is_held(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    take_s(monkeypatch, clock, 0.001)

    class Enough(L.Callback):
        def on_train_epoch_end(self, pl_trainer: L.Trainer, pl_module: Any) -> None:
            pl_trainer.should_stop = pl_module.owner.counts.epoch >= 5

    trainer = keeping(lightning={"callbacks": [Enough()]})
    trainer.run(50, make_loader())
    assert [state.epoch for state in trainer.states.memory.states] == [0, trainer.counts.epoch]
    assert trainer.rewind(epoch=trainer.counts.epoch).n_recomputed == 0


@pytest.mark.parametrize("ends", [False, True])
def test_the_place_of_a_pause_and_of_a_stop_by_hand_is_held(monkeypatch: pytest.MonkeyPatch, clock: list[float], ends: bool) -> None:
    take_s(monkeypatch, clock, 0.5)

    class Halting(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.processed == 7:
                (self.stop if ends else self.pause)()
            return super().train_step(batch)

    trainer = keeping(Halting)
    handle = trainer.run(4, make_loader(), background=True)
    handle.join() if ends else trainer.control.wait_settled()
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    states = [(state.epoch, state.batch) for state in trainer.states.memory.states]
    assert trainer.rewind(step=8).n_recomputed == 0
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert states == [(0, None), (1, 3)]


class Recording(L.Callback):
    """Keeps the weights at the end of each epoch."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_epoch_end(self, pl_trainer: L.Trainer, pl_module: Any) -> None:
        self.weights.append({name: value.clone() for name, value in pl_module.owner.model.state_dict().items()})

    def __deepcopy__(self, memo: Any) -> Recording:
        return Recording()


@pytest.mark.parametrize("end", ["pause", "error", "error that pauses"])
def test_last_epochs_of_a_run_that_is_paused_or_fails_are_reached_exactly_where_they_are_not_held(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], end: str
) -> None:
    take_s(monkeypatch, clock, 0.5)

    class Breaking(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.processed == 42 and self.control.thread is not None and self.log_bar is True:
                if end != "pause":
                    raise ValueError("broken")
                self.pause()
            return super().train_step(batch)

    seen = Recording()
    on_error = "pause" if end == "error that pauses" else "raise"
    trainer = keeping(Breaking, lightning={"callbacks": [seen]}, on_error=on_error)
    trainer.log_bar = True  # of the run, and not of a copy
    handle = trainer.run(30, make_loader(), background=True)
    if end == "error":
        with pytest.raises(ValueError, match="broken"):
            handle.wait()
    trainer.control.wait_settled()
    held = [state.epoch for state in trainer.states.memory.states]
    assert held == ([0, 8] if end == "pause" else [0])  # the pause is in epoch 9
    for epoch in (8, 7, 6, trainer.history.best["epoch"], 0):
        found = trainer.branch(epoch=epoch).model.state_dict()
        expected = seen.weights[epoch - 1] if epoch else trainer.states.memory.states[0].taken.state["state_dict"]
        assert same_weights(found, {name.removeprefix("model."): value for name, value in expected.items()})

    assert trainer.rewind(epoch=8).n_recomputed == 40


def _n_bytes(value: Any, seen: set[int]) -> int:
    """The bytes of all tensors, each once."""
    if isinstance(value, Tensor):
        is_new = value.data_ptr() not in seen
        seen.add(value.data_ptr())
        return value.nbytes if is_new else 0
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_n_bytes(item, seen) for item in items)


def test_states_of_many_epochs_stay_within_the_budget_with_their_best_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SHARE", 0)  # each epoch is kept
    sizes: list[tuple[int, int]] = []

    class Counting(L.Callback):
        def on_train_epoch_start(self, pl_trainer: L.Trainer, pl_module: Any) -> None:
            kept, seen = pl_module.owner.states.memory, set[int]()
            tensors = sum(_n_bytes([state.taken.state, state.best_weights], seen) for state in kept.states)
            sizes.append((kept.n_bytes, tensors))

    model, options = nn.Sequential(nn.Linear(8, 2000), nn.Linear(2000, 1)), {"monitor": "train_score", "monitor_mode": "max"}
    trainer = keeping(timed([0.0], 0.0), model=model, lightning={"callbacks": [Counting()]}, **options)
    trainer.states.memory.budget = budget = 5_000_000
    trainer.run(100, [next(iter(make_loader()))])
    assert all(tensors < n_bytes <= budget for n_bytes, tensors in sizes) and sizes[-1][0] > 0.9 * budget
    states = trainer.states.memory.states
    assert 10 < len(states) < 20 and len({id(state.best_weights) for state in states}) == len(states)
    assert [state.epoch for state in states if state.epoch in (0, 98, 99, 100)] == [0, 98, 99, 100]


def test_where_memory_is_tight_the_start_the_best_and_the_last_three_epochs_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SHARE", 0)

    class Changing(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.processed % 5 > 1:
                self.set(lr=0.001 * (1 + self.counts.processed % 7))  # a state within the epoch is kept, too
            return super().train_step(batch) | {"score": torch.tensor(float(self.counts.epoch == 2))}

    trainer = keeping(Changing, monitor="train_score", monitor_mode="max")
    trainer.states.memory.budget = 120_000  # less than two states
    trainer.run(12, make_loader())
    assert [(state.epoch, state.batch) for state in trainer.states.memory.states] == [(epoch, None) for epoch in (0, 3, 10, 11, 12)]


def test_weights_of_the_best_epoch_of_another_course_are_not_taken_for_those_of_this_one(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    trainer, loader = keeping(), make_loader(own_generator=True)
    trainer.run(1, loader)
    trainer.rewind(epoch=0)
    trainer.set(lr=0.05)
    trainer.run(1, loader)  # its best epoch has the same number
    expected = {name: value.clone() for name, value in trainer.best_weights.items()}
    trainer.run(1, loader)
    trainer.rewind(epoch=1)
    assert same_weights(trainer.best_weights, expected)


def test_states_are_given_up_before_the_memory_is_short(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    trainer = keeping()
    trainer.run(3, make_loader())
    states, texts, free = trainer.states.memory, list[str](), 0
    monkeypatch.setattr("nbtrain.state.kept_states.free_memory", lambda: free)
    assert not states.make_room(10**9) and [state.epoch for state in states.states] == [3]
    monkeypatch.setattr(trainer.recorder, "note", lambda text, **options: texts.append(text))
    trainer.run(1, make_loader())
    assert [state.epoch for state in states.states] == [3]
    assert len(texts) == 1 and texts[0].startswith("A state was not kept in memory: ")


def test_no_more_states_are_given_up_than_are_needed(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    trainer = keeping()
    trainer.run(3, make_loader())
    states = trainer.states.memory
    monkeypatch.setattr("nbtrain.state.kept_states.free_memory", lambda: 0)
    assert states.make_room(1) and len(states) == 3 and states.states[-1].epoch == 3


def test_states_are_held_of_a_model_with_a_sparse_buffer() -> None:
    class Graph(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 1)
            self.register_buffer("adjacency", torch.eye(4).to_sparse(), persistent=False)

    trainer = keeping(model=Graph())
    trainer.run(2, make_loader())
    assert trainer.rewind(epoch=1).n_recomputed == 0


def test_states_of_one_run_are_not_those_of_another_that_was_loaded(tmp_path: Path) -> None:
    kind = Regress.add_on(StateManagerAddon)
    other = make_trainer(kind, model=make_model(5), save_path=tmp_path / "other")
    other.run(3, make_loader())
    trainer = keeping(kind, save_path=tmp_path / "own")
    trainer.run(2, make_loader())
    trainer.load_state(other.run_dir / "checkpoints" / "last.ckpt")
    with pytest.raises(CheckpointError, match="No state up to step 5 is in memory"):
        trainer.rewind(epoch=1)
    trainer.load_state(other.run_dir / "checkpoints" / "epoch=1-step=5.ckpt")
    trainer.run(1, make_loader())
    assert same_weights(trainer.rewind(epoch=1) and trainer.model, _after_epoch(other, 1))


def _after_epoch(trainer: Any, epoch: int) -> nn.Module:
    model = make_model()
    loaded = make_trainer(model=model)
    loaded.apply_weights(next((trainer.run_dir / "checkpoints").glob(f"epoch={epoch}-*.ckpt")))
    return loaded.model
