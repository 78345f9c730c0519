"""What a notebook completes after a name and a dot. IPython asks jedi, which reads annotations, `dir` and values."""

from __future__ import annotations

import inspect
from typing import Any

from jedi import Interpreter
from programs import script
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
    assert found - documented == {"n_seen"}
    assert trainer._internal <= set(object.__dir__(trainer))


def test_no_property_of_a_public_class_hides_the_others() -> None:
    """At some annotations jedi fails, and the object completes to nothing."""
    names = [name for name in nbtrain.PUBLIC if name != "TrainerProtocol"]
    for kind in filter(inspect.isclass, (getattr(nbtrain, name) for name in names)):
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
