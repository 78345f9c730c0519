"""Figures against bounds, and the Markdown that shows them."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from measure import Outcome


@dataclass(frozen=True)
class Claim:
    """A figure and its bound. `aim` is what we want beyond the bound."""

    text: str  # with a place for the bound: "≤ {}×"
    value: float
    bound: float
    aim: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self._within(self.bound)

    def _within(self, bound: float) -> bool:
        return self.value >= bound if self.at_least else self.value <= bound  # nan is neither

    def __str__(self) -> str:
        return self.text.format(f"{self.bound:g}")

    @property
    def verdict(self) -> str:
        if not self.met:
            return f"NO: {self.value:.3g}"
        return "yes" if self.aim is None else "yes, aim too" if self._within(self.aim) else f"yes, aim {self.aim:g} not"


@dataclass(frozen=True)
class Row:
    """A line of a table: its cells, and what is claimed of it."""

    cells: tuple[str, ...]
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def met(self) -> bool:
        return all(claim.met for row in self.rows for claim in row.claims)

    def __str__(self) -> str:
        columns = (*self.columns, "bound", "met")
        lines = [columns, ("---",) + ("---:",) * (len(self.columns) - 1) + ("---", "---")]
        for row in self.rows:
            bounds, verdicts = "; ".join(map(str, row.claims)), "; ".join(claim.verdict for claim in row.claims)
            lines.append((*row.cells, *[""] * (len(self.columns) - len(row.cells)), bounds, verdicts))
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join(part for part in (f"## {self.title}", text, self.note) if part)


DUEL_COLUMNS = ("tool", "µs a step", "base", "µs over", "ratio", "mean: µs over", "whole call, wall", "weights")


def duel_row(outcome: Outcome, claims: Iterable[Claim] = ()) -> Row:
    """The figures of a duel. One that could not be played misses what is claimed of it."""
    name = outcome.duel.name
    if not outcome.rounds:
        return Row((name, f"not there: {outcome.error.splitlines()[-1] if outcome.error else 'no round'}"), tuple(claims))
    figures = f"{outcome.step_us:.0f}", f"{outcome.base_us:.0f}", f"{outcome.over_us:+.0f}", f"{outcome.ratio:.2f}"
    return Row((name, *figures, f"{outcome.mean_over_us:+.0f}", f"{outcome.wall_ratio:.2f}", outcome.weights), tuple(claims))


def at_most(outcome: Outcome, *, ratio: float | None = None, over_us: float | None = None, aims: bool = False) -> list[Claim]:
    """Bounds of the ratio to the base and of the µs over it; `aims` are those of the training step."""
    claims = []
    if ratio is not None:
        claims.append(Claim("≤ {}×", outcome.ratio if outcome.rounds else float("nan"), ratio, 1.08 if aims else None))
    if over_us is not None:
        claims.append(Claim("≤ {} µs over", outcome.over_us if outcome.rounds else float("nan"), over_us, 30 if aims else None))
    return claims


def less_than(ours: Outcome, other: Outcome | None, factor: float) -> list[Claim]:
    """`ours` is at least `factor` times less over the plain loop than `other`; nothing is claimed where that is not there."""
    if other is None or not other.rounds:
        return []
    value = other.over_us / max(ours.over_us, 1.0) if ours.rounds else float("nan")
    return [Claim(f"{other.duel.name}'s overhead ≥ {{}}×", value, factor, at_least=True)]


def facts() -> str:
    """The machine and the versions, in a line."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    packages = "torch", "lightning", "accelerate", "transformers", "fastai", "keras", "pytorch-ignite", "skorch", "tqdm"
    return f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, " + ", ".join(filter(None, map(_version, packages)))


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def main(make: Callable[[int, set[str]], Table], n_rounds: int) -> None:
    """The command of a benchmark: print its table; the exit code is 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--rounds", type=int, default=n_rounds)
    parser.add_argument("--only", type=lambda text: set(text.split(",")), default=set(), help="names of rows, with commas between")
    arguments = parser.parse_args()
    table = make(arguments.rounds, arguments.only)
    print(f"{table}\n\n{facts()}")
    sys.exit(not table.met)
