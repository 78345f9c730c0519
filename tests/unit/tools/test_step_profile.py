"""Where the time of a step goes: the parts add up, what is slow is found, and what can't be profiled is an error."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_modules import Lit
from samples import Regress, make_loader, make_model, make_trainer
from torch.profiler import DeviceType
from torch.utils.data import DataLoader, Dataset

from nbtrain import AccumulationAddon, ConfigError, LimitsAddon, Trainer
from nbtrain.tools import step_profile
from nbtrain.tools.step_profile import Profile


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return torch.ones(8), torch.ones(1)


class Sleeping(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        time.sleep(0.03)
        return super().train_step(batch)


def test_parts_add_up_and_the_slow_ones_are_found(tmp_path: Path) -> None:
    trainer = make_trainer(Sleeping, device="cpu")
    profile = trainer.profile(DataLoader(Slow(), 4, shuffle=True), steps=4, trace=tmp_path / "trace.json")
    assert sum(profile.parts.values()) == pytest.approx(profile.step_s) and profile.step_s > 0.07
    assert sorted(profile.parts, key=profile.share)[-2:] == ["forward", "data"]  # in both of them seconds are slept
    assert list(profile.parts) == ["data", "forward", "backward", "optimizer", "other"]
    assert {"aten::addmm", "aten::mse_loss"} < profile.operators.keys() and sum(profile.operators.values()) < profile.step_s
    assert list(profile.operators.values()) == sorted(profile.operators.values(), reverse=True)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert f"{step_profile._LABEL}forward" in {event["name"] for event in events}
    assert (profile.n_steps, profile.device) == (4, "cpu")


def test_profile_shows_the_largest_operators_below_the_parts() -> None:
    operators = {"aten::mm": 0.0008, "aten::add": 0.0004} | {f"aten::{n}": 1e-6 for n in range(9)}
    profile = Profile(20, 0.002, {"data": 0.0, "forward": 0.0015, "other": 0.0005}, operators, "cuda")
    lines = repr(profile).splitlines()
    assert lines[:7] == [
        "2.00 ms a step on cuda, 20 steps profiled",
        "data           0%      0.00 ms",
        "forward       75%      1.50 ms",
        "other         25%      0.50 ms",
        "operators     60%      1.21 ms",
        "  aten::mm    40%      0.80 ms",
        "  aten::add   20%      0.40 ms",
    ]
    assert len(lines) == 5 + 8


def test_a_step_may_be_several_batches_of_several_loaders() -> None:
    class First(Sleeping):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch["a"])

    trainer = make_trainer(First.add_on(AccumulationAddon), device="cpu", accumulate=2)
    profile = trainer.profile(CombinedLoader({"a": make_loader(), "b": make_loader()}, "min_size"), steps=3)
    assert profile.step_s > 0.05 and profile.parts["data"] > 0


def test_a_list_of_loaders_gives_a_batch_of_each() -> None:
    class First(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch[0])

    assert make_trainer(First).profile([make_loader(), make_loader()], steps=2).parts["data"] > 0


def test_the_updates_of_several_optimizers_are_one_part() -> None:
    model = make_model()
    optimizers = [torch.optim.SGD([parameter], lr=1e-2) for parameter in list(model.parameters())[:2]]
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: time.sleep(0.01))
    assert make_trainer(model=model, optimizer=optimizers).profile(make_loader(), steps=2).parts["optimizer"] > 0.02


def test_on_a_gpu_operators_have_the_time_of_their_kernels() -> None:
    def event(key: str, host: float, device: float, *, kernel: bool = False, label: bool = False) -> SimpleNamespace:
        kind = DeviceType.CUDA if kernel else DeviceType.CPU
        times = {"cpu_time_total": host, "self_cpu_time_total": host, "self_device_time_total": device}
        return SimpleNamespace(key=key, device_type=kind, is_user_annotation=label, **times)

    events = [
        event("ProfilerStep*", 40_000.0, 0.0, label=True),
        event("nbtrain: forward", 10_000.0, 0.0, label=True),
        event("nbtrain: forward", 0.0, 9_000.0, kernel=True, label=True),  # of the label on the device
        event("aten::mm", 300.0, 6_000.0),
        event("sgemm", 0.0, 6_000.0, kernel=True),
        event("cudaLaunchKernel", 100.0, 0.0),
    ]
    watch: Any = SimpleNamespace(key_averages=lambda: events)
    found = step_profile._read(watch, 10, "cuda")
    assert found.operators == {"aten::mm": pytest.approx(0.0006), "cudaLaunchKernel": 0.0}
    assert found.parts["forward"] == pytest.approx(0.001) and found.parts["other"] == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: make_trainer(mode="test").profile(make_loader()), "In mode 'test' nothing is trained"),
        (lambda: make_trainer().profile(make_loader(), trace="nowhere/trace.json"), "There is no folder 'nowhere' for the trace."),
        (
            lambda: make_trainer(Regress.add_on(LimitsAddon), device="cpu", max_steps=5).profile(make_loader()),
            "The run ended before its 23 updates were made.",
        ),
        (lambda: make_trainer().profile(iter([1])), "An iterator can't give its batches twice."),
    ],
)
def test_what_can_not_be_profiled_is_said(make: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(text)


def test_a_class_that_steps_by_hand_has_all_parts_and_keeps_its_own_profiler() -> None:
    class ByHand(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            loss = self.model(batch[0]).square().mean()
            self.optimizer.zero_grad()
            self.backward(loss)
            self.optimizer.step()
            return {"loss": loss}

    trainer = make_trainer(ByHand, lightning={"profiler": "pytorch"})  # torch has one profiler at a time
    profile = trainer.profile(make_loader(), steps=2)
    assert all(profile.parts[part] > 0 for part in ("forward", "backward", "optimizer")) and profile.n_steps == 2
    assert trainer.lightning == {"profiler": "pytorch"}


def test_the_step_of_a_lightning_module_is_found() -> None:
    profile = Trainer.from_lightning(Lit(), device="cpu", log_bar=False).profile(make_loader(), steps=2)
    assert all(profile.parts[part] > 0 for part in ("forward", "backward", "optimizer"))
