"""What prefetching, `torch.compile` and a CUDA graph bring on a GPU: `python tests/benchmarks/gpu.py [steps an epoch]`.

A small MLP and a small CNN, each in fp32 and bf16, and a GPT of 124 M parameters in bf16 with a tenth of the steps, with the same
capturable Adam and the same batches of a DataLoader on the CPU. Every way trains six epochs; the first warms up, the median of the others
is shown, by step: the wall time from the epoch's beginning until the device has done all of it, its ratio to the plain PyTorch loop in the
same process, and the time between two CUDA events around it.
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

from nbtrain import AddOnBase, Trainer
from nbtrain.addons.performance import CompileAddon, CudaGraphAddon, PrefetchAddon
from nbtrain.events import Event
from nbtrain.views.terminal import View

BATCH, EPOCHS = 64, 6
TEXTS, LENGTH = 16, 512  # of the GPT: texts in a batch, tokens in a text
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


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of classes, or of the next token at each place."""
    return cross_entropy(model(x).flatten(0, -2), y.flatten())


class Classify(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": loss_of(self.model, *batch)}


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def make_cnn() -> nn.Module:
    def block(n_in: int, n_out: int) -> list[nn.Module]:
        return [nn.Conv2d(n_in, n_out, 3, padding=1, stride=2), nn.BatchNorm2d(n_out), nn.ReLU()]

    return nn.Sequential(*block(1, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(128 * 4, 10))


class GPT(nn.Module):
    """Of GPT-2's smallest size; the weights of the embedding are those of the head."""

    def __init__(self, n_tokens: int = 50304, width: int = 768, n_layers: int = 12, length: int = LENGTH) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(n_tokens, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True, bias=False)
        self.layers = nn.TransformerEncoder(layer, n_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, n_tokens, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x) + self.places.weight, mask=self.mask, is_causal=True))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(1e-3, device="cuda"), capturable=True)


def make_data(n_steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    n = n_steps * BATCH
    return TensorDataset(torch.randn(n, 1, 16, 16, generator=generator), torch.randint(10, (n,), generator=generator))


def make_texts(n_steps: int) -> TensorDataset:
    tokens = torch.randint(50304, (n_steps * TEXTS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def plain(model: nn.Module, loader: DataLoader[Any], bf16: bool, compiled: bool = False) -> Times:
    model, clock = model.cuda(), Clock()
    optimizer = adam(model.parameters())
    if compiled:
        model.compile()
    for _ in range(EPOCHS):
        clock.begin()
        losses: list[Tensor] = []
        for batch in loader:
            x, y = (item.to("cuda", non_blocking=True) for item in batch)
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                loss = loss_of(model, x, y)
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
    trainer.recorder.add(Complaints())
    trainer.run(EPOCHS, loader)
    return clock.times


class Complaints(View):
    """Says aloud what a run notes: a way that does not do what its name says is not worth a row."""

    def update(self, event: Event) -> None:
        if event.kind == "note":
            print(event.data["text"], file=sys.stderr)


def measured(make: Callable[[], nn.Module], data: TensorDataset, bf16: bool) -> Iterator[tuple[str, Times]]:
    """Each way, with its times."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    is_small = make is not GPT
    paged, pinned = (DataLoader(data, BATCH if is_small else TEXTS, pin_memory=pins) for pins in (False, True))
    yield "plain loop", plain(model(), paged, bf16)
    yield "nbtrain", ours(model(), paged, bf16)
    yield "plain loop, compile", plain(model(), paged, bf16, compiled=True)
    yield "nbtrain, compile", ours(model(), paged, bf16, CompileAddon)
    if is_small:
        yield "plain loop, pinned", plain(model(), pinned, bf16)
        yield "nbtrain, prefetch", ours(model(), paged, bf16, PrefetchAddon)
        yield "nbtrain, prefetch, pinned", ours(model(), pinned, bf16, PrefetchAddon)
        yield "nbtrain, graph", ours(model(), paged, bf16, CudaGraphAddon)
        yield "nbtrain, all three, pinned", ours(model(), pinned, bf16, PrefetchAddon, CompileAddon, CudaGraphAddon)


JOBS: list[tuple[str, Callable[[], nn.Module], Callable[[int], TensorDataset], bool]] = [
    ("MLP, fp32", make_mlp, make_data, False),
    ("MLP, bf16", make_mlp, make_data, True),
    ("CNN, fp32", make_cnn, make_data, False),
    ("CNN, bf16", make_cnn, make_data, True),
    ("GPT, bf16", GPT, make_texts, True),
]


def main(n_steps: int) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {n_steps} steps an epoch.")
    print(f"A batch has {BATCH} images, or {TEXTS} × {LENGTH} tokens.\n")
    print("| model | way | wall, µs a step | of the plain loop | device, µs a step |\n|---|---|---|---|---|")
    for kind, make, data, bf16 in JOBS:
        n = n_steps if make is not GPT else n_steps // 10
        plain_wall = 0.0
        for way, times in measured(make, data(n), bf16):
            wall, device = (1e6 * statistics.median(column) / n for column in zip(*times[1:]))
            plain_wall = plain_wall or wall
            print(f"| {kind} | {way} | {wall:.0f} | {wall / plain_wall:.2f} | {device:.0f} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    else:
        print("There is no CUDA device here: nothing was measured.")
