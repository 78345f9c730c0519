"""`make cluster` runs these tests, in an environment of their own: collected only where Ray is installed."""

from __future__ import annotations

import importlib.util

collect_ignore = ["test_ray.py"] if importlib.util.find_spec("ray") is None else []
