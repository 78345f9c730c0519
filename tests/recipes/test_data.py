"""Data that change with the training: chosen, ordered, labelled or divided during it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from side_by_side import batches, classes, equal, net
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Sampler, TensorDataset

from nbtrain import TensorLoader, Trainer

X, Y = (torch.cat(parts) for parts in zip(*classes()))


class Classify(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": cross_entropy(self.model(batch[0]), batch[1])}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self.train_step(batch)


def trained(model: Any, optimizer: Any, loader: Any, n_epoch: int = 1) -> None:
    """The plain loop of a classifier."""
    for _ in range(n_epoch):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


def classifier() -> Any:
    return net(n_out=3)


@pytest.mark.long
def test_active_learning() -> None:
    """After each round the ten samples of which the model is least sure are labelled, and training continues."""

    @torch.no_grad()
    def least_sure(probabilities: Tensor, known: Tensor) -> Tensor:
        sure = probabilities.amax(1).masked_fill(known, 2)
        return known.index_fill(0, sure.argsort()[:10], True)

    first = torch.arange(len(X)) < 10

    def ours(model: Any) -> None:
        trainer, known = Classify(model, "cpu", optimizer=Adam(model.parameters()), log_bar=False), first
        for _ in range(3):
            trainer.run(2, TensorLoader(X[known], Y[known], batch_size=10))
            known = least_sure(trainer.predict(X).softmax(1), known)

    def plain(model: Any) -> None:
        optimizer, known = Adam(model.parameters()), first
        for _ in range(3):
            trained(model, optimizer, list(zip(X[known].split(10), Y[known].split(10))), 2)
            with torch.no_grad():
                known = least_sure(model(X).softmax(1), known)

    equal(ours, plain, classifier)


class EasyFirst(Sampler[int]):
    """The easiest samples: more of them in each epoch, in random order."""

    def __init__(self) -> None:
        self.n = 20
        self.order = X.sum(1).abs().argsort(descending=True)

    def set_epoch(self, epoch: int) -> None:
        self.n = 20 * (epoch + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order[: self.n][torch.randperm(min(self.n, len(self.order)))].tolist())


def test_curriculum() -> None:
    """A sampler with more and harder samples in each epoch: `set_epoch` gives it the epoch."""

    def loader(sampler: EasyFirst) -> DataLoader[Any]:
        return DataLoader(TensorDataset(X, Y), 10, sampler=sampler)

    def ours(model: Any) -> None:
        Classify(model, "cpu", optimizer=Adam(model.parameters()), log_bar=False).run(3, loader(EasyFirst()))

    def plain(model: Any) -> None:
        optimizer, sampler = Adam(model.parameters()), EasyFirst()
        for epoch in range(3):
            sampler.set_epoch(epoch)
            trained(model, optimizer, loader(sampler))

    equal(ours, plain, classifier)


@pytest.mark.long
def test_pseudo_labels() -> None:
    """The model labels what it is sure of, and trains on that too."""

    def sure(probabilities: Tensor) -> tuple[Tensor, Tensor]:
        found = probabilities.amax(1) > 0.5
        return torch.cat([X[:20], X[20:][found]]), torch.cat([Y[:20], probabilities.argmax(1)[found]])

    def ours(model: Any) -> None:
        trainer = Classify(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False)
        trainer.run(3, TensorLoader(X[:20], Y[:20], batch_size=10))
        trainer.run(2, TensorLoader(*sure(trainer.predict(X[20:]).softmax(1)), batch_size=10))

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        trained(model, optimizer, list(zip(X[:20].split(10), Y[:20].split(10))), 3)
        with torch.no_grad():
            x, y = sure(model(X[20:]).softmax(1))
        trained(model, optimizer, list(zip(x.split(10), y.split(10))), 2)

    equal(ours, plain, classifier)


@pytest.mark.long
def test_k_fold() -> None:
    """Each of three models trains on two thirds and is validated on the rest."""
    folds = torch.arange(len(X)).chunk(3)

    def split(fold: Tensor) -> tuple[Any, Any]:
        inside = torch.ones(len(X), dtype=torch.bool).index_fill(0, fold, False)
        return list(zip(X[inside].split(10), Y[inside].split(10))), list(zip(X[fold].split(10), Y[fold].split(10)))

    scores: dict[str, list[float]] = {"ours": [], "plain": []}

    def ours(models: Any) -> None:
        for model, fold in zip(models, folds):
            result = Classify(model, "cpu", optimizer=Adam(model.parameters()), log_bar=False).run(2, *split(fold))
            scores["ours"].append(result.metrics["val_loss"])

    def plain(models: Any) -> None:
        for model, fold in zip(models, folds):
            training, validation = split(fold)
            trained(model, Adam(model.parameters()), training, 2)
            with torch.no_grad():
                scores["plain"].append(sum(cross_entropy(model(x), y).item() * len(x) for x, y in validation) / len(fold))

    equal(ours, plain, lambda: torch.nn.ModuleList(classifier() for _ in folds))
    assert scores["ours"] == pytest.approx(scores["plain"], rel=1e-12)


@pytest.mark.long
def test_hard_negative_mining() -> None:
    """Only the half of a batch with the largest losses counts."""

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y, reduction="none").topk(len(x) // 2).values.mean()

    class Hardest(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": loss_of(self.model, *batch)}

    def ours(model: Any) -> None:
        Hardest(model, "cpu", optimizer=SGD(model.parameters(), lr=0.1), log_bar=False).run(2, classes())

    def plain(model: Any) -> None:
        optimizer = SGD(model.parameters(), lr=0.1)
        for x, y in classes() * 2:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()

    equal(ours, plain, classifier)


def test_federated_averaging() -> None:
    """Three clients train copies on their own data; the server takes the mean of their weights, and sends it back."""
    clients = [batches()[n::3] for n in range(3)]

    class Client(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": mse_loss(self.model(batch[0]), batch[1])}

    def average(server: Any, models: list[Any]) -> None:
        states = [model.state_dict() for model in models]
        server.load_state_dict({name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]})

    def ours(server: Any) -> None:
        models = [net() for _ in clients]
        trainers = [Client(model, "cpu", optimizer=SGD(model.parameters(), lr=0.05), log_bar=False) for model in models]
        for _ in range(2):
            for trainer, data in zip(trainers, clients):
                trainer.model.load_state_dict(server.state_dict())
                trainer.run(1, data)
            average(server, models)

    def plain(server: Any) -> None:
        models = [net() for _ in clients]
        optimizers = [SGD(model.parameters(), lr=0.05) for model in models]
        for _ in range(2):
            for model, optimizer, data in zip(models, optimizers, clients):
                model.load_state_dict(server.state_dict())
                for x, y in data:
                    optimizer.zero_grad()
                    mse_loss(model(x), y).backward()
                    optimizer.step()
            average(server, models)

    equal(ours, plain)
