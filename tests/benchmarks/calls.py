"""What one call costs: a batch, an evaluation of a batch, a prediction, a run of one batch, beside the same lines in a plain loop.

All are called in turns in one process, a thousand times or less; CPU time of the thread, at the 20th percentile. There are
bounds for the time and, as a slower machine takes longer for both, for the ratio: to 0.05, 0.4, 0.1 and 0.5 ms of the plain calls.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from tables import Claim, Row, Table, main
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Call = Callable[[], Any]
BOUNDS_MS = {"predict(x)": 1.0, "run_batch(batch)": 3.0, "evaluate([batch])": 5.0, "run(1, [batch])": 6.0}
MAX_RATIO = {"predict(x)": 20.0, "run_batch(batch)": 7.5, "evaluate([batch])": 50.0, "run(1, [batch])": 12.0}  # of the plain loop


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 32, generator=generator), torch.randint(0, 2, (32,), generator=generator)


def plain() -> dict[str, Call]:
    """What everybody writes by hand, by the name of the call that does the same."""
    model, (x, y) = make_model(), make_batch()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> float:
        model.train()
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            return cross_entropy(model(x), y).item()

    def predict() -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(x)

    return {"predict(x)": predict, "run_batch(batch)": step, "evaluate([batch])": evaluate, "run(1, [batch])": step}


def make_ours(*addons: Any, **options: Any) -> Any:
    """nbtrain's trainer for the model, without a display."""
    from nbtrain import Trainer

    class Classify(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            return {"loss": cross_entropy(self.model(x), y)}

        test_step = train_step

    kind, model = Classify.add_on(*addons) if addons else Classify, make_model()
    return kind(model, device="cpu", optimizer=torch.optim.Adam(model.parameters()), log_bar=False, **options)


def ours() -> dict[str, Call]:
    trainer, batch = make_ours(), make_batch()
    return {
        "predict(x)": lambda: trainer.predict(batch[0]),
        "run_batch(batch)": lambda: trainer.run_batch(batch),
        "evaluate([batch])": lambda: trainer.evaluate([batch]),
        "run(1, [batch])": lambda: trainer.run(1, [batch]),
    }


def skorch() -> dict[str, Call]:
    from skorch import NeuralNetClassifier

    x, y = make_batch()
    options: dict[str, Any] = {"train_split": None, "verbose": 0, "batch_size": 32, "optimizer": torch.optim.Adam}
    net = NeuralNetClassifier(make_model(), criterion=nn.CrossEntropyLoss, **options).initialize()
    calls: dict[str, Call] = {"predict(x)": lambda: net.forward(x), "run_batch(batch)": lambda: net.train_step((x, y))}
    return calls | {"run(1, [batch])": lambda: net.partial_fit(x, y)}


def fastai() -> dict[str, Call]:
    import fastai.callback.progress  # noqa: F401  no_bar
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    x, y = make_batch()
    loader = torch.utils.data.DataLoader(list(zip(x, y)), batch_size=32)
    learner = Learner(DataLoaders(loader, loader), make_model(), loss_func=cross_entropy)

    def quietly(call: Callable[[], Any]) -> Any:
        with learner.no_bar(), learner.no_logging():
            return call()

    calls: dict[str, Call] = {"predict(x)": lambda: quietly(lambda: learner.get_preds(dl=[(x, y)]))}
    return calls | {"run(1, [batch])": lambda: quietly(lambda: learner.fit(1)), "evaluate([batch])": lambda: quietly(learner.validate)}


def keras() -> dict[str, Call]:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    x, y = make_batch()
    layers = [keras.layers.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return {
        "predict(x)": lambda: model.predict(x, verbose=0),
        "run_batch(batch)": lambda: model.train_on_batch(x, y),
        "evaluate([batch])": lambda: model.evaluate(x, y, verbose=0),
        "run(1, [batch])": lambda: model.fit(x, y, batch_size=32, verbose=0),
    }


PEERS = {"skorch": skorch, "fastai": fastai, "keras": keras}


def measured(sides: dict[str, Call], n: int, clock: Callable[[], float] = time.thread_time) -> dict[str, float]:
    """Milliseconds of each side's call, which come in turns."""
    taken = {name: list[float]() for name in sides}
    for i in range(n + 5):
        for name, call in sides.items():
            begin = clock()
            call()
            taken[name] += [(clock() - begin) * 1e3] if i >= 5 else []
    return {name: sorted(times)[len(times) // 5] for name, times in taken.items()}


def row(call: str, tool: str, ms: float, plain_ms: float) -> Row:
    """A line of the table; nbtrain's has its bound."""
    ratio, is_ours = ms / plain_ms, tool == "nbtrain"
    own = Claim("{:.2f} ms", ms, BOUNDS_MS[call]) if is_ours else f"{ms:.2f} ms"
    shown = Claim("{:.1f} ×", ratio, MAX_RATIO[call]) if is_ours else f"{ratio:.1f} ×"
    more = ("", "") if tool == "plain loop" else (shown, f"{ms - plain_ms:+.2f} ms")
    return Row((f"{call}: {tool}", own, *more), bar=ms)


def asked_us(n: int = 2000) -> float:
    """Microseconds of what a lean loop asks after each batch: was anything set on the objects of the run?"""
    import lightning as L

    taken: list[float] = []

    class Asks(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            ask = trainer.fit_loop.epoch_loop._pass.assignments.changed
            begin = time.thread_time()
            for _ in range(n):
                ask()
            taken.append((time.thread_time() - begin) / n * 1e6)

    make_ours(lightning={"callbacks": [Asks()]}).run(1, [make_batch()] * 20)
    return sorted(taken)[len(taken) // 5]


def table(n_rounds: int, only: set[str]) -> Table:
    """`only`: names of peers."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    peers = [name for name in PEERS if find_spec(name) is not None and (not only or name in only)]
    tools = {"plain loop": plain(), "nbtrain": ours()} | {name: PEERS[name]() for name in peers}
    rows, over = list[Row](), list[str]()
    for call in MAX_RATIO:
        ms = measured({name: calls[call] for name, calls in tools.items() if call in calls}, n_rounds)
        rows += [row(call, name, value, ms["plain loop"]) for name, value in ms.items()]
        over.append(f"{call} {ms['nbtrain'] - ms['plain loop']:.2f} ms")
    rows.append(Row(("after a batch: was anything set?", Claim("{:.1f} µs", asked_us(), 3.0), "", "")))
    says = f"What nbtrain adds to a single call, for an MLP 32→64→2 and a batch of 32: {', '.join(over)}."
    return Table("Single calls", ("call", "CPU time", "of the plain loop", "over it"), tuple(rows), "One CPU thread.", says)


if __name__ == "__main__":
    main(table, 200)
