"""What a step asks of a device, in numbers that are the same on every machine: at most two launches more than a plain loop, and no wait."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_calls
import pytest
import torch
from samples import Regress, make_trainer
from test_addons import ADDONS
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchmetrics.classification import MulticlassAccuracy

from nbtrain import AddOnBase, HealAddon, MetricsAddon, MultiGPUAddon, NonFiniteAddon, StateManagerAddon
from nbtrain.distributed.worker import Rank
from simulated_gpu.counts import Counts, counted
from simulated_gpu.ranks import in_ranks

FEW, MANY = 6, 14  # batches
MORE = 2  # launches a step
SKIPPED = {'nonfinite="skip"': (3, 1), 'nonfinite="skip", fused': (3, 0)}  # launches and waits: the plain loop looks at no gradient
KEPT = {  # bytes on the device that the pages say are kept: recorded values until they are read, and the last batches of metrics
    "clipping": MANY * 512,
    "metrics": 2 * (1536 + 512 + 512) + 2 * 512,
    'nonfinite="skip", fused': 2 * MANY * 512
    + 15 * 512,  # flags, each with its copy in the record; what a forward adds to the gradients before it
}

OF_RANK = {  # launches and waits of a rank's batch: of DistributedDataParallel in a plain loop, and of nbtrain
    "plain": ((36, 0), (36, 0)),
    "clipping": ((44, 0), (44, 0)),
    "accumulation": ((34, 0), (34, 0)),
    "bf16": ((51, 0), (51, 0)),
    "EMA": ((37, 1), (37, 0)),
    "metrics": ((50, 0), (52, 0)),
    'nonfinite="skip"': ((36, 0), (39, 1)),
    'nonfinite="skip", fused': ((31, 0), (34, 1)),
    "states in memory": ((36, 0), (36, 0)),
    "evaluation": ((7, 0), (7, 0)),
}

OFTEN: dict[type[AddOnBase], dict[str, Any]] = {StateManagerAddon: {"every_n_steps": None}}  # a step that saves waits


def by_step(epoch: Callable[[int], Any], index: int = 0) -> Counts:
    """What a batch of `epoch(n_batches)` asks for: the difference of two epochs, so that what an epoch asks once is not counted."""
    epoch(FEW)
    with counted(index) as few:
        epoch(FEW)
    with counted(index) as many:
        epoch(MANY)
    difference = many - few
    return Counts(*(value / (MANY - FEW) for value in vars(difference).values()))


def make_batches() -> list[Any]:
    """The same batch again and again: each epoch is better than the one before, so that each keeps its weights as the best ones."""
    torch.manual_seed(1)
    return gpu_calls.make_batches(1) * MANY


def ours(what: str) -> Callable[[list[Any]], None]:
    """As of the benchmark; the display is shown at the beginning and the end alone, however slow the machine is."""
    return gpu_calls.ours(what, every_s=math.inf)


@pytest.mark.parametrize("what", gpu_calls.WAYS)
def test_a_step_asks_for_what_a_plain_loop_asks_for(what: str) -> None:
    batches = make_batches()
    plain_epoch, epoch = gpu_calls.plain(what), ours(what)
    theirs, found = by_step(lambda n: plain_epoch(batches[:n])), by_step(lambda n: epoch(batches[:n]))
    launches, waits = SKIPPED.get(what, (MORE, 0))
    assert found.launches <= theirs.launches + launches and found.waits <= waits, (theirs, found)


def in_rank(rank: Rank) -> dict[str, list[tuple[float, float]]]:
    """Launches and waits of a batch, by what is done: of the plain loop, and of nbtrain."""
    batches, found = make_batches(), dict[str, list[tuple[float, float]]]()
    for what in gpu_calls.WAYS:
        plain_epoch = gpu_calls.plain(what, partial(DistributedDataParallel, device_ids=[rank.number]))
        epoch = gpu_calls.ours(what, math.inf, [MultiGPUAddon])
        ways = (lambda n, epoch=plain_epoch: epoch(batches[:n])), (lambda n, epoch=epoch: epoch((batches * 2)[: 2 * n]))  # of both ranks
        counts = [by_step(way, rank.number) for way in ways]
        found[what] = [(count.launches, count.waits) for count in counts]
    return found


def test_a_step_of_a_rank_asks_for_what_a_plain_loop_with_ddp_asks_for() -> None:
    assert in_ranks(in_rank) == [{what: list(counts) for what, counts in OF_RANK.items()}] * 2


def peak(make: Callable[[str], Callable[[list[Any]], Any]], what: str) -> int:
    """The most bytes that two epochs need, with the model and its optimizer, and without the batches."""
    batches = make_batches()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before, epoch = torch.cuda.memory_allocated(), make(what)
    epoch(batches)
    epoch(batches)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("what", gpu_calls.WAYS)
def test_the_peak_of_memory_is_that_of_a_plain_loop(what: str) -> None:
    theirs, found = peak(gpu_calls.plain, what), peak(ours, what)
    assert found <= theirs + KEPT.get(what, 0), (theirs, found)


class Classify(gpu_calls.Classify):
    """Some labels are ignored."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        output = self.model(x)
        return {"loss": cross_entropy(output, y), "output": output, "label": torch.where(y > 2, y, -100)}

    test_step = train_step


def largest(label: Any, output: Any) -> float:
    return float(output.argmax(1)[label > 2].sum())


def measured(device: str, metric: Any, phase: str) -> tuple[float, Counts]:
    """The metric of a pass on `device`, and what a batch of it asks for."""
    model, batches, found = gpu_calls.make_model().to(device), make_batches(), list[float]()
    model[2] = nn.Identity()  # type: ignore[index, operator]  # for its dropout
    options: dict[str, Any] = {"metrics": {"it": metric}, "metrics_in_training": True, "log_bar": False}
    trainer = Classify.add_on(MetricsAddon)(model, device, optimizer=lambda params: torch.optim.SGD(params, lr=0.0), **options)
    trainer.recorder.every_s = math.inf
    if phase == "an evaluation":
        counts = by_step(lambda n: found.append(trainer.evaluate(batches[:n])["it"]))
    else:
        counts = by_step(lambda n: found.append(trainer.run(1, batches[:n]).last["train_it"]))
    return found[-1], counts


@pytest.mark.parametrize("metric", [MulticlassAccuracy(10, average="micro"), largest], ids=["torchmetrics", "a function"])
@pytest.mark.parametrize("phase", ["a training", "an evaluation"])
def test_metrics_of_batches_with_ignored_labels_do_not_wait(metric: Any, phase: str) -> None:
    (expected, _), (found, counts) = (measured(device, metric, phase) for device in ("cpu", "cuda"))
    assert counts.waits == 0 and found == pytest.approx(expected)


@pytest.mark.parametrize(
    "addon", [addon for addon in ADDONS if addon not in (HealAddon, MultiGPUAddon, NonFiniteAddon)], ids=lambda addon: addon.__name__
)
def test_no_addon_waits_in_a_step(addon: type[AddOnBase], tmp_path: Path) -> None:
    batches = [(x[:, :8], x.sum(1, keepdim=True)) for x, _ in make_batches()]
    options = ADDONS[addon](tmp_path) | OFTEN.get(addon, {})
    trainer = make_trainer(Regress.add_on(addon), **options)
    trainer.recorder.every_s = math.inf
    counts = by_step(lambda n: trainer.run(1, batches[:n]))
    assert counts.waits <= 0, counts
