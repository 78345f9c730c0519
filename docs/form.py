"""Bring notebooks, tests and package into their one form, and export the notebooks that are newer than their modules: `make format`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from nbdev.export import nb_export

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
_EXPORTS = re.compile(r"#\| default_exp ([\w.]+)")


def changed(root: Path = ROOT) -> dict[Path, Path]:
    """The notebooks that are newer than the module that they export, each with that."""
    found = {}
    for path in sorted((root / "nbs").rglob("*.ipynb")):
        if exported := _EXPORTS.search(path.read_text(encoding="utf-8")):
            module = root / "nbtrain" / f"{exported[1].replace('.', '/')}.py"
            if not module.exists() or path.stat().st_mtime > module.stat().st_mtime:
                found[path] = module
    return found


def _run(program: str, *arguments: str | Path) -> None:
    subprocess.run([BIN / program, *arguments], check=True, cwd=ROOT)


def main() -> None:
    _run("ruff", "format", "--quiet", "nbs", "tests", "docs")
    _run("nbdev-clean")  # writes only what it changes
    exported = changed()
    for path in exported:
        nb_export(path, ROOT / "nbtrain")
    if exported:
        _run("ruff", "format", "--quiet", *exported.values())
    for module in exported.values():
        print("exported", module.relative_to(ROOT))


if __name__ == "__main__":
    main()
