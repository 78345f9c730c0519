"""Run a script on the simulated devices: `PYTHONPATH=tests python -m simulated_gpu tests/random_jobs.py 200`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from . import load

os.environ.setdefault("NBTRAIN_TEST_DEVICE", "simulated")
load()
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
