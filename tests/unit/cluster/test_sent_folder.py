"""What rank 0 writes on a disk of its node comes to the run folder here; without Ray. tests/cluster has nodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import ConfigError, StateManagerAddon
from nbtrain.checkpoint.files import read_superseded
from nbtrain.cluster import sent_folder
from nbtrain.cluster.sent_folder import Change, FolderReceiver, FolderSender


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return tmp_path / "node" / "run-001"


def sent_by(node: Path, write: Callable[[], object]) -> list[Change]:
    """What is sent of that which `write` writes in the folder of a node."""
    sent: list[Change] = []
    with FolderSender(node, sent.append, lambda: 0):
        write()
    return sent


def content(folder: Path) -> dict[str, bytes | str]:
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}


def test_files_folders_and_links_come_as_they_are_in_pieces(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_folder, "_PIECE_BYTES", 1000)
    written: dict[str, bytes | str] = {}

    def write() -> None:
        shards = node / "checkpoints" / "epoch=1-step=4"
        shards.mkdir(parents=True)
        (shards / "a.safetensors").write_bytes(os.urandom(2500))
        (shards / "empty").touch()
        (node / "checkpoints" / "last").symlink_to(shards.name)
        (node / "checkpoints" / ".epoch=2.ckpt.tmp").touch()
        (node / "logs").mkdir()
        (node / "logs" / "training_log.csv").write_text("step,loss\n")
        written.update({name: data for name, data in content(node).items() if "/." not in name and not name.startswith(".")})

    here = tmp_path / "run-001"
    receiver = FolderReceiver(here)
    for change in sent_by(node, write):
        receiver.take(change)
    assert content(here) == written and len(written) == 4
    assert not node.exists()


def test_half_a_checkpoint_is_left_out_and_the_one_before_stays(node: Path, tmp_path: Path) -> None:
    file = node / "checkpoints" / "epoch=1-step=4.ckpt"

    def write() -> None:
        file.parent.mkdir()
        file.write_bytes(b"new")

    here = tmp_path / "run-001"
    place = here / "checkpoints" / file.name
    place.parent.mkdir(parents=True)
    place.write_bytes(b"old")
    receiver = FolderReceiver(here)
    for change in sent_by(node, write)[:-1]:
        receiver.take(change)
    assert place.read_bytes() == b"old"
    receiver.begin(0, 0)
    assert content(here) == {f"checkpoints/{file.name}": b"old", "checkpoints/superseded": f"{file.name}\n".encode()}
    for change in sent_by(node, write):
        receiver.take(change)
    assert place.read_bytes() == b"new" and read_superseded(place.parent) == set()


def test_a_folder_of_a_killed_process_is_replaced_and_another_one_is_not(node: Path) -> None:
    sender = FolderSender(node, print, lambda: 0).__enter__()
    (node / "after-error.ckpt").touch()
    assert [change.name for change in sent_by(node, lambda: None)] == []
    sender._is_done.set()
    node.mkdir()
    (node / "events.jsonl").touch()
    with pytest.raises(ConfigError, match="This node has another run in the run folder.\n  .*run-001\n  Give another save_path."):
        sent_by(node, lambda: None)
    assert (node / "events.jsonl").exists()


def test_a_removed_file_is_removed_here_and_rows_get_the_checkpoints_that_are_left(tmp_path: Path) -> None:
    trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)
    trainer.run(2, make_loader(), make_valid())
    receiver = FolderReceiver(trainer.run_dir)
    first, second = [row.path for row in trainer.history.epochs]
    assert first is not None and second is not None
    for row in trainer.history.epochs:
        row.path = None
    receiver.take(Change("gone", first.relative_to(trainer.run_dir).as_posix()))
    receiver.close(trainer.history)
    assert not first.exists() and [row.path for row in trainer.history.epochs] == [None, second]
