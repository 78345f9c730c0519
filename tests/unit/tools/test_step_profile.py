"""Where the time of a step goes: the parts add up, the lines that wait are the user's, what was tried is true, and nothing changes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from samples import Regress, make_loader, make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nbtrain import AccumulationAddon, ConfigError, LimitsAddon, Trainer
from nbtrain.tools.step_parts import timed_modules


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


def test_parts_add_up_lines_are_named_and_another_loader_is_tried(tmp_path: Path) -> None:
    trainer = make_trainer(Asking, device="cpu")
    profile = trainer.profile(DataLoader(Slow(), 4, shuffle=True), steps=12, trace=tmp_path / "trace.json")
    assert sum(profile.parts.values()) == pytest.approx(profile.step_s, rel=0.01) and profile.step_s > 0.045
    assert profile.parts["data"] > 0.035 and profile.parts["train_step"] > 0.0045  # seconds that are slept
    assert list(profile.modules) == [f"{name} {type(part).__name__}" for name, part in trainer.model.named_children()]
    assert 0 < sum(profile.modules.values()) < profile.parts["train_step"]
    text = 'if output["loss"].item() > 1e9 or float(output["loss"].detach()) > 1e9:'
    assert [(wait.function, wait.text, wait.n) for wait in profile.waits] == [("train_step", text, 2)]
    tried, waits, *_ = profile.advice
    assert tried.startswith("num_workers=") and tried.endswith(" × as fast (tried).")
    assert waits.startswith("line ") and "would wait for a GPU, 2 × a step: if output" in waits
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert repr(profile).count("\n") == profile._repr_html_().count("<tr") + len(profile.advice)


def test_of_a_loader_that_is_quick_there_is_no_advice_and_a_step_may_be_several_batches() -> None:
    class Sleeping(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            time.sleep(0.03)
            return super().train_step(batch["a"])

    trainer = make_trainer(Sleeping.add_on(AccumulationAddon), device="cpu", accumulate=2)
    profile = trainer.profile(CombinedLoader({"a": make_loader(), "b": make_loader()}, "min_size"), steps=3)
    assert profile.step_s > 0.05 and profile.parts["data"] > 0 and not profile.waits and not profile.advice


def test_containers_are_looked_into_up_to_twelve_parts() -> None:
    tower = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    assert list(timed_modules(nn.Sequential(tower, nn.Sequential(nn.Linear(2, 2), nn.ReLU())))) == ["0", "1.0", "1.1"]
    assert list(timed_modules(nn.Linear(2, 2))) == ["(model)"]


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


def test_a_class_that_steps_by_hand_has_its_time_in_the_step() -> None:
    class ByHand(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            loss = self.model(batch[0]).square().mean()
            self.optimizer.zero_grad()
            self.backward(loss)
            self.optimizer.step()
            return {"loss": loss}

    profile = make_trainer(ByHand).profile(make_loader(), steps=2)
    assert profile.parts["train_step"] > 0 and profile.n_steps == 2
