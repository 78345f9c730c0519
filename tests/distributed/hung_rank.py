"""Rank 1 of two stays in its step. A program, which torchrun starts; a cell calls `run`."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch.distributed as dist
from samples import Regress, make_loader, make_trainer

from nbtrain import MultiGPUAddon


class Hangs(Regress):
    def train_step(self, batch: Any) -> Any:
        if dist.get_rank() == 1 and self.counts.step == 3:
            threading.Event().wait()
        return super().train_step(batch)


def run(folder: Any, device: Any = "cpu") -> None:
    trainer = make_trainer(Hangs.add_on(MultiGPUAddon), device=device, timeout_s=8.0, save_path=folder)
    trainer.run(1, make_loader(64, batch_size=4))


if __name__ == "__main__":
    run(sys.argv[1])
