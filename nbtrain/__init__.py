"""Write `train_step` and `test_step` in a notebook; get a Lightning-grade run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public names and the module each comes from. They are imported when they are first used (PEP 562), so that `import nbtrain`
# and the command line do not wait seconds for torch and Lightning.
PUBLIC = {
    "AccumulationAddon": "addons.accumulation",
    "AddOnBase": "engine.addon",
    "AddOnError": "errors",
    "AggregatedOutputs": "addons.accumulation",
    "Callback": "engine.callback",
    "CheckpointError": "errors",
    "CompileAddon": "addons.performance",
    "ConfigError": "errors",
    "CosineAnnealingScheduler": "schedules",
    "CudaGraphAddon": "addons.performance",
    "EMAAddon": "addons.ema",
    "EarlyStoppingAddon": "addons.early_stopping",
    "EnvironmentAddon": "addons.performance",
    "FreezeAddon": "addons.freeze",
    "GradientClipAddon": "addons.gradients",
    "GradientStatsAddon": "addons.gradients",
    "History": "history.history",
    "HealAddon": "addons.heal",
    "LimitsAddon": "addons.limits",
    "LoggersAddon": "loggers.addon",
    "MetricsAddon": "addons.metrics",
    "MicroBatchAddon": "addons.accumulation",
    "ModelTrainer": "variants.model_trainer",
    "MultiGPUAddon": "addons.multi_gpu",
    "MultiOptimizerTrainer": "variants.multi_optimizer",
    "NbtrainError": "errors",
    "NeptuneLoggerAddon": "loggers.addon",
    "NonFiniteAddon": "addons.non_finite",
    "OptionError": "errors",
    "OutOfMemory": "errors",
    "PrefetchAddon": "addons.performance",
    "ProgressChecker": "base.progress_checker",
    "RayAddon": "cluster.ray",
    "RunPaused": "errors",
    "RunStopped": "errors",
    "SAMAddon": "addons.gradients",
    "RunResult": "history.history",
    "SchedulerAddon": "addons.scheduler",
    "SchedulerBase": "schedules",
    "SeededLoader": "data.seeded_loader",
    "StateManagerAddon": "addons.state_manager",
    "StepError": "errors",
    "SystemMonitorAddon": "addons.system_monitor",
    "TaskLoader": "data.task_loader",
    "TensorLoader": "data.tensor_loader",
    "TrainHook": "compat.hook_names",
    "Trainer": "trainer.trainer",
    "TrainerArgs": "jobs.trainer_args",
    "TrainerOptions": "base.addon_options",
    "UpdateRatioAddon": "addons.gradients",
    "WandBLoggerAddon": "loggers.addon",
    "WarmUpScheduler": "schedules",
    "WorkerError": "errors",
    "submitted_jobs": "cluster.jobs",
    "check_port": "tools.port_check",
    "compare": "library.compare",
    "get_combined_lr_scheduler": "schedules",
    "get_lr_scheduler": "schedules",
    "get_multi_step_lr_scheduler": "schedules",
    "load_run": "history.run_folder",
    "runs": "library.runs",
    "param_groups": "optim.param_groups",
    "plot_schedule": "tools.schedule_plot",
    "plot_schedules": "tools.schedule_plot",
    "warmup_cosine": "schedules",
}
__all__ = [*PUBLIC, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from nbtrain.addons.accumulation import (
        AccumulationAddon as AccumulationAddon,
        AggregatedOutputs as AggregatedOutputs,
        MicroBatchAddon as MicroBatchAddon,
    )
    from nbtrain.addons.ema import EMAAddon as EMAAddon
    from nbtrain.engine.addon import AddOnBase as AddOnBase
    from nbtrain.addons.performance import (
        CompileAddon as CompileAddon,
        CudaGraphAddon as CudaGraphAddon,
        EnvironmentAddon as EnvironmentAddon,
        PrefetchAddon as PrefetchAddon,
    )
    from nbtrain.addons.heal import HealAddon as HealAddon
    from nbtrain.loggers.addon import (
        LoggersAddon as LoggersAddon,
        NeptuneLoggerAddon as NeptuneLoggerAddon,
        WandBLoggerAddon as WandBLoggerAddon,
    )
    from nbtrain.addons.metrics import MetricsAddon as MetricsAddon
    from nbtrain.addons.multi_gpu import MultiGPUAddon as MultiGPUAddon
    from nbtrain.addons.non_finite import NonFiniteAddon as NonFiniteAddon
    from nbtrain.addons.gradients import (
        GradientClipAddon as GradientClipAddon,
        GradientStatsAddon as GradientStatsAddon,
        SAMAddon as SAMAddon,
        UpdateRatioAddon as UpdateRatioAddon,
    )
    from nbtrain.addons.scheduler import SchedulerAddon as SchedulerAddon
    from nbtrain.addons.state_manager import StateManagerAddon as StateManagerAddon
    from nbtrain.addons.early_stopping import EarlyStoppingAddon as EarlyStoppingAddon
    from nbtrain.addons.limits import LimitsAddon as LimitsAddon
    from nbtrain.addons.system_monitor import SystemMonitorAddon as SystemMonitorAddon
    from nbtrain.addons.freeze import FreezeAddon as FreezeAddon
    from nbtrain.optim.param_groups import param_groups as param_groups
    from nbtrain.library.compare import compare as compare
    from nbtrain.tools.port_check import check_port as check_port
    from nbtrain.jobs.trainer_args import TrainerArgs as TrainerArgs
    from nbtrain.data.tensor_loader import TensorLoader as TensorLoader
    from nbtrain.errors import (
        AddOnError as AddOnError,
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        NbtrainError as NbtrainError,
        OptionError as OptionError,
        OutOfMemory as OutOfMemory,
        RunPaused as RunPaused,
        RunStopped as RunStopped,
        StepError as StepError,
        WorkerError as WorkerError,
    )
    from nbtrain.cluster.ray import RayAddon as RayAddon
    from nbtrain.history.history import History as History, RunResult as RunResult
    from nbtrain.history.run_folder import load_run as load_run
    from nbtrain.library.runs import runs as runs
    from nbtrain.engine.callback import Callback as Callback
    from nbtrain.compat.hook_names import TrainHook as TrainHook
    from nbtrain.cluster.jobs import submitted_jobs as submitted_jobs
    from nbtrain.variants.model_trainer import ModelTrainer as ModelTrainer
    from nbtrain.variants.multi_optimizer import MultiOptimizerTrainer as MultiOptimizerTrainer
    from nbtrain.data.task_loader import TaskLoader as TaskLoader
    from nbtrain.schedules import (
        CosineAnnealingScheduler as CosineAnnealingScheduler,
        SchedulerBase as SchedulerBase,
        WarmUpScheduler as WarmUpScheduler,
        get_combined_lr_scheduler as get_combined_lr_scheduler,
        get_lr_scheduler as get_lr_scheduler,
        get_multi_step_lr_scheduler as get_multi_step_lr_scheduler,
        warmup_cosine as warmup_cosine,
    )
    from nbtrain.tools.schedule_plot import plot_schedule as plot_schedule, plot_schedules as plot_schedules
    from nbtrain.data.seeded_loader import SeededLoader as SeededLoader
    from nbtrain.base.addon_options import TrainerOptions as TrainerOptions
    from nbtrain.base.progress_checker import ProgressChecker as ProgressChecker
    from nbtrain.trainer.trainer import Trainer as Trainer


def _instead_of(name: str) -> str:
    from nbtrain.compat.foreign_names import instead_of

    return instead_of(name)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        if not name.startswith("_") and (text := _instead_of(name)):
            raise ImportError(text)  # Python would hide an AttributeError
        raise AttributeError(f"module 'nbtrain' has no attribute {name!r}")
    from nbtrain.deferred_imports import deferring, misfit

    with deferring():
        try:
            value = getattr(import_module(f"nbtrain.{PUBLIC[name]}"), name)
        except Exception as error:
            if reason := misfit(error):
                raise ImportError(reason) from None
            raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
