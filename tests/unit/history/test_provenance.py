"""What a run reaches, what is kept of it, and how it is shown and compared."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_trainer
from torch import nn
from torch.utils.data import DataLoader

from nbtrain import ConfigError
from nbtrain.cli import main
from nbtrain.history.run_files import read_record
from nbtrain.library.recorded_run import diff, show
from nbtrain.redaction import blot_out
from nbtrain.secret_names import is_secret
from nbtrain.source.provenance import describe, git_state, record
from nbtrain.source.source_code import Reached, reach

Write = Callable[..., ModuleType]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes a module of the user's, and imports it."""
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(source: str, name: str = "mine") -> ModuleType:
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return write


def names(reached: Reached) -> list[str]:
    return [d.name.removeprefix("mine.") for d in reached.definitions]


# -- the walk
def test_functions_are_reached_through_globals_and_others_are_not(module: Write) -> None:
    mine = module("""
        import math
        def step(x): return loss(x)
        def loss(x): return math.sqrt(helper(x))
        def helper(x): return x
        def unused(x): return x
    """)
    reached = reach([mine.step])
    assert names(reached) == ["step", "loss", "helper"]
    assert reached.definitions[1].text == "def loss(x): return math.sqrt(helper(x))\n"
    assert reached.no_source == [] and reached.packages == []


def test_cycles_end(module: Write) -> None:
    mine = module("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n > 0 and even(n - 1)\n")
    assert names(reach([mine.even])) == ["even", "odd"]


def test_closures_are_seen_with_their_values(module: Write) -> None:
    mine = module("""
        def make(gamma, inner):
            def loss(x): return inner(x) ** gamma
            return loss
        def square(x): return x * x
        loss = make(2, square)
    """)
    reached = reach([mine.loss])
    assert names(reached) == ["make.<locals>.loss", "square"]
    assert reached.values == {"mine.make.loss.gamma": 2}
    assert reached.definitions[0].text == "def loss(x): return inner(x) ** gamma\n"


def test_decorators_partials_and_defaults_are_followed(module: Write) -> None:
    mine = module("""
        import functools
        import torch
        def timed(f):
            @functools.wraps(f)
            def wrapper(*args): return f(*args)
            return wrapper
        @timed
        def one(x): return x
        @torch.no_grad()
        def two(x, scale=lambda x: x): return x
        def three(x, w): return x
        @functools.lru_cache
        def four(x): return x
        chosen = functools.partial(three, w=1)
        def step(x): return one(two(chosen(four(x))))
    """)
    reached = reach([mine.step])
    assert names(reached) == ["timed", "one", "two", "three", "four", "step"]
    assert reached.packages == ["torch"]


def test_classes_bring_bases_methods_and_what_they_hold(module: Write) -> None:
    mine = module("""
        from torch import nn
        class Base(nn.Module):
            def forward(self, x): return self.scale(x)
        class Net(Base):
            loss = None
            @property
            def width(self): return prop()
            @staticmethod
            def scale(x): return static(x)
        class Loss: pass
        class Meta(type): pass
        class Odd(metaclass=Meta):
            class Inner: pass
        def prop(): return 1
        def static(x): return Odd
        Net.loss = Loss
    """)
    assert names(reach([mine.Net])) == ["Base", "Net", "Loss", "Meta", "Odd", "prop", "static"]


def test_objects_bring_the_classes_of_their_parts(module: Write) -> None:
    mine = module("""
        import functools
        from torch import nn
        from torch.utils.data import Dataset
        class Block(nn.Module): pass
        class Data(Dataset):
            def __init__(self): self.transform = [functools.partial(noise, std=0.1)]
            def __len__(self): return 3
            def __getitem__(self, i): return i
        def noise(x, std): return x
        def collate(batch): return batch
    """)
    loader = DataLoader(mine.Data(), collate_fn=mine.collate)
    assert names(reach([nn.Sequential(nn.Sequential(mine.Block())), loader])) == ["Block", "Data", "noise", "collate"]


def test_attributes_of_modules_are_followed_and_constants_kept(module: Write) -> None:
    module("LR = 0.1\nSIZES = [1, 2]\ndef focal(x): return x\ndef other(x): return x\n", "losses")
    mine = module("""
        import losses
        from dataclasses import dataclass
        @dataclass
        class Config:
            width: int = 8
        config = Config()
        HIDDEN = 64
        def step(x):
            from losses import SIZES
            import losses as again
            return losses.focal(x) * losses.LR + HIDDEN + config.width + again.SIZES[0]
    """)
    reached = reach([mine.step])
    assert [d.name for d in reached.definitions] == ["mine.Config", "mine.step", "losses.focal"]
    assert reached.values == {"HIDDEN": 64, "config.width": 8, "losses.LR": 0.1, "losses.SIZES": [1, 2]}


def test_patched_method_is_kept_beside_its_class(module: Write) -> None:
    mine = module("class Net:\n    def forward(self): return 1\ndef better(self): return 2\nNet.forward = better\n")
    assert names(reach([mine.Net])) == ["Net", "better"]


def test_lambda_is_kept_with_its_statement(module: Write) -> None:
    mine = module("from torch import optim\nRATE = 0.1\nmake = dict(\n    optimizer=lambda params: optim.SGD(params, lr=RATE),\n)\n")
    reached = reach([mine.make["optimizer"]])
    assert reached.definitions[0].text == "make = dict(\n    optimizer=lambda params: optim.SGD(params, lr=RATE),\n)\n"
    assert reached.values == {"RATE": 0.1} and reached.packages == ["torch"]
    assert describe(mine.make["optimizer"]) == "lambda params: optim.SGD(params, lr=RATE)"


def test_code_without_source_is_named() -> None:
    namespace: dict[str, Any] = {}
    exec("def helper(x): return x\nclass Net:\n    def forward(self, x): return helper(x)\n", namespace)
    reached = reach([namespace["Net"]])
    assert reached.definitions == [] and reached.no_source == ["Net", "Net.forward", "helper"]


def test_odd_objects_are_not_touched() -> None:
    class Angry:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("I was touched")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("I was compared")

        __hash__ = None  # type: ignore[assignment]

    angry = Angry()
    assert [d.name.rpartition(".")[2] for d in reach([lambda: angry, [angry]]).definitions] == ["Angry", "<lambda>"]
    assert describe(angry) == "Angry()"


# -- what must not be kept
def test_secrets_and_the_environment_are_never_kept(module: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_HOST", "node-17.cluster")
    monkeypatch.setenv("MY_RANK", "3")
    monkeypatch.setenv("SERVICE_TOKEN", "tok-5f0c9a")
    mine = module("""
        import os
        from os import environ
        HOST = os.environ["MY_HOST"]
        RANK = int(os.environ.get("MY_RANK", 0))
        COPY = dict(environ)
        API_KEY = "sk-1234567890"
        OPTIONS = {"password": "hunter2", "width": 4}
        def step(x, key="abc123def456"):
            login(token="tok-5f0c9a")
            return HOST, RANK, COPY, API_KEY, OPTIONS, os.environ["MY_HOST"], environ
        def login(token): pass
    """)
    arguments = {"web_logger": {"api_key": "sk-1234567890"}, "host": "node-17.cluster"}
    record(tmp_path, [mine.step], arguments=arguments, run={}, seed=None, device="cpu")
    kept = read_record(tmp_path)
    assert kept is not None and kept["arguments"] == {"web_logger": {"api_key": "<redacted>"}, "host": "<from the environment>"}
    values = kept["sources"]["source"]["values"]
    assert values == {
        "API_KEY": "<redacted>",
        "COPY": "<from the environment>",
        "HOST": "<from the environment>",
        "OPTIONS": {"password": "<redacted>", "width": 4},
        "RANK": "<from the environment>",
    }
    written = "".join(file.read_text() for file in tmp_path.rglob("*") if file.is_file() and "code" not in file.parts)
    for secret in ("sk-1234567890", "hunter2", "tok-5f0c9a", "abc123def456", "node-17.cluster"):
        assert secret not in written


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "authToken", "--password", "key"])
def test_secret_names(name: str) -> None:
    assert is_secret(name)


# -- texts
def test_another_thread_may_change_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As loggers of other runs do: `os.environ.items()` raises KeyError for a variable that is gone."""

    class Names(str):
        def __len__(self) -> int:
            os.environ.pop("LAST_OF_ALL", None)
            return super().__len__()

    monkeypatch.setenv("LAST_OF_ALL", "a-value")
    monkeypatch.setattr(os.environ, "decodevalue", Names)
    assert blot_out("a text") == describe("a text") == "a text"


def test_descriptions_are_short_and_without_addresses() -> None:
    net = nn.Linear(4, 2)
    assert describe(torch.optim.Adam(net.parameters(), lr=0.001)) == "Adam(lr=0.001)"
    assert describe(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)) == "SGD(lr=0.1, momentum=0.9)"
    assert describe(make_loader()) == "DataLoader(batch_size=16, shuffle=True, 5 batches)"
    assert describe(torch.zeros(2, 3)) == "Tensor (2, 3) float32"
    assert describe(nn.Sequential(net, net)) == "Sequential(10 params)"
    assert describe(list(range(60))).startswith("list of 60 ([0]: int, ")
    assert describe({"a": (1, None), "b": float("nan"), 3: Path("runs")}) == {"a": [1, None], "b": "nan", "3": "runs"}
    assert describe(functools.partial(max, 1, key=None)) == "partial(max, 1, key=None)"
    assert describe(torch.device("cpu")) == "cpu" and describe(Regress) == "samples.Regress"
    assert describe(iter([1])) == "list_iterator()"


# -- git
def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    _git(folder, "init", "-b", "main")
    (folder / "train.py").write_text("lr = 0.1\n")
    _git(folder, "add", "train.py")
    _git(folder, "commit", "-m", "first")
    return folder


def test_clean_repository_has_a_commit_and_no_diff(repository: Path) -> None:
    found = git_state(repository)
    assert found is not None and re.fullmatch("[0-9a-f]{40}", found[0].pop("commit"))
    assert found == ({"branch": "main", "dirty": False}, "")


def test_changed_file_gives_a_diff(repository: Path) -> None:
    (repository / "train.py").write_text("lr = 0.2\n")
    (repository / "untracked.py").write_text("")
    found = git_state(repository)
    assert found is not None and found[0]["dirty"] and found[1].endswith("@@ -1 +1 @@\n-lr = 0.1\n+lr = 0.2\n")


def test_long_diff_is_cut_off_and_says_so(repository: Path) -> None:
    (repository / "train.py").write_text("x = 1234567\n" * 40_000)
    found = git_state(repository)
    assert found is not None and 199_000 < len(found[1]) < 201_000
    assert re.search(r"\n\+x = 1234567\n\(cut off: 52\d,\d{3} characters in all\)\n$", found[1])


def test_no_git_no_repository_and_no_commit_are_left_out(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    (tmp_path / "empty").mkdir()
    _git(tmp_path / "empty", "init")
    assert git_state(tmp_path / "empty") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(repository) is None


# -- a run
def test_run_keeps_its_source_and_arguments(tmp_path: Path) -> None:
    trainer = make_trainer(save_path=tmp_path, seed=3, gradient_clip=1.0)
    trainer.run(1, make_loader())
    kept = read_record(tmp_path / "run-001")
    assert kept is not None
    assert kept["arguments"]["optimizer"] == "lambda params: torch.optim.Adam(params, lr=0.01)"
    assert kept["arguments"]["gradient_clip"] == 1.0 and kept["seed"] == 3 and kept["device"] == str(trainer.device)
    assert kept["runs"][0]["loader"] == "DataLoader(batch_size=16, shuffle=True, 5 batches)"
    steps = (tmp_path / "run-001" / "source" / "steps.py").read_text()
    assert "# ==== samples.Regress · samples.py\nclass Regress(Trainer):\n" in steps and "def plain_loop" not in steps
    assert {"torch", "lightning", "nbtrain", "torchmetrics"} <= kept["versions"].keys()


def test_same_run_gives_the_same_bytes_apart_from_times(tmp_path: Path) -> None:
    texts = []
    for number in (1, 2):
        make_trainer(save_path=tmp_path, seed=3).run(1, make_loader())
        folder = tmp_path / f"run-00{number}"
        began = re.sub(r'"began": "[^"]+"', "", (folder / "provenance.json").read_text())
        texts.append((began, (folder / "source" / "steps.py").read_bytes()))
    assert texts[0] == texts[1]


def test_second_run_adds_its_arguments_and_changed_source(tmp_path: Path, module: Write) -> None:
    mine = module("""
        from nbtrain import Trainer
        WEIGHT = 1.0
        class Mine(Trainer):
            def train_step(self, batch): return {"loss": WEIGHT * self.model(batch[0]).square().mean()}
    """)
    trainer = make_trainer(mine.Mine, save_path=tmp_path)
    trainer.run(1, make_loader())
    trainer.run(2, make_loader())
    mine.WEIGHT = 2.0  # pyright: ignore[reportAttributeAccessIssue]
    trainer.run(1, make_loader())
    kept = read_record(tmp_path / "run-001")
    assert kept is not None and [(run["n_epoch"], run["source"]) for run in kept["runs"]] == [(1, "source"), (2, "source"), (1, "source-3")]
    assert [found["values"] for found in kept["sources"].values()] == [{"WEIGHT": 1.0}, {"WEIGHT": 2.0}]


def test_a_word_for_keep_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_source must be True or False, got 'names'"):
        make_trainer(save_path=tmp_path, keep_source="names")


def test_keep_source_false_keeps_nothing(tmp_path: Path) -> None:
    make_trainer(save_path=tmp_path, keep_source=False).run(1, make_loader())
    kept = [".lock", ".writer", "best.safetensors", "checkpoints", "curves.svg", "events.jsonl", "history.csv", "last.safetensors"]
    assert sorted(file.name for file in (tmp_path / "run-001").iterdir()) == kept
    assert show(tmp_path).endswith("\nnote: Its source was not kept.")


def test_failure_to_record_is_noted_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(save_path=tmp_path)
    trainer.run(1, make_loader())
    (tmp_path / "run-001" / "provenance.json").write_text("{")
    assert trainer.run(1, make_loader()).status == "completed"
    events = [json.loads(line) for line in (tmp_path / "run-001" / "events.jsonl").read_text().splitlines()]
    (note,) = [event["data"]["text"] for event in events if event["kind"] == "note"]
    assert note.startswith("The source of this run was not kept: ConfigError: provenance.json is damaged")


@pytest.mark.long  # its time is that of a quiet machine
def test_recording_takes_less_than_50_ms_apart_from_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.source.provenance.git_state", lambda folder: None)
    trainer, loader = make_trainer(), make_loader()
    times = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        start_s = time.process_time()
        record(tmp_path / str(number), [trainer, loader], arguments=trainer.given, run={"loader": loader}, seed=0, device="cpu")
        times.append(time.process_time() - start_s)
    assert min(times) < 0.05


# -- showing and comparing
EVENTS = [
    {"kind": "start", "data": {"title": "Lines", "model": "Linear", "n_params": 10, "monitor": "val_loss", "monitor_mode": "min"}},
    {"kind": "epoch", "data": {"row": {"epoch": 1, "step": 8, "train_loss": 0.5, "val_loss": 0.25}}},
    {"kind": "end", "data": {"status": "completed", "reason": ""}},
]


def make_run(folder: Path, step: Any, val_loss: float = 0.25, **arguments: Any) -> Path:
    folder.mkdir(parents=True)
    EVENTS[1]["data"]["row"]["val_loss"] = val_loss  # type: ignore[index]
    progress = {"run": 1, "n_epochs": 1, "elapsed_s": 2.0}
    lines = [json.dumps({**event, "progress": progress | {"epoch": int(event["kind"] != "start")}, "time_s": 0.0}) for event in EVENTS]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    record(folder, [step], arguments=arguments, run={"n_epoch": 1}, seed=0, device="cpu")
    return folder


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Versions, platform and place that are the same everywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "nbtrain.source.provenance.git_state", lambda folder: ({"commit": "1234567890abcdef", "branch": "main", "dirty": False}, "")
    )
    monkeypatch.setattr("nbtrain.source.provenance._versions", lambda packages: {"nbtrain": "0.1.0", "torch": "2.13.0"})
    monkeypatch.setattr("platform.platform", lambda: "Linux")
    monkeypatch.setattr("platform.python_version", lambda: "3.11.7")
    monkeypatch.setattr("sys.argv", ["train.py", "--width", "8", "--api-key", "abc", "--token=abc"])


STEP = "HIDDEN = 64\n\ndef step(x):\n    return {}(x) * HIDDEN\n"
SHOWN = """\
run-001
Lines · Linear · 10 params · run-001
epoch  train_loss  val_loss
    1         0.5      0.25 ★
✓ completed · 1 epoch · 00:02 · best val_loss 0.25 at epoch 1

Origin
  command   train.py --width 8 --api-key <redacted> --token=<redacted>
  seed      0
  device    cpu
  python    3.11.7
  platform  Linux

Git
  commit  1234567890abcdef
  branch  main
  dirty   false

Packages
  nbtrain  0.1.0
  torch    2.13.0

Arguments
  model          Linear(in_features=4, out_features=2, 10 params)
  gradient_clip  1.0

Run 1
  began    TIME
  source   source
  n_epoch  1

Values that the code reads
  HIDDEN  64

Source (source/steps.py)

# ==== mine.step · mine.py
def step(x):
    return abs(x) * HIDDEN
"""


@pytest.mark.usefixtures("steady")
def test_show_prints_the_run_and_what_it_came_from(module: Write, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("run-001"), module(STEP.format("abs")).step, model=nn.Linear(4, 2), gradient_clip=1.0)
    assert main(["show", "."]) == 0
    assert re.sub(r"20\d\d-[-\d :+]+\d", "TIME", capsys.readouterr().out) == SHOWN


DIFFERENT = """\
a run-001 · ✓ completed · 1 epoch · 00:02 · best val_loss 0.25 at epoch 1
b run-002 · ✓ completed · 1 epoch · 00:02 · best val_loss 0.125 at epoch 1

Arguments
  gradient_clip  1.0 → 0.5
  width  – → 8

Values that the code reads
  HIDDEN  64 → 32

--- a/steps.py
+++ b/steps.py
@@ -1,3 +1,3 @@
 # ==== mine.step · mine.py
 def step(x):
-    return abs(x) * HIDDEN
+    return round(x) * HIDDEN
"""


@pytest.mark.usefixtures("steady")
def test_diff_prints_only_what_differs(module: Write, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("run-001"), module(STEP.format("abs")).step, model=nn.Linear(4, 2), gradient_clip=1.0)
    sys.modules.pop("mine")
    changed = module(STEP.replace("64", "32").format("round"))
    make_run(Path("run-002"), changed.step, 0.125, model=nn.Linear(4, 2), gradient_clip=0.5, width=8)
    assert main(["diff", "run-001", "run-002"]) == 0
    assert capsys.readouterr().out == DIFFERENT


@pytest.mark.usefixtures("steady")
def test_diff_of_a_run_with_itself_says_so(module: Write) -> None:
    make_run(Path("run-001"), module(STEP.format("abs")).step)
    assert diff("run-001", ".").endswith("\n\nNothing else differs.")


@pytest.mark.usefixtures("steady")
def test_a_record_of_another_version_is_shown_compared_and_continued(module: Write) -> None:
    mine = module(STEP.format("abs"))
    folder = make_run(Path("run-001"), mine.step)
    kept = read_record(folder)
    assert kept is not None
    kept["sources"]["source"]["definitions"] = [{"name": "step", "from": "mine.py", "line": 3}]
    kept["later"] = {"field": 1}
    del kept["versions"], kept["git"]
    (folder / "provenance.json").write_text(json.dumps(kept))
    assert "\nPackages\n" not in show(folder) and "  HIDDEN  64" in show(folder)
    make_run(Path("run-002"), mine.step)
    assert "\nPackages\n  nbtrain  – → 0.1.0\n  torch  – → 2.13.0" in diff("run-001", "run-002")
    record(folder, [mine.step], arguments={}, run={"n_epoch": 2}, seed=0, device="cpu")
    assert "Run 2\n" in show(folder)


def test_folder_without_a_run_is_an_error_of_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "nbtrain: No run was recorded in 'nowhere'.\n  Give a run folder: it holds events.jsonl.\n"
    assert main(["show", "nowhere"]) == 2 and capsys.readouterr() == ("", text)
    assert main(["diff", "nowhere", str(tmp_path)]) == 2 and capsys.readouterr() == ("", text)


@pytest.mark.usefixtures("steady")
def test_show_and_diff_do_without_torch(module: Write, tmp_path: Path) -> None:
    make_run(tmp_path / "run-001", module(STEP.format("abs")).step)
    code = "import sys; from nbtrain.cli import main; main(['show', '.']); main(['diff', '.', 'run-001']); "
    code += "print(sorted({'torch', 'lightning', 'matplotlib', 'IPython'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert done.stdout.endswith("\n[]\n")
