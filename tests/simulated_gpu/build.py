"""Compile device.cpp for the installed torch, once: the library stays in build/ until torch, the compiler or the source changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).parent / "device.cpp"
BUILT = Path(__file__).parents[2] / "build" / "simulated_gpu"
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wno-interference-size")


def torch_folder() -> Path:
    """torch's folder, without importing it: the devices must be there before."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"
    return Path(spec.origin).parent


def library() -> Path:
    """The compiled devices. Needs g++, or the compiler that `CXX` names."""
    compiler, torch = os.environ.get("CXX", "g++"), torch_folder()
    key = "\n".join([SOURCE.read_text(), version("torch"), str(torch), compiler, *FLAGS])
    path = BUILT / f"device-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, f"-I{torch / 'include'}", str(SOURCE), "-o", str(half), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        half.rename(path)
    return path
