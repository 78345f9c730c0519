"""Copies from a GPU beside its work: their order, shown by a stand-in for its streams, and where CUDA is the values themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from samples import make_loader, make_trainer
from torch import Tensor, nn

from nbtrain.checkpoint.device_copy import DeviceCopies
from nbtrain.checkpoint.snapshot import Snapshot, snapshot
from nbtrain.state.kept_states import KeptState

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a copy from a GPU, which this machine lacks")


class _Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} after {other.name}")

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.log.append(f"waited for {self.name}"))


def stand_in(log: list[str], free: int) -> Any:
    """What `DeviceCopies` uses of torch.cuda. It computes at once: only the order of the calls is shown."""
    training = _Stream("training", log)

    @contextmanager
    def inside(stream: _Stream) -> Iterator[None]:
        log.append(f"copy on {stream.name}")
        yield

    return SimpleNamespace(
        Stream=lambda device: _Stream("copies", log), current_stream=lambda device: training, stream=inside,
        mem_get_info=lambda device: (free, free),
    )  # fmt: skip


def test_a_tensor_is_doubled_and_copied_after_what_trained_before(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    doubles: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda double, stream: (doubles.append(double), log.append(f"kept for {stream.name}")))
    copies, weight, into = DeviceCopies(stand_in(log, free=1000)), torch.ones(4), torch.zeros(4)
    copies.copy(weight, into)
    assert log == ["copies after training", "copy on copies", "kept for copies"]
    weight.add_(1)  # the next update changes no memory that the copy reads
    assert not copies.delays_training  # a snapshot does not wait
    assert doubles[0].data_ptr() != weight.data_ptr() and doubles[0].tolist() == into.tolist() == [1, 1, 1, 1]


def test_what_finds_no_room_on_the_gpu_is_copied_in_the_order_of_the_training() -> None:
    log: list[str] = []
    copies, into = DeviceCopies(stand_in(log, free=60)), torch.zeros(4)
    copies.copy(torch.ones(4), into)  # 16 bytes, and a quarter of what is free is 15
    assert log == [] and into.sum() == 4 and copies.delays_training
    copies.finish()
    copies.wait()
    assert log == ["waited for training", "waited for copies"]
    copies.wait()
    assert len(log) == 2


def test_a_state_is_read_only_after_its_copies() -> None:
    log: list[str] = []
    copies = DeviceCopies(stand_in(log, free=60))
    copies.copy(torch.ones(4), into := torch.zeros(4))
    copies.finish()
    kept = KeptState(1, 0, 0, 0, None, 1, True, Snapshot({"weights": into}, copies=copies), ([], None))
    assert kept.state()["weights"].sum() == 4 and log == ["waited for training", "waited for copies"]


@pytest.mark.parametrize(("waits", "delays", "expected"), [(False, False, 0), (False, True, 1), (True, False, 1)])
def test_a_snapshot_waits_for_copies_where_it_is_told_to_and_where_they_delay_the_training(
    monkeypatch: pytest.MonkeyPatch, waits: bool, delays: bool, expected: int
) -> None:
    class Copies(DeviceCopies):
        n_waits = 0

        def finish(self) -> None:
            self.delays_training = delays

        def wait(self) -> None:
            Copies.n_waits += 1

    monkeypatch.setattr("nbtrain.checkpoint.snapshot.DeviceCopies", Copies)
    taken = snapshot({"weights": torch.ones(3)}, waits=waits)
    assert Copies.n_waits == expected and taken.ready() is taken and Copies.n_waits == expected + 1


def test_tensors_on_the_cpu_are_copied_at_once_without_a_gpu() -> None:
    weight = torch.ones(3)
    taken = snapshot({"state_dict": {"weight": weight}}, waits=False)
    weight.add_(1)
    assert taken.copies is not None and not taken.copies.delays_training
    assert taken.state["state_dict"]["weight"].tolist() == [1, 1, 1] and not taken.state["state_dict"]["weight"].is_pinned()


@needs_gpu
def test_what_finds_no_room_on_the_gpu_is_complete_when_the_snapshot_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.checkpoint.device_copy._SHARE", 10**15)  # no clones
    weight = torch.ones(4_000_000, device="cuda")
    taken = snapshot({"state_dict": {"weight": weight}}, waits=False)
    assert taken.copies is not None and taken.copies.delays_training and taken.state["state_dict"]["weight"].sum() == 4_000_000


@needs_gpu
def test_values_of_a_gpu_are_those_from_when_the_state_was_taken() -> None:
    model = nn.Sequential(nn.Linear(2000, 2000), nn.BatchNorm1d(2000)).cuda()
    expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    taken = snapshot({"state_dict": dict(model.state_dict())}, waits=False)
    with torch.no_grad():
        for _ in range(50):  # changes in place, at once, on the training's stream
            model(torch.randn(64, 2000, device="cuda"))
            for parameter in model.parameters():
                parameter.add_(1)
    state = taken.ready().state["state_dict"]
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert all(value.is_pinned() for value in state.values())


@needs_gpu
def test_a_run_on_a_gpu_is_rewound_bit_for_bit() -> None:
    trainer, loader = make_trainer(keep_states=True, device="cuda"), make_loader(own_generator=True)
    trainer.run(3, loader)
    expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.rewind(epoch=1)
    trainer.run(2, loader)
    assert all(torch.equal(value, expected[name]) for name, value in trainer.model.state_dict().items())
