"""The addons, one file each: `from nbtrain.addons import StateManagerAddon`. Each is imported when it is first used, as in `nbtrain`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import nbtrain

__all__ = sorted(name for name, module in nbtrain.PUBLIC.items() if module.startswith("addons."))  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nbtrain.addons' has no attribute {name!r}")
    return getattr(import_module("nbtrain"), name)


def __dir__() -> list[str]:
    return list(__all__)
