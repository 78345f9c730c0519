"""Lightning's strategies by `lightning={"strategy": ...}` under torchrun, and the ranks of other launchers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Regress, make_trainer
from test_worlds import TESTS, WAIT_S, ended, free_port, start

from nbtrain import ConfigError, MultiGPUAddon, StateManagerAddon
from nbtrain.distributed.world import find_world

SCRIPT = """\
import sys, torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from samples import Regress, make_loader, make_trainer, make_valid
from torch import nn
from nbtrain import MultiGPUAddon

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
strategy = {strategy}
options = {{"lightning": {{"strategy": strategy}}}} if strategy is not None else {{}}
trainer = make_trainer(Regress.add_on(MultiGPUAddon), model=model, seed=1, **options)
trainer.run(2, make_loader(64, batch_size=8), make_valid())
if trainer.world.is_first:
    end = {{"weights": trainer.model.state_dict(), "size": trainer.world.size, "best": trainer.best_weights}}
    torch.save(end | {{"updates": trainer.counts.step, "val": trainer.history.last["val_loss"]}}, sys.argv[1])
"""


def run_script(folder: Path, strategy: str, command: list[Any], **variables: str) -> tuple[dict[str, Any], str]:
    """What rank 0 of a script has saved, and its output."""
    script, end = folder / "script.py", folder / "end.pt"
    script.write_text(SCRIPT.format(strategy=strategy))
    process = start([*command, script, end], **variables)
    with ended(process):
        output, _ = process.communicate(timeout=WAIT_S)
    return (torch.load(end) if end.exists() else {}), output


def torchrun() -> list[Any]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of the addon's own DDP."""
    end, output = run_script(tmp_path_factory.mktemp("usual"), "None", torchrun())
    assert end, output
    return end


LONG = pytest.mark.long
STRATEGIES = [
    '"ddp_find_unused_parameters_false"',
    *(pytest.param(s, marks=LONG) for s in ("DDPStrategy(bucket_cap_mb=1)", "ModelParallelStrategy()")),
]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lightnings_strategies_run_under_torchrun(strategy: str, usual: dict[str, Any], tmp_path: Path) -> None:
    if strategy == "ModelParallelStrategy()":
        strategy = "ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)"
    end, output = run_script(tmp_path, strategy, torchrun())
    assert end, output
    assert (end["size"], end["updates"]) == (2, 8) and end["val"] == pytest.approx(usual["val"], rel=1e-4)
    for name, value in usual["weights"].items():
        assert torch.allclose(value, end["weights"][name], atol=1e-5), name
        assert torch.allclose(usual["best"][name], end["best"][name], atol=1e-5), name


@pytest.mark.long
@pytest.mark.parametrize("strategy", ['"deepspeed_stage_2"', pytest.param("FSDPStrategy()", marks=LONG)])
def test_strategies_for_gpus_are_refused_by_name_on_a_cpu(strategy: str, tmp_path: Path) -> None:
    end, output = run_script(tmp_path, strategy, torchrun())
    assert not end and ("needs GPUs" in output or "needs the package deepspeed" in output)


@pytest.mark.long
def test_ranks_of_a_launcher_that_sets_the_same_variables_train_together(usual: dict[str, Any], tmp_path: Path) -> None:
    script, end = tmp_path / "script.py", tmp_path / "end.pt"
    script.write_text(SCRIPT.format(strategy="None"))
    names = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start([sys.executable, script, end], RANK=str(i), LOCAL_RANK=str(i), **names) for i in range(2)]
    with ended(*ranks):
        outputs = [process.communicate(timeout=WAIT_S)[0] for process in ranks]
    assert end.exists(), outputs
    assert torch.load(end)["size"] == 2
    assert all(torch.allclose(value, torch.load(end)["weights"][name], atol=1e-5) for name, value in usual["weights"].items())


def test_rank_without_the_number_of_its_neighbours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12355"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="This process is rank 0 of 2, and LOCAL_WORLD_SIZE is not set"):
        find_world()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_world().size == 1


def test_a_notebook_in_a_job_of_several_tasks_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "lab", "JPY_PARENT_PID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert find_world().size == 1


def test_strategy_that_starts_processes_is_unknown() -> None:
    for name in ("ddp_spawn", "ddp_fork", "ddp_notebook"):
        with pytest.raises(ConfigError, match="is unknown"):
            make_trainer(Regress.add_on(MultiGPUAddon), lightning={"strategy": name})


def test_strategy_is_that_of_the_addon_in_a_notebook_too() -> None:
    trainer = make_trainer(Regress.add_on(MultiGPUAddon, StateManagerAddon), lightning={"strategy": "fsdp2"}, save_path="never")
    assert trainer[MultiGPUAddon].strategy == "fsdp2" and "strategy" not in trainer.lightning


@pytest.mark.long
def test_accelerate_launch_starts_ranks_that_train_together(usual: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2]
    command += ["--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port()]
    path = os.pathsep.join([*map(str, (TESTS.parent, TESTS)), *sys.path])
    end, output = run_script(tmp_path, "None", command, PYTHONPATH=path)
    assert end, output
    assert end["size"] == 2 and all(torch.allclose(value, end["weights"][name], atol=1e-5) for name, value in usual["weights"].items())
