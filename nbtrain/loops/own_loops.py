"""Let a `lightning.Trainer` run a trainer's own steps on nbtrain's own loops."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from ..engine.control import Control
from ..engine.protocol import TrainerProtocol
from .epochs import OwnFitLoop
from .evaluation import OwnEvaluationLoop
from .stock_loops import use_stock_loops, why_stock
from .training import OwnEpochLoop

# %% auto #0
__all__ = ["unknown_version", "use_loops", "use_own_loops"]

KNOWN_VERSIONS = ("2.6",)  # of Lightning, whose private parts the loops use


def unknown_version() -> str:
    """Lightning's version, where nbtrain's loops were not compared with it; else an empty text."""
    return "" if L.__version__.rpartition(".")[0] in KNOWN_VERSIONS else L.__version__


def use_loops(pl_trainer: L.Trainer, trainer: TrainerProtocol) -> None:
    """Choose the loops of a new `pl_trainer` by the owner of the steps: a LightningModule trains on Lightning's, unchanged.

    Own steps do, too, where the installed Lightning lacks a part that nbtrain's loops need. All attend to the requests to `trainer`.
    """
    if trainer.configures_optimizers or why_stock() or unknown_version():
        use_stock_loops(pl_trainer, trainer.control)
    else:
        use_own_loops(pl_trainer, trainer.control)


def use_own_loops(pl_trainer: L.Trainer, control: Control | None = None) -> OwnEpochLoop:
    """Put nbtrain's loops, which attend to `control`, in the place of those of a new `pl_trainer`. Returns the loop of an epoch."""
    fit_loop, stock = pl_trainer.fit_loop, pl_trainer.fit_loop.epoch_loop
    loop = OwnEpochLoop(pl_trainer, min_steps=stock.min_steps, max_steps=stock.max_steps)
    loop.val_loop = OwnEvaluationLoop(pl_trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False)
    pl_trainer.fit_loop = OwnFitLoop(pl_trainer, min_epochs=fit_loop.min_epochs, max_epochs=fit_loop.max_epochs)
    vars(pl_trainer.fit_loop).update(vars(fit_loop), epoch_loop=loop)
    loop.control = loop.val_loop.control = control or loop.control
    for name in ("validate_loop", "test_loop"):
        old = getattr(pl_trainer, name)
        new = OwnEvaluationLoop(pl_trainer, old._trainer_fn, old._stage, verbose=old.verbose, inference_mode=old.inference_mode)
        new.control = loop.control
        setattr(pl_trainer, name, new)
    return loop
