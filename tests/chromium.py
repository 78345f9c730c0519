"""A headless Chromium, for what people see."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser, which is closed after the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"])
        yield browser
        browser.close()
        # Workers of loaders that this process has forked since then hold the driver's pipe open, and it would not end
        for child in multiprocessing.active_children():
            child.kill()
