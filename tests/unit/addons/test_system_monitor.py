"""What SystemMonitorAddon measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import DEVICE, Regress, make_loader, make_trainer, make_valid

from nbtrain import SystemMonitorAddon
from nbtrain.addons import system_monitor

Watched = Regress.add_on(SystemMonitorAddon)


def test_each_row_has_the_newest_measurement() -> None:
    trainer = make_trainer(Watched)
    trainer.run(2, make_loader(), make_valid())
    for row in trainer.history.epochs:
        assert 0 <= row["wait_share"] <= 1 and row["samples_per_s"] > 0 and row["ram_gb"] > 0.05 and row["grad_norm"] > 0
    assert "tokens_per_s" not in row and ("gpu_gb" in row) == (DEVICE == "cuda") and "lr_1" not in row


def test_the_norm_is_that_of_the_update() -> None:
    trainer = make_trainer(Watched)
    trainer.run(1, make_loader())
    gradients = [p.grad for p in trainer.model.parameters()]
    assert trainer.history.last["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)))


def test_it_measures_four_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the loader and the step move: a batch is waited for for 10 ms, and trained in 20 ms."""
    now_s = 0.0
    measured: list[int] = []

    class Loader:
        def __len__(self) -> int:
            return 40

        def __iter__(self) -> Any:
            nonlocal now_s
            for batch in make_loader(160, batch_size=4):
                now_s += 0.01
                yield batch

    class Steps(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            nonlocal now_s
            now_s += 0.02
            return super().train_step(batch)

    monkeypatch.setattr(system_monitor, "memory", lambda device: measured.append(trainer.counts.processed) or {})
    trainer = make_trainer(Steps.add_on(SystemMonitorAddon), lightning={"log_every_n_steps": 2})
    trainer[SystemMonitorAddon].clock = lambda: now_s
    trainer.run(1, Loader())
    assert measured == [2, 12, 22, 32, 40]  # at even updates that are 0.25 s after the one before; and at the last
    row = trainer.history.last
    assert (row["wait_share"], row["samples_per_s"]) == pytest.approx((1 / 3, 4 / 0.03))


def test_each_group_has_its_rate() -> None:
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.01}])

    trainer = make_trainer(Watched, optimizer=two_groups)
    trainer.run(1, make_loader())
    assert (trainer.history.last["lr_1"], trainer.history.last["lr_2"]) == pytest.approx((0.1, 0.01))


def test_speed_is_that_of_the_clock_without_validations() -> None:
    now = [0.0]

    class Ticking(Regress.add_on(SystemMonitorAddon)):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, Any]:
            now[0] += 3.0
            return super().train_step(batch)

        def test_step(self, batch: Any) -> dict[str, Any]:
            now[0] += 100.0
            return Regress.train_step(self, batch)

    class Waiting:
        def __iter__(self) -> Any:
            for x, y in make_loader(64):
                now[0] += 1.0
                yield x, y

    trainer = make_trainer(
        Ticking, monitor_system=False, throughput=True, count_tokens=lambda batch: batch[0].numel(), lightning={"val_check_interval": 2}
    )
    trainer[SystemMonitorAddon].clock = lambda: now[0]
    trainer.run(2, list(make_loader(64)), make_valid())
    row = trainer.history.last
    assert (row["train_samples_per_s"], row["train_step_time_s"], row["train_wait_share"]) == (64 / 12, 3.0, 0.0)
    assert row["train_tokens_per_s"] == 8 * row["train_samples_per_s"] and not {"ram_gb", "wait_share", "samples_per_s"} & set(row)
    trainer = make_trainer(Ticking, throughput=True)
    trainer[SystemMonitorAddon].clock = lambda: now[0]
    trainer.run(1, Waiting())
    row = trainer.history.last
    assert row["train_wait_share"] == pytest.approx(0.25, abs=0.06) and "train_tokens_per_s" not in row
    assert {"ram_gb", "wait_share", "samples_per_s", "train_samples_per_s"} <= set(row)


def test_a_gpu_whose_load_is_not_known_is_measured_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a part of a GPU (MIG), of which pynvml tells none. What memory it has is left out here, where there is no GPU."""
    asked: list[Any] = []

    def utilization(device: Any) -> int:
        asked.append(device)
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(system_monitor, "gpu_memory", lambda device: {})
    for _ in range(2):
        assert system_monitor.memory(torch.device("cuda", 7)).keys() == {"ram_gb"}
    assert len(asked) == 1
