"""However an operation ends, what it changed is put back, and ■ ends it with one line."""

from __future__ import annotations

import pytest
from operations import ENDS, OPERATIONS, PAGE, changed, words
from samples import Broken

from nbtrain import RunStopped

EXPECTED = {"done": type(None), "■": RunStopped, "■■": RunStopped, "error": Broken}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_changed_is_put_back(name: str, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, when_done, always = OPERATIONS[name]
    found, error = changed(name, end)
    assert type(error) is EXPECTED[end]
    assert sorted(found) == sorted(when_done) if end == "done" else set(found) <= set(always)
    if isinstance(error, RunStopped):
        assert str(error).endswith("are as before") and "\n" not in str(error)
    (row,) = (line.split("|")[2:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |"))
    assert row[list(ENDS).index(end)].strip() == words(found), "run `python tests/operations.py`"
