"""The private names of other packages that nbtrain uses, found in its code, and those that docs/private_parts.yaml lists.

Why each is used, and the test that holds it, stands there under the name's full path.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from programs import documented

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "private_parts.yaml"
# Names with an underscore that are documented for everybody: those of Python and IPython
DOCUMENTED = {"_exit", "_fields", "_name_", "_repr_html_", "_repr_mimebundle_", "_repr_png_"}
# Where private names of other packages may stand: the room, and what it tries as a whole
ROOM = "nbtrain.private."
OWN_LOOPS = tuple(f"nbtrain.loops.{name}" for name in (
    "batch_ways", "ddp_step", "epochs", "evaluation", "fast_step", "fetcher", "own_loops", "training",
))  # fmt: skip
WITHIN = (*OWN_LOOPS, "nbtrain.engine.logged")
# Python's own, which no package of others changes
OF_PYTHON = {"_current_frames"}


class Use(NamedTuple):
    """A private name in a module of nbtrain. `on` is what it is read from: `self`, the last name of an expression, empty for a string."""

    name: str
    module: str
    on: str


class Entry(NamedTuple):
    """A private name by its full path. `read_from` tells apart names of two owners: what this one is read from."""

    path: str
    why: str
    test: str
    read_from: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def covers(self, use: Use) -> bool:
        return use.name == self.name and (not self.read_from or use.on in self.read_from)


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None and name not in DOCUMENTED


# -- what other packages have
@functools.cache
def private_names(owner: Any) -> frozenset[str]:
    """The private names that a class or a function has or mentions in its code."""
    found = {name for name in vars(owner) if is_private(name)}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError):  # written in C
        return frozenset(found)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            found.add(node.value)
    return frozenset(found)


def is_there(path: str) -> bool:
    """Does the installed version have this name? An attribute of objects does where the code of its owner mentions it."""
    parts = path.split(".")
    owner: Any = None
    for i, part in enumerate(parts[:-1]):
        try:
            owner = importlib.import_module(".".join(parts[: i + 1])) if owner is None or inspect.ismodule(owner) else getattr(owner, part)
        except ModuleNotFoundError:
            owner = getattr(owner, part, None)
    owners = () if owner is None or inspect.ismodule(owner) else getattr(owner, "__mro__", (owner,))
    return hasattr(owner, parts[-1]) or any(parts[-1] in private_names(part) for part in owners)


def _inherited(module: str, name: str) -> frozenset[str]:
    """The private names that a class of nbtrain has from another package."""
    if module == "nbtrain.__main__":
        return frozenset()
    kind = getattr(importlib.import_module(module), name, None)
    others = [
        base for base in getattr(kind, "__mro__", ()) if base.__module__.split(".")[0] not in ("nbtrain", "builtins", "typing", "abc")
    ]
    return frozenset().union(*map(private_names, others))


# -- what nbtrain uses
def _on(node: ast.expr) -> str:
    """What an attribute is read from: `self` also for `super()`, else the last name."""
    if isinstance(node, ast.Call):
        return "self" if isinstance(node.func, ast.Name) and node.func.id == "super" else _on(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return {"cls": "self"}.get(node.id, node.id) if isinstance(node, ast.Name) else ""


class _Finder(ast.NodeVisitor):
    """Sorts the private names of one module: its own, those of its objects that stand in `self`, and those of others."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.inherited: frozenset[str] = frozenset()
        self.own: set[str] = set()
        self.on_self: list[Use] = []
        self.inherits: list[Use] = []
        self.imports: list[Use] = []
        self.others: list[Use] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.own.add(node.name)
        outer, self.inherited = self.inherited, _inherited(self.module, node.name) if node.bases else frozenset()
        self.generic_visit(node)
        self.inherited = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._defines(node.name)
        self.generic_visit(node)

    def _defines(self, name: str) -> None:
        if name in self.inherited:
            self.inherits.append(Use(name, self.module, "self"))
        else:
            self.own.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._defines(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        on = _on(node.value)
        if is_private(node.attr) and on == "self":
            use = Use(node.attr, self.module, on)
            (self.inherits if node.attr in self.inherited else self.on_self).append(use)
            if isinstance(node.ctx, ast.Store) and node.attr not in self.inherited:
                self.own.add(node.attr)
        else:
            self._reads(node.attr, on)
        self.generic_visit(node)

    def _reads(self, name: str | None, on: str = "") -> None:
        if name is not None and is_private(name):
            self.others.append(Use(name, self.module, on))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        origin = node.module or ""
        if node.level == 0 and origin.split(".")[0] != "nbtrain":
            in_private = any(map(is_private, origin.split(".")))
            self.imports += [Use(alias.name, self.module, "") for alias in node.names if in_private or is_private(alias.name)]

    def visit_Import(self, node: ast.Import) -> None:
        names = [alias.name for alias in node.names]
        self.imports += [Use(name.rpartition(".")[2], self.module, "") for name in names if any(map(is_private, name.split(".")))]

    def visit_keyword(self, node: ast.keyword) -> None:
        self._reads(node.arg)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self.own |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A name, or several with spaces between."""
        for word in node.value.split() if isinstance(node.value, str) and re.fullmatch(r"_\w+( _\w+)*", node.value) else ():
            self._reads(word)

    def visit_Call(self, node: ast.Call) -> None:
        """`find("package.module._name")`, and what is in the arguments."""
        path = node.args[0] if isinstance(node.func, ast.Name) and node.func.id == "find" and node.args else None
        if isinstance(path, ast.Constant):
            self._reads(path.value.rpartition(".")[2])
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):  # the text between is a part of a name
                self.visit(part.value)


def uses() -> list[Use]:
    """Every use in nbtrain of a private name that another package has.

    What is read from `self` is nbtrain's own where a class of nbtrain defines it; what is read from anything else, where its module does,
    or where it is a member of a public class.
    """
    finders: list[_Finder] = []
    for path in sorted((ROOT / "nbtrain").rglob("*.py")):
        if path.name != "_modidx.py":
            parts = path.relative_to(ROOT).with_suffix("").parts
            finders.append(_Finder(".".join(part for part in parts if part != "__init__")))
            finders[-1].visit(ast.parse(path.read_text(encoding="utf-8")))
    own = set[str]().union(*(finder.own for finder in finders))
    members = _members() - {entry.name for entry in entries()}
    return [use for finder in finders for use in _foreign(finder, own, members)]


def _foreign(finder: _Finder, own: set[str], members: Collection[str] = ()) -> Iterator[Use]:
    yield from finder.imports
    yield from finder.inherits
    yield from (use for use in finder.on_self if use.name not in own)
    yield from (use for use in finder.others if use.name not in finder.own and use.name not in members)


def _members() -> set[str]:
    """The private members of nbtrain's public classes, which its modules use and its users don't."""
    public = filter(inspect.isclass, documented().values())
    bases = {base for kind in public for base in kind.__mro__ if base.__module__.startswith("nbtrain.")}
    return {name for base in bases for name in vars(base) if is_private(name)}


# -- the page
def entries() -> list[Entry]:
    """The table of docs/private_parts.yaml."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return [Entry(path, given["why"], given["test"], tuple(given.get("from", ()))) for path, given in table.items()]


@functools.cache
def tests() -> dict[str, list[Path]]:
    """The files that define each test."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.M):
            found.setdefault(name, []).append(path)
    return found
