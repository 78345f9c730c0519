"""A LightningModule trains under nbtrain as under Lightning's own Trainer, bit for bit."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning_modules import Lit, by_lightning, by_nbtrain, difference, drawn, noting
from samples import make_loader, make_valid, same_weights
from torch.utils.data import IterableDataset


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("seed", range(24))
def test_a_random_module_trains_as_under_lightning(seed: int) -> None:
    make, options = drawn(seed)
    assert difference(make, **options) == "", f"seed {seed}"


class Validates(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def test_hooks_come_in_the_order_of_lightning() -> None:
    assert difference(noting(Validates)) == ""


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize("option", [{"val_check_interval": 2}, {"max_steps": 7}, {"overfit_batches": 2}, {"limit_train_batches": 3}])
def test_options_of_lightnings_trainer_do_what_they_do_there(option: dict[str, Any]) -> None:
    assert difference(noting(Validates), **option) == ""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from make_loader(own_generator=True)


def test_a_stream_without_length_trains_as_under_lightning() -> None:
    assert difference(noting(Validates), loader=lambda: torch.utils.data.DataLoader(Stream(), None)) == ""


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
def test_a_step_that_takes_the_iterator_trains_as_under_lightning() -> None:
    class Iterates(Lit):
        def training_step(self, dataloader_iter: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            batch, _, _ = next(dataloader_iter)
            return self.loss([part.to(self.device) for part in batch])

    assert difference(noting(Iterates), valid=lambda: None) == ""


def test_a_module_with_loaders_of_its_own_is_given_as_the_loader() -> None:
    class Loads(Validates):
        def train_dataloader(self) -> Any:
            return make_loader()

        def val_dataloader(self) -> Any:
            return make_valid()

    plain, ours = by_lightning(Loads(), 2), Loads()
    trainer = by_nbtrain(ours, 2, ours)
    assert trainer.history.epochs[-1]["val_loss"] > 0
    assert same_weights(plain, ours)
    assert "train_dataloader" not in vars(ours) and "log" not in vars(ours)


def test_a_callback_gets_what_is_an_instance_of_the_users_module() -> None:
    class Tells(L.Callback):
        def on_train_batch_end(self, pl_trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert isinstance(pl_module, Validates) and isinstance(pl_module, L.LightningModule) and not isinstance(pl_module, L.Trainer)
            assert (
                pl_module.net is module.net
                and pl_module.hparams.lr == module.hparams.lr
                and pl_module.trainer is module.trainer is pl_trainer
            )
            pl_module.share = batch_idx  # for the steps, as under Lightning

    class Validates(Lit):
        share = -1

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            shares.append(self.share)

    shares: list[int] = []
    module = Validates()
    by_nbtrain(module, 1, make_loader(), make_valid(), callbacks=[Tells()], num_sanity_val_steps=0)
    assert shares == [4, 4, 4]
