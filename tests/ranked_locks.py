"""Locks that know their rank: a thread that holds one may take only those of higher ranks, so that no two threads wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

# The modules of nbtrain that have locks, in the order in which a thread takes them. A lock of the first may be held when one of the
# second is taken, never the other way round.
ORDER = (
    "run.handle",  # of two interrupts
    "run.lightning_trainer",  # a Lightning trainer is made; Lightning's messages
    "engine.control",  # a run: its state, its requests and its events
    "history.event_group",  # a run folder
    "views.cell_runs",  # of several runs in one cell
    "views.notebook",
    "loggers.background",  # a queue of calls; the levels of `logging`
    "loggers.wandb",
    "loggers.local",
    "distributed.worker",  # a pipe
    "loops.fast_step",  # a toy is trained, once
    "deferred_imports",  # an import may happen anywhere
)
_HELD = threading.local()
_KINDS = (type(threading.Lock()), type(threading.RLock()))
wrong: list[str] = []  # what was taken in the wrong order, because a thread's error is seen by nothing


def _held() -> list[RankedLock]:
    if not hasattr(_HELD, "locks"):
        _HELD.locks = []
    return _HELD.locks


class RankedLock:
    """`lock`, which asserts that no lock of its own or a higher rank is held where it is taken, except itself."""

    def __init__(self, lock: Any, rank: int) -> None:
        self.lock, self.rank = lock, rank

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._check()
        got = self.lock.acquire(blocking, timeout)
        if got:
            _held().append(self)
        return got

    def _check(self) -> None:
        for other in _held():
            if other is not self and other.rank >= self.rank:
                wrong.append(f"{ORDER[self.rank]} after {ORDER[other.rank]}")
                raise AssertionError(wrong[-1])

    def release(self) -> None:
        self.lock.release()
        _held().remove(self)

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()

    # -- what a Condition needs of a lock that a thread may take several times
    def _is_owned(self) -> bool:
        return self in _held()

    def _release_save(self) -> tuple[int, Any]:
        n = _held().count(self)
        _HELD.locks = [lock for lock in _held() if lock is not self]
        return n, self.lock._release_save()

    def _acquire_restore(self, saved: tuple[int, Any]) -> None:
        self._check()
        self.lock._acquire_restore(saved[1])
        _held().extend([self] * saved[0])


class RankedThreading:
    """The module `threading`, as a module of nbtrain sees it: its locks are ranked."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Lock(self) -> RankedLock:
        return RankedLock(threading.Lock(), self._rank)

    def RLock(self) -> RankedLock:
        return RankedLock(threading.RLock(), self._rank)

    def Condition(self) -> threading.Condition:
        return threading.Condition(self.RLock())  # pyright: ignore[reportArgumentType]


def rank_locks(module: ModuleType, rank: int, replace: Callable[[Any, str, Any], None]) -> None:
    """Let `module` make ranked locks, and `replace` those that it and its objects have."""
    replace(module, "threading", RankedThreading(rank))
    owners = [module, *(item for item in vars(module).values() if getattr(type(item), "__module__", "") == module.__name__)]
    for owner in owners:
        for name, lock in list(getattr(owner, "__dict__", {}).items()):
            if isinstance(lock, _KINDS):
                replace(owner, name, RankedLock(lock, rank))
