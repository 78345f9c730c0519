"""LightningModules as people write them, and ones drawn by seed; what Lightning does with each and what nbtrain does, written down."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from samples import DEVICE, make_loader, make_model, make_valid, same_weights
from torch.nn.functional import mse_loss
from torchmetrics import MeanSquaredError

from nbtrain import Trainer
from nbtrain.run.lightning_trainer import quiet

Seen = list[Any]
_HOOKS = (
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_model_zero_grad", "on_test_start", "on_test_end"),
    *("on_test_epoch_start", "on_test_epoch_end", "on_test_batch_start", "on_test_batch_end", "setup", "teardown"),
)


class Lit(L.LightningModule):
    """A net with dropout, and a place to write down what happens."""

    def __init__(self, seed: int = 0, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = make_model(seed)
        self.mse = MeanSquaredError()
        self.seen: Seen = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def noted(name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **options: Any) -> Any:
        place = (self.global_step, self.current_epoch) if self._trainer is not None and name not in ("setup", "teardown") else None
        self.seen.append(("module", name, place, self.training, int(torch.get_rng_state().sum())))
        return getattr(L.LightningModule, name)(self, *args, **options)

    return hook


def noting(kind: type[Lit]) -> type[Lit]:
    """The class with all of its other hooks written down."""
    names = [name for name in _HOOKS if name not in vars(kind)]
    return type(kind.__name__, (kind,), {name: noted(name) for name in names})


class Notes(L.Callback):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen


def _of_callback(name: str) -> Callable[..., None]:
    def hook(self: Notes, pl_trainer: L.Trainer, *args: Any, **options: Any) -> None:
        metrics = {key: float(value) for key, value in pl_trainer.callback_metrics.items()} if name.endswith("_end") else {}
        self.seen.append(("callback", name, pl_trainer.global_step, pl_trainer.current_epoch, metrics))

    return hook


for name in _HOOKS:
    setattr(Notes, name, _of_callback(name))


class Log(CSVLogger):
    def __init__(self, seen: Seen) -> None:
        super().__init__(".")
        self.seen = seen

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.seen.append(("log", step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, params: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.seen.append(("hparams", dict(params)))

    def save(self) -> None:
        pass


def by_lightning(module: Lit, n_epoch: int, loader: Any = None, valid: Any = None, *, datamodule: Any = None, **options: Any) -> Lit:
    """`module` after a run of Lightning's own Trainer."""
    callbacks = [Notes(module.seen), *options.pop("callbacks", [])]
    plain = {
        "accelerator": DEVICE,
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    plain |= options
    with quiet():
        torch.manual_seed(7)
        own = {"callbacks": callbacks, "num_sanity_val_steps": 0, "inference_mode": False}
        pl_trainer = L.Trainer(max_epochs=n_epoch, logger=Log(module.seen), **own, **plain)
        pl_trainer.fit(module, loader, valid, datamodule=datamodule)
    return module


def by_nbtrain(module: Lit, n_epoch: int, loader: Any, valid: Any = None, **options: Any) -> Any:
    """The trainer of `module` after the same run of nbtrain's."""
    callbacks = [Notes(module.seen), *options.pop("callbacks", [])]
    lightning = {"logger": Log(module.seen), "callbacks": callbacks, **options}
    trainer = Trainer.from_lightning(module, device=DEVICE, log_bar=False, lightning=lightning)
    torch.manual_seed(7)
    trainer.run(n_epoch, loader, valid)
    return trainer


def difference(make: Callable[[], Lit], n_epoch: int = 2, loader: Any = make_loader, valid: Any = make_valid, **options: Any) -> str:
    """What differs between the two runs; empty where nothing does. `options` are made for each run."""

    def made() -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in options.items()}

    plain = by_lightning(make(), n_epoch, loader(), valid(), **made())
    ours: Lit = by_nbtrain(make(), n_epoch, loader(), valid(), **made()).model
    for i, (a, b) in enumerate(zip(plain.seen, ours.seen)):
        if a != b:
            return f"event {i}: {a} and {b}"
    if len(plain.seen) != len(ours.seen):
        return f"{len(plain.seen)} and {len(ours.seen)} events"
    return "" if same_weights(plain, ours) else "weights"


# -- modules drawn by seed
_FLAGS = [{}, {"on_epoch": True}, {"on_step": False, "on_epoch": True}, {"prog_bar": True}, {"logger": False}]
_FLAGS += [{"reduce_fx": "max", "on_epoch": True, "on_step": False}, {"batch_size": 3, "on_epoch": True}]


def drawn(seed: int) -> tuple[Callable[[], Lit], dict[str, Any]]:
    """A function that makes a module, and the options of its runs."""
    draw = random.Random(seed)
    flags = [draw.choice(_FLAGS) for _ in range(4)]
    returns, optimizer = draw.choice(("loss", "dict", "none at times")), draw.choice(("sgd", "adam", "by hand", "two by hand", "lbfgs"))
    schedule = draw.choice((None, "epoch", "step", "plateau", "every second step"))
    if "by hand" in optimizer:  # Lightning warns of what it ignores then
        schedule = draw.choice((None, "epoch"))
    overrides = draw.sample(("clip", "optimizer_step", "lr_scheduler_step", "zero_grad", "transfer", "backward"), draw.randint(0, 3))
    validates, n_loaders, logs_at_end = draw.random() < 0.8, draw.choice((1, 1, 2)), draw.random() < 0.5

    class Drawn(Lit):
        def __init__(self) -> None:
            super().__init__(seed)
            self.automatic_optimization = "by hand" not in optimizer

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not self.automatic_optimization:
                return self.by_hand(batch)
            loss = self.loss(batch)
            self.log("train_loss", loss, **flags[0])
            self.log("plain", float(batch_idx), **flags[1])
            if returns == "none at times" and batch_idx == 1 and optimizer != "lbfgs":
                return None
            return {"loss": loss, "extra": 3} if returns == "dict" else loss

        def by_hand(self, batch: Any) -> None:
            optimizers = self.optimizers()
            for one in optimizers if isinstance(optimizers, list) else [optimizers]:
                loss = self.loss(batch)
                one.zero_grad()
                self.manual_backward(loss)
                one.step()
                self.log("train_loss", loss, **flags[0])

        def on_train_epoch_end(self) -> None:
            self.seen.append("epoch end")
            if logs_at_end:
                self.log("at_end", float(self.current_epoch))
            schedulers = self.lr_schedulers()
            if not self.automatic_optimization and schedulers is not None and not isinstance(schedulers, list) and schedule == "epoch":
                schedulers.step()

        def configure_optimizers(self) -> Any:
            if optimizer == "two by hand":
                return [torch.optim.SGD(self.net[0].parameters(), 1e-2), torch.optim.Adam(self.net[3].parameters(), 1e-2)]
            kinds: dict[str, Any] = {"adam": torch.optim.Adam, "lbfgs": torch.optim.LBFGS}
            made = kinds.get(optimizer, torch.optim.SGD)(self.parameters(), lr=self.lr)
            if schedule is None:
                return made
            if schedule == "plateau":
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0)
                return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}
            scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
            interval = "epoch" if schedule == "epoch" else "step"
            return [made], [{"scheduler": scheduler, "interval": interval, "frequency": 2 if schedule.startswith("every") else 1}]

    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss, **{name: value for name, value in flags[2].items() if name != "batch_size"})
        if n_loaders == 1:
            self.mse(self(batch[0]), batch[1])
            self.log("val_mse", self.mse)
        return loss

    def clip(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (batch_idx + 1)
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
        self.seen.append(("schedule", None if metric is None else float(metric)))
        scheduler.step() if metric is None else scheduler.step(metric)

    def zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.seen.append(("zero", epoch, batch_idx))
        optimizer.zero_grad()

    def transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def backward(self: Any, loss: Any, *args: Any, **options: Any) -> None:
        self.seen.append(("backward", float(loss.detach())))
        loss.backward()

    names = {"clip": "configure_gradient_clipping", "zero_grad": "optimizer_zero_grad", "transfer": "on_after_batch_transfer"}
    functions = {"clip": clip, "optimizer_step": optimizer_step, "lr_scheduler_step": lr_scheduler_step}
    functions |= {"zero_grad": zero_grad, "transfer": transfer, "backward": backward}
    body: dict[str, Any] = {names.get(name, name): functions[name] for name in overrides}
    body |= {"validation_step": validation_step} if validates else {}
    kind = noting(type("Drawn", (Drawn,), body))
    options: dict[str, Any] = {"log_every_n_steps": draw.choice((1, 2, 50)), "check_val_every_n_epoch": draw.choice((1, 1, 2))}
    valid = (lambda: [make_valid(), make_valid(10)]) if n_loaders == 2 else make_valid
    return kind, {"n_epoch": 3, "valid": valid if validates else lambda: None, **options}
