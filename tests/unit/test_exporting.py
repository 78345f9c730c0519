"""Notebooks as modules, and sweeps: whole, through the command line."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from samples import same_weights

from nbtrain.cli import main
from nbtrain.errors import ConfigError
from nbtrain.exporting import export_notebook, export_run
from nbtrain.sweeps import choices

CELLS = [
    "%matplotlib inline\nimport torch\nfrom torch import nn\nfrom torch.nn.functional import mse_loss\nfrom nbtrain import Trainer",
    "SCALE = 2.0\ndef scaled(loss):\n    return loss * SCALE",
    "class Fit(Trainer):\n    def train_step(self, batch):\n        return {'loss': scaled(mse_loss(self.model(batch), batch))}",
    "raise_if_run = 1 / 1\nprint('a trial')",
    "torch.manual_seed(0)\nmodel = nn.Linear(3, 3)\ndata = [torch.ones(4, 3) * i for i in range(5)]",
    "trainer = Fit(model, device='cpu', log_bar=False, seed=0, optimizer=lambda p: torch.optim.SGD(p, lr=0.01))\ntrainer.run(1, data[:1])",
    "result = trainer.run(2, data)",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(path: Path, cells: list[str], marks: str = "") -> Path:
    made = [{"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": marks + source} for source in cells]
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_an_unmarked_notebook_is_exported_as_far_as_its_steps_reach(folder: Path) -> None:
    text = export_notebook(write(folder / "page.ipynb", CELLS), folder).read_text()
    assert "def scaled" in text and "class Fit" in text
    assert "a trial" not in text and "trainer =" not in text and "get_ipython" not in text


def test_marked_cells_are_the_module(folder: Path) -> None:
    write(folder / "marked.ipynb", ["a = 1", "b = 2"], "#| export\n")
    assert main(["export", "marked.ipynb"]) == 0
    assert importlib.import_module("marked").b == 2


def test_a_notebook_without_steps_says_how_to_mark_cells(folder: Path) -> None:
    with pytest.raises(ConfigError, match="No cell is marked for export, and no class has a train_step."):
        export_notebook(write(folder / "page.ipynb", ["a = 1"]), folder)


def test_the_exported_run_has_the_weights_of_the_notebooks_own_bit_for_bit(folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "live"}
    for source in CELLS:
        exec(source.replace("%matplotlib inline", ""), names)
    export_run(write(folder / "page.ipynb", CELLS), folder, "live_run")
    module = importlib.import_module("live_run")
    assert module.main().status == "completed"
    assert same_weights(module.trainer.model, names["model"])


def test_fit_runs_the_last_run_of_a_notebook(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "page.ipynb", [*CELLS[:5], CELLS[5].replace("log_bar=False", "log_bar=True").partition("\n")[0], CELLS[6]])
    assert main(["fit", "page.ipynb"]) == 0
    assert "✓ completed · 2 epochs" in capsys.readouterr().out
    assert not (folder / "notebook_run.py").exists()


def test_a_value_of_a_notebook_is_changed_and_one_that_it_does_not_set_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "page.ipynb", CELLS)
    assert main(["fit", "page.ipynb", "--SCALE", "0.5"]) == 0
    assert main(["fit", "page.ipynb", "--SCALES", "0.5"]) == 2
    error = "No cell that the run needs gives 'SCALES' a plain value.\n  page.ipynb\n  Did you mean 'SCALE'?"
    assert capsys.readouterr().err == f"nbtrain: {error}\n"
    assert "\nSCALE = 0.5\n" in export_run(folder / "page.ipynb", folder, "changed", values={"SCALE": 0.5}).read_text()


def test_a_configuration_for_a_notebook_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "page.ipynb", "-f", "run.yaml"]) == 2
    assert capsys.readouterr().err.startswith("nbtrain: A notebook's run takes no configuration.")


def test_a_trainer_that_no_class_makes_can_not_be_spread(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [*CELLS[:6], "def make():\n    return Fit(model, device='cpu')", "trainer = make()\ntrainer.run(1, data)"]
    write(folder / "page.ipynb", [cell for cell in cells if "trainer = Fit" not in cell])
    assert main(["fit", "page.ipynb", "--devices", "2"]) == 2
    assert capsys.readouterr().err.startswith("nbtrain: The trainer is made by make, which is no class of a Trainer.")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1e-3,3e-4", ["1e-3", "3e-4"]),
        ("0..2", ["0", "1", "2"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("../data", ["../data"]),
    ],
)
def test_choices(value: str, expected: list[str]) -> None:
    assert choices(value) == expected


@pytest.mark.long
def test_a_sweep_runs_the_grid_and_compares_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text(
        "max_epochs: 1\nmodel: {type: nbtrain.examples.mlp.MLP, args: {dim: 4, nlayers: 1}}\nmicro_batch_size: 4\n"
        "optimizer: {type: torch.optim.Adam, args: {lr: 0.01}}\nseed: 0\n"
        "dataset: {type: nbtrain.examples.mlp.SimpleDataset, train_args: {dim: 4, size: 8}}\n"
    )
    assert main(["sweep", "-f", "run.yaml", "--optimizer.args.lr", "0.1,nonsense", "-o", "out"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lr=0.1: done"
    assert lines[1].startswith("lr=nonsense: failed with exit code 1, see out/lr=nonsense/output.txt")
    assert lines[3].split()[:4] == ["lr=0.1", "epoch", "1", "train_loss"] and len(lines) == 4
