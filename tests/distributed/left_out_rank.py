"""One rank of two, which leave batches out, alone or together, and compare with a plain loop over rounds of two batches. A program.

How much of a round counts goes with the gradients where these are exchanged and averaged, and otherwise in a message of its own.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from samples import make_trainer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss

from nbtrain import ConfigError, MultiGPUAddon, StepError, Trainer
from nbtrain.data.loader import BatchList


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class Picky(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any] | None:
        x, y = batch
        return None if x.isnan().any() else {"loss": mse_loss(self.model(x), y)}

    def test_step(self, batch: Any) -> dict[str, Any] | None:
        return self.train_step(batch)


def batches(places: tuple[int, ...], how: str) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    made: list[Any] = [
        (torch.randn(n, 8, generator=generator), torch.randn(n, 1, generator=generator)) for n in (4, 3, 2, 5, 4, 4, 1, 2, 4)
    ]
    for i in places:
        made[i] = None if how == "loader" else (made[i][0] * math.nan, made[i][1])
    return made


def by_hand(made: list[Any], accumulate: int) -> tuple[nn.Module, int]:
    model = make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rounds = [[b for b in made[i : i + 2] if b is not None and not b[0].isnan().any()] for i in range(0, len(made), 2)]
    rounds = [part for part in rounds if part]
    n_updates = 0
    for _ in range(2):
        for i in range(0, len(rounds), accumulate):
            x, y = (torch.cat(part) for part in zip(*itertools.chain(*rounds[i : i + accumulate])))
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            n_updates += 1
    return model, n_updates


@contextmanager
def own_messages() -> Iterator[list[Any]]:
    """The messages about a round: sums of two 64-bit numbers, beside those of DistributedDataParallel."""
    found: list[Any] = []
    reduce = dist.all_reduce

    def counted(value: torch.Tensor, *args: Any, **options: Any) -> Any:
        found.extend([value] if value.dtype == torch.float64 and options.get("async_op") else [])
        return reduce(value, *args, **options)

    dist.all_reduce = counted
    try:
        yield found
    finally:
        dist.all_reduce = reduce


_DDP = {
    "ddp": "ddp",
    "unused": "ddp_find_unused_parameters_true",
    "static": partial(DDPStrategy, static_graph=True),
    "views": partial(DDPStrategy, gradient_as_bucket_view=True),
    "hook": partial(DDPStrategy, ddp_comm_hook=allreduce_hook),
}


def main() -> None:
    cases = [((0,), "loader", 2, True, "ddp"), ((0,), "loader", 2, False, "views"), ((2, 3), "step", 1, True, "ddp")]
    cases += [((2, 3), "step", 1, False, "ddp"), ((0, 1, 5), "loader", 1, True, "unused"), ((0, 1, 5), "loader", 1, True, "views")]
    cases += [((3, 8), "step", 2, True, "hook"), ((3, 8), "step", 2, False, "unused"), ((0,), "step", 1, False, "hook")]
    cases += [((), "step", 1, True, "static")]
    for places, how, accumulate, lean, strategy in cases:
        texts: list[str] = []
        picky = Picky.add_on(MultiGPUAddon(strategy=_DDP[strategy]))
        trainer: Any = make_trainer(picky, model=make_net(), lightning={"accumulate_grad_batches": accumulate})
        trainer.short_way = lean
        emit = trainer.recorder.emit
        trainer.recorder.emit = lambda event, texts=texts, emit=emit: (
            texts.append(event.data["text"]) if event.kind == "note" else None,
            emit(event),
        )
        made = batches(places, how)
        with own_messages() as found:
            trainer.run(2, BatchList(made), BatchList(made))
        case = f"{places} {how} {accumulate} {lean} {strategy}"
        assert len(found) in ([10] if strategy == "hook" else range(1, 10) if accumulate > 1 else [0]), (case, len(found))
        expected, n_updates = by_hand(made, accumulate)
        for a, b in zip(trainer.model.parameters(), expected.parameters()):
            assert torch.allclose(a, b, atol=1e-6), case
        assert trainer.counts.step == n_updates and trainer.counts.left_out == 4 * len(places), (case, trainer.counts)
        left = [text for text in texts if "left out" in text]
        assert len(left) == 2 * bool(places) and all(text.startswith(f"{len(places)} of 9 batches") for text in left), (case, left)
        with torch.no_grad():
            kept = [b for b in made if b is not None and not b[0].isnan().any()]
            mean = sum(mse_loss(expected(x), y).item() * len(x) for x, y in kept) / sum(len(x) for x, _ in kept)
        assert math.isclose(trainer.history.epochs[-1]["val_loss"], mean, rel_tol=1e-4), case
    refuses_lengths()
    trains_in_bfloat16()
    refuses_static_graph()
    print("done")


def refuses_lengths() -> None:
    rank, made = int(os.environ["RANK"]), batches((), "loader")
    trainer: Any = make_trainer(Picky.add_on(MultiGPUAddon), model=make_net())
    for loaders in ((made[: 4 + rank], None), (made[:4], made[: 4 + rank])):
        try:
            trainer.run(1, *(BatchList(part) for part in loaders if part is not None))
        except ConfigError as error:
            assert "4 batches in process 0, 5 batches in process 1" in str(error), error
        else:
            raise AssertionError(loaders)


def trains_in_bfloat16() -> None:
    made = batches((2,), "step")
    trainer: Any = make_trainer(Picky.add_on(MultiGPUAddon), model=make_net(), precision="bf16-true")
    with own_messages() as found:
        trainer.run(1, BatchList(made))
    assert trainer.counts.step == 5 and not found and not hasattr(trainer.module, "round_carrier")


def refuses_static_graph() -> None:
    made = batches((0, 1), "step")  # in both processes, so that none waits for the other
    trainer: Any = make_trainer(Picky.add_on(MultiGPUAddon(strategy=_DDP["static"])), model=make_net(), on_error="raise")
    try:
        trainer.run(1, BatchList(made))
    except StepError as error:
        assert "static_graph=True" in str(error), error
    else:
        raise AssertionError("a static graph has no batch that is left out")


if __name__ == "__main__":
    main()
