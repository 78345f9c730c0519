"""What holds a trainer can be pickled and copied between two runs, and the copy trains as the original does."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning_modules import Lit
from samples import DEVICE, Regress, make_loader, make_model, make_trainer, make_valid, same_weights, without_times
from saved_kinds import Pair
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torchmetrics import MeanSquaredError

from nbtrain import (
    AccumulationAddon,
    EarlyStoppingAddon,
    EMAAddon,
    FreezeAddon,
    GradientClipAddon,
    GradientStatsAddon,
    LimitsAddon,
    LoggersAddon,
    MetricsAddon,
    MicroBatchAddon,
    PrefetchAddon,
    StateManagerAddon,
    SystemMonitorAddon,
    Trainer,
)
from nbtrain.addons import HooksAddon
from nbtrain.history.run_folder import read_history


class Keeps(L.Callback):
    """Keeps what a callback is called with, as callbacks that plot or export do."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.pl_trainer, self.module, self.trainer = trainer, pl_module, pl_module.owner


def halved(optimizer: Any, plan: Any) -> StepLR:
    return StepLR(optimizer, 1, 0.5)


class Drawing(Pair):
    """Draws random numbers on the device, too."""

    def train_step_second(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.model["second"](x + torch.rand_like(x)), y)}


def with_two_optimizers(**options: Any) -> Any:
    model = nn.ModuleDict({"first": make_model(), "second": make_model(1)})
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=1e-2) for name, part in model.items()}
    return Drawing(model, optimizers=optimizers, device=DEVICE, log_bar=False, **options)


class Whole(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mse(self(batch[0]), batch[1])
        self.log_dict({"val_loss": self.loss(batch), "val_mse": self.mse}, on_epoch=True)


def of_lightning(**options: Any) -> Any:
    return Trainer.from_lightning(Whole(), device=DEVICE, log_bar=False, **options)


def in_folder(**options: Any) -> Any:
    kind = Regress.add_on(StateManagerAddon, EMAAddon, AccumulationAddon, GradientClipAddon, EarlyStoppingAddon, SystemMonitorAddon)
    return make_trainer(kind, accumulate=2, gradient_clip=1.0, scheduler=halved, keep_source=False, **options)


def with_more_addons(**options: Any) -> Any:
    addons = (FreezeAddon, GradientStatsAddon, HooksAddon, LimitsAddon, LoggersAddon, MetricsAddon, MicroBatchAddon, PrefetchAddon)
    return make_trainer(Regress.add_on(*addons), metrics={"mse": MeanSquaredError()}, loggers="csv", keep_source=False, **options)


def with_schedule(**options: Any) -> Any:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return make_trainer(model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 1, 0.5), **options)


def finds_batch_size(**options: Any) -> Any:
    options["lightning"]["callbacks"].append(BatchSizeFinder(max_trials=1))
    return make_trainer(**options)


class Lookahead(Optimizer):
    """Wraps another optimizer, and every second time goes half of the way back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner, self.every = SGD(self.param_groups, lr=0.1, momentum=0.9), 2
        self.param_groups = self.inner.param_groups
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for p, slow in zip(self.param_groups[0]["params"], self.slow):
            p.lerp_(slow, 1 / self.every)
            slow.copy_(p)
        return loss


def halve(optimizer: Optimizer, args: Any, options: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad *= 0.5


def hooked(params: Any) -> Optimizer:
    optimizer = SGD(params, lr=0.1)
    optimizer.register_step_pre_hook(halve)
    return optimizer


def several(params: Any) -> list[Optimizer]:
    first, *others = params
    return [hooked([first]), Lookahead(others)]


MAKERS: dict[str, Callable[..., Any]] = {
    "a trainer": make_trainer,
    "in a folder, with addons": in_folder,
    "on Lightning's loops": lambda **options: slow(make_trainer(**options)),
    "that pauses on errors": lambda **options: make_trainer(on_error="pause", **options),
    "with states in memory": lambda **options: make_trainer(keep_states=True, **options),
    "of a LightningModule": of_lightning,
    "with a schedule": with_schedule,
    "in a folder, with more addons": with_more_addons,
    "with a BatchSizeFinder": finds_batch_size,
    "with two optimizers": with_two_optimizers,
    "with an optimizer that has a hook": lambda **options: make_trainer(optimizer=hooked, **options),
    "with an optimizer around another": lambda **options: make_trainer(optimizer=Lookahead, **options),
    "with LBFGS": lambda **options: make_trainer(optimizer=lambda params: LBFGS(params, lr=0.1, max_iter=3), **options),
    "with several optimizers on one loss": lambda **options: make_trainer(optimizer=several, **options),
}


def slow(trainer: Any) -> Any:
    trainer.short_way = False
    return trainer


def through_torch(item: Any) -> Any:
    file = io.BytesIO()
    torch.save(item, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: list[Callable[[Any], Any]] = [lambda item: pickle.loads(pickle.dumps(item)), copy.deepcopy]


def measured(trainer: Any) -> list[dict[str, Any]]:
    names = ("ram", "gpu", "step_s")
    return [{name: value for name, value in row.items() if not name.startswith(names)} for row in without_times(trainer.history.epochs)]


def check_same(trainer: Any, made: list[Any]) -> None:
    for one in (trainer, *made):
        torch.manual_seed(0)
        one.run(1, make_loader(), make_valid())
    for one in made:
        assert isinstance(one, type(trainer).__bases__) and one is not trainer and one.control is not trainer.control
        assert same_weights(trainer.model, one.model) and measured(trainer) == measured(one)


@pytest.mark.parametrize("name", MAKERS)
def test_a_trainer_that_is_copied_before_its_first_run_trains_as_the_original(name: str, tmp_path: Path) -> None:
    trainer = MAKERS[name](lightning={"callbacks": [Keeps()]}, **({"save_path": tmp_path} if "folder" in name else {}))
    check_same(trainer, [way(trainer) for way in WAYS])


@pytest.mark.parametrize("name", MAKERS)
def test_a_callback_that_holds_its_trainer_is_copied_and_the_copy_trains_as_the_original(name: str, tmp_path: Path) -> None:
    keeps, folder = Keeps(), {"save_path": tmp_path} if "folder" in name else {}
    trainer = MAKERS[name](lightning={"callbacks": [keeps]}, **folder)
    trainer.run(2, make_loader(), make_valid())
    made = [way(keeps).trainer for way in WAYS] + [through_torch(keeps.pl_trainer).lightning_module.owner]
    check_same(trainer, made)


def test_a_copy_writes_to_its_own_folder_and_leaves_the_original_s_alone(tmp_path: Path) -> None:
    trainer = in_folder(save_path=tmp_path)
    trainer.run(2, make_loader(), make_valid())
    before = {path: path.read_bytes() for path in trainer.run_dir.rglob("*") if path.is_file()}
    made = copy.deepcopy(trainer)
    made.run(1, make_loader(), make_valid())
    assert (
        made.run_dir.name == "run-001-b1" and {path: path.read_bytes() for path in trainer.run_dir.rglob("*") if path.is_file()} == before
    )
    assert [row["epoch"] for row in read_history(made.run_dir).epochs] == [1, 2, 3]
    again = in_folder(save_path=tmp_path)
    again.run(1, make_loader(), make_valid(), resume=made.run_dir / "checkpoints" / "last.ckpt")
    assert same_weights(made.model, again.model)


def test_a_copied_lightning_trainer_fits_on_by_itself() -> None:
    keeps = Keeps()
    make_trainer(lightning={"callbacks": [keeps]}).run(1, make_loader(), make_valid())
    made = [keeps.pl_trainer, *(way(keeps.pl_trainer) for way in (*WAYS, through_torch))]
    for pl_trainer in made:
        torch.manual_seed(0)
        pl_trainer.fit_loop.max_epochs = 2
        pl_trainer.fit(pl_trainer.lightning_module, make_loader(), make_valid())
    assert all(same_weights(made[0].lightning_module, one.lightning_module) and one.current_epoch == 2 for one in made)
