"""Runs that an error has paused hold nothing up: no thread, file, process or memory is left of those that were dropped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_interactive import Kernel

SETUP = """
import gc, psutil
import lightning as L
from lightning.pytorch.loggers import CSVLogger

class Logger(CSVLogger):
    def finalize(self, status):
        super().finalize(status)
        with open(os.path.join(self.root_dir, "finalized"), "a") as file:
            file.write(status + " ")

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def n_children():
    return len(psutil.Process().children())

def descriptors():
    # Each thread that prints has a socket of the kernel's, with its eventfds; the kernel closes those of dead threads every ten seconds.
    # torch keeps the memory of the last batches that worker processes have sent.
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the listing
            pass
    return sorted(link.partition(":")[0] for link in links if "eventfd" not in link and "/dev/shm/torch" not in link)

def kept():
    gc.collect()
    n_trainers = sum(isinstance(item, Trainer) for item in gc.get_objects())
    return threading.active_count(), len(descriptors()), n_children(), n_trainers

def n_runs():
    return sum(thread.name == "nbtrain run" for thread in threading.enumerate())

def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
"""
STEPS = """\
class Digits(Trainer):
    seen, fails_at, held_mb = 0, {}, 0

    def train_step(self, batch):
        self.seen += 1
        activation = self.model(batch[0]).mean() * torch.ones(self.held_mb * 2**18)
        if self.seen == self.fails_at:
            raise LookupError("no such row")
        return {{"loss": self.model(batch[0]).square().mean() + 0 * activation.sum()}}
"""
BROKEN = STEPS.format(3)
LINE = "paused at epoch 1, batch 3"  # and the calls below
SUMMARY = "LookupError: no such row · train_step at epoch 1, batch 3, line 8 of train_step"


def make_kernel() -> Kernel:
    kernel = Kernel()
    kernel.run(SETUP)
    kernel.run(BROKEN)
    return kernel


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = make_kernel()
    yield kernel
    kernel.close()


def updates(messages: list[dict[str, Any]]) -> list[list[str]]:
    """The lines of each update of a run's record."""
    texts = [message["content"].get("data", {}).get("text/plain", "") for message in messages]
    return [text.splitlines() for text in texts if text.startswith("Digits · ")]


def test_record_below_the_cell_shows_a_failure_in_the_background(kernel: Kernel) -> None:
    kernel.client.execute("trainer = make(Digits)\nhandle = trainer.run(3, make_loader(), background=True)")
    lines: list[str] = []
    while not any("‖ paused" in line for line in lines):
        lines = (updates([kernel.client.get_iopub_msg(timeout=600)]) or [lines])[-1]
    assert [line for line in lines if line.startswith("note: ")] == [f"note: {SUMMARY}", f"note: {LINE}"]
    assert lines[-1].startswith("‖ paused · epoch 1/3 · 2/20 · ")
    again = kernel.client.execute("trainer.run(1, make_loader())")  # it fails too
    while not any("✗ failed" in line for line in lines):
        lines = (updates([kernel.client.get_iopub_msg(timeout=600)]) or [lines])[-1]
    while kernel.client.get_shell_msg(timeout=600)["parent_header"]["msg_id"] != again:
        pass
    time.sleep(0.2)  # the kernel lets a moment pass in which it aborts what comes
    kernel.run("trainer.stop()\ndel trainer, handle")


def test_run_ends_when_its_trainer_is_deleted(kernel: Kernel) -> None:
    kernel.error("trainer = make(Digits, log_bar=False, on_error='pause')\ntrainer.run(1, make_loader())")
    assert kernel.value("n_runs()") == 1
    kernel.run("del trainer")
    kernel.run("1 + 1")
    assert kernel.value("n_runs(), kept()[-1]") == (0, 0)


def test_run_ends_when_its_name_has_another_trainer(kernel: Kernel) -> None:
    kernel.error("trainer = make(Digits, log_bar=False, on_error='pause')\ntrainer.run(1, make_loader())")
    kernel.run("trainer = make(Digits, log_bar=False)")
    kernel.run("1 + 1")
    assert kernel.value("n_runs(), kept()[-1]") == (0, 1)


@pytest.mark.parametrize(
    ("workers", "n", "warm"), [*(pytest.param(0, n, warm, marks=pytest.mark.long) for n, warm in ((50, 10), (12, 4))), (2, 5, 2)]
)
def test_cell_that_fails_again_and_again_leaves_nothing(kernel: Kernel, workers: int, n: int, warm: int) -> None:
    def execute(n: int) -> None:
        for _ in range(n):
            kernel.error(f"trainer = make(Digits)\ntrainer.run(2, make_loader({workers}))")

    execute(warm)
    before, mb = kernel.value("kept(), resident_mb()")
    execute(n - warm)
    kernel.value(f"wait_until(lambda: all(now <= then for now, then in zip(kept(), {before})))")
    assert before[2:] == (workers, 1)
    assert kernel.value("resident_mb()") < mb + 8


@pytest.mark.long
@pytest.mark.parametrize("held_mb", [pytest.param(0, marks=pytest.mark.long), 20])
def test_memory_is_flat_after_ten_failures_of_a_run(kernel: Kernel, held_mb: int) -> None:
    kernel.run(BROKEN)
    kernel.error(f"trainer = make(Digits)\ntrainer.held_mb = {held_mb}\ntrainer.run(3, make_loader())")
    measured = []
    for i in range(2, 12):
        kernel.run(STEPS.format(3 * i))
        assert kernel.error("trainer.resume()")[0] == "LookupError"
        measured.append(kernel.value("(*kept(), trainer.seen, resident_mb())"))
    kernel.run(STEPS.format(0) + "result = trainer.resume()")
    assert kernel.value("result.status, trainer.seen") == ("completed", 60)
    assert [found[:3] for found in measured] == [measured[0][:3]] * 10
    assert [found[3:5] for found in measured] == [(1, 3 * i - 1) for i in range(2, 12)]
    assert measured[-1][-1] < measured[1][-1] + 8 + 4 * held_mb  # the newest failure holds two activations, and the allocator some
    kernel.run(BROKEN)


@pytest.mark.long
def test_kernel_that_is_shut_down_ends_a_failed_run_as_failed(tmp_path: Path) -> None:
    kernel = make_kernel()
    options = f"save_path={str(tmp_path / 'runs')!r}, lightning={{'logger': Logger({str(tmp_path)!r})}}"
    kernel.error(f"trainer = make(Digits, {options})\ntrainer.run(1, make_loader(2))")
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=False)
    (events,) = (tmp_path / "runs").glob("run-*/events.jsonl")
    end = json.loads(events.read_text().splitlines()[-1])
    assert (end["kind"], end["data"]) == ("end", {"status": "failed", "reason": "LookupError at epoch 1, batch 3: no such row"})
    (finalized,) = tmp_path.rglob("finalized")
    assert finalized.read_text() == "failed "


FIRST = """\
class Digits(Trainer):
    fails = True

    def train_step(self, batch):
        loss = self.model(batch[0]).square().mean()
        if type(self).fails:
            raise LookupError("no such row")
        return {"loss": loss}
    test_step = train_step
"""


def test_run_whose_first_batch_fails_has_not_begun(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(FIRST)
    kernel.run(f"trainer = make(Digits, save_path={str(tmp_path)!r})")
    request = kernel.client.execute("trainer.run(3, make_loader())")
    lines, said = list[str](), ""
    while said != "LookupError":
        message = kernel.client.get_iopub_msg(timeout=600)
        lines = (updates([message]) or [lines])[-1]
        said = message["content"].get("ename", "")
    while kernel.client.get_shell_msg(timeout=600)["parent_header"]["msg_id"] != request:
        pass
    time.sleep(0.2)  # the kernel lets a moment pass in which it aborts what comes
    assert len(lines) == 2 and lines[1].startswith("✗ not begun · LookupError at epoch 1, batch 1: no such row · ")
    assert kernel.value("n_runs(), trainer.control.state, trainer.result, trainer.train_state.run") == (0, "idle", None, 0)
    kernel.run("Digits.fails = False\nresult = trainer.run(1, make_loader())")
    assert kernel.value("result.status, result.run_dir.name, result.n_epochs") == ("completed", "run-001", 1)
    kernel.run("Digits.fails = True")
    assert kernel.error("trainer.run(1, make_loader())")[0] == "LookupError"  # a run that continues
    assert kernel.value("trainer.control.state, trainer.failure.place") == ("paused", "epoch 2, batch 1")
    kernel.run("trainer.stop()\ndel trainer, result")
