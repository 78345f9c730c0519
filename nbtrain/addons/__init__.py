"""The addons, one file a capability: `from nbtrain.addons import StateManagerAddon`. Each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import nbtrain

# Those for loggers are in `nbtrain.loggers`
__all__ = sorted(name for name, module in nbtrain.PUBLIC.items() if module.startswith("addons.") or name.endswith("Addon"))  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        if not name.startswith("_"):
            getattr(nbtrain, name, None)  # raises ImportError for a name that was renamed
        raise AttributeError(f"module 'nbtrain.addons' has no attribute {name!r}")
    return getattr(import_module("nbtrain"), name)


def __dir__() -> list[str]:
    return list(__all__)
