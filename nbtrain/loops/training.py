"""Train an epoch on a trainer's own steps: one plain function, from the loader through `train_step` to what follows a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from ..engine.callback import BoundaryCallback, callbacks_of, updates_of
from ..engine.control import Boundary, Control, LeaveAfterError
from ..engine.logged import Results, publish
from ..engine.recorder_callback import RecorderCallback
from ..engine.step_module import StepModule
from ..engine.step_output import LeftOut, NoUpdate
from ..errors import ConfigError
from ..optim.param_groups import scale_gradients
from ..private.lightning_loops import DataFetcher, TrainingEpochLoop, block_parallel_sync_behavior
from ..private.lightning_parts import may_stop
from .batch_ways import Listeners, Ways, explain_full_memory, has_profiler, labelled
from .due import are_loggers_due, is_validation_due
from .fast_step import find_backward, find_step, find_zero_grad, gradients_first, has_hooks_before
from .fetcher import LiveFetcher, quiet_fetcher

# %% auto #0
__all__ = ["WholeStep", "Window", "TrainingWays", "train_epoch", "train_batch", "follow", "OwnEpochLoop", "is_window_closed"]


# -- an epoch
def train_epoch(loop: OwnEpochLoop, fetcher: Any) -> None:
    """One epoch, or the rest of one: get a batch, move it to the device, train on it, and do what follows it.

    Counters, results and hooks are at each point what they are in Lightning's loop. What callbacks change counts from the next batch on.
    """
    pl_trainer, module, connector, results = loop.trainer, loop.module, loop.trainer._logger_connector, loop._results
    progress, total, current = loop.batch_progress, loop.batch_progress.total, loop.batch_progress.current
    window, listeners = loop.window, Listeners(pl_trainer, _HOOKS)
    train = labelled(pl_trainer, "run_training_batch", train_batch)
    ways, hooks = TrainingWays(pl_trainer, listeners), listeners.hooks
    wait, batches = module.owner.recorder.wait, quiet_fetcher(fetcher, module.guard, labelled=has_profiler(pl_trainer))
    is_over = loop.is_over()
    try:
        while not is_over:
            begun_s = wait.clock()
            try:
                batch = next(batches)[0]
            except StopIteration:
                break
            wait.add(begun_s)
            progress.is_last_batch = fetcher.done
            if not ways.are_newest():
                ways = TrainingWays(pl_trainer, listeners)
            batch = ways.move(batch)
            total.ready += 1
            current.ready += 1
            index = current.ready - 1
            connector._first_loop_iter = connector._first_loop_iter is None
            results.batch, results.batch_size, results.dataloader_idx = batch, None, None

            starts = "on_train_batch_start" in hooks and (batch is not None or pl_trainer.world_size > 1)
            if starts and listeners.call("on_train_batch_start", batch, index) == -1:
                loop.skip_rest()
                break
            if batch is not None:
                total.started += 1
                current.started += 1
            train(loop, ways, batch, index)
            total.processed += 1
            current.processed += 1
            loop.step_schedules(is_last=progress.is_last_batch)
            if "on_train_batch_end" in hooks:
                listeners.call("on_train_batch_end", window.output_for_hooks(module, batch), batch, index)
            # Nothing holds the batch from here on: a validation needs the memory
            results.batch = results.batch_size = batch = window.output = window.loss = None
            total.completed += 1
            current.completed += 1
            is_over = follow(loop)
            listeners.refresh()
    except BaseException as error:
        if pl_trainer.training and connector._first_loop_iter is not None:
            publish(pl_trainer, results, on_step=True)
        if isinstance(error, LeaveAfterError) and current.ready > current.completed and pl_trainer.training:
            batches.unread()
        if batches is not fetcher or isinstance(batches, LiveFetcher):
            batches.release()
        raise
    finally:
        window.output = window.loss = None
    if isinstance(fetcher, LiveFetcher) and fetcher.done and not progress.is_last_batch:
        end_late(loop, ways)


def train_batch(loop: OwnEpochLoop, ways: TrainingWays, batch: Any, index: int) -> None:
    """Compute the gradients of a batch; where its window of accumulated gradients ends, update the weights. `loop.window` has the outcome."""
    pl_trainer, module, window = loop.trainer, loop.module, loop.window
    progress, names, n_batches = loop.automatic_optimization.optim_progress.optimizer, vars(module), pl_trainer.accumulate_grad_batches
    is_open = (n_batches > 1 or loop.skips_backward) and loop._should_accumulate()
    window.n_calls, window.is_left_out, window.has_stepped = 0, False, False

    def compute() -> None:
        """The step, its loss and its gradients."""
        window.n_calls += 1
        window.loss = None
        names["_current_fx_name"] = "training_step"
        window.output = output = ways.step(batch, index)
        window.is_left_out = output is None or type(output) is LeftOut
        if window.is_left_out and module.round is None:
            return
        if not window.n_added and not loop.skips_backward:
            ways.zero_gradients(progress.zero_grad)
        loss = None if output is None else output.get("loss")
        if loss is None or loop.skips_backward:
            return
        if n_batches > 1:
            loss = loss / n_batches
        ways.backward(loss)
        window.loss = window.newest_loss = loss.detach()

    def compute_in_round() -> None:
        """The gradients, and what several ranks agree on: how much of this round of batches counts. Gradients are means over that part."""
        compute() if module.guard is None else compute_guarded(loop, ways, batch, compute)
        if module.round is not None:
            part = module.round.close()
            window.is_left_out = part == 0
            if 0 < part < 1 and module.round.weighs and n_batches == 1:
                scale_gradients(ways.optimizer, 1 / part)

    def closure() -> Tensor | None:
        """What the optimizer calls for its gradients."""
        if window.n_calls and n_batches > 1:
            raise ConfigError(
                f"{type(ways.optimizer).__name__} calls its closure several times an update, and the batches before in a window of "
                f"{n_batches} are gone.",
                remedy="Train without accumulated gradients, on larger batches.",
            )
        compute_in_round()
        if window.is_left_out and not (window.n_added and loop._num_ready_batches_reached()):
            raise NoUpdate
        ways.before_step()
        return window.loss if window.loss is not None else window.newest_loss  # a scaler steps only with a loss

    if not module.automatic_optimization:
        names["_current_fx_name"] = "training_step"
        window.output = ways.step(batch, index)
        window.has_stepped = module.has_stepped
    elif is_open and not pl_trainer.strategy.handles_gradient_accumulation:
        with block_parallel_sync_behavior(pl_trainer.strategy):
            compute_in_round()
        window.n_added += not window.is_left_out
    else:
        update(loop, ways, closure, batch, is_open=is_open)
    names["_current_fx_name"] = None
    if window.is_left_out and n_batches > 1:
        loop.window_start += 1  # it does not belong to the window


def update(loop: OwnEpochLoop, ways: TrainingWays, closure: Callable[[], Any], batch: Any, *, is_open: bool = False) -> None:
    """Update the weights with the gradients that `closure` computes, or with all in one where `whole_step` can."""
    window, progress = loop.window, loop.automatic_optimization.optim_progress.optimizer
    counted = () if is_open else (progress.step.total, progress.step.current)  # open: the strategy itself accumulates
    for counts in counted:
        counts.ready += 1
    whole = None
    try:
        if loop.whole_step is None or loop.trainer.accumulate_grad_batches > 1:
            ways.update(closure)
        else:
            whole = loop.whole_step(batch, lambda: ways.update(closure))
    except NoUpdate:
        for counts in counted:
            counts.ready -= 1
        return
    if whole is not None:
        window.output, window.loss = whole, whole["loss"].detach()
        for counts in (progress.zero_grad.total, progress.zero_grad.current):
            counts.increment_by(1)
    elif batch is not None and not window.n_calls:
        raise ConfigError(
            f"{type(ways.optimizer).__name__}.step has not called its closure, which computes the loss and the gradients.",
            remedy="Begin its step(self, closure) with: loss = closure().",
        )
    window.n_added, window.has_stepped = 0, not is_open
    for counts in counted:
        counts.completed += 1


def compute_guarded(loop: OwnEpochLoop, ways: TrainingWays, batch: Any, compute: Callable[[], None]) -> None:
    """`compute`, where an error outside of the step pauses the run, too: the batch is computed again after a fix."""
    window, guard, zero_grad = loop.window, loop.module.guard, loop.automatic_optimization.optim_progress.optimizer.zero_grad
    assert guard is not None
    meter = loop.module.owner.train_state.meters["train"]
    n_recorded, n_zeroed = meter.n_batches, zero_grad.total.ready
    while True:
        try:
            compute()
            return
        except Exception as error:
            if guard.is_final(error):
                raise
            if meter.n_batches > n_recorded:
                meter.drop_newest()
                loop.module.forget_newest()
            n_again = zero_grad.total.ready - n_zeroed
            for counts in (zero_grad.total, zero_grad.current):
                counts.ready -= n_again
                counts.started = counts.completed = counts.ready
            n_lost, window.n_added = window.n_added, 0
            ways.set_to_none()
            lost = f"the gradients of the {n_lost} batches before it in this window are lost" if n_lost else ""
            if not guard.repaired(error, "the backward pass", batch, lost=lost):
                window.output, window.loss, window.is_left_out = None, None, False
                return


def follow(loop: OwnEpochLoop, *, is_late: bool = False) -> bool:
    """What follows a batch, in Lightning's order: logs, a validation, plateau schedules, counters, a state, requests.

    Returns whether the epoch is over. `is_late`: that the batch was the last is known only now, after the loader has ended.
    """
    pl_trainer, window, is_last = loop.trainer, loop.window, loop.is_last()
    validates, validates_after = loop.find_validation(is_late=is_late)
    logs = window.has_stepped and bool(pl_trainer.loggers)
    logs = logs and are_loggers_due(loop._batches_that_stepped, pl_trainer.log_every_n_steps, is_stopping=pl_trainer.should_stop)
    if is_last or validates or validates_after or logs:
        publish(pl_trainer, loop._results, on_step=True)
    if logs:
        pl_trainer._logger_connector.update_train_step_metrics()
    if validates:
        loop.run_validation()
    if window.has_stepped and pl_trainer.strategy.lr_scheduler_configs:
        loop._update_learning_rates("step", update_plateau_schedulers=True)
    loop._batches_that_stepped += window.has_stepped
    loop.n_updates = loop.updates.completed
    loop.validate_next = loop.validate_last = False
    if loop.boundary_due or pl_trainer.should_stop:
        loop.notify_boundary()
    if validates_after:
        loop._batches_that_stepped -= window.has_stepped  # what is logged has the step of the last batch
        loop.run_validation()
        loop._batches_that_stepped += window.has_stepped
    if pl_trainer.received_sigterm and not is_last:
        raise SIGTERMException
    if loop.control.run_state.requested:
        loop.attend()
    return loop.is_over()


def end_late(loop: OwnEpochLoop, ways: TrainingWays) -> None:
    """The loader has ended, and its last batch was not known as the last: do what comes with a last batch."""
    pl_trainer, module, window, current = loop.trainer, loop.module, loop.window, loop.batch_progress.current

    def closure() -> Tensor | None:
        ways.before_step()
        return window.newest_loss

    if 0 < loop.window_start == current.ready:
        for callback in callbacks_of(pl_trainer, BoundaryCallback):
            callback.on_no_rest(pl_trainer, module)
    is_open = current.ready > 0 and loop._should_accumulate()
    loop.batch_progress.is_last_batch, window.has_stepped = True, False
    if is_open:  # a window ends with its epoch
        update(loop, ways, closure, None)
    loop.step_schedules(is_last=True)
    for recorder in callbacks_of(pl_trainer, RecorderCallback) if pl_trainer.lr_scheduler_configs else ():
        recorder.read_rates()  # behind these schedules, as where the end is known
    vars(module)["_current_fx_name"] = "on_train_batch_end"  # in which the pass ends otherwise
    module.end_train_pass()
    vars(module)["_current_fx_name"] = None
    follow(loop, is_late=True)


# -- what it works with
_HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_HOOKS += ("on_train_batch_end",)

# Does forward, backward and the optimizer's step of a batch in one: given the batch and a function that does them in the usual way, it
# returns what the step returned, its loss without a gradient, or None where it has called that function
WholeStep = Callable[[Any, Callable[[], None]], dict[str, Any] | None]


class Window:
    """The batches whose gradients make one update, and the newest of them."""

    n_added = 0  # batches whose gradients are there since the last update
    newest_loss: Tensor | None = None  # of any batch of the epoch, without its graph
    # Of the newest batch
    n_calls = 0  # of its step: LBFGS and SAM compute it several times
    is_left_out = False  # it has no part in the window, on any rank
    has_stepped = True  # with it the weights were updated
    output: Any = None  # of its step
    loss: Tensor | None = None  # without its graph, divided by the batches of a window

    def output_for_hooks(self, module: StepModule, batch: Any) -> dict[str, Any] | None:
        """What `on_train_batch_end` gets."""
        if not module.automatic_optimization:
            return dict(self.output or {})
        if self.loss is None or type(self.output) is LeftOut:
            return None if batch is None else {}
        return {**self.output, "loss": self.loss}


class TrainingWays(Ways):
    """`Ways`, and how gradients are computed and the weights updated."""

    def __init__(self, pl_trainer: L.Trainer, listeners: Listeners) -> None:
        super().__init__(pl_trainer, "training_step")
        self.listeners, self.clip_val = listeners, pl_trainer.gradient_clip_val
        self.optimizer: Any = next(iter(self.strategy.optimizers), None)
        self.set_to_none = find_zero_grad(self.optimizer) if self.optimizer is not None else bool
        self._compute_gradients = find_backward()
        is_by_hand = self.optimizer is None or not self.module.automatic_optimization
        self.update = find_step(self.optimizer, gradients_first=True) if self.is_short and not is_by_hand else self._update_whole

    def are_newest(self) -> bool:
        """Whether nothing that these ways were chosen by was set since."""
        optimizers = self.strategy.optimizers
        return self.clip_val == self.pl_trainer.gradient_clip_val and (not optimizers or optimizers[0] is self.optimizer)

    def zero_gradients(self, progress: Any) -> None:
        """Set the gradients to None, with Lightning's hook and counters."""
        both = progress.total, progress.current
        for counts in both:
            counts.ready += 1
        if "on_before_zero_grad" in self.listeners.hooks:
            self.listeners.call("on_before_zero_grad", self.optimizer)
        for counts in both:
            counts.started += 1
        self.set_to_none()
        for counts in both:
            counts.completed += 1

    def backward(self, loss: Tensor) -> None:
        vars(self.module)["_current_fx_name"] = "backward"
        if not self.is_short:
            self.strategy.backward(loss, self.optimizer)
            return
        hooks = self.listeners.hooks
        if "on_before_backward" in hooks:
            self.listeners.call("on_before_backward", loss)
        self._compute_gradients(loss)
        if "on_after_backward" in hooks:
            self.listeners.call("on_after_backward")

    def before_step(self) -> None:
        """Call `on_before_optimizer_step`, where the precision plugin does not."""
        if self.is_short and "on_before_optimizer_step" in self.listeners.hooks:
            self.listeners.call("on_before_optimizer_step", self.optimizer)

    def _update_whole(self, closure: Callable[[], Any]) -> None:
        closure = torch.enable_grad()(closure)  # the whole step of an optimizer may be under no_grad
        with gradients_first(self.optimizer) if has_hooks_before(self.optimizer) else nullcontext():
            self.strategy.optimizer_step(self.optimizer, closure, self.module)


def is_window_closed(pl_trainer: L.Trainer, n_batches: int) -> bool:
    """Are all windows of accumulated gradients closed after the first `n_batches` of the epoch?"""
    loop = pl_trainer.fit_loop.epoch_loop
    start = loop.window_start if isinstance(loop, OwnEpochLoop) else 0
    return (n_batches - start) % pl_trainer.accumulate_grad_batches == 0


class OwnEpochLoop(TrainingEpochLoop):
    """What an epoch on a trainer's own steps is run with, in the place of Lightning's epoch loop: its counters, and what is asked of it.

    `control`: the requests to the run. `start_at`: how many batches of the first epoch are finished already. `window_start`: the batch
    from which on windows of accumulated gradients are counted. `validate_next`: validate after this batch, once; `validate_last`: after the
    state that ends the run is taken. `validate_steps`, `validate_epochs`: validate after each so many updates, and at the end of each so
    many epochs, too. `boundary_due`: notify the boundary callbacks after this batch, once. `whole_step`: see `WholeStep`.
    """

    control = Control()  # of no run
    start_at = window_start = 0
    validate_next = validate_last = boundary_due = validates = skips_backward = False
    validate_steps: int | None = None
    validate_epochs: int | None = None
    n_updates = 0  # before this batch
    whole_step: WholeStep | None = None
    updates: Any = None  # Lightning's counter of them

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._results = Results(training=True)
        self.window = Window()

    @property
    def module(self) -> StepModule:
        module = self.trainer.lightning_module
        assert isinstance(module, StepModule)
        return module

    def run(self, data_fetcher: DataFetcher) -> None:
        with explain_full_memory(self):
            self.reset()
            self.on_run_start(data_fetcher)
            train_epoch(self, data_fetcher)
            if isinstance(data_fetcher, LiveFetcher):
                data_fetcher.finish()

    def reset(self) -> None:
        super().reset()
        self.window, self.window_start = Window(), self.start_at
        if self.start_at:
            for unit in vars(self.batch_progress.current):  # ready, started, processed, completed
                setattr(self.batch_progress.current, unit, self.start_at)
            self.start_at = 0

    def on_run_start(self, data_fetcher: DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        pl_trainer, fit_loop = self.trainer, self.trainer.fit_loop
        self.updates = updates_of(pl_trainer)
        self.n_updates, self.validates = self.updates.completed, pl_trainer.enable_validation
        self.skips_backward = fit_loop._skip_backward  # SWA's pass for batch norm
        if self.control.requested:
            self.attend()
        if isinstance(data_fetcher, LiveFetcher):
            fit_loop.expect()  # once more: callbacks have begun the epoch  # pyright: ignore[reportAttributeAccessIssue]
            # Several processes exchange their gradients with those of the last batch of a window
            windows = pl_trainer.accumulate_grad_batches > 1 and pl_trainer.world_size > 1
            data_fetcher.must_know = self._stays_open if windows else None

    def _stays_open(self, n_batches: int) -> bool:
        return not is_window_closed(self.trainer, n_batches)

    # -- where the epoch is
    def is_last(self) -> bool:
        """Was this the last batch, of the loader or of the run?"""
        return self.batch_progress.is_last_batch or -1 < self.max_steps <= self.updates.completed

    def is_over(self) -> bool:
        return self.is_last() or (self.trainer.should_stop and self.done)

    @property
    def done(self) -> bool:
        """Lightning's, but an open window is finished: a stop inside it would lose its gradients."""
        return super().done and (self.skips_backward or not self._should_accumulate())

    def _should_accumulate(self) -> bool:
        """Lightning's, but without an update in the pass for batch norm that weight averaging adds: Lightning's has old gradients."""
        return self.skips_backward or super()._should_accumulate()

    def _accumulated_batches_reached(self) -> bool:
        return is_window_closed(self.trainer, self.batch_progress.current.ready)

    def _num_ready_batches_reached(self) -> bool:
        """Whether this was the last batch. Lightning compares with the length that the loader had when the run began."""
        progress = self.batch_progress
        if progress.is_last_batch or isinstance(self.trainer.fit_loop._data_fetcher, LiveFetcher):
            return progress.is_last_batch
        return progress.current.ready == self.trainer.num_training_batches

    # -- validations
    def find_validation(self, *, is_late: bool = False) -> tuple[bool, bool]:
        """Whether a validation follows this batch, and whether one follows the state that is taken after it, because the run ends here.

        A whole epoch, and an open window, have the validations that any epoch has: a run that is resumed there has no more either.
        """
        if not self.validates:
            return False, False
        pl_trainer, is_last = self.trainer, self.batch_progress.is_last_batch
        if self.validate_next or self.is_step_due() or (is_last and self._is_epoch_due()) or self._is_interval_over(is_late):
            return True, False
        wants = self.validate_last
        if pl_trainer.should_stop and not wants:
            wants = self._should_check_val_epoch() and may_stop(pl_trainer) and not (is_last or self._should_accumulate())
        is_after = wants and bool(callbacks_of(pl_trainer, BoundaryCallback))
        return wants and not is_after, is_after

    def _is_interval_over(self, is_late: bool) -> bool:
        """Whether a validation is due by Lightning's intervals. `is_late`: those of batches were looked at already."""
        pl_trainer: Any = self.trainer
        every: float | None = pl_trainer.val_check_batch
        if every is None:
            return self._should_check_val_epoch() and time.monotonic() - pl_trainer._last_val_time >= pl_trainer._val_check_time_interval
        return (every == math.inf or not is_late) and is_validation_due(
            n_in_epoch=self.batch_progress.current.ready,
            n_in_run=self.batch_progress.total.ready,
            is_last=self.batch_progress.is_last_batch,
            epoch=pl_trainer.fit_loop.epoch_progress.current.completed,
            every_n_epochs=pl_trainer.check_val_every_n_epoch,
            every_n_batches=every,
        )

    def is_step_due(self) -> bool:
        """Whether this batch has made the update after which `validate_steps` wants a validation; a batch may make several."""
        n = self.validate_steps
        return n is not None and self.updates.completed // n > self.n_updates // n

    def _is_epoch_due(self) -> bool:
        n = self.validate_epochs
        return n is not None and (self.trainer.current_epoch + 1) % n == 0

    def _should_check_val_fx(self, data_fetcher: DataFetcher) -> bool:
        return any(self.find_validation())

    def run_validation(self) -> None:
        """Validate between two batches, or behind the last one."""
        if not self._should_accumulate():
            names = vars(self.module)
            names["_current_fx_name"] = "on_validation_model_zero_grad"
            self.module.on_validation_model_zero_grad()
            names["_current_fx_name"] = None
        self._validate()

    def validate(self) -> None:
        """Validate now, because it was requested between two batches."""
        self.module.isolate_validation()
        try:
            self._validate()
        finally:
            self.module.restore_training()
        self.notify_boundary()

    def _validate(self) -> None:
        pl_trainer, connector = self.trainer, self.trainer._logger_connector
        first_loop_iter, pl_trainer.validating = connector._first_loop_iter, True
        try:
            self.val_loop.run()
        finally:
            pl_trainer.training, connector._first_loop_iter = True, first_loop_iter

    # -- what comes with a batch
    def skip_rest(self) -> None:
        """`on_train_batch_start` returned -1: the epoch ends here, and with it a window."""
        self.batch_progress.increment_by(0, is_last_batch=True)
        self.window.has_stepped = True
        self.batch_progress.increment_processed()
        self.step_schedules(is_last=True)

    def step_schedules(self, *, is_last: bool) -> None:
        """Step Lightning's schedules after a batch, but for those on a plateau."""
        if self.trainer.strategy.lr_scheduler_configs:
            if self.window.has_stepped:
                self._update_learning_rates("step", update_plateau_schedulers=False)
            if is_last:
                self._update_learning_rates("epoch", update_plateau_schedulers=False)

    def notify_boundary(self) -> None:
        """A batch is over, with the validation and the schedules that follow it: let callbacks take a state."""
        self.boundary_due = False
        for callback in callbacks_of(self.trainer, BoundaryCallback):
            callback.on_batch_over(self.trainer, self.module)

    def attend(self) -> None:
        """Execute the requests to the run, between two batches. An open window is finished before the run ends, and so is an epoch."""
        self.control.attend(Boundary(self.trainer, "train", may_leave=not (self._should_accumulate() or self.done)))
