"""The package as it was at an earlier commit, and a process that trains with it: what the package of this tree is compared with.

Both are named `nbtrain`, so a process imports one of them: the earlier one is in a folder of its own, which comes first in its PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEFORE = "e55e2899b1ea0f207b645fc8469ec1d4bfdbeb0a"  # the last commit whose trainers train on Lightning's loops, corrected


def folder_of(commit: str = BEFORE) -> Path:
    """A folder with the package of `commit`, which git ignores. It is made once, from the history of this repository."""
    folder = ROOT / "build" / "nbtrain_before" / commit
    if folder.exists():
        return folder
    archive = subprocess.run(["git", "archive", commit, "nbtrain"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        words = archive.stderr.decode().strip()
        raise RuntimeError(
            f"The package of {commit[:8]} is made from git, which has it in a whole clone (`git fetch --unshallow`): {words}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        subprocess.run(["tar", "-x", "-C", made], input=archive.stdout, check=True)
        try:
            Path(made).rename(folder)  # whole, or not there
        except OSError:  # another process was faster
            if not folder.exists():
                raise
            return folder
        Path(made).mkdir()  # which its context removes
    return folder


class Process:
    """A process that imports the package in the folder `package`, and calls `function` of the module `module` of tests with each task.

    A task and what is returned for it are plain values. It lives until `close`, because it takes seconds to start.
    """

    def __init__(self, package: Path, module: str, function: str) -> None:
        self.name = f"nbtrain in {package}"
        tests = os.pathsep.join([str(package), str(ROOT / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import before, {module}; before.serve({module}.{function}, {str(package)!r})"],
            cwd=package,  # which Python puts first
            env=os.environ | {"PYTHONPATH": tests, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, *task: Any) -> None:
        """Give it a task, to be done while others work."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """What the function has returned for the task that was given."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended with exit code {self._process.wait()}; see what it has printed.")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve(function: Any, package: str) -> None:
    """The other side: call `function` with each task from the input. What is printed meanwhile goes to the errors."""
    import nbtrain

    assert Path(nbtrain.__file__).parent.parent == Path(package), f"{nbtrain.__file__} was imported, not {package}"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(function(*json.loads(line))) + "\n")
        answers.flush()
    os._exit(0)  # what it leaves is in temporary folders, and torch takes a second to end
