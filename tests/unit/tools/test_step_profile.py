"""Where the time of a step goes: the parts add up, what is slow is found, what was tried is true, and nothing changes."""

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
from samples import Regress, make_loader, make_trainer
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


class Asking(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        output = super().train_step(batch)
        if output["loss"].item() > 1e9 or float(output["loss"].detach()) > 1e9:
            print("far away")
        time.sleep(0.005)
        return output


def test_parts_add_up_reads_are_counted_and_another_loader_is_tried(tmp_path: Path) -> None:
    trainer = make_trainer(Asking, device="cpu")
    profile = trainer.profile(DataLoader(Slow(), 4, shuffle=True), steps=12, trace=tmp_path / "trace.json")
    assert sum(profile.parts.values()) == pytest.approx(profile.step_s) and profile.step_s > 0.045
    assert sorted(profile.parts, key=profile.share)[-2:] == ["train_step", "data"]  # in both of them seconds are slept
    assert list(profile.parts) == ["data", "copies", "train_step", "backward", "update", "other"]
    assert {"aten::addmm", "aten::mse_loss"} < profile.operators.keys() and sum(profile.operators.values()) < profile.step_s
    assert list(profile.operators.values()) == sorted(profile.operators.values(), reverse=True)
    tried, reads = profile.advice
    assert tried.startswith("num_workers=") and tried.endswith(" × as fast (tried).")
    assert reads.startswith("train_step calls aten::item 2 × a step: ")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert f"{step_profile._LABEL}train_step" in {event["name"] for event in events}
    assert profile.idle_share is None and (profile.n_steps, profile.device) == (12, "cpu")


def test_profile_shows_the_slowest_operators_below_the_parts() -> None:
    operators = {"aten::mm": 0.0008, "aten::add": 0.0004, "aten::t": 1e-6}
    profile = Profile(20, 0.002, {"data": 0.0, "train_step": 0.0015, "copies": 0.0, "other": 0.0005}, operators, ("Do less.",), "cuda", 0.4)
    assert repr(profile).splitlines() == [
        "2.0 ms a step on cuda, 500 steps/s, 20 timed · idle 40% of the time",
        "data           0%      0 µs",
        "train_step    75%    1.5 ms  ███████████████",
        "copies         0%      0 µs",
        "other         25%    500 µs  █████",
        "operators     60%    1.2 ms  ████████████",
        "  aten::mm    40%    800 µs  ████████",
        "  aten::add   20%    400 µs  ████",
        "→ Do less.",
    ]


def test_of_a_loader_that_is_quick_there_is_no_advice_and_a_step_may_be_several_batches() -> None:
    class Sleeping(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            time.sleep(0.03)
            return super().train_step(batch["a"])

    trainer = make_trainer(Sleeping.add_on(AccumulationAddon), device="cpu", accumulate=2)
    profile = trainer.profile(CombinedLoader({"a": make_loader(), "b": make_loader()}, "min_size"), steps=3)
    assert profile.step_s > 0.05 and profile.parts["data"] > 0 and not profile.advice


def test_a_list_of_loaders_gives_a_batch_of_each() -> None:
    class First(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch[0])

    assert make_trainer(First).profile([make_loader(), make_loader()], steps=2).parts["data"] > 0


def test_on_a_gpu_operators_have_the_time_of_their_kernels() -> None:
    def event(key: str, host: float, device: float, *, kernel: bool = False, label: bool = False) -> SimpleNamespace:
        kind = DeviceType.CUDA if kernel else DeviceType.CPU
        times = {"cpu_time_total": host, "self_cpu_time_total": host, "self_device_time_total": device}
        return SimpleNamespace(key=key, device_type=kind, is_user_annotation=label, **times)

    events = [
        event("ProfilerStep*", 40_000.0, 0.0, label=True),
        event("nbtrain: train_step", 10_000.0, 0.0, label=True),
        event("nbtrain: train_step", 0.0, 9_000.0, kernel=True, label=True),  # of the label on the device
        event("aten::mm", 300.0, 6_000.0),
        event("sgemm", 0.0, 6_000.0, kernel=True),
        event("cudaLaunchKernel", 100.0, 0.0),
    ]
    steps: Any = SimpleNamespace(n_timed=20, n_profiled=10, step_s=0.002, trainer=SimpleNamespace(device=torch.device("cuda")))
    steps.profiler = SimpleNamespace(key_averages=lambda: events)
    found = step_profile._read(steps)
    assert found.operators == {"aten::mm": pytest.approx(0.0006)} and found.idle_share == pytest.approx(0.7)
    assert found.parts["train_step"] == pytest.approx(0.0005) and found.parts["other"] == pytest.approx(0.0015)
    advice = "The device is idle 70% of the time, because Python is slower: larger batches, CompileAddon or CudaGraphAddon."
    assert step_profile._of_device(found) == [advice]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: make_trainer(mode="test").profile(make_loader()), "In mode 'test' nothing is trained"),
        (lambda: make_trainer().profile(make_loader(), trace="nowhere/trace.json"), "There is no folder 'nowhere' for the trace."),
        (
            lambda: make_trainer(Regress.add_on(LimitsAddon), device="cpu", max_steps=5).profile(make_loader()),
            "The run ended before its 34 updates were made.",
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
    assert all(profile.parts[part] > 0 for part in ("train_step", "backward", "update")) and profile.n_steps == 2
    assert not any("aten::item" in text for text in profile.advice) and trainer.lightning == {"profiler": "pytorch"}


def test_the_step_of_a_lightning_module_is_found() -> None:
    profile = Trainer.from_lightning(Lit(), device="cpu", log_bar=False).profile(make_loader(), steps=2)
    assert profile.parts["train_step"] > 0 and profile.parts["backward"] > 0
