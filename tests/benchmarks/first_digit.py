"""How long one looks at a cell without a number: from the start of `run` in a kernel to the first loss on its screen.

In each kernel a cell makes the trainer, and the next one trains; the message that has the first loss is found by what it shows. A
message's time is that at which the kernel made it. The first call in a kernel is shown beside later ones. nbtrain tries its steps first,
which fastai does not: the first loss is that of the trial, and says so; that of the first step is in a row of its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from statistics import median
from typing import Any

from jupyter_client.manager import start_new_kernel
from tables import Claim, Row, Table, main

SETUP = """
import warnings, torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
from torch.nn.functional import cross_entropy
from nbtrain import Trainer
from nbtrain.examples.digits import SmallCNN, digits_loaders
train, valid = digits_loaders()

class Digits(Trainer):
    def train_step(self, batch):
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}

    test_step = train_step
"""
FASTAI = """
import fastai.callback.progress
from fastai.data.core import DataLoaders
from fastai.learner import Learner
"""
_OURS = 'tool = Digits(SmallCNN(), "cpu", optimizer=lambda p: torch.optim.Adam(p))', "tool.run(1, train, valid)"
_FASTAI = "tool = Learner(DataLoaders(train, valid), SmallCNN(), loss_func=cross_entropy)", "tool.fit(1)"
FIRST, STEP = "nbtrain", "nbtrain, of the first step"
# What makes the trainer, what trains, and the first loss in what the page then shows
TOOLS: dict[str, tuple[str, str, str]] = {
    FIRST: (*_OURS, r"loss\W+\d\.\d"),
    STEP: (*_OURS, r"train\W+loss\W+\d\.\d"),
    "fastai": (*_FASTAI, r"\d\d:\d\d\W+\d\.\d"),
}
MAX_RATIOS = 2.0, 1.25  # of fastai's time: of a first call and of a later one


class Kernel:
    """A kernel, and what its cells show."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.execute(SETUP + (FASTAI if find_spec("fastai") is not None else ""))

    def execute(self, source: str) -> list[Any]:
        """The messages of a cell, from its start on. Raises RuntimeError where it fails."""
        request, messages = self.client.execute(source), list[Any]()
        while True:
            message = self.client.get_iopub_msg(timeout=600)
            if message["msg_type"] == "error":
                raise RuntimeError("\n".join(message["content"]["traceback"]))
            if messages or message["msg_type"] == "execute_input":
                messages.append(message)
            is_end = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            if messages and is_end and message["parent_header"].get("msg_id") == request:
                return messages

    def first_s(self, tool: str) -> float:
        """Seconds until the first loss."""
        make, train, loss = TOOLS[tool]
        self.execute(make)
        messages = self.execute(train)
        at = next(message for message in messages if re.search(loss, _text(message)))["header"]["date"]
        return (at - messages[0]["header"]["date"]).total_seconds()


def _text(message: Any) -> str:
    """What a message shows."""
    data = message["content"].get("data", {})
    shown = data.get("state", {}).get("value", "") if message["msg_type"].startswith("comm_") else data.get("text/html", "")
    return re.sub(r"<style.*?</style>|<[^>]*>", " ", str(shown), flags=re.S).replace("&lt;", "<")


@contextlib.contextmanager
def kernel() -> Iterator[Kernel]:
    manager, client = start_new_kernel(kernel_name="python3", extra_arguments=["--log-level=ERROR"])
    try:
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _measured(tools: list[str], n_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of each tool's first call in a kernel, and of later ones, which come in turns."""
    first, later = ({tool: list[float]() for tool in tools} for _ in range(2))
    for i in range(3 * len(tools)):
        with kernel() as fresh:
            first[tools[i % len(tools)]].append(fresh.first_s(tools[i % len(tools)]))
    with kernel() as warm:
        for i in range(n_rounds * len(tools)):
            later[tools[i % len(tools)]].append(warm.first_s(tools[i % len(tools)]))
    return first, {tool: times[1:] for tool, times in later.items()}


def table(n_rounds: int, only: set[str]) -> Table:
    """`only`: names of rows."""
    tools = [tool for tool in TOOLS if (tool != "fastai" or find_spec("fastai") is not None) and (not only or tool in only)]
    first, later = ({tool: median(times) for tool, times in found.items()} for found in _measured(tools, n_rounds))
    rows, is_beside = list[Row](), {FIRST, "fastai"} <= later.keys()
    for tool in tools:
        beside = zip(("first call", "later call"), (first, later), MAX_RATIOS) if is_beside else ()
        claims = [Claim(f"{call} {{:.2f}} × of fastai", found[tool] / found["fastai"], most) for call, found, most in beside]
        rows.append(Row((tool, f"{first[tool]:.3f} s", f"{later[tool]:.3f} s"), tuple(claims) if tool == FIRST else (), later[tool]))
    says = f"How long one waits in a notebook for the first loss on the screen: {', '.join(f'{t} {s:.3f} s' for t, s in later.items())}."
    note = "Digits, a small convolutional net, one CPU thread. The first loss of nbtrain is that of the trial of its steps before epoch 1."
    return Table("The first number in a notebook", ("first loss", "first call in a kernel", "a later call"), tuple(rows), note, says)


if __name__ == "__main__":
    main(table, 15)
