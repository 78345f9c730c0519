"""The addons, one file a capability: `from nbtrain.addons import StateManagerAddon`. Each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import nbtrain

# Each trainer has these; `trainer[KeptStatesAddon]` finds them
_DEFAULT = {
    "HooksAddon": "addons.hooks",
    "KeptStatesAddon": "state.addon",
    "LiveViewAddon": "library.live_view",
    "SourceAddon": "code.addon",
}
# Those for loggers are in `nbtrain.loggers`
_PUBLIC = [name for name, module in nbtrain.PUBLIC.items() if module.startswith("addons.") or name.endswith("Addon")]
__all__ = sorted([*_PUBLIC, *_DEFAULT])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _DEFAULT:
        return getattr(import_module(f"nbtrain.{_DEFAULT[name]}"), name)
    if name not in __all__:
        if not name.startswith("_"):
            getattr(nbtrain, name, None)  # raises ImportError for a name that was renamed
        raise AttributeError(f"module 'nbtrain.addons' has no attribute {name!r}")
    return getattr(nbtrain, name)


def __dir__() -> list[str]:
    return list(__all__)
