"""The labels of what two runs differ in, in `compare` and behind the curve of a run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import cell
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain.errors import ConfigError
from nbtrain.events import Event, Progress
from nbtrain.history.differences import differences, kept, settings
from nbtrain.library.compare import compare
from nbtrain.library.ghost import loss_curve


def run(folder: Path, kind: type[Any] = Regress, *, batch_size: int = 16, n_epoch: int = 2, **options: Any) -> Any:
    trainer = make_trainer(kind, save_path=folder, log_bar=True, **options)
    trainer.run(n_epoch, make_loader(batch_size=batch_size), make_valid())
    return trainer


class Other(Regress):
    pass


def content(**arguments: Any) -> dict[str, Any]:
    return {"arguments": arguments, "runs": [{"n_epoch": 2}], "seed": 0}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (content(optimizer="Adam(lr=0.1)"), content(optimizer="Adam(lr=0.1)"), []),
        (content(optimizer="Adam(lr=0.003)"), content(optimizer="Adam(lr=0.01)"), ["lr 0.003 → 0.01"]),
        (content(optimizer="Adam(lr=0.1)"), content(optimizer="SGD(lr=0.1)"), ["optimizer Adam → SGD"]),
        (content(optimizer="SGD(lr=0.1)"), content(optimizer="SGD(lr=0.1, momentum=0.9)"), ["momentum none → 0.9"]),
        (content(optimizer="lambda p: Adam(p, lr=1)"), content(optimizer="lambda p: Adam(p, lr=2)"), ["lr 1 → 2"]),
        (content(model="Net(1,234 params)"), content(model="Net(width=8, 5,678 params)"), ["params 1,234 → 5,678", "width none → 8"]),
        (content(gradient_clip=1.0), content(gradient_clip=0.5), ["gradient_clip 1.0 → 0.5"]),
        (content(precision=None), content(precision="bf16"), ["precision none → bf16"]),
        (content(save_path="a"), content(save_path="b"), []),
        (content(a=1, b=1, c=1, d=1, e=1), content(a=2, b=2, c=2, d=2, e=2), ["a 1 → 2", "b 1 → 2", "c 1 → 2", "+ 2 more"]),
        (content(), {**content(), "seed": 1}, ["seed 0 → 1"]),
    ],
)
def test_labels(a: dict[str, Any], b: dict[str, Any], expected: list[str]) -> None:
    assert differences(a, b) == expected


def test_label_names_the_step_that_changed() -> None:
    text = "# ==== Digits · cells/cell-01.py\nclass Digits(Trainer):\n    def train_step(self, batch):\n        return 1\n\n"
    text += "    def test_step(self, b):\n        pass\n"
    assert differences({"steps": text}, {"steps": text.replace("return 1", "return 2")}) == ["train_step changed"]
    assert differences({"steps": text}, {"steps": text.replace("return 1", "return 1  # the same")}) == []
    assert differences({"steps": text}, {"steps": text + "\n# ==== loss_of · a.py\ndef loss_of():\n    pass\n"}) == ["loss_of added"]


def test_label_of_what_a_function_has_closed_over_is_its_plain_name() -> None:
    old, new = ({"sources": {"a": {"values": {"make.<lambda>.lr": value}}}} for value in ("0.001", "0.01"))
    assert differences(old, new) == ["lr 0.001 → 0.01"]


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"arguments": 1},
        {"runs": [3]},
        {"runs": {}},
        {"sources": [1]},
        {"sources": {"a": 1}},
        {"steps": "# ===="},
        {"steps": "# ==== f · cell\ndef f(x):\n    return " + " + ".join(3000 * ["x"])},
    ],
)
def test_damaged_record_has_no_label_and_is_no_error(damaged: dict[str, Any]) -> None:
    assert all(isinstance(label, str) for label in differences(damaged, content()) + differences(content(), damaged))
    assert all(isinstance(text, str) for text in settings(damaged).values())


def test_comparison_has_columns_for_what_differs(tmp_path: Path) -> None:
    class Bigger(Other):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": 2 * super().train_step(batch)["loss"]}

    class Wide(torch.nn.Linear):
        pass

    run(tmp_path, optimizer=torch.optim.SGD, batch_size=16)
    run(tmp_path, optimizer=torch.optim.SGD, batch_size=32)
    run(tmp_path, Bigger, optimizer=torch.optim.SGD, model=Wide(8, 1))
    first, second, third = (tmp_path / f"run-00{i}" for i in (1, 2, 3))
    comparison = compare(first, second)
    lines = [line.split() for line in comparison.table().splitlines()]
    assert [line[:2] for line in lines] == [["run", "batch_size"], ["run-001", "16"], ["run-002", "32"]]
    assert [text.get_text().removeprefix("★ ") for text in comparison.plot().axes[0].texts] == ["batch_size 16", "batch_size 32"]
    head, _, other = compare(first, third).table().splitlines()
    assert head.split()[:4] == ["run", "class", "model", "epoch"] and other.split()[:3] == ["run-003", "Bigger", "Wide"]
    assert "★" not in compare(first, third).table() and compare(first, second, third).table().count("★") == 1


def test_trainers_in_memory_have_the_columns_of_runs_in_folders() -> None:
    trainers = []
    for kind, size in ((Regress, 8), (Regress, 16), (Other, 8)):
        trainers.append(make_trainer(kind))
        trainers[-1].run(1, make_loader(batch_size=size), make_valid())
    rows = [line.replace("Regress 2", "Second").split()[:3] for line in compare(*trainers).table().splitlines()]
    assert rows == [["run", "class", "batch_size"], ["Regress", "Regress", "8"], ["Second", "Regress", "16"], ["Other", "Other", "8"]]


def test_edited_functions_of_compared_runs_are_words(tmp_path: Path) -> None:
    for factor in (1, 2):
        names: dict[str, Any] = {"Regress": Regress, "__name__": "cells"}
        step = f"loss = Regress.train_step(self, batch)['loss']\n        return {{'loss': {factor} * loss}}"
        cell(f"class Edited(Regress):\n    def train_step(self, batch):\n        {step}\n", names)
        run(tmp_path, names["Edited"])
    shown = compare(tmp_path / "run-001", tmp_path / "run-002")
    assert [line.split()[1] for line in shown.table().splitlines()] == ["train_step", "original", "edited"]
    text = "# ==== make.<locals>.<lambda> · a.py\nlambda x: x\n"
    found = settings({"arguments": {"optimizer": "lambda p: SGD(p, lr=0.1)"}, "steps": text})
    assert found["optimizer"] == "a function" and re.fullmatch("code [0-9a-f]{6}", found["lambda"]) and "<lambda>" not in found
    assert differences({"steps": text}, {"steps": text.replace(": x", ": -x")}) == ["lambda changed"]


def test_view_has_the_newest_other_run_of_the_class_behind_it(tmp_path: Path) -> None:
    assert run(tmp_path).view.board.find_ghost() is None
    run(tmp_path, Other)
    ghost = run(tmp_path, batch_size=8, n_epoch=3).view.board.find_ghost()
    assert ghost is not None and ghost[0] == "batch_size 16 → 8, n_epoch 2 → 3"
    assert ghost[1] == loss_curve(tmp_path / "run-001") and ghost[1][-1][0] == 10  # five updates an epoch


def test_compare_with_names_the_run(tmp_path: Path) -> None:
    run(tmp_path / "a", Other)
    trainer = make_trainer(compare_with=tmp_path / "a", log_bar=True)
    trainer.run(1, make_loader())
    ghost = trainer.view.board.find_ghost()
    assert ghost is not None and ghost[0] == "run-001"  # this run keeps nothing of which the label could be made
    with pytest.raises(ConfigError, match="No run was recorded in"):
        make_trainer(compare_with=tmp_path / "b")


@pytest.mark.parametrize("name", ["events.jsonl", "provenance.json"])
@pytest.mark.parametrize("damage", [b"", b"\x00\xff{", b'{"kind":"start"\n{"kind":"steps","progress":{"phase":"train"}}\n'])
def test_damaged_folder_is_no_error_for_the_next_run(tmp_path: Path, name: str, damage: bytes) -> None:
    run(tmp_path, n_epoch=1)
    (tmp_path / "run-001" / name).write_bytes(damage)
    assert run(tmp_path, n_epoch=1).result.status == "completed"


def test_long_record_is_read_in_a_part_of_a_second(tmp_path: Path) -> None:
    block = {"values": {"train_loss": [0.5] * 5}, "n": 5, "samples": 80, "lr": 0.1}
    line = Event("steps", Progress(phase="train", step=123456), data=block).to_json()
    lines = [line.replace("123456", str(5 * i)) for i in range(1, 100_001)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    begun_s = time.process_time()
    points = loss_curve(tmp_path)
    assert len(points) <= 200 and points[0][1] == 0.5 and points[-1][0] > 490_000
    assert time.process_time() - begun_s < 3.0  # a tenth of it on a free machine


def test_record_of_a_folder_is_kept_with_its_newest_source(tmp_path: Path) -> None:
    run(tmp_path)
    record = kept(tmp_path / "run-001")
    assert "class Regress(Trainer)" in record["steps"] and json.dumps(record)
    assert kept(tmp_path) == {}
