"""JupyterLab on this machine only, and a tab of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

_IDLE = "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
_OF_RUN = ".jp-OutputArea button:not(.nbtrain-epochs button)"  # those below a finished run stay
_NO_BUTTONS = f"() => ![...document.querySelectorAll('{_OF_RUN}')].some(b => b.checkVisibility())"
_BROKEN = r"""() => {  // words below the cells that go on in the next line
    const found = [], range = document.createRange();
    for (const area of document.querySelectorAll('.jp-Notebook .jp-OutputArea')) {
        const texts = document.createTreeWalker(area, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
            if (!texts.currentNode.parentElement.checkVisibility()) continue;
            for (const word of texts.currentNode.data.matchAll(/\S+/g)) {
                range.setStart(texts.currentNode, word.index);
                range.setEnd(texts.currentNode, word.index + word[0].length);
                const tops = [...range.getClientRects()].map(r => r.top);
                if (Math.max(...tops) - Math.min(...tops) > 8) found.push(word[0]);
            }
        }
    }
    return found;
}"""
_LARGEST_GAP = """(n) => {  // px of nothing between two things below a cell, one above the other
    const box = document.querySelectorAll('.jp-OutputArea')[n], range = document.createRange(), rows = [];
    const texts = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        if (!texts.currentNode.parentElement.checkVisibility() || !texts.currentNode.data.trim()) continue;
        range.selectNodeContents(texts.currentNode);
        rows.push(...range.getClientRects());
    }
    for (const item of box.querySelectorAll('img, progress, button'))
        if (item.checkVisibility()) rows.push(item.getBoundingClientRect());
    rows.sort((a, b) => a.top - b.top);
    let end = box.getBoundingClientRect().top, gap = 0;
    for (const row of rows) { gap = Math.max(gap, row.top - end); end = Math.max(end, row.bottom); }
    return Math.max(gap, box.getBoundingClientRect().bottom - end);
}"""
_SHOWS = "(p) => new RegExp(p, 'm').test([...document.querySelectorAll('.jp-OutputArea')].map(o => o.innerText).join('\\n'))"


def _add_older_kernel(folder: Path) -> None:
    """A kernel of the line before, ipykernel 6, beside the one that is installed."""
    lowest = Path(sys.prefix) / "lowest"
    assert (lowest / "ipykernel").is_dir(), f"{lowest} is missing: make .venv/installed-dev"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    paths = os.pathsep.join([str(lowest), *filter(None, [os.environ.get("PYTHONPATH")])])
    spec = {"argv": command, "display_name": "older", "language": "python", "env": {"PYTHONPATH": paths}}
    (folder / "kernel.json").write_text(json.dumps(spec))


@contextmanager
def served(lab_root: Path) -> Iterator[str]:
    """The address of a JupyterLab that serves `lab_root` while the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = lab_root.parent / "home"
    home.mkdir(exist_ok=True)
    places = {
        "HOME": "",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
    }
    environment = os.environ | {name: str(home / folder) for name, folder in places.items()} | {"JUPYTER_PLATFORM_DIRS": "1"}
    _add_older_kernel(home / "data" / "kernels" / "older")
    settings = home / "config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text('{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}')
    options = [
        "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=token",
        f"--ServerApp.root_dir={lab_root}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    log = home / "lab.log"
    with log.open("w") as output:
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/api/status?token=token", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                time.sleep(0.25)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


class Lab:
    """One JupyterLab tab."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        page.goto(f"{url}/lab?token=token")
        page.wait_for_selector("#jp-main-dock-panel", timeout=600_000)

    def show(self, name: str) -> None:
        """Load the page again with a notebook whose kernel may be busy, or gone."""
        self.page.goto(f"{self.url}/lab/tree/{name}?reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=600_000)

    def open(self, name: str) -> None:
        self.show(name)
        self.page.wait_for_function(_IDLE, timeout=600_000)

    def press(self, label: str) -> None:
        """Press a button of the view."""
        self.page.locator(f".jp-OutputArea button:visible:has-text('{label}')").first.click()

    def command(self, name: str, *, wait: bool = False, **arguments: str) -> None:
        code = "([name, a, wait]) => { const done = jupyterapp.commands.execute(name, a); return wait ? done.then(() => null) : null }"
        self.page.evaluate(code, [name, arguments, wait])

    def wait_text(self, pattern: str, timeout_s: float = 90) -> None:
        self.page.wait_for_function(_SHOWS, arg=pattern, timeout=timeout_s * 1000)

    def largest_gap(self, n: int = 1) -> float:
        """The height of the largest empty space below the cell number `n`, counted from 0, in px."""
        return self.page.evaluate(_LARGEST_GAP, n)

    def broken_words(self, width: int) -> list[str]:
        """The words below the cells that break in the middle in a window of this width, in px."""
        self.page.set_viewport_size({"width": width, "height": 1100})
        self.page.wait_for_timeout(500)  # JupyterLab lays out
        return self.page.evaluate(_BROKEN)

    def wait_no_buttons(self) -> None:
        """The buttons of a run close after the record's last update."""
        self.page.wait_for_function(_NO_BUTTONS, timeout=600_000)


def write_notebook(lab_root: Path, name: str, *cells: str, kernel: str = "python3") -> str:
    """A notebook of these code cells; returns its file's name."""
    metadata = {"kernelspec": {"display_name": kernel, "language": "python", "name": kernel}}  # else a dialog asks
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=metadata)
    nbformat.write(written, lab_root / f"{name}.ipynb")
    return f"{name}.ipynb"
