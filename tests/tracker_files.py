"""What the trackers have of a run, read back from what their real clients have written into its folder."""

from __future__ import annotations

import csv
import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nbtrain.loggers.neptune_export import read_neptune

Series = dict[str, list[tuple[int, float]]]  # by name: (step, value)


def _by_name(points: Iterator[tuple[str, int, float]]) -> Series:
    found: Series = {}
    for name, step, value in points:
        found.setdefault(name, []).append((step, value))
    return found


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records in a .wandb file: LevelDB's log format behind seven bytes."""
    place, parts = 7, []
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, n, kind = struct.unpack("<IHB", content[place : place + 7])
        parts.append(content[place + 7 : place + 7 + n])
        place += 7 + n
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def read_wandb(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[int]]:
    """The history rows, the summary and the exit codes of all parts of a wandb run."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, summary, exits = [], {}, []
    for file in sorted(folder.rglob("run-*.wandb")):
        for content in wandb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            if record.HasField("history"):
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
            elif record.HasField("summary"):
                summary |= {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.summary.update}
            elif record.HasField("exit"):
                exits.append(record.exit.exit_code)
    return rows, summary, exits


def wandb_series(folder: Path) -> Series:
    rows = [row for row in read_wandb(folder)[0] if "trainer/global_step" in row]
    own = ("_step", "_runtime", "_timestamp", "trainer/global_step")
    return _by_name(
        (name, row["trainer/global_step"], value)
        for row in rows
        for name, value in row.items()
        if name not in own and isinstance(value, (int, float))
    )


def neptune_series(folder: Path) -> Series:
    (entries,) = read_neptune(folder).values()
    return _by_name((entry.name, int(entry.step), entry.value) for entry in entries if entry.step is not None)


def tensorboard_log(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    log.Reload()
    return log


def tensorboard_series(folder: Path) -> Series:
    log = tensorboard_log(folder)
    return {name: [(event.step, event.value) for event in log.Scalars(name)] for name in log.Tags()["scalars"]}


def mlflow_series(folder: Path) -> Series:
    from mlflow.tracking import MlflowClient

    client, run = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}"), (folder / "mlflow-run-id").read_text()
    names = client.get_run(run).data.metrics
    return {name: [(metric.step, metric.value) for metric in client.get_metric_history(run, name)] for name in names}


def trackio_rows(folder: Path, columns: str) -> list[tuple[Any, ...]]:
    """What trackio has of the run in `folder`: `columns` of a table."""
    from trackio.utils import TRACKIO_DIR  # read once a process, which may have run other projects: a database each

    query, name = f"select {columns} where run_name = ?", f"{folder.parent.name}-{folder.name}"
    return [row for file in TRACKIO_DIR.glob("*.db") for row in sqlite3.connect(file).execute(query, (name,))]


def trackio_series(folder: Path) -> Series:
    rows = [(step, json.loads(text)) for step, text in trackio_rows(folder, "step, metrics from metrics")]
    return _by_name((name, step, float(value)) for step, row in rows for name, value in row.items() if not isinstance(value, dict))


def csv_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of the training log."""
    with open(folder / "training_log.csv", newline="") as file:
        return list(csv.DictReader(file))


def csv_series(folder: Path) -> Series:
    columns = {"train_loss": "train/loss_step", "grad_norm": "train/grad_norm_step", "val_loss": "val/loss"}
    rows = csv_rows(folder)
    return _by_name((name, int(row["step"]), float(row[column])) for row in rows for column, name in columns.items() if row[column])


SERIES: dict[str, Callable[[Path], Series]] = {
    "wandb": wandb_series,
    "neptune": neptune_series,
    "csv": csv_series,
    "tensorboard": tensorboard_series,
    "mlflow": mlflow_series,
    "trackio": trackio_series,
}


def metric_values(tracker: str, folder: Path) -> set[tuple[str, int, float]]:
    """(name, step, value) of all that a tracker has of the metrics, with names such as `train/loss`."""
    found = {name if "/" in name else name.replace("_", "/", 1): points for name, points in SERIES[tracker](folder).items()}
    return {(name, *point) for name, points in found.items() if name.startswith(("train/", "val/")) for point in points}
