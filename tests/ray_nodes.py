"""A real Ray cluster of two nodes, which this machine pretends to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_log_monitor": False}


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    """Two nodes of two CPUs, so that workers of two CPUs are on different nodes."""
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "no_monitor": True})
    try:
        made.add_node(**NODE)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
