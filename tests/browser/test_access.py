"""What people with a screen reader, a keyboard alone, a narrow window or a right-to-left language get of records, without a notebook."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid

import nbtrain
from nbtrain.events import Progress
from nbtrain.views.curve import LossCurve, curve_svg
from nbtrain.views.html import record_html
from nbtrain.views.panels import panels_svg
from nbtrain.views.runs import RunCard, runs_html, runs_svg
from nbtrain.views.svg import picture
from nbtrain.views.text import Board

HEBREW = "שגיאה"
# The colours of JupyterLab's themes
THEMES = {
    "light": "--jp-ui-font-color2:rgba(0,0,0,.54);--jp-error-color1:#d32f2f;color:rgba(0,0,0,.87);background:#fff",
    "dark": "--jp-ui-font-color2:rgba(255,255,255,.54);--jp-error-color1:#f44336;color:rgba(255,255,255,.87);background:#111",
}
_TEXTS = """() => {  // the text, the colour, the opacity of each text that is visible
    const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement;
        if (!texts.currentNode.data.trim() || element.tagName == 'STYLE' || !element.checkVisibility()) continue;
        let opacity = 1;
        for (let at = element; at; at = at.parentElement) opacity *= getComputedStyle(at).opacity;
        found.push([texts.currentNode.data.trim(), getComputedStyle(element).color.match(/[\\d.]+/g).map(Number), opacity]);
    }
    return found;
}"""
_DRAWN = """() => {  // the texts of the drawings, each with its colour and the opacity of its fill
    const found = [];
    for (const image of document.querySelectorAll('img[src^="data:image/svg+xml"]')) {
        const frame = document.createElement('div'), bytes = Uint8Array.from(atob(image.src.split(',')[1]), c => c.charCodeAt(0));
        frame.attachShadow({mode: 'open'}).innerHTML = new TextDecoder().decode(bytes);
        image.replaceWith(frame);
        for (const text of frame.shadowRoot.querySelectorAll('text')) {
            const style = getComputedStyle(text);
            found.push([text.textContent, style.fill.match(/[\\d.]+/g).map(Number), style.opacity * style.fillOpacity]);
        }
    }
    return found;
}"""
_PLACES = """(name) => {  // of the last element that has a name and a number behind it, where each is seen
    const element = [...document.querySelectorAll('body *')].filter(
        e => e.tagName != 'STYLE' && e.checkVisibility() && new RegExp(name + ' \\\\d').test(e.textContent)).at(-1);
    const texts = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), letters = [];
    while (texts.nextNode()) [...texts.currentNode.data].forEach((_, i) => letters.push([texts.currentNode, i]));
    const at = element.textContent.search(new RegExp(name + ' \\\\d'));
    return [at, at + name.length + 1].map(place => {
        const range = document.createRange(), [node, i] = letters[place];
        range.setStart(node, i); range.setEnd(node, i + 1);
        return range.getBoundingClientRect().left;
    });
}"""
_WIDER = """() => [...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && e.tagName != 'STYLE'
    && !e.closest('pre, .line') && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 90))"""


class Named(Regress):
    def train_step(self, batch: Any) -> Any:
        found = super().train_step(batch)
        return found | {HEBREW: found["loss"].detach()}

    test_step = train_step


def _trained(lr: float) -> nbtrain.Trainer:
    trainer = make_trainer(Named, optimizer=lambda params: torch.optim.SGD(params, lr=lr), monitor=f"val_{HEBREW}", monitor_mode="min")
    trainer.run(6, make_loader(), make_valid())
    return trainer


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The record of a run, and three runs, one with a note."""
    for lr in (0.1, 0.03, 0.01):
        _trained(lr)
    runs = nbtrain.runs()[-3:]
    runs[0].note = f"{HEBREW} 12"
    cards = [run.card for run in runs]
    return {"record": record_html(cards[0].board), "runs": runs_html(cards, "nbtrain-1")}


@pytest.fixture
def page(browser: Any) -> Any:
    context = browser.new_context(viewport={"width": 900, "height": 900})
    yield context.new_page()
    context.close()


def _drawings() -> str:
    """A curve with all that it may say, panels, and runs in each colour that a label may have."""
    curve = LossCurve()
    curve.begin(Progress())
    curve.add_block(range(1, 101), [2 / i for i in range(1, 101)])
    curve.go_on((Progress(step=60), "continued"))
    curve.add_block(range(101, 151), [0.02] * 20 + [math.nan] * 30)
    curve.add_validation(90, 0.5)
    marks = [(Progress(step=20), "lr"), (Progress(step=110), "lr")]
    rows = [{"epoch": i, "step": 9 * i, "val_loss": 1 / i, "val_acc": 1 - 1 / i} for i in range(1, 9)]
    cards = [RunCard(f"r{i}", Board(epochs=rows, validations=rows), {"kind": f"k{i}"}) for i in range(8)]
    ramp = [replace(card, settings={"lr": f"{i}"}) for i, card in enumerate(cards * 2)]
    ghost = ("run-001", [(1, 1.0), (140, 0.1)])
    svgs = [curve_svg(curve, end_step=200, marks=marks, ghost=ghost), panels_svg(rows, rows[-1], marks), runs_svg(cards), runs_svg(ramp)]
    return "".join(picture(svg, "") for svg in svgs)


def _tree(page: Any) -> list[tuple[str, str]]:
    """The roles and names that a screen reader gets."""
    nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    shown = (node for node in nodes if not node["ignored"])
    return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in shown]


def _luminance(colour: list[float]) -> float:
    parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def _contrast(colour: list[float], opacity: float, ground: int) -> float:
    alpha = (colour[3] if len(colour) > 3 else 1) * opacity
    seen, behind = _luminance([c * alpha + ground * (1 - alpha) for c in colour[:3]]), _luminance([ground] * 3)
    return (max(seen, behind) + 0.05) / (min(seen, behind) + 0.05)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ["record", "runs"])
def test_every_text_has_a_contrast_of_4_5(page: Any, pages: dict[str, str], name: str, theme: str) -> None:
    page.set_content(f'<body style="{THEMES[theme]}">{pages[name]}')
    texts = page.evaluate(_TEXTS)
    ground = 255 if theme == "light" else 17
    assert len(texts) > 10
    assert [text for text, colour, opacity in texts if _contrast(colour, opacity, ground) < 4.5] == []


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ["record", "runs", "drawings"])
def test_every_text_in_a_drawing_has_a_contrast_of_4_5(page: Any, pages: dict[str, str], name: str, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    page.set_content((pages | {"drawings": _drawings()})[name])
    texts = page.evaluate(_DRAWN)
    ground = 255 if theme == "light" else 17
    assert len(texts) > 5
    assert [text for text, colour, opacity in texts if _contrast(colour, opacity, ground) < 4.5] == []


@pytest.mark.parametrize("theme", THEMES)
def test_drawings_have_the_theme_of_jupyterlab_and_not_of_the_system(page: Any, pages: dict[str, str], theme: str) -> None:
    page.emulate_media(color_scheme="dark" if theme == "light" else "light")
    page.set_content(f'<body data-jp-theme-light="{str(theme == "light").lower()}">{pages["record"]}{pages["runs"]}')
    found = page.evaluate("() => [...document.querySelectorAll('img.nbtrain-svg')].map(i => getComputedStyle(i).colorScheme)")
    assert len(found) > 3 and set(found) == {theme}


def test_a_screen_reader_gets_the_status_the_picture_in_words_and_a_table_with_heads(page: Any, pages: dict[str, str]) -> None:
    page.set_content(pages["record"])
    tree = _tree(page)
    assert any(role == "StaticText" and "completed · 6 epochs" in name for role, name in tree)
    assert [name.partition(":")[0] for role, name in tree if role == "image"] == ["By epoch"]
    assert ("table", "Metrics by epoch") in [(role, name[:16]) for role, name in tree]
    roles = [role for role, _ in tree]
    assert roles.count("columnheader") >= 5 and roles.count("rowheader") == 6


def test_a_screen_reader_gets_the_runs_with_names_for_what_can_be_pressed(page: Any, pages: dict[str, str]) -> None:
    page.set_content(pages["runs"])
    tree = _tree(page)
    assert [name for role, name in tree if role == "image"] == [f"val_{HEBREW} of 3 runs by epoch"]
    heads = [name for role, name in tree if role == "radio"]
    assert heads[:2] == ["sort by run", "sort by lr"] and len(heads) == 5
    lines = [name for role, name in tree if role == "DisclosureTriangle"]
    assert lines[0].startswith(f"best · run Named 1, lr 0.1, val_{HEBREW} 0.") and lines[0].endswith(f" · {HEBREW} 12")
    assert lines[1].startswith("run Named 2, lr 0.03, ") and len(lines) == 3


def test_the_keyboard_reaches_heads_and_lines_in_their_order_and_the_focus_is_visible(page: Any, pages: dict[str, str]) -> None:
    page.set_content(pages["runs"])
    seen = []
    for _ in range(4):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("() => [document.activeElement.tagName, document.activeElement.getBoundingClientRect().top]"))
    assert [tag for tag, _ in seen] == ["INPUT", "SUMMARY", "SUMMARY", "SUMMARY"] and [top for _, top in seen] == sorted(
        top for _, top in seen
    )
    outline = "e => getComputedStyle(e).outlineStyle"
    assert page.locator("summary").nth(2).evaluate(outline) != "none"
    page.keyboard.press("Enter")
    assert page.locator("details[open]").count() == 1
    page.locator("input").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("input:checked").get_attribute("id") == "nbtrain-1-1"
    assert page.locator("label:focus-within").evaluate(outline) != "none"


@pytest.mark.parametrize("name", ["record", "runs"])
def test_a_right_to_left_name_stands_left_of_its_number(page: Any, pages: dict[str, str], name: str) -> None:
    page.set_content(pages[name])
    letter, digit = page.evaluate(_PLACES, HEBREW)
    assert letter < digit


@pytest.mark.parametrize("width", [700, 467])
def test_nothing_is_wider_than_a_narrow_window_or_one_at_150_percent(page: Any, pages: dict[str, str], width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for name, html in pages.items():
        page.set_content(html)
        assert page.evaluate(_WIDER) == [], name
