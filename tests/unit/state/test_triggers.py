"""When checkpoints are saved, and which are kept: every n minutes, and the n best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import StateManagerAddon
from nbtrain.state import triggers

Saving = Regress.add_on(StateManagerAddon)


def saved(trainer: Any) -> list[str]:
    return sorted(path.name for path in (trainer.run_dir / "checkpoints").glob("epoch=*"))


class Ticking(Saving):
    """Each training step takes 20 seconds of a clock that does not run by itself."""

    now_s = 0.0

    def train_step(self, batch: Any) -> dict[str, Any]:
        type(self).now_s += 20.0
        return super().train_step(batch)


def test_checkpoint_is_saved_every_n_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers.Triggers.__init__, "__defaults__", (lambda: Ticking.now_s,))
    trainer = make_trainer(Ticking, save_path=tmp_path, every_n_minutes=1, save_best=False)
    trainer.run(2, make_loader())  # ten steps
    assert saved(trainer) == ["epoch=0-step=3.ckpt", "epoch=1-step=6.ckpt", "epoch=1-step=9.ckpt", "epoch=2-step=10.ckpt"]


class Scored(Saving):
    """Its validation has these losses."""

    losses = (5.0, 2.0, 4.0, 1.0, 3.0)

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": torch.tensor(self.losses[self.counts.epoch])}


def best_of(folder: Path, **options: Any) -> tuple[list[str], Any]:
    trainer = make_trainer(Scored, save_path=folder, lightning={"num_sanity_val_steps": 0}, **options)
    trainer.run(5, make_loader(), make_valid())
    return saved(trainer), trainer


def test_the_n_best_checkpoints_are_kept(tmp_path: Path) -> None:
    names, trainer = best_of(tmp_path, keep_best_n=2, every_n_epochs=5)
    assert names == ["epoch=2-step=10.ckpt", "epoch=4-step=20.ckpt", "epoch=5-step=25.ckpt"]  # the last is the newest
    assert (trainer.run_dir / "checkpoints" / "best.ckpt").resolve().name == "epoch=4-step=20.ckpt"


def test_the_n_best_and_the_last_n_are_kept_together(tmp_path: Path) -> None:
    names, _ = best_of(tmp_path, keep_best_n=1, keep_last_n=2)
    assert names == ["epoch=4-step=20.ckpt", "epoch=5-step=25.ckpt"]


def test_a_resumed_run_goes_on_with_the_n_best(tmp_path: Path) -> None:
    first = make_trainer(Scored, save_path=tmp_path, keep_best_n=2, lightning={"num_sanity_val_steps": 0})
    first.run(2, make_loader(), make_valid())
    again = make_trainer(Scored, save_path=tmp_path, keep_best_n=2, lightning={"num_sanity_val_steps": 0})
    again.run(5, make_loader(), make_valid(), resume="last")
    assert saved(again) == ["epoch=2-step=10.ckpt", "epoch=4-step=20.ckpt", "epoch=5-step=25.ckpt"]
