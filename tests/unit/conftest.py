"""What the unit tests share."""

from __future__ import annotations

import pytest

UNSEEN = {"checkpoint", "data", "engine", "foreign", "jobs", "loops", "run", "state", "trainer", "travel"}


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave an empty curves.png where no test looks at it: drawing it took a fifth of the time of all tests."""
    if request.path.parent.name in UNSEEN:
        monkeypatch.setattr("nbtrain.history.history.History.plot", lambda history: None)
        monkeypatch.setattr("nbtrain.views.plots.png", lambda figure: b"")
