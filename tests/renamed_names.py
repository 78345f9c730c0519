"""One private name of another package renamed, as a new release would do it, beside the same jobs without.

`python tests/renamed_names.py NAME ...` prints a line of JSON for each name: what the jobs of `wide_job` give where it is renamed.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lightning", "torch", "torchmetrics", "lightning_utilities")  # a release of one is followed by the others
SUFFIX = "_renamed"


# -- in the process whose packages have another name
class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module whose source has another name."""

    name_there = ""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        assert source is not None
        # A file keeps its name, and so do imports from it
        found = rf"(^[ \t]*(?:from|import)[ \t]+[\w.]+)|\b{self.name_there}\b"
        renamed = re.sub(found, lambda there: there[1] or f"{self.name_there}{SUFFIX}", source, flags=re.M)
        return compile(renamed, self.get_filename(fullname), "exec", dont_inherit=True)


class Renamed(importlib.abc.MetaPathFinder):
    """Gives `name` another name in all modules of PACKAGES that mention it; the others load as usual. Goes before all finders."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname.partition(".")[0] in PACKAGES else None
        loader = spec.loader if spec is not None else None
        if spec is None or not isinstance(loader, importlib.machinery.SourceFileLoader):
            return None
        if self.name.encode() in Path(loader.path).read_bytes():
            spec.loader = _Loader(fullname, loader.path)
            spec.loader.name_there = self.name
        return spec


HELD_OTHERWISE = "parts held otherwise"
_HOLDER = """
class Holder:  # no dict, and no Mapping that says so
    def __init__(self, held=()): self.held = dict(held)
    def __deepcopy__(self, memo): return Holder(copy.deepcopy(self.held, memo))
    def __getattr__(self, name): return getattr(object.__getattribute__(self, "held"), name)
    def __getitem__(self, name): return self.held[name]
    def __setitem__(self, name, value): self.held[name] = value
    def __delitem__(self, name): del self.held[name]
    def __contains__(self, name): return name in self.held
    def __iter__(self): return iter(self.held)
    def __len__(self): return len(self.held)
"""


class _LoaderOfHolders(importlib.machinery.SourceFileLoader):
    """Loads torch's module of modules, whose buffers, names of transient ones and hooks are in objects of another class."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        assert source is not None
        kept = "_buffers|_forward_hooks|_forward_pre_hooks|_load_state_dict_pre_hooks"
        changed, n = re.subn(rf'(super\(\).__setattr__\("({kept})", )(\{{\}}|OrderedDict\(\))\)', r"\1Holder())", source)
        assert n == kept.count("|") + 1, n
        changed = changed.replace("\nclass Module:", f"\nimport copy\n{_HOLDER}\n\nclass Module:", 1)
        return compile(changed, self.get_filename(fullname), "exec", dont_inherit=True)


class HeldOtherwise(importlib.abc.MetaPathFinder):
    """Lets torch keep the parts of modules in other objects than dicts. Goes before all finders."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != "torch.nn.modules.module":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _LoaderOfHolders(fullname, spec.origin)
        return spec


# -- a process of its own
def _notes(folder: Path) -> list[str]:
    """The notes of the runs in a folder, each once."""
    lines = [line for path in sorted(folder.rglob("events.jsonl")) for line in path.read_text().splitlines()]
    return list(dict.fromkeys(event["data"]["text"] for event in map(json.loads, lines) if event["kind"] == "note"))


def run_jobs() -> dict[str, Any]:
    """For each of the jobs a digest of its numbers, or its error; and the notes that the runs have added."""
    try:
        import wide_job  # noqa: PLC0415  # imports what is renamed
    except Exception as error:  # noqa: BLE001
        return {"digests": {"import": _line(error)}, "notes": []}
    digests = dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        for name, job in wide_job.JOBS.items():
            try:
                digests[name] = job(Path(folder) / name)
            except Exception as error:  # noqa: BLE001
                digests[name] = _line(error)
        return {"digests": digests, "notes": _notes(Path(folder))}


def _line(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "nbtrain" in frame.filename]
    return f"{type(error).__name__}: {error} at {', '.join(f'{Path(frame.filename).name}:{frame.lineno}' for frame in frames[-2:])}"


def found_with(name: str) -> dict[str, Any]:
    """What the jobs do in a forked process where `name` has another name; an empty text is no name.

    The caller must not have imported what has the name.
    """
    reads, writes = os.pipe()
    if not (child := os.fork()):
        if name:
            sys.meta_path.insert(0, HeldOtherwise() if name == HELD_OTHERWISE else Renamed(name))
        with os.fdopen(writes, "w") as answer:
            json.dump(run_jobs(), answer)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"digests": {"process": "died"}, "notes": []}


# -- which names
def private_names() -> list[str]:
    """The names of docs/private_parts.yaml that belong to Lightning, torch or torchmetrics."""
    paths = yaml.safe_load((ROOT / "docs" / "private_parts.yaml").read_text(encoding="utf-8"))
    return sorted({path.rpartition(".")[2] for path in paths if path.partition(".")[0] in PACKAGES})


@functools.cache
def _source(package: str) -> str:
    """All Python sources of a package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    paths = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def is_defined_in_python(name: str) -> bool:
    """Whether a Python source gives a thing this name, and none that is written in C has it: C can't be renamed here. It imports torch."""
    import torch

    c: Any = torch._C
    in_c = (c, c.TensorBase, c._VariableFunctionsClass, c._autograd)
    defines = re.compile(rf"(\bdef |\bclass |[\"']){name}\b|\b{name}(: [^=\n]+)? = ")
    return not any(hasattr(kind, name) for kind in in_c) and any(defines.search(_source(package)) for package in PACKAGES)


def found_with_each(names: Sequence[str]) -> list[dict[str, Any]]:
    """What the jobs do with no name renamed, then with each, in a new process."""
    made = subprocess.run(
        [sys.executable, __file__, *names], capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = {line["name"]: line for line in map(json.loads, made.stdout.splitlines())}
    return [found[name] for name in ("", *names)]


def main(names: Sequence[str]) -> None:
    """Print a line of JSON for each name, after one for none. What does not have the name is imported once for all."""
    for module in ("numpy", "scipy.signal", "scipy.stats", "sympy", "matplotlib.pyplot", "transformers", "pytest"):
        with suppress(ImportError):
            importlib.import_module(module)
    early = "torch", "torchmetrics", "lightning_utilities"
    inner = [name for name in names if name == HELD_OTHERWISE or any(name in _source(package) for package in early)]
    for part, imports in ((inner, ()), (["", *(name for name in names if name not in inner)], ("torch._dynamo", "torchmetrics"))):
        for module in imports:
            importlib.import_module(module)
        for name in part:
            print(json.dumps({"name": name} | found_with(name)), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    main(sys.argv[1:])
