"""Callbacks and models of transformers take part in a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from samples import DEVICE, Breaks, Broken, Regress, make_loader, make_trainer, make_valid, same_weights, without_times
from torch.nn.functional import cross_entropy

from nbtrain import AccumulationAddon, ConfigError, HFCallback, ModelTrainer, StateManagerAddon

EVENTS = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]


class Notes(transformers.TrainerCallback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.logs: list[dict[str, float]] = []


def _note(event: str) -> Any:
    def method(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(event.removeprefix("on_"))
        self.logs += [more["logs"]] if event == "on_log" else []

    return method


for _event in EVENTS:
    setattr(Notes, _event, _note(_event))


def run(callback: Any, n_epoch: int = 1, kind: Any = Regress, valid: Any = None, **options: Any) -> Any:
    lightning = {"callbacks": [HFCallback(callback)]} | options.pop("lightning", {})
    trainer = make_trainer(kind, lightning=lightning, **options)
    trainer.run(n_epoch, make_loader(32), valid)
    return trainer


def test_events_come_in_this_order() -> None:
    notes = Notes()
    run(notes, valid=make_valid(), lightning={"log_every_n_steps": 2})
    step = ["step_begin", "pre_optimizer_step", "optimizer_step", "step_end"]
    assert notes.events == ["train_begin", "epoch_begin", *step, *step, "log", "log", "evaluate", "epoch_end", "train_end"]


def test_batches_within_a_window_are_substeps() -> None:
    notes = Notes()
    run(notes, kind=Regress.add_on(AccumulationAddon), accumulate=2)
    inner = ["step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"]
    assert notes.events == ["train_begin", "epoch_begin", *inner, "epoch_end", "train_end"]


def test_logs_hold_the_mean_loss_of_the_updates_since_the_last() -> None:
    notes = Notes()
    trainer = run(notes, lightning={"log_every_n_steps": 2})
    assert notes.logs == [{"loss": pytest.approx(sum(trainer.log_train["loss"]) / 2), "learning_rate": 0.01, "epoch": 1.0}]


def test_early_stopping_of_transformers_stops_the_run_as_it_would_there() -> None:
    class Worse(HFCallback):
        """Shows the callback losses that get worse after the second epoch."""

        def _notify(self, event: str, *args: Any, **more: Any) -> None:
            if event == "on_evaluate":
                more["metrics"]["eval_loss"] = [3.0, 2.0, 2.5, 2.1, 2.0][int(self.state.epoch) - 1]
            super()._notify(event, *args, **more)

    callback = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = make_trainer(lightning={"callbacks": [Worse(callback)]})
    result = trainer.run(9, make_loader(32), make_valid())
    assert (result.status, result.reason) == ("stopped", "EarlyStoppingCallback set should_training_stop")
    assert trainer.counts.epoch == 4


class Asks(transformers.TrainerCallback):
    def __init__(self, flag: str, at: int = 1) -> None:
        self.flag, self.at = flag, at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.at:
            setattr(control, self.flag, True)
        return control


def test_a_save_and_a_validation_that_are_asked_for_follow_after_the_batch(tmp_path: Path) -> None:
    trainer = run(Asks("should_save"), kind=Regress.add_on(StateManagerAddon), save_path=tmp_path)
    assert (trainer.run_dir / "checkpoints" / "epoch=0-step=1.ckpt").exists()
    notes = Notes()
    notes.on_step_end = lambda args, state, control, **more: setattr(control, "should_evaluate", state.global_step == 1)  # type: ignore[method-assign]
    run(notes, valid=make_valid())
    assert notes.events.count("evaluate") == 2


def test_what_can_not_be_had_is_refused_by_name() -> None:
    texts = []
    for flag in ("should_save", "should_evaluate", "should_epoch_stop"):
        with pytest.raises(ConfigError) as caught:
            run(Asks(flag))
        texts.append(str(caught.value).splitlines()[0])
    assert texts == [
        "Asks sets should_save, which needs a run of nbtrain's trainer with StateManagerAddon.",
        "Asks sets should_evaluate, which needs a run of nbtrain's trainer with a valid_loader.",
        "Asks sets should_epoch_stop, and an epoch can't be skipped.",
    ]


def test_an_argument_that_is_unknown_here_is_named_and_can_be_given() -> None:
    class Reads(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.found = args.report_to

    with pytest.raises(ConfigError, match="Reads reads args.report_to, which nbtrain's RunArguments lack"):
        run(Reads())


def test_what_is_no_callback_of_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match="callback must be a TrainerCallback of transformers, got <built-in function print>"):
        HFCallback(print)


def test_a_single_batch_is_no_run_to_tell_of() -> None:
    notes = Notes()
    trainer = make_trainer(lightning={"callbacks": [HFCallback(notes)]})
    trainer.run_batch(next(iter(make_loader())))
    assert notes.events == []


def test_state_and_patience_are_resumed_with_the_run(tmp_path: Path) -> None:
    def made(path: Path, *callbacks: Any) -> tuple[Any, Any]:
        early = HFCallback(transformers.EarlyStoppingCallback(early_stopping_patience=9, early_stopping_threshold=1e9))
        kind: Any = Regress.add_on(StateManagerAddon)
        lightning = {"callbacks": [early, *callbacks], "log_every_n_steps": 2}
        return make_trainer(kind, save_path=path, every_n_steps=1, lightning=lightning), early

    whole, expected = made(tmp_path / "whole")
    torch.manual_seed(1)
    whole.run(3, make_loader(32), make_valid())
    broken, _ = made(tmp_path / "broken", Breaks(4))
    torch.manual_seed(1)
    with pytest.raises(Broken):
        broken.run(3, make_loader(32), make_valid())
    again, early = made(tmp_path / "broken")
    again.run(3, make_loader(32), make_valid(), resume="auto")
    assert same_weights(whole.model, again.model)
    assert early.state.log_history == expected.state.log_history
    assert early.callback.early_stopping_patience_counter == expected.callback.early_stopping_patience_counter == 2


# -- models
TEXT = (transformers.__doc__ or "") + (re.__doc__ or "") + (torch.optim.Adam.__doc__ or "")


def blocks(length: int = 32) -> list[dict[str, torch.Tensor]]:
    codes = torch.tensor(list(TEXT.encode()))
    return [{"input_ids": block, "labels": block} for block in codes[: len(codes) // length * length].view(-1, length)]


def tiny(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **options
    )
    return transformers.GPT2LMHeadModel(config)


def language(model: Any, **options: Any) -> Any:
    data = blocks()
    options = {"train_dataset": data[:-8], "eval_dataset": data[-8:], "learning_rate": 3e-3, "seed": 0} | options
    return ModelTrainer(model, device=DEVICE, log_bar=False, **options)


def test_a_model_made_from_its_config_learns_to_read(tmp_path: Path) -> None:
    trainer = language(tiny(), perplexity=True, batch_size=16)
    result = trainer.run(2)
    assert result.last["val_perplexity"] < 60 < 256
    assert trainer.save_pretrained(tmp_path / "model") == tmp_path / "model"
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert same_weights(again, trainer.model)


def test_gradient_checkpointing_changes_memory_and_no_number() -> None:
    plain, thrifty = language(tiny()), language(tiny(), gradient_checkpointing=True)
    found = [any(getattr(part, "gradient_checkpointing", False) for part in t.model.modules()) for t in (plain, thrifty)]
    assert found == [False, True]
    for trainer in (plain, thrifty):
        torch.manual_seed(5)
        trainer.run(1)
    assert without_times(plain.history.epochs) == without_times(thrifty.history.epochs)


def test_a_model_of_transformers_with_its_own_loss_can_have_another() -> None:
    class Smoothed(ModelTrainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
            return {"loss": cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)}

    trainer = Smoothed(tiny(), device=DEVICE, log_bar=False, mode="test", eval_dataset=blocks()[:8])
    assert trainer.evaluate()["loss"] > 0
