"""Run the unit tests and time a step with each supported torch and Lightning, and write the table of docs/versions.md: `make versions`.

`--torch 2.15.0` and `--lightning 2.6.4` choose, and the other rows stay; `--only steps` runs no tests. Each torch has an environment of its
own, of some gigabytes: the wheel for Linux brings those of CUDA.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import proofs

ROOT = Path(__file__).resolve().parents[1]
PAGE, ENVIRONMENTS = ROOT / "docs" / "versions.md", ROOT / ".venv-versions"
TESTS = "tests/unit", "tests/test_layers.py", "tests/test_private_parts.py"
TORCH, LIGHTNING = ("2.9.1", "2.11.0", "2.13.0", "newest"), ("2.6.4", "newest")
FIRST, LAST = "<!-- made by `make versions` -->", "<!-- until here -->"
_COUNTS = re.compile(r"(\d+) (passed|failed|error|skipped)")


@dataclass(frozen=True)
class Pair:
    """A torch with a Lightning, as numbers of versions."""

    torch: str
    lightning: str

    @property
    def cells(self) -> str:
        return f"| {self.torch} | {self.lightning} |"


@dataclass(frozen=True)
class Found:
    """The tests as pytest counts them, a step beside that of a plain loop, and their commit and day."""

    tests: str
    step: str
    source: str = ""

    @property
    def failed(self) -> bool:
        return "failed" in self.tests or "error" in self.tests or "passed" not in self.tests


def python_of(torch: str) -> Path:
    """The Python of the environment of a torch, made where it isn't there. `newest` asks the index what that is."""
    folder = ENVIRONMENTS / f"torch-{torch}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        (folder / "transformers").symlink_to(ROOT / ".venv" / "transformers")
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not re.match(r"(torch|torchdata|lightning|setuptools)==", line)
    ]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins), encoding="utf-8")
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    _install(python, "pip>=25.1")  # the first that knows groups
    groups = [part for name in ("dev", "docs") for part in ("--group", f"{ROOT}/pyproject.toml:{name}")]
    _install(python, "--constraint", str(constraints), "--upgrade", wanted, "--editable", f"{ROOT}[examples]", *groups)
    return python


def _install(python: Path, *what: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what], check=True)


def measured(python: Path, lightning: str, only: str) -> tuple[Pair, Found]:
    """Install this Lightning, and run what is to be run."""
    _install(python, "--upgrade", "lightning" if lightning == "newest" else f"lightning=={lightning}")
    code = "from importlib.metadata import version; print(version('torch').partition('+')[0], version('lightning'))"
    source = proofs.source()
    pair = Pair(*_output(python, "-c", code).split())
    print(f"torch {pair.torch}, Lightning {pair.lightning}", flush=True)
    found = Found(_tests(python) if only != "steps" else "", _step(python) if only != "tests" else "", source)
    print(f"  {found.tests}; {found.step}", flush=True)
    return pair, found


def _output(python: Path, *arguments: str) -> str:
    environment = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run([python, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout


def _tests(python: Path) -> str:
    """pytest's counts; what failed is printed."""
    output = _output(python, "-m", "pytest", *TESTS)
    print(*(line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), sep="\n", flush=True)
    last = next((line for line in reversed(output.splitlines()) if _COUNTS.search(line)), "pytest has not ended")
    return ", ".join(f"{int(number):,} {what}" for number, what in _COUNTS.findall(last)) or last


def _step(python: Path) -> str:
    """The ratio of a step, from the table that the benchmark prints."""
    found = re.search(r"nbtrain (\d+\.\d+ ×)", _output(python, "tests/benchmarks/steps.py", "--rounds", "9", "--only", "nbtrain"))
    return found.group(1) if found else "not measured"


def rows() -> dict[Pair, Found]:
    """The table as it stands."""
    text = PAGE.read_text(encoding="utf-8").partition(FIRST)[2].partition(LAST)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if re.match(r"\| \d", line)]
    return {Pair(*cells[:2]): Found(*cells[2:]) for cells in lines}


def write(table: dict[Pair, Found]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(FIRST)
    after = rest.partition(LAST)[2]
    ordered = sorted(table, key=lambda pair: [[int(part) for part in number.split(".")] for number in (pair.torch, pair.lightning)])
    lines = ["| torch | Lightning | unit tests | a step, plain loop = 1 | at commit |", "| --- | --- | --- | --- | --- |"]
    lines += [f"{pair.cells} {table[pair].tests} | {table[pair].step} | {table[pair].source} |" for pair in ordered]
    PAGE.write_text("\n".join([before + FIRST, *lines, LAST]) + after, encoding="utf-8")


def main(arguments: Iterable[str] | None = None) -> int:
    """The exit code is 1 where a test fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", nargs="+", default=TORCH)
    parser.add_argument("--lightning", nargs="+", default=LIGHTNING)
    parser.add_argument("--only", choices=("tests", "steps"), default="")
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    failed = False
    for torch in chosen.torch:
        python = python_of(torch)
        for lightning in chosen.lightning:
            pair, found = measured(python, lightning, chosen.only)
            failed |= bool(found.tests) and found.failed
            table = rows()
            old = table.get(pair, Found("", ""))
            if chosen.only and old.source:  # a part that is measured alone names its own commit
                tests, step = (text and f"{text} at {found.source}" for text in (found.tests, found.step))
                found = Found(tests or old.tests, step or old.step, old.source)
            table[pair] = found
            write(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
