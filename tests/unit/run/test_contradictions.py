"""Settings that contradict each other are said before the first step; for each entry of the table, one that is said and one that is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from samples import DEVICE, Regress, make_loader, make_trainer, make_valid
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from nbtrain import ConfigError, TensorLoader
from nbtrain.run.contradictions import CONTRADICTIONS


class Scored(Regress):
    """Returns a value for each batch under a name."""

    score = "f1"

    def test_step(self, batch: Any) -> dict[str, Any]:
        output = super().test_step(batch)
        return output | {self.score: output["mae"]}


class Own(Regress):
    """Sets an attribute that a test names."""

    def __init__(self, model: nn.Module, name: str, value: Any, **options: Any) -> None:
        super().__init__(model, **options)
        setattr(self, name, value)


def plateau(mode: str, *, factory: bool = False, **options: Any) -> Any:
    trainer = make_trainer(**options)

    def made(optimizer: Any, plan: Any) -> Any:
        return ReduceLROnPlateau(optimizer, mode)

    scheduler = made if factory else made(trainer.optimizer, None)
    return make_trainer(optimizer=trainer.optimizer, model=trainer.model, scheduler=scheduler, **options)


def with_norm(norm: type[nn.Module] = nn.BatchNorm1d) -> Any:
    return make_trainer(model=nn.Sequential(nn.Linear(8, 4), norm(4), nn.Linear(4, 1)))


def own(name: str, value: Any) -> Any:
    return Own(nn.Linear(8, 1), name, value, device=DEVICE, log_bar=False, optimizer=lambda p: torch.optim.SGD(p, 0.1))


def scored(name: str) -> Any:
    return make_trainer(type("Scored", (Scored,), {"score": name}))


UP: dict[str, Any] = {"monitor": "val_mae", "monitor_mode": "max"}
SAID: dict[str, list[tuple[Callable[[], Any], int, str]]] = {  # by entry: a trainer, the number of samples, what is said
    "plateau": [
        (lambda: plateau("min", **UP), 20, "while val_mae, where higher is better, improves."),
        (lambda: plateau("min", factory=True, **UP), 20, "(mode='min') reduces the rate while val_mae"),
        (lambda: plateau("max"), 20, "ReduceLROnPlateau(mode='max') reduces the rate while val_loss, where lower is better, improves."),
    ],
    "last batch": [(with_norm, 17, "The last batch of each epoch has one sample, and with one BatchNorm1d can't train")],
    "not averaged": [
        (partial(scored, name), 20, f"val_{name} is the mean of a value for each batch, which is not the value of all samples")
        for name in ("f1", "auroc", "macro_f1_score", "rmse")
    ],
    "own names": [
        (lambda: own("monitor", {}), 20, "self.monitor must be a string, got a dict."),
        (lambda: own("seed", torch.zeros(2)), 20, "self.seed must be an integer or None, got a Tensor."),
        (lambda: own("evaluate", []), 20, "self.evaluate must be the trainer's method, got a list."),
    ],
}  # fmt: skip
QUIET: dict[str, list[tuple[Callable[[], Any], int]]] = {
    "plateau": [(lambda: plateau("max", **UP), 20), (lambda: plateau("min"), 20), (lambda: plateau("min", factory=True), 20)],
    "last batch": [(with_norm, 18), (lambda: with_norm(nn.LayerNorm), 17)],
    "not averaged": [(lambda: scored("accuracy"), 20), (lambda: scored("half1"), 20)],
    "own names": [(lambda: own("seed", 3), 20), (lambda: own("mine", {}), 20), (lambda: own("keep", lambda batch: None), 20)],
}


def said(trainer: Any, loader: Any) -> str:
    notes: list[str] = []
    note = trainer.recorder.note
    trainer.recorder.note = lambda text: (notes.append(text), note(text))[1]
    try:
        trainer.run(1, loader, make_valid())
    except ConfigError as error:
        return str(error)
    except ValueError:  # of BatchNorm, as said
        pass
    return "\n".join(notes)


def test_each_entry_of_the_table_has_its_tests() -> None:
    assert {name.replace("_", " ") for name in CONTRADICTIONS} == SAID.keys() == QUIET.keys()


@pytest.mark.parametrize(("make", "n", "text"), [case for cases in SAID.values() for case in cases])
def test_a_contradiction_is_said_before_the_first_step(make: Callable[[], Any], n: int, text: str) -> None:
    trainer = make()
    trainer.train_step = lambda batch, step=trainer.train_step: step(batch)
    assert text in said(trainer, make_loader(n))


@pytest.mark.parametrize(("make", "n"), [case for cases in QUIET.values() for case in cases])
def test_settings_that_go_together_are_not_told(make: Callable[[], Any], n: int) -> None:
    assert said(make(), make_loader(n)) == ""


def test_the_error_of_a_batch_of_one_names_drop_last() -> None:
    for loader in (
        make_loader(17),
        TensorLoader(*make_loader(17).dataset.tensors, batch_size=16),
        [next(iter(DataLoader(make_loader().dataset, 1)))],
    ):
        with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
            with_norm().run(1, loader)
        assert any("drop_last=True" in note for note in caught.value.__notes__)
    assert said(with_norm(), make_loader(17, drop_last=True)) == ""


def test_a_metric_object_of_the_trainer_can_not_be_logged_and_the_line_that_works_is_named() -> None:
    class Logs(Regress):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.error = torchmetrics.MeanSquaredError()

        def train_step(self, batch: Any) -> dict[str, Any]:
            output = super().train_step(batch)
            self.error.update(output["output"], output["label"])
            self.log("error", self.error, on_epoch=True)
            return output

    with pytest.raises(
        ConfigError, match="log.'error', .... got a MeanSquaredError, which resets itself only in a LightningModule"
    ) as caught:
        make_trainer(Logs).run(1, make_loader(20))
    assert 'metrics={"error": MeanSquaredError()}' in str(caught.value)
