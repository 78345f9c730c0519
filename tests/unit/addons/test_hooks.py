"""The points of a run: their order, who is called with what, and what happens when a hook fails."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from programs import script
from samples import Regress, make_loader, make_trainer, make_valid, same_weights, some, without_times
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from nbtrain import AccumulationAddon, AddOnBase, Callback, ConfigError, StateManagerAddon, StepError, TrainHook
from nbtrain.compat.hook_names import HOOK_NAMES, names_at
from nbtrain.engine.hooks import HOOKS, HookPoint
from nbtrain.library.recorded_run import show

MAKE = script("make_hooks")
NAMES = [name for point in HOOKS for name in names_at(point.name)]
Saved = Regress.add_on(AccumulationAddon, StateManagerAddon)


# -- the table
def test_methods_of_the_callback_are_those_of_the_table() -> None:
    own = {name: method for name, method in vars(Callback).items() if name.startswith("on_")}
    given = {name: tuple(inspect.signature(method).parameters)[3:] for name, method in own.items()}
    assert given == {point.method: point.given for point in HOOKS if MAKE.is_whole(point) and not MAKE.is_lightnings(point)}
    assert all(method.__doc__ for method in own.values())


def test_every_point_of_the_table_has_a_callback_that_brings_it_about() -> None:
    assert all(hasattr(Callback, point.method) and (names_at(point.name) or MAKE.is_whole(point)) for point in HOOKS)


# -- the order
class Order(Callback):
    """Writes down each moment of a callback."""

    def __init__(self, seen: list[str]) -> None:
        for name in dict.fromkeys(point.method for point in HOOKS):
            setattr(self, name, lambda *args, name=name: seen.append(f"Callback.{name}"))


def asks(trainer: Any, batches: Any, idx: int) -> None:
    """In the middle of the run: a setting, and a pause that another thread ends."""
    if trainer.counts.epoch == 0 and idx == 0:
        trainer.control.submit(lambda at: trainer.set(lr=5e-3), whole=True)
        trainer.control.pause()
        threading.Thread(target=lambda: (trainer.control.wait_settled(), trainer.control.proceed())).start()


def told(*spans: str, without: tuple[str, ...] = ()) -> list[HookPoint]:
    return [point for point in HOOKS if point.span in spans and point.name not in without]


FIRST = (
    "on_train_batch_start.first",
    "on_before_zero_grad",
    "on_before_backward.first",
)  # of an update, come with its first batch; the others with its last


def expected() -> list[HookPoint]:
    """What the table says of two epochs of 5 batches in windows of 2, with validations of 3, the second epoch worse than the first."""
    found = told("run")[1:3]  # nothing is loaded
    for epoch in range(2):
        begin, log, *end = told("epoch", without=("on_checkpoint_expired",) if epoch == 0 else ("on_best_changed",))
        found.append(begin)
        for batch in range(5):
            is_first, is_last = batch % 2 == 0, batch % 2 == 1 or batch == 4
            points = told("batch", "update")
            found += [p for p in points if p.span == "batch" or (is_first if p.name in FIRST else is_last)]
            found += told("request") if (epoch, batch) == (0, 1) else []
        start, *rest = told("validation")
        found += [log, start, *told("validation batch") * 3, *rest, *end]
    return found + told("run")[3:]


class Worse(Regress):
    """Its second epoch is worse than the first."""

    def metric_on_epoch_end(self) -> dict[str, Any]:
        return {"epoch": float(self.counts.epoch)}


@pytest.mark.parametrize("lean", [True, False])
def test_hooks_of_a_run_come_in_the_order_of_the_table(lean: bool, tmp_path: Path) -> None:
    seen: list[str] = []
    hooks: dict[str, Callable[..., Any]] = {name: lambda trainer, *args, name=name: seen.append(name) for name in NAMES}
    trainer = make_trainer(
        Worse.add_on(AccumulationAddon, StateManagerAddon),
        accumulate=2,
        gradient_clip=0.5,
        save_path=tmp_path,
        save_best=False,
        keep_last_n=1,
        monitor="val_epoch",
        monitor_mode="min",
        hooks=[hooks, {"on_train_step_start": asks}],
        lightning={"callbacks": [Order(seen)], "num_sanity_val_steps": 0},
    )
    trainer.short_way = lean
    trainer.run(2, make_loader(), make_valid())
    names = [([f"Callback.{point.method}"] if MAKE.is_whole(point) else []) + names_at(point.name) for point in expected()]
    assert seen == [name for row in names for name in row]


# -- who is called with what
class Said(TrainHook):
    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        self.seen.append(self.name)


class Net(nn.Linear, TrainHook):
    def on_epoch_start(self, trainer: Any) -> None:
        self.seen.append("model")


class Tuned(Adam, TrainHook):
    def on_epoch_start(self, trainer: Any) -> None:
        self.seen.append("optimizer")


class Scheduled(StepLR, TrainHook):
    def on_epoch_start(self, trainer: Any) -> None:
        self.seen.append("scheduler")


def test_model_optimizer_and_scheduler_come_in_this_order_and_the_given_hooks_last() -> None:
    seen: list[str] = []
    model = Net(8, 1)
    optimizer = Tuned(model.parameters(), lr=1e-3)
    scheduler = Scheduled(optimizer, 1)
    for part in (model, optimizer, scheduler):
        part.seen = seen  # type: ignore[assignment]
    trainer = make_trainer(model=model, optimizer=optimizer, scheduler=scheduler, hooks=[Said(seen, "first"), Said(seen, "second")])
    trainer.run(1, make_loader())
    assert seen == ["model", "optimizer", "scheduler", "first", "second"]


def test_hooks_get_nbtrains_trainer_and_the_arguments_of_the_table(tmp_path: Path) -> None:
    seen: dict[str, tuple[Any, ...]] = {}
    hooks: dict[str, Any] = {name: lambda *args, name=name: seen.setdefault(name, args) for name in NAMES}
    trainer = make_trainer(Saved, accumulate=2, gradient_clip=0.5, save_path=tmp_path, hooks=hooks)
    trainer.run(1, make_loader(), make_valid())
    arguments = {name: hook.arguments for name, hook in HOOK_NAMES.items()}
    assert all(args[0] is trainer and len(args) == 1 + len(arguments[name]) for name, args in seen.items())
    outputs, batches, index = seen["on_train_step_end"][1:]
    assert [len(batch[0]) for batch in batches] == [16, 16] and index == 0 and len(outputs) == 2
    assert not any(value.requires_grad for output in outputs for value in output.values())
    mean = float(outputs[0]["loss"] + outputs[1]["loss"]) / 2
    assert seen["on_step_end"][1].keys() == {"train_loss", "train_mae"} and seen["on_step_end"][1]["train_loss"] == mean
    aggregated, loss, index = seen["after_aggregate_train_step_outputs"][1:]
    assert (aggregated.num_batches, index) == (2, 0) and float(loss) == pytest.approx(mean)
    assert seen["after_gnorm_clip"][1] > 0.5 and seen["on_epoch_end"][1] == 0
    assert seen["on_val_end"][1] == seen["on_validate_end"][1]["val_loss"] == trainer.history.last["val_loss"]
    assert seen["on_val_step_end"][3] == 0 and seen["on_best_changed"][1] is trainer.history.best
    assert seen["on_checkpoint_end"][1].exists()


def test_a_hook_takes_as_many_arguments_as_it_likes() -> None:
    seen: list[Any] = []

    def with_an_option(trainer: Any, every: int = 3) -> None:
        seen.append(every)

    hooks = {
        "on_epoch_end": lambda trainer: seen.append("one"),
        "on_epoch_start": with_an_option,
        "on_train_end": lambda: seen.append("none"),
    }
    make_trainer(hooks=hooks).run(1, make_loader())
    assert seen == [3, "one", "none"]


def test_metrics_may_be_changed_dropped_and_added_before_they_are_logged() -> None:
    def change(trainer: Any, metrics: dict[str, Any]) -> None:
        metrics["val_loss"] = torch.tensor(float(trainer.counts.epoch))
        metrics["gap"] = 1.5
        del metrics["val_mae"]

    trainer = make_trainer(hooks={"before_log_val_metrics": change})
    trainer.run(2, make_loader(), make_valid())
    assert [row["val_loss"] for row in trainer.history.epochs] == [0.0, 1.0] and trainer.history.best is trainer.history.epochs[0]
    assert trainer.history.last["gap"] == 1.5 and "val_mae" not in trainer.history.last


def test_a_metric_that_a_hook_leaves_as_no_number_is_refused() -> None:
    trainer = make_trainer(hooks={"before_log_train_metrics": lambda trainer, metrics: metrics.update(note="text")})
    with pytest.raises(StepError, match="^on_before_log_metrics left a metric that is not a number: could not convert"):
        trainer.run(1, make_loader())


def test_metrics_of_a_test_have_a_hook() -> None:
    trainer = make_trainer(mode="test", hooks={"before_log_test_metrics": lambda trainer, metrics: metrics.update(test_more=1)})
    assert trainer.run(1, make_valid()).metrics["test_more"] == 1.0


def test_what_a_hook_puts_into_a_checkpoint_comes_back(tmp_path: Path) -> None:
    seen: list[Any] = []
    hooks = {
        "on_save_checkpoint": lambda trainer, checkpoint: checkpoint.update(mine=trainer.counts.epoch),
        "on_load_checkpoint": lambda trainer, checkpoint: seen.append(checkpoint["mine"]),
    }
    for n_epoch in (1, 2):
        make_trainer(Saved, save_path=tmp_path, save_format="safetensor", hooks=hooks).run(n_epoch, make_loader(), resume="auto")
    assert seen == [1]


def test_a_checkpoint_is_told_when_it_is_on_the_disk_and_when_it_is_gone(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    class Watch(Callback):
        def on_checkpoint_saved(self, trainer: Any, pl_module: Any, path: Path) -> None:
            seen.append((f"saved {path.stem}", path.exists()))

        def on_checkpoint_expired(self, trainer: Any, pl_module: Any, path: Path) -> None:
            seen.append((f"expired {path.stem}", path.exists()))

    trainer = make_trainer(
        Regress.add_on(StateManagerAddon), save_path=tmp_path, keep_last_n=1, save_best=False, lightning={"callbacks": [Watch()]}
    )
    trainer.run(2, make_loader())
    assert seen == [("saved epoch=1-step=5", True), ("saved epoch=2-step=10", True), ("expired epoch=1-step=5", False)]


# -- slips
class Misspelt(TrainHook):
    def after_optimzer_step(self, trainer: Any) -> None: ...


class OfLightning(TrainHook):
    def on_train_batch_end(self, trainer: Any) -> None: ...


class Model(nn.Linear, TrainHook):
    def on_device(self) -> None: ...

    def on_trian_end(self, trainer: Any) -> None: ...


class LoggingCallback:  # tlama-core's own example
    def on_train_start(self, trainer):  # type: ignore[no-untyped-def]
        print("Training started!")

    def on_step_end(self, trainer, metrics):  # type: ignore[no-untyped-def]
        if trainer.current_step % 3 == 0:
            print(f"Step {trainer.current_step}: Loss = {metrics['train_loss']:.4f}")

    def on_epoch_end(self, trainer):  # type: ignore[no-untyped-def]
        print(f"Epoch {trainer.current_epoch + 1} completed")

    def on_validate_end(self, trainer, metrics):  # type: ignore[no-untyped-def]
        print(f"Validation loss: {metrics['val_loss']:.4f}")


class Slipped:
    def on_validation_endd(self, trainer: Any) -> None: ...

    def on_step_end(self, trainer: Any) -> None: ...


class Plain:
    def step(self, trainer: Any) -> None: ...


class OfHF:
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


OF_LIGHTNING = "an object of Lightning's"
SLIPS: dict[str, tuple[dict[str, Any], str]] = {
    "a name": (
        {"hooks": {"after_optimzer_step": print}},
        "There is no hook 'after_optimzer_step'.\n  Did you mean 'after_optimizer_step'?",
    ),
    "a method": (
        {"hooks": Misspelt()},
        "Misspelt has a method 'after_optimzer_step', which is not a hook.\n  Did you mean 'after_optimizer_step'?",
    ),
    "Lightning's name": (
        {"hooks": [OfLightning()]},
        "OfLightning has a method 'on_train_batch_end', which is not a hook.\n  Did you mean ",
    ),
    "a model": ({"model": Model(8, 1)}, "Model has a method 'on_trian_end', which is not a hook.\n  Did you mean 'on_train_end'?"),
    "a signature": (
        {"hooks": {"on_val_end": lambda trainer, val_loss, idx: None}},
        "The hook on_val_end (<lambda>) has unknown arguments: 'idx'.\n  It is called with trainer, val_loss.",
    ),
    "no function": ({"hooks": {"on_val_end": 3}}, "The hook on_val_end (int) must be a function, got int.\n  Give a function."),
    "no hooks": ({"hooks": 3}, "hooks=3 is neither an object with hooks nor a mapping of functions.\n"),
    "an object": ({"hooks": Slipped()}, "Slipped has a method 'on_validation_endd', which is not a hook.\n  Did you mean "),
    "an object without a hook": ({"hooks": Plain()}, "hooks=<test_hooks.Plain object at "),
    "a class": (
        {"hooks": LoggingCallback},
        "hooks=<class 'test_hooks.LoggingCallback'> is neither an object with hooks nor a mapping of functions.",
    ),
    "arguments of an object": (
        {"hooks": OfHF()},
        "The hook OfHF.on_step_end has unknown arguments: 'control'.\n  It is called with trainer, metrics.",
    ),
    OF_LIGHTNING: ({"hooks": L.Callback()}, "hooks=<lightning.pytorch.callbacks.callback.Callback object at "),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_found_when_the_trainer_is_made(slip: str) -> None:
    options, text = SLIPS[slip]
    with pytest.raises(ConfigError) as caught:
        make_trainer(**options)
    assert str(caught.value).startswith(text)
    assert slip != OF_LIGHTNING or str(caught.value).endswith('Give it as lightning={"callbacks": [...]}.')


@pytest.mark.parametrize("several", [False, True])
def test_an_object_of_a_class_without_a_base_is_called_by_the_names_of_its_methods(
    several: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(hooks=[LoggingCallback()] if several else LoggingCallback())
    trainer.run(2, make_loader(), make_valid())
    train, rows = trainer.history.steps["train"]["train_loss"], trainer.history.epochs
    step = {n: f"Step {n}: Loss = {train[n - 1]:.4f}" for n in (3, 6, 9)}
    valid = [f"Validation loss: {row['val_loss']:.4f}" for row in rows]
    ends = [f"Epoch {n} completed" for n in (1, 2)]
    assert capsys.readouterr().out.splitlines() == ["Training started!", step[3], valid[0], ends[0], step[6], step[9], valid[1], ends[1]]
    assert (trainer.current_step, trainer.current_epoch) == (10, 2)


def test_a_misspelt_method_of_a_callback_is_found_when_its_class_is_made() -> None:
    with pytest.raises(
        ConfigError, match="Watch has a method 'on_checkpoint_save', which is not a hook.\n  Did you mean 'on_checkpoint_saved'?"
    ):

        class Watch(Callback):
            def on_checkpoint_save(self, *args: Any) -> None: ...


# -- a hook fails
class Full(Exception):
    """What a user's code raises."""


def fails(*args: Any) -> None:
    raise Full("the disk")


@pytest.mark.parametrize(
    "name", some([n for n in NAMES if n not in ("on_load_checkpoint", "on_save_checkpoint", "before_log_test_metrics")], 3)
)
def test_a_hook_that_raises_ends_the_run_and_is_named(name: str, tmp_path: Path) -> None:
    ends: list[str] = []
    closing = {end: lambda trainer, end=end: ends.append(end) for end in ("on_train_end", "on_finalize")}
    trainer = make_trainer(
        Saved,
        accumulate=2,
        gradient_clip=0.5,
        save_path=tmp_path,
        keep_last_n=1,
        save_best=False,
        hooks=[{name: fails}, {"on_train_step_start": asks}, closing],
    )
    with pytest.raises(Full) as caught:
        trainer.run(2, make_loader(), make_valid())
    assert caught.value.__notes__[0].startswith(f"nbtrain: hook {name} (fails), epoch ")
    assert trainer.result is None or trainer.result.status == "failed"  # None: the run has not begun
    before = ["after_setup", "on_init_end"]  # where no training has begun, none has ended
    assert ends == (["on_finalize"] if name in before else ["on_train_end", "on_finalize"])
    healthy = make_trainer(Saved, model=trainer.model, save_path=tmp_path)
    assert healthy.run(1, make_loader()).status == "completed"
    assert trainer.control.state == "idle" and not trainer.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("stops", [False, True])
def test_a_hook_that_raises_while_a_checkpoint_is_saved_is_an_error_of_the_save(stops: bool, tmp_path: Path) -> None:
    trainer = make_trainer(Saved, save_path=tmp_path, stop_on_save_error=stops, hooks={"on_save_checkpoint": fails})
    with pytest.raises(Full) if stops else nullcontext():
        trainer.run(2, make_loader())
    assert trainer.result.status == ("failed" if stops else "completed")
    assert ("a checkpoint was not saved: the disk" in show(trainer.run_dir)) is not stops


def test_a_callback_that_raises_at_a_point_of_its_own_is_named() -> None:
    class Norms(Callback):
        on_after_clip = fails

    trainer = make_trainer(gradient_clip=1.0, lightning={"callbacks": [Norms()]})
    with pytest.raises(Full) as caught:
        trainer.run(1, make_loader())
    assert caught.value.__notes__[0] == "nbtrain: hook Norms.on_after_clip, epoch 1, batch 1"


class Broken(Regress):
    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.processed == 2:
            self.break_off()
        return super().train_step(batch)

    def break_off(self) -> None: ...


def _error(trainer: Any) -> None:
    raise Full("in the step")


def _interrupt(trainer: Any) -> None:
    raise KeyboardInterrupt


def _stop(trainer: Any) -> None:
    trainer.stop()


def _pause_and_stop(trainer: Any) -> None:
    trainer.control.pause()
    threading.Thread(target=lambda: (trainer.control.wait_settled(), trainer.stop())).start()


@pytest.mark.parametrize("how", [_error, _interrupt, _stop, _pause_and_stop])
def test_the_end_is_told_however_a_run_ends(how: Callable[[Any], None]) -> None:
    ends: list[str] = []

    class Last(Callback):
        def on_finalize(self, trainer: Any, pl_module: Any) -> None:
            ends.append("callback")

    kind = type("Ends", (Broken,), {"break_off": how})
    hooks = {"on_train_end": lambda trainer: ends.append("on_train_end"), "on_finalize": lambda trainer: ends.append("on_finalize")}
    trainer = make_trainer(kind, hooks=hooks, lightning={"callbacks": [Last()]})
    if how in (_error, _interrupt):
        with pytest.raises((Full, KeyboardInterrupt)):
            trainer.run(1, make_loader())
    else:
        assert trainer.run(1, make_loader()).status == "stopped"
    assert ends == ["on_train_end", "callback", "on_finalize"]


@pytest.mark.parametrize("how", [_error, _stop])
def test_an_end_that_fails_keeps_no_other_from_being_told(how: Callable[[Any], None]) -> None:
    ends: list[str] = []
    kind = type("Ends", (Broken,), {"break_off": how})
    trainer = make_trainer(kind, hooks=[{"on_train_end": fails}, {"on_train_end": lambda trainer: ends.append("told")}])
    with pytest.raises(Full, match="in the step" if how is _error else "the disk") as caught:
        trainer.run(1, make_loader())
    assert ends == ["told"] and "hook on_train_end (fails)" in " ".join(caught.value.__notes__)


def test_the_error_of_a_hook_reaches_whoever_has_asked_too() -> None:
    asked: list[BaseException] = []

    def ask(trainer: Any) -> None:
        try:
            trainer.set(lr=1e-3)
        except Full as error:
            asked.append(error)

    trainer = make_trainer(hooks={"on_setting_changed": fails})
    threads: list[threading.Thread] = []

    class Asks(L.Callback):
        def on_train_batch_start(self, lightning_trainer: Any, *args: Any) -> None:
            if not threads:
                threads.append(threading.Thread(target=ask, args=(trainer,)))
                threads[0].start()
                while not trainer.control.requested:
                    threads[0].join(0.001)

    trainer.lightning["callbacks"] = [Asks()]
    with pytest.raises(Full) as caught:
        trainer.run(1, make_loader())
    threads[0].join()
    assert asked == [caught.value]


# -- nothing else changes
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_hooks_that_only_look_change_nothing(lean: bool, accumulate: int, tmp_path: Path) -> None:
    lightning = {"val_check_interval": 3}  # a validation within a window
    options: dict[str, Any] = {"accumulate": accumulate, "gradient_clip": 0.5, "save_path": tmp_path}
    plain = make_trainer(Saved, lightning=lightning, **options)
    hooks = {name: lambda *args: None for name in NAMES}
    hooked = make_trainer(Saved, hooks=hooks, lightning=lightning | {"callbacks": [Order([])]}, **options)
    for trainer in (plain, hooked):
        trainer.short_way = lean
        torch.manual_seed(3)
        trainer.run(2, make_loader(), make_valid())
    assert same_weights(plain.model, hooked.model) and without_times(plain.history.epochs) == without_times(hooked.history.epochs)


def test_a_moment_that_nobody_waits_for_has_no_method_in_the_loop() -> None:
    trainer = make_trainer(hooks={"on_epoch_end": print, "on_train_end": print}, gradient_clip=1.0)
    ends, dispatch = (c for c in trainer.callbacks() if type(c).__module__ == "nbtrain.addons.hooks")
    inner = {point.method for point in HOOKS if point.span in ("batch", "update", "validation batch")}
    assert not inner & (vars(type(ends)).keys() | vars(dispatch).keys() | vars(type(dispatch)).keys())


def test_callbacks_with_more_points_work_under_lightnings_own_trainer() -> None:
    seen: list[str] = []

    class Brought(AddOnBase):
        def callbacks(self, trainer: Any) -> list[L.Callback]:
            return [Order(seen)]

    trainer = make_trainer(Regress.add_on(Brought), gradient_clip=1.0, hooks={"after_optimizer_step": lambda t: seen.append("hook")})
    L.Trainer(max_epochs=1, **trainer.lightning_args()).fit(trainer.as_lightning_module(), make_loader(), make_valid())
    assert seen.count("Callback.on_after_clip") == seen.count("hook") == seen.count("Callback.on_after_optimizer_step") == 5
    assert seen[-1] == "Callback.on_finalize" and "Callback.on_before_log_metrics" in seen
