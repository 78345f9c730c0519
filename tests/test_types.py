"""What pyright and mypy, both strict, know in a user's project, in which nbtrain is installed from its wheel or for editing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


class Message(NamedTuple):
    """What a type checker says of a line, counted from 1."""

    kind: str
    line: int
    rule: str
    text: str


# A line that must be an error ends with `# error: RULE`, with pyright's name for it; a revealed type is followed by `# type: TYPE`. All other
# lines must be right. mypy knows no class whose base is a call, so it takes such a class as it is: `# error for pyright: RULE`.
USER = """
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import nn
from typing_extensions import Unpack, reveal_type

from nbtrain import AddOnBase, EarlyStoppingAddon, EMAAddon, GradientClipAddon, MetricsAddon, ModelTrainer, StateManagerAddon
from nbtrain import Trainer, TrainerOptions
from nbtrain.engine.protocol import TrainerProtocol


class Digits(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.model(x), y)}

    def accuracy(self) -> float:
        return 1.0


def adam(parameters: Any) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=1e-3)


net = nn.Linear(1, 1)

# the options and the commands of one addon
trainer = Digits.add_on(StateManagerAddon)(net, "cpu", optimizer=adam, every_n_steps=20, save_path="runs", save_format="safetensor")
Digits.add_on(StateManagerAddon)(net, every_n_stepz=20)  # error: reportCallIssue
Digits.add_on(StateManagerAddon)(net, every_n_steps="20")  # error: reportArgumentType
Digits.add_on(StateManagerAddon)(net, save_format="pickle")  # error: reportArgumentType
Digits.add_on(StateManagerAddon)(net, seed="0")  # error: reportArgumentType
reveal_type(trainer)  # type: Digits
reveal_type(trainer.accuracy())  # type: float
reveal_type(trainer[StateManagerAddon])  # type: StateManagerAddon
reveal_type(trainer[StateManagerAddon].every_n_steps)  # type: int | None
trainer[StateManagerAddon].every_n_stepz  # error: reportAttributeAccessIssue
trainer["StateManagerAddon"]  # error: reportArgumentType
reveal_type(trainer.save_state())  # type: Path | None
reveal_type(trainer.load_state("last.ckpt"))  # type: Path
trainer.load_state(path=3)  # error: reportArgumentType
trainer.save_stat()  # error: reportAttributeAccessIssue
trainer.save_state("here")  # error: reportCallIssue

# two and three addons, and one after the other
two = Digits.add_on(StateManagerAddon, EMAAddon)(net, ema_decay=0.99, keep_last_n=2)
Digits.add_on(StateManagerAddon, EMAAddon)(net, ema_decai=0.99)  # error: reportCallIssue
reveal_type(two.apply_average())  # type: None
three = Digits.add_on(EarlyStoppingAddon, StateManagerAddon, MetricsAddon)(net, patience=3, save_last=False, metrics=())
Digits.add_on(EarlyStoppingAddon, StateManagerAddon, MetricsAddon)(net, patience="3")  # error: reportArgumentType
three.save_metrics("test", {"accuracy": 1.0})
three.save_metrics(1, {})  # error: reportArgumentType
reveal_type(Digits.add_on(EMAAddon).add_on(StateManagerAddon))  # type: type[Digits]
Digits.add_on(3)  # error: reportArgumentType


# a constructor of one's own
class Warm(Digits):
    def __init__(self, model: nn.Module, *, temperature: float = 1.0, **options: Unpack[TrainerOptions]) -> None:
        super().__init__(model, **options)
        self.temperature = temperature


warm = Warm.add_on(StateManagerAddon)(net, temperature=0.5, every_n_epochs=1, seed=1, device="cpu", optimizer=adam)
reveal_type(warm.temperature)  # type: float
Warm.add_on(StateManagerAddon)(net, temperature="hot")  # error: reportArgumentType
Warm.add_on(StateManagerAddon)(net, every_n_epoch=1)  # error: reportCallIssue
Warm(net, mode="trian")  # error: reportArgumentType


class Recorded(Trainer):
    def test_step(self, batch: Any) -> Mapping[str, Any]:
        return {"loss": self.model(batch[0]).mean()}



class Careful(Digits.add_on(GradientClipAddon)):  # type: ignore[misc]
    pass


Careful(net, gradient_clip=1.0, gradient_clip_algorithm="value")
Careful(net, gradient_clip_algorithm="values")  # error for pyright: reportArgumentType


# an addon of one's own, as an instance and as a class
class Tilt(AddOnBase):
    alpha: int = 0


tilted = Digits.add_on(Tilt(alpha=1), StateManagerAddon(save_path="runs", every_n_steps=20))(net, optimizer=adam)
reveal_type(tilted)  # type: Digits
reveal_type(tilted[Tilt].alpha)  # type: int
Digits.add_on(Tilt(alhpa=1))  # error: reportCallIssue
Digits.add_on(Tilt(alpha="1"))  # error: reportArgumentType
Digits.add_on(StateManagerAddon(every_n_steps="20"))  # error: reportArgumentType
Digits.add_on(Tilt(alpha=1))(net, optimiser=adam)  # error: reportCallIssue
reveal_type(Digits.add_on(Tilt, StateManagerAddon)(net, alpha=1, every_n_steps=20))  # type: Digits
reveal_type(Digits.add_on(Tilt).add_on(EMAAddon)(net, alpha=1))  # type: Digits


class Waits(AddOnBase):
    def callbacks(self, trainer: TrainerProtocol) -> Sequence[L.Callback]:
        return (L.Callback(),) if trainer.mode == "train" else ()


# a run, and what comes of it
result = trainer.run(1, [])
reveal_type(result)  # type: RunResult
reveal_type(result.last["epoch"])  # type: Any
total: float = trainer.history.last["epoch"] + trainer.history.best["val_loss"]
handle = trainer.run(1, [], background=True)
reveal_type(handle)  # type: RunHandle
handle.pause()
reveal_type(ModelTrainer(net).run(1, background=True))  # type: RunHandle
reveal_type(trainer.resume())  # type: RunResult | Any
trainer.resume(background=True).wait(timeout_s=3)
ModelTrainer(net).run(1, background=True).wait()


# other ways to a class
def step(trainer: Any, batch: Any) -> dict[str, Any]:
    return {"loss": batch.mean()}


Steps = Trainer.from_steps(step)
Steps.add_on(StateManagerAddon)(net, every_n_steps=1).save_state()
Steps.add_on(StateManagerAddon)(net, every_n_step=1)  # error: reportCallIssue
ModelTrainer.add_on(EMAAddon)(net, batch_size=4, ema_decay=0.5, seed=1)
ModelTrainer.add_on(EMAAddon)(net, batch_sice=4)  # error: reportCallIssue
"""


def _run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, env=alone, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as far as an install reads it."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "nbtrain", folder / "nbtrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "README.pypi.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def _environment(folder: Path, *nbtrain: object) -> Path:
    """A new environment with nbtrain; torch and the rest are those of this environment. Returns its packages."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    options = ("--no-deps", "--no-build-isolation", "--ignore-installed")  # nbtrain is also among the others
    install = _run(BIN / "pip", "--python", folder / "bin" / "python", "install", *options, *nbtrain)
    assert install.returncode == 0, install.stderr
    return packages


@pytest.fixture(scope="module")
def environment(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nbtrain from its wheel, which is built aside."""
    folder = tmp_path_factory.mktemp("environment")
    build = _run(BIN / "python", "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", source)
    assert build.returncode == 0, build.stdout + build.stderr
    (wheel,) = (source / "dist").glob("nbtrain-*.whl")
    assert (_environment(folder, wheel) / "nbtrain" / "py.typed").exists()
    return folder


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with `pip install -e .`; the folder that it names is none that pyright finds otherwise."""
    folder = tmp_path_factory.mktemp("editable")
    packages = _environment(folder, "--editable", source)
    assert not (packages / "nbtrain").exists()
    return folder


def _pyright(folder: Path, python: Path) -> list[Message]:
    """What pyright says of the user's module, in a project in `folder`."""
    (folder / "user.py").write_text(USER)
    (folder / "pyrightconfig.json").write_text(json.dumps({"include": ["user.py"], "typeCheckingMode": "strict"}))
    done = _run(BIN / "pyright", "--outputjson", "--pythonpath", python, cwd=folder)
    report = json.loads(done.stdout)["generalDiagnostics"]
    return [Message(m["severity"], m["range"]["start"]["line"] + 1, m.get("rule", ""), m["message"]) for m in report]


@pytest.fixture(scope="module")
def found(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Message]:
    return _pyright(tmp_path_factory.mktemp("project"), environment / "bin" / "python")


def _marked(pattern: str) -> dict[int, str]:
    lines = enumerate(USER.splitlines(), 1)
    return {number: match[1] for number, line in lines if (match := re.search(rf"  # {pattern}: (?!ignore)(.+)$", line))}


def _errors(found: list[Message]) -> set[tuple[int, str]]:
    return {(message.line, message.rule) for message in found if message.kind == "error"}


def _types(found: list[Message], kind: str) -> dict[int, str]:
    """What was revealed, without the modules of the types."""
    texts = {message.line: message.text.rpartition(" is ")[2].strip('"') for message in found if message.kind == kind}
    return {line: re.sub(r"\b(?:\w+\.)+(?=\w)", "", text) for line, text in texts.items()}


def test_pyright_reports_exactly_the_wrong_lines(found: list[Message]) -> None:
    wrong = _marked("error") | _marked("error for pyright")
    errors = _errors(found)
    assert {line for line, _ in errors} == set(wrong), sorted(errors)
    assert set(wrong.items()) <= errors, sorted(errors)


def test_pyright_knows_trainers_addons_and_commands(found: list[Message]) -> None:
    assert _types(found, "information") == _marked("type")


def test_pyright_knows_as_much_of_an_editable_install(found: list[Message], editable: Path, tmp_path: Path) -> None:
    assert _pyright(tmp_path, editable / "bin" / "python") == found


@pytest.mark.long
def test_mypy_reports_the_same_lines_and_knows_the_same_types(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    options = ("--strict", "--output", "json", "--cache-dir", tmp_path / "cache")
    done = _run(BIN / "mypy", *options, "--python-executable", environment / "bin" / "python", "user.py", cwd=tmp_path)
    report = [json.loads(line) for line in done.stdout.splitlines()]
    found = [Message(m["severity"], m["line"], m["code"] or "", m["message"]) for m in report]
    assert {line for line, _ in _errors(found)} == set(_marked("error")), (found, done.stderr)
    revealed = [message for message in found if message.text.startswith("Revealed type is ")]
    assert _types(revealed, "note") == _marked("type")
