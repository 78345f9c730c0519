"""Metrics of whole passes: the same from a function, torchmetrics and a compute_metrics, over unequal batches and several loaders."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from samples import DEVICE, Regress, make_data, make_loader, make_model, make_trainer, make_valid
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score
from torchmetrics.regression import MeanSquaredError

from nbtrain import MetricsAddon, TaskLoader, Trainer
from nbtrain.addons.metrics import EvalPrediction, without_ignored
from nbtrain.errors import ConfigError, StepError


class Classify(Trainer):
    """The model's output are logits; labels may be -100."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=-100), "output": logits, "label": y}

    test_step = train_step


Measured = Classify.add_on(MetricsAddon)


def make_batches(*sizes: int, n_classes: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    n = sum(sizes)
    logits, labels = torch.randn(n, n_classes, generator=generator), torch.randint(n_classes, (n,), generator=generator)
    return list(zip(logits.split(list(sizes)), labels.split(list(sizes))))


def evaluate(batches: Any, kind: type[Trainer] = Measured, **options: Any) -> dict[str, float]:
    trainer = kind(torch.nn.Identity(), DEVICE, "test", log_bar=False, **options)
    found = trainer.evaluate(batches)
    return {name: value for name, value in found.items() if name != "loss"}


def trainable(**options: Any) -> Any:
    """A trainer of one layer for three classes."""
    model = torch.nn.Linear(3, 3)
    return Measured(model, DEVICE, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), log_bar=False, **options)


def accuracy(y_true: Any, y_pred: Any) -> float:
    return float((y_pred.argmax(-1) == y_true).mean())


def compute_metrics(eval_pred: Any) -> dict[str, float]:
    predictions, labels = eval_pred
    right = predictions.argmax(-1) == labels
    return {"hf_accuracy": float(right[labels != -100].mean())}


def test_three_kinds_of_metrics_agree_over_unequal_batches() -> None:
    batches = make_batches(5, 1, 7)
    logits, labels = (torch.cat(parts) for parts in zip(*batches))
    exact = float((logits.argmax(-1) == labels).double().mean())
    assert exact not in (0, 1)
    assert evaluate(batches, metrics={"tm": MulticlassAccuracy(3, average="micro"), "own": accuracy, "hf": compute_metrics}) == {
        "tm": pytest.approx(exact, abs=1e-7),
        "own": exact,
        "hf_accuracy": exact,
    }


def test_f1_is_that_of_the_pass_and_not_the_mean_of_its_batches() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    batches = make_batches(5, 2, 6)
    logits, labels = (torch.cat(parts) for parts in zip(*batches))
    exact = sklearn.f1_score(labels, logits.argmax(-1), average="macro")
    metrics = [MulticlassF1Score(3, average="macro"), lambda t, p: {"own": sklearn.f1_score(t, p.argmax(-1), average="macro")}]
    assert evaluate(batches, metrics=metrics) == {"f1_score": pytest.approx(exact), "own": pytest.approx(exact)}


def test_ignored_labels_are_left_out_of_all_kinds() -> None:
    logits = torch.eye(3)[None].repeat(2, 1, 1)  # two sequences of three tokens, each predicted as its position
    labels = torch.tensor([[0, 1, -100], [0, 0, -100]])
    metrics = {"own": accuracy, "tm": MulticlassAccuracy(3, average="micro"), "hf": compute_metrics}
    assert evaluate([(logits, labels)], metrics=metrics) == {"own": 0.75, "tm": 0.75, "hf_accuracy": 0.75}
    kept, _ = without_ignored(labels, logits, None)
    assert kept is labels


def test_sequences_of_different_lengths_are_joined() -> None:
    short = torch.eye(3)[None, :2], torch.tensor([[0, 1]])
    long = torch.eye(3)[None], torch.tensor([[0, 1, 0]])
    shapes: list[Any] = []

    def look(eval_pred: EvalPrediction) -> dict[str, float]:
        shapes.append((eval_pred.predictions.shape, eval_pred.label_ids.tolist()))
        return {}

    assert evaluate([short, long], metrics=[accuracy, look]) == {"accuracy": 0.8}
    assert shapes == [((2, 3, 3), [[0, 1, -100], [0, 1, 0]])]


def test_labels_that_are_no_integers_are_never_ignored() -> None:
    label, output = torch.tensor([-100.0, 1.0]), torch.tensor([1.0, 2.0])
    assert without_ignored(label, output)[0] is label


KINDS: dict[str, Any] = {
    "function": (accuracy, {"accuracy"}),
    "dict": ({"own": accuracy}, {"own"}),
    "torchmetrics": (MulticlassAccuracy(3), {"accuracy"}),
    "collection": (MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)]), {"MulticlassAccuracy", "MulticlassF1Score"}),
    "compute_metrics": (compute_metrics, {"hf_accuracy"}),
}
UNLABELLED = [(torch.eye(3), torch.full((3,), -100))]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_without_any_label_has_nan_and_a_note(kind: str, tmp_path: Path) -> None:
    metrics, names = KINDS[kind]
    trainer = Measured(torch.nn.Identity(), DEVICE, "test", log_bar=False, metrics=metrics)
    labelled = trainer.evaluate(make_batches(4, 2))
    unlabelled = trainer.evaluate(UNLABELLED)
    assert labelled.keys() == unlabelled.keys() == names | {"loss"}
    assert all(math.isnan(unlabelled[name]) != math.isnan(labelled[name]) for name in names)


def test_a_metric_that_was_never_computed_is_nan_under_its_own_name() -> None:
    assert {name: str(value) for name, value in evaluate(UNLABELLED, metrics=compute_metrics).items()} == {"compute_metrics": "nan"}


def test_a_validation_without_labels_does_not_end_the_run_and_is_said_once(tmp_path: Path) -> None:
    batches = make_batches(8, 8)
    metrics = [accuracy, MulticlassF1Score(3, average="micro")]
    trainer = trainable(monitor="val_f1_score", metrics=metrics, save_path=tmp_path)
    assert trainer.run(2, batches, UNLABELLED).status == "completed"
    assert [str(row["val_accuracy"]) + str(row["val_f1_score"]) for row in trainer.history.epochs] == ["nannan"] * 2
    events = [json.loads(line) for line in (trainer.run_dir / "events.jsonl").read_text().splitlines()]  # pyright: ignore[reportOptionalOperand]
    assert [event["data"]["text"] for event in events if event["kind"] == "note"] == [
        "A validation pass has only labels of -100, so these metrics are nan: f1_score, accuracy."
    ]
    trainer.run(1, batches, batches)
    assert trainer.history.best == trainer.history.last


@pytest.mark.parametrize("metrics", [compute_metrics, lambda eval_pred: compute_metrics(eval_pred)], ids=["function", "lambda"])
def test_monitored_metric_is_nan_while_all_labels_are_ignored(metrics: Any) -> None:
    """Before the function has returned the names of its metrics."""
    trainer = trainable(monitor="val_hf_accuracy", monitor_mode="max", metrics=metrics)
    assert trainer.run(1, make_batches(8, 8), UNLABELLED).status == "completed"
    assert str(trainer.history.last["val_hf_accuracy"]) == "nan" and "val_<lambda>" not in trainer.history.last
    trainer.run(1, make_batches(8, 8), make_batches(8, 8))
    assert trainer.history.best == trainer.history.last


def test_one_loader_of_several_without_labels() -> None:
    inputs, labels = torch.randn(20, 3), torch.full((20,), -100)
    loaders = [DataLoader(TensorDataset(inputs, torch.arange(20) % 3), 8), DataLoader(TensorDataset(inputs, labels), 8)]
    trainer = trainable(metrics=[accuracy, compute_metrics])
    trainer.run(1, make_batches(4, 2), loaders)
    row = {name.removeprefix("val_"): value for name, value in trainer.history.last.metrics.items()}
    assert row["accuracy"] == row["accuracy/0"] and not math.isnan(row["accuracy"])
    assert math.isnan(row["accuracy/1"]) and math.isnan(row["hf_accuracy/1"]) and "compute_metrics/1" not in row


# -- tasks
class Tasks(Trainer):
    """Task "kind" is a classification, task "size" a regression."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch.batch
        output = self.model(x)
        loss = cross_entropy(output, y) if batch.name == "kind" else (output[:, 0] - y).square().mean()
        return {"loss": loss, "output": output if batch.name == "kind" else output[:, 0], "label": y}

    test_step = train_step


def tasks() -> TaskLoader:
    size = [(logits, logits.sum(1)) for logits, _ in make_batches(3, 4, 5)]
    return TaskLoader({"kind": make_batches(6, 2), "size": size})


def mae(y_true: Any, y_pred: Any) -> float:
    return float(abs(y_true - y_pred).mean())


@pytest.mark.parametrize("squared", [MeanSquaredError(), lambda t, p: {"mean_squared_error": float(((t - p) ** 2).mean())}])
def test_each_task_has_its_metrics_by_its_name(squared: Any) -> None:
    kind, size = make_batches(6, 2), [(logits[:, 0], logits.sum(1)) for logits, _ in make_batches(3, 4, 5)]
    metrics = {"kind": accuracy, "size": [mae, squared]}
    found = evaluate(tasks(), Tasks.add_on(MetricsAddon), metrics=metrics)
    outputs, labels = (torch.cat(parts) for parts in zip(*size))
    assert {name: value for name, value in found.items() if "loss" not in name} == {
        "accuracy_kind": evaluate(kind, metrics=accuracy)["accuracy"],
        "mae_size": pytest.approx(float((outputs - labels).abs().mean())),
        "mean_squared_error_size": pytest.approx(float((outputs - labels).square().mean())),
    }


def test_metrics_for_all_tasks_are_of_all_and_of_each() -> None:
    loader = TaskLoader({"a": make_batches(6, 2), "b": make_batches(5)})
    trainer = type("Named", (Classify,), {"test_step": lambda self, batch: Classify.train_step(self, batch.batch)}).add_on(MetricsAddon)
    found = evaluate(loader, trainer, metrics=accuracy)
    of = {name: evaluate(batches, metrics=accuracy)["accuracy"] for name, batches in loader.loaders.items()}
    both = evaluate([*make_batches(6, 2), *make_batches(5)], metrics=accuracy)["accuracy"]
    assert {name: value for name, value in found.items() if "loss" not in name} == {
        "accuracy": both,
        "accuracy_a": of["a"],
        "accuracy_b": of["b"],
    }


def test_scalars_of_a_step_are_those_of_all_tasks_and_of_each(tmp_path: Path) -> None:
    trainer = Tasks(torch.nn.Linear(3, 3), DEVICE, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), log_bar=False)
    trainer.run(1, tasks(), tasks())
    row = trainer.history.last
    for phase in ("train", "val"):
        kind, size = row[f"{phase}_loss_kind"], row[f"{phase}_loss_size"]
        assert row[f"{phase}_loss"] == pytest.approx((8 * kind + 12 * size) / 20)
    assert len(trainer.log_train["loss_kind"]) == 2 and len(trainer.log_train["loss_size"]) == 3


def test_validation_within_an_epoch_does_not_mix_with_training() -> None:
    metric = MeanSquaredError()
    trainer = make_trainer(Regress.add_on(MetricsAddon), metrics=metric, metrics_in_training=True, lightning={"val_check_interval": 2})
    trainer.model[2].p = 0.0
    trainer.run(3, make_loader(), make_valid())
    for row in trainer.history.epochs:
        assert row["train_mean_squared_error"] == pytest.approx(row["train_loss"], rel=1e-6)
        assert row["val_mean_squared_error"] == pytest.approx(row["val_loss"], rel=1e-6)
    assert metric.update_count == 0  # the user's own was not touched


def test_metric_can_be_monitored_and_tests_never_touch_the_best_validation() -> None:
    values = iter([0.3, 0.6, 0.2, 0.9])
    trainer = make_trainer(Regress.add_on(MetricsAddon), metrics={"f1": lambda t, p: next(values)}, monitor="val_f1")
    result = trainer.run(3, make_loader(), make_valid())
    trainer.evaluate(make_valid())
    assert (trainer.history.best["epoch"], trainer.history.best["val_f1"]) == (2, 0.6)
    assert result.metrics["best_valid"]["eval_f1"] == 0.6 and result.metrics["test"]["test_f1"] == 0.9


def test_several_validation_loaders_have_metrics_together_and_each() -> None:
    loaders = [DataLoader(make_data(20, seed), 8) for seed in (1, 2)]
    trainer = make_trainer(Regress.add_on(MetricsAddon), metrics=MeanSquaredError(), model=make_model())
    trainer.run(1, make_loader(), loaders)
    row, model = trainer.history.last, trainer.model.cpu().eval()
    with torch.no_grad():
        each = [float((model(data.dataset.tensors[0]) - data.dataset.tensors[1]).square().mean()) for data in loaders]
    assert [row["val_mean_squared_error/0"], row["val_mean_squared_error/1"]] == pytest.approx(each)
    assert row["val_mean_squared_error"] == pytest.approx(sum(each) / 2)


def test_what_is_no_metric_is_refused() -> None:
    for wrong in (3, "accuracy", lambda: 0):
        with pytest.raises(ConfigError, match="is not a metric"):
            evaluate([], metrics=[wrong])
    with pytest.raises(ConfigError, match="Two metrics are named 'accuracy'"):
        evaluate([], metrics=[accuracy, MulticlassAccuracy(3)])


def test_metric_that_is_no_number_and_step_without_label_are_named() -> None:
    with pytest.raises(StepError, match=r"The metric 'confusion_matrix' is a Tensor of shape \(3, 3\), not a number"):
        evaluate(make_batches(4), metrics=MulticlassConfusionMatrix(3))
    bare = Trainer.from_steps(lambda self, batch: {"output": batch[0]}).add_on(MetricsAddon)
    with pytest.raises(StepError, match="test_step returned no tensor 'label'"):
        evaluate(make_batches(4), bare, metrics=accuracy)


def test_error_in_a_function_says_what_it_was_given() -> None:
    def broken(y_true: Any, y_pred: Any) -> float:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        evaluate(make_batches(4), metrics=broken)
    assert caught.value.__notes__[0] == "MetricsAddon: broken was called with labels (4,) and outputs (4, 3)"


# -- the result
def test_result_answers_as_the_seed_does_and_lists_its_last_metrics_only() -> None:
    trainer = make_trainer()
    metrics = trainer.run(2, make_loader(), make_valid()).metrics
    best = trainer.history.best
    assert metrics["best_valid"] == {"eval_loss": best["val_loss"], "eval_mae": best["val_mae"]}
    assert metrics["train_metrics_history"][-1]["train_loss"] == metrics["train_loss"] and len(metrics["valid"]) == 2
    assert set(metrics) == {"train_loss", "train_mae", "val_loss", "val_mae"} and metrics["test"] == {}
    assert repr(metrics) == repr(trainer.history) and "★" in str(metrics)
    with pytest.raises(KeyError):
        metrics["best"]


def test_metrics_are_saved_by_split(tmp_path: Path) -> None:
    trainer = make_trainer(save_path=tmp_path)
    with pytest.raises(ConfigError, match="no run folder"):
        trainer.save_metrics("test", {"loss": 1.0})
    result = trainer.run(1, make_loader())
    path = trainer.save_metrics("train", result.metrics)
    assert path == trainer.run_dir / "train_results.json" and json.loads(path.read_text()) == dict(result.metrics)
    with pytest.raises(ConfigError, match="can't be part of a file name"):
        trainer.save_metrics("../test", {})
    with pytest.raises(ConfigError, match="There are no metrics of 'test' yet"):
        trainer.save_metrics("test")
    trainer.toggle("test")
    trainer.run(1, make_valid())
    assert json.loads(trainer.save_metrics("test").read_text()) == trainer.history.tests[-1].metrics
    assert json.loads(trainer.save_metrics("train").read_text()) == {n: v for n, v in result.metrics.items() if n.startswith("train_")}


# -- metrics of one evaluation
class Labelled(Regress):
    def test_step(self, batch: Any) -> dict[str, Any]:
        return super().test_step(batch) | {"output": self.model(batch[0]), "label": batch[1]}


def largest_error(y_true: Any, y_pred: Any) -> float:
    return float(abs(y_true - y_pred).max())


@pytest.mark.parametrize("kind", [Labelled, Labelled.add_on(MetricsAddon(metrics={"own": largest_error}))])
def test_one_evaluation_computes_the_metrics_it_is_asked_for(kind: Any) -> None:
    trainer, loader = make_trainer(kind), make_valid()
    errors = [(trainer.predict(x) - y).abs().max() for x, y in loader]
    asked = {"worst": largest_error, "mse": MeanSquaredError()}
    found = trainer.evaluate(loader, metrics=asked)
    assert found["worst"] == pytest.approx(float(max(errors))) and found["mse"] == pytest.approx(found["loss"])
    assert found.keys() - {"own"} == {"loss", "mae", "worst", "mse"} and trainer.history.tests[-1]["test_worst"] == found["worst"]
    assert trainer.evaluate(loader).keys() - {"own"} == {"loss", "mae"}

    in_run: list[Any] = []
    trainer.lightning["callbacks"] = [LambdaCallback(on_train_start=lambda *args: in_run.append(trainer.evaluate(loader, metrics=asked)))]
    trainer.run(1, make_loader())
    assert in_run[0]["worst"] == found["worst"] and in_run[0]["mse"] == pytest.approx(found["mse"])
    with pytest.raises(ConfigError, match=r"metrics='f1' is not a metric"):
        trainer.evaluate(loader, metrics="f1")


def test_a_metric_with_the_name_of_one_that_the_step_returns_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MetricsAddon computes 'loss', and the step .*\n.*\"whole_loss\""):
        evaluate(make_batches(4, 4), metrics={"loss": accuracy})
    plain = Classify(torch.nn.Identity(), DEVICE, "test", log_bar=False)
    with pytest.raises(ConfigError, match="computes 'loss'"):
        plain.evaluate(make_batches(4, 4), metrics={"loss": accuracy})
