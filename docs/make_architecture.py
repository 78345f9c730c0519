"""Draw the floors of docs/architecture.md from the order of modules that tests/test_layers.py holds: `make names`."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# What the modules from this one on are for
FLOORS = {
    "errors": "values",
    "views.text": "what is shown",
    "history": "what is kept",
    "batches": "data, schedules",
    "meters": "steps and loops",
    "durable": "files",
    "addons.base": "addons",
    "arguments": "the run",
    "trainer": "what you use",
}
_BLOCK = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.M | re.S)


def order() -> list[str]:
    """ORDER of tests/test_layers.py, without importing it."""
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text(encoding="utf-8"))
    (value,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORDER"]
    return ast.literal_eval(value)


def diagram(modules: list[str]) -> str:
    """The floors, the highest first. Each module stands on the floor that it, or the nearest before it in FLOORS, begins."""
    floors: dict[str, list[str]] = {}
    name = ""
    for module in modules:
        name = FLOORS.get(module, name)
        floors.setdefault(name, []).append(module)
    rows = [textwrap.wrap("  ".join(found), 78, break_on_hyphens=False) for found in floors.values()]
    boxes = [[f"│ {name if i == 0 else '':<16}│ {line:<78} │" for i, line in enumerate(lines)] for name, lines in zip(floors, rows)]
    rule = f"{'─' * 17}┼{'─' * 80}"
    lines = f"\n├{rule}┤\n".join("\n".join(box) for box in reversed(boxes))
    return f"┌{rule.replace('┼', '┬')}┐\n{lines}\n└{rule.replace('┼', '┴')}┘\n"


def page() -> str:
    """The page as it should be."""
    return _BLOCK.sub(lambda found: diagram(order()), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
