"""Whole runs that are killed, interrupted and broken off end as the one that was not, bit for bit.

`NBTRAIN_KILLS` says how many kills there are in all, half of them in each of two file systems.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from children import Script
from samples import without_times

from nbtrain import load_run
from nbtrain.checkpoint.atomic import is_leftover
from nbtrain.checkpoint.files import verify_checkpoint

KILLS = int(os.environ.get("NBTRAIN_KILLS", "10"))

SCRIPT = """
import json, os, random, sys
from dataclasses import asdict
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset
from nbtrain import StateManagerAddon, Trainer

folder, save_format, n_workers, setting, event, at = *sys.argv[1:3], int(sys.argv[3]), *sys.argv[4:6], int(sys.argv[6])
torch.manual_seed(0)
x = torch.randn(150, 8)


class Augmented(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        return x[i] + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * np.random.rand(), x[i].sum(0, keepdim=True)


class Fit(Trainer):
    n_seen = 0

    def train_step(self, batch):
        print("batch", flush=True)
        self.n_seen += 1
        if self.n_seen == at and event == "raise":
            raise RuntimeError("boom")
        if self.n_seen == at and event == "wait":
            sys.stdin.read()
        return self.test_step(batch)

    def test_step(self, batch):
        output = self.model(batch[0])
        return {"loss": mse_loss(output, batch[1]), "mae": (output - batch[1]).abs().mean()}


windows = {
    "scheduler": lambda step: 1e-2 * 0.98**step,
    "lightning": {"accumulate_grad_batches": 2, "val_check_interval": 5},
    "gradient_clip": 1.0,
}
trainer = Fit.add_on(StateManagerAddon)(
    nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1)),
    device="cpu",
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    seed=1,
    save_path=folder,
    save_format=save_format,
    every_n_steps=2,
    log_bar=False,
    **(windows if setting == "windows" else {}),
)
loader = DataLoader(Augmented(), 16, shuffle=True, num_workers=n_workers)
torch.manual_seed(os.getpid()), random.seed(os.getpid()), np.random.seed(os.getpid())
result = trainer.run(4, loader, DataLoader(TensorDataset(x[:40], x[:40].sum(1, keepdim=True)), 16), resume="auto")

history = trainer.history
outcome = {
    "status": result.status,
    "weights": trainer.model.state_dict(),
    "best weights": trainer.best_weights,
    "optimizer": trainer.optimizer.state_dict(),
    "counts": asdict(trainer.counts),
    "epochs": [{name: value for name, value in row.items() if name != "time_s"} for row in history.epochs],
    "steps": {phase: {name: list(table[name]) for name in table.columns} for phase, table in history.steps.items()},
    "random": None if result.n_epochs == 0 else [torch.rand(3), random.random(), np.random.rand()],
}
Path(folder, "outcome.json").write_text(json.dumps(outcome, default=torch.Tensor.tolist))  # the shortest text that is exact
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "fit.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def references(script: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], str]:
    """What a run that nothing happens to comes to, by its number of workers and its setting."""
    found = {}
    for n_workers, setting in ((0, "plain"), (2, "plain"), (0, "windows")):
        folder = tmp_path_factory.mktemp("reference")
        assert Script(script, folder, "ckpt", n_workers, setting, "", 0).wait() == 0
        found[n_workers, setting] = (folder / "outcome.json").read_text()
    return found


def check(folder: Path, expected: str) -> None:
    """The run in `folder` is whole, is one run, and came to what was expected."""
    wanted, found = json.loads(expected), json.loads((folder / "outcome.json").read_text())
    if found["random"] is None:  # the kill came between the last save and the end, and nothing was left to do
        wanted["random"] = None
    assert [part for part in wanted if json.dumps(found[part]) != json.dumps(wanted[part])] == []  # as text: a NaN equals a NaN
    (run,) = {
        path.parent.parent for path in folder.glob("run-*/checkpoints/epoch=*")
    }  # a kill before the first save leaves a folder without
    saved = list((run / "checkpoints").glob("epoch=*"))
    assert len(saved) >= found["counts"]["step"] // 2
    for path in saved:
        verify_checkpoint(path)
    assert [path for path in folder.rglob("*") if is_leftover(path)] == []
    assert (run / "checkpoints" / "last").exists() or (run / "checkpoints" / "last.ckpt").exists()
    read = load_run(folder)
    assert without_times(read.epochs) == wanted["epochs"]
    steps = {phase: {name: list(table[name]) for name in table.columns} for phase, table in read.steps.items()}
    assert json.dumps(steps, sort_keys=True) == json.dumps(wanted["steps"], sort_keys=True)


def kill_until_finished(script: Path, folder: Path, arguments: tuple[object, ...], n_kills: int, chance: random.Random) -> int:
    """Start the script, kill it at a moment of chance, and again, at most `n_kills` times; then let it finish. Returns the kills."""
    killed = 0
    while killed < n_kills:
        started = Script(script, folder, *arguments, "", 0)
        started.read(chance.randint(1, 12))
        started.kill()
        if started.process.exitcode == 0:
            return killed
        assert started.process.exitcode == -signal.SIGKILL
        killed += 1
    assert Script(script, folder, *arguments, "", 0).wait() == 0
    return killed


@pytest.mark.parametrize(
    ("save_format", "n_workers", "setting"),
    [
        ("safetensor", 2, "plain"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("ckpt", 0, "plain"), ("safetensor", 0, "windows"))),
    ],
)
def test_killed_runs_end_as_the_one_that_was_not(
    folder: Path, script: Path, references: dict[tuple[int, str], str], save_format: str, n_workers: int, setting: str
) -> None:
    chance, n_kills, n_runs = random.Random(0), 0, 0
    while n_kills < max(KILLS // 4, 1):
        n_runs += 1
        root = folder / str(n_runs)
        n_kills += kill_until_finished(script, root, (save_format, n_workers, setting), max(KILLS // 4, 1) - n_kills, chance)
        check(root, references[n_workers, setting])


@pytest.mark.parametrize("event", ["SIGINT", "SIGTERM", "exception"])
@pytest.mark.parametrize(
    ("save_format", "setting"),
    [
        ("ckpt", "plain"),
        pytest.param("safetensor", "plain", marks=pytest.mark.long),
        pytest.param("ckpt", "windows", marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_broken_off_goes_on_at_its_last_save(
    event: str, script: Path, references: dict[tuple[int, str], str], save_format: str, setting: str, tmp_path: Path
) -> None:
    started = Script(script, tmp_path, save_format, 0, setting, "raise" if event == "exception" else "wait", 17)
    assert started.read(17)
    if event == "exception":
        started.wait()
    else:
        started.kill(signal.Signals[event])
    if event != "exception":  # the batch is finished, and its window; multiprocessing makes exit code 1 of a KeyboardInterrupt
        assert started.process.exitcode == (143 if event == "SIGTERM" else 1)
    assert not (tmp_path / "outcome.json").exists()
    (run,) = tmp_path.glob("run-*")
    newest = max(int(path.stem.partition("step=")[2]) for path in (run / "checkpoints").glob("epoch=*-step=*"))
    wanted = {"plain": (16, 17), "windows": (8, 9)}[setting]
    assert newest == wanted[event != "exception"]
    assert Script(script, tmp_path, save_format, 0, setting, "", 0).wait() == 0
    check(tmp_path, references[0, setting])
