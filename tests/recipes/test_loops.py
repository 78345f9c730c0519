"""Training in a loop of one's own, whose rounds make the data: a session makes one run of them, and each round calls `run`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from side_by_side import batches, equal
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import Adam
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer


class Regress(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.model(x), y)}


def train(model: Any, optimizer: Any, loader: Any, n_epoch: int, scheduler: Any = None) -> None:
    for _ in range(n_epoch):
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


def pool() -> tuple[Tensor, Tensor]:
    x, y = (torch.cat(parts) for parts in zip(*batches(8)))
    return x, y


def test_active_learning() -> None:
    """Each round labels ten samples of which the model is worst, and trains on all that have a label."""
    x, y = pool()

    def label(model: Any, chosen: list[int]) -> DataLoader[Any]:
        with torch.no_grad():
            errors = (model(x) - y).abs().squeeze(1)
        errors[chosen] = -1
        chosen += errors.topk(10).indices.tolist()
        return DataLoader(TensorDataset(x[chosen], y[chosen]), 5, shuffle=True)

    def ours(model: Any) -> None:
        trainer = Regress(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False)
        with trainer.session(3, state={"chosen": []}) as session:
            for _ in session:
                trainer.run(2, label(model, session.state["chosen"]))

    def plain(model: Any) -> None:
        optimizer, chosen = Adam(model.parameters(), lr=1e-2), list[int]()
        for _ in range(3):
            train(model, optimizer, label(model, chosen), 2)

    equal(ours, plain)


def test_growing_batch_size() -> None:
    """The batches double from round to round, and one schedule goes over all updates."""
    x, y = pool()

    def make(size: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(x, y), size, shuffle=True)

    def decay(optimizer: Any, total_steps: int) -> LinearLR:
        return LinearLR(optimizer, 1.0, 0.1, total_steps)

    def ours(model: Any) -> None:
        schedule = lambda optimizer, plan: decay(optimizer, plan.total_steps)  # noqa: E731
        trainer = Regress(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), scheduler=schedule, log_bar=False)
        with trainer.session([10, 20, 40], 2, steps=28) as session:
            for size in session:
                trainer.run(2, make(size))

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        scheduler = decay(optimizer, 28)
        for size in (10, 20, 40):
            train(model, optimizer, make(size), 2, scheduler)

    equal(ours, plain)


@pytest.mark.long
def test_pseudo_labels() -> None:
    """The model labels new samples at the start of each round, and is trained on these and on the true ones."""
    x, y = pool()

    def mix(model: Any) -> DataLoader[Any]:
        new = torch.randn(40, 8)
        with torch.no_grad():
            return DataLoader(TensorDataset(torch.cat([x, new]), torch.cat([y, model(new)])), 20, shuffle=True)

    def ours(model: Any) -> None:
        trainer = Regress(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False)
        with trainer.session(3) as session:
            for _ in session:
                trainer.run(1, mix(model))

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            train(model, optimizer, mix(model), 1)

    equal(ours, plain)
