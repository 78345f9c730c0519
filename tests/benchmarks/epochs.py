"""What an epoch of one batch costs, as in full-batch training on a small table: beside a plain loop, with and without a validation.

nbtrain and the plain loop train in turns, then each peer and the plain loop, all in one process: some hundred epochs, less a short
training, so that what a call sets up is left out. CPU time of the process, all threads included; medians over the rounds. Peers train
without their bars and files, as a person would who has ten thousand such epochs. There are bounds for
what nbtrain adds and, as a slower machine takes longer for both, for the ratio: 0.30 ms over 0.39, with a validation 0.60 over 0.46.
Before that comes one training of 5,000 epochs with a run folder: does an epoch cost more at its end?
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import psutil
import torch
from calls import make_batch, make_model, make_ours
from tables import Claim, Row, Table, main
from torch.nn.functional import cross_entropy

Training = Callable[[int, bool], Any]  # takes the number of epochs, and whether there is a validation
BOUNDS_MS = {False: 0.30, True: 0.60}  # over the plain loop: without and with a validation
MAX_RATIO = {False: 0.69 / 0.39, True: 1.06 / 0.46}  # of the plain loop
OFF: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
N_LONG, N_SHORT, N_SLOW = 400, 20, 40
NOTE = "One CPU thread. In a notebook states are kept in memory, so that you can rewind."
N_GROWTH, FIFTH = 5_000, 1_000


def plain(n_epochs: int, valid: bool) -> list[float]:
    """What everybody writes by hand; the losses are kept."""
    model, (x, y) = make_model(), make_batch()
    optimizer, losses = torch.optim.Adam(model.parameters()), list[float]()
    for _ in range(n_epochs):
        model.train()
        for inputs, classes in [(x, y)]:
            loss = cross_entropy(model(inputs), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        if valid:
            model.eval()
            with torch.no_grad():
                losses.append(cross_entropy(model(x), y).item())
    return losses


def ours(n_epochs: int, valid: bool, **options: Any) -> list[float]:
    """nbtrain with its history and the weights of the best epoch."""
    trainer = make_ours(**options)
    trainer.run(n_epochs, [make_batch()], [make_batch()] if valid else None)
    return [row[name] for row in trainer.history.epochs for name in ("train_loss", "val_loss") if name in row]


def lightning(n_epochs: int, valid: bool) -> None:
    import lightning as L

    class Classify(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = cross_entropy(self.model(x), y)
            self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(y))
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", cross_entropy(self.model(x), y), batch_size=len(y))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=n_epochs, log_every_n_steps=1, **OFF)
    loader = torch.utils.data.DataLoader([make_batch()], batch_size=None)  # it reads a list as several loaders
    trainer.fit(Classify(), loader, loader if valid else None)


def skorch(n_epochs: int, valid: bool) -> None:
    from skorch import NeuralNetClassifier
    from skorch.dataset import Dataset
    from skorch.helper import predefined_split

    x, y = make_batch()
    split = predefined_split(Dataset(x, y)) if valid else None
    options: dict[str, Any] = {"criterion": torch.nn.CrossEntropyLoss, "optimizer": torch.optim.Adam, "verbose": 0, "batch_size": len(y)}
    NeuralNetClassifier(make_model(), max_epochs=n_epochs, train_split=split, **options).fit(x, y)


def fastai(n_epochs: int, valid: bool) -> None:
    import fastai.basics as basics

    x, y = make_batch()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(y))
    loaders = basics.DataLoaders(loader, loader) if valid else basics.DataLoaders(loader, [])
    learner = basics.Learner(loaders, make_model(), loss_func=cross_entropy, opt_func=basics.Adam)
    with learner.no_logging():
        learner.fit(n_epochs)


def keras(n_epochs: int, valid: bool) -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    x, y = make_batch()
    model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=len(y), epochs=n_epochs, validation_data=(x, y) if valid else None, verbose=0)


PEERS: dict[str, Training] = {"Lightning": lightning, "skorch": skorch, "fastai": fastai, "keras": keras}
PLAIN = "plain loop"
PACKAGES = {"Lightning": "lightning"}  # where it has another name


def epoch_ms(train: Training, n: int, valid: bool, clock: Callable[[], float] = time.process_time) -> float:
    """CPU milliseconds of an epoch: of `n` of them, without what a training of `N_SHORT` takes."""
    taken = list[float]()
    for n_epochs in (N_SHORT, N_SHORT + n):
        gc.collect()
        begin_s = clock()
        train(n_epochs, valid)
        taken.append(clock() - begin_s)
    return (taken[1] - taken[0]) / n * 1e3


def growth(n_epochs: int = N_GROWTH, fifth: int = FIFTH) -> tuple[list[float], list[float]]:
    """Of a training with a validation and a run folder: the mean CPU milliseconds of an epoch, and resident MB, after each fifth."""
    import lightning as L

    spent_s, after_mb = list[float](), list[float]()

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if (trainer.current_epoch + 1) % fifth == 0:
                spent_s.append(time.process_time())
                after_mb.append(psutil.Process().memory_info().rss / 1e6)

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_ours(save_path=folder, lightning={"callbacks": [Watch()]})
        begin_s = time.process_time()
        trainer.run(n_epochs, [make_batch()], [make_batch()])
    return [(after - before) / fifth * 1e3 for before, after in zip([begin_s, *spent_s], spent_s)], after_mb


def measured(tools: dict[str, Training], n: int, valid: bool, n_rounds: int) -> list[dict[str, float]]:
    """Milliseconds of an epoch by tool, by round."""
    for train in tools.values():
        train(1, valid)  # imports
    return [{name: epoch_ms(train, n, valid) for name, train in tools.items()} for _ in range(n_rounds)]


def row(name: str, rounds: list[dict[str, float]], valid: bool) -> Row:
    """A line of the table: medians of the rounds; nbtrain's has its bound."""
    ms, over = median(taken[name] for taken in rounds), over_plain(name, rounds)
    ratio = median(taken[name] / taken[PLAIN] for taken in rounds)
    if name == PLAIN:
        more: tuple[str | Claim, ...] = ()
    elif name == "nbtrain":
        more = Claim("{:.2f} ×", ratio, MAX_RATIO[valid]), Claim("{:+.2f} ms", over, BOUNDS_MS[valid])
    else:
        more = f"{ratio:.2f} ×", f"{over:+.2f} ms"
    return Row((f"{'with' if valid else 'without'} a validation: {name}", f"{ms:.2f} ms", *more), bar=ms)


def over_plain(name: str, rounds: list[dict[str, float]]) -> float:
    return median(taken[name] - taken[PLAIN] for taken in rounds)


def growth_row(epoch_ms: list[float], after_mb: list[float]) -> Row:
    """Of the fifths of a long training. The first is left out: memory fills, and what is made once is made there."""
    slower = Claim("the last thousand epochs take {:.2f} × the time of the second thousand", epoch_ms[-1] / epoch_ms[1], 1.10)
    kb = (after_mb[-1] - after_mb[0]) * 1e3 / (FIFTH * (len(after_mb) - 1))
    heavier = Claim("an epoch adds {:.1f} kB to the memory, which is its row of the history", kb, 4.5)
    return Row((f"nbtrain, {N_GROWTH:,} epochs with a run folder", f"{epoch_ms[-1]:.2f} ms"), (slower, heavier), bar=epoch_ms[-1])


def table(n_rounds: int, only: set[str]) -> Table:
    """`only`: names of peers."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    peers = [name for name in PEERS if find_spec(PACKAGES.get(name, name)) is not None and (not only or name in only)]
    first: dict[str, Training] = {PLAIN: plain, "nbtrain": ours, "nbtrain, with states in memory": partial(ours, keep_states=True)}
    with open(os.devnull, "w") as dropped, contextlib.redirect_stdout(dropped):
        grown = growth()
        found = {valid: measured(first, N_LONG, valid, n_rounds) for valid in (False, True)}  # before the peers fill the memory
        other = {(valid, name): measured({PLAIN: plain, name: PEERS[name]}, N_SLOW, valid, 3) for valid in (False, True) for name in peers}
    rows = list[Row]()
    for valid, rounds in found.items():
        rows += [row(name, rounds, valid) for name in first] + [row(name, other[valid, name], valid) for name in peers]
    alone, validated = (over_plain("nbtrain", rounds) for rounds in found.values())
    says = f"What nbtrain adds to an epoch of one batch of 32, for an MLP 32→64→2: {alone:.2f} ms, with a validation {validated:.2f} ms."
    columns = ("epoch", "CPU time", "of the plain loop", "over it")
    return Table("Short epochs", columns, (*rows, growth_row(*grown)), NOTE, says)


if __name__ == "__main__":
    main(table, 7)
