"""One of two ranks stops or fails alone, at a moment of a run. A program, which torchrun starts; a cell calls `run`."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch.distributed as dist
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import MultiGPUAddon


class Alone(L.Callback):
    """On rank 1 alone, it calls `fault` of the trainer at `moment`, once, or raises an error."""

    def __init__(self, moment: str, fault: str) -> None:
        self.moment, self.fault = moment, fault
        if moment.startswith("on_"):
            vars(self)[moment] = lambda pl_trainer, *args: self.act(pl_trainer.lightning_module.owner, moment)

    def act(self, trainer: Any, moment: str) -> None:
        if moment != self.moment or dist.get_rank() != 1 or trainer.module.trainer.sanity_checking:
            return
        self.moment = ""
        if self.fault == "raise":
            raise ValueError(f"boom in {moment}")
        getattr(trainer, self.fault)()


class Acts(Regress):
    """Gives its steps to the callback too."""

    def train_step(self, batch: Any) -> Any:
        self.lightning["callbacks"][0].act(self, "train_step")
        return super().train_step(batch)

    def test_step(self, batch: Any) -> Any:
        self.lightning["callbacks"][0].act(self, "test_step")
        return super().train_step(batch)


def run(moment: str, fault: str, device: Any = "cpu") -> tuple[str, int]:
    trainer = make_trainer(Acts.add_on(MultiGPUAddon), device=device, lightning={"callbacks": [Alone(moment, fault)]})
    result = trainer.run(3, make_loader(64, batch_size=4), make_valid())
    return result.status, trainer.counts.step


if __name__ == "__main__":
    for moment in sys.argv[2:]:
        status, step = run(moment, sys.argv[1])
        print(f"{moment} {status} {step}\n", end="", flush=True)
