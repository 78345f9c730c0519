"""An optimizer with `train` and `eval`, as schedulefree's: its average is evaluated and saved. tests/ecosystem runs the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights

from nbtrain import MultiOptimizerTrainer, StateManagerAddon, Trainer
from nbtrain.optim.optimizer_modes import OptimizerModes


class Averaged(torch.optim.SGD):
    """SGD that keeps the average of its weights, and puts it into the model in evaluation mode. It rounds as schedulefree's do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        self._move(True, -0.9 / 0.1)

    def eval(self) -> None:
        self._move(False, 0.9)

    @torch.no_grad()
    def _move(self, trains: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not trains:
                group["train_mode"] = trains
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert all(group["train_mode"] for group in self.param_groups)
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                z.lerp_(p.detach(), 0.1)
        return loss


class Watched(Regress):
    """Writes down the mode of its optimizer in evaluations. In training the optimizer's `step` checks it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.modes: list[bool] = []

    def test_step(self, batch: Any) -> dict[str, Any]:
        self.modes.append(self.optimizer.param_groups[0]["train_mode"])  # pyright: ignore[reportOptionalMemberAccess]
        return super().test_step(batch)


def make(kind: Any = Watched, *, lean: bool = True, **options: Any) -> Any:
    trainer = make_trainer(kind, model=make_model(0), optimizer=Averaged, seed=0, **options)
    trainer.short_way = lean
    return trainer


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("lightning", [{}, {"val_check_interval": 2}])
def test_training_batches_see_the_training_mode_and_evaluations_the_other(lean: bool, lightning: dict[str, Any]) -> None:
    trainer = make(lean=lean, lightning=lightning)
    trainer.run(2, make_loader(), make_valid())
    assert trainer.optimizer.param_groups[0]["train_mode"] is False
    trainer.evaluate(make_valid())
    assert len(trainer.modes) > 6 and not any(trainer.modes)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("valid", [True, False])
def test_best_and_last_weights_are_the_averages(lean: bool, valid: bool, tmp_path: Path) -> None:
    at_ends: list[dict[str, torch.Tensor]] = []

    class Ends(L.Callback):
        def on_train_epoch_end(self, pl_trainer: Any, pl_module: Any) -> None:
            trains, state = trainer.optimizer.param_groups[0]["train_mode"], trainer.optimizer.state  # it comes before nbtrain's callbacks
            weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
            parameters = dict(trainer.model.named_parameters())
            at_ends.append({name: p.lerp(state[parameters[name]]["z"], 0.9) if trains else p.clone() for name, p in weights.items()})

    trainer = make(lean=lean, save_path=tmp_path, lightning={"callbacks": [Ends()]})
    result = trainer.run(3, make_loader(), make_valid() if valid else None)
    best = at_ends[result.best["epoch"] - 1]
    for saved, expected in ((load_file(result.best.path), best), (load_file(result.run_dir / "last.safetensors"), at_ends[-1])):
        assert all(torch.equal(saved[name], expected[name].cpu()) for name in expected)
    assert all(torch.equal(value, at_ends[-1][name]) for name, value in trainer.model.named_parameters())


@pytest.mark.parametrize("lean", [True, False])
def test_runs_in_parts_equal_one_run(lean: bool) -> None:
    whole, parts = make(lean=lean), make(lean=lean)
    whole.run(3, make_loader(own_generator=True, shuffle=False), make_valid())
    parts.run(1, make_loader(own_generator=True, shuffle=False), make_valid())
    parts.run(2, make_loader(own_generator=True, shuffle=False), make_valid())
    assert same_weights(whole.model, parts.model)


@pytest.mark.parametrize("lean", [True, False])
def test_a_run_that_was_cut_within_an_epoch_resumes_exactly(lean: bool, tmp_path: Path) -> None:
    class Dies(L.Callback):
        def on_train_batch_end(self, pl_trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (pl_trainer.current_epoch, batch_idx) == (1, 3):
                raise SystemExit

    def begin(folder: str, *callbacks: Any) -> Any:
        kind = Watched.add_on(StateManagerAddon)
        return make(kind, lean=lean, save_path=tmp_path / folder, every_n_steps=2, lightning={"callbacks": list(callbacks)})

    whole = begin("whole")
    whole.run(3, make_loader(), make_valid(), resume="auto")
    with pytest.raises(SystemExit):
        begin("cut", Dies()).run(3, make_loader(), make_valid(), resume="auto")
    again = begin("cut")
    again.run(3, make_loader(), make_valid(), resume="auto")
    assert same_weights(whole.model, again.model)
    assert [row["val_loss"] for row in again.history.epochs] == [row["val_loss"] for row in whole.history.epochs]


class Fits(L.LightningModule):
    """Knows nothing of modes."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.modes = make_model(0), list[bool]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.append(self.optimizers().param_groups[0]["train_mode"])  # pyright: ignore[reportAttributeAccessIssue]
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return Averaged(self.parameters())


def test_optimizer_that_a_lightning_module_makes_has_its_modes_too() -> None:
    trainer = Trainer.from_lightning(Fits(), device="cpu", log_bar=False)
    trainer.run(2, make_loader(), make_valid())  # in training mode, or `step` raises
    assert trainer.lightning_module.modes and not any(trainer.lightning_module.modes)
    assert trainer.optimizer.param_groups[0]["train_mode"] is False


class Pair(MultiOptimizerTrainer):
    """The optimizer of the first layer has modes, that of the last one has none."""

    def train_step_first(self, batch: Any) -> dict[str, Any]:
        return {"loss": torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])}

    train_step_last = train_step_first

    def test_step(self, batch: Any) -> dict[str, Any]:
        assert not self.joint.optimizers["first"].param_groups[0]["train_mode"]  # pyright: ignore[reportOptionalMemberAccess]
        return self.train_step_first(batch)


def test_optimizer_among_several_has_its_modes_too() -> None:
    net = make_model(0)
    optimizers = {"first": Averaged(net[0].parameters()), "last": torch.optim.SGD(net[3].parameters(), 0.01)}  # pyright: ignore[reportIndexIssue]
    trainer = Pair(net, device="cpu", optimizers=optimizers, log_bar=False)
    trainer.run(2, make_loader(), make_valid())  # in training mode, or `step` raises
    assert optimizers["first"].param_groups[0]["train_mode"] is False and len(trainer.history) == 2


def test_an_optimizer_without_modes_has_no_callback_for_them() -> None:
    assert not any(isinstance(callback, OptimizerModes) for callback in make_trainer().callbacks())
    assert any(isinstance(callback, OptimizerModes) for callback in make().callbacks())
