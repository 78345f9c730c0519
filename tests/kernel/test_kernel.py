"""A run in a real kernel: what the cell shows, how many messages it costs, and what a saved notebook keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbconvert import HTMLExporter

SETUP = """
import time, torch
from torch import nn
from nbtrain import Trainer

class Slow(Trainer):
    def train_step(self, batch):
        time.sleep(0.002)
        return {"loss": self.model(batch).square().mean()}
    test_step = train_step

trainer = Slow(nn.Linear(4, 1), device="cpu", optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
loader = [torch.randn(8, 4) for _ in range(200)]
"""


WIDGET = "application/vnd.jupyter.widget-view+json"


def test_saved_notebook_keeps_the_record_and_no_widget_where_no_state_can_be_reached(execute: Any) -> None:
    keeps_none = "from nbtrain.addons import KeptStatesAddon\ntrainer[KeptStatesAddon].keep_states = False"
    notebook = execute(SETUP, f"{keeps_none}\nresult = trainer.run(1, loader)")
    buttons, record = notebook.cells[1].outputs
    html = record.data["text/html"].replace('class="nbtrain-svg"', "")  # the drawing stays
    assert buttons.data == {"text/html": "", "text/plain": ""} and 'class="nbtrain-' not in html


def test_saved_notebook_keeps_the_record_and_shows_nothing_of_its_slider(execute: Any) -> None:
    notebook = execute(SETUP, "result = trainer.run(3, loader, loader)")
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    slider, record = notebook.cells[1].outputs
    assert set(record.data) == {"text/html", "text/plain"}
    assert set(slider.data) == {WIDGET, "text/html", "text/plain"} and slider.data["text/html"] == slider.data["text/plain"] == ""
    assert re.search(
        r":has\(\+ .jp-OutputArea-child .nbtrain-\w{8}\)", record.data["text/html"]
    )  # hides what stands there without a kernel
    html = record.data["text/html"]
    assert html.count('scope="row"') == 3 and "✓ completed" in html and "data:image/svg+xml" in html and len(html) < 50_000
    assert "Slow · Linear · 5 params · cpu · started " in record.data["text/plain"] and "★" in record.data["text/plain"]
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert "✓ completed" in page and "widget-view" not in page


def test_run_all_on_finished_runs_draws_their_records_again(execute: Any, tmp_path: Path) -> None:
    make = f"""from nbtrain import StateManagerAddon
torch.manual_seed(0)
sgd = lambda params: torch.optim.SGD(params, lr=0.1)
trainer = Slow.add_on(StateManagerAddon)(nn.Linear(4, 1), "cpu", optimizer=sgd, save_path={str(tmp_path)!r})"""
    runs = ["result = trainer.run(2, loader[:20], loader[:2], resume='auto')", "result = trainer.run(3, loader[:20], resume='auto')"]
    cells = execute(SETUP, make, *runs, make, *runs, "print(result)").cells

    def record(cell: Any) -> Any:
        return next(output.data for output in reversed(cell.outputs) if output.get("data", {}).get("text/plain"))

    def lines(cell: Any) -> list[str]:
        return [line for line in record(cell)["text/plain"].splitlines() if not line.startswith("note: ")]

    for again, why in ((5, "3 epochs were there, 2 are requested: nothing to train"), (6, "all 3 epochs were there: nothing to train")):
        assert f"note: {why}" in record(cells[again])["text/plain"]
        assert record(cells[again])["text/html"].count("<img") == 1
    assert lines(cells[5]) == lines(cells[6])
    assert WIDGET not in cells[5].outputs[0].data and WIDGET in cells[6].outputs[0].data  # the newest record has the slider
    assert "✓ completed · 1 epoch, 3 in all" in lines(cells[3])[-1] and "✓ completed · 3 epochs" in lines(cells[6])[-1]
    assert "(all 3 epochs were there: nothing to train) · 0 epochs, 3 in all" in cells[7].outputs[0].text


def test_record_that_is_drawn_again_has_the_slider_of_the_run(execute: Any, tmp_path: Path) -> None:
    make = f"""from nbtrain import StateManagerAddon
sgd = lambda params: torch.optim.SGD(params, lr=0.1)
trainer = Slow.add_on(StateManagerAddon)(nn.Linear(4, 1), "cpu", optimizer=sgd, save_path={str(tmp_path)!r}, keep_last_n=3)"""
    run = "result = trainer.run(3, loader[:20], resume='auto')"
    look = "from nbtrain.addons import LiveViewAddon\nslider = trainer.view._live.slider\n"
    look += "print([label for label, _ in slider.slider.options], trainer[LiveViewAddon]._slider_view is trainer.view)"
    go = "slider.slider.value = 0\nslider.press('Rewind here')\nprint(trainer.counts.epoch)"
    cells = execute(SETUP, make, run, make, run, look, go, "trainer.show()").cells
    for slider, record in (cells[4].outputs, cells[7].outputs):
        assert WIDGET in slider.data and "all 3 epochs were there" in record.data["text/plain"]
    assert cells[5].outputs[0].text == "['1', '2', '3 ★'] True\n" and cells[6].outputs[-1].text == "1\n"


def test_record_that_is_drawn_again_has_no_slider_where_there_is_nowhere_to_go(execute: Any, tmp_path: Path) -> None:
    make = f"""from nbtrain import StateManagerAddon
sgd = lambda params: torch.optim.SGD(params, lr=0.1)
trainer = Slow.add_on(StateManagerAddon)(nn.Linear(4, 1), "cpu", optimizer=sgd, save_path={str(tmp_path)!r}, keep_last_n=1)"""
    run = "result = trainer.run(2, loader[:20], resume='auto')"
    cells = execute(SETUP, make, run, make, run).cells
    assert len(cells[4].outputs) == 1 and WIDGET not in cells[4].outputs[0].data


def test_failed_run_keeps_its_table_and_shows_the_place(execute: Any) -> None:
    broken = "def train_step(self, batch, n=[0]):\n    n[0] += 1\n    if n[0] == 250: raise RuntimeError('spoilt')\n"
    broken += "    return {'loss': self.model(batch).square().mean()}\nSlow.train_step = train_step\n"
    broken += "trainer.on_error = 'raise'\ntrainer.run(3, loader)"
    notebook = execute(SETUP, broken)
    _, record, error = notebook.cells[1].outputs
    assert "✗ failed · RuntimeError at epoch 2, batch 50: spoilt" in record.data["text/plain"]
    assert record.data["text/html"].count('scope="row"') == 1
    assert error.output_type == "error" and "Slow.train_step, epoch 2, batch 50: the batch is Tensor (8, 4) float32" in "\n".join(
        error.traceback
    )


def test_log_bar_false_shows_nothing(execute: Any) -> None:
    notebook = execute(SETUP, "trainer.log_bar = False\ntrainer.run(1, loader);")
    assert notebook.cells[1].outputs == []


SPINNING = """
from time import perf_counter

class Spinning(Slow):
    def train_step(self, batch):
        end = perf_counter() + 0.001
        while perf_counter() < end:
            pass
        return {"loss": self.model(batch).square().mean()}

spinning = Spinning(nn.Linear(4, 1), device="cpu", optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
"""
SHOWN = {"display_data", "update_display_data", "comm_open", "comm_msg", "comm_close", "stream"}
RUN = """
start = perf_counter()
spinning.run(4, [torch.randn(8, 4)] * 500)
seconds = perf_counter() - start
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(RUN, id="steps", marks=pytest.mark.long),
        pytest.param(RUN.replace("4, [torch.randn(8, 4)] * 500", "1500, [torch.randn(8, 4)]"), id="epochs"),
    ],
)
def test_a_run_at_1_ms_a_step_or_an_epoch_sends_six_messages_a_second_at_most(run: str) -> None:
    manager, client = start_new_kernel()
    sent: list[str] = []
    try:
        client.execute_interactive(SETUP + SPINNING, timeout=600)
        # else a slider is shown at the end
        client.execute_interactive("from nbtrain.addons import KeptStatesAddon; spinning[KeptStatesAddon].keep_states = False", timeout=600)
        client.execute_interactive(run, timeout=600, output_hook=lambda message: sent.append(message["msg_type"]))
        reply = client.execute_interactive("", user_expressions={"seconds": "seconds"}, timeout=600)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    seconds = float(reply["content"]["user_expressions"]["seconds"]["data"]["text/plain"])
    assert [kind for kind in sent if kind not in SHOWN] == ["status", "execute_input", "status"]
    shown = [kind for kind in sent if kind in SHOWN]
    second = len(shown) - shown[::-1].index("display_data")  # the widgets, then the record: once, however long the run is
    assert (
        shown.count("display_data") == 2 and shown[second:].count("comm_open") == 3 * 3 + 3
    )  # three buttons and a hint, after the first step
    end = shown.index("comm_close", second)
    last = shown[second:].index("comm_close") + second
    assert shown[-1] == "update_display_data"  # the cell has ended: for programs that see only its messages
    assert set(shown[second:last]) <= {"update_display_data", "comm_msg", "comm_open"} and set(shown[end:-1]) <= {"comm_close", "comm_msg"}
    assert 0 < shown[second:last].count("update_display_data") <= 6 * seconds


def test_autoreload_keeps_isinstance_and_composed_classes(tmp_path: Path, execute: Any) -> None:
    module = tmp_path / "steps.py"
    source = "from nbtrain import Trainer\n\n\nclass Mine(Trainer):\n    def test_step(self, batch):\n        return {'loss': 1.0}\n"
    module.write_text(source)
    notebook = execute(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n%load_ext autoreload\n%autoreload 2\nfrom steps import Mine",
        "from torch import nn\nfrom nbtrain import GradientClipAddon\n"
        "kind = Mine.add_on(GradientClipAddon)\ntrainer = kind(nn.Linear(1, 1), device='cpu', mode='test')",
        f"from pathlib import Path; import time; time.sleep(1.1)\nPath({str(module)!r}).write_text({source.replace('1.0', '2.0')!r})",
        "assert isinstance(trainer, Mine) and isinstance(trainer, kind) and Mine.add_on(GradientClipAddon) is kind\n"
        "print(trainer.test_step(None)['loss'])",
    )
    assert notebook.cells[3].outputs[0].get("text") == "2.0\n", notebook.cells[3].outputs


def test_run_continues_from_one_cell_to_the_next(execute: Any) -> None:
    notebook = execute(SETUP, "trainer.run(1, loader[:5])", "trainer.run(1, loader[:5])", "print(len(trainer.history))")
    assert notebook.cells[3].outputs[0].text == "2\n"


def test_run_folder_keeps_the_source_in_cells_of_the_newer_class(tmp_path: Path, execute: Any) -> None:
    head = "import torch\nfrom torch import nn\nfrom nbtrain import Trainer\n"
    loss = "# a note above\nGAMMA = 2\n\ndef loss(x):\n    return (x**GAMMA).mean()\n\ndef unused(x):\n    return x\n"
    kind = "class Mine(Trainer):\n    def train_step(self, batch):\n        return {'loss': loss(self.model(batch)) * %d}\n"
    config = "class Config:\n    lr = 0.1\n"
    trainer = (
        f"trainer = Mine(nn.Linear(4, 1), device='cpu', save_path={str(tmp_path)!r},\n"
        "               optimizer=lambda params: torch.optim.SGD(params, lr=Config.lr))\n"
    )
    notebook = execute(
        head,
        kind % 1,
        loss,
        config,
        "%time unrelated = 1\n" + kind % 2,
        trainer,
        "trainer.run(1, [torch.randn(8, 4)] * 5);",
    )
    assert notebook.cells[6].outputs[0].get("ename") is None, notebook.cells[6].outputs
    assert (tmp_path / "run-001" / "source" / "steps.py").read_text() == (
        "# ==== loss · cell\ndef loss(x):\n    return (x**GAMMA).mean()\n"
        "\n\n# ==== Config · cell\n" + config + "\n\n# ==== Mine · cell\n" + kind % 2 + "\n\n"
        "# ==== <lambda> · cell\n" + trainer
    )
    kept = json.loads((tmp_path / "run-001" / "provenance.json").read_text())
    assert kept["sources"]["source"]["values"] == {"Config.lr": 0.1, "GAMMA": 2} and kept["command"] == []
