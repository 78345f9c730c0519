"""Names of other libraries: what a trainer says of its arguments, attributes and steps, and that each sentence of the table is right."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import lightning as L
import pytest
import torch
import yaml
from programs import documented
from samples import Regress, make_loader, make_trainer
from torch.utils.data import DataLoader

import nbtrain
from nbtrain import AddOnBase, ConfigError, ModelTrainer, MultiOptimizerTrainer, OptionError, StateManagerAddon, StepError, Trainer
from nbtrain.base.arguments import TRANSLATED
from nbtrain.base.compose import keywords
from nbtrain.base.written_steps import uncalled_methods
from nbtrain.compat.foreign_names import ARGUMENTS, LIBRARIES, MEMBERS, STEPS, Row
from nbtrain.config.schema import Settings
from nbtrain.engine.addon import options
from nbtrain.errors import nearest

FIXTURE = Path(__file__).parents[2] / "fixtures" / "argument_names.yaml"
LISTED = {name for names in yaml.safe_load(FIXTURE.read_text()).values() for name in names.split()}
LIGHTNING = {*inspect.signature(L.Trainer.__init__).parameters, *inspect.signature(L.Trainer.fit).parameters} - {"self"}
NAMES = sorted((LISTED | LIGHTNING) - keywords(Trainer) - TRANSLATED.keys())
ADDONS = [item for item in documented().values() if isinstance(item, type) and issubclass(item, AddOnBase)]


def said(kind: type[Trainer], name: str) -> str:
    """What the constructor says of an argument `name`, after its first line."""
    with pytest.raises(OptionError, match=f"takes no argument {name!r}") as error:
        make_trainer(kind, **{name: 1})
    return str(error.value).partition("\n")[2].strip()


# -- arguments
SUGGESTED = {  # every other name gets a sentence
    "checkpoints_dir": "save_path",
    "clip_gnorm": "gradient_clip",
    "data_seed": "seed",
    "default_root_dir": "save_path",
    "enable_progress_bar": "log_bar",
    "gradient_clip_val": "gradient_clip",
    "hook": "hooks",
    "jit_compile": "compile",
    "lr_scheduler": "scheduler",
    "max_grad_norm": "gradient_clip",
    "model_dir": "save_path",
    "output_dir": "save_path",
    "path": "save_path",
    "save_dir": "save_path",
    "torch_compile": "compile",
    "verbose": "log_bar",
}
UNKNOWN = {  # nbtrain has nothing for these, so nothing is suggested
    "accelerator_config",
    "auto_scale_loss",
    "average_tokens_across_devices",
    "batch_eval_metrics",
    "debug",
    "eval_accumulation_steps",
    "eval_delay",
    "eval_do_concat_batches",
    "eval_use_gather_object",
    "hub_always_push",
    "hub_revision",
    "ignore_data_skip",
    "include_for_metrics",
    "include_num_input_tokens_seen",
    "include_tokens_per_second",
    "jit_mode_eval",
    "label_names",
    "liger_kernel_config",
    "log_level",
    "log_level_replica",
    "log_on_each_node",
    "neftune_noise_alpha",
    "no_save",
    "optimizer_cls_and_kwargs",
    "past_index",
    "prediction_loss_only",
    "preprocess_logits_for_metrics",
    "remove_unused_columns",
    "reset_opt",
    "restore_callback_states_from_checkpoint",
    "save_on_each_node",
    "skip_memory_metrics",
    "steps_per_execution",
    "task_weights",
    "torch_empty_cache_steps",
    "train_bn",
    "trial_name",
    "use_liger_kernel",
    "weights_only",
}


@pytest.mark.parametrize("name", NAMES)
def test_argument_of_another_library_has_a_sentence_or_no_suggestion(name: str) -> None:
    text = said(Regress, name)
    meant = re.fullmatch(r"Did you mean '(\w+)'\?", text)
    assert (meant and meant[1]) == SUGGESTED.get(name)
    assert text.startswith("Known are: ") == (name in UNKNOWN)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"autocast": "bfloat16"}, "precision", "bf16"),
        ({"autocast": "float32"}, "precision", "fp32"),
        ({"use_mixed_precision": True}, "precision", "bf16"),
        ({"use_mixed_precision": False}, "precision", None),
        ({"optimization_metric": "accuracy"}, "monitor", "val_accuracy"),
        ({"optimization_metric": "eval_loss"}, "monitor", "val_loss"),
    ],
)
def test_argument_of_the_same_meaning_is_taken_and_noted(given: dict[str, Any], name: str, value: Any) -> None:
    for kind in (Regress, ModelTrainer):
        trainer, ours = make_trainer(kind, **given), make_trainer(kind, **({name: value} if value is not None else {}))
        assert getattr(trainer, name) == getattr(ours, name) and trainer.given[name] == ours.given[name]
    trainer, noted = make_trainer(**given), list[str]()
    trainer.recorder.add(SimpleNamespace(update=lambda event: noted.append(event.data.get("text", ""))))
    trainer.toggle("test")
    trainer.run(1, make_loader(16, shuffle=False))
    assert f"{next(iter(given))} is {name} here: {name}={value!r}" in noted


def test_argument_under_two_names_is_refused() -> None:
    with pytest.raises(OptionError, match="autocast and precision are both given, and mean the same"):
        make_trainer(autocast="bf16", precision="bf16")
    with pytest.raises(ConfigError, match="precision"):
        make_trainer(autocast="half")


def test_argument_is_suggested_where_it_can_be_given() -> None:
    assert said(Regress, "loss_func").startswith("Compute the loss in train_step;")
    assert said(ModelTrainer, "loss_func") == "Did you mean 'loss_fn'?"
    assert said(Regress, "save_steps") == "Use every_n_steps= of StateManagerAddon."
    assert said(Regress.add_on(StateManagerAddon), "save_steps") == "Did you mean 'every_n_steps'?"
    assert said(ModelTrainer, "lr") == "Did you mean 'learning_rate'?"
    assert said(Regress, "web_logger").startswith("It is an option of NeptuneLoggerAddon or WandBLoggerAddon:")


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "of fit": (lambda: make_trainer().run(3, [1], callbacks=[]), 'Use lightning={"callbacks": [...]}, with Lightning\'s callbacks.'),
    "of another function": (lambda: make_trainer().lr_find([1], steps=3), "Known are: end, n_batches, start."),
    "of the optimizer": (lambda: make_trainer().set(learning_rate=0.1), "Did you mean 'lr'?"),
    "of fastai's optimizer": (lambda: make_trainer().set(wd=0.1), "Did you mean 'weight_decay'?"),
    "of Lightning's trainer": (lambda: make_trainer(lightning={"epochs": 3}), "Use run(n_epoch=...)."),
    "a name": (lambda: make_trainer(optimizer="adam"), "Give a factory: lambda params: torch.optim.Adam(params, lr=1e-3)."),
    "HF's name": (lambda: make_trainer(optimizer="adamw_torch"), "Give a factory: lambda params: torch.optim.AdamW(params, lr=1e-3)."),
    "an unknown name": (lambda: make_trainer(optimizer="lion"), "Give a factory: lambda params: torch.optim.AdamW(params, lr=1e-3)."),
    "a name of several": (
        lambda: make_trainer(MultiOptimizerTrainer, optimizers={"0": "SGD"}, optimizer=None),
        "Give a factory: lambda params: torch.optim.SGD(params, lr=1e-3).",
    ),
    "a name of a schedule": (
        lambda: make_trainer(scheduler="cosine"),
        "Give a factory: scheduler=lambda optimizer, plan: OneCycleLR(optimizer, 3e-3, total_steps=plan.total_steps).",
    ),
}


@pytest.mark.parametrize(("call", "text"), CALLS.values(), ids=CALLS)
def test_call_in_the_way_of_another_library_says_what_to_write(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value).partition("\n")[2].strip() == text


FILES = {
    "epochs: 3": "Did you mean 'max_epochs'?",
    "lr: 0.1": "Use optimizer.args.lr.",
    "save_steps: 3": "Use checkpoint.every_n_train_steps.",
    "elephants: 3": "Known are: ",
    "checkpoint: {save_total_limit: 3}": "Did you mean 'keep_last_n_checkpoints'?",
}


@pytest.mark.parametrize(("text", "remedy"), FILES.items())
def test_field_of_another_library_says_the_field(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        nbtrain.TrainerArgs.from_dict(yaml.safe_load(text)).check()
    assert f"There is no field {text.partition(':')[0]}" in str(error.value) and remedy in str(error.value)


ALSO_MEANT = {"advice": "device", "model": "mode"}  # "dvice", "modl"


@pytest.mark.parametrize("name", [name for name in sorted(keywords(ModelTrainer)) if len(name) > 3])
def test_typing_error_of_one_letter_is_always_understood(name: str) -> None:
    known, meant = keywords(ModelTrainer), {name, ALSO_MEANT.get(name, name)}
    for i in range(len(name)):
        left_out, swapped = name[:i] + name[i + 1 :], name[:i] + name[i : i + 2][::-1] + name[i + 2 :]
        for typed in {left_out, swapped, name[:i] + "x" + name[i + 1 :], name[:i] + "x" + name[i:]} - known:
            assert nearest(typed, known) in {f"Did you mean {other!r}?" for other in meant}


# -- methods and attributes
MEMBER_NAMES = sorted({name for row in MEMBERS for names in row.theirs.values() for name in names})


@pytest.mark.parametrize("name", MEMBER_NAMES)
def test_attribute_of_another_library_says_what_to_use(name: str) -> None:
    trainer = make_trainer()
    assert not hasattr(trainer, name) and getattr(trainer, name, None) is None
    with pytest.raises(AttributeError, match=rf"^Regress has no {name}\.\n  [A-Z].*\.$"):
        getattr(trainer, name)


class Own(Regress):
    """Has attributes with names of other libraries, one of them broken."""

    def fit(self) -> str:
        return "mine"

    @property
    def best(self) -> Any:
        return self.nothing


def test_own_attributes_and_other_errors_are_as_in_any_class() -> None:
    trainer = make_trainer(Own)
    trainer.lr = 0.5
    assert trainer.fit() == "mine" and trainer.lr == 0.5
    for name in ("nothing", "best"):
        with pytest.raises(AttributeError, match="^'Own' object has no attribute 'nothing'$"):
            getattr(trainer, name)
    for copied in (copy.copy(trainer), copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert copied.lr == 0.5 and not hasattr(copied, "losses")
    assert "fit" not in dir(make_trainer()) and not hasattr(Trainer.__new__(Trainer), "state_dict")


# -- what the table says
def _is_field(path: str) -> bool:
    kind: Any = Settings
    for name in path.split("."):
        if not is_dataclass(kind) or name not in {field.name for field in fields(kind)}:
            return kind is dict
        hint = get_type_hints(kind)[name]
        kind = next((part for part in getattr(hint, "__args__", ()) if is_dataclass(part)), hint)
        kind = dict if getattr(kind, "__origin__", None) is dict else kind
    return True


ROWS = [*ARGUMENTS, *MEMBERS, *STEPS]
TRAINER = make_trainer(Regress.add_on(StateManagerAddon), save_path="runs")
CALLED = (Trainer.run, DataLoader, torch.optim.AdamW, nbtrain.TensorLoader, torch.optim.lr_scheduler.OneCycleLR)
KNOWN = {
    *(name for addon in ADDONS for name in options(addon)),
    *keywords(ModelTrainer),
    *(name for called in CALLED for name in inspect.signature(called).parameters),
    *("data", "max_epochs", "resume_from"),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.say[:50])
def test_sentence_names_what_exists(row: Row) -> None:
    code = " ".join(re.findall(r"`([^`]+)`", row.say))
    assert row.say.count("`") % 2 == 0 and row.say.endswith(".") and row.theirs.keys() <= {*LIBRARIES, ""}
    for name in re.findall(r"\btrainer\.(\w+)", code):
        assert hasattr(TRAINER, name), name
    for name in re.findall(r"(?<![\w.])(\w+)(?==)", code):
        assert name in KNOWN, name
    for name in re.findall(r"\b\w+(?:Addon|Trainer|Loader|Args)\b", code):
        assert hasattr(nbtrain, name) or name == "DataLoader", name
    for name in re.findall(r"`(run|predict|evaluate|validate)\(", row.say):
        assert callable(getattr(Trainer, name))
    assert not row.field or _is_field(row.field), row.field


@pytest.mark.parametrize("rows", [ARGUMENTS, MEMBERS, STEPS], ids=["arguments", "members", "steps"])
def test_name_is_in_one_row(rows: tuple[Row, ...]) -> None:
    names = [name for row in rows for name in {name for names in row.theirs.values() for name in names}]
    assert sorted(names) == sorted(set(names))


# -- steps
def step(self: Any, batch: Any) -> Any: ...
def with_index(self: Any, batch: Any, batch_idx: Any) -> Any: ...
def without_batch(self: Any) -> Any: ...
def with_default(self: Any, batch: Any, batch_idx: int = 0) -> Any: ...


@functools.wraps(with_index)
def decorated(self: Any, *args: Any) -> Any: ...


TRAIN = 'Write train_step(self, batch), which returns a dict with "loss".'
TEST = "Write test_step(self, batch), which returns a dict of metrics; it serves validation and test."
NUMBERS = "self.counts has the numbers of epochs, batches and updates."
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "training_step": ({"training_step": with_index}, f"Mine has training_step, which nbtrain does not call, and no train_step.\n  {TRAIN}"),
    "forward": ({"forward": step}, f"Mine has forward, which nbtrain does not call, and no train_step.\n  {TRAIN}"),
    "compute_loss": ({"compute_loss": step}, f"Mine has compute_loss, which nbtrain does not call, and no train_step.\n  {TRAIN}"),
    "an epoch": ({"_train_epoch": step}, f"Mine has _train_epoch, which nbtrain does not call, and no train_step.\n  {TRAIN}"),
    "validation_step": (
        {"train_step": step, "validation_step": step},
        f"Mine has validation_step, which nbtrain does not call, and no test_step.\n  {TEST}",
    ),
    "batch_idx": (
        {"train_step": with_index},
        f"Mine.train_step(self, batch, batch_idx) can't be called with the batch alone.\n  Write train_step(self, batch); {NUMBERS}",
    ),
    "no batch": (
        {"test_step": without_batch},
        f"Mine.test_step(self) can't be called with the batch alone.\n  Write test_step(self, batch); {NUMBERS}",
    ),
}


def mine(namespace: dict[str, Any], base: type[Trainer] = Trainer) -> type[Trainer]:
    return type("Mine", (base,), namespace | {"__module__": __name__})


@pytest.mark.parametrize(("namespace", "text"), WRONG.values(), ids=WRONG)
def test_step_of_another_library_is_refused_when_the_trainer_is_made(namespace: dict[str, Any], text: str) -> None:
    for kind in (mine(namespace), mine(namespace).add_on(StateManagerAddon)):
        with pytest.raises(StepError) as error:
            make_trainer(kind)
        assert str(error.value) == text


def test_step_with_an_index_is_refused_in_place_of_a_running_class() -> None:
    trainer = make_trainer()
    with pytest.raises(StepError, match=r"Mine.train_step\(self, batch, batch_idx\)"):
        trainer.use(mine({"train_step": with_index}))
    assert type(trainer) is Regress


class Lit(Regress):
    """Has the names of other libraries for what it uses itself."""

    def forward(self, x: Any) -> Any:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.forward(batch[0]).mean()}

    def train_step(self, batch: Any) -> Any:
        return self.training_step(batch, 0)

    def logging(self, values: Any) -> Any:
        return list(map(self.log_reset, values))

    def log_reset(self, value: Any) -> Any:
        return value

    @property
    def shown(self) -> Any:
        return self.logging([])


class Base(Trainer):
    """A base class with a step that a subclass calls."""

    def train_step(self, batch: Any, scale: float) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"loss": self.model(batch[0]).mean() * scale}


class Scaled(Base):
    def train_step(self, batch: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().train_step(batch, 0.5)


class Alias(Trainer):
    def training_step(self, batch: Any) -> Any:
        return {"loss": self.model(batch[0]).mean()}

    train_step = test_step = training_step


RIGHT: dict[str, type[Trainer]] = {
    "helpers": Lit,
    "a base class": Scaled,
    "an alias": Alias,
    "a default": mine({"train_step": with_default}),
    "a decorator": mine({"train_step": decorated}),
    "of functions": Trainer.from_steps(lambda self, batch: {"loss": self.model(batch[0]).mean()}),
    "own names": mine({"train_step": step, "on_my_way": step, "accuracy": step}),
}


@pytest.mark.parametrize("kind", RIGHT.values(), ids=RIGHT)
def test_steps_that_work_are_neither_refused_nor_noted(kind: type[Trainer]) -> None:
    assert uncalled_methods(type(make_trainer(kind))) == []


UNCALLED = {
    "run_batch": "Write what it adds into train_step and test_step, or into a callback.",
    "_train_epoch": TRAIN,
    "logging": "Read trainer.history, which has what the steps return; a callback or loggers= of LoggersAddon does more with it.",
    "configure_optimizers": "Give optimizer= and scheduler= to the trainer.",
    "after_optimizer_step": "Give it as hooks={'after_optimizer_step': function}.",
    "on_train_batch_end": "Give it as a callback, in lightning={'callbacks': [...]}.",
}


def test_method_that_no_run_calls_is_noted_in_the_first_run(tmp_path: Path) -> None:
    trainer = make_trainer(mine(dict.fromkeys(UNCALLED, step), Regress).add_on(StateManagerAddon), save_path=tmp_path)
    trainer.run(1, make_loader())
    trainer.run(1, make_loader())
    events = [json.loads(line) for path in sorted(tmp_path.rglob("events.jsonl")) for line in path.read_text().splitlines()]
    assert [event["data"]["text"] for event in events if event["kind"] == "note"] == [
        f"Mine.{name} is not called in a run. {sentence}" for name, sentence in UNCALLED.items()
    ]


def test_every_step_of_another_library_is_noted() -> None:
    names = {name for row in STEPS for names in row.theirs.values() for name in names}
    noted = uncalled_methods(mine(dict.fromkeys(names, step), Regress))
    assert {note.partition(" ")[0] for note in noted} == {f"Mine.{name}" for name in names}
