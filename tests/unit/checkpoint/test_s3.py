"""Weights and checkpoints in S3, by a server of this machine that speaks its protocol.

`make faults` installs it beside the environment, because its packages would change versions there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STORE = Path(sys.prefix) / "s3"  # moto and s3fs
SCRIPT = """\
import os
import sys
from pathlib import Path

import fsspec
from moto.server import ThreadedMotoServer
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights

from nbtrain import CheckpointError, StateManagerAddon


def refused(call, *args):
    try:
        call(*args)
    except CheckpointError as error:
        print(str(error).partition("\\n")[0])


server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
folder, store = Path(sys.argv[1]), fsspec.filesystem("s3")
store.mkdir("bucket")
for name in ("a.pt", "deep/er/a.safetensors"):
    trainer, other = make_trainer(model=make_model(1)), make_trainer()
    trainer.save_model(f"s3://bucket/{name}")
    other.apply_weights(f"s3://bucket/{name}")
    print(same_weights(trainer.model, other.model))
    refused(trainer.save_model, f"s3://bucket/{name}")
for save_format in ("ckpt", "safetensor"):
    kind, options = Regress.add_on(StateManagerAddon), {"save_format": save_format}
    whole = make_trainer(kind, save_path=folder / save_format, **options)
    whole.run(1, make_loader(), make_valid())
    last = (whole.run_dir / "checkpoints" / ("last.ckpt" if save_format == "ckpt" else "last")).resolve()
    store.put(str(last), f"bucket/{last.name}", recursive=last.is_dir())
    whole.run(1, make_loader(), make_valid())
    resumed = make_trainer(kind, save_path=folder / f"{save_format} resumed", **options)
    resumed.run(2, make_loader(), make_valid(), resume=f"s3://bucket/{last.name}")
    print(same_weights(whole.model, resumed.model), resumed.counts == whole.counts)
refused(make_trainer().apply_weights, "s3://bucket/none.pt")
refused(make_trainer().save_model, "s3://none/a.pt")
server.stop()
refused(make_trainer().save_model, "s3://bucket/b.pt")
"""
TOLD = """\
True
's3://bucket/a.pt' exists.
True
's3://bucket/deep/er/a.safetensors' exists.
True True
True True
There is no file 's3://bucket/none.pt'.
's3://none/a.pt' could not be written: The specified bucket does not exist.
's3://bucket/b.pt' could not be written: Could not connect to the endpoint URL: "http://127.0.0.1:PORT/bucket/b.pt".
"""


@pytest.mark.long
def test_weights_and_states_go_to_s3_and_come_back(tmp_path: Path) -> None:
    if not STORE.is_dir():
        pytest.skip("`make faults` installs moto and s3fs")
    root = Path(__file__).parents[3]
    variables = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}
    variables |= {"PYTHONPATH": os.pathsep.join([str(STORE), str(root), str(root / "tests")]), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert re.sub(r":\d+/", ":PORT/", done.stdout) == TOLD, done.stderr
