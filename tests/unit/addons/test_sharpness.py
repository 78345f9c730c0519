"""SAMAddon trains as sharpness-aware minimization by hand, bit for bit, also with what else a run has, and leaves no weight uphill."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy
from samples import Breaks, Broken, make_trainer, same_weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from nbtrain import (
    AccumulationAddon,
    AddOnBase,
    CheckpointError,
    ConfigError,
    HealAddon,
    MicroBatchAddon,
    MultiGPUAddon,
    SAMAddon,
    StateManagerAddon,
    Trainer,
)
from nbtrain.addons import HooksAddon
from nbtrain.engine.addon import ordered

BATCHES = [tuple(torch.randn(16, n, generator=torch.Generator().manual_seed(7 + i)) for n in (8, 1)) for i in range(6)]


def make_net(*, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh(), nn.Linear(16, 1))


class Fit(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self.train_step(batch)


def made(*addons: Any, kind: Any = Fit, norm: bool = True, **options: Any) -> Any:
    model = make_net(norm=norm)
    return make_trainer(kind.add_on(*addons), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **options)


def uphill(net: nn.Module, gradients: list[Tensor], rho: float, *, adaptive: bool) -> list[Tensor]:
    """Move the weights, as the papers say; returns the old ones."""
    pairs = list(zip(net.parameters(), gradients))
    old = [p.detach().clone() for p, _ in pairs]
    sizes = torch.stack([(p * g if adaptive else g).norm() for p, g in pairs])
    with torch.no_grad():
        for p, g in pairs:
            p.add_((p * p * g if adaptive else g) * (rho / (sizes.norm() + 1e-12)))
    return old


def by_hand(
    rho: float, *, adaptive: bool = False, accumulate: int = 1, low: bool = False, norm: bool = True
) -> tuple[nn.Module, list[float]]:
    net, losses = make_net(norm=norm), list[float]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
            return mse_loss(net(x), y)

    for i, (x, y) in enumerate(BATCHES):
        loss = loss_of(x, y)
        losses.append(loss.item())
        statistics = {name: value.clone() for name, value in net[1].named_buffers()}
        old = uphill(net, list(torch.autograd.grad(loss, list(net.parameters()))), rho, adaptive=adaptive)
        (loss_of(x, y) / accumulate).backward()
        with torch.no_grad():
            for p, before in zip(net.parameters(), old):
                p.copy_(before)
        net[1].load_state_dict(statistics, strict=False)
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net, losses


@pytest.mark.parametrize("adaptive", [False, True])
def test_it_trains_as_by_hand_and_records_the_loss_of_the_weights(adaptive: bool) -> None:
    trainer = made(SAMAddon, sam_rho=0.5, sam_adaptive=adaptive)
    trainer.run(1, BATCHES)
    net, losses = by_hand(0.5, adaptive=adaptive)
    assert same_weights(trainer.model, net) and trainer.loss_history_train == losses
    plain = made()
    plain.run(1, BATCHES)
    assert not same_weights(plain.model, net)


@pytest.mark.parametrize("short_way", [True, False])
def test_gradients_are_accumulated_as_by_hand(short_way: bool) -> None:
    kind = type("Ways", (Fit,), {"short_way": short_way})
    trainer = made(SAMAddon, AccumulationAddon, kind=kind, sam_rho=0.5, accumulate=2)
    trainer.run(1, BATCHES)
    assert same_weights(trainer.model, by_hand(0.5, accumulate=2)[0]) and trainer.current_step == 3


class OwnContext(Fit):
    """Its context is within that of the run, which keeps the weights that it has converted."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        with torch.autocast("cpu", torch.bfloat16):
            return super().train_step(batch)


@pytest.mark.parametrize("kind", [Fit, OwnContext])
def test_in_mixed_precision_the_second_pass_has_the_weights_uphill(kind: type[Any]) -> None:
    trainer = made(SAMAddon, kind=kind, precision="bf16-mixed", sam_rho=0.5)
    trainer.run(1, BATCHES)
    assert same_weights(trainer.model, by_hand(0.5, low=True)[0])


def test_it_comes_before_what_looks_at_the_outputs_of_steps() -> None:
    for other in (AccumulationAddon, HooksAddon, MicroBatchAddon):
        assert ordered([other, SAMAddon]) == ordered([SAMAddon, other]) == (SAMAddon, other)


@pytest.mark.parametrize("fails_at", [3, 4])
def test_an_error_uphill_leaves_the_weights_where_they_were(fails_at: int) -> None:
    class Fails(Fit):
        n_calls = 0

        def train_step(self, batch: Any) -> dict[str, Any]:
            Fails.n_calls += 1
            if Fails.n_calls == fails_at:
                raise RuntimeError("boom")
            return super().train_step(batch)

    trainer = made(SAMAddon, kind=Fails, sam_rho=0.5, on_error="raise")
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run(1, BATCHES)
    one = made(SAMAddon, sam_rho=0.5)
    one.run(1, BATCHES[:1])
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), one.model.parameters()))
    assert trainer.model[1].track_running_stats


def test_a_batch_that_is_left_out_has_no_part() -> None:
    class Leaves(Fit):
        def train_step(self, batch: Any) -> dict[str, Any] | None:
            return None if torch.equal(batch[0].cpu(), BATCHES[2][0]) else super().train_step(batch)

    trainer, plain = made(SAMAddon, kind=Leaves, sam_rho=0.5), made(SAMAddon, sam_rho=0.5)
    trainer.run(1, BATCHES)
    plain.run(1, [*BATCHES[:2], *BATCHES[3:]])
    assert same_weights(trainer.model, plain.model)


def test_rows_of_an_embedding_that_a_batch_lacks_do_not_move() -> None:
    class Words(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": (self.model(batch) - 1).square().mean()}

    torch.manual_seed(0)
    net = nn.Embedding(5, 3, sparse=True)
    before = net.weight.detach().clone()
    trainer = make_trainer(Words.add_on(SAMAddon), model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), sam_rho=0.5)
    trainer.run(1, [torch.tensor([1, 1, 3])] * 2)
    moved = (net.weight.cpu() != before).any(1)
    assert moved.tolist() == [False, True, False, True, False]


def test_a_resumed_run_ends_as_one_that_was_not_interrupted_and_another_rho_is_refused(tmp_path: Path) -> None:
    whole, first, second, other = (
        made(SAMAddon, StateManagerAddon, save_path=tmp_path / name, every_n_steps=2, sam_rho=rho)
        for name, rho in (("a", 0.5), ("b", 0.5), ("b", 0.5), ("b", 0.1))
    )
    whole.run(1, BATCHES)
    first.lightning["callbacks"] = [Breaks(4)]
    with pytest.raises(Broken):
        first.run(1, BATCHES)
    with pytest.raises(CheckpointError, match="sam_rho"):
        other.run(1, BATCHES, resume="auto")
    second.run(1, BATCHES, resume="auto")
    assert same_weights(whole.model, second.model) and second.current_step == 6


def test_on_two_ranks_each_has_its_way_uphill() -> None:
    trainer = made(SAMAddon, MultiGPUAddon, norm=False, device=["cpu", "cpu"], sam_rho=0.5)
    trainer.run(1, BATCHES)
    net, _ = by_hand(0.5, norm=False, accumulate=2)  # an update has the gradients of two batches, each of its way
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(trainer.model.parameters(), net.parameters()))


class Wraps(AddOnBase):
    def wrap_step(self, trainer: Any, step: Any) -> Any:
        return step


@pytest.mark.parametrize("addon", [SAMAddon, HealAddon, MicroBatchAddon, Wraps])
def test_what_wraps_the_step_is_refused_for_a_lightning_module(addon: type[AddOnBase]) -> None:
    with pytest.raises(ConfigError, match=f"{addon.__name__} wraps train_step, and the steps of a LightningModule are called"):
        Trainer.add_on(addon).from_lightning(BoringModel(), device="cpu")
    assert Trainer.add_on(HooksAddon, AccumulationAddon).from_lightning(BoringModel(), device="cpu").mode == "train"


def test_weights_that_a_strategy_divides_and_a_rho_of_zero_are_refused() -> None:
    trainer = made(SAMAddon)
    divided = L.Trainer(accelerator="cpu", devices=1, strategy=ModelParallelStrategy(), logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"SAMAddon needs the whole weights in each process, and ModelParallelStrategy divides them"):
        trainer[SAMAddon].callbacks(trainer)[0].setup(divided, trainer.as_lightning_module(), "fit")
    with pytest.raises(ConfigError, match=r"sam_rho=0 must be a positive number"):
        SAMAddon(sam_rho=0)
