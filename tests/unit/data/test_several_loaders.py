"""A list of loaders is read as Lightning reads it, also where its place is saved, and a resume of it is exact."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import StateManagerAddon, Trainer
from nbtrain.data.several_loaders import SeveralLoaders, n_batches
from nbtrain.errors import ConfigError


class Both(Trainer):
    seen: list[Any]
    stop_after: int | None = None

    def train_step(self, batch: Any) -> dict[str, Any]:
        (labelled,), (unlabelled,) = batch.values() if isinstance(batch, dict) else batch
        self.seen.append((labelled.tolist(), unlabelled.tolist()))
        if len(self.seen) == self.stop_after:
            self.stop()
        return {"loss": self.model(labelled).square().mean() + self.model(unlabelled).abs().mean()}


def loader(n: int, seed: int, *, own_generator: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed) if own_generator else None
    return DataLoader(TensorDataset(torch.arange(2.0 * n).reshape(n, 2) / n), 2, shuffle=True, generator=generator)


def loaders(mode: str, *, own_generator: bool = True) -> Any:
    parts = [loader(6, 1, own_generator=own_generator), loader(14, 2, own_generator=own_generator)]
    if mode == "list":
        return parts
    return CombinedLoader(dict(zip("ab", parts)) if mode == "min_size" else parts, mode)


def make(folder: Path | None = None, stop_after: int | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    options: dict[str, Any] = {"device": "cpu", "optimizer": lambda params: torch.optim.Adam(params, lr=0.01), "log_bar": False}
    trainer: Any = Both.add_on(StateManagerAddon)(model, save_path=folder, **options) if folder else Both(model, **options)
    trainer.seen, trainer.stop_after = [], stop_after
    return trainer


def weights(trainer: Both) -> list[list[float]]:
    return [p.tolist() for p in trainer.model.parameters()]


def length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
@pytest.mark.parametrize("lengths", [(3, 7), (4, 4), (5, None)])
def test_length_is_that_of_lightning(mode: Any, lengths: tuple[int, int | None]) -> None:
    parts = [range(n) if n is not None else (i for i in range(9)) for n in lengths]
    combined = CombinedLoader(parts, mode)
    iter(combined)
    assert length_of(SeveralLoaders(combined)) == length_of(combined)


@pytest.mark.parametrize("mode", ["list", "min_size", "max_size_cycle"])
def test_run_whose_place_is_saved_reads_the_same_batches(mode: str, tmp_path: Path) -> None:
    plain, saved = make(), make(tmp_path)
    for trainer in (plain, saved):
        torch.manual_seed(1)
        trainer.run(2, loaders(mode))
    assert len(plain.seen) == 2 * (3 if mode == "min_size" else 7)
    assert saved.seen == plain.seen and weights(saved) == weights(plain)


@pytest.mark.parametrize("mode", ["list", "min_size", "max_size_cycle"])
@pytest.mark.parametrize("own_generator", [True, False])
def test_resume_in_mid_epoch_is_exact(mode: str, own_generator: bool, tmp_path: Path) -> None:
    def run(trainer: Any) -> Any:
        torch.manual_seed(1)
        trainer.run(3, loaders(mode, own_generator=own_generator), resume="auto")
        return trainer

    whole = run(make(tmp_path / "whole"))
    cut = random.Random(f"{mode} {own_generator}").randrange(1, len(whole.seen))
    first = run(make(tmp_path / "cut", stop_after=cut))
    second = run(make(tmp_path / "cut"))
    assert len(first.seen) == cut and second.seen == whole.seen and weights(second) == weights(whole)  # `seen` is restored too


def test_several_processes_refuse_a_list_of_loaders_whose_place_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.state.states.n_readers", lambda trainer: 2)
    with pytest.raises(ConfigError, match="StateManagerAddon can't save the place in a list of loaders that several processes read"):
        make(tmp_path).run(1, loaders("list"))


@pytest.mark.parametrize(
    ("mode", "limit", "n"),
    [
        ("max_size_cycle", None, 7),
        ("max_size_cycle", 5, 5),
        ("max_size_cycle", 0.5, 3),
        ("sequential", None, 10),
        ("sequential", 5, 3 + 5),  # a limit holds for each loader of a validation
        ("sequential", 0.5, 1 + 3),
    ],
)
def test_batches_of_several_loaders_are_counted_as_they_are_read(mode: str, limit: int | float | None, n: int) -> None:
    parts = loaders("list")
    assert n_batches(parts, mode, limit) == n_batches(dict(zip("ab", parts)), mode, limit) == n


def test_a_loader_without_a_length_is_counted_up_to_a_limit() -> None:
    assert [n_batches(iter([]), limit=limit) for limit in (None, 4, 0.5)] == [None, 4, None]
    assert n_batches({"a": loaders("list")[0], "b": iter([])}, "sequential", 2) == 4
