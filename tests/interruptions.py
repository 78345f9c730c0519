"""Runs that are interrupted where their state changes, in each of their lives but the last, beside the run that is not.

`CHANGES` names the moments. Each life is a process; it watches what its functions return, and changes none of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from inspect import unwrap
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, FrameType
from typing import Any

import lightning as L
import torch
from children import CONTEXT
from resume_cases import LOADERS, VALID_LOADERS, Case, draw, fits, flip, outcome

from nbtrain import ConfigError, RunResult

# Where in a run its state has just changed, with the functions that have changed it: those of nbtrain's loops first, then Lightning's
CHANGES: dict[str, tuple[str, ...]] = {
    "restored": ("nbtrain.state.restore.restore", "nbtrain.state.restore.restore_kept"),
    "loader opened": ("nbtrain.data.resumable_loader.ResumableLoader._begin_pass",),
    "batch fetched": ("nbtrain.loops.fetcher.LiveFetcher.__next__", "lightning.pytorch.loops.fetchers._PrefetchDataFetcher.__next__"),
    "batch moved": ("nbtrain.loops.batch_ways.Ways.move", "lightning.pytorch.strategies.strategy.Strategy.batch_to_device"),
    "step": (  # of a training or a validation: attributes, random numbers, meters
        "nbtrain.engine.step_module.StepModule.training_step",
        "nbtrain.engine.step_module.StepModule.validation_step",
        "nbtrain.variants.wrapped_module.WrappedModule.count",
    ),
    "gradients": ("nbtrain.loops.training.TrainingWays.backward", "lightning.pytorch.loops.optimization.automatic.Closure.closure"),
    "update": (
        "nbtrain.loops.training.train_batch",
        "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization.run",
        "lightning.pytorch.loops.optimization.manual._ManualOptimization.run",
    ),
    "schedule": (
        "nbtrain.optim.resolved_schedule.Schedule.step",
        "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._update_learning_rates",
    ),
    "logged": ("nbtrain.engine.recorder_callback.RecorderCallback.on_train_batch_end",),
    "validation begun": ("nbtrain.engine.pass_module.PassModule.on_validation_start",),
    "validation ended": ("nbtrain.engine.recorder_callback.RecorderCallback.on_validation_end",),
    "epoch ended": ("nbtrain.engine.recorder_callback.RecorderCallback.on_train_epoch_end",),
    "best chosen": ("nbtrain.state.triggers.Triggers.is_best",),
    "saved": ("nbtrain.state.disk.Disk.save",),
    "finished": ("nbtrain.state.keeper.StateKeeper.on_train_end",),
}

# In a session, too
SESSION_CHANGES: dict[str, tuple[str, ...]] = {
    "round begun": ("nbtrain.tools.session.RoundMemory.begin", "nbtrain.tools.session.RoundMemory.go_back"),
    "round saved": ("nbtrain.tools.session.SavedSession.save",),
    "run begun": ("nbtrain.state.keeper.StateKeeper.on_train_start",),
}

HOWS = ("SIGKILL", "SIGTERM", "SIGINT", "error", "should_stop", "pause")
BEFORE_UPDATE = ("restored", *SESSION_CHANGES, "loader opened", "batch fetched", "batch moved", "step", "gradients")


class Boom(RuntimeError):
    pass


@dataclass(frozen=True)
class Interruption:
    """Where a life ends: at the `nth` time that the state has changed in this way, and how."""

    at: str
    nth: int
    how: str


@cache
def codes() -> dict[CodeType, str]:
    """The code of each function in CHANGES and SESSION_CHANGES, with the name of its moment."""
    # Unwrapped: a decorator of torch gives all that it decorates one code
    return {unwrap(resolve_name(place)).__code__: moment for moment, places in (CHANGES | SESSION_CHANGES).items() for place in places}


class Life(L.Callback):
    """Counts the moments of a run, and ends it at one of them. It is a callback to know Lightning's trainer."""

    def __init__(self, end: Interruption | None) -> None:
        self.end, self.trainer, self.pl_trainer = end, None, None
        self.counts: Counter[str] = Counter()

    def setup(self, pl_trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.pl_trainer = pl_trainer

    def __deepcopy__(self, memo: Any) -> Life:
        return self

    def watch(self, frame: FrameType, event: str, argument: Any) -> Any:
        """What to call where a function returns that changes the state. A trace, because a profile hears of every call in C too."""
        if frame.f_code not in codes():
            return None
        frame.f_trace_lines = False
        return self.see

    def see(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "return":
            return self.see
        moment = codes()[frame.f_code]
        self.counts[moment] += 1
        if self.end is not None and moment == self.end.at and self.counts[moment] == self.end.nth:
            sys.settrace(None)
            self.interrupt(self.end.how)
        return None

    def interrupt(self, how: str) -> None:
        if how.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[how])
        elif how == "error":
            raise Boom
        elif how == "pause":
            self.trainer.control.pause()
        elif self.pl_trainer is not None:  # it exists from the first moment on but "restored"
            self.pl_trainer.should_stop = True


def live(case: Case, folder: Path, seed: int, end: Interruption | None, report: Path) -> None:
    """One life of the run, in a process."""
    os.setpgrp()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    life = Life(end)
    trainer = life.trainer = case.make(folder, seed, callbacks=[life])
    n_epoch = 3
    if case.rewinds is not None and not any(folder.glob("run-*/checkpoints/epoch=*")):
        case.run(trainer)
        if case.branches:
            trainer = life.trainer = trainer.branch(epoch=case.rewinds)
        else:
            trainer.rewind(epoch=case.rewinds)
        n_epoch -= case.rewinds
    options = {"resume": "auto" if n_epoch == 3 else None, "background": end is not None and end.how == "pause"}
    result, cause = None, "the end"
    (threading if options["background"] else sys).settrace(life.watch)
    try:
        result = case.run(trainer, n_epoch, **options)
        if options["background"]:
            trainer.control.wait_settled()
            result = trainer.result
    except (Boom, KeyboardInterrupt, SystemExit) as error:
        cause = type(error).__name__
    finally:
        sys.settrace(None)
    if trainer.control.state == "paused":
        with suppress(ConfigError):  # within a validation, where nothing can be saved, and it says so
            trainer.save_state()
    found = {"cause": cause, "counts": life.counts}
    if result is not None and result.status == "completed":
        found["outcome"] = outcome(trainer)
    report.write_text(json.dumps(found))
    os._exit(0)  # with a paused run in another thread


def notes(folder: Path) -> list[str]:
    """What the records in `folder` say that a resume lacks, or that has changed: nothing, for what is drawn here."""
    lines = [line for path in folder.glob("run-*/events.jsonl") for line in path.read_text().splitlines()]
    texts = [event["data"]["text"] for event in map(json.loads, lines) if event["kind"] in ("note", "mark")]
    return [text for text in texts if any(word in text for word in ("not exact", "not saved", "lost", " changed"))]


def run_life(case: Case, folder: Path, seed: int, end: Interruption | None, report: Path) -> dict[str, Any]:
    """What a life has come to: its outcome, if the run is completed."""
    process = CONTEXT.Process(target=live, args=(case, folder, seed, end, report))
    process.start()
    process.join(120)
    with suppress(ProcessLookupError):  # a killed life leaves the workers of its loaders, each with half a gigabyte
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it has started
    assert process.exitcode is not None, f"stands still: {case} {end}"
    if end is not None and end.how.startswith("SIG") and process.exitcode == -signal.Signals[end.how]:  # SIGTERM: before the run has begun
        return {"cause": end.how}
    assert process.exitcode == 0, (process.exitcode, case, end)
    return json.loads(report.read_text())


def interrupted(case: Case, moments: tuple[str, ...], chance: random.Random, folder: Path) -> tuple[list[str], tuple[Interruption, ...]]:
    """Run the case to its end, and again with an interruption in a life for each of `moments`. Returns what differs, and how."""
    whole = run_life(case, folder / "whole", 1, None, folder / "whole.json")
    expected, counts, ends = whole["outcome"], Counter(whole["counts"]), []
    for n, moment in enumerate(moments):
        is_session = isinstance(case, SessionCase)
        most = 3 if is_session and moment == "restored" else max(counts[moment], 1)
        nth = 1 if chance.random() < 0.4 else chance.randint(1, most)
        hows = HOWS[:4] if is_session or moment == "restored" else HOWS  # no run has begun then, or another one follows
        ends.append(Interruption(moment, nth, chance.choice(hows)))
        seed = 7 + n if any(folder.glob("cut/run-*/checkpoints/epoch=*")) else 1
        run_life(case, folder / "cut", seed, ends[-1], folder / f"{n}.json")
        flip(case, folder / "cut")
    seed = 99 if any(folder.glob("cut/run-*/checkpoints/epoch=*")) else 1
    last = run_life(case, folder / "cut", seed, None, folder / "last.json")
    found = last["outcome"]
    return [part for part in expected if found[part] != expected[part]] + notes(folder / "cut"), tuple(ends)


@dataclass(frozen=True)
class SessionCase(Case):
    """A session of three rounds, each with `n_runs` runs, over one loader or, `anew`, over one that each run makes.

    With one run a round, a resume can't know at the second one that its loader is that of the first one, and says so.
    """

    n_runs: int = 1
    anew: bool = True

    def run(self, trainer: Any, n_epoch: int = 3, *, resume: str | None = None, background: bool = False) -> RunResult:
        """Train the session. Each round draws random numbers and reads the weights before, between and after its runs."""
        state: dict[str, Any] = {"seen": [], "noise": torch.Generator().manual_seed(3)}
        with torch.random.fork_rng():  # a script makes it with the same random numbers each time
            torch.manual_seed(5)
            loaders = [(LOADERS[self.loader](), VALID_LOADERS[self.valid]())]

        def look() -> None:
            drawn = torch.rand(1).item(), torch.rand(1, generator=state["noise"]).item(), random.random()
            trained = trainer.model.parameters() if trainer.counts.step else ()  # the first run gives them their precision
            state["seen"].append([*drawn, *(p.detach().sum().item() for p in trained)])

        with trainer.session(n_epoch, self.n_runs, state=state, resume=resume) as session:
            for _ in session:
                look()
                for _ in range(self.n_runs):
                    if self.anew:
                        loaders.append((LOADERS[self.loader](), VALID_LOADERS[self.valid]()))
                    trainer.run(1, *loaders[-1])
                    look()
        trainer.seen_in_rounds = state["seen"]
        return RunResult("completed")


def draw_interrupted(chance: random.Random) -> Case:
    """A case that goes back to an earlier epoch first, or not."""
    case = draw(chance)
    if chance.random() < 0.15:
        case = replace(case, setting="states in memory", rewinds=chance.choice([1, 2]), branches=chance.random() < 0.4)
    return case if fits(case) else draw_interrupted(chance)


def draw_session(chance: random.Random) -> tuple[SessionCase, tuple[str, ...]]:
    """A session, and where its lives end: half of them before the first update of a run."""
    case = draw(chance)
    n_runs, anew = chance.choice([(1, True), (1, True), (2, True), (2, False)])
    found = SessionCase(**vars(case), n_runs=n_runs, anew=anew)
    moments = [chance.choice(BEFORE_UPDATE if chance.random() < 0.5 else [*CHANGES]) for _ in range(chance.choice([2, 2, 3]))]
    return found, tuple(moments)


PAIRS = [(first, second) for first in CHANGES if first != "restored" for second in CHANGES]


def drawn(seed: int, *, session: bool) -> tuple[Case, tuple[str, ...], random.Random]:
    """A case, and where each of its lives but the last ends: of those that are no session, every pair of moments comes in its turn."""
    chance = random.Random(seed)
    if session:
        return *draw_session(chance), chance
    return draw_interrupted(chance), PAIRS[seed * 37 % len(PAIRS)], chance
