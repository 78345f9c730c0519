"""How long a save holds the training up, when it is safe on the disk, what memory it takes: `python tests/benchmarks/saving.py [folder]`.

A state of 400 MB, a model and its Adam, on the CPU. Each way saves four times in a process of its own; the first save is shown apart,
since it touches its memory for the first time. Ratios are to `torch.save` in the same run, times are medians of the other three.
"Durable" ends when the bytes are on the disk (`os.sync` for those that do not see to it); extra memory is the peak above what was there
before, by the state's size.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from nbtrain.checkpoint.files import Writer

MB = 1_000_000
WAYS = ("torch.save", "lightning save_checkpoint", "nbtrain ckpt", "nbtrain safetensor")


class Module(L.LightningModule):
    """33 million parameters; with Adam's two moments 400 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def trained() -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_steps=1, accelerator="cpu", **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(2, 1024)))
    return trainer


def memory(line: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    return next(1024 * int(row.split()[1]) for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(line))


def saver(way: str, trainer: L.Trainer, folder: Path) -> tuple[Callable[[int], None], Callable[[], None]]:
    """What the training calls, and what makes it durable."""
    writer = Writer()

    def dump() -> dict[str, Any]:
        return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)

    if way == "torch.save":
        return lambda i: torch.save(dump(), folder / f"{i}.pt"), os.sync
    if way == "lightning save_checkpoint":
        return lambda i: trainer.save_checkpoint(folder / f"{i}.ckpt"), os.sync
    save_format: Any = way.split()[1]
    return lambda i: writer.save(dump(), folder / f"{i}", save_format), writer.wait


def measure(way: str, parent: str) -> dict[str, Any]:
    trainer = trained()
    dump = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    adam = [value for state in dump["optimizer_states"][0]["state"].values() for value in state.values()]
    n_bytes = sum(tensor.nbytes for tensor in [*dump["state_dict"].values(), *adam])
    del dump, adam
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        save, settle = saver(way, trainer, Path(folder))
        gc.collect()
        os.sync()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before, rows = memory("VmRSS"), []
        for i in range(4):
            start = time.perf_counter()
            save(i)
            stalled = time.perf_counter() - start
            settle()
            rows.append((stalled, time.perf_counter() - start))
        extra = (memory("VmHWM") - before) / n_bytes
    stall, durable = (statistics.median(column) for column in zip(*rows[1:]))
    return {"way": way, "mb": n_bytes / MB, "first": rows[0][0], "stall": stall, "durable": durable, "extra": extra}


def main(parent: str) -> None:
    found = []
    for way in WAYS:
        command = [sys.executable, __file__, parent, way]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))
    base = found[0]
    print(f"A state of {base['mb']:.0f} MB in {parent}, torch {torch.__version__}, {os.cpu_count()} cores.\n")
    print("| | stall | of torch.save | first stall | durable after | of torch.save | extra memory / state |\n|---|---|---|---|---|---|---|")
    for row in found:
        stall, durable = row["stall"] / base["stall"], row["durable"] / base["durable"]
        times = f"{row['stall']:.2f} s | {stall:.2f} | {row['first']:.2f} s | {row['durable']:.2f} s | {durable:.2f}"
        print(f"| {row['way']} | {times} | {row['extra']:.2f} |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) > 2:
        print(json.dumps(measure(sys.argv[2], sys.argv[1])))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
