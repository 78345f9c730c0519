"""Write the types of nbs/base/addon_options.ipynb from the classes of the addons, and of nbs/trainer/commands.ipynb."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import nbtrain
from nbtrain import AddOnBase, Trainer, addons

ROOT = Path(__file__).resolve().parent.parent
CHAPTER = ROOT / "nbs" / "base" / "addon_options.ipynb"
COMMANDS = ROOT / "nbs" / "trainer" / "commands.ipynb"
PREFIX = "addon-types-"  # of the ids of the cells that are written here
COMMANDS_PREFIX = "trainer-commands-"
CELL_LINES = 60


def shipped() -> list[type[AddOnBase]]:
    """The addons that come with nbtrain, without those of clusters, whose modules stand above this one."""
    found = [getattr(addons, name) for name in addons.__all__]
    kinds = [kind for kind in found if isinstance(kind, type) and issubclass(kind, AddOnBase)]
    return [kind for kind in kinds if not kind.__module__.startswith("nbtrain.cluster.")]


# -- what the classes say
def option_groups(kinds: Iterable[type[AddOnBase]]) -> dict[type, dict[str, str]]:
    """By the class that declares them, the options that a trainer does not take itself, with their types."""
    own, found = inspect.signature(Trainer.__init__).parameters, dict[type, dict[str, str]]()
    for kind in kinds:
        for field in fields(kind):  # type: ignore[arg-type]
            holder = next(k for k in reversed(kind.__mro__) if issubclass(k, AddOnBase) and field.name in inspect.get_annotations(k))
            if field.name not in own:
                found.setdefault(holder, {})[field.name] = inspect.get_annotations(holder)[field.name]
    return found


def trainer_options(*, keyword_only: bool) -> dict[str, str]:
    """The arguments of a trainer that are keyword-only, or those that follow the model and needn't be, with their types."""
    _, _, *parameters = inspect.signature(Trainer.__init__).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY if keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {p.name: p.annotation for p in parameters if p.kind is kind}


def command(kind: type[AddOnBase], name: str) -> ast.FunctionDef:
    """The method of an addon as a trainer has it: without the trainer among its arguments, and without a body."""
    method = _stub(getattr(kind, name), f"command_of({kind.__name__!r})")
    del method.args.args[1]
    return method


def _stub(function: Any, *decorators: str) -> ast.FunctionDef:
    """A function with the first line of its documentation, and without a body."""
    found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(found, ast.FunctionDef)
    found.decorator_list = [ast.parse(decorator, mode="eval").body for decorator in decorators]
    documentation = (ast.get_docstring(found) or "").partition("\n")[0]
    found.body = [ast.Expr(ast.Constant(documentation)), ast.Expr(ast.Constant(...))]
    return ast.fix_missing_locations(found)


def trainer_commands() -> dict[str, ast.FunctionDef]:
    """By the module that a command is written in and its name, the method of a trainer that declares it."""
    cells = json.loads(COMMANDS.read_text(encoding="utf-8"))["cells"]
    source = next("".join(cell["source"]) for cell in cells if cell["id"] == COMMANDS_PREFIX + "class")
    declared = ast.parse(source).body[0]
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for method in declared.body:
        if isinstance(method, ast.FunctionDef) and "written_in" in ast.unparse(method.decorator_list[0]):
            first, *others = map(ast.unparse, method.decorator_list)
            module = "nbtrain." + ast.literal_eval(first.removeprefix("written_in"))
            stub = _stub(getattr(importlib.import_module(module), method.name), first, *others)
            if not others:
                of_trainer = stub.args.args[0]
                same = of_trainer.annotation is not None and ast.dump(of_trainer.annotation) == ast.dump(stub.returns or ast.Pass())
                stub.args.args[0] = ast.arg("self", of_trainer.annotation if same else None)  # it returns one of the trainer's class
            found[f"{module}:{method.name}"] = ast.fix_missing_locations(stub)
    return found


def _annotations(method: ast.FunctionDef) -> Iterator[str]:
    arguments = [*method.args.args, *method.args.kwonlyargs, *filter(None, [method.args.kwarg])]
    yield from (ast.unparse(node) for node in (*(a.annotation for a in arguments), method.returns) if node is not None)


# -- where a name in a type comes from
@cache
def _sources(module: str) -> dict[str, str]:
    """The import of each name that a module has at its top."""
    path = inspect.getsourcefile(importlib.import_module(module))
    assert path is not None
    found, package = {}, module.split(".")[:-1]
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            where = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                found[alias.asname or alias.name] = f"from {where} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        elif isinstance(node, ast.Import):
            found |= {a.asname or a.name: f"import {a.name}" + (f" as {a.asname}" if a.asname else "") for a in node.names}
    return found


def imports(used: Iterable[tuple[str, str]]) -> list[str]:
    """The imports for types, each given with the module in which it is written. Raises ValueError where a name means two things."""
    found: dict[str, str] = {}
    for module, annotation in used:
        known = _sources(module)
        for name in (node.id for node in ast.walk(ast.parse(annotation)) if isinstance(node, ast.Name)):
            if not hasattr(builtins, name):
                line = known.get(name, f"from {module} import {name}")
                if found.setdefault(name, line) != line:
                    raise ValueError(f"{name} is {found[name]!r} and {line!r}: rename one of them.")
    plain = sorted({line for line in found.values() if line.startswith("import ")})
    modules: dict[str, set[str]] = {}
    for line in found.values():
        if line.startswith("from "):
            _, module, _, names = line.split(" ", 3)
            modules.setdefault(module, set()).add(names)
    ordered = sorted(modules, key=lambda module: (module.startswith("nbtrain"), module))
    return [*plain, *(f"from {module} import {', '.join(sorted(modules[module]))}" for module in ordered)]


# -- the cells
def _typed_dict(name: str, bases: Iterable[str], options: dict[str, str], documentation: str) -> str:
    head = f'class {name}({", ".join(bases)}, total=False):\n    """{documentation}"""\n'
    return head + "".join(f"    {option}: {kind}\n" for option, kind in options.items())


def _group_name(kind: type) -> str:
    return kind.__name__.removesuffix("Addon") + "Options"


def option_cells() -> list[str]:
    """The TypedDicts, as many in a cell as fit."""
    groups = option_groups(shipped())
    parts = [_typed_dict(_group_name(kind), ["TypedDict"], own, f"Options of {kind.__name__}.") for kind, own in groups.items()]
    cells = [""]
    for part in parts:
        cells += [""] if cells[-1].count("\n") + part.count("\n") > CELL_LINES else []
        cells[-1] += f"\n\n{part}"
    return cells


def joined_cell() -> str:
    """The TypedDicts of the options of all addons, and of all that a trainer takes, whose docstring is written by hand."""
    groups = option_groups(shipped())
    every = _typed_dict("AddonOptions", map(_group_name, groups), {}, "The options of all addons that come with nbtrain.")
    said = "The keyword-only arguments of a trainer, with the options of its addons."
    keywords = _typed_dict("KeywordOptions", ["AddonOptions"], trainer_options(keyword_only=True), said)
    own = _typed_dict("TrainerOptions", ["KeywordOptions"], trainer_options(keyword_only=False), nbtrain.TrainerOptions.__doc__ or "")
    return f"{every}\n\n{keywords}\n\n{own}"


def import_cell() -> str:
    """What the types name, for type checkers alone, and the classes of the addons."""
    used = [(kind.__module__, type_) for kind, own in option_groups(shipped()).items() for type_ in own.values()]
    used += [
        (Trainer.__module__, p.annotation) for p in inspect.signature(Trainer.__init__).parameters.values() if p.default is not p.empty
    ]
    used += [(kind.__module__, kind.__name__) for kind in shipped()]
    union = " | ".join(f"type[{kind.__name__}]" for kind in shipped())
    return _for_type_checkers([*imports(used), "", f"ShippedAddon: TypeAlias = {union}"])


def trainer_cells() -> tuple[str, str]:
    """What the commands of a trainer and of its addons name, and the class that declares them."""
    methods = [(place.partition(":")[0], method) for place, method in trainer_commands().items()]
    methods += [(kind.__module__, command(kind, name)) for kind in shipped() for name in kind.commands]
    used = [(module, type_) for module, method in methods for type_ in _annotations(method)]
    head = 'class TrainerCommands(TrainerBase):\n    """The methods of a trainer that are written in other packages or in addons."""\n\n'
    return _for_type_checkers(imports(used)), head + textwrap.indent("\n\n".join(ast.unparse(method) for _, method in methods), "    ")


def _for_type_checkers(lines: Iterable[str]) -> str:
    return "if TYPE_CHECKING:\n" + textwrap.indent("\n".join(lines), "    ")


def _as_cell(id: str, source: str) -> dict[str, Any]:
    text = f"#| export\n{source.strip()}".splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "id": id, "metadata": {}, "outputs": [], "source": text}


def _put(cells: list[dict[str, Any]], prefix: str, new: list[str]) -> None:
    """Replace the cells whose id begins with `prefix`."""
    at = next(i for i, cell in enumerate(cells) if cell["id"].startswith(prefix))
    cells[:] = [cell for cell in cells if not cell["id"].startswith(prefix)]
    ids = [prefix] if len(new) == 1 else [f"{prefix}-{i}" for i in range(len(new))]
    cells[at:at] = map(_as_cell, ids, new)


def pages() -> dict[Path, str]:
    """The notebooks as they should be."""
    names, declarations = trainer_cells()
    parts = {
        CHAPTER: {
            f"{PREFIX}imports": [import_cell()],
            f"{PREFIX}options": option_cells(),
            f"{PREFIX}joined": [joined_cell()],
        },
        COMMANDS: {f"{COMMANDS_PREFIX}imports": [names], f"{COMMANDS_PREFIX}class": [declarations]},
    }
    return {path: _chapter(path, cells) for path, cells in parts.items()}


def _chapter(path: Path, parts: dict[str, list[str]]) -> str:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for prefix, cells in parts.items():
        _put(notebook["cells"], prefix, cells)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    command_line = [Path(sys.executable).parent / "ruff", "format", "--quiet", "--stdin-filename", path, "-"]
    return subprocess.run(command_line, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
