"""Packages and what each may import, modules without circles, and which of them load no torch. Run as a script, it prints the graph."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from programs import documented

NOTEBOOKS = Path(__file__).resolve().parent.parent / "nbs"
PACKAGE = Path(__file__).resolve().parent.parent / "nbtrain"
# What each package may import beside itself and the BASE. Every package is allowed only what stands above it.
ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "remote_errors": (),
    "tracebacks": ("remote_errors",),
    "private": (),
    "compat": ("private",),
    "annotations": ("tracebacks", "compat"),
    "deferred_imports": (),
    "completion": ("tracebacks",),
    "events": (),
    "best": ("events",),
    "rng": (),
    "resources": (),
    "formatting": (),
    "secret_names": (),
    "secret_reader": ("secret_names",),
    "redaction": ("secret_names", "secret_reader"),
    "objects": ("private",),
    "history": ("compat", "events", "best", "formatting"),
    "data": ("private", "rng", "objects"),
    "optim": ("private", "events", "rng"),
    "engine": ("private", "events", "rng", "objects", "history", "data", "optim"),
    "loops": ("private", "rng", "objects", "data", "optim", "engine"),
    "base": (
        "private",
        "compat",
        "events",
        "best",
        "rng",
        "formatting",
        "objects",
        "history",
        "data",
        "optim",
        "engine",
        "loops",
    ),
    "run": (
        "private",
        "compat",
        "events",
        "rng",
        "resources",
        "formatting",
        "objects",
        "history",
        "data",
        "optim",
        "engine",
        "loops",
        "base",
    ),
    "source": ("secret_names", "redaction", "objects", "history", "data"),
    "views": ("private", "events", "best", "formatting"),
    "library": ("events", "formatting", "history", "engine", "views"),
    "loggers": ("private", "events", "history", "data", "engine", "source", "views"),
    "distributed": ("private", "events", "rng", "resources", "redaction", "objects", "data", "optim", "engine", "base", "source"),
    "code": ("private", "formatting", "objects", "data", "engine", "loops", "base", "source", "distributed"),
    "checkpoint": ("private", "compat", "events", "redaction", "history", "engine", "base", "distributed"),
    "state": (
        "private",
        "compat",
        "events",
        "rng",
        "resources",
        "objects",
        "history",
        "data",
        "optim",
        "engine",
        "loops",
        "base",
        "run",
        "source",
        "distributed",
        "code",
        "checkpoint",
    ),
    "foreign": (
        "private",
        "compat",
        "events",
        "best",
        "rng",
        "formatting",
        "history",
        "data",
        "optim",
        "engine",
        "source",
        "checkpoint",
        "state",
    ),
    "addons": (
        "private",
        "compat",
        "events",
        "best",
        "rng",
        "objects",
        "history",
        "data",
        "optim",
        "engine",
        "loops",
        "base",
        "loggers",
        "distributed",
        "checkpoint",
        "state",
        "foreign",
    ),
    "schedules": ("events",),
    "config": ("compat", "rng", "redaction", "objects", "history", "optim", "engine", "base", "addons"),
    "tools": (
        "events",
        "rng",
        "formatting",
        "redaction",
        "objects",
        "history",
        "data",
        "optim",
        "engine",
        "loops",
        "base",
        "run",
        "views",
        "loggers",
        "code",
        "checkpoint",
        "state",
        "addons",
    ),
    "travel": ("rng", "formatting", "objects", "history", "data", "engine", "base", "run", "views", "code", "state", "tools"),
    "cluster": (
        "events",
        "rng",
        "resources",
        "history",
        "data",
        "engine",
        "base",
        "run",
        "source",
        "views",
        "library",
        "distributed",
        "code",
        "checkpoint",
        "state",
        "addons",
    ),
}
ALLOWED["trainer"] = tuple(ALLOWED)
ALLOWED["variants"] = tuple(ALLOWED)
ALLOWED["examples"] = tuple(ALLOWED)
ALLOWED["jobs"] = tuple(ALLOWED)
ALLOWED["cli"] = tuple(ALLOWED)
WITHOUT_TORCH = (
    "errors",
    "remote_errors",
    "tracebacks",
    "annotations",
    "deferred_imports",
    "compat",
    "events",
    "best",
    "resources",
    "private.names",
    "private.client_parts",
    "views",
    "history",
    "config.document",
    "config.overrides",
    "config.schema",
    "config.instantiate",
)
WITHOUT_TORCH += ("config.compute_plan", "loggers.neptune_export", "cli")


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


BASE = {"errors", "remote_errors", "tracebacks", "annotations", "deferred_imports", "completion"}  # what all others may import
MODULES = {_name(p): p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in ("__init__.py", "__main__.py", "_modidx.py")}


def imports(path: Path, *, when_run: bool = False) -> set[str]:
    """The modules of the package that a module imports, inside functions and for type checkers too; `when_run`, not for these alone."""
    found: set[str] = set()
    here = ["nbtrain", *_name(path).split(".")[:-1]]
    tree = ast.parse(path.read_text())
    if when_run:
        tree.body = [node for node in tree.body if not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING"]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                full = ".".join([*module, alias.name]).removeprefix("nbtrain.")
                found.add(full if full in MODULES else ".".join(module).removeprefix("nbtrain."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("nbtrain.") for alias in node.names if alias.name.startswith("nbtrain.")}
    return found & MODULES.keys()


def package_of(module: str) -> str:
    return module.partition(".")[0]


def graph() -> dict[str, set[str]]:
    """The packages that each package imports; what it names for type checkers alone does not count."""
    found: dict[str, set[str]] = {package: set() for package in ALLOWED}
    for module, path in MODULES.items():
        found[package_of(module)] |= {package_of(name) for name in imports(path, when_run=True)} - {package_of(module)}
    return found


def test_every_module_is_in_a_known_package() -> None:
    assert {package_of(module) for module in MODULES} == ALLOWED.keys()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_package_may(module: str) -> None:
    package = package_of(module)
    base = {"errors"} if package in BASE else BASE
    assert {package_of(name) for name in imports(MODULES[module], when_run=True)} <= {package, *base, *ALLOWED[package]}


def test_each_package_is_allowed_only_those_above_it() -> None:
    order = list(ALLOWED)
    assert all(order.index(other) < order.index(package) for package, others in ALLOWED.items() for other in others)


def test_nothing_is_allowed_that_is_not_used() -> None:
    used = graph()
    spare = {package: set(others) - used[package] for package, others in ALLOWED.items() if len(others) < len(ALLOWED["trainer"])}
    assert not {package: names for package, names in spare.items() if names}


def test_contents_list_the_packages_in_this_order() -> None:
    listed = re.findall(
        r"^\d+\. \[(\w+)\]", "\n".join(cell["source"] for cell in nbformat.read(NOTEBOOKS / "contents.ipynb", 4).cells), re.M
    )
    assert listed == list(ALLOWED)


@pytest.mark.parametrize("package", [package for package in ALLOWED if (NOTEBOOKS / package / "index.ipynb").exists()])
def test_what_the_page_of_a_package_says_that_it_imports_is_what_it_may(package: str) -> None:
    text = "".join(cell["source"] for cell in nbformat.read(NOTEBOOKS / package / "index.ipynb", 4).cells)
    named = re.search(r"imports?\s(?:only\s)?((?:`\w+`(?: \([^)]*\))?(?:,| and)?\s?)+)", text)
    assert named is None or set(re.findall(r"`([a-z]\w*)`", named[1])) - BASE == set(ALLOWED[package])


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {module: imports(path, when_run=True) - {module} for module, path in MODULES.items()}
    while free := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in free}
    needed = {name for names in left.values() for name in names}
    assert not {module for module in left if module in needed}  # the others only import from a circle


def test_no_package_has_more_than_15_modules() -> None:
    sizes = Counter(package_of(module) for module in MODULES if "." in module)
    assert not {package: n for package, n in sizes.items() if n > 15}


# The core, which a person reads in a day. What is not in it is an extra, and hangs on it
CORE = {
    "errors", "remote_errors", "tracebacks", "annotations", "deferred_imports", "completion", "events", "best", "rng", "resources",
    "private", "formatting", "objects", "history", "data", "optim", "engine", "loops", "base", "run", "trainer",
}  # fmt: skip
FOR_ERRORS = {"compat.foreign_names", "compat.hook_names"}  # other systems' words, which the core imports to make an error or a note


def extras_known() -> dict[str, list[str]]:
    """The modules of extras that each module of the core imports when it is imported or run."""
    found = {}
    for name, path in MODULES.items():
        if package_of(name) in CORE:
            found[name] = sorted(m for m in imports(path, when_run=True) if package_of(m) not in CORE and m not in FOR_ERRORS)
    return {name: extras for name, extras in found.items() if extras}


def test_the_core_imports_no_extra() -> None:
    assert not extras_known()


_JOB = """
import torch
from nbtrain import Trainer
class Line(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}
    test_step = train_step
net = torch.nn.Linear(2, 1)
Line(net, "cpu", optimizer=torch.optim.SGD(net.parameters(), lr=0.1), log_bar=False).run(1, [torch.ones(4, 2)] * 2)
"""


def statements_imported(code: str) -> int:
    """The statements of nbtrain's modules that `code` imports, without docstrings."""
    shown = "import sys; print(*(m.__file__ for name, m in sys.modules.items() if name.partition('.')[0] == 'nbtrain'), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{shown}"], capture_output=True, text=True, check=True)
    trees = [ast.parse(Path(line).read_text()) for line in done.stdout.splitlines() if line.endswith(".py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return len([node for node in nodes if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))])


def test_a_plain_job_imports_no_more_of_the_package_than_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    of_trainer, of_job = statements_imported("from nbtrain import Trainer"), statements_imported(_JOB)
    with capsys.disabled():
        print(f"\n`from nbtrain import Trainer` imports {of_trainer:,} statements, a plain job {of_job:,}")
    assert of_trainer <= of_job <= 13_000


# What a run under Lightning has to set on the trainer, where Lightning drives: the pass that is on, and the device of a rank; and the
# newest class of the user's
WRITES = {
    "engine.step_module": {"module", "mode"},
    "engine.pass_module": {"module", "mode"},
    "distributed.rank": {"device"},
    "code.redefined": {"__class__"},
}


def test_where_a_run_comes_from_is_written_by_its_own_methods_alone() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {ast.unparse(target)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for target in ast.walk(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if isinstance(target, ast.Attribute) and ast.unparse(target.value).endswith("origin")
    ]
    assert not found


def written(path: Path) -> set[str]:
    """The attributes that a module sets on what it calls `trainer` or `owner`."""
    targets: list[ast.expr] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets += node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets.append(node.target)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            names = node.args[1]
            attribute = names.value if isinstance(names, ast.Constant) else "?"
            targets.append(ast.Attribute(node.args[0], str(attribute)))
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    trainers = ("trainer", "owner", "self.trainer", "self.owner")
    return {part.attr for part in flat if isinstance(part, ast.Attribute) and ast.unparse(part.value) in trainers}


# What has the life of a run. Where it comes from and its folder are `origin`'s, what gets its events is the recorder's
OF_A_RUN = {"control", "handle", "open_session", "origin", "ran", "recorder", "result", "run_dir", "sinks", "stream"}
OF_ITS_OWN = {"run.outcome": {"result"}, "run.run": {"handle", "ran"}, "tools.session": {"open_session"}}


def test_what_is_of_a_run_is_written_by_it_and_a_session_alone() -> None:
    found = {module: written(path) & OF_A_RUN for module, path in MODULES.items()}
    assert {module: names for module, names in found.items() if names} == OF_ITS_OWN


WRITERS = ("state", "base", "run", "tools", "travel", "trainer")  # the packages that a trainer is made of


@pytest.mark.parametrize("module", [name for name in MODULES if package_of(name) not in WRITERS])
def test_only_its_own_packages_write_the_attributes_of_a_trainer(module: str) -> None:
    assert written(MODULES[module]) <= WRITES.get(module, set())


def test_writes_to_a_trainer_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    lines = ["self.trainer.a = 1", "owner.b, c = 1, 2", "trainer.d += 1", "setattr(trainer, 'e', 1)", "del trainer.f", "trainer.g.h = 1"]
    module.write_text("\n".join(lines))
    assert written(module) == {"a", "b", "d", "e", "f"}


def test_modules_that_load_neither_torch_nor_lightning() -> None:
    plain = [module for module in MODULES if module in WITHOUT_TORCH or package_of(module) in WITHOUT_TORCH]
    code = f"import sys, importlib; [importlib.import_module('nbtrain.' + n) for n in {plain}]; import nbtrain, nbtrain.addons; "
    code += "print(sorted({'torch', 'lightning', 'matplotlib', 'ipywidgets', 'IPython'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_packages_export_nothing_of_their_own_but_two() -> None:
    full = [p.parent.name for p in PACKAGE.rglob("__init__.py") if p.read_text().strip()]
    assert sorted(full) == ["addons", "nbtrain"]


def test_addons_are_importable_from_their_package() -> None:
    import nbtrain
    from nbtrain import addons

    kinds = documented().values()
    shipped = {kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, nbtrain.AddOnBase)} - {"AddOnBase"}
    own = {name for name, module in nbtrain.PUBLIC.items() if module.startswith("addons.")}
    assert set(addons.__all__) == shipped | own and addons.__all__ == sorted(addons.__all__)
    assert all(getattr(addons, name) is documented().get(name, getattr(addons, name)) for name in addons.__all__)
    with pytest.raises(AttributeError, match="no attribute 'StateManagerAdon'"):
        addons.StateManagerAdon  # type: ignore[attr-defined]


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

    assert typed == {name: f"nbtrain.{module}" for name, module in nbtrain.PUBLIC.items()}


if __name__ == "__main__":
    for package, others in graph().items():
        print(f"{package:<12} → {' '.join(name for name in ALLOWED if name in others)}".rstrip(" →"))
    print(f"The core knows extras by {sum(extras_known().values())} imports.")
