"""Memory that is full: one error with everything in it, or smaller parts with the same gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import PLACE, make_trainer, same_weights
from torch import nn
from torch.nn.functional import mse_loss

from nbtrain import AccumulationAddon, GradientClipAddon, MicroBatchAddon, NbtrainError, OutOfMemory, StateManagerAddon, StepError, Trainer


class Net(nn.Module):
    """Its memory suffices for `limit` samples, in the forward or in the backward pass."""

    def __init__(self, limit: int, *, backward: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.limit, self.backward, self.seen = limit, backward, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        output = self.layers(x)
        if len(x) > self.limit:
            if not self.backward:
                self.fail()
            output.register_hook(lambda gradient: self.fail())
        return output

    def fail(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")


class Fit(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch["x"], batch["y"]
        output = self.model(x)
        return {"loss": mse_loss(output, y), "mae": (output - y).abs().mean(), "output": output}

    test_step = train_step


class SumFit(Fit):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": (self.model(batch["x"]) - batch["y"]).square().sum()}


def make_batches(*sizes: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for n in sizes or (10, 10, 7):
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        made.append({"x": x, "y": x.sum(1, keepdim=True), "ids": [str(i) for i in range(n)]})
    return made


def make(limit: int, *addons: Any, kind: type[Trainer] = Fit, backward: bool = False, **options: Any) -> Any:
    return make_trainer(kind.add_on(*addons) if addons else kind, model=Net(limit, backward=backward), **options)


def close(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.allclose(p, q, rtol=1e-12, atol=1e-14) for p, q in zip(a.parameters(), b.parameters()))


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("backward", [False, True])
def test_error_names_the_batch_the_place_and_the_remedies(backward: bool, lean: bool) -> None:
    trainer = make(3, backward=backward)
    trainer.short_way = lean
    with pytest.raises(OutOfMemory) as caught:
        trainer.run(1, make_batches(2, 5))
    assert str(caught.value).splitlines()[:2] == [
        f"The memory of {trainer.device} is full: CUDA out of memory. Tried to allocate 1 TiB.",
        f"  epoch 1, batch 2: the batch is dict of 3 ('x': Tensor (5, 4) float64{PLACE}, 'y': Tensor (5, 1) float64{PLACE}, "
        "'ids': list of 5 ([0]: str, [1]: str, [2]: str, [3]: str, [4]: str))",
    ]
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError) and trainer.result.status == "failed"


def test_full_memory_in_a_validation_is_the_same_error() -> None:
    with pytest.raises(OutOfMemory, match=r"epoch 1, batch 2: the batch is dict of 3 \('x': Tensor \(5, 4\)"):
        make(3).run(1, make_batches(2), make_batches(2, 5))


@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip": 0.01}, {"lightning": {"accumulate_grad_batches": 2}}, {"addons": [AccumulationAddon]}]
)
@pytest.mark.parametrize("backward", [False, True])
def test_smaller_parts_lead_to_the_same_weights(backward: bool, options: dict[str, Any]) -> None:
    options = dict(options)
    addons = options.pop("addons", [])
    small, large = make(3, MicroBatchAddon, *addons, backward=backward, **options), make(100, *addons, **options)
    for trainer in (small, large):
        trainer.run(3, make_batches())
    assert close(small.model, large.model) and small[MicroBatchAddon].n_at_once == 3
    assert small.model.seen[:9] == [10, 5, 3, 3, 3, 1, 3, 3, 3]
    assert small.history.last["train_loss"] == pytest.approx(large.history.last["train_loss"], rel=1e-12)
    assert small.history.last["train_mae"] == pytest.approx(large.history.last["train_mae"], rel=1e-12)


def test_losses_that_are_sums_are_added() -> None:
    small, large = make(4, MicroBatchAddon, kind=SumFit, micro_reduction="sum"), make(100, kind=SumFit)
    for trainer in (small, large):
        trainer.run(2, make_batches())
    assert close(small.model, large.model)
    assert small.history.last["train_loss"] == pytest.approx(large.history.last["train_loss"], rel=1e-12)


def test_outputs_of_the_parts_are_those_of_the_batch() -> None:
    trainer = make(3, MicroBatchAddon, GradientClipAddon)
    output = trainer.run_batch(make_batches(10)[0])
    assert output["output"].shape == (10, 1) and output["loss"].ndim == 0


def test_without_full_memory_nothing_is_cut() -> None:
    trainer, plain = make(100, MicroBatchAddon), make(100)
    for one in (trainer, plain):
        one.run(2, make_batches())
    assert same_weights(trainer.model, plain.model) and trainer[MicroBatchAddon].n_at_once is None


def test_one_sample_that_does_not_fit_is_the_error() -> None:
    with pytest.raises(OutOfMemory, match="the batch is dict"):
        make(0, MicroBatchAddon).run(1, make_batches())


def test_other_errors_of_a_step_pass() -> None:
    class Fails(Fit):
        def train_step(self, batch: Any) -> dict[str, Any]:
            raise RuntimeError("shapes don't fit")

    with pytest.raises(RuntimeError, match="shapes don't fit") as caught:
        make(3, MicroBatchAddon, kind=Fails).run(1, make_batches())
    assert not isinstance(caught.value, NbtrainError)


def test_what_cannot_be_joined_is_named() -> None:
    class Lists(Fit):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch) | {"hidden": [batch["x"]]}

    with pytest.raises(StepError, match="The 'hidden' of the parts of a batch can't be joined"):
        make(3, MicroBatchAddon, kind=Lists).run(1, make_batches())


def test_size_that_fitted_is_saved(tmp_path: Path) -> None:
    trainer = make(3, MicroBatchAddon, StateManagerAddon, save_path=tmp_path)
    trainer.run(1, make_batches())
    again = make(3, MicroBatchAddon, StateManagerAddon, save_path=tmp_path)
    again.run(2, make_batches(), resume="auto")
    assert max(again.model.seen[len(trainer.model.seen) :]) == 3  # the list is restored, too


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_parts_work_in_bf16(precision: str) -> None:
    trainer = make(3, MicroBatchAddon, precision=precision)
    trainer.model.float()
    batches = [{name: value.float() if name != "ids" else value for name, value in batch.items()} for batch in make_batches()]
    assert trainer.run(2, batches).status == "completed"
