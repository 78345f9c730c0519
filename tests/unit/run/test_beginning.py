"""The first batch of a run: what is left as it was if it fails, and the one batch on which `test_step` is tried before epoch 1."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback
from samples import (
    DEVICE,
    Regress,
    make_data,
    make_loader,
    make_model,
    make_trainer,
    make_valid,
    random_numbers,
    same_content,
    same_weights,
)
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import CatMetric, MeanMetric

import nbtrain
from nbtrain import (
    AddOnBase,
    ConfigError,
    LoggersAddon,
    MetricsAddon,
    ModelTrainer,
    MultiGPUAddon,
    MultiOptimizerTrainer,
    NeptuneLoggerAddon,
    StateManagerAddon,
    StepError,
    Trainer,
    WandBLoggerAddon,
    load_run,
)
from nbtrain.data.loader import BatchList
from nbtrain.history.run_folder import open_run_folder, read_events


# -- nothing is called before it: what a step does in its first call is done once
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.extra, self.is_first = nn.Linear(3, 1), None, True
        self.register_buffer("ones", torch.ones(1).expand(3))  # in-place operations on it raise
        self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)

    def forward(self, x: Any) -> Any:
        x = (self.graph @ x.T).T * self.ones
        return self.out(x) if self.extra is None else self.out(x) + self.extra(x)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_tensor_that_cant_be_kept_with_the_weights_is_refused_before_the_run(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for kind, tensor, path in (("torch.sparse_coo", torch.eye(3).to_sparse(), None), ("torch.qint8", quantized, tmp_path)):
        model = nn.Linear(8, 1)
        model.register_buffer("graph", tensor)
        with pytest.raises(ConfigError, match=f"graph of the Linear is a {kind} tensor, which can't be kept"):
            make_trainer(model=model, save_path=path).run(1, make_loader(8))


def test_tensors_of_expand_and_of_8_bits_are_saved_and_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 1))
    model.register_buffer("ones", torch.ones(1).expand(3))
    model.register_parameter("scale", nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False))
    trainer = make_trainer(model=model, save_path=tmp_path, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    trainer.run(1, make_loader(8))
    with torch.no_grad():
        model.scale.zero_()
    trainer.apply_weights()
    assert trainer.model.scale.float().tolist() == trainer.model.ones.tolist() == [1, 1, 1]


def _grow(net: Any, optimizer: Any) -> None:
    torch.manual_seed(4)
    net.extra = nn.Linear(3, 1).to(net.out.weight.device)
    optimizer.add_param_group({"params": list(net.extra.parameters()), "lr": 0.1})


def _shrink(net: Any, optimizer: Any) -> None:
    def decay(*given: Any) -> None:
        for parameter in net.parameters():
            parameter.data.mul_(0.9)

    optimizer.register_step_post_hook(decay)


def _swap(net: Any, optimizer: Any) -> None:
    net.out = nn.Sequential(*(net.out if isinstance(net.out, nn.Sequential) else [net.out]), nn.Linear(1, 1)).to(net.ones.device)


def _replace(net: Any, optimizer: Any) -> None:
    net.out.bias = nn.Parameter(net.out.bias.detach() * 2)


def _data(net: Any, optimizer: Any) -> None:
    net.out.weight.data = net.out.weight.data * 2


def _rate(net: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


ONCE: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda net, optimizer: None,
    "a group is added": _grow,
    "a hook of a tensor": lambda net, optimizer: net.out.weight.register_hook(lambda gradient: gradient * 0.5),
    "a hook of a module": lambda net, optimizer: net.out.register_forward_hook(lambda module, given, output: output * 0.5),
    "a hook of an optimizer": _shrink,
    "a module is replaced": _swap,
    "a parameter is replaced": _replace,
    "data are replaced": _data,
    "a rate is set": _rate,
    "a parameter is frozen": lambda net, optimizer: net.out.bias.requires_grad_(not net.out.bias.requires_grad),
}


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("act", ONCE.values(), ids=ONCE)
def test_what_a_step_does_in_its_first_call_is_done_once(act: Callable[[Any, Any], Any], validates: bool) -> None:
    data = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)).to(DEVICE), torch.ones(4, 1).to(DEVICE)) for i in range(3)]

    def loss(net: Any, optimizer: Any, batch: Any) -> Any:
        if net.is_first and net.training:
            net.is_first = False
            act(net, optimizer)
        return mse_loss(net(batch[0]), batch[1])

    class Acts(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": loss(self.model, self.optimizer, batch)}

        test_step = train_step

    plain = Net().to(DEVICE)
    by_hand = SGD(plain.parameters(), 0.1)
    torch.manual_seed(1)
    for batch in data:
        value = loss(plain, by_hand, batch)
        by_hand.zero_grad()
        value.backward()
        by_hand.step()
    net = Net().to(DEVICE)
    optimizer = SGD(net.parameters(), 0.1)
    torch.manual_seed(1)
    make_trainer(Acts, model=net, optimizer=optimizer).run(1, data, data if validates else None)
    assert same_content([p.tolist() for p in net.parameters()], [p.tolist() for p in plain.parameters()])
    assert len(optimizer.param_groups) == len(by_hand.param_groups)


# -- the run that has not begun
class Fails(Regress):
    """Its step draws, counts and computes gradients before it fails, while it `fails`."""

    fails = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.n_seen, self.rows = 0, list[float]()

    def train_step(self, batch: Any) -> dict[str, Any]:
        output = super().train_step(batch)
        self.n_seen += 1
        self.rows.append(random.random() + float(np.random.rand()))
        if type(self).fails:
            output["loss"].backward()
            raise RuntimeError("boom")
        return output

    def test_step(self, batch: Any) -> dict[str, Any]:
        return Regress.train_step(self, batch)


def _model() -> nn.Module:
    return nn.Sequential(*make_model(), nn.BatchNorm1d(1))


def _fail(trainer: Any, *loaders: Any, **options: Any) -> RuntimeError:
    type(trainer).fails = True
    try:
        with pytest.raises(RuntimeError, match="boom") as caught:
            trainer.run(2, *(loaders or (make_loader(), make_valid())), **options)
    finally:
        type(trainer).fails = False
    return caught.value


def _of(trainer: Any) -> list[Any]:
    """What a call must leave as it was."""
    counts = [vars(trainer.counts).copy(), trainer.train_state.run, trainer.origin.is_over, trainer.history.state_dict()]
    weights = [value.tolist() for value in trainer.model.state_dict().values()]
    gradients = [parameter.grad is None for parameter in trainer.model.parameters()]
    own = [trainer.n_seen, list(trainer.rows), trainer.result, trainer.run_dir, trainer.ran, trainer.mode, trainer.control.state]
    return [
        counts,
        weights,
        gradients,
        own,
        trainer.optimizer.state_dict(),
        [part.training for part in trainer.model.modules()],
        random_numbers(),
    ]


@pytest.mark.parametrize("seed", [None, 3])
def test_error_in_the_first_batch_leaves_the_trainer_as_it_was(seed: int | None, tmp_path: Path) -> None:
    trainer = make_trainer(Fails, model=_model(), save_path=tmp_path, seed=seed)
    loader = make_loader(own_generator=True)
    before, place = deepcopy(_of(trainer)), loader.generator.get_state()
    error = _fail(trainer, loader, make_valid())
    assert same_content(_of(trainer), before)
    assert torch.equal(loader.generator.get_state(), place) and trainer.operations == [] and trainer.recorder.sinks == [trainer.history]
    assert error.__notes__[0].startswith("Fails.train_step, epoch 1, batch 1: the batch is list of 2")
    assert error.__notes__[1:] == ["The run has not begun, no weight has changed: correct it, then run the cell again."]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("own_generator", [False, True])
def test_second_attempt_has_the_digits_of_a_first(own_generator: bool, seed: int | None) -> None:
    def trained(fails: bool) -> list[Any]:
        trainer = make_trainer(Fails, model=_model(), seed=seed)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        loader, Fails.fails = make_loader(own_generator=own_generator), False
        if fails:
            _fail(trainer, loader, make_valid())
        trainer.run(2, loader, make_valid())
        rows = [{name: row[name] for name in row.metrics if "time" not in name} for row in trainer.history.epochs]
        return [[value.tolist() for value in trainer.model.state_dict().values()], rows, trainer.n_seen, trainer.rows, random_numbers()]

    assert same_content(trained(fails=True), trained(fails=False))


@pytest.mark.parametrize("kind", [Fails, Fails.add_on(StateManagerAddon)], ids=["alone", "with checkpoints"])
def test_next_run_takes_the_folder_again(kind: Any, tmp_path: Path) -> None:
    first = make_trainer(kind, save_path=tmp_path)
    for _ in range(2):
        _fail(first)
        assert [path.name for path in tmp_path.iterdir()] == ["run-001"]
        end = [event for event in read_events(tmp_path / "run-001") if event.kind == "end"]
        assert [event.data["status"] for event in end] == ["not begun"]
        assert end[0].data["reason"] == "RuntimeError at epoch 1, batch 1: boom"
    other = make_trainer(kind, save_path=tmp_path)  # as in another kernel
    other.run(1, make_loader())
    assert other.run_dir == tmp_path / "run-001" and len(load_run(tmp_path).epochs) == 1
    assert [event.data.get("status") for event in read_events(other.run_dir) if event.kind in ("start", "end")] == [None, "completed"]
    first.run(1, make_loader())
    assert first.run_dir == tmp_path / "run-002" and first.train_state.run == 1


def test_folder_with_anything_else_in_it_and_that_of_a_run_that_is_on_are_not_taken(tmp_path: Path) -> None:
    _fail(make_trainer(Fails, save_path=tmp_path))
    (tmp_path / "run-001" / "mine.txt").write_text("of a hook")
    assert open_run_folder(tmp_path).name == "run-002"

    names: list[str] = []
    looks = LambdaCallback(on_train_start=lambda *given: names.append(open_run_folder(tmp_path).name))
    make_trainer(save_path=tmp_path, lightning={"callbacks": [looks]}).run(1, make_loader())
    assert names == ["run-004"] and (tmp_path / "run-003" / "events.jsonl").exists()


def test_run_that_has_not_begun_is_in_no_list_of_runs(tmp_path: Path) -> None:
    gc.collect()  # runs of other tests, whose trainers are gone
    n = len(nbtrain.runs())
    trainer = make_trainer(Fails, save_path=tmp_path)
    _fail(trainer)
    assert len(nbtrain.runs()) <= n and trainer[nbtrain.addons.LiveViewAddon].run is None  # trainers of other tests may be gone
    trainer.run(1, make_loader())
    assert trainer[nbtrain.addons.LiveViewAddon].run is not None


TRACKERS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "wandb": (WandBLoggerAddon, {"web_logger": {"wandb": {"mode": "offline"}}}, ["tracker-id", "wandb"]),
    "neptune": (NeptuneLoggerAddon, {"web_logger": {"neptune": {"project_name": "me/p", "api_tkn": "x"}}}, [".neptune", "tracker-id"]),
    "csv": (LoggersAddon, {"loggers": ["csv"]}, ["training_log.csv"]),
}


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("name", TRACKERS)
def test_tracker_is_connected_when_the_first_batch_is_finished(name: str, tmp_path: Path) -> None:
    addon, options, files = TRACKERS[name]
    trainer = make_trainer(type("Tracked", (Fails.add_on(addon),), {}), save_path=tmp_path / "runs", **options)
    folder, connected = tmp_path / "runs" / "run-001", list[int]()
    _fail(trainer)
    assert not [file for file in files if (folder / file).exists()]
    watches = LambdaCallback(on_train_batch_end=lambda *given: connected.append(sum((folder / file).exists() for file in files)))
    trainer.lightning["callbacks"] = [watches]
    trainer.run(1, make_loader())
    assert trainer.run_dir == folder and all((folder / file).exists() for file in files) and connected[1:] == [len(files)] * 4


def test_on_error_pause_pauses_in_the_first_batch() -> None:
    trainer = make_trainer(Fails, on_error="pause")
    _fail(trainer, make_loader())
    assert (trainer.control.state, trainer.failure.place) == ("paused", "epoch 1, batch 1")
    assert trainer.resume().status == "completed" and trainer.n_seen == 10


def test_run_that_continues_fails_as_in_any_other_batch(tmp_path: Path) -> None:
    trainer = make_trainer(Fails, save_path=tmp_path)
    Fails.fails = False
    trainer.run(1, make_loader())
    _fail(trainer)
    assert (trainer.result.status, trainer.result.reason) == ("failed", "RuntimeError at epoch 2, batch 1: boom")
    assert trainer.train_state.run == 2 and trainer.run_dir == tmp_path / "run-001"


def test_run_that_is_resumed_fails_as_in_any_other_batch(tmp_path: Path) -> None:
    kind = type("Saved", (Fails.add_on(StateManagerAddon),), {"fails": False})
    make_trainer(kind, save_path=tmp_path).run(1, make_loader(), resume="auto")
    trainer = make_trainer(kind, save_path=tmp_path)
    _fail(trainer, make_loader(), resume="auto")
    assert trainer.result.status == "failed" and trainer.counts.epoch == 1


WHERE = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_optimizer_step")


@pytest.mark.parametrize("hook", WHERE)
def test_error_in_a_hook_before_the_first_batch_is_finished_is_not_begun(hook: str, tmp_path: Path) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("boom")

    trainer = make_trainer(lightning={"callbacks": [type("Broken", (L.Callback,), {hook: fail})()]}, save_path=tmp_path)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run(1, make_loader())
    assert (trainer.result, trainer.train_state.run, trainer.run_dir) == (None, 0, None) and same_weights(trainer.model, make_model())


def test_error_after_the_first_update_is_one_of_a_run_that_has_begun() -> None:
    def rate(step: int) -> float:
        if step:
            raise RuntimeError("boom")
        return 1.0

    trainer = make_trainer(scheduler=rate)  # per update
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run(1, make_loader())
    assert trainer.result.status == "failed" and not same_weights(trainer.model, make_model())


# -- several updates in a batch
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


LATE: dict[str, Callable[[], Any]] = {
    "by hand": lambda: _by_hand(),
    "in turns": lambda: _in_turns(type("Late", (_Two,), {"train_step_second": lambda self, batch: 1 / 0})),
}


@pytest.mark.parametrize("make", LATE.values(), ids=LATE)
def test_updates_of_a_batch_that_fails_later_are_taken_back(make: Callable[[], Any]) -> None:
    trainer = make()
    if not trainer.automatic_optimization:
        trainer.plan.step = lambda: 1 / 0  # after the updates
    states = [one.state_dict() for one in trainer.all_optimizers]
    before = deepcopy([trainer.model.state_dict(), states])
    with pytest.raises(ZeroDivisionError):
        trainer.run(1, make_loader())
    states = [one.state_dict() for one in trainer.all_optimizers]
    assert same_content([trainer.model.state_dict(), states], before) and (trainer.result, trainer.train_state.run) == (None, 0)


def test_error_in_one_of_several_training_steps_has_its_place() -> None:
    class Wrong(_Two):
        def train_step_second(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model[0](batch[0]).mean()}  # without a gradient: it is the turn of the other layer

    trainer = _in_turns(Wrong)
    with pytest.raises(StepError, match="Wrong.train_step_second, epoch 1, batch 1"):
        trainer.run(1, make_loader())
    assert (trainer.train_state.run, trainer.joint.turn) == (0, None) and all(p.requires_grad for p in trainer.model.parameters())


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


# -- the ends of a run whose first batch fails
class Ends(nbtrain.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_finalize(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.calls.append("on_finalize")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("names", [["on_train_end"], ["on_finalize"], ["on_train_end", "on_finalize"]])
def test_ends_are_called_when_a_batch_fails(names: list[str], at: int) -> None:
    class Late(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.processed == at - 1:
                raise RuntimeError("boom")
            return super().train_step(batch)

    seen, ends = list[str](), Ends()
    hooks = {name: (lambda trainer, name=name: seen.append(name)) for name in names}
    with pytest.raises(RuntimeError, match="boom"):
        make_trainer(Late, hooks=hooks, lightning={"callbacks": [ends]}).run(1, make_loader())
    assert seen == names and ends.calls == ["on_finalize", "teardown fit"]


def test_error_of_a_teardown_after_an_error_is_a_note() -> None:
    class Sticks(L.Callback):
        def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
            raise OSError("it sticks")

    ends = Ends()
    error = _fail(make_trainer(Fails, lightning={"callbacks": [Sticks(), ends]}))
    assert "nbtrain: OSError in teardown after it: it sticks" in error.__notes__ and "teardown fit" in ends.calls


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


EPOCH_1 = "before epoch 1"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another name": (
        lambda: make_trainer(Scored, monitor="val_accuracy"),
        f"monitor='val_accuracy' is not returned by any step.\n  Scored, {EPOCH_1}\n  Did you mean 'val_acc'?",
    ),
    "no name is near": (
        lambda: make_trainer(Scored, monitor="val_f1", monitor_mode="max"),
        f"monitor='val_f1' is not returned by any step.\n  Scored, {EPOCH_1}\n  Known are: val_acc, val_loss.",
    ),
    "a metric of the training": (
        lambda: make_trainer(Scored, monitor="val_mse"),
        f"monitor='val_mse' is not returned by any step.\n  Scored, {EPOCH_1}\n  Known are: val_acc, val_loss.",
    ),
    "without its phase": (
        lambda: make_trainer(Scored, monitor="acc"),
        f"monitor='acc' is not returned by any step.\n  Scored, {EPOCH_1}\n  Did you mean 'val_acc'?",
    ),
    "of the training, before the first update": (
        lambda: make_trainer(Regress, monitor="train_mse"),
        "monitor='train_mse' is not returned by any step.\n  Regress, epoch 1, batch 1\n  Did you mean 'train_mae'?",
    ),
    "of Lightning's EarlyStopping": (
        lambda: make_trainer(Scored, lightning={"callbacks": [EarlyStopping("val_accuracy")]}),
        f"monitor='val_accuracy' of EarlyStopping is not returned by any step.\n  Scored, {EPOCH_1}\n  Did you mean 'val_acc'?",
    ),
    "of a ModelTrainer": (
        lambda: make_trainer(ModelTrainer, monitor="val_acc", loss_fn=mse_loss),
        f"monitor='val_acc' is not returned by any step.\n  ModelTrainer, {EPOCH_1}\n  Known are: val_loss.",
    ),
}


@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED)
def test_monitor_that_no_step_gives_is_refused_before_epoch_1(make: Callable[[], Any], text: str) -> None:
    trainer = make()
    with pytest.raises(ConfigError) as error:
        trainer.run(3, make_loader(), make_valid())
    assert str(error.value) == text
    assert trainer.counts.processed == 0 and trainer.result is None and same_weights(trainer.model, make_model())


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
    "self.log": lambda: make_trainer(Logging, monitor="val_f1", monitor_mode="max"),
    "perplexity": lambda: make_trainer(ModelTrainer, monitor="val_perplexity", monitor_mode="min", loss_fn=mse_loss, perplexity=True),
}


@pytest.mark.parametrize("make", POSSIBLE.values(), ids=POSSIBLE)
def test_monitor_that_may_come_is_not_refused(make: Callable[[], Any]) -> None:
    trainer = make()
    assert trainer.run(1, make_loader(), make_valid()).status == "completed"


def test_monitor_that_no_turn_gives_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'train_extra_first'"):
        _in_turns(monitor="train_extra", monitor_mode="min").run(1, make_loader())


def test_monitor_that_no_training_step_gives_is_refused_without_a_valid_loader() -> None:
    with pytest.raises(ConfigError, match="monitor='train_maee' is not returned by any step"):
        make_trainer(monitor="train_maee", monitor_mode="min").run(1, make_loader())


SEEN: list[int] = []


class Greedy(Regress):
    """Changes what it can reach; test_objects.py does it with objects of every kind."""

    shared: list[int] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.n_seen, self.cat = 0, CatMetric()

    def test_step(self, batch: Any) -> dict[str, Any]:
        x, _ = batch
        self.n_seen += 1
        self.new = 1
        for items in (self.shared, SEEN):
            items.append(1)
        self.cat.update(x)
        self.model[4].update(x)
        _ = random.random(), np.random.rand(), torch.rand(1)
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
    return deepcopy(
        {
            "n_seen": trainer.n_seen,
            "lists": [Greedy.shared, SEEN],
            "metrics": [metric.update_count for metric in (trainer.cat, trainer.model[4])],
            "cat": len(trainer.cat.value),
            "weights": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
            "modes": [part.training for part in trainer.model.modules()],
            "grads": [parameter.grad is None for parameter in trainer.model.parameters()],
            "counts": vars(trainer.counts),
            "state": [trainer.mode, trainer.module is None, trainer.result, trainer.train_state.run, trainer.train_state.metrics],
            "n_batches": [meter.n_batches for meter in trainer.train_state.meters.values()],
            "names of attributes": sorted(vars(trainer)),
        }
    )


# -- `test_step` on one batch before epoch 1
def _counting(kind: type[Trainer] = Regress) -> tuple[type[Trainer], list[Any]]:
    """A class whose `test_step` notes how it is called in a list that no search finds."""
    calls: list[Any] = []
    note = [calls.append].__getitem__

    class Counting(kind):
        def test_step(self, batch: Any) -> dict[str, Any]:
            checks = self.module.trainer.sanity_checking if self.module is not None else None
            note(0)((self.mode, self.model.training, torch.is_grad_enabled(), checks, len(batch[0])))
            return super().test_step(batch)

    return Counting, calls


class Transposed(Regress):
    def test_step(self, batch: Any) -> dict[str, Any]:
        return super().test_step((batch[0].T, batch[1]))


def test_error_of_the_step_is_raised_before_epoch_1_with_its_place(tmp_path: Path) -> None:
    trainer = make_trainer(Transposed, save_path=tmp_path / "runs")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        trainer.run(3, make_loader(), make_valid())
    notes = error.value.__notes__
    assert notes[0].startswith("Transposed.test_step, on a batch of valid_loader before epoch 1: the batch is list of 2")
    assert notes[1:] == [
        'lightning={"num_sanity_val_steps": 0} leaves this check out.',
        "The run has not begun, no weight has changed: correct it, then run the cell again.",
    ]
    assert (trainer.result, trainer.counts.processed, trainer.train_state.run, trainer.run_dir) == (None, 0, 0, None)
    assert trainer.mode == "train" and trainer.model.training


def test_error_of_the_check_is_said_to_be_of_a_validation_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        make_trainer(Transposed, log_bar=True).run(1, make_loader(), make_valid())
    assert "not begun · RuntimeError at a validation batch before epoch 1: mat1 and mat2" in capsys.readouterr().out
    trainer = make_trainer(Transposed, on_error="pause")
    with pytest.raises(RuntimeError) as error:
        trainer.run(1, make_loader(), make_valid())
    place = "a validation batch before epoch 1"
    assert (trainer.failure.place, trainer.result.reason) == (place, place)
    assert error.value.__notes__[-1].startswith(f"paused at {place}\n") and f"test_step at {place}: " in repr(trainer.failure)
    trainer.resume(Regress)
    assert trainer.result.status == "completed" and trainer.counts.processed == 8


def test_output_that_cannot_be_used_is_refused_before_epoch_1() -> None:
    class Broken(Regress):
        def test_step(self, batch: Any) -> Any:
            return {"note": "good"}

    trainer = make_trainer(Broken)
    text = "test_step returned 'note' as str, which is neither a number nor made of tensors."
    place = "Broken.test_step, on a batch of valid_loader before epoch 1"
    with pytest.raises(StepError) as error:
        trainer.run(1, make_loader(), make_valid())
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


def test_step_is_tried_as_in_a_validation_on_one_batch_of_a_new_run() -> None:
    kind, calls = _counting()
    trainer = make_trainer(kind)
    trainer.run(1, make_loader(), make_valid())
    assert calls == [("test", False, False, True, 16), *[("test", False, False, False, n) for n in (16, 16, 8)]]
    trainer.run(1, make_loader(), make_valid())
    assert [call[3] for call in calls].count(True) == 1
    assert [row["processed"] for row in trainer.history.validations] == [8, 16]  # five batches and three, twice


def test_named_loaders_are_tried_each() -> None:
    kind, calls = _counting()
    make_trainer(kind, monitor="val_mae/b").run(1, make_loader(), {"a": make_valid(), "b": make_valid(20)})
    assert [call[4] for call in calls if call[3]] == [16, 16]


class Once(IterableDataset[Any]):
    def __init__(self) -> None:
        self.batches = iter([tensor[:8] for tensor in make_data().tensors] for _ in range(3))

    def __iter__(self) -> Iterator[Any]:
        return self.batches


UNREAD: dict[str, Callable[[], Any]] = {
    "a generator": lambda: ([tensor[:8] for tensor in make_data().tensors] for _ in range(3)),
    "a stream": lambda: DataLoader(Once(), batch_size=None),
}


@pytest.mark.parametrize("make", UNREAD.values(), ids=UNREAD)
def test_loader_that_gives_its_batches_once_gives_them_to_the_validation(make: Callable[[], Any]) -> None:
    kind, calls = _counting()
    trainer = make_trainer(kind)
    trainer.run(1, make_loader(), make())
    assert [call[3] for call in calls] == [False] * 3 and len(trainer.history.validations) == 1


UNTRIED: dict[str, dict[str, Any]] = {
    "turned off": {"lightning": {"num_sanity_val_steps": 0}},
    "no validation": {"lightning": {"limit_val_batches": 0}},
}


@pytest.mark.parametrize("options", UNTRIED.values(), ids=UNTRIED)
def test_step_is_not_tried(options: dict[str, Any]) -> None:
    kind, calls = _counting()
    make_trainer(kind, **options).run(1, make_loader(), make_valid())
    assert not [call for call in calls if call[3]]


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("precision", [None, "bf16", "bf16-true"])
def test_training_is_bit_for_bit_the_one_without_the_check(precision: Any, own_generator: bool) -> None:
    def trained(lightning: dict[str, Any]) -> list[Any]:
        trainer = make_trainer(_Driven, model=_model(), precision=precision, lightning=lightning, seed=3)
        trainer.run(2, make_loader(own_generator=own_generator), make_valid())
        rows = [{name: row[name] for name in row.metrics if "_loss" in name} for row in trainer.history.epochs]
        weights = [value.tolist() for value in trainer.model.state_dict().values()]
        return [weights, rows, trainer.losses, trainer.seen, random_numbers()]

    assert same_content(trained({}), trained({"num_sanity_val_steps": 0}))


def test_step_that_changes_all_it_can_reach_leaves_nothing() -> None:
    pictures: list[Any] = []
    for lightning in ({}, {"num_sanity_val_steps": 0}):
        for items in (Greedy.shared, SEEN):
            items.clear()
        random.seed(1)
        np.random.seed(1)
        trainer = _greedy()
        look = LambdaCallback(on_train_start=lambda *given, trainer=trainer: pictures.append([_picture(trainer), random_numbers()]))
        trainer.lightning |= lightning | {"callbacks": [look]}
        trainer.run(1, make_loader(), make_valid())
    assert same_content(*pictures)


def test_step_may_change_the_batch_of_a_list() -> None:
    class Halving(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            batch[0].mul_(0.5)
            return super().test_step(batch)

    batches, seen = [(torch.ones(4, 8), torch.ones(4, 1))], []
    callback = LambdaCallback(on_train_start=lambda *given: seen.append(batches[0][0].clone()))
    make_trainer(Halving, lightning={"callbacks": [callback]}).run(1, make_loader(), batches)
    assert torch.equal(seen[0], torch.ones(4, 8))


class Scaled(Regress):
    def test_step(self, batch: Any) -> dict[str, Any]:
        return super().test_step((batch[0] * self.scale, batch[1]))  # type: ignore[attr-defined]


def test_step_may_need_what_a_callback_prepares() -> None:
    prepares = LambdaCallback(on_fit_start=lambda pl_trainer, pl_module: setattr(pl_module.owner, "scale", 2.0))
    trainer = make_trainer(Scaled, lightning={"callbacks": [prepares]})
    assert trainer.run(1, make_loader(), make_valid()).status == "completed"


class Mapped(AddOnBase):
    """Gives the steps other batches."""

    def loader(self, trainer: Any, loader: Any, *, training: bool) -> Any:
        return BatchList([(x[:, :8], y) for x, y in loader])


def test_batch_is_as_an_addon_changes_it() -> None:
    wide = [(torch.zeros(4, 9), torch.zeros(4, 1))] * 2
    kind, calls = _counting(Regress.add_on(Mapped))
    make_trainer(kind).run(1, wide, wide)
    assert [call[3] for call in calls] == [True, False, False]


@pytest.mark.parametrize("request_", ["stop", "save_state"])
def test_step_may_ask_for_something_in_the_run(request_: str, tmp_path: Path) -> None:
    class Asking(Regress.add_on(StateManagerAddon)):
        def test_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.epoch or not self.module.trainer.sanity_checking:
                getattr(self, request_)()
            return super().test_step(batch)

    trainer = make_trainer(Asking, save_path=tmp_path)
    trainer.run(1, make_loader(), make_valid())
    assert trainer.counts.processed


# -- in several processes
def test_error_in_the_first_batch_of_other_processes_is_not_begun(tmp_path: Path) -> None:
    class Wrong(Regress.add_on(MultiGPUAddon)):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step((batch[0].T, batch[1]))

    trainer = make_trainer(Wrong, device=["cpu", "cpu"], save_path=tmp_path)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.run(1, make_loader())
    assert (trainer.result, trainer.train_state.run, trainer.run_dir) == (None, 0, None) and same_weights(trainer.model, make_model())
    assert open_run_folder(tmp_path).name == "run-001"


class _BreaksHeader(AddOnBase):
    breaks = True

    def facts(self, trainer: Any) -> dict[str, Any]:
        if self.breaks:
            raise ValueError("boom")
        return {}


class _BreaksView(nbtrain.addons.LiveViewAddon):
    breaks = True

    def begin(self, trainer: Any) -> None:
        if self.breaks:
            raise ValueError("boom")
        super().begin(trainer)


@pytest.mark.parametrize("addon", [_BreaksHeader, _BreaksView])
def test_an_error_before_the_first_batch_leaves_the_trainer_as_it_was(addon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, seeded = Regress.add_on(addon), {"seed": 7, "log_bar": False}
    trainer = make_trainer(kind, save_path=tmp_path / "a", **seeded)
    with pytest.raises(ValueError, match="boom"):
        trainer.run(1, make_loader())
    state = trainer.train_state
    assert (state.run, trainer.origin.is_over, trainer.result, trainer.control.state) == (0, False, None, "idle")
    monkeypatch.setattr(addon, "breaks", False)
    plain = make_trainer(kind, save_path=tmp_path / "b", **seeded)
    for one in (trainer, plain):
        one.run(1, make_loader())
    assert same_weights(trainer.model, plain.model) and trainer.run_dir == tmp_path / "a" / "run-001" and state.run == 1
    monkeypatch.setattr(addon, "breaks", True)
    with pytest.raises(ValueError, match="boom"):
        trainer.run(1, make_loader())
    monkeypatch.setattr(addon, "breaks", False)
    assert trainer.run(1, make_loader()).status == "completed" and trainer.counts.epoch == 2
