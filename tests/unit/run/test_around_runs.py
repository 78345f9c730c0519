"""A run changes nothing around the loop: two runs are one of as many epochs, and read what a plain loop reads."""

from __future__ import annotations

import copy
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from samples import make_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nbtrain import Trainer
from nbtrain.addons.state_manager import StateManagerAddon


class Sees(Trainer):
    """Keeps the first number of each batch."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        batch = batch[0] if isinstance(batch, (tuple, list)) else batch
        vars(self).setdefault("seen", []).append(batch.flatten()[0].item())
        return {"loss": self.model(batch).square().mean()}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"first": batch.flatten()[0].item(), "n_samples": 1}


def make(kind: type[Trainer] = Sees, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return make_trainer(kind, model=model or nn.Linear(3, 1), **options)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


BATCHES = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)]


# -- modes
class Freezes(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.owner.model[1].eval()


class FreezesInStep(Sees):
    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.current_step == 2:
            self.model[1].eval()
        return super().train_step(batch)


@pytest.mark.parametrize("how", ["step", "callback"])
def test_a_mode_that_your_code_sets_in_a_run_stays(how: str) -> None:
    kind, callbacks = (FreezesInStep, []) if how == "step" else (Sees, [Freezes()])
    found = []
    for runs in ((2,), (1, 1)):
        trainer = make(kind, net(), lightning={"callbacks": callbacks})
        for n_epoch in runs:
            trainer.run(n_epoch, BATCHES, BATCHES[:1])
        assert not trainer.model[1].training
        found.append({name: value.tolist() for name, value in trainer.model.state_dict().items()})
    assert found[0] == found[1]


def test_an_evaluation_puts_back_what_it_has_changed_and_nothing_else() -> None:
    class Teaches(Sees):
        def test_step(self, batch: Any) -> dict[str, Any]:
            during.append((self.model.training, self.teacher.training))
            self.model[0].train()  # was in evaluation mode
            self.teacher(batch)
            if self.fails:
                raise ValueError("no")
            return super().test_step(batch)

    during: list[Any] = []
    trainer = make(Teaches, net(), lightning={"num_sanity_val_steps": 0})
    trainer.fails, trainer.teacher = False, copy.deepcopy(trainer.model)
    before = copy.deepcopy(trainer.teacher.state_dict())
    trainer.model[0].eval()
    trainer.run(1, BATCHES, BATCHES)
    trainer.evaluate(BATCHES)
    trainer.fails = True
    with pytest.raises(ValueError, match="no"):
        trainer.evaluate(BATCHES)
    assert during == [(False, False)] * 9
    assert trainer.model[0].training and trainer.model.training and all(part.training for part in trainer.teacher.modules())
    assert all(torch.equal(value, before[name]) for name, value in trainer.teacher.state_dict().items())


def test_an_error_in_the_validation_of_a_lightning_module_leaves_it_in_training_mode() -> None:
    class Fails(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).mean()

        def validation_step(self, batch: Any) -> Any:
            assert not self.layer.training
            raise ValueError("no")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer.from_lightning(Fails(), device="cpu", log_bar=False, lightning={"num_sanity_val_steps": 0})
    with pytest.raises(ValueError, match="no"):
        trainer.run(1, BATCHES, BATCHES)
    assert trainer.model.training and trainer.model.layer.training


# -- when a loader is opened
class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return torch.randn(3)


class Own:
    """A loader whose `__iter__` does its work at once."""

    def __init__(self, open_it: Callable[[], Iterator[Any]]) -> None:
        self.open_it, self.n_opened = open_it, 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        self.n_opened += 1
        return self.open_it()


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), 4, shuffle=True, **options)


def zipped() -> Own:
    a, b = shuffled(), shuffled()
    return Own(lambda: zip(a, b))


EAGER: dict[str, Callable[[], Any]] = {
    "zip": zipped,
    "iter(loader)": lambda: Own(partial(iter, shuffled())),
    "a rollout": lambda: Own(lambda: iter([torch.randn(4, 3) for _ in range(3)])),
    "a DataLoader": shuffled,
}


@pytest.mark.parametrize("saves", [False, True], ids=["bare", "saved"])
@pytest.mark.parametrize("name", EAGER)
def test_two_runs_read_what_a_plain_loop_reads(name: str, saves: bool, tmp_path: Any) -> None:
    loader, trainer = EAGER[name](), make()
    torch.manual_seed(1)
    for _ in range(3):
        for batch in loader:
            trainer.train_step(batch)
    expected = trainer.seen
    found = []
    for runs in ((3,), (1, 2)):
        kind, options = (Sees.add_on(StateManagerAddon), {"save_path": tmp_path / str(runs)}) if saves else (Sees, {})
        trainer, loader = make(kind, **options), EAGER[name]()
        torch.manual_seed(1)
        for n_epoch in runs:
            trainer.run(n_epoch, loader)
        found.append(trainer.seen)
    assert found == [expected, expected]


def test_a_validation_loader_is_opened_once_a_validation() -> None:
    loader = Own(lambda: iter(BATCHES[:3]))
    make(lightning={"num_sanity_val_steps": 0}).run(2, BATCHES, loader)
    assert loader.n_opened == 2


def test_what_a_callback_seeds_before_an_epoch_decides_its_order() -> None:
    class Seeds(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            torch.manual_seed(trainer.current_epoch)

    expected, loader = make(), shuffled()
    for epoch in range(2):
        torch.manual_seed(epoch)
        for batch in loader:
            expected.train_step(batch)
    for runs in ((2,), (1, 1)):
        trainer = make(lightning={"callbacks": [Seeds()]})
        for n_epoch in runs:
            trainer.run(n_epoch, loader, BATCHES)
        assert trainer.seen == expected.seen


# -- persistent workers
def persistent(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), 4, num_workers=1, persistent_workers=True, **options)


def test_persistent_workers_continue_in_the_next_run() -> None:
    found = []
    for runs in ((2,), (1, 1)):
        gc.collect()  # ends the workers of loaders that are no longer used
        trainer, loader, valid = make(), persistent(shuffle=True), persistent()
        torch.manual_seed(1)
        for n_epoch in runs:
            trainer.run(n_epoch, loader, valid)
        found.append((trainer.seen, [row["val_first"] for row in trainer.history.epochs]))
        assert len(multiprocessing.active_children()) == 2
        del trainer
        gc.collect()
        assert not multiprocessing.active_children()
    assert found[0] == found[1]


def test_a_trainer_has_the_persistent_workers_of_its_newest_run_only() -> None:
    before = len(multiprocessing.active_children())
    trainer, loaders = make(), [persistent(), persistent()]
    for loader in loaders:
        trainer.run(1, loader)
        assert len(multiprocessing.active_children()) == before + 1
    trainer.evaluate(persistent())
    trainer.evaluate(loaders[1])
    assert len(multiprocessing.active_children()) == before + 1
    trainer.seen = None
    with pytest.raises(AttributeError):
        trainer.run(1, loaders[1])
    assert len(multiprocessing.active_children()) == before
