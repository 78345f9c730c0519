"""A newcomer's notebook in JupyterLab: live while it runs, complete when it is over, the same after a reload without a kernel.

With NBTRAIN_SCREENSHOTS=FOLDER the pages are kept as pictures, to be looked at.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest

CELL = """import torch
from torch.nn.functional import cross_entropy
from nbtrain import Trainer
from nbtrain.examples.digits import SmallCNN, digits_loaders


class Digits(Trainer):
    def train_step(self, batch):
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}

    def test_step(self, batch):
        return self.train_step(batch)


torch.manual_seed(0)
train_loader, valid_loader = digits_loaders(batch_size=32)
trainer = Digits(SmallCNN(), device="cpu", optimizer=lambda params: torch.optim.Adam(params, lr=1e-3), gradient_clip=1.0)
result = trainer.run(8, train_loader, valid_loader)"""


def _shoot(page: Any, name: str) -> None:
    if folder := os.environ.get("NBTRAIN_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.fixture
def notebook(lab_root: Path) -> str:
    cells = [nbformat.v4.new_code_cell(CELL), nbformat.v4.new_code_cell("trainer")]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}  # else a dialog asks
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), lab_root / "digits.ipynb")
    return "digits.ipynb"


def test_newcomers_notebook(lab: Any, notebook: str, lab_root: Path) -> None:
    lab.open(notebook)
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"epoch [3-8]/8 · ")
    assert lab.page.locator(".jp-OutputArea progress").count() == 1 and lab.page.locator(".jp-OutputArea svg[role=img]").count() == 1
    _shoot(lab.page, "running")
    lab.wait_text(r"✓ completed · 8 epochs")
    lab.wait_text(r"8 epochs done")
    assert lab.page.locator(".jp-OutputArea progress").count() == 0
    assert lab.page.locator(".jp-OutputArea img[alt^=Curves]").count() == 1
    lab.page.locator(".jp-OutputArea img[alt^=Curves]").scroll_into_view_if_needed()
    _shoot(lab.page, "done")
    _shoot(lab.page.locator(".jp-Cell").first, "notebook")
    lab.command("docmanager:save", wait=True)
    saved = nbformat.read(lab_root / notebook, as_version=4)
    assert not saved.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state")
    lab.command("kernelmenu:shutdown", wait=True)
    lab.page.goto(f"{lab.url}/lab/tree/{notebook}?reset")
    lab.wait_text(r"✓ completed · 8 epochs")
    assert "Error displaying widget" not in lab.page.inner_text("body")
    _shoot(lab.page, "reloaded")
