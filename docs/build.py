"""Gather the pages and build the site: `python docs/build.py [FOLDER]`. Chapters, tutorials, pages and modules are found, not listed.

The pages keep the repository's layout, so that a link between them works on GitHub and on the site.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS, DOCS, PACKAGE = ROOT / "nbs", ROOT / "docs", ROOT / "nbtrain"
FIRST = ("resume", "hooks", "errors", "elsewhere", "performance", "benchmarks", "coming_from", "faq", "architecture")  # the rest by name
_LISTED = re.compile(r"^\d+\. \[[^]]+\]\(([\w./]+)\.ipynb\)", re.M)


def gather(source: Path) -> None:
    """Write all pages as Sphinx reads them into the new folder `source`."""
    notebooks = [p for p in NOTEBOOKS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    for path in notebooks:
        page = as_page(nbformat.read(path, as_version=4))
        _write(source / path.relative_to(ROOT), nbformat.writes(without_pictures(page) if path.stem.startswith("index") else page))
    shutil.copytree(DOCS / "images", source / "docs" / "images")
    for path in DOCS.glob("*.md"):
        _write(source / "docs" / path.name, path.read_text(encoding="utf-8"))
    modules = [module_name(p) for p in PACKAGE.rglob("*.py") if p.name not in ("__init__.py", "_modidx.py")]
    for module in modules:
        _write(source / "api" / f"{module}.md", _module_page(module))
    _write(source / "api" / "index.md", "# API\n\n" + toctree("", modules))
    _write(source / "index.ipynb", (source / "nbs" / "index.ipynb").read_text(encoding="utf-8"))
    (source / "nbs" / "index.ipynb").unlink()
    _add_contents(source)


def as_page(notebook: NotebookNode) -> NotebookNode:
    """The notebook without nbdev's marks; cells that only import, in exported code, are folded."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            marks, source = _without_marks(cell.source)
            if not source:
                continue
            cell.source = source
            if any(mark.startswith("export") for mark in marks) and only_imports(source):
                cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]
                cell.metadata["mystnb"] = {"code_prompt_show": "Imports", "code_prompt_hide": "Imports"}
        cells.append(cell)
    notebook.cells = cells
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}  # it knows %%bash
    return notebook


def listed(index: Path) -> list[Path]:
    """The notebooks that an index lists, in its order."""
    text = "\n\n".join(cell.source for cell in nbformat.read(index, as_version=4).cells if cell.cell_type == "markdown")
    return [index.parent / f"{name}.ipynb" for name in _LISTED.findall(text)]


def indexes() -> list[Path]:
    """The contents page and the index of each folder of notebooks."""
    return [NOTEBOOKS / "contents.ipynb", *sorted(NOTEBOOKS.glob("*/index.ipynb"))]


def without_pictures(notebook: NotebookNode) -> NotebookNode:
    """A front page whose outputs are seen themselves, in place of README's pictures of them."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"^!\[.*\n*", "", cell.source, flags=re.M)
    return notebook


def _without_marks(source: str) -> tuple[list[str], str]:
    lines = source.splitlines()
    marks = [line.removeprefix("#|").strip() for line in lines if line.startswith("#|")]
    return marks, "\n".join(line for line in lines if not line.startswith("#|")).strip("\n")


def only_imports(source: str) -> bool:
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body)


def module_name(path: Path) -> str:
    """`addons.state` for nbtrain/addons/state.py."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def _module_page(module: str) -> str:
    full = f"nbtrain.{module}"
    return f"# {module}\n\n```{{eval-rst}}\n.. automodule:: {full}\n   :members:\n```\n"


def toctree(caption: str, names: Iterable[str], depth: int = 1) -> str:
    """A list of pages, which the sidebar shows below `caption`."""
    head = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", *head, f":maxdepth: {depth}", "", *names, "```", ""])


def _add_contents(source: Path) -> None:
    """What the sidebar lists: folders of notebooks, pages, the parts with their chapters, modules."""
    parts = [
        (caption, [source / "nbs" / folder / "index.ipynb"]) for caption, folder in (("Tutorials", "tutorials"), ("Examples", "examples"))
    ]
    parts += [("Guides", sorted((source / "docs").glob("*.md"), key=_place))]
    parts += [("How it is built", [source / "nbs" / "contents.ipynb"])]
    parts += [("한국어", [source / "nbs" / "index.ko.ipynb"])]
    parts += [("Reference", [source / "api" / "index.md"])]
    _hide(source / "index.ipynb", source, parts)
    for index in indexes():
        pages = [source / path.relative_to(ROOT) for path in listed(index)]
        own = [path for path in pages if path != source / "nbs" / "examples" / "index.ipynb"]  # which the front page lists
        _hide(source / index.relative_to(ROOT), source, [("", own)])


def _hide(page: Path, source: Path, parts: list[tuple[str, list[Path]]]) -> None:
    """Add lists of pages at the end of `page` that only the sidebar shows."""
    lists = [toctree(caption, (f"/{p.relative_to(source).with_suffix('').as_posix()}" for p in pages)) for caption, pages in parts]
    notebook = nbformat.read(page, as_version=4)
    hidden = [re.sub(r"^:maxdepth", ":hidden:\n:maxdepth", text, flags=re.M) for text in lists]
    notebook.cells.append(new_markdown_cell("\n".join(hidden)))
    nbformat.write(notebook, page)


def _place(path: Path) -> tuple[int, str]:
    return FIRST.index(path.stem) if path.stem in FIRST else len(FIRST), path.stem


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def build(folder: Path) -> Path:
    """The site in `folder`/html, made anew; CalledProcessError where there is a warning. Returns that folder."""
    shutil.rmtree(folder, ignore_errors=True)
    gather(folder / "source")
    options = [
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "--builder",
        "html",
        "--conf-dir",
        DOCS,
        "--doctree-dir",
        folder / "doctrees",
    ]
    subprocess.run([sys.executable, "-m", "sphinx", *options, folder / "source", folder / "html"], check=True)
    return folder / "html"


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "_site") / "index.html")
