"""Tips about a run: each rule on a run that has the problem, and on one that has not."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid
from torch import nn
from torch.nn.functional import smooth_l1_loss
from torch.utils.data import DataLoader, TensorDataset

from nbtrain.events import Event, Progress
from nbtrain.views.advice import Advice, Explosion
from nbtrain.views.html import record_html
from nbtrain.views.terminal import LogView
from nbtrain.views.text import Board, record_text


class Clock:
    """Stands until it is moved."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def watched(trainer: Any, clock: Clock | None = None) -> Board:
    """The board of the runs of `trainer`."""
    board = Board()
    trainer.recorder.add(board)
    if clock is not None:
        trainer.recorder.clock = clock
    return board


def tips_of(trainer: Any, n_epochs: int, *loaders: Any, clock: Clock | None = None) -> list[str]:
    """The tips that the board shows after a run."""
    board = watched(trainer, clock)
    trainer.run(n_epochs, *loaders)
    return board.advice.lines


class Timed(Regress):
    """Each step takes a tenth of a second."""

    clock = Clock()

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.clock.now_s += 0.1
        return super().train_step(batch)


class Slow(DataLoader[Any]):
    """Takes `wait_s` for each batch."""

    clock, wait_s = Clock(), 0.0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.clock.now_s += self.wait_s
            yield batch


def test_metric_that_has_stopped_improving_is_told() -> None:
    trainer = make_trainer(optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    board = watched(trainer)
    trainer.run(10, make_loader(), make_valid())
    assert board.advice.lines == []
    trainer.run(2, make_loader(), make_valid())
    assert board.advice.lines == []  # each run is read by itself
    trainer = make_trainer(optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    assert tips_of(trainer, 12, make_loader(), make_valid()) == ["val_loss has not improved since epoch 1 of 12"]


def test_run_that_improves_has_no_tip() -> None:
    assert tips_of(make_trainer(), 14, make_loader(), make_valid()) == []


@pytest.mark.parametrize(
    ("wait_s", "n_cores", "expected"),
    [
        (0.3, 8, ["75 % of the time waits for data: num_workers=4 may help (now 0)"]),
        (0.3, 2, ["75 % of the time waits for data: num_workers=2 may help (now 0)"]),
        (0.3, 0, []),
        (0.02, 8, []),
    ],
)
def test_slow_loader_is_told_where_more_workers_may_help(
    wait_s: float, n_cores: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbtrain.run.record.n_cores", lambda: n_cores)
    trainer: Any = make_trainer(Timed)
    loader = Slow(make_loader().dataset, 16)
    trainer.clock = loader.clock = Clock()
    loader.wait_s = wait_s
    assert tips_of(trainer, 5, loader, clock=trainer.clock) == expected


class Dead(Regress):
    """Its loss does not depend on the weights."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch[0]).sum() * 0 + 0.7}


class Far(Regress):
    """Its loss grows with the distance, and not with the square of it: it stays finite."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": smooth_l1_loss(self.model(batch[0]), batch[1])}


def test_loss_that_was_thrown_off_is_told_with_its_learning_rate() -> None:
    trainer = make_trainer(Far, model=nn.Linear(8, 1), optimizer=lambda params: torch.optim.SGD(params, lr=1000.0))
    first, *_ = tips_of(trainer, 40, make_loader())
    assert first.startswith("the loss is not falling, from ") and first.endswith(": lr 1000 may be too high")


def test_loss_that_falls_is_not_told() -> None:
    trainer = make_trainer(Far, model=nn.Linear(8, 1), optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    assert not any(line.startswith("the loss") for line in tips_of(trainer, 40, make_loader()))


def test_overfitting_is_told_instead_of_the_wait() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    trainer = make_trainer(model=model)
    train, valid = torch.utils.data.random_split(noise, [24, 40], generator)
    (line,) = tips_of(trainer, 40, DataLoader(train, 8), DataLoader(valid, 40))
    best = trainer.history.best
    assert line.startswith("train_loss ") and line.endswith(f" and rising: overfitting since epoch {best['epoch']}")


def test_tips_are_lines_below_the_table_and_at_the_end_of_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(Dead, log_bar=True)
    board = watched(trainer)
    trainer.run(20, make_loader())
    tips = ["tip: the loss has been constant since step 1", "tip: train_loss has not improved since epoch 1 of 20"]
    assert [line for line in record_text(board).splitlines() if line.startswith("tip")] == tips
    assert "\n".join(f'<div style="color:var(--jp-ui-font-color2,inherit)">{tip}</div>' for tip in tips) in record_html(board)
    assert isinstance(trainer.view, LogView) and capsys.readouterr().out.splitlines()[-3:-1] == tips


def test_advice_can_be_turned_off() -> None:
    trainer = make_trainer(Dead, advice=False)
    board = watched(trainer)
    trainer.run(20, make_loader())
    assert board.header["advice"] is False and board.advice.lines == []


def _healthy(seed: int) -> list[Event]:
    """A run that still improves: its losses fall with some noise, its validation a bit above its training."""
    rng = random.Random(seed)
    n_epochs, n_batches = rng.randint(1, 90), rng.randint(2, 60)
    floor, decay, noise = rng.uniform(0, 0.2), n_epochs / rng.uniform(0.5, 3), rng.uniform(0, 0.03)
    share, batch_s, scale, now_s, step = rng.uniform(0, 0.35), rng.uniform(1e-3, 0.3), 10 ** rng.uniform(-3, 3), 0.0, 0
    header = {"monitor": "val_loss", "monitor_mode": "min", "num_workers": rng.randint(0, 8), "n_cores": 8}
    events = [Event("start", Progress(n_epochs=n_epochs), data=header)]
    for epoch in range(n_epochs):
        losses = []
        for batch in range(n_batches):
            level = floor + math.exp(-(epoch + batch / n_batches) / decay)
            losses.append(scale * level * (1 + 5 * noise * rng.gauss(0, 1)))
        step += n_batches
        now_s += n_batches * batch_s
        at = Progress(phase="train", epoch=epoch, n_epochs=n_epochs, step=step, processed=step, elapsed_s=now_s)
        block = {"values": {"train_loss": losses}, "n": n_batches, "samples": 0, "lr": 1e-3, "data_s": share * n_batches * batch_s}
        train = sum(losses) / n_batches
        val = train * rng.uniform(1.05, 1.05 + 2 * noise)
        acc = {"train_acc": 1 - train / scale / 2, "val_acc": 1 - val / scale / 2}
        row = {"epoch": epoch + 1, "step": step, "train_loss": train, "val_loss": val, **acc}
        events += [
            Event("steps", at, data=block),
            Event("epoch", Progress(epoch=epoch + 1, n_epochs=n_epochs, step=step, processed=step), data={"row": row}),
        ]
    return events


def test_two_hundred_healthy_runs_have_no_tip() -> None:
    told = {}
    for seed in range(200):
        advice = Advice()
        for event in _healthy(seed):
            advice.update(event)
            if advice.lines:
                told[seed] = advice.lines
    assert told == {}


def test_line_does_not_flicker_around_its_threshold() -> None:
    advice = Advice()
    advice.update(Event("start", Progress(), data={"num_workers": 0, "n_cores": 8}))
    shown, now_s, rng = [], 0.0, random.Random(0)
    for _ in range(200):
        now_s += 1.0
        block = {"values": {}, "n": 10, "samples": 0, "lr": None, "data_s": rng.uniform(0.35, 0.66)}
        advice.update(Event("steps", Progress(phase="train", elapsed_s=now_s), data=block))
        shown.append(bool(advice.lines))
    assert sum(a != b for a, b in zip(shown, shown[1:])) == 1 and shown[-1]


def explosion(losses: list[float], **header: float) -> str:
    """What is said after these losses, which come in blocks of 25 as those of a run do."""
    rule = Explosion({"keeps_states": True, **header}, Progress())
    for first in range(0, len(losses), 25):
        block = losses[first : first + 25]
        data = {"n": len(block), "values": {"train_loss": block}}
        rule.update(Event("steps", Progress(phase="train", step=first + len(block)), 0.0, data))
    return rule.line


@pytest.mark.parametrize("step", [51, 60, 99, 130])
def test_loss_that_has_jumped_or_is_not_finite_has_the_call_that_explains_it(step: int) -> None:
    usual = [1.0 + 0.1 * (i % 7) for i in range(step - 1)]
    assert explosion([*usual, 50.0, *usual]) == (
        f"the loss jumped to 50 at step {step}: see trainer.replay(step={step}) and trainer.blame(step={step})"
    )
    assert explosion([*usual, math.nan, 50.0]) == f"the loss is nan at step {step}: trainer.replay(step={step}).debug() shows why"
    assert explosion([*usual, 9.0, *usual]) == ""


def test_loss_that_falls_or_is_young_has_not_jumped() -> None:
    assert explosion([100.0 * 0.9**i for i in range(200)]) == "" == explosion([0.01] * 20 + [5.0] * 200)


def test_loss_that_jumps_far_below_the_first_one_has_not_jumped() -> None:
    assert explosion([2.4, *[0.0005] * 100, 0.08, *[0.0005] * 50]) == ""
    assert explosion([*[0.001] * 60, 0.0153, *[0.001] * 50], first_loss=2.4) == ""  # a second run
    assert explosion([*[0.001] * 60, 0.0153, *[0.001] * 50]).startswith("the loss jumped to 0.0153 at step 61")
    assert explosion([2.4, *[0.0005] * 100, 0.3, *[0.0005] * 50]).startswith("the loss jumped to 0.3 at step 102")


@pytest.mark.parametrize(("accelerator", "n", "is_told"), [("cuda", 5120, True), ("cuda", 320, False), ("", 5120, False)])
def test_gpu_that_a_long_run_on_the_cpu_leaves_idle_is_told(
    accelerator: str, n: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbtrain.run.record.accelerator_type", lambda: accelerator)
    trainer: Any = make_trainer(Timed, device="cpu")
    trainer.clock = Clock()
    tip = 'the device "cuda" is idle, and this run is on the CPU: leave out device="cpu"'
    assert tips_of(trainer, 1, make_loader(n), clock=trainer.clock) == [tip] * is_told
