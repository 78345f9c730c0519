"""What nbtrain asks of addons, each answered by an addon that a user writes in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import lightning as L
import pytest
import torch
from samples import DEVICE, Regress, make_loader, make_model, make_trainer, make_valid

from nbtrain import AddOnBase, AddOnError, ConfigError, MultiOptimizerTrainer, OptionError, StateManagerAddon, StepError
from nbtrain.addons import LiveViewAddon
from nbtrain.engine.addon import StateService, ViewService
from nbtrain.events import Event
from nbtrain.state.addon import KeptStatesAddon
from nbtrain.tools.scratch_trainer import scratch_trainer


class Manual(Regress):
    automatic_optimization = False


class Alternating(MultiOptimizerTrainer, Regress):
    def train_step_0(self, batch: Any) -> dict[str, Any]:
        return super().train_step(batch)


class Bare(AddOnBase):
    excludes = frozenset({"by_hand", "several_optimizers"})


def test_addon_is_refused_where_it_does_not_work() -> None:
    with pytest.raises(ConfigError, match=r"Manual has automatic_optimization = False, which does not work with Bare\."):
        make_trainer(Manual.add_on(Bare))
    with pytest.raises(ConfigError, match=r"Several optimizers can't train with Bare\."):
        Alternating.add_on(Bare)(make_model(), "cpu", optimizers={"0": torch.optim.Adam})
    assert make_trainer(Regress.add_on(Bare)).run(1, make_loader()).status == "completed"


class Zeroed(L.Callback):
    """Makes all gradients zero."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class ZeroAddon(AddOnBase):
    shapes_updates = True

    def callbacks(self, trainer: Any) -> list[L.Callback]:
        return [Zeroed()]


class OtherAddon(ZeroAddon):
    shapes_updates = False


def _plain_model() -> torch.nn.Module:
    first, relu, _, last = make_model()
    return torch.nn.Sequential(first, relu, last)


def test_learning_rates_are_tried_with_the_addons_that_change_gradients() -> None:
    kinds = {"none": Regress, "zero": Regress.add_on(ZeroAddon), "other": Regress.add_on(OtherAddon)}
    trainers = {name: make_trainer(kind, model=_plain_model()) for name, kind in kinds.items()}
    loader = make_loader(shuffle=False)
    losses = {name: trainer.lr_find(loader, n_batches=20).losses for name, trainer in trainers.items()}
    assert losses["other"] == losses["none"] != losses["zero"]
    assert losses["zero"][:5] == losses["zero"][5:10]  # nothing is learned


class EvenAddon(AddOnBase):
    width: int = 2

    def check(self, trainer: Any) -> None:
        if trainer.model[0].in_features % self.width:
            raise ConfigError(f"width={self.width} does not fit the model.", remedy="Give 1, 2, 4 or 8.")


def test_addon_checks_its_options_when_the_trainer_is_made() -> None:
    assert make_trainer(Regress.add_on(EvenAddon), width=4)[EvenAddon].width == 4
    with pytest.raises(ConfigError, match=r"width=3 does not fit the model\."):
        make_trainer(Regress.add_on(EvenAddon), width=3)


class Silent(AddOnBase):
    def adds_metrics(self, trainer: Any) -> bool:
        return False


@pytest.mark.parametrize(("addon", "n_epochs"), [(AddOnBase, 0), (Silent, 0), (EvenAddon, 1)])
def test_wrong_monitor_is_refused_before_epoch_1_where_no_addon_adds_metrics(addon: type[AddOnBase], n_epochs: int) -> None:
    kind = Regress if addon is AddOnBase else Regress.add_on(addon)
    trainer = make_trainer(kind, monitor="val_maee", monitor_mode="min")
    with pytest.raises(ConfigError, match="val_maee"):
        trainer.run(3, make_loader(), make_valid())
    assert trainer.counts.epoch == n_epochs


class Stream:
    """Batches without a length; notes which are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for i in range(10):
            self.read.append(i)
            yield torch.ones(2, 8), torch.ones(2, 1)


class ShortAddon(AddOnBase):
    """Epochs of two batches."""

    def lightning_args(self, trainer: Any) -> dict[str, Any]:
        return {"limit_train_batches": 2}


class ContinuedAddon(ShortAddon):
    def continues_streams(self, trainer: Any) -> bool:
        return True


@pytest.mark.parametrize(("addon", "expected"), [(ShortAddon, [0, 1, 0, 1]), (ContinuedAddon, [0, 1, 2, 3])])
def test_stream_continues_where_an_addon_says_so(addon: type[AddOnBase], expected: list[int]) -> None:
    loader = Stream()
    make_trainer(Regress.add_on(addon)).run(2, loader)
    assert loader.read == expected


class ThreeAddon(AddOnBase):
    """Ends a run after three updates, and then makes the weights zero."""

    ended: int = 0

    def lightning_args(self, trainer: Any) -> dict[str, Any]:
        return {"max_steps": 3}

    def max_updates(self, trainer: Any) -> int | None:
        return 3

    def end_run(self, trainer: Any) -> None:
        self.ended += 1


class FourAddon(AddOnBase):
    def max_updates(self, trainer: Any) -> int | None:
        return 4


def test_resumed_run_is_over_after_the_updates_of_an_addon(tmp_path: Path) -> None:
    kind = Regress.add_on(ThreeAddon, FourAddon, StateManagerAddon)
    first, again = make_trainer(kind, save_path=tmp_path), make_trainer(kind, save_path=tmp_path)
    assert first.run(4, make_loader()).status == "stopped" and first[ThreeAddon].ended == 0
    again.run(4, make_loader(), resume="auto")
    assert again.current_step == 3 and not again.origin.is_restored and again[ThreeAddon].ended == 1


class StrictAddon(AddOnBase):
    def refuses_nonfinite(self, trainer: Any) -> bool:
        return True


@pytest.mark.skipif(DEVICE != "cpu", reason="the loss is read on the CPU alone")
def test_run_pauses_before_a_loss_that_is_not_finite_where_an_addon_refuses_it() -> None:
    loader = [(torch.ones(2, 8), torch.full((2, 1), y)) for y in (0.0, torch.nan)]
    assert make_trainer(nonfinite="ignore", on_error="pause").run(1, loader).status == "completed"
    trainer = make_trainer(Regress.add_on(StrictAddon), nonfinite="ignore", on_error="pause")
    with pytest.raises(StepError, match=r"The training loss is nan\."):
        trainer.run(1, loader)
    assert trainer.control.state == "paused" and trainer.current_step == 1
    assert trainer.resume(skip=True).status == "completed"


class FirstFacts(AddOnBase):
    def facts(self, trainer: Any) -> dict[str, Any]:
        return {"balanced": True, "sampler": "first"}


class SecondFacts(AddOnBase):
    after = (FirstFacts,)

    def facts(self, trainer: Any) -> dict[str, Any]:
        return {"sampler": "second"}


def test_header_has_the_facts_of_all_addons() -> None:
    class Starts:
        header: dict[str, Any] = {}

        def update(self, event: Event) -> None:
            if event.kind == "start":
                self.header = event.data

    seen = Starts()
    trainer = make_trainer(Regress.add_on(SecondFacts, FirstFacts))
    trainer.recorder.add(seen)
    trainer.run(1, make_loader())
    assert (seen.header["balanced"], seen.header["sampler"], seen.header["accumulate"]) == (True, "second", 1)


class PostAddon(AddOnBase):
    """Posts what a run reaches somewhere."""

    def in_scratch(self) -> None:
        return None


class LoudAddon(AddOnBase):
    loud: bool = True

    def in_scratch(self) -> LoudAddon:
        return LoudAddon(loud=False)


def test_copy_that_shows_nothing_has_what_addons_give_it() -> None:
    trainer = make_trainer(Regress.add_on(PostAddon, LoudAddon, ZeroAddon))
    with scratch_trainer(trainer) as copy:
        assert PostAddon not in map(type, copy.active_addons) and isinstance(copy[ZeroAddon], ZeroAddon)
        assert (copy[LoudAddon].loud, trainer[LoudAddon].loud) == (False, True)


class OwnStates(KeptStatesAddon):
    """Finds states in a separate place."""

    def __post_init__(self) -> None:
        self.asked: list[Any] = []

    def find(self, trainer: Any, resume: Any) -> None:
        self.asked.append(resume)


class MoreStates(KeptStatesAddon):
    pass


def test_an_addon_of_a_user_keeps_the_states() -> None:
    trainer = make_trainer(Regress.add_on(OwnStates))
    assert trainer.run(1, make_loader(), resume="auto").status == "completed"
    assert trainer[OwnStates].asked == ["auto"] and not trainer.origin.is_restored
    with pytest.raises(ConfigError, match=r"resume=: Regress has no folder that it saves in\.\n  Make it with save_path="):
        make_trainer(Regress).run(1, make_loader(), resume="auto")
    with pytest.raises(AddOnError, match="OwnStates and MoreStates do the same: each is a StateService"):
        Regress.add_on(OwnStates, MoreStates)

    class Half(AddOnBase, StateService):
        pass

    with pytest.raises(NotImplementedError, match="Half has no resume: write it, or inherit KeptStatesAddon"):
        Half().resume(None, 1, "auto", None)


class Epochs:
    """A sink that keeps which epochs it was told of."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def update(self, event: Event) -> None:
        self.seen += [event.progress.epoch] if event.kind == "epoch" else []


class OwnView(AddOnBase, ViewService):
    def __post_init__(self) -> None:
        self.epochs = Epochs()

    def open(self, trainer: Any, controls: Any, settings: Any) -> list[Any]:
        return [self.epochs]


class BareView(AddOnBase, ViewService):
    """It draws nothing."""


@pytest.mark.parametrize("kind", [OwnView, BareView])
def test_view_of_a_user_takes_the_place_of_nbtrains_and_draws_what_it_likes(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(Regress.add_on(kind), log_bar=True)
    assert trainer.run(2, make_loader(), make_valid()).status == "completed"
    assert LiveViewAddon not in map(type, trainer.active_addons) and trainer.view is None
    assert capsys.readouterr().out == "" and (kind is BareView or trainer[OwnView].epochs.seen == [1, 2])
    trainer.lr_find(make_loader())
    trainer.show()
    assert "2  " in capsys.readouterr().out  # without a view, the history


def test_an_addon_of_a_cell_goes_to_a_worker_and_checks_its_options_there() -> None:
    class OfCell(AddOnBase):
        """Is sent by value."""

        n: int = 1

    sent = cloudpickle.loads(cloudpickle.dumps(OfCell(n=2)))
    assert sent.n == 2
    with pytest.raises(OptionError, match="takes no option 'm'"):
        type(sent)(m=1)


def test_addon_without_options_lists_none() -> None:
    class Plain(AddOnBase):
        pass

    with pytest.raises(OptionError) as found:
        Plain(every_s=1)  # type: ignore[call-arg]
    assert str(found.value) == "Plain takes no option 'every_s'."
