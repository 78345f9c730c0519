"""One thread for each process: two test workers, kernels and commands share the cores, and OpenMP's waiting threads would starve them."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
