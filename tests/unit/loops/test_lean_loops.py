"""Each feature on Lightning's own loops and on the lean ones: the same hooks, counters, logs, checkpoints and weights.

Run with Lightning 2.6.6, and by `test_the_comparison_holds_on_the_lowest_lightning` in tests/test_setup.py with 2.6.4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from samples import make_loader, make_model, make_valid
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from traced import Memory, StopAt, Stream, Trace, hooked_sgd

from nbtrain.loops.lean_loops import use_lean_loops
from nbtrain.loops.lean_pass import unknown_version
from nbtrain.loops.lean_training import LeanEpochLoop

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, logging and restarted epochs


class Module(L.LightningModule):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.net, self.trace = make_model(), trace

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", mse_loss(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


class Logs(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": 2 * loss.detach(), "index": float(batch_idx)})
        self.log("own", loss, batch_size=batch_idx + 1, on_epoch=True)
        return {"loss": loss, "extra": batch[0].mean(), "count": 3}


class Sometimes(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            self.log("odd", loss, on_step=True, on_epoch=True)
        return None if batch_idx == 3 else loss


class NoIndex(Module):
    def training_step(self, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().training_step(batch, 0)


class AnyArguments(Module):
    def training_step(self, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        batch, batch_idx = args
        self.log("index", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().validation_step(*args)


class AnyKeywords(Module):
    def training_step(self, batch: Any, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().training_step(batch, 0)

    def validation_step(self, batch: Any, **options: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().validation_step(batch, 0)


class Decorated(Module):
    @functools.wraps(Module.training_step)
    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args)


class Subclassed(Module):
    """A step whose loss is a Tensor subclass: with `keyed` in a dict."""

    keyed = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx).as_subclass(Loss)
        return {"loss": loss, "n": len(batch[0])} if self.keyed else loss


class Loss(torch.Tensor):
    pass


class EndsEarly(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class ModuleHooks(Module):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.trace.note("module", "on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("grad", self.net[0].weight.grad.norm(), on_step=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.note("module", "on_train_batch_end", float(outputs["loss"]))


class Raises(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 7:
            raise RuntimeError("boom")
        return super().training_step(batch, batch_idx)


class Stops(Module):
    """A StopIteration in a step ends Lightning's epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise StopIteration
        return super().training_step(batch, batch_idx)


class Manual(Module):
    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class OwnStep(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.trace.note("optimizer_step", batch_idx)
        optimizer.step(closure=optimizer_closure)


class OwnTransfer(Module):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part * 2 for part in batch]


def optimizing(make: Callable[[Module], Any]) -> type[Module]:
    return type("Optimizing", (Module,), {"configure_optimizers": make})


def _replaced(module: Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), 1e-2, momentum=0.9)
    step = optimizer.step

    def own_step(closure: Any) -> Any:
        module.trace.note("own step", module.trainer.global_step)
        return step(closure)

    optimizer.step = own_step
    return optimizer


def _scheduled(interval: str) -> Callable[[Module], Any]:
    def make(module: Module) -> Any:
        optimizer = torch.optim.Adam(module.parameters(), 1e-2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 2, 0.5), "interval": interval}}

    return make


def _plateau(module: Module) -> Any:
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=10.0), "monitor": "v"}}


class NoGrad(torch.optim.Optimizer):
    """An optimizer of others: its whole step is under no_grad, and it has no `lr`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rate": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["rate"] * parameter.grad
        return loss


class Later(Callback):
    """Changes the optimizer or the module in the middle of the first epoch, and once more at its end."""

    def __init__(self, change: Callable[[Trace, Any, L.LightningModule], None], where: str = "on_train_batch_end", at: int = 3) -> None:
        self.change, self.at = change, at
        setattr(self, where, self.look)

    def look(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == self.at:
            self.change(module.trace, trainer.optimizers[0], module)


def _norm(module: Any) -> float | None:
    gradient = module.net[0].weight.grad
    return None if gradient is None else float(gradient.norm())


def _validate_every_second(trace: Trace, optimizer: Any, module: Any) -> None:
    module.trainer.check_val_every_n_epoch = 2


def _register(name: str) -> Callable[..., None]:
    def register(trace: Trace, optimizer: Any, module: Any) -> None:
        getattr(optimizer, name)(lambda *_: trace.note(name, _norm(module)))

    return register


def _replace(name: str) -> Callable[..., None]:
    """Replaces a method of the optimizer by one that wraps it."""

    def replace(trace: Trace, optimizer: Any, module: Any) -> None:
        method = getattr(optimizer, name)

        def own(*args: Any, **options: Any) -> Any:
            trace.note("own", name, _norm(module))
            return method(*args, **options)

        setattr(optimizer, name, own)

    return replace


def _wrap(name: str) -> Callable[..., None]:
    """Sets a hook of the module as an attribute, as libraries do that instrument one: with functools.wraps."""

    def wrap(trace: Trace, optimizer: Any, module: Any) -> None:
        method = getattr(module, name)

        @functools.wraps(method)
        def own(*args: Any, **options: Any) -> Any:
            trace.note("own", name)
            return method(*args, **options)

        setattr(module, name, own)

    return wrap


class LogsToo(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("from_callback", float(batch_idx), on_step=True, on_epoch=True)
        pl_module.log("integer", batch_idx)


class Latecomer(Callback):
    """Adds a callback in mid-epoch."""

    def __init__(self, trace: Trace) -> None:
        self.late = LambdaCallback(on_train_batch_start=lambda t, m, b, i: trace.note("late", i))

    def on_train_batch_end(self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            trainer.callbacks.append(self.late)


class TooLong:
    """A loader with more batches in its length than it gives."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Any:
        yield from make_loader(own_generator=True)


class Batches:
    """A loader of dicts and tuples, and None once."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        x = torch.ones(4, 8)
        yield (x, x.sum(1, keepdim=True))
        yield None
        yield [x + 1, x.sum(1, keepdim=True)]
        yield (x * 2, x.sum(1, keepdim=True))


def run(
    lean: bool, folder: Path, *, module: type[Module] = Module, loader: Any = None, valid: Any = "usual", callbacks: Any = (), **args: Any
) -> Any:
    """Three epochs of five batches. Returns everything that could differ, and why the lean loop stood aside."""
    trace = Trace()
    own = [callback(trace) if callback is Latecomer else callback() for callback in callbacks]
    if args.get("logger"):
        args["logger"] = Memory(trace)
    net = module(trace)
    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 1,
    } | args
    test, path = settings.pop("test", False), settings.pop("ckpt_path", None)
    trainer = L.Trainer(
        callbacks=[trace, *own],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )
    epoch_loop = use_lean_loops(trainer) if lean else None
    error = ""
    try:
        if test:
            trainer.test(net, make_valid(), verbose=False)
        else:
            trainer.fit(net, loader() if loader else make_loader(), make_valid() if valid == "usual" else valid, ckpt_path=path)
    except (RuntimeError, StopIteration, ValueError) as failure:
        error = str(failure)
    seen = {
        "weights": torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(),
        "trace": trace.seen,
        "loops": str(trainer.fit_loop.state_dict()),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "bar": {name: float(value) for name, value in trainer.progress_bar_metrics.items()},
        "lr": [group.get("lr") for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "random": torch.rand(3).tolist(),
        "steps": trainer.global_step,
        "error": error,
    }
    aside = trainer.test_loop.stood_aside if lean and test else epoch_loop.stood_aside if epoch_loop is not None else None
    return seen, aside


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no validation": {"valid": None},
    "max_steps in mid-epoch": {"max_steps": 8, "max_epochs": -1},
    "max_steps in mid-epoch, logging": {"max_steps": 8, "max_epochs": -1, "module": Logs},
    "limit_train_batches": {"limit_train_batches": 3},
    "a share of the batches": {"limit_train_batches": 0.5},
    "validation within the epoch": {"val_check_interval": 0.4},
    "validation every 2 batches": {"val_check_interval": 2},
    "validation every other epoch": {"check_val_every_n_epoch": 2},
    "validation every 7 batches, across epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
    "scheduler by step": {"module": optimizing(_scheduled("step"))},
    "scheduler by epoch": {"module": optimizing(_scheduled("epoch"))},
    "scheduler by plateau": {"module": optimizing(_plateau)},
    "self.log": {"module": Logs},
    "self.log with a logger": {"module": Logs, "logger": True, "log_every_n_steps": 2},
    "self.log within accumulation, with a logger": {"module": Logs, "logger": True, "log_every_n_steps": 2, "accumulate_grad_batches": 2},
    "log_every_n_steps=0": {"module": Logs, "logger": True, "log_every_n_steps": 0},
    "a step that returns None and logs now and then": {"module": Sometimes},
    "a step without batch_idx": {"module": NoIndex},
    "hooks of the module": {"module": ModuleHooks},
    "a callback that logs": {"callbacks": [LogsToo]},
    "a callback added in mid-epoch": {"callbacks": [Latecomer]},
    "should_stop in mid-epoch": {"callbacks": [lambda: StopAt(7)], "module": Logs},
    "should_stop before min_epochs": {"callbacks": [lambda: StopAt(3)], "min_epochs": 2},
    "EarlyStopping": {"callbacks": [lambda: EarlyStopping("v", patience=1, min_delta=100.0)], "max_epochs": 9},
    "on_train_batch_start returns -1": {"module": EndsEarly},
    "-1 within a window, with a schedule": {
        "module": type("EndsAWindow", (EndsEarly,), {"configure_optimizers": _scheduled("step")}),
        "accumulate_grad_batches": 2,
    },
    "accumulation with a schedule": {"module": optimizing(_scheduled("step")), "accumulate_grad_batches": 2},
    "StopIteration in the step": {"module": Stops},
    "an error in the step": {"module": Raises},
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation by 4, validation within a window": {"accumulate_grad_batches": 4, "val_check_interval": 3},
    "accumulation that changes": {"callbacks": [lambda: GradientAccumulationScheduler({1: 2})]},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true", "aside": "precision 64-true"},
    "overfit_batches": {"overfit_batches": 3},
    "max_time": {"max_time": {"hours": 1}},
    "detect_anomaly": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "inference_mode=False": {"inference_mode": False},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "a loader without length": {"loader": lambda: torch.utils.data.DataLoader(Stream(), batch_size=None)},
    "a loader without length, limited": {
        "loader": lambda: torch.utils.data.DataLoader(Stream(), batch_size=None),
        "limit_train_batches": 3,
    },
    "batches in tuples, and None": {"loader": Batches},
    "two loader workers": {"loader": lambda: make_loader(num_workers=2), "max_epochs": 2},
    "loaders in a dict": {
        "loader": lambda: L.pytorch.utilities.CombinedLoader([make_loader()], "max_size_cycle"),
        "module": type("First", (Module,), {"training_step": lambda self, batch, i: Module.training_step(self, batch[0], i)}),
    },
    "several validation loaders": {
        "valid": [make_valid(), make_valid()],
        "module": type(
            "Two", (Module,), {"validation_step": lambda self, batch, i, dataloader_idx=0: Module.validation_step(self, batch, i)}
        ),
    },
    "LambdaCallback": {"callbacks": [lambda: LambdaCallback(on_train_batch_end=lambda t, m, o, b, i: m.trace.note("lambda", i))]},
    "Timer": {"callbacks": [lambda: Timer(interval="step", duration="00:01:00:00")]},
    "StochasticWeightAveraging": {"callbacks": [lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]},
    "LearningRateMonitor": {"callbacks": [lambda: LearningRateMonitor("step")], "module": optimizing(_scheduled("step")), "logger": True},
    "an optimizer with hooks": {"module": optimizing(lambda self: hooked_sgd(self.parameters(), self))},
    "an optimizer whose step was replaced": {"module": optimizing(_replaced)},
    "LBFGS": {"module": optimizing(lambda self: torch.optim.LBFGS(self.parameters(), 0.01, max_iter=3))},
    "a scheduler of betas": {"module": optimizing(lambda self: torch.optim.SGD(self.parameters(), 0.01, momentum=0.9, nesterov=True))},
    "manual optimization": {"module": Manual, "aside": "manual optimization"},
    "optimizer_step overridden": {"module": OwnStep, "aside": "optimizer_step of the module"},
    "batch transfer overridden": {"module": OwnTransfer, "aside": "on_after_batch_transfer of the module"},
    "Lightning's clipping": {"gradient_clip_val": 0.1, "aside": "Lightning's gradient_clip_val"},
    "a profiler": {"profiler": "simple", "aside": "profiler SimpleProfiler"},
    "fast_dev_run": {"fast_dev_run": 3, "aside": "fast_dev_run"},
    "validation by time": {"val_check_interval": {"hours": 1}, "aside": "validation by time"},
    "a test": {"test": True, "module": Logs},
    "self.log, and -1": {"module": type("LogsUntil", (Logs, EndsEarly), {})},
    "steps with *args": {"module": AnyArguments},
    "steps with **options": {"module": AnyKeywords},
    "a step with a decorator": {"module": Decorated},
    "a Tensor subclass": {"module": Subclassed},
    "a Tensor subclass in a dict": {"module": type("Keyed", (Subclassed,), {"keyed": True})},
    "an optimizer under no_grad": {"module": optimizing(lambda self: NoGrad(self.parameters()))},
    **{
        f"{name} in mid-epoch": {"callbacks": [functools.partial(Later, _register(name))]}
        for name in ("register_step_pre_hook", "register_step_post_hook")
    },
    "an epoch whose last batch turns its validation off": {"callbacks": [functools.partial(Later, _validate_every_second, at=5)]},
    **{f"{name} replaced in mid-epoch": {"callbacks": [functools.partial(Later, _replace(name))]} for name in ("step", "zero_grad")},
    **{
        f"{name} as an attribute": {"callbacks": [functools.partial(Later, _wrap(name), "on_fit_start", 0)], "aside": aside}
        for name, aside in {
            "optimizer_step": "optimizer_step of the module",
            "optimizer_zero_grad": "optimizer_zero_grad of the module",
            "configure_gradient_clipping": "configure_gradient_clipping of the module",
            "backward": "backward of the module",
            "on_after_batch_transfer": "on_after_batch_transfer of the module",
            "transfer_batch_to_device": "transfer_batch_to_device of the module",
            "on_train_batch_end": "",
            "on_before_zero_grad": "",
            "on_validation_batch_start": "",
        }.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_both_loops_do_the_same(name: str, tmp_path: Path) -> None:
    case = {"aside": ""} | CASES[name]
    aside = case.pop("aside")
    (stock, _), (lean, stood_aside) = run(False, tmp_path, **case), run(True, tmp_path, **case)
    assert stood_aside == aside
    for part, value in stock.items():
        assert lean[part] == value, part


@pytest.mark.parametrize("step", [5, 6, 7])  # at the end of an epoch, before its validation; in mid-epoch
@pytest.mark.parametrize("saved_lean", [False, True])
@pytest.mark.parametrize("resumed_lean", [False, True])
def test_a_checkpoint_of_either_loop_resumes_on_either(saved_lean: bool, resumed_lean: bool, step: int, tmp_path: Path) -> None:
    def saver(folder: Path) -> Any:
        return lambda: ModelCheckpoint(dirpath=folder, every_n_train_steps=step, save_top_k=-1, filename="{step}")

    loader = partial(make_loader, own_generator=True)
    found = []
    for folder, save, resume in ((tmp_path / "a", False, False), (tmp_path / "b", saved_lean, resumed_lean)):
        run(save, folder, loader=loader, callbacks=[saver(folder)], enable_checkpointing=True, max_epochs=2)
        state = torch.load(folder / f"{step=}.ckpt", weights_only=False)
        resumed, _ = run(resume, folder, loader=loader, ckpt_path=folder / f"{step=}.ckpt", num_sanity_val_steps=0)
        weights = {name: value.tolist() for name, value in state["state_dict"].items()}
        found.append((str(state["loops"]), state["global_step"], weights, resumed))
    assert found[0] == found[1]


def test_monitored_checkpoints_in_mid_epoch_are_the_same(tmp_path: Path) -> None:
    """ModelCheckpoint reads trainer.callback_metrics between two batches."""
    kept = []
    for lean in (False, True):
        folder = tmp_path / str(lean)
        saver = ModelCheckpoint(dirpath=folder, monitor="loss_step", every_n_train_steps=2, save_top_k=2)
        run(lean, folder, module=Logs, callbacks=[lambda saver=saver: saver], enable_checkpointing=True)
        kept.append({Path(path).name: float(score) for path, score in saver.best_k_models.items()})
    assert kept[0] == kept[1] and len(kept[0]) == 2


def test_an_unknown_lightning_runs_its_own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(L, "__version__", "2.7.0")
    assert unknown_version() == "2.7.0"
    assert run(True, tmp_path)[1] == "Lightning 2.7.0"


def test_a_lean_loop_begins_an_epoch_where_it_is_told(tmp_path: Path) -> None:
    indices: list[int] = []
    callback = LambdaCallback(on_train_batch_start=lambda t, m, b, i: indices.append(i))
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    use_lean_loops(trainer).start_at = 3
    trainer.fit(Module(Trace()), make_loader())
    assert indices == [3, 4, 0, 1, 2, 3, 4]


def test_nothing_of_a_batch_is_held_between_batches(tmp_path: Path) -> None:
    import gc
    import weakref

    alive: list[int] = []
    refs: list[weakref.ref[torch.Tensor]] = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
            gc.collect()
            alive.append(sum(ref() is not None for ref in refs))
            refs.append(weakref.ref(batch[0]))

    run(True, tmp_path, callbacks=[Watch], valid=None, max_epochs=1)
    assert alive == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("lean", [False, True])
def test_the_switch_turns_it_off(lean: bool, tmp_path: Path) -> None:
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    loop = use_lean_loops(trainer, lean=lean)
    trainer.fit(Module(Trace()), make_loader())
    assert isinstance(loop, LeanEpochLoop) and loop.stood_aside == ("" if lean else "turned off")
