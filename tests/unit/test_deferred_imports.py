"""What a first step does not use is not imported before it, and what is deferred is the real module as soon as something uses it."""

from __future__ import annotations

import builtins
import gc
import os
import random
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from nbtrain.deferred_imports import _Later, deferring

FIRST_STEP = """
import sys
import torch
from nbtrain import Trainer

class Net(Trainer):
    def train_step(self, batch):
        loaded.update(sys.modules)
        return {"loss": self.model(batch).square().mean()}

loaded = {}
Net(torch.nn.Linear(2, 1), "cpu", optimizer=torch.optim.SGD, save_path=sys.argv[1]).run(1, [torch.zeros(4, 2)])
print(*loaded)
"""
NOT_IN_A_FIRST_STEP = {"matplotlib", "scipy", "PIL.Image", "numpy.f2py", "pandas", "sklearn", "IPython", "ipywidgets", "wandb", "neptune"}
NOT_IN_A_FIRST_STEP |= {
    "requests",
    "urllib3",
    "tensorboard",
    "transformers",
    "torchvision",
    "torchaudio",
    "jsonargparse",
    "optuna",
    "mlflow",
    "nbformat",
}

ORDERED = {
    "nbtrain": "from nbtrain import Trainer",
    "lightning": "import lightning",
    "torchmetrics": "from torchmetrics import MeanMetric",
    "audio": "import torchmetrics.audio",
    "matplotlib": "import matplotlib.pyplot",
    "figure": "from matplotlib.figure import Figure",
    "signal": "from scipy.signal import welch",
    "stats": "import scipy.stats",
    "plot": "from torchmetrics import MeanMetric; metric = MeanMetric(); metric.update(2.0); metric.plot()",
}
REAL = """
import gc, importlib, pickle, sys
import matplotlib.axes, matplotlib.pyplot as plt, scipy.signal
import torchmetrics
from torchmetrics.utilities import plot
from nbtrain import Trainer

metric = torchmetrics.MeanMetric()
metric.update(2.0)
figure, axes = metric.plot()
assert type(figure) is plt.Figure and type(axes) is matplotlib.axes.Axes
assert plot.plt is plt and plot.plt.subplots is plt.subplots and torchmetrics.scipy.signal.welch is scipy.signal.welch
assert isinstance(axes, plot._AX_TYPE) and issubclass(type(axes), plot._AX_TYPE) and not isinstance(figure, plot._AX_TYPE)
assert plot.trim_axs(plt.subplots(1, 3)[1], 2).shape == (2,)
try:
    torchmetrics.MetricCollection([metric]).plot(together=True, ax=figure)
except ValueError as error:
    assert "Expected argument `ax`" in str(error)
else:
    raise AssertionError("a figure is no axes")
assert pickle.loads(pickle.dumps(metric)).compute() == 2.0
assert pickle.loads(pickle.dumps(plot.plot_curve)) is plot.plot_curve
with plt.style.context("dark_background"):
    assert metric.plot()[1].get_facecolor()[:3] == (1, 1, 1)  # torchmetrics draws in its own style
plt.close("all")
assert gc.isenabled() and gc.get_freeze_count() == n_frozen
import builtins
assert __import__ is builtins.__import__ and type(__import__).__name__ == "builtin_function_or_method"
kinds = {type(module).__module__ for module in sys.modules.values()} | {type(m.__loader__).__module__ for m in (torchmetrics, plot)}
assert "nbtrain.deferred_imports" not in kinds
importlib.reload(plot)
assert plot._AX_TYPE is matplotlib.axes.Axes and plot.plt is plt
"""


def run(code: str, *arguments: str) -> str:
    environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    code = f"import gc; n_frozen = gc.get_freeze_count()  # Python 3.12 begins with some\n{code}"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    return done.stdout


def test_first_step_has_imported_only_what_it_uses(tmp_path: Any) -> None:
    loaded = run(FIRST_STEP, str(tmp_path)).splitlines()[-1].split()
    assert "lightning.pytorch" in loaded and NOT_IN_A_FIRST_STEP.isdisjoint(loaded)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 13))])
def test_deferred_module_is_the_real_one_in_every_order(seed: int) -> None:
    order = random.Random(seed).sample(list(ORDERED.values()), len(ORDERED))
    run("\n".join([*order, REAL]))


IN_A_THREAD = """
import threading
failed = []

def other():
    try:
        exec(sys.argv[1], {})
    except BaseException as error:
        failed.append(error)

thread = threading.Thread(target=other)
thread.start()
from nbtrain import Trainer
thread.join()
assert not failed, failed
"""
IN_A_FORK = """
import os
from nbtrain import Trainer
pid = os.fork()
if not pid:
    exec(sys.argv[1], {"n_frozen": n_frozen})
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["matplotlib", "signal", "torchmetrics", "lightning", "plot"])
def test_deferred_module_is_the_real_one_where_a_thread_imports_it_meanwhile(name: str) -> None:
    run(f"import sys\n{IN_A_THREAD}\n{REAL}", ORDERED[name])


@pytest.mark.long
def test_deferred_module_is_the_real_one_in_a_forked_process() -> None:
    run(f"import sys\n{IN_A_FORK}\n{REAL}", REAL)


def test_stand_in_gives_its_place_to_the_module_at_its_first_use() -> None:
    import wave

    owner: dict[str, Any] = {"other": 1}
    owner["w"] = owner["again"] = stand_in = _Later("wave", owner)
    assert not hasattr(stand_in, "__origin__") and owner["w"] is stand_in  # typing looks for such names
    assert stand_in.Error is wave.Error and owner == {"other": 1, "w": wave, "again": wave}
    with pytest.raises(AttributeError, match="module 'wave' has no attribute 'nothing'"):
        stand_in.nothing  # noqa: B018


def test_stand_in_of_a_class_knows_its_instances_and_has_its_methods() -> None:
    import fractions

    owner: dict[str, Any] = {}
    owner["Fraction"] = stand_in = _Later("fractions.Fraction", owner)
    fraction = stand_in(1, 2)
    assert (type(fraction), stand_in.__name__) == (fractions.Fraction, "Fraction") and owner == {"Fraction": fractions.Fraction}
    assert isinstance(fraction, stand_in) and not isinstance(0.5, stand_in)  # pyright: ignore[reportArgumentType]
    assert issubclass(type(fraction), stand_in) and not issubclass(float, stand_in)  # pyright: ignore[reportArgumentType]
    assert stand_in.from_float(0.5) == fraction


TRANSFORMERS = """
from nbtrain import Trainer
import lightning, sys
from torchmetrics.functional.text import bert

if sys.argv[1] == "deferred":
    assert "transformers" not in sys.modules
    assert bert.AutoModel.from_pretrained("a") == "the model a" and bert.AutoTokenizer.__name__ == "AutoTokenizer"
import transformers
assert bert.AutoModel is transformers.AutoModel and bert.AutoTokenizer.from_pretrained("b") == "the tokenizer b"
assert bert.AutoTokenizer is transformers.AutoTokenizer
assert isinstance(transformers.AutoModel(), bert.AutoModel) and bert.__loader__ is bert.__spec__.loader
assert not any(type(module).__module__.startswith("nbtrain") for module in (*sys.modules.values(), bert.__loader__))
"""


_FIRST = [
    pytest.param(line, marks=pytest.mark.long)
    for line in ("import transformers", "import torchmetrics", "from torchmetrics.functional.text import bert")
]


@pytest.mark.long
@pytest.mark.parametrize("first", ["", *_FIRST])
def test_transformers_is_imported_when_torchmetrics_uses_it(first: str, tmp_path: Path) -> None:
    package, metadata = tmp_path / "transformers", tmp_path / "transformers-4.50.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.50.0\n")
    kinds = (("AutoModel", "model"), ("AutoTokenizer", "tokenizer"))
    text = "class {}:\n    @staticmethod\n    def from_pretrained(name):\n        return 'the {} ' + name\n"
    (package / "__init__.py").write_text("".join(text.format(*kind) for kind in kinds))
    run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{first}\n{TRANSFORMERS}", "imported" if first else "deferred")


def test_nothing_is_deferred_where_lightning_is_imported_already() -> None:
    import lightning  # noqa: F401

    before = builtins.__import__
    with deferring():
        assert builtins.__import__ is before and gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_and_imports_are_as_before_after_an_error(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    before, n_frozen = builtins.__import__, gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError, match="^no torch$"), deferring(), deferring():
            assert not gc.isenabled() and builtins.__import__ is not before
            raise ImportError("no torch")
        assert gc.isenabled() is enabled and builtins.__import__ is before and gc.get_freeze_count() == n_frozen
    finally:
        gc.enable()


BESIDE_A_MISFIT = """
for _ in range(2):
    try:
        from nbtrain import Trainer
    except ImportError as error:
        print(error)
from nbtrain import Trainer
"""


def test_a_torchvision_that_does_not_fit_torch_is_named_in_one_line(tmp_path: Path) -> None:
    for folder in ("torchvision", "torchvision-0.1.dist-info"):
        (tmp_path / folder).mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, "-c", BESIDE_A_MISFIT], capture_output=True, text=True, env=environment)
    reason = f"torchvision 0.1 can't be imported beside torch {version('torch')}: operator torchvision::nms does not exist. "
    reason += "Install the torchvision that was built for this torch, or remove it: pip uninstall torchvision"
    assert done.stdout.splitlines() == [reason, reason]
    assert done.stderr.splitlines()[-1] == f"ImportError: {reason}" and len(done.stderr.splitlines()) <= 8
