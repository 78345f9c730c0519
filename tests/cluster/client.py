"""A program that trains on a Ray cluster from outside of it, at "ray://HOST:PORT", as a notebook on a laptop does."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import RayAddon, StateManagerAddon


class Dying(Regress):
    """In rank 1, ends its process in the middle of epoch 2, once: then `died` is there."""

    died: Path

    def train_step(self, batch: Any) -> dict[str, Any]:
        time.sleep(0.05)
        if self.counts.processed == 9 and self.module.global_rank == 1 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(batch)


def main(address: str, folder: Path) -> None:
    """Write what is found and the weights in `folder`, because Ray prints too."""
    where: dict[str, Any] = {"workers": 2, "gpus_per_worker": 0, "address": address}
    trainer = make_trainer(Dying.add_on(RayAddon, StateManagerAddon), **where, save_path=folder / "runs", every_n_steps=2, seed=1)
    trainer.died = folder / "died"
    torch.manual_seed(4)
    handle = trainer.run(3, make_loader(batch_size=8), make_valid(), background=True)
    while trainer.counts.processed < 3 and handle.is_on:
        time.sleep(0.02)
    trainer.pause()
    paused = handle.status
    trainer.resume(background=True)
    status = handle.wait().status
    torch.save(trainer.model.state_dict(), folder / "weights.pt")
    marks = [text for _, text in trainer.history.marks]
    (folder / "found.json").write_text(json.dumps([paused, status, marks]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
