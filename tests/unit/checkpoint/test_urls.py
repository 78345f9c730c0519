"""Weights go to a store by URL, and what can't be there is refused when the trainer is made."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights

from nbtrain import AddOnBase, StateManagerAddon
from nbtrain.errors import AddOnError, CheckpointError, OptionError


@pytest.mark.parametrize("scheme", ["s3", "gs", "hf", "memory", "file"])
@pytest.mark.parametrize("addons", [(), (StateManagerAddon,)])
def test_run_folder_in_a_store_is_refused_when_the_trainer_is_made(
    scheme: str, addons: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="must be on a file system"):
        make_trainer(Regress.add_on(*addons), save_path=f"{scheme}://bucket/runs")
    with pytest.raises(OptionError, match="must be on a file system"):
        make_trainer(Regress.add_on(StateManagerAddon(save_path=f"{scheme}://bucket/runs")))
    with pytest.raises(OptionError, match="must be on a file system"):
        make_trainer(Regress.add_on(*addons), save_path=Path(f"{scheme}://bucket/runs"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "deep/er/a.ckpt"])
def test_weights_are_written_to_and_read_from_a_url(name: str) -> None:
    url, trainer = f"memory://bucket/{name}", make_trainer()
    trainer.model.load_state_dict(make_model(1).state_dict())
    assert trainer.save_model(Path(url), overwrite=True) == trainer.save_model(url, overwrite=True) == url
    other = make_trainer()
    assert not same_weights(trainer.model, other.model)
    other.apply_weights(url)
    assert same_weights(trainer.model, other.model)
    loaded = Regress.load_from_checkpoint(url, model=make_model(2), device="cpu", log_bar=False)
    assert same_weights(trainer.model, loaded.model)
    with pytest.raises(CheckpointError, match=rf"'memory://bucket/{name}' exists.*\n.*overwrite=True"):
        trainer.save_model(url)


def test_checkpoint_of_a_run_is_read_from_a_url(tmp_path: Path) -> None:
    trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)
    trainer.run(1, make_loader(), make_valid())
    fsspec.filesystem("memory").put_file(str(trainer.run_dir / "checkpoints" / "last.ckpt"), "/runs/last.ckpt")
    other = make_trainer(model=make_model(1))
    other.apply_weights("memory://runs/last.ckpt")
    assert same_weights(trainer.model, other.model)


def test_missing_file_in_a_store_is_named() -> None:
    with pytest.raises(CheckpointError, match="There is no file 'memory://nowhere/a.pt'"):
        make_trainer().apply_weights("memory://nowhere/a.pt")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_file_is_not_overwritten_unless_that_is_asked_for(name: str, tmp_path: Path) -> None:
    trainer, path = make_trainer(), tmp_path / name
    trainer.save_model(path)
    before = path.read_bytes()
    with torch.no_grad():
        trainer.model[0].weight.zero_()
    with pytest.raises(CheckpointError, match=f"{name}' exists"):
        trainer.save_model(path)
    assert path.read_bytes() == before
    trainer.save_model(path, overwrite=True)
    other = make_trainer()
    other.apply_weights(path)
    assert same_weights(trainer.model, other.model) and [file.name for file in tmp_path.iterdir()] == [name]


def test_addon_of_zae_engine_is_refused_with_what_to_override() -> None:
    with pytest.raises(AddOnError, match="Mine defines apply\\(cls, base\\).*\n.*callbacks\\(trainer\\)"):

        class Mine(AddOnBase):
            @classmethod
            def apply(cls, base: Any) -> Any:
                return base


# -- save_model leaves a whole file or none
def full(*args: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("damage", ["full", "folder", "file above", "no permission"])
def test_save_model_writes_the_whole_file_or_raises_and_leaves_what_was_there(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, path = make_trainer(), tmp_path / name
    trainer.save_model(path)
    before, reason = path.read_bytes(), "No space left on device"
    if damage == "folder":
        path.unlink()
        (path / "mine").mkdir(parents=True)
        reason = "is a folder"
    elif damage == "file above":
        path, reason = path / name, "Not a directory|File exists"
    elif damage == "no permission":
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied")))
        reason = "Permission denied"
    else:
        monkeypatch.setattr("nbtrain.checkpoint.weights.sync", full)
    with pytest.raises(CheckpointError, match=reason):
        trainer.save_model(path, overwrite=True)
    if damage == "folder":
        assert (path / "mine").is_dir()
    else:
        assert (tmp_path / name).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_errors_of_a_store_are_errors_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", full)
    with pytest.raises(CheckpointError, match="'memory://full/model.pt' could not be written: No space left on device"):
        make_trainer().save_model("memory://full/model.pt")
