"""Files of nnScaler with several optimizers by parameter, a checkpoint to convert, a trace and lines of progress, run as they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from samples import same_weights
from torch.optim import Adam, AdamW
from torch.utils.data import DataLoader, DistributedSampler

from nbtrain import ConfigError, ModelTrainer, TrainerArgs, load_run
from nbtrain.cli import main
from nbtrain.examples.mlp import MLP, SimpleDataset
from nbtrain.rng import seed_all

PARTS = """
def classes(name):
    if name.startswith(("layers.0.", "layers.1.")):
        return 0, int(name[7])
    return 1, 0


def converted(content):
    weights = {name.removeprefix("old."): value for name, value in content["weights"].items()}
    return {"model": weights, "optimizer": content["opt"], "train_status": {"epoch": 2, "finished_train_steps": 8}}


def by_index(name):
    return 0 if name.endswith("weight") else 2
"""
BASE: dict[str, Any] = {
    "model": {"type": "nbtrain.examples.mlp.MLP", "args": {"dim": 8, "nlayers": 3}},
    "optimizer": {"type": "torch.optim.Adam", "args": {"lr": 0.01}},
    "dataset": {
        "type": "nbtrain.examples.mlp.SimpleDataset",
        "train_args": {"dim": 8, "size": 64},
    },
    "micro_batch_size": 16, "max_epochs": 2, "enable_progress_bar": False, "seed": 0, "checkpoint": {"no_save": True},
}  # fmt: skip
TWO = [
    {"type": "torch.optim.Adam", "options": {"lr": 0.02}, "param_groups": [{"options": {"lr": 0.04}}, {"options": {"lr": "6e-2"}}]},
    {"type": "torch.optim.AdamW", "options": {"lr": 0.04}},
]
HYBRID = {"type": "nnscaler.HybridOptimizer", "param_clss_fn": "parts.classes", "args": {"config": {"optimizers": TWO}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def read(**fields: Any) -> TrainerArgs:
    return TrainerArgs.from_dict({**BASE, **fields}, trust=True)


def problem(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**fields).check()
    return str(caught.value)


def model() -> MLP:
    seed_all(0)
    return MLP(8, 3)


def loader() -> DataLoader[Any]:
    data = SimpleDataset(8, 64)
    return DataLoader(data, 16, sampler=DistributedSampler(data, 1, 0))


def scheduler(*factors: float) -> dict[str, Any]:
    parts = [{"type": "torch.optim.lr_scheduler.ConstantLR", "options": {"factor": factor, "total_iters": 5}} for factor in factors]
    return {"type": "nnscaler.HybridLRScheduler", "args": {"config": {"schedulers": parts}}, "interval": "step"}


# -- param_clss_fn
def test_parameters_are_driven_by_the_optimizer_and_the_group_of_their_class() -> None:
    job = read(optimizer=HYBRID, lr_scheduler=scheduler(0.5, 0.25)).build()
    own = model()
    layers = [list(layer.parameters()) for layer in own.layers]
    both = [Adam([{"params": layers[0], "lr": 0.04}, {"params": layers[1], "lr": 0.06}], lr=0.02), AdamW(layers[2], lr=0.04)]
    constant = torch.optim.lr_scheduler.ConstantLR
    scales = [lambda optimizer, plan, f=factor: constant(optimizer, f, 5) for factor in (0.5, 0.25)]
    trainer = ModelTrainer(own, job.trainer.device, log_bar=False, optimizer=both, scheduler=scales, seed=0)
    job.run()
    trainer.run(2, loader())
    assert same_weights(job.trainer.model, own)
    assert [[group["lr"] for group in one.param_groups] for one in job.trainer.optimizers.values()] == [[0.04, 0.06], [0.04]]
    assert job.trainer.history.epochs[0]["lr"] == pytest.approx(0.02)


def test_one_schedule_for_all_optimizers_scales_each() -> None:
    job = read(optimizer=HYBRID, lr_scheduler=scheduler(0.5), max_epochs=1).build()
    job.run()
    assert [[group["lr"] for group in one.param_groups] for one in job.trainer.optimizers.values()] == [[0.02, 0.03], [0.02]]


def test_a_file_is_read_as_it_stands_and_its_overrides_too(folder: Path) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump({**BASE, "optimizer": HYBRID, "checkpoint": {}}))
    assert main(["fit", "-f", "run.yaml", "--optimizer.args.config.optimizers.1.type", "torch.optim.SGD", "--trust"]) == 0
    (run,) = (folder / "checkpoints").iterdir()
    each = TrainerArgs.from_yaml(run / "config.yaml", trust=True).optimizer.each
    assert [part.type for part in each] == ["torch.optim.Adam", "torch.optim.SGD"] and len(each[0].groups) == 2


def test_beside_one_optimizer_a_class_only_orders_buckets_and_is_named_as_ignored() -> None:
    args = read(optimizer={**BASE["optimizer"], "param_clss_fn": "parts.classes"})
    args.check()
    assert args.plan().splitlines()[-1] == "ignored, because no code is generated here: optimizer.param_clss_fn"


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"optimizer": {**HYBRID, "param_clss_fn": None}}, "optimizer.param_clss_fn is missing, which HybridOptimizer needs."),
        ({"optimizer": {**HYBRID, "param_clss_fn": "parts.clases"}}, "optimizer.param_clss_fn: 'parts.clases' can't be imported"),
        ({"optimizer": {**HYBRID, "args": {}}}, "optimizer.args.config.optimizers: expected a list of mappings, got None."),
        (
            {"optimizer": {**HYBRID, "args": {"config": {"optimizers": [{"type": "torch.optim.Adam", "args": {}}]}}}},
            "There is no field optimizer.args.config.optimizers.0.args.",
        ),
        ({"optimizer": HYBRID, "lr_scheduler": scheduler(1, 1, 1)}, "lr_scheduler.each has 3 schedules, and there are 2 optimizers."),
        ({"optimizer": {"each": [{"type": "torch.optim.Adam", "groups": [{"lr": 1.0}]}]}}, "Groups of one of several optimizers need"),
        (
            {"optimizer": {"param_clss_fn": "parts.classes", "each": [{"type": "torch.optim.Adam", "dims": 2}]}},
            "optimizer.param_clss_fn is given beside dims of an optimizer.",
        ),
    ],
)
def test_what_is_wrong_with_classes_is_said_before_anything_is_made(fields: dict[str, Any], what: str) -> None:
    assert what in problem(**fields)


@pytest.mark.parametrize(
    ("function", "groups", "what"),
    [
        ("parts.by_index", [], "optimizer.param_clss_fn returned 2 for 'layers.0.bias', and there is no such optimizer or group."),
        ("parts.classes", [{}], "optimizer.param_clss_fn returned (0, 1) for 'layers.1.weight'"),
        ("parts.classes", [{}, {}, {}], "optimizer.0.groups.2 has no parameter: param_clss_fn never returned it."),
    ],
)
def test_a_class_without_optimizer_and_a_group_without_parameters_are_errors(function: str, groups: list[Any], what: str) -> None:
    each = [{"type": "torch.optim.Adam", "groups": groups}, {"type": "torch.optim.SGD"}]
    with pytest.raises(ConfigError) as caught:
        read(optimizer={"each": each, "param_clss_fn": function}).build()
    assert str(caught.value).startswith(what)


# -- resume_from: {checkpoint, convert_fn}
def old_file(path: Path, n_epochs: int = 2) -> tuple[MLP, Adam]:
    """What another system has written after two epochs."""
    own = model()
    optimizer = Adam(own.parameters(), lr=0.01)
    plain_epochs(own, optimizer, range(n_epochs))
    torch.save({"weights": {f"old.{name}": value for name, value in own.state_dict().items()}, "opt": optimizer.state_dict()}, path)
    return own, optimizer


def plain_epochs(own: MLP, optimizer: Adam, epochs: range) -> None:
    batches = loader()
    for epoch in epochs:
        batches.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in batches:
            optimizer.zero_grad()
            own(batch)["loss"].backward()
            optimizer.step()


def saving(**resume: Any) -> dict[str, Any]:
    return {"save_dir": "runs", "resume_from": resume}


def test_a_converted_checkpoint_goes_on_up_to_the_epochs_of_the_file(folder: Path) -> None:
    own, optimizer = old_file(folder / "old.pt")
    job = read(max_epochs=3, checkpoint=saving(checkpoint="old.pt", convert_fn="parts.converted")).build()
    job.run()
    plain_epochs(own, optimizer, range(2, 3))
    assert (job.trainer.counts.epoch, job.trainer.counts.step) == (3, 12)
    assert same_weights(job.trainer.model, own)
    (run,) = (folder / "runs").iterdir()
    assert [row["epoch"] for row in load_run(run).epochs] == [3]
    newest = str(run / "checkpoints" / "last.ckpt")  # nbtrain's own, which is not converted
    again = read(max_epochs=4, checkpoint=saving(checkpoint=newest, convert_fn="parts.converted")).build()
    again.run()
    assert again.trainer.counts.epoch == 4


def test_a_finished_one_is_not_trained_again_and_is_evaluated_by_its_weights(folder: Path) -> None:
    own, _ = old_file(folder / "old.pt")
    data = {**BASE["dataset"], "val_args": {"dim": 8, "size": 16}}
    job = read(dataset=data, checkpoint=saving(checkpoint="old.pt", convert_fn="parts.converted")).build()
    assert job.load() == "old.pt" and same_weights(job.trainer.model, own) and not (folder / "runs").exists()
    job.run()
    assert same_weights(job.trainer.model, own) and job.trainer.counts.epoch == 2


def test_a_merged_checkpoint_needs_no_function(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, optimizer = old_file(folder / "old.pt")
    status = {"epoch": 2, "finished_train_steps": 8}
    torch.save({"model": own.state_dict(), "optimizer": optimizer.state_dict(), "train_status": status}, "merged.ckpt")
    job = read(max_epochs=3, checkpoint=saving(checkpoint="merged.ckpt")).build()
    job.run()
    assert "nnScaler: merged.ckpt → runs/run-001" in capsys.readouterr().out
    plain_epochs(own, optimizer, range(2, 3))
    assert same_weights(job.trainer.model, own)


def test_a_function_without_a_file_is_named() -> None:
    what = "checkpoint.convert_fn is given, and there is nothing to convert."
    assert what in problem(checkpoint={"convert_fn": "parts.converted"})
    args = read(checkpoint=saving(checkpoint="last", convert_fn="parts.converted"))
    args.check()
    assert args.plan().splitlines()[-1] == "checkpoint.convert_fn converts a file, and resume_from does not name one: it is not called"


def test_what_a_function_raises_is_its_own_error(folder: Path) -> None:
    torch.save({"other": 1}, "other.pt")
    with pytest.raises(KeyError, match="weights"):
        read(checkpoint=saving(checkpoint="other.pt", convert_fn="parts.converted")).build().run()


# -- debug.profile and lines of progress
def profile(**fields: Any) -> dict[str, Any]:
    return {"debug": {"profile": {"schedule": {"warmup": 1, "active": 2}, **fields}}}


def chrome(path: str = "traces/rank{rank}_step{step_num}.json", **more: Any) -> dict[str, Any]:
    return {"name": "default", "args": {"export_chrome_trace": path, **more}}


def test_updates_are_traced_in_the_cycles_of_the_schedule(folder: Path) -> None:
    given = profile(activities=["CPU", "CUDA"], schedule={"skip_first": 1, "warmup": 1, "active": 2}, trace_handler=chrome())
    read(**given, grad_accumulation_steps=2, micro_batch_size=8).build().run()  # 8 updates
    assert sorted(path.name for path in (folder / "traces").iterdir()) == ["rank0_step4.json", "rank0_step7.json", "rank0_step8.json"]
    names = {event.get("name") for event in json.loads((folder / "traces" / "rank0_step4.json").read_text())["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3", "aten::addmm"} <= names and "ProfilerStep#1" not in names


def test_traces_go_to_tensorboard_s_folder_and_stacks_to_files(folder: Path) -> None:
    handler = {"name": "tensorboard", "args": {"dir_name": "board", "worker_name": "worker_{rank}", "use_gzip": True}}
    read(**profile(schedule={"warmup": 1, "active": 2, "repeat": 1}, trace_handler=handler), max_epochs=1).build().run()
    (trace,) = (folder / "board").iterdir()
    assert trace.name.startswith("worker_0.") and trace.name.endswith(".pt.trace.json.gz")
    stacks = chrome(export_stacks="stacks/{rank}_{step_num}", export_stacks_metric="self_cpu_time_total")
    read(**profile(with_stack=True, schedule={"warmup": 1, "active": 1, "repeat": 1}, trace_handler=stacks), max_epochs=1).build().run()
    assert (folder / "stacks" / "0_2").exists()


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({}, "debug.profile.trace_handler.args: expected export_chrome_trace or export_stacks, a path with {rank} and {step_num}."),
        ({"trace_handler": chrome("trace.json")}, "expected {rank} and {step_num} in it, which keep files apart, got 'trace.json'."),
        ({"trace_handler": chrome(), "schedule": {}}, "debug.profile.schedule.active: expected 1 or more, got 0."),
        ({"trace_handler": chrome(), "schedule": {"wait": -1, "active": 1}}, "debug.profile.schedule.wait: expected 0 or more, got -1."),
        ({"trace_handler": chrome(), "activities": ["GPU"]}, "debug.profile.activities: expected CPU, CUDA or XPU, got 'GPU'."),
        ({"trace_handler": chrome(export_stack="a")}, "'default' has no such argument. Did you mean 'export_stacks'?"),
        ({"trace_handler": {"name": "tensorboard"}}, "debug.profile.trace_handler.args: expected dir_name, a folder."),
        ({"trace_handler": {"name": "json"}}, "debug.profile.trace_handler.name: expected default or tensorboard, got 'json'."),
    ],
)
def test_what_is_wrong_with_a_profile_is_said_before_the_run(fields: dict[str, Any], what: str) -> None:
    assert what in problem(**profile(**fields))


def test_without_a_bar_a_line_is_printed_every_n_updates(capsys: pytest.CaptureFixture[str]) -> None:
    job = read(log_progress_every_n_train_steps=3, grad_accumulation_steps=2, micro_batch_size=8).build()
    job.run()
    lines = [line for line in capsys.readouterr().out.splitlines() if " · step " in line]
    assert [line.split(" · train_loss")[0] for line in lines] == ["epoch 1 · batch 6/8 · step 3", "epoch 2 · batch 4/8 · step 6"]
    third = [row["train_loss"] for row in job.trainer.history.steps["train"] if row["step"] == 3]
    assert float(lines[0].rpartition(" ")[2]) == pytest.approx(sum(third) / 2, rel=1e-3)
    read(log_progress_every_n_train_steps=3, enable_progress_bar=True).build().run()
    assert " · step " not in capsys.readouterr().out
