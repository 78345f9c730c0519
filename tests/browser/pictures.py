"""Pictures of the view in sixteen situations, in light and dark, 900 and 1400 pixels wide, to be looked at; and those that pages show.

`make pictures` writes them to `_pictures/`; `make pictures ONLY="nan paused"` makes only those. `ONLY=motion` records the picture in
motion, `ONLY=pages` takes ten pages of the site in light, in dark and on a phone, after `make docs`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import motion
import site_pages
from chromium import chromium
from jupyterlab_tab import Lab, served, write_notebook

ROOT = Path(__file__).parents[2]
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
WIDTHS = (900, 1400)
DIGITS = """import time, torch
from torch.nn.functional import cross_entropy
from nbtrain import StateManagerAddon, Trainer
from nbtrain.examples.digits import SmallCNN, digits_loaders

class Digits(Trainer):
    pause_s = 0.0
    def train_step(self, batch):
        time.sleep(self.pause_s)
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}
    test_step = train_step

def make(kind=Digits, lr=1e-3, **options):
    torch.manual_seed(0)
    optimizer = lambda params: torch.optim.Adam(params, lr=lr)
    return kind(SmallCNN(), device="cpu", optimizer=optimizer, **options)

torch.manual_seed(0)
loaders = digits_loaders(batch_size=32)"""
LINE = """import torch
from torch import nn
from nbtrain import Trainer

class Line(Trainer):
    def train_step(self, batch):
        loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
        return {"loss": loss} | {name: loss.detach() ** (i + 1) for i, name in enumerate(METRICS)}
    test_step = train_step

torch.manual_seed(0)
trainer = Line(nn.Linear(4, 1), device="cpu", optimizer=lambda params: torch.optim.SGD(params, lr=0.003))
batches = [torch.randn(8, 4) for _ in range(20)]"""
METRICS = ["mae", "rmse", "r2", "bias", "mape", "huber", "log_cosh", "quantile_90", "explained_variance", "max_error", "calibration"]
NAN = """class Odd(Digits):
    n = 0
    def train_step(self, batch):
        self.n += 1
        out = super().train_step(batch)
        return out | {"loss": out["loss"] * (float("nan") if self.n > 150 else 1), "ratio": torch.tensor(float("nan"))}
    test_step = Digits.train_step

trainer = make(Odd, on_error="raise")
trainer.run(6, *loaders)"""
NOISY = """class Noisy(Digits):
    def train_step(self, batch):
        x, y = batch
        noise = 0.1 * torch.randn(32, 1, 8, 8)
        return {"loss": cross_entropy(self.model(x + noise), y)}

trainer = make(Noisy)
trainer.run(3, *loaders)"""
BACKGROUND = "trainer = make()\ntrainer.pause_s = 0.1\nhandle = trainer.run(9, *loaders, background=True)"
STOPPED = "trainer = make()\ntrainer.pause_s = 0.02\ntrainer.run(9, *loaders)"
RESUMED = [
    "make(Digits.add_on(StateManagerAddon), save_path='resumed').run(4, *loaders)",
    "trainer = make(Digits.add_on(StateManagerAddon), save_path='resumed')\ntrainer.run(10, *loaders, resume='auto')",
]
SWEEP = """for i in range(20):
    make(lr=1e-4 * 1.4**i).run(2, *loaders)"""
FOLDS = """from torch.utils.data import DataLoader, Subset
data = loaders[0].dataset
for fold in range(5):
    inside, outside = ([i for i in range(len(data)) if (i % 5 == fold) == held] for held in (False, True))
    make().run(4, DataLoader(Subset(data, inside), 32, shuffle=True), DataLoader(Subset(data, outside), 32))"""
SHOWN = """class Showing(Digits):
    def test_step(self, batch):
        x, y = batch
        found = super().test_step(batch)
        if self.counts.step % 2:
            captions = [f"{guess}" for guess in self.model(x[:8]).argmax(1).tolist()]
            self.show("guesses", x[:8] / x[:8].max(), caption=captions)
            self.show("logits", self.model(x), kind="histogram")
        return found

trainer = make(Showing)
trainer.run(5, *loaders)"""
PROFILE = "trainer = make()\ntrainer.pause_s = 0.002\ntrainer.profile(loaders[0], steps=20)"
COMPARED = ["make(save_path='compared').run(4, *loaders)", "trainer = make(lr=1e-2, save_path='compared')\ntrainer.run(4, *loaders)"]


def _nothing_more(lab: Lab, name: str) -> None:
    """The cells are all that there is to it."""


def _edit_and_pause(lab: Lab, name: str) -> None:
    lab.press("Save now")
    lab.wait_text(r"① epoch \d, batch \d+: the state was saved")
    lab.press("Validate now")
    lab.wait_text(r"② epoch \d, batch \d+: validated: val_loss")
    lab.wait_text(r"epoch 3/6 · ")
    lab.press("Pause")
    lab.wait_text(r"‖ run paused at epoch \d")


def _stop(lab: Lab, name: str) -> None:
    lab.press("Stop")
    lab.wait_text("■ stopped")


def _save_and_reload(lab: Lab, name: str) -> None:
    lab.command("docmanager:save", wait=True)
    lab.show(name)
    lab.wait_text(r"epoch [3-9]/9 · ")


def _save_and_leave(lab: Lab, name: str) -> None:
    lab.wait_no_buttons()
    lab.command("docmanager:save", wait=True)
    lab.command("kernelmenu:shutdown", wait=True)
    lab.show(name)
    lab.wait_text(r"✓ completed · 8 epochs")


@dataclass(frozen=True)
class Situation:
    """Cells that are run, the text that is waited for, and what is done then."""

    cells: Sequence[str]
    text: str
    then: Callable[[Lab, str], None] = _nothing_more


SLOW = "trainer = make(Digits.add_on(StateManagerAddon), save_path='runs')\ntrainer.pause_s = 0.02\ntrainer.run(6, *loaders)"
SITUATIONS = {
    "first_epoch": Situation([DIGITS, "trainer = make()\ntrainer.pause_s = 0.3\ntrainer.run(6, *loaders)"], r"epoch 1/6 · 1\d/45"),
    "epochs_200": Situation(["METRICS = []", LINE, "trainer.run(200, batches, batches[:5])"], "✓ completed · 200 epochs"),
    "metrics_12": Situation([f"METRICS = {METRICS}", LINE, "trainer.run(15, batches, batches[:5])"], "✓ completed · 15 epochs"),
    "nan": Situation([DIGITS, NAN], "✗ failed|✓ completed"),
    "paused": Situation([DIGITS, SLOW], r"epoch 2/6 · 1\d/45", _edit_and_pause),
    "error": Situation([DIGITS, NOISY], "paused at epoch 1, batch 45 · fix the cell"),
    "background": Situation([DIGITS, BACKGROUND, "handle"], r"epoch 2/9 · "),
    "reloaded": Situation([DIGITS, BACKGROUND], r"epoch 2/9 · ", _save_and_reload),
    "compared": Situation([DIGITS, *COMPARED], r"✓ completed[\s\S]*✓ completed"),
    "stopped": Situation([DIGITS, STOPPED], r"epoch 4/9 · ", _stop),
    "resumed": Situation([DIGITS, *RESUMED], r"✓ completed[\s\S]*✓ completed"),
    "sweep": Situation([DIGITS, SWEEP], "^20 runs · ★"),
    "folds": Situation([DIGITS, FOLDS], "^5 runs · ★"),
    "shown": Situation([DIGITS, SHOWN], "✓ completed · 5 epochs"),
    "profile": Situation([DIGITS, PROFILE], "a step on cpu"),
    "saved": Situation([DIGITS, "trainer = make()\ntrainer.run(8, *loaders)", "trainer"], "✓ completed · 8 epochs", _save_and_leave),
}
KEPT = {"paused": "live", "saved": "notebook", "error": "failed"}  # those that pages show, light, in docs/images
PLAIN = ".jp-cell-toolbar, .jp-Notebook-footer, .jp-Collapser { visibility: hidden !important }"  # what belongs to JupyterLab


_SCROLL = """() => {
    const seen = kind => [...document.querySelectorAll(`.jp-OutputArea-output ${kind}`)].filter(i => i.checkVisibility()).at(-1);
    const picture = seen('img') ?? seen('pre');  // a profile has no image
    picture?.scrollIntoView({block: 'center'});
    return !!picture;  // none while it is drawn again
}"""


def _shoot(lab: Lab, name: str, out: Path) -> None:
    """The last record on the page in all themes and widths."""
    if lab.page.locator("#jp-left-stack:visible").count():
        lab.command("application:toggle-left-area")
    for theme, title in THEMES.items():
        lab.page.emulate_media(color_scheme=theme)
        lab.command("apputils:change-theme", wait=True, theme=title)
        for width in WIDTHS:
            lab.page.set_viewport_size({"width": width, "height": 1000})
            lab.page.wait_for_function(_SCROLL, timeout=90_000)
            lab.page.wait_for_timeout(1500)  # until a live view was drawn again
            lab.page.screenshot(path=out / f"{name}-{theme}-{width}.png")
            if theme == "light" and width == min(WIDTHS) and name in KEPT:
                style = lab.page.add_style_tag(content=PLAIN)
                lab.page.set_viewport_size({"width": width, "height": 1600})  # a higher cell would be cut off
                lab.page.locator(".jp-CodeCell").nth(1).screenshot(path=ROOT / "docs" / "images" / f"{KEPT[name]}.png")
                style.evaluate("s => s.remove()")
    lab.page.emulate_media(color_scheme="light")
    lab.command("apputils:change-theme", wait=True, theme=THEMES["light"])


def _take(browser: Any, url: str, folder: Path, name: str, out: Path) -> None:
    context = browser.new_context(viewport={"width": min(WIDTHS), "height": 1000}, device_scale_factor=2)
    lab = Lab(context.new_page(), url)
    path = write_notebook(folder, name, *SITUATIONS[name].cells)
    lab.open(path)
    lab.command("notebook:run-all-cells")
    lab.wait_text(SITUATIONS[name].text, 300)
    SITUATIONS[name].then(lab, path)
    _shoot(lab, name, out)
    lab.command("kernelmenu:shutdown")
    context.close()


def main(names: Sequence[str]) -> None:
    """Make the pictures of the situations `names`, of all where there are none."""
    out = ROOT / "_pictures"
    out.mkdir(exist_ok=True)
    if names == ["pages"]:
        site_pages.main()
        return
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        folder = Path(place) / "lab"
        folder.mkdir()
        with served(folder) as url:
            for name in names or [*SITUATIONS, "motion"]:
                if name == "motion":
                    motion.record(browser, url, folder)
                    continue
                _take(browser, url, folder, name, out)
                print(f"{name}: {out.relative_to(ROOT)}/{name}-*.png", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
