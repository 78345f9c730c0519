"""Addons given as instances: `Digits.add_on(EMAAddon(ema_decay=0.9))`, beside classes."""

from __future__ import annotations

import gc
import inspect
import itertools
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import DEVICE, Regress, make_loader, make_model, make_trainer, same_weights, without_times

from nbtrain import (
    AddOnBase,
    AddOnError,
    CompileAddon,
    EMAAddon,
    GradientClipAddon,
    ModelTrainer,
    MultiGPUAddon,
    NonFiniteAddon,
    OptionError,
    SchedulerAddon,
    StateManagerAddon,
    WarmUpScheduler,
    addons,
)
from nbtrain.addons import HooksAddon
from nbtrain.code.redefined import with_addons
from nbtrain.engine.addon import chosen_options, options


class Tilt(AddOnBase):
    """Holds something of its run."""

    level: int = 1
    names: list[str] | None = None

    def __post_init__(self) -> None:
        self.seen: list[int] = []


class Depth(AddOnBase):
    """Has an option of the same name."""

    level: int = 2


def test_instance_and_class_stand_together_and_each_has_its_options() -> None:
    trainer = make_trainer(Regress.add_on(Tilt(level=7), EMAAddon), ema_decay=0.5)
    assert (trainer[Tilt].level, trainer[EMAAddon].ema_decay, trainer.title) == (7, 0.5, "Regress")
    assert trainer.run(1, make_loader()).status == "completed"


def test_equal_option_names_of_two_addons_stay_apart() -> None:
    one, two = make_trainer(Regress.add_on(Tilt(level=7), Depth), level=5), make_trainer(Regress.add_on(Tilt(level=7), Depth(level=8)))
    assert (one[Tilt].level, one[Depth].level) == (7, 5) and (two[Tilt].level, two[Depth].level) == (7, 8)
    assert one.given["level"] == 5 and one.given["Tilt.level"] == 7
    assert two.given["level"] == 7 and two.given["Depth.level"] == 8  # the first of them, by the order of addons, has the plain name


def test_each_trainer_has_its_own_copy_and_the_users_object_is_not_kept() -> None:
    mine = Tilt(level=3)
    kind = Regress.add_on(mine)
    mine.level = 4
    one, two = make_trainer(kind), make_trainer(kind)
    one[Tilt].seen.append(1)
    assert one[Tilt] is not two[Tilt] and two[Tilt].seen == [] == kind._addon_instances[Tilt].seen  # type: ignore[attr-defined]
    assert one[Tilt].level == 3


def test_same_options_in_any_order_give_the_same_class() -> None:
    given = [Tilt(level=3), Depth, EMAAddon(ema_decay=0.5)]
    kinds = {Regress.add_on(*order) for order in itertools.permutations(given)}
    kinds |= {Regress.add_on(Tilt(level=3)).add_on(EMAAddon(ema_decay=0.5), Depth).add_on(Tilt)}
    assert len(kinds) == 1
    assert not kinds & {Regress.add_on(Depth, Tilt(level=4), EMAAddon(ema_decay=0.5)), Regress.add_on(Depth, EMAAddon)}


class Listed(AddOnBase):
    given: Any = None


def test_options_that_cannot_be_compared_give_two_classes() -> None:
    one, two = (Regress.add_on(Listed(given=torch.ones(2))) for _ in range(2))
    assert one is not two and one.addons == two.addons


def test_class_with_instances_goes_with_its_last_use() -> None:
    schedule = WarmUpScheduler(torch.optim.SGD(make_model().parameters(), lr=0.1), 4)
    kind, seen = Regress.add_on(SchedulerAddon(scheduler=schedule)), weakref.ref(schedule)
    del schedule, kind
    gc.collect()
    assert seen() is None


def test_option_of_an_instance_by_keyword_says_where_it_was_given() -> None:
    with pytest.raises(OptionError) as error:
        make_trainer(Regress.add_on(Tilt(level=3)), level=4)
    assert str(error.value) == (
        "Regress takes no argument 'level'.\n"
        "  Tilt was given as an instance with its options: pass it there, Regress.add_on(Tilt(level=...))."
    )
    assert "level" not in inspect.signature(Regress.add_on(Tilt(level=3))).parameters


def test_one_addon_with_two_sets_of_options_is_refused() -> None:
    with pytest.raises(AddOnError, match="Regress was given Tilt twice, with different options"):
        Regress.add_on(Tilt(level=3)).add_on(Tilt(level=4))


def test_what_the_trainer_takes_too_is_that_of_the_instance(tmp_path: Path) -> None:
    schedule = lambda step: 0.1  # noqa: E731
    kind = Regress.add_on(
        StateManagerAddon(save_path=tmp_path),
        SchedulerAddon(scheduler=schedule),
        GradientClipAddon(gradient_clip=0.5),
        NonFiniteAddon(nonfinite="skip"),
        CompileAddon(compile=False),
        HooksAddon(hooks={"after_optimizer_step": lambda t: None}),
    )
    trainer = make_trainer(kind)
    assert trainer.save_path == tmp_path and trainer.scheduler is schedule and trainer.given["gradient_clip"] == 0.5
    assert trainer[StateManagerAddon].save_path == tmp_path and trainer[NonFiniteAddon].nonfinite == "skip"
    trainer.run(1, make_loader())
    assert trainer.save_state().exists() and trainer.run_dir is not None and trainer.run_dir.parent == tmp_path


def test_what_an_instance_leaves_open_is_the_trainers() -> None:
    trainer = make_trainer(
        Regress.add_on(GradientClipAddon(gradient_clip_algorithm="value"), CompileAddon()), gradient_clip=2.0, compile=False
    )
    assert (trainer[GradientClipAddon].gradient_clip, trainer[GradientClipAddon].gradient_clip_algorithm) == (2.0, "value")
    assert trainer[CompileAddon].compile is False


def test_two_values_for_one_option_are_refused(tmp_path: Path) -> None:
    kind = Regress.add_on(StateManagerAddon(save_path="one"))
    assert make_trainer(kind, save_path="one").save_path == "one"
    with pytest.raises(OptionError) as error:
        make_trainer(kind, save_path="two")
    assert str(error.value) == ("StateManagerAddon was given save_path='one', and the trainer save_path='two'.\n  Give it in one place.")


def test_default_that_a_class_has_changed_gives_way_to_an_instance() -> None:
    class Clipped(Regress):
        def __init__(self, *args: Any, gradient_clip: float = 1.0, **options: Any) -> None:
            super().__init__(*args, gradient_clip=gradient_clip, **options)

    kind = Clipped.add_on(GradientClipAddon(gradient_clip=0.5))
    assert make_trainer(kind)[GradientClipAddon].gradient_clip == 0.5
    with pytest.raises(OptionError, match="GradientClipAddon was given gradient_clip=0.5, and the trainer gradient_clip=2.0"):
        make_trainer(kind, gradient_clip=2.0)


@pytest.mark.long
def test_devices_of_an_instance_are_the_trainers() -> None:
    model = make_model()
    trainer = Regress.add_on(MultiGPUAddon(device=["cpu", "cpu"]))(model, optimizer=torch.optim.Adam(model.parameters()), log_bar=False)
    assert trainer[MultiGPUAddon].n_processes == 2 and trainer.given["device"] == ["cpu", "cpu"]
    assert trainer.run(1, make_loader()).status == "completed" and trainer.counts.epoch == 1


def test_model_trainer_keeps_what_an_instance_has_given() -> None:
    kind = ModelTrainer.add_on(SchedulerAddon(scheduler=WarmUpScheduler))  # type: ignore[arg-type]
    trainer = kind(make_model(), DEVICE, loss_fn=torch.nn.functional.mse_loss)
    assert trainer.scheduler is WarmUpScheduler is trainer.given["scheduler"]


def test_pickled_trainer_is_of_the_same_class() -> None:
    trainer = make_trainer(Regress.add_on(Tilt(level=4), Depth), level=6)
    trainer.optimizer = None
    trainer[Tilt].seen.append(1)
    copy = pickle.loads(pickle.dumps(trainer))
    assert type(copy) is type(trainer) and (copy[Tilt].level, copy[Tilt].seen, copy[Depth].level) == (4, [1], 6)


def test_instance_and_keywords_train_alike() -> None:
    one = make_trainer(Regress.add_on(EMAAddon(ema_decay=0.5)), seed=1)
    two = make_trainer(Regress.add_on(EMAAddon), seed=1, ema_decay=0.5)
    for trainer in (one, two):
        trainer.run(2, make_loader())
    assert same_weights(one.model, two.model) and without_times(one.history.epochs) == without_times(two.history.epochs)


def test_composed_class_with_commands_is_subclassed_and_extended(tmp_path: Path) -> None:
    class Mine(Regress.add_on(StateManagerAddon(save_path=tmp_path))):  # type: ignore[misc]
        pass

    trainer = make_trainer(Mine.add_on(Tilt(level=2)))
    assert trainer.save_path == tmp_path and trainer[Tilt].level == 2 and trainer.save_state() is not None


def test_resumed_steps_get_the_instances_too() -> None:
    trainer = make_trainer(Regress.add_on(Tilt(level=2)))
    assert with_addons(trainer, Regress) is type(trainer)


SHIPPED = [kind for name in addons.__all__ if isinstance(kind := getattr(addons, name), type)]
SHIPPED = [kind for kind in SHIPPED if issubclass(kind, AddOnBase) and kind.__name__ != "RayAddon"]  # it needs Ray: tests/cluster


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
def test_every_addon_is_copied_with_its_options(kind: type[AddOnBase]) -> None:
    addon = kind(**({"save_path": "runs"} if "save_path" in options(kind) else {}))
    copy: Any = replace(addon)  # type: ignore[type-var]
    assert copy is not addon and chosen_options(copy) == chosen_options(addon)
    assert all(getattr(copy, name) == getattr(addon, name) for name in options(kind))


@pytest.mark.parametrize("kind", [k for k in SHIPPED if k.commands], ids=lambda kind: kind.__name__)
def test_command_without_its_addon_names_the_addon(kind: type[AddOnBase]) -> None:
    trainer = make_trainer()
    for name in kind.commands:
        assert not hasattr(trainer, name) and not hasattr(type(trainer), name)
        with pytest.raises(AttributeError) as error:
            getattr(trainer, name)
        assert str(error.value) == (
            f"Regress has no {name}: it is a command of {kind.__name__}.\n  Make the trainer with Regress.add_on({kind.__name__})."
        )
