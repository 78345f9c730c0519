"""Several loaders in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import make_loader, make_model, make_trainer, same_weights
from torch.nn.functional import mse_loss

from nbtrain import ConfigError, StateManagerAddon, StepError, TaskLoader, Trainer


class Both(Trainer):
    def train_step(self, task: Any) -> dict[str, Any]:
        x, y = task.batch
        return {"loss": mse_loss(self.model(x), y if task.name == "a" else -y)}


def test_each_task_has_its_share_of_every_part_of_an_epoch() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    names = [task.name for task in TaskLoader({name: [1] for name in weights}, weights, 100)]
    assert all(abs(names[:n].count(name) - n * weight) < 1 for n in range(1, 101) for name, weight in weights.items())


def test_by_default_an_epoch_reads_each_loader_once() -> None:
    loader = TaskLoader({"a": range(7), "b": range(3)})
    batches = list(loader)
    assert len(loader) == 10 and sorted(b for n, b in batches if n == "a") == list(range(7))
    assert [b for n, b in batches if n == "b"] == [0, 1, 2] and list(loader) == batches


def test_short_loader_begins_anew_within_the_epoch() -> None:
    loader = TaskLoader({"a": ["x"], "b": [1, 2]}, {"a": 1, "b": 1}, 6)
    assert [tuple(task) for task in loader] == [("a", "x"), ("b", 1), ("a", "x"), ("b", 2), ("a", "x"), ("b", 1)]


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights are of \['b'\], but loaders of \['a'\]"):
        TaskLoader({"a": [1]}, {"b": 1})
    with pytest.raises(ConfigError, match="not all positive"):
        TaskLoader({"a": [1]}, {"a": 0})
    with pytest.raises(ConfigError, match="The loader of 'a' has no length"):
        TaskLoader({"a": iter([1])})
    with pytest.raises(StepError, match="The loader of 'a' gave no batch"):
        list(TaskLoader({"a": iter([])}, {"a": 1}, 2))


def test_resumed_run_matches_the_unbroken_one(tmp_path: Path) -> None:
    def loader() -> TaskLoader:
        return TaskLoader({"a": make_loader(), "b": make_loader(40)}, {"a": 2, "b": 1}, 9)

    def make(folder: str) -> Any:
        return make_trainer(Both.add_on(StateManagerAddon), model=make_model(), save_path=tmp_path / folder, every_n_steps=2, seed=5)

    whole = make("whole")
    whole.run(2, loader())
    for path in sorted((whole.run_dir / "checkpoints").glob("epoch=*-step=[48]*")):
        again = make("again")
        torch.manual_seed(99)
        again.run(2, loader(), resume=path)
        assert same_weights(whole.model, again.model), path.name
