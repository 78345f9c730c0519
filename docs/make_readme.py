"""Write README.md from nbs/index.ipynb: text and code as they are, outputs left out (the picture shows them)."""

from __future__ import annotations

from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent


def readme(notebook: Path = ROOT / "nbs" / "index.ipynb") -> str:
    """The notebook as Markdown."""
    cells = nbformat.read(notebook, as_version=4).cells
    return "\n\n".join(f"```python\n{cell.source}\n```" if cell.cell_type == "code" else cell.source for cell in cells) + "\n"


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
