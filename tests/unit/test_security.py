"""What SECURITY.md says is about the commands that there are."""

from __future__ import annotations

import re
from pathlib import Path

from nbtrain.cli import _parser

TEXT = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text()


def test_every_command_is_in_the_table_of_what_is_safe() -> None:
    (commands,) = [set(action.choices) for action in _parser()._actions if action.choices]
    assert set(re.findall(r"^\| `nbtrain ([\w-]+)", TEXT, re.MULTILINE)) == commands


def test_packages_that_a_configuration_may_name_are_listed() -> None:
    from nbtrain.config.trust import _CALLED, _CLASSES

    packages = {name.partition(".")[0] for name in (*_CALLED, *_CLASSES)} - {"math"}
    assert all(re.search(rf"\b{package}\b", TEXT) for package in packages)
