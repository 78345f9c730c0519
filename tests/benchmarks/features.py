"""What nbtrain's features cost: each with a plain loop that does the same work; and two of its own, with nbtrain as the base."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import contenders
from contenders import Work
from measure import Duel, Outcome, chosen, play
from tables import Table, duel_row, main


@dataclass
class Count:
    """What a user's callback does in the plain loop."""

    n: int = 0

    def __call__(self, loss: Any) -> None:
        self.n += 1


@dataclass
class Patience:
    """Early stopping for the plain loop: True after three epochs that were no better."""

    losses: list[float] = field(default_factory=list)

    def __call__(self, model: Any, optimizer: Any, loss: float) -> bool:
        self.losses.append(loss)
        return len(self.losses) > 3 and min(self.losses[-3:]) >= min(self.losses[:-3])


class Saver:
    """Saves model and optimizer for the plain loop, as torch's documentation does."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()

    def __call__(self, model: Any, optimizer: Any, loss: float) -> bool:
        import torch

        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(self.folder.name) / "last.pt")
        return False


class SavingPatience:
    def __init__(self) -> None:
        self.save, self.patience = Saver(), Patience()

    def __call__(self, model: Any, optimizer: Any, loss: float) -> bool:
        self.save(model, optimizer, loss)
        return self.patience(model, optimizer, loss)


def decay(step: int) -> float:
    return 1e-3 * 0.9999**step


def early_stopping() -> list[Any]:
    from lightning.pytorch.callbacks import EarlyStopping

    return [EarlyStopping("train_loss")]


def _callback(on_train_batch_end: Callable[..., None]) -> list[Any]:
    import lightning as L

    return [type("UserCallback", (L.Callback,), {"on_train_batch_end": on_train_batch_end, "n": 0})()]


def counting_callback() -> list[Any]:
    def on_train_batch_end(self: Any, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.n += 1

    return _callback(on_train_batch_end)


def everything() -> list[Any]:
    return [*early_stopping(), *counting_callback()]


def state_manager() -> list[Any]:
    from nbtrain import StateManagerAddon

    return [StateManagerAddon]


def five_addons() -> list[Any]:
    """Addons that do nothing per batch, as most do."""
    import lightning as L

    from nbtrain import AddOnBase

    class AtEpochEnd(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pass

    def callbacks(self: Any, trainer: Any) -> list[L.Callback]:
        return [AtEpochEnd()]

    return [type(f"Addon{i}", (AddOnBase,), {"callbacks": callbacks}) for i in range(5)]


WORKS = {
    "validation each epoch": Work(valid=True),
    "clipping by norm": Work(clip=1.0),
    "accumulation of 4": Work(accumulate=4),
    "a schedule by updates": Work(schedule=decay),
    "Muon and AdamW on one loss": Work(several=True),
    "early stopping": Work(on_epoch=Patience, callbacks=early_stopping),
    "a user's callback each batch": Work(on_batch=Count, callbacks=counting_callback),
    "a state saved each epoch": Work(on_epoch=Saver, addons=state_manager),
    "all of these": Work(True, 1.0, 4, decay, on_batch=Count, on_epoch=SavingPatience, callbacks=everything, addons=state_manager),
}


def _own(name: str, work: Work, base: Work, max_over_us: float) -> Duel:
    return Duel(name, partial(contenders.ours, work=work), partial(contenders.ours, work=base), max_over_us=max_over_us)


DUELS = [
    Duel(
        name,
        partial(contenders.ours, work=work),
        partial(contenders.plain, work=work),
        max_ratio=1.20,
        steady=False,
        n_steps=500,
        n_epochs=4,
    )
    for name, work in WORKS.items()
] + [
    _own("nbtrain + five idle addons", Work(addons=five_addons), Work(), 5),
    _own('nbtrain with on_error="pause", in a thread', Work(on_error="pause"), Work(), 15),
    Duel(
        "nbtrain with its states in memory",
        partial(contenders.ours, work=Work(keep_states=True)),
        partial(contenders.ours, work=Work()),
        max_ratio=1.01,
        steady=False,
        n_steps=500,
        n_epochs=4,
    ),
]
NOTE = (
    "Four epochs of 500 steps, and 100 batches where there is validation; the figures are means over the epochs and what is between them.\n"
    "Rows that begin with nbtrain are measured over nbtrain without it; those of addons and errors in one epoch of 2,000 steps."
)
COLUMNS = "with", "µs a step", "of the same without nbtrain", "over it", "with its set-up"


def shown(outcomes: list[Outcome]) -> Table:
    of_loops = [outcome.ratio for outcome in outcomes if outcome.rounds and outcome.duel.name in WORKS]
    found = f"{min(of_loops):.2f} × to {max(of_loops):.2f} ×" if of_loops else "not measured"
    says = f"How long a step takes with a feature of nbtrain, beside a plain loop that does the same by hand: {found}."
    return Table("Features", COLUMNS, tuple(map(duel_row, outcomes)), NOTE, says)


def table(n_rounds: int, only: set[str]) -> Table:
    return shown(play(chosen(DUELS, only), n_rounds))


if __name__ == "__main__":
    main(table, 5)
