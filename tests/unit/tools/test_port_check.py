"""An old loop and a trainer that are compared step by step: where they part, and why."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from samples import DEVICE, Regress, make_data, make_loader, make_trainer, make_valid, on_device, same_weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from nbtrain import AccumulationAddon, ConfigError, check_port
from nbtrain.rng import random_state, same_random
from nbtrain.tools.port_check import PortCheck
from nbtrain.tools.step_trace import digest

LR = 1e-2
DRAWN = "your loop and the trainer have drawn other random numbers before"
TORCHS, BOTH = ("torch", "torch, python") if DEVICE == "cpu" else ("torch.cuda", "python, torch.cuda")


def make_net(*, norm: bool = False, dropout: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(16)] if norm else [nn.Dropout(0.3)] if dropout else [nn.Identity()]
    return nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 1))


def plain(
    model: nn.Module, loader: Any, valid_loader: Any = None, record: Any = None, *, epochs: int = 3, every: int = 1, divide: int = 1,
    clip: float = 0.0, loss_of: Callable[..., torch.Tensor] = mse_loss, make: Any = None, schedule: Any = None, zero: bool = True,
    restore: bool = True, evals: bool = True, trains: bool = True, change: Callable[[nn.Module, int], None] = lambda model, step: None,
    preprocess: Callable[[Any], Any] = lambda x: x, record_of: Any = lambda loss: loss, each_epoch: bool = False, amp: bool = False,
) -> None:  # fmt: skip
    """A loop as it is written by hand; each argument is a way to write it wrong."""
    make = make or (lambda parameters: torch.optim.Adam(parameters, lr=LR))
    optimizer = make(model.parameters())
    scheduler, step = schedule(optimizer) if schedule else None, 0
    for _ in range(epochs):
        optimizer = make(model.parameters()) if each_epoch else optimizer
        if trains:
            model.train()
        for n, (x, y) in enumerate(loader, 1):
            x, y = x.to(DEVICE), y.to(DEVICE)
            with torch.autocast(DEVICE, torch.bfloat16) if amp else nullcontext():
                loss = loss_of(model(preprocess(x)), y)
            (loss / divide).backward()
            if record is not None:
                record(record_of(loss))
            if n % every:
                continue
            if clip:
                clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if zero:
                optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            step += 1
            change(model, step)
        if valid_loader is not None:
            if evals:
                model.eval()
            with torch.no_grad(), isolate_rng() if restore else nullcontext():
                for x, _ in valid_loader:
                    model(x.to(DEVICE))


def check(model: nn.Module | None = None, n: int = 64, *, valid: bool = False, kind: Any = Regress, **faults: Any) -> PortCheck:
    options = {name: faults.pop(name) for name in ("optimizer", "scheduler", "gradient_clip", "accumulate", "precision") if name in faults}
    trainer = make_trainer(kind, device=DEVICE, model=make_net() if model is None else model, **options)
    loop = lambda model, loader, valid_loader, record: plain(model, loader, valid_loader, record, **faults)  # noqa: E731
    return check_port(trainer, loop, 3, make_loader(n), make_valid() if valid else None)


def test_equal_loop_is_equal_and_true() -> None:
    found = check(valid=True)
    assert found and repr(found) == "PortCheck(equal, bit for bit, 12 steps)"


def other_seed(model: nn.Module, step: int) -> None:
    if step == 5:
        torch.rand(1, device=DEVICE)
        random.random()


def draws_twice(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(output, y) + 0 * torch.rand((), device=DEVICE)


def scaled(model: nn.Module, step: int) -> None:
    if step == 2:
        model[2].bias.data.mul_(1.01)  # type: ignore[index]


def freeze(model: nn.Module, step: int) -> None:
    model[2].bias.requires_grad_(False)  # type: ignore[index]
    model[2].bias.grad = None  # type: ignore[index]


Accumulates = Regress.add_on(AccumulationAddon)
SGD = lambda **options: lambda ps: torch.optim.SGD(ps, **{"lr": LR, **options})  # noqa: E731
ADAM = lambda **options: lambda ps: torch.optim.Adam(ps, **options)  # noqa: E731
ADAMW = lambda **options: lambda ps: torch.optim.AdamW(ps, **{"lr": LR, **options})  # noqa: E731
DECAY = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # noqa: E731
OTHER_BATCH = "other samples, another order, perhaps without set_epoch, or another preprocessing"
DROPOUT, NORM = {"dropout": True}, {"norm": True}  # options of the net, which else has neither

FAULTS: dict[
    str, tuple[dict[str, Any], tuple[int, str, str], str]
] = {  # arguments of `plain`; the step that differs, in what and where; why
    "validates without restoring": (
        {"net": DROPOUT, "valid": True, "restore": False},
        (5, "random numbers", ""),
        "your loop validates without restoring the random numbers (torch)",
    ),
    "draws between two steps": (
        {"net": DROPOUT, "change": other_seed},
        (6, "random numbers", "1 (Dropout)"),
        f"{DRAWN} ({BOTH})",
    ),
    "draws within a step": (
        {"net": DROPOUT, "loss_of": draws_twice},
        (2, "random numbers", "1 (Dropout)"),
        f"{DRAWN} ({TORCHS})",
    ),
    "does not call eval": (
        {"net": NORM, "valid": True, "evals": False},
        (5, "weights", "1 (BatchNorm1d)"),
        "1.running_mean is not the same when the step begins: they are changed between two steps, before the first one, or by a validation",
    ),
    "does not call train": (
        {"net": DROPOUT, "valid": True, "trains": False},
        (5, "mode", "1 (Dropout)"),
        "training is False in your loop, True in the trainer: a model.train() or a model.eval() is missing",
    ),
    "other first weights": (
        {"make": lambda ps: [ps := list(ps), nn.init.zeros_(ps[1]), SGD()(ps)][-1]},
        (1, "weights", "0 (Linear)"),
        "0.bias is not the same when the step begins",
    ),
    "changes weights between": ({"change": scaled}, (3, "weights", "2 (Linear)"), "2.bias is not the same when the step begins"),
    "other preprocessing": ({"preprocess": lambda x: x / 255}, (1, "batch", ""), OTHER_BATCH),
    "accumulates": ({"every": 2}, (1, "batch", ""), "the number of batches in an update is 2 in your loop, 1 in the trainer"),
    "autocast": ({"amp": True}, (1, "output", "0 (Linear)"), "it is bfloat16[16, 16] in your loop, float32[16, 16] in the trainer"),
    "sums the loss": (
        {"loss_of": lambda output, y: mse_loss(output, y, reduction="sum")},
        (1, "loss", ""),
        " in the trainer: another loss function, reduction or label",
    ),
    "averages what it records": ({"record_of": lambda loss: loss / 2}, (1, "loss", ""), "or an average that is recorded"),
    "adds up in another order": (
        {"loss_of": lambda output, y: mse_loss(output * 3, y * 3) / 9},
        (1, "gradient", ""),
        "in the last digits alone",
    ),
    "does not divide": (
        {"kind": Accumulates, "accumulate": 2, "every": 2},
        (1, "gradient", ""),
        "clipping, a factor or the reduction of the loss, its division by the batches of an update",
    ),
    "clips": ({"clip": 0.125}, (1, "gradient", ""), "their norm is 0.125 in your loop, "),
    "does not clip": ({"gradient_clip": 0.125}, (1, "gradient", ""), " in your loop, 0.125 in the trainer"),
    "scales the loss": ({"divide": 0.4}, (1, "gradient", ""), "their norm is "),
    "no zero_grad": ({"zero": False}, (2, "gradient", ""), "or optimizer.zero_grad()"),
    "freezes": ({"change": freeze}, (2, "gradient", "2 (Linear)"), "2.bias has none in your loop: it is frozen"),
    "weight decay": (
        {"optimizer": ADAMW(weight_decay=0.1), "make": ADAMW(betas=(0.8, 0.999))},
        (1, "optimizer", ""),
        "betas is (0.8, 0.999) in your loop, (0.9, 0.999) in the trainer; weight_decay is 0.01 in your loop, 0.1",
    ),
    "other class": ({"make": SGD()}, (1, "optimizer", ""), "SGD in your loop, Adam in the trainer"),
    "other rate": ({"make": ADAM(lr=0.02)}, (1, "optimizer", ""), "lr is 0.02 in your loop, 0.01 in the trainer"),
    "other schedule": ({"schedule": DECAY}, (2, "optimizer", ""), "lr is 0.009000000000000001 in your loop, 0.01 in the trainer"),
    "new optimizer": ({"each_epoch": True}, (5, "optimizer", ""), "the weights differ after equal gradients and options: a new optimizer"),
    "fewer parameters": (
        {"make": lambda ps: SGD()(list(ps)[:3]), "optimizer": SGD()},
        (1, "gradient", "2 (Linear)"),
        "2.bias has none in your loop: it is frozen, not in the optimizer, or not in the loss",
    ),
    "ends early": ({"epochs": 2}, (9, "number of steps", ""), "your loop ends after 8 steps, the other makes more"),
    "trains longer": ({"epochs": 4}, (13, "number of steps", ""), "the trainer ends after 12 steps, the other makes more"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_loop_is_found(name: str) -> None:
    faults, (step, what, layer), reason = FAULTS[name]
    faults = {"net": {"dropout": False}, **faults}
    found = check(make_net(**faults.pop("net")), **faults)
    assert not found and (found.step, found.steps, found.what, found.layer) == (step, step - 1, what, layer)
    assert reason in found.reason


class _Ordered(torch.utils.data.Sampler[int]):
    """Another order in each epoch, for loops that call `set_epoch`."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 64

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def ordered_loader() -> DataLoader[Any]:
    return DataLoader(make_data(64), 16, sampler=_Ordered())


def trainer_of(**options: Any) -> Any:
    return make_trainer(device=DEVICE, model=make_net(dropout=False), **options)


def test_loop_that_forgets_set_epoch_differs_in_the_batch() -> None:
    loader = ordered_loader()
    found = check_port(trainer_of(), plain, 3, loader)
    assert repr(found) == f"PortCheck(equal for 4 steps; step 5 differs in the batch: {OTHER_BATCH})"
    assert loader.sampler.epoch == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda loader: list(loader)[::-1], OTHER_BATCH),
        (lambda loader: make_loader(64, batch_size=8, shuffle=False), "it is float32[8, 8] in your loop, float32[16, 8] in the trainer"),
    ],
)
def test_other_batches_are_described(read: Callable[[Any], Any], reason: str) -> None:
    found = check_port(trainer_of(), lambda model, loader: plain(model, read(loader)), 1, make_loader(64, shuffle=False))
    assert (found.step, found.what, found.reason) == (1, "batch", reason)


class _Lit(L.LightningModule):
    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def fit(model: nn.Module, loader: Any, record: Any, lr: float = LR, **options: Any) -> None:
    silent = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    L.Trainer(max_epochs=3, accelerator=DEVICE, devices=1, callbacks=[record], **silent, **options).fit(_Lit(model, lr), loader)


@pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:.*log_every_n_steps")
def test_loop_of_a_lightning_trainer() -> None:
    trainer = make_trainer(Accumulates, device=DEVICE, model=make_net(), accumulate=2)
    found = check_port(trainer, partial(fit, accumulate_grad_batches=2), 3, make_loader(64))
    assert repr(found) == "PortCheck(equal, bit for bit, 6 steps)"
    found = check_port(trainer_of(), partial(fit, lr=0.5), 3, make_loader(64))
    assert (found.step, found.what, found.reason) == (1, "optimizer", "lr is 0.5 in your loop, 0.01 in the trainer")


def test_tensors_of_any_kind_have_a_digest_that_differs_with_a_bit() -> None:
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
    values = [torch.tensor([0, 1, 1]).to(kind) for kind in kinds]
    others = [torch.empty(0), torch.tensor(2.0), torch.eye(2).to_sparse(), torch.eye(3).T]
    found = [digest(value) for value in (*values, *others)]
    assert found == [digest(value.clone()) for value in (*values, *others)]
    assert not any(one.bits == digest(torch.tensor([1, 0, 1]).to(kind)).bits for one, kind in zip(found, kinds))


def test_several_optimizers_are_compared_step_by_step() -> None:
    halves = lambda model: [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[2].parameters(), LR)]  # noqa: E731

    def loop(model: nn.Module, loader: Any, decay: float = 0.0) -> None:
        optimizers = halves(model)
        optimizers[1].param_groups[0]["weight_decay"] = decay
        for x, y in on_device(loader):
            for optimizer in optimizers:
                optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()

    model = make_net()
    trainer = make_trainer(device=DEVICE, model=model, optimizer=halves(model))
    assert check_port(trainer, loop, 1, make_loader(64)).steps == 8
    found = check_port(trainer, partial(loop, decay=0.1), 1, make_loader(64))
    assert (found.step, found.what, found.layer) == (2, "optimizer", "2 (Linear)")


def test_check_stops_after_so_many_steps_and_leaves_everything_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(device=DEVICE, model=make_net(norm=True), save_path=tmp_path, seed=3)
    loader, modes = make_loader(64, own_generator=True), [part.training for part in trainer.model.modules()]
    before, random_before, order = deepcopy(trainer.model), random_state(), loader.generator.get_state()  # type: ignore[union-attr]
    found = check_port(trainer, plain, 1000, loader, steps=7)
    assert repr(found) == "PortCheck(equal, bit for bit, 7 steps)"
    assert same_weights(trainer.model, before) and not trainer.optimizer.state
    assert modes == [part.training for part in trainer.model.modules()]
    assert same_random(random_before, random_state()) and torch.equal(order, loader.generator.get_state())  # type: ignore[union-attr]
    assert (trainer.counts.step, trainer.history.epochs, trainer.result) == (0, [], None) and not list(tmp_path.iterdir())
    assert not trainer.model[0]._forward_hooks


def of_another_model(model: nn.Module, loader: Any) -> None:
    plain(make_net().to(DEVICE), loader)


@pytest.mark.parametrize(
    ("loop", "what"),
    [
        (of_another_model, "No update of the model was seen."),
        (lambda model, loader, optimizer: None, "check_port calls the loop as loop.*: missing a required argument"),
        (lambda: None, "check_port calls the loop as loop.*: too many positional arguments"),
    ],
)
def test_loop_that_can_not_be_compared_is_refused(loop: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check_port(trainer_of(), loop, 1, make_loader(64))


def test_trainer_that_has_trained_and_loader_that_is_read_once_are_refused() -> None:
    trainer = trainer_of()
    with pytest.raises(ConfigError, match="An iterator can.t give its batches twice"):
        check_port(trainer, plain, 1, iter(make_loader()))
    trainer.run(1, make_loader())
    with pytest.raises(ConfigError, match="has trained already"):
        check_port(trainer, plain, 1, make_loader())
