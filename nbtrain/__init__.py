"""Write `train_step` and `test_step` in a notebook; get a Lightning-grade run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public names and the module each comes from. They are imported when they are first used (PEP 562), so that `import nbtrain`
# and the command line do not wait seconds for torch and Lightning.
_PUBLIC = {
    "AddOnBase": "addons.base",
    "AddonError": "errors",
    "CheckpointError": "errors",
    "CompileAddon": "addons.speed",
    "ConfigError": "errors",
    "CudaGraphAddon": "addons.speed",
    "Event": "records",
    "Gallery": "gallery",
    "GradientClipAddon": "addons.optim",
    "History": "history",
    "ModelTrainer": "models",
    "NbtrainError": "errors",
    "OptionError": "errors",
    "Plan": "records",
    "PrefetchAddon": "addons.speed",
    "Progress": "records",
    "ProgressChecker": "trainer",
    "RangeTest": "finding",
    "RunResult": "history",
    "Sample": "gallery",
    "SchedulerAddon": "addons.optim",
    "SeededLoader": "seeded",
    "StateManagerAddon": "addons.state",
    "StepError": "errors",
    "TensorLoader": "data",
    "Trainer": "trainer",
    "TrainerArgs": "config",
    "load_run": "history",
}
__all__ = [*_PUBLIC, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from nbtrain.addons.base import AddOnBase as AddOnBase
    from nbtrain.addons.optim import GradientClipAddon as GradientClipAddon
    from nbtrain.addons.optim import SchedulerAddon as SchedulerAddon
    from nbtrain.addons.speed import CompileAddon as CompileAddon
    from nbtrain.addons.speed import CudaGraphAddon as CudaGraphAddon
    from nbtrain.addons.speed import PrefetchAddon as PrefetchAddon
    from nbtrain.addons.state import StateManagerAddon as StateManagerAddon
    from nbtrain.config import TrainerArgs as TrainerArgs
    from nbtrain.data import TensorLoader as TensorLoader
    from nbtrain.errors import AddonError as AddonError
    from nbtrain.errors import CheckpointError as CheckpointError
    from nbtrain.errors import ConfigError as ConfigError
    from nbtrain.errors import NbtrainError as NbtrainError
    from nbtrain.errors import OptionError as OptionError
    from nbtrain.errors import StepError as StepError
    from nbtrain.finding import RangeTest as RangeTest
    from nbtrain.gallery import Gallery as Gallery
    from nbtrain.gallery import Sample as Sample
    from nbtrain.history import History as History
    from nbtrain.history import RunResult as RunResult
    from nbtrain.history import load_run as load_run
    from nbtrain.models import ModelTrainer as ModelTrainer
    from nbtrain.records import Event as Event
    from nbtrain.records import Plan as Plan
    from nbtrain.records import Progress as Progress
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
