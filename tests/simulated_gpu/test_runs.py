"""Runs on a simulated device end as on the CPU, bit for bit: every addon, states in memory and on disk, resumes and time travel."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Breaks, Broken, Regress, make_loader, make_trainer, make_valid, same_weights, without_times
from test_addons import ADDONS
from torch import nn

from nbtrain import AddOnBase, CudaGraphAddon, MultiGPUAddon, OutOfMemory, StateManagerAddon
from simulated_gpu.counts import kernels
from simulated_gpu.torch_names import devices


def adam(params: Any) -> torch.optim.Optimizer:
    """One kernel for all parameters on both: its arithmetic differs from one for each."""
    return torch.optim.Adam(params, lr=1e-2, foreach=True)


def make_model(dropout: float = 0.0) -> nn.Module:
    """Without dropout by default: a device draws other numbers than the CPU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


def make(device: str, *addons: type[AddOnBase], dropout: float = 0.0, **options: Any) -> Any:
    return make_trainer(Regress.add_on(*addons), **{"device": device, "optimizer": adam, "model": make_model(dropout)} | options)


def run(device: str, *addons: type[AddOnBase], **options: Any) -> Any:
    trainer = make(device, *addons, **options)
    torch.manual_seed(3)
    trainer.run(3, make_loader(), make_valid())
    return trainer


def assert_same(one: Any, other: Any) -> None:
    """Equal weights and rows; `other` may have measured more, because it has a GPU."""
    assert same_weights(one.model, other.model)
    rows = without_times(one.history.epochs)
    assert rows == [{name: row[name] for name in own} for own, row in zip(rows, without_times(other.history.epochs), strict=True)]


ONE_DEVICE = [addon for addon in ADDONS if addon is not MultiGPUAddon]


@pytest.mark.parametrize("addon", ONE_DEVICE, ids=lambda addon: addon.__name__)
def test_every_addon_trains_as_on_the_cpu(addon: type[AddOnBase], tmp_path: Path) -> None:
    cpu, cuda = (run(device, addon, **ADDONS[addon](tmp_path / device)) for device in ("cpu", "cuda:1"))
    assert_same(cpu, cuda)
    assert all(p.device == torch.device("cuda", 1) for p in cuda.model.parameters())


def test_all_addons_together_train_as_on_the_cpu(tmp_path: Path) -> None:
    options = {device: [ADDONS[addon](tmp_path / device) for addon in ONE_DEVICE] for device in ("cpu", "cuda")}
    assert_same(*(run(device, *ONE_DEVICE, **dict(ChainMap(*own))) for device, own in options.items()))


def test_a_graph_trains_as_the_steps_that_it_stands_for() -> None:
    options: dict[str, Any] = {"dropout": 0.3, "optimizer": lambda params: torch.optim.Adam(params, lr=1e-2, capturable=True)}
    eager, graphed = run("cuda", **options), make("cuda", CudaGraphAddon, **options)
    torch.manual_seed(3)
    with kernels() as names:
        graphed.run(3, make_loader(), make_valid())
    assert names["graph"] == 9  # of the 12 whole batches, after three steps that warm up; the last one of an epoch is short
    assert_same(eager, graphed)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true", "bf16-true"])
def test_every_precision_trains_on_the_lean_loops_as_on_lightnings(precision: Any) -> None:
    lean, stock = make("cuda", dropout=0.3, precision=precision), make("cuda", dropout=0.3, precision=precision)
    stock.lean_loops = False
    for trainer in (lean, stock):
        torch.manual_seed(3)
        trainer.run(3, make_loader(), make_valid())
    assert_same(lean, stock)
    assert next(lean.model.parameters()).dtype == {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)


def test_nothing_is_put_on_another_device_than_the_one_that_was_given(tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    trainer = run("cuda:1", StateManagerAddon, save_path=tmp_path, keep_states=True)
    trainer.rewind(epoch=1)
    trainer.evaluate(make_valid())
    assert torch.cuda.max_memory_allocated(0) == before


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_a_run_that_is_broken_off_is_resumed_exactly(save_format: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_steps": 2, "save_format": save_format, "dropout": 0.3}
    whole = run("cuda", StateManagerAddon, save_path=tmp_path / "whole", **options)
    with pytest.raises(Broken):
        run("cuda", StateManagerAddon, save_path=tmp_path / "cut", lightning={"callbacks": [Breaks(8)]}, **options)
    resumed = make("cuda", StateManagerAddon, save_path=tmp_path / "cut", **options)
    resumed.run(3, make_loader(), make_valid(), resume="auto")
    assert_same(whole, resumed)


WAYS = [("cpu", "cuda:1"), ("cuda:0", "cpu"), pytest.param("cpu", "cuda:0", marks=pytest.mark.long), ("cuda:0", "cuda:1")]


@pytest.mark.parametrize(("saved_on", "resumed_on"), WAYS)
def test_a_run_is_resumed_on_another_device(saved_on: str, resumed_on: str, tmp_path: Path) -> None:
    whole = run("cpu")
    with pytest.raises(Broken):
        run(saved_on, StateManagerAddon, save_path=tmp_path, lightning={"callbacks": [Breaks(12)]})
    resumed = make(resumed_on, StateManagerAddon, save_path=tmp_path)
    resumed.run(3, make_loader(), make_valid(), resume="auto")
    assert_same(whole, resumed)


@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_a_run_goes_back_branches_and_repeats_a_step(kept: str, tmp_path: Path) -> None:
    addons: list[type[AddOnBase]] = [] if kept == "memory" else [StateManagerAddon]
    options: dict[str, Any] = {"keep_states": True} if kept == "memory" else {"save_path": tmp_path, "every_n_steps": 2}
    whole, trainer = run("cuda", dropout=0.3), run("cuda", *addons, dropout=0.3, **options)
    replayed = trainer.replay(step=7)
    assert replayed.loss == pytest.approx(trainer.history.steps["train"]["train_loss"][6])
    trainer.rewind(epoch=1)
    branch = trainer.branch(epoch=1)
    for one in (trainer, branch):
        one.run(2, make_loader(), make_valid())
        assert_same(whole, one)


@pytest.fixture
def scarce(request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """Leave cuda:1 so many bytes more than it has given."""
    yield lambda n: devices().simulated_total(1, torch.cuda.memory_allocated(1) + n)
    devices().simulated_total(1, 16 * 2**30)


def test_memory_that_runs_short_is_an_error_with_advice(scarce: Callable[[int], None]) -> None:
    trainer = make("cuda:1")
    trainer.model.to("cuda:1")
    scarce(2**10)
    with pytest.raises(OutOfMemory, match=r"^The memory of cuda:1 is full: .*\n.*\n  Use smaller batches"):
        trainer.run(1, make_loader())
