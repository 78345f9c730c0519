"""How much memory a run takes at its peak: a network of 38 M weights with Adam, each kind of run in a separate process.

A plain loop holds the weights, their gradients and two buffers of the optimizer. What was there before the training, torch and Lightning
imported, is not counted. The peak is that which Linux keeps for a process (VmHWM), so this runs on Linux only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tables import Claim, Row, Table, main
from torch import Tensor, nn

WIDTH = 2048
N_LAYERS = 9
KINDS = {  # what it is called, the options of the trainer, its bound over the plain loop
    "nbtrain": ({}, 1.25),
    "nbtrain with a run folder": ({"save_path": "runs"}, 1.35),
    "nbtrain with its states in memory": ({"keep_states": True}, 1.5),
}
NOTE = "Above the plain loop are the weights of the best epoch; with states in memory also those of the start, to which one may rewind."


def memory_mb(line: str) -> float:
    """A line of what Linux says of this process, in MB."""
    text = Path("/proc/self/status").read_text()
    return int(next(row.split()[1] for row in text.splitlines() if row.startswith(line))) / 1e3


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    for _ in range(2):
        for batch in batches:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train_ours(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], options: dict[str, Any]) -> None:
    from nbtrain import Trainer

    class Repeats(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": loss_of(self.model, batch)}

    Repeats(model, "cpu", optimizer=optimizer, log_bar=False, **options).run(2, batches)


def peak_mb(kind: str) -> float:
    """What a training takes at its peak, in this process."""
    import lightning  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before what is measured

    import nbtrain  # noqa: F401  # pyright: ignore[reportUnusedImport]

    before = memory_mb("VmRSS")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS)))
    optimizer = torch.optim.Adam(model.parameters())
    batches = [torch.randn(2, WIDTH) for _ in range(3)]
    if kind == "plain":
        train_plain(model, optimizer, batches)
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            train_ours(model, optimizer, batches, KINDS[kind][0])
    return memory_mb("VmHWM") - before


def measured(kind: str) -> float:
    done = subprocess.run([sys.executable, __file__, "--kind", kind], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def table(n_rounds: int, only: set[str]) -> Table:
    plain = measured("plain")
    rows = [Row(("plain loop", f"{plain:.0f} MB", ""), bar=plain)]
    for kind, (_, bound) in KINDS.items():
        found = measured(kind)
        rows.append(Row((kind, f"{found:.0f} MB", Claim("{:.2f} ×", found / plain, bound)), bar=found))
    return Table("Memory at its peak", ("", "at its peak", "beside the plain loop"), tuple(rows), NOTE, "What a training takes.")


if __name__ == "__main__":
    if "--kind" in sys.argv:
        print(peak_mb(sys.argv[-1]))
    else:
        main(table, 1)
