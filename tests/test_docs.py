"""The site and its pages: built once without a warning, linked, found by a search, asking no other host; every block of code runs."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from programs import script

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
PAGES = sorted(path for path in DOCS.glob("*.md") if "```python\n" in path.read_text(encoding="utf-8"))


class _Page(HTMLParser):
    """What a page leads to, what it loads, and what can be led to on it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag not in ("meta", "form"):
            self.loads += [given[name] for name in ("src", "srcset", "href", "data", "poster") if given.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return script("build").build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, _Page]:
    return {path: _Page(path) for path in site.rglob("*.html")}


def test_every_notebook_page_and_module_is_on_the_site(site: Path) -> None:
    sources = [p.relative_to(ROOT) for p in [*(ROOT / "nbs").rglob("*.ipynb"), *DOCS.glob("*.md")] if ".ipynb_checkpoints" not in p.parts]
    sources = [path if path != Path("nbs/index.ipynb") else Path("index") for path in sources]
    assert not [path for path in sources if not (site / path.with_suffix(".html")).exists()]
    modules = {script("build").module_name(p) for p in (ROOT / "nbtrain").rglob("*.py") if p.name not in ("__init__.py", "_modidx.py")}
    assert modules == {path.stem for path in (site / "api").glob("*.html")} - {"index"}


def test_links_between_pages_lead_somewhere(site: Path, pages: dict[Path, _Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead


def test_no_page_asks_another_host(site: Path, pages: dict[Path, _Page]) -> None:
    loads = {load for page in pages.values() for load in page.loads}
    assert not {load for load in loads if urlsplit(load).scheme not in ("", "data") or load.startswith("//")}
    styles = "\n".join([*(path.read_text() for path in site.rglob("*.css")), *(page.text for page in pages.values())])
    assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)\s]*", styles)
    assert not any(word in page.text for page in pages.values() for word in ("require.min.js", "mathjax", "cdn."))


def test_names_in_the_text_lead_to_their_entries(site: Path, pages: dict[Path, _Page]) -> None:
    assert "../api/addons.state_manager.html#nbtrain.addons.state_manager.StateManagerAddon" in pages[site / "docs" / "resume.html"].links
    assert "api/trainer.trainer.html#nbtrain.trainer.trainer.TrainerRuns.run" in pages[site / "index.html"].links
    assert "../nbs/history/history.html" in pages[site / "api" / "history.history.html"].links  # [source] is the chapter


def test_search_finds_a_name_offline(site: Path, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{(site / 'search.html').as_uri()}?q=StateManagerAddon")
    for found in ("api/addons.state_manager.html", "docs/resume.html"):  # results come one by one
        page.wait_for_selector(f"#search-results li a[href^='{found}']", timeout=600_000)
    assert all(url.startswith(("file:", "data:")) for url in asked)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_code_of_a_page_runs_and_prints_what_the_page_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = BLOCK.findall(path.read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(text for kind, text in blocks if kind == "python"))
    runpy.run_path(str(script), run_name="page")
    assert capsys.readouterr().out == "".join(text for kind, text in blocks if kind == "text")


def _lasting_folder() -> Path:
    """What the recipe of resume.md finds here."""
    code = next(text for _, text in BLOCK.findall((DOCS / "resume.md").read_text(encoding="utf-8")) if "def lasting_folder" in text)
    tree = ast.parse(code)
    tree.body = [
        node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "name", "") == "lasting_folder"
    ]
    names: dict[str, Any] = {}
    exec(compile(tree, "resume.md", "exec"), names)
    return names["lasting_folder"]()


def test_recipe_saves_to_drive_on_colab(monkeypatch: pytest.MonkeyPatch) -> None:
    mounted: list[str] = []
    colab = ModuleType("google.colab")
    colab.drive = SimpleNamespace(mount=mounted.append)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    assert _lasting_folder() == Path("/content/drive/MyDrive/runs")
    assert mounted == ["/content/drive"]


def test_recipe_saves_to_the_output_on_kaggle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: path == Path("/kaggle/working"))
    assert _lasting_folder() == Path("/kaggle/working/runs")


def test_architecture_shows_the_packages_and_names_modules_that_exist() -> None:
    drawn = script("make_architecture")
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert page == drawn.page(), "run `make names`"
    packages = "|".join(drawn.order())
    named = set(re.findall(r"`nbtrain\.([\w.]+)`", page)) | set(re.findall(rf"\b((?:{packages})\.[a-z_]+)\b", page))
    assert len(named) > 20 and not named - drawn.names() - {"events.jsonl", "trainer.to_config"}


def test_table_of_hooks_is_that_of_the_code() -> None:
    assert (DOCS / "hooks.md").read_text(encoding="utf-8") == script("make_hooks").page(), "run `make names`"
