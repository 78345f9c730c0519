"""Comet and ClearML by name. Small stand-ins for their clients: tests/ecosystem has an offline run with each of the real ones."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from samples import Regress, make_loader, make_trainer

from nbtrain import AddOnError, ConfigError, LoggersAddon
from nbtrain.loggers import hosted
from nbtrain.loggers.entries import LIMITS, Entries

Logged = Regress.add_on(LoggersAddon)

COMET = """
started, key = [], None

def get_config(name):
    return key if name == "comet.api_key" else None

class ExperimentConfig:
    def __init__(self, **options):
        self.options = options

class Experiment:
    def __init__(self, options):
        self.options, self.points, self.parameters, self.others, self.n_ends = options, [], {}, {}, 0
    def get_key(self):
        return self.options["experiment_key"]
    def log_metrics(self, values, step, epoch):
        self.points.append((step, epoch, values))
    def log_parameters(self, values):
        self.parameters |= values
    def log_other(self, name, value):
        self.others[name] = value
    def end(self):
        self.n_ends += 1

def start(**options):
    started.append(Experiment(options))
    return started[-1]
"""

CLEARML = """
from pathlib import Path

created = []

class Board:
    def __init__(self):
        self.points = []
    def report_scalar(self, title, series, value, iteration):
        self.points.append((title, series, value, iteration))

class Task:
    current, is_offline = None, False
    def __init__(self, options):
        self.options, self.board, self.parameters, self.is_closed, self.id = options, Board(), {}, False, str(len(created))
        created.append(self)
    @classmethod
    def current_task(cls):
        return cls.current
    @classmethod
    def set_offline(cls, value):
        cls.is_offline = value
    @classmethod
    def init(cls, **options):
        cls.current = cls(options)
        return cls.current
    def get_logger(self):
        return self.board
    def connect(self, values):
        self.parameters |= values
    def get_offline_mode_folder(self):
        return Path(f"sessions/offline-{self.id}") if Task.is_offline else None
    def close(self):
        self.is_closed, Task.current = True, None
        if Task.is_offline:
            Path("sessions").mkdir(exist_ok=True)
            Path(f"sessions/offline-{self.id}.zip").write_bytes(b"zip")
"""
CLEARML_PARTS = {
    "__init__.py": CLEARML,
    "config.py": "class config_obj:\n    found = {}\n    get = lambda name, default: config_obj.found.get(name, default)\n",
    "backend_api/__init__.py": "",
    "backend_api/session/__init__.py": "",
    "backend_api/session/defs.py": "class ENV_ACCESS_KEY:\n    get = lambda: None\n",
}


@pytest.fixture(autouse=True)
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for both packages, which hide real ones."""
    site = tmp_path / "site"
    for name, text in {"comet_ml/__init__.py": COMET, **{f"clearml/{name}": text for name, text in CLEARML_PARTS.items()}}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("comet_ml", "clearml")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nbtrain.loggers.addon._LOCAL_S", 600.0)
    monkeypatch.setattr(hosted, "_OPEN", set())


@pytest.fixture
def comet(clients: None) -> Any:
    return importlib.import_module("comet_ml")


@pytest.fixture
def clearml(clients: None) -> Any:
    return importlib.import_module("clearml")


def run(name: str, n_epoch: int = 2) -> Any:
    trainer = make_trainer(Logged, save_path="runs", loggers=[name])
    trainer.run(n_epoch, make_loader())
    return trainer


def notes(trainer: Any) -> list[str]:
    events = map(json.loads, (trainer.run_dir / "events.jsonl").read_text().splitlines())
    return [event["data"]["text"] for event in events if event["kind"] == "note"]


def losses(trainer: Any) -> list[float]:
    return pytest.approx([row["train_loss"] for row in trainer.history.epochs])


def test_comet_gets_the_losses_of_epochs_at_their_steps_and_the_hyper_parameters(comet: Any) -> None:
    trainer = run("comet")
    (experiment,) = comet.started
    points = [(step, epoch, values["train/loss"]) for step, epoch, values in experiment.points if "train/loss" in values]
    assert [point[:2] for point in points] == [(5, 0), (10, 1)] and [point[2] for point in points] == losses(trainer)
    assert experiment.parameters["n_params"] == sum(p.numel() for p in trainer.model.parameters())
    assert (experiment.others["status"], experiment.n_ends) == ("success", 1)


def test_comet_without_a_key_is_offline_in_the_run_folder_and_a_note_says_how_to_upload(comet: Any) -> None:
    trainer = run("comet")
    options = comet.started[0].options
    assert options["online"] is False and options["experiment_config"].options["offline_directory"] == str(trainer.run_dir)
    assert notes(trainer) == [f"comet is offline: no key is stored. To upload the run: comet upload {trainer.run_dir}/*.zip"]


@pytest.mark.long
def test_comet_with_a_key_is_online_and_nothing_is_noted(comet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comet, "key", "a-key")
    trainer = run("comet")
    assert comet.started[0].options["online"] is None and notes(trainer) == []


def test_a_second_run_of_a_trainer_continues_its_comet_experiment(comet: Any) -> None:
    trainer = run("comet")
    trainer.run(1, make_loader())
    first, second = [experiment.options for experiment in comet.started]
    assert first["experiment_key"] == second["experiment_key"] and 32 <= len(first["experiment_key"]) <= 50
    assert second["mode"] == "get_or_create"


def test_clearml_gets_the_losses_of_epochs_under_the_title_loss_and_the_hyper_parameters(clearml: Any) -> None:
    trainer = run("clearml")
    (task,) = clearml.created
    points = [(step, value) for title, series, value, step in task.board.points if (title, series) == ("loss", "train")]
    assert [step for step, _ in points] == [5, 10] and [value for _, value in points] == losses(trainer)
    assert task.parameters["n_params"] == sum(p.numel() for p in trainer.model.parameters()) and task.is_closed


def test_clearml_without_credentials_is_offline_and_its_session_is_moved_to_the_run_folder(clearml: Any) -> None:
    trainer = run("clearml")
    assert clearml.Task.is_offline and (trainer.run_dir / "clearml-offline-0.zip").read_bytes() == b"zip"
    assert list(Path("sessions").iterdir()) == []
    (note,) = notes(trainer)
    assert note == (
        f"clearml is offline: no credentials are stored. To upload: clearml-task --import-offline-session {trainer.run_dir}/clearml-*.zip"
    )


@pytest.mark.long
def test_clearml_with_credentials_is_online(clearml: Any) -> None:
    importlib.import_module("clearml.config").config_obj.found = {"api.credentials.access_key": "a"}
    trainer = run("clearml")
    assert not clearml.Task.is_offline and notes(trainer) == [] and clearml.created[0].is_closed


@pytest.mark.long
def test_a_clearml_task_of_the_script_is_used_and_left_open(clearml: Any) -> None:
    task = clearml.Task.init(project_name="mine")
    trainer = run("clearml")
    assert clearml.created == [task] and not task.is_closed
    assert [value for title, series, value, _ in task.board.points if (title, series) == ("loss", "train")] == losses(trainer)


def test_clearml_gets_no_values_that_are_not_finite() -> None:
    task, said = importlib.import_module("clearml").Task({}), list[str]()
    entries = Entries("clearml", LIMITS["clearml"], said.append)
    hosted.ClearMLTracker(task, Path()).log_metrics(entries({"train_loss": float("nan"), "val_loss": 1.0}), 3)
    assert task.board.points == [("loss", "val", 1.0, 3)]
    assert said == ["clearml leaves out what it can't hold, such as nan of 'train_loss'; the run's own history has all."]


@pytest.mark.parametrize("name", ["comet", "clearml"])
def test_a_second_run_at_the_same_time_in_a_process_is_refused_and_one_afterwards_is_not(name: str) -> None:
    go_on = threading.Event()

    class Waits(Logged):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.processed:  # it is connected after the first batch
                go_on.wait(600)
            return super().train_step(batch)

    first = make_trainer(Waits, save_path="runs", loggers=[name])
    handle = first.run(1, make_loader(), background=True)
    while name not in hosted._OPEN:
        threading.Event().wait(0.01)
    with pytest.raises(AddOnError, match="another run of this process logs to it") as caught:
        run(name)
    go_on.set()
    handle.wait()
    assert "in a separate process" in str(caught.value)
    assert run(name).history.epochs[-1]["epoch"] == 2


@pytest.mark.parametrize("name", ["comet", "clearml"])
def test_a_client_that_fails_to_begin_is_free_for_the_next_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = importlib.import_module({"comet": "comet_ml"}.get(name, name))

    def fails(**options: Any) -> None:
        raise OSError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(*((client, "start", fails) if name == "comet" else (client.Task, "init", fails)))
        trainer = run(name, 1)
        assert any("was never reached (OSError: no route)" in note for note in notes(trainer)) and not hosted._OPEN
    assert not any("never reached" in note for note in notes(run(name, 1)))


@pytest.mark.parametrize(("name", "package"), [("comet", "comet_ml"), ("clearml", "clearml")])
def test_a_client_that_is_missing_is_named_with_the_line_that_installs_it(name: str, package: str, monkeypatch: Any) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == package else find(module))
    with pytest.raises(AddOnError) as caught:
        make_trainer(Logged, loggers=[name])
    assert f"needs {package}, which is not installed.\n  pip install {package.replace('_', '-')}" in str(caught.value)


def test_a_run_without_a_folder_names_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="need a folder to write to"):
        make_trainer(Logged, loggers=["comet"]).run(1, make_loader())
