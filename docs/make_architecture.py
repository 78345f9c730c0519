"""Draw the packages of docs/architecture.md from tests/test_layers.py and the modules that are there; print the loop."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, PACKAGE = ROOT / "docs" / "architecture.md", ROOT / "nbtrain"
_BLOCK = re.compile(r"(?<=^<!-- packages -->\n```text\n).*?(?=^```$)", re.M | re.S)
_LOOP = re.compile(r"(?<=^<!-- loop -->\n```py\n).*?(?=^```$)", re.M | re.S)


def order() -> list[str]:
    """The packages, each after those that it may import: ALLOWED of tests/test_layers.py, read without importing it."""
    tree = ast.parse((ROOT / "tests" / "test_layers.py").read_text(encoding="utf-8"))
    table = next(node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ALLOWED")
    assert isinstance(table, ast.Dict)
    late = re.findall(r'^ALLOWED\["(\w+)"\] =', (ROOT / "tests" / "test_layers.py").read_text(encoding="utf-8"), re.M)
    return [*(ast.literal_eval(key) for key in table.keys if key is not None), *late]


def modules(package: str) -> list[str]:
    """The modules of a package by name; none for a package that is one module."""
    return sorted(path.stem for path in (PACKAGE / package).glob("*.py") if path.name != "__init__.py")


def names() -> set[str]:
    """Every package and module, with dots."""
    return {name for package in order() for name in (package, *(f"{package}.{module}" for module in modules(package)))}


def diagram(packages: list[str]) -> str:
    """A box for each package, the highest first, with its modules."""
    rows = {package: textwrap.wrap("  ".join(modules(package)), 78, break_on_hyphens=False) or [""] for package in packages}
    boxes = ["\n".join(f"│ {name if i == 0 else '':<13}│ {line:<78} │" for i, line in enumerate(lines)) for name, lines in rows.items()]
    rule = f"{'─' * 14}┼{'─' * 80}"
    return f"┌{rule.replace('┼', '┬')}┐\n" + f"\n├{rule}┤\n".join(reversed(boxes)) + f"\n└{rule.replace('┼', '┴')}┘\n"


def loop() -> str:
    """The two functions of the training loop, as they are in the file."""
    source = (PACKAGE / "loops" / "training.py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    return "\n\n\n".join(ast.get_source_segment(source, functions[name]) or "" for name in ("train_epoch", "train_batch")) + "\n"


def pages() -> dict[Path, str]:
    """The page as it should be."""
    drawn = _BLOCK.sub(lambda found: diagram(order()), PAGE.read_text(encoding="utf-8"))
    return {PAGE: _LOOP.sub(lambda found: loop(), drawn)}
