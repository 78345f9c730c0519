"""Contenders against their base, in turns: how a figure comes about, and what could make it unfair.

Each tool has a process of its own, in which it and its base (mostly the plain loop) run alternately; rounds go over all processes in
turn. So a tool that patches torch, fills the heap or starts threads slows its own plain loop too, and nobody else's; and all figures
are from one stretch of time. The ratio of each round is taken within the process; the table shows the median over rounds. The row
"plain loop again" is the plain loop against itself: what it is off by is the noise.

- The machine is shared, so the clock is CPU time of the process, all threads included. Waiting for a lock or a disk is not seen; the
  column of wall time has it, and has the neighbours too.
- A window is 100 steps. The first 200 steps and the end of the epoch count in "whole call" only. "µs a step" is the window at the
  20th percentile. What is done a few times a second may fall into other windows, so the mean over all windows is shown beside it.
- Garbage is collected before each call, and the collector stays on. The heap is the same for tool and base.
- Everybody writes to a terminal (a pty that somebody reads), because some bars show themselves only there.
- One thread for torch. Warnings and Lightning's log lines are off; they come once a call.
- The clock's tick costs 0.1 µs and is in every forward.
- Before the first round both sides train 20 steps, which also imports everything: their weights must be equal, bit for bit, or
  the contender says why they can't be, and their loss and accuracy must then be near.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import pty
import struct
import sys
import tempfile
import termios
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from contenders import plain
from workload import Job, Sample, Trained

Contender = Callable[[Job], Trained]


@dataclass(frozen=True)
class Duel:
    """A contender and what it is held against."""

    name: str
    tool: Contender
    base: Contender = plain
    own_way: str = ""  # why its weights can't be the base's
    max_ratio: float | None = None  # to the base
    max_over_us: float | None = None  # the base
    steady: bool = True  # compare the 20th percentile; else the mean, where an epoch has parts of different kinds
    terminal: bool = True  # else its output goes to a file
    every: int = 1  # plays in each round, or in every third: those that are far from any bound
    n_steps: int = 2000
    n_epochs: int = 1


@dataclass(frozen=True)
class Outcome:
    """What came out of a duel: (base, tool) by round, or the error that kept it from being played."""

    duel: Duel
    weights: str = ""
    rounds: tuple[tuple[Sample, Sample], ...] = ()
    error: str = ""

    def median(self, value: Callable[[Sample, Sample], float]) -> float:
        """The median over rounds of what `value` makes of base and tool; nan where there was no round."""
        return median(value(base, tool) for base, tool in self.rounds) if self.rounds else float("nan")

    def _us(self, sample: Sample) -> float:
        return sample.step_us if self.duel.steady else sample.mean_us

    @property
    def base_us(self) -> float:
        return self.median(lambda base, tool: self._us(base))

    @property
    def step_us(self) -> float:
        return self.median(lambda base, tool: self._us(tool))

    @property
    def over_us(self) -> float:
        return self.median(lambda base, tool: self._us(tool) - self._us(base))

    @property
    def ratio(self) -> float:
        return self.median(lambda base, tool: self._us(tool) / self._us(base))

    @property
    def mean_over_us(self) -> float:
        return self.median(lambda base, tool: tool.mean_us - base.mean_us)

    @property
    def wall_ratio(self) -> float:
        return self.median(lambda base, tool: tool.wall_s / base.wall_s)


def same_work(duel: Duel, job: Job) -> str:
    """Lets both sides train 20 steps. Returns how their weights compare; raises AssertionError where the work differs."""
    base, tool = duel.base(job.short()), duel.tool(job.short())
    differ = abs(base.loss - tool.loss), abs(base.accuracy - tool.accuracy)
    if not duel.own_way:
        assert equal_weights(base, tool), f"{duel.name} ends with other weights than its base"
        assert not any(difference > 0.01 for difference in differ), (
            f"{duel.name} tracks other metrics than its base: {differ}"
        )  # fastai smooths
        return "equal"
    assert not any(difference > 0.2 for difference in differ), f"{duel.name} does not learn what its base learns: {differ}"
    return duel.own_way


def equal_weights(a: Trained, b: Trained) -> bool:
    """Equal bit for bit? Names may differ: a tool may wrap the model."""
    assert a.model is not None and b.model is not None
    left, right = list(a.model.state_dict().values()), list(b.model.state_dict().values())
    return len(left) == len(right) and all(map(torch.equal, left, right))


def sample(contender: Contender, job: Job) -> Sample:
    """One measured call."""
    gc.collect()
    job.clock.start()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    contender(job)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return replace(job.clock.sample(), cpu_s=cpu_s, wall_s=wall_s)


def one_round(duel: Duel, job: Job, i: int) -> tuple[Sample, Sample]:
    """Base and tool; in odd rounds the tool goes first."""
    if i % 2:
        after = sample(duel.tool, job)
        return sample(duel.base, job), after
    return sample(duel.base, job), sample(duel.tool, job)


class Player(Protocol):
    """Where a duel is played: a process or a kernel. `weights` is what `same_work` said."""

    weights: str

    def play(self, i: int) -> tuple[Sample, Sample]: ...
    def close(self) -> None: ...


class Process:
    """A process for one duel. Raises RuntimeError with the child's words where it fails."""

    def __init__(self, duel: Duel, terminal: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(duel, theirs, terminal if duel.terminal else os.devnull), daemon=True)
        self._process.start()
        theirs.close()
        self.weights: str = self._answer()

    def play(self, i: int) -> tuple[Sample, Sample]:
        self._connection.send(i)
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"its process ended with {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def settle(output: str) -> None:
    """Make this process one that measures: what it prints goes to `output`, it warns of nothing, and torch has one thread."""
    out = os.open(output, os.O_WRONLY | os.O_NOCTTY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.pop("CI", None)  # with it nbtrain takes a terminal for a log
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def _serve(duel: Duel, connection: Connection, output: str) -> None:
    """The other side of `Process`: answers with the comparison of weights, then with a round for each number."""
    settle(output)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), duel.n_steps, duel.n_epochs)
        try:
            connection.send(same_work(duel, job))
            while True:
                connection.send(one_round(duel, job, connection.recv()))
        except EOFError:
            return
        except Exception as error:
            connection.send(RuntimeError("".join(traceback.format_exception_only(error)).strip()))


@contextlib.contextmanager
def terminal() -> Iterator[str]:
    """The path of a terminal of 24 lines and 100 columns, whose output is read and dropped."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))

    def drain() -> None:
        with contextlib.suppress(OSError):  # the terminal is closed
            while os.read(master, 65536):
                pass

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        yield os.ttyname(slave)
    finally:
        os.close(slave)
        reader.join()
        os.close(master)


def chosen(duels: Iterable[Duel], only: set[str]) -> list[Duel]:
    """The duels of these names; all without any."""
    return [duel for duel in duels if not only or duel.name in only]


def play(duels: Iterable[Duel], n_rounds: int, open_player: Callable[[Duel, str], Player] = Process) -> list[Outcome]:
    """All duels, round by round."""
    players: dict[str, Player] = {}
    outcomes: dict[str, Outcome] = {}
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(terminal())
        for duel in duels:
            _say(f"{duel.name}: starts")
            try:
                players[duel.name] = stack.enter_context(contextlib.closing(open_player(duel, path)))
                outcomes[duel.name] = Outcome(duel, players[duel.name].weights)
            except RuntimeError as error:
                outcomes[duel.name] = Outcome(duel, error=" ".join(str(error).split()))
        for i in range(n_rounds):
            for name, player in players.items():
                if i % outcomes[name].duel.every == 0:
                    _say(f"round {i + 1}/{n_rounds}: {name}")
                    outcomes[name] = replace(outcomes[name], rounds=(*outcomes[name].rounds, player.play(i)))
    _say("")
    return list(outcomes.values())


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
