"""Five threads make requests of a run at once: nothing stands still, and the run trains as a calm one does."""

from __future__ import annotations

import faulthandler
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked_locks import ORDER, RankedLock
from samples import Regress, make_loader, make_trainer, make_valid, same_weights, without_times

import nbtrain
from nbtrain import ConfigError, StateManagerAddon, Trainer

_STILL_S = 300.0  # a storm that stands still; it takes a tenth of it at most


class Stops(Regress):
    """Stops its run with the update `at`, counted from 1."""

    at = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.step + 1 == self.at:
            self.stop()
        return super().train_step(batch)


class Again(Stops):
    """The same steps, written again."""


def requests_of(trainer: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Twelve kinds of requests that change nothing in what is trained."""
    valid, batch = make_valid(), torch.ones(2, 8)
    return {
        "pause": trainer.pause,
        "resume": lambda: trainer.resume(background=True),
        "resume with a class": lambda: trainer.resume(Again, background=True),
        "use": lambda: trainer.use(Again),
        "set": lambda: trainer.set(weight_decay=0),
        "validate_now": trainer.validate_now,
        "save_state": trainer.save_state,
        "save_model": lambda: trainer.save_model(folder / f"{threading.get_ident()}.safetensors", overwrite=True),
        "predict": lambda: trainer.predict(batch),
        "evaluate": lambda: trainer.evaluate(valid),
        "handle.pause": lambda: trainer.handle.pause(),
        "handle.resume": lambda: trainer.handle.resume(),
    }


def storm(trainer: Any, n_requests: int, folder: Path, seed: int = 0, n_threads: int = 5) -> Counter[str]:
    """Make `n_requests` requests of `trainer` from five threads, in an order drawn with `seed`. Returns how often each kind was made."""
    kinds, made, raised = requests_of(trainer, folder), Counter[str](), list[BaseException]()

    def ask(number: int) -> None:
        draws = random.Random(f"{seed} {number}")
        for _ in range(n_requests // n_threads):
            name = draws.choice([*kinds])
            try:
                kinds[name]()
            except ConfigError:  # it is paused inside a validation, or where nothing is to be resumed
                pass
            except BaseException as error:
                raised.append(error)
                return
            made[name] += 1

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_STILL_S)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        pytest.fail("The run and its requests stand still.")
    assert not raised, raised
    return made


def measured(trainer: Trainer) -> list[dict[str, Any]]:
    """The rows of the epochs. Their `processed` counts the batches of all validations, also of those that were requested."""
    return [{name: value for name, value in row.items() if name != "processed"} for row in without_times(trainer.history.epochs)]


def same_state(one: Any, other: Any) -> bool:
    return all(torch.equal(one[i][name], other[i][name]) for i in one for name in one[i]) and one.keys() == other.keys()


@pytest.mark.usefixtures("ranked_locks")
@pytest.mark.parametrize("n_requests", [150, pytest.param(3000, marks=pytest.mark.long)])
def test_requests_from_five_threads_at_once_change_nothing_and_nothing_stands_still(n_requests: int, tmp_path: Path) -> None:
    make = partial(make_trainer, Stops.add_on(StateManagerAddon), every_n_epochs=1_000_000, save_best=False)
    trainer = make(save_path=tmp_path / "storm", keep_states=True)
    trainer.run(1_000_000, make_loader(), make_valid(), background=True)
    made = storm(trainer, n_requests, tmp_path)
    assert len(made) == 12 and made.total() == n_requests
    trainer.pause()
    trainer.at = trainer.counts.step + 3
    assert trainer.resume().status == "stopped"
    calm = make(save_path=tmp_path / "calm")
    calm.at = trainer.at
    assert calm.run(1_000_000, make_loader(), make_valid()).status == "stopped"
    assert (calm.counts.epoch, calm.counts.step) == (trainer.counts.epoch, trainer.counts.step)
    assert same_weights(trainer.model, calm.model)
    assert same_state(trainer.optimizer.state_dict()["state"], calm.optimizer.state_dict()["state"])
    assert measured(trainer) == measured(calm)


def test_every_module_with_a_lock_has_its_rank() -> None:
    root = Path(nbtrain.__file__).parent
    makes = re.compile(r"threading\.(Lock|RLock|Condition)\(")
    found = {".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py") if makes.search(path.read_text())}
    assert found == set(ORDER)


def test_a_lock_that_is_taken_in_the_wrong_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranked_locks.wrong", [])
    run, view = RankedLock(threading.RLock(), ORDER.index("engine.control")), RankedLock(threading.Lock(), ORDER.index("views.notebook"))
    changed = threading.Condition(run)  # pyright: ignore[reportArgumentType]
    with changed, run, view:
        pass
    with changed, run:
        assert not changed.wait(0.001)
    with view, pytest.raises(AssertionError, match="engine.control after views.notebook"), run:
        pass
