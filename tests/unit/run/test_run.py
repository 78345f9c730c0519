"""`run` against a plain loop and against itself, bit for bit; counters, schedules, batches, best weights."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import sys
import tracemalloc
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_module
from samples import (
    DEVICE,
    Regress,
    make_loader,
    make_model,
    make_trainer,
    make_valid,
    plain_loop,
    same_weights,
    some,
    without_times,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from nbtrain import MultiGPUAddon, StateManagerAddon, Trainer
from nbtrain.events import Event
from nbtrain.run.lightning_trainer import quiet


# -- against a plain loop
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("validate", [False, True])
def test_run_equals_plain_loop(own_generator: bool, clip: float, validate: bool) -> None:
    valid = make_valid() if validate else None
    expected, losses = plain_loop(3, make_loader(own_generator=own_generator), valid, clip)
    model = make_model()
    trainer = make_trainer(model=model, gradient_clip=clip)
    trainer.run(3, make_loader(own_generator=own_generator), valid)
    assert same_weights(model, expected)
    assert [row["train_loss"] for row in trainer.history.epochs] == pytest.approx(losses, rel=1e-12)


def test_time_of_a_run_stands_from_its_end_on(tmp_path: Path) -> None:
    trainer = make_trainer(model=make_model(), save_path=tmp_path)
    result = trainer.run(1, make_loader())
    end = json.loads((tmp_path / "run-001" / "events.jsonl").read_text().splitlines()[-1])
    assert end["kind"] == "end" and end["progress"]["elapsed_s"] == result.elapsed_s == trainer.recorder.progress.elapsed_s


@pytest.mark.parametrize("n_workers", [0, 2])
def test_two_runs_equal_one(n_workers: int) -> None:
    def train(*epochs: int) -> Any:
        trainer = make_trainer(model=make_model(), scheduler=lambda step: 1e-2 / (1 + step), gradient_clip=1.0)
        loader, valid = make_loader(num_workers=n_workers), make_valid()
        for n_epoch in epochs:
            trainer.run(n_epoch, loader, valid)
        return trainer

    one, two = train(5), train(2, 3)
    assert same_weights(one.model, two.model)
    assert without_times(one.history.epochs) == without_times(two.history.epochs)
    assert list(one.history.steps["train"]) == list(two.history.steps["train"])
    assert (
        (one.counts.epoch, one.counts.processed, one.counts.step)
        == (two.counts.epoch, two.counts.processed, two.counts.step)
        == (5, 40, 25)
    )
    left, right = (t.optimizer.state_dict()["state"] for t in (one, two))
    assert all(torch.equal(left[i][name], right[i][name]) for i in left for name in left[i])


def test_two_runs_with_a_scheduler_instance_equal_one() -> None:
    def train(*epochs: int) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        trainer = make_trainer(model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 2, gamma=0.5))
        loader = make_loader()
        for n_epoch in epochs:
            trainer.run(n_epoch, loader)
        return trainer

    one, two = train(5), train(2, 3)
    assert same_weights(one.model, two.model)
    assert [row["lr"] for row in two.history.epochs] == [0.01, 0.01, 0.005, 0.005, 0.0025]


def test_lightning_counts_on_in_a_second_run() -> None:
    seen = []
    callback = L.pytorch.callbacks.LambdaCallback(on_train_epoch_start=lambda t, m: seen.append((t.current_epoch, t.global_step)))
    trainer = make_trainer(lightning={"callbacks": [callback]})
    trainer.run(2, make_loader())
    trainer.run(1, make_loader())
    assert seen == [(0, 0), (1, 5), (2, 10)]


# -- counters
def test_steps_count_validation_and_epochs_count_training_only() -> None:
    trainer = make_trainer()
    trainer.run(2, make_loader(), make_valid())
    assert (trainer.progress_checker.get_step(), trainer.progress_checker.get_epoch()) == (2 * (5 + 3) + 1, 3)
    trainer.toggle("test")
    trainer.run(1, make_valid())
    assert (trainer.progress_checker.get_step(), trainer.progress_checker.get_epoch()) == (2 * (5 + 3) + 3 + 1, 3)


def test_zero_epochs_change_nothing() -> None:
    trainer = make_trainer()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert trainer.run(0, make_loader()).status == "completed"
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


# -- what is kept
def test_logs_and_metrics_of_both_passes_live_after_validation() -> None:
    passes = []

    class Metrics(Regress):
        def metric_on_epoch_end(self) -> dict[str, Any] | None:
            log = self.log_train if self.mode == "train" else self.log_test
            passes.append((self.mode, len(log["loss"]), torch.cat(log["output"]).shape))
            return {"n": len(log["loss"])} if self.mode == "train" else None

    trainer = make_trainer(Metrics)
    trainer.run(1, make_loader(), make_valid())
    assert passes == [("train", 5, (70, 1)), ("test", 3, (40, 1))]
    assert trainer.train_metrics == {"n": 5.0} and trainer.test_metrics == {}
    assert len(trainer.log_train["mae"]) == 5 and len(trainer.log_test["mae"]) == 3
    assert trainer.history.last["train_n"] == 5.0 and trainer.mode == "train"


def test_tensors_are_not_kept_where_nothing_reads_them() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader())
    with pytest.raises(KeyError, match="metric_on_epoch_end"):
        trainer.log_train["output"]


def test_loss_histories_have_a_float_for_each_batch() -> None:
    trainer = make_trainer()
    assert trainer.loss_history_train == []
    trainer.run(2, make_loader(), make_valid())
    assert len(trainer.loss_history_train) == 10 and len(trainer.loss_history_test) == 6
    assert all(isinstance(loss, float) for loss in trainer.loss_history_train)


def test_test_mode_changes_no_weight_and_ends_in_test_mode() -> None:
    trainer = make_trainer(mode="test", optimizer=None)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    result = trainer.run(2, make_valid())
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    assert trainer.mode == "test" and len(trainer.history.tests) == 2 and set(result.metrics) == {"test_loss", "test_mae"}


def test_model_stays_on_its_device_and_in_train_mode() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader(), make_valid())
    assert {p.device for p in trainer.model.parameters()} == {trainer.device} and trainer.model.training


def test_memory_of_a_run_does_not_grow_with_its_steps() -> None:
    class Flat(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch)

    def peak(n_epoch: int) -> int:
        trainer = make_trainer(Flat)
        trainer.history.steps["train"].max_rows = 50
        trainer.run(1, make_loader())
        gc.collect()
        tracemalloc.start()
        trainer.run(n_epoch, make_loader(800))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(trainer.history.steps["train"]) <= 50
        return grown

    assert peak(12) - peak(2) < 60_000  # 500 more steps; ten more rows of epochs are allowed


# -- schedules
def _rates(trainer: Any) -> list[float]:
    rates: list[float] = []
    original = trainer.train_step

    def watched(batch: Any) -> dict[str, Any]:
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return original(batch)

    trainer.train_step = watched
    return rates


def _sgd() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def test_scheduler_instance_steps_per_batch_on_request() -> None:
    model, optimizer = _sgd()
    trainer = make_trainer(model=model, optimizer=optimizer, scheduler=ExponentialLR(optimizer, 0.5), scheduler_step_on_batch=True)
    rates = _rates(trainer)
    trainer.run(1, make_loader())
    assert rates == [0.5**i for i in range(5)]


def test_factory_is_asked_again_for_each_run_and_told_its_length() -> None:
    plans = []

    def factory(optimizer: Any, plan: Any) -> CosineAnnealingLR:
        plans.append((plan.n_epochs, plan.total_steps))
        return CosineAnnealingLR(optimizer, plan.total_steps)

    trainer = make_trainer(scheduler=factory)
    trainer.run(2, make_loader())
    trainer.run(3, make_loader())
    assert plans == [(2, 10), (3, 15)]


@pytest.mark.parametrize("validate", [False, True])
def test_plateau_looks_at_the_monitored_loss(validate: bool) -> None:
    model, optimizer = _sgd()
    optimizer.param_groups[0]["lr"] = 1e-9  # nothing gets better by itself
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, min_lr=0.0, eps=0.0, threshold=0.5)
    trainer = make_trainer(model=model, optimizer=optimizer, scheduler=plateau)
    trainer.run(3, make_loader(), make_valid() if validate else None)
    assert [row["lr"] for row in trainer.history.epochs] == [1e-9, 1e-9, 5e-10]
    assert plateau.best == trainer.history.epochs[0]["val_loss" if validate else "train_loss"]


# -- batches
Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "frozen"


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda x, y: (x, y), lambda b: b),
        (lambda x, y: [x, y], lambda b: b),
        (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
        (lambda x, y: {"in": [x, {"deep": (y, "text")}]}, lambda b: (b["in"][0], b["in"][1]["deep"][0])),
        (Pair, lambda b: (b.x, b.y)),
        (Sample, lambda b: (b.x, b.y)),
        (Frozen, lambda b: (b.x, b.y)),
        (lambda x, y: [Frozen(x, y)], lambda b: (b[0].x, b[0].y)),
    ],
    ids=["tuple", "list", "dict", "nested", "namedtuple", "dataclass", "frozen", "nested frozen"],
)
def test_batches_of_every_shape(make: Any, read: Any) -> None:
    class Reads(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(read(batch))

    plain = [(x, y) for x, y in make_loader(shuffle=False)]
    batches = [make(x, y) for x, y in plain]
    trainer, expected = make_trainer(Reads), make_trainer()
    torch.manual_seed(3)
    trainer.run(1, batches, batches)
    torch.manual_seed(3)
    expected.run(1, plain)
    assert same_weights(trainer.model, expected.model)
    assert trainer.history.last["train_mae"] == expected.history.last["train_mae"]


class Endless:
    """Batches of the numbers 0, 1, 2, … in one stream, which continues in the next pass; its length is that of an epoch."""

    def __init__(self, n: int | None) -> None:
        self.n, self.given = n, itertools.count()

    def __len__(self) -> int:
        if self.n is None:
            raise TypeError("no length")
        return self.n

    def __iter__(self) -> Iterator[Any]:
        return (torch.full((2, 1), float(i)) for i in self.given)


class EndlessDataset(IterableDataset[Any]):
    def __init__(self, n: int | None) -> None:
        self.batches = Endless(n)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class EndlessLoader(DataLoader[Any]):
    """A DataLoader that begins again by itself."""

    def __init__(self, n: int | None) -> None:
        super().__init__(TensorDataset(torch.zeros(n or 1)), 1)
        self.batches = Endless(n)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.batches)


class EndlessSampler(Endless):
    def __iter__(self) -> Iterator[Any]:
        return ([i] for i in self.given)


class Numbers(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)])

    def __len__(self) -> int:
        return 1000


ENDLESS: dict[str, Callable[[int | None], Any]] = {
    "a class": Endless,
    "a dataset": lambda n: DataLoader(EndlessDataset(n), batch_size=None),
    "a DataLoader's subclass": EndlessLoader,
    "a batch sampler": lambda n: DataLoader(Numbers(), batch_sampler=EndlessSampler(n)),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("valid", some([True, False], 2))
@pytest.mark.parametrize("addons", [(), (StateManagerAddon,)])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("limit", [4, 3])
@pytest.mark.parametrize("kind", ENDLESS)
def test_no_batch_is_read_that_no_step_gets(
    kind: str, limit: int, lean: bool, addons: tuple[Any, ...], valid: bool, tmp_path: Path
) -> None:
    seen: list[float] = []
    validated: list[float] = []

    class Line(Trainer):
        def train_step(self, batch: Any) -> Any:
            (seen if self.mode == "train" else validated).append(batch.flatten()[0].item())
            return {"loss": self.model(batch).square().mean()}

        test_step = train_step

    limits = {"limit_train_batches": limit, "limit_val_batches": limit}
    options = {"save_path": tmp_path} if addons else {}
    trainer = make_trainer(Line.add_on(*addons), model=nn.Linear(1, 1), lightning=limits, **options)
    trainer.short_way = lean
    trainer.run(3, ENDLESS[kind](4), ENDLESS[kind](4) if valid else None)
    n = 3 * limit
    assert seen == list(range(n)) and validated == (list(range(n)) if valid else [])


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Partial()])
@pytest.mark.parametrize("lean", [False, True])
def test_a_distributed_loss_is_recorded_as_its_number(lean: bool, placement: Any, mesh: Any) -> None:
    class Distributed(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            output = super().train_step(batch)
            return {"loss": DTensor.from_local(output["loss"], mesh, [placement]), "mae": output["mae"]}

        test_step = train_step

    trainers = [make_trainer(kind) for kind in (Distributed, Regress)]
    for trainer in trainers:
        trainer.short_way = lean
        torch.manual_seed(3)
        trainer.run(2, make_loader(own_generator=True), make_valid())
    assert same_weights(trainers[0].model, trainers[1].model)
    assert without_times(trainers[0].history.epochs) == without_times(trainers[1].history.epochs)


# -- best weights
def _scripted(values: list[float], **options: Any) -> Any:
    """A trainer whose val_loss is `values`, epoch by epoch, and whose weights are the epoch's number."""

    class Scripted(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            with torch.no_grad():
                self.model.weight.fill_(self.counts.epoch + 1)
            return {"loss": self.model(torch.zeros(1, 1, device=DEVICE)).sum()}

        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": values[self.counts.epoch], "acc": values[self.counts.epoch]}

    model = torch.nn.Linear(1, 1)
    return make_trainer(Scripted, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), **options)


def test_only_nan_gives_no_best() -> None:
    trainer = _scripted([math.nan])
    assert trainer.run(1, [[0]], [[0]]).best is None and trainer.best_weights is None


def test_one_copy_is_kept_and_written_over() -> None:
    trainer = _scripted([3.0, 2.0, 1.0])
    trainer.run(1, [[0]], [[0]])
    memory = trainer.best_weights["weight"].data_ptr()
    trainer.run(2, [[0]], [[0]])
    assert trainer.best_weights["weight"].data_ptr() == memory and trainer.best_weights["weight"].item() == 3.0


def test_best_goes_on_across_runs() -> None:
    trainer = _scripted([1.0, 2.0])
    trainer.run(1, [[0]], [[0]])
    trainer.run(1, [[0]], [[0]])
    assert trainer.best_weights["weight"].item() == 1.0


# -- how a run ends
def test_interrupt_is_a_keyboard_interrupt_and_leaves_the_trainer_usable() -> None:
    class Interrupted(Regress):
        broken = True

        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.broken and self.counts.processed == 7:
                raise KeyboardInterrupt
            return super().train_step(batch)

    trainer = make_trainer(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(3, make_loader())
    assert trainer.result.status == "interrupted" and len(trainer.history) == 1
    trainer.broken = False
    assert trainer.run(1, make_loader()).last["epoch"] == 2


def notes_of_runs(n: int) -> list[str]:
    """What the record of a trainer notes in its first `n` runs."""
    trainer, notes = make_trainer(), list[str]()
    trainer.recorder.add(SimpleNamespace(update=lambda event: notes.append(event.data["text"]) if event.kind == "note" else None))
    for _ in range(n):
        trainer.run(1, make_loader())
    return notes


def test_a_torch_without_tests_is_noted_in_the_first_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.run.record.unknown_torch", lambda: "9.9")
    assert notes_of_runs(2) == [
        "nbtrain's fast functions don't do what torch 9.9 does; steps use its public API instead, about 50 µs slower."
    ]


ALONE = {
    "torchrun": ({"RANK": "1", "WORLD_SIZE": "2"}, "This process is rank 1 of 2"),
    "SLURM": ({"SLURM_NTASKS": "7", "SLURM_JOB_NAME": "lab"}, "SLURM has given this job 7 tasks, of which this process is one"),
    "accelerate": ({}, "accelerate is configured for 2 processes, of which this is one"),
}


@pytest.mark.parametrize("launcher", ALONE)
def test_process_that_trains_alone_among_several_says_so_once(launcher: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables, what = ALONE[launcher]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if launcher == "accelerate":
        pytest.importorskip("accelerate")
        config = tmp_path / "accelerate" / "default_config.yaml"
        config.parent.mkdir()
        config.write_text("mixed_precision: 'no'\nnum_processes: 2\n")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert notes_of_runs(2) == [f"{what}, and trains alone, on all data. Use MultiGPUAddon to train together."]
    assert notes_of_runs(1) == []


def test_tasks_of_slurm_that_idle_are_named_beside_processes_of_a_notebook(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    for name, value in {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "lab", "JPY_PARENT_PID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("nbtrain.run.record._SAID", [])
    trainer = make_trainer(Regress.add_on(MultiGPUAddon), device=["cpu", "cpu"], log_bar=False)
    for _ in range(2):
        trainer.run(1, make_loader())
    text = "SLURM has given this job 2 tasks, of which this process is one. The run starts 2 processes here, and the other tasks idle; "
    assert caplog.messages == [f"{text}srun starts a script in all of them."]


def test_two_runs_that_overlap_leave_the_messages_of_lightning_as_they_were() -> None:
    logger, message = logging.getLogger("lightning.pytorch"), logging.makeLogRecord({"levelno": logging.INFO})
    first, second = quiet(), quiet()
    before = list(warnings.filters)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not logger.filter(message)  # the second run is still on
    second.__exit__(None, None, None)
    assert logger.filter(message) and list(warnings.filters) == before


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning", "lightning_fabric"])
def test_no_line_of_lightning_leaks_whichever_of_its_packages_was_imported_last(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (package, f"{package}.utilities.rank_zero"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)  # to where caplog listens
    monkeypatch.setitem(sys.modules, f"{package}.utilities.rank_zero", rank_zero_module)
    with caplog.at_level(logging.INFO, package):
        monkeypatch.setattr(rank_zero_module, "log", logging.getLogger(f"{package}.utilities.rank_zero"))  # as its import does
        make_trainer().run(1, make_loader())
    assert not [record.message for record in caplog.records if record.name.startswith(package)]


def test_first_step_is_recorded_at_once() -> None:
    events: list[Event] = []
    trainer = make_trainer()
    trainer.recorder.add(type("Sink", (), {"update": staticmethod(events.append)})())
    trainer.run(1, make_loader())
    assert [event.data["n"] for event in events if event.kind == "steps"][0] == 1
