"""A newcomer's notebook in JupyterLab: live while it runs, complete when it is over, the same after a reload without a kernel.

With NBTRAIN_SCREENSHOTS=FOLDER the pages are kept as pictures, to be looked at.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyterlab_tab import write_notebook

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
    assert lab.page.locator(".jp-OutputArea progress:visible").count() == 2
    assert lab.page.locator(".jp-OutputArea img[alt^=Training]:visible").count() == 1
    _shoot(lab.page, "running")
    lab.wait_text(r"✓ completed · 8 epochs")
    lab.wait_text(r"8 epochs done")
    assert lab.page.locator(".jp-OutputArea progress").count() == 0
    assert lab.page.locator(".jp-OutputArea img[alt^='By epoch']:visible").count() == 1
    lab.page.locator(".jp-OutputArea img[alt^='By epoch']:visible").scroll_into_view_if_needed()
    _shoot(lab.page, "done")
    _shoot(lab.page.locator(".jp-Cell").first, "notebook")
    lab.command("docmanager:save", wait=True)
    saved = nbformat.read(lab_root / notebook, as_version=4)
    assert not saved.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state")
    lab.command("kernelmenu:shutdown", wait=True)
    lab.show(notebook)
    lab.wait_text(r"✓ completed · 8 epochs")
    assert "Error displaying widget" not in lab.page.inner_text("body")
    _shoot(lab.page, "reloaded")


SLOW = """import time, torch
from torch.nn.functional import cross_entropy
from nbtrain import StateManagerAddon, Trainer
from nbtrain.examples.digits import SmallCNN, digits_loaders

class Digits(Trainer):
    def train_step(self, batch):
        time.sleep(0.01)
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}
    test_step = train_step

torch.manual_seed(0)
loaders = digits_loaders(batch_size=32)
trainer = Digits.add_on(StateManagerAddon)(
    SmallCNN(), device="cpu", optimizer=lambda params: torch.optim.Adam(params, lr=1e-3), save_path="runs")"""
READ = "import ipykernel; print('kernel', ipykernel.__version__.split('.')[0], trainer.control.state, trainer.result)"


_BUTTONS_FIT = """() => {  // with the words of each, in the width of the output
    const buttons = [...document.querySelectorAll('.jp-OutputArea button')].filter(b => b.checkVisibility());
    return buttons.length == 4 && buttons.every(b => b.scrollWidth <= b.clientWidth
        && b.getBoundingClientRect().right <= b.closest('.jp-OutputArea-output').getBoundingClientRect().right);
}"""


@pytest.mark.long
def test_buttons_are_heard_while_the_cell_waits(lab: Any, lab_root: Path) -> None:
    lab.open(write_notebook(lab_root, "blocking", SLOW, "trainer.run(6, *loaders)", "print('after', 'wards')"))
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"epoch 2/6")
    lab.press("Save now")
    lab.wait_text(r"① epoch \d, batch \d+: the state was saved")
    lab.press("Validate now")
    lab.wait_text(r"② epoch \d, batch \d+: validated: val_loss")
    lab.command("application:toggle-left-area")
    lab.page.set_viewport_size({"width": 467, "height": 1100})
    lab.page.wait_for_function(_BUTTONS_FIT, timeout=90_000)
    lab.page.set_viewport_size({"width": 1200, "height": 1100})
    lab.press("Pause")
    lab.wait_text(r"‖ run paused at epoch \d, (validation )?batch \d+\n  trainer.resume\(\)  # continues it, while it is paused")
    _shoot(lab.page, "paused")
    lab.press("Continue")  # in the background: the cell is over
    lab.wait_text(r"[345]/6")
    lab.press("Stop")
    lab.wait_text(r"■ stopped · ")
    lab.wait_no_buttons()
    assert "after wards" not in lab.page.locator(".jp-Notebook").inner_text()


@pytest.mark.long
def test_stop_button_of_jupyter_pauses_and_ends_run_all(lab: Any, lab_root: Path) -> None:
    lab.open(write_notebook(lab_root, "interrupted", SLOW, "trainer.run(20, *loaders)", "print('after', 'wards')"))
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"epoch 2/20")
    lab.command("notebook:interrupt-kernel")
    lab.wait_text(r"‖ run paused at epoch \d")
    lab.page.wait_for_timeout(1000)  # what is queued would run now
    assert lab.largest_gap() < 40 and [lab.broken_words(width) for width in (1280, 900)] == [[], []]
    assert "after wards" not in lab.page.locator(".jp-Notebook").inner_text()


LOADERS = """import torch
from torch.nn.functional import cross_entropy

from nbtrain import Trainer
from nbtrain.examples.digits import SmallCNN, digits_loaders

torch.manual_seed(0)
train_loader, valid_loader = digits_loaders(batch_size=32)"""
NOISY = """class Noisy(Trainer):
    def train_step(self, batch):
        x, y = batch
        noise = 0.1 * torch.randn(32, 1, 8, 8)
        return {"loss": cross_entropy(self.model(x + noise), y)}

    def test_step(self, batch):
        x, y = batch
        return {"loss": cross_entropy(self.model(x), y)}
"""
BEGIN = """

trainer = Noisy(SmallCNN(), "cpu", optimizer=torch.optim.Adam)
trainer.run(3, train_loader, valid_loader)"""


@pytest.mark.long
def test_error_pauses_the_run_and_a_repaired_class_continues_it(lab: Any, lab_root: Path) -> None:
    repaired = NOISY.replace("torch.randn(32, 1, 8, 8)", "torch.randn_like(x)") + "\n\ntrainer.resume(Noisy)"
    lab.open(write_notebook(lab_root, "failed", LOADERS, NOISY + BEGIN, "print('after', 'wards')", repaired))
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"paused at epoch 1, batch 45\nfix the cell and run it, then:\n  trainer\.resume\(Noisy\)      # tries this batch again")
    lab.wait_text(r"‖ paused · epoch 1/3 · 44/45")
    lab.page.wait_for_timeout(1000)  # what is queued would run now
    assert "after wards" not in lab.page.locator(".jp-Notebook").inner_text()
    assert _counts(lab) == ["[1]:", "[2]:", "[ ]:", "[ ]:"]
    _shoot(lab.page.locator(".jp-Notebook .jp-CodeCell").nth(1), "failed")
    assert lab.largest_gap() < 40 and lab.broken_words(1280) == []
    assert not [word for word in lab.broken_words(900) if "trainer." in word]  # lines of code are as long as they are
    assert not lab.page.locator("button:visible:has-text('here')").count(), "there is no epoch to go back to"
    lab.page.locator(".jp-Notebook .jp-CodeCell .cm-content").nth(3).click()
    lab.command("notebook:run-cell")
    lab.wait_text(r"✓ completed · 3 epochs")
    lab.wait_no_buttons()


LONG_STEP = """
import os

class LongStep(Digits):
    n = 0
    def train_step(self, batch):
        self.n += 1
        if self.n == 46:
            print("in the", "long step")
            time.sleep(4)
            while not os.path.exists("go"):
                time.sleep(0.01)
        return super().train_step(batch)

trainer = LongStep(SmallCNN(), device="cpu", optimizer=lambda params: torch.optim.Adam(params, lr=1e-3))"""
STOPPED = r"■ stopped at epoch 2, batch 2 · trainer.result has what it reached"


def _counts(lab: Any) -> list[str]:
    """What stands beside each cell: `[1]:`, and `[ ]:` where it was not executed."""
    return lab.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_inner_texts()


def _check_stopped(lab: Any, lab_root: Path) -> None:
    """Let the long step end: the cell that trains ends with one line, and the one behind it is not executed."""
    assert "trainer.result has" not in lab.page.locator(".jp-Notebook").inner_text()
    (lab_root / "go").touch()
    lab.wait_text(STOPPED)
    lab.wait_no_buttons()
    lab.page.wait_for_timeout(1000)  # what is queued would run now
    cells = lab.page.locator(".jp-Notebook").inner_text()
    assert "after wards" not in cells and "Traceback" not in cells
    assert _counts(lab) == ["[1]:", "[2]:", "[ ]:"]


@pytest.mark.long
def test_stop_button_of_jupyter_twice_is_shown_at_once_and_ends_run_all(lab: Any, lab_root: Path) -> None:
    (lab_root / "go").unlink(missing_ok=True)
    lab.open(write_notebook(lab_root, "twice", SLOW + LONG_STEP, "trainer.run(20, *loaders)", "print('after', 'wards')"))
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"in the long step")
    lab.command("notebook:interrupt-kernel")
    lab.wait_text(r"‖ pausing after this batch")
    lab.command("notebook:interrupt-kernel")
    lab.wait_text(r"■ stopping after this batch")
    _shoot(lab.page, "stopping")
    _check_stopped(lab, lab_root)
    _shoot(lab.page, "stopped")


@pytest.mark.long
def test_stop_button_of_the_view_ends_the_waiting_cell_and_run_all(lab: Any, lab_root: Path) -> None:
    (lab_root / "go").unlink(missing_ok=True)
    lab.open(write_notebook(lab_root, "button", SLOW + LONG_STEP, "trainer.run(20, *loaders)", "print('after', 'wards')"))
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"in the long step")
    lab.press("Stop")
    lab.wait_text(r"■ stopping after this batch")
    _check_stopped(lab, lab_root)


@pytest.mark.long
@pytest.mark.parametrize("version", ["7", "6"])
def test_buttons_in_the_background(lab: Any, lab_root: Path, version: str) -> None:
    kernel = "python3" if version == "7" else "older"
    lab.open(
        write_notebook(lab_root, f"background{version}", SLOW, "handle = trainer.run(6, *loaders, background=True)", READ, kernel=kernel)
    )
    lab.command("notebook:run-all-cells")
    lab.wait_text(rf"kernel {version} running None")
    lab.wait_text(r"epoch [1-3]/6")
    lab.press("Pause")
    lab.wait_text(r"‖ paused")
    lab.press("Continue")
    lab.wait_text(r"[2-4]/6")
    lab.press("Stop")
    lab.wait_text(r"■ stopped · ")


@pytest.mark.long
def test_a_paused_notebook_opened_with_a_dead_kernel_shows_where_it_paused(lab: Any, lab_root: Path) -> None:
    lab.open(write_notebook(lab_root, "left", SLOW, "trainer.run(20, *loaders)"))
    lab.command("apputils:change-theme", theme="JupyterLab Dark")
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"epoch 3/20")
    _shoot(lab.page, "dark")
    lab.command("notebook:interrupt-kernel")
    lab.wait_text(r"‖ run paused at epoch \d")  # the error
    lab.wait_text(r"‖ paused · epoch 3/20 · \d+/45")  # the record
    _shoot(lab.page, "dark-paused")
    lab.command("docmanager:save", wait=True)
    saved = nbformat.read(lab_root / "left.ipynb", as_version=4)
    assert not saved.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state")
    lab.command("kernelmenu:shutdown", wait=True)
    lab.show("left.ipynb")
    lab.wait_text(r"■ its kernel is gone · paused at \d\d:\d\d:\d\d · epoch 3/20 · \d+/45")
    _shoot(lab.page, "dark-reloaded")
    assert "Error displaying widget" not in lab.page.inner_text("body")


SWEEP = """import torch
from nbtrain.examples.digits import Digits, SmallCNN, digits_loaders

train_loader, valid_loader = digits_loaders(batch_size=128)
for i in range(20):
    torch.manual_seed(0)
    net = SmallCNN(4)
    trainer = Digits(net, "cpu", optimizer=torch.optim.Adam(net.parameters(), lr=1e-4 * 1.6**i))
    trainer.run(2, train_loader, valid_loader)"""


def test_twenty_runs_of_a_cell_are_one_picture_under_900_px(lab: Any, lab_root: Path) -> None:
    lab.open(write_notebook(lab_root, "sweep", SWEEP, "print('all ' + 'done')"))
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"^\d runs · 1 is on")
    _shoot(lab.page, "sweep-running")
    lab.wait_text(r"^all done", 240)
    lab.wait_text(r"^20 runs · ★ val_loss")
    area = lab.page.locator(".jp-OutputArea:has(.lines)").first
    assert area.bounding_box()["height"] < 900
    assert area.locator(".jupyter-widgets").count() == 0  # what was live is closed
    head = area.locator("label").nth(2)
    assert head.inner_text() == "val_loss"
    before = area.locator("details").evaluate_all("all => all.map(d => d.getBoundingClientRect().top)")
    head.click()
    after = area.locator("details").evaluate_all("all => all.map(d => d.getBoundingClientRect().top)")
    best = area.locator("details").evaluate_all("all => all.findIndex(d => d.innerText.includes('★'))")
    assert before == sorted(before) and after != before and after[best] == min(after)
    _shoot(lab.page, "sweep-sorted")
    area.locator("details").nth(best).locator("summary").click()
    lab.wait_text(r"✓ completed · 2 epochs")
    _shoot(lab.page, "sweep-open")
    lab.command("docmanager:save", wait=True)
    lab.command("kernelmenu:shutdown", wait=True)
    lab.show("sweep.ipynb")
    lab.wait_text(r"^20 runs · ★ val_loss")
    _shoot(lab.page, "sweep-reloaded")


CELL_OF_A_MORNING = """for i in range(FIRST, FIRST + 5):
    torch.manual_seed(0)
    net = SmallCNN(4)
    trainer = Digits(net, "cpu", optimizer=torch.optim.Adam(net.parameters(), lr=1e-4 * 1.6**i), keep_states=False)
    trainer.run(2, train_loader, valid_loader)"""
HEAD = SWEEP.partition("for i")[0]


@pytest.mark.long
def test_runs_of_four_cells_are_one_picture_under_900_px_and_some_are_selected(lab: Any, lab_root: Path) -> None:
    cells = [f"FIRST = {first}\n{CELL_OF_A_MORNING}" for first in range(0, 20, 5)]
    again = ["import nbtrain\nfound = nbtrain.runs()\nfound", "found", "found[3:8]", "found[found.df.lr > 1e-2]"]
    lab.open(write_notebook(lab_root, "morning", HEAD, *cells, *again))
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"^20 runs · ★ val_loss", 240)
    lab.wait_text(r"^10 runs · ★ val_loss")
    areas = lab.page.locator(".jp-OutputArea:has(.lines)")
    assert [areas.nth(i).locator("details").count() for i in range(8)] == [5, 5, 5, 5, 20, 20, 5, 10]
    assert areas.nth(4).bounding_box()["height"] < 900 and areas.nth(4).locator("img[alt^='val_loss of 20 runs']").count() == 1
    areas.nth(4).locator("label").nth(2).click()  # sorts this picture, and not the same one below
    best = [areas.nth(i).locator("details").evaluate_all(_PLACE_OF_BEST) for i in (4, 5)]
    assert best[0] == 0 and best[1] > 0
    _shoot(areas.nth(4), "morning")


_PLACE_OF_BEST = """all => [...all].sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)
    .findIndex(d => d.querySelector('summary').textContent.includes('★'))"""
