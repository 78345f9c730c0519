"""A small GPT and a ResNet-18, as people train them, beside a plain loop: what a step costs where the work is the model's.

A GPT of 10 M weights on texts of 128 tokens, and a ResNet-18 on pictures of 32 x 32, with a DataLoader. Both sides have the same weights,
the same batches and the same optimizer, and end with the same weights, bit for bit. A round trains the one and then the other, the next
round the other way round; compared is the CPU time of the process, all threads included, and shown the median of the ratios. The first
round warms up, and compiles.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from tables import Claim, Row, Table, main
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

N_TOKENS, LENGTH = 512, 128
N_STEPS = 4
BOUND = 1.02


class Block(nn.Module):
    """A layer of the GPT: attention to what came before, and two linear layers."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.norms[0](x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in parts]
        found = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.join(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, width: int = 320, n_layers: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(N_TOKENS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Block(width, 8) for _ in range(n_layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, N_TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x) + self.places.weight[: x.shape[1]])).flatten(0, 1)


class Residual(nn.Module):
    """Two convolutions, and a way round them."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()
        self.main = nn.Sequential(*first, nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out))
        is_same = n_in == n_out
        self.short = nn.Identity() if is_same else nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return (self.main(x) + self.short(x)).relu()


def make_resnet() -> nn.Module:
    """ResNet-18 for pictures of 32 x 32."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    layers = [Residual(a, b, 1 if a == b else 2) for a, b in zip(widths, widths[1:])]
    stem = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def texts() -> TensorDataset:
    tokens = torch.randint(N_TOKENS, (8 * N_STEPS, LENGTH + 1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def pictures() -> TensorDataset:
    return TensorDataset(torch.rand(16 * N_STEPS, 3, 32, 32), torch.randint(10, (16 * N_STEPS,)))


@dataclass(frozen=True)
class Case:
    """A model with its data, and how it is trained."""

    name: str
    make: Callable[[], nn.Module]
    data: Callable[[], TensorDataset]
    batch_size: int
    workers: int = 0
    compiled: bool = False
    bf16: bool = False
    accumulate: int = 1
    clip: float | None = None


CASES = (
    Case("GPT of 10 M weights", GPT, texts, 8),
    Case("GPT compiled", GPT, texts, 8, compiled=True),
    Case("GPT in bf16 with accumulation and clipping", GPT, texts, 8, bf16=True, accumulate=4, clip=1.0),
    Case("ResNet-18 with two loader workers", make_resnet, pictures, 16, workers=2),
)


def loss_of(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return cross_entropy(model(x), y.flatten())


def plain(case: Case, model: nn.Module, loader: DataLoader[Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = torch.compile(model) if case.compiled else model
    for i, batch in enumerate(loader, start=1):
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            loss = loss_of(run, batch)
        (loss / case.accumulate).backward()
        if i % case.accumulate == 0:
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()


def ours(case: Case, model: nn.Module, loader: DataLoader[Any]) -> None:
    from nbtrain import AccumulationAddon, CompileAddon, Trainer

    class Learner(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": loss_of(self.model, batch)}

    addons = [AccumulationAddon] * (case.accumulate > 1) + [CompileAddon] * case.compiled
    options: dict[str, Any] = {"accumulate": case.accumulate} if case.accumulate > 1 else {}
    options |= {"precision": "bf16-mixed"} if case.bf16 else {}
    options |= {"gradient_clip": case.clip} if case.clip is not None else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kind = Learner.add_on(*addons) if addons else Learner
    kind(model, "cpu", optimizer=optimizer, log_bar=False, **options).run(1, loader)


@contextlib.contextmanager
def timed(spent: list[float]) -> Iterator[None]:
    begin_s = time.process_time()
    yield
    spent.append(time.process_time() - begin_s)


def ratios(case: Case, n_rounds: int) -> tuple[float, float]:
    """The seconds of a step of the plain loop, and the ratio to it."""
    torch.manual_seed(0)
    first = case.make()
    loader = DataLoader(case.data(), case.batch_size, num_workers=case.workers)
    spent: dict[Any, list[float]] = {plain: [], ours: []}
    models = {way: copy.deepcopy(first) for way in spent}
    for i in range(n_rounds + 1):
        for way in (plain, ours) if i % 2 else (ours, plain):
            with timed(spent[way]):
                way(case, models[way], loader)
        if not i:
            left, right = (list(model.state_dict().values()) for model in models.values())
            assert all(map(torch.equal, left, right)), f"{case.name} ends with other weights than the plain loop"
    pairs = list(zip(spent[plain], spent[ours]))[1:]
    return median(base for base, _ in pairs) / N_STEPS, median(tool / base for base, tool in pairs)


def table(n_rounds: int, only: set[str]) -> Table:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for case in CASES:
        if not only or case.name in only:
            step_s, ratio = ratios(case, n_rounds)
            rows.append(Row((case.name, f"{step_s * 1e3:.0f} ms", Claim("{:.3f} ×", ratio, BOUND))))
    says = "What a step costs where the work is the model's, beside a plain loop with the same weights."
    return Table("Real models", ("model", "a step of the plain loop", "nbtrain"), tuple(rows), says=says)


if __name__ == "__main__":
    main(table, 5)
