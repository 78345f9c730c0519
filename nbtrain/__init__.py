"""Write `train_step` and `test_step` in a notebook; get a Lightning-grade run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public names and the module each comes from. They are imported when they are first used (PEP 562), so that `import nbtrain`
# and the command line do not wait seconds for torch and Lightning.
_PUBLIC = {
    "AccumulationAddon": "addons.accumulation",
    "AddOnBase": "addons.base",
    "AddonError": "errors",
    "AggregatedOutputs": "addons.accumulation",
    "Callback": "hooks",
    "CheckpointError": "errors",
    "CompileAddon": "addons.speed",
    "ConfigError": "errors",
    "CosineAnnealingScheduler": "schedulers",
    "CudaGraphAddon": "addons.speed",
    "EMAAddon": "addons.averaging",
    "EarlyStoppingAddon": "addons.stopping",
    "EnvironmentAddon": "addons.environment",
    "Event": "records",
    "FreezeAddon": "addons.tuning",
    "Gallery": "gallery",
    "GradientClipAddon": "addons.optim",
    "GradientStatsAddon": "addons.watching",
    "HFCallback": "hfcallbacks",
    "History": "history",
    "HooksAddon": "addons.hooks",
    "LimitsAddon": "addons.stopping",
    "LoggersAddon": "addons.loggers",
    "MetricsAddon": "addons.metrics",
    "MicroBatchAddon": "addons.memory",
    "ModelTrainer": "models",
    "MultiGPUAddon": "addons.multigpu",
    "MultiOptimizerTrainer": "multioptimizer",
    "NbtrainError": "errors",
    "NeptuneLoggerAddon": "addons.loggers",
    "NonFiniteAddon": "addons.nonfinite",
    "OptionError": "errors",
    "OutOfMemory": "errors",
    "Plan": "records",
    "PrefetchAddon": "addons.speed",
    "Progress": "records",
    "ProgressChecker": "trainer",
    "RangeTest": "finding",
    "RunHandle": "interrupts",
    "RunPaused": "errors",
    "RunResult": "history",
    "Sample": "gallery",
    "SchedulerAddon": "addons.optim",
    "SchedulerBase": "schedulers",
    "SchedulerChain": "schedulers",
    "SeededLoader": "seeded",
    "StateManagerAddon": "addons.state",
    "StepError": "errors",
    "SystemMonitorAddon": "addons.system",
    "Task": "multitask",
    "TaskLoader": "multitask",
    "TensorLoader": "data",
    "ThroughputAddon": "addons.watching",
    "TrainHook": "hooks",
    "Trainer": "trainer",
    "TrainerArgs": "config",
    "WandBLoggerAddon": "addons.loggers",
    "WarmUpScheduler": "schedulers",
    "WorkerError": "errors",
    "compare": "comparing",
    "cutmix": "mixing",
    "get_combined_lr_scheduler": "schedulers",
    "get_lr_scheduler": "schedulers",
    "get_multi_step_lr_scheduler": "schedulers",
    "load_run": "history",
    "mixup": "mixing",
    "param_groups": "addons.tuning",
    "plot_schedule": "schedulers",
    "plot_schedules": "schedulers",
    "warmup_cosine": "schedulers",
}
__all__ = [*_PUBLIC, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from nbtrain.addons.accumulation import AccumulationAddon as AccumulationAddon
    from nbtrain.addons.accumulation import AggregatedOutputs as AggregatedOutputs
    from nbtrain.addons.averaging import EMAAddon as EMAAddon
    from nbtrain.addons.base import AddOnBase as AddOnBase
    from nbtrain.addons.environment import EnvironmentAddon as EnvironmentAddon
    from nbtrain.addons.hooks import HooksAddon as HooksAddon
    from nbtrain.addons.loggers import LoggersAddon as LoggersAddon
    from nbtrain.addons.loggers import NeptuneLoggerAddon as NeptuneLoggerAddon
    from nbtrain.addons.loggers import WandBLoggerAddon as WandBLoggerAddon
    from nbtrain.addons.memory import MicroBatchAddon as MicroBatchAddon
    from nbtrain.addons.metrics import MetricsAddon as MetricsAddon
    from nbtrain.addons.multigpu import MultiGPUAddon as MultiGPUAddon
    from nbtrain.addons.nonfinite import NonFiniteAddon as NonFiniteAddon
    from nbtrain.addons.optim import GradientClipAddon as GradientClipAddon
    from nbtrain.addons.optim import SchedulerAddon as SchedulerAddon
    from nbtrain.addons.speed import CompileAddon as CompileAddon
    from nbtrain.addons.speed import CudaGraphAddon as CudaGraphAddon
    from nbtrain.addons.speed import PrefetchAddon as PrefetchAddon
    from nbtrain.addons.state import StateManagerAddon as StateManagerAddon
    from nbtrain.addons.stopping import EarlyStoppingAddon as EarlyStoppingAddon
    from nbtrain.addons.stopping import LimitsAddon as LimitsAddon
    from nbtrain.addons.system import SystemMonitorAddon as SystemMonitorAddon
    from nbtrain.addons.tuning import FreezeAddon as FreezeAddon
    from nbtrain.addons.tuning import param_groups as param_groups
    from nbtrain.addons.watching import GradientStatsAddon as GradientStatsAddon
    from nbtrain.addons.watching import ThroughputAddon as ThroughputAddon
    from nbtrain.comparing import compare as compare
    from nbtrain.config import TrainerArgs as TrainerArgs
    from nbtrain.data import TensorLoader as TensorLoader
    from nbtrain.errors import AddonError as AddonError
    from nbtrain.errors import CheckpointError as CheckpointError
    from nbtrain.errors import ConfigError as ConfigError
    from nbtrain.errors import NbtrainError as NbtrainError
    from nbtrain.errors import OptionError as OptionError
    from nbtrain.errors import OutOfMemory as OutOfMemory
    from nbtrain.errors import RunPaused as RunPaused
    from nbtrain.errors import StepError as StepError
    from nbtrain.errors import WorkerError as WorkerError
    from nbtrain.finding import RangeTest as RangeTest
    from nbtrain.gallery import Gallery as Gallery
    from nbtrain.gallery import Sample as Sample
    from nbtrain.hfcallbacks import HFCallback as HFCallback
    from nbtrain.history import History as History
    from nbtrain.history import RunResult as RunResult
    from nbtrain.history import load_run as load_run
    from nbtrain.mixing import cutmix as cutmix
    from nbtrain.mixing import mixup as mixup
    from nbtrain.hooks import Callback as Callback
    from nbtrain.hooks import TrainHook as TrainHook
    from nbtrain.interrupts import RunHandle as RunHandle
    from nbtrain.models import ModelTrainer as ModelTrainer
    from nbtrain.multioptimizer import MultiOptimizerTrainer as MultiOptimizerTrainer
    from nbtrain.multitask import Task as Task
    from nbtrain.multitask import TaskLoader as TaskLoader
    from nbtrain.records import Event as Event
    from nbtrain.records import Plan as Plan
    from nbtrain.records import Progress as Progress
    from nbtrain.schedulers import CosineAnnealingScheduler as CosineAnnealingScheduler
    from nbtrain.schedulers import SchedulerBase as SchedulerBase
    from nbtrain.schedulers import SchedulerChain as SchedulerChain
    from nbtrain.schedulers import WarmUpScheduler as WarmUpScheduler
    from nbtrain.schedulers import get_combined_lr_scheduler as get_combined_lr_scheduler
    from nbtrain.schedulers import get_lr_scheduler as get_lr_scheduler
    from nbtrain.schedulers import get_multi_step_lr_scheduler as get_multi_step_lr_scheduler
    from nbtrain.schedulers import plot_schedule as plot_schedule
    from nbtrain.schedulers import plot_schedules as plot_schedules
    from nbtrain.schedulers import warmup_cosine as warmup_cosine
    from nbtrain.seeded import SeededLoader as SeededLoader
    from nbtrain.trainer import ProgressChecker as ProgressChecker
    from nbtrain.trainer import Trainer as Trainer


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'nbtrain' has no attribute {name!r}")
    value = getattr(import_module(f"nbtrain.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
