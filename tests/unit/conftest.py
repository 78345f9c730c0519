"""What the unit tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

OF_THE_CPU = {  # what is left out where `NBTRAIN_TEST_DEVICE` names another device, and why
    "test_columns_of_a_page_are_equal_as_it_says[lightning": "Lightning's Trainer trains on every device that it finds",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("NBTRAIN_TEST_DEVICE", "cpu") != "cpu":
        left_out = [item for item in items if item.name.startswith(tuple(OF_THE_CPU))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A busy machine may take much longer to import a client and to connect it; no test leaves the client of wandb to the next."""
    for kind in ("WandBLoggerAddon", "NeptuneLoggerAddon"):
        monkeypatch.setattr(f"nbtrain.{kind}.wait_s", 600.0)
    for name in ("loggers.addon._LOCAL_S", "loggers.addon._AWAY_S", "loggers.wandb._INIT_S", "loggers.wandb._FINISH_S"):
        monkeypatch.setattr(f"nbtrain.{name}", 600.0)
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "600")
    yield
    assert getattr(sys.modules.get("wandb.sdk.wandb_setup"), "_singleton", None) is None
