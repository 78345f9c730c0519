"""Whether memory stays flat: 200,000 steps in 20 epochs, the resident memory after each.

The history keeps what it keeps of 100,000 steps, and thins it past that; so growth is bounded for the second half, and in all.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from typing import Any

import psutil
import torch
from tables import Claim, Row, Table, main

N_EPOCHS, N_STEPS = 20, 10_000


def measured(n_epochs: int = N_EPOCHS, n_steps: int = N_STEPS) -> list[float]:
    """Resident megabytes after each epoch. The model is tinier still: what is measured is what nbtrain keeps."""
    import lightning as L

    from nbtrain import Trainer

    after_mb: list[float] = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            gc.collect()
            after_mb.append(psutil.Process().memory_info().rss / 1e6)

    class Tiny(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            output = self.model(batch)
            return {"loss": output.square().mean(), "size": output.detach().abs().mean()}

    with tempfile.TemporaryDirectory() as folder:
        optimizer = torch.optim.SGD((model := torch.nn.Linear(4, 1)).parameters(), lr=1e-3)
        trainer = Tiny(model, "cpu", optimizer=optimizer, save_path=folder, lightning={"callbacks": [Watch()]})
        trainer.run(n_epochs, [torch.randn(8, 4)] * n_steps)
    return after_mb


def table(n_rounds: int, only: set[str]) -> Table:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as dropped, contextlib.redirect_stdout(dropped):
        after_mb = measured()
    start, half, end = after_mb[1], after_mb[N_EPOCHS // 2 - 1], after_mb[-1]
    return shown(start, half - start, end - half)


def shown(start_mb: float, first_half_mb: float, second_half_mb: float) -> Table:
    more_mb = first_half_mb + second_half_mb
    rows = (
        Row(("20,000 steps", f"{start_mb:.0f} MB"), bar=start_mb),
        Row(("100,000 steps", f"{start_mb + first_half_mb:.0f} MB", f"{first_half_mb:+.1f} MB"), bar=start_mb + first_half_mb),
        Row(
            ("200,000 steps", f"{start_mb + more_mb:.0f} MB", Claim("{:+.1f} MB", second_half_mb, 4)),
            (Claim("{:+.1f} MB in all", more_mb, 16),),
            start_mb + more_mb,
        ),
    )
    says = f"How much more memory a process holds after 200,000 steps than after 20,000: {more_mb:+.1f} MB."
    return Table("Memory", ("after", "memory held", "more than before"), rows, says=says)


if __name__ == "__main__":
    main(table, 1)
