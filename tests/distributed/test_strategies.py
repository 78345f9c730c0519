"""A model that is split over two processes on the CPU does what it does in one, and comes back whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from samples import Regress, make_data, make_trainer
from torch import nn
from torch.utils.data import DataLoader

from nbtrain import ConfigError, MultiGPUAddon, StateManagerAddon

PLAN = {"0": "colwise", "2": "rowwise"}  # the others stay whole
SPLIT = {
    "fsdp2": {"strategy": "fsdp2"},
    "tp": {"strategy": "tp", "tensor_plan": PLAN},
}


def make_net(seed: int = 0) -> nn.Module:
    """Layers that can be split unevenly, too, and a parameter that no plan names."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 1))


def make(addons: tuple[Any, ...] = (MultiGPUAddon,), **options: Any) -> Any:
    options = {"model": make_net(), "device": ["cpu", "cpu"], "gradient_clip": 0.3} | options
    return make_trainer(Regress.add_on(*addons), **options)


def loader(trainer: Any) -> DataLoader[Any]:
    """Batches of which all readers together get 16 samples; 70 samples leave a short round."""
    torch.manual_seed(5)
    return DataLoader(make_data(), 16 // trainer[MultiGPUAddon].n_readers, shuffle=True)


def difference(a: Any, b: Any) -> float:
    """The largest of weights and of the optimizer's states."""
    pairs = list(zip(a.model.state_dict().values(), b.model.state_dict().values()))
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        left, right = a.optimizer.state[p], b.optimizer.state[q]
        assert left.keys() == right.keys() and len(left) == 3
        pairs += zip(left.values(), right.values())
    assert all(x.shape == y.shape and type(x) is type(y) for x, y in pairs)
    return max(float((x - y).abs().max()) for x, y in pairs)


def columns(trainer: Any) -> list[list[float]]:
    return [[row[name] for name in ("train_loss", "val_loss", "train_grad_norm")] for row in trainer.history.epochs]


@pytest.mark.parametrize("name", SPLIT)
def test_split_model_does_what_one_process_does_and_goes_on(name: str) -> None:
    """Adam, clipping by the norm of all parts, validation, best weights, and a second run that takes up the optimizer's states."""
    one, two = make(device="cpu"), make(**SPLIT[name])
    kept = two.model, two.optimizer, next(two.model.parameters())
    for trainer in one, two:
        batches = loader(trainer)
        trainer.run(2, batches, DataLoader(make_data(21, seed=3), 4))
        trainer.run(1, batches, DataLoader(make_data(21, seed=3), 4))
    assert difference(one, two) < 1e-5 and one.counts.step == two.counts.step == 15
    for a, b in zip(columns(one), columns(two)):
        assert a == pytest.approx(b, rel=1e-4)
    assert kept[0] is two.model and kept[1] is two.optimizer and kept[2] is next(two.model.parameters())
    assert one.history.best["epoch"] == two.history.best["epoch"] and one.best_weights.keys() == two.best_weights.keys()
    assert max(float((one.best_weights[n] - two.best_weights[n]).abs().max()) for n in one.best_weights) < 1e-5
    assert two.evaluate(make_data(13))["loss"] == pytest.approx(one.evaluate(make_data(13))["loss"], rel=1e-4)


KINDS: dict[str, Any] = {  # of the matrices
    "ddp": lambda params: torch.optim.Muon(params, lr=0.02),
    "fsdp2": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),  # torch's Muon can't update a sharded matrix
}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_several_optimizers_do_on_two_ranks_what_they_do_in_one_process(strategy: str, tmp_path: Path) -> None:
    """Each with its bound of the gradients and a schedule, broken off between two epochs and taken up again."""

    def several(params: Any) -> dict[str, Any]:
        params = list(params)
        matrices, vectors = ([p for p in params if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
        return {"matrices": KINDS[strategy](matrices), "rest": torch.optim.AdamW(vectors, lr=0.01)}

    options: dict[str, Any] = {"optimizer": several, "gradient_clip": {"rest": 0.1}}
    options["scheduler"] = [lambda optimizer, plan: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)] * 2
    one, two = make(device="cpu", **options), make((MultiGPUAddon, StateManagerAddon), strategy=strategy, save_path=tmp_path, **options)
    one.run(2, loader(one))
    two.run(1, loader(two))
    again = make((MultiGPUAddon, StateManagerAddon), strategy=strategy, save_path=tmp_path, **options)
    again.run(2, loader(again), resume="auto")
    assert max(float((p - q).detach().abs().max()) for p, q in zip(one.model.parameters(), again.model.parameters())) < 1e-5
    rates = [[row[f"lr/{name}"] for name in ("matrices", "rest")] for row in again.history.epochs]
    assert rates == [[row[f"lr/{name}"] for name in ("matrices", "rest")] for row in one.history.epochs]


def by_hand(model: nn.Module, mesh: Any) -> nn.Module:
    """As a user would write it: tensor parallel for two layers."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def test_split_by_a_function_and_a_strategy_of_lightning_and_resumed_by_any_other(tmp_path: Path) -> None:
    """One epoch each in one process, DDP, FSDP2 and a ModelParallelStrategy: each takes up what the one before has saved."""
    addons = (MultiGPUAddon, StateManagerAddon)
    never = make(device="cpu")
    never.run(4, loader(never))
    ways = [
        {"device": "cpu"},
        {"strategy": lambda: DDPStrategy(gradient_as_bucket_view=True)},
        {"strategy": "fsdp2", "save_format": "safetensor"},
        {"strategy": ModelParallelStrategy(1, 2), "parallelize": by_hand, "save_format": "safetensor"},
    ]
    parts = never
    for n, way in enumerate(ways, 1):
        parts = make(addons, save_path=tmp_path, **way)
        parts.run(n, loader(parts), resume="auto")
        assert len(list(tmp_path.glob("run-001/checkpoints/epoch=*"))) == n
    assert parts.counts.epoch == 4 and difference(never, parts) < 1e-5


def test_auto_says_what_fits_and_takes_it_or_refuses_with_the_numbers() -> None:
    trainer, texts = make(strategy="auto", memory_gb=5e-6), []
    trainer.recorder.add(SimpleNamespace(update=lambda event: texts.append(event.data["text"]) if event.kind == "note" else None))
    trainer.run(1, loader(trainer))
    assert texts == [
        "2 devices of 5e-06 GB, 4e-06 GB of it beside activations; on each, in kB:",
        "  strategy     weights  gradients  optimizer  exchange    total",
        "  ddp             0.98       0.98       1.96      0.98     4.90",
        "→ fsdp2 ×2        0.49       0.49       0.98      1.77     3.73",
    ]
    assert trainer.counts.step == 5
    with pytest.raises(ConfigError, match="do not fit on the devices.\n  2 devices of 1e-06 GB(.|\n)*fsdp2 ×2        0.49"):
        make(strategy="auto", memory_gb=1e-6).run(1, loader(trainer))


class Faulty(Regress):
    """Its third step fails, in one rank or in both."""

    n_steps, ranks = 0, (0, 1)

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.n_steps += 1
        if self.n_steps == 3 and torch.distributed.get_rank() in self.ranks:
            raise LookupError("no third step")
        return super().train_step(batch)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_failing_step_of_a_split_model_is_raised_and_keeps_what_all_ranks_still_have(ranks: tuple[int, ...]) -> None:
    trainer = make_trainer(Faulty.add_on(MultiGPUAddon), model=make_net(), device=["cpu", "cpu"], strategy="fsdp2")
    trainer.ranks = ranks
    with pytest.raises(LookupError, match="no third step"):
        trainer.run(1, loader(trainer))
    assert trainer.counts.step == (2 if len(ranks) == 2 else 0)
    changed = any(not torch.equal(p, q) for p, q in zip(trainer.model.parameters(), make_net().parameters()))
    assert changed == (len(ranks) == 2)
