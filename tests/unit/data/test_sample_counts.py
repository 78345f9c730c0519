"""The means of an epoch are over samples: of batches of every kind, by the step's word, or with a note that the number is a guess."""

from __future__ import annotations

import math
import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from samples import Regress, make_trainer
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from nbtrain import MultiOptimizerTrainer, StepError, Trainer
from nbtrain.addons.accumulation import AccumulationAddon, MicroBatchAddon
from nbtrain.data.batch import batch_size, can_split, split, why_guessed
from nbtrain.engine.meter import Meter
from nbtrain.errors import OutOfMemory

NOTHING = "it holds nothing with a row or an item for each sample"
UNEVEN = "its tensors may be parts or samples of different lengths"
Pair = namedtuple("Pair", "image label")


class GraphBatch:
    """As torch_geometric's Batch: several graphs in one, with their number."""

    def __init__(self, values: list[float]) -> None:
        self.x, self.num_graphs = torch.tensor(values), len(values)

    def to(self, device: Any, **options: Any) -> GraphBatch:
        return self


class Opaque:
    """A graph of a library that says nothing of its size."""

    def __init__(self, values: list[float]) -> None:
        self.x = torch.tensor(values)


class TensorTable(dict[str, Tensor]):
    """As tensordict's TensorDict: its batch_size is a torch.Size."""

    @property
    def batch_size(self) -> torch.Size:
        return next(iter(self.values())).shape[:1]


@dataclass(frozen=True)
class Sample:
    image: Tensor
    label: int


def images(n: int) -> list[Tensor]:
    return [torch.zeros(3, 8 + i, 9) for i in range(n)]


def targets(n: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.zeros(3, 4), "labels": torch.zeros(3)} for _ in range(n)]


KNOWN = {
    "a tensor": (torch.zeros(5, 2), 5),
    "tensors": ([torch.zeros(5, 2), torch.zeros(5)], 5),
    "an array": (np.zeros((5, 2)), 5),
    "arrays in a dict": ({"x": np.zeros((5, 2)), "y": np.zeros(5)}, 5),
    "an encoding": ({"input_ids": torch.zeros(5, 7), "attention_mask": torch.zeros(5, 7), "labels": torch.zeros(5)}, 5),
    "an encoding with targets of detection": ({"pixel_values": torch.zeros(5, 3, 4, 4), "labels": targets(5)}, 5),
    "two inputs and a label": ([[torch.zeros(5, 2), torch.zeros(5, 3)], torch.zeros(5)], 5),
    "words and a label": ((["a", "b", "c"], torch.zeros(3)), 3),
    "words": (["a", "b", "c"], 3),
    "a name and a tensor": (("train", torch.zeros(5)), 5),
    "a scale and a tensor": ({"scale": torch.tensor(2.0), "x": torch.zeros(5)}, 5),
    "one row for all": ({"x": torch.zeros(5, 2), "weights": torch.zeros(1, 2)}, 5),
    "graphs": (GraphBatch([1.0, 2.0]), 2),
    "two views of graphs": ((GraphBatch([1.0, 2.0]), GraphBatch([1.0, 2.0])), 2),
    "a TensorDict": (TensorTable(x=torch.zeros(5, 2)), 5),
    "packed sequences": (pack_sequence([torch.zeros(4), torch.zeros(2), torch.zeros(1)]), 3),
    "images and targets": ((images(4), targets(4)), 4),
    "images and targets of one image": ((images(1), targets(1)), 1),
    "images and targets as tuples": ((tuple(images(4)), tuple(targets(4))), 4),
    "images and targets by name": ({"images": images(4), "targets": targets(4)}, 4),
    "images and labels": ((images(4), torch.zeros(4)), 4),
    "samples that are pairs": ([(image, 1) for image in images(4)], 4),
    "samples with targets": (list(zip(images(4), targets(4))), 4),
    "one sample with a target": ([(images(1)[0], targets(1)[0])], 1),
    "samples that are objects": ([Opaque([1.0]), Opaque([2.0, 3.0])], 2),
    "samples with dicts": ([{"image": image, "label": 1, "boxes": torch.zeros(2, 4)} for image in images(4)], 4),
    "samples of a dataclass": ([Sample(image, 1) for image in images(4)], 4),
    "a named tuple": (Pair(torch.zeros(5, 2), torch.zeros(5)), 5),
    "inputs and labels in dicts": (({"ids": torch.zeros(5, 2)}, {"label": torch.zeros(5)}), 5),
    "tensors without rows": ((torch.zeros(0, 2), torch.zeros(0)), 0),
    "parts of one kind without rows": ([torch.zeros(0, 2), torch.zeros(0, 2)], 0),
    "no rows in a dict": ({"scale": torch.tensor(2.0), "x": torch.zeros(0, 2), "weights": torch.zeros(1, 2)}, 0),
    "a TensorDict without rows": (TensorTable(x=torch.zeros(0, 2)), 0),
    "no graphs": (GraphBatch([]), 0),
    "images without boxes": ({"x": torch.zeros(5, 2), "boxes": torch.zeros(0, 4)}, 5),
    "samples without boxes": ([{"boxes": torch.zeros(0, 4)}, {"boxes": torch.zeros(0, 4)}], 2),
}
GUESSED = {
    "nothing": ("no tensor", 1, NOTHING),
    "an object": (Opaque([1.0, 2.0]), 1, NOTHING),
    "no rows beside rows": ((torch.zeros(0, 2), torch.zeros(3)), 3, "its tensors have 0, 3 rows"),
    "no images and targets": (([], []), 0, "it is an empty list"),
    "a scalar": ({"loss": torch.tensor(1.0)}, 1, NOTHING),
    "a graph in a dict": (dict(x=torch.zeros(70, 9), edges=torch.zeros(2, 30), y=torch.zeros(8)), 70, "its tensors have 70, 2, 8 rows"),
    "images alone": (images(4), 3, "its tensors may be parts or samples"),
    "sequences of different lengths": ([torch.zeros(n, 3) for n in (1, 4, 2)], 3, UNEVEN),
    "sequences of one length and one step": ([torch.zeros(4, 3), torch.zeros(1, 3)], 4, UNEVEN),
    "two encodings": (({"ids": torch.zeros(5, 2)}, {"ids": torch.zeros(5, 3)}), 5, "its dicts may be parts or samples"),
    "images and masks": ((images(4), [torch.zeros(1, 8, 9)] * 4), 4, "its lists may be parts or samples"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_number_of_samples_is_known(name: str) -> None:
    batch, n = KNOWN[name]
    assert (batch_size(batch), why_guessed(batch)) == (n, "")


@pytest.mark.parametrize("name", GUESSED)
def test_number_of_samples_that_is_a_guess_is_said(name: str) -> None:
    batch, n, doubt = GUESSED[name]
    assert (batch_size(batch), why_guessed(batch)) == (n, doubt)


def test_a_list_of_sequences_counts_its_sequences() -> None:
    draw = random.Random(0)
    for _ in range(50):
        lengths = draw.sample(range(2, 40), draw.randint(2, 9))  # differ, so they can't be the rows of one batch
        kind, shape = draw.choice([list, tuple]), draw.choice([(), (3,), (2, 5)])
        assert batch_size(kind(torch.zeros(n, *shape) for n in lengths)) == len(lengths)


def test_an_epoch_mean_over_lists_of_sequences_is_over_the_sequences() -> None:
    class Norms(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"size": torch.stack([item.square().mean() for item in batch]).mean()}

    sequences = [torch.full((n, 3), float(n)) for n in (5, 2, 9, 4, 7)]
    batches = [sequences[:3], sequences[3:]]
    assert make_trainer(Norms).evaluate(batches)["size"] == pytest.approx(sum(n * n for n in (5, 2, 9, 4, 7)) / 5)


@pytest.mark.parametrize("name", ["images and targets", "tensors", "words and a label", "images and labels"])
def test_known_batches_are_split_into_their_samples(name: str) -> None:
    batch, n = KNOWN[name]
    assert can_split(batch) and [batch_size(part) for part in split(batch, 2)] == [min(2, n - i) for i in range(0, n, 2)]


@pytest.mark.parametrize("name", ["graphs", "packed sequences"])
def test_a_batch_in_the_form_of_a_library_is_not_split(name: str) -> None:
    assert not can_split(KNOWN[name][0])


# -- in runs
class Means(Trainer):
    """Its loss is the mean of the values of a batch, so that the mean of a pass must be the mean of all values."""

    def values(self, batch: Any) -> Tensor:
        return batch.x if isinstance(batch, (GraphBatch, Opaque)) else torch.stack([image.mean() for image in batch[0]])

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.values(batch).mean() + 0 * self.model.weight.sum()}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self.train_step(batch)


def make(kind: type[Trainer] = Means, **options: Any) -> Any:
    return make_trainer(kind, model=nn.Linear(1, 1), **options)


def run(trainer: Any, loader: Any, valid: Any = None, n_epoch: int = 1) -> dict[str, Any]:
    """The row of the last epoch."""
    trainer.run(n_epoch, loader, valid)
    return dict(trainer.history.epochs[-1])


class Notes:
    def __init__(self, trainer: Any) -> None:
        self.texts: list[str] = []
        trainer.recorder.add(self)

    def update(self, event: Any) -> None:
        if event.kind == "note":
            self.texts.append(event.data["text"])


VALUES = [[10.0, 20.0, 30.0, 40.0], [0.0]]  # mean 20; of two batches that count alike 12.5


def test_a_guess_is_noted_once_with_the_remedy() -> None:
    trainer = make()
    notes, batches = Notes(trainer), [Opaque(values) for values in VALUES]
    row = run(trainer, batches, batches, 2)
    trainer.run(1, batches)
    assert row["train_loss"] == 12.5
    assert notes.texts == [
        f"The means count a Opaque as one sample, which is a guess: {NOTHING}. Return 'n_samples' from the step, or give the trainer "
        "count_samples=lambda batch: ..."
    ]


def test_a_guess_for_the_only_batch_of_a_pass_changes_no_mean_and_is_not_noted() -> None:
    trainer = make()
    notes, batch = Notes(trainer), Opaque(VALUES[0])
    trainer.run(3, [batch], [batch])
    assert notes.texts == []
    trainer.run(1, [batch, batch])
    assert [text[:40] for text in notes.texts] == ["The means count a Opaque as one sample, "]


class Stated(Means):
    """States its tokens, as a tensor."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        return super().train_step(batch) | {"n_samples": torch.tensor(len(batch.x))}


def images_with_targets(values: list[float]) -> Any:
    return [torch.full((3, 4 + i, 5), value) for i, value in enumerate(values)], targets(len(values))


EXACT: dict[str, tuple[Callable[[], Any], Callable[[list[float]], Any]]] = {  # a trainer, and its batch of these values
    "over graphs": (make, GraphBatch),
    "over images with targets": (make, images_with_targets),
    "counted by a function of the trainer": (lambda: make(count_samples=lambda batch: len(batch.x)), Opaque),
    "stated by the step": (lambda: make(Stated), Opaque),
}


@pytest.mark.parametrize("name", EXACT)
def test_means_are_over_samples_and_no_guess_is_noted(name: str) -> None:
    make_it, batch_of = EXACT[name]
    trainer = make_it()
    notes, batches = Notes(trainer), [batch_of(values) for values in VALUES]
    row = run(trainer, batches, batches)
    assert (row["train_loss"], row["val_loss"], notes.texts) == (20.0, 20.0, [])
    assert trainer.evaluate(batches) == {"loss": 20.0}
    assert [column for column in row if "n_samples" in column] == []


def test_what_a_step_logs_counts_samples_as_what_it_returns() -> None:
    class Logs(Means):
        def train_step(self, batch: Any) -> dict[str, Any]:
            found = super().train_step(batch)
            self.log("again", found["loss"].detach(), on_epoch=True, on_step=False)
            return found

    batches = [GraphBatch(values) for values in [*VALUES, *VALUES]]
    for lean in (True, False):
        trainer = make(Logs)
        trainer.short_way = lean
        assert run(trainer, batches)["again"] == 20.0


def test_one_of_several_steps_states_the_samples() -> None:
    class Two(MultiOptimizerTrainer):
        def train_step_a(self, batch: Any) -> dict[str, Any]:
            return {"loss": batch.x.mean() + 0 * self.model["a"].weight.sum(), "n_samples": len(batch.x)}

        def train_step_b(self, batch: Any) -> dict[str, Any]:
            return {"loss": 2 * batch.x.mean() + 0 * self.model["b"].weight.sum()}

    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    optimizers = {name: lambda params: torch.optim.SGD(params, lr=0.1) for name in "ab"}
    trainer = Two(model, "cpu", optimizers=optimizers, log_bar=False)
    row = run(trainer, [Opaque(values) for values in VALUES])
    assert {name: row[name] for name in row if "loss" in name} == {"train_loss_a": 20.0, "train_loss_b": 40.0, "train_loss": 60.0}


def test_accumulation_weighs_batches_by_the_trainers_count() -> None:
    class Slope(Means):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": (self.model.weight * batch.x.to(self.device)).mean()}

    batches = [Opaque(values) for values in VALUES]
    options = {"optimizer": lambda params: torch.optim.SGD(params, lr=1.0), "count_samples": lambda batch: len(batch.x)}
    trainer = make(Slope.add_on(AccumulationAddon), accumulate=2, **options)
    before = trainer.model.weight.item()
    trainer.run(1, batches)
    assert before - trainer.model.weight.item() == pytest.approx(20.0)


def test_a_graph_batch_that_runs_out_of_memory_is_an_error_and_not_halved() -> None:
    class Full(Means):
        n_calls = 0

        def train_step(self, batch: Any) -> dict[str, Any]:
            self.n_calls += 1
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.")

    trainer = make(Full.add_on(MicroBatchAddon))
    with pytest.raises(OutOfMemory, match="the batch is GraphBatch"):
        trainer.run(1, [GraphBatch([1.0, 2.0])])
    assert trainer.n_calls == 1


@pytest.mark.parametrize("n", ["300", True, -1, math.nan, [3]])
def test_a_stated_number_that_is_none_is_an_error(n: Any) -> None:
    class Wrong(Means):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch) | {"n_samples": n}

    trainer = make(Wrong)
    with pytest.raises(StepError, match="n_samples"):
        trainer.run(1, [GraphBatch([1.0])])


def test_a_count_that_is_none_is_an_error() -> None:
    trainer = make(count_samples=lambda batch: 0.5)
    with pytest.raises(StepError) as caught:
        trainer.run(1, [GraphBatch([1.0])])
    assert str(caught.value) == "count_samples returned 0.5 for a batch.\n  Means: the batch is GraphBatch\n  Return an int."


def test_means_of_stated_samples_survive_a_state() -> None:
    meter, again = Meter(), Meter()
    meter.add({"loss": torch.tensor(2.0)}, torch.tensor(100))
    again.load_state_dict(meter.state_dict())
    again.add({"loss": torch.tensor(1.0)}, torch.tensor(300))
    assert again.means() == {"loss": 1.25}


def test_means_do_not_depend_on_when_their_values_are_read() -> None:
    draw = random.Random(0)
    values = [draw.random() * 10 ** draw.uniform(-3, 3) for _ in range(60)]
    found = set()
    for n_read in (1, 7, 60):
        meter = Meter()
        for i, value in enumerate(values):
            meter.add({"loss": value}, 3)
            if i % n_read == 0:
                meter.flush()
        found.add(meter.means()["loss"])
    assert len(found) == 1


def test_a_batch_without_rows_has_no_part_in_means_and_updates() -> None:
    class Sums(Means):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": (self.model.weight * batch[0]).sum() + batch[0].sum()}

        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": batch[0].mean()}

    batches = [(torch.tensor(values),) for values in (VALUES[0], [], VALUES[0])]
    trainer = make(Sums.add_on(AccumulationAddon), accumulate=3, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    notes, before = Notes(trainer), trainer.model.weight.item()
    row = run(trainer, batches, batches)
    assert before - trainer.model.weight.item() == pytest.approx(100.0)  # the mean of both batches
    assert (row["train_loss"], row["val_loss"]) == (pytest.approx(100.0 * (1 + before)), 25.0)
    assert notes.texts == ["val_loss is not finite for a batch without samples, which has no part in the mean."]


def test_a_pass_without_a_stated_sample_has_no_mean() -> None:
    meter = Meter()
    meter.add({"loss": torch.tensor(2.0)}, 0)
    assert math.isnan(meter.means()["loss"])
