"""Notebooks for the tests, in kernels that start at once; a test that is about the kernel's process starts its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient


class Watched(NotebookClient):
    """Asks as a frontend does at which somebody sits."""

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
