"""A run that was broken off anywhere and resumed ends exactly as the one that was not.

With `NBTRAIN_EVERY_SAVE` it is resumed at every save it made, else at some of them.
"""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from samples import (
    Augmented,
    Breaks,
    Broken,
    Regress,
    make_data,
    make_loader,
    make_model,
    make_trainer,
    make_valid,
    same_weights,
    some,
    without_times,
)
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, IterableDataset

from nbtrain import (
    CheckpointError,
    ConfigError,
    EMAAddon,
    FreezeAddon,
    MultiGPUAddon,
    SeededLoader,
    StateManagerAddon,
    TensorLoader,
    load_run,
)
from nbtrain.checkpoint.atomic import written
from nbtrain.checkpoint.files import read_checkpoint, write_checkpoint
from nbtrain.checkpoint.snapshot import snapshot

EVERY_SAVE = bool(os.environ.get("NBTRAIN_EVERY_SAVE"))
Saving = Regress.add_on(StateManagerAddon)


class Stream(IterableDataset[Any]):
    """Five batches, without a length."""

    def __iter__(self) -> Any:
        yield from make_loader(own_generator=True)


class Tensors(Regress):
    """Keeps tensors of the epoch for its own metric, which a resumed epoch must have too."""

    def metric_on_epoch_end(self) -> dict[str, Any] | None:
        log = self.log_train if self.mode == "train" else self.log_test
        return {"spread": torch.cat(log["output"]).std()}


def augmented(**options: Any) -> Any:
    return lambda: DataLoader(Augmented(), 16, shuffle=True, **options)


def in_memory() -> Any:
    return TensorLoader(make_data(), batch_size=16, shuffle=True)


LIMITED = {"limit_train_batches": 3}
CASES: dict[str, dict[str, Any]] = {
    "dropout and shuffling": {},
    "a generator of its own": {"loader": lambda: make_loader(own_generator=True)},
    "full batches and a generator of its own": {"loader": lambda: make_loader(64, own_generator=True)},
    "augmentation": {"loader": augmented()},
    "two workers": {"loader": augmented(num_workers=2), "every": 3},
    "validation": {"valid": True},
    "validation within the epoch": {"valid": True, "lightning": {"val_check_interval": 2}},
    "validation every 3 batches, across epochs": {"valid": True, "lightning": {"val_check_interval": 3, "check_val_every_n_epoch": None}},
    "accumulation": {"lightning": {"accumulate_grad_batches": 2}, "every": 1},
    "accumulation, and validation within a window": {"valid": True, "lightning": {"accumulate_grad_batches": 2, "val_check_interval": 3}},
    "a schedule by epoch": {"scheduler": lambda optimizer: StepLR(optimizer, 1, 0.5)},
    "a schedule by batch": {"scheduler": lambda optimizer: StepLR(optimizer, 2, 0.9), "scheduler_step_on_batch": True},
    "a factory": {"scheduler": lambda _: lambda optimizer, plan: OneCycleLR(optimizer, 0.1, total_steps=plan.total_steps)},
    "a factory with a function": {"scheduler": lambda _: lambda optimizer, plan: LambdaLR(optimizer, lambda i: 1 - i / plan.total_steps)},
    "a function of the step": {"scheduler": lambda _: lambda step: 0.01 / (1 + step)},
    "clipping": {"gradient_clip": 0.1},
    "safetensors": {"save_format": "safetensor", "valid": True},
    "bf16": {"precision": "bf16"},
    "tensors for an own metric": {"kind": Tensors, "valid": True},
    "early stopping": {"valid": True, "callbacks": lambda: [EarlyStopping("val_loss", patience=0, min_delta=10.0)]},
    "a loader without length": {"loader": lambda: DataLoader(Stream(), batch_size=None)},
    "a limited epoch": {"lightning": LIMITED},
    "TensorLoader": {"loader": in_memory},
    "TensorLoader, limited": {"loader": in_memory, "lightning": LIMITED},
    "SeededLoader": {"loader": lambda: SeededLoader(Augmented(), 16)},
    "SeededLoader, limited": {"loader": lambda: SeededLoader(Augmented(), 16), "lightning": LIMITED},
    "Lightning's own loops": {"valid": True, "lean": False},
    "averaged weights": {"kind": Regress.add_on(EMAAddon), "ema_decay": 0.9, "valid": True},
    "averaged weights in safetensors": {"kind": Regress.add_on(EMAAddon), "valid": True, "save_format": "safetensor", "every": 2},
    "frozen for an epoch": {"kind": Regress.add_on(FreezeAddon), "freeze": {"0": range(1, 2)}},
    "validate_on_save": {"valid": True, "validate_on_save": True, "every": 2},
}


def build(folder: Path, case: dict[str, Any], seed: int) -> Any:
    """A trainer for a case, with random numbers of its own, as another process would have."""
    case = dict(case)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if "scheduler" in case:
        case["scheduler"] = case["scheduler"](optimizer)
    lightning = case.pop("lightning", {}) | {"callbacks": case.pop("callbacks", list)()}
    for name in ("loader", "valid"):
        case.pop(name, None)
    kind, lean, every = case.pop("kind", Regress), case.pop("lean", True), case.pop("every", 1)
    options = {"save_path": folder, "every_n_steps": every, "keep_source": False, "lightning": lightning} | case
    trainer = make_trainer(kind.add_on(StateManagerAddon), model=model, optimizer=optimizer, **options)
    trainer.short_way = lean
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    return trainer


def run(trainer: Any, case: dict[str, Any], n_epoch: int = 3, **options: Any) -> Any:
    return trainer.run(n_epoch, case.get("loader", make_loader)(), make_valid() if case.get("valid") else None, **options)


def numbers(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in weights.items()}


def outcome(trainer: Any) -> dict[str, Any]:
    """Everything that must be equal."""
    history = trainer.history
    return {
        "weights": numbers(trainer.model.state_dict()),
        "optimizer": str(trainer.optimizer.state_dict()),
        "epochs": without_times(history.epochs),
        "best": without_times([history.best]),
        "best weights": numbers(trainer.best_weights),
        "steps": str({phase: table.state_dict() for phase, table in history.steps.items()}),
        "counts": str(trainer.counts),
        "metrics": (trainer.train_metrics, trainer.test_metrics, dict(trainer.log_train)["loss"]),
        "random": (torch.rand(3).tolist(), random.random(), np.random.rand()),
    }


@pytest.mark.parametrize("name", some(CASES, 4))
def test_a_run_resumed_at_any_save_ends_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    warnings.simplefilter("ignore")
    whole = build(tmp_path, case, seed=1)
    run(whole, case)
    expected = outcome(whole)
    saves = [path for path in sorted((whole.run_dir / "checkpoints").glob("epoch=*-step=*")) if not path.is_symlink()]
    assert len(saves) > 2
    some = saves[:-1] if EVERY_SAVE else random.Random(name).sample(saves[:-1], min(len(saves) - 1, 2))
    for path in some:
        again = build(tmp_path / "again", case, seed=2)
        run(again, case, resume=path)
        found = outcome(again)
        for part, value in expected.items():
            assert found[part] == value, (path.name, part)


class Stops(Callback):
    """Ends the run after a batch of the second epoch, or at its first validation after that batch began."""

    def __init__(self, after: str = "batch") -> None:
        self.after = after

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop |= self.after == "batch" and (trainer.current_epoch, batch_idx) == (1, 2)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop |= self.after == "validation" and trainer.current_epoch == 1


CUTS: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 8},
    "max_steps, and the validation that comes with it": {"max_steps": 8, "validate_on_save": True},
    "max_steps, and a save that is due": {"max_steps": 8, "validate_on_save": True, "every": 4},
    "max_steps, and a validation that is due": {"max_steps": 9, "lightning": {"val_check_interval": 3, "check_val_every_n_epoch": None}},
    "max_steps and accumulation": {"max_steps": 4, "lightning": {"accumulate_grad_batches": 2}},
    "max_steps on Lightning's own loops": {"max_steps": 8, "validate_on_save": True, "lean": False},
    "max_steps, and a loader with a generator of its own": {"max_steps": 8, "loader": lambda: make_loader(own_generator=True)},
    "a callback": {"stops": "batch"},
    "a callback, and epochs without validation": {"stops": "batch", "lightning": {"check_val_every_n_epoch": 3}},
    "a callback in an open window": {"stops": "batch", "lightning": {"accumulate_grad_batches": 2}},
    "a callback in an open window of Lightning's own loops": {"stops": "batch", "lightning": {"accumulate_grad_batches": 2}, "lean": False},
    "a callback in the validation": {"stops": "validation", "lightning": {"val_check_interval": 2}},
}


@pytest.mark.parametrize("name", some(CUTS, 2))
def test_a_run_that_a_limit_has_cut_inside_an_epoch_goes_on_there(name: str, tmp_path: Path) -> None:
    case = {"valid": True, "every": None, "kind": Tensors} | CUTS[name]
    stops, max_steps, lightning = case.pop("stops", None), case.pop("max_steps", -1), case.pop("lightning", {})
    whole = build(tmp_path / "whole", case | {"lightning": lightning}, seed=1)
    run(whole, case)
    expected = outcome(whole)
    limits = {"lightning": lightning | {"max_steps": max_steps}, "callbacks": lambda: [Stops(stops)] if stops else []}
    cut = build(tmp_path / "cut", case | limits, seed=1)
    result = run(cut, case)
    assert result.status == "stopped" and (cut.counts.epoch, len(cut.history)) == (2, 2)
    (state,) = (cut.run_dir / "checkpoints").glob(f"epoch=1-step={cut.counts.step}.ckpt")
    assert cut.history.last.path == state == (cut.run_dir / "checkpoints" / "last.ckpt").resolve()
    again = build(tmp_path / "cut", case | {"lightning": lightning}, seed=2)
    run(again, case, resume="auto")
    assert outcome(again) == expected
    assert without_times(load_run(again.run_dir).epochs) == without_times(whole.history.epochs)


def test_the_row_of_a_cut_epoch_can_be_the_best_one(tmp_path: Path) -> None:
    case = {"valid": True, "validate_on_save": True, "keep_last_n": 1, "every": None, "lightning": {"max_steps": 8}}
    trainer = build(tmp_path, case, seed=1)
    run(trainer, case)
    folder = trainer.run_dir / "checkpoints"
    assert trainer.history._last_is_best and saved(trainer) == ["best.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    assert (folder / "best.ckpt").resolve() == trainer.history.best.path == folder / "epoch=1-step=8.ckpt"
    state = read_checkpoint(folder / "best.ckpt")["state_dict"]
    assert numbers({name.removeprefix("model."): value for name, value in state.items()}) == numbers(trainer.best_weights)


def as_killed_after(folder: Path, name: str) -> None:
    """Leave in a folder of checkpoints what is there when `name` was just written: no later one, and no link yet."""
    path = folder / name
    for other in list(folder.iterdir()):
        if other.is_symlink() or (other.name != "history.jsonl" and other.stat().st_mtime_ns > path.stat().st_mtime_ns):
            other.unlink()


def test_a_kill_between_a_save_and_its_links_costs_neither_the_best_weights_nor_the_link(tmp_path: Path) -> None:
    whole = build(tmp_path, {"every": 2}, seed=1)
    run(whole, {})
    expected, folder = outcome(whole), whole.run_dir / "checkpoints"
    as_killed_after(folder, "epoch=2-step=10.ckpt")
    assert whole.history.best["epoch"] == 3
    again = build(tmp_path, {"every": 2}, seed=2)
    again.load_state()
    assert again.history.best.path == folder / "epoch=2-step=10.ckpt"
    assert numbers(again.best_weights) == numbers(again.model.state_dict())
    run(again, {}, resume="auto")
    assert outcome(again) == expected
    assert (folder / "best.ckpt").resolve() == (folder / "last.ckpt").resolve() == folder / "epoch=3-step=15.ckpt"


def test_an_older_state_has_the_best_weights_of_its_time(tmp_path: Path) -> None:
    whole = build(tmp_path, {"every": 2}, seed=1)
    run(whole, {})
    again = build(tmp_path / "again", {"every": 2}, seed=2)
    again.load_state(whole.run_dir / "checkpoints" / "epoch=1-step=8.ckpt")
    then = build(tmp_path / "then", {"every": 2}, seed=2)
    then.load_state(whole.run_dir / "checkpoints" / "epoch=1-step=5.ckpt")
    assert numbers(again.best_weights) == numbers(then.model.state_dict())


def test_the_link_to_the_best_is_mended_by_the_next_save_of_another_process(tmp_path: Path) -> None:
    one = make_trainer(Saving, save_path=tmp_path)
    one.run(1, make_loader())
    folder = one.run_dir / "checkpoints"
    (folder / "best.ckpt").unlink()
    two = make_trainer(Saving, save_path=tmp_path, keep_last_n=1)
    two.load_state()
    two.history.epochs[0]["train_loss"] = -1.0  # no later epoch is better
    two.run(2, make_loader())
    assert saved(two) == ["best.ckpt", "epoch=1-step=5.ckpt", "epoch=3-step=15.ckpt", "last.ckpt"]
    assert (folder / "best.ckpt").resolve().name == "epoch=1-step=5.ckpt"


def test_what_a_kill_left_in_any_run_folder_is_cleaned_at_the_next_start(tmp_path: Path) -> None:
    with written(tmp_path / "run-001" / "checkpoints" / "a.ckpt") as temp:
        temp.touch()
    (temp.parent / "a.ckpt").unlink()
    leftover = temp.with_name(f"{temp.name.rpartition('-')[0]}-00000000.tmp")  # of an earlier process with this one's number
    beside = tmp_path / "run-001" / leftover.name.replace("a.ckpt", "after-error.ckpt")
    living = tmp_path / "run-001" / temp.name.replace(f"-{os.getpid()}-", f"-{os.getppid()}-")
    for file in (leftover, beside, living, own := tmp_path / "run-001" / "mine.tmp"):
        file.touch()
    trainer = make_trainer(Saving, save_path=tmp_path)
    trainer.run(1, make_loader(), resume="auto")
    assert trainer.run_dir.name == "run-002"
    assert [path.exists() for path in (leftover, beside, living, own)] == [False, False, True, True]


# -- the newest state is the one furthest on
def turn_clock_back(folder: Path) -> None:
    """Give the checkpoints of a folder times in the reverse order."""
    for time_s, path in enumerate(sorted(folder.glob("epoch=*"), key=lambda path: path.stat().st_mtime_ns, reverse=True), 1_000_000):
        for file in (path, *path.glob("*")):
            os.utime(file, (time_s, time_s))


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_lives_under_a_clock_that_goes_back_continue_where_the_one_before_was(save_format: str, tmp_path: Path) -> None:
    options = {"save_path": tmp_path / "lives", "save_format": save_format, "every_n_steps": 1, "keep_source": False}
    never = make_trainer(Saving, save_path=tmp_path / "never", every_n_steps=1)
    never.run(4, make_loader(), make_valid())
    torch.manual_seed(0)
    reached = []
    for _ in range(3):
        trainer = make_trainer(Saving, **options, lightning={"callbacks": [Breaks(6)]})
        with pytest.raises(Broken):
            trainer.run(4, make_loader(), make_valid(), resume="auto")
        reached.append(trainer.counts.step)
        turn_clock_back(trainer.run_dir / "checkpoints")
    last = make_trainer(Saving, **options)
    last.run(4, make_loader(), make_valid(), resume="auto")
    assert reached == [5, 10, 15] and last.counts == never.counts and same_weights(last.model, never.model)


def test_old_checkpoints_are_removed_by_their_progress_and_not_by_their_time(tmp_path: Path) -> None:
    one = make_trainer(Saving, save_path=tmp_path, save_best=False)
    one.run(12, make_loader())
    turn_clock_back(one.run_dir / "checkpoints")
    two = make_trainer(Saving, save_path=tmp_path, save_best=False, keep_last_n=3)
    two.run(13, make_loader(), resume="auto")
    assert saved(two) == ["epoch=11-step=55.ckpt", "epoch=12-step=60.ckpt", "epoch=13-step=65.ckpt", "last.ckpt"]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9])
def test_the_newest_n_checkpoints_are_kept(n: int, tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, save_best=False, keep_last_n=n)
    trainer.run(5, make_loader())
    assert saved(trainer) == [*(f"epoch={i}-step={5 * i}.ckpt" for i in range(max(1, 6 - n), 6)), "last.ckpt"]


@pytest.mark.parametrize("keep_last_n", [None, 1, 2])
def test_a_run_that_went_back_is_resumed_and_not_what_it_left_behind(keep_last_n: int | None, tmp_path: Path) -> None:
    one = make_trainer(Saving, save_path=tmp_path, save_best=False)
    one.run(6, make_loader())
    path = one.run_dir / "checkpoints" / "epoch=2-step=10.ckpt"
    options = {"optimizer": lambda params: torch.optim.Adam(params, lr=1e-3), "save_best": False, "keep_last_n": keep_last_n}
    never = make_trainer(Saving, save_path=tmp_path / "never", **options)
    never.run(5, make_loader(), resume=path)
    killed = make_trainer(Saving, save_path=tmp_path, **options, lightning={"callbacks": [Breaks(7)]})
    with pytest.raises(Broken):
        killed.run(5, make_loader(), resume=path)
    again = make_trainer(Saving, save_path=tmp_path, **options)
    again.run(5, make_loader(), resume="auto")
    assert same_weights(again.model, never.model) and again.counts.epoch == 5
    kept = {None: range(1, 7), 1: range(5, 6), 2: range(4, 6)}[keep_last_n]
    assert saved(again) == [*(f"epoch={n}-step={5 * n}.ckpt" for n in kept), "last.ckpt", *(["superseded"] if keep_last_n is None else [])]
    assert make_trainer(Saving, save_path=tmp_path).load_state().name == "epoch=5-step=25.ckpt"
    if keep_last_n is None:  # what was left behind is there by its path, and is then the newest
        left = make_trainer(Saving, save_path=tmp_path)
        left.run(7, make_loader(), resume=path.with_name("epoch=6-step=30.ckpt"))
        assert left.counts.epoch == 7 and "superseded" not in saved(left)


# -- when and where
def saved(trainer: Any) -> list[str]:
    """What is in the folder of the checkpoints, beside the journal of the history."""
    return sorted(path.name for path in (trainer.run_dir / "checkpoints").iterdir() if path.name != "history.jsonl")


def test_each_epoch_is_saved_where_nothing_else_is_said(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path)
    trainer.run(2, make_loader())
    assert saved(trainer) == ["best.ckpt", "epoch=1-step=5.ckpt", "epoch=2-step=10.ckpt", "last.ckpt"]
    assert trainer.result.last.path == trainer.run_dir / "checkpoints" / "epoch=2-step=10.ckpt"
    assert (trainer.run_dir / "checkpoints" / "last.ckpt").resolve() == trainer.result.last.path
    assert not (trainer.run_dir / "last.safetensors").exists()


def test_the_end_is_saved_even_where_no_save_was_due(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, every_n_epochs=5, save_best=False, save_last=False)
    trainer.run(2, make_loader())
    assert saved(trainer) == ["epoch=2-step=10.ckpt"]


def test_keep_last_n_keeps_what_best_points_to(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, keep_last_n=1, monitor="train_mae", monitor_mode="max")
    trainer.run(4, make_loader())
    best = trainer.history.best["epoch"]
    names = {f"epoch={best}-step={5 * best}.ckpt", "epoch=4-step=20.ckpt", "best.ckpt", "last.ckpt"}
    assert set(saved(trainer)) == names and best < 4
    assert [row["epoch"] for row in trainer.history.epochs if row.path] == [best, 4]


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
@pytest.mark.parametrize("wanted", [True, False])
def test_where_links_can_not_be_or_are_not_wanted_best_and_last_are_copies_and_no_more_is_kept(
    save_format: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError("no links here")

    if wanted:
        monkeypatch.setattr(Path, "symlink_to", refuse)
    options = {"keep_last_n": 1, "monitor": "train_mae", "monitor_mode": "max", "save_format": save_format, "symlink_best_and_last": wanted}
    trainer = make_trainer(Saving, save_path=tmp_path, **options)
    trainer.run(4, make_loader())
    best, suffix = trainer.history.best["epoch"], ".ckpt" if save_format == "ckpt" else ""
    folder = trainer.run_dir / "checkpoints"
    names = {f"epoch={best}-step={5 * best}{suffix}", f"epoch=4-step=20{suffix}", f"best{suffix}", f"last{suffix}"}
    assert set(saved(trainer)) == names and best < 4 and not any(path.is_symlink() for path in folder.iterdir())
    for link, name in (("best", f"epoch={best}-step={5 * best}"), ("last", "epoch=4-step=20")):
        copied, original = read_checkpoint(folder / f"{link}{suffix}"), read_checkpoint(folder / f"{name}{suffix}")
        assert numbers(copied["state_dict"]) == numbers(original["state_dict"])
    again = make_trainer(Saving, save_path=tmp_path, **options)
    again.run(5, make_loader(), resume="last")
    assert again.counts.epoch == 5 and again.run_dir == trainer.run_dir and f"epoch={best}-step={5 * best}{suffix}" in saved(again)


def test_config_of_the_model_is_beside_its_weights(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, save_format="safetensor")
    trainer.model.config = {"width": 16}
    trainer.run(1, make_loader())
    config = trainer.run_dir / "checkpoints" / "last" / "config.json"
    assert config.read_text().split() == ["{", '"width":', "16", "}"]


@pytest.mark.filterwarnings("ignore")
def test_a_plain_lightning_trainer_goes_on_with_a_state(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path)
    trainer.run(2, make_loader())
    other = make_trainer(Saving, save_path=tmp_path / "other")
    plain = L.Trainer(**other.lightning_args(), max_epochs=3, default_root_dir=tmp_path)
    plain.fit(other.as_lightning_module(), make_loader(), ckpt_path=trainer.result.last.path)
    assert (plain.current_epoch, plain.global_step) == (3, 15)
    assert torch.load(trainer.result.last.path, weights_only=True)["epoch"] == 1


@pytest.mark.filterwarnings("ignore")
def test_the_addon_saves_under_a_plain_lightning_trainer(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, every_n_steps=2)
    L.Trainer(**trainer.lightning_args(), max_epochs=1, default_root_dir=tmp_path).fit(trainer.as_lightning_module(), make_loader())
    assert saved(trainer) == ["best.ckpt", "epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "epoch=1-step=5.ckpt", "last.ckpt"]


def test_save_state_and_load_state_between_runs(tmp_path: Path) -> None:
    one = make_trainer(Saving, save_path=tmp_path, every_n_epochs=9)
    torch.manual_seed(4)
    one.run(1, make_loader())
    path = one.save_state()
    one.run(2, make_loader())
    two = make_trainer(Saving, save_path=tmp_path)
    assert two.load_state(path) == path
    two.run(2, make_loader())
    assert same_weights(one.model, two.model) and without_times(one.history.epochs) == without_times(two.history.epochs)


def test_load_state_takes_the_newest_of_the_newest_run(tmp_path: Path) -> None:
    for n in (1, 2):
        make_trainer(Saving, save_path=tmp_path).run(n, make_loader())
    trainer = make_trainer(Saving, save_path=tmp_path)
    assert trainer.load_state() == tmp_path / "run-002" / "checkpoints" / "epoch=2-step=10.ckpt"
    assert (trainer.counts.epoch, len(trainer.history)) == (2, 2)


# -- resume=
def test_resume_auto_starts_takes_up_and_ends(tmp_path: Path) -> None:
    def attempt(*callbacks: Callback) -> Any:
        trainer = make_trainer(Saving, save_path=tmp_path, keep_source=False, lightning={"callbacks": [*callbacks]})
        trainer.run(3, make_loader(), resume="auto")
        return trainer

    with pytest.raises(Broken):
        attempt(Breaks(6))
    second = attempt()
    assert (second.counts.epoch, second.run_dir.name, second.result.status) == (3, "run-001", "completed")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    third = attempt()
    assert (third.result.status, third.result.last["epoch"]) == ("completed", 3)
    assert third.result.reason == "all 3 epochs were there: nothing to train"
    handle = make_trainer(Saving, save_path=tmp_path).run(3, make_loader(), resume="auto", background=True)
    assert handle.wait() is handle.result and handle.status == "completed" and not handle.is_on
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"} == before


def test_events_of_a_resumed_run_read_as_one_run(tmp_path: Path) -> None:
    whole = build(tmp_path, {"every": 2}, seed=1)
    run(whole, {})
    middle = whole.run_dir / "checkpoints" / "epoch=1-step=8.ckpt"
    (whole.run_dir / "events.jsonl").write_text((whole.run_dir / "events.jsonl").read_text()[:-7])  # a kill cuts the last line
    again = build(tmp_path, {"every": 2}, seed=2)
    run(again, {}, resume=middle)
    read = load_run(again.run_dir)
    assert without_times(read.epochs) == without_times(whole.history.epochs)
    assert list(read.steps["train"].steps) == list(whole.history.steps["train"].steps)


@pytest.mark.parametrize("resume", ["last", "best", "auto"])
def test_nothing_to_resume_is_a_fresh_run_and_said(resume: str, tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, keep_source=False)
    trainer.run(1, make_loader(), resume=resume)
    notes = [line for line in (trainer.run_dir / "events.jsonl").read_text().splitlines() if '"kind":"note"' in line]
    assert len(notes) == 1 and f"resume='{resume}': nothing was saved" in notes[0] and trainer.counts.epoch == 1


def test_resume_best_goes_back_to_the_best_epoch(tmp_path: Path) -> None:
    one = make_trainer(Saving, save_path=tmp_path, monitor="train_mae", monitor_mode="max")
    one.run(3, make_loader())
    best = one.history.best["epoch"]
    two = make_trainer(Saving, save_path=tmp_path, monitor="train_mae", monitor_mode="max")
    two.run(best + 1, make_loader(), resume="best")
    assert two.counts.epoch == best + 1 and two.history.epochs[best - 1]["train_mae"] == one.history.best["train_mae"]


def test_a_damaged_newest_state_is_skipped_and_said(tmp_path: Path) -> None:
    one = make_trainer(Saving, save_path=tmp_path)
    one.run(2, make_loader())
    newest = one.result.last.path
    newest.write_bytes(newest.read_bytes()[:-100])
    two = make_trainer(Saving, save_path=tmp_path, keep_source=False)
    two.run(3, make_loader(), resume="auto")
    notes = [line for line in (two.run_dir / "events.jsonl").read_text().splitlines() if '"kind":"note"' in line]
    texts = ("skipped: ", "resumed from epoch=1-step=5.ckpt")
    assert [text in note for text, note in zip(texts, notes, strict=True)] == [True, True]
    assert same_weights(one.model, two.model) is False and two.counts.epoch == 3


# -- bad input
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"save_path": None}, 'StateManagerAddon needs a folder to save in.\n  Give save_path="runs/my-run".'),
        ({"save_format": "safetensors"}, "save_format must be 'ckpt' or 'safetensor', got 'safetensors'.\n  Did you mean 'safetensor'?"),
        ({"keep_last_n": 0}, "keep_last_n=0 must be a positive integer.\n  Give 1, 2, 3, … or leave it out."),
        ({"every_n_steps": 1.5}, "every_n_steps must be an integer or None, got 1.5."),
        ({"every_n_steps": 1, "every_n_epochs": 1}, "every_n_epochs and every_n_steps are both given.\n  Give one of them."),
        ({"every_n_minutes": 0.0}, "every_n_minutes=0.0 must be a positive number.\n  Give 10, 0.5, … or leave it out."),
        ({"keep_best_n": 0}, "keep_best_n=0 must be a positive integer.\n  Give 1, 2, 3, … or leave it out."),
        (
            {"keep_best_n": 2, "save_best": False},
            "keep_best_n is given, and save_best=False saves no best checkpoint.\n  Leave one of them out.",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer(Saving, **{"save_path": tmp_path, **options})
    assert str(error.value) == text


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint 'nowhere.ckpt'"):
        make_trainer(Saving, save_path=tmp_path).run(1, make_loader(), resume="nowhere.ckpt")


def test_another_number_of_processes_is_named(tmp_path: Path) -> None:
    one = make_trainer(Saving, save_path=tmp_path, every_n_steps=2)
    one.run(1, make_loader())
    two = make_trainer(Saving.add_on(MultiGPUAddon), save_path=tmp_path / "x", device=["cpu", "cpu"])
    two.load_state(one.run_dir / "checkpoints" / "epoch=0-step=2.ckpt")  # to look at
    assert two.counts.step == 2
    with pytest.raises(CheckpointError) as error:
        two.run(1, make_loader())
    what = "1, and 2 now, so that an update takes 2 batches instead of 1."
    assert str(error.value).splitlines()[0] == f"epoch=0-step=2.ckpt was saved in mid-epoch with another number of processes: {what}"
    assert "with StateManagerAddon's strict=False the epoch begins again" in str(error.value)


def test_weights_alone_are_no_state(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    with pytest.raises(CheckpointError, match="weights.ckpt contains weights, not the state of an nbtrain run"):
        make_trainer(Saving, save_path=tmp_path).load_state(tmp_path / "weights.ckpt")


MISSING = object()
NO_RUN = "a.ckpt is not a state of a run: its {} can't be from one."


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("nbtrain.version", MISSING, "a.ckpt is a state of version None, and this nbtrain reads 1."),
        ("nbtrain.history", MISSING, "a.ckpt is not a whole state: {} is missing."),
        ("nbtrain.best", MISSING, "a.ckpt is not a whole state: {} is missing."),
        ("optimizer_states", MISSING, "a.ckpt is not a whole state: {} is missing."),
        ("nbtrain.counts", [1, 2, 3], NO_RUN),
        ("nbtrain.counts", {"epoch": 1, "years": 2}, NO_RUN),
        ("nbtrain.history", {"epochs": 3}, NO_RUN),
        ("nbtrain.history", "a long one", NO_RUN),
        ("nbtrain.metrics", {"train": {}}, NO_RUN),
        ("nbtrain.finished", "two", NO_RUN),
        ("nbtrain.random", None, NO_RUN),
        ("nbtrain.best", 3, NO_RUN),
        ("optimizer_states", {"lr": 0.1}, NO_RUN),
        ("state_dict", [torch.ones(2)], NO_RUN),
    ],
)
def test_a_state_whose_part_is_missing_or_something_else_is_refused_and_changes_nothing(
    name: str, value: Any, text: str, tmp_path: Path
) -> None:
    one = make_trainer(Saving, save_path=tmp_path)
    one.run(1, make_loader())
    state = read_checkpoint(one.result.last.path)
    part, key = (state["nbtrain"] if name.startswith("nbtrain.") else state), name.removeprefix("nbtrain.")
    if value is MISSING:
        del part[key]
    else:
        part[key] = value
    write_checkpoint(snapshot(state), tmp_path / "a.ckpt")
    two = make_trainer(Saving, save_path=tmp_path)
    before = numbers(two.model.state_dict())
    with pytest.raises(CheckpointError) as error:
        two.load_state(tmp_path / "a.ckpt")
    assert str(error.value).splitlines()[0] == text.format(name)
    assert numbers(two.model.state_dict()) == before and two.counts.epoch == 0


class FolderGone(Callback):
    """Puts a file where the folder of checkpoints was, when the second epoch begins: nothing can be saved any more."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            keeper: Any = next(callback for callback in trainer.checkpoint_callbacks)
            keeper.disk.writer.wait()
            folder = self.root / "run-001" / "checkpoints"
            folder.rename(self.root / "gone")
            folder.touch()


def test_a_save_that_fails_is_noted_and_the_run_goes_on(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, keep_source=False, lightning={"callbacks": [FolderGone(tmp_path)]})
    trainer.run(3, make_loader())
    notes = [line for line in (trainer.run_dir / "events.jsonl").read_text().splitlines() if '"kind":"note"' in line]
    assert trainer.result.status == "completed" and len(notes) == 2 and "a checkpoint was not saved" in notes[0]
    assert (tmp_path / "gone" / "epoch=1-step=5.ckpt").exists()
    assert trainer.result.last.path.suffix == ".safetensors"  # the weights alone, written at the end


def test_a_save_that_fails_stops_the_run_where_that_was_asked_for(tmp_path: Path) -> None:
    callbacks = {"callbacks": [FolderGone(tmp_path)]}
    trainer = make_trainer(Saving, save_path=tmp_path, stop_on_save_error=True, keep_source=False, lightning=callbacks)
    with pytest.raises((CheckpointError, OSError)):
        trainer.run(3, make_loader())


def test_persistent_workers_are_said_to_be_inexact(tmp_path: Path) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, keep_source=False)
    trainer.run(1, DataLoader(Augmented(), 16, num_workers=1, persistent_workers=True))
    assert "Resume is not exact here: persistent workers keep their random numbers" in (trainer.run_dir / "events.jsonl").read_text()


@pytest.mark.parametrize("validates", [True, False])
def test_a_save_by_steps_records_the_loss_of_its_validation_else_of_the_training_so_far(tmp_path: Path, validates: bool) -> None:
    trainer = make_trainer(Saving, save_path=tmp_path, every_n_steps=3, validate_on_save=validates)
    trainer.run(1, make_loader(), make_valid())
    path = tmp_path / "run-001" / "checkpoints" / "epoch=0-step=3.ckpt"
    loss = read_checkpoint(path)["nbtrain"]["loss"]
    if validates:
        again = make_trainer(Saving, save_path=tmp_path / "other")
        again.load_state(path)
        assert loss == pytest.approx(again.evaluate(make_valid())["loss"], rel=1e-6)
    else:
        losses, samples = trainer.history.steps["train"]["train_loss"][:3], 16
        assert loss == pytest.approx(sum(value * samples for value in losses) / (3 * samples), rel=1e-12)


def test_a_save_by_epochs_is_validated_first_where_that_is_asked_for(tmp_path: Path) -> None:
    options = {"every_n_epochs": 2, "save_best": False, "lightning": {"check_val_every_n_epoch": 5}}
    trainer = make_trainer(Saving, save_path=tmp_path, validate_on_save=True, **options)
    trainer.run(5, make_loader(), make_valid())
    assert ["val_loss" in row for row in trainer.history.epochs] == [False, True, False, True, True]  # the end is a save too
    losses = [read_checkpoint(row.path)["nbtrain"]["loss"] for row in trainer.history.epochs if row.path]
    assert losses == [row["val_loss"] for row in trainer.history.epochs if "val_loss" in row]


class Fails(Saving):
    """Raises at a batch, counted over the run."""

    fails_at, fails_in, n_batches = 0, "train", 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.n_batches += self.mode == self.fails_in
        if self.n_batches == self.fails_at and self.mode == self.fails_in:
            raise ValueError("boom")
        return super().train_step(batch)


def fail(tmp_path: Path, at: int, mode: str = "train", **options: Any) -> Any:
    trainer = make_trainer(Fails, save_path=tmp_path, **options)
    trainer.fails_at, trainer.fails_in = at, mode
    with pytest.raises(ValueError, match="boom"):
        trainer.run(3, make_loader(), make_valid())
    return trainer


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_after_an_error_a_state_is_saved_that_resume_takes_by_its_path(tmp_path: Path, save_format: str) -> None:
    failed = fail(tmp_path, 8, save_format=save_format)  # epoch 2, batch 3
    (path,) = failed.run_dir.glob("after-error*")
    assert f"The state after the error is in {path.name}: resume from it" in (failed.run_dir / "events.jsonl").read_text()
    trainer = make_trainer(Saving, save_path=tmp_path, save_format=save_format)
    trainer.load_state(path)
    assert trainer.counts.step == 7 and same_weights(trainer.model, failed.model)
    resumed = make_trainer(Saving, save_path=tmp_path, save_format=save_format)
    assert resumed.run(3, make_loader(), make_valid(), resume=path).status == "completed" and resumed.counts.step == 15
    auto = make_trainer(Saving, save_path=tmp_path, save_format=save_format)
    assert auto.run(3, make_loader(), make_valid(), resume="auto").status == "completed" and auto.counts.step == 15


def test_after_an_error_in_a_validation_the_weights_are_there(tmp_path: Path) -> None:
    failed = fail(tmp_path, 2, "test")  # the first batch is tried before the training
    path = failed.run_dir / "after-error.ckpt"
    trainer = make_trainer(Saving, save_path=tmp_path)
    with pytest.raises(CheckpointError, match="after an error at the end of an epoch or in its validation, and can't be resumed"):
        trainer.load_state(path)
    trainer.apply_weights(path)
    assert same_weights(trainer.model, failed.model)


def test_no_state_after_an_error_in_a_window_or_without_the_option(tmp_path: Path) -> None:
    in_window = fail(tmp_path / "a", 4, lightning={"accumulate_grad_batches": 2})
    off = fail(tmp_path / "b", 4, save_on_error=False)
    assert not list(in_window.run_dir.glob("after-error*")) and not list(off.run_dir.glob("after-error*"))
