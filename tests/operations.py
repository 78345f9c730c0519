"""Every operation of a trainer, ended in every way: what has changed afterwards. `tests/operations.md` has the table.

python tests/operations.py     # tests/operations.md is written
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from samples import Broken, make_loader, make_model, make_trainer, make_valid, same_content
from torch import nn
from torch.nn.functional import mse_loss

from nbtrain import RunPaused, RunStopped, StateManagerAddon, Trainer

PAGE = Path(__file__).resolve().with_suffix(".md")
ENDS = ("done", "■", "■■", "error")


class Fails:
    """What the steps do at a certain call: nothing, ■, ■ twice, or an error. The steps reach it by no name that nbtrain searches."""

    def __init__(self) -> None:
        self.end, self.at, self.n = "done", 0, 0
        self.is_heard: Callable[[str], bool] = lambda state: True  # by a run in another thread, which has this state then

    def arm(self, end: str, at: int) -> None:
        self.end, self.at, self.n = end, at, 0

    def __call__(self) -> None:
        self.n += 1
        if self.n != self.at or self.end == "done":
            return
        if self.end == "error":
            raise Broken
        if self.end == "kernel restart":
            os._exit(3)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            if self.end == "■■":  # the second while the first takes effect
                self._wait("pausing")
                os.kill(os.getpid(), signal.SIGINT)
                self._wait("stopping")

    def _wait(self, state: str) -> None:
        while not self.is_heard(state):
            time.sleep(0.001)


FAILS = Fails()
_REACH = [FAILS.__call__].__getitem__


class Busy(Trainer):
    """Its steps change all that an operation has to put back: random numbers, modes, buffers, attributes."""

    n_steps = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        self.n_steps += 1
        random.random(), np.random.rand(), torch.rand(1)
        output = self.model(x)
        _REACH(0)()
        return {"loss": mse_loss(output, y), "output": output, "label": y}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self.train_step(batch)


def loader_of() -> Any:
    return make_loader(shuffle=False, own_generator=True)  # it draws a seed for each pass


def make() -> Any:
    FAILS.arm("done", 0)
    torch.manual_seed(0)
    trainer = make_trainer(Busy, model=nn.Sequential(*make_model(), nn.BatchNorm1d(1)), keep_states=True)
    trainer.run(1, loader_of(), make_valid())
    return trainer


BATCH = next(iter(make_valid()))


# Each operation: its call, the call of a step at which it ends early, what changes when it is done, and what also when it is not
_READ = ("loader", "objects")  # a pass reads its loader, and your steps may count
OPERATIONS: dict[str, tuple[Callable[[Any, Any], Any], int, tuple[str, ...], tuple[str, ...]]] = {
    "evaluate": (lambda trainer, loader: trainer.evaluate(loader), 2, (*_READ, "counts", "history"), (*_READ, "counts")),
    "validate": (lambda trainer, loader: trainer.validate(loader), 2, (*_READ, "counts", "history"), (*_READ, "counts")),
    "predict": (lambda trainer, loader: trainer.predict(loader), 2, _READ, _READ),
    "inference": (lambda trainer, loader: trainer.inference(loader), 2, _READ, _READ),
    "lr_find": (lambda trainer, loader: trainer.lr_find(loader, n_batches=20), 7, (), ()),
    "profile": (lambda trainer, loader: trainer.profile(loader, steps=3), 5, (), ()),
    "show_results": (lambda trainer, loader: trainer.show_results(loader, 40), 2, ("objects",), ("objects",)),
    "show_worst": (lambda trainer, loader: trainer.show_worst(loader), 20, ("objects",), ("objects",)),
    "check": (lambda trainer, loader: trainer.check(BATCH), 2, (), ()),
    "summary": (lambda trainer, loader: trainer.summary(BATCH), 1, (), ()),
    "replay": (lambda trainer, loader: trainer.replay(4), 2, (), ()),
    "blame": (lambda trainer, loader: trainer.blame(4), 6, (), ()),
    "rewind": (
        lambda trainer, loader: trainer.rewind(step=3),
        2,
        ("weights", "optimizer", "random numbers", "objects", "counts", "history"),
        (),
    ),
}


def state_of(trainer: Any, loader: Any) -> dict[str, Any]:
    """What must be as before, by name."""
    counts = trainer.counts
    return {
        "weights": [value.clone() for value in trainer.model.state_dict().values()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()],
        "optimizer": deepcopy(trainer.optimizer.state_dict()),
        "mode": trainer.mode,
        "modes of the layers": [part.training for part in trainer.model.modules()],
        "random numbers": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "loader": loader.generator.get_state(),
        "hooks": [len(part._forward_hooks) for part in trainer.model.modules()],
        "objects": trainer.n_steps,
        "counts": (counts.epoch, counts.processed, counts.step),
        "history": (len(trainer.history.epochs), len(trainer.history.tests)),
        "signals": signal.getsignal(signal.SIGINT),
        "operations": (list(trainer.operations), trainer.control.state, trainer.module),
    }


def changed(name: str, end: str) -> tuple[list[str], BaseException | None]:
    """What has changed after the operation has ended so, and what it raised."""
    call, at, _, _ = OPERATIONS[name]
    trainer, loader, error = make(), loader_of(), None
    before = state_of(trainer, loader)
    FAILS.arm(end, at)
    try:
        call(trainer, loader)
    except (RunStopped, Broken) as raised:
        error = raised
    finally:
        FAILS.arm("done", 0)
    after = state_of(trainer, loader)
    return [part for part in before if not same_content(before[part], after[part])], error


# -- what becomes of a training
TRAINING_ENDS = (*ENDS, "kernel restart")
_AT = {"run": 6, "resume": 9}  # the call of a step at which a training ends early: in epoch 1, and in its validation


def make_saving(folder: Path) -> Any:
    """A trainer that saves after each step."""
    FAILS.arm("done", 0)
    torch.manual_seed(0)
    options: dict[str, Any] = {"save_path": folder, "every_n_steps": 1, "on_error": "pause", "model": nn.Sequential(*make_model())}
    return make_trainer(Busy.add_on(StateManagerAddon), **options)


def _train(trainer: Any, name: str, **options: Any) -> str:
    """`run`, or `resume` after ■, until its end, to which `FAILS` leads. Returns its status."""
    loaders, (end, at) = (loader_of(), make_valid()), (FAILS.end, FAILS.at)
    FAILS.is_heard = lambda state: trainer.control.state == state
    if name == "resume":
        FAILS.arm("■", 4)
    try:
        trainer.run(2, *loaders, background=True, **options).wait()
    except (RunPaused, RunStopped, Broken):
        pass
    if name == "resume":
        FAILS.end, FAILS.at = end, at
        with suppress(RunPaused, RunStopped, Broken):
            trainer.resume()
    return trainer.result.status


def _die(folder: Path, name: str) -> None:
    """Train in another process, which a restart of its kernel kills."""
    code = f"import pathlib, operations; operations.die(pathlib.Path({str(folder)!r}), {name!r})"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}).returncode == 3


def die(folder: Path, name: str) -> None:
    trainer = make_saving(folder)
    FAILS.arm("kernel restart", _AT[name])
    _train(trainer, name)


def trained(name: str, end: str, folder: Path) -> tuple[str, bool]:
    """What becomes of `run` or `resume` that ends so; and whether it equals, continued, a run that did not end."""
    whole = make_saving(folder / "whole")
    _train(whole, "run")
    trainer = make_saving(folder / "ended")
    if end == "kernel restart":
        _die(folder / "ended", name)
        status = "lost"
    else:
        FAILS.arm(end, _AT[name])
        status = _train(trainer, name)
    if status == "paused":
        trainer.resume()
    elif status != "completed":
        trainer = make_saving(folder / "ended")
        _train(trainer, "run", resume="auto")
    FAILS.arm("done", 0)
    FAILS.is_heard = lambda state: True
    parts = ("weights", "optimizer", "objects", "counts")
    after, before = (state_of(one, loader_of()) for one in (trainer, whole))
    return status, all(same_content(after[part], before[part]) for part in parts)


_THEN = {"completed": "completed", "paused": "paused; `resume()` continues it", "interrupted": "ended, its state saved", "lost": "gone"}


def training_words(status: str, is_same: bool) -> str:
    """What a cell of the page's second table says."""
    continues = "" if status in ("completed", "paused") else '; `run(…, resume="auto")` continues it'
    return f"{_THEN[status]}{continues}, {'bit for bit' if is_same else 'otherwise'}"


def words(parts: Iterable[str]) -> str:
    """What a cell of the page's table says of the parts that have changed."""
    return ", ".join(parts) or "–"


def page() -> str:
    rows = []
    for name in OPERATIONS:
        found = {end: changed(name, end)[0] for end in ENDS}
        rows.append(f"| {name} | " + " | ".join(words(found[end]) for end in ENDS) + " |")
    checked = ", ".join(state_of(make(), loader_of()))
    trainings = []
    for name in _AT:
        with TemporaryDirectory() as folder:
            found = {end: trained(name, end, Path(folder) / str(i)) for i, end in enumerate(TRAINING_ENDS)}
        trainings.append(f"| {name} | " + " | ".join(training_words(*found[end]) for end in TRAINING_ENDS) + " |")
    return TEXT.format(rows="\n".join(rows), checked=checked, trainings="\n".join(trainings))


TEXT = """# Operations: what ■ does, and what is put back

All that takes time is an operation. It has its own mode: `trainer.mode` is what you chose for `run`, and no operation leaves it
changed. If it takes longer than a moment, it shows a line: what it is, how far it
is, and after a second the time left.

## What ■ does

- **A training pauses.** ■ in `run` and `resume` finishes the batch, and the cell ends with one line. A second ■ before it has paused
  ends the run.
- **A paused run waits until `resume()` continues it, or `stop()` or the next `run()` ends it.** That holds for a run that ■ paused and
  for one that an error paused. The record of the next run says which run was ended.
  Once a run is paused, ■ has nothing to interrupt.
- **Everything else ends.** ■ ends it with one line, without frames of libraries, and the trainer is as before. A second ■ meanwhile
  changes nothing. During a run, such as for `evaluate` while it is paused, ■ ends the operation after its batch,
  and the run stays as it is.

In a script, Ctrl-C does the same, except that a training ends after its batch.

## What is put back

The table is made by `python tests/operations.py`, which ends each operation in four ways in the middle: done, by ■, by ■ twice, and by
an error in a step. It lists what has changed afterwards. Compared are
{checked}.

| operation | done | ■ | ■ ■ | error |
| --- | --- | --- | --- | --- |
{rows}

- *loader*: a pass draws the seed of its loader, as any pass does; `lr_find` and the looks at samples read a copy. *objects*: what your
  steps count in their own attributes. The operations that call `train_step` put these back, too.
- *counts*: the batches of an evaluation count as processed batches. *history*: `evaluate` and `validate` record their metrics when they
  are done.
- After `rewind` the trainer is at the earlier place; interrupted on the way there, it is where it was.

What a step writes outside of Python, such as a file, stays. After a restart of the kernel nothing is left in memory, so that there is
nothing to put back.

## What becomes of a training

A `run`, and a `resume` after ■, end in five ways in mid-epoch. The table, made by the same command, says what becomes of it, and whether
weights, optimizer, objects and counts at its end equal those of a run that was never interrupted. The trainer has a `StateManagerAddon`,
which saves; without one, a run that was stopped or whose kernel was restarted can't [resume](../docs/resume.md).

| operation | done | ■ | ■ ■ | error | kernel restart |
| --- | --- | --- | --- | --- | --- |
{trainings}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
