"""The ranks of a split model write one state together, and it is resumed as any other, by any strategy."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from samples import make_trainer, make_valid, same_weights
from test_strategies import SPLIT, difference, loader, make, make_net
from torch.distributed.tensor import DTensor

import nbtrain.checkpoint.sharded
from nbtrain import CheckpointError, MultiGPUAddon, StateManagerAddon, Trainer, WorkerError
from nbtrain.checkpoint.files import newest_valid, read_checkpoint

SAVING = (MultiGPUAddon, StateManagerAddon)


def notes_of(trainer: Any) -> list[str]:
    texts: list[str] = []
    trainer.recorder.add(SimpleNamespace(update=lambda event: texts.append(event.data["text"]) if event.kind == "note" else None))
    return texts


class Look(L.Callback):
    """Tells in each checkpoint what kinds of tensors it was made of."""

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        moments = [state["exp_avg"] for state in checkpoint["optimizer_states"][0]["state"].values()]
        checkpoint["n_split"] = sum(isinstance(value, DTensor) for value in [*checkpoint["state_dict"].values(), *moments])


@pytest.mark.parametrize(("name", "save_type", "second"), [("fsdp2", "sharded", 0.85), ("tp", "deduped", 0.5)])
def test_parts_are_saved_without_a_gather_and_are_what_the_run_ended_with(tmp_path: Path, name: str, save_type: str, second: float) -> None:
    """`second`: how large the second rank's file is at the most, beside the first one's."""
    trainer = make(SAVING, save_path=tmp_path, save_type=save_type, keep_last_n=1, lightning={"callbacks": [Look()]}, **SPLIT[name])
    trainer.run(2, loader(trainer))
    path = trainer.result.last.path
    assert [file.name for file in sorted(path.iterdir())] == [
        "rank-0-of-2.safetensors",
        "rank-1-of-2.safetensors",
        "state.json",
        "tensors.safetensors",
    ]
    state = read_checkpoint(tmp_path / "run-001" / "checkpoints" / "last")
    assert state["n_split"] == {"fsdp2": 16, "tp": 8}[name]
    one = make(SAVING, save_path=tmp_path, device="cpu", model=make_net(seed=1))
    one.load_state(path)
    assert same_weights(one.model, trainer.model) and difference(one, trainer) == 0.0
    assert {p.name for p in path.parent.iterdir()} == {path.name, "last", "best", one.history.best.path.name, "history.jsonl"}
    sizes = [file.stat().st_size for file in sorted(path.glob("rank-*"))]
    assert sizes[1] < sizes[0] * second


def test_each_strategy_takes_up_what_another_has_saved_in_parts(tmp_path: Path) -> None:
    never = make(device="cpu")
    never.run(5, loader(never))
    ways = [
        {**SPLIT["fsdp2"], "save_type": "sharded"},
        {**SPLIT["tp"], "save_type": "deduped"},
        {"strategy": "ddp", "save_type": "deduped"},  # not split: a whole state
        {**SPLIT["fsdp2"], "save_type": "deduped", "save_format": "safetensor"},
        {"device": "cpu"},
    ]
    trainer = never
    for n, way in enumerate(ways, 1):
        before = trainer
        trainer = make(SAVING, save_path=tmp_path, **way)
        if n > 1:
            trainer.load_state()
            assert difference(before, trainer) == 0.0
        trainer.run(n, loader(trainer), resume="last")
    assert trainer.counts.epoch == 5 and difference(never, trainer) < 1e-5
    folder = tmp_path / "run-001" / "checkpoints"
    assert [path.is_dir() for path in sorted(folder.glob("epoch=*"))] == [True, True, False, True, False]
    assert [link.name for link in folder.glob("last*")] == ["last.ckpt"]


def test_run_goes_on_from_parts_that_were_saved_in_mid_epoch_bit_for_bit(tmp_path: Path) -> None:
    options = {**SPLIT["fsdp2"], "save_path": tmp_path, "every_n_steps": 3, "save_type": "deduped"}
    never = make(SAVING, **options)
    never.run(3, loader(never))
    path = tmp_path / "run-001" / "checkpoints" / "epoch=1-step=6"
    again = make(SAVING, **options, model=make_net(seed=1))
    texts = notes_of(again)
    again.run(3, loader(again), resume=path)
    cost = "Resuming reads 1 batch of this epoch again: its batches are dealt to several processes, each of which reads its own."
    assert texts == ["resumed from epoch=1-step=6: 1 of 3 epochs was there; 2 more", cost]
    assert again.counts.step == 15 and difference(never, again) == 0.0
    three = make(SAVING, save_path=tmp_path, strategy="fsdp2", device=["cpu"] * 3)
    with pytest.raises(CheckpointError, match="epoch=1-step=6 was saved in mid-epoch with another number of processes: 2, and 3 now"):
        three.run(3, loader(again), resume=path)


class Break(L.Callback):
    """In rank `rank` the function `name` of the writing fails in its second save: it raises, or the process is killed."""

    def __init__(self, rank: int, name: str, *, kill: bool) -> None:
        self.rank, self.name, self.kill = rank, name, kill

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_rank != self.rank:
            return
        real, calls = getattr(nbtrain.checkpoint.sharded, self.name), []

        def failing(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                if self.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(28, "No space left on device")
            return real(*args)

        setattr(nbtrain.checkpoint.sharded, self.name, failing)


def test_part_that_can_not_be_written_is_noted_and_costs_only_that_save(tmp_path: Path) -> None:
    options = {**SPLIT["fsdp2"], "save_type": "sharded", "save_path": tmp_path}
    trainer = make(SAVING, lightning={"callbacks": [Break(1, "write_part", kill=False)]}, **options)
    texts = notes_of(trainer)
    trainer.run(3, loader(trainer))
    assert texts == ["a checkpoint was not saved: Rank 1 could not write its shard: [Errno 28] No space left on device"]
    folder = tmp_path / "run-001" / "checkpoints"
    assert {path.name for path in folder.iterdir()} - {"best"} == {"epoch=1-step=5", "epoch=3-step=15", "last", "history.jsonl"}


def test_merged_parts_are_a_checkpoint_of_plain_lightning_and_of_a_trainer(tmp_path: Path) -> None:
    trainer = make(SAVING, save_path=tmp_path, save_type="deduped", **SPLIT["tp"])
    trainer.run(1, loader(trainer))
    merged = Trainer.merge_checkpoint(tmp_path / "run-001", tmp_path / "whole.ckpt")
    one = make_trainer(type(make(device="cpu")), model=make_net(seed=1), gradient_clip=0.3)
    module = one.as_lightning_module()
    plain = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    plain.fit(module, loader(make(device="cpu")), make_valid(), ckpt_path=merged)
    assert same_weights(one.model, trainer.model)  # the epoch was done, and the weights are those that were saved


def test_first_rank_is_killed_while_it_writes_and_the_state_before_is_resumed(tmp_path: Path) -> None:
    options = {"save_type": "sharded", "save_path": tmp_path}
    killed = make(SAVING, lightning={"callbacks": [Break(0, "write_folder", kill=True)]}, **SPLIT["fsdp2"], **options)
    with pytest.raises(WorkerError, match="Rank 0 was killed by SIGKILL"):
        killed.run(3, loader(killed))
    folder = tmp_path / "run-001" / "checkpoints"
    assert newest_valid(folder).path == folder / "epoch=1-step=5" == (folder / "last").resolve()
    assert len(list(folder.glob(".epoch=2-step=10.*.tmp/rank-*"))) == 2  # all parts, and no word of them
    again = make(SAVING, device="cpu", **options)
    again.run(2, loader(again), resume="auto")
    assert {path.name for path in folder.iterdir()} == {"epoch=1-step=5", "epoch=2-step=10.ckpt", "last.ckpt", "best.ckpt", "history.jsonl"}
