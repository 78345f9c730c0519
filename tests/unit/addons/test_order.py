"""The order of addons is declared: it depends neither on names, nor on the order in which they are listed or imported."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from samples import ONE_DEVICE, Regress, make_loader, make_trainer, make_valid, same_weights
from test_addons import ADDONS

from nbtrain import (
    AddOnBase,
    AddOnError,
    CompileAddon,
    GradientClipAddon,
    NeptuneLoggerAddon,
    NonFiniteAddon,
    PrefetchAddon,
    StateManagerAddon,
    StepError,
    SystemMonitorAddon,
    WandBLoggerAddon,
    addons,
)
from nbtrain.addons import HooksAddon, KeptStatesAddon, LiveViewAddon, SourceAddon
from nbtrain.distributed.worker import loads
from nbtrain.distributed.worker_pool import pack
from nbtrain.engine.addon import ordered, precedes

PAIRS = list(itertools.combinations(ADDONS, 2))
SLOW = {CompileAddon, NeptuneLoggerAddon, WandBLoggerAddon}  # a second and more to begin
QUICK = set(random.Random(0).sample([pair for pair in PAIRS if not SLOW & {*pair}], 24))


def every_addon() -> list[type[AddOnBase]]:
    """The classes there are, those of tests included."""
    found, waiting = list[type[AddOnBase]](), [AddOnBase]
    while waiting:
        below = waiting.pop().__subclasses__()
        found += below
        waiting += below
    return found


def renamed(addon: type[AddOnBase], name: random.Random) -> type[AddOnBase]:
    """The same addon under a random name."""
    letters = "".join(name.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=8))
    return type(letters, (addon,), {"__qualname__": letters, "__doc__": addon.__doc__})


def trained(kinds: list[type[AddOnBase]], folder: Path) -> Any:
    options: dict[str, Any] = {}
    for kind in kinds:
        options |= next(make for addon, make in ADDONS.items() if issubclass(kind, addon))(folder)
    trainer = make_trainer(Regress.add_on(*kinds), keep_source=False, lightning={"accumulate_grad_batches": 2}, **options)
    torch.manual_seed(3)
    trainer.run(2, make_loader(40), make_valid(16))
    return trainer


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=() if pair in QUICK else pytest.mark.long, id="-".join(addon.__name__ for addon in pair)) for pair in PAIRS],
)
def test_renamed_addons_in_any_order_train_to_the_same_weights(
    pair: tuple[type[AddOnBase], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(list(pair), tmp_path / "as-they-are")
    chance = random.Random(str(pair))
    kinds = [renamed(addon, chance) for addon in pair]
    shuffled = every_addon()
    chance.shuffle(shuffled)
    for place, kind in enumerate(shuffled):  # as if they had been imported in another order
        monkeypatch.setattr(kind, "_definition", place)
    chance.shuffle(kinds)
    found = trained(kinds, tmp_path / "renamed")
    assert same_weights(expected.model, found.model)
    assert [row["val_loss"] for row in expected.history.epochs] == [row["val_loss"] for row in found.history.epochs]


def test_replica_keeps_the_order_of_its_trainer_in_a_process_that_imports_addons_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [PrefetchAddon, SystemMonitorAddon, GradientClipAddon]
    trainer = make_trainer(Regress.add_on(*kinds), keep_source=False)
    data = pack(trainer)
    for place, kind in enumerate(sorted(every_addon(), key=lambda kind: -kind._definition)):
        monkeypatch.setattr(kind, "_definition", place)
    replica = loads(data)
    assert type(replica).addons != type(trainer).addons
    assert [type(addon) for addon in replica.active_addons] == [type(addon) for addon in trainer.active_addons]


def test_all_addons_that_change_the_loader_declare_their_order() -> None:
    changing = [addon for addon in ADDONS if addon.loader is not AddOnBase.loader]
    assert len(changing) >= 4
    assert all(precedes(*pair) != precedes(*reversed(pair)) for pair in itertools.combinations(changing, 2))


def test_addons_of_gradients_come_in_their_order() -> None:
    names = [addon.__name__ for addon in ordered(random.Random(1).sample(list(ADDONS), len(ADDONS)))]
    order = ("MicroBatch", "Accumulation", "GradientClip", "GradientStats", "Hooks", "NonFinite")
    places = [names.index(f"{name}Addon") for name in order]
    assert places == sorted(places)
    assert names.index("StateManagerAddon") < names.index("PrefetchAddon") and names.index("EMAAddon") < names.index("EarlyStoppingAddon")


class Reversed(AddOnBase):
    def loader(self, trainer: Any, loader: Any, *, training: bool) -> Any:
        return list(reversed(list(loader)))


def test_two_loaders_in_an_undeclared_order_are_refused() -> None:
    with pytest.raises(AddOnError) as caught:
        Regress.add_on(PrefetchAddon, Reversed)
    assert str(caught.value) == (
        "PrefetchAddon and Reversed both change the loader, and neither says which comes first.\n"
        "  Write after = (PrefetchAddon,) in Reversed, or the other way round."
    )

    class Declared(Reversed):
        after = (PrefetchAddon,)

    assert Regress.add_on(Declared, StateManagerAddon, PrefetchAddon).addons == (StateManagerAddon, PrefetchAddon, Declared)
    assert Regress.add_on(Declared, StateManagerAddon).addons == (StateManagerAddon, Declared)  # carried over without Prefetch


# -- a subclass of an addon is that addon
class Manager(StateManagerAddon):
    """Saves as the addon it inherits from."""


class Clip(GradientClipAddon):
    pass


def test_subclass_is_found_as_the_addon_and_resumes(tmp_path: Path) -> None:
    def trainer() -> Any:
        return make_trainer(Regress.add_on(Manager), save_path=tmp_path)

    whole = make_trainer()
    whole.run(3, make_loader(own_generator=True))
    first = trainer()
    first.run(2, make_loader(own_generator=True))
    again = trainer()
    assert again[StateManagerAddon] is again[Manager] and type(again[StateManagerAddon]) is Manager
    assert again.run(3, make_loader(own_generator=True), resume="auto").status == "completed"
    assert len(again.history) == 3 and again.save_state().exists()
    assert same_weights(whole.model, again.model)


def test_shorthand_uses_the_subclass_that_is_there() -> None:
    class Hooks(HooksAddon):
        pass

    class Skips(NonFiniteAddon):
        pass

    trainer = make_trainer(Regress.add_on(Clip, Hooks, Skips), gradient_clip=0.5, nonfinite="skip")
    assert {type(addon) for addon in trainer.active_addons} == {Clip, Hooks, KeptStatesAddon, LiveViewAddon, Skips, SourceAddon}
    assert trainer[GradientClipAddon].gradient_clip == 0.5 and trainer[NonFiniteAddon].nonfinite == "skip"
    trainer.run(1, make_loader())
    assert trainer.history.last["train_grad_norm"] > 0
    assert len(trainer.lr_find(make_loader(), n_batches=10).rates) > 3


def test_addon_beside_its_subclass_is_refused() -> None:
    for kinds in ((Clip, GradientClipAddon), (GradientClipAddon, Clip)):
        with pytest.raises(AddOnError, match="Clip is a GradientClipAddon, and both were given"):
            Regress.add_on(*kinds)
    with pytest.raises(AddOnError, match="Clip is a GradientClipAddon"):
        Regress.add_on(Clip).add_on(GradientClipAddon)


def test_two_siblings_are_told_apart() -> None:
    class Other(GradientClipAddon):
        pass

    trainer = make_trainer(Regress.add_on(Clip, Other), gradient_clip=1.0)
    with pytest.raises(AddOnError, match="has several of GradientClipAddon: Clip and Other"):
        trainer[GradientClipAddon]
    assert type(trainer[Other]) is Other


# -- what addons contribute
class Scaled(AddOnBase):
    """Multiplies the loss, and sees what is inside of it."""

    factor: float = 2.0

    def wrap_step(self, trainer: Any, step: Any) -> Any:
        return lambda batch: {**(found := step(batch)), "loss": found["loss"] * self.factor, "inner": found["loss"].detach()}


class Squared(AddOnBase):
    after = (Scaled,)

    def wrap_step(self, trainer: Any, step: Any) -> Any:
        return lambda batch: {**(found := step(batch)), "loss": found["loss"] ** 2}


def test_steps_are_wrapped_in_the_order_of_the_addons() -> None:
    trainer = make_trainer(Regress.add_on(Squared, Scaled))
    trainer.run(1, make_loader())
    steps = trainer.history.steps["train"]
    assert steps["train_loss"] == pytest.approx([(2 * inner) ** 2 for inner in steps["train_inner"]])


def test_idle_addons_leave_the_step_as_it_is() -> None:
    wrapped: list[bool] = []

    class Looks(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            assert self.module is not None
            wrapped.append(self.module._wrapped_step is not None)
            return super().train_step(batch)

    idle = [
        addon
        for addon in ADDONS
        if addon not in SLOW and addon.__name__ not in ("AccumulationAddon", "HealAddon", "MicroBatchAddon", "SAMAddon")
    ]
    kind = Looks.add_on(*[addon for addon in idle if "save_path" not in addon.__annotations__])
    make_trainer(kind, device=ONE_DEVICE, metrics=()).run(1, make_loader())
    assert wrapped == [False] * 5


def test_wrapped_step_that_returns_nothing_leaves_every_batch_out_and_ends_the_run() -> None:
    class Silent(AddOnBase):
        def wrap_step(self, trainer: Any, step: Any) -> Any:
            return lambda batch: None

    with pytest.raises(StepError, match="All 5 batches of the training pass of epoch 1 were left out"):
        make_trainer(Regress.add_on(Silent)).run(1, make_loader())


class Listens(AddOnBase):
    """Counts what it is asked for, and keeps the events of a run."""

    def __post_init__(self) -> None:
        self.kinds: list[str] = []
        self.asked: list[str] = []

    def sink(self, trainer: Any) -> Any:
        self.asked.append("sink")
        return self

    def update(self, event: Any) -> None:
        self.kinds.append(event.kind)

    def pass_metrics(self, trainer: Any, phase: Any) -> dict[str, float]:
        self.asked.append(phase)
        return {"asked": float(len(self.asked))}

    def configure_model(self, trainer: Any, module: Any) -> None:
        self.asked.append("model")


def test_addon_is_asked_once_a_run_and_once_a_pass() -> None:
    trainer = make_trainer(Regress.add_on(Listens))
    for _ in range(2):
        trainer.run(2, make_loader(), make_valid())
    listens = trainer[Listens]
    assert listens.asked == ["sink", "model", "train", "valid", "train", "valid"] * 2
    assert listens.kinds.count("epoch") == 4 and "steps" in listens.kinds and trainer.recorder.sinks == [trainer.history]
    assert {"train_asked", "val_asked"} <= set(trainer.history.last)


def test_sink_is_closed_when_a_run_fails_also_under_a_lightning_trainer() -> None:
    class Fails(Regress.add_on(Listens)):  # type: ignore[misc]
        def train_step(self, batch: Any) -> dict[str, Any]:
            raise OSError("no")

    trainer = make_trainer(Fails)
    with pytest.raises(OSError):
        trainer.run(1, make_loader())
    assert trainer.recorder.sinks == [trainer.history]
    for _ in range(2):
        with pytest.raises(OSError):
            L.Trainer(**trainer.lightning_args(), max_epochs=1).fit(trainer.as_lightning_module(), make_loader(), make_valid())
    assert trainer.recorder.sinks.count(trainer[Listens]) == 1  # the next run closes what this one left open


def test_option_that_hides_a_method_is_refused() -> None:
    with pytest.raises(AddOnError, match="Hides has an option 'sink', which is a method of every addon"):

        class Hides(AddOnBase):
            sink: int = 1


def test_what_is_named_in_after_is_an_addon_and_so_is_what_that_comes_after() -> None:
    shipped = [kind for name in addons.__all__ if isinstance(kind := getattr(addons, name), type) and issubclass(kind, AddOnBase)]
    known = {base.__name__: base for kind in shipped for base in kind.__mro__ if issubclass(base, AddOnBase)}
    named = [(kind, known[name]) for kind in shipped for name in kind.after if isinstance(name, str)]
    assert len(named) > 5
    assert all(precedes(other, kind) for kind, before in named for other in shipped if precedes(other, before))


@pytest.mark.parametrize(("name", "other"), [("after", "EMAAddon"), ("before", AddOnBase)])
def test_one_addon_where_a_tuple_belongs_is_refused(name: str, other: Any) -> None:
    with pytest.raises(AddOnError, match=rf"Late\.{name} must be a tuple of addons\.\n  Write {name} = \(OtherAddon,\)"):
        type("Late", (AddOnBase,), {name: other})
