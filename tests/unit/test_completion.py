"""What a notebook completes after a name and a dot. IPython asks jedi, which reads annotations, `dir` and values."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from jedi import Interpreter
from programs import documented, script
from samples import Regress, make_loader, make_trainer

import nbtrain


def completed(text: str, **names: Any) -> set[str]:
    return {found.name for found in Interpreter(text, [names]).complete() if not found.name.startswith("_")}


class Counting(Regress):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.n_seen = 0


def test_after_a_trainer_come_its_documented_members_and_your_own_and_nothing_else() -> None:
    trainer = make_trainer(Counting)
    make = script("make_reference")
    found, page = completed("trainer.", trainer=trainer), make.entries()["Trainer"]
    documented = {entry.name for entry in page.members} | set(page.attributes) | make.of_commands()
    documented |= inspect.signature(nbtrain.Trainer).parameters.keys()
    assert {"run", "history", "set", "n_seen"} <= found
    assert found - documented == {"n_seen"} and len(found) < 60
    assert trainer._unlisted <= documented
    assert trainer._internal | trainer._unlisted <= set(object.__dir__(trainer))


def test_a_command_is_listed_where_its_addon_is(tmp_path: Path) -> None:
    saving = make_trainer(Regress.add_on(nbtrain.StateManagerAddon), save_path=tmp_path)
    commands = {"save_state", "load_state", "import_run"}
    assert commands <= completed("trainer.", trainer=saving) and "apply_average" not in dir(saving)
    assert not {*commands, "apply_average"} & (completed("trainer.", trainer=make_trainer()) | set(dir(make_trainer())))


UNKNOWN = {
    "histroy": "Regress has no histroy.\n  Did you mean 'history'?",
    "modle": "Regress has no modle.\n  Did you mean 'model'?",
    "fit": "Regress has no fit.\n  Call trainer.run(n_epoch, loader, valid_loader).",
    "save_stat": "Regress has no save_stat.\n  Did you mean 'save_state'?",
    "save_state": "Regress has no save_state: it is a command of StateManagerAddon.\n"
    "  Make the trainer with Regress.add_on(StateManagerAddon).",
    "zzz": "'Regress' object has no attribute 'zzz'",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_attribute_names_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(make_trainer(), name)
    assert str(error.value) == str(pickle.loads(pickle.dumps(error.value))) == UNKNOWN[name]


def test_unknown_attribute_of_a_history_and_of_a_result_names_the_nearest_one() -> None:
    result = make_trainer().run(1, make_loader())
    with pytest.raises(AttributeError, match="History has no epoch.\n  Did you mean 'epochs'"):
        result.history.epoch  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(AttributeError, match="RunResult has no bset.\n  Did you mean 'best'"):
        result.bset  # type: ignore[attr-defined] # noqa: B018
    for read in (lambda: result.train_loss, lambda: result["train_loss"]):  # type: ignore[attr-defined, index]
        with pytest.raises((AttributeError, TypeError), match=r"Read result.metrics\['train_loss'\], the one of the last epoch"):
            read()
    with pytest.raises(TypeError, match="'RunResult' object is not subscriptable"):
        list(result)  # type: ignore[call-overload]


def test_error_in_a_property_of_yours_is_its_own() -> None:
    class Broken(Regress):
        @property
        def found(self) -> Any:
            return self.model.zzz

    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'zzz'"):
        make_trainer(Broken).found  # noqa: B018


def test_no_property_of_a_public_class_hides_the_others() -> None:
    """At some annotations jedi fails, and the object completes to nothing."""
    for kind in [thing for name, thing in documented().items() if inspect.isclass(thing) and name != "TrainerProtocol"]:
        properties = {name: value for name, value in inspect.getmembers(kind, lambda value: isinstance(value, property)) if name[0] != "_"}
        assert completed("thing.", thing=type(kind.__name__, (), properties)()) == properties.keys()


def test_what_a_property_returns_completes_with_what_its_objects_have() -> None:
    trainer = make_trainer()
    handle = trainer.run(1, make_loader(), background=True)
    handle.wait()
    names = {"trainer": trainer, "handle": handle}
    assert {"epochs", "steps", "marks", "df", "plot"} <= completed("trainer.history.", **names)
    assert {"status", "best", "elapsed_s"} <= completed("handle.result.", **names)
    assert not completed("trainer.history.", **names) & nbtrain.History._internal


@pytest.mark.parametrize("name", ["Trainer", "trainer.run"])
def test_what_ipython_shows_of_a_name_fits_on_a_screen_and_says_where_to_read_on(name: str) -> None:
    shell = InteractiveShell(colors="nocolor", user_ns={"Trainer": nbtrain.Trainer, "trainer": make_trainer()})
    text = shell.object_inspect_text(name)
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 140
    assert ("TrainerOptions?" if name == "Trainer" else "StateManagerAddon?") in text
    explained = inspect.getdoc(nbtrain.TrainerOptions) or ""
    own = nbtrain.TrainerOptions.__annotations__.keys() & inspect.signature(nbtrain.Trainer).parameters
    assert [argument for argument in own if f"    {argument}: " not in explained] == []
