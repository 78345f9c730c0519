"""Where the CPU seconds up to the first step go, by package: `python tests/benchmarks/import_times.py [ours | lightning | plain]`.

A module counts without those that it imports, and without the garbage collector, which is a row. What remains of the process is its start
and all that is not an import.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from startup import script
from tables import Row, Table

# Before all other imports: the import system is asked for every module that is not imported yet through this one function
WATCH = """
import gc, importlib._bootstrap, json, os, sys, time
load, spent_s, own_s, n, gc_s, begun_s = importlib._bootstrap._find_and_load, [0.0], {}, {}, [0.0], [0.0]

def watched(name, import_):
    if name in sys.modules:
        return load(name, import_)
    start_s = time.thread_time() - gc_s[0]
    spent_s.append(0.0)
    try:
        return load(name, import_)
    finally:
        inclusive_s, package = time.thread_time() - gc_s[0] - start_s, name.partition(".")[0]
        own_s[package] = own_s.get(package, 0.0) + inclusive_s - spent_s.pop()
        n[package] = n.get(package, 0) + 1
        spent_s[-1] += inclusive_s

def collected(phase, info):
    if phase == "start":
        begun_s[0] = time.thread_time()
    else:
        gc_s[0] += time.thread_time() - begun_s[0]

def leave(code):
    rest_s = time.process_time() - gc_s[0] - sum(own_s.values())
    with open(sys.argv[1], "w") as file:
        json.dump({"own_s": own_s, "n": n, "gc_s": gc_s[0], "rest_s": rest_s}, file)
    end(code)

end, os._exit = os._exit, leave
importlib._bootstrap._find_and_load = watched
gc.callbacks.append(collected)
"""


def table(tool: str, path: Path) -> Table:
    subprocess.run(
        [sys.executable, "-c", WATCH + script(tool), str(path)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    found = json.loads(path.read_text())
    figures = found["own_s"] | {"(the garbage collector)": found["gc_s"], "(all else)": found["rest_s"]}
    rows = [
        Row((name, f"{own:.2f} s", str(found["n"].get(name, ""))), bar=own)
        for name, own in sorted(figures.items(), key=lambda item: -item[1])
        if own >= 0.01
    ]
    return Table(f"First step: {tool}", ("package", "CPU", "modules"), tuple(rows), says=f"{sum(figures.values()):.2f} s in all.")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print(table(sys.argv[1] if len(sys.argv) > 1 else "ours", Path(folder) / "found.json"))
