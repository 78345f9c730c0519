"""CUDA devices on a machine without one: `load()` before torch is imported, and `torch.cuda` has two of them.

Tensors say `cuda:0` and hold memory that is counted and can run out; kernels compute on the CPU. What a CPU's clock doesn't show is
counted: kernels that are launched, copies, and times at which the host waits (`counts`). What a real device would do later is checked: a
stream that reads what another one has written, without an event between them, is an error; a copy that doesn't block arrives when
something waits for it. Processes that train together have a backend that torch knows as NCCL; gloo computes for it.

It can't show the numerics of CUDA's kernels, what depends on timing, NCCL's own errors, Triton, or how long anything takes.
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


class _BeforeTorch(importlib.abc.MetaPathFinder):
    """Modules of torch look for what its C++ half has when they are imported: just before that, it is there."""

    def __init__(self, devices: ctypes.CDLL) -> None:
        self.devices = devices

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in ("torch.cuda", "torch.distributed.distributed_c10d"):
            from .torch_names import give, give_collectives

            (give if name == "torch.cuda" else give_collectives)(self.devices)


def load() -> None:
    """Bring the simulated devices into this process.

    A process that it starts has them too, if its environment has `NBTRAIN_TEST_DEVICE=simulated`. A second call does nothing. Raises
    RuntimeError where torch is imported already.
    """
    if any(isinstance(finder, _BeforeTorch) for finder in sys.meta_path):
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, and has no CUDA devices. Call simulated_gpu.load() first.")
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, _BeforeTorch(ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)))
    paths = [SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
