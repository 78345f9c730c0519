"""The picture in motion of README and landing page: a run in JupyterLab that is paused and resumed, in light and in dark.

`make pictures ONLY=motion` writes `docs/images/run-{light,dark}.webp` and its last frame as
`run-{light,dark}.png`, for those who asked for less motion.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyterlab_tab import Lab, write_notebook
from PIL import Image

IMAGES = Path(__file__).parents[2] / "docs" / "images"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
WIDTH, HEIGHT, SCALE = 688, 562, 1.5  # of the page's part that is shown; pixels of the picture to one of the page
MAX_BYTES = 500_000
FIRST_S, RUN_S, LAST_S = 0.5, 3.0, 1.5  # how long the first frame stands, the run takes at most, and the last frame stands
APART_S = 0.2  # between two frames: more of them are not seen, and make the files larger
# Not shown. The pause makes a step as slow as that of a larger model; all else is as in the cell that is shown.
BEFORE = """import time, torch
from torch.nn.functional import cross_entropy
from nbtrain import Trainer
from nbtrain.examples import digits

class SmallCNN(digits.SmallCNN):
    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)

torch.manual_seed(0)
loader, valid_loader = digits.digits_loaders()
adam = lambda params: torch.optim.Adam(params, lr=1e-3)"""
SHOWN = """class Digits(Trainer):
    def train_step(self, batch):
        x, y = batch
        logits = self.model(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        return {"loss": cross_entropy(logits, y), "acc": accuracy}

    test_step = train_step

trainer = Digits(SmallCNN(), optimizer=adam)
trainer.run(4, loader, valid_loader)"""


@dataclass(frozen=True)
class Act:
    """What is done as soon as the page shows `text`, and how long it is looked at before."""

    text: str
    then: Callable[[Lab], None]
    look_s: float = 0.0


ACTS = (
    Act(r"epoch 2/4 · [23]\d/45", lambda lab: lab.press("Pause")),
    Act(r"paused at epoch 2", lambda lab: lab.press("Continue"), look_s=1.0),
    Act(r"✓ completed", lambda lab: None),
)


class Recorder:
    """Frames of a part of a page, each with the time at which it was taken."""

    def __init__(self, page: Any, clip: dict[str, float]) -> None:
        self.page, self.clip = page, clip
        self.frames: list[tuple[float, Image.Image]] = []

    def take(self) -> None:
        if self.frames:
            self.page.wait_for_timeout(1000 * max(0.0, self.frames[-1][0] + APART_S - time.monotonic()))
        png = self.page.screenshot(clip=self.clip, animations="disabled", caret="hide")
        self.frames.append((time.monotonic(), Image.open(io.BytesIO(png)).convert("RGB")))

    def take_until(self, text: str, limit_s: float = 120) -> None:
        """Take frames until the page shows `text`."""
        end = time.monotonic() + limit_s
        while True:
            self.take()
            if self.shows(text):
                return
            assert time.monotonic() < end, f"the page does not show {text!r}"

    def take_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.take()

    def shows(self, text: str) -> bool:
        found = "p => [...document.querySelectorAll('.jp-OutputArea')].some(o => new RegExp(p).test(o.innerText))"
        return self.page.evaluate(found, text)


def timed(frames: Sequence[tuple[float, Image.Image]]) -> tuple[list[Image.Image], list[int]]:
    """Frames that differ from the one before, and how many milliseconds each stands: a run that took longer than RUN_S is played faster."""
    kept: list[Image.Image] = []
    starts: list[float] = []
    for at, image in frames:
        if not kept or image.tobytes() != kept[-1].tobytes():
            kept.append(image)
            starts.append(at)
    faster = max(1.0, (starts[-1] - starts[1]) / RUN_S)
    lasting = [round(1000 * (after - at) / faster) for at, after in zip(starts[1:], starts[2:])]
    return kept, [round(1000 * FIRST_S), *lasting, round(1000 * LAST_S)]


def _open(lab: Lab, folder: Path, theme: str) -> None:
    path = write_notebook(folder, f"motion-{theme}", BEFORE, SHOWN)
    lab.open(path)
    lab.command("apputils:change-theme", wait=True, theme=THEMES[theme])
    if lab.page.locator("#jp-left-stack:visible").count():
        lab.command("application:toggle-left-area")
    lab.page.add_style_tag(content=".jp-cell-toolbar, .jp-Notebook-footer { display: none !important }")
    lab.page.wait_for_timeout(1000)
    lab.command("notebook:run-cell-and-select-next", wait=True)
    lab.page.wait_for_timeout(500)


def _clip(lab: Lab) -> dict[str, float]:
    """The second cell and what is below it, which is scrolled to the top."""
    cell = lab.page.locator(".jp-CodeCell").nth(1)
    cell.evaluate("c => c.scrollIntoView({block: 'start'})")
    box = cell.bounding_box()
    return {"x": box["x"], "y": box["y"], "width": WIDTH, "height": HEIGHT}


def _record(browser: Any, url: str, folder: Path, theme: str) -> tuple[list[Image.Image], list[int]]:
    context = browser.new_context(viewport={"width": 780, "height": 1000}, device_scale_factor=SCALE, color_scheme=theme)
    lab = Lab(context.new_page(), url)
    _open(lab, folder, theme)
    recorder = Recorder(lab.page, _clip(lab))
    recorder.take()
    lab.command("notebook:run-cell")
    for act in ACTS:
        recorder.take_until(act.text)
        recorder.take_for(act.look_s)
        act.then(lab)
    lab.wait_no_buttons()
    recorder.take()
    lab.command("kernelmenu:shutdown")
    context.close()
    return timed(recorder.frames)


def record(browser: Any, url: str, folder: Path) -> None:
    """Write the pictures of both themes."""
    for theme in THEMES:
        frames, lasting = _record(browser, url, folder, theme)
        path = IMAGES / f"run-{theme}.webp"
        options = {"duration": lasting, "loop": 0, "lossless": True, "method": 6}
        frames[0].save(path, save_all=True, append_images=frames[1:], **options)
        frames[-1].save(path.with_suffix(".png"), optimize=True)
        print(f"{path}: {len(frames)} frames, {sum(lasting) / 1000:.1f} s, {path.stat().st_size:,} bytes", flush=True)
        assert path.stat().st_size <= MAX_BYTES, f"{path.name} is over {MAX_BYTES:,} bytes"
