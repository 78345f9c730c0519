"""■ twice, the Stop button and `exit()`: the run ends after its batch, and what stands behind the cell does not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import some
from test_interactive import SETUP, Kernel

LONG_STEP = """
class LongStep(Steps):
    def train_step(self, batch):
        if self.counts.processed == 2:
            print("in the step", flush=True)
            time.sleep(10)  # a busy machine shows two states within it
            stepped.append(time.time())
        return super().train_step(batch)

stepped, queued = [], []
trainer = make(LongStep)
stop = lambda: trainer.view.controls.actions["stop"]()
"""
SAVED = """
trainer = make(Steps.add_on(StateManagerAddon), log_bar=False, save_path={folder!r}, every_n_epochs=1_000_000, save_best=False)
trainer.seconds = 0.01
handle = trainer.run(1_000_000, make_loader(), background=True)
while trainer.counts.processed < 30: time.sleep(0.01)
"""


SLOW = """
class Slow(Steps):
    is_slow = True

    def train_step(self, batch):
        if self.is_slow:
            print("in the step", flush=True)
            time.sleep(10)  # a busy machine shows two states within it
        return super().train_step(batch)

slow = make(Slow)
"""
OPERATIONS = {
    "evaluate": "slow.evaluate(make_loader())",
    "validate": "slow.validate(make_loader())",
    "lr_find": "slow.lr_find(make_loader())",
}


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.close()


def shown(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The updates of the record that have `text`."""
    return [m for m in messages if text in m["content"].get("data", {}).get("text/plain", "")]


def press_until(kernel: Kernel, state: str) -> list[dict[str, Any]]:
    """Press ■ as Jupyter does, and read what the kernel says until the record shows `state`."""
    kernel.manager.interrupt_kernel()
    messages: list[dict[str, Any]] = []
    while not shown(messages, state):
        messages.append(kernel.client.get_iopub_msg(timeout=600))
    return messages


def replies(kernel: Kernel, requests: list[str]) -> list[dict[str, Any]]:
    found = {}
    while not set(requests) <= found.keys():
        reply = kernel.client.get_shell_msg(timeout=600)
        found[reply["parent_header"]["msg_id"]] = reply["content"]
    return [found[request] for request in requests]


def test_interrupt_twice_in_a_long_step_is_shown_at_once_and_ends_what_is_queued(kernel: Kernel) -> None:
    kernel.run(LONG_STEP)
    requests = [kernel.client.execute(code) for code in ("trainer.run(1, make_loader())", "queued.append('evaluated')")]
    while "in the step" not in kernel.client.get_iopub_msg(timeout=600)["content"].get("text", ""):
        pass
    press_until(kernel, "‖ pausing after this batch")
    said = shown(press_until(kernel, "■ stopping after this batch"), "■ stopping after this batch")[0]
    first, second = replies(kernel, requests)
    assert (first["status"], first["ename"]) == ("error", "RunStopped")
    assert first["evalue"] == "stopped at epoch 1, batch 4 · trainer.result has what it reached"
    assert second["status"] in ("aborted", "error")
    while kernel.client.get_iopub_msg(timeout=600)["content"].get("execution_state") != "idle":
        pass
    time.sleep(0.2)  # the kernel lets a moment pass in which it aborts what comes
    stepped, queued = kernel.value("stepped, queued")
    assert len(stepped) == 1 and said["header"]["date"].timestamp() < stepped[0] and queued == []
    assert kernel.value("trainer.result.status, trainer.result.reason, trainer.control.state") == (
        "interrupted",
        "epoch 1, batch 4",
        "idle",
    )


def test_two_signals_at_once_are_both_counted(kernel: Kernel) -> None:
    kernel.run(LONG_STEP)
    kernel.run("press = lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.01), os.kill(os.getpid(), signal.SIGINT))")
    kernel.run("threading.Timer(1, press).start()")
    assert kernel.error("trainer.run(1, make_loader())")[0] == "RunStopped"
    assert kernel.value("trainer.counts.processed") == 3
    kernel.manager.interrupt_kernel()  # the kernel is idle: nothing
    assert kernel.value("trainer.control.state") == "idle"


def test_the_button_ends_a_waiting_cell_and_trainer_stop_returns_its_result(kernel: Kernel) -> None:
    kernel.run(LONG_STEP + "threading.Timer(1, stop).start()")
    name, text, _ = kernel.error("trainer.run(1, make_loader())")
    assert (name, text) == ("RunStopped", "stopped at epoch 1, batch 4 · trainer.result has what it reached")
    assert kernel.value("trainer.result.status, trainer.result.reason") == ("stopped", "epoch 1, batch 4")
    kernel.run(LONG_STEP + "threading.Timer(1, trainer.stop).start()\nresult = trainer.run(1, make_loader())")
    assert kernel.value("result.status, result.reason") == ("stopped", "epoch 1, batch 4")


def test_the_button_ends_a_run_in_the_background_and_a_later_wait_returns_its_result(kernel: Kernel) -> None:
    kernel.run(LONG_STEP + "handle = trainer.run(1, make_loader(), background=True)\nstop()")
    kernel.run("result = handle.wait()")
    assert kernel.value("result.status") == "stopped"


def test_a_run_that_a_press_ends_in_a_wait_is_returned_by_the_next_wait(kernel: Kernel) -> None:
    kernel.run(LONG_STEP + "handle = trainer.run(1, make_loader(), background=True)\nthreading.Timer(1, stop).start()")
    assert kernel.error("handle.wait()")[0] == "RunStopped"
    kernel.run("result = handle.wait()")
    assert kernel.value("result.status") == "stopped"


def end_of(folder: Path) -> dict[str, Any]:
    """What the record of the only run says of its end."""
    (events,) = folder.glob("run-*/events.jsonl")
    event = json.loads(events.read_text().splitlines()[-1])
    assert event["kind"] == "end"
    assert len(list(folder.glob("run-*/checkpoints/epoch=*"))) == 1
    return event["data"]


@pytest.mark.long
@pytest.mark.parametrize("paused", [False, pytest.param(True, marks=pytest.mark.long)])
def test_exit_of_ipython_is_not_called_sigterm(paused: bool, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(SETUP + SAVED.format(folder=str(tmp_path / "runs")))
    command = [sys.executable, "-m", "IPython", "--no-banner", "--simple-prompt", "--colors=NoColor", "--HistoryManager.enabled=False"]
    lines = ["%run -i setup.py", *(["trainer.pause()", "print(handle.status)"] if paused else []), "exit()", ""]
    done = subprocess.run(command, input="\n".join(lines), cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr and ("paused" in done.stdout) == paused, done
    end = end_of(tmp_path / "runs")
    assert end["status"] == "interrupted"
    assert re.fullmatch(r"the interpreter ended at epoch \d+, batch \d+", end["reason"])


@pytest.mark.long
def test_a_kernel_that_is_shut_down_is_not_called_sigterm(tmp_path: Path) -> None:
    kernel = Kernel()
    kernel.run(SAVED.format(folder=str(tmp_path)))
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=False)
    assert end_of(tmp_path)["reason"].startswith("the interpreter ended at epoch ")


@pytest.mark.parametrize("name", some(OPERATIONS, 2))
def test_interrupt_ends_what_is_not_a_training_with_one_line_and_the_next_run_trains(kernel: Kernel, name: str) -> None:
    kernel.run(SLOW)
    request = kernel.client.execute(OPERATIONS[name], stop_on_error=False)  # the kernel would abort the next cell, if that is early
    while "in the step" not in kernel.client.get_iopub_msg(timeout=600)["content"].get("text", ""):
        pass
    kernel.manager.interrupt_kernel()
    (reply,) = replies(kernel, [request])
    text = rf"{name} stopped.* · weights, modes and random numbers are as before"
    assert reply["ename"] == "RunStopped" and re.fullmatch(text, reply["evalue"])
    assert len(reply["traceback"]) == 1 and "\n" not in reply["traceback"][0]
    messages = kernel.run("slow.is_slow = False\nslow.run(2, make_loader())")
    assert not [message["content"] for message in messages if message["msg_type"] == "error"]
    assert kernel.value("(slow.mode, slow.result.status, slow.counts.epoch, len(slow.history.epochs))") == ("train", "completed", 2, 2)
