"""What a long history costs: to save, show, load and resume a run of 20,000 epochs, and to log 100,000 metrics.

Each epoch is one batch and a validation. A checkpoint holds its place in the journal of the history, so a save and an epoch cost at the end
what they cost at the beginning. CPU time of the process, all threads included, in this one; the bounds are those of the page.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from calls import make_batch, make_ours
from tables import Claim, Row, Table, main
from torch import nn

from nbtrain import StateManagerAddon, Trainer, load_run
from nbtrain.cli import main as nbtrain

N_EPOCHS, TENTH = 20_000, 2_000
N_KEYS, N_STEPS = 100_000, 10
BOUNDS_S = {"save": 0.05, "nbtrain show": 1.0, "load_run": 1.0, "resume the finished run": 1.0}
NOTE = "One CPU thread. The history has a row for each of 20,000 epochs and validations, and a value for each of 40,000 steps."


def taken_s(call: Callable[[], Any]) -> float:
    begin_s = time.process_time()
    call()
    return time.process_time() - begin_s


def long_run(folder: str) -> tuple[Any, list[float]]:
    """The trainer of a long run, and the milliseconds of an epoch in each tenth of it."""
    spent_s = [time.process_time()]

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if (trainer.current_epoch + 1) % TENTH == 0:
                spent_s.append(time.process_time())

    trainer = make_saving(folder, callbacks=[Watch()])
    trainer.run(N_EPOCHS, [make_batch()], [make_batch()])
    return trainer, [(after - before) / TENTH * 1e3 for before, after in zip(spent_s, spent_s[1:])]


def make_saving(folder: str, callbacks: Any = ()) -> Any:
    """With one checkpoint at the end, so that the epochs are those of the run alone."""
    options = {"every_n_epochs": N_EPOCHS, "save_best": False, "lightning": {"callbacks": list(callbacks)}}
    return make_ours(StateManagerAddon, save_path=folder, **options)


def shown(folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        nbtrain(["show", str(folder)])


def epochs() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        trainer, epoch_ms = long_run(folder)
        newest = max((trainer.run_dir / "checkpoints").glob("epoch=*"), key=lambda path: path.stat().st_mtime_ns)
        calls: dict[str, Callable[[], Any]] = {
            "save": trainer.save_state,
            "nbtrain show": lambda: shown(trainer.run_dir),
            "load_run": lambda: load_run(trainer.run_dir),
            "resume the finished run": lambda: make_saving(folder).run(N_EPOCHS, [make_batch()], [make_batch()], resume="auto"),
        }
        rows = [Row((name, Claim("{:.2f} s", taken_s(call), BOUNDS_S[name]))) for name, call in calls.items()]
        size = Claim("a checkpoint has {:.2f} MB", newest.stat().st_size / 1e6, 0.2)
        slower = Claim("the last tenth takes {:.2f} × the time of the second", epoch_ms[-1] / epoch_ms[1], 1.10)
    return [*rows, Row(("an epoch", f"{epoch_ms[-1]:.2f} ms"), (slower, size))]


def keys() -> Row:
    names = [f"m{i}" for i in range(N_KEYS)]

    class Wide(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model(batch).square().mean()} | dict.fromkeys(names, 0.5)

    trainer = Wide(nn.Linear(4, 2), "cpu", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), log_bar=False)
    spent_s = taken_s(lambda: trainer.run(1, [torch.ones(2, 4)] * N_STEPS))
    return Row((f"{N_STEPS} steps with {N_KEYS:,} metrics", Claim("{:.3f} ms a value", spent_s * 1e3 / (N_KEYS * N_STEPS), 0.01)))


def table(n_rounds: int, only: set[str]) -> Table:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    says = f"What a run of {N_EPOCHS:,} epochs of one batch costs where its history is read or saved, and a step with very many metrics."
    return Table("Long histories", ("after 20,000 epochs", "CPU time"), (*epochs(), keys()), NOTE, says)


if __name__ == "__main__":
    main(table, 1)
