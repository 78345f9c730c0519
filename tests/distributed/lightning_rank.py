"""LightningModules for two processes, and the program that trains one under torchrun or SLURM: `python lightning_rank.py HOW NAME FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from samples import make_loader, make_model, make_valid
from torch.nn.functional import mse_loss

MODULES = ("plain", "windows", "by hand")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"lightning": {"accumulate_grad_batches": 2}},
    "by hand": {"strategy": "ddp_find_unused_parameters_true"},
}


def make_kind(name: str) -> type[Any]:
    """A class of a module with one optimizer, or with two "by hand", that keeps several things. In "draws", ranks draw unequally."""

    class Lit(L.LightningModule):
        def __init__(self, lr: float = 1e-2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net, self.ranks, self.seen = make_model(0), list[Any](), 0
            self.automatic_optimization = name != "by hand"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += 1
            torch.rand(self.global_rank if name == "draws" else 0)
            loss = mse_loss(self.net(batch[0]), batch[1])
            self.log("train_mean", loss, on_step=False, on_epoch=True, sync_dist=True)
            if self.automatic_optimization:
                return loss
            for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
                optimizer.zero_grad()
                self.manual_backward(mse_loss(self.net(batch[0]), batch[1]))
                optimizer.step()
            for scheduler in self.lr_schedulers():  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
                scheduler.step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = mse_loss(self.net(batch[0]), batch[1])
            self.log("val_loss", loss, sync_dist=True)
            self.log("val_alone", loss)

        def on_validation_epoch_end(self) -> None:
            self.ranks.append(self.all_gather(torch.tensor(float(self.global_rank))).tolist())  # pyright: ignore[reportAttributeAccessIssue]
            self.hparams["epoch"] = self.current_epoch

        def configure_optimizers(self) -> Any:
            parts = [self.net] if self.automatic_optimization else [self.net[0], self.net[3]]  # pyright: ignore[reportIndexIssue]
            made = [torch.optim.Adam(part.parameters(), self.hparams["lr"]) for part in parts]
            return made, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in made]

    return Lit


class Stops(L.Callback):
    """Rank 1 alone stops its run after two updates."""

    trainer: Any = None

    def on_train_batch_end(self, pl_trainer: L.Trainer, *args: Any) -> None:
        if self.trainer.world.number == 1 and pl_trainer.global_step == 2:
            self.trainer.stop()


def train_in_two_parts(name: str, folder: Path) -> Any:
    """The trainer after 3 epochs in two runs: the first one is stopped by one of the ranks, the second one resumes it."""
    from nbtrain import MultiGPUAddon, StateManagerAddon, Trainer

    def make(*callbacks: L.Callback) -> Any:
        lightning = {**OPTIONS[name].get("lightning", {}), "callbacks": list(callbacks)}
        options: dict[str, Any] = {**OPTIONS[name], "lightning": lightning, "save_path": folder}
        kind = Trainer.add_on(MultiGPUAddon, StateManagerAddon)
        return kind.from_lightning(make_kind(name)(), device="cpu", log_bar=False, **options)

    stops = Stops()
    stops.trainer = first = make(stops)
    torch.manual_seed(7)
    assert first.run(3, make_loader(), make_valid()).status == "stopped" and 2 <= first.current_step < 5
    second = make()
    second.run(3, make_loader(), make_valid(), resume="auto")
    return second


def train(how: str, name: str, file: Path) -> None:
    """Train for 3 epochs with Lightning's trainer or with nbtrain's; rank 0 writes the weights and what was logged."""
    from nbtrain import MultiGPUAddon, Trainer

    module, options = make_kind(name)(), OPTIONS[name]
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    if how == "lightning":
        strategy = options.get("strategy", "ddp")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=3,
            num_sanity_val_steps=0,
            inference_mode=False,
            **quiet,
            **options.get("lightning", {}),
        )
        torch.manual_seed(7)
        trainer.fit(module, make_loader(), make_valid())
        is_first, metrics = trainer.is_global_zero, {key: float(value) for key, value in trainer.callback_metrics.items()}
    elif how == "stopped":
        trainer = train_in_two_parts(name, file.with_suffix(""))
        module, is_first, metrics = trainer.model, trainer.is_main_process, {}
    else:
        trainer = Trainer.add_on(MultiGPUAddon).from_lightning(module, device="cpu", log_bar=False, **options)
        torch.manual_seed(7)
        trainer.run(3, make_loader(), make_valid())
        is_first, metrics = trainer.is_main_process, {}
    if is_first:
        torch.save({"weights": module.state_dict(), "metrics": metrics}, file)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
