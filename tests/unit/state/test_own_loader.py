"""An addon with its own `loader` beside StateManagerAddon: the order needs no declaration, and what is saved is resumed in mid-epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Regress, make_data, make_loader, make_trainer, same_weights
from torch.utils.data import DataLoader, WeightedRandomSampler

from nbtrain import AddOnBase, CheckpointError, StateManagerAddon, Trainer


class ByLoss(AddOnBase):
    """Draws samples in proportion to weights that change while it trains."""

    def __post_init__(self) -> None:
        self.chances = torch.ones(70)

    def wrap_step(self, trainer: Any, step: Any) -> Any:
        def wrapped(batch: Any) -> Any:
            output = step(batch)
            self.chances[: len(batch[0])] += output["loss"].item()
            return output

        return wrapped

    def loader(self, trainer: Any, loader: Any, *, training: bool) -> Any:
        return Weighted(self, loader) if training else loader


class Weighted:
    def __init__(self, addon: ByLoss, loader: Any) -> None:
        self.addon, self.of_user = addon, loader

    def __len__(self) -> int:
        return len(self.of_user)

    def __iter__(self) -> Any:
        sampler = WeightedRandomSampler(self.addon.chances.tolist(), 70)
        yield from DataLoader(self.of_user.dataset, self.of_user.batch_size, sampler=sampler)


class Interrupted(Regress):
    """Fails in the eighth batch, which is in the second epoch."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.processed == 7:
            raise ConnectionError("the line is cut")
        return super().train_step(batch)


def trained(kind: type[Trainer], **options: Any) -> Any:
    trainer = make_trainer(kind, seed=3, **options)
    trainer.run(3, make_loader(), resume="auto" if options else None)
    return trainer


@pytest.mark.parametrize("addons", [(ByLoss, StateManagerAddon), (StateManagerAddon, ByLoss)], ids=["before", "after"])
def test_an_addon_with_its_own_loader_is_resumed_in_mid_epoch(addons: tuple[Any, ...], tmp_path: Path) -> None:
    assert Regress.add_on(*addons).addons == (ByLoss, StateManagerAddon)
    whole = trained(Regress.add_on(ByLoss))
    with pytest.raises(ConnectionError):
        trained(Interrupted.add_on(*addons), save_path=tmp_path, every_n_steps=2)
    again = trained(Regress.add_on(*addons), save_path=tmp_path, every_n_steps=2)
    assert same_weights(again.model, whole.model) and torch.equal(again[ByLoss].chances, whole[ByLoss].chances)


def test_another_loader_of_the_user_is_still_refused_in_mid_epoch(tmp_path: Path) -> None:
    kind = Regress.add_on(ByLoss, StateManagerAddon)
    with pytest.raises(ConnectionError):
        trained(Interrupted.add_on(ByLoss, StateManagerAddon), save_path=tmp_path, every_n_steps=2)
    with pytest.raises(CheckpointError, match="another loader: batches was 5 and is 7, batch_size was 16 and is 10"):
        make_trainer(kind, save_path=tmp_path).run(3, DataLoader(make_data(), 10, shuffle=True), resume="auto")
