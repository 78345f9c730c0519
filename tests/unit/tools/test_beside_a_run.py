"""A prediction or an evaluation between two batches of a run, which goes on as one without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from samples import Regress, make_data, make_loader, make_trainer, make_valid, same_weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from nbtrain import ConfigError, Trainer


class Logs(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.log("of_module", 1.0)
        getattr(self, "log")("of_callback", 1.0)  # noqa: B009  # Lightning sets it


class Thaws(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model[0], optimizer)


class Looks(Regress):
    """Evaluates and predicts in a batch of epoch 3, if it is asked to."""

    looks = True
    seen: Any = None

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.looks and self.seen is None and self.counts.step == 12:
            self.seen = ()  # `test_step` calls this, too
            self.seen = self.evaluate(make_valid()), self.inference(make_valid())
        return super().train_step(batch)


@pytest.mark.parametrize("callback", [Logs, Thaws, lambda: StochasticWeightAveraging(0.05, 1)], ids=["logs", "thaws", "averages"])
def test_callbacks_of_the_run_take_no_part_in_what_is_beside_it(callback: Any) -> None:
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
        trainer = make_trainer(Looks, model=model, optimizer=optimizer, lightning={"callbacks": [callback()]})
        trainer.looks = looks
        trainer.run(4, make_loader(own_generator=True))
        assert (bool(trainer.seen)) == looks
        found.append(trainer)
    assert same_weights(found[0].model, found[1].model)
    assert found[0].history.epochs[-1].metrics == found[1].history.epochs[-1].metrics


class Lit(L.LightningModule):
    owner: Any = None  # the trainer, where a batch predicts

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse_loss(self(batch[0]), batch[1])
        self.log("own", loss)
        if Lit.owner is not None and batch_idx == 2:
            Lit.owner.predict(batch[0])
        assert self.optimizers() is not None and self.trainer.training
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def test_a_lightning_module_goes_on_logging_after_a_prediction_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for predicts in (False, True):
        torch.manual_seed(0)
        trainer = Trainer.from_lightning(Lit(), "cpu", log_bar=False)
        monkeypatch.setattr(Lit, "owner", trainer if predicts else None)
        trainer.run(1, make_loader(own_generator=True))
        rows.append(trainer.history.epochs[-1].metrics)
    assert rows[0] == rows[1] and "own" in rows[0]


def test_a_data_module_is_not_set_up_beside_a_run() -> None:
    class Module(L.LightningDataModule):
        def predict_dataloader(self) -> Any:
            return make_valid()

    class Predicts(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            with pytest.raises(ConfigError, match="A data module can't be set up while a run is on"):
                self.inference(Module())
            return super().train_step(batch)

    assert make_trainer(Predicts).run(1, make_loader()).status == "completed"


@dataclass
class Points(Dataset[Any]):
    n: int = 20

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return make_data(self.n)[i]


def test_a_dataset_that_is_a_dataclass_is_a_dataset() -> None:
    trainer = make_trainer()
    assert torch.equal(trainer.predict(Points()), trainer.predict(make_data(20)))


def test_a_lightning_module_is_nothing_to_predict_for() -> None:
    with pytest.raises(ConfigError, match="x must be a tensor, an array, a batch, a loader or a dataset, got a Lit"):
        make_trainer().predict(Lit())
