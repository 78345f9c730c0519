"""What the unit tests share."""

from __future__ import annotations

import os

import pytest

UNSEEN = {"checkpoint", "data", "engine", "foreign", "jobs", "loops", "run", "state", "trainer", "travel"}
OF_THE_CPU = {  # what is left out where `NBTRAIN_TEST_DEVICE` names another device, and why
    "test_columns_of_a_page_are_equal_as_it_says[lightning": "Lightning's Trainer trains on every device that it finds",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("NBTRAIN_TEST_DEVICE", "cpu") != "cpu":
        left_out = [item for item in items if item.name.startswith(tuple(OF_THE_CPU))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave an empty curves.png where no test looks at it: drawing it took a fifth of the time of all tests."""
    if request.path.parent.name in UNSEEN:
        monkeypatch.setattr("nbtrain.history.history.History.plot", lambda history: None)
        monkeypatch.setattr("nbtrain.views.plots.png", lambda figure: b"")
