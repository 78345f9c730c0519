"""The view of a run in JupyterLab: its numbers agree at every moment, it stands still, and it survives a reload and a saved file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyterlab_tab import Lab, write_notebook
from nbconvert import HTMLExporter
from samples import some
from test_lab import _shoot

SETUP = """import time, torch
from torch import nn
from nbtrain import Trainer

class Slow(Trainer):
    pause_s = 0.01
    def train_step(self, batch):
        time.sleep(self.pause_s)
        loss = self.model(batch).square().mean()
        return {"loss": loss, "mae": loss.detach().sqrt()}
    test_step = train_step

torch.manual_seed(0)
trainer = Slow(nn.Linear(4, 1), device="cpu", optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
loader = [torch.randn(8, 4) for _ in range(30)]"""
DEAD = ("Error displaying widget", "Loading widget", "VBox(", "HBox(")
_VISIBLE = (
    """() => [...document.querySelectorAll('.jp-OutputArea-output')].filter(o => o.checkVisibility()).map(o => o.innerText).join('\\n')"""
)
_SAMPLE = """() => {
    const area = [...document.querySelectorAll('.jp-OutputArea-output')].filter(o => o.checkVisibility());
    const button = area.flatMap(o => [...o.querySelectorAll('button')]).filter(b => b.checkVisibility())[1];
    const box = document.querySelectorAll('.jp-OutputArea')[1];
    return {
        text: area.map(o => o.innerText).join('\\n'),
        bars: area.flatMap(o => [...o.querySelectorAll('progress')].filter(p => p.checkVisibility())).map(p => [p.value, p.max]),
        rows: area.flatMap(o => [...o.querySelectorAll('tbody th')]).filter(h => h.checkVisibility())
            .map(h => parseInt(h.innerText.replace('★', ''))),
        button: button && [button.getBoundingClientRect().left - box.getBoundingClientRect().left,
                           button.getBoundingClientRect().top - box.getBoundingClientRect().top],
    };
}"""

_FITS = """() => [...document.querySelectorAll('.jp-OutputArea-output')].filter(o => o.checkVisibility()).every(
    o => [...o.querySelectorAll('img, span')].every(e => e.getBoundingClientRect().right <= o.getBoundingClientRect().right + 1))"""
_TOPS = """() => {
    const box = document.querySelectorAll('.jp-OutputArea')[1], found = {};
    for (const [name, kind] of [['title', 'strong'], ['curve', 'img'], ['bars', 'progress'], ['buttons', '.nbtrain-buttons button'],
                                ['table', 'table']]) {
        const places = [...box.querySelectorAll(kind)].filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect().top);
        if (places.length) found[name] = Math.min(...places) - box.getBoundingClientRect().top;
    }
    return found;
}"""
_RESTART = "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"


def _visible(lab: Any) -> str:
    return lab.page.evaluate(_VISIBLE)


def _wait(lab: Any, pattern: str) -> None:
    code = f"(p) => new RegExp(p).test(({_VISIBLE})())"
    lab.page.wait_for_function(code, arg=pattern, timeout=90_000)


def _run(lab: Any, lab_root: Path, name: str, *cells: str) -> str:
    path = write_notebook(lab_root, name, SETUP, *cells)
    lab.open(path)
    lab.command("notebook:run-all-cells")
    return path


def _pause_in_training(lab: Any) -> None:
    """Pause where epochs can be restored; within a validation, which is refused there, go on to a later batch."""
    lab.press("Pause")
    _wait(lab, r"‖ paused · epoch ")
    while re.search(r"‖ paused · epoch \S+ · valid ", _visible(lab)):
        lab.press("Continue")
        _wait(lab, r"▶ running · epoch \S+ · \d")
        lab.press("Pause")
        _wait(lab, r"‖ paused · epoch ")
    _wait(lab, r"the end of epoch \d+")


def _check(seen: dict[str, Any]) -> tuple[float, float]:
    """Everything that is on the page at one moment says the same; returns how far the two bars are."""
    ((epoch, n_epochs, phase, batch, n_batches),) = re.findall(r"epoch (\d+)/(\d+) · (valid )?(\d+)/(\d+) · ", seen["text"])
    (epochs, batches) = seen["bars"]
    assert [epochs[1], batches[1]] == [int(n_epochs), int(n_batches)] and batches[0] == int(batch)
    inside = 1.0 if phase else int(batch) / int(n_batches)
    assert epochs[0] == pytest.approx(int(epoch) - 1 + inside)
    newest = max(seen["rows"], default=0)
    assert newest == int(epoch) - 1 or (newest == int(epoch) == int(n_epochs))
    losses = re.findall(r"train\s*loss [\d.e-]+", seen["text"])
    assert len(losses) <= 1 and seen["text"].count("lr 0.01 · ") == len(losses)
    return epochs[0], batches[0]


def test_all_numbers_on_the_page_agree_at_every_moment(lab: Any, lab_root: Path) -> None:
    _run(lab, lab_root, "agree", "handle = trainer.run(200, loader, loader, background=True)")
    _wait(lab, r"epoch 1/200 · ")
    far = []
    for _ in range(100):
        far.append(_check(lab.page.evaluate(_SAMPLE))[0])
        lab.page.wait_for_timeout(83)
    assert far == sorted(far) and len(set(far)) > 20
    lab.page.set_viewport_size({"width": 820, "height": 1100})  # beside the list of files it is narrower than a record
    lab.page.wait_for_function(_FITS, timeout=90_000)
    lab.command("kernelmenu:shutdown", wait=True)


@pytest.mark.long
def test_clock_goes_on_in_a_step_of_some_seconds(lab: Any, lab_root: Path) -> None:
    _run(lab, lab_root, "clock", "trainer.pause_s = 3.5\ntrainer.run(1, loader[:2])")
    for second in range(3):
        _wait(lab, rf"epoch 1/1 · 0/2 · 00:0{second} < –")
    _wait(lab, r"✓ completed · 1 epoch · ")


def test_nothing_moves_in_a_run_a_pause_and_at_the_end(lab: Any, lab_root: Path) -> None:
    _run(lab, lab_root, "still", "handle = trainer.run(30, loader[:20], loader[:2], background=True)")
    seen = []
    for at_least in (r"\d+", r"([2-9]|\d\d)", r"([5-9]|\d\d)", r"\d\d"):
        _wait(lab, rf"▶ running · epoch {at_least}/30 · ")
        seen.append(lab.page.evaluate(_TOPS))
        assert "table" not in seen[-1] or lab.largest_gap() < 20
        assert len(lab.page.evaluate(_SAMPLE)["rows"]) <= 12
    _pause_in_training(lab)
    seen.append(lab.page.evaluate(_TOPS))
    assert lab.largest_gap() < 20
    _shoot(lab.page, "slider-paused")
    lab.press("Continue")
    _wait(lab, r"▶ running · epoch \d+/30 · ")
    seen.append(lab.page.evaluate(_TOPS))
    _wait(lab, r"✓ completed · 30 epochs")
    lab.wait_no_buttons()
    end = lab.page.evaluate(_TOPS)
    for name, places in (("title", [*seen, end]), ("curve", [*seen, end]), ("bars", seen), ("buttons", seen), ("table", seen)):
        assert len({place[name] for place in places if name in place}) == 1, name
    assert "curve" in end and lab.largest_gap() < 20


@pytest.mark.long
def test_background_run_comes_back_live_after_a_reload(lab: Any, lab_root: Path) -> None:
    path = _run(lab, lab_root, "background_reload", "handle = trainer.run(14, loader, loader, background=True)")
    _wait(lab, r"epoch 2/14 · ")
    lab.command("docmanager:save", wait=True)
    lab.show(path)
    _wait(lab, r"epoch [5-9]/14 · ")
    _check(lab.page.evaluate(_SAMPLE))
    assert not [words for words in DEAD if words in _visible(lab)] and " at " not in _visible(lab)
    _shoot(lab.page, "reloaded-background")
    lab.press("Pause")
    _wait(lab, r"‖ paused · epoch ")
    lab.press("Continue")
    _wait(lab, r"✓ completed · 14 epochs")
    lab.wait_no_buttons()
    assert _visible(lab).count("· started ") == 1


@pytest.mark.long
def test_run_whose_kernel_is_busy_says_after_a_reload_when_it_was_drawn_and_ends_complete(lab: Any, lab_root: Path) -> None:
    path = _run(lab, lab_root, "foreground_reload", "trainer.run(12, loader, loader)")
    _wait(lab, r"epoch 2/12 · ")
    assert " at " not in _visible(lab)
    lab.command("docmanager:save", wait=True)
    lab.show(path)
    _wait(lab, r"running at \d\d:\d\d:\d\d · epoch \d+/12 · [^■]*the whole record will be here when the run ends")
    _shoot(lab.page, "reloaded-foreground")
    assert not [words for words in DEAD if words in _visible(lab)]
    _wait(lab, r"✓ completed · 12 epochs")  # the kernel is free, and answers
    assert _visible(lab).count("· started ") == 1 and "will be here" not in _visible(lab)


@pytest.mark.long
@pytest.mark.parametrize("is_trusted", some([False, True], 2))
def test_kernel_restarted_in_mid_run_is_said_in_the_page_and_in_the_saved_file(lab: Any, lab_root: Path, is_trusted: bool) -> None:
    path = _run(lab, lab_root, f"left_{is_trusted}", "handle = trainer.run(40, loader, loader, background=True)")
    _wait(lab, r"▶ running · epoch 3/40 · ")
    lab.page.evaluate(_RESTART)
    gone = r"■ its kernel is gone · running at \d\d:\d\d:\d\d · epoch [2-5]/40 · "
    _wait(lab, gone)
    _shoot(lab.page, "restarted")
    assert "this is the last that was saved here" in _visible(lab) and "▶ running" not in _visible(lab)
    lab.command("docmanager:save", wait=True)
    if not is_trusted:
        lab.command("kernelmenu:shutdown", wait=True)
        notebook = nbformat.read(lab_root / path, as_version=4)
        notebook.cells[0].source += "\n# changed by somebody"
        nbformat.write(notebook, lab_root / path)
    lab.show(path)
    _wait(lab, gone if is_trusted else r"▶ running at \d\d:\d\d:\d\d · epoch [2-5]/40 · ")  # without trust there are no style sheets
    lab.page.wait_for_timeout(2000)  # in which JupyterLab would say that it has no such widget
    seen = _visible(lab)
    assert not [words for words in DEAD if words in seen] and seen.count("running at") == 1 and seen.count("★ ") == 1
    _shoot(lab.page, f"saved-{'trusted' if is_trusted else 'untrusted'}")
    page, _ = HTMLExporter().from_filename(str(lab_root / path))
    assert "▶ running at" in page and not [words for words in DEAD if words in page] and "widget-view+json" not in page


@pytest.mark.long
def test_two_windows_show_the_same_run_and_each_has_its_buttons(lab: Any, lab_root: Path) -> None:
    path = _run(lab, lab_root, "two_windows", "handle = trainer.run(20, loader, loader, background=True)")
    _wait(lab, r"epoch 2/20 · ")
    lab.command("docmanager:save", wait=True)
    other = Lab(lab.page.context.new_page(), lab.url)
    other.show(path)
    _wait(other, r"epoch ([4-9]|1\d)/20 · ")
    other.press("Pause")
    for tab in (other, lab):
        _wait(tab, r"‖ paused · epoch ")
        _check(tab.page.evaluate(_SAMPLE))
    lab.press("Continue")
    for tab in (other, lab):
        _wait(tab, r"✓ completed · 20 epochs")
        assert not [words for words in DEAD if words in _visible(tab)] and _visible(tab).count("· started ") == 1


@pytest.mark.long
def test_lost_connection_comes_back_with_the_run_as_it_is_then(lab: Any, lab_root: Path) -> None:
    _run(lab, lab_root, "lost", "handle = trainer.run(30, loader, loader, background=True)")
    _wait(lab, r"epoch 2/30 · ")
    lab.page.context.set_offline(True)
    lab.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel._ws.close()")
    lab.page.wait_for_timeout(8_000)  # some ten epochs
    far = int(re.findall(r"epoch (\d+)/30", _visible(lab))[0])
    assert far <= 4
    lab.page.context.set_offline(False)
    _wait(lab, r"epoch ([89]|1\d|2\d)/30 · ")
    _check(lab.page.evaluate(_SAMPLE))
    _wait(lab, r"✓ completed · 30 epochs")
    lab.wait_no_buttons()


@pytest.mark.long
def test_killed_kernel_leaves_a_record_that_says_when_it_was_drawn(lab: Any, lab_root: Path) -> None:
    end = "import threading, os; threading.Timer(4, os._exit, (9,)).start()"
    path = _run(lab, lab_root, "killed", f"{end}\nhandle = trainer.run(90, loader, loader, background=True)")
    _wait(lab, r"epoch 2/90 · ")
    lab.page.wait_for_timeout(6_000)
    lab.command("docmanager:save", wait=True)
    _shoot(lab.page, "killed")
    lab.show(path)
    _wait(lab, r"■ its kernel is gone · running at \d\d:\d\d:\d\d · epoch \d+/90 · [^▶]*this is the last that was saved here")
    assert not [words for words in DEAD if words in _visible(lab)] and lab.page.locator(".jp-OutputArea button:visible").count() == 0


def _held(lab: Any) -> dict[str, float]:
    """What the page holds after a garbage collection: bytes of JavaScript, and nodes."""
    devtools = lab.page.context.new_cdp_session(lab.page)
    devtools.send("Performance.enable")
    devtools.send("HeapProfiler.collectGarbage")
    return {metric["name"]: metric["value"] for metric in devtools.send("Performance.getMetrics")["metrics"]}


@pytest.mark.long
def test_browser_holds_as_much_after_a_thousand_epochs_as_after_a_hundred(lab: Any, lab_root: Path) -> None:
    run = "trainer.pause_s = 0.005\nhandle = trainer.run(1200, loader[:4], loader[:2], background=True)"
    _run(lab, lab_root, "memory", run)
    held = []
    for epoch in ("1\\d\\d", "11\\d\\d"):
        _wait(lab, rf"epoch {epoch}/1200 · ")
        held.append(_held(lab))
    early, late = held
    assert late["JSHeapUsedSize"] < early["JSHeapUsedSize"] + 5e6 and late["Nodes"] < early["Nodes"] + 500
    lab.command("kernelmenu:shutdown", wait=True)


_TOP_OF_SLIDER = "() => document.querySelector('.nbtrain-epochs button').getBoundingClientRect().top"


def _place(lab: Any, n_left: int) -> None:
    """Move the slider to the left by so many epochs."""
    lab.page.locator(".nbtrain-epochs [role=slider]:visible").focus()
    for _ in range(n_left):
        lab.page.keyboard.press("ArrowLeft")


@pytest.mark.long
def test_slider_of_a_finished_run_rewinds_says_so_and_gives_way_without_its_kernel(lab: Any, lab_root: Path) -> None:
    path = _run(lab, lab_root, "slider", "trainer.run(4, loader, loader)")
    _wait(lab, r"✓ completed · 4 epochs")
    _wait(lab, r"the end of epoch 4")
    _place(lab, 2)
    _wait(lab, r"the end of epoch 2")
    top = lab.page.evaluate(_TOP_OF_SLIDER)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):  # which later tests find
        lab.command("apputils:change-theme", wait=True, theme=theme)
        lab.page.wait_for_function("() => !document.querySelector('#jupyterlab-splash')")
        _shoot(lab.page, f"slider-{theme[11:].lower()}")
    lab.press("Branch here")
    _wait(lab, r"Branched from the end of epoch 2 · trainer\.branches\[0\] is the branch")
    lab.press("Rewind here")
    _wait(lab, r"Rewound to the end of epoch 2, step 60 · ")
    assert lab.page.evaluate(_TOP_OF_SLIDER) == top
    lab.command("docmanager:save", wait=True)
    lab.show(path)  # the kernel is there
    _wait(lab, r"Rewound to the end of epoch 2")
    _place(lab, 1)
    lab.press("Rewind here")
    _wait(lab, r"Rewound to the end of epoch 1, step 30")
    lab.command("docmanager:save", wait=True)
    lab.command("kernelmenu:shutdown", wait=True)
    _wait_without_slider(lab)
    lab.show(path)
    _wait(lab, r"✓ completed · 4 epochs")
    lab.page.wait_for_timeout(2000)  # in which JupyterLab would say that it has no such widget
    _wait_without_slider(lab)
    assert not [words for words in DEAD if words in _visible(lab)] and _visible(lab).count("· started ") == 1
    page, _ = HTMLExporter().from_filename(str(lab_root / path))
    assert "✓ completed" in page and not [words for words in DEAD if words in page] and "widget-view+json" not in page


def _wait_without_slider(lab: Any) -> None:
    gone = "() => ![...document.querySelectorAll('.nbtrain-epochs')].some(slider => slider.checkVisibility())"
    lab.page.wait_for_function(gone, timeout=90_000)


@pytest.mark.long
def test_slider_is_gone_after_a_restart_and_comes_with_a_pause(lab: Any, lab_root: Path) -> None:
    _run(lab, lab_root, "slider_paused", "handle = trainer.run(40, loader, loader, background=True)")
    _wait(lab, r"epoch 3/40 · ")
    button = lab.page.evaluate(_SAMPLE)["button"]
    _pause_in_training(lab)
    assert lab.page.evaluate(_SAMPLE)["button"] == button  # stands still
    _shoot(lab.page, "slider-paused")
    lab.press("Rewind here")
    _wait(lab, r"Rewound to the end of epoch ")
    _wait(lab, r"■ stopped")
    lab.page.evaluate(_RESTART)
    _wait_without_slider(lab)
    assert re.search(r"■ stopped · ", _visible(lab))


@pytest.mark.long
def test_pictures_have_a_slider_that_works_after_the_run_and_in_the_saved_file(lab: Any, lab_root: Path) -> None:
    cell = """class Ramps(Slow):
    pause_s = 0.05
    def metric_on_epoch_end(self):
        if self.mode == "train":
            self.show("ramp", torch.linspace(0, (1 + self.current_epoch) / 4, 64).view(1, 8, 8))

trainer = Ramps(nn.Linear(4, 1), device="cpu", optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
result = trainer.run(4, loader)"""
    lab.open(write_notebook(lab_root, "pictures", SETUP, cell))
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"^ramp epoch 2, step 60")
    assert lab.page.locator(".nbtrain-shown .stops:visible").count() == 0  # during the run there is only the newest
    _shoot(lab.page, "pictures-running")
    lab.wait_text(r"^✓ completed")
    lab.wait_text(r"^ramp epoch 4, step 120")
    stops = lab.page.locator(".nbtrain-shown:visible .stops label")
    assert stops.count() == 4 and lab.page.locator(".nbtrain-shown img:visible").count() == 1
    stops.nth(0).click()
    lab.wait_text(r"^ramp epoch 1, step 30")
    _shoot(lab.page, "pictures-chosen")
    lab.command("docmanager:save", wait=True)
    lab.command("kernelmenu:shutdown", wait=True)
    lab.show("pictures.ipynb")
    lab.wait_text(r"^ramp epoch 4, step 120")
    stops.nth(2).click()
    lab.wait_text(r"^ramp epoch 3, step 90")
    assert lab.page.locator(".nbtrain-shown img:visible").count() == 1
    _shoot(lab.page, "pictures-saved")


_FOCUSED = """() => {
    const e = document.activeElement, handle = e.classList.contains('noUi-handle');
    return [handle ? 'slider' : e.innerText, getComputedStyle(e).outlineStyle != 'none'];
}"""


@pytest.mark.long
def test_tab_leads_over_all_buttons_to_the_slider_and_the_focus_is_visible(lab: Any, lab_root: Path) -> None:
    _run(lab, lab_root, "keyboard", "trainer.run(20, loader, loader)")
    _wait(lab, r"epoch 3/20 · ")
    _pause_in_training(lab)
    lab.page.locator(".nbtrain-buttons button:visible").first.focus()
    seen = []
    while len(seen) < 12 and (not seen or seen[-1][0] != "Branch here"):
        seen.append(lab.page.evaluate(_FOCUSED))
        lab.page.keyboard.press("Tab")
    names = [name for name, _ in seen if "★" not in name]  # the value of the slider can be typed, too
    assert names == ["Continue", "Stop", "Validate now", "slider", "Rewind here", "Branch here"] and all(shown for _, shown in seen)


_RECORD_IS_SMALL = """() => {
    const area = document.querySelectorAll(".jp-OutputArea")[1];
    const record = area?.querySelector(".jp-OutputArea-output strong")?.closest(".jp-OutputArea-output");
    const height = record?.getBoundingClientRect().height ?? 0;
    return height > 0 && height < 350;
}"""


def test_run_that_has_not_begun_has_no_buttons_and_is_under_350_px(lab: Any, lab_root: Path) -> None:
    wrong = SETUP.replace('return {"loss": loss, ', 'return {"los": loss, ')
    lab.open(write_notebook(lab_root, "not-begun", wrong, "trainer.run(3, loader, loader)"))
    lab.command("notebook:run-all-cells")
    lab.wait_text(r"✗ not begun · StepError")
    lab.page.wait_for_function(_RECORD_IS_SMALL, timeout=90_000)  # the view replaces its output when the run ends
    assert lab.page.evaluate(_SAMPLE)["button"] is None
