"""An error of a step pauses the run; the cell that is written again repairs it, and `trainer.resume()` goes on."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

SETUP = """\
import os, threading, torch
import lightning as L
from torch import nn
from torch.utils.data import DataLoader, Dataset
from nbtrain import Trainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)

def make(kind, **options):
    torch.manual_seed(0)
    return kind(Net(), device="cpu", optimizer=lambda params: torch.optim.Adam(params, lr=0.1), **({"log_bar": False} | options))

def make_loader():
    return DataLoader(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)), 8, shuffle=True)

def same(a, b):
    rows = [[{k: v for k, v in row.items() if k != "time_s"} for row in t.history.epochs] for t in (a, b)]
    states = a.model.state_dict(), b.model.state_dict()
    return rows[0] == rows[1] and all(torch.equal(x, y) for x, y in zip(*(state.values() for state in states)))

def run_threads():
    return sum(thread.name == "nbtrain run" for thread in threading.enumerate())
"""
GOOD = """\
class Digits(Trainer):
    seen = 0

    def train_step(self, batch):
        self.seen += 1
        return {"loss": self.model(batch).square().mean() + torch.rand(())}
    test_step = train_step
"""
BROKEN = """\
class Digits(Trainer):
    seen = 0

    def train_step(self, batch):
        self.seen += 1
        loss = self.model(batch).square().mean() + torch.rand(())
        if self.seen == 3:
            loss = loss + batch.no_such_name
        return {"loss": loss}
    test_step = train_step
"""
STILL_BROKEN = GOOD.replace("        return {", "        loss = {}['x']\n        return {")
BROKEN_NET = """\
class Net(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            x = x.T
        return self.layers(x)
"""
GOOD_NET = BROKEN_NET.replace("            x = x.T\n", "            pass\n")
BROKEN_CALLBACK = """\
class Count(L.Callback):
    n = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.n += 1
        if self.n == 3:
            no_such_name
"""
GOOD_CALLBACK = BROKEN_CALLBACK.replace("            no_such_name\n", "            pass\n")
RUN = "result = trainer.run(2, make_loader())"
CELLS = {
    "setup": SETUP + GOOD,
    "never": "never = make(Digits)\nnever.run(2, make_loader())",
    "broken": BROKEN + "trainer = make(Digits)",
    "run": RUN,
    "failure": "f = trainer.failure\ntype(f.error).__name__, f.what, f.place, f.batch.shape, sorted(f.variables)",
    "paused": "trainer.result.status, trainer.control.state, trainer.counts.step, run_threads()",
    "repair": GOOD,
    "resume": "result = trainer.resume(Digits)",
    "completed": "result.status, trainer.seen, same(trainer, never), type(trainer) is Digits, trainer.failure, run_threads()",
    "plain": BROKEN + "trainer = make(Digits)\n" + RUN,
    "repair plainly": GOOD,
    "resume plainly": "result = trainer.resume()",
    "completed plainly": "result.status, same(trainer, never), type(trainer) is Digits",
    "first": BROKEN + "trainer, First = make(Digits), Digits\n" + RUN,
    "second": STILL_BROKEN + "trainer.resume(Digits)",
    "after the second": "trainer.control.state, type(trainer) is First, trainer.seen, trainer.failure.place",
    "second plainly": STILL_BROKEN + "trainer.resume()",
    "after the second plainly": "trainer.control.state, type(trainer) is First",
    "third": GOOD + "result = trainer.resume()",
    "after the third": "result.status, same(trainer, never), type(trainer) is Digits",
    "net": BROKEN_NET + "trainer = make(Digits)\n" + RUN,
    "repair net": GOOD_NET,
    "resume net": "result = trainer.resume()",
    "completed net": "result.status, same(trainer, never), type(trainer.model) is Net",
    "callback": BROKEN_CALLBACK + "trainer = make(Digits, lightning={'callbacks': [count := Count()]})\n" + RUN,
    "failure of callback": "trainer.failure.what",
    "repair callback": GOOD_CALLBACK,
    "resume callback": "result = trainer.resume()",
    "completed callback": "result.status, same(trainer, never), type(count) is Count, count.n",
    "skipped": BROKEN + "trainer = make(Digits)\n" + RUN,
    "skip": GOOD + "result = trainer.resume(skip=True)",
    "after skip": "result.status, trainer.counts.step, trainer.seen, same(trainer, never)",
    "skip without": "trainer.resume(skip=True)",
    "to stop": BROKEN + "trainer = make(Digits)\n" + RUN,
    "stop": "result = trainer.stop()",
    "stopped": "result.status, result.reason, trainer.failure, run_threads()",
    "use": GOOD + "trainer.use(Digits)\nresult = trainer.run(2, make_loader())",
    "used": "result.status, type(trainer) is Digits",
    "resume without a run": BROKEN + "trainer = make(Digits)\n" + GOOD + "trainer.resume(Digits)\nresult = trainer.run(2, make_loader())",
    "resumed without a run": "result.status, same(trainer, never), type(trainer) is Digits",
    "raise": BROKEN + "trainer = make(Digits, on_error='raise')\n" + RUN,
    "after raise": "trainer.control.state, trainer.failure, trainer.result.status, run_threads()",
    "use after raise": GOOD + "trainer.use(Digits)\nresult = trainer.run(2, make_loader())",
    "used after raise": "result.status, type(trainer) is Digits",
    "background": BROKEN + "trainer = make(Digits, log_bar=True)\nhandle = trainer.run(3, make_loader(), background=True)\n"
    "trainer.control.wait_settled()",
    "elsewhere": "1 + 1",
    "names it": "state = trainer.control.state",
    "names it again": "state = trainer.control.state",
    "repr": "handle",
    "wait": "handle.wait()",
    "whole": "trainer.traceback()",
    "resume in background": GOOD + "result = trainer.resume(background=True).wait()",
    "after background": "result.status, len(trainer.history.epochs), handle.status, handle.error",
    "fails": BROKEN + "trainer = make(Digits, log_bar=True, save_path='runs')\n" + RUN,
    "dropped": GOOD + "trainer.use(Digits)\nfolder = trainer.run_dir\nresult = trainer.run(1, make_loader())",
    "folder": "print((folder / 'events.jsonl').read_text())",
    "after dropped": "result.status, result.reason, run_threads(), folder == trainer.run_dir",
}
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def outputs(execute: Any) -> dict[str, Any]:
    """What each of the cells has sent, by its name."""
    notebook = execute(*CELLS.values())
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells)}
