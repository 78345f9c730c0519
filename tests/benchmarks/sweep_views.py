"""What a person sees of the same sweep of ten learning rates in JupyterLab: during, after, after a reload without a kernel, in the file.

Each tool trains the same model on the same data for three epochs a run, with a validation each epoch, in one cell with a loop, and is used
as its documentation shows; nothing is printed beside it. Each step waits 5 ms, so that there is something to see while it runs.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chromium import chromium
from jupyterlab_tab import Lab, served, write_notebook
from tables import Row, Table, main

BEGIN = """import os, time
os.environ["KERAS_BACKEND"] = "torch"
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(1000, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
train, valid = TensorDataset(x[:800], y[:800]), TensorDataset(x[800:], y[800:])
RATES = [0.00010, 0.00025, 0.00063, 0.0016, 0.0041, 0.0098, 0.024, 0.061, 0.15, 0.38]

class Wait(nn.Module):
    def forward(self, x):
        time.sleep(0.005)
        return x

def net():
    torch.manual_seed(0)
    return nn.Sequential(Wait(), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

def loaders():
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(valid, batch_size=32)
"""
OURS = """from nbtrain import Trainer

class Classify(Trainer):
    def train_step(self, batch):
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}
    test_step = train_step
"""
OUR_LOOP = """for lr in RATES:
    model = net()
    Classify(model, "cpu", optimizer=torch.optim.Adam(model.parameters(), lr=lr)).run(3, *loaders())"""
LIGHTNING = """import lightning as L

class Classify(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.model, self.lr = net(), lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        loss = cross_entropy(logits, y)
        self.log_dict({"train_loss": loss, "train_acc": (logits.argmax(1) == y).float().mean()}, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        self.log_dict({"val_loss": cross_entropy(logits, y), "val_acc": (logits.argmax(1) == y).float().mean()}, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)
"""
LIGHTNING_LOOP = """for lr in RATES:
    L.Trainer(max_epochs=3).fit(Classify(lr), *loaders())"""
FASTAI = """from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
import fastai.callback.schedule
from fastai.callback.progress import *
"""
FASTAI_LOOP = """for lr in RATES:
    learn = Learner(DataLoaders(*loaders(), device="cpu"), net(), loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
    learn.fit_one_cycle(3, lr)"""
KERAS = """import keras

class Wait(keras.layers.Layer):
    def call(self, x):
        time.sleep(0.005)
        return x
"""
KERAS_LOOP = """for lr in RATES:
    model = keras.Sequential([keras.Input((8,)), Wait(), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(lr), loss=loss, metrics=["accuracy"])
    model.fit(x[:800], y[:800], batch_size=32, epochs=3, validation_data=(x[800:], y[800:]))"""
HF = """from transformers import Trainer, TrainingArguments

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}

class Named(torch.utils.data.Dataset):
    def __init__(self, pairs):
        self.pairs = pairs
    def __len__(self):
        return len(self.pairs)
    def __getitem__(self, i):
        x, y = self.pairs[i]
        return {"x": x, "labels": y}

def accuracy(found):
    return {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()}
"""
HF_LOOP = """for lr in RATES:
    arguments = TrainingArguments(
        "out", learning_rate=lr, num_train_epochs=3, per_device_train_batch_size=32, eval_strategy="epoch", logging_strategy="epoch"
    )
    trainer = Trainer(WithLoss(), arguments, train_dataset=Named(train), eval_dataset=Named(valid), compute_metrics=accuracy)
    trainer.train()"""
TOOLS = {
    "nbtrain": (OURS, OUR_LOOP),
    "fastai": (FASTAI, FASTAI_LOOP),
    "Keras 3": (KERAS, KERAS_LOOP),
    "HF Trainer": (HF, HF_LOOP),
    "Lightning": (LIGHTNING, LIGHTNING_LOOP),
}
RATES = ("0.00025", "2.5e-4", "0.0098", "9.8e-3", "0.15")  # learning rates as they may be written
_SEEN = """() => {  // of the output of the second cell, which has the loop
    const area = document.querySelectorAll('.jp-Notebook .jp-Cell')[1]?.querySelector('.jp-OutputArea');
    if (!area) return {px: 0, n_lines: 0, bars: 0, widgets: 0, text: ''};
    const texts = document.createTreeWalker(area, NodeFilter.SHOW_TEXT), range = document.createRange(), tops = [];
    while (texts.nextNode()) {
        if (!texts.currentNode.data.trim() || !texts.currentNode.parentElement.checkVisibility()) continue;
        range.selectNodeContents(texts.currentNode);
        tops.push(...[...range.getClientRects()].map(r => r.top));
    }
    tops.sort((a, b) => a - b);
    const bars = [...area.querySelectorAll('progress, .progress-bar, [role=progressbar]')].filter(b => b.checkVisibility());
    const drawn = (area.innerText.match(/^[^┏┡└\\n]*[━█]{5}/gm) ?? []).length;  // of characters
    return {
        px: Math.round(area.getBoundingClientRect().height), bars: bars.length + drawn, text: area.innerText,
        n_lines: tops.filter((t, i) => i == 0 || t - tops[i - 1] > 8).length,
        widgets: [...area.querySelectorAll('.jupyter-widgets')].filter(w => w.checkVisibility()
            && !w.parentElement.closest('.jupyter-widgets')).length,
    };
}"""
_DEAD = re.compile("Error displaying widget|Loading widget|Widget\\(|VBox\\(|HBox\\(")


@dataclass(frozen=True)
class Seen:
    """What is on the page at a moment: the height of the output, its lines, its bars, its widgets that are seen, its text."""

    px: int
    n_lines: int  # of text, one above the other
    bars: int
    widgets: int
    text: str

    @property
    def digits(self) -> int:
        """The significant digits that most of the numbers below one have."""
        numbers = [found.lstrip("0.") for found in re.findall(r"(?<![\d.])0\.(\d{2,})(?!\d)", self.text)]
        return Counter(map(len, numbers)).most_common(1)[0][0] if numbers else 0


@dataclass(frozen=True)
class Found:
    """A sweep: while its last run was on, after it, after a reload without a kernel, and its file."""

    during: Seen
    after: Seen
    reloaded: Seen
    kilobytes: float


def measured(lab: Lab, folder: Path, name: str, cells: tuple[str, str]) -> Found:
    """Run the notebook of a tool, and look at it."""
    path = write_notebook(folder, re.sub(r"\W", "", name), BEGIN + cells[0], cells[1], "print('all ' + 'done')")
    lab.open(path)
    lab.command("notebook:run-all-cells")
    end_s = time.monotonic() + 600
    during, look = Seen(0, 0, 0, 0, ""), lambda: Seen(**lab.page.evaluate(_SEEN))
    while "all done" not in lab.page.inner_text(".jp-Notebook"):
        seen = look()
        assert time.monotonic() < end_s, seen.text[-2000:]
        during = seen if seen.px and seen.bars >= during.bars else during
        lab.page.wait_for_timeout(100)
        assert "Traceback" not in seen.text, seen.text[-2000:]
    lab.page.wait_for_timeout(2000)  # what is drawn late
    after = look()
    lab.command("docmanager:save", wait=True)
    lab.command("kernelmenu:shutdown", wait=True)
    lab.show(path)
    lab.page.wait_for_timeout(4000)
    return Found(during, after, look(), (folder / path).stat().st_size / 1000)


def row(name: str, found: Found) -> Row:
    """What was found, as a line of the table."""
    after, reloaded = found.after, found.reloaded
    n_dead = len(_DEAD.findall(reloaded.text))
    is_told_apart = any(rate in after.text for rate in RATES)
    left = f"{reloaded.n_lines} lines" + (f", {n_dead} dead widgets" if n_dead else "")
    texts = (found.during.bars, f"{after.px:,}", after.n_lines, after.widgets, after.digits)
    answers = ("★" if "★" in after.text else "no", "yes" if is_told_apart else "no")
    return Row((name, *map(str, texts), *answers, left, f"{found.kilobytes:,.0f}"))


COLUMNS = (
    "tool", "bars during", "px after", "lines", "widgets", "digits", "best marked", "says what differs", "after a reload", "file, KB",
)  # fmt: skip
NOTE = """Ten learning rates in one cell, three epochs each, in JupyterLab with Chromium, 1,200 px wide. Bars: the most at once, also those
made of characters. Widgets: those left in the page after the cell. Digits: the significant ones of most numbers. After a reload: with the
file saved and the kernel shut down. nbtrain's lines open to the record of each run, which makes its file the largest. Made by
`tests/benchmarks/sweep_views.py`."""


def table(n_rounds: int, only: set[str]) -> Table:
    """Look at the sweep of each tool once."""
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        folder = Path(place) / "lab"
        folder.mkdir()
        with served(folder) as url:
            for name, cells in _chosen(only).items():
                context: Any = browser.new_context(viewport={"width": 1200, "height": 1100})
                rows[name] = row(name, measured(Lab(context.new_page(), url), folder, name, cells))
                context.close()
    says = "What a person sees of the same sweep of ten runs in a notebook, each tool as its documentation shows it."
    return Table("A sweep of ten runs", COLUMNS, tuple(rows.values()), NOTE, says)


def _chosen(only: set[str]) -> Mapping[str, tuple[str, str]]:
    return {name: cells for name, cells in TOOLS.items() if not only or name in only}


if __name__ == "__main__":
    main(table, 1)
