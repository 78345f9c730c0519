"""Statistics of gradients and activations."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
from samples import DEVICE, Regress, make_data, make_loader, make_model, make_trainer, same_weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import mse_loss

from nbtrain import CompileAddon, ConfigError, GradientClipAddon, GradientStatsAddon, StateManagerAddon, Trainer, UpdateRatioAddon
from nbtrain.optim.given_gradients import total_norm


def test_statistics_are_those_of_the_batch_and_the_training_is_not_touched() -> None:
    trainer = make_trainer(Regress.add_on(GradientStatsAddon), model=make_model().eval(), stats_every_n_steps=3)
    plain, model = make_trainer(model=make_model()), make_model()
    x, y = make_data(64).tensors
    model[2].p = plain.model[2].p = trainer.model[2].p = 0.0
    for one in (trainer, plain):
        one.run(1, list(zip(x.split(16), y.split(16))))
    assert same_weights(plain.model, trainer.model)
    hidden = model[0](x[:16])
    mse_loss(model(x[:16]), y[:16]).backward()
    steps = trainer.history.steps["train"]
    norm = torch.cat([p.grad.flatten() for p in model[0].parameters()]).norm()
    assert steps["train_grad_norm.0"][0] == pytest.approx(norm.item(), rel=1e-5)
    assert steps["train_act_std.0"][0] == pytest.approx(hidden.std().item(), rel=1e-5)
    assert steps["train_act_zeros.1"][0] == pytest.approx((hidden <= 0).float().mean().item())
    assert [math.isnan(value) for value in steps["train_grad_norm.0"]] == [False, True, True, False]
    assert "train_grad_norm.1" not in steps.columns and not trainer.model[0]._forward_hooks


def test_activations_of_a_compiled_model_are_those_of_the_model() -> None:
    def rows(*addons: Any, **options: Any) -> list[dict[str, float]]:
        trainer = make_trainer(Regress.add_on(GradientStatsAddon, *addons), stats_every_n_steps=2, seed=3, **options)
        trainer.run(2, make_loader())
        return [{name: value for name, value in row.metrics.items() if "_act_" in name} for row in trainer.history.epochs]

    assert rows(CompileAddon, compile={"backend": "eager"}) == rows() != [{}, {}]


def test_depth_chooses_the_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)), torch.nn.Linear(4, 1))
    trainer = make_trainer(Regress.add_on(GradientStatsAddon), model=model, stats_depth=2)
    trainer.run(1, make_loader())
    assert {name for name in trainer.history.last if name.startswith("train_grad_norm")} == {
        f"train_grad_norm.{name}" for name in ("0.0", "0.1", "1")
    }


def test_hooks_are_gone_after_an_error() -> None:
    class Fails(Regress.add_on(GradientStatsAddon)):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, Any]:
            raise RuntimeError("no")

    trainer = make_trainer(Fails)
    with pytest.raises(RuntimeError):
        trainer.run(1, make_loader())
    assert not any(part._forward_hooks for part in trainer.model.modules())
    with pytest.raises(ConfigError, match="stats_depth=0"):
        make_trainer(Regress.add_on(GradientStatsAddon), stats_depth=0)


PARTS = [torch.tensor([3.0, 0.0, 4.0]), torch.empty(0), torch.tensor([6.0], dtype=torch.float64), torch.tensor([8.0], dtype=torch.bfloat16)]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([[5.0, 0.0]]).to_sparse(),
        torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True),  # two entries of one place
        torch.tensor([3 + 4j]),
        torch.tensor([5]),
        torch.tensor([True, False]),
        torch.tensor([5.0]).to(torch.float8_e4m3fn),
    ],
)
def test_the_norm_of_tensors_of_every_kind_is_that_of_their_numbers(other: torch.Tensor, norm_type: float) -> None:
    plain = [part.double() for part in PARTS] + [torch.tensor([1.0 if other.dtype is torch.bool else 5.0])]
    expected = torch.linalg.vector_norm(torch.cat(plain), norm_type)
    assert float(total_norm([part.to(DEVICE) for part in (*PARTS, other)], norm_type)) == pytest.approx(float(expected), rel=1e-6)


def test_the_norm_of_no_numbers_is_zero() -> None:
    assert [float(total_norm(tensors, norm)) for tensors in ([], [torch.empty(0, device=DEVICE)]) for norm in (2.0, math.inf)] == [0.0] * 4


@pytest.mark.filterwarnings("ignore")  # of the process group, on torch's side
def test_the_norm_of_shards_on_several_meshes_is_that_of_the_whole_tensors() -> None:
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        meshes = [init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))]
        shards = [distribute_tensor(torch.tensor([3.0, value]), mesh, [Shard(0)] * mesh.ndim) for mesh, value in zip(meshes, (0.0, 4.0))]
        norm = total_norm([*shards, torch.tensor([12.0])])
    finally:
        torch.distributed.destroy_process_group()
    assert type(norm) is torch.Tensor and float(norm) == pytest.approx(math.sqrt(9 + 9 + 16 + 144))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_sparse_and_complex_gradients_are_clipped(algorithm: str) -> None:
    parts = nn.ModuleDict({"sparse": nn.Embedding(3, 2, sparse=True), "complex": nn.ParameterList([torch.ones(1, dtype=torch.complex64)])})

    class Steps(Trainer):
        def train_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
            z = self.model["complex"][0]
            return {"loss": 3 * self.model["sparse"](torch.tensor([1, 1], device=DEVICE)).sum() + (3 * z.real + 4 * z.imag).sum()}

    before = {name: value.clone() for name, value in parts.to(DEVICE).state_dict().items()}
    options = {"gradient_clip": 1.0, "gradient_clip_algorithm": algorithm}
    optimizer = torch.optim.SGD(parts.parameters(), lr=1.0)
    trainer = Steps.add_on(GradientClipAddon)(parts, device=DEVICE, log_bar=False, optimizer=optimizer, **options)
    trainer.run(1, [torch.zeros(1)])
    moved = {name: before[name] - value for name, value in parts.state_dict().items()}
    norm = math.sqrt(2 * 6**2 + 5**2)  # each number of the row is there twice
    share = 1 / norm if algorithm == "norm" else None
    assert moved["sparse.weight"][1].tolist() == pytest.approx([1.0] * 2 if share is None else [6 * share] * 2, rel=1e-5)
    z = complex(moved["complex.0"])
    assert (z.real, z.imag) == pytest.approx((1.0, 1.0) if share is None else (3 * share, 4 * share), rel=1e-5)
    assert trainer.history.steps["train"]["train_grad_norm"] == pytest.approx([norm])


class Weights(L.Callback):
    """The weights of the first layer before the first batch and after each."""

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if not self.taken:
            self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.taken.append(torch.cat([p.detach().flatten().clone() for p in pl_module.owner.model[0].parameters()]))


def test_update_ratio_is_the_change_of_the_weights_beside_them() -> None:
    watch = Weights()
    trainer = make_trainer(Regress.add_on(UpdateRatioAddon), ratio_every_n_steps=2, lightning={"callbacks": [watch]})
    trainer.run(1, make_loader())
    measured = [(b - a).norm() / a.norm() for a, b in list(pairwise(watch.taken))[::2]]
    assert len(measured) == 3 and trainer.history.last["train_update_ratio.0"] == pytest.approx(
        torch.stack(measured).mean().item(), rel=1e-5
    )
    plain = make_trainer()
    plain.run(1, make_loader())
    assert same_weights(plain.model, trainer.model) and "train_update_ratio.1" not in trainer.history.last  # a ReLU has no weights


def test_resumed_update_ratio_is_that_of_the_uninterrupted_run(tmp_path: Any) -> None:
    class Stops(Regress.add_on(UpdateRatioAddon, StateManagerAddon)):  # type: ignore[misc]
        at = -1

        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.step == self.at:
                self.stop()
            return super().train_step(batch)

    def trained(folder: str, at: int, **options: Any) -> Any:
        trainer = make_trainer(Stops, ratio_every_n_steps=1, save_path=tmp_path / folder)
        trainer.at = at
        trainer.run(2, make_loader(own_generator=True), **options)
        return trainer

    whole = trained("whole", -1)
    trained("parts", 2)
    resumed = trained("parts", -1, resume="auto")
    assert resumed.history.last["train_update_ratio.0"] == whole.history.last["train_update_ratio.0"]
    assert resumed.history.epochs[0]["train_update_ratio.0"] == whole.history.epochs[0]["train_update_ratio.0"]
