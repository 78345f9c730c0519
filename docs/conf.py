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
from sphinx.domains.python import ObjectEntry, PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
gc.set_threshold(100_000, 20, 50)  # nearly all objects are kept to the end: to look at them again and again took a fifth of a build

import repository  # noqa: E402
import search_pages  # noqa: E402

import nbtrain  # noqa: E402

project = html_title = "nbtrain"
author = "the authors of nbtrain"
version = release = nbtrain.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.linkcode", "sphinx_copybutton"]

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}  # its default is on a CDN
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]  # a widget needs a kernel; what stays is HTML
nb_code_prompt_show = "{type}"
nb_code_prompt_hide = "{type}"
myst_enable_extensions = ["colon_fence", "deflist"]  # no mathematics: MathJax would come from a CDN
myst_heading_anchors = 3
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # those of Lightning and torch belong to their own pages
napoleon_google_docstring = True
napoleon_custom_sections = ["Changes"]
napoleon_use_ivar = True  # attributes as a list: many are properties, too, which have an entry
suppress_warnings = ["ref.python"]  # one name in two modules, as an annotation

html_theme = "furo"
html_static_path = ["style", "images"]  # the front page shows pictures by their address
html_css_files = ["nbtrain.css"]
templates_path = ["templates"]
html_additional_pages = {"search": "search.html"}  # our own; Sphinx's index takes a word as it is written, and all words must be there
html_copy_source = html_show_copyright = False
html_theme_options: dict[str, Any] = {"navigation_with_keys": True}
if address := repository.address():
    icon = '<svg viewBox="0 0 16 16" width="1em" height="1em" stroke="currentColor" fill="none"><path d="M3 2h10v12H3zM3 11h10"/></svg>'
    html_theme_options["footer_icons"] = [{"name": "Repository", "url": address, "html": icon, "class": ""}]
copybutton_selector = "div.highlight:not(.cell_output *, .highlight-text *) pre"  # code, not what it prints
copybutton_exclude = ".linenos, .gp, .go"

_EXPORTS = re.compile(r"#\| default_exp ([\w.]+)")
_SPAN = re.compile(r"(`+)(.+?)\1")
_CALL = re.compile(r"^(?:trainer\.)?(\w+)\(.*\)$", re.S)


@cache
def _chapters() -> dict[str, str]:
    """The page of the notebook that exports each module, seen from the pages in api/."""
    found = {}
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        if exported := _EXPORTS.search(path.read_text(encoding="utf-8")):
            found[f"nbtrain.{exported[1]}"] = f"../{path.relative_to(ROOT).with_suffix('').as_posix()}.html"
    return found


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """[source] leads to the chapter that a thing is written in."""
    return _chapters().get(info["module"])


def docstring_as_rst(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Our docstrings have Markdown's `code`, and stars and bars that mean nothing."""
    end = next((i for i, line in enumerate(lines) if line == "Example:"), len(lines))  # code from there on
    parts = _SPAN.split("\n".join(lines[:end]))  # text, ticks, code, text, ticks, code, …, text
    made = [_prose(part) if i % 3 == 0 else f"\\ ``{part}``\\ " for i, part in enumerate(parts) if i % 3 != 1]
    lines[:end] = "".join(made).split("\n")


def _prose(text: str) -> str:
    return re.sub(r"([*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", text)


class LinkNames(SphinxPostTransform):
    """`Trainer`, `trainer.run(5)` or `nbtrain.events` written as code, on any page, lead to that name's entry."""

    default_priority = 8  # before the references are resolved

    def run(self, **kwargs: Any) -> None:
        names = _names(self.env)
        for node in list(self.document.findall(nodes.literal)):
            text = node.astext()
            call = _CALL.match(text)
            target = names.get(text) or (names.get(f"Trainer.{call[1]}") or names.get(call[1]) if call else None)
            if target is not None and not _is_linked(node):
                _link(node, target, self.env.docname)


def _names(env: Any) -> dict[str, str]:
    """What names are called in full, found once for all pages."""
    if not hasattr(env, "nbtrain_names"):
        env.nbtrain_names = _find_names(env)
    return env.nbtrain_names


def _find_names(env: Any) -> dict[str, str]:
    """What names are called in full: the public ones, `Class.method` of all classes, modules, and other classes and functions if unique."""
    found = {name: f"nbtrain.{module}.{name}" for name, module in nbtrain.PUBLIC.items()}
    for base in nbtrain.Trainer.__mro__:  # its methods stand in the small classes that it is made of
        if base.__module__.startswith("nbtrain."):
            for name in vars(base):
                found.setdefault(f"Trainer.{name}", f"{base.__module__}.{base.__qualname__}.{name}")
    doubled = set()
    for full, entry in env.get_domain("py").objects.items():
        if entry.objtype == "module":
            found[full] = full
            continue
        parts = full.removeprefix("nbtrain.").split(".")
        at = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
        short = ".".join(parts[at:])
        if found.setdefault(short, full) != full:
            doubled.add(short)
    return {name: full for name, full in found.items() if name in nbtrain.PUBLIC or name not in doubled}


class QuickPythonDomain(PythonDomain):
    """Sphinx's, which looks for each `int` and `str` of a signature through the names of all objects."""

    _last_parts: tuple[int, set[str]] = (0, set())

    def find_obj(
        self, env: BuildEnvironment, modname: str, classname: str, name: str, type: str | None, searchmode: int = 0
    ) -> list[tuple[str, ObjectEntry]]:
        n, known = self._last_parts
        if n != len(self.objects):
            known = {full.rpartition(".")[2] for full in self.objects}
            self._last_parts = len(self.objects), known
        if name.removesuffix("()").rpartition(".")[2] not in known:
            return []
        return super().find_obj(env, modname, classname, name, type, searchmode)


def _is_linked(node: nodes.Node) -> bool:
    parent = node.parent
    while parent is not None and not isinstance(parent, (nodes.reference, pending_xref, nodes.title)):
        parent = parent.parent
    return parent is not None


def _link(node: nodes.literal, target: str, docname: str) -> None:
    reference = pending_xref("", refdomain="py", reftype="obj", reftarget=target, refdoc=docname, refexplicit=True, refwarn=False)
    node.replace_self(reference)
    reference += node


def fold_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Open the sidebar where the page is: all of it on every page would take most of the time of a build, and of each page's bytes.

    A page of a module does not list its two hundred siblings.
    """
    whole, depth = context.get("toctree"), {"maxdepth": 1} if page.startswith("api/") and page != "api/index" else {}
    if whole is not None:
        context["toctree"] = lambda **options: whole(**options | {"collapse": True} | depth)


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
    app.connect("autodoc-process-docstring", docstring_as_rst, priority=400)  # before napoleon's
    app.add_post_transform(LinkNames)
    app.add_domain(QuickPythonDomain, override=True)
