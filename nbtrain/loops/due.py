"""When a validation is due, and when loggers are fed: two pure functions."""

from __future__ import annotations

import math

# %% auto #0
__all__ = ["is_validation_due", "are_loggers_due"]


def is_validation_due(
    *, n_in_epoch: int, n_in_run: int, is_last: bool, epoch: int, every_n_epochs: int | None, every_n_batches: float | None
) -> bool:
    """Whether a validation follows a batch, by Lightning's intervals.

    Args:
        n_in_epoch: The batches of this epoch, with this one.
        n_in_run: The batches of the run, with this one.
        is_last: Whether no batch of the epoch follows.
        epoch: The finished epochs.
        every_n_epochs: Lightning's `check_val_every_n_epoch`. None: batches are counted over epochs.
        every_n_batches: Lightning's `val_check_batch`. inf: at the end of an epoch. None: by time, which is not decided here.
    """
    if every_n_batches is None:
        return False
    if every_n_epochs is not None and (epoch + 1) % every_n_epochs:
        return False
    if every_n_batches == math.inf:
        return is_last
    n = n_in_run if every_n_epochs is None else n_in_epoch
    return n % every_n_batches == 0


def are_loggers_due(n_updates: int, every_n_updates: int, *, is_stopping: bool) -> bool:
    """Whether loggers get the numbers of a batch with an update: each `every_n_updates` (0: never), and where the run is asked to end.

    Args:
        n_updates: The batches with an update that loggers count, before this one.
        every_n_updates: Lightning's `log_every_n_steps`.
        is_stopping: Whether `should_stop` is set.
    """
    if every_n_updates == 0:
        return False
    return is_stopping or (n_updates + 1) % every_n_updates == 0
