"""Write the table of docs/hooks.md from `nbtrain.engine.hooks.HOOKS` and the names in `nbtrain.compat.hook_names`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from nbtrain.compat.hook_names import NNSCALER, OWN, TLAMA, HookName
from nbtrain.engine.hooks import HOOKS, HookPoint

PAGE = Path(__file__).resolve().parent / "hooks.md"
_TABLE = re.compile(r"^\| when .*?(?=^$|\Z)", re.M | re.S)
_HEAD = "| when | each | `nbtrain.Callback` | Lightning's | `TrainHook` | tlama |"


def _call(name: str, arguments: tuple[str, ...]) -> str:
    return f"`{name}({', '.join(arguments)})`"


def _calls(names: Mapping[str, HookName], moment: str) -> str:
    return " ".join(_call(name, hook.arguments) for name, hook in names.items() if hook.moment == moment)


def _row(point: HookPoint) -> str:
    callback = _call(point.method, point.given) if point.is_whole else ""
    own, lightnings = ("", callback) if point.is_lightnings else (callback, "")
    when = point.when + (f" With `{point.needs}`." if point.needs else "")
    cells = [when, point.span, own, lightnings, _calls(NNSCALER | OWN, point.name), _calls(TLAMA, point.name)]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The table as Markdown, in the order of a run."""
    return "\n".join([_HEAD, "|" + "---|" * (_HEAD.count("|") - 1), *map(_row, HOOKS)]) + "\n"


def pages() -> dict[Path, str]:
    """The page as it should be."""
    return {PAGE: _TABLE.sub(lambda found: table(), PAGE.read_text(encoding="utf-8"))}
