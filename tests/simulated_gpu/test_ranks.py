"""Two processes on two simulated devices: collectives in the order of streams, and runs that end as those of two processes on the CPU."""

from __future__ import annotations

import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from samples import Breaks, Broken, Regress, make_data, make_trainer, same_weights, without_times
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.regression import MeanSquaredError

from nbtrain import AccumulationAddon, EMAAddon, MetricsAddon, MultiGPUAddon, NonFiniteAddon, StateManagerAddon
from nbtrain.distributed.worker import Rank
from simulated_gpu.counts import counted
from simulated_gpu.ranks import in_ranks


# -- collectives
def reduced(rank: Rank) -> Any:
    x = torch.full((3,), rank.number + 1.0, device="cuda")
    with counted(rank.number) as counts:
        dist.all_reduce(x)
        y = x * 2
    return y.tolist(), counts.launches, counts.waits


def test_a_collective_is_one_launch_and_the_host_does_not_wait() -> None:
    assert in_ranks(reduced) == [([6, 6, 6], 2, 0)] * 2


def read_too_early(rank: Rank) -> Any:
    x = torch.ones(3, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(RuntimeError) as error:
        x + 1
    work.wait()
    return str(error.value), (x + 1).tolist()


def test_what_a_collective_writes_is_read_after_its_wait_alone() -> None:
    for i, (text, found) in enumerate(in_ranks(read_too_early)):
        assert re.search(rf"aten::add on stream 0 of cuda:{i} reads what was written by nccl::all_reduce on stream 1\d\d of cuda:{i}", text)
        assert found == [3, 3, 3]


def gathered(rank: Rank) -> Any:
    own = torch.full((2,), float(rank.number), device="cuda")
    parts, whole, half = [torch.empty_like(own) for _ in range(2)], torch.empty(4, device="cuda"), torch.empty(2, device="cuda")
    dist.all_gather(parts, own)
    dist.all_gather_single(whole, own)
    dist.reduce_scatter_single(half, whole + rank.number, op=dist.ReduceOp.AVG)
    dist.broadcast(own, 1)
    dist.barrier(device_ids=[rank.number])
    return [value.tolist() for value in (torch.cat(parts), whole, half, own)]


def test_what_is_gathered_and_scattered() -> None:
    rest = [0, 0, 1, 1], [0, 0, 1, 1]
    assert in_ranks(gathered) == [[*rest, [0.5, 0.5], [1, 1]], [*rest, [1.5, 1.5], [1, 1]]]


def crossed(rank: Rank) -> Any:
    x, group = torch.ones(1, device="cuda"), dist.new_group(backend="gloo")
    for work in (lambda: dist.all_reduce(x), lambda: dist.barrier(group))[:: 1 - 2 * rank.number]:
        work()
    return x.item()


def test_a_collective_that_another_rank_begins_later_does_not_hold_the_host() -> None:
    assert in_ranks(crossed) == [2, 2]


# -- runs
class Leaves(Regress):
    """Leaves out the batches of one sample in five."""

    def train_step(self, batch: Any) -> Any:
        return None if batch[0][0, 0] > 0.8 else super().train_step(batch)


class SomeNan(Regress):
    """Some losses are not finite."""

    def train_step(self, batch: Any) -> Any:
        output = super().train_step(batch)
        bad = batch[0][0, 0] > 1.0
        return output | {"loss": output["loss"] * torch.where(bad, math.nan, 1.0)}


def squared(label: Tensor, output: Tensor) -> float:
    return float(((label - output) ** 2).mean())


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2, foreach=True)


def make_net(normed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if normed else nn.Tanh(), nn.Linear(16, 1))


def make(device: Any, *addons: Any, kind: type[Regress] = Regress, **options: Any) -> Any:
    options = {"model": make_net(), "optimizer": adam, "seed": 1} | options
    return make_trainer(kind.add_on(MultiGPUAddon, *addons), device=device, **options)


def loaders() -> tuple[Any, Any]:
    """70 samples in rounds of 16: the last has 6, on one of two ranks; 13 in rounds of 10."""
    return DataLoader(make_data(70), 8, shuffle=True), DataLoader(make_data(13, seed=3), 5)


def assert_same(cpu: Any, cuda: Any) -> None:
    assert same_weights(cpu.model, cuda.model) and vars(cpu.counts) == vars(cuda.counts)
    rows = without_times(cpu.history.epochs)
    assert rows == [{name: row[name] for name in own} for own, row in zip(rows, without_times(cuda.history.epochs), strict=True)]


METRICS: dict[str, Any] = {"metrics": {"own": squared, "mse": MeanSquaredError()}, "metrics_in_training": True}
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "windows": ((AccumulationAddon,), {"accumulate": 2}),
    "clipping": ((), {"gradient_clip": 0.05}),
    "bf16": ((), {"precision": "bf16"}),
    "EMA": ((EMAAddon,), {"ema_decay": 0.9}),
    "metrics": ((MetricsAddon,), METRICS),
    "batch norm": ((), {"model": make_net(normed=True)}),
    "left-out batches": ((), {"kind": Leaves}),
    "left-out batches in windows": ((), {"kind": Leaves, "lightning": {"accumulate_grad_batches": 2}}),
    "skipped updates": ((NonFiniteAddon,), {"kind": SomeNan, "nonfinite": "skip"}),
    "Lightning's strategy": ((), {"strategy": DDPStrategy}),
    "unused parameters": ((), {"strategy": "ddp_find_unused_parameters_true"}),
    "Lightning's loops": ((), {"kind": type("Stock", (Regress,), {"lean_loops": False, "__module__": __name__})}),
}


OFTEN = {"plain", "windows", "left-out batches", "Lightning's strategy"}


@pytest.mark.parametrize("case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.long) for case in CASES])
def test_two_devices_end_as_two_processes_on_the_cpu(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    addons, options = CASES[case]
    ended = []
    for device in (["cpu", "cpu"], "cuda"):
        trainer = make(device, *addons, **deepcopy(options))
        trainer.run(2, *loaders())
        ended.append((trainer, trainer.evaluate(loaders()[1])))
    (cpu, found), (cuda, other) = ended
    assert_same(cpu, cuda)
    assert without_times([found]) == without_times([other]) and cuda.device == torch.device("cuda", 0)
    assert (
        case == "Lightning's strategy" or "AccumulateGrad" not in capsys.readouterr().out
    )  # of rank 0: torch warns where DDP was made on another stream than that of its passes


@pytest.mark.long
@pytest.mark.parametrize("strategy", [{"strategy": "fsdp2"}, {"strategy": "tp", "tensor_plan": {"0": "colwise", "2": "rowwise"}}])
def test_a_model_that_is_split_ends_as_on_the_cpu(strategy: dict[str, Any]) -> None:
    cpu, cuda = (make(device, **strategy) for device in (["cpu", "cpu"], "cuda"))
    for trainer in (cpu, cuda):
        trainer.run(2, *loaders())
    assert_same(cpu, cuda)


@pytest.mark.long
def test_a_run_that_is_broken_off_is_resumed_exactly(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": make_net(), "every_n_steps": 2}
    whole = make("cuda", StateManagerAddon, save_path=tmp_path / "whole", **deepcopy(options))
    whole.run(3, *loaders())
    with pytest.raises(Broken):
        cut = make("cuda", StateManagerAddon, save_path=tmp_path / "cut", lightning={"callbacks": [Breaks(8)]}, **deepcopy(options))
        cut.run(3, *loaders())
    for device in ("cuda", ["cpu", "cpu"]):
        resumed = make(device, StateManagerAddon, save_path=tmp_path / "cut", **deepcopy(options))
        resumed.run(3, *loaders(), resume="auto")
        assert_same(whole, resumed)


@pytest.mark.long
def test_a_run_goes_back_and_on(tmp_path: Path) -> None:
    whole, trainer = make("cuda"), make("cuda", StateManagerAddon, save_path=tmp_path, every_n_steps=2)
    whole.run(3, *loaders())
    trainer.run(2, *loaders())
    trainer.rewind(epoch=1)
    trainer.run(2, *loaders())
    assert_same(whole, trainer)
