"""A live trainer as a configuration: what is written trains the same weights, and what can't be known is told whole."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from samples import same_weights
from torch.utils.data import DataLoader

from nbtrain import AccumulationAddon, ConfigError, EMAAddon, MultiGPUAddon, StateManagerAddon, TrainerArgs, load_run, param_groups
from nbtrain.cli import main
from nbtrain.rng import seed_all

PARTS = """
import torch
from torch import nn
from torch.utils.data import Dataset
from nbtrain import Trainer, TrainHook, warmup_cosine


class Net(nn.Module):
    def __init__(self, dim, hidden=16, dropout=0.0):
        super().__init__()
        self.dim, self.hidden, self._dropout = dim, hidden, dropout
        self.layers = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.layers(x)


class Doubled(Net):
    def __init__(self, dim):
        super().__init__(2 * dim)


class Forgetful(Net):
    def __init__(self, dim, hidden=16):
        nn.Module.__init__(self)
        self.layers = nn.Linear(dim, 1)


class Data(Dataset):
    def __init__(self, n, dim=8, seed=1):
        self.n, self.dim, self.seed = n, dim, seed
        self.x = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.x[index], self.x[index].sum(0, keepdim=True)


class Count(TrainHook):
    def __init__(self, start=0):
        self.start = self.n = start

    def after_optimizer_step(self, trainer):
        self.n += 1


class Fit(Trainer):
    def __init__(self, *args, power=2, **options):
        super().__init__(*args, **options)
        self.power = power

    def train_step(self, batch):
        x, y = batch
        return {"loss": (self.model(x) - y).abs().pow(self.power).mean()}

    test_step = train_step


def collate(samples):
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
"""


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "parts.py").write_text(PARTS)
    return importlib.import_module("parts")


def make(parts: Any, *addons: Any, model: Any = None, optimizer: Any = None, **options: Any) -> Any:
    seed_all(0)
    optimizer = optimizer or (lambda params: torch.optim.Adam(params, lr=0.01))
    kind = parts.Fit.add_on(*addons) if addons else parts.Fit
    given = {"device": "cpu", "log_bar": False, "seed": 0} | options
    return kind(model or parts.Net(8, dropout=0.3), optimizer=optimizer, **given)


def loaders(parts: Any, **options: Any) -> list[Any]:
    return [DataLoader(parts.Data(70), 16, shuffle=True, **options), DataLoader(parts.Data(40, seed=2), 16)]


def fit(trainer: Any, **fields: Any) -> Any:
    """The model that a job trains from the trainer's configuration."""
    trainer.to_config("run.yaml", **fields)
    job = TrainerArgs.from_yaml("run.yaml").build()
    job.run()
    return job.trainer.model


# -- what is written trains the same
def test_nbtrain_fit_repeats_the_run_bit_for_bit(parts: Any) -> None:
    trainer = make(parts, StateManagerAddon, save_path="live", gradient_clip=0.5)
    trainer.run(2, *loaders(parts))
    trainer.to_config("run.yaml")
    assert main(["fit", "-f", "run.yaml", "--checkpoint.save_dir=job"]) == 0
    weights = [torch.load(next(Path(run).glob("*/checkpoints/last.ckpt")))["state_dict"] for run in ("live", "job")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [[row["val_loss"] for row in load_run(next(Path(run).iterdir())).epochs] for run in ("live", "job")]
    assert losses[0] == losses[1] and len(losses[0]) == 2


@pytest.mark.parametrize("seed", range(6))
def test_the_run_of_the_written_file_is_the_run_of_a_drawn_trainer(seed: int, parts: Any) -> None:
    draw = random.Random(seed)
    optimizer = draw.choice([
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=draw.choice([0.0, 0.1])),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
        lambda params: torch.optim.RMSprop(params, lr=0.003, centered=True),
    ])  # fmt: skip
    addons = draw.sample([AccumulationAddon, EMAAddon], draw.randint(0, 2))
    options: dict[str, Any] = {"accumulate": draw.choice([2, 3])} if AccumulationAddon in addons else {}
    options |= {"gradient_clip": draw.choice([0.0, 0.3]), "nonfinite": draw.choice(["raise", "ignore"])}
    seed_all(0)
    trainer = make(parts, *addons, model=parts.Net(8, dropout=draw.choice([0.0, 0.2])), optimizer=optimizer, **options)
    n, batch_size = draw.choice([30, 33, 70]), draw.choice([4, 16])
    train = DataLoader(parts.Data(n), batch_size, shuffle=draw.random() < 0.7, drop_last=draw.random() < 0.5)
    valid = DataLoader(parts.Data(40, seed=2), draw.choice([3, 25, batch_size]), drop_last=draw.random() < 0.3)
    if seed % 2:
        trainer.optimizer = torch.optim.AdamW(param_groups(trainer.model, 0.01, weight_decay=0.1, lr_factors={"layers.0": 0.5}))
    trainer.run(2, train, draw.choice([valid, valid, None]))
    trainer.to_config("run.yaml")
    job = TrainerArgs.from_yaml("run.yaml").build()
    job.run()
    assert same_weights(trainer.model, job.trainer.model)
    rows = [[{**row.metrics, "lr": row["lr"]} for row in made.history.epochs] for made in (trainer, job.trainer)]
    assert rows[0] == rows[1]


def muon_and_adamw(params: Any) -> Any:
    params = list(params)
    matrices, vectors = ([p for p in params if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
    return {"muon": torch.optim.Muon(matrices, lr=0.02), "rest": torch.optim.AdamW(vectors, lr=0.01)}


SEVERAL = """optimizer:
  - type: torch.optim.Muon
    args: {lr: 0.02}
    dims: 2
  - type: torch.optim.AdamW
    args: {lr: 0.01}
    name: rest
    clip_gnorm: 0.1
"""


def test_several_optimizers_are_written_as_a_list_and_train_the_same(parts: Any) -> None:
    trainer = make(parts, optimizer=muon_and_adamw, gradient_clip={"rest": 0.1})
    trainer.run(2, *loaders(parts))
    assert same_weights(fit(trainer), trainer.model)
    found = yaml.safe_load(Path("run.yaml").read_text())
    written = found.pop("optimizer")
    assert written["each"][1]["params"] == ["layers.0.bias", "layers.3.bias"]
    Path("run.yaml").write_text(SEVERAL + yaml.safe_dump(found))  # as one would write it by hand
    args = TrainerArgs.from_yaml("run.yaml")
    assert "parts.Net, torch.optim.Muon, torch.optim.AdamW" in args.plan()
    job = args.build()
    job.run()
    assert same_weights(job.trainer.model, trainer.model) and list(job.trainer.optimizer.optimizers) == ["muon", "rest"]
    trainer = make(parts, optimizer=muon_and_adamw, gradient_clip=0.2)
    trainer.run(1, *loaders(parts))
    assert same_weights(fit(trainer), trainer.model)


@pytest.mark.parametrize(
    ("written", "said"),
    {
        ("dims: 2", "params: [layers.9.weight]"): r"optimizer.0.params: Net has no parameter 'layers.9.weight'.\n.*layers.3.weight",
        ("dims: 2", "dims: 3"): "optimizer.0 drives no parameter",
        ("dims: 2", "name: all"): "Two optimizers name no parameters: only one can drive what is left.\n  run.yaml:1",
        ("name: rest", "params: [layers.*]"): "The optimizers 'muon' and 'adamw' drive the same parameters",
        ("args: {lr: 0.02}", "args: {rl: 0.02}"): r"Muon takes no argument 'rl'.\n  run.yaml:3\n",
        ("type: torch.optim.Muon", "kind: x"): r"There is no field optimizer.0.kind.\n  run.yaml:2\n",
    }.items(),
)
def test_what_is_wrong_in_a_list_of_optimizers_is_said_with_its_place(written: tuple[str, str], said: str, parts: Any) -> None:
    text = make_text(parts)
    Path("run.yaml").write_text(SEVERAL.replace(*written) + text)
    with pytest.raises(ConfigError, match=said):
        TrainerArgs.from_yaml("run.yaml").build()


def make_text(parts: Any) -> str:
    """A file without its optimizer."""
    trainer = make(parts)
    trainer.run(1, *loaders(parts))
    found = yaml.safe_load(trainer.to_config())
    del found["optimizer"]
    return yaml.safe_dump(found)


def test_groups_of_parameters_are_written_by_their_names(parts: Any) -> None:
    def grouped(params: Any) -> Any:
        first, *rest = params
        return torch.optim.AdamW([{"params": [first], "betas": (0.8, 0.9)}, {"params": rest, "lr": 0.02}], lr=0.01)

    trainer = make(parts, optimizer=grouped)
    trainer.run(1, *loaders(parts))
    written = trainer.to_config("run.yaml")
    assert yaml.safe_load(written)["optimizer"]["groups"][1]["lr"] == 0.02
    job = TrainerArgs.from_yaml("run.yaml").build()
    assert [group["betas"] for group in job.trainer.optimizer.param_groups] == [(0.8, 0.9), (0.9, 0.999)]
    Path("run.yaml").write_text(written.replace("layers.0.bias", "layers.0.bais"))
    with pytest.raises(ConfigError, match="optimizer.groups: Net has no parameter 'layers.0.bais'.\n.*layers.0.bias"):
        TrainerArgs.from_yaml("run.yaml").build()


def test_the_text_is_a_short_file_for_people(parts: Any) -> None:
    trainer = make(parts, gradient_clip=0.5)
    trainer.run(1, *loaders(parts, drop_last=True))
    assert trainer.to_config() == (
        "# A run of Fit, written by its to_config().\n"
        "# The weights start as in this run if the model is made right after torch.manual_seed(0).\n"
        "trainer:\n  type: parts.Fit\n  args:\n    device: cpu\n"
        "model:\n  type: parts.Net\n  args:\n    dim: 8\n    dropout: 0.3\n"
        "optimizer:\n  type: torch.optim.Adam\n  args:\n    lr: 0.01\n  clip_gnorm: 0.5\n"
        "dataset:\n  type: parts.Data\n  train_args:\n    n: 70\n  val_args:\n    n: 40\n    seed: 2\n"
        "dataloader:\n  train_args:\n    shuffle: true\n    drop_last: true\n  val_args:\n    shuffle: false\n"
        "checkpoint:\n  no_save: true\n"
        "dataset_sampler:\n  type: null\n"
        "micro_batch_size: 16\nmax_epochs: 1\nseed: 0\nenable_progress_bar: false\n"
    )


def test_options_of_addon_instances_are_written(parts: Any) -> None:
    trainer = make(parts, StateManagerAddon(save_path="live", every_n_steps=3), EMAAddon(ema_decay=0.5))
    trainer.run(1, *loaders(parts))
    found = yaml.safe_load(trainer.to_config())
    assert found["addons"] == [{"type": "nbtrain.EMAAddon", "args": {"ema_decay": 0.5}}]
    assert found["checkpoint"]["save_dir"] == "live" and found["checkpoint"]["every_n_train_steps"] == 3
    assert same_weights(trainer.model, fit(trainer, checkpoint={"save_dir": "job"}))


SCHEDULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "a factory": lambda parts: {"scheduler": parts.warmup_cosine},
    "a factory with options": lambda parts: {"scheduler": __import__("functools").partial(parts.warmup_cosine, warmup=0.3)},
    "power of an own trainer": lambda parts: {"power": 1},
    "accumulation": lambda parts: {"lightning": {"accumulate_grad_batches": 2, "max_steps": 7}},
    "dtypes": lambda parts: {"precision": {"param": torch.float32, "input": "fp32"}},
    "precision": lambda parts: {"precision": "bf16"},
    "a hook": lambda parts: {"hooks": parts.Count(start=3)},
    "functions as hooks": lambda parts: {"hooks": {"after_optimizer_step": print_nothing}},
    "a callback": lambda parts: {"lightning": {"callbacks": [early_stopping()]}},
}


def print_nothing(trainer: Any) -> None: ...


def early_stopping() -> Any:
    from lightning.pytorch.callbacks import EarlyStopping

    return EarlyStopping("train_loss", patience=1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_trainer_was_made_with_is_in_it(name: str, parts: Any) -> None:
    trainer = make(parts, **SCHEDULES[name](parts))
    trainer.run(2, *loaders(parts))
    assert same_weights(fit(trainer), trainer.model)


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_scheduler_that_lives_is_made_again(by_batch: bool, parts: Any) -> None:
    model = parts.Net(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    seed_all(0)
    model.load_state_dict(parts.Net(8).state_dict())
    trainer = make(parts, model=model, optimizer=optimizer, scheduler=scheduler, scheduler_step_on_batch=by_batch)
    trainer.run(3, *loaders(parts))
    assert same_weights(fit(trainer), trainer.model)


def test_addons_come_with_their_options(parts: Any) -> None:
    trainer = make(parts, AccumulationAddon, accumulate=2)
    loader = loaders(parts, collate_fn=parts.collate)[0]
    trainer.run(1, loader)
    trainer.run(1, loader)
    assert same_weights(fit(trainer), trainer.model)
    assert yaml.safe_load(Path("run.yaml").read_text())["addons"] == [{"type": "nbtrain.AccumulationAddon", "args": {"accumulate": 2}}]


def test_saving_is_written_as_it_was(parts: Any) -> None:
    trainer = make(
        parts,
        StateManagerAddon,
        save_path="runs/a",
        every_n_steps=1,
        keep_last_n=1,
        save_best=False,
        save_format="safetensor",
        symlink_best_and_last=False,
    )
    trainer.run(1, *loaders(parts))
    written = yaml.safe_load(trainer.to_config())
    assert written["trainer"]["args"] == {"device": "cpu", "validate_on_save": False}
    assert written["checkpoint"] == {
        "every_n_train_steps": 1,
        "keep_last_n_checkpoints": 1,
        "save_best": False,
        "symlink_best_and_last": False,
        "save_dir": "runs/a",
        "save_format": "safetensor",
    }


TWO = {"runtime_ngpus": 2}


@pytest.mark.parametrize(
    ("options", "compute", "policy"),
    [
        ({}, TWO, None),
        ({"strategy": "fsdp2"}, TWO | {"use_zero": True}, None),
        ({"strategy": "fsdp2", "shard_size": 2}, TWO | {"use_zero": True, "zero_ngroups": 1}, None),
        ({"strategy": "tp", "tensor_plan": {"layers.0": "colwise"}}, TWO | {"plan_ngpus": 2}, "tp"),
        ({"strategy": "auto", "memory_gb": 4.0}, TWO | {"plan_ngpus": 2}, "autodist"),
    ],
    ids=str,
)
def test_devices_and_strategy_are_written_and_read_again(parts: Any, options: Any, compute: Any, policy: str | None) -> None:
    trainer = make(parts, MultiGPUAddon, device=["cpu", "cpu"], **options)
    said = {"dataset": {"type": "parts.Data", "train_args": {"n": 8}}, "dataset_sampler": {"type": None}}
    trainer.to_config("run.yaml", max_epochs=1, micro_batch_size=4, **said)
    written = yaml.safe_load(Path("run.yaml").read_text())
    assert written["compute_config"] == compute and written.get("pas_policy") == policy
    job = TrainerArgs.from_yaml("run.yaml").build()
    again = job.trainer
    was, now = trainer[MultiGPUAddon], again[MultiGPUAddon]
    assert job.loader.batch_size == 4 and "accumulate_grad_batches" not in again.lightning  # pyright: ignore[reportAttributeAccessIssue]
    assert now.devices == was.devices and now.parallelism == was.parallelism
    assert (now.strategy, now.memory_gb) == (was.strategy, was.memory_gb)


def test_a_strategy_without_a_word_in_a_configuration_is_told(parts: Any) -> None:
    trainer = make(parts, MultiGPUAddon, device=["cpu", "cpu"], strategy="ddp_find_unused_parameters_true")
    with pytest.raises(ConfigError, match="compute_config: it can't express the strategy 'ddp_find_unused_parameters_true'"):
        trainer.to_config(max_epochs=1, dataset={"type": "parts.Data", "train_args": {"n": 8}}, dataset_sampler={"type": None})


# -- what can't be known
def test_all_that_cant_be_known_is_told_at_once(parts: Any) -> None:
    class Cell(parts.Fit):
        pass

    model = parts.Forgetful(8)
    trainer = Cell(model, "cpu", log_bar=False, optimizer=lambda params: torch.optim.SGD([*params, torch.ones(2)], lr=0.1))
    trainer.run(1, [next(iter(loaders(parts)[0]))])
    with pytest.raises(ConfigError) as caught:
        trainer.to_config("run.yaml")
    assert str(caught.value) == (
        "The configuration has 4 errors.\n"
        "  1. trainer.type: test_all_that_cant_be_known_is_told_at_once.<locals>.Cell can't be imported by name.\n"
        "     It is from test_from_trainer. Put it into a module: nbtrain export my.ipynb.\n"
        "  2. model.args: this Forgetful does not store its constructor arguments: dim, hidden.\n"
        '     Give it: to_config(path, model={"args": {...}}).\n'
        "  3. optimizer: 1 of its parameters are not in the model.\n"
        '     Name a function that makes it: to_config(path, optimizer={"type": ...}).\n'
        "  4. dataset: the loader does not have a dataset, as a DataLoader does.\n"
        "     Give it: to_config(path, dataset={...})."
    )
    assert not Path("run.yaml").exists()


def test_what_is_given_is_taken(parts: Any) -> None:
    model = parts.Forgetful(8)
    trainer = make(parts, model=model)
    trainer.run(1, *loaders(parts))
    data = {"type": parts.Data, "train_args": {"n": 9}}
    written = yaml.safe_load(trainer.to_config(model={"args": {"dim": 8}}, dataset=data, max_epochs=5))
    assert written["model"] == {"type": "parts.Forgetful", "args": {"dim": 8}}
    assert (written["dataset"], written["max_epochs"]) == ({"type": "parts.Data", "train_args": {"n": 9}}, 5)


PROBLEMS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "an attribute that was changed": (
        lambda parts: make(parts, model=parts.Doubled(4)),
        {},
        "model: a second Doubled made from its stored arguments is different: its parameters or parts differ.\n"
        '  Give it: to_config(path, model={"args": {...}}).',
    ),
    "a field that is none": (lambda parts: make(parts), {"max_epoch": 1}, "There is no field max_epoch.\n  Did you mean 'max_epochs'?"),
    "a function of the step": (
        lambda parts: make(parts, scheduler=lambda step: 0.1),
        {},
        "lr_scheduler: a job can't make a scheduler from a function of the step.\n"
        "  Write a factory (optimizer, plan) around it, in a module.",
    ),
    "a secret": (
        lambda parts: make(parts, power={"api_key": "a1b2c3d4e5f6a7b8"}),
        {},
        "trainer.args.power.api_key is a secret, which no file should hold.\n"
        '  Give it: to_config(path, trainer={"args": {...}}), and $(NAME) for that of the environment.',
    ),
    "a tensor": (
        lambda parts: make(parts, power=torch.ones(3)),
        {},
        'trainer.args.power: a Tensor of 3 values is too long for a configuration.\n  Give it: to_config(path, trainer={"args": {...}}).',
    ),
    "evaluation": (
        lambda parts: make(parts, mode="test"),
        {},
        "In mode 'test' there is no training to repeat.\n  Make the trainer with an optimizer.",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_says_what_helps(name: str, parts: Any) -> None:
    make_one, fields, text = PROBLEMS[name]
    trainer = make_one(parts)
    loader = [loaders(parts)[0].dataset[i] for i in range(2)]
    known = {"dataset": {"type": "parts.Data", "train_args": {"n": 9}}, "max_epochs": 1} | fields
    with pytest.raises(ConfigError) as caught:
        trainer.to_config(**known)
    assert str(caught.value) == text and len(loader) == 2


def test_options_that_were_changed_by_hand_are_told(parts: Any) -> None:
    trainer = make(parts)
    trainer.run(1, *loaders(parts))
    trainer.set(lr=0.5)
    with pytest.raises(ConfigError, match=r"optimizer\.args\.lr is 0\.5, and it was made with 0\.01\."):
        trainer.to_config()


def test_runs_on_different_data_are_told(parts: Any) -> None:
    trainer = make(parts)
    for _ in range(2):
        trainer.run(1, *loaders(parts))
    with pytest.raises(ConfigError, match="the runs had different loaders, and a job has one run"):
        trainer.to_config()


def test_the_loaders_are_not_pickled_with_the_trainer(parts: Any) -> None:
    trainer = make(parts)
    trainer.run(1, *loaders(parts))
    assert trainer.ran.n_epochs == 1 and trainer.__reduce__()[2]["ran"] is None
