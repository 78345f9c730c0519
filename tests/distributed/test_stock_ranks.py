"""Two ranks of a LightningModule on Lightning's own loops: requests come between the same two batches on both, and errors end the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from samples import make_loader, make_model, same_weights, without_times
from torch.nn.functional import mse_loss

from nbtrain import MultiGPUAddon, RunPaused, StateManagerAddon, Trainer
from nbtrain.addons.multi_gpu import _pool

N_EPOCH, N_BATCHES = 6, 9  # of each rank


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    _pool().close()


class Lit(L.LightningModule):
    """Draws random numbers in each step. Its steps take a while, so that a request comes in mid-epoch."""

    fails_in: tuple[int, ...] = ()  # the ranks in which the fourth step raises, which closes a window

    def __init__(self) -> None:
        super().__init__()
        self.net, self.n_steps = make_model(), 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        self.n_steps += 1
        if self.n_steps == 4 and self.global_rank in self.fails_in:
            raise LookupError(f"no fourth step in rank {self.global_rank}")
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("train_mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}]


def make(*addons: Any, fails_in: tuple[int, ...] = (), **options: Any) -> Any:
    module = Lit()
    module.fails_in = fails_in
    kind = Trainer.add_on(MultiGPUAddon, *addons)
    lightning = {"accumulate_grad_batches": 2}
    return kind.from_lightning(module, device=["cpu", "cpu"], log_bar=False, seed=3, lightning=lightning, **options)


def loaders() -> tuple[Any, Any]:
    """They draw from generators of their own, so that one more validation changes no random number of the training."""
    return make_loader(batch_size=4, own_generator=True), make_loader(40, shuffle=False, own_generator=True)


@pytest.fixture(scope="module")
def whole() -> Any:
    """A run without a request."""
    trainer = make()
    trainer.run(N_EPOCH, *loaders())
    return trainer


def begun(trainer: Any) -> Any:
    """The handle of a run in its second epoch."""
    handle = trainer.run(N_EPOCH, *loaders(), background=True)
    while trainer.counts.processed < N_BATCHES + 2:
        time.sleep(0.01)
    return handle


def rows(trainer: Any) -> list[dict[str, Any]]:
    """The epochs, without the count that has the batches of one more validation, too."""
    return [{name: value for name, value in row.items() if name != "processed"} for row in without_times(trainer.history.epochs)]


def same_end(one: Any, other: Any) -> bool:
    return same_weights(one.model, other.model) and rows(one) == rows(other)


def test_both_ranks_pause_validate_and_save_after_the_same_batch_and_end_as_if_they_had_not(whole: Any, tmp_path: Path) -> None:
    trainer = make(StateManagerAddon, save_path=tmp_path)
    handle = begun(trainer)
    trainer.pause()
    place = trainer.counts.processed
    with pytest.raises(RunPaused, match="paused at epoch "):
        handle.wait()
    trainer.validate_now()
    trainer.save_state()
    time.sleep(0.3)
    assert trainer.counts.processed == place
    assert trainer.resume().status == "completed"
    assert same_end(whole, trainer)
    marks = [text.partition(":")[0] for _, text in trainer.history.marks]
    assert sorted(marks) == ["the state was saved", "validated"]

    saved = min((tmp_path / "run-001" / "checkpoints").glob("epoch=*"), key=lambda path: path.stat().st_mtime)
    again = make(StateManagerAddon, save_path=tmp_path / "again")
    again.run(N_EPOCH, *loaders(), resume=saved)
    assert same_end(whole, again)


def test_stopped_ranks_close_their_window_and_resume_exactly(whole: Any, tmp_path: Path) -> None:
    trainer = make(StateManagerAddon, save_path=tmp_path)
    begun(trainer)
    assert trainer.stop().status == "stopped"
    counts = trainer.counts
    assert N_BATCHES < counts.processed < N_EPOCH * N_BATCHES, counts
    again = make(StateManagerAddon, save_path=tmp_path)
    again.run(N_EPOCH, *loaders(), resume="auto")
    assert same_end(whole, again)


@pytest.mark.parametrize("ranks", [(1,), pytest.param((0, 1), marks=pytest.mark.long)])
def test_a_step_that_fails_ends_the_run_with_its_rank_and_place(ranks: tuple[int, ...]) -> None:
    trainer = make(fails_in=ranks)
    with pytest.raises(LookupError, match=r"no fourth step in rank \d") as raised:
        trainer.run(N_EPOCH, *loaders())
    notes = "\n".join(raised.value.__notes__)
    assert f"nbtrain: raised in rank {str(raised.value)[-1]}" in notes, notes
    assert trainer.result.status == "failed" and trainer.counts.processed == 3
