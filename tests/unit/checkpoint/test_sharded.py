"""A state in parts is what its ranks had, bit for bit, or it is refused with the name of what is missing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from samples import Regress, make_loader, make_trainer
from torch import Tensor

from nbtrain import CheckpointError, ConfigError, StateManagerAddon, Trainer
from nbtrain.checkpoint.files import _seal, newest_valid, read_checkpoint, verify_checkpoint, write_checkpoint
from nbtrain.checkpoint.sharded import Ranks, ShardWriter
from nbtrain.checkpoint.snapshot import Box, Snapshot, snapshot
from nbtrain.checkpoint.weights import read_weights
from nbtrain.cli import main


def in_threads(n: int, work: Callable[[Ranks], None]) -> list[Exception]:
    """`work` in each of `n` ranks, which are threads. Returns what they raised."""
    told: list[Any] = [None] * n
    barrier, errors = Barrier(n, timeout=20), []

    def gather(value: Any, rank: int) -> list[Any]:
        told[rank] = value
        barrier.wait()
        values = list(told)
        barrier.wait()
        return values

    def run(rank: int) -> None:
        try:
            work(Ranks(rank, n, partial(gather, rank=rank)))
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def whole_state() -> dict[str, Any]:
    """A matrix and its moment, a row that is too short for all ranks, tied weights, a buffer, a step count, and all that is no tensor."""
    torch.manual_seed(0)
    tied = torch.randn(4, 2).bfloat16()
    weights = {"model.0.weight": torch.randn(5, 3), "model.0.bias": torch.randn(1), "model.in": tied, "model.out": tied}
    moments = {"step": torch.tensor(7.0), "exp_avg": torch.randn(5, 3)}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    buffers = {"model.mean": torch.randn(3), "model.n": torch.tensor(3)}
    random = {"torch": torch.arange(9, dtype=torch.uint8), "numpy": np.arange(3), "places": (1, 2)}
    return {"state_dict": weights | buffers, "optimizer_states": [optimizer], "nbtrain": {"random": random}, "epoch": 2}


SPLIT = [("state_dict", name) for name in ("model.0.weight", "model.0.bias", "model.in", "model.out")]
SPLIT.append(("optimizer_states", 0, "state", 0, "exp_avg"))


def part_of(state: dict[str, Any], rank: int, n: int) -> Snapshot:
    """What a snapshot has in a rank, of which each has some of the rows, as `torch.chunk` shares them out."""
    taken = snapshot(state)
    cut: dict[int, Tensor] = {}
    for *keys, last in SPLIT:
        holder: Any = taken.state
        for key in keys:
            holder = holder[key]
        tensor = holder[last]
        size = -(-len(tensor) // n)
        at = min(rank * size, len(tensor))
        holder[last] = cut.setdefault(id(tensor), tensor[at : at + size].clone())
        taken.boxes[(*keys, last)] = Box(tuple(tensor.shape), (at, *(0,) * (tensor.ndim - 1)))
    return taken


def save(path: Path, *, n: int = 2, deduped: bool = True, state: dict[str, Any] | None = None) -> Path:
    state = whole_state() if state is None else state

    def work(ranks: Ranks) -> None:
        ShardWriter(ranks, deduped)(part_of(state, ranks.number, ranks.size), path, "ckpt", {"hidden": 3})

    for error in in_threads(n, work):
        raise error
    return path


def identical(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(identical, a, b))
    return type(a) is type(b) and np.array_equal(a, b)


@pytest.mark.parametrize("deduped", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_parts_of_any_number_of_ranks_are_read_as_the_whole_bit_for_bit(tmp_path: Path, n: int, deduped: bool) -> None:
    state = read_checkpoint(save(tmp_path / "state", n=n, deduped=deduped))
    assert identical(state, whole_state())
    assert state["state_dict"]["model.in"] is state["state_dict"]["model.out"]  # tied as they were


def test_sharded_has_all_that_a_rank_has_and_deduped_each_value_once(tmp_path: Path) -> None:
    names = {
        deduped: [set(load_file(file)) for file in sorted(save(tmp_path / str(deduped), deduped=deduped).glob("rank-*"))]
        for deduped in (False, True)
    }
    split = {"state_dict.model.0.weight", "state_dict.model.in", "optimizer_states.0.state.0.exp_avg"}
    copies = {"state_dict.model.mean", "state_dict.model.n", "optimizer_states.0.state.0.step"}
    short = {"state_dict.model.0.bias"}
    assert names == {False: [split | copies | short, split | copies], True: [split | copies | short, split]}


@pytest.mark.parametrize("out", ["whole.ckpt", "whole.pt", "whole"])
def test_merged_state_is_a_whole_checkpoint(tmp_path: Path, out: str) -> None:
    path = Trainer.merge_checkpoint(save(tmp_path / "parts"), tmp_path / out)
    assert path == tmp_path / out and identical(read_checkpoint(path), whole_state())
    if path.is_dir():
        assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", "state.json", "tensors.safetensors"]
        assert json.loads((path / "config.json").read_text()) == {"hidden": 3}
    else:
        assert torch.equal(torch.load(path, weights_only=True)["state_dict"]["model.n"], torch.tensor(3))


def test_parts_are_given_as_a_list_of_all_files_too(tmp_path: Path) -> None:
    files = sorted(save(tmp_path / "parts").iterdir())
    assert identical(read_checkpoint(Trainer.merge_checkpoint(files, tmp_path / "a.ckpt")), whole_state())
    assert identical(read_checkpoint(Trainer.merge_checkpoint(files[1:3], tmp_path / "b.ckpt")), whole_state())


def refusal(files: Any, out: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        Trainer.merge_checkpoint(files, out)
    assert not out.exists()
    return str(raised.value).partition("\n")[0]


def test_missing_part_is_named(tmp_path: Path) -> None:
    save(tmp_path / "b")
    path, out = save(tmp_path / "a", n=3), tmp_path / "whole.ckpt"
    files = [path / "rank-0-of-3.safetensors", path / "rank-2-of-3.safetensors"]
    assert refusal(files, out) == "rank-1-of-3.safetensors of a is not among the files."
    assert refusal([path, tmp_path / "b"], out) == f"Expected one checkpoint to merge, got {path}, {tmp_path / 'b'}."
    assert refusal([], out) == "Expected one checkpoint to merge, got nothing."
    (path / "rank-1-of-3.safetensors").unlink()
    assert refusal(path, out) == refusal(files, out) == "rank-1-of-3.safetensors is missing."
    (path / "state.json").unlink()
    assert refusal(path, out) == "a holds no state.json: it is not a checkpoint, or an incomplete one."


def test_damaged_part_is_skipped_for_the_newest_that_is_whole(tmp_path: Path) -> None:
    older, newer = save(tmp_path / "older"), save(tmp_path / "newer")
    with open(newer / "rank-1-of-2.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    found = newest_valid(tmp_path)
    assert found.path == older and "rank-1-of-2.safetensors is damaged" in str(found.skipped[0])


def _pieces(content: dict[str, Any], name: str = "model.0.weight") -> list[Any]:
    return next(entry for entry in content["parts"] if entry["where"]["$tuple"][-1] == name)["pieces"]


NO_TENSOR = "The shards of state_dict.model.0.weight do not make a tensor of {}."
FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a part less": (lambda c: _pieces(c).pop(), NO_TENSOR.format((5, 3))),
    "another shape": (lambda c: c["parts"][0].update(shape={"$tuple": [10**9, 10**9]}), NO_TENSOR.format((10**9, 10**9))),
    "a part elsewhere": (lambda c: _pieces(c)[1]["$tuple"][2]["$tuple"].__setitem__(0, 1), NO_TENSOR.format((5, 3))),
    "a name that is in no file": (
        lambda c: _pieces(c)[0]["$tuple"].__setitem__(1, "other"),
        "A shard of parts is not a complete safetensors file, or lacks a tensor.",
    ),
    "a rank that is none": (lambda c: _pieces(c)[0]["$tuple"].__setitem__(0, 9), "parts does not have the content of a checkpoint."),
    "more ranks than files": (
        lambda c: c.update(ranks=10**12),
        "state.json lists invalid files, or not all: 'config.json', 'rank-0-of-2.safetensors', 'rank-1-of-2.safetensors', "
        "'tensors.safetensors'.",
    ),
    "no index": (lambda c: c.pop("parts"), "parts does not have the content of a checkpoint."),
}


@pytest.mark.parametrize("name", FORGED)
def test_index_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    path, (change, expected) = save(tmp_path / "parts"), FORGED[name]
    content = json.loads((path / "state.json").read_text())["content"]
    change(content)
    (path / "state.json").write_bytes(_seal(json.dumps(content).encode()))  # with a checksum that fits
    assert refusal(path, tmp_path / "whole.ckpt") == expected


def errors_of(folder: Path, change: Callable[[Snapshot, int], None]) -> set[str]:
    """What two ranks raise that write a snapshot after `change`; nothing is left in the folder."""

    def work(ranks: Ranks) -> None:
        taken = part_of(whole_state(), ranks.number, ranks.size)
        change(taken, ranks.number)
        ShardWriter(ranks, True)(taken, folder / "parts", "ckpt", None)

    messages = {str(error).partition("\n")[0] for error in in_threads(2, work)}
    assert list(folder.iterdir()) == []
    return messages


def test_what_one_rank_can_not_write_is_an_error_in_all_and_nothing_is_left(tmp_path: Path) -> None:
    def both_have_the_first_rows(taken: Snapshot, rank: int) -> None:
        taken.boxes[SPLIT[0]] = Box((5, 3), (0, 0))

    def unknown_type(taken: Snapshot, rank: int) -> None:
        if rank == 1:
            taken.state["state_dict"]["model.in"] = taken.state["state_dict"]["model.in"].to(torch.complex128)

    what = NO_TENSOR.format((5, 3))
    assert errors_of(tmp_path, both_have_the_first_rows) == {what, f"Rank 0 could not write its shard: {what}"}
    what = "state_dict.model.in is a tensor of complex128, which safetensors does not support."
    assert errors_of(tmp_path, unknown_type) == {what, f"Rank 1 could not write its shard: {what}"}


def test_weights_are_read_from_parts_and_a_part_is_no_whole_checkpoint(tmp_path: Path) -> None:
    weights = read_weights(save(tmp_path / "parts"))
    assert identical(weights, {name.removeprefix("model."): value for name, value in whole_state()["state_dict"].items()})
    with pytest.raises(CheckpointError, match="model.0.weight is sharded over ranks, and a merged checkpoint can't hold a shard."):
        write_checkpoint(part_of(whole_state(), 0, 2), tmp_path / "a.ckpt")


def test_merge_is_a_command_for_a_state_and_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "run-001" / "checkpoints" / "epoch=1-step=5")
    for given, out in ((path, tmp_path / "a.ckpt"), (tmp_path / "run-001", tmp_path / "b")):
        assert main(["merge", str(given), str(out)]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        verify_checkpoint(out)
    (path / "rank-1-of-2.safetensors").unlink()
    assert main(["merge", str(path), str(tmp_path / "c.ckpt")]) == 1
    assert capsys.readouterr().err.startswith("nbtrain: rank-1-of-2.safetensors is missing.\n")
    assert main(["merge", str(tmp_path / "run-001"), str(tmp_path / "c.ckpt")]) == 1
    assert capsys.readouterr().err.startswith("nbtrain: There is no valid checkpoint in ")


def test_model_that_is_not_split_is_saved_whole_whatever_the_type(tmp_path: Path) -> None:
    trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path, save_type="sharded")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run(1, make_loader())
    assert trainer.result.last.path.name == "epoch=1-step=5.ckpt" and trainer.result.last.path.is_file()
    with pytest.raises(ConfigError, match="save_type must be .*, got 'dedupt'.\n  Did you mean 'deduped'?"):
        make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path, save_type="dedupt")
