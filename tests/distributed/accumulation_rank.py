"""One rank of two: it trains on every other batch, and its weights must be those of one big batch for each window. A program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from test_accumulation import WAYS, assert_equal, by_hand, make, make_data

from nbtrain import AggregatedOutputs, GradientClipAddon
from nbtrain.data.loader import BatchList

SIZES = (4, 3, 2, 5, 4, 4, 1, 2, 4, 3)  # of the two ranks in turn; windows of two batches each, the last one short
CLIP = 0.05


def count_tokens(outputs: Sequence[Any], sync_group: Any) -> AggregatedOutputs:
    sums = torch.stack([sum(output[name] for output in outputs) for name in ("loss", "n_tokens")])
    torch.distributed.all_reduce(sums, group=sync_group)
    return AggregatedOutputs(loss_sum=sums[0], num_batches=2 * len(outputs), num_tokens=sums[1])


def main(way: str) -> None:
    kind, options = WAYS[way]
    if "aggregate_outputs_fn" in options:
        options = options | {"aggregate_outputs_fn": count_tokens}
    x, y = make_data(sum(SIZES))
    batches = list(zip(x.split(list(SIZES)), y.split(list(SIZES))))
    ours = make(kind, GradientClipAddon, accumulate=2, gradient_clip=CLIP, **options)
    strategy = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")
    arguments = ours.lightning_args() | {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
    L.Trainer(**arguments, max_epochs=2).fit(ours.as_lightning_module(), BatchList(batches[int(os.environ["LOCAL_RANK"]) :: 2]))
    assert_equal(ours.model, by_hand(kind, [batches[i : i + 4] for i in range(0, len(batches), 4)] * 2, CLIP))


if __name__ == "__main__":
    for name in WAYS:
        main(name)
