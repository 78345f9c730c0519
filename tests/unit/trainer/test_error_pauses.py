"""An error of the user's code pauses a run; repaired and resumed, the run equals one that never failed, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from nbtrain import AccumulationAddon, StateManagerAddon, StepError, Trainer
from nbtrain.rng import random_state

KINDS = (
    "train_step",
    "after forward",
    "test_step",
    "after test forward",
    "metric",
    "loader",
    "valid loader",
    "NaN",
    "backward",
    "missing loss",
)
HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
HOOKS += ("on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end")


class Fault:
    """Raises at the call number `at` of the place `kind`, once."""

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.kind, self.left = kind, at

    def is_due(self, kind: str) -> bool:
        if kind != self.kind:
            return False
        self.left -= 1
        return self.left == -1

    def at(self, kind: str) -> None:
        if self.is_due(kind):
            raise ZeroDivisionError(kind)


class Points(Dataset[Any]):
    """Augmented points; while the file `broken` is there, the one of its number can't be read."""

    def __init__(self, broken: Path) -> None:
        self.x, self.broken = torch.randn(26, 4, generator=torch.Generator().manual_seed(0)), broken

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.broken.exists() and self.broken.read_text() == str(i):
            random.random(), np.random.rand(), torch.rand(())
            raise FileNotFoundError("no such point")
        return self.x[i] + random.random() + float(np.random.rand()) + torch.rand(())


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.fault.at("backward")
        return grads[0], None


class Fit(Trainer):
    fault = Fault()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen, self.mean, self.losses = 0, MeanMetric(), []

    def train_step(self, batch: torch.Tensor) -> dict[str, Any]:
        self.fault.at("train_step")
        self.seen += len(batch)
        scale = random.random() + float(np.random.randn()) + float(torch.rand(()))
        hidden = self.model[:3](batch)
        hidden = _Broken.apply(hidden, self.fault) if self.fault.kind == "backward" else hidden
        loss = scale * self.model[3](hidden).square().mean()
        self.mean.update(loss.detach())
        self.losses.append(loss.item())
        self.log("u", loss.detach(), on_step=False, on_epoch=True)
        self.fault.at("after forward")
        if self.fault.is_due("missing loss"):
            return {"los": loss}
        return {"loss": loss * float("nan") if self.fault.is_due("NaN") else loss, "seen": self.seen}

    def test_step(self, batch: torch.Tensor) -> dict[str, Any]:
        self.fault.at("test_step")
        loss = self.model(batch).square().mean() + random.random()
        self.fault.at("after test forward")
        return {"loss": loss}

    def metric_on_epoch_end(self) -> dict[str, float]:
        self.fault.at("metric")
        return {"mean": float(self.mean.compute()), "n": float(len(self.losses))}


class Watch(L.Callback):
    """Calls the fault in each of its hooks."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.counts = fault, dict.fromkeys(HOOKS, 0)


def _hook(name: str) -> Any:
    def hook(self: Watch, *args: Any, **options: Any) -> None:
        self.counts[name] += 1
        random.random(), torch.rand(())
        self.fault.at(name)

    return hook


for _name in HOOKS:
    setattr(Watch, _name, _hook(_name))


def run(seed: int, tmp_path: Path, kind: str = "", at: int = 0) -> tuple[Fit, int]:
    """Two runs of a drawn setting; each failure is repaired and resumed. Returns the trainer and the number of failures."""
    draw = random.Random(seed)
    window, workers, by_batch, saves = draw.choice((1, 1, 3)), draw.choice((0, 0, 0, 2)), draw.random() < 0.5, draw.random() < 0.3
    window = 1 if kind in ("backward", "on_after_backward", "on_before_optimizer_step") else window
    tmp_path.mkdir(exist_ok=True)
    broken = tmp_path / "broken"
    fault = Fault(kind, at)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    addons = [AccumulationAddon] + ([StateManagerAddon] if saves else [])
    options: dict[str, Any] = {"save_path": tmp_path / f"run{kind}", "every_n_steps": 3} if saves else {}
    trainer: Any = Fit.add_on(*addons)(
        model,
        "cpu",
        optimizer=optimizer,
        scheduler=schedule,
        scheduler_step_on_batch=by_batch and window == 1,
        accumulate=window,
        log_bar=False,
        on_error="pause",
        lightning={"callbacks": [Watch(fault)]},
        **options,
    )
    trainer.fault = fault
    data = Points(broken)
    loader = DataLoader(data, 4, shuffle=True, num_workers=workers)
    valid = DataLoader(Points(broken if kind == "valid loader" else tmp_path / "whole"), 8, num_workers=workers)
    if kind == "valid loader":
        data.broken = tmp_path / "whole"
    if kind.endswith("loader"):
        broken.write_text(str(at))
    n_failed = 0
    for begin in (lambda: trainer.run(1, loader, valid), lambda: trainer.run(2, loader, valid)):
        while True:
            try:
                begin()
                break
            except (ZeroDivisionError, FileNotFoundError, StepError):
                n_failed += 1
                assert trainer.control.state == "paused" and trainer.failure.place in trainer.failure.line
                broken.unlink(missing_ok=True)
                begin = trainer.resume
    return trainer, n_failed


def state_of(trainer: Fit) -> dict[str, Any]:
    rows = [{name: value for name, value in row.items() if name != "time_s"} for row in trainer.history.epochs]
    tensors = [*trainer.model.state_dict().values()]
    tensors += [value for state in trainer.optimizer.state.values() for value in state.values()]  # pyright: ignore[reportOptionalMemberAccess]
    watch = trainer.lightning["callbacks"][0]
    return {
        "rows": rows,
        "losses": trainer.history.steps("train_loss") if callable(getattr(trainer.history, "steps", None)) else trainer.losses,
        "tensors": [tensor.tolist() for tensor in tensors],
        "random": repr(random_state()),
        "own": (trainer.seen, trainer.losses, float(trainer.mean.compute())),
        "counts": vars(trainer.train_state.counts),
        "hooks": {n: c for n, c in watch.counts.items() if n in HOOKS},
    }


def _cases() -> Iterator[tuple[int, str, int]]:
    draw = random.Random(0)
    for seed, kind in enumerate([*KINDS, *HOOKS, *KINDS]):
        n = {"metric": 4, "test_step": 8, "after test forward": 8}.get(kind, 2 if "epoch" in kind or kind == "on_validation_start" else 12)
        yield seed, kind, draw.randrange(n)


@pytest.mark.parametrize(("seed", "kind", "at"), list(_cases()))
def test_run_that_failed_and_was_repaired_equals_one_that_never_failed(seed: int, kind: str, at: int, tmp_path: Path) -> None:
    unbroken = state_of(run(seed, tmp_path / "a", "backward" if kind == "backward" else "", 10**6)[0])
    trainer, n_failed = run(seed, tmp_path / "b", kind, at)
    assert n_failed >= 1
    failed = state_of(trainer)
    for name, part in unbroken.items():
        assert failed[name] == part, name
