"""The samples that `blame` shows, their losses and the norms of their gradients are those of a plain computation, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from samples import Regress, make_data, make_loader, make_model, make_trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, default_collate

STEP = 8


class Sum(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.model(x), y, reduction="sum")}


class OfDict(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch["inputs"]["x"]), batch["label"])}


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class OfTuple(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch.x), batch.y)}


class Classes(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        scores = torch.cat([self.model(x), -self.model(x)], 1)
        return {"loss": cross_entropy(scores, (y[:, 0] > 0).long()), "output": scores, "label": (y[:, 0] > 0).long()}


def as_dict(samples: list[Any]) -> dict[str, Any]:
    x, y = default_collate(samples)
    return {"inputs": {"x": x}, "label": y, "step": torch.tensor(3)}


def as_tuple(samples: list[Any]) -> Pair:
    return Pair(*default_collate(samples))


KINDS: dict[str, tuple[type[Regress], Callable[[list[Any]], Any]]] = {
    "mean": (Regress, default_collate),
    "sum": (Sum, default_collate),
    "dict": (OfDict, as_dict),
    "named tuple": (OfTuple, as_tuple),
    "classes": (Classes, default_collate),
}


def plainly(model: nn.Module, loss_of: Callable[[Any], Tensor], samples: list[Any]) -> list[tuple[int, float, float]]:
    """The index, the loss and the gradient's norm of each sample, the largest norm first."""
    found = []
    for i, sample in enumerate(samples):
        model.zero_grad()
        loss = loss_of(sample)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((i, float(loss.detach()), float(gradient.double().norm())))
    return sorted(found, key=lambda row: -row[2])


@pytest.mark.parametrize("name", KINDS)
def test_blamed_samples_are_those_of_a_plain_computation(name: str) -> None:
    kind, collate = KINDS[name]
    weights: dict[int, dict[str, Tensor]] = {}

    class Keeping(kind):  # the weights before each step
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.model.training:
                weights.setdefault(self.counts.step + 1, {name: value.clone() for name, value in self.model.state_dict().items()})
            return super().train_step(batch)

    trainer = make_trainer(Keeping, keep_states=True)
    trainer.run(2, DataLoader(make_data(70), 16, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(3)))
    gallery = trainer.blame(STEP, n=5)
    batch = trainer.replay(STEP).batch
    x, y = (batch["inputs"]["x"], batch["label"]) if isinstance(batch, dict) else batch
    plain = make_trainer(kind, model=make_model())
    plain.model.load_state_dict(weights[STEP])
    plain.model.eval()
    samples = [collate([(x[i], y[i])]) for i in range(16)]
    expected = plainly(plain.model, lambda sample: plain.train_step(sample)["loss"], samples)[:5]
    assert [sample.index for sample in gallery.samples] == [i for i, _, _ in expected]
    for sample, (_, loss, norm) in zip(gallery.samples, expected):
        assert (sample.loss, sample.gradient) == (loss, pytest.approx(norm, rel=1e-12))


def test_a_sample_whose_gradient_is_not_finite_comes_first() -> None:
    loader = [(x.clone(), y.clone()) for x, y in make_loader(shuffle=False)]
    loader[2][1][7] = torch.inf
    trainer = make_trainer(keep_states=True, nonfinite="ignore")
    trainer.run(1, loader)
    first, second = trainer.blame(3, n=2).samples
    assert first.index == 7 and not torch.tensor(first.gradient).isfinite() and torch.tensor(second.gradient).isfinite()
