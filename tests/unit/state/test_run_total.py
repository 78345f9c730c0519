"""With `resume`, the number is the run's total: what there is, what is trained, what was changed in between, and what is said."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from resume_cases import outcome
from samples import Breaks, Broken, Regress, make_loader, make_model, make_trainer, make_valid, same_weights, without_times
from torch import nn

from nbtrain import (
    CheckpointError,
    ConfigError,
    EarlyStoppingAddon,
    GradientClipAddon,
    NbtrainError,
    RunPaused,
    RunStopped,
    StateManagerAddon,
)
from nbtrain.cli import main
from nbtrain.history.run_folder import find_run

Saving = Regress.add_on(StateManagerAddon)
Stopping = Regress.add_on(StateManagerAddon, EarlyStoppingAddon)


def make(folder: Path, kind: Any = Saving, **options: Any) -> Any:
    return make_trainer(kind, save_path=folder, keep_source=False, **options)


def run(trainer: Any, n_epoch: int, **options: Any) -> Any:
    return trainer.run(n_epoch, options.pop("loader", None) or make_loader(), make_valid(), resume="auto", **options)


def cosine(optimizer: Any, plan: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.total_steps)


def sgd(params: Any, lr: float = 0.1) -> Any:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Saving, {}),
        (Saving, {"optimizer": sgd, "scheduler": cosine}),
        (Saving, {"save_format": "safetensor", "scheduler": lambda step: 0.9**step}),
        (Stopping, {"patience": 3, "delta": 0.001, "restore_best": True}),
    ],
    ids=["plain", "a schedule that is planned", "a schedule by step", "early stopping"],
)
def test_a_higher_number_trains_on_in_the_same_process_as_in_a_new_one(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    options = {**options, "seed": 1}
    same = make(tmp_path / "same", kind, **options)
    assert run(same, 2).reason == ""
    result, expected = run(same, 4), outcome(same)
    assert (result.n_epochs, same.counts.epoch, same.train_state.run) == (2, 4, 1)
    run(make(tmp_path / "new", kind, **options), 2)
    new = make(tmp_path / "new", kind, **options)
    run(new, 4)
    assert outcome(new) == expected and without_times(new.history.epochs) == without_times(same.history.epochs)
    for trainer in (same, make(tmp_path / "new", kind, **options)):
        again = run(trainer, 4)
        assert (again.reason, again.n_epochs) == ("all 4 epochs were there: nothing to train", 0)
        assert run(trainer, 1).reason == "4 epochs were there, 1 is requested: nothing to train; rewind(epoch=1) goes back"


def test_what_was_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(make(tmp_path), 1)
    trainer = make(tmp_path)
    run(trainer, 3)
    record = (tmp_path / "run-001" / "events.jsonl").read_text()
    assert "resumed from epoch=1-step=5.ckpt: 1 of 3 epochs was there; 2 more" in record
    capsys.readouterr()
    run(make(tmp_path, log_bar=True), 3)
    assert re.fullmatch(r"all 3 epochs were there: nothing to train · \S*run-001\n", capsys.readouterr().out)


def test_a_rewound_run_continues_from_where_it_is(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": 1, "scheduler": cosine}
    trainer, whole = make(tmp_path / "rewound", keep_states=True, **options), make(tmp_path / "whole", **options)
    run(whole, 4)
    run(whole, 5)
    run(trainer, 4)
    for epoch in (2, 4):
        trainer.rewind(epoch=epoch)
        assert run(trainer, epoch).reason.endswith("nothing to train") and trainer.counts.epoch == epoch
        run(trainer, 4 if epoch == 2 else 5)
    assert same_weights(trainer.model, whole.model) and trainer.train_state.run == 1


def test_a_run_does_not_resume_what_is_in_a_session(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(Broken), trainer.session(3, 1, resume="auto") as session:
        for _ in session:
            trainer.run(1, make_loader())
            raise Broken
    with pytest.raises(CheckpointError, match=r"(?s)is in a session.*session\(\.\.\., resume=\)"):
        make(tmp_path).run(3, make_loader(), resume="auto")


# -- several lines
def new_head(trainer: Any) -> None:
    torch.manual_seed(5)
    nn.init.normal_(trainer.model[-1].weight)


def other_optimizer(trainer: Any) -> None:
    trainer.optimizer = sgd(trainer.model[-1:].parameters(), 0.05)


def other_rate(trainer: Any) -> None:
    trainer.set(lr=1e-3)


def thawed(trainer: Any) -> None:
    trainer.model[0].requires_grad_(False)


def script(folder: Path, change: Callable[[Any], None], *, kind: Any = Saving, first: int = 2, resume: bool = True, **options: Any) -> Any:
    """Two lines, and what is changed by hand in between."""
    trainer = make(folder, kind, **options)
    torch.manual_seed(1)
    train = run if resume else lambda trainer, n: trainer.run(n, make_loader(), make_valid())
    train(trainer, first)
    change(trainer)
    train(trainer, 4 if resume else 2)
    return trainer


@pytest.mark.parametrize("change", [new_head, other_optimizer, other_rate, thawed])
@pytest.mark.parametrize("breaks", [None, 7, 10, 13])
def test_what_is_changed_between_two_lines_is_trained(change: Any, breaks: int | None, tmp_path: Path) -> None:
    expected = script(tmp_path / "plain", change, resume=False)
    folder = tmp_path / "resumed"
    if breaks is not None:
        with pytest.raises(Broken):
            script(folder, change, every_n_steps=1, lightning={"callbacks": [Breaks(breaks)]})
    trainer = script(folder, change, **({} if breaks is None else {"every_n_steps": 1}))
    assert same_weights(trainer.model, expected.model) and trainer.counts.epoch == 4
    again = script(folder, change, **({} if breaks is None else {"every_n_steps": 1}))
    assert same_weights(again.model, expected.model) and again.result.n_epochs == 0


def test_a_line_that_early_stopping_has_ended_trains_nothing_when_a_later_one_has_trained_on(tmp_path: Path) -> None:
    def lines(*callbacks: L.Callback) -> Any:
        trainer = make(tmp_path, Stopping, patience=1, delta=9.0, lightning={"callbacks": [*callbacks]})
        first = run(trainer, 12)
        trainer.optimizer = sgd(trainer.model[-1:].parameters())
        return trainer, first, run(trainer, 20)

    with pytest.raises(Broken):
        lines(Breaks(13))
    trainer, first, second = lines()
    assert first.n_epochs == 0 and first.reason.startswith("ended at epoch 2 of 12 (val_loss has not improved")
    assert (second.n_epochs, trainer.counts.epoch) == (1, 3)
    _, first, second = lines()
    assert first.reason == "the run of 12 epochs ended at epoch 2, and 3 epochs are there"
    assert (first.n_epochs, second.n_epochs) == (0, 0) and second.reason.startswith("ended at epoch 3 of 20 (val_loss has not improved")


# -- other settings
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"optimizer": lambda params: sgd(params, 0.01)}, "another option of the optimizer: lr was 0.1 and is 0.01"),
    "batches": ({"loader": (64, 8)}, "another loader: batches was 4 and is 8, batch_size was 16 and is 8"),
    "clipping": ({"gradient_clip": 1.0}, "another clipping: gradient_clip was 0.5 and is 1.0"),
}


@pytest.mark.parametrize("name", OTHER)
def test_nothing_to_train_with_other_settings_is_an_error(name: str, tmp_path: Path) -> None:
    kind = Regress.add_on(StateManagerAddon, GradientClipAddon)
    given: dict[str, Any] = {"optimizer": sgd, "gradient_clip": 0.5}
    run(make(tmp_path, kind, **given), 2, loader=make_loader(64, batch_size=16))
    other, words = OTHER[name]
    size, batch_size = other.get("loader", (64, 16))
    trainer = make(tmp_path, kind, **(given | {key: value for key, value in other.items() if key != "loader"}))
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    with pytest.raises(ConfigError, match="^run-001 is complete with epoch 2, and was trained with another ") as error:
        run(trainer, 2, loader=make_loader(size, batch_size=batch_size))
    assert words in str(error.value) and "Give this run its own save_path" in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert run(trainer, 3, loader=make_loader(size, batch_size=batch_size)).n_epochs == 1


def test_save_path_is_enough_to_resume(tmp_path: Path) -> None:
    """StateManagerAddon joins the trainer, and keeps the newest two checkpoints and the best."""
    whole = make(tmp_path / "whole", keep_last_n=2, seed=1)
    run(whole, 5)
    with pytest.raises(Broken):
        run(make(tmp_path / "plain", Regress, seed=1, lightning={"callbacks": [Breaks(18)]}), 5)
    trainer = make(tmp_path / "plain", Regress, seed=1)
    run(trainer, 5)
    assert same_weights(trainer.model, whole.model) and trainer.title == "Regress"
    names = [{path.name for path in (one.run_dir / "checkpoints").glob("epoch=*")} for one in (trainer, whole)]
    assert names[0] == names[1] and len(names[0]) in (2, 3)
    session = make(tmp_path / "session", Regress)
    with session.session(2, 1, resume="auto") as rounds:
        for _ in rounds:
            session.run(1, make_loader())
    with pytest.raises(ConfigError, match=r"(?s)has no folder that it saves in.*save_path="):
        make_trainer().run(1, make_loader(), resume="auto")


def test_a_run_folder_stands_for_its_newest_checkpoint_and_its_best_weights(tmp_path: Path) -> None:
    first = make(tmp_path / "runs")
    run(first, 2)
    shutil.rmtree(make_trainer(save_path=tmp_path / "runs").run(1, make_loader()).run_dir / "checkpoints")  # as one that was killed
    for folder in (first.run_dir, tmp_path / "runs"):
        trainer = make(tmp_path / folder.name)
        trainer.run(3, make_loader(), resume=folder)
        assert trainer.history.epochs[-1]["epoch"] == 3 and trainer.result.n_epochs == 1
    with pytest.raises(CheckpointError, match=r"(?s)run-002 has no checkpoint to resume.*apply_weights\('.*run-002'\)"):
        make(tmp_path / "other").run(3, make_loader(), resume=tmp_path / "runs" / "run-002")
    model = make_trainer(model=make_model(7))
    model.apply_weights(first.run_dir)
    assert same_weights(dict(model.model.state_dict()), dict(first.best_weights))


def test_every_command_takes_a_run_folder_or_the_folder_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    first = make(runs)
    run(first, 2)
    make_trainer(save_path=runs).run(1, make_loader())
    shutil.rmtree(runs / "run-002" / "checkpoints")  # as one that was killed
    for weights in (runs / "run-002").glob("*.safetensors"):
        weights.unlink()
    assert make(tmp_path / "new").load_state(runs).name == make(tmp_path / "new").load_state(first.run_dir).name == "epoch=2-step=10.ckpt"
    capsys.readouterr()
    make_trainer(model=make_model(7)).apply_weights(runs)
    assert capsys.readouterr().out == "runs: the weights of run-001 (best), as run-002 has none.\n"
    with pytest.raises(ConfigError, match="runs is of nbtrain"):
        make(tmp_path / "new").import_run(runs)
    assert main(["resume", str(runs)]) == 2
    said = capsys.readouterr()
    assert said.out == "run-002 has no checkpoint; this is run-001\n" and "run-001' has no config.yaml" in said.err
    (tmp_path / "empty").mkdir()
    for resume in (lambda: make(tmp_path / "new").load_state(tmp_path / "empty"), lambda: find_run(tmp_path / "empty")):
        with pytest.raises(NbtrainError, match=r"(holds neither a run nor a checkpoint|No run was recorded).*\n *Give a run folder"):
            resume()


# -- the end
MOMENTS = ("train_batch_end", "validation_start", "validation_batch_end", "validation_end", "train_epoch_end", "train_end", "fit_end")


@pytest.mark.parametrize("moment", [*MOMENTS, "teardown", "finalize"])
def test_an_interrupt_after_the_last_batch_ends_what_waits_at_every_moment(moment: str) -> None:
    """It pauses the run, or, where no further batch comes, ends the cell: in a loop, the next run must not begin."""

    class Presses(L.Callback):
        pass

    def press(*given: Any, **options: Any) -> None:
        if trainer.counts.step >= 9 and not pressed:  # a batch is counted behind its hook
            pressed.append(moment)
            while not trainer.handle.is_waited_for:  # else the signal would end the tests
                time.sleep(0.01)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

    pressed: list[str] = []
    setattr(Presses, moment if moment == "teardown" else f"on_{moment}", press)
    given: dict[str, Any] = {"hooks": {"on_finalize": press}} if moment == "finalize" else {"lightning": {"callbacks": [Presses()]}}
    trainer = make_trainer(**given)
    handle = trainer.run(2, make_loader(), make_valid(), background=True)
    with pytest.raises((RunPaused, RunStopped)) as error:
        handle.wait()
    assert pressed
    if error.type is RunStopped:
        assert str(error.value) == "■ came at the end: the run is completed · trainer.result has what it reached"
        assert handle.status == "completed" and handle.wait() is trainer.result
    else:
        assert trainer.resume() is trainer.result and trainer.result.status == "completed"


# -- the best
@pytest.mark.parametrize("again", [False, True], ids=["the same trainer", "a new process"])
def test_the_best_belongs_to_a_validation_set_and_a_monitor(again: bool, tmp_path: Path) -> None:
    trainer = make(tmp_path, monitor="val_loss")
    run(trainer, 2)
    before = {name: value.clone() for name, value in trainer.best_weights.items()}
    trainer = make(tmp_path, monitor="val_loss") if again else trainer
    trainer.run(3, make_loader(), make_valid(8), resume="auto")
    assert trainer.history.best["epoch"] == 3
    (text,) = [words for _, words in trainer.history.marks]
    assert text.startswith(
        "the validation set is TensorDataset of 8, and was TensorDataset of 40: best starts again, apply_weights(before=1)"
    )
    trainer.apply_weights(before=1)
    assert same_weights(dict(trainer.model.state_dict()), before)
    other = make(tmp_path, monitor="val_mae")
    other.run(4, make_loader(), make_valid(8), resume="auto")
    assert other.history.best["epoch"] == 4
    assert [words.partition(":")[0] for _, words in other.history.marks][1:] == ["the monitor is val_mae, and was val_loss"]
    make(tmp_path, monitor="val_mae").run(5, make_loader(), make_valid(8), resume="auto")
    assert len(other.history.marks) == 2
