"""The cell of a class is run again, or its file is edited under `%autoreload`: the next operation uses and marks it."""

from __future__ import annotations

from typing import Any

import pytest

SETUP = """\
import os, sys, tempfile, torch
from pathlib import Path
from nbtrain import Trainer

def make(kind):
    torch.manual_seed(0)
    return kind(torch.nn.Linear(4, 1), device="cpu", optimizer=lambda params: torch.optim.SGD(params, lr=0.01), log_bar=False)

loader = [torch.ones(8, 4) * i for i in range(1, 4)]
marks = lambda: [text for _, text in trainer.history.marks]
"""
STEPS = """\
class Noisy(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}

    def test_step(self, batch):
        return self.train_step(batch)
"""
TIMES_TEN = STEPS.replace(".mean()", ".mean() * 10")
FILE = """\
Path(folder, "my_steps.py").write_text({text!r})
os.utime(Path(folder, "my_steps.py"), (0, {time}))
"""
CELLS = {
    "setup": SETUP + STEPS + "trainer = make(Noisy)\nresult = trainer.run(1, loader, loader)",
    "again": STEPS,
    "run": "result = trainer.run(1, loader, loader)",
    "unchanged": "marks(), type(trainer) is Noisy",
    "edited": TIMES_TEN,
    "evaluate": "before = trainer.history.best['val_loss']\nratio = trainer.evaluate(loader)['loss'] / before\n"
    "marks()[0].partition(',')[0], ratio > 5",
    "derived": "class Noisy(Noisy):\n    def train_step(self, batch):\n        return super().train_step(batch) | {'more': 1.0}",
    "run derived": "result = trainer.run(1, loader, loader)",
    "more": "result.last['train_more'], len(marks()), type(trainer) is Noisy",
    "autoreload": "%load_ext autoreload\n%autoreload 2\nfolder = tempfile.mkdtemp()\nsys.path.insert(0, folder)\n"
    + FILE.format(text="from nbtrain import Trainer\n" + STEPS, time=1_000),
    "import": "import my_steps\ntrainer = make(my_steps.Noisy)\nresult = trainer.run(2, loader, loader)\nbest = trainer.history.best",
    "pause": "handle = trainer.run(1000, loader, loader, background=True)\ntrainer.pause()\n"
    + FILE.format(text="from nbtrain import Trainer\n" + TIMES_TEN, time=2_000),
    "resume": "handle = trainer.resume(background=True)\ntrainer.pause()\nresult = trainer.stop()",
    "marked": "[text.partition(',')[0] for text in marks()], trainer.history.best_before(1)['val_loss'] <= best['val_loss']",
}


@pytest.fixture(scope="module")
def value(execute: Any) -> Any:
    """What a cell gives, evaluated, by the name of the cell."""
    notebook = execute(*CELLS.values())
    cells = dict(zip(CELLS, notebook.cells))
    errors = [output for cell in notebook.cells for output in cell.outputs if output.output_type == "error"]
    assert not errors, errors

    def read(name: str) -> Any:
        (result,) = [output for output in cells[name].outputs if output.output_type == "execute_result"]
        return eval(result.data["text/plain"])  # noqa: S307  # what the cell has written

    return read


def test_cell_that_is_run_again_is_used_by_the_next_operation_and_marked_if_it_was_edited(value: Any) -> None:
    assert value("unchanged") == ([], True)
    assert value("evaluate") == ("train_step changed; best starts again", True)


def test_class_that_derives_from_the_one_before_is_used(value: Any) -> None:
    assert value("more") == (1.0, 2, True)


def test_file_that_is_edited_in_a_pause_is_marked_when_the_run_is_resumed(value: Any) -> None:
    assert value("marked") == (["train_step changed; best starts again"], True)
