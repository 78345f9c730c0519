"""States of a fine-tuning hold what trains, and the frozen base by its name and checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import DEVICE, Breaks, Broken, Regress, make_data, make_loader, make_trainer, make_valid, same_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nbtrain import CheckpointError, StateManagerAddon
from nbtrain.addons.early_stopping import EarlyStoppingAddon
from nbtrain.addons.ema import EMAAddon
from nbtrain.addons.freeze import FreezeAddon
from nbtrain.checkpoint.files import read_checkpoint
from nbtrain.checkpoint.frozen_base import FrozenBase, checksum


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it, as LoRA has them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


WIDTH = 256


def make_model(base_seed: int = 0) -> nn.Module:
    torch.manual_seed(base_seed)  # the pretrained weights
    layers = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
    torch.manual_seed(5)  # the adapters, which a new process makes anew
    return nn.Sequential(Adapted(layers[0]), nn.BatchNorm1d(WIDTH), nn.ReLU(), Adapted(layers[1]), nn.Dropout(0.1), nn.Linear(WIDTH, 1))


ADAPTERS = ["0.down.weight", "0.up.weight", "3.down.weight", "3.up.weight"]
OTHERS = ["1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked", "5.weight", "5.bias"]
BASE = ["0.base.bias", "0.base.weight", "3.base.bias", "3.base.weight"]


def make(folder: Path, *addons: Any, seed: int = 1, base_seed: int = 0, n: int = 0, **options: Any) -> Any:
    lightning = {"callbacks": [Breaks(n)]} if n else {}
    options = {"save_weights": "trainable", "every_n_steps": 1, "keep_source": False} | options
    kind = Regress.add_on(StateManagerAddon, *addons)
    trainer = make_trainer(kind, model=make_model(base_seed), save_path=folder, lightning=lightning, **options)
    torch.manual_seed(seed)
    return trainer


def checkpoints(trainer: Any) -> Path:
    return trainer.run_dir / "checkpoints"


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_a_state_holds_what_trains_and_the_base_by_name_and_checksum(save_format: str, tmp_path: Path) -> None:
    sizes = {}
    for which in ("all", "trainable"):
        trainer = make(tmp_path / which, save_format=save_format, save_weights=which)
        trainer.run(1, make_loader(), make_valid())
        path = (checkpoints(trainer) / ("last.ckpt" if save_format == "ckpt" else "last")).resolve()
        sizes[which] = size(path)
    state = read_checkpoint(path)
    assert sorted(state["state_dict"]) == sorted(f"model.{name}" for name in ADAPTERS + OTHERS)
    base = state["nbtrain"]["base"]
    assert (base["name"], sorted(base["checksums"])) == ("Sequential", BASE)
    assert tuple(base["checksums"]["0.base.bias"]) == checksum(make_model().get_parameter("0.base.bias"))
    base_bytes = 4 * (8 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH)
    assert sizes["all"] - sizes["trainable"] > 0.95 * base_bytes


@pytest.mark.parametrize("addons", [(), (EMAAddon,)])
@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_resumed_run_matches_an_unbroken_one(save_format: str, addons: tuple[Any, ...], tmp_path: Path) -> None:
    whole = make(tmp_path / "whole", *addons, save_format=save_format)
    whole.run(3, make_loader(), make_valid())
    with pytest.raises(Broken):
        make(tmp_path / "broken", *addons, n=8, save_format=save_format).run(3, make_loader(), make_valid(), resume="auto")
    again = make(tmp_path / "broken", *addons, seed=9, save_format=save_format)
    again.run(3, make_loader(), make_valid(), resume="auto")
    assert same_weights(whole.model, again.model)
    assert same_weights(whole.best_weights, again.best_weights)


def test_a_finished_run_gives_its_best_weights_to_a_new_trainer(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.run(2, make_loader(), make_valid())
    again = make(tmp_path, seed=9)
    again.run(2, make_loader(), make_valid(), resume="auto")
    assert sorted(again.best_weights) == sorted(ADAPTERS + OTHERS + BASE)
    again.apply_weights()
    trainer.apply_weights()
    assert same_weights(trainer.model, again.model)


def test_another_base_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    make(tmp_path).run(1, make_loader())
    other = make(tmp_path, base_seed=7)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        other.run(2, make_loader(), resume="auto")
    text = "was trained on the frozen weights of Sequential, but the model has different ones: 0.base.weight, 0.base.bias, 3.base.weight"
    assert text in str(caught.value) and "Create the model with the pretrained weights of Sequential" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_weights_of_a_state_are_applied_and_exported(save_format: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, save_format=save_format)
    trainer.run(1, make_loader())
    path = (checkpoints(trainer) / ("last.ckpt" if save_format == "ckpt" else "last")).resolve()
    other = make(tmp_path / "other", seed=9)
    other.apply_weights(path)
    assert same_weights(trainer.model, other.model)
    other.save_model(tmp_path / "whole.safetensors")
    third = make(tmp_path / "third", save_weights="all")
    third.apply_weights(tmp_path / "whole.safetensors")
    assert same_weights(trainer.model, third.model)
    loaded = Regress.load_from_checkpoint(path, model=make_model(), device=DEVICE, log_bar=False)
    assert same_weights(trainer.model, loaded.model)


def test_weights_that_were_trained_and_are_frozen_later_are_saved(tmp_path: Path) -> None:
    freezes = {"freeze": {"0.down": range(1, 3)}}
    trainer = make(tmp_path, FreezeAddon, **freezes)
    trainer.run(2, make_loader())
    names = read_checkpoint((checkpoints(trainer) / "last.ckpt").resolve())["state_dict"]
    assert "model.0.down.weight" in names and "model.0.base.weight" not in names
    again = make(tmp_path, FreezeAddon, seed=9, **freezes)
    again.run(3, make_loader(), resume="auto")
    saved = read_checkpoint((checkpoints(again) / "last.ckpt").resolve())["state_dict"]
    assert "model.0.down.weight" in saved and "model.0.base.weight" not in saved


def test_what_was_frozen_first_and_then_changed_is_no_base() -> None:
    model, base = make_model(), FrozenBase()
    base.begin(model)
    assert sorted(base.unchanged(model)) == BASE
    with torch.no_grad():
        model.get_parameter("0.base.bias").add_(1)
        model.get_parameter("3.base.bias").add_(0)
    assert sorted(base.unchanged(model)) == [name for name in BASE if name != "0.base.bias"]


def test_after_a_state_with_all_weights_all_are_saved(tmp_path: Path) -> None:
    make(tmp_path, save_weights="all").run(1, make_loader())
    again = make(tmp_path, seed=9)
    again.run(2, make_loader(), resume="auto")
    assert len(read_checkpoint((checkpoints(again) / "last.ckpt").resolve())["state_dict"]) == len(ADAPTERS + OTHERS + BASE)


def test_a_run_that_is_stopped_early_restores_its_best_weights_from_such_states(tmp_path: Path) -> None:
    trainer = make(tmp_path, EarlyStoppingAddon, patience=1, restore_best=True, every_n_steps=None, save_best=False)
    trainer.run(3, DataLoader(make_data(), 16), make_valid())
    again = make(tmp_path, EarlyStoppingAddon, seed=9, patience=1, restore_best=True, every_n_steps=None, save_best=False)
    again.run(3, DataLoader(make_data(), 16), make_valid(), resume="auto")
    assert same_weights(trainer.model, again.model)
    assert sorted(again.best_weights) == sorted(ADAPTERS + OTHERS + BASE)
