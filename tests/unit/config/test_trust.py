"""What a configuration of a stranger may name: nothing of it runs, and what a training needs is found."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nbtrain import ConfigError, TrainerArgs
from nbtrain.cli import main
from nbtrain.config.document import parse_yaml
from nbtrain.config.instantiate import Maker, load_name
from nbtrain.config.trust import is_own
from nbtrain.jobs.trainer_args import ComputeArgs


def words(text: str) -> list[str]:
    return text.split()


STRANGE = words("""
    os.system posix.system subprocess.run subprocess.Popen shutil.rmtree builtins.eval eval exec open __import__ getattr type
    runpy.run_path code.interact pickle.loads timeit.timeit pty.spawn ctypes.CDLL importlib.import_module operator.methodcaller
    torch.os.system torch.sys.exit torch.hub.load torch.hub.load_state_dict_from_url torch.load torch.save torch.serialization.load
    torch.jit.load torch.package.PackageImporter torch.utils.cpp_extension.load_inline torch.utils.collect_env.run torch.from_file
    torch.utils.benchmark.Timer torch.multiprocessing.spawn torch.classes.load_library torch.ops.load_library torch.import_ir_module
    torch.distributed.run.main torch.distributed.elastic.multiprocessing.start_processes torch.utils.model_zoo.load_url
    torch.nn.modules.module.torch.hub.load torch.nn.functional.importlib.import_module torch.optim.optimizer.functools.reduce
    torch.utils.data.dataloader.os.system torch.utils.data.datapipes.utils.decoder.basichandlers torch._C._jit_clear_class_registry
    torch.nn.Module.__init__ torch.nn.Module.forward.__globals__ torch.nn.Module.__class__ torch.Tensor.__reduce__
    torch.nn.modules.module.warnings.warn torch.optim.lr_scheduler.types.CodeType torch._inductor.codecache.PyCodeCache
    lightning.pytorch.cli.LightningCLI lightning.pytorch.cli.instantiate_class lightning.LightningModule.load_from_checkpoint
    lightning.pytorch.utilities.migration.migrate_checkpoint lightning.fabric.utilities.cloud_io.get_filesystem
    nbtrain.cli.main nbtrain.config.instantiate.load_name nbtrain.distributed.worker.loads nbtrain.TrainerArgs.from_yaml
    nbtrain.jobs.notebook.export_run nbtrain.trainer.trainer.os.system nbtrain.source.provenance.subprocess.run
    pytest.main nbtrain.cli.sys.exit
    nbtrain.jobs.sweep.run_sweep nbtrain.load_run nbtrain.__main__ antigravity this pdb.set_trace webbrowser.open numpy.load
    mine.os.system mine.system mine.run mine.shell mine.Net.__init__ mine.load mine.Fit.load_from_checkpoint mine.subprocess.run
""")

KNOWN = words("""
    torch.optim.Adam torch.optim.adam.Adam torch.nn.Linear torch.nn.modules.linear.Linear torch.nn.functional.gelu torch.nn.functional.relu
    torch.nn.functional.max_pool2d torch.float32 torch.channels_last torch.device torch.arange torch.ones torch.Generator torch.einsum
    torch.utils.data.DataLoader torch.utils.data.DistributedSampler torch.utils.data.default_collate torch.utils.data.TensorDataset
    torch.distributed.fsdp.MixedPrecisionPolicy torch.distributed.tensor.Replicate torch.distributed.tensor.parallel.ColwiseParallel
    torch.optim.lr_scheduler.StepLR torch.linalg.norm torch.nn.attention.SDPBackend.MATH torch.nn.init.zeros_ torch.manual_seed
    torchmetrics.Accuracy torchmetrics.classification.BinaryAccuracy torchmetrics.functional.accuracy
    lightning.pytorch.callbacks.EarlyStopping lightning.pytorch.loggers.CSVLogger lightning.LightningModule lightning.pytorch.Callback
    lightning.pytorch.strategies.DDPStrategy lightning.pytorch.plugins.MixedPrecision lightning.pytorch.profilers.SimpleProfiler
    nbtrain.Trainer nbtrain.EMAAddon nbtrain.warmup_cosine nbtrain.examples.mlp.MLP nbtrain.examples.mlp.SimpleDataset nbtrain.TrainHook
    nbtrain.addons.averaging.EMAAddon nbtrain.schedulers.warmup_cosine nbtrain.data.tensor_loader.TensorLoader
    fractions.Fraction functools.partial collections.OrderedDict datetime.timedelta pathlib.Path math.sqrt tuple str int float dict print
    mine.Net mine.make mine.Net.small mine.half mine.RATE mine.cached mine.Again package.deep.Net
""")

MINE = """
import functools, os, subprocess
from os import system
from subprocess import run
from lightning import LightningModule as Fit
from torch import load, nn
from torch.nn import Linear as Again
RATE = 0.1
shell = functools.partial(os.system, "touch touched")
class Net(nn.Module):
    @classmethod
    def small(cls): return cls()
def make(): return Net()
half = functools.partial(round, 1)
@functools.lru_cache
def cached(): return 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder that the person works in, with a module and a package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "deep.py").write_text("class Net: pass\n")
    yield tmp_path
    for name in ("mine", "package", "package.deep", "touches"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", STRANGE)
def test_strange_names_are_refused(name: str, folder: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=f"^{re.escape(repr(name))} is not called without --trust|^There is no|has no .os."):
        load_name(name, trusted=False)
    assert not {"antigravity", "this", "pdb", "pty", "webbrowser"} & (set(sys.modules) - before)


@pytest.mark.parametrize("name", KNOWN)
def test_what_a_training_needs_is_found(name: str, folder: Path) -> None:
    assert load_name(name, trusted=False) == load_name(name)


def test_every_public_class_and_schedule_of_nbtrain_is_found() -> None:
    import nbtrain

    refused = [name for name in nbtrain.PUBLIC if _is_refused(f"nbtrain.{name}")]
    refused += [name for name in nbtrain.addons.__all__ if _is_refused(f"nbtrain.addons.{name}")]
    left_out = {"AddOnError", "CheckpointError", "ConfigError", "History", "NbtrainError", "OptionError", "OutOfMemory", "RunPaused"}
    left_out |= {"RunResult", "RunStopped", "StepError", "TrainerArgs", "WorkerError", "compare", "load_run"}
    assert set(refused) <= left_out


def _is_refused(name: str) -> bool:
    try:
        load_name(name, trusted=False)
    except ConfigError:
        return True
    return False


def test_what_is_installed_in_the_folder_is_not_ones_own(folder: Path) -> None:
    place = folder / ".venv" / "lib" / "site-packages"
    place.mkdir(parents=True)
    (place / "installed.py").write_text("")
    sys.path.insert(0, str(place))
    try:
        assert is_own("mine") and is_own("package.deep") and not is_own("installed") and not is_own("os") and not is_own("nowhere")
    finally:
        sys.path.remove(str(place))


CALL = "{__type: os.system, command: touch touched}"
PLACES = {  # where a configuration has a name or a value, and what is written there
    "trainer.type": "os.system",
    "model.type": "os.system",
    "model.args.x": CALL,
    "model.args.list": f"[1, {CALL}]",
    "optimizer.type": "os.system",
    "optimizer.aggregate_outputs_fn": "os.system",
    "optimizer.args.betas": CALL,
    "dataset.type": "os.system",
    "dataset.train_args.x": CALL,
    "dataset.train_args.size": "{__value_type: os.system, value: touch touched}",
    "dataset.train_args.data_size": "{__value_type: function, value: os.system}",
    "dataloader.type": "os.system",
    "dataloader.train_args.collate_fn": "os.system",
    "dataloader.train_args.worker_init_fn": "{__value_type: function, value: os.system}",
    "dataset_sampler.type": "os.system",
    "lr_scheduler.type": "os.system",
    "log": "[{type: os.system, args: {command: touch touched}}]",
    "addons": "[{type: os.system, args: {command: touch touched}}]",
    "hook.on_train_start": "os.system",
    "hook": "{type: os.system, args: {command: touch touched}}",
    "init_env_fn": "os.system",
    "init_module": "touches.now",
    "pas_policy": "os.system",
    "lightning.callbacks": f"[{CALL}]",
    "lightning.plugins": "$!(compute_config.pas_config.x)",
    "vars.x": CALL,
    "trainer.args.metric": CALL,
}
PLAIN = """
model: {type: nbtrain.examples.mlp.MLP, args: {dim: 4, nlayers: 1}}
optimizer: {type: torch.optim.Adam}
dataset: {type: nbtrain.examples.mlp.SimpleDataset, train_args: {dim: 4, size: 8}}
max_epochs: 1
checkpoint: {no_save: true}
enable_progress_bar: false
"""


@pytest.mark.parametrize("at", PLACES)
def test_nothing_of_a_strangers_configuration_runs(at: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "touches.py").write_text("from pathlib import Path\nPath('touched').write_text('')\n")
    value: Any = yaml.safe_load(PLACES[at])
    for key in reversed(at.split(".")):
        value = {key: value}
    (folder / "run.yaml").write_text(PLAIN + f"compute_config: {{pas_config: {{x: {CALL}}}}}\n")
    (folder / "more.yaml").write_text(yaml.safe_dump(value))
    sys.path.append(str(folder.parent))
    try:
        code = main(
            ["fit", "-f", "run.yaml", "-f", "more.yaml", "--optimizer.grad_reduction", "per-token-mean" if "aggregate" in at else "mean"]
        )
    finally:
        sys.path.remove(str(folder.parent))
    error = capsys.readouterr().err
    assert code == 2 and not (folder / "touched").exists(), error
    name = "touches.now" if at == "init_module" else "os.system"
    assert f"{name!r} is not called without --trust" in error and "--trust" in error
    assert "more.yaml:" in error or "run.yaml:8" in error


@pytest.mark.parametrize("command", ["fit", "plan", "validate", "test", "predict", "sweep"])
def test_the_line_with_the_name_is_told(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PLAIN.replace("nbtrain.examples.mlp.MLP", "os.system").replace("{dim: 4, nlayers: 1}", "{command: touch touched}")
    (folder / "run.yaml").write_text(text)
    options = {"predict": ["-o", "out.pt"]}.get(command, [])
    assert main([command, "-f", "run.yaml", *options]) == 2
    assert re.search(r"model\.type: 'os\.system' is not called without --trust\.\n +run\.yaml:2", capsys.readouterr().err)
    assert not (folder / "touched").exists()


def test_trust_calls_what_is_named(folder: Path) -> None:
    (folder / "run.yaml").write_text(PLAIN + "init_env_fn: mine.shell\n")
    assert main(["fit", "-f", "run.yaml"]) == 2 and not (folder / "touched").exists()
    assert main(["fit", "-f", "run.yaml", "--trust"]) == 0 and (folder / "touched").exists()
    with pytest.raises(ConfigError, match="mine.shell"):
        TrainerArgs.from_yaml("run.yaml").check()
    TrainerArgs.from_yaml("run.yaml", trust=True).check()


@pytest.mark.parametrize("written", ["trust_remote_code: true", "x: {weights_only: 'False'}", "allow_pickle: 1"])
def test_arguments_that_run_code_of_a_file_are_refused(written: str) -> None:
    text = f"x: {{__type: builtins.dict, {written}}}"
    with pytest.raises(ConfigError, match="is not called without --trust"):
        Maker(parse_yaml(text)).value(parse_yaml(text).data, ())
    assert Maker(parse_yaml("x: {__type: builtins.dict, trust_remote_code: false}")).value({"trust_remote_code": False}, ())


# -- a policy of one's own
POLICY = (
    "def policy(compute_config):\n    return 'dp' if compute_config.plan_ngpus == 1 else 'tp'\ndef odd(compute_config):\n    return 3\n"
)


def test_policy_of_ones_own_is_asked(folder: Path) -> None:
    (folder / "mine.py").write_text(POLICY)
    (folder / "run.yaml").write_text(PLAIN)
    args = TrainerArgs.from_files(["run.yaml"], [])
    plan = TrainerArgs.from_dict(args.to_dict() | {"pas_policy": "mine.policy", "compute_config": {"runtime_ngpus": 2}}).plan()
    assert "2 devices, 2 batches at a time, strategy='ddp'" in plan
    from_python = TrainerArgs(pas_policy=lambda compute_config: "data", compute_config=ComputeArgs(runtime_ngpus=2), max_epochs=1)
    assert "strategy='ddp'" in from_python.plan()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.odd", "mine.odd returned 3"),
        ("os.system", "is not called without --trust"),
        ("mine.nowhere", "has no 'nowhere'"),
        ("dq", "unknown here"),
    ],
)
def test_a_policy_that_does_not_fit_is_named(name: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(POLICY)
    (folder / "run.yaml").write_text(PLAIN + f"pas_policy: {name}\n")
    assert main(["fit", "-f", "run.yaml"]) == 2
    error = capsys.readouterr().err
    assert message in error and "run.yaml:8" in error


# -- a folder of another's
def test_a_run_of_another_user_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text(PLAIN.replace("no_save: true", "save_dir: runs"))
    assert main(["fit", "-f", "run.yaml"]) == 0
    config = folder / "runs" / "run-001" / "config.yaml"
    config.write_text(config.read_text() + "init_env_fn: mine.shell\n")
    capsys.readouterr()
    assert main(["resume", "runs"]) == 2
    assert "mine.shell" in (error := capsys.readouterr().err) and "another user" not in error
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert main(["resume", "runs"]) == 2
    error = capsys.readouterr().err
    assert "nbtrain: runs/run-001 is another user's (" in error and "mine.shell" in error and not (folder / "touched").exists()
