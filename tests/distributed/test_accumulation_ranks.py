"""Two processes share the windows of `AccumulationAddon`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.mark.long
def test_window_of_two_ranks_is_one_big_batch() -> None:
    tests = Path(__file__).parent.parent
    paths = os.pathsep.join(map(str, (tests.parent, tests, tests / "unit" / "addons")))
    shared = os.environ | {
        "PYTHONPATH": paths,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": "2",
        "NODE_RANK": "0",
    }
    command = [sys.executable, Path(__file__).with_name("accumulation_rank.py")]
    ranks = [
        subprocess.Popen(command, env=shared | {"LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
