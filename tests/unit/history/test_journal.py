"""A checkpoint has exactly the history that it was saved with, though the history is beside it; without its journal it still resumes."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid, without_times

from nbtrain import StateManagerAddon, load_run
from nbtrain.checkpoint.files import read_checkpoint
from nbtrain.engine.callback import Callback
from nbtrain.history.history import History
from nbtrain.history.journal import FILE, save_history, whole_history

Saving = Regress.add_on(StateManagerAddon)


class Seen(Callback):
    """The history at each save, by the name of the checkpoint."""

    def __init__(self) -> None:
        self.histories: dict[str, dict[str, Any]] = {}
        self.trainer: Any = None

    def on_checkpoint_saved(self, trainer: L.Trainer, pl_module: L.LightningModule, path: Path) -> None:
        self.histories[path.name] = self.trainer.history.state_dict()


def build(folder: Path, **options: Any) -> Any:
    seen = Seen()
    interval = {"val_check_interval": 2} if "every_n_epochs" not in options else {}
    options = {"every_n_steps": 2, "lightning": {"callbacks": [seen], **interval}} | options
    trainer = make_trainer(Saving, save_path=folder, **options)
    seen.trainer, trainer.seen = trainer, seen
    return trainer


def loaded(path: Path) -> Any:
    trainer = make_trainer(Saving, save_path=path.parent.parent.parent, save_format="ckpt" if path.suffix else "safetensor")
    trainer.load_state(path)
    return trainer


def notes(trainer: Any) -> list[str]:
    return [data["text"] for kind, data in trainer.recorder._held if kind == "note"]


def checkpoints(trainer: Any) -> Path:
    return trainer.run_dir / "checkpoints"


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_each_checkpoint_has_the_history_it_was_saved_with_also_after_a_way_back(save_format: str, tmp_path: Path) -> None:
    first = build(tmp_path, save_format=save_format)
    first.run(2, make_loader(), make_valid())
    folder, expected = checkpoints(first), dict(first.seen.histories)
    left = {}  # what the second run goes back from, under other names
    for name, history in expected.items():
        left[folder / f"left-{name}"] = history
        (shutil.copytree if (folder / name).is_dir() else shutil.copy)(folder / name, folder / f"left-{name}")
    again = build(tmp_path, save_format=save_format)
    again.load_state(folder / sorted(expected)[1])
    again.set(lr=0.003)
    again.run(3, make_loader(), make_valid(), resume=folder / sorted(expected)[1])
    assert len(expected) > 3 and set(again.seen.histories) & set(expected)
    for path, history in {**left, **{folder / name: history for name, history in again.seen.histories.items()}}.items():
        assert loaded(path).history.state_dict() == history, path.name
    assert without_times(load_run(tmp_path).epochs) == without_times(again.history.epochs)


def test_run_in_another_folder_has_a_journal_with_everything(tmp_path: Path) -> None:
    first = build(tmp_path / "a")
    first.run(1, make_loader(), make_valid())
    before = (checkpoints(first) / FILE).read_bytes()
    other = build(tmp_path / "b")
    other.run(2, make_loader(), make_valid(), resume=first.result.last.path)
    assert other.run_dir.parent == tmp_path / "b" and (checkpoints(first) / FILE).read_bytes() == before
    shutil.rmtree(tmp_path / "a")
    assert loaded(other.result.last.path).history.state_dict() == other.history.state_dict()


def test_save_between_two_runs_and_after_a_rewind_is_exact(tmp_path: Path) -> None:
    trainer = build(tmp_path, every_n_steps=None, every_n_epochs=1)
    trainer.run(3, make_loader(), make_valid())
    trainer.rewind(epoch=1)
    path = trainer.save_state()
    assert len(trainer.history.epochs) == 1 and loaded(path).history.state_dict() == trainer.history.state_dict()


def test_checkpoint_that_was_copied_alone_resumes_and_says_what_it_lacks(tmp_path: Path) -> None:
    trainer = build(tmp_path / "a", every_n_steps=None, every_n_epochs=1)
    trainer.run(4, make_loader(), make_valid())
    whole = build(tmp_path / "a", every_n_steps=None, every_n_epochs=1)
    whole.run(5, make_loader(), make_valid(), resume="auto")
    (tmp_path / "alone").mkdir()
    alone = shutil.copy(checkpoints(trainer) / "epoch=4-step=20.ckpt", tmp_path / "alone")
    other = build(tmp_path / "b", every_n_steps=None, every_n_epochs=1)
    other.load_state(alone)
    missing = "The history of epochs 1 to 3 is not here: it is in checkpoints/history.jsonl of the run folder."
    assert notes(other) == [missing]
    assert other.history.epochs[-1] == trainer.history.epochs[3] and dict(other.history.best) == dict(trainer.history.best)
    other.run(5, make_loader(), make_valid(), resume=alone)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value)
    assert without_times(other.history.epochs[-1:]) == without_times(whole.history.epochs[-1:])
    assert len(loaded(other.result.last.path).history.epochs) == len(other.history.epochs)


@pytest.mark.parametrize("damage", ["cut off", "changed", "of another run"])
def test_damaged_journal_is_as_a_missing_one_and_the_run_goes_on(damage: str, tmp_path: Path) -> None:
    trainer = build(tmp_path, every_n_steps=None, every_n_epochs=1)
    trainer.run(3, make_loader(), make_valid())
    file, last = checkpoints(trainer) / FILE, checkpoints(trainer) / "epoch=3-step=15.ckpt"
    content, first = file.read_bytes(), read_checkpoint(checkpoints(trainer) / "epoch=1-step=5.ckpt")["nbtrain"]["history"]
    if damage == "of another run":
        other = build(tmp_path / "other", every_n_steps=None, every_n_epochs=1, model=None)
        other.run(3, make_loader(), make_valid())
        content = (checkpoints(other) / FILE).read_bytes()
    file.write_bytes(
        content[:-9] if damage == "cut off" else content.replace(b'"epoch":3', b'"epoch":4') if damage == "changed" else content
    )
    found = loaded(last)
    assert notes(found) == ["The history of epochs 1 to 2 is not here: checkpoints/history.jsonl is damaged."]
    if damage != "of another run":
        assert "lacks" not in whole_history(first, checkpoints(trainer))
    again = build(tmp_path, every_n_steps=None, every_n_epochs=1)
    again.run(4, make_loader(), make_valid(), resume=last)
    assert loaded(again.result.last.path).history.state_dict() == again.history.state_dict()


def test_links_out_of_the_run_folder_are_neither_read_nor_written(tmp_path: Path) -> None:
    trainer = build(tmp_path / "a", every_n_steps=None, every_n_epochs=1)
    trainer.run(2, make_loader(), make_valid())
    file, elsewhere = checkpoints(trainer) / FILE, tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    found = loaded(checkpoints(trainer) / "epoch=2-step=10.ckpt")
    assert len(notes(found)) == 1 and len(found.history.epochs) < 3
    path = trainer.save_state()
    assert elsewhere.read_bytes() == before and file.is_symlink()
    assert read_checkpoint(path)["nbtrain"]["history"] == trainer.history.state_dict()  # as a whole


WRONG = [
    None, 1, "x", [], {}, [0, 10, "x"], [-5, 50, 1], [0, 2**70, 1], [[], [], []],
    {"file": FILE}, {"file": "../../secret", "place": [0, 1, 2]},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_invalid_places_are_no_places(wrong: Any, tmp_path: Path) -> None:
    history = History()
    state = save_history(history, tmp_path / "checkpoints" / "a.ckpt")
    for journal in (wrong, state["journal"] | {"place": wrong}, state["journal"] | {"file": str(wrong)}, {"file": FILE, "place": wrong}):
        read = whole_history(state | {"journal": journal}, tmp_path / "checkpoints")
        assert "saved" not in read or read["saved"][1] == state["journal"]["place"]
        History().load_state_dict(read)


@pytest.mark.parametrize(
    "record", ["[]", "{}", '{"before": [0, 1, 2], "rows": {}, "steps": {}}', '{"before": null, "rows": {"epochs": [7, [1]]}}']
)
def test_records_of_a_stranger_are_checked(record: str, tmp_path: Path) -> None:
    state = save_history(History(), tmp_path / "checkpoints" / "a.ckpt")
    crc = zlib.crc32(record.encode())
    line = b'{"crc32": "%08x", "record": ' % crc + record.encode() + b"}\n"
    (tmp_path / "checkpoints" / FILE).write_bytes(line)
    state["journal"]["place"] = [0, len(line), crc]
    assert whole_history(state, tmp_path / "checkpoints")["lacks"].endswith("is damaged.")


def test_a_record_has_only_what_is_new(tmp_path: Path) -> None:
    trainer = build(tmp_path, every_n_steps=None, every_n_epochs=1)
    trainer.run(6, make_loader(), make_valid())
    sizes = [len(line) for line in (checkpoints(trainer) / FILE).read_bytes().splitlines()]
    assert len(sizes) >= 6 and max(sizes) < 2 * sizes[1]
    rows = [json.loads(line)["record"]["rows"]["epochs"] for line in (checkpoints(trainer) / FILE).read_text().splitlines()]
    assert [(start, len(new)) for start, new in rows][:6] == [(n, 1) for n in range(6)]
