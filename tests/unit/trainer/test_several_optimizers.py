"""Several optimizers on one loss train as in the loop that everybody would write, bit for bit, however the run is broken off or moved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import DEVICE, Breaks, Broken, make_model, make_trainer, same_weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, AdamW, Muon, Optimizer, SparseAdam
from torch.optim.lr_scheduler import StepLR

from nbtrain import ConfigError, OptionError, StateManagerAddon, Trainer
from nbtrain.optim.joint_optimizer import JointOptimizer

N_EPOCHS, N_BATCHES = 3, 4
_GENERATOR = torch.Generator().manual_seed(1)
BATCHES: list[Any] = [(torch.randint(9, (6, 2), generator=_GENERATOR), torch.randn(6, 1, generator=_GENERATOR)) for _ in range(N_BATCHES)]


class Words(nn.Module):
    """Has matrices, vectors, and a table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4, sparse=True)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(x).flatten(1))


class Fit(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.model(x), y)}

    test_step = train_step


def three(model: nn.Module) -> list[Optimizer]:
    layers = list(model.layers.parameters())  # type: ignore[union-attr, operator]
    matrices, vectors = ([p for p in layers if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
    return [Muon(matrices, lr=0.02), AdamW(vectors, lr=0.01), SparseAdam(model.table.parameters(), lr=0.05)]  # type: ignore[union-attr, operator]


def schedules(optimizers: list[Optimizer]) -> dict[str, StepLR]:
    return {"muon": StepLR(optimizers[0], 1, 0.5), "sparseadam": StepLR(optimizers[2], 2, 0.9)}


def plain_loop(clip: float = 0.0, accumulate: int = 1, precision: str = "32-true") -> nn.Module:
    model = Words().to(DEVICE)
    optimizers = three(model)
    schedulers = schedules(optimizers).values()
    for _ in range(N_EPOCHS):
        for i, (x, y) in enumerate(BATCHES):
            with torch.autocast(torch.device(DEVICE).type, torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = mse_loss(model(x.to(DEVICE)), y.to(DEVICE))
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0:
                if clip:
                    clip_grad_norm_(model.layers.parameters(), clip)  # type: ignore[union-attr, operator]
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return model


def make(kind: type[Trainer] = Fit, **options: Any) -> Any:
    model = Words()
    optimizers = three(model)
    return kind(model, DEVICE, optimizer=optimizers, scheduler=schedules(optimizers), log_bar=False, **options)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize(("accumulate", "precision"), [(1, "32-true"), (2, "32-true"), (2, "bf16-mixed")])
def test_they_train_as_in_a_plain_loop(accumulate: int, precision: str, lean: bool) -> None:
    trainer = make(lightning={"accumulate_grad_batches": accumulate}, precision=precision)
    trainer.short_way = lean
    trainer.run(N_EPOCHS, BATCHES)
    assert same_weights(trainer.model, plain_loop(accumulate=accumulate, precision=precision))
    assert trainer.counts.step == N_EPOCHS * N_BATCHES // accumulate


def dense(kind: type[Trainer] = Fit, **options: Any) -> Any:
    """A trainer without the sparse table, whose gradients no clipping of torch's takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
    return kind(model, DEVICE, log_bar=False, optimizer={"matrices": Muon(matrices), "rest": AdamW(vectors)}, **options)


@pytest.mark.parametrize("clip", [0.1, {"rest": 0.1}], ids=["over all of them", "of one of them"])
@pytest.mark.parametrize("lean", [True, False])
def test_gradients_are_clipped_over_all_of_them_or_by_the_bound_of_each(lean: bool, clip: Any) -> None:
    data = [(x.float(), y) for x, y in BATCHES]
    trainer, plain = dense(gradient_clip=clip), dense()
    trainer.short_way = lean
    trainer.run(1, data)
    clipped, norms = [p for p in plain.model.parameters() if p.ndim == 1 or clip == 0.1], list[float]()
    for x, y in ([item.to(DEVICE) for item in batch] for batch in data):
        plain.optimizer.zero_grad()
        mse_loss(plain.model(x), y).backward()
        norms.append(float(clip_grad_norm_(plain.model.parameters(), 1e9)))
        clip_grad_norm_(clipped, 0.1)
        for optimizer in plain.optimizer.optimizers.values():
            optimizer.step()
    assert same_weights(trainer.model, plain.model)
    assert list(trainer.history.steps["train"]["train_grad_norm"]) == pytest.approx(norms)


def test_a_bound_of_an_optimizer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no optimizer 'rst'[^$]*rest"):
        dense(gradient_clip={"rst": 0.1})
    with pytest.raises(ConfigError, match="for several optimizers, and there is one"):
        Fit(nn.Linear(2, 1), DEVICE, optimizer=lambda p: AdamW(p), gradient_clip={"rest": 0.1}, log_bar=False)


@pytest.mark.parametrize("broken_at", [1, 6])
def test_a_run_that_is_broken_off_is_resumed_exactly(broken_at: int, tmp_path: Path) -> None:
    kind = Fit.add_on(StateManagerAddon)
    with pytest.raises(Broken):
        make(kind, save_path=tmp_path, every_n_steps=1, lightning={"callbacks": [Breaks(broken_at)]}).run(N_EPOCHS, BATCHES)
    resumed = make(kind, save_path=tmp_path, every_n_steps=1)
    resumed.run(N_EPOCHS, BATCHES, resume="auto")
    whole = make()
    whole.run(N_EPOCHS, BATCHES)
    assert same_weights(resumed.model, plain_loop())
    rates = [[row[name] for name in ("lr", "lr/muon", "lr/adamw", "lr/sparseadam")] for row in resumed.history.epochs]
    assert rates == [[row[name] for name in ("lr", "lr/muon", "lr/adamw", "lr/sparseadam")] for row in whole.history.epochs]
    assert [row["lr/muon"] for row in whole.history.epochs] == [0.02, 0.01, 0.005]


def test_they_go_back_branch_and_repeat_a_step() -> None:
    trainer = make(keep_states=True)
    trainer.run(N_EPOCHS, BATCHES)
    branch = trainer.branch(epoch=1)
    branch.run(N_EPOCHS - 1, BATCHES)
    trainer.rewind(epoch=1)
    trainer.run(N_EPOCHS - 1, BATCHES)
    copied = copy.deepcopy(trainer)
    assert all(same_weights(one.model, plain_loop()) for one in (branch, trainer, copied))
    assert trainer.replay(step=2 * N_BATCHES).loss == trainer.history.steps["train"]["train_loss"][2 * N_BATCHES - 1]


def test_a_copy_trains_without_a_warning_of_its_schedules() -> None:
    copied = copy.deepcopy(make())
    copied.run(N_EPOCHS, BATCHES)
    assert same_weights(copied.model, plain_loop())


def test_a_rate_is_set_for_one_of_them_and_scales_its_schedule() -> None:
    trainer = make()
    trainer.set(lr={"muon": 0.2})
    trainer.run(2, BATCHES)
    assert [row["lr/muon"] for row in trainer.history.epochs] == [0.2, 0.1]
    assert [row["lr/adamw"] for row in trainer.history.epochs] == [0.01, 0.01]
    assert trainer.history.marks[-1][1] == "lr of muon 0.02 → 0.2"
    with pytest.raises(OptionError, match="there is no optimizer 'adam'"):
        trainer.set(lr={"adam": 0.2})
    with pytest.raises(ConfigError, match="lr=-1 must be a positive number"):
        trainer.set(lr={"adamw": -1})
    with pytest.raises(OptionError, match="lr={} names no optimizer"):
        trainer.set(lr={})
    with pytest.raises(OptionError, match="AdamW has no option 'momentum'"):  # which Muon has
        trainer.set(momentum=0.8)
    trainer.optimizer.optimizers["adamw"].param_groups[0]["lr"] = 0.0
    with pytest.raises(ConfigError, match="The learning rate of adamw is 0 here"):
        trainer.set(lr={"muon": 0.5, "adamw": 0.5})
    assert trainer.optimizer.param_groups[0]["lr"] == 0.05  # what it was
    shared = dense(scheduler=lambda step: 0.1)
    with pytest.raises(ConfigError, match="One schedule drives the rates of all optimizers"):
        shared.set(lr={"rest": 0.5})
    assert shared.optimizer.optimizers["rest"].param_groups[0]["lr"] == 1e-3


def test_a_factory_makes_them_and_each_schedule_has_its_plan() -> None:
    model = Words()
    trainer = Fit(
        model,
        DEVICE,
        optimizer=lambda params: three(model),
        scheduler={"muon": lambda optimizer, plan: StepLR(optimizer, plan.batches_per_epoch, 0.5)},
        log_bar=False,
    )
    trainer.run(2, BATCHES)
    assert [row["lr/muon"] for row in trainer.history.epochs] == [0.02, 0.01]
    trainer = Fit(model, DEVICE, optimizer=(parts := three(model)), scheduler=[None, StepLR(parts[1], 1, 0.5), None], log_bar=False)
    trainer.run(2, BATCHES)
    assert [row["lr/adamw"] for row in trainer.history.epochs] == [0.01, 0.005]


def test_parameters_in_none_of_them_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    model = Words()
    Fit(model, DEVICE, optimizer=three(model)[1:]).run(1, BATCHES)
    said = "In no optimizer, though the loss has a gradient for them: layers.0.weight, layers.2.weight. They keep their values."
    assert said in capsys.readouterr().out


def test_what_cannot_share_a_loss_is_refused() -> None:
    model = Words()
    parts = three(model)
    for given, message in [([parts[1], parts[1]], "'adamw' and 'adamw_2' drive the same parameters"), ([], "optimizer= is empty")]:
        with pytest.raises(ConfigError, match=message):
            Fit(model, DEVICE, optimizer=given)
    with pytest.raises(ConfigError, match="LBFGS computes the loss several times in a step"):
        Fit(model, DEVICE, optimizer=[parts[0], LBFGS(model.layers.parameters())])
    with pytest.raises(ConfigError, match="There are 1 schedulers, and one optimizer"):
        Fit(model, DEVICE, optimizer=parts[0], scheduler=[StepLR(parts[0], 1)])
    with pytest.raises(ConfigError, match="no optimizer for the scheduler 'adam'"):
        Fit(model, DEVICE, optimizer=parts, scheduler={"adam": StepLR(parts[1], 1)})


def test_a_group_is_added_to_one_of_them() -> None:
    trainer = dense()
    with pytest.raises(ConfigError, match="can't be added to several optimizers: matrices, rest"):
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize("kind", [AdamW, LBFGS])
def test_one_in_a_list_is_that_optimizer(kind: type[Optimizer]) -> None:
    optimizer = kind(Words().layers.parameters())
    trainer = Fit(Words(), DEVICE, optimizer=[optimizer])
    assert trainer.optimizer is optimizer and not isinstance(trainer.optimizer, JointOptimizer)


def test_optimizers_that_replace_those_of_a_trainer_train_and_are_replaced_as_a_whole() -> None:
    model = Words()
    trainer = Fit(model, DEVICE, optimizer=three(model), log_bar=False)
    trainer.run(1, BATCHES)
    rates = {name: torch.optim.SGD(one.param_groups[0]["params"], 0.25) for name, one in trainer.optimizers.items()}
    with pytest.raises(ConfigError, match="Give all of them: trainer.optimizer = {"):
        trainer.optimizers["muon"] = rates["muon"]
    trainer.optimizer = {**trainer.optimizers, "muon": rates["muon"]}
    trainer.run(1, BATCHES)
    assert trainer.optimizers["muon"] is rates["muon"] and trainer.history.epochs[-1]["lr/muon"] == 0.25


@pytest.mark.parametrize(("n", "what"), [(0, "There are 0 schedulers"), (1, "There is 1 scheduler"), (3, "There are 3 schedulers")])
def test_a_list_of_schedulers_of_another_length_is_refused(n: int, what: str) -> None:
    model: Any = make_model()
    parts = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[3].parameters(), lr=0.1)]
    given = [torch.optim.lr_scheduler.StepLR(parts[i % 2], 1) for i in range(n)]
    with pytest.raises(ConfigError) as error:
        make_trainer(model=model, optimizer=parts, scheduler=given)
    assert str(error.value) == f"{what} for 2 optimizers.\n  Give one for each, None for one without, or a dict: {{'sgd': scheduler}}."
