"""How Sphinx makes the site from the pages that build.py has gathered. Nothing is executed: notebooks show the outputs they keep."""

from __future__ import annotations

import gc
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
gc.set_threshold(100_000, 20, 50)  # nearly all objects are kept to the end: to look at them again and again took a fifth of a build

import make_reference  # noqa: E402
import repository  # noqa: E402
import search_pages  # noqa: E402

import nbtrain  # noqa: E402

project = html_title = "nbtrain"
author = "the authors of nbtrain"
version = release = nbtrain.__version__
extensions = ["myst_nb", "sphinx_copybutton"]

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}  # its default is on a CDN
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]  # a widget needs a kernel; what stays is HTML
nb_code_prompt_show = "{type}"
nb_code_prompt_hide = "{type}"
myst_enable_extensions = ["colon_fence", "deflist"]  # no mathematics: MathJax would come from a CDN
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["style", "images"]  # the front page shows pictures by their address
html_css_files = ["nbtrain.css"]
templates_path = ["templates"]
html_additional_pages = {"search": "search.html"}  # our own; Sphinx's index takes a word as it is written, and all words must be there
html_copy_source = html_show_copyright = False
html_theme_options: dict[str, Any] = {"navigation_with_keys": True}
if address := repository.address():
    html_baseurl = f"{repository.site(address)}/"
    icon = '<svg viewBox="0 0 16 16" width="1em" height="1em" stroke="currentColor" fill="none"><path d="M3 2h10v12H3zM3 11h10"/></svg>'
    html_theme_options["footer_icons"] = [{"name": "Repository", "url": address, "html": icon, "class": ""}]
copybutton_selector = "div.highlight:not(.cell_output *, .highlight-text *) pre"  # code, not what it prints
copybutton_exclude = ".linenos, .gp, .go"

_EXPORTS = re.compile(r"#\| default_exp ([\w.]+)")
_CALL = re.compile(r"^(?:trainer\.)?(\w+)\(.*\)$", re.S)


class LinkNames(SphinxPostTransform):
    """`Trainer`, `trainer.run(5)` or `nbtrain.events` written as code, lead to that name's entry, or to a chapter of the site."""

    default_priority = 8  # before the references are resolved

    def run(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(nodes.literal)):
            text = node.astext()
            call = _CALL.match(text)
            found = _places().get(text) or (_places().get(f"Trainer.{call[1]}") or _places().get(call[1]) if call else None)
            if found is not None and found[0] in self.env.found_docs and not _is_linked(node):
                page, part = found
                here = self.env.docname
                address = self.app.builder.get_relative_uri(here, page) if page != here else ""
                reference = nodes.reference("", "", refuri=f"{address}#{part}" if part else address or "#", internal=True)
                node.replace_self(reference)
                reference += node


@cache
def _places() -> dict[str, tuple[str, str]]:
    """What is written as code: the page that explains it, and the part of that page."""
    found = {}
    for name, entry in make_reference.entries().items():
        found[name] = f"docs/reference/{make_reference.page_of(name).removesuffix('.md')}", ""
        for member in entry.members:
            page = make_reference.page_of(f"{name}.{member.name}" if name == "Trainer" else name)
            found[f"{name}.{member.name}"] = f"docs/reference/{page.removesuffix('.md')}", nodes.make_id(f"{name}.{member.name}")
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        if exported := _EXPORTS.search(path.read_text(encoding="utf-8")):
            found[f"nbtrain.{exported[1]}"] = path.relative_to(ROOT).with_suffix("").as_posix(), ""
    return found


def _is_linked(node: nodes.Node) -> bool:
    parent = node.parent
    while parent is not None and not isinstance(parent, (nodes.reference, pending_xref, nodes.title)):
        parent = parent.parent
    return parent is not None


def fold_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Open the sidebar where the page is: all of it on every page would take most of the time of a build, and of each page's bytes."""
    if (whole := context.get("toctree")) is not None:
        context["toctree"] = lambda **options: whole(**options | {"collapse": True})


def leave_out_index(app: Sphinx) -> None:
    """Without Sphinx's own search, its index of all words and its page."""
    app.builder.search = False
    app.builder.nbtrain_pages = []


def collect_page(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """What the search knows of a page; the process of the build resolves all of them, where others write."""
    app.builder.nbtrain_pages += search_pages.records(page, app.env.titles[page].astext(), doctree)


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """What the search reads, and without the script of Sphinx's search."""
    static = Path(app.outdir) / "_static"
    (static / "search_pages.js").write_text(search_pages.script(app.builder.nbtrain_pages), encoding="utf-8")
    for name in ("searchtools.js", "language_data.js"):
        (static / name).unlink(missing_ok=True)


def use_processes(app: Sphinx, n: int) -> None:
    """Pages are written in several processes, and read in one: to hand over what another has read takes longer than to read it."""
    app.parallel = n


def setup(app: Sphinx) -> None:
    n_processes = app.parallel
    app.connect("env-before-read-docs", lambda app, env, pages: use_processes(app, 1))
    app.connect("env-updated", lambda app, env: use_processes(app, n_processes))
    app.connect("builder-inited", leave_out_index)
    app.connect("doctree-resolved", collect_page)
    app.connect("build-finished", write_pages)
    app.connect("html-page-context", fold_sidebar, priority=400)  # before the theme's
    app.add_post_transform(LinkNames)
