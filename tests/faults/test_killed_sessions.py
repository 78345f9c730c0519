"""A session is killed in the middle of a round, and the same script ends as the one that was never killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from children import Script
from torch import Tensor

SCRIPT = """
import os, signal, sys, torch
from samples import Regress, make_trainer
from torch.utils.data import DataLoader, TensorDataset
from nbtrain import StateManagerAddon

folder, end, save_format, *kills = sys.argv[1:]


class Fit(Regress):
    def train_step(self, batch):
        if str(self.counts.step) in kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)


def play(model, memory):
    x = torch.randn(40, 8)
    with torch.no_grad():
        y = x.sum(1, keepdim=True) + 0.1 * model(x)
    memory.append(float(y.mean()))
    return TensorDataset(x, y)


def cycle(optimizer, plan):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=plan.total_steps)


trainer = make_trainer(
    Fit.add_on(StateManagerAddon), save_path=folder, seed=1, every_n_steps=2, keep_last_n=1, save_format=save_format, scheduler=cycle
)
with trainer.session(4, 3, state={"memory": [], "generator": torch.Generator().manual_seed(3)}, resume="auto") as session:
    for round in session:
        data = play(trainer.model, session.state["memory"])
        trainer.run(2, DataLoader(data, 10, shuffle=True))
        extra = torch.randn(15, 8, generator=session.state["generator"])
        trainer.run(1, DataLoader(TensorDataset(extra, torch.rand(15, 1)), 5, shuffle=True))
        session.state["memory"].append(round)
rows = [{name: value for name, value in row.items() if name != "time_s"} for row in trainer.history.epochs]
states = [trainer.model.state_dict(), trainer.optimizer.state_dict(), session.state["memory"]]
torch.save([*states, torch.rand(1), rows, trainer.counts.step], end)
"""


def _leaves(value: object) -> list[object]:
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if parts is None else [leaf for part in parts for leaf in _leaves(part)]


# A round has two runs, of 8 and of 3 steps: batches 1 and 2 of the first run, the first one's end, the second run, and the round's end
@pytest.mark.parametrize(
    ("save_format", "kills"), [("ckpt", [27]), pytest.param("safetensor", [0, 8, 9, 19, 22, 24, 30, 33, 43], marks=pytest.mark.long)]
)
def test_killed_session_resumes_in_its_round_and_ends_as_the_one_that_was_not(save_format: str, kills: list[int], tmp_path: Path) -> None:
    path = tmp_path / "fit.py"
    path.write_text(SCRIPT)
    assert Script(path, tmp_path / "whole", tmp_path / "whole.pt", save_format).wait() == 0
    for kill in kills:
        assert Script(path, tmp_path / "killed", tmp_path / "killed.pt", save_format, kill).wait() == -9
    assert Script(path, tmp_path / "killed", tmp_path / "killed.pt", save_format).wait() == 0
    whole, killed = (_leaves(torch.load(tmp_path / f"{name}.pt")) for name in ("whole", "killed"))
    assert len(whole) == len(killed) and all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(whole, killed))
    assert Script(path, tmp_path / "killed", tmp_path / "again.pt", save_format, 43).wait() == 0  # which trains nothing more
    assert [len(list(folder.glob("run-*"))) for folder in (tmp_path / "whole", tmp_path / "killed")] == [1, 1]
