"""How long one waits for the first step: imports, the command, and a script up to its first training step.

Fresh processes in turn; CPU seconds of the process, medians over rounds.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tables import Claim, Row, Table, main

SCRIPT = """
import os, sys, warnings
from pathlib import Path
sys.path.insert(0, {here!r})
import contenders, workload
warnings.simplefilter("ignore")

class FirstStep(workload.Clock):
    def tick(self):
        super().tick()
        if self.n == 2:  # the second forward: one step is done
            os._exit(0)

contenders.{tool}(workload.Job(Path("."), clock=FirstStep()))
"""
HELP = "import sys; sys.argv = ['nbtrain', '--help']; from nbtrain.cli import main; main()"  # what the command `nbtrain` does


def cpu_s(code: str) -> float:
    """CPU seconds of a new interpreter that runs `code`, its own start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env=environment, **streams)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def script(tool: str) -> str:
    return SCRIPT.format(here=str(Path(__file__).parent), tool=tool)


CODES = {
    "python": "pass",
    "import nbtrain": "import nbtrain",
    "nbtrain --help": HELP,
    "first step: plain loop": script("plain"),
    "first step: Lightning": script("lightning"),
    "first step: nbtrain": script("ours"),
}
OVER = {"import nbtrain": "python", "first step: nbtrain": "first step: Lightning"}
CLAIMS = {
    "import nbtrain": ("≤ {} s over python", 0.15),
    "nbtrain --help": ("≤ {} s", 0.3),
    "first step: nbtrain": ("≤ {} s over Lightning", 0.2),
}


def table(n_rounds: int, only: set[str]) -> Table:
    names = [name for name in CODES if not only or name in only or any(OVER.get(chosen) == name for chosen in only)]
    seconds = {name: list[float]() for name in names}
    for _ in range(n_rounds):
        for name in names:
            seconds[name].append(cpu_s(CODES[name]))
    rows = []
    for name, own in seconds.items():
        over = [a - b for a, b in zip(own, seconds[OVER[name]])] if name in OVER else own
        claims = (Claim(CLAIMS[name][0], median(over), CLAIMS[name][1]),) if name in CLAIMS else ()
        rows.append(Row((name, f"{median(own):.2f}", f"{median(over):+.2f}" if name in OVER else ""), claims))
    return Table("Start-up", ("what", "CPU s", "s over"), tuple(rows))


if __name__ == "__main__":
    main(table, 3)
