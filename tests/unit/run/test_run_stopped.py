"""A run that is ended by hand ends the cell or the script that waited for it."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from samples import Regress, make_loader, make_trainer

from nbtrain import RunStopped, Trainer
from nbtrain.code.addon import SourceAddon
from nbtrain.run import failed_runs

pytestmark = pytest.mark.usefixtures("ranked_locks")
TESTS = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys
from samples import Regress, make_loader, make_trainer
from nbtrain import AccumulationAddon, StateManagerAddon

class Presses(Regress):
    n_steps = 0

    def train_step(self, batch):
        self.n_steps += 1
        for _ in range({presses} if self.n_steps == {at} else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return super().train_step(batch)

trainer = make_trainer(Presses.add_on(AccumulationAddon, StateManagerAddon), save_path="runs", log_bar=False, accumulate={accumulate})
{run}
print("after")
"""
CATCHES = """
try:
    trainer.run(3, make_loader())
except KeyboardInterrupt as error:
    print(type(error).__name__, trainer.result.status, trainer.result.reason)
"""


def shell(folder: Path, run: str = "trainer.run(3, make_loader())", presses: int = 1, at: int = 8, accumulate: int = 1) -> Any:
    """The script, and a second one behind it, as a shell executes them."""
    (folder / "train.py").write_text(SCRIPT.format(run=run, presses=presses, at=at, accumulate=accumulate))
    line = f"{shlex.quote(sys.executable)} train.py && echo evaluated; code=$?; exit $code"
    paths = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, env=paths, check=False)


def test_ctrl_c_finishes_the_batch_saves_and_exits_with_130(tmp_path: Path) -> None:
    done = shell(tmp_path)
    saved = Path("runs", "run-001", "checkpoints", "epoch=1-step=8.ckpt")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"■ stopped at epoch 2, batch 4 · state saved in {saved}\n"
    assert (tmp_path / saved).exists()
    assert '"status":"interrupted","reason":"epoch 2, batch 4"' in (tmp_path / "runs" / "run-001" / "events.jsonl").read_text()


@pytest.mark.long
def test_tests_press_ctrl_c_also_where_a_shell_has_started_them_in_the_background() -> None:
    tests = [
        f"{__file__}::test_ctrl_c_finishes_the_batch_saves_and_exits_with_130",
        f"{TESTS}/unit/engine/test_control.py::test_a_second_ctrl_c_ends_at_once",
    ]
    ignored = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", ignored, "-m", "pytest", "-n", "0", "-q", *tests]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(".. "), done.stdout


def test_ctrl_c_finishes_an_open_window(tmp_path: Path) -> None:
    done = shell(tmp_path, at=7, accumulate=3)  # the second batch of an epoch
    assert done.returncode == 130 and done.stderr.startswith("■ stopped at epoch 2, batch 4 · state saved in ")


@pytest.mark.long
def test_a_script_that_catches_ctrl_c_goes_on_with_the_result(tmp_path: Path) -> None:
    done = shell(tmp_path, run=CATCHES)
    assert (done.returncode, done.stdout) == (0, "RunStopped interrupted epoch 2, batch 4\nafter\nevaluated\n"), done.stderr


@pytest.mark.long
def test_a_second_ctrl_c_ends_at_once_with_130(tmp_path: Path) -> None:
    done = shell(tmp_path, presses=2)
    assert (done.returncode, done.stdout) == (130, "") and done.stderr.rstrip().endswith("KeyboardInterrupt")


# -- a cell that waits, with a thread in place of a frontend
class Pressed(Regress):
    """Calls `press` in its training batch with the number `at`."""

    n_steps, at, press = 0, 8, staticmethod(lambda: None)

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.n_steps += 1
        if self.n_steps == self.at:
            self.press()
        return super().train_step(batch)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(failed_runs, "in_shell", lambda: True)
    return make_trainer(Pressed)


def press_twice(trainer: Trainer) -> None:
    assert trainer.handle is not None
    thread = trainer.handle._thread
    presses = [threading.Thread(target=thread._interrupt) for _ in range(2)]
    for press in presses:
        press.start()
    for press in presses:
        press.join()


def test_two_interrupts_end_the_waiting_cell_once(trainer: Any) -> None:
    trainer.press = lambda: press_twice(trainer)
    with pytest.raises(RunStopped, match=r"^stopped at epoch 2, batch 4 · trainer.result has what it reached$"):
        trainer.run(3, make_loader())
    assert (trainer.result.status, trainer.result.reason) == ("interrupted", "epoch 2, batch 4")
    assert trainer.handle.wait() is trainer.result
    assert trainer.run(1, make_loader()).status == "completed"


def test_two_interrupts_in_the_last_batch_end_the_cell_of_a_completed_run(trainer: Any) -> None:
    trainer.at, trainer.press = 10, lambda: press_twice(trainer)
    with pytest.raises(RunStopped, match="^the run was completed before it stopped · trainer.result has what it reached$"):
        trainer.run(2, make_loader())
    assert trainer.result.status == "completed"


def test_a_run_that_can_not_be_shown_leaves_a_trainer_that_can_be_stopped(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise OSError("no disk")

    with monkeypatch.context() as patch:
        patch.setattr(SourceAddon, "keep", fails)
        with pytest.raises(OSError, match="no disk"):
            trainer.run(1, make_loader())
    assert trainer.stop() is None and trainer.run(1, make_loader()).status == "completed"
