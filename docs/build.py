"""Gather the pages and build the site: `python docs/build.py [FOLDER]`. All pages for users are found, and the chapters they link to.

The pages keep the repository's layout, so that a link between them works on GitHub and on the site. Each page gets a description for
search engines and for the site's own search, of which `search_pages.py` and `style/search.js` are the two parts.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, reads, writes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import repository  # noqa: E402

NOTEBOOKS, DOCS = ROOT / "nbs", ROOT / "docs"
DOORS = {  # what the sidebar lists, in this order; pages of docs/ that no door names are in the last one
    "Get started": tuple(f"docs/{name}.md" for name in ("get_started", "life_of_a_step", "coming_from", "elsewhere", "platforms", "faq")),
    "Tutorials": ("nbs/tutorials/index.ipynb", "nbs/examples/index.ipynb"),
    "How-to": ("nbs/howto/index.ipynb", "docs/resume.md", "docs/several_processes.md"),
    "Reference": (
        "docs/reference/index.md",
        "docs/reference/trainer.md",
        "docs/reference/run_history.md",
        "docs/reference/loaders.md",
        "docs/reference/schedules.md",
        "docs/reference/addons.md",
        "docs/hooks.md",
        "docs/reference/configuration.md",
        "docs/errors.md",
        "docs/error_messages.md",
    ),
    "Inside": ("docs/architecture.md", "docs/performance.md", "docs/benchmarks.md"),
}
TITLES = {"nbs/index.ko.ipynb": "nbtrain 소개"}
CARDS = """:::{container} doors
- [**Get started**](docs/get_started.md): install, train a first model, and what you see.
- [**Tutorials**](nbs/tutorials/index.ipynb): from a first run to several GPUs, 10 to 30 minutes each.
- [**How-to**](nbs/howto/index.ipynb): one question a page, with a cell to copy.
- [**Reference**](docs/reference/index.md): every argument, addon, hook and command, with examples.
- [**Inside**](docs/architecture.md): how nbtrain is built, and what proves its claims.
:::
"""
_MOVING = re.compile(r"<picture>.*?</picture>\n?", re.S)
_LINK = re.compile(r"\[([^]]*)\]\(([^)\s#:]+\.ipynb)(#[^)]*)?\)")
_LISTED = re.compile(r"^\d+\. \[[^]]+\]\(([\w./]+)\.ipynb\)", re.M)


def gather(source: Path) -> None:
    """Write all pages as Sphinx reads them into the new folder `source`."""
    users = for_users()
    read = chapters(users)
    titles = {_title(text).lower(): path for path, text in users.items()}
    for path in [*users, *read]:
        if path.suffix == ".md":
            _write(source / path.relative_to(ROOT), linked(path.read_text(encoding="utf-8"), path, {*users, *read}, titles))
            continue
        page = as_page(_notebook(path))
        for cell in page.cells:
            if cell.cell_type == "markdown":
                cell.source = linked(cell.source, path, {*users, *read}, titles)
        _write(source / path.relative_to(ROOT), writes(as_front_page(page) if path.stem.startswith("index") else page))
    shutil.copytree(DOCS / "images", source / "docs" / "images")
    front = (source / "nbs" / "index.ipynb").read_text(encoding="utf-8").replace("../_static/", "_static/")
    _write(source / "index.ipynb", front)
    (source / "nbs" / "index.ipynb").unlink()
    _add_contents(source, read)
    _link_tutorials(source)
    _introduce_tutorials(source)
    if address := repository.address():
        _add_buttons(source, address)
    for page in [*source.rglob("*.ipynb"), *source.rglob("*.md")]:
        _describe(page)


def for_users() -> dict[Path, str]:
    """The pages for users, with their text: all but the chapters, and what maintainers do for a release."""
    folders = [NOTEBOOKS / name for name in ("howto", "tutorials", "examples")]
    notebooks = [*NOTEBOOKS.glob("index*.ipynb"), *(path for folder in folders for path in folder.glob("*.ipynb"))]
    pages = {path for path in DOCS.rglob("*.md") if path.name != "release.md"}
    return {path: path.read_text(encoding="utf-8") for path in pages} | {path: _text(_notebook(path)) for path in notebooks}


def chapters(users: dict[Path, str]) -> list[Path]:
    """The chapters that are on the site: those to which a page for users links, unless such a page has the same title."""
    found = {(path.parent / link[2]).resolve() for path, text in users.items() for link in _LINK.finditer(text)} - users.keys()
    titles = {_title(text).lower() for text in users.values()}
    return sorted(path for path in found if path.stem != "index" and title_of(path).lower() not in titles)


def linked(text: str, page: Path, on_site: set[Path], titles: dict[str, Path]) -> str:
    """The text with links to pages of the site: of another chapter the page of its title, else the file in the repository, or its words."""

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found[2]).resolve()
        if target in on_site:
            return found[0]
        if twin := titles.get(title_of(target).lower()):
            return f"[{found[1]}]({os.path.relpath(twin, page.parent)})"
        address = repository.address()
        return f"[{found[1]}]({address}/blob/main/{target.relative_to(ROOT)})" if address else found[1]

    return _LINK.sub(link, text)


def _text(notebook: NotebookNode) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def _notebook(path: Path) -> NotebookNode:
    """A notebook; the tests have validated it, which here would take most of the time."""
    return reads(path.read_text(encoding="utf-8"))


def as_page(notebook: NotebookNode) -> NotebookNode:
    """The notebook without nbdev's marks; cells that only import, in exported code, are folded."""
    cells = []
    for cell in notebook.cells:
        if {"install", "test"} & set(cell.metadata.get("tags", [])):
            continue  # for those who open the notebook elsewhere, and for our tests: nothing to copy
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
    return [index.parent / f"{name}.ipynb" for name in _LISTED.findall(_text(_notebook(index)))]


def indexes() -> list[Path]:
    """The contents page and the index of each folder of notebooks."""
    return [NOTEBOOKS / "contents.ipynb", *sorted(NOTEBOOKS.glob("*/index.ipynb"))]


def as_front_page(notebook: NotebookNode) -> NotebookNode:
    """A front page: its outputs are seen in place of README's pictures of them, and the picture in motion follows the page's theme."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"^!\[.*\n*", "", cell.source, flags=re.M)
            cell.source = _MOVING.sub(lambda found: _of_both_themes(found[0]), cell.source)
    return notebook


def _of_both_themes(picture: str) -> str:
    """README's picture in motion for a page with a switch between light and dark: of two pictures one is shown, and loaded."""
    words = re.search(r'alt="([^"]*)"', picture)
    still = '<source media="(prefers-reduced-motion: reduce)" srcset="../_static/run-{0}.png">'
    moving = '<img src="../_static/run-{0}.webp" width="688" height="562" loading="lazy" alt="{1}">'
    return "".join(
        f'<picture class="only-{theme} moving">\n{still}\n{moving}\n</picture>\n'.format(theme, words[1] if words else "")
        for theme in ("light", "dark")
    )


def _without_marks(source: str) -> tuple[list[str], str]:
    lines = source.splitlines()
    marks = [line.removeprefix("#|").strip() for line in lines if line.startswith("#|")]
    return marks, "\n".join(line for line in lines if not line.startswith("#|")).strip("\n")


def only_imports(source: str) -> bool:
    """Whether a cell only imports, for type checkers among others."""
    body = [
        inner
        for node in ast.parse(source).body
        for inner in (node.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" else [node])
    ]
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body)


def toctree(caption: str, names: Iterable[str], depth: int = 1) -> str:
    """A list of pages, which the sidebar shows below `caption`."""
    head = [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", *head, f":maxdepth: {depth}", "", *names, "```", ""])


def _add_contents(source: Path, read: list[Path]) -> None:
    """What the sidebar lists: the doors with their pages, below these the notebooks of each folder, and the chapters."""
    named = {page for pages in DOORS.values() for page in pages}
    rest = sorted(path.relative_to(source).as_posix() for path in (source / "docs").glob("*.md"))
    doors = {**DOORS, "Inside": (*DOORS["Inside"], *(page for page in rest if page not in named)), "한국어": ("nbs/index.ko.ipynb",)}
    _put(source / "index.ipynb", CARDS)
    _hide(source / "index.ipynb", source, [(caption, [source / page for page in pages]) for caption, pages in doors.items()])
    _hide(source / "docs" / "coming_from.md", source, [("", sorted((source / "docs" / "coming_from").glob("*.md")))])
    for topic in ("trainer", "run_history", "loaders", "schedules", "addons", "configuration", "errors"):
        _hide_names(source / "docs" / ("errors.md" if topic == "errors" else f"reference/{topic}.md"), source)
    _hide(source / "docs" / "architecture.md", source, [("", [source / path.relative_to(ROOT) for path in read])])
    for name in ("howto", "tutorials", "examples"):
        index = NOTEBOOKS / name / "index.ipynb"
        _hide(source / index.relative_to(ROOT), source, [("", [source / path.relative_to(ROOT) for path in listed(index)])])


def _hide_names(page: Path, source: Path) -> None:
    """Below a topic of the reference, the pages of its names."""
    reference = source / "docs" / "reference"
    linked = re.findall(r"\]\((?:reference/)?(\w+)\.md[)#]", page.read_text(encoding="utf-8"))
    own = [reference / f"{name}.md" for name in dict.fromkeys(linked) if (reference / f"{name}.md").exists()]
    topics = {f"docs/reference/{path.name}" for path in own} & {name for names in DOORS.values() for name in names}
    _hide(page, source, [("", [path for path in own if f"docs/reference/{path.name}" not in topics])])


def _hide(page: Path, source: Path, parts: list[tuple[str, list[Path]]]) -> None:
    """Add lists of pages at the end of `page` that only the sidebar shows."""
    lists = [toctree(caption, (_entry(path.relative_to(source)) for path in pages)) for caption, pages in parts]
    _append(page, "\n".join(re.sub(r"^:maxdepth", ":hidden:\n:maxdepth", text, flags=re.M) for text in lists))


def _entry(page: Path) -> str:
    """A page as a list names it, below another title where its own would not do."""
    title, name = TITLES.get(page.as_posix()), f"/{page.with_suffix('').as_posix()}"
    return f"{title} <{name}>" if title else name


def _append(page: Path, text: str) -> None:
    """Add a part at the end of a notebook or of a page of text."""
    if page.suffix == ".md":
        page.write_text(f"{page.read_text(encoding='utf-8')}\n{text}", encoding="utf-8")
        return
    notebook = _notebook(page)
    notebook.cells.append(new_markdown_cell(text))
    _write(page, writes(notebook))


def _put(page: Path, text: str) -> None:
    """Add a part below the picture in motion of the front page."""
    notebook = _notebook(page)
    before, picture, after = notebook.cells[0].source.rpartition("</picture>\n")
    notebook.cells[0].source = f"{before}{picture}\n{text}{after}"
    _write(page, writes(notebook))


def _add_buttons(source: Path, address: str) -> None:
    """Below the title of each tutorial: where to open it; last in the sidebar: the repository."""
    _append(source / "index.ipynb", toctree("Elsewhere", [f"Repository <{address}>"]).replace(":maxdepth", ":hidden:\n:maxdepth"))
    for path in listed(NOTEBOOKS / "tutorials" / "index.ipynb"):
        page = source / path.relative_to(ROOT)
        notebook = _notebook(page)
        notebook.cells[0].source += f"\n\n{repository.buttons(address, path.relative_to(ROOT).as_posix())}"
        _write(page, writes(notebook))


def _link_tutorials(source: Path) -> None:
    """At the end of each tutorial: the how-to pages that name it."""
    found: dict[str, list[str]] = {}
    for path in listed(NOTEBOOKS / "howto" / "index.ipynb"):
        text = _notebook(path).cells[-1].source
        for tutorial in re.findall(r"\(\.\./tutorials/(\w+)\.ipynb\)", text):
            found.setdefault(tutorial, []).append(f"[{title_of(path)}](../howto/{path.name})")
    for tutorial, links in found.items():
        _append(source / "nbs" / "tutorials" / f"{tutorial}.ipynb", f"How-to pages for this tutorial: {', '.join(sorted(links))}.")


def _introduce_tutorials(source: Path) -> None:
    """Below the title of each tutorial: for whom it is and how long it takes, as their index says."""
    text = _text(_notebook(NOTEBOOKS / "tutorials" / "index.ipynb"))
    for level, audience, entries in re.findall(r"^## (\w+)\n\n(For .+\.)\n\n((?:\d+\. .+\n?)+)", text, re.M):
        for name, needed, minutes in re.findall(r"\]\((\w+)\.ipynb\): .+?\. (?:(.+); )?(\d+ minutes)\.", entries):
            page = source / "nbs" / "tutorials" / f"{name}.ipynb"
            notebook = _notebook(page)
            needs = f" {needed}." if needed else ""
            notebook.cells[0].source += f"\n\n*{level}, {minutes}. {audience}{needs}*"
            _write(page, writes(notebook))


def title_of(notebook: Path) -> str:
    """The first heading of a notebook."""
    return _title(_notebook(notebook).cells[0].source)


# -- what a search finds
def description(text: str) -> str:
    """The promise of a page, or else its first sentence, in at most 160 characters; an empty text if it has no sentence."""
    body = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    body = re.sub(r"^[#|!<].*$", "", body, flags=re.M)
    promise = re.search(r"^> (.+(?:\n> .+)*)", text, re.M)
    paragraph = promise[1].replace("\n> ", " ") if promise else next((p for p in re.split(r"\n\s*\n", body) if p.strip()), "")
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    plain = re.sub(r"[`*>]|^[-\d.]+ ", "", plain).strip()
    if len(plain) <= 160:
        return plain
    sentence = re.match(r".{30,158}?[.:;](?= )", plain)
    return sentence[0] if sentence else plain[:157].rsplit(" ", 1)[0] + " …"


def _describe(page: Path) -> None:
    """Add the description to the metadata of a page. (A directive in the first cell would be parsed below 10,000 empty lines.)"""
    if page.suffix == ".md":
        text = page.read_text(encoding="utf-8")
        found = _metadata(_title(text), text)
        page.write_text(f"---\n{yaml.safe_dump(found, allow_unicode=True, width=1000)}---\n\n{text}", encoding="utf-8")
        return
    notebook = _notebook(page)
    text = _text(notebook)
    notebook.metadata |= _metadata(_title(text), text)
    _write(page, writes(notebook))


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")


def _metadata(title: str, text: str) -> dict[str, Any]:
    """What Sphinx reads of a page for search engines, and for the site's own search."""
    return {"myst": {"html_meta": {"description": description(text) or title}}}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def build(folder: Path) -> Path:
    """The site in `folder`/html, built again; CalledProcessError where there is a warning. Returns that folder."""
    shutil.rmtree(folder, ignore_errors=True)
    gather(folder / "source")
    options = [
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "--jobs",
        str(min(4, os.cpu_count() or 1)),
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
