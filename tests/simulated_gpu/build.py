"""Compile device.cpp for the installed torch, once: the library stays in build/ until torch, the compiler or a source changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).parent / "device.cpp"
BUILT = Path(__file__).parents[2] / "build" / "simulated_gpu"
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-interference-size", "-Wno-attributes")


def torch_folder() -> Path:
    """torch's folder, without importing it: the devices must be there before."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"
    return Path(spec.origin).parent


def library(kind: str = "cuda") -> Path:
    """The compiled devices, which torch knows as `kind`: "cuda" or "xpu". Needs g++, or the compiler that `CXX` names."""
    compiler, torch = os.environ.get("CXX", "g++"), torch_folder()
    flags = [*FLAGS, *(["-DSIMULATED_XPU"] if kind == "xpu" else [])]
    sources = [path.read_text() for path in (SOURCE, SOURCE.with_name("collectives.h"))]
    key = "\n".join([*sources, version("torch"), str(torch), sysconfig.get_python_version(), compiler, *flags])
    path = BUILT / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", f"-I{sysconfig.get_path('include')}"]
        command = [compiler, *flags, *includes, str(SOURCE), "-o", str(half), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        half.rename(path)
    return path
