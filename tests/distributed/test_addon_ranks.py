"""Addons that look at batches and gradients do on two ranks what they do in one process, in an uneven last round too."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import Regress, make_data, make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.regression import MeanSquaredError, SpearmanCorrCoef

from nbtrain import AccumulationAddon, LoggersAddon, MetricsAddon, MultiGPUAddon, NonFiniteAddon, TaskLoader, WandBLoggerAddon

STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "tp": {"strategy": "tp", "tensor_plan": {"0": "colwise", "2": "rowwise"}},
}


class Samples(SumMetric):
    """How many samples there were."""

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        super().update(float(len(label)))


class Sums(Regress):
    """A loss that is a sum over the samples."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        output = super().train_step(batch)
        return output | {"loss": output["loss"] * len(batch[0]) / 16}


def squared(label: np.ndarray, output: np.ndarray) -> dict[str, float]:
    return {"squared": float(((label - output) ** 2).mean()), "samples": len(label)}


def make(kind: Any, devices: int, strategy: str, addons: tuple[Any, ...], **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 1))
    options |= {"device": ["cpu"] * devices, **STRATEGIES[strategy]} if devices > 1 else {"device": "cpu"}
    return make_trainer(kind.add_on(MultiGPUAddon, *addons), model=net, **options)


def batches(trainer: Any, data: Any, size: int, **options: Any) -> DataLoader[Any]:
    """Of which all readers together get `size` samples."""
    n_readers = trainer[MultiGPUAddon].n_readers if trainer[MultiGPUAddon].is_elsewhere else 1
    return DataLoader(data, size // n_readers, **options)


def difference(a: Any, b: Any) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(a.model.state_dict().values(), b.model.state_dict().values()))


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all")
@pytest.mark.parametrize("kind, reduction", [(Regress, "mean"), (Sums, "sum")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_windows_and_metrics_are_those_of_one_process(strategy: str, kind: Any, reduction: str) -> None:
    """70 samples in rounds of 16: the last has 6, on one of two ranks; 13 samples in rounds of 10: the last has 3, on one of them."""
    metrics = {"own": squared, "all": MetricCollection(MeanSquaredError(), SpearmanCorrCoef()), "seen": Samples()}
    options = {"accumulate": 2, "grad_reduction": reduction, "loss_reduction": reduction, "metrics": metrics, "metrics_in_training": True}
    one, two = (make(kind, n, strategy, (AccumulationAddon, MetricsAddon), **options) for n in (1, 2))
    for trainer in one, two:
        torch.manual_seed(5)
        trainer.run(2, batches(trainer, make_data(70), 16, shuffle=True), batches(trainer, make_data(13, seed=3), 10))
    assert difference(one, two) < 1e-5 and one.counts.step == two.counts.step == 6
    names = ["train_window_loss", *(f"{part}_{name}" for part in ("train", "val") for name in ("squared", "samples", "seen"))]
    names += [f"{part}_{name}" for part in ("train", "val") for name in ("MeanSquaredError", "SpearmanCorrCoef")]
    for row, other in zip(one.history.epochs, two.history.epochs):
        assert [row[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-4)
    assert two.history.last["train_seen"] == 70 and two.history.last["val_seen"] == two.history.last["val_samples"] == 13


class Named(Regress):
    """Validates on the batches of a TaskLoader."""

    def test_step(self, batch: Any) -> dict[str, Any]:
        return super().test_step(batch.batch)


def test_metrics_of_tasks_are_those_of_one_process_where_a_rank_has_no_batch_of_one() -> None:
    """Batches a, a, a, b in rounds of two: one rank has no batch of b."""
    metrics = {"a": squared, "b": [MeanSquaredError(), squared]}
    one, two = (make(Named, n, "ddp", (MetricsAddon,), metrics=metrics) for n in (1, 2))
    for trainer in one, two:
        loaders = {name: DataLoader(make_data(n, seed=n), 8) for name, n in (("a", 24), ("b", 8))}
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        trainer.run(1, DataLoader(make_data(16), 8), TaskLoader(loaders))
    names = ["val_loss", "val_loss_a", "val_loss_b", "val_squared_a", "val_squared_b", "val_mean_squared_error_b", "val_samples_b"]
    rows = one.history.last, two.history.last
    assert [rows[1][name] for name in names] == pytest.approx([rows[0][name] for name in names], rel=1e-5)
    assert rows[1]["val_samples_a"] == 24 and rows[1]["val_samples_b"] == 8


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_skip_an_update_that_is_not_finite_in_one_of_them(strategy: str) -> None:
    x, y = make_data(64).tensors
    data = TensorDataset(torch.cat([x[:20], torch.full((1, 8), torch.nan), x[21:]]), y)
    one, two = (make(Regress, n, strategy, (NonFiniteAddon,), nonfinite="skip") for n in (1, 2))
    for trainer in one, two:
        trainer.run(2, batches(trainer, data, 16))
    assert one[NonFiniteAddon].n_skipped == two[NonFiniteAddon].n_skipped == 2
    assert two.history.last["train_skipped"] == 0.25 and difference(one, two) < 1e-5


def test_the_loggers_of_two_ranks_have_one_run(tmp_path: Path) -> None:
    options = {
        "save_path": tmp_path,
        "loggers": ["csv"],
        "web_logger": {"wandb": {"mode": "offline"}},
        "lightning": {"log_every_n_steps": 2},
    }
    trainer = make(Regress, 2, "ddp", (LoggersAddon, WandBLoggerAddon), **options)
    trainer.run(1, batches(trainer, make_data(64), 16), batches(trainer, make_data(16), 16))
    with open(trainer.run_dir / "training_log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = trainer.history.steps["train"]["train_loss"]
    assert [row["step"] for row in rows] == ["2", "4"] and len(list(tmp_path.rglob("run-*.wandb"))) == 1
    assert [float(row["train_loss"]) for row in rows] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert float(rows[1]["val_loss"]) == pytest.approx(trainer.history.last["val_loss"], rel=1e-6)
