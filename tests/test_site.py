"""The site: built once without a warning, linked, found by a search, asking no other host."""

from __future__ import annotations

import json
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from programs import script

pytestmark = pytest.mark.long  # two minutes of a core; test_docs reads the links in the sources
ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
QUERIES = {
    # data
    "load my own images": "nbs/howto/custom_dataset",
    "streaming dataset": "nbs/howto/iterable_dataset",
    "rollouts": "nbs/howto/run_in_a_loop",
    "curriculum learning": "nbs/howto/growing_data",
    "contrastive learning": "nbs/howto/self_supervised",
    "GNN": "nbs/howto/graph_network",
    "pandas dataframe": "nbs/howto/tabular_data",
    "mixup": "nbs/howto/data_augmentation",
    "class weights": "nbs/howto/class_imbalance",
    "num_workers": "nbs/howto/slow_data_loading",
    # training
    "bf16": "nbs/howto/mixed_precision",
    "how do I use a larger batch size": "nbs/howto/gradient_accumulation",
    "stop training when val_loss does not improve": "nbs/howto/early_stopping",
    "autoreload": "nbs/howto/edit_a_step",
    "lr scheduler": "nbs/howto/learning_rate_schedule",
    "CosineAnnealingWarmRestarts": "nbs/howto/warm_restarts",
    "max_steps": "nbs/howto/train_for_steps",
    "label smoothing": "nbs/howto/label_smoothing",
    "polyak averaging": "nbs/howto/ema",
    "discriminative learning rates": "nbs/howto/layer_learning_rates",
    "transfer learning": "nbs/howto/load_pretrained",
    # evaluation and saving
    "auroc": "nbs/howto/custom_metric",
    "k fold": "nbs/howto/cross_validation",
    "inference": "nbs/howto/predict",
    "restart after preemption": "nbs/howto/resume_after_crash",
    "save model": "nbs/howto/save_and_load_weights",
    "ModelCheckpoint": "nbs/howto/save_checkpoints",
    "push_to_hub": "nbs/howto/hugging_face_hub",
    "int8 quantisation": "nbs/howto/quantization",
    # trouble
    "loss is nan": "nbs/howto/debug_nan",
    "CUDA out of memory": "nbs/howto/out_of_memory",
    "expected all tensors to be on the same device": "nbs/howto/same_device",
    "why is training slow": "nbs/howto/profile_run",
    "wandb": "nbs/howto/log_to_wandb",
    "plot loss": "nbs/howto/plot_curves",
    # devices
    "multi gpu": "nbs/howto/two_gpus",
    "deepspeed": "nbs/howto/fsdp",
    "ray cluster": "nbs/howto/ray",
    "macbook": "docs/platforms#mps-macos-on-apple-silicon",
    "windows": "docs/platforms#windows",
    "tpu": "docs/platforms#tpu",
    # names and doors
    "StateManagerAddon": "docs/reference/StateManagerAddon",
    "trainer.rewind": "docs/reference/trainer_travel#trainer-rewind",
    "colab": "docs/get_started#jupyter-vs-code-colab-kaggle-and-servers",
    "model.fit": "docs/coming_from/keras",
    # stems, typing errors, a word that is being typed
    "augmenting": "nbs/howto/data_augmentation",
    "freezing the encoder": "nbs/howto/freeze_layers",
    "tensorbord": "nbs/howto/log_to_tensorboard",
    "early stoping": "nbs/howto/early_stopping",
    "gradeint cliping": "nbs/howto/gradient_clipping",
    "mixed presicion": "nbs/howto/mixed_precision",
    "confus": "nbs/howto/confusion_matrix",
}


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


def test_pages_for_users_are_on_the_site_and_the_chapters_they_link_to(site: Path) -> None:
    build = script("build")
    users = build.for_users()
    sources = [path.relative_to(ROOT) for path in [*users, *build.chapters(users)]]
    sources = [path if path != Path("nbs/index.ipynb") else Path("index") for path in sources]
    made = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")} - {Path("search"), Path("genindex")}
    assert made == {path.with_suffix("") for path in sources} and len(made) < 310
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 25_000_000


def test_no_two_pages_of_the_site_have_one_title(site: Path, pages: dict[Path, _Page]) -> None:
    titles = [re.search(r"<title>(.*?) - nbtrain", page.text) for path, page in pages.items() if path.stem not in ("index", "index.ko")]
    found = [title[1].lower() for title in titles if title]
    assert len(found) > 200 and sorted(found) == sorted(set(found))


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
    assert "reference/StateManagerAddon.html" in pages[site / "docs" / "resume.html"].links
    assert "docs/reference/trainer_run.html#trainer-run" in pages[site / "index.html"].links
    assert "../nbs/base/compose.html" in pages[site / "docs" / "architecture.html"].links  # a module's is its chapter


def test_search_is_used_by_the_keyboard_and_offline(site: Path, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "nbs" / "howto" / "ctc.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("tensorbord")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li", timeout=600_000)
    first = page.locator("#search-results li").first
    assert first.locator(".kind").inner_text() == "How-to" and "TensorBoard" in first.locator("mark").all_inner_texts()
    assert page.inner_text("#search-status").startswith("“tensorbord” is read as “tensorboard”.")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "nbs/howto/log_to_tensorboard.html"
    page.keyboard.press("Enter")
    page.wait_for_url("**/log_to_tensorboard.html")
    assert all(url.startswith(("file:", "data:")) for url in asked)


def test_a_persons_words_find_the_right_page_first(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "search.html").as_uri())
    first = "query => nbtrainSearch.search(query).pages[0]?.address.replace('.html', '')"
    assert {query: page.evaluate(first, query) for query in QUERIES} == QUERIES


def test_most_queries_of_somebody_who_has_not_seen_the_pages_find_one_in_the_first_three(site: Path, browser: Any) -> None:
    """Written from what people search for elsewhere; their pages were named before the search was tried. Not to be tuned to."""
    page = browser.new_page()
    page.goto((site / "search.html").as_uri())
    top = "query => nbtrainSearch.search(query).pages.slice(0, 3).map(found => found.address)"
    lines = [line.split("\t") for line in (ROOT / "tests" / "fixtures" / "held_out_queries.tsv").read_text().splitlines()]
    found = [any(name in address for address in page.evaluate(top, query) for name in pages.split()) for query, pages in lines]
    assert len(found) == 60 and sum(found) >= 54


def test_the_text_of_an_error_finds_its_entry(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "search.html").as_uri())
    top = "query => nbtrainSearch.search(query).pages.slice(0, 3).map(found => found.address)"
    headings = re.findall(r"^### (.+)$", (ROOT / "docs" / "error_messages.md").read_text(encoding="utf-8"), re.M)
    places = ("error_messages", "debug_nan", "out_of_memory", "iterable_dataset")  # or the page that the entry names
    missed = [text for text in headings if not any(place in address for address in page.evaluate(top, text) for place in places)]
    assert len(headings) > 40 and len(missed) <= 2


def test_search_shows_each_page_once_with_its_kind(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "search.html").as_uri())
    every = "query => nbtrainSearch.search(query).pages.map(found => [found.address.split('#')[0], found.kind])"
    kinds = set()
    for query in ("mixed precision", "early stopping", "resume"):
        found = page.evaluate(every, query)
        assert len(found) > 3 and len({place for place, _ in found}) == len(found)
        kinds |= {kind for _, kind in found}
    assert kinds == {"How-to", "Reference", "Tutorial", "Chapter", "Page"}
    assert page.evaluate("nbtrainSearch.search('zzzzqqqq').pages") == []


def test_search_knows_all_pages_and_its_words_mean_some(site: Path) -> None:
    pages = json.loads((site / "_static" / "search_pages.js").read_text().partition("nbtrainPages = ")[2].rstrip(";\n"))
    assert {page["address"].partition("#")[0] for page in pages} == {
        path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.parent != site or path.stem not in ("search", "genindex")
    }
    titles, make = [page["title"] for page in pages], script("search_pages")
    assert not [key for key in make.said()["titles"] if not any(make.stems(key) <= make.stems(title) for title in titles)]
    assert (site / "_static" / "search_pages.js").stat().st_size < 3_000_000 and not (site / "searchindex.js").exists()


def test_pages_fit_on_a_phone(site: Path, browser: Any) -> None:
    pages = runpy.run_path(str(ROOT / "tests" / "browser" / "site_pages.py"))
    page = browser.new_page(viewport=pages["PHONE"])
    widths = {}
    for name, address in pages["PAGES"].items():
        page.goto(pages["address"](site, address))
        widths[name] = page.evaluate("Math.max(document.documentElement.scrollWidth, document.querySelector('article').scrollWidth)")
    assert not {name: width for name, width in widths.items() if width > pages["PHONE"]["width"]}


def test_landing_page_shows_a_run_in_motion_by_theme_and_still_for_those_who_ask(site: Path, browser: Any) -> None:
    shown = "() => [...document.querySelectorAll('picture.moving img')].filter(i => i.checkVisibility()).map(i => i.currentSrc)"
    for scheme in ("light", "dark"):
        for motion, ending in (("no-preference", "webp"), ("reduce", "png")):
            page = browser.new_page(color_scheme=scheme, reduced_motion=motion)
            page.goto((site / "index.html").as_uri())
            page.wait_for_function("() => [...document.images].some(i => i.currentSrc.includes('/run-') && i.naturalWidth > 900)")
            assert page.evaluate(shown) == [(site / "_static" / f"run-{scheme}.{ending}").as_uri()]
            page.close()


def test_landing_page_leads_through_the_five_doors(pages: dict[Path, _Page], site: Path) -> None:
    doors = [
        "docs/get_started.html",
        "nbs/tutorials/index.html",
        "nbs/howto/index.html",
        "docs/reference/index.html",
        "docs/architecture.html",
    ]
    cards = pages[site / "index.html"].text.partition('class="doors docutils container"')[2].partition("</div>")[0]
    assert re.findall(r'href="([^"]+)"', cards) == doors


def test_every_tutorial_says_for_whom_it_is_and_how_long_it_takes(pages: dict[Path, _Page], site: Path) -> None:
    tutorials = [path for path in (site / "nbs" / "tutorials").glob("*.html") if path.stem != "index"]
    said = re.compile(r"<em>(?:Beginner|Intermediate|Advanced), \d+ minutes\. For .+</em>")
    assert len(tutorials) >= 11 and not [path.stem for path in tutorials if not said.search(pages[path].text)]


def test_every_page_has_a_description(pages: dict[Path, _Page], site: Path) -> None:
    made = {site / f"{name}.html" for name in ("genindex", "search", "py-modindex")}
    described = {path: re.findall(r'<meta content="([^"]*)" name="description"', page.text) for path, page in pages.items()}
    assert not [path for path, found in described.items() if path not in made and (len(found) != 1 or len(found[0]) < 20)]


def test_sidebar_has_five_doors_in_their_order(pages: dict[Path, _Page], site: Path) -> None:
    captions = re.findall(r'<span class="caption-text">(.*?)</span>', pages[site / "index.html"].text)
    assert captions == ["Get started", "Tutorials", "How-to", "Reference", "Inside", "한국어"]


def test_tutorials_reference_and_howto_pages_link_to_each_other(pages: dict[Path, _Page], site: Path) -> None:
    howto = pages[site / "nbs" / "howto" / "early_stopping.html"].links
    assert {"../tutorials/classification.html", "../../docs/reference/EarlyStoppingAddon.html"} <= set(howto)
    assert "../howto/early_stopping.html" in pages[site / "nbs" / "tutorials" / "classification.html"].links
    assert "../../nbs/howto/early_stopping.html" in pages[site / "docs" / "reference" / "EarlyStoppingAddon.html"].links
    tutorials = [path for path in (site / "nbs" / "tutorials").glob("*.html") if path.stem != "index"]
    assert not [path.stem for path in tutorials if not any(link.startswith("../howto/") for link in pages[path].links)]
