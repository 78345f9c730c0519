"""Weights, checkpoints and records in S3, by a server of this machine that speaks its protocol.

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
import time
from pathlib import Path

import fsspec
import nbtrain
from moto.server import ThreadedMotoServer
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights

from nbtrain import CheckpointError, StateManagerAddon
from nbtrain.history.follow import recorded_events


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
record, file = (whole.run_dir / "events.jsonl").read_bytes(), "bucket/runs/run-001/events.jsonl"
store.pipe_file(file, record[: len(record) // 2])
followed = recorded_events("s3://bucket/runs")
half = list(iter(lambda: next(followed, None), None))
store.pipe_file(file, record)
rest = list(iter(lambda: next(followed, None), None))
print(len(half) > 0, len(rest) > 0, len(half) + len(rest) == record.count(b"\\n"))


class Stopping(kind):
    def train_step(self, batch):
        if self.counts.processed == 6 and not self.resumed:
            self.control.stop()
        return super().train_step(batch)


def until(condition):
    end_s = time.monotonic() + 60
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.1)


def in_store(run_dir):
    store.invalidate_cache()
    newest = (run_dir / "checkpoints" / "last.ckpt").resolve().name
    return store.exists(f"bucket/mirrored/run-001/checkpoints/{newest}")


for name in ("one disk", "another disk"):
    trainer = make_trainer(Stopping if name == "one disk" else kind, save_path=folder / name, seed=1)
    nbtrain.mirror(trainer, "s3://bucket/mirrored")
    trainer.run(2, make_loader(), make_valid(), resume="auto")
    until(lambda: in_store(trainer.run_dir))
whole = make_trainer(kind, save_path=folder / "undisturbed", seed=1)
whole.run(2, make_loader(), make_valid())
print(same_weights(whole.model, trainer.model), trainer.counts == whole.counts)
handle = trainer.run(10_000, make_loader(), make_valid(), background=True)
newest = f"bucket/mirrored/{trainer.run_dir.name}"
until(lambda: (store.invalidate_cache(), store.exists(f"{newest}/.writer"))[1])
nbtrain.command("s3://bucket/mirrored", "set", lr=1e-4)
nbtrain.command("s3://bucket/mirrored", "stop")
print(handle.wait().status, trainer.optimizer.param_groups[0]["lr"])
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
True True True
True True
stopped 0.0001
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
