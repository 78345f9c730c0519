"""Notebooks for the tests, in kernels that start at once; a test that is about the kernel's process starts its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient


class Watched(NotebookClient):
    """Asks as the frontend of a user does."""

    async def async_start_new_kernel_client(self, **options: Any) -> Any:
        client = await super().async_start_new_kernel_client(**options)
        client.allow_stdin = True
        return client


@pytest.fixture(scope="session")
def execute(warm_kernel: Any) -> Callable[..., Any]:
    """Executes cells, and gives the notebook that they have become."""

    def run(*cells: str) -> Any:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        Watched(notebook, warm_kernel(), timeout=600, store_widget_state=False, allow_errors=True).execute(cleanup_kc=True)
        return notebook

    return run


@pytest.fixture
def shown(outputs: dict[str, Any]) -> Callable[[str], str]:
    """The error that a cell ends with, without colours, by the name of the cell in the module's `outputs`.

    Numbers of frames are N, which other versions change.
    """

    def show(name: str) -> str:
        errors = [output for output in outputs[name] if output.output_type == "error"]
        assert len(errors) == 1, outputs[name]
        text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(errors[0].traceback))
        return re.sub(r"\[\d+ frames", "[N frames", re.sub(r"Cell In\[\d+\]", "Cell", text))

    return show


@pytest.fixture
def printed(outputs: dict[str, Any]) -> Callable[[str], str]:
    """What a cell prints, by its name."""
    return lambda name: "".join(output.text for output in outputs[name] if output.output_type == "stream")
