"""Processes that tests may kill, forked from one that has imported what takes seconds to import."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "numpy", "nbtrain.trainer.trainer", "nbtrain.checkpoint.files", "interruptions"])


class Script:
    """A script that runs in a process of its own; `lines` are what it has printed, as they come."""

    def __init__(self, path: Path, *arguments: object) -> None:
        output, theirs = CONTEXT.Pipe(duplex=False)
        theirs_in, self._input = CONTEXT.Pipe(duplex=False)
        command = [str(path), *map(str, arguments)]
        self.process = CONTEXT.Process(target=_run_script, args=(command, theirs_in, theirs))
        self.process.start()
        theirs.close()
        theirs_in.close()
        self.lines = open(os.dup(output.fileno()))
        output.close()

    def read(self, n: int) -> bool:
        """Wait for `n` lines. False if it ended before."""
        return all(self.lines.readline() for _ in range(n))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the signal and wait for the end; a script that reads its input finds the end of it after the signal."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # it ended before
            os.kill(self.process.pid, number)
        self.wait()

    def wait(self) -> int:
        """Wait for the end. Returns the exit code."""
        self._input.close()
        self.process.join()
        self.lines.close()  # workers of a killed process live on for seconds, and hold the other end
        assert self.process.exitcode is not None
        return self.process.exitcode


def _run_script(command: list[str], standard_input: Connection, standard_output: Connection) -> None:
    multiprocessing.set_start_method("fork", force=True)  # for the script's own workers, as in a process that was not forked itself
    os.dup2(standard_input.fileno(), 0)
    os.dup2(standard_output.fileno(), 1)
    sys.argv, sys.stdin, sys.stdout = command, os.fdopen(0), os.fdopen(1, "w")
    runpy.run_path(command[0], run_name="__main__")
