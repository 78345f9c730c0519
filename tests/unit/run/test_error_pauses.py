"""An error of the user's code pauses a run; repaired and resumed, the run equals one that never failed, bit for bit."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from samples import DEVICE, same_weights, some, without_times
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from nbtrain import AccumulationAddon, ConfigError, MultiGPUAddon, StateManagerAddon, StepError, Trainer
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


LEFT: dict[str, int] = {}  # calls of a place before its fault; outside of the trainer's objects, which are restored after an error


class Fault:
    """Raises at the call number `at` of the place `kind`, once."""

    def __init__(self, kind: str = "", at: int = 0) -> None:
        self.kind = kind
        LEFT[kind] = at

    def is_due(self, kind: str) -> bool:
        if kind != self.kind:
            return False
        LEFT[kind] -= 1
        return LEFT[kind] == -1

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


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


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
    seed_all(seed)
    model = make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    addons = [AccumulationAddon] + ([StateManagerAddon] if saves else [])
    options: dict[str, Any] = {"save_path": tmp_path / f"run{kind}", "every_n_steps": 3} if saves else {}
    trainer: Any = Fit.add_on(*addons)(
        model,
        DEVICE,
        optimizer=optimizer,
        scheduler=schedule,
        scheduler_step_on_batch=by_batch,
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
        broken.write_text(str(at + 8 if kind == "valid loader" else at))  # behind the batch that the check reads
    n_failed = 0
    for begin in (lambda: trainer.run(1, loader, valid), lambda: trainer.run(2, loader, valid)):
        while True:
            try:
                begin()
                break
            except (ZeroDivisionError, FileNotFoundError, StepError):
                n_failed += 1
                assert trainer.control.state == "paused" and trainer.failure.place in trainer.failure.choices
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


@pytest.mark.parametrize("case", some(_cases(), 5), ids=lambda case: "-".join(map(str, case)))
def test_run_that_failed_and_was_repaired_equals_one_that_never_failed(case: tuple[int, str, int], tmp_path: Path) -> None:
    seed, kind, at = case
    unbroken = state_of(run(seed, tmp_path / "a", "backward" if kind == "backward" else "", 10**6)[0])
    trainer, n_failed = run(seed, tmp_path / "b", kind, at)
    assert n_failed >= 1
    failed = state_of(trainer)
    for name, part in unbroken.items():
        assert failed[name] == part, name


class Mean(Trainer):
    """Fails on batches of negative numbers until `fixed`."""

    fixed = False

    def train_step(self, batch: Any) -> dict[str, Any]:
        if float(batch.sum()) < 0 and not self.fixed:
            raise ValueError("a negative batch")
        return {"loss": (self.model(batch) - 1).square().mean()}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self.train_step(batch)


def make(kind: Any = Mean, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    options = {"device": DEVICE, "on_error": "pause", "log_bar": False} | options
    return kind(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options)


def batches(*signs: int) -> list[torch.Tensor]:
    return [sign * torch.full((3, 2), 1.0 + i) for i, sign in enumerate(signs)]


def fail(trainer: Any, *args: Any, **options: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        trainer.run(*args, **options)
    assert trainer.control.state == "paused"
    return caught.value


def test_skipped_batch_is_left_out() -> None:
    trainer, whole = make(), batches(1, 1, -1, 1)
    fail(trainer, 1, whole)
    result = trainer.resume(skip=True)
    without = make()
    without.run(1, [whole[0], whole[1], whole[3]])
    assert result.status == "completed"
    assert same_weights(trainer.model, without.model)
    assert result.last["train_loss"] == without.result.last["train_loss"]


def test_batch_that_a_validation_skips_is_not_in_its_mean() -> None:
    trainer = make()
    fail(trainer, 1, batches(1, 1), DataLoader(torch.stack([*batches(1)[0], *batches(-1)[0], *batches(1)[0]]), 3))
    trainer.resume(skip=True)
    without = make()
    without.run(1, batches(1, 1), DataLoader(torch.stack([*batches(1)[0], *batches(1)[0]]), 3))
    assert trainer.result.last["val_loss"] == without.result.last["val_loss"]


def test_sample_that_cannot_be_read_is_skipped_with_its_batch(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("5")
    trainer = make(nonfinite="ignore")
    trainer.model = nn.Linear(4, 1)
    trainer.optimizer.param_groups[0]["params"] = list(trainer.model.parameters())
    trainer.fixed = True
    fail(trainer, 1, DataLoader(Points(broken), 2))
    assert trainer.failure.what == "the loader" and trainer.failure.place == "epoch 1, batch 3"
    assert trainer.resume(skip=True).status == "completed"
    assert trainer.train_state.meters["train"].n_batches == 12


def test_an_error_in_the_batch_of_the_check_pauses_the_run_in_the_validation_that_reads_it_again(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("3")
    torch.manual_seed(0)
    model = make_net()
    trainer: Any = Fit(model, DEVICE, optimizer=torch.optim.SGD(model.parameters(), 0.01), log_bar=False, on_error="pause")
    error = fail(trainer, 1, DataLoader(Points(tmp_path / "whole"), 4), DataLoader(Points(broken), 8))
    assert isinstance(error, FileNotFoundError) and trainer.counts.processed == 7
    broken.unlink()
    assert trainer.resume().status == "completed" and "val_loss" in trainer.history.epochs[0]


def test_an_epoch_that_a_broken_stream_ends_is_ended_with_all_that_comes_then() -> None:
    """The gradients of an open window, a schedule and the validation."""

    class Stream:
        """Gives five batches in an epoch but the first one: in that it breaks behind the fourth, which was not given yet, or ends there."""

        n = 0

        def __init__(self, breaks: bool) -> None:
            self.breaks = breaks

        def __iter__(self) -> Iterator[torch.Tensor]:
            self.n += 1
            if self.n > 1:
                yield from batches(1, 1, 1, 1, 1)
                return
            yield from batches(1, 1, 1)
            if self.breaks:
                yield batches(1, 1, 1, 1)[3]
                raise OSError("the connection is lost")

    def make_accumulating() -> Any:
        trainer = make(Mean.add_on(AccumulationAddon), accumulate=2)
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.1)
        return trainer

    trainer, whole = make_accumulating(), make_accumulating()
    error = fail(trainer, 2, Stream(breaks=True), batches(1))
    assert "the loader can't be read on from here: the next epoch follows" in error.__notes__[-1]
    assert trainer.resume().status == "completed"
    whole.run(2, Stream(breaks=False), batches(1))
    assert same_weights(trainer.model, whole.model)
    assert without_times(trainer.history.epochs) == without_times(whole.history.epochs)


class Refused(Trainer):
    """Its second backward pass fails, once, where it is given the fault."""

    fault = Fault()

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": _Broken.apply(self.model(batch), self.fault).square().mean()}


def test_error_of_the_backward_pass_in_an_open_window_says_what_is_lost() -> None:
    trainer = make(Refused.add_on(AccumulationAddon), accumulate=4)
    trainer.fault = Fault("backward", 1)
    error = fail(trainer, 1, batches(1, 1, 1, 1))
    assert trainer.failure.lost == "the gradients of the 1 batches before it in this window are lost"
    assert trainer.failure.lost in error.__notes__[-1]
    assert trainer.resume().status == "completed"
    assert len(trainer.history.epochs) == 1


def test_steps_are_recorded_as_if_a_callback_had_not_failed() -> None:
    calm, failed = (make(lightning={"callbacks": [Watch(fault)]}) for fault in (Fault(), Fault("on_train_batch_end", 2)))
    calm.run(1, batches(1, 1, 1, 1, 1))
    fail(failed, 1, batches(1, 1, 1, 1, 1))
    failed.resume()
    assert failed.history.steps["train"].state_dict() == calm.history.steps["train"].state_dict()


def test_batch_that_is_skipped_after_an_error_of_the_backward_pass_makes_no_update() -> None:
    trainer, whole = make(Refused), batches(1, 1, 1)
    trainer.fault = Fault("backward", 1)
    fail(trainer, 1, whole)
    trainer.resume(skip=True)
    without = make(Refused, on_error="raise")
    without.run(1, [whole[0], whole[2]])
    assert trainer.counts.step == without.counts.step == 2
    assert same_weights(trainer.model, without.model)
    assert trainer.counts.left_out == 1


@pytest.mark.parametrize("ends", ["stop", "another run"])
def test_stopped_after_an_error_it_is_saved_and_resumed_exactly(ends: str, tmp_path: Path) -> None:
    kind = Fit.add_on(StateManagerAddon)

    def begin(folder: str, fault: Fault) -> Any:
        seed_all(0)
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters())
        trainer: Any = kind(model, DEVICE, optimizer=optimizer, log_bar=False, on_error="pause", save_path=tmp_path / folder)
        trainer.fault = fault
        return trainer

    loader = DataLoader(Points(tmp_path / "whole"), 4, shuffle=True)
    unbroken = begin("a", Fault())
    unbroken.run(2, loader)
    failed = begin("b", Fault("after forward", 9))
    with pytest.raises(ZeroDivisionError):
        failed.run(2, loader)
    folder = failed.run_dir
    if ends == "stop":
        result = failed.stop()
        assert (result.status, result.reason) == ("stopped", "epoch 2, batch 3, after ZeroDivisionError: after forward")
    else:
        failed.run(1, loader)
    text = "The state after the error is in after-error.ckpt: resume from it begins with the batch that failed."
    assert text in (folder / "events.jsonl").read_text()
    resumed = begin("c", Fault())
    resumed.run(2, loader, resume=folder / "after-error.ckpt")
    assert same_weights(resumed.model, unbroken.model)


def test_error_of_a_validation_that_was_requested_goes_to_its_caller() -> None:
    trainer = make()
    trainer.fixed = True
    handle = trainer.run(300, batches(1, 1, 1), batches(1), background=True)
    trainer.pause()
    trainer.fixed = False
    with pytest.raises(ValueError, match="a negative batch"):
        trainer.evaluate(batches(-1))
    assert trainer.control.state == "paused" and trainer.failure is None
    trainer.fixed = True
    trainer.stop()
    assert handle.result.status == "stopped"


def test_paused_by_an_error_it_is_evaluated_changed_and_continues() -> None:
    trainer, other = make(), make()
    fail(trainer, 1, batches(1, -1, 1))
    assert trainer.evaluate(batches(1))["loss"] > 0
    trainer.predict(torch.ones(1, 2))
    trainer.fixed = other.fixed = True
    assert trainer.resume().status == "completed"
    other.run(1, batches(1, -1, 1))
    assert same_weights(trainer.model, other.model)


def test_hook_of_the_user_that_fails_is_called_again() -> None:
    calls = []

    def log(*args: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("no disk")

    trainer = make(hooks={"after_optimizer_step": log})
    fail(trainer, 1, batches(1, 1, 1))
    assert "after_optimizer_step" in trainer.failure.what
    assert trainer.resume().status == "completed"
    assert len(calls) == 4


def test_without_a_run_the_steps_are_those_of_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    class Better(Mean):
        fixed = True

    trainer = make(on_error="raise")
    with pytest.raises(ValueError, match="a negative batch"):
        trainer.run(1, batches(-1))
    trainer.use(Better)
    assert trainer.run(1, batches(-1)).status == "completed"
    assert trainer.resume(Mean) is None and type(trainer) is Mean
    assert capsys.readouterr().out == "No run is paused. The next run() uses the steps of Mean.\n"
    with pytest.raises(ConfigError, match="No run is in progress"):
        trainer.resume(Better, skip=True)
    assert type(trainer) is Mean


def test_run_in_several_processes_is_not_paused() -> None:
    with pytest.raises(ConfigError, match="a run in several processes can't be paused by an error"):
        make(Mean.add_on(MultiGPUAddon), device=["cpu", "cpu"]).run(1, batches(1))


def test_workers_end_with_a_run_that_was_left() -> None:
    trainer = make()
    fail(trainer, 1, DataLoader(torch.stack([*batches(1)[0], *batches(-1)[0], *batches(1)[0]]), 3, num_workers=1))
    assert multiprocessing.active_children()
    trainer.stop()
    assert not multiprocessing.active_children()
