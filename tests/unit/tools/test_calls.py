"""Single calls: the same with what is found once as with a `lightning.Trainer` that searches each time, and no memory is kept."""

from __future__ import annotations

import gc
import importlib.metadata
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities import registry
from samples import DEVICE, Regress, make_data, make_model, make_trainer, same_content
from torch import Tensor, nn

from nbtrain import CompileAddon, EMAAddon, StateManagerAddon
from nbtrain.base.operation import operate
from nbtrain.engine.step_module import StepModule
from nbtrain.run import execution, lightning_trainer
from nbtrain.run.lightning_trainer import ENTRY_POINTS, EntryPoints, make_pl_trainer
from nbtrain.tools import evaluate, lr_finder
from nbtrain.tools.evaluate import needs_lightning, predict_directly

FACTORIES = "lightning.pytorch.callbacks_factory"
BATCHES = [make_data(48, seed=seed).tensors for seed in range(3)]
TRAINING = ["on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_fit_end"]
TESTING = ["on_test_start", "on_test_batch_end", "on_test_end", "on_validation_batch_end", "on_validation_end"]
PREDICTING = ["setup", "teardown", "on_predict_start", "on_predict_batch_end", "on_predict_end", "on_exception"]


def tracing(hooks: list[str]) -> Any:
    """A callback that writes down these hooks, with the place, the modes and the metrics that it sees."""

    def traced(name: str) -> Callable[..., None]:
        def hook(self: Any, pl_trainer: L.Trainer, module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
            metrics = {key: float(value) for key, value in pl_trainer.callback_metrics.items()}
            self.seen.append((name, pl_trainer.global_step, pl_trainer.current_epoch, module.training, metrics))

        return hook

    return type("Tracing", (L.Callback,), {name: traced(name) for name in hooks} | {"seen": []})()


class Halved(Regress):
    """Another step for the same model."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        output = super().train_step(batch)
        return output | {"loss": output["loss"] / 2}


def _draw(seed: int, n: int) -> list[tuple[str, int]]:
    """Calls by name, each with the number of a batch."""
    drawn = random.Random(seed)
    names = ["run", "run_batch", "evaluate", "validate", "predict", "predict", "toggle", "set", "optimizer", "model", "callback"]
    names += ["step", "error", "argument"]
    return [(drawn.choice(names), drawn.randrange(len(BATCHES))) for _ in range(n)]


def _refused(x: Tensor) -> Tensor:
    raise ValueError("no")


def _call(trainer: Any, name: str, k: int) -> Any:
    batch = BATCHES[k]
    if name == "run":
        return trainer.run(1, [batch], [BATCHES[0]]).metrics
    if name in ("run_batch", "evaluate", "validate", "predict"):
        given = {"run_batch": batch, "evaluate": [batch, BATCHES[0]], "validate": [batch], "predict": batch[0]}
        return getattr(trainer, name)(given[name])
    if name == "set" and trainer.optimizer is not None:
        trainer.set(lr=10.0 ** -(k + 1))
    elif name == "error":
        forward, trainer.model.forward = trainer.model.forward, _refused
        with pytest.raises(ValueError, match="no"):
            (trainer.run_batch if k else trainer.predict)(batch if k else batch[0])
        trainer.model.forward = forward
    else:
        _replace(trainer, name, k)
    return None


def _replace(trainer: Any, name: str, k: int) -> None:
    """Another part for the same trainer, between two calls."""
    if name == "toggle":
        trainer.toggle()
    elif name == "step":
        trainer.__class__ = Halved if type(trainer) is Regress else Regress
    elif name == "argument":
        trainer.lightning["gradient_clip_val"] = 0.1 * k or None
    elif name == "callback":
        trainer.lightning["callbacks"] = [tracing(TRAINING + TESTING + (PREDICTING if k else []))]
    elif name in ("optimizer", "model"):
        trainer.model = make_model(k) if name == "model" else trainer.model
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01 * (k + 1), momentum=0.9)


def _values(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().clone()
    return {name: _values(value) for name, value in found.items()} if isinstance(found, dict) else found


def _played(calls: list[tuple[str, int]]) -> list[Any]:
    """What the calls return, and what the trainer, its callbacks and the random numbers are after each."""
    trainer, seen, tracers = make_trainer(lightning={}), [], []
    torch.manual_seed(7)
    for name, k in calls:
        found = _values(_call(trainer, name, k))
        tracers += [part for part in trainer.lightning.get("callbacks", []) if part not in tracers]
        modes = [part.training for part in trainer.model.modules()]
        rows = [dict(row) | {"time_s": 0} for row in (*trainer.history.epochs, *trainer.history.tests)]
        logs = _values(dict(trainer.log_train)), _values(dict(trainer.log_test))
        weights = [_values(p) for p in trainer.model.parameters()]
        seen.append((found, modes, trainer.mode, weights, rows, logs, trainer.counts, torch.get_rng_state(), trainer.module))
    return [seen, [part.seen for part in tracers]]


def _search_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own trainer for each call, and each prediction by Lightning."""
    for module in (evaluate, execution, lr_finder):
        monkeypatch.setattr(module, "make_pl_trainer", L.Trainer)
    monkeypatch.setattr("nbtrain.tools.evaluate.predict_directly", lambda trainer, x: None)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 40))])
def test_drawn_calls_are_the_same_with_lightnings_own_trainer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _draw(seed, 25)
    ours = _played(calls)
    _search_each_time(monkeypatch)
    for i, (own, lightnings) in enumerate(zip(ours[0], _played(calls)[0])):
        assert same_content(own, lightnings), (i, calls[: i + 1])


@pytest.mark.parametrize("hooks", [TRAINING + TESTING, TRAINING + TESTING + PREDICTING])
def test_callbacks_see_the_same_as_under_lightnings_own_trainer(hooks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> Any:
        trainer = make_trainer(lightning={"callbacks": [callback := tracing(hooks)]})
        for name in ("run", "predict", "run_batch", "evaluate", "error", "predict", "run"):
            _call(trainer, name, 1)
        return callback.seen

    ours = seen()
    _search_each_time(monkeypatch)
    assert ours == seen() and len(ours) > 15


@pytest.mark.parametrize("n_calls", [100, pytest.param(500, marks=pytest.mark.long)])
def test_calls_keep_nothing(n_calls: int) -> None:
    def of_lightning() -> list[Any]:
        gc.collect()
        return [part for part in gc.get_objects() if issubclass(type(part), (L.Trainer, StepModule))]

    earlier = of_lightning()  # what other tests hold
    trainer = make_trainer()
    x, _ = batch = BATCHES[0]

    def n_objects(n: int) -> int:
        for _ in range(n):
            trainer.run_batch(batch)
            trainer.predict(x)
        gc.collect()
        return len(gc.get_objects())

    before = n_objects(10)
    assert n_objects(n_calls // 2) - before < 100
    trainer.run(1, [batch])
    trainer.evaluate([batch])
    assert {id(part) for part in of_lightning()} <= set(map(id, earlier))


class _Cast(nn.Module):
    """Draws a random number, even in eval mode, and counts the changes of mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.changes = nn.Linear(8, 1), list[bool]()

    def train(self, mode: bool = True) -> Any:
        self.changes.append(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.rand(())


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"precision": "fp32"}, {"mode": "test"}], ids=str)
def test_a_tensor_is_predicted_as_by_lightning(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(model=_Cast(), **options)
    trainer.model.layer.eval()
    x, changes = BATCHES[0][0], trainer.model.changes
    random_before = torch.get_rng_state()
    assert operate(trainer, "predict", lambda operation: predict_directly(trainer, x)) is not None
    changes.clear()
    ours, ours_changed = trainer.predict(x), changes.copy()
    assert torch.equal(torch.get_rng_state(), random_before) and not ours.requires_grad
    assert trainer.model.training and not trainer.model.layer.training
    changes.clear()
    _search_each_time(monkeypatch)
    lightnings = trainer.predict(x)
    assert torch.equal(ours, lightnings) and ours.dtype == lightnings.dtype and ours_changed == changes


def test_a_prediction_leaves_modes_and_gradients_also_after_an_error() -> None:
    trainer = make_trainer()
    trainer.model(BATCHES[0][0].to(DEVICE)).sum().backward()
    before = [p.grad.clone() for p in trainer.model.parameters()]
    trainer.predict(BATCHES[0][0])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.predict(torch.ones(2, 3))
    assert all(part.training for part in trainer.model.modules()) and torch.is_grad_enabled()
    assert all(map(torch.equal, before, (p.grad for p in trainer.model.parameters())))


def _callback(hook: str) -> L.Callback:
    return type("Hooked", (L.Callback,), {hook: lambda self, *args, **kwargs: None})()


SAYING: dict[str, Callable[[], Any]] = {
    "a moving average": lambda: make_trainer(Regress.add_on(EMAAddon)),
    "compile": lambda: make_trainer(Regress.add_on(CompileAddon), compile={"backend": "eager"}),
    "inference_mode": lambda: make_trainer(lightning={"inference_mode": True}),
    "a profiler": lambda: make_trainer(lightning={"profiler": "simple"}),
    "limit_predict_batches": lambda: make_trainer(lightning={"limit_predict_batches": 1}),
    **{hook: lambda hook=hook: make_trainer(lightning={"callbacks": [_callback(hook)]}) for hook in PREDICTING},
}


@pytest.mark.parametrize("what", SAYING)
def test_lightning_predicts_where_something_has_a_say(what: str) -> None:
    trainer = SAYING[what]()
    assert needs_lightning(trainer) and predict_directly(trainer, BATCHES[0][0]) is None
    assert trainer.predict(BATCHES[0][0]).shape == (48, 1)


@pytest.mark.parametrize("precision", ["bf16-true", {"input": "bf16", "param": "bf16"}])
def test_a_precision_that_changes_the_model_is_lightnings(precision: Any) -> None:
    assert predict_directly(make_trainer(precision=precision), BATCHES[0][0]) is None


def test_nothing_of_nbtrain_alone_has_a_say(tmp_path: Path) -> None:
    for trainer in (make_trainer(), make_trainer(keep_states=True), make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)):
        assert not needs_lightning(trainer)
        trainer.lightning["callbacks"] = [_callback("on_train_start")]
        assert not needs_lightning(trainer)


def test_a_variable_of_the_environment_reaches_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "1")
    trainer = make_trainer()
    trainer.run(1, BATCHES)
    assert trainer.counts.processed == 1 and needs_lightning(trainer)


# -- what is found once
def _install(folder: Path, name: str) -> None:
    """A package with an entry point that makes a callback."""
    (folder / f"{name}.py").write_text(
        "import lightning as L\nmade = []\nclass Counts(L.Callback):\n"
        "    n = 0\n    def on_train_batch_end(self, *args): self.n += 1\n"
        "def make():\n    made.append(Counts())\n    return made[-1]\n"
    )
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{FACTORIES}]\nmake = {name}:make\n")


def test_a_callback_of_a_package_that_was_installed_meanwhile_comes_to_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    trainer.run_batch(BATCHES[0])
    monkeypatch.syspath_prepend(tmp_path)
    trainer.run_batch(BATCHES[0])  # searches the folder, in which there is nothing yet
    _install(tmp_path, "counts_batches")
    monkeypatch.delitem(sys.modules, "counts_batches", raising=False)
    trainer.run_batch(BATCHES[0])
    trainer.run(1, BATCHES)
    made = sys.modules["counts_batches"].made
    assert [callback.n for callback in made] == [1, 3] and needs_lightning(trainer)  # one for each use
    monkeypatch.undo()
    trainer.run_batch(BATCHES[0])
    assert len(made) == 2 and not needs_lightning(trainer)


def test_packages_are_searched_once_and_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    points = EntryPoints(lambda group: [searched.append(group)])  # pyright: ignore[reportArgumentType]
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(3):
        assert points.find("a") == (None,)
    points.find("b")
    assert searched == ["a", "b"]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, object()])
    points.find("a")
    assert searched == ["a", "b", "a"]


def test_only_our_trainers_are_made_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    search = type(ENTRY_POINTS).find
    monkeypatch.setattr(EntryPoints, "find", lambda self, group: seen.append(vars(registry)["entry_points"]) or search(self, group))
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    pl_trainer = make_pl_trainer(**off, accelerator=DEVICE)
    assert isinstance(pl_trainer, L.Trainer) and len(seen) == 1 and vars(registry)["entry_points"] is importlib.metadata.entry_points
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        make_pl_trainer(unknown=1)
    L.Trainer(**off, accelerator=DEVICE)
    assert len(seen) == 1 and vars(registry)["entry_points"] is importlib.metadata.entry_points


def test_handlers_of_signals_are_after_a_run_as_before() -> None:
    def handler(signum: int, frame: Any) -> None: ...

    class Sets(L.Callback):
        def on_train_start(self, *args: Any) -> None:
            assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
            signal.signal(signal.SIGUSR2, handler)

    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    make_trainer(lightning={"callbacks": [Sets()]}).run_batch(BATCHES[0])
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    assert lightning_trainer.QuickTrainer.__name__ == L.Trainer.__name__
