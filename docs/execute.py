"""Execute notebooks in a folder of their own, and keep the outputs: `python docs/execute.py [NOTEBOOK ...]`.

With `--compare` nothing is kept: the metrics and texts that come out are set beside those of the stored outputs. Where another kind of
processor has stored them, torch rounds otherwise, and training amplifies it: `--within 0.05`.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
_NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_METRIC = re.compile(rf"\b((?:train|val|test)_\w+|loss|accuracy|acc|f1|perplexity)['\"]?[:=]?\s+({_NUMBER})\b")
_VARYING = re.compile(r"(_per_s|time_s|wait_share|_gb)$")  # of the machine and the moment
_WITHIN, _ZERO = 1e-4, 1e-6  # a seed and one thread give the same numbers; relative, and what counts as zero
# What may differ in a text: addresses, hashes, pictures, numbers with their unit, bars, and the spaces that align them
_NOT_WORDING = re.compile(
    r"nbtrain-[0-9a-f]{8}|0x[0-9a-f]+|base64,[^\"]+"
    r"|-?\b[0-9a-f]{7,}\b|-?\d[\d,.]*(?:e[+-]?\d+)?(?: ?(?:[µm]?s|min|[kMG]i?B)\b)?|[▁-█━╸╺─]|\s"
)


@contextmanager
def warm_kernels() -> Iterator[Callable[[], AsyncKernelManager]]:
    """A function that makes managers of kernels that have imported the large packages already: see `warm_kernels.py`."""
    program = [sys.executable, str(ROOT / "docs" / "warm_kernels.py")]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        process = subprocess.Popen([*program, path], stdout=subprocess.DEVNULL)  # where a kernel says how to connect to it
        try:
            while not Path(path).exists():
                assert process.poll() is None, "the process that forks kernels has ended"
                time.sleep(0.05)
            spec = KernelSpec(argv=[*program, path, "-f", "{connection_file}", "--log-level=ERROR"], display_name="warm", language="python")

            def make_manager() -> AsyncKernelManager:
                manager = AsyncKernelManager()
                manager._kernel_spec = spec
                return manager

            yield make_manager
        finally:
            process.terminate()
            process.wait()


def execute(path: Path, folder: str, manager: AsyncKernelManager) -> nbformat.NotebookNode:
    """The notebook at `path`, executed in `folder` by a kernel that `manager` starts and ends; a raising cell raises."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(notebook, manager, timeout=3600, store_widget_state=False, coalesce_streams=True, resources=resources)
    client.execute(cleanup_kc=True)  # which it would not do with a manager that it was given
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    notebook.metadata = nbformat.from_dict({"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}})
    return notebook


def results(notebook: nbformat.NotebookNode) -> list[tuple[int, str, float]]:
    """What the outputs say that was measured, in their order: the cell, a metric's name, its value.

    Times and rates are left out, and cells tagged "varies": what they show depends on when something happened, or on the processor.
    """
    found = []
    for n, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []) if "varies" not in cell.metadata.get("tags", []) else []:
            text = output.get("text", "") or output.get("data", {}).get("text/plain", "")
            found += [(n, name, float(value)) for name, value in _pairs(text) if not _VARYING.search(name)]
    return found


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Names with their values: of tables by column, elsewhere where a value follows a name."""
    header: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and all(re.fullmatch(r"[a-z]\w*", word) for word in words):
            header = words
        elif header and len(words) >= len(header) and re.fullmatch(_NUMBER, words[0]):
            yield from ((name, word) for name, word in zip(header, words) if "_" in name and re.fullmatch(_NUMBER, word))
        else:
            header = []
            yield from _METRIC.findall(line)


def differences(stored: nbformat.NotebookNode, fresh: nbformat.NotebookNode, within: float = _WITHIN) -> list[str]:
    """What does not agree, a line each; metrics may differ by the share `within`."""
    old, new = results(stored), results(fresh)
    if [found[:2] for found in old] != [found[:2] for found in new]:
        return [f"other metrics: {len(old)} are stored, {len(new)} came out", *_other_lines(stored, fresh)]
    far = [
        f"cell {cell}: {name} is {value:g}, {after:g} came out"
        for (cell, name, value), (_, _, after) in zip(old, new)
        if not math.isclose(value, after, rel_tol=within, abs_tol=_ZERO)
    ]
    return far + _other_lines(stored, fresh)


def _other_lines(stored: nbformat.NotebookNode, fresh: nbformat.NotebookNode) -> list[str]:
    """The first line of each cell's texts that has other words."""
    found = []
    for n, (old, new) in enumerate(zip(stored.cells, fresh.cells)):
        pairs = zip_longest(_lines(old), _lines(new), fillvalue="")
        other = next(((a, b) for a, b in pairs if _NOT_WORDING.sub("", a) != _NOT_WORDING.sub("", b)), None)
        if other and "varies" not in old.metadata.get("tags", []):
            found.append(f"cell {n}: the text is {other[0][:200]!r}, {other[1][:200]!r} came out")
    return found


def _lines(cell: nbformat.NotebookNode) -> list[str]:
    outputs = cell.get("outputs", [])
    texts = [
        output.get("text", "") + "".join(output.get("data", {}).get(kind, "") for kind in ("text/plain", "text/html")) for output in outputs
    ]
    return "".join(texts).splitlines()


def main(arguments: list[str]) -> int:
    """Returns how many notebooks do not agree with what they have stored; 0 without `--compare`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    parser.add_argument("--compare", action="store_true", help="keep the stored outputs, and compare with them")
    parser.add_argument("--within", type=float, default=_WITHIN, metavar="SHARE", help=f"by which a metric may differ: {_WITHIN}")
    given = parser.parse_args(arguments)
    paths = given.notebooks or sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    os.environ["OMP_NUM_THREADS"] = "1"  # with another number of threads torch rounds otherwise, and training amplifies it
    with warm_kernels() as make_manager:
        return sum(_execute_one(path, make_manager(), compare=given.compare, within=given.within) for path in paths)


def _execute_one(path: Path, manager: AsyncKernelManager, *, compare: bool, within: float) -> bool:
    """Does it not agree with what it has stored?"""
    try:
        with tempfile.TemporaryDirectory() as folder:
            fresh = execute(path, folder, manager)
    except CellExecutionError as error:
        if not compare:
            raise
        print(path, f"{error.ename}: {error.evalue}", error, sep="\n  ", flush=True)
        return True
    if not compare:
        nbformat.write(fresh, path)
        print(path, flush=True)
        return False
    stored = nbformat.read(path, as_version=4)
    found = differences(stored, fresh, within)
    print(path, *(found or [f"{len(results(stored))} metrics and all texts agree"]), sep="\n  ", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
