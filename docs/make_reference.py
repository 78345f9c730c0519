"""Write docs/reference/ from the code: `make names`. A page for each public name, the methods of Trainer by task, an index for each topic.

Signatures are those of the code, with the aliases of types spelled out. What a signature can't say stands in the docstrings, in sections:

    Args:        what each argument means; for a class also `Attributes:`. The fields of a dataclass may have a comment instead
    Returns:     what comes back, unless the first sentence says it
    Raises:      a line for each error, with when; for a function with `@checked`, wrong types and names are added
    Changes:     what is not as before; for what changes nothing, "nothing"
    Example:     a doctest, which `tests/test_reference.py` runs after the lines of `BEFORE`

An argument that many functions share is explained once, in `SHARED`.
"""

from __future__ import annotations

import argparse
import ast
import collections.abc
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import nbformat

import nbtrain
from nbtrain import cli
from nbtrain.annotations import WrittenIn
from nbtrain.base.trainer_base import TrainerBase
from nbtrain.completion import Listed
from nbtrain.config.schema import describe_fields
from nbtrain.engine.addon import Service

ROOT = Path(__file__).resolve().parent.parent
FOLDER, HOWTO = ROOT / "docs" / "reference", ROOT / "nbs" / "howto"
MADE = "<!-- Made by `make names` from the docstrings -->"
TOPICS = {  # title, what the page is for, the packages whose public names it lists
    "trainer": (
        "Trainer",
        "The class that you subclass, its arguments and methods, and the objects that it returns.",
        ("trainer", "variants", "base", "run", "tools", "travel", "cluster", "engine"),
    ),
    "run_history": ("Run and history", "What a run returns and records, and how you read it again.", ("history", "library", "events")),
    "loaders": ("Loaders and batches", "Loaders that resume, and functions that change a batch.", ("data",)),
    "schedules": (
        "Schedules and parameter groups",
        "Learning-rate schedules, their pictures, and parameter groups.",
        ("optim", "schedules"),
    ),
    "addons": (
        "Addons and their options",
        "One capability each, with the keywords that it adds to a trainer.",
        ("addons", "loggers", "compat", "cluster"),
    ),
    "configuration": ("Commands and configuration", "The command line, and the fields of a YAML file.", ("jobs", "config")),
}
_OF_RUNS = ("JobHandle", "RunHandle", "RunPaused", "RunStopped", "Session", "submitted_jobs")
MOVED = (
    dict.fromkeys(("AddOnBase", "KeptStatesAddon", "SourceAddon"), "addons")
    | {"plot_schedule": "schedules", "plot_schedules": "schedules"}
    | dict.fromkeys(_OF_RUNS, "run_history")
)  # where to look
TASKS = {  # the members of Trainer by what one wants, each on a page
    "write": ("Steps and metrics", ("train_step", "test_step", "metric_on_epoch_end", "log", "show", "backward", "automatic_optimization")),
    "run": ("Train", ("run", "run_epoch", "run_batch", "toggle", "mode", "result", "run_dir")),
    "session": ("Runs in a loop", ("session",)),
    "submit": ("Submit to a cluster", ("submit",)),
    "change": ("Pause and change a run", ("pause", "resume", "stop", "set", "use", "validate_now", "failure", "traceback", "free")),
    "evaluate": ("Evaluate and predict", ("evaluate", "validate", "predict", "inference", "show_results", "show_worst")),
    "inspect": ("Inspect before training", ("check", "summary", "lr_find", "profile")),
    "travel": ("Go back in a run", ("rewind", "branch", "replay", "blame")),
    "weights": ("Weights and checkpoints", ("save_model", "apply_weights", "best_weights", "load_from_checkpoint", "merge_checkpoint")),
    "measured": (
        "Counts, logs and metrics",
        (
            "history", "current_epoch", "current_step", "counts", "progress_checker", "log_train", "log_test", "train_metrics",
            "runs", "save_metrics",
            "test_metrics", "loss_history_train", "loss_history_test", "get_loss_history", "loader_name",
        ),
    ),
    "make": ("Make a trainer", ("add_on", "addons", "active_addons", "from_steps", "from_lightning", "to_config")),
    "elsewhere": (
        "Lightning, processes and parts",
        (
            "as_lightning_module", "lightning_args", "callbacks", "short_way", "launcher", "world", "world_size", "global_rank",
            "is_main_process", "open_run_dir", "optimizers", "all_optimizers",
        ),
    ),
}  # fmt: skip
BEFORE = """import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import *


class Line(Trainer):
    def train_step(self, batch):
        x, y = batch
        output = self.model(x)
        return {"loss": mse_loss(output, y), "output": output, "label": y}

    test_step = train_step


x = torch.linspace(-1, 1, 64).unsqueeze(1)
data = TensorDataset(x, 2 * x + 1)
loader = DataLoader(data, batch_size=16)
torch.manual_seed(0)
net = nn.Linear(1, 1)
trainer = Line(net, optimizer=SGD(net.parameters(), lr=0.1), seed=0)
"""
_HOOK = {
    "trainer": "Lightning's trainer.",
    "pl_trainer": "Lightning's trainer.",
    "pl_module": "The LightningModule of the run; `pl_module.owner` is nbtrain's trainer.",
}
SHARED: dict[str, dict[str, str]] = {  # arguments that many functions take; "" for all, else by class
    "": {
        "what": "What happened.",
        "where": "Where: the class and method, epoch, batch, file.",
        "remedy": "What to do.",
        "n": "How many samples, the first or the worst ones.",
        "draw": "`draw(axes, sample)` draws a Sample on matplotlib axes. Without it, images, curves and short rows are recognized.",
        "classes": "The names of the classes, by number.",
        "batch_size": "The number of samples in a batch; for a dataset only. None: 32.",
    },
    "Callback": _HOOK,
    "AddOnBase": {"trainer": "The trainer that the addon belongs to.", "weights": "Tensors by the names of the model's `state_dict`."},
}
_OF_LAUNCHERS = {"home", "launch", "start", "use", "world", "backend", "is_elsewhere"}
_OF_LAUNCHERS |= {"n_processes", "n_readers", "saves_end"}
RECEIVED = {  # classes of what you are given: each is imported from its module, and its page says so
    "Event": "events",
    "Gallery": "tools.gallery",
    "HooksAddon": "addons.hooks",
    "JobHandle": "cluster.jobs",
    "KeptStatesAddon": "state.addon",
    "LiveViewAddon": "library.live_view",
    "Notification": "tools.notify",
    "Plan": "events",
    "PortCheck": "tools.port_check",
    "Profile": "tools.step_profile",
    "Progress": "events",
    "RangeTest": "tools.lr_finder",
    "Replay": "travel.replay",
    "Rewound": "travel.rewind",
    "RunHandle": "run.handle",
    "Runs": "library.runs",
    "Sample": "tools.gallery",
    "SchedulerChain": "schedules",
    "Session": "tools.session",
    "Shown": "events",
    "SourceAddon": "code.addon",
    "Task": "data.task_loader",
    "TrainerProtocol": "engine.protocol",
}
MODULES = {**nbtrain.PUBLIC, **RECEIVED}
THINGS = {name: getattr(import_module(f"nbtrain.{module}"), name) for name, module in MODULES.items()}
LISTED = {name: kind._internal for name, kind in THINGS.items() if isinstance(kind, type) and issubclass(kind, Listed)}
# Members that nbtrain's own parts call, and whose names Lightning or many modules share: not for you
INTERNAL: dict[str, Set[str]] = {
    **LISTED,
    "MultiGPUAddon": _OF_LAUNCHERS,
    "RayAddon": _OF_LAUNCHERS,
    "StateManagerAddon": {"folder"},
    "WandBLoggerAddon": {"connect", "options", "service"},
    "NeptuneLoggerAddon": {"connect", "options", "service"},
    "Shown": {"n_bytes", "processed", "read"},
    "SeededLoader": {"batch_sampler", "sampler", "settings"},
    "TaskLoader": {"batch_sampler", "sampler", "tells_epoch"},
    "TensorLoader": {"settings"},
}
_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Changes", "Example")
_SECTION = re.compile(rf"^({'|'.join(_SECTIONS)}):\n", re.M)
_HOWTO = re.compile(r"^How-to: (.+)\n", re.M)
_CHECKED = "an argument has a wrong type, or a name that is not known"


# -- what a docstring says
def _items(text: str) -> dict[str, str]:
    """The lines `name: text` of a section, whose continuations are indented further."""
    lines = textwrap.dedent(text)
    return {name: " ".join(said.split()) for name, said in re.findall(r"^\*{0,2}(\w+): (.*(?:\n[ ]+.*)*)", lines, re.M)}


class Said(NamedTuple):
    """A docstring by its parts."""

    before: str
    sections: dict[str, str]
    howtos: tuple[str, ...] = ()  # the names of how-to pages

    @classmethod
    def of(cls, thing: Any) -> Said:
        text = inspect.cleandoc(getattr(thing, "__doc__", None) or "") + "\n"
        named = _HOWTO.search(text)
        parts = _SECTION.split(_HOWTO.sub("", text))
        rest: list[str] = []
        sections = {}
        for name, body in zip(parts[1::2], parts[2::2]):
            own = re.match(r"(?:[ \t]+.*\n?|\n)*", body)
            sections[name] = textwrap.dedent(own[0] if own else "").strip("\n")
            rest.append(body[own.end() if own else 0 :].strip())
        howtos = tuple(named[1].split(", ")) if named else ()
        return cls("\n\n".join(part for part in (parts[0].strip(), *rest) if part), sections, howtos)

    @property
    def sentence(self) -> str:
        """The first line."""
        return " ".join(self.before.partition("\n\n")[0].split())

    @property
    def more(self) -> str:
        """What follows the first paragraph."""
        return self.before.partition("\n\n")[2]

    def items(self, section: str) -> dict[str, str]:
        return _items(self.sections.get(section, ""))


# -- types as a person reads them
@cache
def _space(module: str) -> dict[str, Any]:
    """The names of a module, with those that it imports for type checkers alone."""
    found = dict(vars(sys.modules[module]))
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                try:
                    exec(compile(ast.Module([line], []), module, "exec"), found)
                except ImportError:
                    continue
    return found


def spelled(annotation: Any, module: str) -> str:
    """An annotation with the aliases of nbtrain spelled out."""
    if isinstance(annotation, str):
        try:
            return _words(eval(annotation, _space(module)))
        except (NameError, AttributeError, TypeError, SyntaxError):
            return annotation
    return _words(annotation)


# Names that alone would say too little, and those of the parts that a class is made of
_NAMED = {
    "torch.device": "torch.device",
    "torch.nn.modules.module.Module": "nn.Module",
    "nbtrain.base.trainer_base.TrainerBase": "Trainer",
    "nbtrain.base.compose.Composable": "Trainer",
    "nbtrain.base.addon_options.TrainerFactory": "type",  # which knows the options of the addons
    ".Composable": "Trainer",
}


def _words(hint: Any) -> str:
    origin, options = get_origin(hint), get_args(hint)
    if hint in (None, NoneType) or hint is Ellipsis:
        return "None" if hint is not Ellipsis else "..."
    if isinstance(hint, TypeVar):
        return _words(hint.__bound__) if hint.__bound__ is not None else "Any"
    if isinstance(hint, (str, typing.ForwardRef)):
        name = hint if isinstance(hint, str) else hint.__forward_arg__
        return _NAMED.get(f".{name}", name)
    if origin is Annotated:
        return _words(options[0])
    if origin in (Union, UnionType):
        found = list(dict.fromkeys(part for option in options for part in _words(option).split(" | ")))
        return " | ".join(sorted(found, key=lambda word: word == "None"))
    if origin is Literal:
        return " | ".join(f'"{option}"' if isinstance(option, str) else repr(option) for option in options)
    if origin is collections.abc.Callable:
        given = "..." if options[0] is Ellipsis else f"[{', '.join(map(_words, options[0]))}]"
        return f"Callable[{given}, {_words(options[1])}]"
    kind: Any = origin or hint
    name = _NAMED.get(f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}", getattr(kind, "__name__", str(hint)))
    return f"{name}[{', '.join(map(_words, options))}]" if options else name


def _default(value: object) -> str:
    if inspect.isfunction(value) or inspect.isclass(value):
        return value.__name__
    return repr(value) if not isinstance(value, str) else f'"{value}"'


# -- what there is
class Argument(NamedTuple):
    name: str
    type: str
    default: str | None
    said: str


class Entry:
    """A public name, or a member of a public class: what its page says."""

    def __init__(self, name: str, thing: Any, owner: type | None = None, public: str = "") -> None:
        self.name, self.owner, self.public = name, owner, public or name
        self.is_property = isinstance(thing, property) or type(thing).__name__ == "cached_property"
        self.is_class = inspect.isclass(thing)
        self.is_static = isinstance(thing, (classmethod, staticmethod))
        inner = getattr(thing, "fget", None) or getattr(thing, "func", None) or getattr(thing, "__func__", thing)
        self.thing = inner if self.is_property or self.is_static else thing
        self.said = Said.of(self.thing)
        if thing is nbtrain.Trainer:  # whose own docstring fits on a screen
            self.said = Said(self.said.before, Said.of(TrainerBase).sections | self.said.sections)
        if not self.said.before and owner is not None:
            self.said = Said(_comments(owner).get(name, ""), {})

    @property
    def title(self) -> str:
        return f"{self.public}.{self.name}" if self.owner is not None else self.name

    @property
    def is_callable(self) -> bool:
        return not self.is_property and (self.is_class or callable(self.thing))

    @cached_property
    def parameters(self) -> list[inspect.Parameter]:
        if not self.is_callable or (self.is_class and self._has_no_constructor):
            return []
        try:
            found = list(inspect.signature(self.thing).parameters.values())
        except ValueError:
            return []
        is_command = self.owner is not None and (self.name in getattr(self.owner, "commands", ()) or hasattr(self.thing, "is_command"))
        hidden = ("self", "cls", "trainer") if is_command else ("self", "cls")
        if self.owner is nbtrain.History and "." not in self.thing.__qualname__:  # it is written in another module
            hidden += ("history",)
        return [p for i, p in enumerate(found) if not (i < 2 and p.name in hidden)]

    @property
    def _has_no_constructor(self) -> bool:
        return getattr(self.thing, "_is_protocol", False) or issubclass(self.thing, (KeyboardInterrupt, dict)) or self.name in MADE_BY

    def _module(self, name: str) -> str:
        """The module in which the annotation of an argument is written."""
        if not self.is_class:
            return inspect.unwrap(self.thing).__module__
        for base in self.thing.__mro__:
            if name in vars(base).get("__annotations__", {}) or (
                "__init__" in vars(base) and name in inspect.signature(vars(base)["__init__"]).parameters and base.__module__ in sys.modules
            ):
                return base.__module__
        return self.thing.__module__

    @cached_property
    def explained(self) -> dict[str, str]:
        """What the docstrings say of arguments and attributes."""
        shared = {**SHARED[""], **SHARED.get(self.public, {})}
        bases = reversed(self.thing.__mro__) if self.is_class else (self.thing,)
        said = [Said.of(base) for base in bases if not self.is_class or vars(base).get("__doc__")]
        said += [Said.of(nbtrain.TrainerOptions)] if self.thing is nbtrain.Trainer else []
        found = {name: text for one in said for section in ("Args", "Attributes") for name, text in one.items(section).items()}
        return shared | (_comments(self.thing) | _helps(self.thing) if self.is_class else {}) | found

    @cached_property
    def arguments(self) -> list[Argument]:
        found = []
        for p in self.parameters:
            name = p.name
            if self.is_class and name == "addon_options":
                continue
            type_ = spelled(p.annotation, self._module(name)) if p.annotation is not p.empty else ""
            default = None if p.default is p.empty or "Factory" in repr(p.default) or "factory" in repr(p.default) else _default(p.default)
            found.append(Argument(name, type_, default, self.explained.get(name, "")))
        if self.is_class and self.public in OWN_ARGUMENTS_ONLY:
            own = Said.of(self.thing).items("Args")
            return [argument for argument in found if argument.name in own]
        return found

    @cached_property
    def returns_type(self) -> str:
        if self.is_class or not callable(self.thing):
            return ""
        try:
            annotation = getattr(self.thing, "returns", None) or inspect.signature(self.thing).return_annotation
        except ValueError:
            return ""
        return "" if annotation is inspect.Signature.empty else spelled(annotation, inspect.unwrap(self.thing).__module__)

    @property
    def returns(self) -> str:
        return " ".join(self.said.sections.get("Returns", "").split())

    @property
    def says_what_it_returns(self) -> bool:
        is_comment = self.owner is not None and not self.thing.__doc__  # which says nothing else
        nothing = self.is_class or self.is_property or is_comment or self.returns_type in ("", "None")
        return nothing or bool(self.returns) or re.search(r"\b[Rr]eturns?\b", self.said.before) is not None

    @property
    def is_checked(self) -> bool:
        thing = vars(self.thing).get("__init__") if self.is_class else self.thing
        while thing is not None:
            if getattr(getattr(thing, "__code__", None), "co_name", "") == "with_check":
                return True
            thing = getattr(thing, "__wrapped__", None)
        is_addon = self.is_class and issubclass(self.thing, nbtrain.AddOnBase) and self.thing is not nbtrain.AddOnBase
        return is_addon or (self.owner is not None and self.name in getattr(self.owner, "commands", ()))

    @property
    def raises(self) -> dict[str, str]:
        return self.said.items("Raises")

    @property
    def checks_arguments(self) -> bool:
        """Whether a call refuses arguments of a wrong type or name."""
        return self.is_checked and bool(self.arguments)

    @cached_property
    def raised_in_body(self) -> set[str]:
        """The errors that stand in its own code."""
        if self.is_class and self._has_no_constructor:
            return set()
        thing = vars(self.thing).get("__init__") if self.is_class else self.thing
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing))))  # type: ignore[arg-type]
        except (OSError, TypeError, SyntaxError):
            return set()
        calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
        names = [ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)]
        return {name for name in names if name[:1].isupper()}

    @property
    def changes(self) -> str:
        return " ".join(self.said.sections.get("Changes", "").split())

    @property
    def example(self) -> str:
        return self.said.sections.get("Example", "")

    @property
    def chapter(self) -> str:
        """The chapter that its code stands in."""
        thing = self.thing if not self.is_property else self.thing
        return f"../../nbs/{inspect.unwrap(thing).__module__.removeprefix('nbtrain.').replace('.', '/')}.ipynb"

    @cached_property
    def members(self) -> list[Entry]:
        """Its public methods and properties, those of other packages' bases left out."""
        return list(_members(self.name, self.thing)) if self.is_class else []

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Its attributes that are no arguments, with what they are."""
        if not self.is_class:
            return {}
        taken = {argument.name for argument in self.arguments} | {member.name for member in self.members}
        if issubclass(self.thing, nbtrain.AddOnBase) and self.thing is not nbtrain.AddOnBase:
            taken |= _own_attributes(nbtrain.AddOnBase) | _of_services(self.thing)
        found = {} if self.name in OWN_ARGUMENTS_ONLY else {n: s for n, s in self.explained.items() if n in _own_attributes(self.thing)}
        return {name: said for name, said in found.items() if name not in taken and name not in INTERNAL.get(self.name, ())}


def _comments(kind: type) -> dict[str, str]:
    """The comments behind the fields of a dataclass or a protocol."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("nbtrain."):
            for line in inspect.getsource(base).split("\n"):
                if match := re.match(r"    (?:def )?(\w+)(?:: |\(self\)).*?  # (?!pyright)(.+)$", line):
                    found[match[1]] = match[2][:1].upper() + match[2][1:] + "."
    return found


def _helps(kind: type) -> dict[str, str]:
    """The lines of help of a configuration's fields."""
    fields = getattr(kind, "__dataclass_fields__", {}).values()
    return {field.name: f"{text[:1].upper()}{text[1:]}." for field in fields if (text := field.metadata.get("help"))}


# Made by nbtrain, not by you: their fields are attributes, and their constructors are not shown
MADE_BY = {
    "Event", "Gallery", "History", "Plan", "Profile", "Progress", "RangeTest", "Replay", "Rewound", "RunHandle", "RunResult", "Sample",
    "Session", "TrainerOptions",
}  # fmt: skip
OWN_ARGUMENTS_ONLY = {"ModelTrainer", "MultiOptimizerTrainer"}  # the others are those of Trainer


def _own_attributes(kind: type) -> set[str]:
    """The public attributes that a class of nbtrain declares, assigns or explains."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("nbtrain."):
            said = Said.of(base) if vars(base).get("__doc__") else Said("", {})
            found |= set(vars(base).get("__annotations__", {})) | set(said.items("Attributes"))
            found |= {name for name, value in vars(base).items() if not callable(value) and not isinstance(value, (property, classmethod))}
    return {name for name in found if not name.startswith("_")}


def _of_services(kind: type) -> set[str]:
    """What nbtrain requests of a service that `kind` is: not for you to call."""
    return {
        name
        for base in kind.__mro__
        if issubclass(base, Service) and base is not kind
        for name in (*vars(base), *vars(base).get("__annotations__", {}))
    }


def _members(public: str, kind: type) -> Iterator[Entry]:
    inherited = set()
    if kind is not nbtrain.Trainer and issubclass(kind, nbtrain.Trainer):
        inherited = set(dir(nbtrain.Trainer))
    elif kind is not nbtrain.AddOnBase and issubclass(kind, nbtrain.AddOnBase):
        inherited = {*dir(nbtrain.AddOnBase), *_of_services(kind)} - set(kind.commands)
    for name, member in inspect.getmembers_static(kind) if hasattr(inspect, "getmembers_static") else inspect.getmembers(kind):
        is_field = name in getattr(kind, "__dataclass_fields__", ())
        if name.startswith("_") or name in inherited or is_field or name in INTERNAL.get(public, ()):
            continue
        if isinstance(member, WrittenIn) and name not in of_commands():  # it is written in another module
            member = getattr(getattr(kind, name), "__func__", getattr(kind, name))
        if not (inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod, cached_property))):
            continue
        entry = Entry(name, member, kind, public)
        if getattr(inspect.unwrap(entry.thing), "__module__", "").startswith("nbtrain."):
            yield entry


def of_commands() -> set[str]:
    """The commands of nbtrain's addons, which a trainer declares for type checkers."""
    return {name for name in dir(nbtrain.Trainer) if type(inspect.getattr_static(nbtrain.Trainer, name)).__name__ == "MissingCommand"}


@cache
def entries() -> dict[str, Entry]:
    """All that has a page."""
    return {name: Entry(name, thing) for name, thing in THINGS.items()}


def everything() -> list[Entry]:
    """All that has a page, each with its members."""
    return [part for entry in entries().values() for part in (entry, *entry.members)]


# -- where a thing stands
def topic_of(name: str) -> str | None:
    """The page that lists a public name; None for the errors, which have docs/errors.md."""
    package = MODULES[name].partition(".")[0]
    return MOVED.get(name) or next((topic for topic, (_, _, packages) in TOPICS.items() if package in packages), None)


def page_of(name: str) -> str:
    """The page of a public name, or of a member of Trainer written with the class."""
    if name.startswith("Trainer."):
        member = name.partition(".")[2]
        return next((f"trainer_{task}.md" for task, (_, members) in TASKS.items() if member in members), "trainer.md")
    if name == "Trainer":
        return "trainer.md"
    return f"{next((other for other in MODULES if name == other.lower() != other), name)}.md"  # `runs` stands with the class Runs


def howtos(entry: Entry) -> list[str]:
    """Links to the how-to pages that its docstring names."""
    paths = [HOWTO / f"{name}.ipynb" for name in entry.said.howtos]
    titles = [nbformat.read(path, as_version=4).cells[0].source.partition("\n")[0].removeprefix("# ") for path in paths]
    return [f"[{title}](../../nbs/howto/{path.name})" for title, path in zip(titles, paths)]


# -- the pages
def signature(entry: Entry) -> str:
    """The call as code, an argument a line if it is long."""
    if entry.is_property:
        return f"{_before(entry)}{entry.name} -> {entry.returns_type}"
    parts, is_starred = [], False
    shown = {argument.name: argument for argument in entry.arguments}
    for p in entry.parameters:
        if p.kind is p.KEYWORD_ONLY and not is_starred and p.name in shown:
            is_starred = True
            parts.append("*")
        if p.name in shown:
            star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
            is_starred = is_starred or p.kind is p.VAR_POSITIONAL
            one = shown[p.name]
            equals = "" if one.default is None else f" = {one.default}" if one.type else f"={one.default}"
            parts.append(f"{star}{p.name}{': ' * bool(one.type)}{one.type}{equals}")
        elif p.kind is p.VAR_KEYWORD:
            parts.append("**options of the addons" if entry.name == "Trainer" else "**arguments of Trainer")
    returns = f" -> {entry.returns_type}" if entry.returns_type else ""
    line = f"{_before(entry)}{entry.name}({', '.join(parts)}){returns}"
    return line if len(line) <= 60 else f"{_before(entry)}{entry.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _before(entry: Entry) -> str:
    if entry.owner is None:
        return ""
    is_command = entry.name in getattr(entry.owner, "commands", ())
    return "trainer." if is_command else f"{entry.public}."


def _bullet(name: str, said: str, type_: str = "", default: str | None = None) -> str:
    kind = f" (`{type_}`{f', default `{default}`' if default is not None else ''})" if type_ else ""
    return f"- `{name}`{kind}: {said}"


def body(entry: Entry) -> str:
    """What is said of a name below its title."""
    signed = entry.is_callable and not (entry.is_class and entry._has_no_constructor) or entry.is_property
    parts = [entry.said.sentence, f"```text\n{signature(entry)}\n```" if signed else "", entry.said.more]
    arguments = [a for a in entry.arguments if (entry.public, a.name) != ("AddOnBase", "trainer")]  # the class explains it
    if arguments:
        parts.append("\n".join(["**Arguments**", "", *(_bullet(a.name, a.said, a.type, a.default) for a in arguments)]))
    if entry.attributes:
        parts.append("\n".join(["**Attributes**", "", *(_bullet(name, said) for name, said in entry.attributes.items())]))
    if entry.returns:
        parts.append(f"**Returns** {entry.returns}")
    raises = [_bullet(name, f"{said.rstrip('.')}.") for name, said in entry.raises.items()]
    raises += [f"- `ConfigError`, `OptionError`: {_CHECKED}."] if entry.checks_arguments else []
    if raises:
        parts.append("\n".join(["**Raises**", "", *raises]))
    if entry.changes:
        parts.append(f"**Changes** {entry.changes}")
    if entry.example:
        parts.append(f"```pycon\n{entry.example}\n```")
    links = howtos(entry)
    where = f"How-to: {', '.join(links)}. " if links else ""
    if not (entry.owner is not None and links == [] and entry.public != "Trainer"):
        parts.append(f"{where}Chapter: [{Path(entry.chapter).stem}]({entry.chapter}).")
    return "\n\n".join(part for part in parts if part)


def page(name: str) -> str:
    """The page of a public name."""
    entry = entries()[name]
    parts = [f"# {name}", MADE, *([f"`from nbtrain.{RECEIVED[name]} import {name}`"] if name in RECEIVED else []), body(entry)]
    if name == "Trainer":
        lines = [
            f"- [{title}](trainer_{task}.md): {', '.join(f'[`{name}`](trainer_{task}.md#trainer-{_slug(name)})' for name in members)}"
            for task, (title, members) in TASKS.items()
        ]
        parts += ["## Methods and properties", "\n".join(lines)]
        parts += ["## Other names of this topic", _list(other for other in _names("trainer") if other != "Trainer")]
    else:
        members = entry.members
        if name == "AddOnBase":  # in the order of its code: what most addons write comes first
            members = sorted(members, key=lambda member: list(vars(entry.thing)).index(member.name))
        parts += [f"## {name}.{member.name}\n\n{body(member)}" for member in members]
        parts += [f"## {other}\n\n{body(entries()[other])}" for other in MODULES if other != name and page_of(other) == f"{name}.md"]
    return "\n\n".join([*parts, _foot(name)]) + "\n"


def _slug(member: str) -> str:
    return member.replace("_", "-")


def _task_page(task: str) -> str:
    title, members = TASKS[task]
    trainer = entries()["Trainer"]
    known = {member.name: member for member in trainer.members}
    parts = [f"# {title}", MADE, "Methods and properties of [Trainer](trainer.md)."]
    for name in members:
        if name in known:
            parts.append(f"(trainer-{_slug(name)})=\n## Trainer.{name}\n\n{body(known[name])}")
        elif name in trainer.attributes:
            parts.append(f"(trainer-{_slug(name)})=\n## Trainer.{name}\n\n{trainer.attributes[name]}")
    return "\n\n".join([*parts, _foot("Trainer")]) + "\n"


def _foot(name: str) -> str:
    topic = topic_of(name)
    index = f"[{TOPICS[topic][0]}]({topic}.md)" if topic else "[Errors](../errors.md)"
    return f"Examples begin with [these lines](index.md#before-each-example). More: {index}, [all names](index.md)."


def _names(topic: str | None) -> list[str]:
    return sorted((name for name in MODULES if topic_of(name) == topic), key=lambda name: (name != "Trainer", name))


def _list(names: Iterable[str]) -> str:
    return "\n".join(f"- [`{name}`]({page_of(name)}): {entries()[name].said.sentence}" for name in names)


def _index() -> str:
    """The first page: the topics with their names, and what examples begin with."""
    said = "Each name, from the code: signature, arguments, errors, and an example that runs."
    said += " What you make, call, subclass or catch is imported from `nbtrain`;"
    said += " the class of what you are given, such as a Sample or a RunHandle, from the module that its page names."
    parts = ["# Reference", MADE, said]
    for topic, (title, purpose, _) in TOPICS.items():
        names = ", ".join(f"[`{name}`]({page_of(name)})" for name in _names(topic))
        parts += [f"## {title}", f"{purpose} [With a line for each]({topic}.md).", names]
    parts += ["## Errors", "[What to do](../errors.md).", ", ".join(f"[`{name}`]({page_of(name)})" for name in _names(None))]
    said = "Each example on these pages runs by itself after these lines. What a run prints while it trains is left out."
    return "\n\n".join([*parts, "## Before each example", said, f"```python\n{BEFORE.strip()}\n```"]) + "\n"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    return _cell(f"`{text}`")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines)


def _commands() -> str:
    """The commands, each with its arguments."""
    (commands,) = (action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    parts = ["## Commands", "`nbtrain COMMAND --help` prints this in a shell."]
    for action in commands._choices_actions:
        parser, said = commands.choices[action.dest], f"{action.help}."
        parts += [f"### nbtrain {action.dest}", said[:1].upper() + said[1:]]
        if action.dest in cli._CONFIGURED:
            parts.append(f"```console\n{cli._help(action.dest).partition('fields:')[0].strip()}\n```")
        else:
            known = [a for a in parser._actions if a.dest != "help"]
            rows = [(_code(", ".join(a.option_strings) or a.dest), _cell((a.help or "") % {"default": a.default})) for a in known]
            parts.append(_table(("argument", "what it is"), rows) if rows else "")
    return "\n\n".join(part for part in parts if part)


def _fields() -> str:
    """All fields of a configuration."""
    return "\n".join(
        ["## Fields of a configuration", "", "On the command line each is an option.", "", "```console", *describe_fields(), "```"]
    )


def pages() -> dict[Path, str]:
    """Each page as Markdown."""
    made = {FOLDER / "index.md": _index()}
    more: dict[str, tuple[Callable[[], str], ...]] = {"configuration": (_commands, _fields)}
    for topic, (title, purpose, _) in TOPICS.items():
        if topic != "trainer":
            parts = [f"# {title}", MADE, purpose, _list(_names(topic)), *(make() for make in more.get(topic, ()))]
            made[FOLDER / f"{topic}.md"] = "\n\n".join(parts) + "\n"
    made |= {FOLDER / f"trainer_{task}.md": _task_page(task) for task in TASKS}
    return made | {FOLDER / page_of(name): page(name) for name in MODULES if page_of(name) in ("trainer.md", f"{name}.md")}
