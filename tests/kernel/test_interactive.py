"""■, pause and continue, the background, live edits and the end of a kernel: a run as somebody in a notebook meets it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

SETUP = """
import os, signal, time, weakref, threading, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nbtrain import StateManagerAddon, Trainer

warnings.simplefilter("ignore")

class Steps(Trainer):
    presses = set()  # the batches, counted over training and validation, in which somebody presses ■
    n_presses = 1
    n = 0
    seconds = 0.0

    def train_step(self, batch):
        self.n += 1
        if self.n in self.presses:
            for _ in range(self.n_presses):
                state, end = self.control.state, time.monotonic() + 20
                os.killpg(os.getpgrp(), signal.SIGINT)  # as Jupyter does: the workers get it too
                while self.control.state == state and time.monotonic() < end:
                    time.sleep(0.001)
        time.sleep(self.seconds)
        return {"loss": self.model(batch[0]).square().mean(), "draw": torch.rand(())}

    def test_step(self, batch):
        return self.train_step(batch)

def make(kind=Steps, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    options = {"device": "cpu", "optimizer": lambda params: torch.optim.Adam(params, lr=0.01)} | options
    return kind(model, **options)

def make_loader(workers=0):
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(160, 4, generator=generator)), 8, shuffle=True, num_workers=workers)

def measured(trainer):
    rows = [{k: v for k, v in row.items() if k != "time_s"} for row in trainer.history.epochs]
    return rows, [table.state_dict() for table in trainer.history.steps.values()]

def same(a, b):
    weights = all(torch.equal(x, y) for x, y in zip(a.model.state_dict().values(), b.model.state_dict().values()))
    return weights and measured(a) == measured(b)
"""


class Kernel:
    """One kernel, and what its cells have answered."""

    def __init__(self, **environment: str) -> None:
        self.manager, self.client = start_new_kernel(env=os.environ | environment)
        self.run(SETUP)

    def run(self, code: str, *, stop_on_error: bool = True) -> list[dict[str, Any]]:
        """Execute a cell. Returns its messages, those that came later by another thread apart."""
        messages: list[dict[str, Any]] = []
        reply = self.client.execute_interactive(code, timeout=600, output_hook=messages.append, stop_on_error=stop_on_error)
        assert reply["content"]["status"] != "aborted", "the kernel has not run this cell, because one before it ended with an error"
        return [message for message in messages if message["msg_type"] != "status"]

    def value(self, expression: str) -> Any:
        """What `repr` gives for `expression`, evaluated."""
        reply = self.client.execute_interactive("", user_expressions={"it": expression}, timeout=600, output_hook=lambda message: None)
        answer = reply["content"]["user_expressions"]["it"]
        assert answer["status"] == "ok", "\n".join(answer.get("traceback", []))
        return eval(answer["data"]["text/plain"])  # noqa: S307  # it is the literal that the test has asked for

    def error(self, code: str) -> tuple[str, str, list[str]]:
        """The error that a cell ends with: its name, its text, and what is shown of it."""
        found = [message["content"] for message in self.run(code) if message["msg_type"] == "error"]
        assert len(found) == 1, found
        return found[0]["ename"], found[0]["evalue"], found[0]["traceback"]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_run_that_was_paused_again_and_again_equals_one_that_never_was(kernel: Kernel, workers: int) -> None:
    kernel.run(f"never = make(log_bar=False)\nnever.run(3, make_loader({workers}), make_loader({workers}))")
    kernel.run("paused = make(log_bar=False)\npaused.presses = {3, 27, 45, 67, 85}")  # the second and the fourth in a validation
    name, text, shown = kernel.error(f"paused.run(3, make_loader({workers}), make_loader({workers}))")
    assert name == "RunPaused" and shown == [f"‖ {text}"]
    assert text.startswith("run paused at epoch 1, batch ") and text.endswith("\n  paused.resume()  # continues it, while it is paused")
    places = [text] + [kernel.error("torch.rand(5); paused.model.eval(); paused.resume()")[1] for _ in range(4)]
    assert "epoch 1, validation batch" in places[1] and "epoch 2, validation batch" in places[3]
    kernel.run("result = paused.resume()")
    assert kernel.value("result.status, same(paused, never)") == ("completed", True)


def test_cells_that_are_queued_behind_a_paused_one_do_not_run(kernel: Kernel) -> None:
    kernel.run("trainer, ran = make(log_bar=False), False\ntrainer.presses = {5}")
    first = kernel.client.execute("trainer.run(1, make_loader())")
    second = kernel.client.execute("ran = True")
    replies = {}
    while len(replies) < 2:
        reply = kernel.client.get_shell_msg(timeout=600)
        replies[reply["parent_header"]["msg_id"]] = reply["content"]["status"]
    assert replies[first] == "error" and replies[second] in ("aborted", "error")
    time.sleep(0.2)  # the kernel lets a moment pass in which it aborts what comes
    assert kernel.value("ran, trainer.control.state, trainer.result.status") == (False, "paused", "paused")
    kernel.run("trainer.stop()")


def test_a_second_interrupt_ends_the_run_and_saves_its_state(kernel: Kernel, tmp_path: Path) -> None:
    options = f"Steps.add_on(StateManagerAddon), log_bar=False, save_path={str(tmp_path)!r}"
    kernel.run(f"trainer = make({options})\ntrainer.presses = {{47}}\ntrainer.n_presses = 2")
    text = "stopped at epoch 2, batch 8 · trainer.result has what it reached"
    assert kernel.error("result = trainer.run(3, make_loader(), make_loader())") == ("RunStopped", text, [f"■ {text}"])
    assert kernel.value("trainer.result.status, trainer.result.reason") == ("interrupted", "epoch 2, batch 8")
    kernel.run("never = make(log_bar=False)\nnever.run(3, make_loader(), make_loader())")
    kernel.run(f"again = make({options})\nagain.run(3, make_loader(), make_loader(), resume='auto')")
    assert kernel.value("again.result.status, same(again, never)") == ("completed", True)


def test_stop_ends_a_paused_run_and_leaves_nothing(kernel: Kernel) -> None:
    kernel.run(
        "import lightning as L, gc\nseen = []\n"
        "class Ends(L.Callback):\n"
        "    def teardown(self, trainer, module, stage): seen.append(stage)\n"
        "class Kept(Steps):\n"
        "    def train_step(self, batch):\n"
        "        self.batch = weakref.ref(batch[0])\n"
        "        return super().train_step(batch)\n"
        "trainer = make(Kept, log_bar=False, lightning={'callbacks': [Ends()]})\ntrainer.presses = {7}\nbefore = threading.active_count()"
    )
    assert kernel.error("trainer.run(1, make_loader(2))")[0] == "RunPaused"
    kernel.run("result = trainer.stop(); gc.collect()")
    assert kernel.value(
        "result.status, seen, trainer.batch(), threading.active_count() - before, all(p.grad is None for p in trainer.model.parameters())"
    ) == ("stopped", ["fit"], None, 0, True)
    kernel.run("trainer.run(1, make_loader())")
    assert kernel.value("trainer.result.status, len(trainer.history)") == ("completed", 1)


def test_a_background_run_lets_the_kernel_answer(kernel: Kernel) -> None:
    kernel.run("trainer = make(log_bar=False)\ntrainer.seconds = 0.01")
    kernel.run("handle = trainer.run(200, make_loader(), background=True)")
    assert kernel.value("handle.status, trainer.predict(torch.ones(2, 4)).shape == (2, 1)") == ("running", True)
    name, text, _ = kernel.error("trainer.run(1, make_loader())")
    assert (name, text.splitlines()[0]) == ("ConfigError", "A run of this trainer is on.")
    kernel.run("trainer.pause(); step = trainer.counts.processed; time.sleep(0.1)")
    assert kernel.value("handle.status, trainer.counts.processed == step") == ("paused", True)
    assert kernel.error("handle.wait()")[0] == "RunPaused"
    kernel.run("trainer.resume(background=True); time.sleep(0.2)")
    assert kernel.value("trainer.counts.processed > step") is True
    kernel.run("trainer.stop()")
    assert kernel.value("handle.status, handle.wait().status") == ("stopped", "stopped")


def test_what_the_steps_print_lands_under_the_cell_that_began_the_run(kernel: Kernel) -> None:
    kernel.run(
        "class Prints(Steps):\n    def train_step(self, batch):\n        print('from the step')\n        return super().train_step(batch)"
    )
    kernel.run("trainer = make(Prints, log_bar=False)\ntrainer.seconds = 0.02")
    messages: list[dict[str, Any]] = []
    first = kernel.client.execute("handle = trainer.run(1, make_loader(), background=True)")
    second = kernel.client.execute("import time; time.sleep(1)")
    while not any(
        m["msg_type"] == "status" and m["parent_header"]["msg_id"] == second and m["content"]["execution_state"] == "idle" for m in messages
    ):
        messages.append(kernel.client.get_iopub_msg(timeout=600))
    prints = [m for m in messages if m["msg_type"] == "stream" and "from the step" in m["content"]["text"]]
    assert prints and {m["parent_header"]["msg_id"] for m in prints} == {first}
    for _ in range(2):
        kernel.client.get_shell_msg(timeout=600)
    kernel.run("handle.wait()")


def test_a_failure_in_the_background_is_raised_by_wait_with_the_line_of_the_cell(kernel: Kernel) -> None:
    kernel.run("class Broken(Steps):\n    def train_step(self, batch):\n        return {'loss': spoilt}")
    kernel.run("trainer = make(Broken, log_bar=False, on_error='pause')")
    kernel.run("handle = trainer.run(1, make_loader(), background=True)")
    kernel.run("handle.join()")
    assert kernel.value("handle.status, trainer.result.status") == ("paused", "paused")
    name, text, shown = kernel.error("handle.wait()")
    assert name == "NameError" and "spoilt" in "\n".join(shown) and "Broken.train_step, epoch 1, batch 1" in "\n".join(shown)


def test_an_error_holds_its_batch_until_free(kernel: Kernel) -> None:
    kernel.run(
        "batches = []\nclass Fails(Steps):\n    def train_step(self, batch):\n        batches.append(weakref.ref(batch[0]))\n"
        "        raise RuntimeError('spoilt')"
    )
    kernel.run("import gc\ntrainer = make(Fails, log_bar=False, on_error='pause')")
    assert kernel.error("trainer.run(1, make_loader())")[0] == "RuntimeError"
    kernel.run("gc.collect()")
    assert kernel.value("batches[0]() is not None") is True  # for %debug
    kernel.run("trainer.stop(); trainer.free(); gc.collect()")
    assert kernel.value("batches[0]() is None") is True


def test_live_edits_are_made_between_two_batches_and_marked(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(
        f"trainer = make(Steps.add_on(StateManagerAddon), log_bar=False, save_path={str(tmp_path)!r})\ntrainer.seconds = 0.005\n"
        "handle = trainer.run(200, make_loader(), make_loader(), background=True)"
    )
    kernel.run("trainer.set(lr=0.002)\nmetrics = trainer.validate_now()\npath = trainer.save_state()")
    assert kernel.value("sorted(metrics), path.exists(), trainer.optimizer.param_groups[0]['lr']") == (
        ["val_draw", "val_loss"],
        True,
        0.002,
    )
    kernel.run("trainer.stop()")
    marks = kernel.value("[text for _, text in trainer.history.marks]")
    assert marks[0] == "lr 0.01 → 0.002" and marks[1].startswith("validated: val_") and marks[2:] == ["the state was saved"]


def test_a_rewritten_cell_is_used_from_the_next_batch_on(kernel: Kernel) -> None:
    kernel.run("trainer = make(Steps, log_bar=False)\ntrainer.presses = {7}")
    assert kernel.error("trainer.run(1, make_loader())")[0] == "RunPaused"
    kernel.run("class New(Steps):\n    def train_step(self, batch):\n        return super().train_step(batch) | {'twice': 2.0}")
    expected = "steps must be a subclass of TrainerBase, a subclass of LightningModule or None, got the class Linear."
    assert kernel.error("trainer.resume(torch.nn.Linear)")[1] == expected
    kernel.run("trainer.resume(New)")
    rows = kernel.value("trainer.history.epochs[0]['train_twice'], [t == t for t in trainer.history.steps['train']['train_twice']]")
    assert rows[0] == 2.0 and rows[1].index(True) >= 7 and all(rows[1][rows[1].index(True) :])
    assert kernel.value("[text for _, text in trainer.history.marks]") == ["train_step changed"]


def test_show_shows_a_live_run_once_more(kernel: Kernel) -> None:
    kernel.run("trainer = make()\ntrainer.seconds = 0.02")
    began = kernel.run("handle = trainer.run(100, make_loader(), background=True)")
    ids = [m["content"]["transient"]["display_id"] for m in began if m["msg_type"] == "display_data"]
    shown = [m for m in kernel.run("trainer.show()") if m["msg_type"] == "display_data"]
    assert [m["content"]["transient"]["display_id"] for m in shown] == ids and "epoch " in shown[1]["content"]["data"]["text/plain"]
    kernel.run("while trainer.counts.epoch < 1: time.sleep(0.01)\ntrainer.stop()")
    after = [m for m in kernel.run("trainer.show()") if m["msg_type"] == "display_data"]
    slider, record = (m["content"]["data"] for m in after)
    assert "application/vnd.jupyter.widget-view+json" in slider and "■ stopped" in record["text/plain"]


SLIDER = "trainer.view._live.slider"


def _send(kernel: Kernel, widget: str, data: dict[str, Any]) -> None:
    """What a page sends when a person uses a widget; returns once the kernel has attended to it."""
    content = {"comm_id": kernel.value(f"{SLIDER}.{widget}.model_id"), "data": data}
    message = kernel.client.session.msg("comm_msg", content)
    kernel.client.shell_channel.send(message)
    while True:
        reply = kernel.client.get_iopub_msg(timeout=600)
        is_reply = reply["parent_header"].get("msg_id") == message["header"]["msg_id"]
        if is_reply and reply["msg_type"] == "status" and reply["content"]["execution_state"] == "idle":
            return


def _choose(kernel: Kernel, index: int) -> None:
    _send(kernel, "slider", {"method": "update", "state": {"index": index}, "buffer_paths": []})


def _click(kernel: Kernel, label: str) -> str:
    """Click a button beside the slider. Returns what is said then."""
    _send(kernel, f"buttons[{label!r}]", {"method": "custom", "content": {"event": "click"}})
    return kernel.value(f"{SLIDER}.words.value").partition(">")[2].removesuffix("</div>")


def test_slider_of_a_finished_run_rewinds_and_branches_as_the_calls_do(kernel: Kernel) -> None:
    kernel.run("never = make(log_bar=False)\nnever.run(3, make_loader())")
    kernel.run("trainer = make()\nresult = trainer.run(3, make_loader())")
    assert kernel.value(f"[label for label, _ in {SLIDER}.slider.options]")[:2] == ["start", "1"]
    _choose(kernel, 1)
    assert _click(kernel, "Branch here") == (
        "Branched from the end of epoch 1 · trainer.branches[0] is the branch: its run() continues from there"
    )
    assert _click(kernel, "Rewind here").startswith("Rewound to the end of epoch 1, step 20")
    assert kernel.value("trainer.counts.epoch, trainer.branches[0].counts.epoch") == (1, 1)
    kernel.run("result = trainer.run(2, trainer.ran.loader)")
    assert kernel.value("same(trainer, never)") is True


def test_slider_moves_to_the_newest_record_and_is_refused_while_a_run_is_on(kernel: Kernel) -> None:
    kernel.run("trainer = make()\nresult = trainer.run(1, make_loader())\nfirst = trainer.view")
    kernel.run("trainer.seconds = 0.02\nhandle = trainer.run(100, make_loader(), background=True)")
    assert kernel.value("first._live.slider, trainer.view._live.slider, first._record.has_slider") == (None, None, False)
    kernel.run("from nbtrain.travel.reachable_epochs import travel_of\nfrom nbtrain.views.epoch_slider import EpochSlider")
    kernel.run("slider = EpochSlider(travel_of(trainer)); slider.refresh(); slider.press('Rewind here')")
    assert "✗ A run of this trainer is on." in kernel.value("slider.words.value")
    kernel.run("trainer.stop(); handle.join()")
    assert kernel.value(f"{SLIDER} is not None") is True


def test_live_record_is_shown_once_and_stays_with_the_slider(kernel: Kernel) -> None:
    messages = kernel.run("trainer = make()\nresult = trainer.run(2, make_loader())")
    drawn = [m for m in messages if "application/vnd.jupyter.widget-view+json" in m["content"].get("data", {})]
    assert [m["msg_type"] for m in drawn] == [
        "display_data"
    ]  # a second drawing at the end would take the focus from an element that you have selected


def test_slider_stays_below_its_training_when_something_is_evaluated(kernel: Kernel) -> None:
    kernel.run("trainer = make()\nresult = trainer.run(2, make_loader())\nfirst = trainer.view\nmetrics = trainer.evaluate(make_loader())")
    assert kernel.value("first._live.slider is not None, trainer.view is first, trainer.view._live.slider") == (True, False, None)
    kernel.run("found = trainer.rewind(epoch=1)")
    assert kernel.value("first._live.slider.chosen.epoch, len(first._live.slider._places)") == (1, 2)


def test_paused_run_has_a_slider_below_it_and_a_rewind_ends_it(kernel: Kernel) -> None:
    kernel.run("trainer = make()\ntrainer.presses = {45}")
    assert kernel.error("trainer.run(4, make_loader())")[0] == "RunPaused"
    assert kernel.value(f"[child is {SLIDER}.box for child in trainer.view._live._below.children]") == [True]
    _choose(kernel, 1)
    assert _click(kernel, "Rewind here").startswith("Rewound to the end of epoch 1, step 20")
    assert kernel.value("trainer.control.state, trainer.result.status, trainer.counts.epoch") == ("idle", "stopped", 1)
    kernel.run(
        "trainer.presses = set()\nresult = trainer.run(3, trainer.ran.loader)\nnever = make(log_bar=False)\nnever.run(4, make_loader())"
    )
    assert kernel.value("same(trainer, never)") is True


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_kernel_that_is_shut_down_in_a_run_leaves_no_process(workers: int, tmp_path: Path) -> None:
    kernel = Kernel()
    kernel.run(
        f"trainer = make(Steps.add_on(StateManagerAddon), save_path={str(tmp_path)!r})\ntrainer.seconds = 0.02\n"
        f"handle = trainer.run(100, make_loader({workers}), background=True)\n"
        "while trainer.counts.processed < 30: time.sleep(0.01)"
    )
    pid = kernel.value("os.getpid()")
    children = _children(pid)
    assert len(children) >= workers
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=False)
    deadline = time.monotonic() + 10
    while any(map(_is_alive, [pid, *children])):
        assert time.monotonic() < deadline, "a process of the kernel is left"
        time.sleep(0.1)
    text = (tmp_path / "run-001" / "events.jsonl").read_text()
    assert '"kind":"end"' in text.splitlines()[-1] and '"status":"interrupted"' in text.splitlines()[-1]
    saved = [path.name for path in (tmp_path / "run-001" / "checkpoints").glob("epoch=1-*")]
    assert len(saved) == 2  # at the end of the epoch, and where it was left


def test_a_killed_kernel_leaves_the_record_up_to_its_last_update() -> None:
    killed = "class Killed(Steps):\n    def train_step(self, batch):\n        if self.n == 70:\n            time.sleep(1.5)\n"
    killed += "            os.kill(os.getpid(), signal.SIGKILL)\n        return super().train_step(batch)\n"
    killed += "trainer = make(Killed)\ntrainer.seconds = 0.055"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in (SETUP, killed, "trainer.run(9, make_loader())")])
    with pytest.raises(DeadKernelError):
        NotebookClient(notebook, timeout=600, store_widget_state=False).execute()
    record = notebook.cells[2].outputs[0]
    nbformat.validate(notebook)
    html = record.data["text/html"]
    assert html.count('scope="row"') == 3 and re.search(r"▶ running at \d\d:\d\d:\d\d<.*> · epoch 4/9 · ", html)


OLD = Path(os.environ.get("VIRTUAL_ENV") or Path(__import__("sys").prefix)) / "lowest"


@pytest.mark.parametrize("press", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ipykernel_6_pauses_and_works_in_the_background(press: bool) -> None:
    kernel = Kernel(PYTHONPATH=os.pathsep.join([str(OLD), *filter(None, [os.environ.get("PYTHONPATH")])]))
    try:
        assert kernel.value("__import__('ipykernel').__version__").startswith("6.")
        if press:
            kernel.run("trainer = make()\ntrainer.presses = {7}")
            assert kernel.error("trainer.run(1, make_loader(2))")[0] == "RunPaused"
            kernel.run("trainer.resume()")
        else:
            kernel.run("trainer = make()\nhandle = trainer.run(1, make_loader(2), background=True)")
            kernel.run("handle.wait()")
        assert kernel.value("trainer.result.status") == "completed"
    finally:
        kernel.close()


SESSION = """
with {name}.session(4, 2, state={{"memory": []}}) as session:
    for round in session:
        session.state["memory"].append(float(torch.rand(())))
        x = torch.randn(40, 4) + {name}.model(torch.zeros(1, 4)).item()
        {more}
        {name}.run(2, DataLoader(TensorDataset(x), 8, shuffle=True))
"""


def test_a_session_that_was_paused_goes_on_when_its_cell_is_run_again(kernel: Kernel) -> None:
    evaluated = SESSION.format(name="shown", more="shown.evaluate(DataLoader(TensorDataset(x), 8))")
    messages = kernel.run("shown = make()\n" + evaluated)
    shown = {message["content"]["transient"]["display_id"] for message in messages if message["msg_type"] == "display_data"}
    assert len({name.removesuffix("-live") for name in shown}) == 1  # one record of all rounds
    kernel.run("never = make()\n" + SESSION.format(name="never", more="pass"))
    never = kernel.value("session.state['memory'], torch.rand(()).item()")
    kernel.run("paused, broken = make(), True\npaused.presses = {13, 24, 33}")
    cell = SESSION.format(name="paused", more="if round == 3 and broken: raise OSError('no data')")
    name, text, shown = kernel.error(cell)
    assert name == "RunPaused" and shown == [f"‖ {text}"]
    how = "run this cell again to continue the session, or:\n  trainer.stop()  # ends it".replace("trainer", "paused")
    assert text == f"session paused in round 2 of 4, at epoch 3, batch 4\n{how}"
    assert "round 3 of 4, at epoch 5, batch 5" in kernel.error(cell)[1]
    kernel.run("paused.resume()")  # the run, to its end
    assert kernel.error("torch.rand(3)\n" + cell)[:2] == ("OSError", "no data")
    kernel.run("broken = False")
    assert "round 4 of 4" in kernel.error("torch.rand(3)\n" + cell)[1]
    kernel.run(cell)
    assert kernel.value("session.state['memory'], torch.rand(()).item()") == never
    assert kernel.value("same(paused, never), paused.history.epochs[-1]['round'], paused.open_session") == (True, 4, None)
