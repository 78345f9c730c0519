"""An error of a step pauses the run; the cell that is written again repairs it, and `trainer.resume()` goes on."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

SETUP = """\
import json, tempfile, threading, torch
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
    "paused": "trainer.result.status, trainer.control.state, trainer.counts.processed, run_threads()",
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
    "after the second plainly": "trainer.control.state, type(trainer) is First, trainer.seen, trainer.failure.place",
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
    "after skip": "result.status, trainer.seen, same(trainer, never)",
    "skip without": "trainer.resume(skip=True)",
    "to stop": BROKEN + "trainer = make(Digits)\n" + RUN,
    "stop": "result = trainer.stop()",
    "stopped": "result.status, result.reason, trainer.failure, run_threads()",
    "use": GOOD + "trainer.use(Digits)\nresult = trainer.run(2, make_loader())",
    "used": "result.status, type(trainer) is Digits",
    "resume without a run": BROKEN + "trainer = make(Digits)\n" + GOOD + "trainer.resume(Digits)\nresult = trainer.run(2, make_loader())",
    "resumed without a run": "result.status, same(trainer, never) and type(trainer) is Digits",
    "raise": BROKEN + "trainer = make(Digits, on_error='raise')\n" + RUN,
    "after raise": "trainer.control.state, trainer.failure, trainer.result.status, run_threads()",
    "use after raise": GOOD + "trainer.use(Digits)\nresult = trainer.run(2, make_loader())",
    "used after raise": "result.status, type(trainer) is Digits",
    "background": BROKEN + "trainer = make(Digits, log_bar=True)\nhandle = trainer.run(3, make_loader(), background=True)\n"
    "trainer.control.wait_settled()",
    "elsewhere": "1 + 1",
    "met": "globals()['train' + 'er'].traceback()",  # a cell that does not name it
    "names it": "state = trainer.control.state",
    "names it again": "state = trainer.control.state",
    "repr": "handle",
    "wait": "handle.wait()",
    "whole": "trainer.traceback()",
    "resume in background": GOOD + "result = trainer.resume(background=True).wait()",
    "after background": "result.status, len(trainer.history.epochs), handle.status, handle.error",
    "named": BROKEN + "clf = make(Digits)\nclf.run(2, make_loader())",
    "pause": GOOD + "def pause(batch):\n    clf.control.pause()\n    return batch\n"
    "clf.stop()\nclf.resume(Digits)\nclf.run(2, map(pause, make_loader()))",
    "end": "result = clf.stop()",
    "fails": BROKEN + "trainer = make(Digits, log_bar=True, save_path=tempfile.mkdtemp())\n" + RUN,
    "dropped": GOOD + "trainer.use(Digits)\nfolder = trainer.run_dir\nresult = trainer.run(1, make_loader())",
    "after dropped": "result.status, result.reason, run_threads(), folder == trainer.run_dir",
    "events": "events = map(json.loads, (folder / 'events.jsonl').read_text().splitlines())\n"
    "[tuple(event['data'].values()) for event in events if event['kind'] in ('end', 'note')]",
}


@pytest.fixture(scope="module")
def outputs(execute: Any) -> dict[str, Any]:
    """What each of the cells has sent, by its name."""
    notebook = execute(*CELLS.values())
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells)}


@pytest.fixture
def value(outputs: dict[str, Any]) -> Any:
    """What a cell gives that must not fail, evaluated."""

    def read(name: str) -> Any:
        (result,) = [output for output in outputs[name] if output.output_type == "execute_result"]
        return eval(result.data["text/plain"], {"Size": tuple, "torch": SimpleNamespace(Size=tuple)})  # noqa: S307  # what the cell has written

    return read


def records(outputs: list[Any]) -> list[str]:
    """The lines of the run's record below a cell."""
    shown = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    return next(filter(None, shown)).splitlines()  # the first output is that of the buttons, which have no text


LINE = """paused at epoch 1, batch 3
fix the cell and run it, then:
  trainer.resume(Digits)     # tries this batch again
  trainer.resume(skip=True)  # leaves this batch out
  trainer.stop()             # ends the run"""
ERROR = "AttributeError: 'Tensor' object has no attribute 'no_such_name'"
SUMMARY = f"{ERROR} · train_step at epoch 1, batch 3, line 8 of train_step"
SHOWN = (
    "-" * 75
    + f"""
AttributeError                            Traceback (most recent call last)
Cell, line 1
----> 1 {RUN}

Cell, line 8, in Digits.train_step(self, batch)
      4     def train_step(self, batch):
      5         self.seen += 1
      6         loss = self.model(batch).square().mean() + torch.rand(())
      7         if self.seen == 3:
----> 8             loss = loss + batch.no_such_name
      9         return {{"loss": loss}}

[N frames of nbtrain hidden · trainer.traceback() shows them]
{ERROR}
Digits.train_step, epoch 1, batch 3: the batch is Tensor (8, 4) float32
{LINE}"""
)


def test_cell_ends_with_the_error_and_one_line_of_what_can_be_done(shown: Any, value: Any) -> None:
    assert shown("run") == SHOWN
    assert value("paused") == ("paused", "paused", 2, 1)


def test_failure_has_the_error_the_batch_and_the_variables(value: Any) -> None:
    assert value("failure") == ("AttributeError", "train_step", "epoch 1, batch 3", (8, 4), ["batch", "loss", "self"])


def test_class_that_is_written_again_and_given_to_resume_completes_the_run(outputs: dict[str, Any], value: Any) -> None:
    assert outputs["repair"] == outputs["resume"] == []
    assert value("completed") == ("completed", 12, True, True, None, 0)


def test_plain_resume_finds_what_is_written_again(value: Any) -> None:
    assert value("completed plainly") == ("completed", True, True)


@pytest.mark.parametrize("how", ["second", "second plainly"])
def test_class_that_is_broken_too_leaves_the_run_paused_at_the_same_batch(how: str, shown: Any, value: Any) -> None:
    lines = shown(how).splitlines()
    assert lines[-7:] == ["KeyError: 'x'", "Digits.train_step, epoch 1, batch 3: the batch is Tensor (8, 4) float32", *LINE.splitlines()]
    assert "----> 6         loss = {}['x']" in lines
    assert value(f"after the {how}") == ("paused", False, 2, "epoch 1, batch 3")


def test_third_class_completes_the_run(value: Any) -> None:
    assert value("after the third") == ("completed", True, True)


def test_model_that_is_written_again_is_used(shown: Any, value: Any) -> None:
    text = shown("net")
    assert "in Net.forward(self, x)\n" in text and "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)\n" in text
    assert text.endswith("\n" + LINE)
    assert value("completed net") == ("completed", True, True)


def test_callback_that_is_written_again_is_used_and_counts_once(shown: Any, value: Any) -> None:
    assert shown("callback").endswith(f"NameError: name 'no_such_name' is not defined\n{LINE}")
    assert value("failure of callback") == "Count.on_train_batch_end"
    assert value("completed callback") == ("completed", True, True, 12)


def test_batch_that_is_skipped_is_left_out(shown: Any, value: Any) -> None:
    assert value("after skip") == ("completed", 11, False)
    assert shown("skip without").endswith("ConfigError: No run is in progress.\n  Start one with run(n_epoch, loader).")


def test_stop_returns_a_result_that_names_the_error(value: Any) -> None:
    assert value("stopped") == ("stopped", f"epoch 1, batch 3, after {ERROR}", None, 0)


@pytest.mark.parametrize("name", ["used", "resumed without a run", "used after raise"])
def test_next_run_has_the_new_steps(name: str, value: Any) -> None:
    assert value(name) == ("completed", True)


def test_on_error_raise_ends_the_run(shown: Any, value: Any) -> None:
    assert shown("raise").endswith(f"{ERROR}\nDigits.train_step, epoch 1, batch 3: the batch is Tensor (8, 4) float32")
    assert value("after raise") == ("idle", None, "failed", 0)


def test_next_cell_that_names_the_trainer_prints_a_failure_in_the_background_once(printed: Any) -> None:
    assert printed("background") == printed("elsewhere") == printed("names it again") == ""
    assert printed("names it") == f"trainer: {SUMMARY}\n{LINE}\n  handle.wait()  # raises the error\n"


def test_handle_of_a_failed_run_says_the_error_and_raises_it(outputs: dict[str, Any], shown: Any) -> None:
    assert outputs["repr"][0].data["text/plain"] == f"RunHandle(paused · {SUMMARY}\n{LINE}\n  handle.wait()  # raises the error)"
    text = shown("wait")
    assert "Cell, line 1\n----> 1 handle.wait()\n" in text and text.endswith(f"float32\n{LINE}")
    assert "----> 8             loss = loss + batch.no_such_name" in text and "trainer.traceback() shows them]" in text


def test_traceback_of_a_paused_run_has_all_frames(printed: Any) -> None:
    for name in ("met", "whole"):
        text = printed(name)
        assert "nbtrain/loops/error_guard.py" in text and text.endswith(f"float32\n{LINE}\n")


def test_run_in_the_background_goes_on_in_the_background(outputs: dict[str, Any], value: Any) -> None:
    assert value("after background") == ("completed", 3, "completed", None)
    assert records(outputs["background"])[5:-1] == ["✎ epoch 1, batch 3: train_step changed after AttributeError"]


def test_messages_have_the_name_of_the_trainer_in_the_notebook(shown: Any) -> None:
    assert shown("named").endswith(LINE.replace("trainer.", "clf."))
    assert re.search(r"run paused at epoch 1, batch \d+\n  clf\.resume\(\)  # continues it, while it is paused$", shown("pause"))


def test_run_again_ends_the_paused_one_and_says_so(outputs: dict[str, Any], value: Any) -> None:
    note = "the run that was paused at epoch 1, batch 3 is ended; resume() would have continued it"
    assert f"note: {note}" in records(outputs["dropped"])
    assert value("after dropped") == ("completed", "", 0, True)
    assert value("events") == [(SUMMARY,), ("failed", ERROR.replace(":", " at epoch 1, batch 3:", 1)), (note,), ("completed", "")]


def test_executed_for_nobody_the_error_is_raised_at_once(warm_kernel: Any) -> None:
    codes = [
        SETUP + BROKEN,
        "trainer = make(Digits)\ntrainer.run(2, make_loader())",
        "trainer.control.state, trainer.result.status, run_threads()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    NotebookClient(notebook, warm_kernel(), timeout=600, store_widget_state=False, allow_errors=True).execute(cleanup_kc=True)
    (error,) = notebook.cells[1].outputs
    assert error.ename == "AttributeError" and "paused" not in "\n".join(error.traceback)
    assert notebook.cells[2].outputs[0].data["text/plain"] == "('idle', 'failed', 0)"
