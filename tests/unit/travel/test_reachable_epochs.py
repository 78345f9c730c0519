"""Which epochs the slider offers, and what its buttons do to the trainer."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid, same_weights, without_times

from nbtrain import ConfigError, StateManagerAddon
from nbtrain.checkpoint.snapshot import Snapshot
from nbtrain.state.kept_states import KeptState
from nbtrain.travel.reachable_epochs import reachable_epochs, travel_of


def keeping(**options: Any) -> Any:
    return make_trainer(keep_states=True, **options)


def test_slider_offers_the_start_and_all_epochs_whose_values_are_in_the_table() -> None:
    trainer = keeping()
    trainer.run(3, make_loader(), make_valid())
    places = reachable_epochs(trainer)
    assert [place.epoch for place in places] == [0, 1, 2, 3]
    assert [place.epoch for place in places if place.is_best] == [trainer.history.best["epoch"]]
    assert [place.line for place in places[1:]] == [f"the end of epoch {n}" for n in (1, 2, 3)]


def test_every_epoch_that_is_offered_can_be_reached_and_no_other_one() -> None:
    class Slowing(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.step in (6, 17):
                self.set(lr=0.001 * self.counts.step)
            return super().train_step(batch)

    trainer = keeping(kind=Slowing)
    trainer.run(5, make_loader())
    kept = trainer.states.memory
    kept.states = [state for state in kept.states if state.step == 0 or state.step > 11]  # as the budget may thin them
    offered = {place.epoch for place in reachable_epochs(trainer)}
    reached = set()
    for epoch in range(6):
        try:
            trainer.branch(epoch=epoch)
        except Exception as error:
            assert "was done by hand" in str(error)
        else:
            reached.add(epoch)
    assert offered == reached and {0, 1, 5} <= offered and 2 not in offered


def test_what_is_recomputed_is_said() -> None:
    trainer = keeping()
    trainer.run(3, make_loader())
    trainer.states.memory.states = trainer.states.memory.states[:1]
    words = [place.words for place in reachable_epochs(trainer)]
    assert words == ["", *(f"recomputes {n} batches" for n in (5, 10, 15))]


def test_nothing_is_offered_where_no_state_is_kept_and_in_mode_test() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader())
    assert reachable_epochs(trainer) == []
    kept = keeping()
    kept.run(1, make_loader())
    kept.toggle("test")
    assert reachable_epochs(kept) == []


def test_an_iterator_can_only_be_rewound_to_what_is_kept() -> None:
    trainer = keeping()
    trainer.run(1, iter([*make_loader()]))
    trainer.states.memory.states = trainer.states.memory.states[:1]
    assert [place.epoch for place in reachable_epochs(trainer)] == [0]


def test_buttons_rewind_and_branch_the_trainer() -> None:
    a, b = keeping(seed=3), keeping(seed=3)
    loader = make_loader()
    for trainer in (a, b):
        trainer.run(3, loader)
    travel = travel_of(a)
    assert travel.actions["Branch here"](1) == (
        "Branched from the end of epoch 1 · trainer.branches[0] is the branch: its run() continues from there"
    )
    assert travel.actions["Rewind here"](2).startswith("Rewound to the end of epoch 2, step 10")
    a.run(1, loader)
    assert same_weights(a.model, b.model) and without_times(a.history.epochs) == without_times(b.history.epochs)
    assert a.branches[0].counts.epoch == 1 and a.branches[0].branches == [] and b.branches == []


def test_click_while_a_run_is_on_is_refused() -> None:
    class Waiting(Regress):
        seconds = 0.0

        def train_step(self, batch: Any) -> dict[str, Any]:
            time.sleep(self.seconds)
            return super().train_step(batch)

    trainer = keeping(kind=Waiting)
    trainer.run(1, make_loader())
    trainer.seconds = 0.02
    handle = trainer.run(50, make_loader(), background=True)
    with pytest.raises(ConfigError, match="A run of this trainer is on"):
        travel_of(trainer).actions["Rewind here"](1)
    handle.stop()
    handle.join()


def test_slider_does_not_hold_the_trainer() -> None:
    trainer = keeping()
    trainer.run(1, make_loader())
    travel = travel_of(trainer)
    del trainer
    gc.collect()
    assert travel.places() == []
    with pytest.raises(ConfigError) as error:
        travel.actions["Rewind here"](1)
    assert str(error.value) == "The trainer of this run is gone: another one has its name, or it was deleted."


def test_ten_thousand_epochs_are_looked_up_at_once() -> None:
    trainer = keeping()
    trainer.run(1, make_loader())
    (row,), kept = trainer.history.epochs, trainer.states.memory
    trainer.history.epochs += [type(row)({**row, "epoch": n, "step": 5 * n, "processed": 5 * n}) for n in range(2, 10_001)]
    loaders = kept.states[0].loaders
    kept.states += [KeptState(1, n, 5 * n, 5 * n, None, 10_000, False, Snapshot({}), loaders) for n in range(10, 10_001, 10)]
    begin = time.process_time()
    assert len(reachable_epochs(trainer)) == 10_001
    assert time.process_time() - begin < 5  # a search from the end for each takes a minute


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    trainer: Any = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path, seed=1)
    trainer.run(3, make_loader(), make_valid())
    return trainer


def test_checkpoints_on_the_disk_are_offered(saved: Any) -> None:
    words = [place.words for place in reachable_epochs(saved)]
    assert words == [f"from epoch={n}-step={5 * n}.ckpt" for n in (1, 2, 3)]


def test_saved_states_serve_for_branches_replays_and_the_steps_between(saved: Any) -> None:
    loaders = saved.ran.loader, saved.ran.valid_loader
    expected = {name: value.clone() for name, value in saved.model.state_dict().items()}
    epochs = without_times(saved.history.epochs)
    batch = saved.replay(9).batch
    made = saved.branch(epoch=1)
    made.run(2, *loaders)
    assert all(torch.equal(value, expected[name]) for name, value in made.model.state_dict().items())
    assert without_times(made.history.epochs) == epochs and made.run_dir.name == "run-001-b1"
    assert made.train_state.best_weights is not None
    found = saved.rewind(step=9)
    assert found.n_recomputed > 0 and torch.equal(saved.replay(9).batch[0], batch[0])
    saved.run(2, *loaders)
    assert all(torch.equal(value, expected[name]) for name, value in saved.model.state_dict().items())
    assert without_times(saved.history.epochs) == epochs
