"""What the picture of 20 and of 200 runs is in JupyterLab: its height, its nodes, the time to draw, to sort, to open and to scroll."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chromium import chromium
from jupyterlab_tab import Lab, served, write_notebook
from tables import Claim, Row, Table, main

BEGIN = """import torch
from torch import nn
import nbtrain

class Line(nbtrain.Trainer):
    def train_step(self, batch):
        return {"loss": (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()}
    test_step = train_step

torch.manual_seed(0)
batches = [torch.randn(8, 4) for _ in range(5)]"""
SWEEP = """for i in range(N):
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    trainer = Line(net, "cpu", optimizer=torch.optim.SGD(net.parameters(), lr=1e-4 * 1.03**i, momentum=0.9 * (i % 2)))
    trainer.run(5, batches, batches[:2])"""
_MEASURE = """async (n) => {  // of the picture number n in the page
    const area = [...document.querySelectorAll('.jp-OutputArea')].filter(o => o.querySelector('.lines'))[n];
    area.scrollIntoView();
    const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
    const timed = async (act) => { await frame(); const t = performance.now(); act(); await frame(); return performance.now() - t; };
    const list = area.querySelector('.lines'), heads = [...area.querySelectorAll('label input')], frames = [], sorts = [];
    const found = {px: area.getBoundingClientRect().height, nodes: area.querySelectorAll('*').length};
    for (const i of [3, 1, 2, 0]) sorts.push(await timed(() => heads[i].click()));
    for (let i = 0; i < 60; i++) frames.push(await timed(() => { list.scrollTop = i * list.scrollHeight / 60; }));
    const line = area.querySelectorAll('summary')[10];
    const box = list.parentElement, html = box.outerHTML;
    return {...found, sort: Math.max(...sorts), scroll: frames.sort((a, b) => a - b)[57], open: await timed(() => line.click()),
            draw: await timed(() => { box.outerHTML = html; })};
}"""


def measured(browser: Any, url: str, folder: Path, n_runs: int) -> list[Row]:
    """The picture below the cell of the sweep, and that of `nbtrain.runs()`."""
    context = browser.new_context(viewport={"width": 1200, "height": 1100})
    lab = Lab(context.new_page(), url)
    path = write_notebook(folder, f"runs{n_runs}", BEGIN, f"N = {n_runs}\n{SWEEP}", "nbtrain.runs()", "print('all ' + 'done')")
    lab.open(path)
    lab.command("notebook:run-all-cells")
    lab.wait_text("^all done", 600)
    lab.page.wait_for_timeout(3000)  # until everything is drawn
    found: list[Mapping[str, float]] = [lab.page.evaluate(_MEASURE, n) for n in range(2)]
    lab.command("docmanager:save", wait=True)
    lab.command("kernelmenu:shutdown")
    context.close()
    size = f"{(folder / path).stat().st_size / 2000:,.0f}"
    return [_row(f"{n_runs} runs, {where}", figures, size) for where, figures in zip(("below their cell", "nbtrain.runs()"), found)]


def _row(name: str, figures: Mapping[str, float], size: str) -> Row:
    times = [f"{figures[what]:.0f}" for what in ("draw", "sort", "open", "scroll")]
    return Row((name, Claim("{:.0f}", figures["px"], 900), f"{figures['nodes']:,.0f}", *times, size))


COLUMNS = ("what", "px", "nodes", "ms to draw", "ms to sort", "ms to open a record", "ms a frame, scrolling", "file, KB")
NOTE = """Short runs of five epochs, in JupyterLab with Chromium, 1,200 px wide; a time ends with the frame that shows it, and a frame is
17 ms. The slowest of four sorts, the third slowest of 60 frames, and half of the file, which has the picture twice. Made by
`tests/benchmarks/many_runs.py`."""


def table(n_rounds: int, only: set[str]) -> Table:
    """Measure both numbers of runs once."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        folder = Path(place) / "lab"
        folder.mkdir()
        with served(folder) as url:
            for n_runs in (20, 200):
                if not only or str(n_runs) in only:
                    rows += measured(browser, url, folder, n_runs)
    return Table("Many runs in a browser", COLUMNS, tuple(rows), NOTE, "How high and how quick the picture of many runs is in a notebook.")


if __name__ == "__main__":
    main(table, 1)
