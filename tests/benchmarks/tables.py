"""Figures against bounds, and the Markdown that shows them."""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from measure import Outcome


@dataclass(frozen=True)
class Claim:
    """A figure and its bound, shown as "1.00 × (bound 1.10)"."""

    text: str  # with a place for the figure: "{:.2f} ×"
    value: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound  # nan is neither

    def __str__(self) -> str:
        figure = "not measured" if math.isnan(self.value) else self.text.format(self.value)
        place = re.search("{.*?}", self.text) if self.bound % 1 else None  # a bound has as many digits as its figure
        bound = place[0].replace("+", "").format(self.bound) if place else f"{self.bound:.0f}"
        limits = f"{'at least' if self.at_least else 'bound'} {bound}"
        return f"{figure} ({limits})" if self.met else f"**{figure} ({limits}: missed)**"


@dataclass(frozen=True)
class Row:
    """A line of a table: its cells, some of which may be claims. `bar` is drawn; `claims` are listed below the table."""

    cells: tuple[str | Claim, ...]
    claims: tuple[Claim, ...] = ()
    bar: float | None = None

    @property
    def all_claims(self) -> tuple[Claim, ...]:
        return (*(cell for cell in self.cells if isinstance(cell, Claim)), *self.claims)


BAR_LENGTH = 20


def drawn(value: float, longest: float) -> str:
    """A bar of block characters, which are text everywhere: BAR_LENGTH of them for `longest`."""
    eighths = round(max(value, 0) / longest * BAR_LENGTH * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip() or "▏"


@dataclass(frozen=True)
class Table:
    """What a benchmark found. `says` is the sentence above it: what it shows, and the result."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""
    says: str = ""

    @property
    def met(self) -> bool:
        return all(claim.met for row in self.rows for claim in row.all_claims)

    def __str__(self) -> str:
        below = "\n".join(f"- {row.cells[0]}: {claim}" for row in self.rows for claim in row.claims)
        return "\n\n".join(part for part in (f"## {self.title}", self.says, self._grid(), below, self.note) if part)

    def _grid(self) -> str:
        bars = [row.bar for row in self.rows if row.bar is not None]
        lines = [
            self._line(self.columns, "" if bars else None),
            self._line(("---", *["---:"] * (len(self.columns) - 1)), "---" if bars else None),
        ]
        for row in self.rows:
            cells = (*map(str, row.cells), *[""] * (len(self.columns) - len(row.cells)))
            bar = "" if row.bar is None or math.isnan(row.bar) else drawn(row.bar, max(bars))
            lines.append(self._line(cells, bar if bars else None))
        return "\n".join(lines)

    def _line(self, cells: Iterable[str], bar: str | None) -> str:
        first, *others = cells
        return "| " + " | ".join([first, *([] if bar is None else [bar]), *others]) + " |"


DUEL_COLUMNS = ("tool", "µs a step", "of the plain loop", "over it", "with its set-up")


def duel_row(outcome: Outcome, further: Iterable[Claim] = ()) -> Row:
    """The figures of a duel, its bounds, and what is claimed further. A duel that could not be played misses its bounds."""
    name, duel = outcome.duel.name, outcome.duel
    ratio = Claim("{:.2f} ×", outcome.ratio, duel.max_ratio) if duel.max_ratio is not None else f"{outcome.ratio:.2f} ×"
    over = Claim("{:+.0f} µs", outcome.over_us, duel.max_over_us) if duel.max_over_us is not None else f"{outcome.over_us:+.0f} µs"
    if not outcome.rounds:
        return Row((name, outcome.error), (*(claim for claim in (ratio, over) if isinstance(claim, Claim)), *further))
    name += f" ({outcome.weights})" if outcome.weights != "equal" else ""
    return Row((name, f"{outcome.step_us:.0f}", ratio, over, f"{outcome.wall_ratio:.2f} ×"), tuple(further), outcome.ratio)


def less_than(ours: Outcome, other: Outcome | None, factor: float) -> list[Claim]:
    """`ours` is at least `factor` times less over the base than `other`; nothing is claimed where that is not there.

    Less than 1 µs counts as 1 µs.
    """
    if other is None or not other.rounds:
        return []
    value = other.over_us / max(ours.over_us, 1.0)
    return [Claim(f"{{:,.0f}} times less overhead than {other.duel.name}", value, factor, at_least=True)]


def ratios(outcomes: Iterable[Outcome], *names: str) -> str:
    """What these tools take of their base's time, in words; those that were not there are left out."""
    found = {outcome.duel.name: outcome.ratio for outcome in outcomes if outcome.rounds}
    return ", ".join(f"{name} {found[name]:.2f} ×" for name in names if name in found)


def by_ratio(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The fastest first; at the end those that could not be played."""
    return sorted(outcomes, key=lambda outcome: outcome.ratio if outcome.rounds else math.inf)


def duel_table(title: str, outcomes: Iterable[Outcome], note: str = "", says: str = "") -> Table:
    """A table of duels without further claims, the fastest first."""
    return Table(title, DUEL_COLUMNS, tuple(map(duel_row, by_ratio(outcomes))), note, says)


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
