"""Modules stand in one order: each imports only from those before it, and the first of them know neither torch nor Lightning."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "nbtrain"
ORDER = [
    "errors",
    "records",
    "views.text",
    "views.html",
    "views.plots",
    "views.notebook",
    "history",
    "following",
    "comparing",
    "batches",
    "data",
    "seeded",
    "mixing",
    "prefetching",
    "resumable",
    "multitask",
    "schedulers",
    "meters",
    "precision",
    "hooks",
    "steps",
    "recorder",
    "control",
    "interrupts",
    "shortcuts",
    "loop",
    "parallel",
    "estimates",
    "durable",
    "snapshots",
    "parts",
    "checkpoints",
    "shards",
    "weights",
    "sources",
    "provenance",
    "delivery",
    "points",
    "wandbtracker",
    "neptunefiles",
    "neptunetracker",
    "localtrackers",
    "worker",
    "launch",
    "sharding",
    "worlds",
    "ranks",
    "states",
    "arguments",
    "documents",
    "overrides",
    "resolve",
    "settings",
    "plans",
    "addons.base",
    "addons.optim",
    "addons.state",
    "addons.speed",
    "addons.accumulation",
    "addons.averaging",
    "addons.environment",
    "addons.hooks",
    "addons.memory",
    "addons.metrics",
    "addons.nonfinite",
    "addons.stopping",
    "addons.loggers",
    "addons.system",
    "addons.tuning",
    "addons.watching",
    "copies",
    "addons.multigpu",
    "recalling",
    "configuring",
    "driving",
    "session",
    "passes",
    "edits",
    "inspection",
    "finding",
    "gallery",
    "trainer",
    "models",
    "hfcallbacks",
    "multioptimizer",
    "checks",
    "jobs",
    "config",
    "examples.digits",
    "examples.mlp",
    "exporting",
    "sweeps",
    "cli",
    "__main__",
]
PLAIN = [
    *ORDER[: ORDER.index("comparing") + 1],
    *("sources", "provenance", "neptunefiles", "documents", "overrides", "resolve", "settings", "plans"),
]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """The modules of the package that a module imports, those inside functions too."""
    found: set[str] = set()
    here = ["nbtrain", *_name(path).split(".")[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                full = ".".join([*module, alias.name])
                name = full if full.removeprefix("nbtrain.") in ORDER else ".".join(module)
                if name.startswith("nbtrain."):
                    found.add(name.removeprefix("nbtrain."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("nbtrain.") for alias in node.names if alias.name.startswith("nbtrain.")}
    return found


MODULES = [p for p in PACKAGE.rglob("*.py") if p.name not in ("__init__.py", "_modidx.py")]


def test_order_names_every_module() -> None:
    assert sorted(ORDER) == sorted(map(_name, MODULES))


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_module_imports_only_from_those_before_it(path: Path) -> None:
    allowed = set(ORDER[: ORDER.index(_name(path))])
    assert imports(path) <= allowed


def test_addons_package_is_empty() -> None:
    assert (PACKAGE / "addons" / "__init__.py").read_text() == ""


def test_first_modules_load_neither_torch_nor_lightning() -> None:
    code = f"import sys, importlib; [importlib.import_module('nbtrain.' + n) for n in {PLAIN}]; import nbtrain, nbtrain.cli; "
    code += "print(sorted({'torch', 'lightning', 'matplotlib', 'ipywidgets', 'IPython'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_are_there_and_nothing_else() -> None:
    import nbtrain

    assert all(getattr(nbtrain, name) is not None for name in nbtrain.__all__)
    assert dir(nbtrain) == sorted(nbtrain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        nbtrain.Trianer  # type: ignore[attr-defined]


def test_public_names_are_also_known_to_type_checkers() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.asname: f"{node.module}" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    import nbtrain

    assert typed == {name: f"nbtrain.{module}" for name, module in nbtrain._PUBLIC.items()}
