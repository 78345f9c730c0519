"""The validation is tried on one batch before epoch 1: what is found, what is left as it was, and where it is not tried."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from samples import DEVICE, Regress, make_data, make_loader, make_model, make_trainer, make_valid, on_device, same_weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import CatMetric, MeanMetric

import nbtrain
from nbtrain import (
    AddOnBase,
    ConfigError,
    EarlyStoppingAddon,
    MetricsAddon,
    ModelTrainer,
    MultiGPUAddon,
    MultiOptimizerTrainer,
    SeededLoader,
    StateManagerAddon,
    StepError,
    TaskLoader,
    TensorLoader,
    Trainer,
)
from nbtrain.data.first_batch import first_batch
from nbtrain.data.loader import BatchList
from nbtrain.optim.joint_optimizer import single
from nbtrain.rng import random_state
from nbtrain.run.dry_run import DryRun
from nbtrain.state.kept_objects import kept_objects


def _counting(kind: type[Trainer] = Regress) -> tuple[type[Trainer], list[Any]]:
    """A class whose `test_step` notes how it is called in a list that no probe finds."""
    calls: list[Any] = []
    note = [calls.append].__getitem__

    class Counting(kind):
        def test_step(self, batch: Any) -> dict[str, Any]:
            note(0)((self.mode, self.model.training, torch.is_grad_enabled(), self.control.state))
            return super().test_step(batch)

    return Counting, calls


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(np.array_equal(np.asarray(left), np.asarray(right)))


# -- what it finds
class Transposed(Regress):
    def test_step(self, batch: Any) -> dict[str, Any]:
        return super().test_step((batch[0].T, batch[1]))


def test_error_of_the_step_is_raised_before_epoch_1_with_its_place(tmp_path: Path) -> None:
    trainer = make_trainer(Transposed, save_path=tmp_path / "runs")
    events: list[Any] = []
    trainer.sinks.append(type("Sink", (), {"update": staticmethod(events.append)})())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        trainer.run(3, make_loader(), make_valid())
    shapes = "list of 2 ([0]: Tensor (16, 8) float32, [1]: Tensor (16, 1) float32)"
    assert error.value.__notes__ == [
        f"Transposed.test_step, on a batch of valid_loader before epoch 1: the batch is {shapes}",
        "The run has not begun, no weight has changed: correct test_step, then run the cell again.",
    ]
    assert (trainer.result, trainer.counts.processed, trainer.train_state.run, events) == (None, 0, 0, [])
    assert not (tmp_path / "runs").exists() and trainer.mode == "train" and trainer.model.training


RETURNED: dict[str, tuple[Any, str]] = {
    "text": ({"note": "good"}, "test_step returned 'note' as str, which is neither a number nor made of tensors."),
}


@pytest.mark.parametrize(("returned", "text"), RETURNED.values(), ids=RETURNED)
def test_output_that_cannot_be_used_is_refused_before_epoch_1(returned: Any, text: str) -> None:
    class Broken(Regress):
        def test_step(self, batch: Any) -> Any:
            return returned

    trainer = make_trainer(Broken)
    with pytest.raises(StepError) as error:
        trainer.run(1, make_loader(), make_valid())
    place = "Broken.test_step, on a batch of valid_loader before epoch 1"
    assert str(error.value).startswith(f"{text}\n  {place}") and trainer.counts.processed == 0


def test_dataset_that_raises_is_found_before_epoch_1() -> None:
    class Short(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            raise KeyError(index)

        def __len__(self) -> int:
            return 4

    trainer = make_trainer()
    with pytest.raises(KeyError):
        trainer.run(1, make_loader(), DataLoader(Short(), 2))
    assert trainer.counts.processed == 0 and trainer.result is None


def test_step_is_tried_as_in_a_validation_once_for_a_trainer() -> None:
    kind, calls = _counting()
    trainer = make_trainer(kind)
    trainer.run(1, make_loader(), make_valid())
    assert calls[0] == ("test", False, False, "idle") and [call[3] for call in calls[1:]] == ["running"] * 3
    trainer.run(1, make_loader(), make_valid())
    assert [call[3] for call in calls].count("idle") == 1


def test_probe_reads_one_batch_and_calls_the_step_once() -> None:
    kind, calls = _counting()
    indices: list[int] = []
    note = [indices.append].__getitem__

    class Read(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            note(0)(index)
            return super().__getitem__(index)

    DryRun(make_trainer(kind), 1, None, DataLoader(Read(*make_data().tensors), 16, shuffle=True)).try_steps()
    assert len(calls) == 1 and indices == list(range(16))


def test_steps_that_have_changed_are_tried_again() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader(), make_valid())
    trainer.__class__ = Transposed
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.run(1, make_loader(), make_valid())
    assert trainer.counts.epoch == 1


# -- the monitor
class Scored(Trainer):
    """Its steps give other metrics."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1]), "mse": 1.0}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1]), "acc": 0.5}


class Logging(Scored):
    def test_step(self, batch: Any) -> dict[str, Any]:
        self.log("val_f1", 0.5)
        return super().test_step(batch)


class Whole(Scored):
    def metric_on_epoch_end(self) -> dict[str, Any]:
        return {"f1": 0.5}


WHERE = "before epoch 1"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another name": (
        lambda: make_trainer(Scored, monitor="val_accuracy"),
        f"monitor='val_accuracy' is not returned by any step.\n  Scored, {WHERE}\n  Did you mean 'val_acc'?",
    ),
    "no name is near": (
        lambda: make_trainer(Scored, monitor="val_f1", monitor_mode="max"),
        f"monitor='val_f1' is not returned by any step.\n  Scored, {WHERE}\n  Known are: val_acc, val_loss.",
    ),
    "a metric of the training": (
        lambda: make_trainer(Scored, monitor="val_mse"),
        f"monitor='val_mse' is not returned by any step.\n  Scored, {WHERE}\n  Known are: val_acc, val_loss.",
    ),
    "without its phase": (
        lambda: make_trainer(Scored, monitor="acc"),
        f"monitor='acc' is not returned by any step.\n  Scored, {WHERE}\n  Did you mean 'val_acc'?",
    ),
    "of the training, by a test_step that calls train_step": (
        lambda: make_trainer(Regress, monitor="train_mse"),
        f"monitor='train_mse' is not returned by any step.\n  Regress, {WHERE}\n  Did you mean 'train_mae'?",
    ),
    "with EarlyStoppingAddon": (
        lambda: make_trainer(Scored.add_on(EarlyStoppingAddon), monitor="val_accuracy", patience=2),
        f"monitor='val_accuracy' is not returned by any step.\n  Scored, {WHERE}\n  Did you mean 'val_acc'?",
    ),
    "of Lightning's EarlyStopping": (
        lambda: make_trainer(Scored, lightning={"callbacks": [EarlyStopping("val_accuracy")]}),
        f"monitor='val_accuracy' of EarlyStopping is not returned by any step.\n  Scored, {WHERE}\n  Did you mean 'val_acc'?",
    ),
    "of a ModelTrainer": (
        lambda: make_trainer(ModelTrainer, monitor="val_acc", loss_fn=mse_loss),
        f"monitor='val_acc' is not returned by any step.\n  ModelTrainer, {WHERE}\n  Known are: val_loss.",
    ),
}


@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED)
def test_monitor_that_no_step_gives_is_refused_before_epoch_1(make: Callable[[], Any], text: str) -> None:
    trainer = make()
    with pytest.raises(ConfigError) as error:
        trainer.run(3, make_loader(), make_valid())
    assert str(error.value) == text
    assert trainer.counts.processed == 0 and trainer.result is None


class Adding(nbtrain.Callback):
    def on_before_log_metrics(self, trainer: Any, pl_module: Any, metrics: dict[str, Any], phase: str) -> None:
        metrics[f"{'val' if phase == 'valid' else phase}_f1"] = 0.5


class PassF1(AddOnBase):
    def pass_metrics(self, trainer: Any, phase: Any) -> dict[str, float]:
        return {"f1": 0.5}


def f1(labels: Any, outputs: Any) -> float:
    return 0.5


POSSIBLE: dict[str, Callable[[], Any]] = {
    "val_loss": lambda: make_trainer(Scored),
    "of a step": lambda: make_trainer(Scored, monitor="val_acc"),
    "of the training": lambda: make_trainer(Scored, monitor="train_mse"),
    "metric_on_epoch_end": lambda: make_trainer(Whole, monitor="val_f1", monitor_mode="max"),
    "an addon": lambda: make_trainer(Scored.add_on(PassF1), monitor="val_f1", monitor_mode="max"),
    "MetricsAddon": lambda: make_trainer(Regress.add_on(MetricsAddon), monitor="val_f1", monitor_mode="max", metrics=f1),
    "a callback": lambda: make_trainer(Scored, monitor="val_f1", monitor_mode="max", lightning={"callbacks": [Adding()]}),
    "a hook": lambda: make_trainer(
        Scored, monitor="val_f1", monitor_mode="max", hooks={"before_log_val_metrics": lambda trainer, metrics: metrics.update(val_f1=0.5)}
    ),
    "perplexity": lambda: make_trainer(ModelTrainer, monitor="val_perplexity", monitor_mode="min", loss_fn=mse_loss, perplexity=True),
}


@pytest.mark.parametrize("make", POSSIBLE.values(), ids=POSSIBLE)
def test_monitor_that_may_come_is_not_refused(make: Callable[[], Any]) -> None:
    trainer = make()
    assert trainer.run(1, make_loader(), make_valid()).status == "completed"


def test_what_self_log_gives_is_not_refused_before_epoch_1() -> None:
    trainer = make_trainer(Logging, monitor="val_f1", monitor_mode="max")
    DryRun(trainer, 1, None, make_valid()).try_steps()
    trainer = make_trainer(Scored, monitor="val_f1", monitor_mode="max")
    with pytest.raises(ConfigError):
        DryRun(trainer, 1, None, make_valid()).try_steps()


# -- what is left as it was
class Meter:
    def __init__(self) -> None:
        self.total, self.rows = 0, [1]


SEEN: list[int] = []


class Greedy(Regress):
    """Changes whatever it can reach."""

    shared: list[int] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.n_seen, self.outputs, self.by_name, self.names = 0, list[int](), dict[str, int](), {1}
        self.total, self.array = torch.zeros(2, device=DEVICE), np.zeros(2)
        self.mean, self.cat, self.meter = MeanMetric(), CatMetric(), Meter()
        self.generator, self.random = torch.Generator().manual_seed(1), random.Random(1)

    def test_step(self, batch: Any) -> dict[str, Any]:
        x, _ = batch
        self.n_seen += 1
        self.new = 1
        for items in (self.outputs, self.meter.rows, self.shared, SEEN):
            items.append(1)
        self.by_name["a"] = 1
        self.names.add(2)
        self.total += x.sum()
        self.array += 1
        self.meter.total += 1
        self.mean.update(x)
        self.cat.update(x)
        self.model[4].update(x)
        torch.randn(3, generator=self.generator)
        _ = self.random.random(), random.random(), np.random.rand(), torch.rand(1)
        self.model.train()
        for norm in (part for part in self.model if isinstance(part, nn.BatchNorm1d)):
            norm(self.model[0](x))
        self.model.eval()
        with torch.enable_grad():
            super().test_step(batch)["loss"].backward()
        return super().test_step(batch)


class Passing(MeanMetric):
    def forward(self, value: Any) -> Any:
        return value


def _greedy() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1), Passing())
    return make_trainer(Greedy, model=model)


def _picture(trainer: Any) -> dict[str, Any]:
    """All that a step may have changed."""
    own = {name: value for name, value in vars(trainer).items() if name not in trainer.own_names}
    plain = {name: own.get(name) for name in ("n_seen", "outputs", "by_name", "new")}
    metrics = {name: metric.update_count for name, metric in {"mean": own["mean"], "cat": own["cat"], "inner": trainer.model[4]}.items()}
    return deepcopy(
        {
            **plain,
            "array": own["array"].tolist(),
            "names": sorted(own["names"]),
            "total": own["total"].tolist(),
            "meter": [own["meter"].total, own["meter"].rows],
            "lists": [Greedy.shared, SEEN],
            "metrics": metrics,
            "cat": len(own["cat"].value),
            "weights": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
            "modes": [part.training for part in trainer.model.modules()],
            "grads": [parameter.grad is None for parameter in trainer.model.parameters()],
            "generators": [own["generator"].get_state().tolist(), own["random"].getstate()],
            "counts": vars(trainer.counts),
            "state": [trainer.mode, trainer.module is None, trainer.result, trainer.train_state.run, trainer.train_state.metrics],
            "n_batches": [meter.n_batches for meter in trainer.train_state.meters.values()],
            "names of attributes": sorted(vars(trainer)),
        }
    )


def _random() -> dict[str, Any]:
    state = random_state()
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def test_step_that_changes_all_it_can_reach_leaves_nothing() -> None:
    trainer = _greedy()
    before, numbers, objects = _picture(trainer), _random(), {name: id(value) for name, value in vars(trainer).items()}
    DryRun(trainer, 1, None, make_valid()).try_steps()
    assert trainer.probed
    trainer.probed = {}
    assert _picture(trainer) == before
    assert _same(list(_random().values()), list(numbers.values()))
    assert {name: id(value) for name, value in vars(trainer).items() if name != "probed"} == {
        name: own for name, own in objects.items() if name != "probed"
    }
    with kept_objects(trainer):
        trainer.test_step(on_device(make_valid())[0])
        assert _picture(trainer) != before


def test_step_that_fails_in_the_middle_leaves_nothing() -> None:
    class Failing(Greedy):
        def test_step(self, batch: Any) -> dict[str, Any]:
            super().test_step(batch)
            raise RuntimeError("broken")

    trainer = _greedy()
    trainer.__class__ = Failing
    before = _picture(trainer)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.run(1, make_loader(), make_valid())
    assert _picture(trainer) == before


def test_run_is_bit_for_bit_the_one_without_a_probe() -> None:
    def trained(lightning: dict[str, Any]) -> Any:
        trainer = make_trainer(lightning=lightning, seed=3)
        trainer.run(2, make_loader(own_generator=True), make_valid())
        return trainer

    tried, untried = trained({}), trained({"num_sanity_val_steps": 0})
    assert tried.probed and not untried.probed
    assert same_weights(tried.model, untried.model)
    assert [row["val_loss"] for row in tried.history.epochs] == [row["val_loss"] for row in untried.history.epochs]


@pytest.mark.parametrize("precision", ["bf16", "bf16-true", "fp64", {"param": "bf16", "input": "bf16"}])
def test_step_is_tried_in_the_precision_of_the_run_and_the_model_keeps_its_own(precision: Any) -> None:
    dtypes: list[torch.dtype] = []
    note = [dtypes.append].__getitem__

    class Noting(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            note(0)(self.model(batch[0]).dtype)
            x, y = batch
            return {"loss": mse_loss(self.model(x), y)}

    trainer = make_trainer(Noting, precision=precision)
    DryRun(trainer, 1, None, make_valid()).try_steps()
    assert dtypes == [torch.float64 if precision == "fp64" else torch.bfloat16]
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_trainer_that_was_probed_can_be_pickled_and_copied() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader(), make_valid())
    assert pickle.loads(pickle.dumps(trainer)).probed == {} and copy(trainer).counts == trainer.counts


# -- loaders
class Once(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a pass was begun")


class Counted(Dataset[Any]):
    def __init__(self) -> None:
        self.n_read, self.rng = 0, np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        self.n_read += 1
        return torch.full((8,), float(index)) + self.rng.random(), torch.zeros(1)

    def __len__(self) -> int:
        return 10


def _generator() -> Iterator[Any]:
    raise AssertionError("a pass was begun")
    yield


class AsObject:
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a pass was begun")


UNREAD: dict[str, Callable[[], Any]] = {
    "a generator": _generator,
    "an iterator": lambda: iter([1]),
    "an iterable dataset": lambda: DataLoader(Once(), batch_size=2),
    "an object": AsObject,
    "a sampler that is an iterator": lambda: DataLoader(Counted(), batch_sampler=iter([[0], [1]])),  # type: ignore[arg-type]
    "several loaders": lambda: [make_valid(), make_valid()],
    "a dataset that workers prepare": lambda: DataLoader(Counted(), 2, num_workers=1, worker_init_fn=lambda i: None),
}


@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD)
def test_loader_that_gives_its_batches_to_a_pass_alone_is_left_alone(make: Callable[[], Any]) -> None:
    assert first_batch(make()) == []


def _first(n: int) -> list[torch.Tensor]:
    return [tensor[:n] for tensor in make_data().tensors]


READ: dict[str, Callable[[], Any]] = {
    "a DataLoader": make_valid,
    "shuffled": lambda: make_loader(own_generator=True),
    "with workers": lambda: make_loader(num_workers=2, persistent_workers=True),
    "a batch sampler": lambda: DataLoader(make_data(), batch_sampler=[list(range(16)), [3]]),
    "a TensorLoader": lambda: TensorLoader(*make_data().tensors, batch_size=16),
    "a SeededLoader": lambda: SeededLoader(make_data(), 16, num_workers=2),
    "a list": lambda: [_first(16), _first(3)],
}


@pytest.mark.parametrize("make", READ.values(), ids=READ)
def test_first_batch_is_read_without_workers_and_random_numbers(make: Callable[[], Any]) -> None:
    loader = make()
    generator = getattr(loader, "generator", None)
    state = None if generator is None else generator.get_state()
    numbers = _random()
    (batch,) = first_batch(loader)
    assert all(map(torch.equal, batch, _first(16)))
    assert _same(list(_random().values()), list(numbers.values())) and (state is None or torch.equal(state, generator.get_state()))
    assert getattr(loader, "_iterator", None) is None


def test_tensor_loader_that_shuffles_keeps_its_order_and_its_place() -> None:
    def made() -> TensorLoader:
        return TensorLoader(torch.arange(8), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))

    loader, other = made(), made()
    state = made()
    iterator = iter(state)
    next(iterator)
    for one in (loader, other):
        one.load_state_dict(state.state_dict())
    first_batch(loader)
    assert [b[0].tolist() for b in loader] == [b[0].tolist() for b in other]


def test_dataset_is_as_before() -> None:
    dataset = Counted()
    loader = DataLoader(dataset, 4)
    state = dataset.rng.bit_generator.state
    (batch,) = first_batch(loader)
    assert len(batch[0]) == 4 and dataset.n_read == 0 and dataset.rng.bit_generator.state == state


def test_batch_of_a_task_has_its_name() -> None:
    (task,) = first_batch(TaskLoader({"a": make_valid(), "b": make_valid()}))
    assert task.name == "a" and torch.equal(task.batch[0], _first(16)[0])


def test_step_may_change_the_batch_of_a_list() -> None:
    class Halving(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            batch[0].mul_(0.5)
            return super().test_step(batch)

    batches = [(torch.ones(4, 8), torch.ones(4, 1))]
    DryRun(make_trainer(Halving), 1, None, batches).try_steps()
    assert torch.equal(batches[0][0], torch.ones(4, 8))


# -- where it is not tried
class Preparing(L.Callback):
    """Sets what the step needs."""

    def __init__(self, trainer: list[Any]) -> None:
        self.made = trainer

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.made[0].scale = 2.0


class Scaled(Regress):
    def test_step(self, batch: Any) -> dict[str, Any]:
        return super().test_step((batch[0] * self.scale, batch[1]))  # type: ignore[attr-defined]


def test_step_that_needs_what_a_callback_prepares_is_left_to_the_run() -> None:
    made: list[Any] = []
    made.append(make_trainer(Scaled, lightning={"callbacks": [Preparing(made)]}))
    assert made[0].run(1, make_loader(), make_valid()).status == "completed"


def test_step_that_reads_lightnings_trainer_is_left_to_the_run() -> None:
    class Reading(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            assert self.module is not None
            return super().test_step(batch) | {"updates": self.module.trainer.global_step}

    trainer = make_trainer(Reading)
    assert trainer.run(1, make_loader(), make_valid()).metrics["val_updates"] == 5


class Mapped(AddOnBase):
    """Gives the steps other batches."""

    def loader(self, trainer: Any, loader: Any, *, training: bool) -> Any:
        return BatchList([(x[:, :8], y) for x, y in loader])


WIDE = DataLoader(TensorDataset(torch.zeros(8, 9), torch.zeros(8, 1)), 4)


def test_batches_that_an_addon_changes_are_left_to_the_run() -> None:
    assert make_trainer(Regress.add_on(Mapped)).run(1, WIDE, WIDE).status == "completed"


UNTRIED: dict[str, Callable[[type[Trainer]], Any]] = {
    "turned off": lambda kind: make_trainer(kind, lightning={"num_sanity_val_steps": 0}),
    "no validation": lambda kind: make_trainer(kind, lightning={"limit_val_batches": 0}),
    "mode test": lambda kind: make_trainer(kind, mode="test"),
    "a strategy": lambda kind: make_trainer(kind, lightning={"strategy": "single_device"}),
}


@pytest.mark.parametrize("make", UNTRIED.values(), ids=UNTRIED)
def test_step_is_not_tried(make: Callable[[type[Trainer]], Any]) -> None:
    kind, calls = _counting()
    DryRun(make(kind), 1, None, make_valid()).try_steps()
    assert calls == []


def test_step_is_tried_where_a_saved_run_is_resumed(tmp_path: Path) -> None:
    saving = {"save_path": tmp_path}
    make_trainer(Regress.add_on(StateManagerAddon), **saving).run(1, make_loader(), make_valid(), resume="auto")
    trainer = make_trainer(Transposed.add_on(StateManagerAddon), **saving)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        trainer.run(2, make_loader(), make_valid(), resume="auto")
    assert "on a batch of valid_loader before epoch 2" in error.value.__notes__[0]


def test_model_that_is_compiled_is_not_compiled_for_one_batch() -> None:
    model = make_model()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model.compile(backend=backend)
    DryRun(make_trainer(model=model), 1, None, make_valid()).try_steps()
    assert compiled == []


@pytest.mark.parametrize("request_", ["pause", "stop", "save_state", "validate_now"])
def test_step_that_asks_for_something_in_the_run_is_left_to_it(request_: str, tmp_path: Path) -> None:
    class Asking(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            getattr(self, request_)()
            return super().test_step(batch)

    trainer = make_trainer(Asking.add_on(StateManagerAddon), save_path=tmp_path)
    DryRun(trainer, 1, None, make_valid()).try_steps()
    assert list(tmp_path.iterdir()) == [] and request_ not in vars(trainer) and trainer.control.state == "idle"


# -- the training step
class _Driven(Regress):
    """Its training step changes what a training may change: its model has batch norm, it counts, draws and keeps a metric."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen, self.losses, self.mean = 0, [], MeanMetric()

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.seen += 1
        output = super().train_step(batch)
        self.losses.append(float(output["loss"].detach()))
        self.mean.update(output["loss"].detach())
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        return {**output, "loss": output["loss"] * (1 + noise * 0.1)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return Regress.train_step(self, batch)


def _trained(trainer: Any, loader: Any) -> list[Any]:
    """Train, and return all that this has changed."""
    trainer.run(2, loader, make_valid())
    rows = [{name: row[name] for name in row.metrics if "_loss" in name} for row in trainer.history.epochs]
    optimizer = [state for one in single(trainer.all_optimizers) for state in one.state.values()]
    moments = [torch.as_tensor(value).tolist() for state in optimizer for value in state.values() if value is not None]
    weights = [value.tolist() for value in trainer.model.state_dict().values()]
    rates = [group["lr"] for one in single(trainer.all_optimizers) for group in one.param_groups]
    return [weights, moments, rows, rates, trainer.losses, trainer.seen, random_state()]


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("precision", [None, "bf16", "bf16-true"])
def test_epoch_after_a_dry_run_is_bit_for_bit_the_one_without(precision: Any, own_generator: bool) -> None:
    found = []
    for lightning in ({}, {"num_sanity_val_steps": 0}):
        model = nn.Sequential(*make_model(), nn.BatchNorm1d(1))
        trainer = make_trainer(_Driven, model=model, precision=precision, lightning=lightning, seed=3)
        found.append(_trained(trainer, make_loader(own_generator=own_generator)))
        assert (set(trainer.probed) == {"train", "test"}) == (not lightning)
    assert _same(*found)


class _ByHand(_Driven):
    """As a GAN by hand: it sets a rate, turns parameters off and on, and steps two optimizers, one with a closure, and a schedule."""

    automatic_optimization = False

    def train_step(self, batch: Any) -> dict[str, Any]:
        first, second = self.optimizers.values()
        first.param_groups[0]["lr"] = 0.1 / (1 + self.counts.processed)
        self.model[0].weight.requires_grad_(self.seen % 2 == 0)
        first.zero_grad()
        output = super().train_step(batch)
        self.backward(output["loss"])
        first.step()

        def closure() -> Any:
            second.zero_grad()
            loss = _Driven.train_step(self, batch)["loss"]
            self.backward(loss)
            return loss

        second.step(closure)
        self.plan.step()
        return output


def _by_hand(**options: Any) -> Any:
    model = nn.Sequential(*make_model(), nn.BatchNorm1d(1))
    parts = [Adam(model[0].parameters(), lr=0.1), SGD(model[-2].parameters(), lr=0.1, momentum=0.9)]
    trainer = make_trainer(_ByHand, model=model, optimizer=parts, seed=3, **options)
    trainer.plan = torch.optim.lr_scheduler.ExponentialLR(parts[1], 0.9)
    return trainer


class _Two(_Driven, MultiOptimizerTrainer):
    def train_step_first(self, batch: Any) -> dict[str, Any]:
        return {**_Driven.train_step(self, batch), "extra": 1.0}

    def train_step_second(self, batch: Any) -> dict[str, Any]:
        return _Driven.train_step(self, batch)

    train_step = MultiOptimizerTrainer.train_step


def _in_turns(kind: Any = _Two, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizers = {"first": Adam(model[0].parameters(), lr=0.1), "second": SGD(model[2].parameters(), lr=0.1, momentum=0.9)}
    return kind(model, DEVICE, optimizers=optimizers, seed=3, log_bar=False, **options)


def _joint(**options: Any) -> Any:
    model = nn.Sequential(*make_model(), nn.BatchNorm1d(1))
    parts = [Adam(model[0].parameters(), lr=0.1), SGD(model[-2].parameters(), lr=0.1, momentum=0.9)]
    return make_trainer(_Driven, model=model, optimizer=parts, seed=3, **options)


SEVERAL: dict[str, Callable[..., Any]] = {"by hand": _by_hand, "in turns": _in_turns, "one loss": _joint}


@pytest.mark.parametrize("make", SEVERAL.values(), ids=SEVERAL)
def test_several_optimizers_after_a_dry_run_are_bit_for_bit_as_without(make: Callable[..., Any]) -> None:
    found = []
    for lightning in ({}, {"num_sanity_val_steps": 0}):
        trainer = make(lightning=lightning)
        found.append(_trained(trainer, make_loader()))
        assert (set(trainer.probed) == {"train", "test"}) == (not lightning)
    assert _same(*found)


def test_error_in_one_of_several_training_steps_is_found_before_epoch_1() -> None:
    class Wrong(_Two):
        def train_step_second(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model[0](batch[0]).mean()}  # without a gradient: it is the turn of the other layer

    trainer = _in_turns(Wrong)
    with pytest.raises(StepError, match="Wrong.train_step_second, on a batch of loader before epoch 1"):
        trainer.run(1, make_loader())
    assert (trainer.train_state.run, trainer.joint.turn) == (0, None) and all(p.requires_grad for p in trainer.model.parameters())


def test_monitor_that_no_turn_gives_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'train_extra_first'"):
        _in_turns(monitor="train_extra", monitor_mode="min").run(1, make_loader())


def test_error_in_a_step_by_hand_is_found_before_epoch_1() -> None:
    class Wrong(_ByHand):
        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"note": "text"}

        def backward(self, loss: Any, **options: Any) -> None:
            raise KeyError("before the updates")

    trainer = _by_hand()
    trainer.__class__ = Wrong
    before = deepcopy(trainer.model.state_dict())
    with pytest.raises(KeyError, match="before the updates") as error:
        trainer.run(1, make_loader())
    assert "Wrong.train_step, on a batch of loader before epoch 1" in error.value.__notes__[0]
    assert all(map(torch.equal, before.values(), trainer.model.state_dict().values())) and not trainer.optimizers["adam"].state


@pytest.mark.parametrize("reads", ["state", "loss"])
def test_step_by_hand_that_needs_its_updates_raises_no_false_alarm(reads: str) -> None:
    class Needing(_ByHand):
        def train_step(self, batch: Any) -> dict[str, Any]:
            output = super().train_step(batch)
            weight, adam = self.model[0].bias, self.optimizers["adam"]
            if reads == "state":
                return {**output, "n": adam.state[weight]["step"]}
            before = weight.detach().clone()
            while torch.equal(weight, before):
                adam.step()
            return output

    trainer = _by_hand()
    trainer.__class__ = Needing
    assert trainer.run(1, make_loader()).status == "completed"


@pytest.mark.parametrize("act", [lambda self, loss: self.backward(loss), lambda self, loss: self.optimizers["adam"].step()])
def test_validation_by_hand_that_would_train_is_refused_before_epoch_1(act: Callable[[Any, Any], Any]) -> None:
    class Wrong(_ByHand):
        def test_step(self, batch: Any) -> dict[str, Any]:
            output = super().test_step(batch)
            act(self, output["loss"])
            return output

    trainer = _by_hand()
    trainer.__class__ = Wrong
    with pytest.raises(StepError, match="it would train on the data of an evaluation"):
        trainer.run(1, make_loader(), make_valid())
    assert trainer.train_state.run == 0


def test_error_in_a_step_is_found_before_processes_are_started() -> None:
    class Wrong(Regress.add_on(MultiGPUAddon)):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step((batch[0].T, batch[1]))

    trainer = make_trainer(Wrong, device=["cpu", "cpu"])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        trainer.run(1, make_loader())
    assert "Wrong.train_step, on a batch of loader before epoch 1" in error.value.__notes__[0] and trainer.train_state.run == 0


@pytest.mark.parametrize("text", ["without 'loss'", "which has no gradient", "a loss without a gradient"])
def test_output_of_a_step_is_found_before_the_model_is_sharded_and_all_else_is_left_to_the_run(text: str) -> None:
    class Wrong(Regress.add_on(MultiGPUAddon)):
        def train_step(self, batch: Any) -> dict[str, Any]:
            torch.rand(1)
            return WRONG_TRAINING[text](self, batch)

    trainer = make_trainer(Wrong, device=["cpu", "cpu"], strategy="fsdp2")
    before = random_state()
    with pytest.raises(StepError, match=text):
        trainer.run(1, make_loader())
    assert (trainer.train_state.run, trainer.control.state) == (0, "idle") and _same(random_state(), before)
    assert same_weights(trainer.model, make_model())
    trainer.__class__ = type("Sharded", (Wrong,), {"train_step": lambda self, batch: {"loss": self.model[0].weight.full_tensor().mean()}})
    DryRun(trainer, 1, make_loader(), None).try_steps()


@pytest.mark.parametrize("read", [lambda: torch.distributed.get_rank(), lambda: os.environ["A_RANK"]], ids=["group", "variable"])
def test_step_that_reads_what_only_the_processes_have_is_left_to_them(read: Callable[[], Any]) -> None:
    class Reading(Regress.add_on(MultiGPUAddon)):
        def train_step(self, batch: Any) -> dict[str, Any]:
            read()
            return super().train_step(batch)

    said: list[str] = []
    DryRun(make_trainer(Reading, device=["cpu", "cpu"]), 1, make_loader(), None).try_steps(said.append)
    assert said == ["train_step on one batch"]
    with pytest.raises((ValueError, KeyError)):
        DryRun(make_trainer(type("Alone", (Regress,), {"train_step": Reading.train_step})), 1, make_loader(), None).try_steps()


def test_step_that_updates_with_an_optimizer_of_its_own_is_left_to_the_run() -> None:
    class Hidden(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            self.other.step()
            return super().train_step(batch)

    trainer = make_trainer(Hidden)
    trainer.other = Adam([nn.Parameter(torch.ones(1))], lr=0.1)
    trainer.other.param_groups[0]["params"][0].grad = torch.ones(1)
    DryRun(trainer, 1, make_loader(), None).try_steps()
    assert not trainer.other.state and trainer.other.param_groups[0]["params"][0].item() == 1.0


WRONG_TRAINING: dict[str, Callable[[Any, Any], Any]] = {
    "without 'loss'": lambda self, batch: {"accuracy": 1.0},
    "which has no gradient": lambda self, batch: {"loss": 1.0},
    "a loss without a gradient": lambda self, batch: {"loss": self.model(batch[0]).mean().detach()},
    "shapes cannot be multiplied": lambda self, batch: {"loss": self.model(batch[0].T).mean()},
}


@pytest.mark.parametrize("text", WRONG_TRAINING)
def test_error_in_a_training_step_is_found_without_a_valid_loader(text: str, tmp_path: Path) -> None:
    trainer = make_trainer(type("Wrong", (Regress,), {"train_step": WRONG_TRAINING[text]}), save_path=tmp_path / "runs", on_error="pause")
    with pytest.raises((StepError, RuntimeError), match=text) as error:
        trainer.run(1, make_loader())
    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert "Wrong.train_step, on a batch of loader before epoch 1" in said
    assert (trainer.result, trainer.counts.processed, trainer.train_state.run, trainer.control.state) == (None, 0, 0, "idle")
    assert trainer.operations == [] and not (tmp_path / "runs").exists() and trainer.model[0].weight.grad is None


def test_monitor_that_no_training_step_gives_is_refused_without_a_valid_loader() -> None:
    with pytest.raises(ConfigError, match="monitor='train_maee' is not returned by any step"):
        make_trainer(monitor="train_maee", monitor_mode="min").run(1, make_loader())


def _hooked() -> Any:
    trainer = make_trainer()
    trainer.model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    return trainer


def _updating() -> Any:
    class Updating(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            output = super().train_step(batch)
            if self.control.state == "idle":
                self.optimizer.step()
            return output

    return make_trainer(Updating)


LEFT = {
    "a hook at a weight": _hooked,
    "no batch of training": lambda: make_trainer(lightning={"limit_train_batches": 0}),
    "mode test": lambda: make_trainer(mode="test"),
    "turned off": lambda: make_trainer(lightning={"num_sanity_val_steps": 0}),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_training_step_is_left_to_the_run(make: Callable[[], Any]) -> None:
    said: list[str] = []
    DryRun(make(), 1, make_loader(), None).try_steps(said.append)
    assert said == []


def test_training_step_that_updates_weights_is_left_to_the_run() -> None:
    trainer = _updating()
    before = deepcopy(trainer.model.state_dict())
    DryRun(trainer, 1, make_loader(), None).try_steps()
    assert all(map(torch.equal, before.values(), trainer.model.state_dict().values())) and "step" not in vars(trainer.optimizer)
