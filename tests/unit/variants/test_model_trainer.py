"""Models that return their loss: datasets for loaders, the default optimizer, perplexity, and models of Hugging Face."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from samples import DEVICE, PLACE, Breaks, Broken, make_data, make_model, same_weights, some, without_times
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset

from nbtrain import ConfigError, MetricsAddon, ModelTrainer, OptionError, StateManagerAddon, StepError
from nbtrain.variants.model_trainer import perplexity


class Returns(nn.Module):
    """Returns its loss among other things."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.net(x)
        return {"loss": mse_loss(logits, labels), "logits": logits, "hidden": None}


def named(n: int = 70) -> list[dict[str, torch.Tensor]]:
    return [{"x": x, "labels": y} for x, y in make_data(n)]


def make(model: nn.Module | None = None, kind: type[ModelTrainer] = ModelTrainer, **options: Any) -> Any:
    return kind(model or Returns(), **({"device": DEVICE, "log_bar": False} | options))


# -- datasets
def test_datasets_stand_for_loaders_and_are_shuffled_by_seed_and_epoch() -> None:
    runs = [make(train_dataset=named(), eval_dataset=named(40), batch_size=16, learning_rate=1e-2, seed=seed) for seed in (3, 3, 4)]
    models = []
    for trainer in runs:
        torch.manual_seed(0)
        trainer.run(2)
        models.append(trainer.model)
    assert runs[0].history.last.keys() >= {"train_loss", "val_loss"} and len(runs[0].log_train["loss"]) == 5
    assert same_weights(models[0], models[1]) and not same_weights(models[0], models[2])


def test_a_second_run_goes_on_with_the_order_of_its_epochs() -> None:
    whole, parted = (make(train_dataset=named(), learning_rate=1e-2, seed=0) for _ in range(2))
    whole.run(3)
    parted.run(1)
    parted.run(2)
    assert same_weights(whole.model, parted.model)


def test_a_loader_that_is_given_wins() -> None:
    trainer = make(train_dataset=named(), eval_dataset=named(40), batch_size=16, learning_rate=1e-2)
    batches = [{"x": torch.ones(2, 8), "labels": torch.ones(2, 1)}]
    trainer.run(1, batches, batches * 3)
    assert len(trainer.log_train["loss"]) == 1 and len(trainer.log_test["loss"]) == 3


def test_without_loader_and_dataset_there_is_nothing_to_run_on() -> None:
    with pytest.raises(ConfigError) as caught:
        make().run(1)
    text = "Neither a loader nor a dataset was given.\n  Make the trainer with train_dataset=..., or give a loader."
    assert str(caught.value) == text
    with pytest.raises(ConfigError, match="eval_dataset"):
        make(mode="test", train_dataset=named()).run(1)


def test_mode_test_and_evaluate_read_the_evaluation_set() -> None:
    trainer = make(mode="test", eval_dataset=named(40))
    assert trainer.optimizer is None
    assert trainer.evaluate() == {"loss": trainer.run(1).metrics["test_loss"]}


def test_a_dataset_is_evaluated_with_the_trainers_collate_fn() -> None:
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([x for x, _ in samples]), "labels": torch.stack([y for _, y in samples])}

    trainer = make(mode="test", collate_fn=collate)
    assert trainer.evaluate(make_data(40)).keys() == {"loss"}


def test_a_short_last_batch_is_dropped_in_training_alone() -> None:
    trainer = make(train_dataset=named(20), eval_dataset=named(20), batch_size=16, drop_last=True, learning_rate=1e-2)
    trainer.run(1)
    assert len(trainer.log_train["loss"]) == 1 and len(trainer.log_test["loss"]) == 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(named(20))


def test_a_stream_is_a_dataset_too() -> None:
    trainer = make(train_dataset=Stream(), batch_size=8, learning_rate=1e-2)
    trainer.run(1)
    assert len(trainer.log_train["loss"]) == 3


def test_options_of_loading_that_can_not_work_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="prefetch_factor needs num_workers"):
        make(train_dataset=named(), prefetch_factor=2)
    with pytest.raises(ConfigError, match="batch_size must be a positive integer, got 0"):
        make(train_dataset=named(), batch_size=0)


@pytest.mark.parametrize("num_workers", some([0, 2], 2))
def test_a_run_on_datasets_is_resumed_in_mid_epoch_bit_for_bit(num_workers: int, tmp_path: Path) -> None:
    kind: Any = ModelTrainer.add_on(StateManagerAddon)

    def made(path: Path, **options: Any) -> Any:
        options |= {"train_dataset": named(), "eval_dataset": named(40), "batch_size": 16, "num_workers": num_workers}
        return make(kind=kind, seed=1, save_path=path, every_n_steps=2, learning_rate=1e-2, perplexity=True, **options)

    whole = made(tmp_path / "whole")
    whole.run(2)
    with pytest.raises(Broken):
        made(tmp_path / "broken", lightning={"callbacks": [Breaks(8)]}).run(2)
    again = made(tmp_path / "broken")
    torch.manual_seed(99)
    again.run(2, resume="auto")
    assert same_weights(whole.model, again.model)
    assert without_times(whole.history.epochs) == without_times(again.history.epochs)


# -- the optimizer
def test_the_default_optimizer_is_adamw_with_decay_on_matrices() -> None:
    trainer = make(learning_rate=0.1, weight_decay=0.3)
    assert type(trainer.optimizer) is torch.optim.AdamW
    found = {group["weight_decay"]: [p.ndim for p in group["params"]] for group in trainer.optimizer.param_groups}
    assert found == {0.3: [2, 2], 0.0: [1, 1]} and {group["lr"] for group in trainer.optimizer.param_groups} == {0.1}
    assert {group["lr"] for group in make().optimizer.param_groups} == {5e-5}


def test_an_optimizer_and_a_rate_contradict_each_other() -> None:
    with pytest.raises(ConfigError) as caught:
        make(optimizer=torch.optim.SGD, learning_rate=0.1, weight_decay=0.1)
    text = "optimizer and learning_rate and weight_decay are both given.\n  Leave optimizer out, or pass these arguments to it."
    assert str(caught.value) == text


def test_a_rate_that_can_not_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="learning_rate=-1.0 with weight_decay=0.01 can't train"):
        make(learning_rate=-1.0)


# -- perplexity
def test_perplexity_is_the_exponential_of_each_passs_mean_loss() -> None:
    trainer = make(train_dataset=named(), eval_dataset=named(40), learning_rate=1e-2, perplexity=True, monitor="val_perplexity")
    row = trainer.run(2).last
    assert row["val_perplexity"] == math.exp(row["val_loss"]) and row["train_perplexity"] == math.exp(row["train_loss"])
    assert trainer.history.best["val_perplexity"] == min(r["val_perplexity"] for r in trainer.history.epochs)
    found = trainer.evaluate()
    assert found["perplexity"] == math.exp(found["loss"])


def test_perplexity_of_a_large_loss_is_infinite_and_of_nan_is_nan() -> None:
    assert perplexity(1e6) == math.inf and math.isnan(perplexity(math.nan)) and perplexity(0.0) == 1.0


def test_perplexity_under_a_lightning_trainer_of_ones_own() -> None:
    trainer = make(learning_rate=1e-2, perplexity=True)
    loader = torch.utils.data.DataLoader(named(), 16)
    other = L.Trainer(**trainer.lightning_args(), max_epochs=1)
    with pytest.warns(UserWarning):
        other.fit(trainer.as_lightning_module(), loader)
    assert float(other.callback_metrics["train_perplexity"]) == pytest.approx(math.exp(other.callback_metrics["train_loss"]))


# -- what the model can do
def test_a_model_without_save_pretrained_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make().save_pretrained(tmp_path)
    assert str(caught.value) == "Returns has no save_pretrained.\n  Write its weights with save_model(filename)."


def test_a_model_without_gradient_checkpointing_says_so() -> None:
    with pytest.raises(ConfigError, match="Returns has no gradient_checkpointing_enable"):
        make(gradient_checkpointing=True)


def test_the_main_process_is_the_one_of_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    assert trainer.is_main_process
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert not trainer.is_main_process


# -- steps
def test_loss_fn_makes_the_loss_of_what_a_plain_model_returns() -> None:
    trainer = make(make_model(), mode="test", loss_fn=mse_loss, eval_dataset=make_data(40), batch_size=40)
    x, y = make_data(40).tensors
    with torch.no_grad():
        expected = mse_loss(trainer.model.cpu().eval()(x), y)
    assert trainer.evaluate()["loss"] == pytest.approx(float(expected))


def test_prepare_batch_is_asked_for_every_batch() -> None:
    class Halved(ModelTrainer):
        def prepare_batch(self, batch: Any) -> Any:
            return {"x": batch[0], "labels": batch[1] / 2}

    trainer = make(kind=Halved, mode="test", eval_dataset=make_data(40))
    assert trainer.evaluate()["loss"] < make(mode="test", eval_dataset=named(40)).evaluate()["loss"]


def test_a_model_without_a_loss_and_without_loss_fn_says_so() -> None:
    with pytest.raises(StepError, match=rf"The model returned Tensor \(8, 1\) float32{PLACE}, without a loss"):
        make(make_model(), mode="test").evaluate([torch.ones(8, 8)])


# -- arguments
def test_an_unknown_argument_is_answered_with_those_of_all_classes() -> None:
    with pytest.raises(OptionError, match="batch_sise.*\n.*batch_size"):
        make(batch_sise=4)
    with pytest.raises(OptionError, match="gradient_clp.*\n.*gradient_clip"):
        make(gradient_clp=1.0)


def test_a_composed_class_shows_the_arguments_of_all_classes() -> None:
    parameters = inspect.signature(ModelTrainer.add_on(MetricsAddon)).parameters
    assert list(parameters)[:5] == ["model", "device", "mode", "optimizer", "scheduler"]
    assert {"train_dataset", "learning_rate", "log_bar", "seed", "metrics"} <= parameters.keys() and "options" not in parameters


def test_arguments_are_kept_for_the_run_folder(tmp_path: Path) -> None:
    trainer = make(train_dataset=named(20), learning_rate=1e-2, save_path=tmp_path)
    trainer.run(1)
    arguments = json.loads((trainer.run_dir / "provenance.json").read_text())["arguments"]
    assert (arguments["learning_rate"], arguments["batch_size"]) == (0.01, 8)


class HFDataset:
    """As datasets.Dataset is: samples by number, a length, and none of torch's classes."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, n: int, shift: float = 0.0) -> None:
        self.samples = [{"x": torch.tensor([float(i)]), "labels": torch.tensor([i + shift])} for i in range(n)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.samples)


class OneLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def test_a_dataset_of_hugging_face_is_evaluated_in_batches() -> None:
    trainer = ModelTrainer(OneLayer(), DEVICE, mode="test", batch_size=4, log_bar=False)
    near, far = trainer.evaluate(HFDataset(10)), trainer.evaluate(HFDataset(10, 5.0), batch_size=3)
    both = trainer.evaluate({"near": HFDataset(10), "far": HFDataset(10, 5.0)})
    assert (both["loss/near"], both["loss/far"]) == pytest.approx((near["loss"], far["loss"]))
    assert both["loss"] == pytest.approx((near["loss"] + far["loss"]) / 2)


def test_several_evaluation_datasets_validate_a_run_by_name() -> None:
    data = {"near": HFDataset(10), "far": HFDataset(10, 5.0)}
    trainer = ModelTrainer(OneLayer(), DEVICE, train_dataset=HFDataset(10), eval_dataset=data, batch_size=4, log_bar=False)
    trainer.run(1)
    assert {"val_loss", "val_loss/near", "val_loss/far"} <= set(trainer.history.epochs[0])
