"""CUDA devices on a machine without one: `load()` before torch is imported, and `torch.cuda` has two of them.

Tensors say `cuda:0` and hold memory that is counted and can run out; kernels compute on the CPU. What a CPU's clock doesn't show is
counted: kernels that are launched, copies, and times at which the host waits (`counts`). What a real device would do later is checked: a
stream that reads what another one has written, without an event between them, is an error; a copy that doesn't block arrives when
something waits for it.

It can't show the numerics of CUDA's kernels, what depends on timing, NCCL, Triton, or how long anything takes.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import os
import sys
from pathlib import Path
from typing import Any

from .build import library, torch_folder

SITE = str(Path(__file__).parent / "site")


class _BeforeTorchCuda(importlib.abc.MetaPathFinder):
    """`torch.cuda` looks for what its C++ half has when it is imported: just before that, it is there."""

    def __init__(self, devices: ctypes.CDLL) -> None:
        self.devices = devices

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch.cuda":
            sys.meta_path.remove(self)
            from .torch_names import give

            give(self.devices)


def load() -> None:
    """Bring the simulated devices into this process.

    A process that it starts has them too, if its environment has `NBTRAIN_TEST_DEVICE=simulated`. A second call does nothing. Raises
    RuntimeError where torch is imported already.
    """
    if any(isinstance(finder, _BeforeTorchCuda) for finder in sys.meta_path) or f"{__name__}.torch_names" in sys.modules:
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, and has no CUDA devices. Call simulated_gpu.load() first.")
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, _BeforeTorchCuda(ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)))
    paths = [SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
