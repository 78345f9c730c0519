"""Run one short job with each library and write docs/ecosystem.md: `make ecosystem`, or `make ecosystem ONLY="timm peft"`."""

from __future__ import annotations

import ast
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import proofs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ecosystem.md"
LIMIT_S = 600
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_NEEDS = re.compile(r"^# dependencies = (\[.*?\])$", re.M)
_BARE = re.compile(r"^# no-deps = (\[.*?\])$", re.M)


@dataclass(frozen=True)
class Job:
    """A script with a docstring that says what it shows, and what it needs as PEP 723 writes it: `# dependencies = ["timm"]`.

    A library that asks for what can't be had beside this torch, and works without it, is installed alone: `# no-deps = ["tlama-core"]`.
    """

    path: Path
    shows: str
    needs: tuple[str, ...]  # as pip reads them; the first is the library that the job is about, if there is none in `bare`
    n_lines: int  # of code
    bare: tuple[str, ...] = ()  # what is installed without its dependencies

    @property
    def library(self) -> str:
        return re.split(r"[\[=<>~! ]", (*self.bare, *self.needs)[0])[0]


@dataclass(frozen=True)
class Outcome:
    """What became of a job. `reason`: why it failed; empty where it did not."""

    version: str
    seconds: float
    reason: str


def read_job(path: Path) -> Job:
    """The job in a script. Raises ValueError for one that says not what it shows, or what it needs."""
    text = path.read_text(encoding="utf-8")
    tree, needs = ast.parse(text), _NEEDS.search(text)
    shows = ast.get_docstring(tree)
    if shows is None or needs is None:
        raise ValueError(f'{path.name} needs a docstring and a line such as # dependencies = ["timm"]')
    first = tree.body[0].end_lineno or 1
    code = [line for line in text.splitlines()[first:] if line.strip() and not line.lstrip().startswith("#")]
    bare = tuple(ast.literal_eval(found[1])) if (found := _BARE.search(text)) is not None else ()
    return Job(path, " ".join(shows.split()), tuple(ast.literal_eval(needs[1])), len(code), bare)


def make_environment(job: Job) -> Path:
    """The Python of an environment for a job alone, in which what this one has is there too. What two libraries need may differ."""
    folder = Path(sys.prefix) / "jobs" / job.path.stem
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True)
        packages = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
        )
        shared = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (Path(packages.stdout.strip()) / "shared.pth").write_text(shared, encoding="utf-8")
    return python


def install(job: Job, python: Path) -> str:
    """Install what a job needs beside the tested torch and Lightning. Returns why it can't be installed."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith(("torch==", "lightning=="))]
    constraints = python.with_name("constraints.txt")
    constraints.write_text("\n".join(pins), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--constraint", constraints]
    for packages in (job.needs, ("--no-deps", *job.bare) if job.bare else ()):
        done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False) if packages else None
        if done is not None and done.returncode != 0:
            return f"not installed: {last_error(done.stderr)}"
    return ""


def run_job(job: Job, python: Path, limit_s: float = LIMIT_S) -> str:
    """Run a job in a process and a folder of its own. Returns why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | SETTINGS | {"HOME": folder, "PYTHONPATH": str(Path(__file__).with_name("without_cuda"))}
        try:
            done = subprocess.run(
                [python, job.path], cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not finished after {limit_s:g} s"
    return "" if done.returncode == 0 else last_error(done.stderr) or f"exit code {done.returncode}"


def last_error(text: str) -> str:
    """The line that says what went wrong: the last one that begins with an error's name, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|ERROR)\b", line)]
    return (errors or lines or [""])[-1][:200]


def outcome(job: Job) -> Outcome:
    """Install and run a job."""
    python = make_environment(job)
    reason, began = install(job, python), time.monotonic()
    reason = reason or run_job(job, python)
    return Outcome(installed_version(job, python), time.monotonic() - began, reason)


def installed_version(job: Job, python: Path) -> str:
    """The version of the library in the job's environment; empty where it is not there."""
    code = f"import importlib.metadata; print(importlib.metadata.version({job.library!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def row(job: Job, found: Outcome) -> str:
    """A job as a row of the page's table."""
    code = f"`{job.path.name}`"
    worked = "yes" if not found.reason else f"**no**: {found.reason.replace('|', '¦').replace('<', '‹')}"
    return f"| {job.library} | {found.version} | {job.shows} | {worked} | {code} | {job.n_lines} | {found.seconds:.0f} |"


def page(rows: Iterable[str], source: str) -> str:
    """The page with these rows."""
    rows = sorted(rows, key=str.lower)
    failed = sum("| **no**" in line for line in rows)
    tested = f"Python {platform.python_version()}, torch {version('torch')}, lightning {version('lightning')}"
    return f"""# Libraries that were tried

{len(rows) - failed} of {len(rows)} jobs did what they show, with {tested}.

{proofs.line("ecosystem", source)}

A job is a short script that uses the library as the library's own documentation does, on data that it makes, without a network. It ends
with an assertion. Copy one from `tests/ecosystem/` as a beginning. `make ecosystem` installs the newest versions that go with the tested
torch, each in an environment for itself, runs all jobs and writes this page. A library that can't be installed, or that breaks, is a row
that says why.

| library | version | what the job shows | worked | job | lines | seconds |
| --- | --- | --- | --- | --- | ---: | ---: |
{chr(10).join(rows)}

Lines are lines of code. Seconds are those of the whole process, with its imports, on one thread.

torchvision on PyPI is built for CUDA. Beside a torch for CPUs its compiled operators are missing here, such as `nms`: a detector trains and
does not predict.
"""


def main(only: list[str]) -> None:
    jobs = [read_job(path) for path in sorted(Path(__file__).parent.glob("with_*.py"))]
    if unknown := set(only) - {job.library for job in jobs}:
        raise SystemExit(f"There is no job for {', '.join(sorted(unknown))}. There is: {', '.join(sorted(job.library for job in jobs))}")
    rows, source = [], proofs.source()
    for job in jobs:
        if not only or job.library in only:
            rows.append(row(job, outcome(job)))
            print(rows[-1], flush=True)
    if not only:
        PAGE.write_text(page(rows, source), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
