"""A session: the runs of a loop are one run in the view, the history, the loggers and the schedule, and wrong use is refused."""

from __future__ import annotations

import csv
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from samples import Breaks, Broken, Regress, make_loader, make_model, make_trainer, make_valid, same_weights, without_times
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR

from nbtrain import CheckpointError, ConfigError, EarlyStoppingAddon, MultiGPUAddon, StateManagerAddon

Saving = Regress.add_on(StateManagerAddon)


def train(trainer: Any, rounds: Any, epochs: int | None = None, *, n: int = 2, **options: Any) -> list[Any]:
    """A session of runs over two epochs, with an evaluation in each round. Returns what the session gave."""
    seen = []
    with trainer.session(rounds, epochs, **options) as session:
        for item in session:
            seen.append(item)
            trainer.evaluate(make_valid())
            trainer.run(n, make_loader(), make_valid())
    assert not isinstance(rounds, int) or session.round == rounds
    return seen


def test_a_session_is_one_run_in_the_view_the_folder_and_the_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(save_path=tmp_path, log_bar=True)
    assert train(trainer, 3, 2) == [0, 1, 2]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("· run-001 · round 1 of 3") and lines[-1].startswith("✓ completed · 6 epochs · ") and len(lines) == 8
    assert lines[3].startswith("epoch 3/6 · round 2 · train_loss")
    assert [row["round"] for row in trainer.history.epochs] == [1, 1, 2, 2, 3, 3] and len(trainer.history.tests) == 3
    with open(tmp_path / "run-001" / "history.csv") as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["1", "1", "2", "2", "3", "3"]
    events = [json.loads(line) for line in (tmp_path / "run-001" / "events.jsonl").read_text().splitlines()]
    of_session = [event for event in events if event["progress"]["run"] == 2 and event["progress"]["n_epochs"] == 6]
    assert {event["kind"]: event["data"] for event in of_session}["end"] == {"status": "completed", "reason": ""}
    assert [event["data"]["round"] for event in of_session if event["kind"] == "start"] == [1, 2, 3]
    assert len(list((tmp_path / "run-001").glob("source*"))) == 1
    assert trainer.open_session is None and trainer.result.n_epochs == 2
    trainer.run(1, make_loader())
    assert "round" not in trainer.history.epochs[-1]


def test_runs_of_a_session_train_as_repeated_runs_do() -> None:
    session, runs = make_trainer(model=make_model()), make_trainer(model=make_model())
    torch.manual_seed(2)
    train(session, 2)
    torch.manual_seed(2)
    for _ in range(2):
        runs.evaluate(make_valid())
        runs.run(2, make_loader(), make_valid())
    rows = [{name: value for name, value in row.items() if name != "round"} for row in without_times(session.history.epochs)]
    assert same_weights(session.model, runs.model) and rows == without_times(runs.history.epochs)


def test_a_session_is_one_run_of_a_logger(tmp_path: Path) -> None:
    train(make_trainer(lightning={"logger": CSVLogger(tmp_path)}), 3)
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


@pytest.mark.parametrize("n_after", [0, 1])
def test_schedule_is_planned_over_the_session_as_over_one_run(n_after: int) -> None:
    factory = lambda optimizer, plan: LinearLR(optimizer, 1.0, 0.1, plan.total_steps)  # noqa: E731
    session, run = (make_trainer(model=make_model(), scheduler=factory) for _ in range(2))
    session.run(n_after, make_loader())
    run.run(n_after, make_loader())
    train(session, 3, 2)
    run.run(6, make_loader())
    assert [row["lr"] for row in session.history.epochs] == [row["lr"] for row in run.history.epochs]


def test_rate_that_is_set_between_two_rounds_scales_the_rest_of_the_schedule() -> None:
    trainer = make_trainer(model=make_model(), scheduler=lambda optimizer, plan: LinearLR(optimizer, 1.0, 0.1, plan.total_steps))
    whole = make_trainer(model=make_model(), scheduler=lambda optimizer, plan: LinearLR(optimizer, 1.0, 0.1, plan.total_steps))
    train(whole, 2, 1, n=1)
    with trainer.session(2, 1) as session:
        for _ in session:
            trainer.run(1, make_loader())
            trainer.set(lr=trainer.optimizer.param_groups[0]["lr"] / 2)
    first, second = (trainer.history.epochs[n]["lr"] / whole.history.epochs[n]["lr"] for n in range(2))
    assert (first, second) == pytest.approx((1.0, 0.5))


def test_schedule_keeps_its_plan_when_the_data_grow_and_says_so_once() -> None:
    trainer = make_trainer(scheduler=lambda optimizer, plan: LinearLR(optimizer, 1.0, 0.1, plan.total_steps), log_bar=True)
    with trainer.session(4, 1) as session:
        for round in session:
            trainer.run(1, make_loader(20 + 20 * round, batch_size=10))
    rates = [row["lr"] for row in trainer.history.epochs]
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(1e-3)
    notes = trainer.view.board.notes
    assert len([note for note in notes if note.startswith("Epoch 2 has 4 batches, and the schedule was planned for 2")]) == len(notes) == 1


def test_schedule_over_rounds_that_differ_is_planned_over_the_steps_that_are_given() -> None:
    for length in ((3, 1), (None, None)):
        factory = lambda optimizer, plan: LinearLR(optimizer, 1.0, 0.1, plan.total_steps)  # noqa: E731
        trainer = make_trainer(scheduler=factory, log_bar=True)
        with trainer.session(*length, steps=12) as session:
            for round in session:
                trainer.run(1, make_loader(20 * (1 + round), batch_size=10))
                if round == 2:
                    break
        assert trainer.current_step == 12 and trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
        assert not trainer.view.board.notes


def test_without_a_length_only_a_schedule_that_reads_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)needs plan.total_steps, and the session has no length.*rounds=50, epochs=4"):
        train(make_trainer(scheduler=lambda optimizer, plan: LinearLR(optimizer, total_iters=plan.total_steps)), None)
    with pytest.raises(ConfigError, match="needs plan.n_epochs"):
        train(make_trainer(scheduler=lambda optimizer, plan: CosineAnnealingLR(optimizer, plan.n_epochs)), 3)
    for schedule in (lambda optimizer, plan: ExponentialLR(optimizer, 0.9), lambda step: 0.01 * 0.9**step):
        trainer = make_trainer(scheduler=schedule)
        with trainer.session() as session:
            for round in session:
                trainer.run(1, make_loader())
                if round == 2:
                    break
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**15)


def test_an_instance_steps_on_over_the_rounds() -> None:
    trainer = make_trainer(optimizer=(adam := torch.optim.Adam((model := make_model()).parameters())), model=model)
    trainer = make_trainer(model=model, optimizer=adam, scheduler=LambdaLR(adam, lambda epoch: 1 / (1 + epoch)))
    train(trainer, 3, 1, n=1)
    assert [row["lr"] for row in trainer.history.epochs] == pytest.approx([1e-3, 1e-3 / 2, 1e-3 / 3])


def test_rounds_may_be_items_and_early_stopping_begins_again_in_each() -> None:
    trainer = make_trainer(Regress.add_on(EarlyStoppingAddon), patience=1, delta=1e9)
    assert train(trainer, [32, 64], n=5) == [32, 64]
    assert trainer.current_epoch == 2 + 1  # the best value is that of all runs


def test_seed_makes_the_first_data_too() -> None:
    draws = []
    for junk in range(2):
        torch.manual_seed(junk)
        trainer = make_trainer(seed=5)
        with trainer.session(1) as session:
            for _ in session:
                draws.append(torch.rand(3))
                trainer.run(1, make_loader())
                draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[2]) and torch.equal(draws[1], draws[3])


def draw_in_rounds(trainer: Any, failing: int | None = None) -> list[tuple[int, float]]:
    """A session that draws a number in each round, and fails at the end of one. Returns what it has drawn."""
    seen = []
    with suppress(OSError), trainer.session(3, 1) as session:
        for round in session:
            seen.append((round, torch.rand(1).item()))
            trainer.run(1, make_loader())
            if round == failing:
                raise OSError("no data")
    return seen


def test_a_session_that_an_error_ends_says_so_and_the_next_one_goes_on(tmp_path: Path) -> None:
    trainer, whole = (make_trainer(seed=1, save_path=tmp_path / name, model=make_model()) for name in ("failed", "whole"))
    expected = draw_in_rounds(whole)
    assert draw_in_rounds(trainer, failing=1) == expected[:2]
    events = [json.loads(line) for line in (tmp_path / "failed" / "run-001" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["data"] == {"status": "failed", "reason": "OSError in round 2 of 3"}
    torch.rand(1)
    assert draw_in_rounds(trainer) == expected[1:]
    assert same_weights(trainer.model, whole.model) and without_times(trainer.history.epochs) == without_times(whole.history.epochs)
    assert trainer.train_state.run == 1
    assert [round for round, _ in draw_in_rounds(trainer)] == [0, 1, 2] and trainer.train_state.run == 2  # a new one


def phases(folder: Path, end: int | None = None) -> Any:
    """A script of a run, two sessions and a run, each with its total. It fails after `end` rounds."""
    trainer = make_trainer(Saving, seed=1, save_path=folder, model=make_model(), scheduler=lambda step: 0.01)
    seen = []
    trainer.run(1, make_loader(), resume="auto")
    for number in range(2):
        with trainer.session(2 + 2 * number, 1, state={"n": 0}, resume="auto") as session:
            for round in session:
                seen.append((number, round))
                session.state["n"] += 1
                trainer.run(1, make_loader())
                if len(seen) == end:
                    raise OSError
    trainer.run(6, make_loader(), resume="auto")
    return trainer, seen


def test_sessions_and_runs_resume_in_their_order(tmp_path: Path) -> None:
    whole, seen = phases(tmp_path / "whole")
    assert seen == [(0, 0), (0, 1), (1, 2), (1, 3)] and whole.counts.epoch == 6
    assert whole.train_state.rounds == {2: 2, 4: 4} and whole.origin.is_over
    assert phases(tmp_path / "whole")[1] == []
    for end in (2, 3):
        with pytest.raises(OSError):
            phases(tmp_path / str(end), end)
        trainer, again = phases(tmp_path / str(end))
        assert again == seen[end - 1 :] and same_weights(trainer.model, whole.model)
        assert without_times(trainer.history.epochs) == without_times(whole.history.epochs)


def test_wrong_use_of_a_session_is_refused(tmp_path: Path) -> None:
    several = make_trainer(Regress.add_on(MultiGPUAddon), device=["cpu", "cpu"])
    with pytest.raises(ConfigError, match="A session trains in this process alone"), several.session(2):
        pass
    trainer, other = make_trainer(), make_trainer()
    with pytest.raises(ConfigError, match="The session is not open"):
        next(iter(trainer.session(2)))
    with trainer.session(1, 2) as session:
        for _ in session:
            with pytest.raises(ConfigError, match="A session of this trainer is open"), trainer.session(2):
                pass
            with pytest.raises(ConfigError, match="background=True in a session"):
                trainer.run(1, make_loader(), background=True)
            with pytest.raises(ConfigError, match=r"(?s)resume= in a session.*Give it to session"):
                trainer.run(1, make_loader(), resume="auto")
            with pytest.raises(ConfigError, match=r"(?s)round 1 of 1 would train 3 epochs, and session\(epochs=2\) plans 2"):
                trainer.run(3, make_loader())
            trainer.run(2, make_loader())
            with pytest.raises(ConfigError, match="A session is open, and its loop can't go back"):
                trainer.rewind(epoch=1)
    with pytest.raises(ConfigError, match=r"(?s)No round of the session had a run of Regress.*belongs to"), trainer.session(2) as session:
        for _ in session:
            other.run(1, make_loader())
    trainer.toggle("test")
    with pytest.raises(ConfigError, match="In mode 'test' there is no session"), trainer.session(2):
        pass
    saving = make_trainer(Saving, save_path=tmp_path)
    with open(__file__) as file, pytest.raises(ConfigError, match=r"session.state\['file'\] has a TextIOWrapper"):
        train(saving, 1, state={"file": file})


def test_a_run_that_was_saved_is_not_resumed_as_a_session(tmp_path: Path) -> None:
    make_trainer(Saving, save_path=tmp_path).run(1, make_loader())
    with pytest.raises(CheckpointError, match=r"(?s)is the state of a run, not of a session.*run\(..., resume=\)"):
        train(make_trainer(Saving, save_path=tmp_path), 2, resume="auto")


class At(L.Callback):
    """Calls `call` with the trainer where the training of run `n` begins, and raises `then` before its first batch."""

    def __init__(self, n: int, call: Any, then: type[BaseException] | None = None) -> None:
        self.n, self.call, self.then = n, call, then

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.n -= 1
        if self.n == 0:
            self.call()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if self.n == 0 and self.then is not None:
            raise self.then


def two_in_a_round(folder: Path, at: At | None = None, ask: Any = None, **options: Any) -> tuple[list[float], Any]:
    """Three rounds of two runs each, which draw numbers before, between and after these; `ask` is called with the number drawn so far."""
    trainer = make_trainer(Saving, save_path=folder, lightning={"callbacks": [] if at is None else [at]}, **options)
    torch.manual_seed(1)
    with trainer.session(3, epochs=2, state={"drawn": []}, resume="auto") as session:
        drawn = session.state["drawn"]
        for _ in session:
            for n in range(3):
                drawn.append(float(torch.rand(1)))
                if ask is not None:
                    ask(trainer, len(drawn))
                if n < 2:
                    trainer.run(1, make_loader())
    return drawn, trainer


@pytest.mark.parametrize("n_run", [3, 4], ids=["the first run of a round", "the second one"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("every", [{"every_n_epochs": 1}, {"every_n_steps": 2, "save_format": "safetensor"}])
def test_session_that_is_ended_before_the_first_update_of_a_run_resumes_as_if_it_was_not(
    every: dict[str, Any], signum: signal.Signals, n_run: int, tmp_path: Path
) -> None:
    drawn, whole = two_in_a_round(tmp_path / "whole", **every)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        two_in_a_round(tmp_path / "ended", At(n_run, lambda: os.kill(os.getpid(), signum)), **every)
    again, resumed = two_in_a_round(tmp_path / "ended", **every)
    assert again == drawn and same_weights(resumed.model, whole.model)
    assert without_times(resumed.history.epochs) == without_times(whole.history.epochs)


@pytest.mark.parametrize("n_drawn", [4, 5, 6], ids=["before its runs", "between them", "after them"])
def test_a_save_by_hand_in_a_round_does_not_replace_what_the_round_goes_back_to(n_drawn: int, tmp_path: Path) -> None:
    def save(trainer: Any, n: int) -> None:
        if n == n_drawn:
            torch.rand(1)
            assert trainer.save_state().exists()
            raise Broken

    drawn, whole = two_in_a_round(tmp_path / "whole")
    with pytest.raises(Broken):
        two_in_a_round(tmp_path / "broken", ask=save)
    again, resumed = two_in_a_round(tmp_path / "broken")
    assert again == drawn and same_weights(resumed.model, whole.model)


def test_the_end_of_a_session_whose_last_run_was_there_has_its_state(tmp_path: Path) -> None:
    def fail(trainer: Any, n: int) -> None:
        if n == 9:
            raise Broken

    with pytest.raises(Broken):
        two_in_a_round(tmp_path, ask=fail)
    drawn, _ = two_in_a_round(tmp_path)
    again, trainer = two_in_a_round(tmp_path)
    assert again == drawn and len(drawn) == 9 and trainer.train_state.rounds == {3: 3}


@pytest.mark.parametrize("n_run", [3, 4])
def test_a_save_by_hand_before_the_first_update_of_a_run_counts(n_run: int, tmp_path: Path) -> None:
    trainers: list[Any] = []

    def change() -> None:
        trainers[-1].set(lr=0.5)
        trainers[-1].save_state()

    drawn, _ = two_in_a_round(tmp_path / "whole")
    with pytest.raises(Broken):
        two_in_a_round(tmp_path / "broken", At(n_run, change, Broken), ask=lambda trainer, n: trainers.append(trainer))
    again, resumed = two_in_a_round(tmp_path / "broken")
    assert again == drawn
    assert [row["lr"] for row in resumed.history.epochs] == [0.01] * (n_run - 1) + [0.5] * (7 - n_run)


@pytest.mark.parametrize("n_runs", [1, 2])
def test_one_loader_of_all_runs_keeps_its_order_or_a_note_says_that_it_starts_again(n_runs: int, tmp_path: Path) -> None:
    """In a new process the first run of a round has no run before it to be compared with."""

    def go(folder: Path, *callbacks: L.Callback) -> Any:
        trainer = make_trainer(Saving, save_path=folder, lightning={"callbacks": [*callbacks]}, seed=1)
        loader = make_loader(own_generator=True)
        with trainer.session(3, n_runs, resume="auto") as session:
            for _ in session:
                for _ in range(n_runs):
                    trainer.run(1, loader)
        return trainer

    whole = go(tmp_path / "whole")
    with pytest.raises(Broken):
        go(tmp_path / "broken", Breaks(7))  # in the second run
    resumed = go(tmp_path / "broken")
    is_said = "The loader starts again: if it is that of the run before" in (resumed.run_dir / "events.jsonl").read_text()
    assert (same_weights(resumed.model, whole.model), is_said) == (n_runs == 2, n_runs == 1)


def test_a_session_that_was_stopped_before_an_update_can_be_extended(tmp_path: Path) -> None:
    class StopsInRoundTwo(L.Callback):
        def on_train_start(self, *args: Any) -> None:
            if trainer.counts.epoch == 1:
                trainer.stop()

    kind = Regress.add_on(StateManagerAddon)
    trainer = make_trainer(kind, save_path=tmp_path, lightning={"callbacks": [StopsInRoundTwo()]})
    with trainer.session(2, 1, resume="auto") as session:
        for _ in session:
            trainer.run(1, make_loader())
    trainer, rounds = make_trainer(kind, save_path=tmp_path), []
    with trainer.session(3, 1, resume="auto") as session:
        for number in session:
            trainer.run(1, make_loader())
            rounds.append(number)
    assert rounds and trainer.counts.epoch == len(rounds) + 1
