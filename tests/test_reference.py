"""The reference lacks nothing: each public name and each member has what a reader needs, and its example runs and prints what it says."""

from __future__ import annotations

import doctest
import os
import re
from pathlib import Path
from typing import Any

import pytest
from programs import script

from nbtrain.views.terminal import LogView

MAKE = script("make_reference")
EVERY = {entry.title: entry for entry in MAKE.everything()}
NAMES = MAKE.entries()
# Hooks and parts of a contract: nbtrain calls them, and the example of their class shows them
CALLED = {title for title in EVERY if title.startswith(("Callback.on_", "AddOnBase.", "TrainerProtocol."))}


def test_every_name_has_a_sentence() -> None:
    assert not [title for title, entry in EVERY.items() if not entry.said.sentence.rstrip(")").endswith((".", "?", "`"))]


def test_every_argument_is_explained() -> None:
    assert not [f"{title}({argument.name})" for title, entry in EVERY.items() for argument in entry.arguments if not argument.said]


def test_every_argument_has_a_type() -> None:
    assert not [f"{title}({argument.name})" for title, entry in EVERY.items() for argument in entry.arguments if not argument.type]


def test_every_attribute_is_explained() -> None:
    kinds = {name: entry for name, entry in NAMES.items() if entry.is_class and name not in MAKE.OWN_ARGUMENTS_ONLY}
    missing = []
    for name, entry in kinds.items():
        known = {argument.name for argument in entry.arguments} | {member.name for member in entry.members} | set(entry.attributes)
        known |= MAKE.INTERNAL.get(name, set()) | MAKE.of_commands()
        if name not in ("Trainer", "TrainerArgs", "TrainerOptions"):
            missing += [f"{name}.{attribute}" for attribute in MAKE._own_attributes(entry.thing) - known - _of_base(entry.thing)]
    assert not missing


def _of_base(kind: type) -> set[str]:
    """What every addon has."""
    base = NAMES["AddOnBase"]
    return {*base.attributes, *MAKE._of_services(kind)} if issubclass(kind, base.thing) else set()


def test_every_member_of_the_trainer_has_its_task() -> None:
    tasks = [member for _, members in MAKE.TASKS.values() for member in members]
    trainer = NAMES["Trainer"]
    members = {member.name for member in trainer.members} - MAKE.of_commands()
    assert len(tasks) == len(set(tasks))
    assert sorted(members - set(tasks)) == [] and not set(tasks) - members - set(trainer.attributes)


def test_what_returns_something_says_what() -> None:
    assert not [title for title, entry in EVERY.items() if not entry.says_what_it_returns]


def test_every_error_in_the_code_of_a_name_is_named_with_its_cause() -> None:
    assert not {title: lost for title, entry in EVERY.items() if (lost := entry.raised_in_body - set(entry.raises))}


def test_errors_stand_in_their_section() -> None:
    assert not [title for title, entry in EVERY.items() if re.search(r"\bRaises [A-Z]", entry.said.before)]


def test_what_a_call_changes_is_said() -> None:
    calls = {title: entry for title, entry in EVERY.items() if entry.is_callable and not entry.is_class and title not in CALLED}
    assert not [title for title, entry in calls.items() if not entry.changes]


def test_every_name_has_an_example_and_every_member_is_in_one() -> None:
    missing = [name for name, entry in NAMES.items() if ">>> " not in entry.example]
    for title, entry in EVERY.items():
        if entry.owner is not None and title not in CALLED and ">>> " not in entry.example:
            own = NAMES[entry.public]
            text = "\n".join([own.example, *(member.example for member in own.members)])
            missing += [title] if not re.search(rf"\.{entry.name}\b|def {entry.name}\b", text) else []
    assert not missing


def test_every_name_leads_to_its_chapter() -> None:
    assert not [title for title, entry in EVERY.items() if not (MAKE.FOLDER / entry.chapter).resolve().exists()]


def test_internal_members_are_there() -> None:
    assert not [
        f"{name}.{member}"
        for name, members in MAKE.INTERNAL.items()
        for member in members - MAKE.LISTED.get(name, frozenset())
        if member not in _known(NAMES[name].thing)
    ]


def _known(kind: type) -> set[str]:
    return set(dir(kind)) | MAKE._own_attributes(kind)


def test_reference_is_that_of_the_docstrings() -> None:
    made = MAKE.pages()
    assert {path: path.read_text(encoding="utf-8") for path in MAKE.FOLDER.glob("*.md")} == made, "run `make names`"
    assert len({path.name.lower() for path in made}) == len(made), "two pages with one name on macOS and Windows"
    assert not [name for name, module in MAKE.MODULES.items() if MAKE.topic_of(name) is None and module != "errors"]


def test_pages_are_short() -> None:
    lines = {path.stem: text.count("\n") + sum(len(line) // 60 for line in text.split("\n")) for path, text in MAKE.pages().items()}
    fields = {"configuration", "TrainerArgs"}  # a line for each field of a configuration
    assert not {name: n for name, n in lines.items() if n > 400 and name not in fields}


def test_types_are_spelled_out() -> None:
    text = "\n".join(MAKE.signature(entry) for entry in EVERY.values())
    assert not re.findall(r"\b(?:Loaders|Optimizers|Schedulers|PositiveInt|Predicted|Hooks|Mode|Device|BranchType|AnyTrainer)\b", text)
    assert "Composable" not in text and "TrainerBase." not in text and "n_epoch: int" in text


@pytest.mark.parametrize("title", [title for title, entry in EVERY.items() if entry.example])
def test_example_runs_and_prints_what_it_says(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LogView, "_line", lambda *args: None)  # what a run prints
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(_before(), names)
    found = doctest.DocTestParser().get_doctest(EVERY[title].example + "\n", names, title, f"{title} in {os.getcwd()}", 0)
    failed: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL).run(found, out=failed.append)
    assert not failed, "".join(failed)


def _before() -> Any:
    return compile(MAKE.BEFORE, "before", "exec")
