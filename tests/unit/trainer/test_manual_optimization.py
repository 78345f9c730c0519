"""With `automatic_optimization = False` the step makes its updates, and the run is that of the plain loop with the same lines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from samples import DEVICE, Breaks, Broken, Regress, make_loader, make_model, make_trainer, on_device, same_weights, without_times
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from nbtrain import (
    AccumulationAddon,
    ConfigError,
    GradientStatsAddon,
    LimitsAddon,
    LoggersAddon,
    MultiOptimizerTrainer,
    StateManagerAddon,
    StepError,
    Trainer,
)
from nbtrain.data.loader import BatchList

BATCHES: list[Any] = list(make_loader(shuffle=False))
N = len(BATCHES)


def networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
    return nn.ModuleDict({"critic": critic, "generator": nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))})


def optimizers(model: Any) -> dict[str, Any]:
    return {
        "critic": Adam(model["critic"].parameters(), lr=1e-3, betas=(0.0, 0.9)),
        "generator": Adam(model["generator"].parameters(), lr=1e-3, betas=(0.0, 0.9)),
    }


def penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    share = torch.rand(len(real), 1, device=real.device)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.norm(2, dim=1) - 1) ** 2).mean()


class WGAN(Trainer):
    """A Wasserstein GAN with gradient penalty: the generator steps in each fifth batch."""

    automatic_optimization = False
    n_seen = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        real, critic, generator = batch[0], self.model["critic"], self.model["generator"]
        fake = generator(torch.randn(len(real), 3, device=DEVICE)).detach()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
        self.optimizers["critic"].zero_grad()
        self.backward(loss)
        self.optimizers["critic"].step()
        self.n_seen += 1
        if self.n_seen % 5:
            return {"loss": loss}
        loss_g = -critic(generator(torch.randn(len(real), 3, device=DEVICE))).mean()
        self.optimizers["generator"].zero_grad()
        self.backward(loss_g)
        self.optimizers["generator"].step()
        return {"loss": loss, "loss_g": loss_g}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"mean": self.model["critic"](batch[0]).mean()}


def plain_wgan(n_batches: int, clip: float = 0.0) -> tuple[nn.ModuleDict, list[float]]:
    model = networks().to(DEVICE)
    critic, generator = model["critic"], model["generator"]
    made, losses = optimizers(model), []
    torch.manual_seed(7)
    for n in range(n_batches):
        real = BATCHES[n % N][0].to(DEVICE)
        fake = generator(torch.randn(len(real), 3, device=DEVICE)).detach()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
        made["critic"].zero_grad()
        loss.backward()
        if clip:
            clip_grad_norm_(critic.parameters(), clip)
        made["critic"].step()
        losses.append(loss.item())
        if (n + 1) % 5 == 0:
            loss_g = -critic(generator(torch.randn(len(real), 3, device=DEVICE))).mean()
            made["generator"].zero_grad()
            loss_g.backward()
            if clip:
                clip_grad_norm_(generator.parameters(), clip)
            made["generator"].step()
    return model, losses


def make(kind: Any = WGAN, **options: Any) -> Any:
    model = networks()
    return kind(model, **({"device": DEVICE, "log_bar": False, "optimizer": optimizers(model)} | options))


LOOPS = pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock"])


def run(trainer: Any, n_epoch: int, lean: bool = True, **options: Any) -> Any:
    trainer.short_way = lean
    torch.manual_seed(7)
    return trainer.run(n_epoch, BATCHES, **options)


@LOOPS
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_gan_with_several_critic_steps_equals_the_plain_loop(lean: bool, clip: float) -> None:
    trainer = make(gradient_clip=clip)
    run(trainer, 3, lean)
    model, losses = plain_wgan(3 * N, clip)
    assert same_weights(trainer.model, model)
    assert trainer.loss_history_train == losses
    assert trainer.counts.step == trainer.counts.processed == 3 * N
    assert "train_loss_g" in trainer.history.last and ("train_grad_norm" in trainer.history.last) == bool(clip)


class Whole(Trainer):
    """Steps one optimizer in each second batch, and a schedule with it."""

    automatic_optimization = False
    n = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.schedule = StepLR(self.optimizer, 2, gamma=0.9) if self.optimizer is not None else None

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        loss = mse_loss(self.model(x), y) / 2
        self.backward(loss)
        self.n += 1
        if self.n % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        return {"loss": loss}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}


def make_whole(kind: Any = Whole, **options: Any) -> Any:
    model = make_model()
    return kind(model, DEVICE, optimizer=AdamW(model.parameters(), lr=1e-2), **({"log_bar": False} | options))


def plain_whole(n_batches: int, context: Any = nullcontext) -> nn.Module:
    model = make_model().to(DEVICE)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    schedule = StepLR(optimizer, 2, gamma=0.9)
    torch.manual_seed(7)
    for n in range(n_batches):
        x, y = on_device(BATCHES)[n % N]
        with context():
            loss = mse_loss(model(x), y) / 2
        loss.backward()
        if n % 2:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return model


@LOOPS
def test_accumulating_by_hand_goes_on_over_the_ends_of_epochs_and_validations(lean: bool) -> None:
    trainer = make_whole(lightning={"val_check_interval": 3})
    run(trainer, 3, lean, valid_loader=BATCHES[:2])
    assert N == 5 and trainer.counts.step == 3 * N // 2  # a batch counts as an update where something steps
    assert same_weights(trainer.model, plain_whole(3 * N))


@LOOPS
def test_bf16_equals_the_plain_loop_with_autocast(lean: bool) -> None:
    trainer = make_whole(precision="bf16")
    run(trainer, 2, lean)
    assert same_weights(trainer.model, plain_whole(2 * N, lambda: torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False)))


@LOOPS
@pytest.mark.parametrize("save_format", ["ckpt", "safetensor"])
def test_a_run_is_resumed_in_mid_epoch_and_mid_window_bit_for_bit(lean: bool, save_format: str, tmp_path: Path) -> None:
    kind: Any = Whole.add_on(StateManagerAddon)

    def made(callbacks: list[Any]) -> Any:
        options: dict[str, Any] = {"save_path": tmp_path, "save_format": save_format, "every_n_steps": 1}
        return make_whole(kind, lightning={"callbacks": callbacks}, **options)

    for breaks in (4, 9):
        broken = made([Breaks(breaks)])
        with pytest.raises(Broken):
            run(broken, 3, lean, resume="auto")
    again = made([])
    again.short_way = lean
    torch.manual_seed(99)
    again.run(3, BATCHES, resume="auto")
    assert same_weights(again.model, plain_whole(3 * N))
    assert again.schedule.last_epoch == again.counts.step == 3 * N // 2


@LOOPS
def test_a_stopped_run_and_a_pause_change_nothing(lean: bool) -> None:
    class Pauses(Whole):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.processed == 7:
                self.pause()
            return super().train_step(batch)

    trainer = make_whole(Pauses)
    trainer.short_way = lean
    torch.manual_seed(7)
    handle = trainer.run(3, BATCHES, background=True)
    assert trainer.control.wait_settled(60) and trainer.control.state == "paused" and trainer.counts.processed == 8
    trainer.resume()
    assert handle.wait().status == "completed" and same_weights(trainer.model, plain_whole(3 * N))


@LOOPS
def test_a_run_can_go_back(lean: bool) -> None:
    trainer = make_whole(keep_states=True)
    run(trainer, 3, lean)
    rows = without_times(trainer.history.epochs)
    trainer.rewind(step=4)
    trainer.run(2, BATCHES)
    assert same_weights(trainer.model, plain_whole(3 * N)) and without_times(trainer.history.epochs) == rows
    branch = trainer.branch(epoch=1)
    branch.run(2, BATCHES)
    assert same_weights(branch.model, trainer.model) and branch.schedule.last_epoch == trainer.schedule.last_epoch
    seen = trainer.replay(4)  # the update after the eighth batch
    assert seen.loss == pytest.approx(trainer.loss_history_train[7]) and seen.layers
    with pytest.raises(ConfigError, match="Whole optimizes by hand, so its loss of one sample can't be computed"):
        trainer.blame(4)


def test_fp16_scales_the_loss_and_skips_an_update_that_is_not_finite() -> None:
    class Scaled(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            loss = mse_loss(self.model(x).float(), y) * (1e38 if self.counts.processed == 2 else 1)
            self.optimizer.zero_grad()
            self.backward(loss)
            self.optimizer.step()
            return {"loss": loss}

    trainer = make_whole(Scaled, precision=MixedPrecision("16-mixed", DEVICE), nonfinite="ignore")
    run(trainer, 1)
    model = make_model().to(DEVICE)
    optimizer, scaler = AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler(DEVICE)
    torch.manual_seed(7)
    for n, (x, y) in enumerate(on_device(BATCHES)):
        with torch.autocast(DEVICE, torch.half, cache_enabled=False):
            loss = mse_loss(model(x).float(), y) * (1e38 if n == 2 else 1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert trainer.precision.scaler.get_scale() == scaler.get_scale() < 2.0**16
    assert same_weights(trainer.model, model)


def test_fp16_without_the_scale_is_refused() -> None:
    class Plain(Whole):
        def backward(self, loss: torch.Tensor, **options: Any) -> None:
            loss.backward()

    with pytest.raises(StepError, match="without the scale that fp16 needs"):
        run(make_whole(Plain, precision=MixedPrecision("16-mixed", DEVICE)), 1)


@LOOPS
def test_steps_are_limited_and_saved_by_updates(lean: bool, tmp_path: Path) -> None:
    kind: Any = Whole.add_on(StateManagerAddon, LimitsAddon)
    trainer = make_whole(kind, save_path=tmp_path, every_n_steps=2, keep_last_n=9, max_steps=5)
    run(trainer, 9, lean)
    assert trainer.counts.step == 5 and trainer.counts.processed == 10
    assert {path.name for path in tmp_path.glob("run-*/checkpoints/epoch=*")} >= {"epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"}
    assert same_weights(trainer.model, plain_whole(10))


def test_a_schedule_of_the_trainer_steps_with_the_batches_that_update() -> None:
    rates: list[float] = []

    class Rates(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            rates.append(round(self.optimizers["adamw"].param_groups[0]["lr"], 6))
            self.backward(mse_loss(self.model(batch[0]), batch[1]))
            if len(rates) % 2 == 0:
                self.optimizers["adamw"].step()

    run(make_whole(Rates, scheduler=lambda step: 0.1 / (1 + step)), 1)
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.033333]


@LOOPS
def test_a_step_may_return_nothing(lean: bool) -> None:
    class Silent(Whole):
        def train_step(self, batch: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().train_step(batch)

    trainer = make_whole(Silent)
    result = run(trainer, 3, lean, valid_loader=BATCHES[:2])
    assert result.status == "completed" and same_weights(trainer.model, plain_whole(3 * N))
    assert trainer.counts.step == 7 and trainer.counts.left_out == 0 and "val_loss" in trainer.history.last
    assert "train_loss" not in trainer.history.last


@LOOPS
def test_a_step_may_return_a_loss_for_some_batches(lean: bool) -> None:
    class Later(Whole):
        def train_step(self, batch: Any) -> dict[str, Any] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
            found = super().train_step(batch)
            return found if self.counts.processed > 2 else None

    trainer = make_whole(Later)
    run(trainer, 2, lean)
    assert len(trainer.loss_history_train) == 7 and trainer.counts.processed == 10


@LOOPS
def test_an_epoch_without_a_step_is_noted(lean: bool) -> None:
    class Forgets(Whole):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": mse_loss(self.model(batch[0]), batch[1])}

    trainer, notes = make_whole(Forgets), list[str]()
    trainer.recorder.add(SimpleNamespace(update=lambda event: notes.append(event.data["text"]) if event.kind == "note" else None))
    run(trainer, 2, lean)
    text = "train_step has not stepped an optimizer in a whole epoch: with automatic_optimization = False it calls self.backward(loss) and "
    assert [note for note in notes if "stepped" in note] == [text + "self.optimizer.step()."]
    assert trainer.counts.step == 0


def test_hooks_see_each_step_and_its_gradients() -> None:
    seen: list[str] = []

    class Hooks(L.Callback):
        def on_before_optimizer_step(self, pl_trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(f"before {type(optimizer).__name__}")
            assert optimizer.param_groups[0]["params"][0].grad is not None

    options: dict[str, Any] = {"hooks": {"after_optimizer_step": lambda *given: seen.append("after")}}
    run(make(lightning={"callbacks": [Hooks()]}, **options), 1)
    assert seen == ["before Adam", "after"] * 6


def test_addons_measure_at_a_step_and_after_the_batch() -> None:
    class Measures(L.Callback):
        def on_train_batch_end(self, pl_trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.record("size", float(len(batch[0])))

    kind: Any = Whole.add_on(GradientStatsAddon)
    trainer = make_whole(kind, gradient_clip=1.0, stats_every_n_steps=1, lightning={"callbacks": [Measures()]})
    run(trainer, 2)
    steps = trainer.history.steps["train"]
    assert [norm != norm for norm in steps["train_grad_norm"]] == [n % 2 == 0 for n in range(2 * N)]  # none where nothing steps
    assert steps["train_size"] == [float(len(x)) for x, _ in BATCHES] * 2
    assert "train_grad_norm.0" in trainer.history.last


def test_loggers_get_a_point_at_each_update(tmp_path: Path) -> None:
    class Points(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "train_loss_step" in metrics:
                seen.append(step)

    seen: list[Any] = []
    kind: Any = Whole.add_on(LoggersAddon)
    run(make_whole(kind, loggers=[Points(tmp_path)], save_path=tmp_path, lightning={"log_every_n_steps": 1}), 2)
    assert seen == [1, 2, 2, 3, 4, 5]  # five updates in ten batches; the first epoch ends between two


def test_each_optimizer_has_its_bound() -> None:
    clipped: dict[str, list[float]] = {"critic": [], "generator": []}

    class Looks(WGAN):
        def train_step(self, batch: Any) -> dict[str, Any]:
            found = super().train_step(batch)
            for name, norms in clipped.items():
                grads = [p.grad for p in self.model[name].parameters() if p.grad is not None]
                norms.append(float(torch.stack([g.norm() for g in grads]).norm()) if grads else 0.0)
            return found

    run(make(Looks, gradient_clip={"critic": 0.1}, lightning={"num_sanity_val_steps": 0}), 1)
    assert all(norm == pytest.approx(0.1, abs=1e-4) for norm in clipped["critic"][:4])


def test_an_optimizer_with_a_closure_steps_beside_another_one() -> None:
    x, y = on_device(BATCHES)[0]

    def made(model: Any) -> dict[str, Any]:
        return {"adam": Adam(model[0].parameters(), lr=1e-2), "lbfgs": LBFGS(model[3].parameters())}

    class Closures(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            def closure() -> torch.Tensor:
                self.model.zero_grad()
                loss = mse_loss(self.model(batch[0]), batch[1])
                self.backward(loss)
                return loss

            return {"loss": self.optimizers["adam" if self.counts.epoch < 2 else "lbfgs"].step(closure)}

    models = [make_whole().model.eval() for _ in range(2)]
    models[1][2] = nn.Identity()
    models[0][2] = nn.Identity()
    models[1].to(DEVICE)
    Closures(models[0], DEVICE, optimizer=made(models[0]), gradient_clip=0.5, log_bar=False).run(4, [(x, y)])
    optimizers = made(models[1])
    for epoch in range(4):
        optimizer = optimizers["adam" if epoch < 2 else "lbfgs"]

        def closure(optimizer: Any = optimizer) -> torch.Tensor:
            models[1].zero_grad()
            loss = mse_loss(models[1](x), y)
            loss.backward()
            clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            return loss

        optimizer.step(closure)
    assert same_weights(*models)


def test_it_trains_alike_under_a_lightning_trainer_of_ones_own() -> None:
    trainer = make()
    module, other = trainer.as_lightning_module(), L.Trainer(**trainer.lightning_args(), max_epochs=2)
    torch.manual_seed(7)
    with pytest.warns(UserWarning):
        other.fit(module, BatchList(BATCHES))
    assert same_weights(trainer.model, plain_wgan(2 * N)[0])
    assert other.global_step == trainer.counts.step == 2 * N


def test_mode_test_and_a_single_batch_work() -> None:
    assert make(mode="test", optimizer=None).evaluate(BATCHES).keys() == {"mean"}
    trainer = make()
    assert trainer.run_batch(BATCHES[0]).keys() == {"loss"} and trainer.counts.step == 1


def test_the_optimizers_have_names() -> None:
    trainer, one = make(), make_whole()
    assert list(trainer.optimizers) == ["critic", "generator"] and list(one.optimizers) == ["adamw"]
    assert one.optimizers["adamw"] is one.optimizer


def test_what_can_not_be_done_by_hand_is_refused_by_name() -> None:
    accumulating: Any = Whole.add_on(AccumulationAddon)
    for kind, options, text in [
        (Whole, {"lightning": {"accumulate_grad_batches": 2}}, "does not work with accumulated gradients"),
        (accumulating, {"accumulate": 2}, "does not work with"),
        (Whole, {"nonfinite": "skip"}, 'does not work with nonfinite="skip"'),
        (Whole, {"on_error": "pause"}, 'does not work with on_error="pause"'),
    ]:
        with pytest.raises(ConfigError, match=text):
            make_whole(kind, **options)
    for command in (lambda: make_whole().check(BATCHES[0]), lambda: make_whole().lr_find(BATCHES)):
        with pytest.raises(ConfigError, match="Whole.train_step makes its updates by hand"):
            command()
    with pytest.raises(StepError, match="backward was called outside of a run"):
        make_whole().train_step(on_device(BATCHES)[0])


def test_an_automatic_step_that_calls_backward_is_refused() -> None:
    class Both(Whole):
        automatic_optimization = True

    with pytest.raises(StepError, match="Both.train_step calls backward, which nbtrain does after it"):
        run(make_whole(Both), 1)


@pytest.mark.parametrize("what", ["calls backward", "steps an optimizer"])
def test_an_evaluation_that_would_train_is_refused(what: str) -> None:
    class Trains(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            loss = mse_loss(self.model(batch[0]), batch[1])
            if what == "calls backward":
                self.backward(loss)
            self.optimizers["sgd"].step()
            return {"loss": loss}

        test_step = torch.enable_grad()(train_step)

    model = nn.Linear(8, 1)
    trainer = Trains(model, DEVICE, optimizer=SGD(model.parameters(), lr=0.1), log_bar=False)
    with pytest.raises(StepError, match=f"^Trains.test_step {what}: it would train on the data of an evaluation"):
        trainer.run(1, BATCHES, BATCHES)


def test_several_optimizers_in_turn_are_another_trainer() -> None:
    class Turns(MultiOptimizerTrainer):
        automatic_optimization = False

        def train_step_critic(self, batch: Any) -> dict[str, Any]:
            return {}

    with pytest.raises(ConfigError, match="Turns is a MultiOptimizerTrainer, which steps its optimizers in turn"):
        Turns(networks(), DEVICE, optimizers={"critic": SGD}, log_bar=False)


LOSSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number": (lambda output: 3.0, "its loss as float, which has no gradient."),
    "a dict": (lambda output: {"loss": output.mean()}, "its loss as dict, which has no gradient."),
    "a vector": (lambda output: output, "a loss of shape (16, 1), not a scalar."),
    "without a graph": (lambda output: output.mean().detach(), "a loss without a gradient."),
}


@pytest.mark.parametrize(("loss", "what"), LOSSES.values(), ids=LOSSES)
def test_backward_of_what_is_not_a_loss_says_so(loss: Callable[[Any], Any], what: str) -> None:
    class Wrong(Regress):
        automatic_optimization = False

        def train_step(self, batch: Any) -> Any:
            self.backward(loss(self.model(batch[0])))

    with pytest.raises(StepError) as error:
        make_trainer(Wrong).run(1, make_loader())
    assert str(error.value).startswith(f"Wrong.train_step called backward with {what}\n  epoch 1, batch 1\n")


def test_backward_takes_the_gradient_of_a_vector() -> None:
    class Vector(Regress):
        automatic_optimization = False

        def train_step(self, batch: Any) -> Any:
            output = self.model(batch[0])
            self.backward(output, gradient=torch.ones_like(output))
            self.optimizer.step()

    assert make_trainer(Vector).run(1, make_loader()).status == "completed"
