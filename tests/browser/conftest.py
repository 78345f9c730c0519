"""JupyterLab for the browser tests: one server, and a tab for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyterlab_tab import Lab, served


@pytest.fixture(scope="session")
def lab_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="session")
def lab_url(lab_root: Path) -> Iterator[str]:
    with served(lab_root) as url:
        yield url


@pytest.fixture
def lab(browser: Any, lab_url: str) -> Iterator[Lab]:
    context = browser.new_context(viewport={"width": 1200, "height": 1100})
    yield Lab(context.new_page(), lab_url)
    context.close()
