"""Write the pages in docs/reference/ from the docstrings, by topic: `make names`. Each entry links to the how-to pages that use it."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import nbformat

import nbtrain
from nbtrain import cli
from nbtrain.config.schema import describe_fields

ROOT = Path(__file__).resolve().parent.parent
FOLDER, HOWTO = ROOT / "docs" / "reference", ROOT / "nbs" / "howto"
MADE = "<!-- Made by `make names` from the docstrings -->"
TOPICS = {  # title, what the page is for, the packages whose public names it lists
    "trainer": (
        "Trainer",
        "The class that you subclass, its arguments and methods, and the objects that it returns.",
        ("trainer", "base", "run", "tools", "travel", "engine"),
    ),
    "runs": ("Run and history", "What a run returns and records, and how you read it again.", ("history", "events")),
    "loaders": ("Loaders and batches", "Loaders that resume, and functions that change a batch.", ("data",)),
    "schedules": ("Schedules and parameter groups", "Learning-rate schedules, their pictures, and parameter groups.", ("optim",)),
    "addons": (
        "Addons and their options",
        "One capability each, with the keywords that it adds to a trainer.",
        ("addons", "loggers", "compat"),
    ),
    "configuration": ("Commands and configuration", "The command line, and the fields of a YAML file.", ("jobs", "config")),
}
MOVED = {"AddOnBase": "addons"} | dict.fromkeys(("RunHandle", "RunPaused", "RunStopped", "Session"), "runs")  # where to look


def topic_of(name: str) -> str | None:
    """The page that lists a public name; None for the errors, which have docs/errors.md."""
    package = nbtrain.PUBLIC[name].partition(".")[0]
    return MOVED.get(name) or next((topic for topic, (_, _, packages) in TOPICS.items() if package in packages), None)


@cache
def _howtos() -> Mapping[Path, str]:
    """The how-to pages with their code."""
    pages = {path: nbformat.read(path, as_version=4).cells for path in sorted(HOWTO.glob("*.ipynb")) if path.stem != "index"}
    return {path: "\n".join(cell.source for cell in cells) for path, cells in pages.items()}


def _used_in(name: str) -> str:
    """A line of links to the how-to pages that link to the entry of `name`."""
    links = [
        f"[{text.partition(chr(10))[0].removeprefix('# ')}](../../nbs/howto/{path.name})"
        for path, text in _howtos().items()
        if re.search(rf"\[`{name}`\]\(\.\./\.\./docs/reference/", text)
    ]
    return f"How-to: {', '.join(links)}." if links else ""


def _documentation(thing: object) -> tuple[str, dict[str, str], str]:
    """The text of a docstring, its arguments, and what follows them."""
    text = inspect.getdoc(thing) or ""
    before, found, after = re.match(r"(.*?)(?:\nArgs:\n(.*?)(?:\n(?=\S)|\Z)(.*))?\Z", text, re.S).groups("")  # type: ignore[union-attr]
    arguments = {name: " ".join(said.split()) for name, said in re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", found, re.M)}
    return before.strip(), arguments, after.strip()


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    return _cell(f"`{text}`")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines)


def _default(value: object) -> str:
    return "" if value is inspect.Parameter.empty else _code(repr(value))


def _options(kind: type) -> Iterator[tuple[str, ...]]:
    """The arguments of a class: name, type, default, what it does."""
    explained = {name: said for base in reversed(kind.__mro__) for name, said in _documentation(base)[1].items()}
    if issubclass(kind, nbtrain.AddOnBase):
        types = {name: text for base in reversed(kind.__mro__) for name, text in inspect.get_annotations(base).items()}
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            yield _code(field.name), _code(types[field.name]), _default(field.default), _cell(explained.get(field.name, ""))
        return
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in explained:
            yield _code(name), _code(parameter.annotation), _default(parameter.default), _cell(explained[name])


def _entry(name: str) -> str:
    thing = getattr(nbtrain, name)
    before, arguments, after = _documentation(thing)
    parts = [f"## {name}", before]
    if inspect.isclass(thing) and arguments and (rows := list(_options(thing))):
        parts.append(_table(("option", "type", "default", "what it does"), rows))
    elif arguments:
        parts.append(_table(("argument", "what it is"), [(_code(key), _cell(said)) for key, said in arguments.items()]))
    return "\n\n".join(part for part in (*parts, after, _used_in(name)) if part)


def _methods() -> str:
    """Every public method and property of a trainer, with its first line."""
    members = getattr(inspect, "getmembers_static", inspect.getmembers)(nbtrain.Trainer)  # the static one: from Python 3.11 on
    kinds = (property, classmethod, staticmethod)
    found = [
        (name, getattr(member, "__func__", member)) for name, member in members if inspect.isfunction(member) or isinstance(member, kinds)
    ]
    rows = [(_code(f"Trainer.{name}"), _cell(_documentation(member)[0].partition("\n")[0])) for name, member in found if name[:1] != "_"]
    return "## Methods and properties of a trainer\n\n" + _table(("name", "what you get"), rows)


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
    made = {}
    more = {"trainer": (_methods,), "configuration": (_commands, _fields)}
    for topic, (title, purpose, _) in TOPICS.items():
        names = sorted((name for name in nbtrain.PUBLIC if topic_of(name) == topic), key=lambda name: (name != "Trainer", name))
        entries = [*map(_entry, names), *(make() for make in more.get(topic, ()))]
        made[FOLDER / f"{topic}.md"] = "\n\n".join([f"# {title}", MADE, purpose, *entries]) + "\n"
    return made


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
