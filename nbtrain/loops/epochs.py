"""Run the code between two epochs with Lightning's order, hooks and counters, at little cost even if an epoch is one batch."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..data.epoch import set_epoch
from ..engine.callback import BoundaryCallback, PassCallback, callbacks_of
from ..engine.logged import publish, reset_results
from ..engine.step_module import StepModule
from ..private.lightning_loops import FitLoop
from .batch_ways import call_hooks
from .fetcher import LiveFetcher, limits_of, live, set_limits

# %% auto #0
__all__ = ["OwnFitLoop"]

_MONITORING = (EarlyStopping, Checkpoint)  # Lightning calls them after the module, which may log what they read


# Those that set up the process for an epoch, also for the rest of one; what the others begin was begun before the state was taken
_SETTING_UP = (PassCallback, GradientAccumulationScheduler, StochasticWeightAveraging)


class OwnFitLoop(FitLoop):
    """Lightning's loop over epochs; what it does around each of them is done here.

    An epoch ends where its loader ends, or at a limit that the user gave. `max_batches` is the forecast of the current epoch; inf if
    there is none. `is_told`: whether the loader knows the number of the next epoch already. `resumes_epoch`: the first epoch has begun
    before this run.
    """

    tells_epoch = True
    is_told = resumes_epoch = False
    _val_check_batch: float | None = None  # Lightning's, as it was computed here

    def setup_data(self) -> None:
        fetcher = self._data_fetcher
        super().setup_data()
        if self._data_fetcher is not fetcher:  # a new loader
            self._data_fetcher: Any = live(self._data_fetcher)
            self._val_check_batch = self.trainer.val_check_batch

    def on_advance_start(self) -> None:
        pl_trainer, progress, module = self.trainer, self.epoch_progress, self.trainer.lightning_module
        assert isinstance(module, StepModule)
        self.setup_data()
        assert self._combined_loader is not None
        for loader in () if self.is_told else self._combined_loader.flattened:
            set_epoch(loader, progress.current.processed)  # pyright: ignore[reportAttributeAccessIssue]
        self.is_told = False
        self.expect()
        progress.increment_ready()
        if self.resumes_epoch:
            callbacks: list[L.Callback] = pl_trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
            call_hooks(pl_trainer, "on_train_epoch_start", [one for one in callbacks if isinstance(one, _SETTING_UP)], others=False)
            module.begin_train_pass()
        else:
            call_hooks(pl_trainer, "on_train_epoch_start")
        self.resumes_epoch = False
        progress.increment_started()

    def expect(self) -> None:
        """Read the length of the epoch from the loaders, which serves bars, plans and shares of an epoch."""
        pl_trainer, combined, fetcher, module = self.trainer, self._combined_loader, self._data_fetcher, self.trainer.lightning_module
        assert combined is not None and combined._iterator is not None and isinstance(module, StepModule)
        limit = pl_trainer.limit_train_batches
        limits = limits_of(limit, combined)
        set_limits(combined, limits)
        n = sized_len(combined)
        if isinstance(fetcher, LiveFetcher):
            fetcher.limit = limits[0] if len(limits) == 1 or type(limit) is int or limit == 1.0 else n or math.inf
        before, self.max_batches = self.max_batches, n or math.inf  # at 0 Lightning would end the run
        share = pl_trainer.val_check_interval
        if isinstance(share, float) and pl_trainer.val_check_batch == self._val_check_batch:  # else a callback has set it
            # An epoch is validated at its end, wherever that is; a share of it is one of the forecast
            is_at_end = share == 1.0 or self.max_batches == math.inf
            self._val_check_batch = math.inf if is_at_end else max(1, int(self.max_batches * share))
            pl_trainer.val_check_batch = self._val_check_batch
        if self.max_batches != before:
            module.owner.recorder.expect(self.max_batches)

    def on_advance_end(self) -> None:
        current: Any = self.epoch_progress.current
        total: Any = self.epoch_progress.total
        self._end_epoch()
        for callback in callbacks_of(self.trainer, BoundaryCallback):
            callback.on_epoch_over(self.trainer, self.trainer.lightning_module)
        current.completed, total.completed = current.completed + 1, total.completed + 1  # a checkpoint of Lightning's is without
        if self.trainer.received_sigterm:
            raise SIGTERMException

    def _end_epoch(self) -> None:
        loop, pl_trainer, connector = self.epoch_loop, self.trainer, self.trainer._logger_connector
        connector._first_loop_iter = None
        self.epoch_progress.increment_processed()
        callbacks: list[L.Callback] = pl_trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        call_hooks(pl_trainer, "on_train_epoch_end", [callback for callback in callbacks if not isinstance(callback, _MONITORING)])
        monitoring = [callback for callback in callbacks if isinstance(callback, _MONITORING)]
        call_hooks(pl_trainer, "on_train_epoch_end", monitoring, others=False)
        publish(pl_trainer, loop._results)
        connector._current_fx = None
        if pl_trainer.lr_scheduler_configs and loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        if pl_trainer.loggers:
            loop._batches_that_stepped -= 1  # what is logged has the step of the last batch
            connector.update_train_epoch_metrics()
            loop._batches_that_stepped += 1
        else:
            reset_results(loop._results)
            connector._first_loop_iter = connector._current_fx = None
