"""Two processes of this machine, each with its own simulated device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from nbtrain.distributed.worker import Rank
from nbtrain.distributed.worker_pool import Launch, Pool

POOL = Pool(("nbtrain.trainer.trainer",))


def in_ranks(work: Callable[[Rank], Any]) -> list[Any]:
    """The results of `work` in the two processes, which nbtrain takes for those of torchrun."""

    def payload(rank: Rank) -> Any:
        variables = {"RANK": rank.number, "LOCAL_RANK": rank.number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 0}
        os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="localhost")
        torch.cuda.set_device(rank.number)
        return work(rank)

    with Launch(payload, 2, pool=POOL, backend="cpu:gloo,cuda:nccl") as launch:
        return launch.wait()
