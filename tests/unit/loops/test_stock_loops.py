"""Lightning's own loops: where its version lacks what nbtrain's need every job ends at the same numbers, and requests are attended to.

In your own `lightning.Trainer` a stop is attended to, and what needs a run of nbtrain's is refused.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import wide_job
from lightning.pytorch.callbacks import LambdaCallback
from lightning_modules import Lit
from samples import DEVICE, Regress, make_loader, make_trainer, make_valid, same_weights

from nbtrain import ConfigError, RunPaused, StateManagerAddon, Trainer
from nbtrain.engine import logged
from nbtrain.loops import own_loops, stock_loops
from nbtrain.loops.training import OwnEpochLoop
from nbtrain.run import record


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_loops, "MISSING", ("_first_loop_iter", "_gone"))
    monkeypatch.setattr(logged, "MISSING", ("_first_loop_iter", "_gone"))
    monkeypatch.setattr(record, "_SAID", [])


@pytest.mark.parametrize("name", wide_job.JOBS)
def test_jobs_end_at_the_same_numbers_on_lightnings_own_loops(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    expected = wide_job.JOBS[name](tmp_path / "lean")
    request.getfixturevalue("stock")
    assert wide_job.JOBS[name](tmp_path / "stock") == expected


@pytest.mark.usefixtures("stock")
def test_an_epoch_is_resumed_where_lightning_does_not_call_before_it_reads_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = wide_job.saved(tmp_path / "called")
    monkeypatch.setattr(stock_loops, "call_before_fetch", lambda *args: False)
    assert wide_job.saved(tmp_path / "not called") == expected


def notes_of(trainer: Any) -> list[str]:
    found: list[str] = []
    trainer.recorder.add(SimpleNamespace(update=lambda event: found.append(event.data["text"]) if event.kind == "note" else None))
    trainer.run(1, make_loader())
    return found


@pytest.mark.usefixtures("stock")
def test_what_is_missing_is_said_once() -> None:
    first, second = notes_of(make_trainer()), notes_of(make_trainer())
    assert (
        len(first) == 1 and "which has no _first_loop_iter, _gone: runs take Lightning's own loops, about 1 ms a batch slower" in first[0]
    )
    assert not second


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("at", [3, 7])  # in the training, and in the validation
def test_a_run_on_lightnings_loops_is_paused_and_resumed(at: int) -> None:
    class Pauses(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.progress_checker.get_step() == at:
                self.pause()
            return super().train_step(batch)

    trainer = make_trainer(Pauses)
    with pytest.raises(RunPaused):
        trainer.run(2, make_loader(own_generator=True), make_valid(), background=True).wait()
    assert not isinstance(trainer.module.trainer.fit_loop.epoch_loop, OwnEpochLoop)
    trainer.resume()
    whole = make_trainer()
    whole.run(2, make_loader(own_generator=True), make_valid())
    assert same_weights(trainer.model, whole.model)


@pytest.mark.usefixtures("stock")
def test_a_run_on_lightnings_loops_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    class Stops(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.current_step == 7:
                self.stop()
            return super().train_step(batch)

    stopped = make_trainer(Stops.add_on(StateManagerAddon), save_path=tmp_path)
    assert stopped.run(3, make_loader(), make_valid()).status == "stopped" and stopped.current_step == 8
    resumed = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)
    resumed.run(3, make_loader(), make_valid(), resume="auto")
    whole = make_trainer()
    whole.run(3, make_loader(), make_valid())
    assert same_weights(resumed.model, whole.model) and resumed.current_step == 15


# -- in your own lightning.Trainer
class Validated(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def in_your_trainer(trainer: Any, call: Any) -> Any:
    """Your trainer, after two epochs of five batches in which `call` was called after the second batch."""
    at_second = LambdaCallback(on_train_batch_end=lambda pl_trainer, *args: call() if pl_trainer.global_step == 2 else None)
    own = L.Trainer(max_epochs=2, **trainer.lightning_args() | {"callbacks": [at_second]})
    own.fit(trainer.as_lightning_module(), make_loader(), make_valid())
    return own


@pytest.mark.parametrize("of_lightning", [False, True])
def test_stop_ends_your_own_trainer_after_its_batch(of_lightning: bool) -> None:
    trainer: Any = Trainer.from_lightning(Validated(), device=DEVICE) if of_lightning else make_trainer()
    own = in_your_trainer(trainer, trainer.stop)
    assert own.should_stop and own.global_step == trainer.current_step == 2
    assert not in_your_trainer(trainer, lambda: None).should_stop  # the next one


@pytest.mark.parametrize("request_name", ["pause", "resume", "validate_now", "save_state"])
def test_other_requests_are_refused_in_your_own_trainer(request_name: str, tmp_path: Path) -> None:
    trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)
    with pytest.raises(ConfigError) as raised:
        in_your_trainer(trainer, getattr(trainer, request_name))
    assert str(raised.value) == (
        f"{request_name}() needs a run of nbtrain's, and your own lightning.Trainer trains here.\n"
        "  Train with run(n_epoch, loader). Here stop() or pl_trainer.should_stop = True ends the training, and "
        "pl_trainer.save_checkpoint(path) saves."
    )
    assert not list(tmp_path.glob("*/checkpoints/epoch*"))
    with pytest.raises(ConfigError, match="No run is in progress."):  # the error has ended it
        trainer.pause()
