"""What can be known of a split model before a process is started: its blocks, what the options mean, and what fits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from samples import SEED, Regress, make_trainer
from torch import nn

from nbtrain import ConfigError, EMAAddon, MultiGPUAddon
from nbtrain.cli import main
from nbtrain.distributed.memory_estimate import DeviceMemory, device_memory, estimate, plan_devices
from nbtrain.distributed.parallelism import Parallelism, find_blocks, resolve_parallelism


def test_large_modules_are_the_parts_where_no_block_comes_twice() -> None:
    with torch.device("meta"):
        attention = nn.MultiheadAttention(2048, 2)  # 16 million parameters, of which its own part is called by nobody
        bilinear = nn.Bilinear(4096, 4096, 1)
        model = nn.Sequential(nn.Linear(8, 8), attention, nn.ModuleList([bilinear]))
    assert find_blocks(model) == [attention, bilinear]


def test_shared_block_is_no_part_of_its_own() -> None:
    block = nn.Linear(4, 4)
    assert find_blocks(nn.ModuleDict({"a": nn.Sequential(block, nn.Linear(4, 4)), "b": nn.Sequential(block)})) == []


@pytest.mark.parametrize(
    ("strategy", "options", "found"),
    [
        ("ddp", {}, Parallelism("ddp", 4)),
        ("fsdp2", {}, Parallelism("fsdp2", 4, 4)),
        ("fsdp2", {"shard_size": 2}, Parallelism("fsdp2", 4, 2)),
        ("tp", {"tensor_plan": {"0": "rowwise"}}, Parallelism("tp", 4, 1, 4, {"0": "rowwise"})),
        ("tp", {"tensor_size": 2, "parallelize": print}, Parallelism("tp", 4, 2, 2, {}, print)),
        (ModelParallelStrategy(4, 1), {}, Parallelism("fsdp2", 4, 4)),
        (ModelParallelStrategy, {"parallelize": print}, Parallelism("tp", 4, 1, 4, {}, print)),
        (DDPStrategy, {}, Parallelism(DDPStrategy, 4)),
    ],
)  # fmt: skip
def test_options_become_sizes(strategy: Any, options: dict[str, Any], found: Parallelism) -> None:
    assert resolve_parallelism(strategy, 4, "cpu", **options) == found


@pytest.mark.parametrize(
    ("strategy", "options", "text"),
    [
        ("fdsp", {}, "strategy='fdsp' is unknown.\n  Did you mean 'fsdp'?"),
        ("ddp", {"shard_size": 2}, "strategy='ddp' takes no shard_size.\n  It goes with strategy='fsdp2'."),
        (DDPStrategy, {"shard_size": 2}, "strategy=DDPStrategy takes no shard_size.\n  It goes with strategy='fsdp2'."),
        (
            "ddp_find_unused_parameters_false",
            {"tensor_plan": {"0": "colwise"}},
            "strategy=DDPStrategy takes no tensor_plan.\n  It goes with strategy='tp'.",
        ),
        ("fsdp2", {"shard_size": 3}, "shard_size=3 does not divide 4 devices.\n  Give one of: 2, 4."),
        (
            "tp",
            {"tensor_plan": {"0": "columns"}},
            "tensor_plan={'0': 'columns'} is invalid.\n  Give \"colwise\", \"rowwise\" or a ParallelStyle of torch.",
        ),
        (3, {}, "strategy=int is invalid.\n  Give a name, a Lightning strategy, or a function that makes one."),
        (FSDPStrategy, {}, "strategy='fsdp' needs GPUs, and the devices are of type 'cpu'.\n  strategy='fsdp2' runs everywhere."),
        (ModelParallelStrategy(3, 1), {}, "ModelParallelStrategy(3, 1) needs 3 devices, and there are 4."),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(strategy: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_parallelism(strategy, 4, "cpu", **options)
    assert str(raised.value) == text


def test_strategies_for_gpus_are_made_where_they_can_be() -> None:
    assert isinstance(resolve_parallelism("fsdp", 2, "cuda").make(None), FSDPStrategy)  # type: ignore[arg-type]
    pytest.importorskip("deepspeed")
    assert type(resolve_parallelism("deepspeed", 2, "cuda").make(None)).__name__ == "DeepSpeedStrategy"  # type: ignore[arg-type]


def test_module_that_is_not_there_is_named_with_the_nearest() -> None:
    parallel = resolve_parallelism("tp", 2, "cpu", tensor_plan={"encoder.liner": "colwise"})
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"linear": nn.Linear(2, 2)})})
    with pytest.raises(ConfigError, match="there is no such module.\n  Did you mean 'encoder.linear'?"):
        parallel.split(model, None, {"tensor_parallel": None})  # type: ignore[arg-type]


def test_one_device_needs_no_strategy() -> None:
    assert not make_trainer(Regress.add_on(MultiGPUAddon), strategy="fsdp2")[MultiGPUAddon].is_elsewhere


def test_addon_that_keeps_weights_is_refused_by_a_split_model() -> None:
    trainer = make_trainer(Regress.add_on(MultiGPUAddon, EMAAddon), device=["cpu", "cpu"], strategy="fsdp2")
    with pytest.raises(ConfigError, match=r"EMAAddon keeps whole weights, and the model is sharded \(fsdp2 on 2 devices, 2 shards\)."):
        trainer.run(1, [(torch.ones(2, 8), torch.ones(2, 1))])


# -- what fits
def make_optimizer(kind: type[Any], **options: Any) -> tuple[nn.Module, Any]:
    net = nn.Linear(100, 10, dtype=torch.bfloat16)  # 1,010 parameters
    net.bias.requires_grad = False
    return net, kind(net.parameters(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("kind", "options", "n"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.AdamW, {"amsgrad": True}, 3),
        (torch.optim.RMSprop, {"centered": True}, 2),
    ],
)  # fmt: skip
def test_states_are_guessed_as_they_will_be(kind: type[Any], options: dict[str, Any], n: int) -> None:
    net, optimizer = make_optimizer(kind, **options)
    assert estimate(net, optimizer) == DeviceMemory(2020, 2000, 2000 * n)
    net(torch.ones(1, 100, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert 0 <= estimate(net, optimizer).optimizer - 2000 * n <= 4  # a counter


def test_simplest_that_fits_is_picked_and_evaluation_needs_weights_alone() -> None:
    net = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(10)])
    optimizer = torch.optim.Adam(net.parameters())  # weights of 400 kB
    picks = {size: plan_devices(net, optimizer, 4, size).pick for size in (2_600_000, 2_000_000, 800_000, 600_000)}
    assert [pick and pick.name for pick in picks.values()] == ["ddp", "fsdp2 ×2", "fsdp2 ×4", None]
    assert plan_devices(net, None, 4, 600_000).pick.memory == DeviceMemory(400_000, 0, 0)  # type: ignore[union-attr]
    assert device_memory(torch.device("cpu"), 2) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def test_plan_of_a_configuration_is_printed_for_devices_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seed.yaml").write_text(SEED)
    assert main(["plan", "-f", "seed.yaml", "--devices", "2", "--memory", "80"]) == 0
    assert capsys.readouterr().out == (
        "2 devices of 80 GB, 64 GB of it beside activations; on each, in kB:\n"
        "  strategy     weights  gradients  optimizer  exchange    total\n"
        "→ ddp            17.41      17.41      34.82     17.41    87.04\n"
        "  fsdp2 ×2        8.70       8.70      17.41      3.26    38.08\n"
    )
    assert main(["plan", "-f", "seed.yaml", "--devices", "2", "--memory", "0.00001"]) == 1
    assert main(["plan", "-f", "seed.yaml", "--memory", "many"]) == 2
    assert (
        capsys.readouterr().err
        == "nbtrain: --memory must be a positive number of GB; got many.\n  Give the memory of a device: --memory 80.\n"
    )
