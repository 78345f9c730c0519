"""Requests that come between the last batch of a run and the first one of the next: each is served, or says that the run was over.

■ at these moments is in tests/unit/state/test_run_total.py.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid, some

from nbtrain import ConfigError, StateManagerAddon

pytestmark = pytest.mark.usefixtures("ranked_locks")
TESTS = Path(__file__).parents[2]
MOMENTS = [
    *("train_batch_end", "validation_start", "validation_batch_end", "validation_end"),
    *("train_epoch_end", "train_end", "fit_end", "teardown", "finalize"),
]
IN_VALIDATION = MOMENTS[:3]  # there are batches after these: those of the last validation


class Late:
    """A run of two epochs in the background, of which `ask` requests something in another thread, at a moment after its last batch."""

    def __init__(self, moment: str, ask: Callable[[Any], Any], kind: Any = Regress, **options: Any) -> None:
        callback = L.Callback()
        self.answer: Any = None
        self._ask, self._thread = ask, threading.Thread(target=self._request)
        setattr(callback, moment if moment == "teardown" else f"on_{moment}", self._at)
        options |= {"hooks": {"on_finalize": self._at}} if moment == "finalize" else {"lightning": {"callbacks": [callback]}}
        self.trainer: Any = make_trainer(kind, **options)
        self.handle = self.trainer.run(2, make_loader(), make_valid(), background=True)
        self.trainer.control.wait_settled()
        self._thread.join()

    def _at(self, *given: Any, **options: Any) -> None:
        run_state = self.trainer.control.run_state
        if self.trainer.counts.step >= 9 and self._thread.ident is None:  # a batch is counted behind its hook
            self._thread.start()
            with run_state.changed:
                run_state.changed.wait_for(lambda: run_state.requested)

    def _request(self) -> None:
        try:
            self.answer = self._ask(self.trainer)
        except ConfigError as error:
            self.answer = error


@pytest.mark.parametrize("moment", some(MOMENTS, 3))
def test_a_late_pause_pauses_the_validation_or_says_that_the_run_was_over(moment: str, capsys: pytest.CaptureFixture[str]) -> None:
    late = Late(moment, lambda trainer: trainer.pause(), log_bar=False)
    if moment in IN_VALIDATION:
        assert late.handle.status == "paused"
        late.trainer.resume()
    assert late.handle.wait().status == "completed"
    assert capsys.readouterr().out == ("" if moment in IN_VALIDATION else "The run was over before it could pause.\n")


@pytest.mark.parametrize("moment", some(MOMENTS, 3, first=1))
def test_a_late_stop_ends_the_validation_or_says_that_the_run_was_over(moment: str, capsys: pytest.CaptureFixture[str]) -> None:
    late = Late(moment, lambda trainer: trainer.stop(), log_bar=False)
    assert late.answer is late.trainer.result
    assert late.answer.status == ("stopped" if moment in IN_VALIDATION else "completed")
    assert capsys.readouterr().out == ("" if moment in IN_VALIDATION else "The run was over before it could stop.\n")
    assert late.trainer.stop() is late.answer and capsys.readouterr().out == ""


def linear(optimizer: Any, plan: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, plan.total_steps)


@pytest.mark.parametrize("moment", some(MOMENTS, 3, first=2))
@pytest.mark.parametrize(
    ("scheduler", "before"),
    [(None, "0.01"), (lambda step: 0.01 * 0.9**step, "0.003487"), (linear, "0.001")],
    ids=["none", "step", "factory"],
)
def test_a_late_rate_is_that_of_the_next_run_and_it_says_so(
    scheduler: Any, before: str, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    late = Late(moment, lambda trainer: trainer.set(lr=0.5), scheduler=scheduler, log_bar=False)
    assert capsys.readouterr().out == f"The run has no batch left: lr {before} → 0.5 holds for the next one.\n"
    rates: list[float] = []
    late.trainer.train_step = lambda batch: (
        rates.append(late.trainer.optimizer.param_groups[0]["lr"]) or Regress.train_step(late.trainer, batch)
    )
    late.trainer.run(1, make_loader())
    assert rates[0] == pytest.approx(0.5)
    assert [text for _, text in late.trainer.history.marks] == [f"lr {before} → 0.5"]


@pytest.mark.parametrize("moment", some(MOMENTS, 3))
def test_a_late_save_has_the_end_of_the_run(moment: str, tmp_path: Path) -> None:
    late = Late(moment, lambda trainer: trainer.save_state(), Regress.add_on(StateManagerAddon), save_path=tmp_path)
    assert late.answer.name == "epoch=2-step=10.ckpt" and late.answer.exists()
    resumed = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)
    assert resumed.run(2, make_loader(), make_valid(), resume="auto").reason == "all 2 epochs were there: nothing to train"


@pytest.mark.parametrize("moment", some(MOMENTS, 3, first=1))
def test_a_late_validation_is_refused(moment: str) -> None:
    late = Late(moment, lambda trainer: trainer.validate_now())
    assert str(late.answer).startswith("The run ended before it could be validated.")


def test_a_rate_that_is_set_before_the_last_batch_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(log_bar=False)
    handle = trainer.run(10**6, make_loader(), background=True)
    trainer.set(lr=0.5)
    handle.stop()
    assert handle.wait().status == "stopped" and capsys.readouterr().out == ""


SCRIPT = """
import os, signal, sys
import lightning as L
from samples import Regress, make_loader, make_trainer, make_valid
from nbtrain import StateManagerAddon

for moment in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        break
    print(moment, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()

def press(*given, **options):
    if trainer.counts.step >= 9 and not pressed:
        pressed.append(moment)
        os.kill(os.getpid(), signal.SIGINT)

pressed, callback = [], L.Callback()
setattr(callback, moment if moment == "teardown" else f"on_{moment}", press)
given = {"hooks": {"on_finalize": press}} if moment == "finalize" else {"lightning": {"callbacks": [callback]}}
trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=moment, log_bar=False, **given)
trainer.run(2, make_loader(), make_valid())
print("the script goes on")
"""


def test_ctrl_c_after_the_last_batch_of_a_script_saves_and_exits_with_130(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    paths = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", *MOMENTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=paths, check=False)
    assert done.stdout.splitlines() == [f"{moment} 130" for moment in MOMENTS], done.stderr
    where = "run-001/checkpoints/epoch=2-step=10.ckpt"
    lines = [f"■ the run was completed before it stopped · state saved in {moment}/{where}" for moment in MOMENTS]
    assert done.stderr.splitlines() == lines and all((tmp_path / moment / where).exists() for moment in MOMENTS)


def test_a_stop_from_another_thread_waits_for_a_run_in_this_one() -> None:
    results: list[Any] = []

    stopping = threading.Thread(target=lambda: results.append(trainer.stop()))

    class Stops(L.Callback):
        def on_train_epoch_start(self, *args: Any) -> None:
            if stopping.ident is None:
                stopping.start()

    trainer = make_trainer(lightning={"callbacks": [Stops()]})
    result = trainer.run(10_000, make_loader())
    stopping.join()
    assert results == [result] and result.status == "stopped"
