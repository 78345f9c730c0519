"""A notebook that is no part of the Ray cluster connects to its head by "ray://HOST:PORT"."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import MultiGPUAddon

PORT = 10001  # that of `ray start --head` for clients
ENVIRONMENT = os.environ | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def address() -> Iterator[str]:
    ray = Path(sys.executable).with_name("ray")
    options = [
        "--port=0",
        f"--ray-client-server-port={PORT}",
        "--num-cpus=4",
        "--object-store-memory=100000000",
        "--include-dashboard=false",
    ]
    head = subprocess.Popen([ray, "start", "--head", *options, "--block"], env=ENVIRONMENT, start_new_session=True)
    try:
        end_s = time.monotonic() + 90
        while socket.socket().connect_ex(("127.0.0.1", PORT)):
            assert time.monotonic() < end_s and head.poll() is None
            time.sleep(0.2)
        yield f"ray://127.0.0.1:{PORT}"
    finally:
        head.send_signal(signal.SIGTERM)  # it ends all that it has started
        head.wait(60)


def test_runs_from_outside_of_the_cluster(address: str, tmp_path: Path) -> None:
    program = Path(__file__).with_name("client.py")
    done = subprocess.run([sys.executable, program, address, tmp_path], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    paused, status, marks = json.loads((tmp_path / "found.json").read_text())
    assert (paused, status) == ("paused", "completed")
    assert marks == ["Rank 1 was lost: its process or its node has ended. The run continues from epoch=1-step=6.ckpt."]
    here = make_trainer(Regress.add_on(MultiGPUAddon), device=["cpu", "cpu"], seed=1)
    torch.manual_seed(4)
    here.run(3, make_loader(batch_size=8), make_valid())
    weights = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(weights[name], value) for name, value in here.model.state_dict().items())
