"""Run all benchmarks, each as a process of its own, and write docs/benchmarks.md: `make bench`; `--rounds` and `--only` go to each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import proofs

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "benchmarks.md"
PARTS = (
    "steps",
    "features",
    "loggers",
    "evaluation",
    "calls",
    "epochs",
    "counts",
    "long_history",
    "kernel",
    "first_digit",
    "loaders",
    "real_models",
    "scaling",
    "startup",
    "memory",
    "peaks",
    "sweep_views",
    "many_runs",
)
HEAD = """# Benchmarks

{made}
`make bench-peers` installs the peers. How the figures come about, and what could make them unfair, is written in
`tests/benchmarks/measure.py`; how each tool is used, in `tests/benchmarks/contenders.py`. The model is tiny on purpose: at 50 ms a
step the slowest tool here adds about a twentieth.

"1.00 × (bound 1.10)" reads: 1.00 times what it is measured against, and more than 1.10 fails the benchmark. A missed bound is bold.
Bounds in µs, ms and s are those of a machine on which the plain loop of the first table takes 550 µs; a slower one may miss them.
"""


def main() -> int:
    """The exit code is 1 where a bound is missed."""
    texts, facts, missed, head = [], "", False, HEAD.format(made=proofs.line("bench", proofs.source()))
    paths = map(str, [HERE.parent, HERE.parent / "browser", *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    for part in PARTS:
        done = subprocess.run([sys.executable, HERE / f"{part}.py", *sys.argv[1:]], stdout=subprocess.PIPE, text=True, env=environment)
        text, _, facts = done.stdout.strip().rpartition("\n\n")
        texts.append(text)
        missed |= done.returncode != 0
        print(text, end="\n\n", flush=True)
    print(facts)
    PAGE.write_text("\n".join([head, facts + ".\n", *(f"{text}\n" for text in texts)]), encoding="utf-8")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
