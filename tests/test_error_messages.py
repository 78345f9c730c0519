"""docs/error_messages.md: each error that it lists is raised, and what it shows is what a user sees."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from nbtrain import MultiGPUAddon, Trainer

PAGE = (Path(__file__).parents[1] / "docs" / "error_messages.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### ([^\n]+)\n\n```text\n(.+?)\n```", PAGE, re.M | re.S))
BATCHES = [(torch.ones(4, 3), torch.ones(4, 1))]
Step = Callable[[Trainer, Any], Any]


def sgd(parameters: Iterable[Any]) -> SGD:
    return SGD(parameters, lr=0.1)


def mean(trainer: Trainer, batch: Any) -> dict[str, Tensor]:
    return {"loss": trainer.model(batch[0]).mean()}


def regress(
    step: Step = mean, batches: Any = BATCHES, model: nn.Module | None = None, optimizer: Any = sgd, addon: Any = None, **options: Any
) -> None:
    class Regress(Trainer):
        def train_step(self, batch: Any) -> Any:
            return step(self, batch)

    (Regress.add_on(addon) if addon else Regress)(model or nn.Linear(3, 1), optimizer=optimizer, log_bar=False, **options).run(1, batches)


def loss_of(loss: Callable[[Tensor], Any], model: nn.Module | None = None) -> None:
    """A run whose loss is computed by `loss` from the output of the model."""
    regress(lambda trainer, batch: {"loss": loss(trainer.model(batch[0]))}, model=model)


def model_gets(value: Tensor, model: nn.Module) -> None:
    regress(batches=[(value,)], model=model)


class Items(Dataset[Any]):
    """Eight samples, each made by `item`."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


def load(item: Callable[[int], Any], **options: Any) -> None:
    regress(batches=DataLoader(Items(item), 4, **options))


def load_weights(name: str, saved: Any, n_bytes: int | None = None) -> None:
    torch.save(saved, name)
    os.truncate(name, n_bytes or os.path.getsize(name))
    Trainer(nn.Linear(3, 1), mode="test").apply_weights(name)


def change_in_place(output: Tensor) -> Tensor:
    squashed = torch.sigmoid(output)
    loss = squashed.sum()
    squashed += 1
    return loss


def keep_the_graph(output: Tensor) -> Tensor:
    loss = (output**2).sum()
    loss.backward()
    return loss


def train_on_inference(trainer: Trainer, batch: Any) -> Any:
    with torch.inference_mode():
        taught = trainer.model(batch[0])
    return {"loss": (taught * trainer.model(batch[0])).sum()}


def change_a_weight(trainer: Trainer, batch: Any) -> Any:
    trainer.model.weight += 1
    return mean(trainer, batch)


class Forgotten(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(3, 1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.ones(3)


def load_other_state() -> None:
    other = nn.Linear(3, 1, bias=False)
    sgd(nn.Linear(3, 1).parameters()).load_state_dict(sgd(other.parameters()).state_dict())


def share_a_weight() -> None:
    net = nn.Linear(3, 1)
    regress(model=net, optimizer=SGD([{"params": [net.weight]}, {"params": [*net.parameters()]}], lr=0.1))


def open_many_files() -> None:
    """Ends at the second of two workers: the loader's iterator is half made, and clean-up can't shut it down."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []

    class Worker(ForkProcess):
        def start(self) -> None:
            super().start()
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            with suppress(OSError):
                while True:
                    opened.append(os.open(os.devnull, os.O_RDONLY))
            os.close(opened.pop())  # one is left

    class Context(ForkContext):
        Process = Worker  # type: ignore[assignment]

    try:
        load(lambda i: torch.ones(3), num_workers=2, multiprocessing_context=Context())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in opened:
            os.close(file)
    assert not any(isinstance(child, Worker) for child in multiprocessing.active_children())


def fill_a_disk(trainer: Trainer, batch: Any) -> None:
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)


def take_a_port() -> None:
    import socket

    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        regress(addon=MultiGPUAddon, device=["cpu", "cpu"], init_method="tcp://127.0.0.1:29500")


MADE: dict[str, Callable[[], Any]] = {  # by the heading
    "mat1 and mat2 shapes cannot be multiplied": lambda: model_gets(torch.ones(4, 5), nn.Linear(3, 1)),
    "The size of tensor a must match the size of tensor b at non-singleton dimension": lambda: loss_of(
        lambda y: (y - torch.ones(3, 1)).sum()
    ),
    "Expected input batch_size to match target batch_size": lambda: loss_of(
        lambda y: cross_entropy(y, torch.tensor([0, 1])), nn.Linear(3, 3)
    ),
    "Given groups=1, weight of size, expected input to have channels": lambda: model_gets(torch.ones(4, 3, 8, 8), nn.Conv2d(1, 2, 3)),
    "input.size(-1) must be equal to input_size": lambda: model_gets(torch.ones(4, 3, 1), nn.LSTM(3, 2)),
    "Expected more than 1 value per channel when training": lambda: model_gets(torch.ones(1, 3), nn.BatchNorm1d(3)),
    "mat1 and mat2 must have the same dtype": lambda: model_gets(torch.ones(4, 3).double(), nn.Linear(3, 1)),
    "expected target dtype to be Long": lambda: loss_of(lambda y: cross_entropy(y, torch.ones(4)), nn.Linear(3, 3)),
    "Target is out of bounds": lambda: loss_of(lambda y: cross_entropy(y, torch.arange(4)), nn.Linear(3, 3)),
    "index out of range in self": lambda: model_gets(torch.tensor([10]), nn.Embedding(10, 2)),
    "argument 'input' must be Tensor": lambda: regress(lambda trainer, batch: {"loss": trainer.model(batch).mean()}),
    "Boolean value of Tensor with more than one value is ambiguous": lambda: loss_of(lambda y: y if y > 0 else -y),
    "only one element tensors can be converted to Python scalars": lambda: loss_of(lambda y: float(y)),
    "Can't call numpy() on Tensor that requires grad": lambda: loss_of(lambda y: y.numpy()),
    "grad can be implicitly created only for scalar outputs": lambda: loss_of(lambda y: y**2),
    "element 0 of tensors does not require grad and does not have a grad_fn": lambda: loss_of(lambda y: y.mean().detach()),
    "modified by an inplace operation": lambda: loss_of(change_in_place),
    "Trying to backward through the graph a second time": lambda: loss_of(keep_the_graph),
    "a leaf Variable that requires grad is being used in an in-place operation": lambda: regress(change_a_weight),
    "Inference tensors cannot be saved for backward": lambda: regress(train_on_inference),
    "The training loss is nan": lambda: loss_of(lambda y: y.mean() * float("nan")),
    "cannot assign module before Module.__init__() call": Forgotten,
    "optimizer got an empty parameter list": lambda: regress(model=nn.Identity()),
    "some parameters appear in more than one parameter group": share_a_weight,
    "loaded state dict contains a parameter group that doesn't match the size of optimizer's group": load_other_state,
    "StepLR can't step in a run": lambda: regress(scheduler=StepLR),
    "stack expects each tensor to be equal size": lambda: load(lambda i: torch.ones(3 + i % 2)),
    "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists": lambda: load(lambda i: (torch.ones(3), None)),
    "num_samples should be a positive integer value, but got num_samples=0": lambda: DataLoader(
        TensorDataset(torch.ones(0, 3)), shuffle=True
    ),
    "has no len()": lambda: len(DataLoader(Stream())),
    "DataLoader worker exited unexpectedly": lambda: load(lambda i: os.kill(os.getpid(), signal.SIGKILL), num_workers=1),
    "Can't pickle local object": lambda: load(lambda i: torch.ones(3), num_workers=1, multiprocessing_context="spawn"),
    "too many open files": open_many_files,
    "Weights only load failed": lambda: load_weights("old.pt", nn.Linear(3, 1)),
    "Error(s) in loading state_dict": lambda: load_weights("net.pt", nn.Sequential(nn.Linear(3, 1)).state_dict()),
    "PytorchStreamReader failed reading zip archive": lambda: load_weights("cut.pt", nn.Linear(3, 1).state_dict(), 962),
    "No space left on device": lambda: regress(fill_a_disk),
    "CUDA out of memory, can't allocate memory": lambda: loss_of(lambda y: torch.empty(10**15).sum()),
    "Torch not compiled with CUDA enabled, no CUDA GPUs are available": lambda: regress(device="cuda"),
    "Default process group has not been initialized": lambda: loss_of(torch.distributed.all_reduce),
    "Address already in use": take_a_port,
}


def test_every_error_of_the_page_is_raised() -> None:
    headings = [*re.findall(r"^### (.+)$", PAGE, re.M)]
    assert headings == [*MADE, "Error displaying widget"]


@pytest.mark.filterwarnings("ignore")  # of torch, at errors
@pytest.mark.parametrize("heading", MADE)
def test_an_error_shows_what_the_page_shows(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as raised:
        MADE[heading]()
    shown = "\n".join([f"{raised.type.__name__}: {raised.value}", *getattr(raised.value, "__notes__", ())])
    varying = re.compile(r"pid\(s\) \d+|an? \d+ bytes")
    for line in SECTIONS[heading].splitlines():
        assert varying.sub("", line) in varying.sub("", shown)
