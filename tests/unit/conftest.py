"""What the unit tests share."""

from __future__ import annotations

import pytest

LOOKED_AT = {"history", "loggers", "tools", "views"}  # here, what a run leaves is looked at


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave an empty curves.png in tests that are on something else: drawing it took a fifth of their time."""
    if request.path.parent.name not in LOOKED_AT:
        monkeypatch.setattr("nbtrain.history.history.History.plot", lambda history: None)
        monkeypatch.setattr("nbtrain.views.plots.png", lambda figure: b"")
