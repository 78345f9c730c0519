"""One namespace of weights: the names of the bare model, in every file and in every way to read one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from samples import Regress, make_loader, make_trainer, make_valid, some
from torch import nn

from nbtrain import EarlyStoppingAddon, EMAAddon, StateManagerAddon
from nbtrain.checkpoint.weights import load_weights, read_weights
from nbtrain.jobs.build import Job


class Causal(nn.Module):
    """Parts named as in transformers' causal models."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.lm_head = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.lm_head(self.model(x))


class Only(nn.Module):
    """All of it is a part named `model`, and one in that too."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"model": nn.Linear(8, 1)})

    def forward(self, x: Any) -> Any:
        return self.model["model"](x)


def compiled_part() -> nn.Module:
    model: Any = Causal()
    model.model = torch.compile(model.model, backend="eager")
    return model


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: nn.Linear(8, 1),
    "causal": Causal,
    "only": Only,
    "compiled": lambda: torch.compile(Causal(), backend="eager"),
    "a compiled part": compiled_part,
}
BARE = {"plain": "plain", "causal": "causal", "only": "only", "compiled": "causal", "a compiled part": "causal"}


def make(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return KINDS[kind]()


def trained(kind: str, folder: Path, **options: Any) -> Any:
    addons = [StateManagerAddon] + [EMAAddon] * options.pop("ema", False)
    trainer = make_trainer(Regress.add_on(*addons), model=make(kind, 0), save_path=folder, **options)
    trainer.run(1, make_loader(64), make_valid())
    return trainer


def bare(model: nn.Module) -> dict[str, Any]:
    return {name.replace("_orig_mod.", ""): value.tolist() for name, value in model.state_dict().items()}


def by_lightning(trainer: Any, folder: Path) -> Path:
    """What Lightning's own trainer saves of these steps."""
    options: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 0, "logger": False, "enable_progress_bar": False}
    module = trainer.as_lightning_module()
    own = L.Trainer(**options, enable_checkpointing=False)
    own.fit(module, make_loader(64))
    own.save_checkpoint(folder / "own.ckpt")
    return folder / "own.ckpt"


FILES: dict[str, Callable[[Any, Path], Path]] = {
    "a checkpoint": lambda trainer, folder: trainer.run_dir / "checkpoints" / "last.ckpt",
    "the best checkpoint": lambda trainer, folder: trainer.run_dir / "checkpoints" / "best.ckpt",
    "a torch file": lambda trainer, folder: trainer.save_model(folder / "weights.pt"),
    "safetensors": lambda trainer, folder: trainer.save_model(folder / "weights.safetensors"),
    "a state that was saved by hand": lambda trainer, folder: trainer.save_state(),
    "Lightning's": by_lightning,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", [*FILES, "a folder"])
@pytest.mark.parametrize("kind", some(KINDS, 2))
def test_each_file_is_read_by_the_names_of_the_bare_model(kind: str, file: str, tmp_path: Path) -> None:
    trainer = trained(kind, tmp_path / "runs", save_format="safetensor" if file == "a folder" else "ckpt")
    path = trainer.run_dir / "checkpoints" / "last" if file == "a folder" else FILES[file](trainer, tmp_path)
    expected = bare(trainer.model)
    assert {name: value.tolist() for name, value in read_weights(path).items()} == expected
    for other in {BARE[kind], kind, "compiled" if BARE[kind] == "causal" else kind}:
        again = make_trainer(model=make(other, 1))
        assert bare(again.model) != expected
        again.apply_weights(path)
        assert bare(again.model) == expected
        loaded = Regress.load_from_checkpoint(path, model=make(other, 1), device="cpu", log_bar=False)
        assert bare(loaded.model) == expected
    assert set(trainer.best_weights) == set(expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
@pytest.mark.parametrize("kind", KINDS)
def test_names_in_the_files_are_bare(kind: str, save_format: str, tmp_path: Path) -> None:
    trainer = trained(kind, tmp_path, save_format=save_format)
    expected = make(BARE[kind], 0).state_dict().keys()
    folder = trainer.run_dir / "checkpoints"
    if save_format == "ckpt":
        state = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
        assert state.keys() == {f"model.{name}" for name in expected}
    else:
        assert load_file(folder / "last" / "model.safetensors").keys() == expected
    assert torch.load(trainer.save_model(tmp_path / "a.pt"), weights_only=True).keys() == expected
    assert load_file(trainer.save_model(tmp_path / "a.safetensors")).keys() == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
@pytest.mark.parametrize("kind", some(KINDS, 3))
def test_commands_and_resume_find_the_weights(kind: str, save_format: str, ema: bool, tmp_path: Path) -> None:
    trainer = trained(kind, tmp_path, save_format=save_format, ema=ema)
    weights = {name: value.tolist() for name, value in trainer.best_weights.items()}
    addons = [StateManagerAddon, EarlyStoppingAddon] + [EMAAddon] * ema
    again = make_trainer(Regress.add_on(*addons), model=make(kind, 1), save_path=tmp_path, save_format=save_format, restore_best=True)
    assert Job(again, 1, make_loader(), None, None, None, []).load().startswith("epoch=1")
    assert bare(again.model) == weights
    again.run(2, make_loader(64), make_valid(), resume="auto")
    whole = make_trainer(type(again), model=make(kind, 0), save_path=tmp_path / "whole", restore_best=True)
    whole.run(2, make_loader(64), make_valid())
    assert again.counts == whole.counts and bare(again.model).keys() == bare(whole.model).keys()


@pytest.mark.filterwarnings("ignore")
def test_a_plain_lightning_trainer_reads_the_checkpoint_of_a_compiled_model(tmp_path: Path) -> None:
    trainer = trained("compiled", tmp_path)
    for kind in ("compiled", "causal", "a compiled part"):
        other = make_trainer(model=make(kind, 1))
        module = other.as_lightning_module()
        options: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False}
        L.Trainer(**options).fit(module, make_loader(64), ckpt_path=trainer.run_dir / "checkpoints" / "last.ckpt")
        assert bare(other.model) == bare(trainer.model), kind


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod.", "model._orig_mod."])
@pytest.mark.parametrize("kind", ["plain", "causal", "only"])
@pytest.mark.parametrize("strict", [True, False])
def test_files_with_other_names_that_were_saved_before_still_load(kind: str, prefix: str, strict: bool, tmp_path: Path) -> None:
    one, two = make(kind, 0), make(kind, 1)
    prefixed = {prefix + name: value for name, value in one.state_dict().items()}
    torch.save({"state_dict": prefixed}, tmp_path / "a.pt")
    torch.save({"state_dict": prefixed, "pytorch-lightning_version": "2.6.0"}, tmp_path / "a.ckpt")
    for name in ("a.pt", "a.ckpt"):
        load_weights(two, read_weights(tmp_path / name), strict)
        assert bare(one) == bare(two)
