"""The site: built once without a warning, linked, found by a search, asking no other host."""

from __future__ import annotations

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
    "custom dataset": "nbs/howto/custom_dataset",
    "iterable dataset": "nbs/howto/iterable_dataset",
    "active learning": "nbs/howto/active_learning",
    "rollouts": "nbs/howto/run_in_a_loop",
    "outer loop": "nbs/howto/run_in_a_loop",
    "curriculum learning": "nbs/howto/growing_data",
    "distillation": "nbs/howto/distillation",
    "contrastive learning": "nbs/howto/self_supervised",
    "reinforcement learning": "nbs/howto/reinforcement_learning",
    "graph neural network": "nbs/howto/graph_network",
    "CTC": "nbs/howto/ctc",
    "pandas dataframe": "nbs/howto/tabular_data",
    "numpy": "nbs/howto/tabular_data",
    "mixup": "nbs/howto/data_augmentation",
    "data augmentation": "nbs/howto/data_augmentation",
    "class imbalance": "nbs/howto/class_imbalance",
    "class weights": "nbs/howto/class_imbalance",
    "num_workers": "nbs/howto/slow_data_loading",
    "batch size": "nbs/howto/gradient_accumulation",
    # training
    "mixed precision": "nbs/howto/mixed_precision",
    "bf16": "nbs/howto/mixed_precision",
    "gradient accumulation": "nbs/howto/gradient_accumulation",
    "gradient clipping": "nbs/howto/gradient_clipping",
    "early stopping": "nbs/howto/early_stopping",
    "stop training": "nbs/howto/early_stopping",
    "pause training": "nbs/howto/pause_training",
    "autoreload": "nbs/howto/edit_a_step",
    "torch compile": "nbs/howto/torch_compile",
    "learning rate": "nbs/howto/learning_rate_schedule",
    "learning rate finder": "nbs/howto/learning_rate_finder",
    "lr scheduler": "nbs/howto/learning_rate_schedule",
    "warmup": "nbs/howto/learning_rate_schedule",
    "max_steps": "nbs/howto/train_for_steps",
    "multiple losses": "nbs/howto/several_losses",
    "ema": "nbs/howto/ema",
    # fine-tuning
    "LoRA": "nbs/howto/lora",
    "freeze layers": "nbs/howto/freeze_layers",
    "transfer learning": "nbs/howto/load_pretrained",
    "discriminative learning rates": "nbs/howto/layer_learning_rates",
    # evaluation
    "multiple validation loaders": "nbs/howto/multiple_validation_sets",
    "several validation sets": "nbs/howto/multiple_validation_sets",
    "custom metric": "nbs/howto/custom_metric",
    "f1 score": "nbs/howto/custom_metric",
    "confusion matrix": "nbs/howto/confusion_matrix",
    "inference": "nbs/howto/predict",
    "cross validation": "nbs/howto/cross_validation",
    "kfold": "nbs/howto/cross_validation",
    # saving
    "resume training": "nbs/howto/resume_after_crash",
    "resume": "nbs/howto/resume_after_crash",
    "save model": "nbs/howto/save_and_load_weights",
    "load model": "nbs/howto/save_and_load_weights",
    "checkpoint": "nbs/howto/save_checkpoints",
    "ModelCheckpoint": "nbs/howto/save_checkpoints",
    "onnx": "nbs/howto/export_onnx",
    "torch.export": "nbs/howto/torch_export",
    "hugging face hub": "nbs/howto/hugging_face_hub",
    "push_to_hub": "nbs/howto/hugging_face_hub",
    "random seed": "nbs/howto/reproducibility",
    # trouble
    "nan loss": "nbs/howto/debug_nan",
    "CUDA out of memory": "nbs/howto/out_of_memory",
    "overfit one batch": "nbs/howto/overfit_one_batch",
    "count parameters": "nbs/howto/model_summary",
    "profiler": "nbs/howto/profile_run",
    "slow training": "nbs/howto/profile_run",
    # watching
    "wandb": "nbs/howto/log_to_wandb",
    "tensorboard": "nbs/howto/log_to_tensorboard",
    "plot loss": "nbs/howto/plot_curves",
    "progress bar": "nbs/howto/progress_bar",
    # devices and jobs
    "gpu": "nbs/howto/two_gpus",
    "multi gpu": "nbs/howto/two_gpus",
    "DDP": "nbs/howto/two_gpus",
    "fsdp": "nbs/howto/fsdp",
    "deepspeed": "nbs/howto/fsdp",
    "slurm": "nbs/howto/slurm",
    "ray cluster": "nbs/howto/ray",
    "yaml config": "nbs/howto/config_file",
    # code
    "callbacks": "nbs/howto/custom_callback",
    "LightningModule": "nbs/howto/lightning_module",
    "pytorch lightning": "nbs/howto/lightning_module",
    # doors
    "install": "docs/get_started",
    "colab": "docs/get_started",
    "kaggle": "docs/get_started",
    "keras": "docs/coming_from/keras",
    "StateManagerAddon": "docs/reference/StateManagerAddon",
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


def test_every_notebook_page_and_module_is_on_the_site(site: Path) -> None:
    sources = [p.relative_to(ROOT) for p in [*(ROOT / "nbs").rglob("*.ipynb"), *DOCS.rglob("*.md")] if ".ipynb_checkpoints" not in p.parts]
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
    assert "api/trainer.trainer.html#nbtrain.trainer.trainer.Trainer.run" in pages[site / "index.html"].links
    assert "../nbs/history/history.html" in pages[site / "api" / "history.history.html"].links  # [source] is the chapter


def test_search_finds_a_name_offline(site: Path, browser: Any) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{(site / 'search.html').as_uri()}?q=StateManagerAddon")
    for found in ("api/addons.state_manager.html", "docs/resume.html"):  # results come one by one
        page.wait_for_selector(f"#search-results li a[href^='{found}']", timeout=600_000)
    assert all(url.startswith(("file:", "data:")) for url in asked)


def test_a_persons_words_find_the_right_page_first(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "search.html").as_uri())
    page.wait_for_function("Search.hasIndex()", timeout=600_000)
    first = "query => Search._performSearch(...Search._parseQuery(query)).at(-1)?.[0]"
    found = {query: page.evaluate(first, query) for query in QUERIES}
    assert found == QUERIES


def test_search_shows_each_page_once_and_where_it_is(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "search.html").as_uri())
    page.wait_for_function("Search.hasIndex()", timeout=600_000)
    every = "query => Search._performSearch(...Search._parseQuery(query)).filter(r => r[6] !== 'object')"
    for query in ("mixed precision", "early stopping", "resume"):
        found = page.evaluate(every, query)
        places, shown = ([tuple(result[i] for i in parts) for result in found] for parts in ([0], [1, 3]))  # title and part of the site
        assert len(found) > 3 and len(places) == len(set(places)) and len(shown) == len(set(shown))


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
        "nbs/contents.html",
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
