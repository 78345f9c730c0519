"""The rest of the façade: less than a run, weights, a look before the run, and Lightning's own callbacks."""

from __future__ import annotations

import copy
import random
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import callbacks as C
from lightning_modules import Lit
from samples import (
    DEVICE,
    ONE_DEVICE,
    PLACE,
    Regress,
    make_data,
    make_loader,
    make_model,
    make_trainer,
    make_valid,
    on_device,
    plain_loop,
    same_weights,
    some,
)
from torch.nn.functional import mse_loss

from nbtrain import CheckpointError, ConfigError, LimitsAddon, ProgressChecker, StateManagerAddon, StepError, Trainer
from nbtrain.best import known_mode
from nbtrain.distributed.worker import dumps, loads
from nbtrain.engine.step_module import StepModule
from nbtrain.engine.train_state import Counts
from nbtrain.loops.own_loops import use_own_loops


def snapshot(trainer: Trainer) -> Any:
    """All that a look at the model must leave as it was."""
    return (
        {name: value.clone().tolist() for name, value in trainer.model.state_dict().items()},
        [None if p.grad is None else p.grad.tolist() for p in trainer.model.parameters()],
        [part.training for part in trainer.model.modules()],
        (trainer.mode, trainer.counts.epoch, trainer.counts.processed, trainer.counts.step),
        (dict(trainer.log_train), dict(trainer.log_test), dict(trainer.train_metrics), dict(trainer.test_metrics)),
        (len(trainer.history.epochs), len(trainer.history.tests), len(trainer.history.steps["test"])),
        [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()],
    )


# -- less than a run
def test_run_epoch_is_a_run_of_one_epoch() -> None:
    one = make_trainer()
    one.run_epoch(make_loader())
    two = make_trainer()  # seeded as the first one
    two.run(1, make_loader())
    assert same_weights(one.model, two.model) and one.counts.epoch == 1


def test_batches_one_by_one_equal_a_plain_epoch() -> None:
    expected, _ = plain_loop(1, batches := [tuple(batch) for batch in make_loader(own_generator=True)])
    trainer = make_trainer(model=make_model())
    outputs = [trainer.run_batch(batch) for batch in batches]
    assert same_weights(trainer.model, expected)
    assert (trainer.counts.processed, trainer.counts.step, trainer.counts.epoch) == (5, 5, 0)
    assert trainer.loss_history_train == pytest.approx([float(out["loss"]) for out in outputs])
    assert len(trainer.history) == 0 and not outputs[0]["loss"].requires_grad and outputs[0]["output"].shape == (16, 1)


def test_run_batch_goes_on_between_runs_without_a_trace_in_the_epochs() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = make_trainer(model=model, optimizer=optimizer, scheduler=scheduler)
    trainer.run(1, make_loader())
    best = {name: value.clone() for name, value in trainer.best_weights.items()}
    trainer.run_batch(next(iter(make_loader())))
    assert optimizer.param_groups[0]["lr"] == 0.005 and len(trainer.history) == 1
    assert all(torch.equal(best[name], value) for name, value in trainer.best_weights.items())
    assert trainer.run(1, make_loader()).last["epoch"] == 2


LIMITS: dict[str, dict[str, Any]] = {
    "val_check_interval": {"val_check_interval": 3},
    "a share of the batches": {"limit_train_batches": 0.5, "limit_test_batches": 0.2},
    "no batch": {"limit_train_batches": 0, "limit_test_batches": 0},
    "overfit_batches": {"overfit_batches": 0.01},
    "max_steps, reached": {"max_steps": 5},
    "max_time, over": {"max_time": timedelta(microseconds=1)},
    "fast_dev_run": {"fast_dev_run": 3},
    "min_steps": {"min_steps": 20},
    "accumulation": {"accumulate_grad_batches": 4},
    "Timer, over": {"callbacks": [C.Timer(timedelta(0))]},
    "EarlyStopping": {"callbacks": [C.EarlyStopping("train_loss")]},
    "BatchSizeFinder": {"callbacks": [C.BatchSizeFinder()]},
    "StochasticWeightAveraging": {"callbacks": [C.StochasticWeightAveraging(0.1, 1)]},
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_single_batch_runs_whatever_limits_a_run(name: str) -> None:
    batch = next(iter(make_loader(shuffle=False)))
    limited, free = make_trainer(model=make_normed(), lightning=LIMITS[name]), make_trainer(model=make_normed())
    for trainer in (limited, free):
        trainer.train_state.counts.step = 5
        assert trainer.run_batch(batch).keys() == {"loss", "mae", "output", "label"}
    assert same_weights(limited.model, free.model) and limited.counts == free.counts
    for trainer in (limited, free):
        trainer.toggle("test")
    assert torch.equal(limited.run_batch(batch)["loss"], free.run_batch(batch)["loss"])


def test_a_single_batch_runs_after_the_last_step_of_limits() -> None:
    trainer = make_trainer(Regress.add_on(LimitsAddon), max_steps=3, steps_per_epoch=2, val_every_n_steps=2)
    trainer.run(2, make_loader(), make_valid())
    assert trainer.counts.step == 3 and trainer.run_batch(next(iter(make_loader())))["loss"] > 0 and trainer.counts.step == 4


def test_run_batch_in_test_mode_trains_nothing() -> None:
    trainer = make_trainer(mode="test")
    before = snapshot(trainer)[0]
    output = trainer.run_batch(next(iter(make_valid())))
    assert snapshot(trainer)[0] == before and "mae" in output and trainer.counts.processed == 1 and trainer.history.tests == []


def test_inference_gives_the_outputs_and_changes_nothing() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader(), make_valid())
    before = snapshot(trainer)
    outputs = trainer.inference(make_valid())
    assert snapshot(trainer) == before
    with torch.no_grad():
        expected = trainer.model.cpu().eval()(make_data(40).tensors[0])
    assert [len(output) for output in outputs] == [16, 16, 8] and torch.equal(torch.cat(outputs), expected)


@pytest.mark.parametrize("wrap", [lambda x, y: x, lambda x, y: (x, y), lambda x, y: [x, y]], ids=["tensor", "tuple", "list"])
def test_predict_takes_a_tensor_or_a_batch_and_changes_nothing(wrap: Any) -> None:
    trainer = make_trainer()
    before = snapshot(trainer)
    x, y = make_data(10).tensors
    output = trainer.predict(wrap(x, y))
    assert snapshot(trainer) == before
    with torch.no_grad():
        assert torch.equal(output, trainer.model.cpu().eval()(x)) and not output.requires_grad


def test_predict_takes_a_loader_also_one_that_drops_its_last_batch() -> None:
    trainer = make_trainer()
    assert trainer.predict(make_valid()).shape == (40, 1)
    assert trainer.predict(make_loader(40, shuffle=False, drop_last=True)).shape == (32, 1)
    assert trainer.predict(x for x, _ in make_valid()).shape == (40, 1)


@pytest.mark.parametrize("batch_size", [None, 1, 7, 40])
def test_predict_and_inference_read_a_dataset_in_batches(batch_size: int | None) -> None:
    trainer, data = make_trainer(), make_data(40)
    expected = trainer.predict(data.tensors[0])
    sizes = [len(output) for output in trainer.inference(data, batch_size)]
    size = batch_size or 32
    assert sizes == [min(size, 40 - start) for start in range(0, 40, size)]
    assert torch.allclose(trainer.predict(data, batch_size), expected, atol=1e-6)


def test_predict_needs_an_output() -> None:
    class Silent(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": super().test_step(batch)["loss"]}

    with pytest.raises(StepError, match="test_step returned 'loss', without 'output'"):
        make_trainer(Silent).inference(make_valid())


def test_evaluate_gives_the_steps_own_names_for_loaders_and_datasets() -> None:
    trainer = make_trainer()
    result = trainer.run(1, make_loader())
    metrics = trainer.evaluate(make_valid())
    assert metrics == pytest.approx(trainer.evaluate(make_data(40), batch_size=7), rel=1e-6) and set(metrics) == {"loss", "mae"}
    with torch.no_grad():
        x, y = make_data(40).tensors
        assert metrics["loss"] == pytest.approx(mse_loss(trainer.model.cpu().eval()(x), y).item(), rel=1e-6)
    assert trainer.mode == "train" and trainer.result is result and len(trainer.history.tests) == 2


def test_loss_history_by_mode() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader(), make_valid())
    assert trainer.get_loss_history() == trainer.loss_history_train and len(trainer.get_loss_history("test")) == 3
    with pytest.raises(ConfigError, match="mode must be .*, got 'valid'"):
        trainer.get_loss_history("valid")


def test_toggle_flips_and_sets() -> None:
    trainer = make_trainer()
    trainer.toggle()
    assert trainer.mode == "test"
    trainer.toggle("test")
    assert trainer.mode == "test"
    trainer.toggle()
    assert trainer.mode == "train"


# -- a look before the run
def test_check_prints_what_went_in_and_came_out_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    trainer = make_trainer(model=model)
    trainer.run(1, make_loader())
    before = snapshot(trainer)
    trainer.check(next(iter(make_loader(own_generator=True))))
    shown = capsys.readouterr().out.splitlines()
    assert snapshot(trainer)[:-1] == before[:-1]
    x, y = (f"Tensor (16, {n}) float32{PLACE}" for n in (8, 1))
    assert shown[0] == f"batch: list of 2 ([0]: {x}, [1]: {y})"
    assert shown[1].startswith("train_step: loss ") and shown[1].endswith(f"output {y}, label {y}")
    assert shown[2].startswith("test_step: loss ") and len(shown) == 3


def test_check_names_parameters_without_a_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    model.add_module("unused", torch.nn.Linear(1, 1))
    model.forward = lambda x: model[3](model[0](x))  # type: ignore[method-assign]
    make_trainer(model=model).check(next(iter(make_loader())))
    assert "2 parameters got no gradient in train_step." in capsys.readouterr().out


def test_check_raises_what_the_run_would_raise() -> None:
    class NoLoss(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"acc": 1.0}

    with pytest.raises(StepError, match="without 'loss'"):
        make_trainer(NoLoss).check(next(iter(make_loader())))


def test_summary_is_a_table_of_layers_and_changes_nothing() -> None:
    trainer = make_trainer()
    batch = next(iter(make_loader(own_generator=True)))
    before = snapshot(trainer)
    summary = trainer.summary(batch)
    assert snapshot(trainer) == before
    assert repr(summary).splitlines()[1].split() == ["0", "Linear", "16×16", "144"]
    assert repr(summary).endswith("161 params, 161 of them trained") and "<table" in summary._repr_html_()


# -- weights
@pytest.mark.parametrize("name", ["model.safetensors", "deep/model.pt"])
def test_weights_go_through_a_file_into_a_bare_model(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(model=make_model(1))
    file = trainer.save_model(tmp_path / name)
    other = make_trainer(model=make_model(2))
    other.apply_weights(file)
    assert same_weights(other.model, trainer.model)


def test_apply_weights_takes_the_best_copy() -> None:
    trainer = make_trainer(monitor="train_loss", monitor_mode="max")  # the first epoch is the worst
    trainer.run(3, make_loader())
    assert trainer.history.best["epoch"] == 1
    trainer.apply_weights()
    assert same_weights(trainer.model, trainer.best_weights)


def test_logs_are_empty_before_their_first_batch() -> None:
    """A step of the first epoch may read the log of a validation that comes later."""
    seen: list[Any] = []

    class Reads(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            seen.append(list(self.log_test["loss"]))
            return super().train_step(batch)

    trainer = make_trainer(Reads)
    trainer.run(2, make_loader(16), make_valid(16))
    assert [len(values) for values in seen] == [0, 0, 1, 0]  # training, validation, training, validation
    with pytest.raises(KeyError, match="'los' is not in this epoch's log, which has: loss, mae"):
        _ = trainer.log_test["los"]


def test_weights_that_are_not_there_or_do_not_fit(tmp_path: Path) -> None:
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match="There are no best weights yet"):
        trainer.apply_weights()
    with pytest.raises(CheckpointError, match="There is no file"):
        trainer.apply_weights(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="bad.safetensors holds no weights that can be read safely"):
        trainer.apply_weights(tmp_path / "bad.safetensors")
    other = make_trainer(model=torch.nn.Sequential(torch.nn.Linear(8, 16)))
    file = other.save_model(tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not those of a Sequential: 3.weight is missing, 3.bias is missing"):
        trainer.apply_weights(file)
    trainer.apply_weights(file, strict=False)
    assert torch.equal(trainer.model[0].weight, other.model[0].weight)


class Bomb:
    def __reduce__(self) -> Any:
        return (print, ("boom",))


def test_pickles_of_strangers_are_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": Bomb()}, tmp_path / "bomb.pt")
    with pytest.raises(CheckpointError, match="bomb.pt holds no weights that can be read safely"):
        make_trainer().apply_weights(tmp_path / "bomb.pt")
    assert capsys.readouterr().out == ""


def test_lightning_checkpoint_is_loaded_into_a_trainer(tmp_path: Path) -> None:
    checkpoint = C.ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
    trainer = make_trainer(lightning={"callbacks": [checkpoint]})
    trainer.run(1, make_loader())
    loaded = Regress.load_from_checkpoint(checkpoint.last_model_path, model=make_model(3), device=DEVICE)
    assert same_weights(loaded.model, trainer.model) and loaded.mode == "test"


def test_class_from_two_functions() -> None:
    def train_step(self: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.model(x), y)}

    trainer = make_trainer(Trainer.from_steps(train_step, name="Functions"))
    assert trainer.run(1, make_loader(), make_valid()).status == "completed" and trainer.title == "Functions"


def test_zero_argument_super_works_in_steps_and_constructor() -> None:
    class Mine(Regress):
        def __init__(self, *args: Any, factor: float = 2.0, **options: Any) -> None:
            super().__init__(*args, **options)
            self.factor = factor

        def train_step(self, batch: Any) -> dict[str, Any]:
            out = super().train_step(batch)
            return {**out, "loss": self.factor * out["loss"]}

    assert make_trainer(Mine, factor=3.0).run(1, make_loader()).status == "completed"


# -- bad input that only a run shows
def test_loss_on_another_device() -> None:
    other = "meta" if DEVICE == "cpu" else "cpu"

    class Elsewhere(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": torch.zeros((), device=other, requires_grad=True)}

    with pytest.raises(StepError, match=f"returned a loss on {other}, and the model is on {ONE_DEVICE}"):
        make_trainer(Elsewhere).run(1, make_loader())


def test_tensors_that_fill_the_memory_are_hinted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeps(Regress):
        def metric_on_epoch_end(self) -> None:
            return None

    monkeypatch.setattr("nbtrain.engine.recorder._HINT_BYTES", 100)
    trainer = make_trainer(Keeps)
    events: list[Any] = []
    trainer.recorder.add(type("Sink", (), {"update": staticmethod(events.append)})())
    trainer.run(2, make_loader())
    assert [e.data["text"].split(" for ")[0] for e in events if e.kind == "note"] == ["the logs hold over 0.0 GB of tensors"]


# -- Lightning's own callbacks under ours
def test_learning_rate_monitor_with_a_csv_logger(tmp_path: Path) -> None:
    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    lightning = {"callbacks": [C.LearningRateMonitor("step")], "logger": logger, "log_every_n_steps": 1}
    make_trainer(scheduler=lambda step: 1e-3 * (step + 1), lightning=lightning).run(1, make_loader())
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "lr-Adam" in text.splitlines()[0] and "0.005" in text


class Watch(L.Callback):
    """Notes the weights that each epoch begins with, and the learning rate that each update used."""

    def __init__(self) -> None:
        self.weights: list[list[torch.Tensor]] = []
        self.rates: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.weights.append([parameter.detach().clone() for parameter in pl_module.parameters()])

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def make_normed() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


@pytest.mark.parametrize("n_accumulated", [1, 2])
@pytest.mark.parametrize("lean", [False, True])
def test_weight_averaging_with_batch_norm_ends_with_the_averages(lean: bool, n_accumulated: int) -> None:
    watch, swa = Watch(), C.StochasticWeightAveraging(5e-2, swa_epoch_start=2, annealing_epochs=1)
    model, loader = make_normed(), make_loader(shuffle=False)
    trainer = make_trainer(model=model, lightning={"callbacks": [watch, swa], "accumulate_grad_batches": n_accumulated})
    trainer.short_way = lean
    trainer.run(3, loader, make_valid())
    averages = [torch.stack(values).mean(0) for values in zip(*watch.weights[1:3])]
    assert all(torch.allclose(p, average, rtol=1e-6) for p, average in zip(model.parameters(), averages))
    inputs = [model[0](x) for x, _ in on_device(loader)]
    assert torch.allclose(model[1].running_mean, torch.stack([x.mean(0) for x in inputs]).mean(0), atol=1e-6)
    assert torch.allclose(model[1].running_var, torch.stack([x.var(0) for x in inputs]).mean(0), rtol=1e-5)
    assert trainer.counts.step == len(watch.rates) == 3 * -(-len(loader) // n_accumulated)


@pytest.mark.filterwarnings("ignore")  # Lightning's own run
@pytest.mark.parametrize("form", ["instance", "factory", "function"])
def test_weight_averaging_takes_the_learning_rate_over_as_in_lightning(form: str) -> None:
    class Plain(Lit):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            interval = "epoch" if form == "instance" else "step"
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halving(optimizer), "interval": interval}}

    def halving(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def callbacks() -> list[Any]:
        return [Watch(), C.StochasticWeightAveraging(5e-2, swa_epoch_start=2, annealing_epochs=1)]

    plain, ours = callbacks(), callbacks()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Plain()
    L.Trainer(max_epochs=3, accelerator=DEVICE, devices=1, callbacks=plain, **quiet).fit(module, make_loader(own_generator=True))
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scheduler = {
        "instance": lambda: halving(optimizer),
        "factory": lambda: lambda o, plan: halving(o),
        "function": lambda: lambda step: 1e-2 * 0.5**step,
    }
    trainer = make_trainer(model=model, optimizer=optimizer, scheduler=scheduler[form](), lightning={"callbacks": ours})
    trainer.run(3, make_loader(own_generator=True))
    assert ours[0].rates == plain[0].rates and ours[0].rates[10:] == [5e-2] * 5
    assert same_weights(model, module.net)


def test_model_summary_profiler_and_lambda(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    seen: list[int] = []
    watch = C.LambdaCallback(on_train_batch_end=lambda t, m, outputs, batch, i: seen.append(i))
    profiler = L.pytorch.profilers.SimpleProfiler(tmp_path, "profile")
    make_trainer(lightning={"callbacks": [watch, C.ModelSummary()], "profiler": profiler}).run(1, make_loader())
    assert seen == [0, 1, 2, 3, 4] and "run_training_batch" in next(tmp_path.glob("*.txt")).read_text()


class Five:
    """A loader of five batches that says that it has nine."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Any:
        yield from make_loader()


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("end", ["too large a length", "a limit that is not reached", "-1"])
@pytest.mark.parametrize("lean", [False, True])
def test_model_checkpoint_finds_the_step_metrics_of_an_epoch_that_ends_early(lean: bool, end: str, tmp_path: Path) -> None:
    class Logs(Regress):
        def train_step(self, batch: Any) -> Any:
            self.log("u", float(self.counts.processed), on_step=True, on_epoch=True)
            return super().train_step(batch)

    class Seen(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append(float(trainer.callback_metrics["u_step"]))

    class Ended(StepModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 5 else None

    seen: list[float] = []
    saver = C.ModelCheckpoint(tmp_path, monitor="u_step", save_top_k=-1, filename="{u_step:.0f}")
    limits = {"limit_train_batches": 9} if end.startswith("a limit") else {}
    trainer = make_trainer(Logs, lightning={"callbacks": [saver, Seen()], **limits})
    trainer.short_way = lean
    if end == "-1":
        pl_trainer = L.Trainer(max_epochs=2, **trainer.lightning_args())
        use_own_loops(pl_trainer)
        pl_trainer.fit(Ended(trainer), make_loader(200))
    else:
        trainer.run(2, Five() if end.startswith("too") else iter_only(make_loader()))
    assert seen == [4.0, 9.0] and {path.stem for path in tmp_path.glob("*.ckpt")} == {"u_step=4", "u_step=9"}


def iter_only(loader: Any) -> Any:
    """`loader` without its length."""
    return type("Stream", (), {"__iter__": lambda self: iter(loader)})()


def test_batch_size_finder_finds_and_the_run_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the trials keep a checkpoint there, which a test that is killed would leave
    sizes: list[int] = []

    class Sizes(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            sizes.append(len(batch[0]))
            return super().train_step(batch)

    finder = C.BatchSizeFinder(steps_per_trial=1, init_val=4, max_trials=2)
    trainer = make_trainer(Sizes, lightning={"callbacks": [finder]})
    trainer.run(2, make_loader(), make_valid())
    assert finder.optimal_batch_size == 8 and sizes[-12:-3] == [8] * 8 + [6] and not any(tmp_path.iterdir())
    assert len(trainer.history) == 2 and trainer.counts.processed == 2 * (9 + 3)


@pytest.mark.parametrize("mode", some(["power", "binsearch"], 2))
@pytest.mark.parametrize("validates", some([False, True], 2))
@pytest.mark.parametrize("lean", some([True, False], 2))
def test_batch_size_finder_stops_where_the_memory_is_full(
    lean: bool, validates: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Small(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if len(batch[0]) > 20:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            sizes.append(len(batch[0]))
            return super().train_step(batch)

        def test_step(self, batch: Any) -> dict[str, Any]:
            return Regress.train_step(self, batch)

    sizes: list[int] = []
    finder = C.BatchSizeFinder(mode, steps_per_trial=1, init_val=4, margin=0.0)
    trainer = make_trainer(Small, lightning={"callbacks": [finder]})
    trainer.short_way = lean
    trainer.run(1, make_loader(), make_valid() if validates else None)
    best = {"power": 16, "binsearch": 20}[mode]
    n = -(-70 // best)
    assert finder.optimal_batch_size == best and sizes[-n:] == [best] * (n - 1) + [70 - best * (n - 1)]
    assert trainer.counts.step == n


def test_in_mode_test_both_loaders_are_evaluated() -> None:
    trainer = make_trainer(mode="test")
    data = make_valid(), list(make_valid())[:1]
    result = trainer.run(2, *data)
    losses = [(row.get("val_loss"), row.get("test_loss")) for row in trainer.history.tests]
    alone = make_trainer(model=trainer.model).validate
    test, valid = (alone(loader)["loss"] for loader in data)
    assert losses == [(pytest.approx(valid), pytest.approx(test))] * 2
    assert result.last == trainer.history.tests[-1] and trainer.counts.epoch == 0 and trainer.mode == "test"


def test_a_progress_checker_counts_by_itself_and_that_of_a_trainer_its_batches() -> None:
    alone = ProgressChecker()
    alone.update_step()
    alone.update_step()
    alone.update_epoch()
    assert (alone.get_step(), alone.get_epoch()) == (3, 2)
    alone.init_state()
    assert (alone.get_step(), alone.get_epoch(), repr(ProgressChecker())) == (1, 1, "ProgressChecker(step=1, epoch=1)")
    trainer = make_trainer()
    trainer.run(1, make_loader(), make_valid())
    assert trainer.progress_checker.get_step() == trainer.counts.processed + 1 and trainer.progress_checker.get_epoch() == 2
    trainer.progress_checker.init_state()
    assert trainer.counts == Counts()


@pytest.mark.parametrize("name", ["eval_loss", "val_loss", "test_loss", "loss", "train_loss", "val_eval_loss"])
def test_a_loss_is_better_where_it_is_lower_under_all_names(name: str) -> None:
    assert known_mode(name) == "min" and known_mode(name.replace("loss", "accuracy")) == "max"


@pytest.mark.parametrize("place", ["nbtrain", "nbtrain.addons"])
def test_name_that_was_renamed_is_refused_with_the_new_one(place: str) -> None:
    now = "ThroughputAddon is now SystemMonitorAddon(throughput=True, monitor_system=False): from nbtrain import SystemMonitorAddon"
    with pytest.raises(ImportError, match=re.escape(now)):
        exec(f"from {place} import ThroughputAddon")
    with pytest.raises(ImportError, match="AddonError is now AddOnError: from nbtrain import AddOnError"):
        exec(f"from {place} import AddonError")
    with pytest.raises(ImportError, match="cannot import name 'Traner'"):
        exec(f"from {place} import Traner")


@pytest.mark.long
def test_addons_are_imported_when_they_are_used() -> None:
    code = "import sys, nbtrain.addons; assert 'torch' not in sys.modules; from nbtrain.addons import StateManagerAddon as one"
    code += "; from nbtrain import StateManagerAddon as other; assert one is other and 'StateManagerAddon' in dir(nbtrain.addons)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_class_that_inherits_from_one_of_add_on_is_sent_with_its_checks(tmp_path: Path) -> None:
    class Cell(Regress.add_on(StateManagerAddon)):  # pyright: ignore[reportGeneralTypeIssues]
        """A class that can't be imported is pickled with its bases and their commands."""

    trainer = make_trainer(Cell, save_path=tmp_path)
    for again in (loads(dumps(trainer)), copy.deepcopy(trainer), make_trainer(loads(dumps(Cell)), save_path=tmp_path)):
        assert isinstance(again, Cell) and same_weights(trainer.model, again.model)
        with pytest.raises(ConfigError, match="path must be"):
            again.load_state(3)
