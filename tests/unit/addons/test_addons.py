"""`add_on`, the addons there are, and their reuse under a `lightning.Trainer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from programs import documented
from samples import ONE_DEVICE, Regress, make_loader, make_model, make_trainer, make_valid, same_weights

import nbtrain
from nbtrain import AddOnBase, AddOnError, GradientClipAddon, OptionError, StateManagerAddon, Trainer
from nbtrain.engine.addon import options


class Shared(AddOnBase):
    """Two addons that share an option through a base."""

    folder: str = "."


class One(Shared):
    level: int = 1


class Two(Shared):
    depth: int = 2
    after = (One,)


class Clash(AddOnBase):
    level: int = 3


def test_options_show_in_the_signature() -> None:
    parameters = inspect.signature(Regress.add_on(One, GradientClipAddon)).parameters
    assert parameters["level"].default == 1 and parameters["folder"].default == "."
    assert list(parameters).count("gradient_clip") == 1 and "gradient_clip_algorithm" in parameters
    assert "addon_options" not in parameters and list(parameters)[:3] == ["model", "device", "mode"]


def test_options_reach_the_addon_and_the_addon_is_reached() -> None:
    trainer = make_trainer(Regress.add_on(One, Two), level=7, folder="here")
    assert (trainer[One].level, trainer[One].folder, trainer[Two].folder, trainer[Two].depth) == (7, "here", "here", 2)


def test_two_claims_to_one_option_are_refused_at_class_creation() -> None:
    with pytest.raises(AddOnError, match="One and Clash both take the option 'level'"):
        Regress.add_on(One, Clash)


def test_what_is_no_addon() -> None:
    with pytest.raises(AddOnError, match="is not an addon"):
        Regress.add_on(dict)  # type: ignore[arg-type]


def test_instance_with_an_unknown_option_is_refused() -> None:
    with pytest.raises(OptionError, match="^StateManagerAddon takes no option 'every_n_step'.\n  Did you mean 'every_n_steps'\\?$"):
        StateManagerAddon(every_n_step=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="^StateManagerAddon takes options by name, got 'runs'.\n  Known are: keep_states, save_path"):
        StateManagerAddon("runs")  # type: ignore[call-arg]
    assert "every_n_steps: 'int | None' = None" in str(inspect.signature(StateManagerAddon))


def test_composed_class_is_subclassed_again() -> None:
    class Mine(Regress.add_on(One)):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch)

    trainer = make_trainer(Mine.add_on(Two), level=5)
    assert trainer[One].level == 5 and trainer[Two].depth == 2 and trainer.title == "Mine"
    assert trainer.run(1, make_loader()).status == "completed" and isinstance(trainer, Mine)


class Counter(AddOnBase):
    """Has a command."""

    commands = ("count",)
    start: int = 10

    def count(self, trainer: Any, by: int = 1) -> int:
        """Count on."""
        self.start += by
        return self.start + trainer.counts.epoch


def test_commands_become_methods_with_their_signature_and_help() -> None:
    trainer = make_trainer(Regress.add_on(Counter), start=20)
    trainer.run(1, make_loader())
    assert trainer.count(by=5) == 26 and type(trainer).count.__doc__ == "Count on."
    assert str(inspect.signature(trainer.count)) == "(by: 'int' = 1) -> 'int'"
    assert not hasattr(make_trainer(), "count")


def test_command_whose_name_is_taken_is_refused() -> None:
    class Run(AddOnBase):
        commands = ("run",)

    class Count(AddOnBase):
        commands = ("count",)

        def count(self, trainer: Any) -> None: ...

    with pytest.raises(AddOnError, match="Run has a command 'run', and so has Regress"):
        Regress.add_on(Run)
    with pytest.raises(AddOnError, match="has a command 'count', and so has another addon"):
        Regress.add_on(Counter, Count)


# -- one contract for all addons
def bias(y_true: Any, y_pred: Any) -> dict[str, float]:
    return {"bias": float((y_pred - y_true).mean())}


def watch(*args: Any) -> None:
    """A hook that only looks."""


ADDONS: dict[type[AddOnBase], Callable[[Path], dict[str, Any]]] = {  # their options; the folder is one to write in
    nbtrain.AccumulationAddon: lambda folder: {"loss_reduction": "mean"},
    nbtrain.GradientClipAddon: lambda folder: {"gradient_clip": 0.5},
    nbtrain.SchedulerAddon: lambda folder: {"scheduler": lambda step: 1e-2 / (step + 1)},
    nbtrain.StateManagerAddon: lambda folder: {"save_path": folder, "every_n_steps": 2},
    nbtrain.CompileAddon: lambda folder: {"compile": {"backend": "eager"}},
    nbtrain.NonFiniteAddon: lambda folder: {"nonfinite": "skip"},
    nbtrain.PrefetchAddon: lambda folder: {},
    nbtrain.SAMAddon: lambda folder: {"sam_rho": 0.1},
    nbtrain.CudaGraphAddon: lambda folder: {},
    nbtrain.EMAAddon: lambda folder: {"ema_decay": 0.9},
    nbtrain.EarlyStoppingAddon: lambda folder: {"patience": 5},
    nbtrain.EnvironmentAddon: lambda folder: {"deterministic": True},
    nbtrain.FreezeAddon: lambda folder: {"freeze": {"0.bias": 1}},
    nbtrain.GradientStatsAddon: lambda folder: {"stats_every_n_steps": 2},
    nbtrain.HealAddon: lambda folder: {"heal_steps": 2},
    nbtrain.addons.HooksAddon: lambda folder: {"hooks": {"after_gnorm_clip": watch, "on_step_start": watch, "on_val_end": watch}},
    nbtrain.addons.LiveViewAddon: lambda folder: {},
    nbtrain.addons.SourceAddon: lambda folder: {},
    nbtrain.LimitsAddon: lambda folder: {"max_steps": 100, "max_val_steps": 3},
    nbtrain.MicroBatchAddon: lambda folder: {"micro_reduction": "mean"},
    nbtrain.MetricsAddon: lambda folder: {"metrics": bias, "metrics_in_training": True},
    nbtrain.LoggersAddon: lambda folder: {"loggers": ["csv"], "save_path": folder},
    nbtrain.NeptuneLoggerAddon: lambda folder: {"save_path": folder},
    nbtrain.SystemMonitorAddon: lambda folder: {"throughput": True, "count_tokens": lambda batch: batch[0].numel()},
    nbtrain.UpdateRatioAddon: lambda folder: {"ratio_every_n_steps": 2},
    nbtrain.WandBLoggerAddon: lambda folder: {"web_logger": {"wandb": {"mode": "offline"}}, "save_path": folder},
    nbtrain.MultiGPUAddon: lambda folder: {"device": ONE_DEVICE},
}


def test_the_contract_is_tested_of_every_addon() -> None:
    assert {kind for kind in documented().values() if isinstance(kind, type) and issubclass(kind, AddOnBase)} == {
        AddOnBase,
        nbtrain.addons.KeptStatesAddon,  # in whose place StateManagerAddon is
        nbtrain.RayAddon,  # tests/cluster
        *ADDONS,
    }


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("addon", ADDONS, ids=lambda a: a.__name__)
def test_addon_trains_under_lightnings_own_trainer_as_under_ours(addon: type[AddOnBase], tmp_path: Path) -> None:
    def trainer() -> Trainer:
        return make_trainer(Regress.add_on(addon), model=make_model(), **ADDONS[addon](tmp_path))

    ours = trainer()
    ours.run(3, make_loader(), make_valid())
    theirs = trainer()
    L.Trainer(**{"default_root_dir": tmp_path, "log_every_n_steps": 5, **theirs.lightning_args()}, max_epochs=3).fit(
        theirs.as_lightning_module(), make_loader(), make_valid()
    )
    assert same_weights(ours.model, theirs.model)
    assert [r["val_loss"] for r in theirs.history.epochs] == [r["val_loss"] for r in ours.history.epochs]


@pytest.mark.parametrize("addon", ADDONS, ids=lambda a: a.__name__)
def test_addon_has_documentation_and_stands_alone(addon: type[AddOnBase], tmp_path: Path) -> None:
    assert addon.__doc__ and not addon.__doc__.startswith(addon.__name__ + "(")
    given = {name: value for name, value in ADDONS[addon](tmp_path).items() if name in options(addon)}
    assert all(isinstance(c, L.Callback) for c in addon(**given).callbacks(make_trainer(save_path=tmp_path)))


def test_users_own_log_lands_in_the_history() -> None:
    own = {"on_epoch": True, "on_step": False, "batch_size": 1}
    logs = LambdaCallback(on_train_batch_end=lambda trainer, module, *args: module.log("mine", 2.0, **own))
    trainer = make_trainer(lightning={"callbacks": [logs]})
    trainer.run(1, make_loader())
    assert trainer.history.last["mine"] == 2.0
