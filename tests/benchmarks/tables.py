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


def duel_row(outcome: Outcome, further: Iterable[Claim] = (), aim_ratio: float | None = None, aim_us: float | None = None) -> Row:
    """The figures of a duel, its bounds, and what is claimed further. A duel that could not be played misses its bounds."""
    name, duel = outcome.duel.name, outcome.duel
    claims = [Claim("≤ {}×", outcome.ratio, duel.max_ratio, aim_ratio)] if duel.max_ratio is not None else []
    claims += [Claim("≤ {} µs over", outcome.over_us, duel.max_over_us, aim_us)] if duel.max_over_us is not None else []
    claims += further
    if not outcome.rounds:
        return Row((name, outcome.error), tuple(claims))
    figures = f"{outcome.step_us:.0f}", f"{outcome.base_us:.0f}", f"{outcome.over_us:+.0f}", f"{outcome.ratio:.2f}"
    return Row((name, *figures, f"{outcome.mean_over_us:+.0f}", f"{outcome.wall_ratio:.2f}", outcome.weights), tuple(claims))


def less_than(ours: Outcome, other: Outcome | None, factor: float) -> list[Claim]:
    """`ours` is at least `factor` times less over the base than `other`; nothing is claimed where that is not there."""
    if other is None or not other.rounds:
        return []
    value = other.over_us / max(ours.over_us, 1.0)
    return [Claim(f"{other.duel.name}'s overhead ≥ {{}}×", value, factor, at_least=True)]


def duel_table(title: str, outcomes: Iterable[Outcome], note: str = "") -> Table:
    """A table of duels without further claims."""
    return Table(title, DUEL_COLUMNS, tuple(map(duel_row, outcomes)), note)


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
