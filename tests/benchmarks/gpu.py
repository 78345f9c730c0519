"""What prefetching, `torch.compile` and a CUDA graph bring on a GPU: `python tests/benchmarks/gpu.py [steps an epoch]`.

A small MLP and a small CNN, each in fp32 and bf16, with the same capturable Adam and the same batches of a DataLoader on the CPU. Every
way trains six epochs; the first warms up, the median of the others is shown, by step: the wall time from the epoch's beginning until the
device has done all of it, its ratio to the plain PyTorch loop in the same process, and the time between two CUDA events around it.
Without CUDA it says so and measures nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import AddOnBase, Event, Trainer
from nbtrain.addons.performance import CompileAddon, CudaGraphAddon, PrefetchAddon
from nbtrain.views.terminal import View

BATCH, EPOCHS = 64, 6
Times = list[tuple[float, float]]  # of each epoch: wall time and device time in s


class Clock(L.Callback):
    """Takes the time of each epoch."""

    def __init__(self) -> None:
        self.times: Times = []
        self.begun = 0.0
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        torch.cuda.synchronize()
        self.begun = time.perf_counter()
        self.start.record()

    def stop(self) -> None:
        self.end.record()
        torch.cuda.synchronize()
        self.times.append((time.perf_counter() - self.begun, self.start.elapsed_time(self.end) / 1e3))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stop()


class Classify(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": cross_entropy(self.model(x), y)}


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def make_cnn() -> nn.Module:
    def block(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, stride=2), nn.BatchNorm2d(n_out), nn.ReLU()]

    return nn.Sequential(*block(1, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(128 * 4, 10))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(1e-3, device="cuda"), capturable=True)


def make_loader(n_steps: int, pinned: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    n = n_steps * BATCH
    data = TensorDataset(torch.randn(n, 1, 16, 16, generator=generator), torch.randint(10, (n,), generator=generator))
    return DataLoader(data, BATCH, pin_memory=pinned)


def plain(model: nn.Module, loader: DataLoader[Any], bf16: bool) -> Times:
    model, clock = model.cuda(), Clock()
    optimizer = adam(model.parameters())
    for _ in range(EPOCHS):
        clock.begin()
        losses: list[Tensor] = []
        for batch in loader:
            x, y = (item.to("cuda", non_blocking=True) for item in batch)
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.stack(losses).tolist()
        clock.stop()
    return clock.times


def ours(model: nn.Module, loader: DataLoader[Any], bf16: bool, *addons: type[AddOnBase]) -> Times:
    clock = Clock()
    options: dict[str, Any] = {"precision": "bf16" if bf16 else None, "log_bar": False, "lightning": {"callbacks": [clock]}}
    trainer = Classify.add_on(*addons)(model, device="cuda", optimizer=adam, **options)
    trainer.sinks.append(Complaints())
    trainer.run(EPOCHS, loader)
    return clock.times


class Complaints(View):
    """Says aloud what a run notes: a way that does not do what its name says is not worth a row."""

    def update(self, event: Event) -> None:
        if event.kind == "note":
            print(event.data["text"], file=sys.stderr)


def measured(make: Callable[[], nn.Module], n_steps: int, bf16: bool) -> Iterator[tuple[str, Times]]:
    """Each way, with its times."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    paged, pinned = make_loader(n_steps, False), make_loader(n_steps, True)
    yield "plain loop", plain(model(), paged, bf16)
    yield "plain loop, pinned", plain(model(), pinned, bf16)
    yield "nbtrain", ours(model(), paged, bf16)
    yield "nbtrain, prefetch", ours(model(), paged, bf16, PrefetchAddon)
    yield "nbtrain, prefetch, pinned", ours(model(), pinned, bf16, PrefetchAddon)
    yield "nbtrain, compile", ours(model(), paged, bf16, CompileAddon)
    yield "nbtrain, graph", ours(model(), paged, bf16, CudaGraphAddon)
    yield "nbtrain, all three, pinned", ours(model(), pinned, bf16, PrefetchAddon, CompileAddon, CudaGraphAddon)


def main(n_steps: int) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {BATCH}, {n_steps} steps an epoch.\n")
    print("| model | way | wall, µs a step | of the plain loop | device, µs a step |\n|---|---|---|---|---|")
    for name, make in (("MLP", make_mlp), ("CNN", make_cnn)):
        for bf16 in (False, True):
            plain_wall = 0.0
            for way, times in measured(make, n_steps, bf16):
                wall, device = (1e6 * statistics.median(column) / n_steps for column in zip(*times[1:]))
                plain_wall = plain_wall or wall
                kind = f"{name}, {'bf16' if bf16 else 'fp32'}"
                print(f"| {kind} | {way} | {wall:.0f} | {wall / plain_wall:.2f} | {device:.0f} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    else:
        print("There is no CUDA device here: nothing was measured.")
