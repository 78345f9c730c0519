"""CUDA devices on a machine without one: `load()` before torch is imported, and `torch.cuda` has two of them. Or `torch.xpu` has them.

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

    def __init__(self, devices: ctypes.CDLL, kind: str) -> None:
        self.devices, self.kind = devices, kind

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == f"torch.{self.kind}":
            from .torch_names import give

            give(self.devices, self.kind)
        elif name == "torch.distributed.distributed_c10d" and self.kind == "cuda":
            from .torch_names import give_collectives

            give_collectives(self.devices)


KINDS = {"simulated": "cuda", "simulated-xpu": "xpu"}  # by NBTRAIN_TEST_DEVICE: what torch calls the devices


def load() -> None:
    """Bring the simulated devices into this process: XPUs if the environment has `NBTRAIN_TEST_DEVICE=simulated-xpu`, else CUDA's.

    A process that it starts has them too, if its environment has `NBTRAIN_TEST_DEVICE=simulated` or that. A second call does nothing.
    Raises RuntimeError where torch is imported already.
    """
    kind = KINDS.get(os.environ.get("NBTRAIN_TEST_DEVICE", ""), "cuda")
    if any(isinstance(finder, _BeforeTorch) for finder in sys.meta_path):
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, and has no CUDA devices. Call simulated_gpu.load() first.")
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    if kind == "xpu":
        os.environ.setdefault(
            "ZE_AFFINITY_MASK", "0.0"
        )  # of a form for which torch.xpu asks torch._C, and not Intel's driver, for the number
    sys.meta_path.insert(0, _BeforeTorch(ctypes.CDLL(str(library(kind)), mode=ctypes.RTLD_GLOBAL), kind))
    paths = [SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
