"""Runs in two processes: the numbers of one process, everything back in the caller's objects, faults with their rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from samples import DEVICE, Regress, make_loader, make_model, make_trainer, make_valid, same_weights, without_times
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import (
    AddOnError,
    CheckpointError,
    ConfigError,
    MultiGPUAddon,
    RunPaused,
    RunStopped,
    StateManagerAddon,
    TensorLoader,
    TrainerArgs,
    WorkerError,
)
from nbtrain.addons.multi_gpu import _pool
from nbtrain.base.launcher import Launcher
from nbtrain.cli import main
from nbtrain.history.run_folder import load_run

TWO = ["cuda:0", "cuda:1"] if DEVICE == "cuda" and torch.cuda.device_count() > 1 else ["cpu", "cpu"]


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    _pool().close()


class Measured(Regress):
    """Also counts its steps, those of the validation too, and measures over everything that a pass gave."""

    n_steps = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.n_steps += 1
        return super().train_step(batch)

    def metric_on_epoch_end(self) -> dict[str, Any]:
        log = self.log_train if self.mode == "train" else self.log_test
        outputs = torch.cat(log["output"])
        return {"n": len(outputs), "spread": outputs.double().std(), "batches": len(log["loss"])}


Several = Measured.add_on(MultiGPUAddon)


def make_net(seed: int = 0) -> nn.Module:
    """No dropout: its numbers depend on the rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def make_several(kind: Any = Several, **options: Any) -> Any:
    return make_trainer(kind, **({"model": make_net(), "device": TWO} | options))


def difference(a: nn.Module, b: nn.Module) -> float:
    return max(float((p.cpu() - q.cpu()).abs().max()) for p, q in zip(a.state_dict().values(), b.state_dict().values()))


def batches_of(size: int, n: int = 70) -> dict[str, Any]:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    data = x, x.sum(1, keepdim=True)
    return {
        "loader": DataLoader(TensorDataset(*data), size, shuffle=True),
        "own generator": DataLoader(TensorDataset(*data), size, shuffle=True, generator=torch.Generator().manual_seed(2)),
        "tensors": TensorLoader(*data, batch_size=size, shuffle=True),
        "list": list(zip(data[0].split(size), data[1].split(size))),
    }


@pytest.mark.parametrize("kind", ["loader", "own generator", "tensors", "list"])
def test_two_ranks_do_what_one_process_does_with_twice_the_batch(kind: str) -> None:
    """70 samples by 8 are 9 batches: in the last round one rank has 6 samples and the other none."""
    one, two = make_several(device="cpu", gradient_clip=0.5), make_several(gradient_clip=0.5)
    for trainer, size in (one, 16), (two, 8):
        torch.manual_seed(5)
        trainer.run(3, batches_of(size)[kind], DataLoader(batches_of(16)["loader"].dataset, 13))
    assert difference(one.model, two.model) < 1e-5
    for a, b in zip(one.history.epochs, two.history.epochs):
        assert {name: a[name] for name in a if name.startswith("val") or name == "train_loss"} == pytest.approx(
            {name: b[name] for name in a if name.startswith("val") or name == "train_loss"}, rel=1e-5
        )
    assert two.history.last["train_n"] == two.history.last["val_n"] == 70 and two.history.last["val_batches"] == 6
    assert one.counts.step == two.counts.step == 15


def test_validation_is_exact() -> None:
    """13 samples in batches of 2 have no honest half."""
    trainer = make_several()
    data = batches_of(2, 13)["loader"].dataset
    found = trainer.evaluate(DataLoader(data, 2))
    with torch.no_grad():
        x, y = (part.to(trainer.device) for part in data.tensors)
        errors = (trainer.model(x) - y).double()
    assert found["loss"] == pytest.approx(float(errors.square().mean()), rel=1e-6) and found["n"] == 13
    assert found["mae"] == pytest.approx(float(errors.abs().mean()), rel=1e-6)


def test_everything_comes_back_into_the_same_objects(tmp_path: Path) -> None:
    model = make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = ExponentialLR(optimizer, 0.5)
    early = EarlyStopping("val_loss", patience=1, min_delta=1e9)
    trainer = make_several(
        model=model, optimizer=optimizer, scheduler=scheduler, lightning={"callbacks": [early]}, save_path=tmp_path, seed=3
    )
    first = next(model.parameters())
    before, place = first.detach().clone(), first.data_ptr()
    loader = make_loader(own_generator=True)
    result = trainer.run(5, loader, make_valid())
    assert (result.status, result.reason) == ("stopped", "EarlyStopping") and early.wait_count == 1
    assert trainer.model is model and next(model.parameters()) is first and not torch.equal(first.cpu(), before.cpu())
    assert first.data_ptr() == place or first.is_cuda  # its memory on a device is not that of before
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert optimizer.state[first]["step"] == 6 and scheduler.last_epoch == 2 and optimizer.param_groups[0]["lr"] == 1e-2 / 4
    assert (trainer.counts.epoch, trainer.counts.step, trainer.counts.processed, trainer.n_steps) == (2, 6, 10, 10)
    assert trainer.train_metrics["n"] == 70 and len(trainer.log_test["loss"]) == 3 and set(trainer.best_weights) == set(model.state_dict())
    assert [row.metrics for row in load_run(tmp_path).epochs] == [row.metrics for row in trainer.history.epochs]
    assert len(trainer.history.steps["train"]) == 6 and trainer.history.best.path == trainer.run_dir / "best.safetensors"


def test_another_kernel_trains_on_from_the_state_of_the_end(tmp_path: Path) -> None:
    """A `save_path` is enough: two processes save the end of a run as one does."""
    whole, first, second = (make_several(save_path=folder, seed=3) for folder in (None, tmp_path, tmp_path))
    whole.run(4, make_loader(), make_valid())
    first.run(2, make_loader(), make_valid())
    second.run(4, make_loader(), make_valid(), resume="auto")
    assert second.run_dir == first.run_dir and len(second.history.epochs) == 4
    assert same_weights(second.model, whole.model.state_dict())
    assert without_times(second.history.epochs) == without_times(whole.history.epochs)


def test_a_rate_that_comes_after_the_last_batch_is_that_of_the_next_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks have read their last command by then: it is executed here, when the run is over."""

    class Asks:
        def update(self, event: Any) -> None:
            if event.kind == "epoch" and event.progress.epoch == 2:
                trainer.set(lr=0.5)
                trainer.validate_now()

    trainer = make_several()
    trainer.recorder.add(Asks())
    trainer.run(2, make_loader(), make_valid())
    assert capsys.readouterr().out.splitlines() == [
        "The run has no batch left: lr=0.5 holds for the next one.",
        "The run ended before it could be validated. evaluate(loader) validates without a run.",
    ]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    trainer.run(1, make_loader())
    assert [float(row["lr"]) for row in trainer.history.epochs] == [0.01, 0.01, 0.5]


def test_two_runs_are_one_longer_run() -> None:
    """With dropout: the random numbers go on too."""
    trainers = [make_several(model=None) for _ in range(2)]
    for trainer, parts in zip(trainers, ([1, 2], [3])):
        torch.manual_seed(4)
        loader = make_loader()
        for n_epoch in parts:
            trainer.run(n_epoch, loader, make_valid())
    assert same_weights(trainers[0].model, trainers[1].model)
    assert without_times(trainers[0].history.epochs) == without_times(trainers[1].history.epochs)


def test_resumed_at_the_end_of_an_epoch_by_any_number_of_ranks(tmp_path: Path) -> None:
    kind = Measured.add_on(MultiGPUAddon, StateManagerAddon)
    whole = make_several(kind, save_path=tmp_path / "whole", seed=1)
    whole.run(3, batches_of(8)["loader"])
    make_several(kind, save_path=tmp_path / "parts", seed=1).run(1, batches_of(8)["loader"])
    assert len(list((tmp_path / "parts").glob("run-*/checkpoints/epoch=*"))) == 1
    one = make_several(kind, device="cpu", save_path=tmp_path / "parts")
    one.run(2, batches_of(16)["loader"], resume="auto")
    two = make_several(kind, save_path=tmp_path / "parts")
    two.run(3, batches_of(8)["loader"], resume="auto")
    assert two.counts.epoch == 3 and difference(whole.model, two.model) < 1e-5


def test_state_of_two_ranks_in_mid_epoch_is_resumed_exactly_by_two(tmp_path: Path) -> None:
    """With dropout: each rank has random numbers of its own."""
    kind, options = Measured.add_on(MultiGPUAddon, StateManagerAddon), {"model": make_model(), "seed": 1, "every_n_steps": 2}
    whole = make_several(kind, save_path=tmp_path / "whole", **options)
    whole.run(2, batches_of(8)["loader"])
    states = tmp_path / "whole" / "run-001" / "checkpoints"
    resumed = make_several(kind, save_path=tmp_path / "resumed", **options | {"model": make_model(7)})
    resumed.run(2, batches_of(8)["loader"], resume=states / "epoch=1-step=8.ckpt")
    assert same_weights(whole.model, resumed.model)
    assert without_times(whole.history.epochs) == without_times(resumed.history.epochs)
    with pytest.raises(CheckpointError, match="epoch=1-step=8.ckpt was saved in mid-epoch with another number of processes: 2, and 1 now"):
        one = make_several(kind, device="cpu", save_path=tmp_path / "one", model=make_model())
        one.run(2, batches_of(8)["loader"], resume=states / "epoch=1-step=8.ckpt")
    one = make_several(kind, device="cpu", save_path=tmp_path / "one", model=make_model(), strict=False)
    one.run(2, batches_of(8)["loader"], resume=states / "epoch=1-step=8.ckpt")
    n_batches = len(batches_of(8)["loader"])
    assert one.counts.epoch == 2 and one.counts.step == 8 + n_batches
    (line,) = [line for line in (one.run_dir / "events.jsonl").read_text().splitlines() if "was saved with" in line]
    what = "another number of processes: 2, and 1 now, so that an update takes 1 batch instead of 2, and epoch 2 begins again."
    assert what in json.loads(line)["data"]["text"]


class Faulty(Measured):
    """Does `fault` to itself in its third training step, in the rank that is given."""

    fault, in_rank = "", 1

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.n_steps == 2 and self.module.global_rank == self.in_rank:
            if self.fault == "raise":
                raise LookupError("no third step")
            if self.fault == "interrupt":
                os.kill(os.getppid(), signal.SIGINT)
            elif self.fault == "SIGTERM to all":
                for pid in (os.getpid(), os.getppid()):
                    os.kill(pid, signal.SIGTERM)
            elif self.fault:
                os.kill(os.getpid(), getattr(signal, self.fault))
        return super().train_step(batch)


def make_faulty(fault: str) -> Any:
    trainer = make_several(Faulty.add_on(MultiGPUAddon))
    trainer.fault = fault
    return trainer


def test_raising_step_has_its_rank_place_and_frames_and_loses_nothing() -> None:
    trainer = make_faulty("raise")
    began = time.monotonic()
    with pytest.raises(LookupError, match="no third step") as raised:
        trainer.run(1, batches_of(8)["loader"])
    assert 'raise LookupError("no third step")' in str(raised.value.__cause__)
    notes = "\n".join(raised.value.__notes__)
    assert "train_step, epoch 1, batch 3: the batch is list of 2" in notes and "nbtrain: raised in rank 1" in notes
    assert time.monotonic() - began < 200 and trainer.result.status == "failed"
    assert trainer.counts.step == 2 and difference(trainer.model, make_net()) > 0  # two steps were done, and are not lost


@pytest.mark.long
def test_killed_rank_is_named_and_the_trainer_is_what_it_was() -> None:
    trainer = make_faulty("SIGKILL")
    with pytest.raises(WorkerError, match="Rank 1 was killed by SIGKILL [(]out of memory[?][)]."):
        trainer.run(1, batches_of(8)["loader"])
    assert trainer.counts.processed in (0, 2)
    trainer.fault = ""
    trainer.run(1, batches_of(8)["loader"])
    assert trainer.history.last["epoch"] == 1


def test_sigterm_to_a_rank_stops_all_after_the_same_batch_and_loses_nothing() -> None:
    trainer = make_faulty("SIGTERM")
    with pytest.raises(WorkerError, match="Rank 1 received SIGTERM, and all ranks have stopped after the same batch."):
        trainer.run(2000, batches_of(8)["loader"])
    assert trainer.counts.step > 2 and trainer.optimizer.state[next(trainer.model.parameters())]["step"] == trainer.counts.step


def test_sigterm_to_all_processes_ends_the_run_as_in_one_process() -> None:
    trainer = make_faulty("SIGTERM to all")
    with pytest.raises(SystemExit) as raised:
        trainer.run(2000, batches_of(8)["loader"])
    assert raised.value.code == 143 and trainer.result.status == "interrupted" and trainer.result.reason.startswith("SIGTERM at ")
    assert trainer.optimizer.state[next(trainer.model.parameters())]["step"] == trainer.counts.step > 2


def test_interrupt_stops_all_after_the_same_batch_and_loses_nothing() -> None:
    trainer = make_faulty("interrupt")
    with pytest.raises(RunStopped, match=r"^stopped at epoch \d+, batch \d+ · trainer.result has what it reached$"):
        trainer.run(2000, batches_of(8)["loader"])
    assert trainer.result.status == "interrupted"
    assert trainer.optimizer.state[next(trainer.model.parameters())]["step"] == trainer.counts.step > 2
    trainer.fault = ""
    assert trainer.run(1, batches_of(8)["loader"]).status == "completed"


class Slow(Measured):
    def train_step(self, batch: Any) -> dict[str, Any]:
        time.sleep(0.02)
        return super().train_step(batch)


def test_all_ranks_pause_after_the_same_batch_and_go_on_as_if_they_had_not() -> None:
    never = make_several(Slow.add_on(MultiGPUAddon))
    never.run(6, batches_of(8)["loader"])
    paused = make_several(Slow.add_on(MultiGPUAddon))
    handle = paused.run(6, batches_of(8)["loader"], background=True)
    while paused.counts.processed < 2:
        time.sleep(0.01)
    for _ in range(2):
        paused.pause()
        step = paused.counts.processed
        with pytest.raises(RunPaused, match="paused at epoch "):
            handle.wait()
        time.sleep(0.3)
        assert handle.status == "paused" and paused.counts.processed == step
        paused.resume(background=True)
        time.sleep(0.1)
    assert handle.wait().status == "completed"
    assert difference(never.model, paused.model) == 0 and never.history.epochs[-1]["train_loss"] == paused.history.epochs[-1]["train_loss"]


def test_live_edits_and_the_end_reach_all_ranks(tmp_path: Path) -> None:
    trainer = make_several(Slow.add_on(MultiGPUAddon, StateManagerAddon), save_path=tmp_path)
    handle = trainer.run(2000, batches_of(8)["loader"], make_valid(), background=True)
    while trainer.counts.processed < 2:
        time.sleep(0.01)
    with pytest.raises(ConfigError, match="The run is in other processes"):
        trainer.predict(torch.ones(1, 8))
    trainer.pause()
    trainer.set(lr=0.002)
    trainer.validate_now()
    trainer.save_state()
    trainer.resume(background=True)
    while len(trainer.history.marks) < 3:
        time.sleep(0.01)
    assert trainer.stop().status == handle.wait().status == "stopped"
    marks = [text.partition(":")[0] for _, text in trainer.history.marks]
    assert marks[0].endswith("→ 0.002") and sorted(marks[1:]) == ["the state was saved", "validated"]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.002
    names = [path.name for path in (tmp_path / "run-001" / "checkpoints").glob("epoch=*")]
    assert len(names) >= 2  # by hand, and where it was left
    again = make_several(Slow.add_on(MultiGPUAddon, StateManagerAddon), save_path=tmp_path)
    assert again.load_state().name in names and again.counts.step == trainer.counts.step


@pytest.mark.parametrize("how", ["init_method", "MASTER_PORT"])
def test_given_address_is_where_the_ranks_meet(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = {"init_method": f"tcp://localhost:{port}"} if how == "init_method" else {}
    if how == "MASTER_PORT":
        monkeypatch.setenv("MASTER_PORT", str(port))
    trainer = make_several(**options)
    for _ in range(5):  # in processes that stay, and that must not meet the ranks of an earlier run
        assert trainer.run(1, batches_of(8)["loader"]).status == "completed"


def test_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://localhost:{server.getsockname()[1]}"
        with pytest.raises(WorkerError, match=f"The address {address} is in use already.\n  Give no address, and no MASTER_PORT"):
            make_several(init_method=address).run(1, batches_of(8)["loader"])


def test_second_launcher_is_refused() -> None:
    class Elsewhere(Launcher):
        """Another one."""

    with pytest.raises(AddOnError, match="^MultiGPUAddon and Elsewhere both decide where a run executes.\n  Leave one of them out.$"):
        Several.add_on(Elsewhere)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "dpp"}, "strategy='dpp' is unknown.\n  Did you mean 'ddp'?"),
        (
            {"device": ["cpu", "meta"]},
            'device=\'meta\' can\'t train here.\n  Give "auto", "cpu", "cuda", "cuda:1", "mps", "xpu" or a torch.device.',
        ),
        ({"device": []}, "device=[] names no device.\n  Give \"auto\", or a list of devices."),
        (
            {"num_nodes": 2},
            "num_nodes=2, but the number of machines is 1.\n  Start the script on each machine, with torchrun --nnodes or srun.",
        ),
    ],
)  # fmt: skip
def test_what_can_not_work_is_refused_when_the_trainer_is_made(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_several(**options)
    assert str(raised.value) == text


def test_no_warning_and_no_variable_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    environment = dict(os.environ)
    with warnings.catch_warnings(record=True) as caught:
        make_several().run(1, batches_of(8)["loader"], make_valid())
    assert caught == [] and capfd.readouterr() == ("", "") and dict(os.environ) == environment


@pytest.mark.parametrize(
    ("compute", "policy", "strategy"),
    [
        ({}, "autodist", "ddp"),
        ({"use_zero": True}, "dp", "fsdp2"),
        ({"plan_ngpus": 2}, "autodist", "auto"),
        ({"plan_ngpus": 2}, "tp", "tp"),
    ],
)
def test_two_devices_from_a_configuration_are_one_with_twice_the_batch(
    compute: dict[str, Any], policy: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbtrain.jobs.validate.n_cores", lambda: 2)
    common = {"max_epochs": 2, "seed": 0, "enable_progress_bar": False, "global_batch_size": 8, "checkpoint": {"no_save": True}}
    parts = {
        "model": {"type": "nbtrain.examples.mlp.MLP", "args": {"dim": 8, "nlayers": 2}},
        "optimizer": {"type": "torch.optim.Adam", "args": {"lr": 0.01}},
        "dataset": {"type": "nbtrain.examples.mlp.SimpleDataset", "train_args": {"dim": 8, "size": 32}},
        "trainer": {"type": "nbtrain.ModelTrainer", "args": {"device": "cpu"}},
    }
    one = TrainerArgs.from_dict(common | parts | {"micro_batch_size": 4}).build()
    if policy == "tp":  # its layers' outputs are added to their inputs, so that all of each is needed
        whole = {"__type": "torch.distributed.tensor.Replicate"}
        colwise = {"__type": "torch.distributed.tensor.parallel.ColwiseParallel", "output_layouts": whole}
        parts["trainer"]["args"]["tensor_plan"] = {"layers.*": colwise}
    spread = {"micro_batch_size": 4, "compute_config": {"runtime_ngpus": 2, **compute}, "pas_policy": policy}
    two = TrainerArgs.from_dict(common | parts | spread).build()
    assert one.run().status == two.run().status == "completed"
    assert one.trainer.lightning["accumulate_grad_batches"] == 2 and two.trainer[MultiGPUAddon].strategy == strategy
    assert ("accumulate_grad_batches" in two.trainer.lightning) == (strategy == "tp")
    assert one.trainer.counts.step == two.trainer.counts.step == 8
    assert difference(one.trainer.model, two.trainer.model) < 1e-6


def test_devices_that_share_a_copy_of_the_model_share_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.jobs.validate.n_cores", lambda: 2)
    common = {
        "model": {"type": "nbtrain.examples.mlp.MLP", "args": {"dim": 8, "nlayers": 2}},
        "optimizer": {"type": "torch.optim.Adam", "args": {"lr": 0.01}},
        "dataset": {"type": "nbtrain.examples.mlp.SimpleDataset", "train_args": {"dim": 8, "size": 16}},
        "trainer": {"type": "nbtrain.ModelTrainer", "args": {"device": "cpu"}},
        "max_epochs": 1,
        "seed": 0,
        "enable_progress_bar": False,
        "checkpoint": {"no_save": True},
        "micro_batch_size": 2,
    }
    one = TrainerArgs.from_dict(common).build()
    two = TrainerArgs.from_dict(common | {"compute_config": {"runtime_ngpus": 2, "plan_ngpus": 2}}).build()
    assert one.run().status == two.run().status == "completed"
    assert one.trainer.counts.step == two.trainer.counts.step == 8  # 2 samples an update, of 16
    assert difference(one.trainer.model, two.trainer.model) < 1e-6


def test_notebook_is_run_on_two_devices_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.jobs.validate.n_cores", lambda: 2)
    monkeypatch.chdir(tmp_path)
    cells = [
        "import torch\nfrom torch import nn\nfrom nbtrain import Trainer\nfrom torch.nn.functional import mse_loss",
        "class Fit(Trainer):\n    def train_step(self, batch):\n        return {'loss': mse_loss(self.model(batch), batch)}",
        "lr = 0.0\ndata = [torch.ones(4, 3) * i for i in range(5)]\nmodel = nn.Linear(3, 3)",
        "trainer = Fit(model, 'cpu', log_bar=False, save_path='runs', optimizer=lambda p: torch.optim.SGD(p, lr=lr))",
        "trainer.run(1, data)\ntrainer.run(2, data)",
    ]
    made = [{"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": source} for source in cells]
    Path("page.ipynb").write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert main(["fit", "page.ipynb", "--devices", "2", "--lr", "0.01"]) == 0
    rows = load_run("runs").epochs
    assert [row["step"] for row in rows] == [3, 6, 9]  # five batches are three rounds
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
