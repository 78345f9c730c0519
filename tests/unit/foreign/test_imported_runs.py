"""Runs of other systems are taken over: from files that the real systems have written (`fixtures/make_foreign.py`, `make_sharded.py`), and
made here.

OmniGenBench and nnScaler can't be installed beside the others: their files are written as their source does it.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from nbtrain import NeptuneLoggerAddon, StateManagerAddon, Trainer, load_run
from nbtrain.cli import main
from nbtrain.errors import CheckpointError, ConfigError
from nbtrain.foreign.foreign_files import read_content
from nbtrain.foreign.points import history_of, own_name, row_points
from nbtrain.foreign.readers import read_runs

SAVED = Path(__file__).parents[2] / "fixtures" / "foreign"
Saving = Regress.add_on(StateManagerAddon)


def zeroed(model: nn.Module) -> nn.Module:
    """A model whose weights are all to be taken."""
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def trainer_of(folder: Path, model: nn.Module | None = None, kind: type[Trainer] = Saving, **options: Any) -> Any:
    options = {"optimizer": lambda params: torch.optim.AdamW(params, lr=0.01)} | options
    return make_trainer(kind, model=zeroed(make_model() if model is None else model), save_path=folder, **options)


def still_model() -> nn.Module:
    """The model without dropout."""
    model: Any = make_model()
    model[2].p = 0.0
    return model


def plain_epochs(
    model: nn.Module, optimizer: Any, n_epochs: int, *, each_epoch: Any = None, each_step: Any = None, loader: Any = None
) -> None:
    loader = make_loader(shuffle=False) if loader is None else loader
    model.train()
    for _ in range(n_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            if each_step is not None:
                each_step.step()
        if each_epoch is not None:
            each_epoch.step()


# -- a script
def script_file(path: Path, n_epochs: int, **more: Any) -> tuple[nn.Module, Any, Any]:
    """Train as a script does, with dropout and shuffling, and save after `n_epochs`."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = StepLR(optimizer, 1, 0.5)
    torch.manual_seed(3)
    plain_epochs(model, optimizer, n_epochs, each_epoch=schedule, loader=make_loader())
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
    torch.save(states | {"epoch": n_epochs - 1, "rng_state": torch.get_rng_state()} | more, path)
    return model, optimizer, schedule


def halving(params: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(params, lr=0.01)
    return {"optimizer": optimizer, "scheduler": StepLR(optimizer, 1, 0.5)}


def test_a_script_that_goes_on_in_nbtrain_equals_one_that_went_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, schedule = script_file(tmp_path / "last.pt", 2, val_losses=[2.0, 1.0], config={"lr": 0.01})
    plain_epochs(model, optimizer, 3, each_epoch=schedule, loader=make_loader())
    own = zeroed(make_model())
    trainer = trainer_of(tmp_path / "runs", own, **halving(own.parameters()))
    torch.manual_seed(99)
    folder = trainer.import_run(tmp_path / "last.pt")
    assert capsys.readouterr().out == (
        f"a script: {tmp_path}/last.pt → {tmp_path}/runs/run-001\n"
        "  weights         4 tensors\n"
        "  optimizer       1 state\n"
        "  learning rate   0.0025\n"
        "  schedule        1 state\n"
        "  epoch and step  2 epochs, 10 updates; 'epoch' is 1, counted from 0, as the schedule shows\n"
        "  place           before epoch 3\n"
        "  best            val_loss 1 at epoch 2\n"
        "  history         2 epochs\n"
        "  random numbers  torch\n"
    )
    saved = torch.load(tmp_path / "last.pt")["model"]  # epoch 2 is the best, so its weights are
    assert trainer.best_weights is not None and all(torch.equal(trainer.best_weights[name], value) for name, value in saved.items())
    trainer.run(3, make_loader())
    assert same_weights(own, model) and trainer.run_dir == folder
    assert (trainer.counts.epoch, trainer.counts.step) == (5, 25)
    assert [row["epoch"] for row in load_run(folder).epochs] == [1, 2, 3, 4, 5]
    assert [row["lr"] for row in trainer.history.epochs[2:]] == [0.0025, 0.00125, 0.000625]


def test_the_command_makes_a_run_folder_that_resume_show_and_compare_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, schedule = script_file(tmp_path / "last.pt", 2, log=[{"epoch": 1, "val_loss": 2.0}, {"epoch": 2, "val_loss": 1.0}])
    plain_epochs(model, optimizer, 1, each_epoch=schedule, loader=make_loader())
    assert main(["import", str(tmp_path / "last.pt"), "-o", str(tmp_path / "runs")]) == 0
    assert main(["show", str(tmp_path / "runs")]) == 0
    assert "■ stopped · imported from a script · 2 epochs" in capsys.readouterr().out
    own = zeroed(make_model())
    trainer = trainer_of(tmp_path / "runs", own, **halving(own.parameters()))
    trainer.run(3, make_loader(), resume="auto")  # of which two are there
    assert same_weights(own, model) and trainer.run_dir == tmp_path / "runs" / "run-001"
    assert main(["compare", str(trainer.run_dir), "--output", str(tmp_path / "c.png")]) == 0
    assert main(["resume", str(trainer.run_dir)]) == 2
    assert "has no config.yaml: a notebook or a script began this run, and has its code." in capsys.readouterr().err
    assert same_weights(nn.ModuleDict({"a": own}), nn.ModuleDict({"a": model}))


def test_a_schedule_by_updates_that_a_factory_makes_goes_on(tmp_path: Path) -> None:
    model = still_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    factory: Callable[..., LRScheduler] = lambda optimizer, plan: LambdaLR(optimizer, lambda step: 1 / (step + 1))  # noqa: E731
    schedule = factory(optimizer, None)
    plain_epochs(model, optimizer, 2, each_step=schedule)
    torch.save(
        {"net": model.state_dict(), "opt": optimizer.state_dict(), "lr_sched": schedule.state_dict(), "epoch": 2}, tmp_path / "a.pth"
    )
    plain_epochs(model, optimizer, 2, each_step=schedule)
    trainer = trainer_of(tmp_path / "runs", still_model(), scheduler=factory)
    trainer.import_run(tmp_path / "a.pth")
    trainer.run(2, make_loader(shuffle=False))
    assert same_weights(trainer.model, model)


def test_several_optimizers_get_their_states_in_the_order_of_the_file(tmp_path: Path) -> None:
    def parts(model: nn.Module) -> dict[str, Any]:
        return {"first": torch.optim.AdamW(model.get_submodule("0").parameters()), "last": torch.optim.SGD(model[3].parameters(), 0.1, 0.9)}  # type: ignore[index]

    model = still_model()
    both = parts(model)
    for x, y in make_loader(shuffle=False):
        mse_loss(model(x), y).backward()
        for optimizer in both.values():
            optimizer.step()
            optimizer.zero_grad()
    states = [optimizer.state_dict() for optimizer in both.values()]
    torch.save({"model": model.state_dict(), "optimizers": states, "epoch": 1, "iter_num": 5}, tmp_path / "a.pt")
    own = zeroed(still_model())
    trainer = trainer_of(tmp_path / "runs", own, optimizer=parts(own))
    trainer.import_run(tmp_path / "a.pt")
    found = trainer.optimizer_states()[0]
    assert list(found) == ["first", "last"] and found["last"]["param_groups"][0]["momentum"] == 0.9
    assert torch.equal(found["first"]["state"][0]["exp_avg"], states[0]["state"][0]["exp_avg"])
    assert torch.equal(found["last"]["state"][0]["momentum_buffer"], states[1]["state"][0]["momentum_buffer"])


def test_of_an_epoch_that_may_count_from_0_is_said_how_it_was_taken(tmp_path: Path) -> None:
    torch.save({"model": make_model().state_dict(), "epoch": 4, "best_acc": 0.5}, tmp_path / "a.pt")
    (run,) = read_runs(tmp_path / "a.pt")
    assert (run.epoch, run.taken()["epoch and step"]) == (4, "4 epochs; as 'epoch' says; give epoch=5 if it counts from 0")
    assert run.without()["best"] == "only its value is in the file: best_acc 0.5"
    (run,) = read_runs(tmp_path / "a.pt", epoch=5)
    assert run.taken()["epoch and step"] == "5 epochs; as given"


def test_lists_in_a_file_without_an_epoch_say_how_many_there_were(tmp_path: Path) -> None:
    content = {
        "state_dict": make_model().state_dict(),
        "global_step": 9,
        "history": {"train_losses": [3.0, 2.0, 1.0], "val_accs": [0.1, 0.2, 0.3]},
    }
    torch.save(content, tmp_path / "a.pt")
    (run,) = read_runs(tmp_path / "a.pt")
    assert run.taken()["epoch and step"] == "3 epochs, 9 updates; as many epochs as have values"
    assert [(row["step"], row["train_loss"], row["val_acc"]) for row in run.history.epochs] == [(3, 3.0, 0.1), (6, 2.0, 0.2), (9, 1.0, 0.3)]
    assert run.taken()["best"] == "val_acc 0.3 at epoch 3"


# -- the real systems
def groups(model: nn.Module) -> Any:
    """As Hugging Face's Trainer makes them: with weight decay, and without."""
    weights, biases = [[p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


def linear(optimizer: Any, plan: Any) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 20))


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def adam(model: nn.Module) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def steps(optimizer: Any) -> LRScheduler:
    return StepLR(optimizer, 1, 0.5)


def pickled(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def torch_file(path: Path) -> Any:
    return torch.load(path, weights_only=False)


REAL: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {  # by the files: model, optimizer, schedule by epochs, and options
    "hf_trainer/checkpoint-10": (make_model, groups, None, {"scheduler": linear}),
    "accelerate/epoch_1": (make_model, adamw, steps, {}),
    "zae/saved": (still_model, adam, steps, {}),
    "nnscaler/merged.ckpt": (still_model, adamw, steps, {}),
    "tlama/checkpoints/checkpoint_step_00000009.pt": (still_model, adamw, None, {"scheduler": lambda step: 0.01 / (step + 1)}),
    "deepspeed_2": (still_model, adamw, None, {}),
    "deepspeed_3/global_step10": (still_model, adamw, None, {}),
    "fsdp/sharded/epoch_1": (still_model, adamw, None, {}),
    "fsdp/full/epoch_1": (still_model, adamw, None, {}),
    "lightning_fsdp/epoch=1-step=10.ckpt": (still_model, adamw, None, {}),
}


@pytest.mark.parametrize("file", REAL)
def test_a_run_of_a_real_system_continues_as_the_system_itself_does(file: str, tmp_path: Path) -> None:
    make, make_optimizer, make_schedule, options = REAL[file]
    name = file.partition("/")[0]
    model = zeroed(make())
    optimizer = make_optimizer(model)
    options |= {"scheduler": make_schedule(optimizer)} if make_schedule is not None else {}
    trainer = trainer_of(tmp_path, model, optimizer=optimizer, **options)
    trainer.import_run(SAVED / file, epoch=2 if name == "zae" else None)
    assert (trainer.counts.epoch, trainer.counts.step) == (2, 10)
    trainer.run(1, make_loader(shuffle=False))
    expected = {key.removeprefix("net."): value for key, value in load_file(SAVED / name / "expected.safetensors").items()}
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("file", "system"), [("deepspeed_2", "DeepSpeed"), ("fsdp/sharded/epoch_1", "accelerate")])
def test_of_shards_nothing_is_lost_but_what_the_system_lacks(file: str, system: str) -> None:
    (run,) = read_runs(SAVED / file)
    assert run.system == system and run.taken()["optimizer"] == "1 state" and run.taken()["weights"] == "4 tensors"
    assert ("random numbers" in run.without()) == (system == "DeepSpeed")


def test_deepspeed_s_shards_below_hugging_face_and_accelerate_are_found(tmp_path: Path) -> None:
    hf, state = tmp_path / "checkpoint-10", {"epoch": 2.0, "global_step": 10, "log_history": []}
    shutil.copytree(SAVED / "deepspeed_2", hf)
    (hf / "trainer_state.json").write_text(json.dumps(state))
    shutil.copytree(SAVED / "deepspeed_3" / "global_step10", tmp_path / "epoch_1" / "pytorch_model")
    shutil.copy(SAVED / "accelerate" / "epoch_1" / "random_states_0.pkl", tmp_path / "epoch_1")
    runs = [read_runs(path)[0] for path in (hf, tmp_path / "epoch_1")]
    assert [run.system for run in runs] == ["Hugging Face Trainer", "accelerate"]
    first, second = (run.optimizers[0]["state"] for run in runs)
    assert len(first) == len(second) == 4 and all(torch.allclose(first[i]["exp_avg"], second[i]["exp_avg"]) for i in range(4))
    assert all(torch.allclose(value, runs[1].weights[name]) for name, value in runs[0].weights.items())


def test_deepspeed_below_lightning_has_what_lightning_saves(tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt" / "checkpoint"
    shutil.copytree(SAVED / "deepspeed_2" / "global_step10", folder)
    file = folder / "mp_rank_00_model_states.pt"
    torch.save(torch.load(file, weights_only=False) | {"pytorch-lightning_version": "2.6", "epoch": 2, "global_step": 10}, file)
    (run,) = read_runs(tmp_path / "last.ckpt")
    assert (run.system, run.epoch, run.step, len(run.optimizers)) == ("Lightning", 2, 10, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_shard_that_is_missing_is_an_error_that_says_so(stage: int, tmp_path: Path) -> None:
    shutil.copytree(SAVED / f"deepspeed_{stage}" / "global_step10", tmp_path / "a")
    (tmp_path / "a" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="a is not whole: 1 of 2 shards of the optimizer are here"):
        read_runs(tmp_path / "a")


def test_tensors_that_are_split_over_devices_need_deepspeed_s_tools(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "deepspeed_2" / "global_step10", tmp_path / "a")
    shutil.copy(tmp_path / "a" / "mp_rank_00_model_states.pt", tmp_path / "a" / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"split over several devices \(mp_rank_01\)"):
        read_runs(tmp_path / "a")


def test_hugging_face_s_checkpoint_continues_bit_for_bit_and_its_log_is_the_history(tmp_path: Path) -> None:
    folder, model = SAVED / "hf_trainer" / "checkpoint-10", make_model()
    optimizer = groups(model)
    schedule = linear(optimizer, None)
    model.load_state_dict({name.removeprefix("net."): value for name, value in load_file(folder / "model.safetensors").items()})
    optimizer.load_state_dict(torch_file(folder / "optimizer.pt"))
    schedule.load_state_dict(torch_file(folder / "scheduler.pt"))
    own = make_model()
    trainer = trainer_of(tmp_path, own, optimizer=groups(own), scheduler=linear)
    trainer.import_run(folder.parent)  # the newest one in the output folder
    torch.set_rng_state(torch_file(folder / "rng_state.pth")["cpu"])
    plain_epochs(model, optimizer, 2, each_step=schedule)
    trainer.run(2, make_loader(shuffle=False))
    assert same_weights(own, model)
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert [row["val_loss"] for row in trainer.history.epochs[:2]] == [row["eval_loss"] for row in log if "eval_loss" in row]
    assert [row["train_loss"] for row in trainer.history.epochs[:2]] == [row["loss"] for row in log if "loss" in row]
    assert trainer.history.steps["train"].steps[:3].tolist() == [5, 10, 11]


def test_omnigenbench_s_folders_have_the_epoch_and_the_metrics_in_their_names(tmp_path: Path) -> None:
    (run,) = read_runs(SAVED / "omnigenbench" / "ogb_epoch_2_seed_42_loss_0.5000_seed_42_f1_score_0.5000")
    assert [(row["val_loss"], row["val_f1_score"]) for row in run.history.epochs] == [(0.75, 0.25), (0.5, 0.5)]
    assert run.taken()["weights"] == "4 tensors; in float16, so rounded" and run.epoch == 2
    assert torch.equal(run.weights["0.weight"], make_model(2).half().state_dict()["0.weight"])


def omni_run(path: Path) -> tuple[int, list[float], bool]:
    (run,) = read_runs(path)
    assert run.system == "OmniGenBench"
    return run.epoch, [row["val_loss"] for row in run.history.epochs], torch.equal(run.weights["0.weight"], make_model(run.epoch)[0].weight)  # pyright: ignore[reportIndexIssue]


def test_omnigenbench_s_files_of_a_model_of_one_s_own_are_a_run(tmp_path: Path) -> None:
    for epoch, loss in ((2, 0.75), (10, 0.5)):  # `save_model` writes such a file for a model without `save`
        torch.save(make_model(epoch).state_dict(), tmp_path / f"net_epoch_{epoch}_seed_42_loss_{loss:.4f}.pt")
    assert omni_run(tmp_path) == (10, [0.75, 0.5], True)
    assert omni_run(tmp_path / "net_epoch_2_seed_42_loss_0.7500.pt") == (2, [0.75], True)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt"])
def test_omnigenbench_s_folder_of_a_model_with_its_own_save_is_a_run(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "net_epoch_3_seed_42_loss_0.2500"
    folder.mkdir()
    torch.save(make_model(3).state_dict(), folder / name)
    assert omni_run(folder) == omni_run(tmp_path) == (3, [0.25], True)


def tlama_files(root: Path) -> None:
    """A run with another folder for its checkpoints and its log, whose second step was the best validation."""
    shutil.copytree(SAVED / "tlama/checkpoints", root / "ckpts")
    content = read_content(root / "ckpts/checkpoint_step_00000009.pt")
    best = {**content, "model": {name: value + 1 for name, value in content["model"].items()}, "step": 4}
    torch.save({name: value for name, value in best.items() if name != "config"}, root / "ckpts/checkpoint_best.pt")
    (root / "my_logs").mkdir()
    lines = (SAVED / "tlama/logs/training_log.txt").read_text().splitlines()
    rows = [line.split(",") for line in lines[1:]]
    for row in rows:
        row[6] = {"4": "0.25", "9": "0.5"}.get(row[1], row[6])
    (root / "my_logs/training_log.txt").write_text("\n".join([lines[0], *map(",".join, rows)]) + "\n")


def test_tlama_s_best_validation_and_other_folders_come_along(tmp_path: Path) -> None:
    tlama_files(tmp_path)
    (run,) = read_runs(tmp_path)
    assert run.history.best is not None and run.history.best["val_loss"] == 0.25 and run.best is not None
    assert all(torch.equal(run.best[name], value + 1) for name, value in run.weights.items())
    shutil.copytree(tmp_path / "my_logs", tmp_path / "other_logs")
    (run,) = read_runs(tmp_path)
    assert run.lost["history"] == "several logs lie beside: my_logs, other_logs"


def test_the_best_weights_of_another_checkpoint_come_along(tmp_path: Path) -> None:
    for step, seed in ((5, 1), (10, 2)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        torch.save(make_model(seed).state_dict(), folder / "pytorch_model.bin")
        log = [{"eval_acc": 0.75, "epoch": 1.0, "step": 5}, {"eval_acc": 0.5, "epoch": 1.5, "step": 10}]
        state = {"epoch": step / 5 - 0.5, "global_step": step, "best_metric": 0.75, "best_model_checkpoint": "/old/checkpoint-5"}
        (folder / "trainer_state.json").write_text(json.dumps(state | {"log_history": log[: step // 5]}))
    trainer = trainer_of(tmp_path / "runs", monitor="val_acc")
    trainer.import_run(tmp_path, trust=False)
    trainer.apply_weights()
    assert same_weights(trainer.model, make_model(1))
    (run,) = read_runs(tmp_path)
    assert run.taken()["best"] == "val_acc 0.75 at epoch 1, with its weights"
    assert run.without()["place"] == "it was saved after epoch 1.5; that epoch begins again"
    assert run.without()["optimizer"] == "there is no optimizer.pt or optimizer.bin"


# -- Lightning
class Lit(L.LightningModule):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = still_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


def lightning_fit(folder: Path, n_epochs: int, ckpt: Path | None = None, **options: Any) -> Lit:
    module = Lit()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "log_every_n_steps": 1}
    saves = [ModelCheckpoint(monitor="val_loss", save_top_k=-1), EarlyStopping("val_loss", patience=9)]
    trainer = L.Trainer(max_epochs=n_epochs, logger=CSVLogger(folder, name="log"), callbacks=saves, **quiet, **options)
    trainer.fit(module, make_loader(shuffle=False), make_valid(), ckpt_path=ckpt)
    return module


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers", "ignore:.*Checkpoint directory.*exists")
def test_a_run_of_lightning_goes_on_in_both_trainers_as_it_would_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lightning_fit(tmp_path, 2)
    expected = lightning_fit(tmp_path / "whole", 4)
    own = still_model()
    trainer = trainer_of(
        tmp_path / "runs", own, **halving(own.parameters()), lightning={"callbacks": [EarlyStopping("val_loss", patience=9)]}
    )
    trainer.import_run(tmp_path / "log" / "version_0")
    said = capsys.readouterr().out
    assert "  epoch and step  2 epochs, 10 updates\n" in said and "  random numbers  – lost: Lightning does not save them" in said
    trainer.run(2, make_loader(shuffle=False), make_valid())
    assert same_weights(own, expected.model)
    with open(tmp_path / "whole/log/version_0/metrics.csv") as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert [row["train_loss"] for row in trainer.history.epochs] == pytest.approx(losses)

    lit = Trainer.add_on(StateManagerAddon).from_lightning(Lit(), save_path=tmp_path / "lit", device="cpu", log_bar=False)
    lit.import_run(tmp_path / "log" / "version_0")
    lit.run(2, make_loader(shuffle=False), make_valid())
    assert same_weights(lit.model, expected)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers", "ignore:.*Checkpoint directory.*exists")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_an_imported_run_continues_in_plain_lightning(tmp_path: Path) -> None:
    lightning_fit(tmp_path, 2)
    expected = lightning_fit(tmp_path / "whole", 4)
    lit = Trainer.add_on(StateManagerAddon).from_lightning(Lit(), save_path=tmp_path / "lit", device="cpu", log_bar=False)
    lit.import_run(tmp_path / "log" / "version_0")
    state = torch.load(tmp_path / "lit/run-001/checkpoints/epoch=2-step=10.ckpt", weights_only=True)
    state["state_dict"] = {name.removeprefix("model."): value for name, value in state["state_dict"].items()}
    torch.save(state, tmp_path / "own.ckpt")
    assert same_weights(lightning_fit(tmp_path / "again", 4, tmp_path / "own.ckpt"), expected)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_of_a_checkpoint_within_an_epoch_is_said_that_it_begins_again(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", max_steps=8, logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
                        enable_model_summary=False, callbacks=[ModelCheckpoint(tmp_path / "saved", every_n_train_steps=8)])  # fmt: skip
    trainer.fit(Lit(), make_loader(shuffle=False), make_valid())
    (run,) = read_runs(tmp_path / "saved")
    assert (run.epoch, run.step) == (1, 8)
    assert run.without()["place"] == "3 batches of epoch 2 were trained; it begins again"


# -- what is not run, and what does not fit
class Danger:
    def __reduce__(self) -> Any:
        return exec, ("import nbtrain.errors; nbtrain.errors.was_run = True",)


def test_no_pickle_is_run_and_what_needs_one_asks_for_trust_and_names_the_file(tmp_path: Path) -> None:
    import nbtrain.errors as place

    torch.save({"model": make_model().state_dict(), "config": Danger()}, tmp_path / "a.pt")
    (run,) = read_runs(tmp_path / "a.pt")
    assert run.without()["config"] == "a Python object, which was not made" and len(run.weights) == 4
    folder = tmp_path / "zae"
    folder.mkdir()
    torch.save(make_model().state_dict(), folder / "model.ckpt")
    (folder / "optimizer.zae").write_bytes(pickle.dumps(torch.optim.SGD(make_model().parameters()).state_dict()))
    (folder / "scheduler.zae").write_bytes(pickle.dumps({"last_epoch": 1, "chain": Danger()}))
    (run,) = read_runs(folder)
    assert run.without()["schedule"] == (
        "scheduler.zae holds Python objects (builtins.exec), which are not unpickled. "
        "If you trust it, unpickle it with trust=True (--trust): that may run any code."
    )
    assert len(run.optimizers) == 1 and not hasattr(place, "was_run")
    (run,) = read_runs(folder, trust=True)
    assert run.schedules[0]["last_epoch"] == 1 and place.was_run  # pyright: ignore[reportAttributeAccessIssue]
    del place.was_run  # pyright: ignore[reportAttributeAccessIssue]


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    script_file(tmp_path / "last.pt", 1)
    trainer = trainer_of(tmp_path / "runs", optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(
        CheckpointError, match=r"another optimizer: its options were amsgrad, betas.*, and are dampening, momentum"
    ) as error:
        trainer.import_run(tmp_path / "last.pt")
    assert "give without=('optimizer',) to begin with a new one" in str(error.value)
    with pytest.raises(CheckpointError, match="The weights are not those of a Linear"):
        trainer_of(tmp_path / "runs", nn.Linear(2, 2)).import_run(tmp_path / "last.pt")
    with pytest.raises(ConfigError, match="is of nbtrain"):
        other = trainer_of(tmp_path / "own")
        other.run(1, make_loader())
        trainer.import_run(other.run_dir)
    assert not (tmp_path / "runs").exists() and trainer.counts.step == 0


def test_what_the_trainer_has_no_place_for_is_lost_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script_file(tmp_path / "last.pt", 1)

    def begin(**options: Any) -> Any:
        return trainer_of(tmp_path / "runs", optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **options)

    begin().import_run(tmp_path / "last.pt", without=("optimizer",))
    assert "  optimizer       – lost: without='optimizer'\n" in capsys.readouterr().out
    trainer = begin(strict=False)
    trainer.import_run(tmp_path / "last.pt")
    said = capsys.readouterr().out
    assert "  optimizer       – lost: its options were" in said
    assert "  learning rate   – lost: those of the trainer are used\n" in said
    assert "  schedule        – lost: the trainer has none: give scheduler= to continue it\n" in said
    trainer.run(1, make_loader())
    own = zeroed(make_model())
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    other = trainer_of(tmp_path / "runs", own, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9))
    other.import_run(tmp_path / "last.pt", without=("lr",))
    said = capsys.readouterr().out
    assert "  learning rate   – lost: without='lr'\n" in said
    assert "  schedule        – lost: it was one with base_lrs, gamma, last_epoch, step_size: the trainer's" in said
    other.run(1, make_loader())
    assert "The schedule is a CosineAnnealingLR, and was one with base_lrs, gamma" in (other.run_dir / "events.jsonl").read_text()


def test_files_of_no_known_system_are_refused_with_what_they_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("none")
    assert main(["import", str(tmp_path)]) == 2
    assert "is not a run of a known system." in (said := capsys.readouterr().err) and "It has notes.txt." in said
    assert main(["import", str(tmp_path / "missing")]) == 2
    torch.save({"pytorch-lightning_version": "2", "state_dict": make_model().state_dict(), "loops": 3}, tmp_path / "a.ckpt")
    assert main(["import", str(tmp_path / "a.ckpt")]) == 1
    assert "a.ckpt is not as Lightning writes it: 'int' object has no attribute 'get'." in capsys.readouterr().err
    (tmp_path / "a.pt").write_bytes(b"no file of torch")
    assert main(["import", str(tmp_path / "a.pt")]) == 1
    assert "a.pt can't be read." in capsys.readouterr().err


# -- Neptune
def test_an_offline_run_of_neptune_s_client_becomes_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(Regress.add_on(NeptuneLoggerAddon), save_path=tmp_path / "runs")
    trainer.run(2, make_loader(), make_valid())
    assert main(["neptune-export", str(trainer.run_dir)]) == 0
    table = capsys.readouterr().out.strip()
    assert main(["import", table, "-o", str(tmp_path / "old")]) == 0
    history = load_run(tmp_path / "old")
    for name in ("train_loss", "val_loss"):
        assert [row[name] for row in history.epochs] == pytest.approx([row[name] for row in trainer.history.epochs])
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "old"), str(trainer.run_dir), "--output", str(tmp_path / "c.png")]) == 0
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines()[:3])
    assert [head[:2], *(line[:2] for line in lines)] == [["run", "class"], ["old/run-001", "Neptune"], ["runs/run-001", "Regress"]]


def exported(run: str, name: str, kind: str, step: float | None, value: float) -> dict[str, Any]:
    """A row of Neptune's exporter, which writes parquet."""
    return {"project_id": "a/b", "run_id": run, "attribute_path": name, "attribute_type": kind, "step": step, "float_value": value}


def write_parquet(path: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With pyarrow if it is installed, as where `datasets` is; else its reader is stood in for."""
    if importlib.util.find_spec("pyarrow") is not None:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    path.write_bytes(b"PAR1")
    module = types.ModuleType("pyarrow.parquet")
    vars(module)["read_table"] = lambda path: types.SimpleNamespace(to_pylist=lambda: rows)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)


def test_the_tables_of_neptune_s_exporter_become_a_run_folder_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        exported(run, "metrics/val/loss", "float_series", step, 1 / (step + n))
        for n, run in enumerate(("R-1", "R-2"))
        for step in (5.0, 10.0)
    ]
    rows += [exported("R-1", "params/lr", "float", None, 0.1), exported("R-1", "sys/owner", "float", None, 0.0)]
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "R-1_part_0.parquet", rows, monkeypatch)
    assert main(["import", str(tmp_path / "data"), "-o", str(tmp_path / "runs")]) == 0
    first, second = (load_run(tmp_path / "runs" / name) for name in ("run-001", "run-002"))
    assert [row["val_loss"] for row in first.epochs] == [0.2, 0.1] and [row["val_loss"] for row in second.epochs] == [1 / 6, 1 / 11]
    assert json.loads((tmp_path / "runs/run-001/provenance.json").read_text())["arguments"] == {"params/lr": 0.1}


def test_without_pyarrow_parquet_is_an_error_that_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "R-1.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError) as caught:
        read_runs(tmp_path / "R-1.parquet")
    assert str(caught.value) == f"R-1.parquet needs pyarrow to be read.\n  {tmp_path}/R-1.parquet\n  pip install pyarrow"


# -- names and rows
@pytest.mark.parametrize(
    ("theirs", "own"),
    [("eval_accuracy", "val_accuracy"), ("metrics/train/loss", "train_loss"), ("acc/valid", "val_acc"), ("loss", "train_loss"),
     ("lr-AdamW", "lr"), ("learning_rate", "lr"), ("eval_runtime", ""), ("grad_norm", "grad_norm"), ("validation.f1", "val_f1"),
     ("train_loss_epoch", "train_loss_epoch"), ("train/epoch", "")],
)  # fmt: skip
def test_metrics_get_nbtrain_s_names(theirs: str, own: str) -> None:
    assert own_name(theirs) == own


def test_without_epochs_each_validation_ends_one_and_lightning_s_two_losses_are_one() -> None:
    rows = [{"step": 1, "train_loss": 4.0}, {"step": 2, "train_loss": 2.0}, {"step": 2, "val_loss": 1.0}, {"step": 3, "train_loss": 1.0}]
    history = history_of(row_points([*rows, {"step": 4, "val_loss": 0.5}]))
    assert [(row["step"], row["train_loss"], row["val_loss"]) for row in history.epochs] == [(2, 3.0, 1.0), (4, 1.0, 0.5)]
    rows = [{"epoch": 0, "step": 0, "train_loss_step": 4.0}, {"epoch": 0, "step": 1, "train_loss_epoch": 1.0, "val_loss": "nan"}]
    history = history_of(row_points(rows, from_zero=True))
    assert [(row["epoch"], row["train_loss"]) for row in history.epochs] == [(1, 1.0)]
    assert list(history.steps["train"]) == [{"step": 1, "train_loss": 4.0}]
