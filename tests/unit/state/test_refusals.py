"""A state that can't be continued exactly is refused before anything has changed; with `strict=False` the record names what differs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import Breaks, Broken, Regress, make_data, make_loader, make_model, make_trainer, some
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler
from torchmetrics import MeanMetric

from nbtrain import AccumulationAddon, AddOnBase, CheckpointError, ConfigError, SeededLoader, StateManagerAddon, TensorLoader
from nbtrain.engine.protocol import TrainerProtocol


class NoiseAddon(AddOnBase):
    noise: Any = 0.0

    def resume_settings(self, trainer: TrainerProtocol) -> dict[str, dict[str, Any]]:
        return {"noise": {"noise": self.noise}}


Saving = Regress.add_on(StateManagerAddon, AccumulationAddon, NoiseAddon)


def in_groups(*sizes: int, kind: Any = Adam) -> Callable[[nn.Module], Any]:
    """Makes an optimizer whose groups have so many parameters."""

    def make(model: nn.Module) -> Any:
        left = iter(model.parameters())
        return kind([{"params": [next(left) for _ in range(n)]} for n in sizes])

    return make


def backwards(model: nn.Module) -> list[Any]:
    """Two vectors of the same length would be swapped without a sign of it."""
    weight, bias, *rest = model.parameters()
    return [bias, weight, *rest]


def normed(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def frozen() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    return model


@dataclass
class Run:
    """What a run is given. Each of the factories is called for each run."""

    model: Callable[[], nn.Module] = make_model
    optimizer: Callable[[nn.Module], Any] = lambda model: Adam(model.parameters(), lr=0.01)
    scheduler: Callable[[Any], Any] = lambda optimizer: None
    loader: Callable[[], Any] = make_loader
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path, **options: Any) -> Any:
        model = self.model()
        optimizer = self.optimizer(model)
        given = {"save_path": folder, "every_n_steps": 1, "keep_source": False, "nonfinite": "ignore"} | self.options | options
        return make_trainer(Saving, model=model, optimizer=optimizer, scheduler=self.scheduler(optimizer), **given)


def tensor_loader(**options: Any) -> TensorLoader:
    return TensorLoader(make_data(), **{"batch_size": 16, "shuffle": True} | options)


def seeded_loader(**options: Any) -> SeededLoader:
    return SeededLoader(make_data(), **{"batch_size": 16} | options)


def weighted() -> DataLoader[Any]:
    return DataLoader(make_data(), 16, sampler=WeightedRandomSampler(torch.ones(70), 70))


def by_batches() -> DataLoader[Any]:
    return DataLoader(make_data(), batch_sampler=BatchSampler(RandomSampler(range(70)), 10, False))


# What can never be continued: what was saved, what is given, and what the error says
ALWAYS: dict[str, tuple[Run, Run, str]] = {
    "another model": (Run(), Run(model=lambda: nn.Linear(8, 1)), "weights are not those of a Linear: weight is missing, bias is missing"),
    "another width of the model": (
        Run(model=lambda: normed(4)),
        Run(model=lambda: normed(3)),
        r"weights are not those of a Sequential: 0.weight \(4, 8 in the file; 3, 8 here\)",
    ),
    "SGD for Adam": (Run(), Run(optimizer=lambda m: SGD(m.parameters(), 0.1)), "optimizer: class was Adam and is SGD"),
    "Adam for SGD": (Run(optimizer=lambda m: SGD(m.parameters(), 0.1)), Run(), "optimizer: class was SGD and is Adam"),
    "AdamW for Adam": (Run(), Run(optimizer=lambda m: AdamW(m.parameters())), "optimizer: class was Adam and is AdamW"),
    "SGD for Adam, in groups": (
        Run(),
        Run(optimizer=in_groups(2, 2, kind=partial(SGD, lr=0.1))),
        r"another optimizer: class was Adam and is SGD, parameters by group was \[4\] and is \[2, 2\]",
    ),
    "more parameter groups": (Run(), Run(optimizer=in_groups(2, 2)), r"by group was \[4\] and is \[2, 2\]"),
    "other parameter groups": (Run(optimizer=in_groups(1, 3)), Run(optimizer=in_groups(2, 2)), r"by group was \[1, 3\] and is \[2, 2\]"),
    "fewer parameters": (Run(), Run(optimizer=in_groups(3)), r"by group was \[4\] and is \[3\]"),
    "another order of parameters": (Run(), Run(optimizer=lambda m: Adam(backwards(m))), "parameter 1 was 0.weight and is 0.bias"),
}
STEPPED = Run(scheduler=lambda o: StepLR(o, 1))
# What can't be continued in mid-epoch
WITHIN: dict[str, tuple[Run, Run, str]] = {
    "another batch size": (Run(), Run(loader=lambda: make_loader(batch_size=14)), "batch_size was 16 and is 14"),
    "another batch size of a batch sampler": (Run(loader=by_batches), Run(), "batch_size was 10 and is 16"),
    "more data": (Run(), Run(loader=lambda: make_loader(72)), "samples was 70 and is 72"),
    "less data": (Run(), Run(loader=lambda: make_loader(40)), "another loader: batches was 5 and is 3, samples was 70 and is 40"),
    "no shuffling": (Run(), Run(loader=lambda: make_loader(shuffle=False)), "sampler was RandomSampler and is SequentialSampler"),
    "another sampler": (Run(), Run(loader=weighted), "sampler was RandomSampler and is WeightedRandomSampler"),
    "without the last batch": (Run(), Run(loader=lambda: make_loader(drop_last=True)), "drop_last was False and is True"),
    "another class of loaders": (Run(), Run(loader=tensor_loader), "class was DataLoader and is TensorLoader"),
    "a list of batches": (Run(), Run(loader=lambda: list(make_loader())), "class was DataLoader and is BatchList"),
    "a shorter list": (Run(loader=lambda: list(make_loader())), Run(loader=lambda: list(make_loader())[:4]), "batches was 5 and is 4"),
    "TensorLoader in order": (Run(loader=tensor_loader), Run(loader=lambda: tensor_loader(shuffle=False)), "shuffle was True and is False"),
    "another seed": (Run(loader=seeded_loader), Run(loader=lambda: seeded_loader(seed=3)), "seed was 0 and is 3"),
    "a schedule": (Run(), STEPPED, "schedule was None and is StepLR"),
    "another schedule": (STEPPED, Run(scheduler=lambda o: ExponentialLR(o, 0.5)), "schedule was StepLR and is ExponentialLR"),
    "a schedule by batch": (
        STEPPED,
        Run(scheduler=STEPPED.scheduler, options={"scheduler_step_on_batch": True}),
        "scheduler_step_on_batch was False and is True",
    ),
    "another schedule by a factory": (
        Run(scheduler=lambda o: lambda optimizer, plan: StepLR(optimizer, plan.total_steps)),
        Run(scheduler=lambda o: lambda optimizer, plan: ExponentialLR(optimizer, 0.5)),
        "another schedule of the factory: class was StepLR and is ExponentialLR",
    ),
    "accumulation": (Run(), Run(options={"accumulate": 2}), "accumulate was 1 and is 2"),
    "another schedule of accumulation": (
        Run(options={"accumulate": {0: 1, 4: 2}}),
        Run(options={"accumulate": {0: 1, 4: 3}}),
        "accumulate was {0: 1, 4: 2} and is {0: 1, 4: 3}",
    ),
    "Lightning's accumulation": (Run(), Run(options={"lightning": {"accumulate_grad_batches": 2}}), "accumulate was 1 and is 2"),
    "clipping": (Run(), Run(options={"gradient_clip": 1.0}), "gradient_clip was 0.0 and is 1.0"),
    "another bound": (Run(options={"gradient_clip": 2.0}), Run(options={"gradient_clip": 1.0}), "gradient_clip was 2.0 and is 1.0"),
    "precision": (Run(), Run(options={"precision": "bf16-mixed"}), "precision was None and is bf16-mixed"),
    "a setting of the user's addon": (Run(), Run(options={"noise": 0.5}), "another noise: noise was 0.0 and is 0.5"),
    "a function of the user's addon": (Run(options={"noise": torch.rand}), Run(options={"noise": torch.randn}), "was rand and is randn"),
    "sums of gradients": (Run(), Run(options={"grad_reduction": "sum"}), "grad_reduction was mean and is sum"),
    "frozen parameters": (Run(), Run(model=frozen), "another model: 0.weight was trained and is frozen"),
    "parameters that are trained": (Run(model=frozen), Run(), "another model: 0.weight was frozen and is trained"),
}
IN_MID_EPOCH, AT_THE_END = 2, 5


def saved_run(run: Run, folder: Path, n_updates: int) -> Path:
    """A run that was broken off after so many batches, and the path of its newest state."""
    trainer = run.make(folder)
    trainer.lightning = trainer.lightning | {"callbacks": [Breaks(n_updates + 1)]}
    with pytest.raises(Broken):
        trainer.run(2, run.loader(), resume="auto")
    return (trainer.run_dir / "checkpoints" / "last.ckpt").resolve()


def everything(trainer: Any, folder: Path) -> dict[str, Any]:
    """All that a refusal must leave as it was."""
    scheduler = trainer.scheduler
    return {
        "weights": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
        "buffers and attributes": repr([sorted(vars(part)) for part in trainer.model.modules()]),
        "optimizer": deepcopy(repr(trainer.optimizer.state_dict())),
        "counts": repr(trainer.counts),
        "state": repr({name: value for name, value in vars(trainer.train_state).items() if name != "history"} | {"meters": None}),
        "history": repr(trainer.history.state_dict()),
        "schedule": repr(scheduler.state_dict()) if isinstance(scheduler, LRScheduler) else None,
        "random": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),
        "folder": (trainer.run_dir, dict(vars(trainer.origin))),
        "files": {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))},
    }


def refused(saved: Run, given: Run, said: str, folder: Path, at: int, loads: bool = False) -> str:
    path = saved_run(saved, folder / "saved", at)
    trainer = given.make(folder / "saved")
    loader = given.loader()
    before = everything(trainer, folder)
    with pytest.raises(CheckpointError, match=said) as error:
        trainer.load_state(path) if loads else trainer.run(2, loader, resume=random.Random(said).choice(["auto", "last", path]))
    after = everything(trainer, folder)
    assert [name for name in before if before[name] != after[name]] == []
    return str(error.value)


@pytest.mark.parametrize("at", [IN_MID_EPOCH, AT_THE_END])
@pytest.mark.parametrize("name", ALWAYS)
def test_another_model_or_optimizer_is_refused_before_anything_has_changed(name: str, at: int, tmp_path: Path) -> None:
    refused(*ALWAYS[name], tmp_path, at, loads=at == AT_THE_END)


@pytest.mark.parametrize("name", WITHIN)
def test_another_loader_or_schedule_in_mid_epoch_is_refused_before_anything_has_changed(name: str, tmp_path: Path) -> None:
    assert refused(*WITHIN[name], tmp_path, IN_MID_EPOCH).startswith("epoch=0-step=2.ckpt was saved in mid-epoch with another ")


@pytest.mark.parametrize("seed", range(4))
def test_several_differences_at_once_are_refused(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    kinds = {name: (saved, given, said) for name, (saved, given, said) in WITHIN.items() if saved == Run()}
    (_, one, said), (_, two, _) = (kinds[name] for name in chance.sample(sorted(kinds), 2))
    plain = Run()
    parts = {name: getattr(one if getattr(one, name) != getattr(plain, name) else two, name) for name in vars(plain)}
    refused(plain, Run(**parts), said, tmp_path, chance.choice([1, 2, 3, 4]))


def test_a_loader_that_does_not_fit_a_loaded_state_is_refused_when_the_run_begins(tmp_path: Path) -> None:
    path = saved_run(Run(), tmp_path, IN_MID_EPOCH)
    trainer = Run().make(tmp_path)
    trainer.load_state(path)
    before = everything(trainer, tmp_path)
    with pytest.raises(CheckpointError, match="batch_size was 16 and is 14"):
        trainer.run(1, make_loader(batch_size=14))
    assert everything(trainer, tmp_path) == before
    trainer.run(1, make_loader())
    assert trainer.counts.step == 5


def notes(trainer: Any) -> list[str]:
    lines = map(json.loads, (trainer.run_dir / "events.jsonl").read_text().splitlines())
    return [line["data"]["text"] for line in lines if line["kind"] == "note" and "The run continues with" in line["data"]["text"]]


@pytest.mark.parametrize("at", [IN_MID_EPOCH, AT_THE_END])
@pytest.mark.parametrize("name", some(["another order of parameters", "SGD for Adam", "AdamW for Adam", *WITHIN], 2))
def test_without_strict_the_run_continues_and_the_record_names_what_differs(name: str, at: int, tmp_path: Path) -> None:
    if at == AT_THE_END and name in WITHIN and random.Random(name).random() < 0.6:
        pytest.skip("a few of them are enough")
    saved, given, said = (ALWAYS | WITHIN)[name]
    saved_run(saved, tmp_path, at)
    trainer = given.make(tmp_path, strict=at == AT_THE_END and name in WITHIN)
    result = trainer.run(2, given.loader(), resume="auto")
    (note,) = notes(trainer)
    assert said in note and result.status == "completed" and trainer.counts.epoch == 2
    model = given.model()
    assert type(trainer.optimizer) is type(given.optimizer(model))
    assert [p.requires_grad for p in trainer.model.parameters()] == [p.requires_grad for p in model.parameters()]


def test_what_fits_is_not_named(tmp_path: Path) -> None:
    saved_run(Run(), tmp_path, IN_MID_EPOCH)
    trainer = Run().make(tmp_path)
    trainer.run(2, make_loader(), resume="auto")
    assert notes(trainer) == []


ROWS = {  # of the table in docs/resume.md, with what shows them here
    "names or shapes of the weights": ["another model", "another width of the model"],
    "class of the optimizer, its groups, the order of its parameters": [*ALWAYS][2:],
    "training loader: class, batch size, samples, sampler, `drop_last`, seed": [*WITHIN][:12],
    "class of the schedule, or when it steps": ["a schedule", "another schedule", "a schedule by batch", "another schedule by a factory"],
    "accumulation, gradient clipping, precision": [*WITHIN][16:-2],
    "which parameters are trained": [*WITHIN][-2:],
}


def test_page_on_resuming_has_what_is_refused_here() -> None:
    text = (Path(__file__).parents[3] / "docs" / "resume.md").read_text(encoding="utf-8")
    lines = text.split("## What is refused")[1].split("\n\n")[2].splitlines()[2:]
    rows = {name: cells for name, *cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}
    assert [*rows] == [*ROWS, "number of processes"]  # which tests/distributed shows
    assert [name for names in ROWS.values() for name in names] == [*ALWAYS, *WITHIN]
    for row, names in ROWS.items():
        later = "refused" if names[0] in ALWAYS else "noted in the record"
        assert rows[row][0] == "refused" and rows[row][1].startswith(later)


# -- what is trained on the trainer
class Weighted(Regress):
    """Weighs two losses by what it has learned."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        found, weights = super().train_step(batch), getattr(self.model, "log_vars", None)
        weights = self.log_vars if weights is None else weights
        return found | {"loss": (torch.stack([found["loss"], found["mae"]]) * (-weights).exp() + weights).sum()}


def test_a_parameter_that_is_trained_on_the_trainer_is_refused_with_the_line_that_works(tmp_path: Path) -> None:
    trainer = make_trainer(Weighted)
    trainer.log_vars = nn.Parameter(torch.zeros(2))
    trainer.optimizer = torch.optim.Adam([*trainer.model.parameters(), trainer.log_vars])
    with pytest.raises(ConfigError) as refused:
        trainer.run(1, make_loader())
    assert str(refused.value) == (
        "The optimizer trains self.log_vars of the trainer, which is not in the model: it would not be saved and moved with it.\n"
        "  Put it into the model before you make the optimizer: model.log_vars = nn.Parameter(torch.zeros([2])); "
        "use self.model.log_vars in the steps."
    )
    trainer.log_vars = nn.Linear(1, 2)
    trainer.optimizer = torch.optim.Adam([*trainer.model.parameters(), *trainer.log_vars.parameters()])
    with pytest.raises(ConfigError, match=r"model.log_vars = trainer.log_vars; use self.model.log_vars"):
        trainer.run(1, make_loader())


class Learned(nn.Module):
    """A net, and the weights of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_vars = make_model(), nn.Parameter(torch.zeros([2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_the_line_that_works_is_resumed(tmp_path: Path) -> None:
    first, again = (
        make_trainer(Weighted.add_on(StateManagerAddon), model=Learned(), save_path=tmp_path, keep_source=False) for _ in range(2)
    )
    first.run(1, make_loader())
    again.run(1, make_loader(), resume="auto")
    assert again.model.log_vars.tolist() == first.model.log_vars.tolist() != [0, 0]


def test_modules_on_the_trainer_that_are_not_trained_are_not_refused() -> None:
    trainer = make_trainer()
    trainer.teacher, trainer.free, trainer.metric = make_model(1).requires_grad_(False), make_model(2), MeanMetric()
    trainer.shared = trainer.model[0]
    trainer.run(1, make_loader())
    assert trainer.counts.epoch == 1
