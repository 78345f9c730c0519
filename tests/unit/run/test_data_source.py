"""A LightningDataModule in place of a loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning_modules import Lit, by_lightning, by_nbtrain
from samples import DEVICE, Regress, make_data, make_loader, make_trainer, make_valid, same_weights, without_times
from torch.utils.data import DataLoader

from nbtrain import PrefetchAddon, StateManagerAddon, Trainer
from nbtrain.errors import ConfigError


class Data(L.LightningDataModule):
    """Loaders for all stages, and a list of what Lightning has called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.data: Any = None
        self.n_epochs_seen = 0

    def prepare_data(self) -> None:
        self.called.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.called.append(f"setup {str(getattr(stage, 'value', stage))}")
        self.data = make_data()

    def teardown(self, stage: str) -> None:
        self.called.append(f"teardown {str(getattr(stage, 'value', stage))}")

    def train_dataloader(self) -> Any:
        self.called.append("train_dataloader")
        return DataLoader(self.data, 16, shuffle=True)

    def val_dataloader(self) -> Any:
        self.called.append("val_dataloader")
        return make_valid()

    def test_dataloader(self) -> Any:
        return make_valid()

    def predict_dataloader(self) -> Any:
        return make_valid()

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n_epochs_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n_epochs_seen = state_dict["n"]


def test_a_run_with_a_data_module_is_that_with_its_loaders() -> None:
    trainers, source = [make_trainer(seed=1), make_trainer(seed=1)], Data()
    trainers[0].run(2, make_loader(), make_valid())
    trainers[1].run(2, source)
    assert same_weights(trainers[0].model, trainers[1].model)
    rows = [without_times(trainer.history.epochs) for trainer in trainers]
    assert rows[0] == rows[1] and "val_loss" in rows[0][0]
    assert source.called == ["prepare_data", "setup fit", "train_dataloader", "val_dataloader", "teardown fit"]
    assert not {"train_dataloader", "val_dataloader", "test_dataloader"} & set(vars(source))


def test_a_module_and_a_data_module_train_as_under_lightning() -> None:
    class Validates(Lit):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def on_train_start(self) -> None:
            self.seen.append(type(self.trainer.datamodule).__name__)

    class Moves(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

    plain, sources = Validates(), (Moves(), Moves())
    by_lightning(plain, 2, datamodule=sources[0])
    ours = by_nbtrain(Validates(), 2, sources[1], num_sanity_val_steps=0)
    assert same_weights(ours.model, plain)
    assert plain.seen == ours.model.seen and sources[0].called == sources[1].called


def test_hooks_of_a_data_module_are_called() -> None:
    class Moves(Data):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 2, batch[1]]

    class Doubles(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step([batch[0] * 2, batch[1]])

        test_step = train_step

    by_hand, by_hook = make_trainer(Doubles, seed=1), make_trainer(seed=1)
    by_hand.run(2, Data())
    by_hook.run(2, Moves())
    assert same_weights(by_hand.model, by_hook.model)


def test_evaluate_validate_and_inference_read_a_data_module() -> None:
    trainer, source = make_trainer(), Data()
    expected = trainer.evaluate(make_valid())
    assert trainer.evaluate(source) == expected and trainer.validate(source) == expected
    assert [len(output) for output in trainer.inference(source)] == [16, 16, 8]
    assert [step for step in source.called if step.startswith("setup")] == ["setup test", "setup validate", "setup predict"]


def test_several_validation_loaders_of_a_data_module_are_named() -> None:
    class Two(Data):
        def val_dataloader(self) -> Any:
            return {"a": make_valid(), "b": make_valid(10)}

    trainer = make_trainer()
    trainer.run(1, Two())
    assert {"val_loss", "val_loss/a", "val_loss/b"} <= set(trainer.history.epochs[0])


def test_a_run_with_a_data_module_resumes_exactly_and_restores_its_state(tmp_path: Path) -> None:
    class Dies(L.Callback):
        def on_train_batch_end(self, pl_trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_trainer.datamodule.n_epochs_seen = pl_trainer.current_epoch
            if pl_trainer.current_epoch == 1 and batch_idx == 3:
                raise SystemExit

    def make(**options: Any) -> Any:
        return make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path, seed=1, every_n_steps=1, **options)

    whole = make_trainer(seed=1)
    whole.run(3, Data())
    with pytest.raises(SystemExit):
        make(lightning={"callbacks": [Dies()]}).run(3, Data(), resume="auto")
    again, source = make(), Data()
    again.run(3, source, resume="auto")
    assert same_weights(whole.model, again.model) and source.n_epochs_seen == 1


def test_addons_wrap_the_loaders_of_a_data_module() -> None:
    class Watches(Regress):
        def _read_loader(self, loader: Any, *, training: bool) -> Any:
            found.append(training)
            return super()._read_loader(loader, training=training)

    found: list[bool] = []
    make_trainer(Watches.add_on(PrefetchAddon)).run(1, Data())
    assert found == [True, False]


class OnlyTest(L.LightningDataModule):
    def test_dataloader(self) -> Any:
        return make_valid()


REFUSED = {
    "two validations": (
        lambda: make_trainer().run(1, Data(), make_valid()),
        "Data makes the validation loader, and valid_loader is given, too.\n  Leave valid_loader out.",
    ),
    "as valid_loader": (
        lambda: make_trainer().run(1, make_loader(), Data()),
        "valid_loader must be an iterable, a dict or None, got a Data.",
    ),
    "no loader": (
        lambda: make_trainer().run(1, OnlyTest()),
        "OnlyTest has no train_dataloader.\n  Write train_dataloader(self), which returns a loader; or give a loader.",
    ),
    "another model": (
        lambda: make_trainer().run(1, Loads()),
        "Loads is a model, and not that of this trainer.\n  Give a loader or a LightningDataModule.",
    ),
}


class Loads(Lit):
    def train_dataloader(self) -> Any:
        return make_loader()


@pytest.mark.parametrize("name", REFUSED)
def test_a_data_module_that_can_not_be_read_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value).startswith(text)


# -- progress bars of Lightning
@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_that_a_user_gives_shows_the_run(kind: Any, capfd: pytest.CaptureFixture[str]) -> None:
    if kind is RichProgressBar:
        pytest.importorskip("rich")
    trainer = make_trainer(lightning={"callbacks": [kind()]}, log_bar=True)
    trainer.run(1, make_loader(), make_valid())
    shown = capfd.readouterr()
    assert trainer.view is None and "Epoch 0" in shown.out + shown.err
    trainer.evaluate(make_valid())
    trainer.inference(make_valid())
    trainer.run_batch(next(iter(make_loader())))
    assert len(trainer.history.epochs) == 1


def test_a_progress_bar_works_with_a_module(capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer.from_lightning(Lit(), device=DEVICE, lightning={"callbacks": [TQDMProgressBar()]})
    trainer.run(1, make_loader())
    shown = capfd.readouterr()
    assert "Epoch 0" in shown.out + shown.err and trainer.view is None
