"""Write docs/names.md: every public name with its first line, and the methods of Trainer. `make names`."""

from __future__ import annotations

import inspect
from pathlib import Path

import nbtrain

ROOT = Path(__file__).resolve().parent.parent


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def names() -> str:
    """The page as Markdown."""
    lines = ["# Public names", "", "Made by `make names` from the docstrings.", "", "## nbtrain", ""]
    lines += [f"- `{name}`: {_first_line(getattr(nbtrain, name))}" for name in sorted(nbtrain.PUBLIC)]
    lines += ["", "## Trainer", ""]
    members = inspect.getmembers_static(nbtrain.Trainer) if hasattr(inspect, "getmembers_static") else inspect.getmembers(nbtrain.Trainer)
    for name, member in members:
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, (property, classmethod))):
            lines.append(f"- `{name}`: {_first_line(getattr(member, '__func__', member))}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "names.md").write_text(names(), encoding="utf-8")
