"""Where the figures of a page come from: the command, the commit and the day, in a line that the command writes."""

from __future__ import annotations

import re
import subprocess
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = re.compile(r"`[0-9a-f]{8}`(?: with changes)?, \d{4}-\d\d-\d\d")


def source() -> str:
    """The commit, whether code or tests differ from it, and the day: to be read when a command begins, not hours later."""
    commit, changes = (
        subprocess.run(["git", *command.split()], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        for command in ("rev-parse --short=8 HEAD", "status --porcelain nbtrain tests")
    )
    return f"`{commit}`{' with changes' if changes else ''}, {date.today()}"


def line(command: str, of: str) -> str:
    """The line of a page that `make COMMAND` has made from `source()`."""
    return f"Made by `make {command}` at commit {of}."
