"""What a run hands to its loggers: one contract for all of them, and services that are away, broken or slow."""

from __future__ import annotations

import csv
import http.server
import importlib.util
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.fabric.utilities import seed as seeding
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from samples import Regress, make_loader, make_trainer, make_valid, same_weights
from torch.utils.data._utils import worker
from torch.utils.tensorboard import SummaryWriter
from tracker_files import csv_rows, metric_values, read_wandb, tensorboard_log, trackio_rows
from tracker_media import CHECKS, ShowsOnce

from nbtrain import AddOnError, ConfigError, LoggersAddon, NeptuneLoggerAddon, OptionError, StateManagerAddon, WandBLoggerAddon
from nbtrain.cli import main
from nbtrain.loggers.background import Delivery, _Sender, draw_apart
from nbtrain.loggers.neptune import NeptuneTracker, connect_neptune
from nbtrain.loggers.neptune_export import read_neptune
from nbtrain.loggers.step_points import StepPoints, gpu_memory
from nbtrain.loggers.wandb import WandBTracker, connect_wandb

KEY = "0123456789abcdef0123456789abcdef01234567"
Web = Regress.add_on(WandBLoggerAddon, NeptuneLoggerAddon)
Local = Regress.add_on(LoggersAddon)


pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests use no key of the user's, and write nothing into the home folder."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NEPTUNE_MODE", "NEPTUNE_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)


def notes(trainer: Any) -> list[str]:
    events = (trainer.run_dir / "events.jsonl").read_text().splitlines()
    return [event["data"]["text"] for event in map(json.loads, events) if event["kind"] == "note"]


LOGGERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "wandb": (Regress.add_on(WandBLoggerAddon), {"web_logger": {"wandb": {"mode": "offline"}}}),
    "neptune": (Regress.add_on(NeptuneLoggerAddon), {"web_logger": {"neptune": {"project_name": "me/p", "api_tkn": "x"}}}),
    **{name: (Local, {"loggers": [name]}) for name in ("csv", "tensorboard", "mlflow", "trackio")},
}


IN_CSV = {"train/loss_step", "train/grad_norm_step", "val/loss"}  # the other columns are none of a metric


def expected(name: str, trainer: Any, every: int) -> dict[tuple[str, int], float]:
    """What the logger `name` must have of a run with five batches an epoch, from its history."""
    found: dict[tuple[str, int], float] = {}
    for row in trainer.history.epochs:
        found |= {(metric.replace("_", "/", 1), row["step"]): value for metric, value in row.metrics.items()}
    table = trainer.history.steps["train"]
    ends = sorted({*range(every, len(table) + 1, every), *range(5, len(table) + 1, 5)})
    for first, last in zip([0, *ends], ends):
        for column in table.columns:
            found[column.replace("_", "/", 1) + "_step", last] = sum(table[column][first:last]) / (last - first)
    return {at: value for at, value in found.items() if name != "csv" or at[0] in IN_CSV}


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's, of SQLAlchemy
@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_gets_every_metric_once_with_its_step_and_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    kind, options = LOGGERS[name]
    pytest.importorskip(name)
    before = threads(), processes()
    lightning = {"log_every_n_steps": 3, "callbacks": [ShowsOnce()]}
    trainer = make_trainer(kind, save_path=tmp_path / "runs", lightning=lightning, gradient_clip=1.0, **options)
    trainer.run(1, make_loader(), make_valid())
    trainer.run(2, make_loader(), make_valid())
    assert threads() <= before[0] and processes() <= before[1]
    CHECKS[name](trainer.run_dir)
    values = metric_values(name, trainer.run_dir)
    assert len(values) == len({(name, step) for name, step, _ in values})
    assert {(name, step): value for name, step, value in values} == pytest.approx(expected(name, trainer, 3), rel=1e-5)
    assert "wandb" not in os.listdir(tmp_path) and ".neptune" not in os.listdir(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", LOGGERS)
def test_runs_at_the_same_time_do_not_mix_and_leave_the_terminal_alone(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, options = LOGGERS[name]
    pytest.importorskip(name)
    stdout = sys.stdout
    trainers = [make_trainer(kind, save_path=tmp_path / "at-once", lightning={"log_every_n_steps": 3}, **options) for _ in range(2)]
    for handle in [trainer.run(1, make_loader(), make_valid(), background=True) for trainer in trainers]:
        handle.wait()
    printed = capsys.readouterr()
    assert sys.stdout is stdout and "rackio" not in printed.out and "mlflow" not in (printed.out + printed.err).lower()
    for trainer in trainers:
        values = {(name, step): value for name, step, value in metric_values(name, trainer.run_dir)}
        assert values == pytest.approx(expected(name, trainer, 3), rel=1e-5)


@pytest.mark.parametrize("method", ["_on_ready", "_atexit_cleanup"])
def test_a_wandb_run_that_ends_leaves_the_client_to_one_that_begins_or_ends(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both methods the client does not have the run among its active ones."""
    from wandb.sdk.wandb_run import Run

    entered, go_on, own = threading.Event(), threading.Event(), getattr(Run, method)

    def slowly(self: Run, *args: Any, **options: Any) -> None:
        if self.id == "slow":
            entered.set()
            assert go_on.wait(600)
        own(self, *args, **options)

    def run(name: str) -> WandBTracker:
        tracker = connect_wandb({"mode": "offline"}, name, tmp_path / name, lambda note: None)
        tracker.log_metrics({"train/loss": 0.5}, 0)
        return tracker

    monkeypatch.setattr(Run, method, slowly)
    quick = run("quick")
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(lambda: run("slow").finalize("success"))
        assert entered.wait(600)
        quick.finalize("success")
        go_on.set()
        slow.result()
    for name in ("quick", "slow"):
        rows, _, exits = read_wandb(tmp_path / name)
        assert [row.get("train/loss") for row in rows] == [0.5] and exits == [0]
    assert not any(thread.startswith("wandb") for thread in threads())


@pytest.mark.parametrize("order", [("wandb", "neptune"), ("neptune", "wandb")])
def test_both_web_loggers_at_once_in_either_order_leave_the_users_dict_as_it_is(order: tuple[str, str], tmp_path: Path) -> None:
    given = {"wandb": {"project": "p", "mode": "offline"}, "neptune": {"project_name": "me/p", "api_tkn": "t"}}
    web_logger = {name: dict(given[name]) for name in order}
    addons = [WandBLoggerAddon if name == "wandb" else NeptuneLoggerAddon for name in order]
    trainer = make_trainer(Regress.add_on(*addons), save_path=tmp_path / "runs", web_logger=web_logger)
    trainer.run(1, make_loader(), make_valid())
    assert web_logger == given
    assert metric_values("wandb", trainer.run_dir) == metric_values("neptune", trainer.run_dir) != set()


def test_logging_changes_nothing_of_the_training(tmp_path: Path) -> None:
    plain = make_trainer()
    random.seed(5)
    torch.manual_seed(3)
    plain.run(2, make_loader(), make_valid())
    drawn = random.random()
    logged = make_trainer(Web, save_path=tmp_path / "runs", web_logger={"wandb": {"mode": "offline"}})
    random.seed(5)
    torch.manual_seed(3)
    logged.run(2, make_loader(), make_valid())
    assert same_weights(plain.model, logged.model) and drawn == random.random()


def test_a_whole_runs_parameters_source_best_score_figure_and_weights_are_kept(tmp_path: Path) -> None:
    options = {
        "web_logger": {"neptune": {"api_tkn": "a-secret"}, "wandb": {"mode": "offline"}},
        "log_figures": True,
        "log_checkpoints": True,
    }
    trainer = make_trainer(Web, save_path=tmp_path / "runs", gradient_clip=0.25, **options)
    trainer.run(1, make_loader(), make_valid())
    (entries,) = read_neptune(trainer.run_dir).values()
    values = {entry.name: entry.value for entry in entries}
    best = trainer.history.best
    assert (values["best/val_loss"], values["best/epoch"], values["status"]) == (best["val_loss"], 1, "success")
    assert values["hyperparams/gradient_clip"] == 0.25
    _, summary, exits = read_wandb(trainer.run_dir)
    assert (summary["best/val_loss"], exits) == (best["val_loss"], [0])
    (files,) = (trainer.run_dir / "wandb").glob("offline-run-*/files")
    assert "class Regress" in (files / "source" / "steps.py").read_text() and (files / "best.safetensors").exists()
    assert list(files.glob("media/images/curves*.png"))
    everything = [file.read_bytes() for file in trainer.run_dir.rglob("*") if file.is_file()]
    assert not any(b"a-secret" in content for content in everything)


def tensorboard_parameters(folder: Path) -> dict[str, Any]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = HParamsPluginData.FromString(tensorboard_log(folder).SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    return {name: value.number_value or value.string_value for name, value in data.session_start_info.hparams.items()}


def mlflow_parameters(folder: Path) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    found = client.get_run((folder / "mlflow-run-id").read_text()).data.params
    return {name: float(value) if value.replace(".", "").isdigit() else value for name, value in found.items()}


def trackio_parameters(folder: Path) -> dict[str, Any]:
    return json.loads(trackio_rows(folder, "config from configs")[0][0])


PARAMETERS = {"tensorboard": tensorboard_parameters, "mlflow": mlflow_parameters, "trackio": trackio_parameters}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_tracker_by_name_has_the_hyper_parameters_and_goes_on_where_they_have_changed(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    kind = Regress.add_on(LoggersAddon, StateManagerAddon)
    first = make_trainer(kind, save_path=tmp_path / "params", loggers=[name], gradient_clip=0.25)
    first.run(1, make_loader())
    second = make_trainer(kind, save_path=tmp_path / "params", loggers=[name], gradient_clip=0.5)
    second.run(2, make_loader(), resume="auto")
    assert not any("failed" in note for note in notes(second))
    found = PARAMETERS[name](second.run_dir)
    assert (found["n_params"], found["monitor"]) == (161, "val_loss") and found["gradient_clip"] in (0.25, 0.5)


def test_a_run_resumed_in_another_process_goes_on_under_its_id(tmp_path: Path) -> None:
    def make() -> Any:
        kind = Regress.add_on(WandBLoggerAddon, StateManagerAddon)
        return make_trainer(kind, save_path=tmp_path / "runs", web_logger={"wandb": {"mode": "offline"}})

    first = make()
    first.run(1, make_loader())
    second = make()
    second.run(2, make_loader(), resume="auto")
    assert second.run_dir == first.run_dir
    ids = {file.stem for file in first.run_dir.rglob("run-*.wandb")}
    assert ids == {f"run-{(first.run_dir / 'tracker-id').read_text()}"}
    assert {(n, s) for n, s, _ in metric_values("wandb", first.run_dir) if n == "train/loss"} == {("train/loss", 5), ("train/loss", 10)}


def test_two_runs_in_one_process_do_not_mix_nor_touch_a_run_of_the_users_own(tmp_path: Path) -> None:
    import wandb

    own = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off"))
    trainers = [make_trainer(Web, save_path=tmp_path / "runs", web_logger={"wandb": {"mode": "offline"}}) for _ in range(2)]
    for trainer in trainers:
        trainer.run(1, make_loader())
    own.log({"mine": 1})
    own.finish()
    wandb.teardown()
    assert [len(list((t.run_dir / "wandb").glob("offline-run-*"))) for t in trainers] == [1, 1]
    assert read_wandb(tmp_path / "wandb")[0][0]["mine"] == 1


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_a_run_that_breaks_off_is_closed_with_what_it_had(error: BaseException, tmp_path: Path) -> None:
    class Breaks(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.progress_checker.get_step() == 4:
                raise error
            return super().train_step(batch)

    trainer = make_trainer(Breaks.add_on(*Web.addons), save_path=tmp_path / "runs", web_logger={"wandb": {"mode": "offline"}})
    with pytest.raises(type(error)):
        trainer.run(1, make_loader())
    rows, _, exits = read_wandb(trainer.run_dir)
    assert exits == [1] and [row["trainer/global_step"] for row in rows if "train/loss_step" in row] == [3]
    assert metric_values("neptune", trainer.run_dir) == metric_values("wandb", trainer.run_dir)


def test_a_run_that_is_stopped_after_a_pause_is_closed_and_has_not_failed(tmp_path: Path) -> None:
    class Pauses(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.progress_checker.get_step() == 4:
                self.control.pause()
                threading.Thread(target=lambda: (self.control.wait_settled(), self.stop())).start()
            return super().train_step(batch)

    trainer = make_trainer(Pauses.add_on(*Web.addons), save_path=tmp_path / "runs", web_logger={"wandb": {"mode": "offline"}})
    assert trainer.run(1, make_loader(), make_valid()).status == "stopped"
    (entries,) = read_neptune(trainer.run_dir).values()
    assert read_wandb(trainer.run_dir)[2] == [0] and [entry.value for entry in entries if entry.name == "status"] == ["success"]
    assert metric_values("neptune", trainer.run_dir) == metric_values("wandb", trainer.run_dir) != set()


SCRIPT = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from samples import Regress, make_loader, make_trainer
from nbtrain import LoggersAddon, WandBLoggerAddon
import nbtrain.loggers.addon, nbtrain.loggers.background, nbtrain.loggers.wandb
nbtrain.loggers.wandb._INIT_S = nbtrain.loggers.wandb._FINISH_S = WandBLoggerAddon.wait_s = 600.0
trained = threading.Event()  # a client that has started only after the run
"""


def ends(code: str) -> str:
    """What a script writes to stderr; it must succeed."""
    done = subprocess.run([sys.executable, "-c", SCRIPT + code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.long
def test_a_process_that_ends_while_a_run_is_on_closes_it(tmp_path: Path) -> None:
    ends("""
reached, never = threading.Event(), threading.Event()
class Waits(Regress):
    def train_step(self, batch):
        if self.progress_checker.get_step() == 4:
            reached.set()
            never.wait()
        return super().train_step(batch)
trainer = make_trainer(Waits.add_on(WandBLoggerAddon), save_path="runs", web_logger={"wandb": {"mode": "offline"}})
threading.Thread(target=trainer.run, args=(1, make_loader()), daemon=True).start()
reached.wait()
""")
    assert read_wandb(tmp_path / "runs")[2] == [1]


WAITS = "nbtrain: waiting for {}, which has not received all of a run: 120 s at most.\n"


@pytest.mark.long
@pytest.mark.parametrize("stops", ["", pytest.param("mid-run", marks=pytest.mark.long)])
def test_wandb_that_starts_after_the_run_gets_all_of_it_before_the_script_ends(stops: str, tmp_path: Path) -> None:
    code = f"""
import functools, wandb
init = wandb.init
@functools.wraps(init)
def slow(**options):
    trained.wait()
    time.sleep(0.5)  # the main thread is at its end
    return init(**options)
wandb.init = slow
WandBLoggerAddon.wait_s = 0.1
class Stops(Regress):
    def train_step(self, batch):
        if {bool(stops)} and self.progress_checker.get_step() == 4:
            trained.set()
            threading.Event().wait()
        return super().train_step(batch)
trainer = make_trainer(Stops.add_on(WandBLoggerAddon), save_path="runs", web_logger={{"wandb": {{"mode": "offline"}}}})
if {bool(stops)}:
    threading.Thread(target=trainer.run, args=(1, make_loader()), daemon=True).start()
    trained.wait()
else:
    trainer.run(2, make_loader())
    trained.set()
"""
    assert ends(code) == WAITS.format("wandb")
    rows, _, exits = read_wandb(tmp_path / "runs")
    assert exits == [1 if stops else 0]
    assert stops or [row["trainer/global_step"] for row in rows if "train/loss" in row] == [5, 10]


LATE = """
from lightning.pytorch.loggers.logger import DummyLogger
class Late(DummyLogger):
    @property
    def experiment(self):
        {starts}
    def log_metrics(self, metrics, step=None):
        if "train_loss" in metrics:
            print(step, file=open("steps.txt", "a"))
nbtrain.loggers.addon._AWAY_S = 0.1
make_trainer(Regress.add_on(LoggersAddon), loggers=[Late()]).run(2, make_loader())
trained.set()
"""


@pytest.mark.long
def test_a_logger_that_starts_after_the_run_gets_all_of_it_before_the_script_ends(tmp_path: Path) -> None:
    assert ends(LATE.format(starts="trained.wait(), time.sleep(0.5)")) == WAITS.format("Late")
    assert (tmp_path / "steps.txt").read_text().split() == ["5", "10"]


@pytest.mark.long
def test_what_a_logger_has_not_received_at_the_end_of_the_script_is_said() -> None:
    code = "nbtrain.loggers.background._EXIT_S = 0.1\n" + LATE.format(starts="threading.Event().wait()")
    lost = "nbtrain: Late was not done within 0.1 s; what it misses is in the run's own history only.\n"
    assert ends(code) == WAITS.format("Late").replace("120", "0.1") + lost


@pytest.mark.long
def test_a_service_that_is_given_up_at_the_end_of_the_script_is_said() -> None:
    lost = "nbtrain: Late was never reached (OSError: no route); it has no data of this run.\n"
    starts = "trained.wait(), time.sleep(0.5)\n        raise OSError('no route')"
    assert ends(LATE.format(starts=starts)) == WAITS.format("Late") + lost


@pytest.mark.long
def test_a_kernel_that_is_shut_down_while_a_run_is_on_closes_it(tmp_path: Path) -> None:
    from jupyter_client.manager import start_new_kernel

    code = """
class Slow(Regress):
    def train_step(self, batch):
        time.sleep(0.05)
        return super().train_step(batch)
trainer = make_trainer(Slow.add_on(WandBLoggerAddon), save_path="runs", web_logger={"wandb": {"mode": "offline"}})
trainer.run(1000, make_loader(), background=True)
while trainer.current_step < 1:  # the client connects after the first batch
    time.sleep(0.01)
trainer.pause()
"""
    manager, client = start_new_kernel(600, "python3", cwd=str(tmp_path), extra_arguments=["--log-level=ERROR"])
    manager.shutdown_wait_time = 100.0  # before it is killed
    try:
        reply = client.execute_interactive(SCRIPT + code, timeout=600, output_hook=lambda message: None)
        assert reply["content"]["status"] == "ok", reply
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)
    assert read_wandb(tmp_path / "runs")[2] == [1]


def test_no_value_is_read_off_the_device_for_a_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    for name in ("item", "tolist", "__float__", "cpu", "numpy"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *args, name=name, own=own, **kw: (reads.append(name), own(*args, **kw))[1])

    def count(n: int, kind: Any, **options: Any) -> int:
        trainer = make_trainer(kind, lightning={"log_every_n_steps": 1}, **options)
        trainer.recorder.every_s = 1e9  # one flush an epoch
        trainer.run(1, make_loader(16 * n))
        reads.clear()
        trainer.run(1, make_loader(16 * n))
        return len(reads)

    logger = Listed()
    few, many = (count(n, Local, loggers=[logger]) - count(n, Regress) for n in (2, 20))
    assert few == many and len([point for _, point in logger.points if "lr" in point]) == 44


def test_single_batches_and_predictions_are_no_run(tmp_path: Path) -> None:
    trainer = make_trainer(Web, save_path=tmp_path / "runs", web_logger={"wandb": {"mode": "offline"}})
    trainer.run_batch(next(iter(make_loader())))
    trainer.inference(make_valid())
    assert not list(tmp_path.rglob("*.wandb")) and not list(tmp_path.rglob(".neptune"))


def test_a_test_is_logged_at_the_step_where_training_stands(tmp_path: Path) -> None:
    trainer = make_trainer(Local, save_path=tmp_path / "runs", loggers=["tensorboard"])
    trainer.run(2, make_loader())
    trainer.evaluate(make_valid())
    assert [event.step for event in tensorboard_log(trainer.run_dir).Scalars("test_loss")] == [10]


# -- what can't work
def test_an_unknown_logger_is_named_with_those_that_are_known_and_the_way_for_others() -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer(Local, loggers=["comet"])
    others = 'Other services: loggers=[...] and lightning={"logger": ...} take Lightning\'s loggers.'
    assert str(caught.value) == f"loggers=['comet'] is unknown.\n  Known are: csv, mlflow, tensorboard, trackio. {others}"


def test_wrong_options_are_named() -> None:
    with pytest.raises(OptionError, match="is unknown.\n  Did you mean 'wandb'"):
        make_trainer(Web, web_logger={"wand": {}})
    with pytest.raises(ConfigError, match="unknown.\n  Did you mean 'tensorboard'"):
        make_trainer(Local, loggers=["tensorbord"])
    with pytest.raises(ConfigError, match="loggers.0. must be a string or a Logger, got 1"):
        make_trainer(Local, loggers=[1])
    with pytest.raises(ConfigError, match="need a folder to write to"):
        make_trainer(Local, loggers=["csv"]).run(1, make_loader())


def test_an_argument_that_the_client_does_not_take_is_named_when_the_run_begins() -> None:
    trainer = make_trainer(Regress.add_on(WandBLoggerAddon), web_logger={"wandb": {"projct": "p"}})
    with pytest.raises(OptionError, match="Did you mean 'project'"):
        trainer.run(1, make_loader())
    trainer = make_trainer(Regress.add_on(NeptuneLoggerAddon), web_logger={"neptune": {"project_nam": "p"}})
    with pytest.raises(OptionError, match="Did you mean 'project_name'"):
        trainer.run(1, make_loader())


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("wandb", "tensorboard") else find(name))
    with pytest.raises(AddOnError, match=r"needs wandb, which is not installed.\n  pip install wandb$"):
        make_trainer(Regress.add_on(WandBLoggerAddon))


@pytest.mark.long
def test_the_clients_are_imported_only_when_a_run_begins() -> None:
    code = "import sys; from nbtrain import Trainer, WandBLoggerAddon, NeptuneLoggerAddon, LoggersAddon; "
    code += "print(sorted({'wandb', 'neptune', 'tensorboard', 'mlflow', 'trackio'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- services that are away
@contextmanager
def service(status: int) -> Iterator[str]:
    """A web service that answers every request with `status`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"{}")

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def silence() -> Iterator[str]:
    """A port that accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def dead_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("make_service", "words"),
    [
        pytest.param(dead_port, "can't be reached", marks=pytest.mark.long),
        (silence, "does not answer"),
        (lambda: service(401), "its key is refused"),
        pytest.param(lambda: service(500), "", marks=pytest.mark.long),
    ],
)
def test_wandb_whose_service_is_away_goes_on_offline_in_the_first_run(
    make_service: Callable[[], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbtrain.loggers.wandb._INIT_S", 4.0)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with make_service() as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        trainer = make_trainer(Regress.add_on(WandBLoggerAddon), save_path=tmp_path / "runs")
        result = trainer.run(1, make_loader(), make_valid())
    (text,) = notes(trainer)
    assert result.status == "completed"
    assert text.startswith("wandb is offline: ") and words in text and "wandb sync" in text
    assert {name for name, _, _ in metric_values("wandb", trainer.run_dir)} >= {"train/loss", "val/loss"}


def test_wandb_without_a_key_stays_offline_and_says_so_once(tmp_path: Path) -> None:
    trainer = make_trainer(Regress.add_on(WandBLoggerAddon), save_path=tmp_path / "runs")
    trainer.run(1, make_loader())
    trainer.run(1, make_loader())
    (text,) = notes(trainer)
    assert text.startswith("wandb is offline: no key is stored. To upload the run: wandb sync")


def test_neptune_is_given_the_values_of_a_second_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from neptune.handler import Handler

    calls: list[int] = []
    extend = Handler.extend
    monkeypatch.setattr(Handler, "extend", lambda self, values, **given: (calls.append(len(values)), extend(self, values, **given)))
    now_s = 0.0
    tracker = NeptuneTracker(connect_neptune({}, "run1", tmp_path, lambda text: None).run, clock=lambda: now_s)
    seconds = [0.0, 0.25, 0.5, 1.25, 1.5]
    for step, now_s in enumerate(seconds):
        tracker.log_metrics({"train/loss": 2 * now_s} | ({} if step == 1 else {"lr": 0.5}), step=step)
    assert calls == [1, 1, 2, 1]  # the first of each, and three as the fourth step came
    tracker.finalize("success")
    assert calls == [1, 1, 2, 1, 2, 2]
    (entries,) = read_neptune(tmp_path).values()
    losses, rates = ([(e.step, e.value, e.time_s) for e in entries if e.name == name] for name in ("train/loss", "lr"))
    assert losses[1:] == [(step, 2 * s, s) for step, s in enumerate(seconds)][1:]
    assert rates[1:] == [(step, 0.5, seconds[step]) for step in (2, 3, 4)]


def test_neptune_says_once_that_its_service_is_closed(tmp_path: Path) -> None:
    trainer = make_trainer(Regress.add_on(NeptuneLoggerAddon), save_path=tmp_path / "runs")
    trainer.run(1, make_loader())
    trainer.run(1, make_loader())
    (text,) = notes(trainer)
    assert text.startswith("Neptune's hosted service closed on 5 March 2026")


def test_the_netrc_file_has_the_key(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1\n  login user\n  password {KEY}\n")
    said: list[str] = []
    with service(401) as url:
        connect_wandb({"settings": {"base_url": url}}, "a", tmp_path, said.append).finalize("success")
    assert "its key is refused" in said[0]


# -- failures in mid-run
class Unsteady(DummyLogger):
    """Fails as it is told; keeps what it got."""

    def __init__(self, fails: Callable[[Unsteady], bool]) -> None:
        super().__init__()
        self.fails, self.n_calls, self.got, self.closed = fails, 0, [], []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.n_calls += 1
        self.step = step
        if self.fails(self):
            raise ConnectionError("gone")
        self.got.append(step)

    def finalize(self, status: str) -> None:
        self.closed.append(status)


def deliver(logger: Any, n: int = 6, **options: Any) -> list[str]:
    said: list[str] = []
    delivery = Delivery("service", lambda note: logger, said.append, retry_s=0.01, **options)
    _ = delivery.experiment
    for index in range(n):  # of the newest update
        delivery.log_metrics({"loss": 1.0}, index)
    delivery.finalize("success")
    return said


FAILED = "service failed (ConnectionError: gone); what it misses is kept and tried again."


DELIVERIES: dict[str, tuple[Callable[[Unsteady], bool], str, list[int]]] = {  # when it fails; the last note; the steps it has in the end
    "two calls": (lambda logger: logger.n_calls in (2, 3), "service has all entries now.", [1, 2, 3, 4, 5, 6]),
    "one entry": (lambda logger: logger.step == 2, "service refused 1 entries; the run's own history has all.", [1, 3, 4, 5, 6]),
    "all after two": (lambda logger: logger.n_calls > 2, "service refused 4 entries; the run's own history has all.", [1, 2]),
}


@pytest.mark.parametrize(("fails", "note", "steps"), DELIVERIES.values(), ids=DELIVERIES)
def test_what_fails_is_kept_in_order_and_tried_again_with_one_warning(
    fails: Callable[[Unsteady], bool], note: str, steps: list[int]
) -> None:
    logger = Unsteady(fails)
    assert deliver(logger) == [FAILED, note]
    assert (logger.got, logger.closed) == (steps, ["success"])


def test_a_service_that_does_not_close_is_reported() -> None:
    class Sticks(Unsteady):
        def finalize(self, status: str) -> None:
            raise ConnectionError("gone")

    assert deliver(Sticks(lambda self: False)) == ["service could not be closed (ConnectionError: gone); the run's own history has all."]


def test_a_service_that_was_never_reached_is_reported() -> None:
    class Away(DummyLogger):
        @property
        def experiment(self) -> Any:
            raise OSError("no route")

    assert deliver(Away()) == [
        "service failed (OSError: no route); what it misses is kept and tried again.",
        "service was never reached (OSError: no route); it has no data of this run.",
    ]


def joins(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the ends of the next runs wait for their loggers, in seconds."""
    waited, join = [], _Sender.join

    def listed(self: Any, seconds: float) -> None:
        waited.append(seconds)
        join(self, seconds)

    monkeypatch.setattr(_Sender, "join", listed)
    return waited


def test_a_client_that_hangs_holds_up_neither_beginning_nor_end(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    class Hangs(DummyLogger):
        @property
        def experiment(self) -> Any:
            go_on.wait()

    waited = joins(monkeypatch)
    assert deliver(Hangs(), wait_s=1.0) == [
        "service did not answer within 1 s; the run continues, and what it misses is kept.",
        "service was not done within 1 s; it continues in the background, and the end of this process waits for it.",
    ]
    assert waited and max(waited) < 0.5  # what the beginning has left of the second
    go_on.set()


def test_two_services_that_are_away_are_waited_for_at_the_same_time_and_less_in_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nbtrain.loggers.addon._AWAY_S", 2.0)
    monkeypatch.setattr("nbtrain.loggers.background._SHORT_WAIT_S", 0.2)
    asked, go_on, waited = Semaphore(0), threading.Event(), joins(monkeypatch)

    class Away(DummyLogger):
        @property
        def experiment(self) -> Any:
            asked.release()
            go_on.wait(600)
            raise OSError("no route")

    trainer = make_trainer(Local, save_path=tmp_path, loggers=[Away(), Away()])
    for seconds in ("2", "0.2"):
        waited.clear()
        trainer.run(1, make_loader())
        assert any(f"did not answer within {seconds} s" in note for note in notes(trainer)) and max(waited) < float(seconds)
        assert asked.acquire(timeout=600) and asked.acquire(timeout=600)  # the second one while the first had not answered
    go_on.set()


def test_a_logger_that_raises_never_ends_a_run(tmp_path: Path) -> None:
    logger = Unsteady(lambda self: True)
    trainer = make_trainer(Local, save_path=tmp_path / "runs", loggers=[logger])
    assert trainer.run(1, make_loader(), make_valid()).status == "completed"
    assert notes(trainer)[0] == "Unsteady failed (ConnectionError: gone); what it misses is kept and tried again."
    assert logger.closed == ["success"]


class Points:
    """Keeps what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.points.append((step, dict(metrics)))


class Bare(Points, Logger):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Has what Lightning demands, and no client's object."""

    name, version = "bare", "0"

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


class Listed(Points, DummyLogger):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


def test_a_logger_without_an_experiment_has_the_values_of_one_with_it(tmp_path: Path) -> None:
    bare, listed = Bare(), Listed()
    trainer = make_trainer(Local, save_path=tmp_path, loggers=[bare, listed], lightning={"log_every_n_steps": 1})
    trainer.run(2, make_loader(), make_valid())
    assert bare.points == listed.points and len(bare.points) > 10 and notes(trainer) == []


# -- points
@pytest.mark.parametrize("lean", [True, False])
def test_points_follow_updates_where_gradients_are_accumulated(lean: bool, tmp_path: Path) -> None:
    logger = Listed()
    lightning = {"accumulate_grad_batches": 2, "log_every_n_steps": 2}
    trainer = make_trainer(Local, loggers=[logger], lightning=lightning, scheduler=lambda step: 0.01 / (step + 1))
    trainer.short_way = lean
    trainer.run(2, make_loader())  # five batches: three updates an epoch
    points = [(step, round(point["lr"], 6), point["epoch"]) for step, point in logger.points if "lr" in point]
    assert points == [(2, 0.005, 0), (3, round(0.01 / 3, 6), 0), (4, 0.0025, 1), (6, round(0.01 / 6, 6), 1)]
    losses = trainer.history.steps["train"]["train_loss"]
    means = [point["train_loss_step"] for _, point in logger.points if "lr" in point]
    assert means == pytest.approx([sum(losses[:4]) / 4, losses[4], sum(losses[5:7]) / 2, sum(losses[7:]) / 3])


def test_a_loss_that_is_nan_shows() -> None:
    class Diverges(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            found = super().train_step(batch)
            return {**found, "loss": found["loss"] * (float("nan") if self.progress_checker.get_step() == 2 else 1.0)}

    logger = Listed()
    make_trainer(Diverges.add_on(LoggersAddon), loggers=[logger], nonfinite="ignore").run(1, make_loader())
    assert [str(point["train_loss_step"]) for _, point in logger.points if "lr" in point] == ["nan"]


def test_the_memory_of_a_gpu_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may have none: torch.cuda's two numbers are made up, and the device of the trainer is named after the run began."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2.5e9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3e9)
    assert gpu_memory(torch.device("cuda", 0)) == {"gpu_gb": 2.5, "gpu_held_gb": 3.0} and gpu_memory(torch.device("cpu")) == {}
    monkeypatch.setattr("nbtrain.loggers.step_points.gpu_memory", lambda device: gpu_memory(torch.device("cuda", 0)))
    logger = Listed()
    make_trainer(Local, loggers=[logger]).run(1, make_loader())
    assert [(p["gpu_gb"], p["gpu_held_gb"]) for _, p in logger.points if "lr" in p] == [(2.5, 3.0)]


def test_tokens_are_counted_where_a_batch_has_token_ids() -> None:
    class Tokens(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model(batch["ids"].float()).mean()}

    logger = Listed()
    loader = [{"ids": torch.ones(4, 8, dtype=torch.long)}] * 3
    make_trainer(Tokens.add_on(LoggersAddon), loggers=[logger]).run(1, loader)
    ((_, point),) = [entry for entry in logger.points if "lr" in entry[1]]
    assert point["tokens_per_s"] == pytest.approx(8 * point["samples_per_s"])


def test_loggers_of_the_addon_stand_beside_those_in_lightning() -> None:
    ours, theirs = Listed(), Listed()
    trainer = make_trainer(Local, loggers=[ours], lightning={"logger": theirs})
    trainer.run(1, make_loader())
    assert [s for s, p in ours.points if "train_loss" in p] == [5]
    assert [s for s, p in theirs.points if "train_loss" in p] == [4]  # what Lightning gives: the index of the update


def test_points_are_none_of_a_run_without_their_logger() -> None:
    trainer = make_trainer(lightning={"callbacks": []})
    callback = StepPoints(trainer, [])
    L.Trainer(max_epochs=1, **trainer.lightning_args() | {"callbacks": [callback], "logger": False}).fit(
        trainer.as_lightning_module(), make_loader(), make_valid()
    )
    assert trainer.recorder.sinks == [trainer.history]


# -- CSV
def test_the_training_log_has_tlamas_columns_in_complete_rows(tmp_path: Path) -> None:
    trainer = make_trainer(Local, save_path=tmp_path / "runs", loggers=["csv"], gradient_clip=1.0, lightning={"log_every_n_steps": 3})
    trainer.run(1, make_loader(), make_valid())
    trainer.run(1, make_loader(), make_valid())
    rows = csv_rows(trainer.run_dir)
    assert list(rows[0]) == ["epoch", "step", "time", "train_loss", "learning_rate", "grad_norm", "val_loss", "tokens_per_sec"]
    assert [(row["epoch"], row["step"], row["val_loss"] != "") for row in rows] == [
        ("1", "3", False),
        ("1", "5", True),
        ("2", "6", False),
        ("2", "9", False),
        ("2", "10", True),
    ]
    assert all(row[name] for row in rows for name in ("time", "train_loss", "learning_rate", "grad_norm"))
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert losses == pytest.approx([row["val_loss"] for row in trainer.history.epochs])


def test_a_resumed_run_appends_to_its_training_log_where_its_state_was(tmp_path: Path) -> None:
    kind = Regress.add_on(LoggersAddon, StateManagerAddon)
    first = make_trainer(kind, save_path=tmp_path, loggers=["csv"])
    first.run(3, make_loader())
    with open(first.run_dir / "training_log.csv", "a") as file:
        file.write("4,17,1e9,0.")  # cut off by a kill
    second = make_trainer(kind, save_path=tmp_path, loggers=["csv"])
    second.run(4, make_loader(), resume=first.run_dir / "checkpoints" / "epoch=2-step=10.ckpt")
    assert [row["step"] for row in csv_rows(second.run_dir)] == ["5", "10", "15", "20"]


# -- neptune-export
def test_neptune_export_writes_a_csv_for_each_run_and_joins_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(Regress.add_on(NeptuneLoggerAddon), save_path=tmp_path / "runs")
    trainer.run(1, make_loader())
    trainer.run(1, make_loader())
    assert main(["neptune-export", str(trainer.run_dir)]) == 0
    file = Path(capsys.readouterr().out.strip())
    with open(file, newline="") as stream:
        rows = list(csv.DictReader(stream))
    losses = [(float(row["step"]), float(row["value"])) for row in rows if row["name"] == "train/loss"]
    assert [step for step, _ in losses] == [5, 10]
    assert [loss for _, loss in losses] == pytest.approx([row["train_loss"] for row in trainer.history.epochs])


def test_neptune_export_of_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["neptune-export", str(tmp_path)]) == 2
    assert "There is no offline run of Neptune's" in capsys.readouterr().err


CLIENT = """
import random, threading
from lightning.pytorch.loggers.logger import DummyLogger

class Client(DummyLogger):
    n_drawn = 0

    def _draw(self):
        for _ in range(20):
            random.random()
        self.n_drawn += 1

    def log_metrics(self, metrics, step=None):
        self._draw()
        thread = threading.Thread(target=self._draw)
        thread.start()
        thread.join()
"""


def test_what_a_client_draws_in_its_threads_does_not_change_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "drawing_client.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(str(folder))
    client = importlib.import_module("drawing_client").Client()

    class Augmented(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            return super().train_step((x * (0.5 + random.random()), y))

    trainers = []
    for kind, options in ((Augmented, {}), (Augmented.add_on(LoggersAddon), {"loggers": [client]})):
        trainer = make_trainer(kind, seed=3, **options)
        trainer.run(3, make_loader())
        trainers.append(trainer)
    assert client.n_drawn > 0 and same_weights(trainers[0].model, trainers[1].model)


def test_packages_that_train_keep_their_random_numbers(tmp_path: Path) -> None:
    """torch seeds the workers of loaders with Python's `random`, and has a logger of its own; so has Lightning."""
    draw_apart(SummaryWriter(str(tmp_path)), CSVLogger(tmp_path))
    assert vars(worker)["random"] is vars(seeding)["random"] is random


AUTOLOGGED = """
import sys
import mlflow
import torch

mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/mlflow.db")
mlflow.pytorch.autolog(log_models=False)
from nbtrain import Trainer


class Line(Trainer):
    def train_step(self, batch):
        return {"loss": (self.model(batch) - 1).square().mean()}

    test_step = train_step


trainer = Line(torch.nn.Linear(2, 1), "cpu", optimizer=torch.optim.SGD)
trainer.run(1, [torch.ones(4, 2)] * 3, [torch.ones(4, 2)])
trainer.run(1, [torch.ones(4, 2)] * 3)
trainer.validate([torch.ones(4, 2)])
print(len(mlflow.search_runs(output_format="list")), "runs in mlflow")
"""


@pytest.mark.long
def test_with_autolog_of_mlflow_a_run_prints_its_own_lines_and_none_of_lightning(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", AUTOLOGGED, tmp_path], capture_output=True, text=True, env=environment, cwd=tmp_path)
    kinds = [line.split(" ")[0] for line in done.stdout.splitlines()]
    assert kinds == ["Line", "epoch", "✓", "Line", "epoch", "✓", "2"], done.stdout + done.stderr
    of_mlflow = re.compile(r"\d{4}/\d\d/\d\d [\d:]{8} (INFO|WARNING) mlflow\.")
    assert not [line for line in done.stderr.splitlines() if not of_mlflow.match(line)]
