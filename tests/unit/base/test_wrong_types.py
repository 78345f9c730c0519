"""Every public constructor and method refuses an argument of a wrong type, by the argument's name, before anything has happened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_origin

import pytest
from programs import documented
from samples import make_loader, make_trainer

import nbtrain
from nbtrain import AddOnBase, NbtrainError, OptionError
from nbtrain.annotations import checked, find_misfit, parameter_hints, read_hint
from nbtrain.engine.addon import options

# What is not checked, and why
MADE_BY_NBTRAIN = {
    "Event",
    "Gallery",
    "History",
    "JobHandle",
    "Notification",
    "Plan",
    "PortCheck",
    "Profile",
    "Progress",
    "ProgressChecker",
    "RangeTest",
    "Replay",
    "Rewound",
    "RunHandle",
    "RunResult",
    "Runs",
    "Sample",
    "Session",
    "Shown",
    "Task",
}
CALLED_BY_NBTRAIN = {"Callback", "TrainHook", "NbtrainError"}  # hooks and errors: users write them, nbtrain calls them
EXCEPTIONS = {
    "AggregatedOutputs.__init__": "made in each window by a user's function",
    "TrainerBase.log": "called in each batch; Lightning checks it",
    "TrainerBase.backward": "called in each batch",
    "Composable.add_on": "raises AddOnError, which names what was given",
    "TrainerArgs.__init__": "a configuration is checked as a whole, by `check()`",
    "SchedulerBase.rate": "called by the schedule",
    "History.update": "called by the recorder",
    "History.drop_after": "called by a resume",
    "History.load_state_dict": "called by a resume",
    "SeededLoader.load_state_dict": "called by a resume",
    "TensorLoader.load_state_dict": "called by a resume",
    "Event.from_json": "reads what nbtrain has written",
    "Shown.read": "reads what nbtrain has written",
    "RunHandle.start": "called by the run",
    "Session.run": "called by the trainer's run, which is checked",
    "Session.end": "called by the controls",
    "draw_sample": "called by matplotlib's figure",
    "TrainerBase.step_module": "called by the run",
    "SchedulerChain.rate": "called by the schedule",
    "WarmUpScheduler.rate": "called by the schedule",
    "CosineAnnealingScheduler.rate": "called by the schedule",
}


class Wrong:
    """Fits no annotation but Any."""


def _functions(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(kind):
        item = inspect.getattr_static(kind, name)
        function = item.__func__ if isinstance(item, (classmethod, staticmethod)) else item
        is_own = inspect.isfunction(function) and function.__module__.startswith("nbtrain.")
        if is_own and (name == "__init__" or not name.startswith("_")):
            yield name, function


def _public() -> Iterator[tuple[str, Callable[..., Any]]]:
    seen = set()
    for public, item in documented().items():
        if inspect.isfunction(item):
            yield public, item
        if not isinstance(item, type) or public in CALLED_BY_NBTRAIN or issubclass(item, BaseException):
            continue
        if issubclass(item, AddOnBase):
            continue  # below: their options, and their commands
        for name, function in _functions(item):
            skipped = name == "__init__" and public in MADE_BY_NBTRAIN
            if function not in seen and not skipped:
                seen.add(function)
                yield function.__qualname__, function


def _parameters() -> Iterator[tuple[str, Callable[..., Any], str]]:
    for name, function in _public():
        for parameter, hint in parameter_hints(function).items() if name not in EXCEPTIONS else ():
            if find_misfit("", Wrong(), hint) is not None or get_origin(hint) is tuple:
                yield name, function, parameter


CASES = list(_parameters())


def _call(function: Callable[..., Any], parameter: str, value: Any) -> None:
    """Call a method without its object: the check comes before it is looked at."""
    kinds = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
    if kinds[parameter] is inspect.Parameter.VAR_POSITIONAL:
        function(*([object()] if "self" in kinds or "cls" in kinds else []), value)
    else:
        function(**{parameter: value})


@pytest.mark.parametrize(("name", "function", "parameter"), CASES, ids=[f"{name}-{parameter}" for name, _, parameter in CASES])
def test_wrong_type_is_refused_by_name(name: str, function: Callable[..., Any], parameter: str) -> None:
    with pytest.raises(NbtrainError, match=rf"^{parameter}\b.* must be .*, got a Wrong\."):
        _call(function, parameter, Wrong())


def test_there_are_many_of_them_and_each_exception_is_one() -> None:
    assert len(CASES) > 80
    assert EXCEPTIONS.keys() <= {name for name, _ in _public()}


ADDONS = [item for item in documented().values() if isinstance(item, type) and issubclass(item, AddOnBase)]
OPTIONS = [(addon, name) for addon in ADDONS for name in options(addon)]
OF_ANY_TYPE = {"metrics", "hooks"}  # any object may have hooks


@pytest.mark.parametrize(("addon", "option"), OPTIONS, ids=[f"{addon.__name__}-{name}" for addon, name in OPTIONS])
def test_option_of_a_wrong_type_is_refused_by_name(addon: type[AddOnBase], option: str) -> None:
    if option not in OF_ANY_TYPE:
        with pytest.raises(NbtrainError, match=rf"^{option} must be .*, got a Wrong\."):
            addon(**{option: Wrong()})


@pytest.mark.parametrize("option", [name for _, name in OPTIONS if name not in OF_ANY_TYPE])
def test_option_is_refused_by_the_trainer_too(option: str) -> None:
    addon = next(addon for addon, name in OPTIONS if name == option)
    kind = nbtrain.Trainer if addon in (nbtrain.addons.HooksAddon, nbtrain.SchedulerAddon) else nbtrain.Trainer.add_on(addon)
    with pytest.raises(NbtrainError, match=rf"^{option} must be .*, got a Wrong\."):
        make_trainer(kind, **{option: Wrong()})


@pytest.mark.parametrize("addon", [addon for addon in ADDONS if addon.commands], ids=lambda addon: addon.__name__)
def test_commands_refuse_wrong_types(addon: type[AddOnBase]) -> None:
    kind = nbtrain.Trainer.add_on(addon)
    for command in addon.commands:
        for parameter, hint in list(parameter_hints(getattr(addon, command)).items())[1:]:
            if find_misfit("", Wrong(), hint) is not None:
                trainer = make_trainer(kind, **({"save_path": "runs"} if "save_path" in options(addon) else {}))
                with pytest.raises(NbtrainError, match=rf"^{parameter} must be"):
                    getattr(trainer, command)(**{parameter: Wrong()})


# -- what the annotations mean
FITS = [
    ("1", float, False), (True, int, False), (1, bool, False), (3, float, True), (3.0, int, False), ("ab", "list[str]", False),
    ({"a": 1}, "Iterable[Any]", False), (["a", 3], "Sequence[str]", False), ({"a": "b"}, "Mapping[str, float]", False),
    ({1: None}, "Mapping[int, int | None]", True), ("mean", 'Literal["mean", "sum"]', True), ("men", 'Literal["mean", "sum"]', False),
    (int, "type[int]", True), (str, "type[int]", False), (3, "type[int]", False), (len, "Callable[..., Any]", True),
    (None, "int | None", True), ((1, "a"), "tuple[int, str]", True), ((1,), "tuple[int, str]", False), (3, "NotThere", True),
]  # fmt: skip


@pytest.mark.parametrize(("value", "hint", "fits"), FITS)
def test_what_fits_an_annotation(value: Any, hint: Any, fits: bool) -> None:
    import collections.abc
    import typing

    space = vars(typing) | vars(collections.abc)
    assert (find_misfit("x", value, read_hint(hint, space)) is None) == fits


def test_scalars_of_numpy_are_numbers_and_their_integers_are_said_how_to_convert() -> None:
    numpy = pytest.importorskip("numpy")
    assert find_misfit("x", numpy.float32(3), float) is None and find_misfit("x", numpy.int64(3), float) is None
    with pytest.raises(NbtrainError, match=r"^n_epoch must be an integer, got an int64.\n  Convert it: int\(...\).$"):
        make_trainer().run(numpy.int64(1), make_loader())


# -- calls that don't fit
STEPS = {"train_step", "test_step", "prepare_batch"}  # users write them, nbtrain calls them


def _callable_with_keywords() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions and methods that take arguments, and not any keyword."""
    for name, function in _public():
        parameters = list(inspect.signature(function).parameters.values())
        takes = [p for p in parameters if p.name not in ("self", "cls")]
        if takes and name not in EXCEPTIONS and name.partition(".")[2] not in STEPS and not any(p.kind is p.VAR_KEYWORD for p in takes):
            yield name, function


CALLABLE = list(_callable_with_keywords())


@pytest.mark.parametrize(("name", "function"), CALLABLE, ids=[name for name, _ in CALLABLE])
def test_unknown_argument_is_refused_with_the_nearest_known_one(name: str, function: Callable[..., Any]) -> None:
    title = "object" if name.endswith("__init__") else function.__name__
    wanted = next(p.name for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls"))
    args = [object()] if next(iter(inspect.signature(function).parameters)) in ("self", "cls") else []
    with pytest.raises(OptionError) as error:
        function(*args, **{f"{wanted}_": Wrong()})
    kind = inspect.signature(function).parameters[wanted].kind
    assert str(error.value).startswith(f"{title} takes no argument '{wanted}_'.")
    assert kind is inspect.Parameter.VAR_POSITIONAL or str(error.value).endswith(f"Did you mean {wanted!r}?")


@checked
def place(n: int, *, where: str, cpus: int = 1) -> None:
    """A function with an argument that is given by name alone."""


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "epochs": (lambda: make_trainer().run(epochs=3), "run takes no argument 'epochs'.\n  Did you mean 'n_epoch'?"),
    "max_epochs": (lambda: make_trainer().run(max_epochs=3), "run takes no argument 'max_epochs'.\n  Did you mean 'n_epoch'?"),
    "loader": (lambda: make_trainer().run(3, train_dataloaders=[]), "run takes no argument 'train_dataloaders'.\n  Did you mean 'loader'?"),
    "valid": (lambda: make_trainer().run(3, [1], val_loader=[]), "run takes no argument 'val_loader'.\n  Did you mean 'valid_loader'?"),
    "evaluate": (lambda: make_trainer().evaluate(dataloader=[]), "evaluate takes no argument 'dataloader'.\n  Did you mean 'data'?"),
    "typing error": (lambda: make_trainer().run(3, [1], resum="auto"), "run takes no argument 'resum'.\n  Did you mean 'resume'?"),
    "one is missing": (lambda: make_trainer().run(5), "run needs 'loader'.\n  For example: run(5, loader)."),
    "all are missing": (lambda: make_trainer().run(), "run needs 'n_epoch' and 'loader'.\n  For example: run(n_epoch, loader)."),
    "by name": (lambda: make_trainer().run(n_epoch=5), "run needs 'loader'.\n  For example: run(n_epoch=5, loader)."),
    "twice": (
        lambda: make_trainer().run(5, [1], n_epoch=3),
        "run was given 'n_epoch' twice.\n  Give it by position or by name.",
    ),
    "too many": (
        lambda: make_trainer().run(5, [1], None, "auto"),
        "run: too many positional arguments.\n  Give resume=... and without=... and notify=... and background=... by name.",
    ),
    "by name alone": (lambda: place(5, cpus=4), "place needs 'where'.\n  For example: place(5, where=where)."),
    "constructor": (lambda: nbtrain.Trainer(), "Trainer needs 'model'.\n  For example: Trainer(model)."),
    "constructor, run's": (
        lambda: make_trainer(max_epochs=3),
        "Regress takes no argument 'max_epochs'.\n  Use run(n_epoch=...).",
    ),
    "command": (
        lambda: make_trainer(nbtrain.Trainer.add_on(nbtrain.StateManagerAddon), save_path="runs").load_state(filename="x"),
        "load_state takes no argument 'filename'.\n  Known are: path, without.",
    ),
}


@pytest.mark.parametrize(("call", "text"), CALLS.values(), ids=CALLS)
def test_call_that_does_not_fit_is_refused_with_what_was_meant(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(OptionError) as error:
        call()
    assert str(error.value) == text and isinstance(error.value, TypeError)


# -- values, which their owners check
VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "seed of 70 bits": (
        lambda: make_trainer(seed=2**70),
        "seed must be an integer or None, got 1180591620717411303424.\n  An integer must have at most 64 bits.",
    ),
    "monitor": (lambda: make_trainer(monitor=None), "monitor must be a string, got None."),
    "quotes": (
        lambda: make_trainer(gradient_clip="1"),
        "gradient_clip must be a number or a dict, got '1'.\n  Leave out the quotes: gradient_clip=1.",
    ),
    "class of a callback": (
        lambda: make_trainer(lightning={"callbacks": [nbtrain.Callback]}),
        "lightning['callbacks'][0] must be a Callback, got the class Callback.\n  Give an object of it: Callback(...).",
    ),
    "dict of loaders": (
        lambda: make_trainer().run(1, {"a": make_loader()}),
        "loader must be one loader for training, got a dict.\n"
        "  TaskLoader({...}) reads several by turns, and Lightning's CombinedLoader one batch of each.",
    ),
    "dataset": (
        lambda: make_trainer().run(1, make_loader().dataset),
        "loader must be an iterable, a dict, a LightningDataModule or a LightningModule, got a TensorDataset.\n"
        "  Give a loader of it: DataLoader(dataset, batch_size=32).",
    ),
    "resume": (lambda: make_trainer().run(1, make_loader(), resume=True), "resume must be a string, a Path or None, got True."),
}


@pytest.mark.parametrize(("make", "text"), VALUES.values(), ids=VALUES)
def test_bad_value(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(NbtrainError) as error:
        make()
    assert str(error.value) == text
