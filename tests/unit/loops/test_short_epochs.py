"""Many short epochs: the same on Lightning's own loops and on the lean ones, and right wherever something looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakSet

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from samples import Regress, make_data, make_loader, make_trainer, make_valid
from torch import nn
from traced import Memory, Trace

from nbtrain.engine import pass_module
from nbtrain.engine.logged import Results
from nbtrain.rng import random_state, set_random_state


class LogsToo(L.Callback):
    """Logs in the hooks in which an epoch's own metrics are logged."""

    def on_train_batch_end(self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("by_step", float(trainer.global_step), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        pl_module.log("val_epoch", float(trainer.current_epoch))

    def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch % 2:
            pl_module.log("sometimes", float(trainer.current_epoch))


class Plain(Regress):
    """Returns only numbers, which a trace can compare."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {name: value for name, value in super().train_step(batch).items() if not isinstance(value, torch.Tensor) or not value.ndim}

    test_step = train_step


class Draws(Plain):
    """Its validation draws random numbers of all kinds, which the training must not notice."""

    def test_step(self, batch: Any) -> dict[str, Any]:
        numpy.random.randn()
        torch.rand(1)
        return super().test_step(batch)


def run(lean: bool, *, valid: bool = True, logger: bool = False, callbacks: Any = (), kind: type = Plain, **options: Any) -> dict[str, Any]:
    """Eight epochs of one batch. Returns all that could differ."""
    trace = Trace()
    lightning = {"callbacks": [trace, *(callback() for callback in callbacks)]} | ({"logger": Memory(trace)} if logger else {})
    torch.manual_seed(3)
    numpy.random.seed(3)
    trainer = make_trainer(kind, lightning=lightning, **options)
    trainer.short_way = lean
    numpy.random.randn()  # one of a pair: the other one is kept for the next call
    result = trainer.run(8, make_loader(16), make_valid(16) if valid else None)
    rows = [{name: value for name, value in row.items() if name != "time_s"} for row in trainer.history.epochs]
    return {
        "trace": trace.seen,
        "rows": rows,
        "best": trainer.history.best["epoch"],
        "status": (result.status, result.reason),
        "weights": [p.tolist() for p in trainer.model.parameters()],
        "best weights": {name: value.tolist() for name, value in trainer.best_weights.items()},
        "random": (torch.rand(2).tolist(), float(numpy.random.randn()), float(numpy.random.rand())),
    }


CASES: dict[str, dict[str, Any]] = {
    "alone": {"valid": False},
    "a validation": {},
    "a logger": {"logger": True},
    "a logger, without a validation": {"logger": True, "valid": False},
    "callbacks that log": {"callbacks": [LogsToo], "logger": True},
    "early stopping": {"callbacks": [lambda: EarlyStopping("val_loss", patience=1, min_delta=100.0)]},
    "a validation that draws": {"kind": Draws},
    "a schedule": {"scheduler": lambda optimizer, plan: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)},
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # in the trace
@pytest.mark.parametrize("case", CASES)
def test_short_epochs_do_the_same_on_both_loops(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lean = run(True, **CASES[case])
    options = {"on_step": False, "on_epoch": True, "batch_size": 1}
    monkeypatch.setattr(pass_module, "log_means", lambda module, metrics, **logger: module.log_dict(metrics, **options, **logger))
    stock = run(False, **CASES[case])
    for what, value in stock.items():
        assert lean[what] == value, what


def test_a_short_validation_leaves_what_lightning_leaves() -> None:
    seen: list[tuple[list[bool], float]] = []

    class Looks(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
            seen.append(([part.training for part in pl_module.modules()], trainer._last_val_time))

    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trainer = make_trainer(model=model, lightning={"callbacks": [Looks()]})
    model[1].eval()  # frozen statistics, which stay in eval mode through all validations
    trainer.run(4, make_loader(16), make_valid(16))
    modes = [mode for mode, _ in seen]
    assert modes == modes[:1] * 4 and not modes[0][[*trainer.model.modules()].index(model[1]) + 1]
    times = [time for _, time in seen]
    assert times == sorted(times) and len(set(times)) == 4


class _Counting(nn.Linear):
    """Counts the changes of its mode, and never leaves eval mode."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.changes: list[bool] = []

    def train(self, mode: bool = True) -> Any:
        self.changes.append(mode)
        return super().train(False)


def test_a_model_with_its_own_modes_is_asked_for_them_before_each_short_validation() -> None:
    def changes(lean: bool) -> list[bool]:
        model = _Counting()
        trainer = make_trainer(Plain, model=model)
        trainer.short_way = lean
        trainer.run(4, make_loader(16), make_valid(16))
        return model.changes

    assert changes(lean=True).count(False) == changes(lean=False).count(False) >= 4


def _read(results: _ResultCollection) -> list[Any]:
    """All that callbacks and loggers get of a table, by step and by epoch."""
    found = [
        {place: {name: float(value) for name, value in of.items()} for place, of in results.metrics(step).items()} for step in (True, False)
    ]
    return [bool(results), *found]


@pytest.mark.parametrize("logs_before", [(), ("training_step", "b"), ("on_train_batch_end", "b"), ("on_train_batch_end", "a")], ids=str)
@pytest.mark.parametrize("logs_after", [(), ("on_train_epoch_end", "b"), ("on_train_epoch_end", "a"), ("on_train_batch_end", "a")], ids=str)
@pytest.mark.parametrize("logger", [True, False])
def test_means_of_a_pass_are_read_and_reset_as_in_lightnings_table(logs_before: Any, logs_after: Any, logger: bool) -> None:
    hook, options = "on_train_batch_end", {"logger": logger, "on_step": False, "on_epoch": True, "batch_size": 1}
    ours, lightnings = Results(training=True), _ResultCollection(training=True)
    for fx in (None, "on_train_epoch_end", hook):
        for results in (ours, lightnings):
            if logs_before:
                results.log(*logs_before, torch.tensor(3.0), **options)
        ours.log_means(hook, {"a": torch.tensor(0.5), "c": torch.tensor(0.25)}, logger=logger)
        for name, value in (("a", 0.5), ("c", 0.25)):
            lightnings.log(hook, name, torch.tensor(value), **options)
        assert _read(ours) == _read(lightnings)
        for results in (ours, lightnings):
            if logs_after:
                results.log(*logs_after, torch.tensor(2.0), **options)
        assert _read(ours) == _read(lightnings)
        for results in (ours, lightnings):
            results.reset(metrics=None if fx is None else False, fx=fx)
        assert _read(ours)[1:] == _read(lightnings)[1:]
        ours.reset()
        lightnings.reset()


def test_history_is_that_of_the_epoch_in_each_callback() -> None:
    seen: list[tuple[int, int, float]] = []

    class Looks(L.Callback):
        def on_train_epoch_start(self, pl_trainer: Any, pl_module: Any) -> None:
            history = pl_module.owner.history
            assert len(history) == pl_trainer.current_epoch
            if history.epochs:
                seen.append((len(history), history.epochs[-1]["epoch"], history.epochs[-1]["val_loss"]))
                assert float(pl_trainer.callback_metrics["val_loss"]) == pytest.approx(history.epochs[-1]["val_loss"])

    trainer = make_trainer(lightning={"callbacks": [Looks()]})
    trainer.run(20, make_loader(16), make_valid(16))
    assert seen == [(i, i, trainer.history.epochs[i - 1]["val_loss"]) for i in range(1, 20)]


def test_numpys_numbers_are_restored_also_where_one_of_a_pair_is_left() -> None:
    numpy.random.seed(0)
    for n_before in (0, 1, 2, 3):
        for _ in range(n_before):
            numpy.random.randn()
        for n_inside in (0, 1, 2):
            state = random_state()
            expected = numpy.random.RandomState()
            expected.set_state(numpy.random.get_state())
            for _ in range(n_inside):
                numpy.random.randn()
            set_random_state(state)
            ours, theirs = numpy.random.get_state(), expected.get_state()
            assert all(numpy.array_equal(a, b) for a, b in zip(ours, theirs)), (n_before, n_inside)


def test_short_epochs_of_an_ordinary_loader_reshuffle_as_a_loop_does(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    class Sees(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            seen.append(batch[1].flatten().tolist())
            return super().train_step(batch)

    loader = torch.utils.data.DataLoader(make_data(16), 16, shuffle=True, generator=torch.Generator().manual_seed(1))
    make_trainer(Sees, save_path=tmp_path).run(5, loader)
    again = torch.utils.data.DataLoader(make_data(16), 16, shuffle=True, generator=torch.Generator().manual_seed(1))
    assert seen == [batch[1].flatten().tolist() for _ in range(5) for batch in again]


class Late(L.Callback):
    """Gets a hook when the third epoch begins, and the module another training_step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch != 2:
            return
        own = pl_module.training_step

        def halved(batch: Any, batch_idx: int) -> Any:
            output = own(batch, batch_idx)
            return {**output, "loss": output["loss"] / 2}

        pl_module.training_step = halved
        self.on_before_backward = lambda trainer, pl_module, loss: self.seen.append(trainer.current_epoch)


@pytest.mark.parametrize("valid", [False, True])
def test_what_is_replaced_between_two_epochs_counts_from_the_next_one(valid: bool) -> None:
    lates: list[Late] = []

    def late() -> Late:
        lates.append(Late())
        return lates[-1]

    lean, own = (run(lean, valid=valid, callbacks=(late,)) for lean in (True, False))
    assert lean == own and lean["weights"] != run(True, valid=valid)["weights"]
    assert [late.seen for late in lates] == [[2, 3, 4, 5, 6, 7]] * 2


def test_iterator_of_the_loader_is_released_with_its_epoch() -> None:
    alive: list[int] = []

    class Batches:
        """Its iterators say how many of them are there."""

        def __init__(self) -> None:
            self.iterators: WeakSet[Any] = WeakSet()

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Any:
            alive.append(len(self.iterators))
            iterator = (batch for batch in make_loader(16))
            self.iterators.add(iterator)
            return iterator

    make_trainer(Plain).run(4, Batches())
    assert max(alive[-2:]) <= 1
