"""What a device was asked for: launches, waits, copies; and which kernels, where that is asked."""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .torch_names import devices


@dataclass
class Counts:
    """Kernels that were launched, times at which the host waited, and copies: to the device, to the host, on the device."""

    launches: int = 0
    waits: int = 0
    to_device: int = 0
    to_host: int = 0
    on_device: int = 0

    @classmethod
    def now(cls, index: int = 0) -> Counts:
        """All that the device has done in this process."""
        found = (ctypes.c_int64 * 5)()
        devices().simulated_counts(index, found)
        return cls(*found)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(other, name) for name in Counts.__dataclass_fields__))


@contextlib.contextmanager
def counted(index: int = 0) -> Iterator[Counts]:
    """What the block asks of the device; the numbers stand there when the block has ended."""
    result, before = Counts(), Counts.now(index)
    yield result
    result.__dict__.update((Counts.now(index) - before).__dict__)


@contextlib.contextmanager
def kernels() -> Iterator[Counter[str]]:
    """The names of the kernels that the block launches, with how often."""
    result: Counter[str] = Counter()
    devices().simulated_trace(1)
    yield result
    result.update(devices().simulated_names().decode().split())
    devices().simulated_trace(0)
