"""Write the tables of names in docs/coming_from.md and docs/coming_from/ from `nbtrain.compat.foreign_names`: `make names`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from nbtrain.compat.foreign_names import ARGUMENTS, LIBRARIES, MEMBERS, STEPS

DOCS = Path(__file__).resolve().parent
PAGES = (DOCS / "coming_from.md", *sorted((DOCS / "coming_from").glob("*.md")))
_TABLE = re.compile(r"(<!-- names of (\w+), made by `make names` -->\n).*?(?=^$|\Z)", re.M | re.S)


def _rows(library: str) -> Iterator[str]:
    for rows, before, after in ((STEPS, "def ", ""), (MEMBERS, "", ""), (ARGUMENTS, "", "=")):
        for row in rows:
            if names := row.theirs.get(library):
                yield f"| {', '.join(f'`{before}{name}{after}`' for name in names)} | {row.say} |"


def table(library: str) -> str:
    """The names of a library as Markdown: steps, then methods and attributes, then arguments."""
    return "\n".join([f"| {LIBRARIES[library]} | nbtrain |", "| --- | --- |", *_rows(library)]) + "\n"


def page(path: Path) -> str:
    """A page as it should be."""
    return _TABLE.sub(lambda found: found[1] + table(found[2]), path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), encoding="utf-8")
