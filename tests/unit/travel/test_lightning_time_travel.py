"""A LightningModule in `from_lightning` is rewound, replayed and branched; a learning rate set by hand scales its schedules."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from samples import make_loader, make_valid, same_content
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from nbtrain import Trainer
from nbtrain.errors import ConfigError

SCHEDULES: dict[str, Callable[[Any], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda i: 1 - i / 20),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.02, 20),
    "warm-up": lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1, 5), CosineAnnealingLR(optimizer, 15)], [5]),
}


class Lit(L.LightningModule):
    """Dropout, BatchNorm, a schedule by step, and a list of what each step used. `act` is called before each step."""

    def __init__(self, schedule: str = "cosine", act: Callable[[int, float], None] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.schedule, self.act = schedule, act
        self.rates: list[float] = []
        self.inputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))
        self.inputs.append(x)
        if self.act is not None:
            self.act(len(self.rates), self.rates[-1])
        loss = mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": SCHEDULES[self.schedule](optimizer), "interval": "step"}}


class TwoOptimizers(Lit):
    """Optimizes by hand, each half of the net with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
            optimizer.zero_grad()
            self.manual_backward(mse_loss(self.net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        halves = self.net[0].parameters(), self.net[4].parameters()
        return [torch.optim.Adam(half, lr=1e-2) for half in halves]


def make(module: type[Lit] = Lit, *args: Any) -> Any:
    torch.manual_seed(0)
    return Trainer.from_lightning(module(*args), device="cpu", log_bar=False, keep_states=True)


def weights(trainer: Any) -> list[Tensor]:
    return [value.clone() for value in trainer.model.state_dict().values()]


def has_trained(module: type[Lit] = Lit) -> tuple[Any, list[Tensor]]:
    """A trainer after 4 epochs of 5 batches, and its weights."""
    trainer = make(module)
    trainer.run(4, make_loader(), make_valid())
    return trainer, weights(trainer)


@pytest.mark.parametrize("module", [Lit, TwoOptimizers])
@pytest.mark.parametrize("place", [{"epoch": 2}, {"step": 18}, {"epoch": 0}])
def test_run_after_a_rewind_gives_the_same_weights(module: type[Lit], place: dict[str, int]) -> None:
    trainer, end = has_trained(module)
    trainer.rewind(**place)
    assert not same_content(weights(trainer), end)
    trainer.run(4 - trainer.counts.epoch, make_loader(), make_valid())
    assert same_content(weights(trainer), end) and trainer.history.epochs[-1]["epoch"] == 4


def test_branch_shares_the_past_and_leaves_the_trainer_as_it_is() -> None:
    trainer, end = has_trained()
    branch = trainer.branch(epoch=2)
    branch.run(2, make_loader(), make_valid())
    assert same_content(weights(branch), end) and same_content(weights(trainer), end)
    other = trainer.branch(epoch=2, lr=1e-4)
    other.run(2, make_loader(), make_valid())
    assert not same_content(weights(other), end)


def test_replay_repeats_the_step_of_the_module() -> None:
    trainer, end = has_trained()
    replay = trainer.replay(step=12)  # each epoch has 5 batches
    assert replay.place == "epoch 3, batch 2" and torch.equal(replay.batch[0], trainer.model.inputs[11])
    table = trainer.history.steps["train"]
    losses = dict(zip(table.steps, table.columns["train_loss"]))
    assert replay.loss == pytest.approx(losses[12]) and set(replay.gradients) == {"net.0", "net.1", "net.4"}
    assert "finite" in str(replay.debug()) and same_content(weights(trainer), end)


def test_blame_ranks_the_samples_of_a_step_of_the_module() -> None:
    trainer, _ = has_trained()
    worst, (x, y) = trainer.blame(step=18, n=3), trainer.replay(step=18).batch
    trainer.rewind(step=17)
    model = trainer.model.eval()
    norms = []
    for i in range(len(x)):
        loss = mse_loss(model.net(x[i : i + 1]), y[i : i + 1])
        norms.append(float(torch.stack([p.norm() for p in torch.autograd.grad(loss, list(model.parameters()))]).norm()))
    order = sorted(range(len(x)), key=lambda i: -norms[i])
    assert [sample.index for sample in worst.samples] == order[:3]
    assert [sample.gradient for sample in worst.samples] == pytest.approx([norms[i] for i in order[:3]], rel=1e-4)


def test_blame_of_a_module_that_optimizes_by_hand_is_refused() -> None:
    trainer, _ = has_trained(TwoOptimizers)
    with pytest.raises(ConfigError, match="TwoOptimizers optimizes by hand, .*\n  Use replay"):
        trainer.blame(step=18)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rate_that_is_set_by_hand_scales_the_schedules_of_the_module(schedule: str) -> None:
    plain = make(Lit, schedule)
    plain.run(4, make_loader())
    expected = list(plain.model.rates)
    live = make(Lit, schedule, lambda n, lr: live.set(lr=lr / 2) if n == 7 else None)
    live.run(4, make_loader())
    assert live.model.rates == pytest.approx(expected[:7] + [rate / 2 for rate in expected[7:]])
    plain.rewind(epoch=2)
    plain.set(lr=expected[10] / 2)
    plain.run(2, make_loader())
    assert plain.model.rates[-10:] == pytest.approx([rate / 2 for rate in expected[10:]])


def test_a_schedule_of_the_first_run_that_rises_again_in_the_second_is_noted() -> None:
    trainer, notes = make(), list[str]()
    trainer.recorder.add(SimpleNamespace(update=lambda event: notes.append(event.data["text"]) if event.kind == "note" else None))
    trainer.run(4, make_loader())  # 20 steps
    assert not [text for text in notes if "T_max" in text]
    trainer.run(1, make_loader())
    assert [text for text in notes if "T_max" in text] == [
        "CosineAnnealingLR has T_max=20, and this run goes to step 25: its learning rate rises again. "
        "configure_optimizers is called in the first run only: give its schedule the length of all runs."
    ]
