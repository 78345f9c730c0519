"""The examples in the documents of zae-engine, OmniGenBench, nnScaler and tlama-core: all foreign names in one message, then to the end."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from samples import Regress, make_data, make_loader, make_model, make_trainer, make_valid

import nbtrain
from nbtrain import (
    AccumulationAddon,
    ConfigError,
    EarlyStoppingAddon,
    LimitsAddon,
    MetricsAddon,
    OptionError,
    StateManagerAddon,
    StepError,
    Trainer,
    TrainerArgs,
    get_lr_scheduler,
)

MEMBERS = yaml.safe_load((Path(__file__).parents[2] / "fixtures" / "member_names.yaml").read_text())


def refused(call: Callable[[], Any], kind: type[Exception] = OptionError) -> dict[str, str]:
    """What the one error of a call says of each name."""
    with pytest.raises(kind) as error:
        call()
    what, *lines = str(error.value).split("\n  ")
    said = {name: remedy for line in lines for names, _, remedy in [line.partition(": ")] for name in names.split(", ")}
    assert re.findall(r"'(\w+)'", what) == [name for name in re.findall(r"'(\w+)'", what) if said.get(name)], str(error.value)
    return said


# -- tlama-core: "Here's a complete example of how to use the Trainer class"
TLAMA: dict[str, Any] = {
    "train_data_loader": [], "val_data_loader": [], "scheduler": lambda step: 1e-4, "total_batch_size": 1048576, "epochs": 3,
    "gradient_accumulation": True, "validation_steps": 500, "checkpoint_steps": 2000, "use_mixed_precision": True, "verbose": True,
    "checkpoints_dir": "./checkpoints", "logs_dir": "./logs", "seed": 42,
}  # fmt: skip


def test_tlama_s_example(tmp_path: Path) -> None:
    said = refused(lambda: make_trainer(**TLAMA))
    assert said.keys() == TLAMA.keys() - {"scheduler", "use_mixed_precision", "seed"}
    rates = get_lr_scheduler(max_lr=1e-4, min_lr=1e-6, warmup_steps=2, max_steps=15, decay_type="cosine")
    kind = Regress.add_on(AccumulationAddon, LimitsAddon, StateManagerAddon)
    own = {"scheduler": rates, "use_mixed_precision": True, "seed": 42, "log_bar": False, "save_path": tmp_path}
    trainer = make_trainer(kind, **own, accumulate=2, val_every_n_steps=2, every_n_steps=4)
    assert trainer.run(3, make_loader(), make_valid()).status == "completed"


class LoggingCallback:
    """The callback of tlama-core's document, with what it prints in a list."""

    said: list[str]

    def on_train_start(self, trainer: Any) -> None:
        self.said = ["Training started!"]

    def on_step_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.current_step % 10 == 0:
            self.said.append(f"Step {trainer.current_step}: Loss = {metrics['train_loss']:.4f}")

    def on_epoch_end(self, trainer: Any) -> None:
        self.said.append(f"Epoch {trainer.current_epoch + 1} completed")

    def on_validate_end(self, trainer: Any, metrics: Any) -> None:
        self.said.append(f"Validation loss: {metrics['val_loss']:.4f}")


def test_tlama_s_callback() -> None:
    callback = LoggingCallback()
    refused(lambda: make_trainer(train_data_loader=[], callbacks=[callback]))
    make_trainer(hooks=callback, seed=0).run(2, make_loader(), make_valid())
    assert [line.partition(" ")[0] for line in callback.said] == ["Training", "Validation", "Epoch", "Step", "Validation", "Epoch"]


# -- OmniGenBench: its native, its distributed, its Hugging Face and its own trainer
OMNI: dict[str, Any] = {
    "train_dataset": [], "eval_dataset": [], "lr_scheduler": None, "epochs": 10, "batch_size": 32, "gradient_accumulation_steps": 2,
    "max_grad_norm": 1.0, "autocast": "bf16", "patience": 3, "delta": 0.001, "save_dir": "./checkpoints", "save_steps": 1000,
    "save_total_limit": 3, "seed": 42,
}  # fmt: skip
HF_ARGUMENTS: dict[str, Any] = {
    "output_dir": "./results", "num_train_epochs": 10, "per_device_train_batch_size": 32, "per_device_eval_batch_size": 64,
    "learning_rate": 5e-5, "weight_decay": 0.01, "warmup_steps": 500, "evaluation_strategy": "steps", "eval_steps": 500,
    "save_strategy": "steps", "save_steps": 500, "save_total_limit": 3, "load_best_model_at_end": True,
    "metric_for_best_model": "eval_accuracy", "logging_dir": "./logs", "logging_steps": 100, "report_to": ["tensorboard"], "fp16": True,
}  # fmt: skip


def test_omnigenbench_s_example(tmp_path: Path) -> None:
    said = refused(lambda: make_trainer(**OMNI))
    assert said.keys() == OMNI.keys() - {"autocast", "seed"}
    assert refused(lambda: make_trainer(**HF_ARGUMENTS, seed=42)).keys() == HF_ARGUMENTS.keys()
    assert refused(lambda: make_trainer(num_workers=8, pin_memory=True, prefetch_factor=2)).keys() == {
        "num_workers",
        "pin_memory",
        "prefetch_factor",
    }
    addons = AccumulationAddon, EarlyStoppingAddon, StateManagerAddon, MetricsAddon
    trainer = make_trainer(
        Regress.add_on(*addons), accumulate=2, gradient_clip=1.0, autocast="bf16", patience=3, delta=0.001, save_path=tmp_path,
        every_n_steps=3, keep_last_n=3, seed=42, metrics=lambda y_true, y_pred: {"worst": float(abs(y_true - y_pred).max())},
    )  # fmt: skip
    result = trainer.run(2, make_loader(), make_valid())
    assert result.metrics["best_valid"]["eval_worst"] == result.best["val_worst"]
    assert len(result.metrics["train_metrics_history"]) == 2 and trainer.evaluate(make_data())["worst"] > 0


def test_omnigenbench_s_own_trainer_has_all_its_methods_in_one_message() -> None:
    def method(self: Any, batch: Any) -> Any: ...

    written = dict.fromkeys(("_setup_training_components", "_prepare_batch", "_train_epoch"), method)
    kind = type("CustomTrainer", (Trainer,), written | {"__module__": __name__})
    with pytest.raises(StepError) as error:
        make_trainer(kind)
    assert str(error.value).split("\n  ") == [
        "CustomTrainer has _train_epoch, which nbtrain does not call, and no train_step.",
        'Write train_step(self, batch), which returns a dict with "loss".',
        "CustomTrainer._setup_training_components is not called in a run. Give optimizer= and scheduler= to the trainer.",
        "CustomTrainer._prepare_batch is not called in a run. Write what it adds into train_step and test_step, or into a callback.",
    ]


# -- zae-engine: its names are nbtrain's
def test_zae_engine_s_example(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    trainer = Regress.add_on(StateManagerAddon)(
        model=model, device="cpu", mode="train", optimizer=optimizer, log_bar=False, save_path=tmp_path,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2),
    )  # fmt: skip
    trainer.run(n_epoch=2, loader=make_loader(), valid_loader=make_valid())
    trainer.toggle()
    assert trainer.inference(make_valid()) and trainer.log_train["loss"] and len(trainer.get_loss_history("train")) == 10
    said = refused(lambda: make_trainer(web_logger={"wandb": {}}, init_method="tcp://localhost:12355"))
    assert said.keys() == {"web_logger", "init_method"}


# -- nnScaler: its nanoGPT file with the hook of its example
NANOGPT = """
compute_config: {plan_ngpus: 1, constant_folding: true, use_zero: false, use_end2end: true}
init_env_fn: own_nanogpt.init_env
run_mode: run
pas_policy: autodist
micro_batch_size: 8
grad_accumulation_steps: 1
max_train_steps: 6
max_val_steps: 2
val_every_n_train_steps: 3
enable_progress_bar: false
model: {type: nbtrain.examples.mlp.MLP, args: {dim: 8, nlayers: 2}}
optimizer: {type: torch.optim.AdamW, args: {lr: 1e-3, betas: [0.9, 0.99], fused: true}, clip_gnorm: 0.0}
lr_scheduler: {type: own_nanogpt.Scheduler, args: {warmup_iters: 2, learning_rate: 1e-3, lr_decay_iters: 6, min_lr: 1e-4}, interval: step}
dataset: {type: nbtrain.examples.mlp.SimpleDataset, train_args: {dim: 8, size: 32}, val_args: {dim: 8, size: 16}}
checkpoint: {keep_last_n_checkpoints: 10, every_n_train_steps: 3, save_type: deduped}
hook: {on_train_step_end: own_nanogpt.HOOK, on_val_step_end: own_nanogpt.HOOK}
"""
MODULE = """
import torch
said = []
def init_env(trainer):
    torch.manual_seed(0)
def of_nnscaler(trainer, outputs):
    said.append((trainer.train_status.finished_train_steps, outputs[0].item()))
def of_nbtrain(trainer, outputs):
    said.append((trainer.current_step, outputs[0]["loss"].item()))
class Scheduler(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, warmup_iters, learning_rate, lr_decay_iters, min_lr):
        self.it, self.top = 0, learning_rate
        super().__init__(optimizer)
    def get_lr(self):
        self.it += 1
        return [self.top / self.it for _ in self.optimizer.param_groups]
"""


def test_nnscaler_s_file_with_the_hook_of_its_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nanogpt.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(NANOGPT.replace("HOOK", "of_nnscaler"))
    with pytest.raises(AttributeError) as error:
        TrainerArgs.from_yaml("theirs.yaml", trust=True).run()
    assert str(error.value) == (
        "ModelTrainer has no train_status.\n  Read trainer.current_step, the number of updates, and trainer.history.best; "
        'a hook\'s outputs are dicts: outputs[0]["loss"].'
    )
    (tmp_path / "ours.yaml").write_text(NANOGPT.replace("HOOK", "of_nbtrain"))
    result = TrainerArgs.from_yaml("ours.yaml", trust=True).run()
    assert result is not None and result.history.last["step"] == 6
    steps = [step for step, _ in sys.modules.pop("own_nanogpt").said]
    assert steps.count(6) >= 2 and max(steps) == 6


# -- what is read of a trainer, of a history and of the package
@pytest.mark.parametrize("name", sorted({name for names in MEMBERS.values() for name in names.split()}))
def test_a_public_name_of_the_four_systems_is_there_or_has_a_hint(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)
    if hasattr(trainer, name):
        return
    with pytest.raises(
        AttributeError, match=rf"^Regress has no {name}(\.|:.*)\n  [A-Z].*\.$|^Regress has no {name}\.\n  Did you mean '\w+'\?$"
    ):
        getattr(trainer, name)


ROWS = "Read history.epochs, a list with a dict for each: [row['train_loss'] for row in history.epochs]."
FIRST = "Give the number of epochs first: run(n_epoch, "
OTHERS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "history.history": (lambda trainer: trainer.history.history, AttributeError, ROWS),
    "history[name]": (lambda trainer: trainer.history["train_loss"], TypeError, ROWS),
    "history[Keras' name]": (lambda trainer: trainer.history["loss"], TypeError, ROWS),
    "history[-1]": (lambda trainer: trainer.history[-1], TypeError, "history.last is the newest one."),
    "run(x, y)": (
        lambda trainer: trainer.run(torch.ones(4, 8), torch.ones(4, 1)),
        ConfigError,
        FIRST + "TensorLoader(x, y, batch_size=32)).",
    ),
    "run(loader, 2)": (lambda trainer: trainer.run(make_loader(), 2), ConfigError, FIRST + "loader, valid_loader)."),
    "run(loader)": (lambda trainer: trainer.run(make_loader()), ConfigError, FIRST + "loader, valid_loader)."),
    "set": (
        lambda trainer: trainer.set(learning_rate=1, wd=2),
        OptionError,
        "learning_rate: Did you mean 'lr'?\n  wd: Did you mean 'weight_decay'?",
    ),
    "run(epochs=, train_loader=)": (
        lambda trainer: trainer.run(epochs=1, train_loader=[]),
        OptionError,
        "train_loader: Did you mean 'loader'?",
    ),
    "Learner": (lambda trainer: nbtrain.Learner, ImportError, "Write a subclass of Trainer with a train_step"),  # pyright: ignore[reportAttributeAccessIssue]
}


@pytest.mark.parametrize(("call", "kind", "text"), OTHERS.values(), ids=OTHERS)
def test_what_another_library_would_take_has_a_hint(call: Callable[[Any], Any], kind: type[Exception], text: str) -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader())
    with pytest.raises(kind) as error:
        call(trainer)
    assert str(error.value).partition("\n")[2].strip().endswith(text) or text in str(error.value)
