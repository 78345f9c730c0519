"""A run with a `save_path` saves the state of its end, from which another kernel trains on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resume_cases import outcome
from samples import Regress, make_loader, make_trainer, make_valid, same_weights

from nbtrain import EarlyStoppingAddon, StateManagerAddon, load_run
from nbtrain.history.run_folder import read_events


def make(folder: Path | None, kind: Any = Regress, **options: Any) -> Any:
    return make_trainer(kind, save_path=folder, keep_source=False, seed=0, **options)


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.02)


def cosine(optimizer: Any, plan: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.total_steps)


def notes(trainer: Any) -> str:
    return "\n".join(event.data["text"] for event in read_events(trainer.run_dir) if event.kind == "note")


class StopsAt(Regress):
    """Stops in its sixth batch, which is in the second epoch."""

    n_steps = 0

    def train_step(self, batch: Any) -> Any:
        self.n_steps += 1
        if self.n_steps == 6:
            self.stop()
        return super().train_step(batch)


@pytest.mark.parametrize("options", [{}, {"optimizer": adam, "scheduler": cosine}, {"keep_states": True}])
def test_another_kernel_trains_on_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = make(None, **options)
    whole.run(5, make_loader(), make_valid())
    expected = outcome(whole)
    first = make(tmp_path, **options)
    first.run(2, make_loader(), make_valid())
    first.run(1, make_loader(), make_valid())
    second = make(tmp_path, **options)
    second.run(5, make_loader(), make_valid(), resume="auto")
    assert second.run_dir == first.run_dir and "3 of 5 epochs were there; 2 more" in notes(second)
    if "scheduler" not in options:  # which has begun again with the second line
        assert outcome(second) == expected


def test_a_run_that_was_stopped_within_an_epoch_goes_on_with_its_next_batch(tmp_path: Path) -> None:
    whole = make(None)
    whole.run(3, make_loader(), make_valid())
    expected = outcome(whole)
    stopped = make(tmp_path, StopsAt)
    assert stopped.run(3, make_loader(), make_valid()).status == "stopped"
    resumed = make(tmp_path)
    resumed.run(3, make_loader(), make_valid(), resume="auto")
    assert outcome(resumed) | {"attributes": {}} == expected


def test_only_the_end_is_kept_and_its_best_weights_come_back(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    for _ in range(3):
        trainer.run(1, make_loader(), make_valid())
    saved = sorted(path.name for path in (trainer.run_dir / "checkpoints").glob("*.ckpt"))
    assert len(saved) == 2 and saved[0].startswith("epoch=3-") and saved[1] == "last.ckpt"
    weights = {path.name for path in trainer.run_dir.glob("*.safetensors")}
    assert weights == {"best.safetensors", "last.safetensors"}
    again = make(tmp_path)
    again.run(3, make_loader(), make_valid(), resume="auto")
    assert again.best_weights is not None and all(torch.equal(again.best_weights[n], v) for n, v in trainer.best_weights.items())


def test_weights_that_a_resumed_run_has_passed_are_in_no_file(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.run(1, make_loader(), make_valid())
    second = make(tmp_path)
    second.run(3, make_loader(), make_valid(), resume="auto")
    assert not list(second.run_dir.glob("*.safetensors"))  # the checkpoints have newer ones
    assert second.history.best["epoch"] > 1
    other = make(None)
    other.apply_weights(tmp_path)
    assert same_weights(other.model, second.best_weights)


def test_a_best_that_no_checkpoint_has_stays_in_its_file(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.run(2, make_loader(), make_valid())
    best = {name: value.clone() for name, value in first.best_weights.items()}
    worse = make(tmp_path, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    worse.run(3, make_loader(), make_valid(), resume="auto", without=("optimizer",))
    assert worse.history.best["epoch"] == 2 and not (worse.run_dir / "last.safetensors").exists()
    other = make(None)
    other.apply_weights(worse.run_dir)
    assert same_weights(other.model, best)


def test_why_a_resume_is_not_exact_is_said_by_the_run_that_resumes(tmp_path: Path) -> None:
    class Counting:
        """A loader that draws as it goes, and has no state."""

        def __init__(self) -> None:
            self.n = 0

        def __iter__(self) -> Any:
            for _ in range(4):
                self.n += 1
                yield torch.randn(8, 8), torch.randn(8, 1)

    first = make(tmp_path)
    first.run(1, Counting())
    assert "not exact" not in notes(first)
    second = make(tmp_path)
    second.run(2, Counting(), resume="auto")
    assert ("not exact" in notes(second)) == ("not exact" in notes(_managed(tmp_path / "managed", Counting())))


def _managed(folder: Path, loader: Any) -> Any:
    trainer = make(folder, Regress.add_on(StateManagerAddon))
    trainer.run(1, loader)
    return trainer


def test_what_can_not_be_saved_is_noted_and_the_weights_are_there(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        """Has a sparse tensor in its state, which no checkpoint can hold."""

        def step(self, closure: Any = None) -> Any:
            self.state[self.param_groups[0]["params"][0]]["seen"] = torch.eye(3).to_sparse()
            return super().step(closure)

    trainer = make(tmp_path, optimizer=lambda params: Odd(params, lr=0.01))
    assert trainer.run(2, make_loader(), make_valid()).status == "completed"
    assert notes(trainer).count("a checkpoint was not saved") == 1 and "seen" in notes(trainer)
    assert {path.name for path in trainer.run_dir.glob("*.safetensors")} == {"best.safetensors", "last.safetensors"}


def test_evaluations_and_trainers_without_a_folder_save_no_state(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.evaluate(make_valid())
    tester = make(tmp_path, mode="test")
    tester.run(1, make_valid())
    assert not list(tmp_path.rglob("*.ckpt"))


def test_early_stopping_that_has_ended_the_run_ends_it_again(tmp_path: Path) -> None:
    kind = Regress.add_on(EarlyStoppingAddon)
    first = make(tmp_path, kind, patience=1, delta=100.0)
    assert first.run(6, make_loader(), make_valid()).status == "stopped"
    epochs = len(first.history.epochs)
    again = make(tmp_path, kind, patience=1, delta=100.0)
    again.run(6, make_loader(), make_valid(), resume="auto")
    assert len(again.history.epochs) == epochs < 6
    assert len(load_run(tmp_path).epochs) == epochs
