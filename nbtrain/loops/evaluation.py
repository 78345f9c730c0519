"""Validate and test on a trainer's own steps: one plain function over the batches of one or several sets."""

from __future__ import annotations

import time
from collections import ChainMap
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..data.epoch import set_epoch
from ..engine.callback import BoundaryCallback, callbacks_of
from ..engine.control import Boundary, Control
from ..engine.logged import Results, publish, reset_results
from ..engine.pass_module import TrainingModes, is_sanity_check
from ..engine.step_module import StepModule
from ..private.lightning_loops import EvaluationLoop, no_grad_context, select_data_fetcher
from .batch_ways import Listeners, Ways, call_hooks, explain_full_memory, has_profiler
from .fetcher import LiveFetcher, limits_of, live, quiet_fetcher

# %% auto #0
__all__ = ["evaluate", "OwnEvaluationLoop"]


def evaluate(loop: OwnEvaluationLoop) -> list[dict[str, Any]]:
    """One pass over the sets of `loop`, in Lightning's order. Returns what was logged for each of them."""
    pl_trainer, module, connector, results = loop.trainer, loop.trainer.lightning_module, loop.trainer._logger_connector, loop._results
    assert isinstance(module, StepModule)
    stage = "test" if pl_trainer.testing else "validation"
    start, end, is_check = f"on_{stage}_batch_start", f"on_{stage}_batch_end", is_sanity_check(pl_trainer)
    modes, names = TrainingModes(module), vars(module)
    loop.set_modes(modes, stage)
    call_hooks(pl_trainer, f"on_{stage}_start")
    call_hooks(pl_trainer, f"on_{stage}_epoch_start")
    listeners, ways = Listeners(pl_trainer, (start, end)), Ways(pl_trainer, f"{stage}_step")
    progress, total, current, hooks = loop.batch_progress, loop.batch_progress.total, loop.batch_progress.current, listeners.hooks
    batches, logged, of_set = quiet_fetcher(loop.fetcher, module.guard, labelled=has_profiler(pl_trainer)), list[dict[str, Any]](), 0
    with explain_full_memory(loop):
        while True:
            try:
                batch, index, set_index = next(batches)
            except StopIteration:
                break
            if set_index != of_set:
                logged.append(loop.end_set())
                of_set = set_index
            progress.is_last_batch = loop.fetcher.done
            batch = ways.move(batch, set_index)
            args = (batch, index, set_index) if loop.num_dataloaders > 1 else (batch, index)
            total.ready += 1
            current.ready += 1
            connector._first_loop_iter = connector._first_loop_iter is None
            results.batch, results.batch_size, results.dataloader_idx = batch, None, set_index if loop.num_dataloaders > 1 else None
            if start in hooks:
                listeners.call(start, *args)
            total.started += 1
            current.started += 1
            names["_current_fx_name"] = f"{stage}_step"
            output = ways.step(*args)
            names["_current_fx_name"] = None
            total.processed += 1
            current.processed += 1
            if end in hooks:
                listeners.call(end, output, *args)
            logs = bool(results) and any(not metric.has_reset for metric in results.values())
            if logs:
                connector.on_batch_end()
            results.batch = results.batch_size = batch = output = args = None
            total.completed += 1
            current.completed += 1
            if not is_check:
                loop._has_run = True
                if logs:
                    connector.update_eval_step_metrics(loop._seen_batches_per_dataloader[set_index])
                loop._seen_batches_per_dataloader[set_index] += 1
            if pl_trainer.received_sigterm and not progress.is_last_batch:
                raise SIGTERMException
            if loop.control.run_state.requested:
                loop.attend()
            listeners.refresh()
    logged.append(loop.end_set())
    return loop.end_pass(modes, stage, logged)


class OwnEvaluationLoop(EvaluationLoop):
    """What an evaluation on a trainer's own steps is run with, in the place of Lightning's loop: its counters, loaders and requests."""

    control = Control()  # of no run
    fetcher: Any = None  # of this pass

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._results = Results(training=False)

    @no_grad_context
    def run(self) -> list[dict[str, Any]]:
        if self._combined_loader is not None:
            self._expect()
        self.setup_data()
        if self.skip:
            return []
        self.reset()
        try:
            return evaluate(self)
        finally:
            self.on_iteration_done()

    # -- data
    def setup_data(self) -> None:
        # In a training a BatchSizeFinder calls it without validation, too; an evaluation of nothing is an error
        if self._trainer_fn != TrainerFn.FITTING or self._data_source.is_defined():
            super().setup_data()

    def _limits(self) -> list[float]:
        """The most batches of each loader."""
        pl_trainer, combined = self.trainer, self._combined_loader
        assert combined is not None
        limits = limits_of(pl_trainer.limit_test_batches if pl_trainer.testing else pl_trainer.limit_val_batches, combined)
        return [min(pl_trainer.num_sanity_val_steps, limit) for limit in limits] if pl_trainer.sanity_checking else limits

    def _expect(self) -> None:
        """Read the lengths of the loaders, which serve bars and plans."""
        combined = self._combined_loader
        assert combined is not None
        limit = self.trainer.limit_test_batches if self.trainer.testing else self.trainer.limit_val_batches
        lengths = [sized_len(loader) for loader in combined.flattened]
        found = zip(lengths, limits_of(limit, combined))
        self._max_batches = [most if n is None else min(n, most) for n, most in found]  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self) -> None:
        """What Lightning's does; each loader is read to its end, or to a limit that the user gave."""
        pl_trainer, combined, module = self.trainer, self._combined_loader, self.trainer.lightning_module
        assert combined is not None and pl_trainer.state.stage is not None and isinstance(module, StepModule)
        self._has_run = False
        self.batch_progress.reset_on_run()
        epoch = pl_trainer.fit_loop.epoch_progress.current.processed
        if pl_trainer.state.fn != TrainerFn.FITTING:
            epoch = module.owner.train_state.counts.epoch
        for loader in combined.flattened:
            set_epoch(loader, epoch)
        combined.limits = limits = self._limits()  # pyright: ignore[reportAttributeAccessIssue]
        fetcher = select_data_fetcher(pl_trainer, pl_trainer.state.stage)
        fetcher.setup(combined)
        iter(fetcher)
        fetcher = live(fetcher)
        if isinstance(fetcher, LiveFetcher):
            fetcher.limit = limits[0] if len(limits) == 1 else fetcher.limit
        fetcher._start_profiler, fetcher._stop_profiler = self._on_before_fetch, self._on_after_fetch
        self.fetcher = self._data_fetcher = fetcher

    # -- a pass
    def set_modes(self, modes: TrainingModes, stage: str) -> None:
        """Set the modules to evaluation mode."""
        module = self.trainer.lightning_module
        is_usual = self.trainer.model is module and f"on_{stage}_model_eval" not in vars(module)
        if not (is_usual and modes.evaluate()):
            getattr(module, f"on_{stage}_model_eval")()

    def end_set(self) -> dict[str, Any]:
        """The batches of a set are over. Returns what was logged for it."""
        self.trainer._logger_connector.epoch_end_reached()
        return {} if is_sanity_check(self.trainer) else publish(self.trainer, self._results)

    def end_pass(self, modes: TrainingModes, stage: str, logged: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What follows the last batch: the metrics, which all hooks see, and the training modes. Returns what was logged for each set."""
        pl_trainer, connector, results, module = self.trainer, self.trainer._logger_connector, self._results, self.trainer.lightning_module
        assert isinstance(module, StepModule)
        results.dataloader_idx = None
        vars(module)["_current_fx_name"] = f"on_{stage}_epoch_end"
        module.end_evaluation_pass()
        vars(module)["_current_fx_name"] = None
        publish(pl_trainer, results)
        call_hooks(pl_trainer, f"on_{stage}_epoch_end")
        of_pass = publish(pl_trainer, results)
        connector._current_fx = None
        for of_set in logged:
            of_set.update(of_pass)
        if pl_trainer.loggers:
            connector.log_eval_end_metrics(dict(ChainMap(*logged)))
        call_hooks(pl_trainer, f"on_{stage}_end")
        reset_results(results)
        connector._first_loop_iter = connector._current_fx = None
        if f"on_{stage}_model_train" in vars(module):
            getattr(module, f"on_{stage}_model_train")()
        else:
            modes.restore()
        pl_trainer._last_val_time = time.monotonic()  # pyright: ignore[reportAttributeAccessIssue]
        return logged

    def attend(self) -> None:
        """Execute the requests to the run. A validation is finished where a callback can save a checkpoint after it."""
        pl_trainer = self.trainer
        may_leave = pl_trainer.testing or not callbacks_of(pl_trainer, BoundaryCallback)
        self.control.attend(Boundary(pl_trainer, "test" if pl_trainer.testing else "valid", may_leave))
