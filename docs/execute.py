"""Execute notebooks in a folder of their own, and keep the outputs: `python docs/execute.py [NOTEBOOK ...]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent


def execute(path: Path, folder: str) -> nbformat.NotebookNode:
    """The notebook at `path`, executed in `folder`; a raising cell raises."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(notebook, timeout=3600, store_widget_state=False, coalesce_streams=True, resources=resources)
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    notebook.metadata = nbformat.from_dict({"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}})
    return notebook


def main(names: list[str]) -> None:
    paths = [Path(name) for name in names] or sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, folder), path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
