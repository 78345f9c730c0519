"""What is asked of a run while it is on, in scripts: pausing, ending, live edits, and the signals."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from samples import Regress, make_loader, make_trainer, make_valid, some
from torch.utils.data import DataLoader, default_collate

from nbtrain import Callback, ConfigError, OptionError, RunPaused, RunResult, RunStopped, StateManagerAddon, Trainer
from nbtrain.base.interrupts import signals_stop, workers_ignore_interrupts
from nbtrain.code.addon import SourceAddon
from nbtrain.engine.control import Boundary, Control, RunState
from nbtrain.events import Event
from nbtrain.run import failed_runs
from nbtrain.run.handle import RunHandle
from nbtrain.schedules import WarmUpScheduler

pytestmark = pytest.mark.usefixtures("ranked_locks")


class Asks(Regress):
    """Calls `ask` in the training batch with the number `at`, counted from 1."""

    at, n = 0, 0
    ask: Any = None

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.n += 1
        if self.n == self.at:
            self.ask()
        return super().train_step(batch)

    def test_step(self, batch: Any) -> dict[str, Any]:
        return Regress.train_step(self, batch)


def measured(trainer: Trainer) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "time_s"} for row in trainer.history.epochs]


def same(one: Trainer, other: Trainer) -> bool:
    states = zip(one.model.state_dict().values(), other.model.state_dict().values())
    return all(torch.equal(a, b) for a, b in states) and measured(one) == measured(other)


def asking(at: int, ask: Any, kind: type[Trainer] = Asks, **options: Any) -> Any:
    trainer = make_trainer(kind, **options)
    trainer.at, trainer.ask = at, lambda: ask(trainer)
    return trainer


def start(trainer: Any, *args: Any) -> RunHandle:
    handle = trainer.run(*args, background=True)
    assert isinstance(handle, RunHandle)
    return handle


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("options", [{}, {"lightning": {"accumulate_grad_batches": 2}}, {"scheduler": lambda step: 0.01 / (step + 1)}])
def test_a_paused_run_goes_on_as_if_it_had_not_been(lean: bool, options: dict[str, Any]) -> None:
    never = make_trainer(**options)
    never.run(3, make_loader(), make_valid())
    paused = asking(7, lambda trainer: trainer.pause(), **options)
    paused.short_way = lean
    handle = start(paused, 3, make_loader(), make_valid())
    with pytest.raises(RunPaused, match=r"^run paused at epoch 2, batch [34]\n  trainer.resume\(\)  # continues it, while it is paused$"):
        handle.wait()
    torch.rand(3)
    paused.model.eval()
    assert paused.predict(torch.ones(2, 8)).shape == (2, 1)
    assert paused.result.status == handle.status == "paused"
    assert paused.resume() == paused.result and paused.result.status == "completed"
    assert same(never, paused)


def test_a_pause_in_a_validation_holds_it() -> None:
    class InValidation(Asks):
        def test_step(self, batch: Any) -> dict[str, Any]:
            if not self.at:
                self.at = 1
                self.pause()
            return super().test_step(batch)

    never = make_trainer()
    never.run(2, make_loader(), make_valid())
    paused = make_trainer(InValidation, lightning={"num_sanity_val_steps": 0})
    with pytest.raises(RunPaused, match="paused at epoch 1, validation batch 2"):
        start(paused, 2, make_loader(), make_valid()).wait()
    with pytest.raises(ConfigError, match="paused inside a batch or a validation"):
        paused.validate_now()
    paused.resume()
    assert same(never, paused)


def test_a_pause_in_an_accumulation_window_waits_for_its_end() -> None:
    trainer = asking(1, lambda trainer: trainer.pause(), lightning={"accumulate_grad_batches": 4})
    with pytest.raises(RunPaused, match="paused at epoch 1, batch 5"):
        start(trainer, 1, make_loader()).wait()
    trainer.stop()


def test_a_step_may_end_its_run() -> None:
    trainer = asking(8, lambda trainer: trainer.stop())
    result = trainer.run(3, make_loader(), make_valid())
    assert (result.status, result.reason) == ("stopped", "epoch 2, batch 4")
    assert len(trainer.history) == 1 and len(trainer.history.steps["train"]) == 8
    assert trainer.run(1, make_loader()).status == "completed" and len(trainer.history) == 2


@pytest.mark.parametrize("lean", some([True, False], 2))
@pytest.mark.parametrize("at", some([1, 3, 5, 7, 10, 14], 2))
@pytest.mark.parametrize("options", [{}, {"every_n_steps": 4}, {"lightning": {"accumulate_grad_batches": 2}}])
def test_a_run_that_was_ended_anywhere_is_resumed_exactly(tmp_path: Path, at: int, options: dict[str, Any], lean: bool) -> None:
    plain = {name: value for name, value in options.items() if name == "lightning"}
    never = make_trainer(**plain)
    never.run(3, make_loader(), make_valid())
    kind = Asks.add_on(StateManagerAddon)
    ended = asking(at, lambda trainer: trainer.stop(), kind, save_path=tmp_path, **options)
    ended.short_way = lean
    assert ended.run(3, make_loader(), make_valid()).status == "stopped"
    again = make_trainer(kind, save_path=tmp_path, **options)
    torch.rand(5)
    assert again.run(3, make_loader(), make_valid(), resume="auto").status == "completed"
    assert same(never, again)


def test_a_stop_in_a_validation_lets_it_end_where_a_state_is_saved(tmp_path: Path) -> None:
    class InValidation(Asks):
        def test_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.epoch == 1:
                self.stop()
            return super().test_step(batch)

    never = make_trainer()
    never.run(4, make_loader(), make_valid())
    kind = InValidation.add_on(StateManagerAddon)
    assert make_trainer(kind, save_path=tmp_path).run(4, make_loader(), make_valid()).reason == "epoch 3, batch 1"
    again = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)
    again.run(4, make_loader(), make_valid(), resume="auto")
    assert same(never, again)
    assert make_trainer(InValidation).run(4, make_loader(), make_valid()).reason == "epoch 2, validation batch 2"


def test_ctrl_c_ends_a_run_after_its_batch_and_is_python_s_own_afterwards(tmp_path: Path) -> None:
    press = lambda trainer: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    trainer = asking(8, press, Asks.add_on(StateManagerAddon), save_path=tmp_path)
    with pytest.raises(RunStopped) as stopped:
        trainer.run(3, make_loader(), make_valid())
    saved = tmp_path / "run-001" / "checkpoints" / "epoch=1-step=8.ckpt"
    assert str(stopped.value) == f"stopped at epoch 2, batch 4 · state saved in {saved}"
    assert (trainer.result.status, trainer.result.reason) == ("interrupted", "epoch 2, batch 4")
    assert [path.name for path in (tmp_path / "run-001" / "checkpoints").glob("epoch=1-step=8*")] == ["epoch=1-step=8.ckpt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


class Pressed:
    """Ctrl-C comes while this object is destroyed: Python prints what a destructor raises, and goes on."""

    def __init__(self) -> None:
        self.me = self  # the garbage collector destroys it

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def in_destructor() -> None:
    Pressed()
    gc.collect()


def in_finalizer() -> None:
    victim = type("Victim", (), {})()
    weakref.finalize(victim, os.kill, os.getpid(), signal.SIGINT)
    del victim


class Noisy(L.Callback):
    """Presses in the moment `name`, once."""

    def __init__(self, name: str, press: Callable[[], None]) -> None:
        self.n = 0
        setattr(self, name, lambda *args, **options: self.once(press))

    def once(self, press: Callable[[], None]) -> None:
        self.n += 1
        if self.n == 1:
            press()


MOMENTS = ["setup", "on_train_start", "on_train_batch_start", "on_before_zero_grad", "on_train_batch_end", "on_validation_start"]
MOMENTS += ["on_validation_batch_end"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("press", [in_destructor, in_finalizer])
@pytest.mark.parametrize("moment", ["keep", "loader", *MOMENTS])
def test_ctrl_c_within_a_destructor_is_not_lost(moment: str, press: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = [Noisy(moment, press)] if moment in MOMENTS else []
    trainer = make_trainer(lightning={"callbacks": callbacks})
    loader: Any = make_loader()
    if moment == "keep":
        monkeypatch.setattr(SourceAddon, "keep", lambda *_: press())
    if moment == "loader":
        dataset = loader.dataset
        loader = DataLoader(dataset, 16, collate_fn=lambda rows: (press() if len(rows) == 6 else None, default_collate(rows))[1])
    with pytest.raises(RunStopped):
        trainer.run(3, loader, make_valid())
    monkeypatch.undo()
    assert trainer.result.status == "interrupted" and trainer.counts.epoch < 3
    assert trainer.run(1, make_loader(), make_valid()).status == "completed"


def test_ctrl_c_while_a_run_is_prepared_ends_it_before_its_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SourceAddon, "keep", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        trainer = make_trainer()
        with pytest.raises(RunStopped, match="^stopped at epoch 1, batch 1 · trainer.result has what it reached$"):
            trainer.run(3, make_loader())
    result = trainer.result
    assert (result.status, result.reason, trainer.counts.processed) == ("interrupted", "epoch 1, batch 1", 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_the_first_batch_and_right_after_going_on_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    def hurried(handle: RunHandle, timeout_s: float | None = None) -> RunResult:
        os.kill(os.getpid(), signal.SIGINT)
        return wait(handle, timeout_s)

    wait = RunHandle.wait
    never = make_trainer()
    never.run(40, make_loader())
    trainer = make_trainer()
    monkeypatch.setattr(failed_runs, "in_shell", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(SourceAddon, "keep", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(RunPaused, match="epoch 1, batch 1"):
            trainer.run(40, make_loader())
    with monkeypatch.context() as patch:
        patch.setattr(RunHandle, "wait", hurried)
        with pytest.raises(RunPaused):
            trainer.resume()
    assert trainer.resume().status == "completed" and same(never, trainer)


def test_a_second_ctrl_c_ends_at_once() -> None:
    def twice(trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    trainer = asking(8, twice)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(3, make_loader())
    assert trainer.result.status == "interrupted" and trainer.control.state == "idle"


@pytest.mark.parametrize("n_workers", [0, 1])
def test_sigterm_saves_and_exits_with_143(n_workers: int, tmp_path: Path) -> None:
    """SLURM sends it to the workers of a loader too, and what comes to torchrun it passes on: the second one is the same request."""

    def kill(trainer: Trainer) -> None:
        for pid in (*(child.pid for child in multiprocessing.active_children()), os.getpid(), os.getpid()):
            os.kill(pid or 0, signal.SIGTERM)

    trainer = asking(8, kill, Asks.add_on(StateManagerAddon), save_path=tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        trainer.run(3, make_loader(num_workers=n_workers), make_valid())
    assert exit_info.value.code == 143
    assert (trainer.result.status, trainer.result.reason) == ("interrupted", "SIGTERM at epoch 2, batch 4")
    never, again = make_trainer(), make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)
    never.run(3, make_loader(), make_valid())
    again.run(3, make_loader(num_workers=n_workers), make_valid(), resume="auto")
    assert same(never, again)


@pytest.mark.skipif(sys.platform != "linux", reason="a worker reads in /proc whether its parent handles the signal")
def test_a_worker_outlives_sigterm_until_the_run_no_longer_handles_it() -> None:
    loader = make_loader(num_workers=1)
    with signals_stop(Control()), workers_ignore_interrupts(loader):
        batches = iter(loader)
        next(batches)
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid or 0, signal.SIGTERM)
        assert len(list(batches)) == 4
        batches = iter(loader)
        next(batches)
        (worker,) = multiprocessing.active_children()
    worker.terminate()  # as multiprocessing does at the end of a process
    worker.join()
    assert worker.exitcode == 0


def test_a_signal_before_the_ranks_meet_stops_all_and_one_after_they_parted_ends_the_process() -> None:
    control, sent = Control(), list[int | None]()
    control.begin(lambda state: None)
    control.stop(signal.SIGTERM, late=True)
    control.stop_with(sent.append)
    assert (control.state, control.signum, sent) == ("running", None, [signal.SIGTERM]) and control.is_stopping
    control.end()
    assert control.signum == signal.SIGTERM


ENDS = {"exit()": 0, "": 0, "sys.exit(3)": 3, "1 / 0": 1}


@pytest.mark.long
@pytest.mark.parametrize("end", [end if end == "exit()" else pytest.param(end, marks=pytest.mark.long) for end in ENDS])
def test_a_process_that_ends_with_a_run_in_the_background_ends_cleanly_and_saves_it(end: str, tmp_path: Path) -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from samples import Regress, make_loader, make_trainer
from nbtrain import StateManagerAddon
trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path={str(tmp_path)!r}, every_n_epochs=1_000_000, save_best=False)
trainer.run(1_000_000, make_loader(), background=True)
while trainer.counts.processed < 7:
    time.sleep(0.01)
{end}
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == ENDS[end]
    assert ended.stderr.count("Traceback") == (end == "1 / 0") and (ended.stderr == "" or end == "1 / 0"), ended.stderr
    assert len(list(tmp_path.glob("run-*/checkpoints/epoch=*"))) == 1


def test_a_handler_of_the_user_s_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: heard.append(signum))
    try:
        trainer = asking(3, lambda trainer: os.kill(os.getpid(), signal.SIGINT))
        assert trainer.run(1, make_loader()).status == "completed" and heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("set_", "expected"), [({"lr": 0.002}, "lr 0.01 → 0.002"), ({"weight_decay": 0.1}, "weight_decay 0 → 0.1")])
def test_a_setting_holds_from_the_next_batch_on_and_is_marked(set_: dict[str, float], expected: str) -> None:
    trainer = asking(7, lambda trainer: trainer.set(**set_))
    trainer.run(2, make_loader())
    [(place, text)] = trainer.history.marks
    assert (place.epoch, place.batch, text) == (1, 1, expected)
    assert [group[name] for group in trainer.optimizer.param_groups for name in set_] == list(set_.values())


@pytest.mark.parametrize("scheduler", ["function", "instance", "factory"])
def test_a_schedule_is_scaled_with_the_rate(scheduler: str, tmp_path: Path) -> None:
    def make(kind: type[Trainer], **options: Any) -> Any:
        optimizer = torch.optim.SGD
        if scheduler == "function":
            options["scheduler"] = lambda step: 0.1 * 0.9**step
        elif scheduler == "factory":
            options["scheduler"] = lambda optimizer, plan: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.total_steps)
        trainer = make_trainer(kind, optimizer=lambda params: optimizer(params, lr=0.1), **options)
        if scheduler == "instance":
            trainer = make_trainer(
                kind,
                model=trainer.model,
                optimizer=trainer.optimizer,
                scheduler=torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5),
                **options,
            )
        return trainer

    plain = make(Asks)
    plain.run(2, make_loader())
    edited = make(Asks)
    edited.at, edited.ask = 3, lambda: edited.set(lr=edited.optimizer.param_groups[0]["lr"] / 4)
    edited.run(2, make_loader())
    rates = [row["lr"] for row in plain.history.epochs]
    assert [row["lr"] * 4 for row in edited.history.epochs] == pytest.approx(rates, rel=1e-12)
    assert edited.optimizer.param_groups[0]["lr"] * 4 == pytest.approx(plain.optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15)


def test_a_setting_between_two_runs_holds_for_the_next_and_is_marked_there() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader())
    trainer.set(lr=0.5)
    trainer.run(1, make_loader())
    assert [row["lr"] for row in trainer.history.epochs] == [0.01, 0.5]
    assert [(place.run, text) for place, text in trainer.history.marks] == [(2, "lr 0.01 → 0.5")]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda t: t.set(lrr=1), OptionError, "Adam has no option 'lrr'.\n  Did you mean 'lr'?"),
        (lambda t: t.set(lr=-1), ConfigError, "lr=-1 must be a positive number.\n  Give lr=1e-3, for example."),
        (lambda t: t.pause(), ConfigError, "No run is in progress.\n  Start one with run(n_epoch, loader)."),
        (lambda t: t.resume(), ConfigError, "No run is in progress.\n  Start one with run(n_epoch, loader)."),
        (
            lambda t: t.validate_now(),
            ConfigError,
            "There is no run to validate.\n  evaluate(loader) validates without a run.",
        ),
    ],
)
def test_what_cannot_be_done_is_said(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        call(make_trainer())
    assert str(error.value) == text


def test_what_trains_or_records_is_refused_while_a_run_is_on() -> None:
    trainer = asking(2, lambda trainer: trainer.pause())
    with pytest.raises(RunPaused):
        start(trainer, 1, make_loader()).wait()
    for again in (lambda: trainer.validate(make_valid()), lambda: trainer.run_batch(None)):
        with pytest.raises(ConfigError) as error:
            again()
        lines = ["A run of this trainer is paused.", "epoch 1, batch 3", "resume() continues a paused one; stop() ends it."]
        assert str(error.value) == "\n  ".join(lines)
    assert trainer.stop().status == "stopped"


def elsewhere(call: Any) -> None:
    """`call` in another thread, as a cell calls it while a run is in the background."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("options", [{}, {"lightning": {"accumulate_grad_batches": 3}}], ids=["every batch", "windows"])
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "on_train_batch_end"])
def test_free_leaves_the_gradients_of_a_run_that_is_on(hook: str, options: dict[str, Any]) -> None:
    expected = make_trainer(**options)
    expected.run(2, make_loader())
    trainer = make_trainer(**options)
    trainer.lightning = trainer.lightning | {"callbacks": [LambdaCallback(**{hook: lambda *args: elsewhere(trainer.free)})]}
    trainer.run(2, make_loader())
    assert same(trainer, expected)
    trainer.free()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("place", ["running", "paused", "in a step", "in a validation"])
def test_the_mode_is_not_changed_while_a_run_is_on(place: str) -> None:
    refused: list[str] = []

    def change(own_thread: bool = False) -> None:
        calls = {"toggle": lambda: trainer.toggle(), "to test": lambda: trainer.toggle("test")}
        for call in calls.values() if own_thread else [*calls.values(), lambda: setattr(trainer, "mode", "test")]:
            with pytest.raises(ConfigError) as error:
                call()
            refused.append(str(error.value).splitlines()[0])

    trainer: Any = None
    if place == "paused":
        trainer = asking(2, lambda trainer: trainer.pause())
        with pytest.raises(RunPaused):
            start(trainer, 2, make_loader()).wait()
        change()
        trainer.resume()
        expected = "The mode can't be changed while a run is paused."
    else:
        looks = {"running": "on_train_batch_end", "in a step": "on_train_batch_start", "in a validation": "on_validation_batch_end"}
        look = lambda *args: change(own_thread=True) if place == "in a step" else elsewhere(change)  # noqa: E731
        trainer = make_trainer(lightning={"callbacks": [LambdaCallback(**{looks[place]: look})]})
        trainer.run(2, make_loader(), make_valid())
        expected = "The mode can't be changed while a run is on."
    assert set(refused) == {expected} and trainer.mode == "train" and trainer.counts.epoch == 2
    trainer.toggle()
    assert trainer.mode == "test"


def test_validate_now_is_as_a_validation_of_the_run_and_draws_nothing_from_it() -> None:
    never = make_trainer()
    never.run(2, make_loader(), make_valid())
    found: list[Any] = []
    trainer = asking(3, lambda trainer: found.append(trainer.validate_now()))
    trainer.run(2, make_loader(), make_valid())
    assert found == [None]  # in a step it is left for the end of the batch
    losses = [[row[name] for name in ("train_loss", "val_loss")] for row in (*never.history.epochs, *trainer.history.epochs)]
    assert losses[:2] == losses[2:] and all(map(torch.equal, never.model.parameters(), trainer.model.parameters()))
    assert [text.split(":")[0] for _, text in trainer.history.marks] == ["validated"]


class Ranked(Asks):
    pauses_in = ""

    def test_step(self, batch: Any) -> dict[str, Any]:
        if self.control.state == "running" and self.pauses_in == "validation":
            self.pauses_in = ""
            self.pause()
        return super().test_step(batch)

    def metric_on_epoch_end(self) -> dict[str, float]:
        log = self.log_train if self.mode == "train" else self.log_test
        return {"mode": float(self.mode == "test"), "n_batches": float(len(log["loss"]))}


@pytest.mark.parametrize("where", ["training", "validation"])
def test_a_paused_run_can_be_evaluated_and_does_not_notice(where: str) -> None:
    never = make_trainer(Ranked)
    never.run(2, make_loader(), make_valid())
    trainer = asking(3 if where == "training" else 0, lambda trainer: trainer.pause(), Ranked, lightning={"num_sanity_val_steps": 0})
    trainer.pauses_in = where
    with pytest.raises(RunPaused, match="validation batch 2" if where == "validation" else "epoch 1, batch 4"):
        start(trainer, 2, make_loader(), make_valid()).wait()
    other = make_trainer(Ranked)
    other.model.load_state_dict(trainer.model.state_dict())
    events = len(trainer.history.tests)
    assert trainer.evaluate(make_valid()) == other.evaluate(make_valid()) and len(trainer.history.tests) == events
    trainer.resume()
    assert same(trainer, never)


def test_a_callback_may_evaluate_at_the_end_of_each_epoch() -> None:
    found: list[float] = []
    callback = LambdaCallback(on_train_epoch_end=lambda *_: found.append(trainer.evaluate(make_valid())["loss"]))
    trainer = make_trainer(Asks, lightning={"callbacks": [callback]})
    trainer.run(2, make_loader(), make_valid())
    never = make_trainer(Asks)
    never.run(2, make_loader(), make_valid())
    assert same(trainer, never) and found[1] == never.evaluate(make_valid())["loss"]


def test_a_run_without_a_valid_loader_says_so_when_it_is_to_be_validated() -> None:
    trainer = asking(2, lambda trainer: trainer.pause())
    with pytest.raises(RunPaused):
        start(trainer, 1, make_loader()).wait()
    with pytest.raises(ConfigError, match="This run has no valid_loader."):
        trainer.validate_now()
    assert trainer.resume().status == "completed"


def test_a_state_that_is_saved_by_hand_in_mid_epoch_is_resumed_exactly(tmp_path: Path) -> None:
    kind = Asks.add_on(StateManagerAddon)
    never = make_trainer()
    never.run(3, make_loader(), make_valid())
    trainer = asking(8, lambda trainer: trainer.pause(), kind, save_path=tmp_path)
    with pytest.raises(RunPaused):
        start(trainer, 3, make_loader(), make_valid()).wait()
    torch.rand(7)  # the saved random numbers are the run's
    path = trainer.save_state()
    trainer.stop()
    again = make_trainer(kind, save_path=tmp_path)
    again.run(3, make_loader(), make_valid(), resume=path)
    assert path.name == "epoch=1-step=8.ckpt" and same(never, again)


def test_the_time_of_a_pause_does_not_count() -> None:
    events: list[Event] = []
    trainer = asking(3, lambda trainer: trainer.pause())
    trainer.recorder.add(type("Sink", (), {"update": staticmethod(events.append)})())
    time_s = [0.0]
    trainer.recorder.clock = lambda: time_s[0]
    with pytest.raises(RunPaused):
        start(trainer, 1, make_loader()).wait()
    time_s[0] = 1000.0
    trainer.resume()
    assert events[-1].kind == "end" and events[-1].progress.elapsed_s == 0.0
    assert [event.data["state"] for event in events if event.kind == "state"] == ["pausing", "paused", "running"]


def test_steps_of_another_kind_are_refused_and_say_why() -> None:
    trainer = asking(2, lambda trainer: trainer.pause())
    with pytest.raises(RunPaused):
        start(trainer, 1, make_loader()).wait()
    with pytest.raises(ConfigError, match="has StateManagerAddon, and this trainer was made without"):
        trainer.resume(Regress.add_on(StateManagerAddon))
    trainer.resume(Regress)
    assert type(trainer) is Regress and trainer.result.status == "completed"


def test_an_error_of_a_request_is_the_asker_s_and_not_the_run_s() -> None:
    trainer = asking(2, lambda trainer: trainer.pause())
    with pytest.raises(RunPaused):
        start(trainer, 1, make_loader()).wait()
    with pytest.raises(ZeroDivisionError):
        trainer.control.do(lambda at: 1 / 0)
    assert trainer.resume().status == "completed"


def test_a_background_run_raises_where_it_is_waited_for() -> None:
    def fail(trainer: Trainer) -> None:
        raise RuntimeError("spoilt")

    handle = start(asking(3, fail), 1, make_loader())
    with pytest.raises(RuntimeError, match="spoilt"):
        handle.wait()
    assert handle.status == "failed" and repr(handle) == "RunHandle(failed · epoch 1, batch 3)"


def test_the_training_thread_has_the_settings_of_the_one_that_began_it() -> None:
    seen: list[Any] = []

    def work() -> Any:
        seen.extend([torch.get_default_device(), torch.is_grad_enabled(), threading.current_thread().name])

    with torch.device("meta"), torch.no_grad():
        handle = RunHandle(Control(), lambda: "here")
    handle.start(work)
    handle.join()
    assert seen == [torch.device("meta"), False, "nbtrain run"]


def test_a_pause_is_told_before_the_run_tells_that_it_is_there() -> None:
    told: list[str] = []
    control = Control()

    def tell(state: str) -> None:
        if state == "pausing":
            boundary.set()
            ran.wait(0.2)  # the run gets time to be there first
        told.append(state)

    boundary, ran = threading.Event(), threading.Event()
    control.begin(tell)
    trainer: Any = SimpleNamespace(lightning_module=torch.nn.Linear(1, 1), callbacks=[])

    def run() -> None:
        boundary.wait()
        control.attend(Boundary(trainer, "train", True))
        ran.set()

    control.thread = threading.Thread(target=run, daemon=True)
    control.thread.start()
    control.pause()
    assert control.wait_settled(5) and told == ["pausing", "paused"]
    control.proceed()
    control.thread.join()
    assert told == ["pausing", "paused", "running"]


class Pauses(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_paused(self, *args: Any) -> None:
        self.heard.append("paused")

    def on_resumed(self, *args: Any) -> None:
        self.heard.append("resumed")


def test_a_second_pause_right_after_resume_is_one_more_pause() -> None:
    pauses, states = Pauses(), list[str]()
    trainer = asking(3, lambda trainer: trainer.pause(), lightning={"callbacks": [pauses]})
    trainer.recorder.add(SimpleNamespace(update=lambda event: states.append(event.data.get("state", ""))))
    handle = start(trainer, 1, make_loader())
    trainer.control.wait_settled()
    with trainer.control.run_state.changed:  # the run's thread can't look in between
        handle.resume()
        handle.pause()
    trainer.pause()
    assert trainer.counts.processed == 4 and trainer.resume().status == "completed"
    assert list(filter(None, states)) == ["pausing", "paused", "pausing", "paused", "running"]
    assert pauses.heard == ["paused", "resumed"] * 2


def test_a_pause_that_another_thread_withdraws_is_not_waited_for() -> None:
    def withdraw(trainer: Trainer) -> None:
        pause = threading.Thread(target=trainer.pause, daemon=True)
        pause.start()
        trainer.control.run_state.wait("pausing")
        trainer.resume(background=True)
        pause.join(60)
        assert not pause.is_alive()

    trainer = asking(3, withdraw)
    assert start(trainer, 1, make_loader()).wait().status == "completed"


def test_requests_without_an_end_do_not_keep_a_run_from_its_batches() -> None:
    seen: list[int] = []

    def look(at: Boundary | None) -> None:
        seen.append(trainer.counts.processed)
        asker = threading.Thread(target=trainer.control.submit, args=(look,))
        if at is not None:
            asker.start()
            asker.join()

    trainer = asking(1, lambda trainer: trainer.control.submit(look, whole=True))
    start(trainer, 1, make_loader()).wait()
    assert seen[:5] == [1, 2, 3, 4, 5]


def test_a_pickled_control_has_no_run() -> None:
    control = Control()
    control.begin(lambda state: None)
    assert pickle.loads(pickle.dumps(control)).state == "idle"


def test_workers_ignore_interrupts_while_a_run_is_on() -> None:
    loader = make_loader(num_workers=1, worker_init_fn=_note_worker)
    with workers_ignore_interrupts(loader, None):
        assert loader.worker_init_fn is not _note_worker
        assert len(list(loader)) == 5
    assert loader.worker_init_fn is _note_worker


def _note_worker(worker_id: int) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_new_scheduler_of_a_factory_begins_with_its_own_rates() -> None:
    trainer = make_trainer(scheduler=lambda optimizer, plan: WarmUpScheduler(optimizer, plan.total_steps))
    trainer.at = 0
    trainer.run(1, make_loader())
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


# -- what would wait for itself
def test_pause_without_a_thread_of_its_own_is_refused() -> None:
    trainer = asking(2, lambda trainer: trainer.pause())
    with pytest.raises(ConfigError, match="^This run has the main thread, so it can't be paused and resumed.") as error:
        trainer.run(1, make_loader())
    assert "background=True" in str(error.value) and trainer.control.state == "idle"


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_controls_of_a_foreground_run_say_it_in_another_thread_too(call: str) -> None:
    errors: list[BaseException] = []

    def ask(trainer: Trainer) -> None:
        def work() -> None:
            try:
                getattr(trainer, call)()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    trainer = asking(0, ask)
    trainer.run(1, make_loader(), background=True).wait()  # its handle is that of another run
    trainer.at = trainer.n + 2
    trainer.run(1, make_loader())
    assert [type(error) for error in errors[-1:]] == [ConfigError] and "main thread" in str(errors[-1])


WAITS: dict[str, Callable[[Any], Any]] = {
    "resume": lambda trainer: trainer.resume(),
    "wait": lambda trainer: trainer.handle.wait(),
    "join": lambda trainer: trainer.handle.join(),
}


@pytest.mark.parametrize("name", WAITS)
def test_waiting_for_a_run_in_its_own_step_is_refused(name: str) -> None:
    trainer = asking(2, WAITS[name])
    handle = trainer.run(1, make_loader(), background=True)
    with pytest.raises(ConfigError, match=rf"^{name}\(\) in a step or a callback would wait for its own run."):
        handle.wait(60)


# -- options that can't work are refused when they are set
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a number for two": (torch.optim.Adam, {"betas": 3}, "betas=3 must be 2 finite numbers, such as (0.9, 0.999)."),
    "three for two": (torch.optim.Adam, {"betas": (0.1, 0.2, 0.3)}, "betas=(0.1, 0.2, 0.3) must be 2 finite numbers"),
    "text in two": (torch.optim.Adam, {"betas": (0.1, "x")}, "betas=(0.1, 'x') must be 2 finite numbers"),
    "out of its range": (torch.optim.Adam, {"betas": (0.1, 2.0)}, "Adam refuses betas=(0.1, 2.0): Invalid beta parameter at index 1: 2.0"),
    "text": (torch.optim.Adam, {"weight_decay": "x"}, "weight_decay='x' must be a finite number."),
    "a bool": (torch.optim.Adam, {"weight_decay": True}, "weight_decay=True must be a finite number."),
    "negative": (torch.optim.Adam, {"weight_decay": -1.0}, "Adam refuses weight_decay=-1.0: Invalid weight_decay value: -1.0"),
    "infinite rate": (torch.optim.Adam, {"lr": float("inf")}, "lr=inf must be a positive number."),
    "no rate": (torch.optim.Adam, {"lr": float("nan")}, "lr=nan must be a positive number."),
    "not finite": (torch.optim.SGD, {"momentum": float("nan")}, "momentum=nan must be a finite number."),
    "a number for a switch": (torch.optim.SGD, {"nesterov": 1}, "nesterov=1 must be True or False."),
    "needs another": (torch.optim.SGD, {"nesterov": True}, "SGD refuses nesterov=True: Nesterov momentum requires a momentum"),
    "text for a choice": (torch.optim.Adam, {"foreach": "yes"}, "foreach='yes' must be True or False."),
    "one of two": (torch.optim.Adam, {"lr": 0.1, "eps": "x"}, "eps='x' must be a finite number."),
}


@pytest.mark.parametrize(("make", "options", "text"), REFUSED.values(), ids=REFUSED)
def test_option_that_cannot_work_is_refused_and_nothing_changes(make: Callable[..., Any], options: dict[str, Any], text: str) -> None:
    model = torch.nn.Linear(8, 1)
    trainer = make_trainer(model=model, optimizer=make([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1))
    before = [{**group, "params": None} for group in trainer.optimizer.param_groups]
    with pytest.raises(ConfigError) as error:
        trainer.set(**options)
    assert str(error.value).startswith(text)
    assert [{**group, "params": None} for group in trainer.optimizer.param_groups] == before


def test_option_keeps_its_kind() -> None:
    trainer = make_trainer()
    trainer.set(betas=[0.8, 0.9], weight_decay=0)
    assert trainer.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert trainer.run(1, make_loader()).status == "completed"


# -- workers that are being started
def _blocked(worker_id: int) -> None:
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())  # since the fork


def _run_blocked(background: bool) -> None:
    loader = make_loader(32, num_workers=1, worker_init_fn=_blocked, multiprocessing_context="fork")
    result = make_trainer().run(1, loader, background=background)
    assert (result.wait() if isinstance(result, RunHandle) else result).status == "completed"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no signal masks")
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.long)], ids=["main thread", "own thread"])
def test_interrupts_do_not_reach_a_worker_that_is_being_started(background: bool) -> None:
    # a fresh process: clients of loggers in this one run hooks at a fork, too
    process = multiprocessing.get_context("forkserver").Process(target=_run_blocked, args=(background,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_report_that_other_processes_continue_does_not_withdraw_a_newer_request_to_pause() -> None:
    state = RunState()
    state.begin(lambda name: None)
    state.request("pausing", lambda message: None)
    state.follow("running")
    assert state.name == "pausing"
    state.follow("paused")
    assert state.name == "paused"
