"""The first ten minutes of a newcomer, timed: `first_minutes.py [--install]` writes the table in docs/get_started.md.

Each row is a program of its own, from its start to its end, so that most of it is the import of torch and Lightning. With `--install`
also the installation, into a new environment with pip's cache as it is. On a busy machine it writes nothing.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "get_started.md"
BEGIN, END = "<!-- Made by tests/benchmarks/first_minutes.py -->", "<!-- end -->"
MODEL = re.search(r"```python\n(import torch\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]  # type: ignore[index]
MISTAKE = MODEL.replace('return {"loss": cross_entropy(logits, y), "acc"', 'return {"los": cross_entropy(logits, y), "acc"')
SAVING = """
from nbtrain import StateManagerAddon
trainer = Digits.add_on(StateManagerAddon)(SmallCNN(), "cpu", optimizer=lambda p: torch.optim.Adam(p, lr=1e-3), save_path="runs")
trainer.run(4, *digits_loaders(), resume="auto")
print("epochs:", len(trainer.history.epochs))
"""


def _seconds(command: list[str | Path], folder: Path, expected: str, code: int = 0) -> float:
    """Run `command` in `folder`. Raises RuntimeError if it ends with another code, or does not print what is expected."""
    begin = time.perf_counter()
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    seconds = time.perf_counter() - begin
    if done.returncode != code or expected not in done.stdout + done.stderr:
        raise RuntimeError(f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds


def _install(folder: Path) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    constraints = ROOT / "constraints.txt"
    subprocess.run([folder / "env" / "bin" / "pip", "install", "--quiet", "--constraint", constraints, ROOT], check=True)
    return time.perf_counter() - begin


def rows(folder: Path, *, install: bool) -> dict[str, float]:
    """What a newcomer does, with the seconds that it takes."""
    python = Path(sys.executable)
    for name, text in {"own.py": MODEL, "mistake.py": MISTAKE, "saving.py": MODEL.partition("torch.manual_seed")[0] + SAVING}.items():
        (folder / name).write_text(text, encoding="utf-8")
    steps: dict[str, Callable[[], float]] = {
        "`pip install .` in a fresh environment, with the packages in pip's cache": lambda: _install(folder),
        "first picture: `nbtrain demo`, ten epochs": lambda: _seconds([python, "-m", "nbtrain", "demo"], folder, "completed"),
        "your own model: the script below, three epochs": lambda: _seconds([python, "own.py"], folder, "completed True"),
        "first mistake: a step without a loss, time until the error message": lambda: _seconds(
            [python, "mistake.py"], folder, "without 'loss'", 1
        ),
        "first resume: the same line again, once a run of four epochs has ended": lambda: _again(python, folder),
    }
    return {name: step() for name, step in steps.items() if install or "pip install" not in name}


def _again(python: Path, folder: Path) -> float:
    _seconds([python, "saving.py"], folder, "epochs: 4")
    return _seconds([python, "saving.py"], folder, "epochs: 4")


def main() -> None:
    if (load := os.getloadavg()[0]) > 0.5 * (os.cpu_count() or 1):
        sys.exit(f"The machine is busy (load {load:.1f}): its figures would not be those of a newcomer.")
    with tempfile.TemporaryDirectory() as folder:
        found = rows(Path(folder), install="--install" in sys.argv)
    cpu = next(iter(re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())), platform.processor())
    head = f"On {cpu.partition(' with')[0]}, {os.cpu_count()} cores, each in a new process:"
    table = "\n".join(["| step | seconds |", "| --- | ---: |", *(f"| {name} | {seconds:.0f} |" for name, seconds in found.items())])
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{head}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
