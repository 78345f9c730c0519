"""`Trainer.from_lightning`: a LightningModule with nbtrain's history, commands and checkpoints."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning_modules import Lit, by_lightning, by_nbtrain
from samples import DEVICE, make_data, make_loader, make_model, make_trainer, make_valid, same_weights

from nbtrain import EarlyStoppingAddon, EMAAddon, GradientClipAddon, MultiGPUAddon, StateManagerAddon, Trainer
from nbtrain.errors import ConfigError, StepError


class Whole(Lit):
    """All four steps, and a schedule."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_mae", loss.sqrt())
        self.log("scale", 2.0, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mse", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0] if isinstance(batch, list) else batch)

    def on_train_epoch_end(self) -> None:
        self.log("at_end", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Remembers(Whole):
    """A validation that leaves traces: a count, a buffer, random numbers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.n_trained, self.n_validated = 0, 0
        self.register_buffer("total", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.n_trained += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.n_validated += 1
        self.total += torch.rand(())
        return super().validation_step(batch, batch_idx)


class ByHand(Lit):
    """Two optimizers with schedules, stepped by hand."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        for scheduler in self.lr_schedulers():  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
            scheduler.step()
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(self.net[0].parameters(), 1e-2), torch.optim.Adam(self.net[3].parameters(), 1e-2)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


def make_lit(module: Lit, kind: type[Trainer] = Trainer, **options: Any) -> Any:
    return kind.from_lightning(module, DEVICE, log_bar=False, **options)


def test_an_epoch_has_the_losses_and_what_was_logged() -> None:
    trainer = make_lit(Whole())
    result = trainer.run(2, make_loader(), make_valid())
    assert [list(row) for row in trainer.history.epochs] == [
        ["epoch", "step", "processed", "train_loss", "train_mae", "val_loss", "scale", "at_end", "lr", "time_s"]
    ] * 2
    assert [row["at_end"] for row in trainer.history.epochs] == [0.0, 1.0]
    assert result.status == "completed" and trainer.title == "Whole"
    assert trainer.history.best["val_loss"] == min(row["val_loss"] for row in trainer.history.epochs)
    assert len(trainer.history.steps["train"]["train_mae"]) == 10


def test_a_validation_step_that_fails_is_found_before_the_first_epoch() -> None:
    class Fails(Remembers):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            raise KeyError("label")

    trainer = make_lit(Fails())
    before = copy.deepcopy(trainer.model)
    with pytest.raises(KeyError) as caught:
        trainer.run(2, make_loader(), make_valid())
    assert "Fails.validation_step, on a batch of valid_loader before epoch 1." in caught.value.__notes__[0]
    assert (trainer.model.n_trained, trainer.model.n_validated, trainer.model.total) == (0, 0, 0) and same_weights(trainer.model, before)
    trainer.on_error = "pause"  # which is for a run that has begun
    with pytest.raises(KeyError):  # what failed is tried again
        trainer.run(2, make_loader(), make_valid())
    assert trainer.model.n_trained == 0
    trainer.on_error = "raise"
    with pytest.raises(KeyError):
        trainer.run(2, make_loader(), iter(make_valid()))
    assert trainer.model.n_trained == 5  # what can be read only once is not tried


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling")
def test_the_first_validation_leaves_nothing_behind() -> None:
    def run(**lightning: Any) -> Any:
        torch.manual_seed(0)
        trainer, valid = make_lit(Remembers(), lightning=lightning), make_loader(own_generator=True)
        trainer.run(1, make_loader(), valid)
        trainer.run(1, make_loader(), valid)
        return trainer

    checked, plain, twice = run(), run(num_sanity_val_steps=0), run(num_sanity_val_steps=2)
    rows = [[{**row, "time_s": 0} for row in trainer.history.epochs] for trainer in (checked, plain, twice)]
    assert rows[0] == rows[1] and same_weights(checked.model, plain.model) and torch.equal(checked.model.total, plain.model.total)
    assert (checked.model.n_validated, plain.model.n_validated) == (10, 10)
    assert [list(row) for row in rows[2]] == [list(row) for row in rows[1]]  # the epoch after Lightning's own has its training loss


def test_an_epoch_without_validation_has_no_old_values_of_one() -> None:
    trainer = make_lit(Whole(), lightning={"check_val_every_n_epoch": 2})
    trainer.run(3, make_loader(), make_valid())
    assert ["val_loss" in row for row in trainer.history.epochs] == [False, True, False]


def test_a_second_run_continues_optimizers_and_schedules() -> None:
    def run(*parts: int) -> Any:
        torch.manual_seed(1)
        trainer = make_lit(Whole())
        for n in parts:
            trainer.run(n, make_loader(own_generator=True, shuffle=False))
        return trainer

    torch.manual_seed(0)
    whole, parts = run(4), run(1, 3)
    assert [row["lr"] for row in parts.history.epochs] == [row["lr"] for row in whole.history.epochs]
    assert same_weights(whole.model, parts.model)


@pytest.mark.parametrize("kind", [Whole, ByHand])
def test_a_killed_run_resumes_exactly(kind: type[Lit], tmp_path: Path) -> None:
    def make(folder: str) -> Any:
        return make_lit(kind(), Trainer.add_on(StateManagerAddon), save_path=tmp_path / folder, seed=3, every_n_steps=2)

    class Dies(L.Callback):
        def on_train_batch_end(self, pl_trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if pl_trainer.current_epoch == 1 and batch_idx == 3:
                raise SystemExit

    whole = make("whole")
    whole.run(3, make_loader(), make_valid() if kind is Whole else None)
    first = make_lit(
        kind(), Trainer.add_on(StateManagerAddon), save_path=tmp_path / "cut", seed=3, every_n_steps=2, lightning={"callbacks": [Dies()]}
    )
    with pytest.raises(SystemExit):
        first.run(3, make_loader(), make_valid() if kind is Whole else None)
    again = make("cut")
    again.run(3, make_loader(), make_valid() if kind is Whole else None, resume="auto")
    assert same_weights(whole.model, again.model)
    assert [row["train_loss"] for row in again.history.epochs] == [row["train_loss"] for row in whole.history.epochs]


def test_a_state_saved_between_runs_has_all_optimizers(tmp_path: Path) -> None:
    def make() -> Any:
        return make_lit(ByHand(), Trainer.add_on(StateManagerAddon), save_path=tmp_path, seed=3)

    trainer = make()
    trainer.run(1, make_loader())
    path = trainer.save_state()
    trainer.run(1, make_loader())
    again = make()
    again.load_state(path)
    again.run(1, make_loader())
    assert same_weights(trainer.model, again.model) and again.history.epochs[-1]["epoch"] == 2


def test_a_file_of_model_checkpoint_is_lightnings(tmp_path: Path) -> None:
    files = {}
    for name in ("plain", "ours"):
        checkpoint = ModelCheckpoint(tmp_path / name, save_last=True)
        if name == "plain":
            by_lightning(Whole(lr=0.02), 1, make_loader(), make_valid(), callbacks=[checkpoint], enable_checkpointing=True)
        else:
            by_nbtrain(Whole(lr=0.02), 1, make_loader(), make_valid(), callbacks=[checkpoint])
        files[name] = torch.load(tmp_path / name / "last.ckpt", weights_only=False)
    plain, ours = files["plain"], files["ours"]
    assert plain["state_dict"].keys() == ours["state_dict"].keys() and plain["hyper_parameters"] == ours["hyper_parameters"]
    assert all(torch.equal(plain["state_dict"][key], value) for key, value in ours["state_dict"].items())
    assert Whole.load_from_checkpoint(tmp_path / "ours" / "last.ckpt").lr == 0.02


def test_what_the_module_saves_itself_is_restored(tmp_path: Path) -> None:
    class Saves(Whole):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert "net.0.weight" in checkpoint["state_dict"]
            checkpoint["note"] = 5

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert "net.0.weight" in checkpoint["state_dict"]
            self.note = checkpoint["note"]

    kind = Trainer.add_on(StateManagerAddon)
    make_lit(Saves(), kind, save_path=tmp_path).run(1, make_loader(), resume="auto")
    again = make_lit(Saves(), kind, save_path=tmp_path)
    again.run(2, make_loader(), resume="auto")
    assert again.model.note == 5


def test_a_paused_run_resumes_at_the_same_batch() -> None:
    whole = make_lit(Whole(), seed=2)
    whole.run(2, make_loader(), make_valid())

    class Pauses(L.Callback):
        def on_train_batch_end(self, pl_trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (pl_trainer.current_epoch, batch_idx) == (1, 1):
                trainer.pause()

    trainer = make_lit(Whole(), seed=2, lightning={"callbacks": [Pauses()]})
    handle = trainer.run(2, make_loader(), make_valid(), background=True)
    assert trainer.control.wait_settled(60) and trainer.control.state == "paused"
    place = trainer.recorder.place
    handle.resume()
    assert handle.wait().status == "completed"
    assert place == "epoch 2, batch 3" and same_weights(whole.model, trainer.model)


def test_evaluate_validate_predict_and_inference() -> None:
    trainer = make_lit(Whole())
    trainer.run(1, make_loader(), make_valid())
    x = make_data(5).tensors[0]
    assert list(trainer.evaluate(make_valid())) == ["mse"]
    found = trainer.validate(make_valid())
    assert found["val_loss"] == pytest.approx(trainer.evaluate(make_valid())["mse"])
    trainer.model.eval()
    assert torch.equal(trainer.predict(x), trainer.model(x.to(DEVICE)).detach().cpu())
    assert [len(part) for part in trainer.inference(make_valid())] == [16, 16, 8]


def test_a_single_batch_is_trained() -> None:
    trainer = make_lit(Whole())
    before = copy.deepcopy(trainer.model.state_dict())
    output = trainer.run_batch(next(iter(make_loader())))
    assert "loss" in output and not torch.equal(before["net.0.weight"], trainer.model.state_dict()["net.0.weight"])
    assert not trainer.history.epochs and trainer.counts.processed == 1


def test_a_learning_rate_finder_finds_the_same_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = by_lightning(Whole(), 1, make_loader(batch_size=2), callbacks=[LearningRateFinder(num_training_steps=30)])
    ours = by_nbtrain(Whole(), 1, make_loader(batch_size=2), callbacks=[LearningRateFinder(num_training_steps=30)]).model
    assert plain.lr == ours.lr != 1e-2 and same_weights(plain, ours)


class MakesLoaders(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return make_loader(24, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return make_valid()


class Data(L.LightningDataModule):
    batch_size = 2
    train_dataloader, val_dataloader = MakesLoaders.train_dataloader, MakesLoaders.val_dataloader


@pytest.mark.long
@pytest.mark.parametrize("of_data", [False, True])
def test_a_batch_size_finder_finds_the_same_size(of_data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[Any, BatchSizeFinder]:
        return (Data() if of_data else None), BatchSizeFinder(steps_per_trial=1, max_trials=2)

    monkeypatch.chdir(tmp_path)
    (data, finder), module = made(), Whole() if of_data else MakesLoaders()
    plain = by_lightning(module, 1, datamodule=data, callbacks=[finder])
    (data, finder), module = made(), Whole() if of_data else MakesLoaders()
    trainer = by_nbtrain(module, 1, data or module, callbacks=[finder])
    assert finder.optimal_batch_size == 4 == (data or module).batch_size and same_weights(plain, module)
    assert trainer.counts.step == 6 and len(trainer.history) == 1 and not any(tmp_path.glob(".scale*"))


def test_callbacks_see_the_attributes_of_the_module() -> None:
    class Looks(L.Callback):
        def on_train_start(self, pl_trainer: Any, pl_module: Any) -> None:
            assert pl_module.lr == 1e-2 and pl_module.hparams.lr == 1e-2 and pl_module.net[0].in_features == 8
            pl_module.lr = 3.0

    trainer = make_lit(Whole(), lightning={"callbacks": [Looks()]})
    trainer.run(1, make_loader())
    assert trainer.model.lr == 3.0


@pytest.mark.parametrize(
    ("addon", "options"),
    [(EarlyStoppingAddon, {"patience": 1}), (EMAAddon, {"ema_decay": 0.9}), (GradientClipAddon, {"gradient_clip": 0.1})],
)
def test_addons_work_with_a_module(addon: Any, options: dict[str, Any]) -> None:
    trainer = make_lit(Whole(lr=0.0 if addon is EarlyStoppingAddon else 1e-2), Trainer.add_on(addon), **options)
    result = trainer.run(4, make_loader(), make_valid())
    assert result.status == ("stopped" if addon is EarlyStoppingAddon else "completed")


def test_early_stopping_of_lightning_monitors_what_is_logged() -> None:
    trainer = make_lit(Whole(lr=0.0), lightning={"callbacks": [EarlyStopping("val_loss", patience=1)]})
    assert trainer.run(5, make_loader(), make_valid()).status == "stopped"


def test_a_trainer_of_a_module_is_pickled() -> None:
    trainer = make_lit(Lit())
    trainer.run(1, make_loader())
    again = pickle.loads(cloudpickle.dumps(trainer))
    assert same_weights(trainer.model, again.model) and again.history.epochs == trainer.history.epochs
    other = copy.deepcopy(trainer)
    for one in (trainer, again, other):
        torch.manual_seed(0)
        one.run(1, make_loader())
    assert same_weights(trainer.model, again.model) and same_weights(trainer.model, other.model)


def test_the_training_step_of_a_module_inside_logs_without_more() -> None:
    class Calls(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model.training_step(batch, 0)}  # pyright: ignore[reportCallIssue]

        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model.validation_step(batch, 0)}  # pyright: ignore[reportCallIssue]

    trainer = make_trainer(Calls, model=Whole())
    trainer.run(2, make_loader(), make_valid())
    row = trainer.history.epochs[-1]
    assert row["scale"] == 2.0 and "train_mae" in row and "log" not in vars(trainer.model)


REFUSED = {
    "no module": (lambda: Trainer.from_lightning(make_model()), "from_lightning needs a LightningModule, got Sequential."),
    "a class": (
        lambda: Trainer.from_lightning(Lit),  # pyright: ignore[reportArgumentType]
        "from_lightning needs a LightningModule, got the class Lit.\n  Make an instance: Lit(...).",
    ),
    "clipping": (
        lambda: make_lit(ByHand(), gradient_clip=1.0),
        "gradient_clip: ByHand optimizes by hand, so it also clips by hand.\n  Call self.clip_gradients(",
    ),
    "optimizer": (
        lambda: make_lit(Lit(), optimizer=torch.optim.Adam),
        "optimizer is made by the LightningModule.\n  Write it into its configure_optimizers.",
    ),
    "pause": (
        lambda: make_lit(ByHand(), on_error="pause"),
        'on_error="pause": ByHand optimizes by hand, and an error in its step can\'t be taken back.\n'
        '  Use automatic optimization, or resume from a checkpoint: StateManagerAddon, resume="auto".',
    ),
    "shards": (
        lambda: (
            Trainer.add_on(MultiGPUAddon)
            .from_lightning(Lit(), device=["cpu", "cpu"], log_bar=False, strategy="fsdp2")
            .run(1, make_loader())
        ),
        "strategy='fsdp2' can't shard a LightningModule here.\n"
        "  Use strategy='ddp', or shard it in its configure_model, with lightning.Trainer(strategy=...).",
    ),
    "batch size": (
        lambda: make_lit(Lit(), lightning={"callbacks": [BatchSizeFinder()]}).run(1, make_loader()),
        "BatchSizeFinder can't change the batch size of this loader: your code makes it, not the module.\n"
        "  Give run(n_epoch, module), or a LightningDataModule, whose train_dataloader reads self.batch_size.",
    ),
    "test": (lambda: make_lit(Lit()).evaluate(make_valid()), "Lit has no test_step, and evaluate calls it."),
    "finder": (
        lambda: make_trainer(lightning={"callbacks": [LearningRateFinder()]}),
        "LearningRateFinder sets the rate of a LightningModule, and the optimizer here is the trainer's.\n"
        "  Call trainer.lr_find(loader).suggestion; or train a LightningModule: Trainer.from_lightning(module).",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_module_can_not_do_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value).startswith(text)


def test_a_step_outside_of_a_run_is_refused() -> None:
    with pytest.raises(StepError, match="^The training_step of Lit can only be called in a run"):
        make_lit(Lit()).train_step([])
