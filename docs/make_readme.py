"""Write README.md and README.ko.md from nbs/index.ipynb and nbs/index.ko.ipynb: text and code; pictures are in place of outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent


def readme(notebook: Path = ROOT / "nbs" / "index.ipynb") -> str:
    """The notebook as Markdown."""
    cells = nbformat.read(notebook, as_version=4).cells
    return "\n\n".join(f"```python\n{cell.source}\n```" if cell.cell_type == "code" else cell.source for cell in cells) + "\n"


if __name__ == "__main__":
    for name, notebook in (("README.md", "index.ipynb"), ("README.ko.md", "index.ko.ipynb")):
        (ROOT / name).write_text(readme(ROOT / "nbs" / notebook), encoding="utf-8")
