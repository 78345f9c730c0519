"""Several optimizers take turns on each batch, as in the loop that everybody would write."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from samples import DEVICE, Breaks, Broken, make_loader, on_device, same_weights, without_times
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from nbtrain import AccumulationAddon, ConfigError, MultiOptimizerTrainer, StateManagerAddon, StepError
from nbtrain.data.loader import BatchList
from nbtrain.variants.multi_optimizer import JointOptimizer

BATCHES: list[Any] = list(make_loader(shuffle=False))  # a loader would draw a seed in each pass


class GAN(MultiOptimizerTrainer):
    """Makes points of eight coordinates."""

    def train_step_discriminator(self, batch: Any) -> dict[str, Any]:
        real, model = batch[0], self.model
        right, wrong = model["discriminator"](real), model["discriminator"](model["generator"](torch.randn(len(real), 3, device=DEVICE)))
        loss = bce(right, torch.ones_like(right)) + bce(wrong, torch.zeros_like(wrong))
        return {"loss": loss, "acc": (right > 0).float().mean(), "output": wrong}

    def train_step_generator(self, batch: Any) -> dict[str, Any]:
        logits = self.model["discriminator"](self.model["generator"](torch.randn(len(batch[0]), 3, device=DEVICE)))
        return {"loss": bce(logits, torch.ones_like(logits))}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"mean": self.model["discriminator"](batch[0]).mean()}


def networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
    return nn.ModuleDict({"generator": nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8)), "discriminator": discriminator})


def optimizers() -> dict[str, Any]:
    return {"discriminator": lambda params: Adam(params, lr=1e-2), "generator": lambda params: SGD(params, lr=1e-2, momentum=0.9)}


def make(kind: Any = GAN, **options: Any) -> Any:
    return kind(networks(), **({"device": DEVICE, "log_bar": False, "optimizers": optimizers()} | options))


def plain_loop(
    n_epoch: int, *, clip: float = 0.0, gamma: float = 1.0, n_critic: int = 1
) -> tuple[nn.ModuleDict, list[tuple[float, float]]]:
    """The loop as tutorials have it."""
    model = networks().to(DEVICE)
    g, d = model["generator"], model["discriminator"]
    made = optimizers()
    opt_d, opt_g = made["discriminator"](d.parameters()), made["generator"](g.parameters())
    losses, n = [], 0
    torch.manual_seed(7)
    for _ in range(n_epoch):
        for x, _ in on_device(BATCHES):
            right, wrong = d(x), d(g(torch.randn(len(x), 3, device=DEVICE)).detach())
            loss_d = bce(right, torch.ones_like(right)) + bce(wrong, torch.zeros_like(wrong))
            opt_d.zero_grad()
            loss_d.backward()
            if clip:
                clip_grad_norm_(d.parameters(), clip)
            opt_d.step()
            n += 1
            if n % n_critic:
                continue
            logits = d(g(torch.randn(len(x), 3, device=DEVICE)))
            loss_g = bce(logits, torch.ones_like(logits))
            opt_g.zero_grad()
            loss_g.backward()
            if clip:
                clip_grad_norm_(g.parameters(), clip)
            opt_g.step()
            losses.append((loss_d.item(), loss_g.item()))
        for optimizer in (opt_d, opt_g):
            optimizer.param_groups[0]["lr"] *= gamma
    return model, losses


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_training_is_that_of_a_plain_loop_bit_for_bit(lean: bool, clip: float) -> None:
    expected, losses = plain_loop(3, clip=clip)
    trainer = make(gradient_clip=clip)
    trainer.short_way = lean
    torch.manual_seed(7)
    trainer.run(3, BATCHES)
    assert same_weights(expected, trainer.model)
    steps = trainer.history.steps["train"]
    assert steps["train_loss_discriminator"] == pytest.approx([d for d, _ in losses])
    assert steps["train_loss_generator"] == pytest.approx([g for _, g in losses])
    assert steps["train_loss"] == pytest.approx([d + g for d, g in losses])
    assert trainer.counts.step == 15 and "train_acc_discriminator" in trainer.history.last
    assert all((f"train_grad_norm_{name}" in trainer.history.last) == bool(clip) for name in optimizers())


@pytest.mark.parametrize("lean", [True, False])
def test_one_of_them_steps_in_each_nth_batch(lean: bool, tmp_path: Path) -> None:
    expected, losses = plain_loop(3, n_critic=2)
    kind: Any = GAN.add_on(StateManagerAddon)
    trainer = make(every={"generator": 2})
    trainer.short_way = lean
    torch.manual_seed(7)
    trainer.run(3, BATCHES)
    assert same_weights(expected, trainer.model) and trainer.counts.step == 15 and trainer.counts.left_out == 0
    assert len(losses) == 7 and torch.isfinite(torch.tensor(trainer.history.steps["train"]["train_loss_generator"])).sum() == 7
    options: dict[str, Any] = {"every": {"generator": 2}, "save_path": tmp_path, "every_n_steps": 1}
    with pytest.raises(Broken):  # between two of its turns
        broken = make(kind, lightning={"callbacks": [Breaks(7)]}, **options)
        torch.manual_seed(7)
        broken.run(3, BATCHES)
    again = make(kind, **options)
    again.run(3, BATCHES, resume="auto")
    assert same_weights(expected, again.model)


def test_it_trains_alike_under_a_lightning_trainer_of_ones_own() -> None:
    expected, _ = plain_loop(2)
    trainer = make()
    module = trainer.as_lightning_module()
    other = L.Trainer(**trainer.lightning_args(), max_epochs=2)
    torch.manual_seed(7)
    with pytest.warns(UserWarning):
        other.fit(module, BatchList(BATCHES))
    assert other.callback_metrics.keys() >= {"train_loss", "train_loss_generator", "train_loss_discriminator"}
    assert same_weights(expected, trainer.model)


def test_parameters_of_the_others_get_no_gradient_and_can_be_trained_again() -> None:
    seen = []

    class Looks(GAN):
        def train_step_generator(self, batch: Any) -> dict[str, Any]:
            seen.append({name: [p.requires_grad for p in part.parameters()] for name, part in self.model.items()})
            return super().train_step_generator(batch)

    trainer = make(Looks)
    trainer.run_batch(BATCHES[0])
    assert seen == [{"generator": [True] * 4, "discriminator": [False] * 4}]
    assert all(p.requires_grad for p in trainer.model.parameters())


@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_a_run_is_resumed_in_mid_epoch_bit_for_bit(save_format: str, tmp_path: Path) -> None:
    kind: Any = GAN.add_on(StateManagerAddon)
    schedules = {name: lambda optimizer, plan: LambdaLR(optimizer, lambda step: 1 / (1 + step)) for name in optimizers()}

    def made(path: Path, **options: Any) -> Any:
        return make(kind, save_path=path, save_format=save_format, every_n_steps=2, seed=3, schedulers=schedules, **options)

    whole = made(tmp_path / "whole")
    whole.run(2, BATCHES)
    with pytest.raises(Broken):
        made(tmp_path / "broken", lightning={"callbacks": [Breaks(8)]}).run(2, BATCHES)
    again = made(tmp_path / "broken")
    torch.manual_seed(99)
    again.run(2, BATCHES, resume="auto")
    assert same_weights(whole.model, again.model)
    assert without_times(whole.history.epochs) == without_times(again.history.epochs)
    assert [g["lr"] for g in whole.optimizer.param_groups] == [g["lr"] for g in again.optimizer.param_groups] == [1e-2 / 11] * 2


def test_a_pause_changes_nothing() -> None:
    expected, _ = plain_loop(2)

    class Pauses(GAN):
        def train_step_generator(self, batch: Any) -> dict[str, Any]:
            if self.counts.processed == 3:
                self.pause()
            return super().train_step_generator(batch)

    trainer = make(Pauses)
    torch.manual_seed(7)
    handle = trainer.run(2, BATCHES, background=True)
    assert trainer.control.wait_settled(60) and trainer.control.state == "paused" and trainer.counts.processed == 4
    trainer.resume()
    assert handle.wait().status == "completed" and same_weights(expected, trainer.model)


def test_schedulers_step_per_epoch_each_on_its_own_optimizer() -> None:
    expected, _ = plain_loop(3, gamma=0.5)
    model, made = networks(), optimizers()
    both = {name: made[name](model[name].parameters()) for name in made}
    trainer = GAN(model, DEVICE, log_bar=False, optimizers=both, schedulers={name: StepLR(o, 1, gamma=0.5) for name, o in both.items()})
    torch.manual_seed(7)
    trainer.run(3, BATCHES)
    assert same_weights(expected, model)


def test_a_single_batch_returns_the_values_of_all_steps_and_check_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make()
    found = trainer.run_batch(BATCHES[0])
    assert found.keys() == {"loss", "loss_discriminator", "acc_discriminator", "loss_generator"}
    before = pickle.dumps(trainer.model.state_dict())
    trainer.check(BATCHES[0])
    assert "train_step: loss" in capsys.readouterr().out and pickle.dumps(trainer.model.state_dict()) == before


def test_a_joint_optimizer_survives_pickling_with_its_state() -> None:
    trainer = make()
    trainer.run(1, BATCHES)
    again = pickle.loads(pickle.dumps(trainer.optimizer))
    assert str(again.state_dict()) == str(trainer.optimizer.state_dict()) and len(again.state) == len(trainer.optimizer.state) == 8


def test_states_of_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="they were a and are b"):
        JointOptimizer({"b": SGD([nn.Parameter(torch.ones(1))])}).load_state_dict({"a": {}})


def test_errors_name_the_step_whose_they_are() -> None:
    class Detached(GAN):
        def train_step_generator(self, batch: Any) -> dict[str, Any]:
            return {"loss": super().train_step_generator(batch)["loss"].detach()}

    with pytest.raises(StepError) as caught:
        make(Detached).run(1, BATCHES)
    assert str(caught.value).splitlines()[0] == "train_step_generator returned a loss without a gradient."


def test_what_several_optimizers_can_not_do_is_refused_by_name() -> None:
    shared = networks()
    for options, text in [
        ({"optimizers": {"generator": SGD(shared.parameters()), "discriminator": SGD(shared.parameters())}}, "drive the same parameters"),
        ({"optimizers": {"critic": SGD}}, "GAN has an optimizer 'critic', and no train_step_critic"),
        ({"optimizers": {"generator": SGD}}, "GAN has train_step_discriminator, and no optimizer 'discriminator'"),
        ({"optimizers": None}, "GAN takes its optimizers by name"),
        ({"optimizer": SGD}, "GAN takes its optimizers by name"),
        ({"schedulers": {"generatr": StepLR}}, "There is no optimizer for the scheduler 'generatr'"),
        ({"schedulers": {"generator": ReduceLROnPlateau(SGD(shared.parameters()))}}, "can't step together"),
        ({"every": {"generatr": 5}}, r"there is no optimizer 'generatr'.\n.*generator"),
        ({"every": {"generator": 0}}, "must be a positive integer"),
        ({"every": {"generator": 5, "discriminator": 2}}, "no optimizer steps in each batch"),
        ({"kind": GAN.add_on(AccumulationAddon)}, "can't train with AccumulationAddon"),
    ]:
        with pytest.raises(ConfigError, match=text):
            make(**options)
    with pytest.raises(ConfigError, match="can't train with accumulate_grad_batches=2"):
        make(lightning={"accumulate_grad_batches": 2}).run(1, BATCHES)
    with pytest.raises(ConfigError, match="lr_find finds one learning rate"):
        make().lr_find(BATCHES)


def test_without_optimizers_it_evaluates() -> None:
    assert make(mode="test", optimizers=None).evaluate(BATCHES).keys() == {"mean"}
