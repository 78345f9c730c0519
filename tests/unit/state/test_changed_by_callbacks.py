"""What callbacks change in a model or an optimizer comes back: groups, frozen parts, modes; in a resume, a second run, a rewind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from resume_cases import exact
from samples import DEVICE, Regress, make_loader, make_trainer, same_weights, some, without_times
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import prune
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from nbtrain import CheckpointError, FreezeAddon, StateManagerAddon, Trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def net_of(module: Any) -> Any:
    return getattr(module.model, "net", module.model)


class Thaws(BaseFinetuning):
    """Freezes the first layers, and adds them to the optimizer in the second epoch."""

    train_bn = True

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(net_of(pl_module)[:2], train_bn=self.train_bn)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(net_of(pl_module)[:2], optimizer, train_bn=self.train_bn)


class ThawsNorms(Thaws):
    train_bn = False


class Stateless(L.Callback):
    """Does the same with one layer, and has no state."""

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        net_of(pl_module)[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        layer = net_of(pl_module)[0].requires_grad_(True) if trainer.current_epoch == 1 else None
        if layer is not None and all(p is not layer.weight for group in trainer.optimizers[0].param_groups for p in group["params"]):
            trainer.optimizers[0].add_param_group({"params": list(layer.parameters()), "lr": 1e-3})


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, 0.5)}


class FreezesItself(Lit):
    def setup(self, stage: str) -> None:
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=1e-2)


def plain(**options: Any) -> Any:
    model = make_net()
    optimizer = Adam(model[4].parameters(), lr=1e-2)
    return make_trainer(Regress.add_on(StateManagerAddon), model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 1, 0.5), **options)


def lit(kind: type[Lit] = Lit) -> Callable[..., Any]:
    return lambda **options: Trainer.add_on(StateManagerAddon).from_lightning(kind(), device=DEVICE, log_bar=False, **options)


def freezing(**options: Any) -> Any:
    freeze = {"0": 1, "1": range(1, 2)}
    return make_trainer(Regress.add_on(StateManagerAddon, FreezeAddon), model=make_net(), freeze=freeze, **options)


CASES: dict[str, tuple[Callable[..., Any], type[L.Callback] | None]] = {
    "a group is added": (plain, Thaws),
    "statistics are switched off": (plain, ThawsNorms),
    "by a callback without a state": (plain, Stateless),
    "of a LightningModule": (lit(), Thaws),
    "statistics of a LightningModule": (lit(), ThawsNorms),
    "of a LightningModule, by a callback without a state": (lit(), Stateless),
    "by the LightningModule": (lit(FreezesItself), None),
    "by the addon": (freezing, None),
}


def make(name: str, folder: Path, seed: int, *others: L.Callback) -> Any:
    build, kind = CASES[name]
    callbacks = [*([kind()] if kind is not None else []), *others]
    options = {"save_path": folder, "every_n_steps": 1, "keep_source": False, "keep_states": True}
    trainer = build(lightning={"callbacks": callbacks}, **options)
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    modules = list(trainer.model.modules())
    return {
        "weights": exact(trainer.model.state_dict()),
        "optimizer": exact([optimizer.state_dict() for optimizer in trainer.all_optimizers]),
        "trained": [parameter.requires_grad for parameter in trainer.model.parameters()],
        "modes": [(part.training, getattr(part, "track_running_stats", None)) for part in modules],
        "epochs": repr(without_times(trainer.history.epochs)),
    }


def differing(trainer: Any, expected: dict[str, Any]) -> list[str]:
    found = outcome(trainer)
    return [part for part in expected if found[part] != expected[part]]


@pytest.mark.parametrize("name", some(CASES, 3, first=1))
def test_what_was_changed_comes_back_in_a_resume_a_second_run_and_a_rewind(name: str, tmp_path: Path) -> None:
    whole = make(name, tmp_path / "whole", 1)
    whole.run(3, make_loader())
    expected = outcome(whole)
    saves = [path for path in (whole.run_dir / "checkpoints").glob("epoch=*-step=*") if not path.is_symlink()]
    saves.sort(key=lambda path: int(path.stem.rpartition("=")[2]))
    for n in (3, 5, 8):  # frozen, at the end of that epoch, and trained
        again = make(name, tmp_path / "again", 2)
        again.run(3, make_loader(), resume=saves[n - 1])
        assert differing(again, expected) == [], n
    whole.rewind(step=7)
    whole.run(3 - whole.counts.epoch, make_loader())
    assert differing(whole, expected) == []
    whole.rewind(epoch=1)
    whole.run(2, make_loader())
    assert differing(whole, expected) == []
    twice = make(name, tmp_path / "twice", 1)
    twice.run(2, make_loader())
    twice.run(1, make_loader())
    assert differing(twice, expected) == []


# -- parameters that change
class Prunes(L.Callback):
    """Prunes the first layer after the first epoch."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            prune.l1_unstructured(net_of(module)[0], "weight", 0.5)


class Splats(nn.Module):
    """Points whose number grows in the run, and whose hook makes them as many as a state has."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.ones(4))
        self.register_load_state_dict_pre_hook(self.resize)

    @staticmethod
    def resize(module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
        module.points = nn.Parameter(torch.zeros_like(state[f"{prefix}points"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True) * self.points.sum()


class Grows(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == 0:
            model, (optimizer,) = net_of(module), trainer.optimizers
            model.points = nn.Parameter(torch.ones(6))
            optimizer.param_groups[0]["params"] = [model.points]
            optimizer.state.clear()


def changing(folder: Path, model: nn.Module, change: L.Callback | None, *, is_pruned: bool = False) -> Any:
    optimizer = Adam(model.parameters(), lr=1e-3)
    if is_pruned:
        prune.identity(model[0], "weight")
    callbacks = [change] if change is not None else []
    kind = Regress.add_on(StateManagerAddon)
    return make_trainer(kind, model=model, optimizer=optimizer, save_path=folder, seed=1, lightning={"callbacks": callbacks})


@pytest.mark.parametrize("change", [Prunes, Grows])
def test_a_model_whose_parameters_changed_resumes_where_its_own_code_rebuilds_it(change: type[L.Callback], tmp_path: Path) -> None:
    is_pruned = change is Prunes
    make_model = make_net if is_pruned else Splats
    whole = changing(tmp_path / "whole", make_model(), change())
    whole.run(3, make_loader())
    changing(tmp_path / "resumed", make_model(), change()).run(2, make_loader(), resume="auto")
    if is_pruned:
        with pytest.raises(
            CheckpointError, match=r"0.weight had been pruned. Make the model, then its optimizer, then prune.identity\(model"
        ):
            changing(tmp_path / "resumed", make_model(), None).run(3, make_loader(), resume="auto")
    trainer = changing(tmp_path / "resumed", make_model(), None, is_pruned=is_pruned)
    trainer.run(3, make_loader(), resume="auto")
    assert same_weights(trainer.model, whole.model)
