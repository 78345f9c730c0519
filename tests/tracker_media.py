"""A callback that shows three things once, and what each tracker then has of them, read back from what its client has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from tracker_files import read_wandb, tensorboard_log, trackio_rows

PICTURE = torch.linspace(0, 1, 3 * 6 * 5).view(3, 6, 5)
PIXELS = (PICTURE * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


class ShowsOnce(L.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.show("samples", PICTURE, caption="a ramp")
            trainer.show("prompt", "Once upon a time")
            trainer.show("values", torch.arange(10.0), kind="histogram")


def is_picture(path: Path) -> bool:
    """Whether it is the picture, enlarged above its caption."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    factor = (pixels.shape[1] - 2) // 5
    return np.array_equal(pixels[1 + factor // 2 :: factor, 1 + factor // 2 :: factor][:6, :5], PIXELS)


def check_wandb(folder: Path) -> None:
    rows = [row for row in read_wandb(folder)[0] if any("/_type" in name for name in row)]
    assert [row["trainer/global_step"] for row in rows] == [5, 5, 5]
    found = {name: value for row in rows for name, value in row.items()}
    (picture,), (table,) = folder.rglob(found["samples/path"]), folder.rglob(found["prompt/path"])
    assert is_picture(picture) and found["samples/caption"] == "a ramp"
    assert json.loads(table.read_text())["data"] == [["Once upon a time"]]
    assert sum(found["values/values"]) == 10 and found["values/bins"][-1] == 9


def check_tensorboard(folder: Path) -> None:
    log = tensorboard_log(folder)
    (image,), (text,), (histogram,) = log.Images("samples"), log.Tensors("prompt/text_summary"), log.Histograms("values")
    (folder / "a.png").write_bytes(image.encoded_image_string)
    assert is_picture(folder / "a.png") and text.tensor_proto.string_val == [b"Once upon a time"]
    assert (image.step, text.step, histogram.step) == (5, 5, 5)
    value = histogram.histogram_value
    assert (value.num, value.min, value.max, value.sum) == (10, 0, 9, 45) and value.sum_squares == pytest.approx(285)


def check_mlflow(folder: Path) -> None:
    (file,) = (folder.parent / "mlflow-artifacts").rglob("samples+step+5+*.png")
    assert is_picture(file)
    assert [path.read_text() for path in (folder.parent / "mlflow-artifacts").rglob("*-prompt.txt")] == ["Once upon a time"]
    assert [path.read_text()[:9] for path in (folder.parent / "mlflow-artifacts").rglob("*-values.csv")] == ["start,end"]


def check_trackio(folder: Path) -> None:
    rows: dict[str, Any] = {}
    for step, text in trackio_rows(folder, "step, metrics from metrics"):
        rows |= {name: (step, value) for name, value in json.loads(text).items() if name in ("samples", "prompt", "values")}
    assert {step for step, _ in rows.values()} == {5}
    (file,) = folder.parent.parent.rglob(Path(rows["samples"][1]["file_path"]).name)
    assert is_picture(file) and rows["prompt"][1]["_value"] == "Once upon a time" and sum(rows["values"][1]["values"]) == 10


def check_neptune(folder: Path) -> None:
    lines = [json.loads(line) for file in folder.rglob("data-*.log") for line in file.read_text().splitlines()]
    found = {"/".join(line["obj"]["path"]): line["obj"] for line in lines if line["obj"]["path"][0] == "shown"}
    (image,), (text,) = found["shown/samples"]["values"], found["shown/prompt"]["values"]
    assert image["step"] == text["step"] == 5 and text["value"] == "Once upon a time" and image["value"]["description"] == "a ramp"
    assert "shown/0001-000005-values" in found


def check_csv(folder: Path) -> None:
    assert is_picture(folder / "shown/0001-000005-samples.png")
    assert (folder / "shown/0001-000005-prompt.txt").read_text() == "Once upon a time"


CHECKS: dict[str, Callable[[Path], None]] = {
    "wandb": check_wandb,
    "neptune": check_neptune,
    "tensorboard": check_tensorboard,
    "mlflow": check_mlflow,
    "trackio": check_trackio,
    "csv": check_csv,
}
