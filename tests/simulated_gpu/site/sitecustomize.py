"""Processes that a test starts have the simulated devices too: this folder is in their PYTHONPATH (`simulated_gpu.load`)."""

import os
import sys

if os.environ.get("NBTRAIN_TEST_DEVICE", "").startswith("simulated"):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    import simulated_gpu

    simulated_gpu.load()
