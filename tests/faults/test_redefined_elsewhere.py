"""Steps that are written again while a run in two processes is paused: all of them use the new ones after the same batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from cells import FIT, NEW_STEP, RunCell, in_main
from samples import make_loader, make_trainer, make_valid, same_weights, without_times

from nbtrain import ConfigError, MultiGPUAddon, StateManagerAddon, Trainer
from nbtrain.addons.multi_gpu import _pool


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    _pool().close()


@pytest.fixture
def notebook() -> Iterator[RunCell]:
    with in_main() as run:
        run(FIT)
        yield run


def make(notebook: RunCell, *addons: Any, **options: Any) -> Any:
    kind = notebook("")["Fit"].add_on(MultiGPUAddon, *addons)
    return make_trainer(kind, device=["cpu", "cpu"], seed=1, **options)


def begun(trainer: Any, loader: Any = None) -> Any:
    """A run of eight epochs that is paused in its first ones."""
    torch.manual_seed(4)
    handle = trainer.run(8, loader or make_loader(batch_size=8), make_valid(), background=True)
    while trainer.counts.processed < 3:
        time.sleep(0.01)
    trainer.pause()
    return handle


@pytest.mark.parametrize("way", ["a cell", "a function", "a constant", "another class", "an attribute"])
def test_new_steps_are_used_by_all_ranks_after_the_same_batch(notebook: RunCell, way: str) -> None:
    trainer = make(notebook)
    handle, steps = begun(trainer), None
    place = trainer.counts.processed
    if way == "a cell":
        notebook(NEW_STEP)
    elif way == "a function":
        notebook("def distance(output, y):\n    return 10.0 * (output - y).square().mean()")
    elif way == "a constant":
        notebook("TIMES = 10.0")
    elif way == "an attribute":
        trainer.change_after = place
    else:
        steps = notebook(NEW_STEP.replace("Fit", "Other"))["Other"]
    trainer.resume(steps, background=True)
    assert handle.wait().status == "completed"
    marks = [(at.processed, "changed" in mark) for at, mark in trainer.history.marks]
    assert marks == ([(place, True)] if way != "an attribute" else [])
    counted = [row["train_n"] for row in trainer.history.epochs]
    assert [b - a for a, b in zip(counted, counted[1:])] == pytest.approx([5.0] * 7)  # a global that counts goes on
    notebook(FIT)
    whole = make(notebook)
    notebook(f"Fit.change_after = {place}")
    begun(whole)
    whole.resume()
    assert same_weights(whole.model, trainer.model) and whole.counts == trainer.counts
    rows = [without_times(it.history.epochs) for it in (whole, trainer)]
    assert rows[0] == rows[1]


def test_a_class_that_cannot_be_used_is_refused_and_the_run_stays_paused(notebook: RunCell) -> None:
    trainer = make(notebook)
    handle = begun(trainer)
    with pytest.raises(ConfigError, match="steps must be a subclass of TrainerBase"):
        trainer.resume(dict)
    with pytest.raises(ConfigError, match="has StateManagerAddon, and this trainer was made without"):
        trainer.use(notebook("")["Fit"].add_on(StateManagerAddon))
    assert handle.status == "paused"
    notes: list[str] = []
    trainer.recorder.note = lambda text, **options: notes.append(text)
    notebook("def distance(output, y):\n    return guard and 0 * output.sum()", guard=Lock())
    trainer.resume(background=True)
    assert handle.wait().status == "completed" and trainer.history.last["train_loss"] > 0
    assert notes and notes[0].startswith("The new definitions are not used: guard (lock) can't be sent to the worker processes"), notes


def test_a_change_of_what_is_not_sent_is_said(notebook: RunCell) -> None:
    """Weights and optimizer are those of before the run: the run has its own, which come back at its end."""
    trainer, data = make(notebook), [(torch.ones(8), torch.ones(1))] * 40
    handle, notes = begun(trainer, torch.utils.data.DataLoader(data, 4)), list[str]()
    trainer.recorder.note = lambda text, **options: notes.append(text)
    trainer.resume(background=True)
    trainer.pause()
    assert not notes
    with torch.no_grad():
        trainer.model[0].weight.zero_()
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    data.append(data[0])
    trainer.resume(background=True)
    assert handle.wait().status == "completed"
    assert [note.partition(" changed here, but")[0] for note in notes] == ["The weights", "The options of the optimizer", "The data"]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01 and trainer.model[0].weight.abs().sum() > 0


def test_an_older_class_is_held_and_a_newer_one_is_taken_for_the_next_run(notebook: RunCell) -> None:
    trainer = make(notebook)
    handle, old = begun(trainer), notebook("")["Fit"]
    notebook(NEW_STEP)
    trainer.use(old)
    trainer.resume(background=True)
    assert handle.wait().status == "completed" and trainer._written_steps is old and not trainer.history.marks
    trainer.run(1, make_loader(batch_size=8))
    assert trainer._written_steps is old
    trainer.use(notebook("")["Fit"])
    trainer.run(1, make_loader(batch_size=8))
    assert trainer._written_steps is notebook("")["Fit"] and len(trainer.history.marks) == 1


def test_the_next_run_in_the_same_processes_has_nothing_of_the_last(notebook: RunCell) -> None:
    trainer = make(notebook)
    handle = begun(trainer)
    notebook(NEW_STEP.replace('"n": ', '"new": '))
    trainer.resume(background=True)
    handle.wait()
    notebook(FIT)
    second = make(notebook)
    handle = begun(second)
    second.resume(background=True)
    handle.wait()
    assert "train_new" in trainer.history.last and "train_new" not in second.history.last and not second.history.marks


def test_layers_datasets_and_callbacks_get_their_new_classes(notebook: RunCell) -> None:
    parts = """
import lightning as L
class Net(torch.nn.Linear):
    times = 1.0
    def forward(self, x):
        return super().forward(x) * self.times
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return torch.ones(8), torch.ones(1)
class Watch(L.Callback):
    seen = 0
    def on_train_batch_end(self, pl_trainer, pl_module, *args):
        self.seen += 1
        pl_module.log("watched", float(self.seen))
"""
    names = notebook(parts)
    model = names["Net"](8, 1)
    torch.nn.init.ones_(model.weight)
    trainer = make(notebook, model=model, lightning={"callbacks": [names["Watch"]()]})
    torch.manual_seed(4)
    loader = torch.utils.data.DataLoader(names["Data"](), 4)
    handle = trainer.run(6, loader, background=True)
    while trainer.counts.processed < 3:
        time.sleep(0.01)
    trainer.pause()
    changed = (
        parts.replace("times = 1.0", "times = 0.0")
        .replace("torch.ones(1)", "torch.zeros(1)")
        .replace("float(self.seen)", "-float(self.seen)")
    )
    notebook(changed)
    trainer.resume(background=True)
    assert handle.wait().status == "completed"
    last = trainer.history.last
    assert last["train_loss"] == 0.0 and last["watched"] < -25, last


def test_a_saved_state_knows_the_code_of_its_ranks(notebook: RunCell, tmp_path: Path) -> None:
    first = make(notebook, StateManagerAddon, save_path=tmp_path)
    torch.manual_seed(4)
    first.run(1, make_loader(batch_size=8))
    notebook(NEW_STEP)
    again = make(notebook, StateManagerAddon, save_path=tmp_path)
    again.run(2, make_loader(batch_size=8), resume="auto")
    assert [text.partition(";")[0] for _, text in again.history.marks] == ["train_step changed"]
    same = make(notebook, StateManagerAddon, save_path=tmp_path)
    same.run(3, make_loader(batch_size=8), resume="auto")
    assert len(same.history.marks) == 1 and same.counts.epoch == 3


def test_a_lightning_module_gets_its_new_class(notebook: RunCell) -> None:
    lit = """
import lightning as L
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        x, y = batch
        self.log("times", 1.0)
        return (self.net(x) - y).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""
    names = notebook(lit)
    trainer = Trainer.add_on(MultiGPUAddon).from_lightning(names["Lit"](), device=["cpu", "cpu"])
    handle = trainer.run(5, make_loader(batch_size=8), background=True)
    while trainer.counts.processed < 3:
        time.sleep(0.01)
    trainer.pause()
    trainer.resume(notebook(lit.replace("1.0)", "3.0)"))["Lit"], background=True)
    assert handle.wait().status == "completed" and trainer.history.last["times"] == 3.0
    assert [text.partition(";")[0] for _, text in trainer.history.marks] == ["training_step changed"]
