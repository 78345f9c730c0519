"""Write the table of docs/hooks.md from `nbtrain.engine.hooks.HOOKS` and the names in `nbtrain.compat.hook_names`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import lightning as L

from nbtrain.compat.hook_names import NNSCALER, OWN, TLAMA, HookName
from nbtrain.engine.hooks import HOOKS, HookPoint

PAGE = Path(__file__).resolve().parent / "hooks.md"
_TABLE = re.compile(r"^\| when .*?(?=^$|\Z)", re.M | re.S)
_HEAD = "| when | each | `nbtrain.Callback` | Lightning's | `TrainHook` | tlama |"


def is_whole(point: HookPoint) -> bool:
    """Whether a callback's method means this alone in its kind of pass. The others, such as `first`, are for HooksAddon."""
    return point.part in ("", "train", "valid", "test")


def is_lightnings(point: HookPoint) -> bool:
    """Whether Lightning calls the method."""
    return hasattr(L.Callback, point.method)


def _call(name: str, arguments: tuple[str, ...]) -> str:
    return f"`{name}({', '.join(arguments)})`"


def _calls(names: Mapping[str, HookName], moment: str) -> str:
    return " ".join(_call(name, hook.arguments) for name, hook in names.items() if hook.moment == moment)


def _row(point: HookPoint) -> str:
    callback = _call(point.method, point.given) if is_whole(point) else ""
    own, lightnings = ("", callback) if is_lightnings(point) else (callback, "")
    when = point.when + (f" With `{point.needs}`." if point.needs else "")
    cells = [when, point.span, own, lightnings, _calls(NNSCALER | OWN, point.name), _calls(TLAMA, point.name)]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The table as Markdown, in the order of a run."""
    return "\n".join([_HEAD, "|" + "---|" * (_HEAD.count("|") - 1), *map(_row, HOOKS)]) + "\n"


def pages() -> dict[Path, str]:
    """The page as it should be."""
    return {PAGE: _TABLE.sub(lambda found: table(), PAGE.read_text(encoding="utf-8"))}
