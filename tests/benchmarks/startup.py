"""How long one waits for the first step: imports, the command, and a script up to its first training step.

Fresh processes in turn; CPU seconds of the process, medians over rounds. The first round is not counted: Python compiles in it what it
has not kept compiled, and keeps it, also where PYTHONDONTWRITEBYTECODE is set, as in many containers.
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
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryDirectory() as folder:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env=environment, **streams)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def script(tool: str) -> str:
    return SCRIPT.format(here=str(Path(__file__).parent), tool=tool)


PLAIN = "first step: plain loop"
CODES = {
    "python": "pass",
    "import nbtrain": "import nbtrain",
    "nbtrain --help": HELP,
    PLAIN: script("plain"),
    "first step: Lightning": script("lightning"),
    "first step: nbtrain": script("ours"),
}
OVER = {"import nbtrain": "python", "first step: Lightning": PLAIN, "first step: nbtrain": PLAIN}
NOTE = "If transformers is installed, Lightning imports it through torchmetrics, which takes it 0.6 s more."
BOUNDS_S = {"import nbtrain": 0.15, "nbtrain --help": 0.3, "first step: nbtrain": 0.6}


def table(n_rounds: int, only: set[str]) -> Table:
    names = [name for name in CODES if not only or name in only or any(OVER.get(chosen) == name for chosen in only)]
    seconds = {name: list[float]() for name in names}
    for i in range(n_rounds + 1):
        for name in names:
            own = cpu_s(CODES[name])
            seconds[name] += [own] if i else []
    over_s = {name: median(a - b for a, b in zip(seconds[name], seconds[base])) for name, base in OVER.items() if name in seconds}
    return shown({name: median(own) for name, own in seconds.items()}, over_s)


def shown(seconds: dict[str, float], over_s: dict[str, float]) -> Table:
    """`over_s`: how much more than what `OVER` names."""
    rows = []
    for name, own in seconds.items():
        over = f"{over_s[name]:+.2f} s" if name in over_s else ""
        cells: list[str | Claim] = [name, f"{own:.2f} s", over]
        if name in BOUNDS_S:
            cells[1 + (name in over_s)] = Claim("{:+.2f} s" if name in over_s else "{:.2f} s", over_s.get(name, own), BOUNDS_S[name])
        rows.append(Row((*cells, OVER.get(name, "")), bar=own))
    firsts = ", ".join(f"{name.removeprefix('first step: ')} {own:.2f} s" for name, own in seconds.items() if name.startswith("first step"))
    says = f"How long one waits from the start of Python to the end of the first step, in CPU seconds: {firsts}."
    return Table("Start-up", ("what", "in all", "more", "than"), tuple(rows), NOTE, says)


if __name__ == "__main__":
    main(table, 3)
