"""Write README.md and README.ko.md from nbs/index.ipynb and nbs/index.ko.ipynb: text and code; pictures are in place of outputs.

README.pypi.md is what an index shows, where a relative address leads nowhere. Once `[project.urls]` in pyproject.toml has the repository,
its pictures have whole addresses, and each tutorial begins with a cell that installs nbtrain where it is missing.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import repository  # noqa: E402

INSTALL = "install"  # the tag of the cell; the site leaves it out


def readme(notebook: Path = ROOT / "nbs" / "index.ipynb") -> str:
    """The notebook as Markdown; once the repository has an address, with badges and what to install."""
    cells = nbformat.read(notebook, as_version=4).cells
    text = "\n\n".join(f"```python\n{cell.source}\n```" if cell.cell_type == "code" else cell.source for cell in cells) + "\n"
    if address := repository.address():
        text = repository.installed(text.replace("\n\n", f"\n\n{repository.badges(address)}\n\n", 1), address)
    return text


def version() -> str:
    """The version that the package has, without importing it."""
    tree = ast.parse((ROOT / "nbtrain" / "__init__.py").read_text(encoding="utf-8"))
    return next(
        ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )


def with_install_cell(notebook: NotebookNode, address: str | None) -> NotebookNode:
    """The notebook with the cell that installs nbtrain from `address` below its title; without one where there is no address."""
    cells = [cell for cell in notebook.cells if INSTALL not in cell.metadata.get("tags", [])]
    if address is not None:
        cell = new_code_cell(repository.install_cell(address), id=INSTALL, metadata={"tags": [INSTALL]})
        cells.insert(1, cell)
    notebook.cells = cells
    return notebook


def pages() -> dict[Path, str]:
    """README in both languages and for an index, and the tutorials that lack the cell which installs nbtrain, or have one too many."""
    address = repository.address()
    made = {
        ROOT / name: readme(ROOT / "nbs" / notebook)
        for name, notebook in (("README.md", "index.ipynb"), ("README.ko.md", "index.ko.ipynb"))
    }
    made[ROOT / "README.pypi.md"] = repository.for_an_index(readme(), address, version())
    for path in sorted((ROOT / "nbs" / "tutorials").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        before = nbformat.writes(notebook)
        if path.stem != "index" and (now := nbformat.writes(with_install_cell(notebook, address))) != before:
            made[path] = f"{now}\n"
    return made
