"""Weights of other tools' files are found, and what is not whole is said: real files of torch, safetensors, transformers and DCP."""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from samples import Regress, make_loader, make_model, make_trainer, same_weights
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nbtrain import MultiOptimizerTrainer, StateManagerAddon
from nbtrain.errors import CheckpointError, ConfigError
from nbtrain.jobs.build import Job


def notes(trainer: Any) -> list[str]:
    """The notes that the next run begins with."""
    return [data["text"] for kind, data in trainer.recorder._held if kind == "note"]


def applied(path: Any, model: nn.Module | None = None, **options: Any) -> Any:
    trainer = make_trainer(model=model or make_model(9))
    trainer.apply_weights(path, **options)
    return trainer


def refused(path: Any, model: nn.Module | None = None, **options: Any) -> CheckpointError:
    trainer = make_trainer(model=model or make_model(9))
    before = {name: value.cpu().clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        trainer.apply_weights(path, **options)
    assert all(torch.equal(value.cpu(), before[name]) for name, value in trainer.model.state_dict().items())
    assert notes(trainer) == []
    return caught.value


def adam(model: nn.Module) -> dict[str, Any]:
    """The state of an optimizer that has made a step."""
    optimizer = torch.optim.Adam(model.parameters())
    torch.stack([p.sum() for p in model.parameters()]).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


# -- below a key, with prefixes
SAVED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {  # what a script saves, and the note
    "tlama": (lambda m: {"model": m.state_dict(), "epoch": 3}, "the weights below 'model'"),
    "nanoGPT": (
        lambda m: {
            "model": torch.compile(m, backend="eager").state_dict(), "optimizer": adam(m), "model_args": {"n_layer": 2},
            "iter_num": 5, "best_val_loss": torch.tensor(1.5), "config": {"lr": 0.1},
        },
        "the weights below 'model'",
    ),
    "torchvision": (
        lambda m: {
            "model": nn.DataParallel(m).module.state_dict(), "optimizer": adam(m), "lr_scheduler": {"last_epoch": 1}, "epoch": 1,
            "args": argparse.Namespace(lr=0.1, path=Path("data")), "scaler": {"scale": torch.ones(1)},
        },
        "the weights below 'model'",
    ),
    "DataParallel": (lambda m: {"net": nn.DataParallel(m).state_dict()}, "the weights below 'net', 'module.' was taken from the names"),
    "compiled in DDP": (
        lambda m: {"model_state_dict": {f"module._orig_mod.{name}": value for name, value in m.state_dict().items()}},
        "the weights below 'model_state_dict', 'module.' was taken from the names",
    ),
    "only the average": (
        lambda m: {"ema": {"decay": 0.9, "module": AveragedModel(m).state_dict()}},
        "the weights below 'ema.module', 'module.' was taken from the names",
    ),
    "tensors beside them": (
        lambda m: {"model": m.state_dict(), "opt": {"state": {"0.weight": {"exp_avg": torch.ones(1)}}}, "rng": torch.get_rng_state(), 0: 1}
        | {f"loss_{i}": torch.ones(()) for i in range(9)},
        "the weights below 'model'",
    ),
    "some numbers in a mapping": (lambda m: {**m.state_dict(), "norm": {"mean": torch.ones(3)}}, ""),
    "deeper": (lambda m: {"state": {"network": m.state_dict()}, "step": 1}, "the weights below 'state.network'"),
    "another name": (lambda m: {"my_cnn": m.state_dict()}, "the weights below 'my_cnn'"),
    "net. and model.": (
        lambda m: {f"model.net.{name}": value for name, value in m.state_dict().items()}, "'model.net.' was taken from the names"
    ),
    "a state_dict": (lambda m: m.state_dict(), ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "suffix"), [*((kind, ".pt") for kind in SAVED), *(("tlama", suffix) for suffix in (".pth", ".bin", ".ckpt"))]
)
def test_weights_are_found_where_scripts_put_them(kind: str, suffix: str, tmp_path: Path) -> None:
    saved, model = SAVED[kind], make_model(1)
    torch.save(saved[0](model), tmp_path / f"a{suffix}")
    for strict in (True, False):
        trainer = applied(tmp_path / f"a{suffix}", strict=strict)
        assert same_weights(trainer.model, model)
        assert notes(trainer) == ([f"a{suffix}: {saved[1]}."] if saved[1] else [])


def test_names_of_a_model_in_a_wrapper_are_found(tmp_path: Path) -> None:
    torch.save(make_model(1).state_dict(), tmp_path / "a.pt")
    trainer = applied(tmp_path / "a.pt", nn.DataParallel(make_model(2)))
    assert same_weights(trainer.model.module, make_model(1)) and notes(trainer) == ["a.pt: 'module.' was put before the names."]


def test_trained_weights_come_before_their_average_and_a_key_chooses(tmp_path: Path) -> None:
    """As in torchvision's references, where both fit."""
    one, two = make_model(1), make_model(2)
    torch.save({"model_ema": AveragedModel(two).state_dict(), "model": one.state_dict()}, tmp_path / "a.pth")
    trainer = applied(tmp_path / "a.pth")
    assert same_weights(trainer.model, one)
    assert notes(trainer) == ["a.pth: the weights below 'model' (key='model_ema' takes others)."]
    trainer = applied(tmp_path / "a.pth", key="model_ema")
    assert same_weights(trainer.model, two) and notes(trainer) == ["a.pth: 'module.' was taken from the names."]
    error = refused(tmp_path / "a.pth", key="ema_model")
    assert str(error).splitlines()[::2] == ["a.pth has no weights below 'ema_model'.", "  Did you mean 'model_ema'?"]


def test_of_several_the_weights_that_fit_the_model_are_taken_and_a_tie_is_refused(tmp_path: Path) -> None:
    other, own, third = nn.Sequential(nn.Linear(2, 2)), make_model(1), make_model(2)
    torch.save({"model": other.state_dict(), "critic": own.state_dict()}, tmp_path / "a.pt")
    assert same_weights(applied(tmp_path / "a.pt").model, own)
    torch.save({"generator": own.state_dict(), "critic": third.state_dict()}, tmp_path / "b.pt")
    assert "Choose with key='generator' or key='critic'." in str(refused(tmp_path / "b.pt"))
    assert same_weights(applied(tmp_path / "b.pt", key="critic").model, third)


def test_key_is_also_the_beginning_of_names(tmp_path: Path) -> None:
    """A LightningModule with a second model beside `self.model`."""
    weights = {
        f"{part}.{name}": value for part, seed in (("model", 1), ("teacher", 2)) for name, value in make_model(seed).state_dict().items()
    }
    torch.save({"state_dict": weights, "pytorch-lightning_version": "2.6.0"}, tmp_path / "a.ckpt")
    assert same_weights(applied(tmp_path / "a.ckpt", key="teacher").model, make_model(2))
    trainer = applied(tmp_path / "a.ckpt", strict=False)
    assert same_weights(trainer.model, make_model(1))
    (note,) = notes(trainer)
    left = "teacher.0.weight, teacher.0.bias, teacher.3.weight, teacher.3.bias"
    assert note == f"a.ckpt: 4 of 4 tensors loaded (100 % of the parameters); not used: {left}."


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model(1)


def test_checkpoint_of_any_lightning_module_is_loaded(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=0)
    trainer.strategy.connect(module := Net())
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    loaded = Regress.load_from_checkpoint(tmp_path / "a.ckpt", model=make_model(9), device="cpu", log_bar=False)
    assert same_weights(loaded.model, module.net) and notes(loaded) == ["a.ckpt: 'net.' was taken from the names."]


# -- not whole
def test_to_load_nothing_is_an_error_also_if_not_strict(tmp_path: Path) -> None:
    torch.save({"model": nn.Sequential(nn.LayerNorm(3)).state_dict(), "epoch": 3}, tmp_path / "a.pt")
    model = nn.Sequential()
    model.add_module("head", nn.Linear(2, 1))
    for strict in (True, False):
        assert str(refused(tmp_path / "a.pt", model, strict=strict)).splitlines() == [
            "The weights are not those of a Sequential: head.weight is missing, head.bias is missing, 0.weight is unknown, "
            "0.bias is unknown; none of its 2 weights is there.",
            f"  {tmp_path / 'a.pt'}, below 'model'",
            "  Create the model as it was when they were saved, or give rename=: given is 0.weight (3,), 0.bias (3,), "
            "the model has head.weight (1, 2), head.bias (1,).",
        ]


NO_WEIGHTS = [
    {"epoch": 3}, {}, [torch.ones(1)], {"optimizer": {"state": {0: {"exp_avg": torch.ones(1)}}}},
    {"state_dict": 3}, {"state_dict": {1: 2}, "nbtrain": 1}, {"state_dict": [1]},
]  # fmt: skip


def test_file_without_weights_is_an_error(tmp_path: Path) -> None:
    for content in NO_WEIGHTS:
        torch.save(content, tmp_path / "a.pt")
        error = str(refused(tmp_path / "a.pt", strict=False))
        assert error.startswith("a.pt holds no weights") and "and not tensors by their names." in error, content


def test_note_says_how_many_are_loaded_and_names_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = make_model(1).state_dict()
    torch.save({name: weights[name] for name in list(weights)[:2]} | {f"old.{i}": torch.ones(1) for i in range(7)}, tmp_path / "a.pt")
    trainer = applied(tmp_path / "a.pt", strict=False)
    assert capsys.readouterr().out.startswith("a.pt: 2 of 4 tensors loaded")  # at once: a run may never come
    assert notes(trainer) == [
        "a.pt: 2 of 4 tensors loaded (89 % of the parameters); as before: 3.weight (not in the file), 3.bias (not in the file); "
        "not used: old.0, old.1, old.2, old.3, old.4 and 2 more."
    ]
    seen: list[str] = []
    trainer.recorder.add(argparse.Namespace(update=lambda event: seen.append(event.data["text"]) if event.kind == "note" else None))
    trainer.run(1, make_loader(16))
    assert any(text.startswith("a.pt: 2 of 4 tensors loaded") for text in seen)


def test_weights_are_loaded_by_a_step_during_a_run(tmp_path: Path) -> None:
    weights = make_model(1).state_dict()
    torch.save({"0.weight": weights["0.weight"]}, tmp_path / "a.pt")
    seen: list[str] = []

    class Loads(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            self.apply_weights(tmp_path / "a.pt", strict=False)
            assert torch.equal(self.model[0].weight.cpu(), weights["0.weight"])
            return super().train_step(batch)

    trainer = make_trainer(Loads)
    trainer.recorder.add(argparse.Namespace(update=lambda event: seen.append(event.data["text"]) if event.kind == "note" else None))
    trainer.run(1, make_loader(16))
    assert any(text.startswith("a.pt: 1 of 4 tensors loaded (80 % of the parameters)") for text in seen)


# -- other shapes
def classifier(classes: int, width: int = 32, inputs: int = 8) -> nn.Sequential:
    torch.manual_seed(classes)
    return nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.Linear(width, 64), nn.Linear(64, classes))


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.ckpt"])
def test_old_weights_are_loaded_into_a_model_with_another_head(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = classifier(10), classifier(5)
    weights, head = old.state_dict(), new[3].weight.clone()
    if name == "a.safetensors":
        save_file(weights, tmp_path / name)
    else:
        torch.save({"state_dict": weights} if name == "a.ckpt" else weights, tmp_path / name)
    model = applied(tmp_path / name, new, strict=False).model.cpu()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items() if not name.startswith("3."))
    assert torch.equal(model[3].weight, head)
    assert capsys.readouterr().out.endswith(
        "9 of 11 tensors loaded (88 % of the parameters); "
        "as before: 3.weight (10, 64 in the file; 5, 64 here), 3.bias (10 in the file; 5 here).\n"
    )


def test_a_batch_norm_of_another_width_takes_nothing(tmp_path: Path) -> None:
    old, new = classifier(5), classifier(5, width=16)
    old(torch.randn(4, 8))
    torch.save({**old.state_dict(), "2.weight": torch.zeros(64, 16), "0.weight": torch.zeros(16, 8)}, tmp_path / "a.pt")
    before = [value.clone() for value in new[1].state_dict().values()]
    model = applied(tmp_path / "a.pt", new, strict=False).model
    assert all(torch.equal(value.cpu(), other) for value, other in zip(model[1].state_dict().values(), before, strict=True))


def test_little_that_fits_is_loaded_and_said_to_be_little(tmp_path: Path) -> None:
    torch.save((old := classifier(5)).state_dict(), tmp_path / "a.pt")
    trainer = applied(tmp_path / "a.pt", classifier(5, inputs=3000), strict=False)
    assert torch.equal(trainer.model[3].weight.cpu(), old[3].weight)
    assert notes(trainer) == [
        "a.pt: only 10 of 11 tensors loaded (3 % of the parameters); as before: 0.weight (32, 8 in the file; 32, 3000 here)."
    ]


def test_a_small_file_of_which_all_fits_is_no_wrong_one(tmp_path: Path) -> None:
    torch.save({"3.bias": torch.ones(5)}, tmp_path / "a.pt")
    assert torch.equal(applied(tmp_path / "a.pt", classifier(5), strict=False).model[3].bias.cpu(), torch.ones(5))


class Splats(nn.Module):
    """A model whose points come from a file, up to eight."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.points, self.head = nn.Parameter(torch.zeros(n, 3)), nn.Linear(3, 1)
        self.register_load_state_dict_pre_hook(self.resize)

    @staticmethod
    def resize(module: Any, weights: dict[str, Any], prefix: str, *_: Any) -> None:
        n = len(weights[f"{prefix}points"])
        if n <= 8:
            module.points = nn.Parameter(torch.zeros(n, 3))


def test_a_module_that_resizes_itself_is_asked_first_and_as_before_if_it_does_not(tmp_path: Path) -> None:
    torch.save(Splats(5).state_dict(), tmp_path / "five.pt")
    torch.save(Splats(9).state_dict(), tmp_path / "nine.pt")
    assert applied(tmp_path / "five.pt", Splats(2)).model.points.shape == (5, 3)
    model = Splats(2)
    before = model.head.weight.clone()
    assert "size mismatch for points" in str(refused(tmp_path / "nine.pt", model))
    assert torch.equal(model.head.weight.cpu(), before)


# -- other names
def encoder(name: str) -> nn.Module:
    model = nn.Sequential()
    model.add_module(name, make_model(1))
    return model


def test_error_proposes_a_mapping_that_works(tmp_path: Path) -> None:
    torch.save(encoder("backbone").state_dict(), tmp_path / "a.pt")
    error = refused(tmp_path / "a.pt", encoder("encoder"), strict=False)
    assert error.rename == {"backbone.": "encoder."}
    assert str(error).splitlines()[-1] == (
        '  Give rename={"backbone.": "encoder."}: then 4 of 4 fit, for example backbone.0.weight (16, 8) as encoder.0.weight.'
    )
    trainer = applied(tmp_path / "a.pt", encoder("other"), rename={"backbone.": "other."})
    assert same_weights(trainer.model.other, make_model(1))
    assert same_weights(applied(tmp_path / "a.pt", rename={"backbone": ""}).model, make_model(1))


def test_mapping_is_proposed_by_the_order_of_the_shapes(tmp_path: Path) -> None:
    named = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4), "third": nn.Linear(4, 4)})
    torch.save(named.state_dict(), tmp_path / "a.pt")
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    error = refused(tmp_path / "a.pt", plain)
    assert error.rename == {"first.": "0.", "second.": "2.", "third.": "4."}
    trainer = applied(tmp_path / "a.pt", plain, rename=error.rename)
    assert torch.equal(trainer.model[4].weight.cpu(), named["third"].weight)


def test_error_of_some_weights_names_both_ways(tmp_path: Path) -> None:
    one = nn.ModuleDict({"body": nn.Linear(2, 3), "head": nn.Linear(3, 4)})
    torch.save(one.state_dict(), tmp_path / "a.pt")
    error = str(refused(tmp_path / "a.pt", nn.ModuleDict({"body": nn.Linear(2, 3), "fc": nn.Linear(3, 4)})))
    assert error.splitlines()[-1].endswith("as fc.weight. Or load what fits with apply_weights(path, strict=False).")
    assert 'Give rename={"head.": "fc."}: then 4 of 4 fit' in error


def test_mapping_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    torch.save(encoder("backbone").state_dict(), tmp_path / "a.pt")
    error = refused(tmp_path / "a.pt", rename={"bakbone.": ""})
    assert str(error) == "rename has 'bakbone.', and no name of the weights begins with it.\n  Did you mean 'backbone'?"
    error = refused(tmp_path / "a.pt", rename={"backbone.0.": "x.", "backbone.3.": "x."})
    assert "rename gives backbone.0.weight and backbone.3.weight one name, x.weight." in str(error)
    with pytest.raises(ConfigError, match="apply_weights got key= or rename=, and no file"):
        make_trainer().apply_weights(rename={"a": "b"})


# -- shards and folders
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sharded", "whole"])
def test_folder_of_save_pretrained_is_loaded(kind: str, tmp_path: Path) -> None:
    """`lm_head.weight` is tied, and not in the file."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=1)
    one, two = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    one.save_pretrained(tmp_path, max_shard_size="8KB" if kind == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (kind == "sharded")
    trainer = applied(tmp_path, two)
    assert same_weights(trainer.model, one) and notes(trainer) == []
    if kind == "sharded":
        assert same_weights(applied(tmp_path / "model.safetensors.index.json", GPT2LMHeadModel(config)).model, one)


@pytest.fixture(params=[True, False], ids=["safetensors", "bin"])
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_torch_state_dict(make_model(1).state_dict(), tmp_path, max_shard_size=200, safe_serialization=request.param)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_sharded_folder_is_loaded_and_a_missing_shard_is_named(shards: Path) -> None:
    (index,) = shards.glob("*.index.json")
    assert index.name in ("model.safetensors.index.json", "pytorch_model.bin.index.json")
    assert same_weights(applied(shards).model, make_model(1))
    lost = sorted(shards.glob("*-of-*"))[0]
    lost.unlink()
    assert str(refused(shards)).startswith(f"{lost.name} is missing, one of the 2 shards in {index.name}.")


@pytest.mark.parametrize("place", ["../a.bin", "/etc/passwd"])
def test_index_that_leads_out_of_its_folder_is_refused(place: str, shards: Path) -> None:
    (index,) = shards.glob("*.index.json")
    index.write_text(json.dumps({"weight_map": {"0.weight": place}}))
    assert "is not an index of shards" in str(refused(shards))


def test_folder_with_one_file_is_loaded_and_several_are_refused(tmp_path: Path) -> None:
    torch.save(make_model(1).state_dict(), tmp_path / "pytorch_model.bin")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, tmp_path / name)
    assert same_weights(applied(tmp_path).model, make_model(1))
    torch.save(make_model(1).state_dict(), tmp_path / "second.pt")
    assert "has several files of weights: pytorch_model.bin, second.pt" in str(refused(tmp_path))
    (tmp_path / "none").mkdir()
    assert str(refused(tmp_path / "none")).startswith("There is no file of weights in")


def test_safetensors_is_known_by_its_content(tmp_path: Path) -> None:
    save_file(make_model(1).state_dict(), tmp_path / "a.safetensor")
    assert same_weights(applied(tmp_path / "a.safetensor").model, make_model(1))


# -- torch.distributed.checkpoint
@pytest.fixture
def distributed(tmp_path: Path) -> Path:
    model = make_model(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "model": {f"module.{name}": value for name, value in model.state_dict().items()},
            "optimizer": adam(make_model(2)),
            "epoch": 3,
        }
        dcp.save(state, checkpoint_id=tmp_path / "step-5")
    return tmp_path / "step-5"


def test_distributed_checkpoint_is_loaded_without_its_optimizer(distributed: Path) -> None:
    for path in (distributed, distributed / ".metadata"):
        trainer = applied(path)
        assert same_weights(trainer.model, make_model(1))
        assert notes(trainer) == [f"{path.name}: the weights below 'model', 'module.' was taken from the names."]


class Bomb:
    def __reduce__(self) -> Any:
        return print, ("boom",)


def test_objects_in_the_index_of_a_distributed_checkpoint_are_not_unpickled(distributed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (distributed / ".metadata").write_bytes(pickle.dumps(Bomb()))
    error = str(refused(distributed))
    assert "step-5 holds no weights" in error and "Python objects (builtins.print)" in error
    assert capsys.readouterr().out == ""


def without_a_chunk(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.module.0.weight"].chunks.clear()  # torch would return memory with whatever was in it
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def overwritten(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    file.write_bytes(b"0" * file.stat().st_size)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a chunk that is missing": (without_a_chunk, "model.module.0.weight is not stored as a whole"),
    "no file of a rank": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing, in which model.module."),
    "a file of other bytes": (overwritten, "step-5 holds no weights"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_distributed_checkpoint_is_refused(damage: Callable[[Path], Any], said: str, distributed: Path) -> None:
    damage(distributed)
    assert said in str(refused(distributed))


# -- every way to bring weights in
class Parts(MultiOptimizerTrainer):
    def train_step_head(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).mean()}

    def test_step(self, batch: Any) -> Any:
        return self.train_step_head(batch)


def test_every_way_uses_the_same_finder(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"model": nn.DataParallel(make_model(1)).state_dict(), "epoch": 3}, path)
    said = "a.pt: the weights below 'model', 'module.' was taken from the names."
    model = make_model(2)
    parts = Parts(model, "cpu", optimizers={"head": torch.optim.SGD(model.parameters(), lr=0.1)}, log_bar=False)
    parts.apply_weights(path)
    loaded = Parts.load_from_checkpoint(path, model=make_model(3), device="cpu", log_bar=False)
    trainer = make_trainer(Regress.add_on(StateManagerAddon), model=make_model(2), save_path=tmp_path / "runs")
    assert Job(trainer, 1, make_loader(), None, None, str(path), []).load() == "a.pt"
    for one in (parts, loaded, trainer):
        assert same_weights(one.model, make_model(1)) and notes(one) == [said]


def test_object_of_a_script_is_named(tmp_path: Path) -> None:
    torch.save({"model": make_model(1).state_dict(), "net": make_model(1)}, tmp_path / "a.pt")
    error = str(refused(tmp_path / "a.pt"))
    assert "Python objects (torch.nn.modules.container.Sequential)" in error and "safe_globals([Sequential])" in error
