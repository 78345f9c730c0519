"""Pictures of ten pages of the site in light, in dark and on a phone, to be looked at: `make pictures ONLY=pages`, after `make docs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chromium import chromium

ROOT = Path(__file__).parents[2]
PAGES = {
    "landing": "index.html",
    "get_started": "docs/get_started.html",
    "tutorial": "nbs/tutorials/classification.html",
    "howto_index": "nbs/howto/index.html",
    "howto": "nbs/howto/early_stopping.html",
    "reference": "docs/reference/addons.html",
    "coming_from": "docs/coming_from/keras.html",
    "inside": "nbs/history/history.html",
    "benchmarks": "docs/benchmarks.html",
    "search": "search.html?q=mixed+precision",
}
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def address(html: Path, page: str) -> str:
    """The page of a site on disk, with its query."""
    path, question, query = page.partition("?")
    return (html / path).as_uri() + question + query


def shoot(browser: Any, html: Path, out: Path) -> None:
    """The first screens of each page, and all of it on a phone up to eight screens."""
    for name, page in PAGES.items():
        for kind, size, scheme in (("light", DESK, "light"), ("dark", DESK, "dark"), ("phone", PHONE, "light")):
            context = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=1, reduced_motion="reduce")
            tab = context.new_page()
            tab.goto(address(html, page))
            if name == "search":
                tab.wait_for_selector("#search-results li", timeout=90_000)
            tab.set_viewport_size({**size, "height": min(8 * size["height"], tab.evaluate("document.documentElement.scrollHeight"))})
            tab.screenshot(path=out / f"{name}-{kind}.png")
            context.close()
        print(f"{name}: {out}/{name}-*.png", flush=True)


def main(html: Path = ROOT / "_site" / "html") -> None:
    out = ROOT / "_pictures"
    out.mkdir(exist_ok=True)
    with chromium() as browser:
        shoot(browser, html, out)
