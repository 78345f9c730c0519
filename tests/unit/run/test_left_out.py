"""Batches that are left out: the loader or the step gives None for them, or their update is skipped. Beside a plain PyTorch loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import plain_loop as judge
import pytest
import torch
from lightning_modules import Lit, by_lightning, by_nbtrain
from samples import DEVICE, make_model, make_trainer, on_device, same_weights
from torch import nn
from torch.nn.functional import mse_loss

from nbtrain import MultiOptimizerTrainer, NonFiniteAddon, StepError, Trainer
from nbtrain.history.history import Row

BOTH = pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock"])
HOW = pytest.mark.parametrize("how", ["loader", "step"])


def batches(n: int = 7, seed: int = 1) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(n)]


def without(how: str, *places: int, n: int = 7, seed: int = 1) -> list[Any]:
    """Batches of which those at `places` are left out: by the loader, or by the step, which sees that they hold no numbers."""
    made = batches(n, seed)
    for i in places:
        made[i] = None if how == "loader" else (made[i][0] * math.nan, made[i][1])
    return made


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor | None:
    x, y = (part.to(DEVICE) for part in batch)
    return None if x.isnan().any() else mse_loss(model(x), y)


class Picky(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any] | None:
        loss = loss_of(self.model, batch)
        return None if loss is None else {"loss": loss}

    def test_step(self, batch: Any) -> dict[str, Any] | None:
        return self.train_step(batch)


def make(*, lean: bool = True, kind: Any = Picky, **options: Any) -> Any:
    trainer = make_trainer(kind, **options)
    trainer.short_way = lean
    return trainer


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("places", [(0,), (2,), (6,), (0, 1, 2), (3, 5), (5, 6), (1, 2, 4, 6)], ids=str)
@HOW
@BOTH
def test_batches_that_are_left_out_have_no_part_in_a_training(lean: bool, how: str, places: tuple[int, ...], accumulate: int) -> None:
    loader, n_epochs = without(how, *places), 2
    trainer = make(lean=lean, lightning={"accumulate_grad_batches": accumulate})
    trainer.run(n_epochs, loader)
    plain = make_model().to(DEVICE)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    found = [losses for losses, _ in judge.train(plain, optimizer, loss_of, loader, range(n_epochs), accumulate=accumulate)]
    assert same_weights(trainer.model, plain)
    means = [pytest.approx(sum(losses) / len(losses), rel=1e-12) for losses in found]
    assert [row["train_loss"] for row in trainer.history.epochs] == means
    n_each = 7 - len(places)
    assert trainer.counts.left_out == n_epochs * len(places) and trainer.counts.step == n_epochs * -(-n_each // accumulate)
    assert trainer.history.steps["train"]["train_loss"] == [loss for losses in found for loss in losses]


PASSES: dict[str, Callable[[Any, Any], float]] = {
    "validation": lambda trainer, loader: trainer.run(1, batches(), loader).metrics["val_loss"],
    "validate": lambda trainer, loader: trainer.validate(loader)["loss"],
    "evaluate": lambda trainer, loader: trainer.evaluate(loader)["loss"],
    "mode test": lambda trainer, loader: (trainer.toggle("test"), trainer.run(1, loader).metrics["test_loss"])[1],
}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("places", [(0,), (2, 6)], ids=str)
@HOW
@BOTH
def test_batches_that_are_left_out_have_no_part_in_an_evaluation(lean: bool, how: str, places: tuple[int, ...], name: str) -> None:
    trainer = make(lean=lean)
    found = PASSES[name](trainer, without(how, *places))
    with torch.no_grad():
        losses = [loss.item() for batch in without("step", *places) if (loss := loss_of(trainer.model.eval(), batch)) is not None]
    assert found == pytest.approx(sum(losses) / (7 - len(places)), rel=1e-12) and trainer.counts.left_out == len(places)


class Outputs(Picky):
    def test_step(self, batch: Any) -> Any:
        return None if batch[0].isnan().any() else {"output": self.model(batch[0]), **(self.train_step(batch) or {})}


@HOW
def test_inference_leaves_batches_out(how: str) -> None:
    trainer = make(kind=Outputs)
    found, made = trainer.inference(without(how, 0, 3)), batches()
    expected = trainer.inference([made[i] for i in (1, 2, 4, 5, 6)])
    assert len(found) == 5 and all(map(torch.equal, found, expected))


def test_their_number_is_noted_once_in_each_kind_of_pass() -> None:
    trainer, texts = make(), []
    emit = trainer.recorder.emit
    trainer.recorder.emit = lambda event: (texts.append(event.data["text"]) if event.kind == "note" else None, emit(event))
    trainer.run(2, without("step", 0, 3), without("loader", 1))
    assert texts == [
        "2 of 7 batches of the training pass of epoch 1 were left out: the loader or the step gave None for them.",
        "1 of 7 batches of the validation pass of epoch 1 were left out: the loader or the step gave None for them.",
    ]


def test_a_step_that_forgets_its_return_is_refused_and_so_is_a_pass_without_a_batch() -> None:
    class Forgets(Picky):
        def train_step(self, batch: Any) -> Any:
            loss_of(self.model, batch)

    for trainer, loader in ((make(kind=Forgets), batches()), (make(), without("step", *range(7)))):
        with pytest.raises(StepError) as caught:
            trainer.run(1, loader)
        assert str(caught.value) == (
            "All 7 batches of the training pass of epoch 1 were left out: the loader or the step gave None for each of them.\n"
            f"  {trainer.title}\n"
            '  Let the step end with a return, such as: return {"loss": loss}'
        )


class Plain(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


@pytest.mark.filterwarnings("ignore")  # Lightning's, of a batch that is left out
@HOW
def test_a_lightning_module_leaves_batches_out_as_under_lightning(how: str) -> None:
    loader, valid = without(how, 1, 3), batches(3, seed=2)
    alone = by_lightning(Plain(), 2, trainer_loader(loader), trainer_loader(valid))
    trainer = by_nbtrain(Plain(), 2, trainer_loader(loader), trainer_loader([*valid, None]))
    assert same_weights(trainer.model, alone) and trainer.counts.left_out == 6 and trainer.result.status == "completed"
    assert all(math.isfinite(row["train_loss"]) for row in trainer.history.epochs)
    assert trainer.history.last["val"] == float(alone.trainer.callback_metrics["val"])


def trainer_loader(made: Any) -> Any:
    return torch.utils.data.DataLoader(made, batch_size=None, collate_fn=lambda batch: batch)


class Turns(MultiOptimizerTrainer):
    """Trains its second part on each other batch."""

    model: Any
    n = 0

    def train_step_a(self, batch: Any) -> dict[str, Any] | None:
        x, y = batch
        return None if x.isnan().any() else {"loss": mse_loss(self.model["b"](self.model["a"](x)), y)}

    def train_step_b(self, batch: Any) -> dict[str, Any] | None:
        self.n += 1
        return self.train_step_a(batch) if self.n % 2 else None


@pytest.mark.parametrize("order", ["ab", "ba"])
@BOTH
def test_a_turn_may_leave_a_batch_out(lean: bool, order: str) -> None:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(4, 1)}))
    model, plain = models
    plain.to(DEVICE)
    trainer: Any = Turns(model, DEVICE, optimizers={n: torch.optim.Adam(model[n].parameters(), lr=0.1) for n in order}, log_bar=False)
    trainer.short_way = lean
    loader = without("step", 3)
    trainer.run(2, loader)
    optimizers = {n: torch.optim.Adam(plain[n].parameters(), lr=0.1) for n in order}
    losses: dict[str, list[float]] = {"a": [], "b": []}
    for i, (x, y) in enumerate(on_device(loader) * 2):
        for n in order:
            if x.isnan().any() or (n == "b" and i % 2):
                continue
            plain.zero_grad()
            loss = mse_loss(plain["b"](plain["a"](x)), y)
            loss.backward()
            optimizers[n].step()
            losses[n].append(loss.item())
    assert same_weights(model, plain) and trainer.counts.left_out == 2
    table = trainer.history.steps["train"]
    assert {n: [v for v in table[f"train_loss_{n}"] if not math.isnan(v)] for n in "ab"} == losses


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("every_s", [0.0, 3600.0])
@BOTH
def test_a_skipped_batch_is_left_out_of_the_mean_and_of_the_best(lean: bool, every_s: float, accumulate: int) -> None:
    class Loss(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": mse_loss(self.model(batch[0]), batch[1])}

        def metric_on_epoch_end(self) -> dict[str, Any]:
            return {"rows": len(self.log_train["loss"])}

    def window_of_nan(epoch_losses: list[float]) -> list[float]:
        windows = [epoch_losses[i : i + accumulate] for i in range(0, len(epoch_losses), accumulate)]
        return [loss for window in windows if not any(map(math.isnan, window)) for loss in window]

    loader = without("step", 2, n=8)
    trainer = make(lean=lean, kind=Loss, nonfinite="skip", lightning={"accumulate_grad_batches": accumulate})
    trainer.recorder.every_s = every_s
    trainer.run(2, loader)
    steps = trainer.history.steps["train"]["train_loss"]
    kept = [window_of_nan(steps[:8]), window_of_nan(steps[8:])]
    assert len(steps) == 16 and math.isnan(steps[2]) and len(kept[0]) == 8 - accumulate
    assert [row["train_loss"] for row in trainer.history.epochs] == [pytest.approx(sum(losses) / len(losses), rel=1e-12) for losses in kept]
    assert [row["train_rows"] for row in trainer.history.epochs] == [8 - accumulate] * 2
    assert isinstance(trainer.history.best, Row) and trainer[NonFiniteAddon].n_skipped == 2
    assert trainer.history.last["train_skipped"] == accumulate / 8


@HOW
def test_what_looks_at_single_batches_leaves_them_out(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, loader = make(kind=Outputs), without(how, 0, 3)
    kept = [batch for i, batch in enumerate(batches()) if i not in (0, 3)]
    for show in (trainer.show_worst, trainer.show_results):
        assert [torch.equal(a.output, b.output) for a, b in zip(show(loader, n=12).samples, show(kept, n=12).samples)] == [True] * 12
    trainer.check(without("step", 0)[0])
    assert "train_step: None, which leaves the batch out\ntest_step: None, which leaves the batch out" in capsys.readouterr().out
    assert trainer.run_batch(without("step", 0)[0]) == {} and trainer.counts.step == 0
