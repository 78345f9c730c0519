"""Runs over loaders that draw and count in their own ways are killed, and end as those that were not."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from children import Script

SCRIPT = """
import json, sys, torch
from pathlib import Path
from loader_kinds import LOADERS
from samples import Regress, make_trainer
from nbtrain import StateManagerAddon

folder, train, valid = sys.argv[1:4]


class Fit(Regress):
    def train_step(self, batch):
        print("batch", flush=True)
        return super().train_step(batch)


trainer = make_trainer(Fit.add_on(StateManagerAddon), save_path=folder, every_n_steps=1, seed=1)
result = trainer.run(3, LOADERS[train](), LOADERS[valid](), resume="auto")
rows = [{name: value for name, value in row.items() if name != "time_s"} for row in trainer.history.epochs]
outcome = {"weights": trainer.model.state_dict(), "epochs": rows}
Path(folder, "outcome.json").write_text(json.dumps(outcome, default=torch.Tensor.tolist))
"""

PAIRS = [
    ("nested samplers", "sampler with a generator of NumPy's"),
    ("dataset with a generator of Python's", "sampler that counts"),
    ("stream that counts", "torchdata, two workers"),
]


@pytest.mark.long
@pytest.mark.parametrize(("train", "valid"), [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.long) for pair in PAIRS[1:])])
def test_killed_run_over_loaders_with_generators_ends_as_the_one_that_was_not(train: str, valid: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.py"
    path.write_text(SCRIPT)
    assert Script(path, tmp_path / "whole", train, valid).wait() == 0
    chance = random.Random(train)
    for _ in range(2):
        started = Script(path, tmp_path / "killed", train, valid)
        started.read(chance.randint(3, 9))  # a resumed run repeats what the newest save lacks
        started.kill()
        assert started.process.exitcode == -signal.SIGKILL
    assert Script(path, tmp_path / "killed", train, valid).wait() == 0
    whole, killed = (json.loads((tmp_path / name / "outcome.json").read_text()) for name in ("whole", "killed"))
    assert killed == whole
