"""A long run that is paused, saved, stopped, restarted and killed at random ends as the one nobody touched, bit for bit: `make soak`.

Two kernels train the same at once, each 1,000,000 steps in 100 epochs. One is left alone. To the other something happens every 25,000
steps or so: a pause, a save by hand, a stop, Jupyter's restart of its kernel, a kill. Weights, the optimizer's state, history and best
score are compared, and the memory of both is watched. The result is written to docs/soak.md. The steps at which something is to happen
are drawn from `--seed`; the moment at which a kernel hears of it is not, so no two soaks are the same.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import proofs
import psutil
from jupyter_client.manager import start_new_kernel

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "soak.md"
STEPS_PER_EPOCH = 10_000
MEMORY_MB = 48  # that a kernel may grow by, from the end of its second epoch on

SETUP = """
import hashlib, json, torch
from torch import nn
from torch.nn.functional import mse_loss
from nbtrain import StateManagerAddon, TensorLoader, Trainer

torch.set_num_threads(1)


class Fit(Trainer):
    def train_step(self, batch):
        x, y = batch
        output = self.model(x)
        return {{"loss": mse_loss(output, y), "mae": (output - y).abs().mean()}}

    test_step = train_step


def tensors(n, seed):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sin().sum(1, keepdim=True)


torch.manual_seed(0)
trainer = Fit.add_on(StateManagerAddon)(
    nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)),
    device="cpu",
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    scheduler=lambda step: 1e-3 * 0.999997**step,
    seed=1,
    gradient_clip=1.0,
    save_path={folder!r},
    every_n_steps=2_000,
    keep_last_n=3,
)
loader = TensorLoader(*tensors(4 * {steps_per_epoch}, 1), batch_size=4, shuffle=True)
valid_loader = TensorLoader(*tensors(400, 2), batch_size=40)


def run():
    return trainer.run({n_epochs}, loader, valid_loader, resume="auto", background=True)


def outcome():
    numbers = [value for group in trainer.optimizer.state_dict()["state"].values() for value in group.values()]
    tensors = [*trainer.model.state_dict().values(), *map(torch.as_tensor, numbers)]
    rows = [{{name: value for name, value in row.items() if not name.endswith("_s")}} for row in trainer.history.epochs]
    return json.dumps({{
        "status": handle.status,
        "steps": trainer.counts.step,
        "state": hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest(),
        "history": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "best": trainer.history.best["val_loss"],
        "loss": rows[-1]["val_loss"],
    }})


handle = run()
"""


class Kernel:
    """A kernel in which the run is, from start to start."""

    def __init__(self, folder: Path, n_epochs: int) -> None:
        self._setup = SETUP.format(folder=str(folder), n_epochs=n_epochs, steps_per_epoch=STEPS_PER_EPOCH)
        self._manager, self._client = start_new_kernel(extra_arguments=["--log-level=ERROR"])  # else each start warns of its open port
        self.memory_mb: list[list[float]] = []  # of each life of the kernel, at the end of each of its epochs but the first
        self.begin()

    def begin(self) -> None:
        """Make everything anew, and let the run go on from its newest state."""
        self.memory_mb.append([])
        self._epoch = -1
        self.do(self._setup)

    def do(self, code: str, expression: str = "None") -> Any:
        """Execute `code`, and return what `expression` is then. Raises RuntimeError with the kernel's traceback."""
        asked = {"value": f"__import__('json').dumps({expression})"}
        reply = self._client.execute_interactive(code, user_expressions=asked, timeout=600, output_hook=lambda message: None)
        content = reply["content"]
        told = content if content["status"] != "ok" else content["user_expressions"]["value"]
        if told["status"] != "ok":
            raise RuntimeError("\n".join(told["traceback"]))
        return json.loads(eval(told["data"]["text/plain"]))  # the repr of a str

    def steps(self) -> int:
        """How many updates are done; the memory is looked at once an epoch."""
        status, steps = self.do("", "[handle.status, trainer.counts.step]")
        assert status in ("running", "completed"), status
        if steps // STEPS_PER_EPOCH > self._epoch:
            if self._epoch >= 0:
                self.memory_mb[-1].append(psutil.Process(self._manager.provisioner.pid).memory_info().rss / 1e6)  # pyright: ignore
            self._epoch = steps // STEPS_PER_EPOCH
        return steps

    def wait(self, steps: int) -> bool:
        """Wait until that many updates are done. False if the run is over before."""
        while self.steps() < steps:
            if self.do("", "handle.status") == "completed":
                return False
            time.sleep(0.2)
        return self.do("", "handle.status") == "running"

    def restart(self, *, kill: bool) -> None:
        """As the button of Jupyter does, which lets the kernel end; or as a full machine does."""
        self._manager.restart_kernel(now=kill)
        self._client.wait_for_ready(timeout=600)
        self.begin()

    def end(self) -> dict[str, Any]:
        """What the run came to."""
        self.do("handle.wait()")
        found = json.loads(self.do("", "outcome()"))
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        return found


def pause(kernel: Kernel) -> None:
    kernel.do("trainer.pause()\nassert handle.status == 'paused', handle.status")
    kernel.do("handle = trainer.resume(background=True)")


EVENTS = {
    "a pause": pause,
    "a save by hand": lambda kernel: kernel.do("trainer.save_state()"),
    "a stop": lambda kernel: kernel.do("trainer.stop()\nhandle = run()"),
    "a restart of the kernel": lambda kernel: kernel.restart(kill=False),
    "a kill": lambda kernel: kernel.restart(kill=True),
}


@dataclass
class Soaked:
    """One run: what it came to, and what it had to bear."""

    outcome: dict[str, Any]
    memory_mb: list[list[float]]
    wall_s: float
    happened: Counter[str] = field(default_factory=Counter)

    @property
    def growth_mb(self) -> float:
        """The most that one life of the kernel grew."""
        return max((max(life) - life[0] for life in self.memory_mb if life), default=0.0)


def soak(folder: Path, n_epochs: int, chance: random.Random | None, every: int) -> Soaked:
    """Train `n_epochs`; with `chance` something happens about every `every` steps."""
    start, happened = time.monotonic(), Counter[str]()
    kernel = Kernel(folder, n_epochs)
    steps = 0
    while chance is not None:
        steps += round(chance.uniform(0.2, 1.8) * every)
        if not kernel.wait(steps):
            break
        event = chance.choice(list(EVENTS))
        print(f"{steps:,} steps: {event}", flush=True)
        EVENTS[event](kernel)
        happened[event] += 1
    kernel.wait(n_epochs * STEPS_PER_EPOCH + 1)
    return Soaked(kernel.end(), kernel.memory_mb, time.monotonic() - start, happened)


PAGE_TEXT = """\
# A long run with interruptions

`make soak` trains the same twice, {n_steps:,} steps each, in notebook kernels. One run is uninterrupted. In the other one this happens at
random steps (`--seed {seed}`), and each time it is resumed, after a pause by `resume`, else by `resume="auto"`.

{made}

| what happened | times |
| --- | --- |
{rows}

Both ended after {n_updates:,} updates. Weights and the optimizer's state are {state}, and so is the history: {history}. The best validation
loss is {best} in both.

The kernel of the uninterrupted run grew by {alone_mb:.1f} MB after its second epoch; of the {n_lives} lives of the other one none grew by
more than {disturbed_mb:.1f} MB. It took {alone_min:.0f} and {disturbed_min:.0f} minutes, side by side.
"""


def page(source: str, n_steps: int, seed: int, alone: Soaked, disturbed: Soaked) -> str:
    """The result, as the documentation shows it."""
    verdict = {name: "equal bit for bit" if value == disturbed.outcome[name] else "NOT EQUAL" for name, value in alone.outcome.items()}
    return PAGE_TEXT.format(
        made=proofs.line("soak", source),
        n_steps=n_steps,
        seed=seed,
        rows="\n".join(f"| {name} | {n} |" for name, n in sorted(disturbed.happened.items())),
        n_updates=alone.outcome["steps"],
        state=verdict["state"],
        history=verdict["history"],
        best=alone.outcome["best"],
        alone_mb=alone.growth_mb,
        n_lives=len(disturbed.memory_mb),
        disturbed_mb=disturbed.growth_mb,
        alone_min=alone.wall_s / 60,
        disturbed_min=disturbed.wall_s / 60,
    )


def main() -> int:
    """Returns 1 where the runs differ or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100, help=f"of {STEPS_PER_EPOCH:,} steps")
    parser.add_argument("--every", type=int, default=25_000, help="steps between two disturbances, on average")
    parser.add_argument("--seed", type=int, default=0)
    given, source = parser.parse_args(), proofs.source()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(soak, Path(folder, "alone"), given.epochs, None, given.every),
            pool.submit(soak, Path(folder, "disturbed"), given.epochs, random.Random(given.seed), given.every),
        ]
        alone, disturbed = (run.result() for run in runs)
    text = page(source, given.epochs * STEPS_PER_EPOCH, given.seed, alone, disturbed)
    print(text)
    good = alone.outcome == disturbed.outcome and max(alone.growth_mb, disturbed.growth_mb) <= MEMORY_MB
    if good and given.epochs == parser.get_default("epochs"):
        PAGE.write_text(text)
    return not good


if __name__ == "__main__":
    sys.exit(main())
