"""A training as a user's script has it; torchrun, SLURM or a shell start it. Rank 0 writes what it ended with. A program."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
from samples import Regress, make_loader, make_trainer, make_valid
from torch import nn

from nbtrain import MultiGPUAddon, StateManagerAddon


class Faulty(Regress):
    """Once, before the update `at`, it sends itself `fault`, and with SIGKILL the process too that has started it: a machine is gone.

    "error" is raised instead, and "rank 0" and "rank 1" kill only the process of that rank. "hold" waits until the test closes a pipe.
    "SIGTERM to torchrun" is what Kubernetes sends, and torchrun passes it on; "SIGTERM to all" is what SLURM sends: to torchrun, the ranks
    and their loaders' workers.
    """

    fault, at, mark = "", 0, Path()

    def train_step(self, batch: Any) -> dict[str, Any]:
        is_other = self.fault.startswith("rank") and self.fault != f"rank {self.world.number}"
        if self.fault and not is_other and self.counts.step == self.at and not self.mark.exists():
            if self.fault.startswith("SIGTERM to"):
                self._end_job()
                return super().train_step(batch)
            if self.fault == "hold":
                self._hold()
                return super().train_step(batch)
            self.mark.touch()
            if self.fault == "error":
                raise RuntimeError("boom")
            if self.fault.startswith("rank"):
                os.kill(os.getpid(), signal.SIGKILL)
            signum = getattr(signal, self.fault)
            for pid in (os.getppid(), os.getpid()) if signum == signal.SIGKILL else (os.getpid(),):
                os.kill(pid, signum)
        return super().train_step(batch)

    def _hold(self) -> None:
        """Wait in rank 0; the others wait for it in this step."""
        self.fault = ""
        if self.world.is_first:
            print("held", flush=True)
            self.mark.with_name("hold").read_text()

    def _end_job(self) -> None:
        """End the job. Rank 0 waits until torchrun has passed the signal on; the others wait for it in this step."""
        fault, self.fault = self.fault, ""
        if self.world.is_first:
            arrived, wakeup = os.pipe2(os.O_NONBLOCK)
            os.set_blocking(arrived, True)
            signal.set_wakeup_fd(wakeup)
            os.kill(os.getppid(), signal.SIGTERM)
            os.read(arrived, 1)
            signal.set_wakeup_fd(-1)
        if fault == "SIGTERM to all":
            os.killpg(0, signal.SIGTERM)  # torchrun gives each rank its own group


def make_net(dropout: float) -> nn.Module:
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # the ranks begin with the weights of the first one
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2 in parts": {"strategy": "fsdp2", "save_type": "sharded", "save_format": "safetensor"},
    "tp": {"strategy": "tp", "tensor_plan": {"0": "colwise", "3": "rowwise"}},
    "auto": {"strategy": "auto", "memory_gb": 4e-6},  # which is enough for half of the model
}


def train(
    folder: Path, *, fault: str = "", at: int = 0, batch_size: int = 8, dropout: float = 0.0, strategy: str = "ddp", n_workers: int = 0
) -> None:
    """12 updates of two ranks, or of one process with twice the batch size, in 3 epochs; each third one is saved."""
    options = {"model": make_net(dropout), "save_path": folder / "runs", "seed": 1, "every_n_steps": 3} | STRATEGIES[strategy]
    trainer = make_trainer(Faulty.add_on(MultiGPUAddon, StateManagerAddon), **options)
    mark = f"faulted-{trainer.world.number}" if fault == "error" else "faulted"  # an error is to be raised by all
    trainer.fault, trainer.at, trainer.mark = fault, at, folder / mark
    result: Any = None
    with contextlib.suppress(RuntimeError) if fault == "error" else contextlib.nullcontext():
        result = trainer.run(3, make_loader(64, batch_size=batch_size, num_workers=n_workers), make_valid(), resume="auto")
    evaluated = trainer.evaluate(make_valid())
    if trainer.world.is_first:
        rows = [dict(row) for row in trainer.history.epochs]
        end = {"weights": trainer.model.state_dict(), "rows": rows, "result": str(result), "evaluated": evaluated}
        torch.save(end | {"n_updates": trainer.counts.step}, folder / "end.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", default="")
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--n_workers", type=int, default=0)
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    train(**vars(parser.parse_args()))
