"""From the second run of a cell on, its runs are one output: as it is saved, and in what stays alive in the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

BEGIN = """
import ipywidgets, torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from nbtrain import Trainer
x = torch.linspace(-1, 1, 64)[:, None]
loader = DataLoader(TensorDataset(x, x * 2), batch_size=16)

class Fit(Trainer):
    def train_step(self, batch):
        assert BREAKS != self.optimizer.param_groups[0]["lr"]
        return {"loss": F.mse_loss(self.model(batch[0]), batch[1])}
    def test_step(self, batch):
        return {"loss": F.mse_loss(self.model(batch[0]), batch[1])}

BREAKS = None
def fit(lr):
    model = torch.nn.Linear(1, 1)
    return Fit(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=lr))
"""
N_WIDGETS = "len(ipywidgets.widgets.widget._instances)"
CELLS = {
    "one": "one = fit(0.1)\none.run(2, loader, loader)\nn_widgets = " + N_WIDGETS,
    "loop": "import weakref\nmade = []\nfor lr in (0.1, 0.01, 0.001):\n    trainer = fit(lr)\n    made.append(weakref.ref(trainer))\n    "
    "trainer.run(2, loader, loader)\n    trainer.evaluate(loader)",
    "alive": "import gc\ngc.collect()\nprint(sum(ref() is not None for ref in made))",
    "widgets": f"print({N_WIDGETS} - n_widgets)",
    "again": "trainer.show()",
    "fails": "BREAKS = 0.01\nfor lr in (0.1, 0.01):\n    fit(lr).run(2, loader, loader)",
    "background": "BREAKS = None\nhandles = [fit(lr).run(3, loader, loader, background=True) for lr in (0.1, 0.01)]",
    "waits": "for handle in handles: handle.wait()",
    "session": "import nbtrain\nnbtrain.runs()[-2:]",
}


@pytest.fixture(scope="module")
def outputs(execute: Callable[..., Any]) -> dict[str, Any]:
    cells = execute(BEGIN, *CELLS.values()).cells
    return dict(zip(CELLS, (cell.outputs for cell in cells[1:])))


def shown(outputs: list[Any]) -> list[str]:
    """The HTML of the outputs that show anything."""
    return [html for output in outputs if (html := output.get("data", {}).get("text/html"))]


def test_one_run_has_its_own_record(outputs: dict[str, Any]) -> None:
    (record,) = shown(outputs["one"])
    assert "<details" not in record and "completed" in record


def test_runs_of_a_loop_are_one_output_with_a_line_each(outputs: dict[str, Any]) -> None:
    (page,) = shown(outputs["loop"])
    assert page.count("<details") == 3 and "3 runs · ★ val_loss" in page and 'aria-label="run Fit 2, lr' in page.replace("best · ", "")
    (text,) = (found.splitlines() for output in outputs["loop"] if (found := output["data"]["text/plain"]))
    assert text[0].split() == ["run", "lr", "val_loss", "at", "epoch", "test_loss", "time"]
    assert [line.split()[1:3] for line in text[1:]] == [["2", "0.1"], ["3", "0.01"], ["4", "0.001"]]  # Fit 1 is that of the cell before


def test_their_widgets_are_closed(outputs: dict[str, Any], printed: Callable[[str], str]) -> None:
    assert int(printed("widgets")) <= 0


def test_their_trainers_are_freed(outputs: dict[str, Any], printed: Callable[[str], str]) -> None:
    assert printed("alive") == "1\n"  # the last one, which the cell has named


def test_a_folded_run_can_be_shown_again(outputs: dict[str, Any]) -> None:
    (record,) = shown(outputs["again"])
    assert "completed" in record and "<details" not in record


def test_a_run_that_fails_is_a_line_and_its_error_is_below(outputs: dict[str, Any]) -> None:
    (page,) = shown(outputs["fails"])
    assert page.count("<details") == 2 and "✗ not begun · AssertionError" in page
    assert outputs["fails"][-1].output_type == "error"


def test_runs_in_the_background_fold_when_they_have_ended(outputs: dict[str, Any]) -> None:
    (page,) = shown(outputs["background"])
    assert page.count("<details") == 2 and " on · " not in page


def test_the_session_lists_its_runs(outputs: dict[str, Any]) -> None:
    (page,) = shown(outputs["session"])
    assert page.count("<details") == 2
