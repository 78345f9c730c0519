"""Runs on a device end as on the CPU: every addon, states in memory and on disk, resumes and time travel.

On simulated devices bit for bit, which torch knows as CUDA's or as XPUs. On a real one (`make gpu`) its kernels round otherwise than
those of the CPU; two runs on it are equal.
"""

from __future__ import annotations

import contextlib
import os
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import DEVICE, Breaks, Broken, Regress, make_loader, make_trainer, make_valid, same_weights, without_times
from test_addons import ADDONS
from torch import nn
from torch.profiler import ProfilerActivity, profile

from nbtrain import AddOnBase, CudaGraphAddon, MultiGPUAddon, OutOfMemory, StateManagerAddon
from simulated_gpu.counts import kernels
from simulated_gpu.torch_names import devices

REAL = os.environ["NBTRAIN_TEST_DEVICE"] == "cuda"
LAST = f"{DEVICE}:{torch.accelerator.device_count() - 1}"


def adam(params: Any) -> torch.optim.Optimizer:
    """One kernel for all parameters on both: its arithmetic differs from one for each."""
    return torch.optim.Adam(params, lr=1e-2, foreach=True)


def make_model(dropout: float = 0.0) -> nn.Module:
    """Without dropout by default: a device draws other numbers than the CPU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


def make(device: str, *addons: type[AddOnBase], dropout: float = 0.0, kind: type[Regress] = Regress, **options: Any) -> Any:
    return make_trainer(kind.add_on(*addons), **{"device": device, "optimizer": adam, "model": make_model(dropout)} | options)


def run(device: str, *addons: type[AddOnBase], **options: Any) -> Any:
    trainer = make(device, *addons, **options)
    torch.manual_seed(3)
    trainer.run(3, make_loader(), make_valid())
    return trainer


def assert_same(one: Any, other: Any, *, on_both: bool = False) -> None:
    """Equal weights and rows, but for rounding where a real GPU and the CPU have trained; `other` may have measured more, on a GPU."""
    rows = without_times(one.history.epochs)
    others = [{name: row[name] for name in own} for own, row in zip(rows, without_times(other.history.epochs), strict=True)]
    if REAL and (on_both or len({next(trainer.model.parameters()).device.type for trainer in (one, other)}) == 2):
        torch.testing.assert_close(state_on_cpu(other), state_on_cpu(one), rtol=1e-3, atol=1e-4)
        assert others == [{name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in row.items()} for row in rows]
    else:
        assert same_weights(one.model, other.model) and others == rows


def state_on_cpu(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in trainer.model.state_dict().items()}


ON_ONE = [addon for addon in ADDONS if addon is not MultiGPUAddon]


@pytest.mark.parametrize("addon", ON_ONE, ids=lambda addon: addon.__name__)
def test_every_addon_trains_as_on_the_cpu(addon: type[AddOnBase], tmp_path: Path) -> None:
    cpu, cuda = (run(device, addon, **ADDONS[addon](tmp_path / device)) for device in ("cpu", LAST))
    assert_same(cpu, cuda)
    assert all(p.device == torch.device(LAST) for p in cuda.model.parameters())


def test_all_addons_together_train_as_on_the_cpu(tmp_path: Path) -> None:
    options = {device: [ADDONS[addon](tmp_path / device) for addon in ON_ONE] for device in ("cpu", DEVICE)}
    assert_same(*(run(device, *ON_ONE, **dict(ChainMap(*own))) for device, own in options.items()))


@contextlib.contextmanager
def launched_graphs() -> Iterator[Callable[[], int]]:
    if not REAL:
        with kernels() as names:
            yield lambda: names["graph"]
        return
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        yield lambda: sum(event.name == "cudaGraphLaunch" for event in seen.events())


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA's graphs")
def test_a_graph_trains_as_the_steps_that_it_stands_for() -> None:
    options: dict[str, Any] = {"dropout": 0.3, "optimizer": lambda params: torch.optim.Adam(params, lr=1e-2, capturable=True)}
    eager, graphed = run(DEVICE, **options), make(DEVICE, CudaGraphAddon, **options)
    torch.manual_seed(3)
    with launched_graphs() as count:
        graphed.run(3, make_loader(), make_valid())
    assert count() == 9  # of the 12 whole batches, after three steps that warm up; the last one of an epoch is short
    assert_same(eager, graphed)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true", "bf16-true"])
def test_every_precision_trains_on_the_lean_loops_as_on_lightnings(precision: Any) -> None:
    lean, stock = make(DEVICE, dropout=0.3, precision=precision), make(DEVICE, dropout=0.3, precision=precision)
    stock.short_way = False
    for trainer in (lean, stock):
        torch.manual_seed(3)
        trainer.run(3, make_loader(), make_valid())
    assert_same(lean, stock)
    assert next(lean.model.parameters()).dtype == {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="there is one device")
def test_nothing_is_put_on_another_device_than_the_one_that_was_given(tmp_path: Path) -> None:
    torch.accelerator.reset_peak_memory_stats(0)
    before = torch.accelerator.memory_allocated(0)
    trainer = run(LAST, StateManagerAddon, save_path=tmp_path, keep_states=True)
    trainer.rewind(epoch=1)
    trainer.evaluate(make_valid())
    assert torch.accelerator.max_memory_allocated(0) == before


def test_a_model_that_was_moved_and_a_layer_that_is_new_come_to_the_device() -> None:
    stays, moved = run(DEVICE), run(DEVICE)
    moved.model.cpu()
    for trainer in (stays, moved):
        torch.manual_seed(4)
        trainer.run(1, make_loader(), make_valid())
    assert_same(stays, moved)
    moved.model[3] = nn.Linear(16, 1)
    assert moved.predict(torch.zeros(4, 8)).shape == (4, 1) and {p.device for p in moved.model.parameters()} == {moved.device}


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_a_run_that_is_broken_off_is_resumed_exactly(save_format: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_steps": 2, "save_format": save_format, "dropout": 0.3}
    whole = run(DEVICE, StateManagerAddon, save_path=tmp_path / "whole", **options)
    with pytest.raises(Broken):
        run(DEVICE, StateManagerAddon, save_path=tmp_path / "cut", lightning={"callbacks": [Breaks(8)]}, **options)
    resumed = make(DEVICE, StateManagerAddon, save_path=tmp_path / "cut", **options)
    resumed.run(3, make_loader(), make_valid(), resume="auto")
    assert_same(whole, resumed)


WAYS = [("cpu", LAST), (f"{DEVICE}:0", "cpu"), pytest.param("cpu", f"{DEVICE}:0", marks=pytest.mark.long), (f"{DEVICE}:0", LAST)]


@pytest.mark.parametrize(("saved_on", "resumed_on"), WAYS)
def test_a_run_is_resumed_on_another_device(saved_on: str, resumed_on: str, tmp_path: Path) -> None:
    whole = run("cpu")
    with pytest.raises(Broken):
        run(saved_on, StateManagerAddon, save_path=tmp_path, lightning={"callbacks": [Breaks(12)]})
    resumed = make(resumed_on, StateManagerAddon, save_path=tmp_path)
    resumed.run(3, make_loader(), make_valid(), resume="auto")
    assert_same(whole, resumed, on_both=True)


@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_a_run_goes_back_branches_and_repeats_a_step(kept: str, tmp_path: Path) -> None:
    addons: list[type[AddOnBase]] = [] if kept == "memory" else [StateManagerAddon]
    options: dict[str, Any] = {"keep_states": True} if kept == "memory" else {"save_path": tmp_path, "every_n_steps": 2}
    whole, trainer = run(DEVICE, dropout=0.3), run(DEVICE, *addons, dropout=0.3, **options)
    replayed = trainer.replay(step=7)
    assert replayed.loss == pytest.approx(trainer.history.steps["train"]["train_loss"][6])
    trainer.rewind(epoch=1)
    branch = trainer.branch(epoch=1)
    for one in (trainer, branch):
        one.run(2, make_loader(), make_valid())
        assert_same(whole, one)


def test_a_profile_finds_the_way_to_the_device_and_changes_nothing() -> None:
    trainer, untouched = make(DEVICE), make(DEVICE)
    found = trainer.profile(make_loader(), steps=4)
    assert all(seconds > 0 for seconds in found.parts.values()) and found.device == torch.device(DEVICE).type
    assert same_weights(trainer.model, untouched.model)


@pytest.fixture
def scarce() -> Iterator[Callable[[int], None]]:
    """Leave the last device so many bytes more than it has given."""
    index = torch.device(LAST).index
    total = torch.get_device_module(LAST).mem_get_info(index)[1]

    def leave(n: int) -> None:
        torch.accelerator.empty_cache()
        left = torch.accelerator.memory_reserved(index) + n
        torch.cuda.set_per_process_memory_fraction(left / total, index) if REAL else devices().simulated_total(index, left)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0, index) if REAL else devices().simulated_total(index, total)


def test_memory_that_runs_short_is_an_error_with_advice(scarce: Callable[[int], None]) -> None:
    trainer = make(LAST, model=nn.Linear(8, 1 << 24))
    trainer.model.to(LAST)
    scarce(2**10)
    with pytest.raises(OutOfMemory, match=rf"^The memory of {LAST} is full: .*\n.*\n  Use smaller batches"):
        trainer.run(1, make_loader())
