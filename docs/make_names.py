"""Write docs/names.md: every public name by topic, with its first line, and the methods of Trainer. `make names`."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Iterator
from pathlib import Path

import nbtrain

ROOT = Path(__file__).resolve().parent.parent
_REFERENCE = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))  # the same topics as in the reference


def _line(name: str, thing: object, page: str) -> str:
    return f"- [`{name}`](reference/{page}): {(inspect.getdoc(thing) or '').partition(chr(10))[0]}"


def _members() -> Iterator[str]:
    """A line for each public method and property of a trainer."""
    for member in _REFERENCE["entries"]()["Trainer"].members:
        yield _line(member.name, member.thing, _REFERENCE["page_of"](f"Trainer.{member.name}"))


def names() -> str:
    """The page as Markdown."""
    by_topic: dict[str | None, list[str]] = {}
    for name in sorted(nbtrain.PUBLIC, key=lambda name: (name != "Trainer", name)):
        page = _REFERENCE["page_of"](name)
        by_topic.setdefault(_REFERENCE["topic_of"](name), []).append(_line(name, getattr(nbtrain, name), page))
    lines = ["# Public names", "", _REFERENCE["MADE"], "", "All names that you import from `nbtrain`, by topic."]
    for topic, (title, _, _) in _REFERENCE["TOPICS"].items():
        lines += ["", f"## {title}", "", f"Details: [{title}](reference/{topic}.md).", "", *by_topic[topic]]
    lines += ["", "## Errors", "", "Details: [Errors and what to do](errors.md).", "", *by_topic[None]]
    return "\n".join([*lines, "", "## Methods of a trainer", "", *_members()]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "names.md").write_text(names(), encoding="utf-8")
