"""A trainer is rewound, a step is replayed, a branch is made: what is exact, what is refused, and what stays untouched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from samples import Augmented, Regress, make_loader, make_model, make_trainer, make_valid, same_weights, without_times
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from nbtrain import (
    AccumulationAddon,
    CheckpointError,
    ConfigError,
    ModelTrainer,
    MultiOptimizerTrainer,
    OptionError,
    StateManagerAddon,
    compare,
)
from nbtrain.checkpoint.snapshot import Snapshot
from nbtrain.library.recorded_run import show
from nbtrain.state.kept_states import KeptState, KeptStates


def keeping(**options: Any) -> Any:
    return make_trainer(keep_states=True, **options)


class OneAtATime(Regress):
    """While `in_turn` is on, each batch of two runs waits for a batch of the other one."""

    turns: ClassVar[threading.Barrier | None] = None

    @classmethod
    @contextmanager
    def in_turn(cls) -> Iterator[None]:
        cls.turns = threading.Barrier(2)
        yield
        cls.turns = None

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.turns is not None:
            self.turns.wait(60)
        return super().train_step(batch)


def test_a_trainer_in_a_script_keeps_no_states() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader())
    with pytest.raises(CheckpointError) as error:
        trainer.rewind(epoch=1)
    assert str(error.value) == (
        "No state up to step 5 is in memory.\n"
        "  Make the trainer with keep_states=True, which is the default in a notebook, or save states with StateManagerAddon."
    )


def test_states_change_nothing_in_a_run() -> None:
    plain, kept = make_trainer(seed=3), keeping(seed=3)
    for trainer in (plain, kept):
        trainer.run(2, make_loader(), make_valid())
    assert same_weights(plain.model, kept.model)
    assert without_times(plain.history.epochs) == without_times(kept.history.epochs)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_replay_gets_the_augmented_batch_that_was_trained_on(n_workers: int) -> None:
    seen: list[Tensor] = []

    class Looking(Regress):
        is_looking = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.is_looking:
                seen.append(batch[0].clone())
            return super().train_step(batch)

    trainer = keeping(kind=Looking)
    trainer.is_looking = True
    trainer.run(2, DataLoader(Augmented(), 16, shuffle=True, num_workers=n_workers))
    losses = trainer.history.steps["train"]["train_loss"]  # with dropout
    for step in (1, 7, 10):
        found = trainer.replay(step)
        assert torch.equal(found.batch[0], seen[step - 1]) and found.loss == losses[step - 1]


def test_a_replay_leaves_the_trainer_and_the_random_numbers_as_they_are() -> None:
    a, b = keeping(seed=1), keeping(seed=1)
    loaders = make_loader(own_generator=True), make_loader(own_generator=True)
    for trainer, loader in zip((a, b), loaders):
        torch.manual_seed(5)
        trainer.run(1, loader)
        if trainer is a:
            assert trainer.replay(3).updates.keys() == {"0", "3"}
            assert not trainer.blame(3, n=2).samples[0].is_wrong
        trainer.run(1, loader)
    assert same_weights(a.model, b.model)


def test_blame_shows_a_label_and_a_gradient_and_no_prediction_that_the_step_did_not_return() -> None:
    class Silent(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": super().train_step(batch)["loss"]}

    trainer = keeping(kind=Silent)
    trainer.run(1, make_loader())
    gallery = trainer.blame(2, n=2)
    sample = gallery.samples[0]
    assert sample.output is None and sample.words.startswith("is ") and "predicted" not in sample.words
    assert repr(gallery).splitlines()[2].split()[1] == "–"


def test_replay_names_its_table() -> None:
    trainer = keeping()
    trainer.run(1, make_loader())
    shown = trainer.replay(2)._repr_html_()
    assert ">Outputs, gradients and updates by layer</caption>" in shown and "Metrics by epoch" not in shown


def test_rewind_to_the_best_epoch_drops_what_came_after() -> None:
    trainer = keeping()
    trainer.run(3, make_loader())
    best = trainer.history.best["epoch"]
    found = trainer.rewind("best")
    assert (found.epoch, len(trainer.history.epochs)) == (best, best)
    assert trainer.history.marks == []  # it waits for the next run
    trainer.run(1, make_loader())
    assert [text for _, text in trainer.history.marks] == [f"rewound to the end of epoch {best}, step {5 * best}"]


def test_rewind_to_a_step_of_several_batches_is_to_the_end_of_its_window() -> None:
    trainer = keeping(kind=Regress.add_on(AccumulationAddon), accumulate=2)
    trainer.run(1, make_loader())
    assert list(trainer.history.steps["train"].steps) == [1, 1, 2, 2, 3]
    assert (trainer.rewind(step=2).n_recomputed, trainer.counts.step, trainer.counts.processed) == (4, 2, 4)


def test_rewind_to_the_last_step_of_an_epoch_is_to_its_end() -> None:
    trainer = validated()
    expected = without_times(trainer.history.epochs)
    assert repr(trainer.rewind(step=5)).startswith("Rewound to the end of epoch 1, step 5")
    trainer.states.memory.states = trainer.states.memory.states[:1]
    trainer.run(1, make_loader(), make_valid())
    trainer.rewind(step=5)
    assert without_times(trainer.history.epochs) == expected[:1] and trainer.history.validations[-1] is trainer.history.epochs[0]


def test_a_step_within_a_batch_that_makes_several_updates_names_the_nearest_ones() -> None:
    class Twice(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.layer = False, nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer: Any = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                loss = (self.layer(batch[0]) - batch[1]).square().mean()
                self.manual_backward(loss)
                optimizer.step()
            self.log("train_loss", loss, on_step=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer: Any = ModelTrainer.from_lightning(Twice(), device="cpu", keep_states=True, log_bar=False)
    trainer.run(1, make_loader())
    assert list(trainer.history.steps["train"].steps) == [2, 4, 6, 8, 10] and trainer.history.epochs[0]["step"] == 10
    with pytest.raises(ConfigError) as error:
        trainer.rewind(step=3)
    assert str(error.value) == "Step 3 is within a batch, which makes the updates 3 to 4.\n  Give step 2 or 4."
    assert trainer.replay(3).place == trainer.replay(4).place == "epoch 1, batch 2"
    assert trainer.rewind(step=4).batch == 2


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({}, 'No place was given.\n  Give one of epoch=3, step=1200 and "best".'),
        ({"epoch": 1, "step": 2}, 'epoch and step was given.\n  Give one of epoch=3, step=1200 and "best".'),
        ({"epoch": 7}, "There is no epoch 7: 1 are finished.\n  Give 0 for the start, 1, 2, …"),
        ({"step": 99}, "There is no step 99 yet: 5 updates are done.\n  Give a step from 0 to 5."),
    ],
)
def test_a_place_that_does_not_exist_is_named(place: dict[str, int], text: str) -> None:
    trainer = keeping()
    trainer.run(1, make_loader())
    with pytest.raises(ConfigError) as error:
        trainer.rewind(**place)
    assert str(error.value) == text


def test_a_step_behind_a_change_by_hand_is_reached_from_the_state_after_it() -> None:
    class Slowing(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.step == 6:
                self.set(lr=0.001)
            return super().train_step(batch)

    trainer = keeping(kind=Slowing)
    loader = make_loader()
    trainer.run(3, loader)
    expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert trainer.rewind(step=9).n_recomputed <= 2
    trainer.run(2, loader)
    assert all(torch.equal(value, expected[name]) for name, value in trainer.model.state_dict().items())


def test_set_after_a_rewind_scales_the_schedule_of_the_run_that_continues() -> None:
    trainer = keeping(scheduler=lambda step: 0.01 * 0.9**step)
    trainer.run(2, make_loader())
    trainer.rewind(epoch=1)
    trainer.set(lr=trainer.optimizer.param_groups[0]["lr"] / 10)
    trainer.run(1, make_loader())
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.001 * 0.9**10)


def test_a_shorter_run_after_a_rewind_keeps_the_plan_of_the_first() -> None:
    def factory(optimizer: Any, plan: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=plan.total_steps)

    whole, rewound = keeping(scheduler=factory, seed=1), keeping(scheduler=factory, seed=1)
    loaders = make_loader(own_generator=True), make_loader(own_generator=True)
    whole.run(4, loaders[0])
    rewound.run(4, loaders[1])
    rewound.rewind(epoch=1)
    rewound.run(2, loaders[1])
    assert without_times(rewound.history.epochs) == without_times(whole.history.epochs[:3])


def test_a_paused_run_is_replayed_and_then_rewound() -> None:
    reached, go = threading.Event(), threading.Event()

    class Waiting(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if self.counts.step == 7 and threading.current_thread() is self.control.thread and not reached.is_set():
                reached.set()
                go.wait(60)
            return super().train_step(batch)

    trainer = keeping(kind=Waiting)
    handle = trainer.run(100, make_loader(), background=True)
    assert reached.wait(60)
    handle.pause()
    go.set()
    trainer.control.wait_settled()
    assert trainer.replay(6).step == 6
    assert trainer.rewind(epoch=1).epoch == 1
    assert trainer.control.state == "idle"
    assert trainer.run(1, make_loader()).status == "completed"


def test_a_run_with_a_state_manager_is_rewound_from_memory(tmp_path: Path) -> None:
    trainer = keeping(kind=Regress.add_on(StateManagerAddon), save_path=tmp_path)
    loader = make_loader()
    trainer.run(3, loader, make_valid())
    expected = without_times(trainer.history.epochs)
    trainer.rewind(step=7)
    trainer.run(2, loader, make_valid())
    assert without_times(trainer.history.epochs) == expected


def test_a_saved_state_serves_where_memory_has_none(tmp_path: Path) -> None:
    trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path)
    loader = make_loader()
    trainer.run(3, loader)
    expected = without_times(trainer.history.epochs)
    assert repr(trainer.rewind(epoch=2)).startswith("Rewound to the end of epoch 2, step 10 · run() continues from here")
    trainer.run(1, loader)
    assert without_times(trainer.history.epochs) == expected


def test_what_is_outside_of_the_trainer_is_named() -> None:
    class Outside(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            global n_outside
            n_outside = 1
            return super().train_step(batch)

    trainer = keeping(kind=Outside)
    trainer.run(1, iter([*make_loader()]))
    assert trainer.rewind(epoch=0).notes == (
        "the loader is an iterator, which can be read once, and its place is not kept",
        "n_outside is outside of the trainer, and stays as it is",
    )


def test_a_branch_has_its_own_folder_and_show_prints_the_tree(tmp_path: Path) -> None:
    trainer = keeping(save_path=tmp_path, monitor="train_loss", keep_source=False)
    trainer.run(2, make_loader(own_generator=True))
    made = trainer.branch(epoch=1, lr=0.1)
    made.run(1, make_loader(own_generator=True))
    again = made.branch(step=7)
    again.run(1, make_loader(own_generator=True))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["run-001", "run-001-b1", "run-001-b1-b1"]
    tree = show(tmp_path / "run-001").partition("Tree\n")[2].splitlines()[:3]
    words = [line.partition(" · ")[0].split() for line in tree]
    assert [" ".join(found) for found in words] == [
        "run-001 2 epochs",
        "└─ run-001-b1 from epoch 1, step 5: lr 0.01 → 0.1",
        "└─ run-001-b1-b1 from epoch 1, step 7",
    ]
    assert compare(trainer, made).tree() == compare(tmp_path / "run-001", tmp_path / "run-001-b1").tree()


def test_a_branch_refuses_an_option_that_the_optimizer_does_not_have() -> None:
    trainer = keeping()
    trainer.run(1, make_loader())
    with pytest.raises(OptionError, match="^Adam has no option 'rate'"):
        trainer.branch(epoch=1, rate=1.0)


def test_a_branch_can_have_other_steps() -> None:
    class Doubled(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            found = super().train_step(batch)
            return found | {"loss": 2 * found["loss"]}

    trainer = keeping()
    trainer.run(1, make_loader())
    made = trainer.branch(epoch=0, steps=Doubled)
    made.run(1, make_loader())
    assert (made.title, trainer.title, made.origin.fork.words) == ("Doubled", "Regress", "steps Doubled")


def test_two_branches_that_run_at_once_equal_themselves_alone() -> None:
    trainer, loaders = (
        make_trainer(OneAtATime, model=nn.Linear(8, 1), keep_states=True),
        [make_loader(own_generator=True) for _ in range(5)],
    )
    trainer.run(1, loaders[0])
    alone = [trainer.branch(epoch=1, lr=lr) for lr in (0.1, 0.001)]
    for made, loader in zip(alone, loaders[1:3]):
        made.run(4, loader)
    at_once = [trainer.branch(epoch=1, lr=lr) for lr in (0.1, 0.001)]
    with OneAtATime.in_turn():
        handles = [made.run(4, loader, background=True) for made, loader in zip(at_once, loaders[3:])]
        assert [handle.wait(60).status for handle in handles] == ["completed", "completed"]
    for one, other in zip(alone, at_once):
        assert one.counts.epoch == 5 and same_weights(one.model, other.model)
        assert without_times(one.history.epochs) == without_times(other.history.epochs)
    assert not same_weights(*(made.model for made in at_once))


def test_debug_names_the_backward_pass_where_only_its_gradient_is_not_finite() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).abs().sqrt() + x

    trainer = keeping(model=nn.Sequential(make_model(), Root()), nonfinite="ignore")
    trainer.run(1, make_loader())
    assert "the backward pass is not" in str(trainer.replay(1).debug())


def test_debug_points_to_the_step_before_where_the_weights_are_not_finite() -> None:
    trainer = keeping(nonfinite="ignore", optimizer=lambda params: torch.optim.SGD(params, lr=1e30))
    trainer.run(1, make_loader())
    assert str(trainer.replay(5).debug()) == ("0.weight is not finite before this step: look at the training step before, replay(step=4).")


def validated(**options: Any) -> Any:
    """Two epochs of 5 updates and 3 validation batches."""
    trainer = keeping(nonfinite="ignore", **options)
    trainer.run(2, make_loader(), make_valid())
    assert [(row["step"], row["processed"]) for row in trainer.history.epochs] == [(5, 8), (10, 16)]
    return trainer


def test_debug_points_to_the_training_step_before_a_validation() -> None:
    trainer = validated(optimizer=lambda params: torch.optim.SGD(params, lr=1e30))
    text = str(trainer.replay(6).debug())
    assert text == "0.weight is not finite before this step: look at the training step before, replay(step=5)."
    assert trainer.replay(5).place == "epoch 1, batch 5"


def test_debug_says_that_weights_were_not_finite_at_the_start() -> None:
    model = make_model()
    nn.init.constant_(next(model.parameters()), float("nan"))
    assert str(validated(model=model).replay(1).debug()) == "0.weight is not finite before this step: it was so at the start."


def test_each_step_is_a_training_step_and_others_are_named() -> None:
    trainer = validated()
    assert [row["step"] for row in trainer.history.steps["train"]] == list(range(1, 11))
    assert [trainer.replay(step=step).place for step in (5, 6)] == ["epoch 1, batch 5", "epoch 2, batch 1"]
    for step in (0, 11, 17):
        with pytest.raises(ConfigError) as error:
            trainer.replay(step=step)
        assert str(error.value) == f"There is no step {step}: 10 updates are done.\n  Give a step of history.steps['train']."
    assert trainer.rewind(step=6).place == "batch 1 of epoch 2, step 6"


class Unsized:
    """Batches whose number is not known before they were read."""

    def __iter__(self) -> Iterator[Any]:
        yield from make_loader(shuffle=False)


@pytest.mark.parametrize(
    "make", [make_loader, Unsized, lambda: list(make_loader()), lambda: StatefulDataLoader(Augmented(), 16, shuffle=True)]
)
@pytest.mark.parametrize("valid", [None, make_valid()])
def test_an_epoch_whose_state_is_not_kept_is_rewound_to_its_end(make: Callable[[], Any], valid: Any) -> None:
    trainer = keeping(model=make_model())
    trainer.run(3, make(), valid)
    first = deepcopy(trainer.model)
    trainer.states.memory.states[1:] = []
    found = trainer.rewind(epoch=1)
    assert (found.epoch, found.batch) == (1, None) and found.n_recomputed > 0
    trainer.run(2, make(), valid)
    assert trainer.counts.epoch == 3 and same_weights(trainer.model, first)


def test_memory_of_ten_thousand_epochs_is_bounded_by_the_budget() -> None:
    kept, step = KeptStates(budget=50_000), 0
    for epoch in range(10_001):
        step = 7 * epoch
        kept.add(KeptState(1, epoch, step, step, None, 10_000, epoch == 0, Snapshot({}), ([], None), n_bytes=1000), best=7 * 4321)
        assert kept.n_bytes <= 50_000
    steps = [state.step for state in kept.states]
    assert steps[0] == 0 and 7 * 4321 in steps and steps[-3:] == [step - 14, step - 7, step]
    gaps = [(step - early, late - early) for early, late in zip(steps, steps[1:])]
    assert all(gap <= max(age, 7) for age, gap in gaps)


def test_a_state_larger_than_half_of_the_memory_leaves_only_the_newest() -> None:
    kept = KeptStates(budget=100)
    for step in range(5):
        kept.add(KeptState(1, step, step, step, None, 9, step == 0, Snapshot({}), ([], None), n_bytes=600))
    assert [state.step for state in kept.states] == [4]


def test_a_step_behind_a_change_between_rewind_and_run_is_recomputed_with_it() -> None:
    trainer = keeping()
    loader = make_loader()
    trainer.run(2, loader)
    trainer.rewind(step=7)
    trainer.set(lr=0.001)
    trainer.run(1, loader)
    expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    kept = trainer.states.memory
    kept.states = [state for state in kept.states if state.step in (0, 7)]  # the start, and the one that the change was made in
    assert trainer.rewind(step=9).n_recomputed == 2
    trainer.run(1, loader)
    assert all(torch.equal(value, expected[name]) for name, value in trainer.model.state_dict().items())


def test_a_rewind_into_an_earlier_run_is_followed_by_the_same_runs() -> None:
    whole, rewound = keeping(seed=1), keeping(seed=1)
    for trainer in (whole, rewound):
        loader = make_loader(own_generator=True)
        trainer.run(2, loader, make_valid())
        trainer.run(3, loader)
        if trainer is rewound:
            trainer.rewind(epoch=1)
            trainer.run(1, loader, make_valid())
            trainer.run(3, loader)
    assert same_weights(whole.model, rewound.model)
    assert without_times(whole.history.epochs) == without_times(rewound.history.epochs)


def _ends_again(trainer: Any, loader: Any, step: int, n_left: int) -> bool:
    """Rewind to `step`, train `n_left` epochs, and compare with the weights from before."""
    expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.rewind(step=step)
    trainer.run(n_left, loader)
    return all(torch.equal(value, expected[name]) for name, value in trainer.model.state_dict().items())


def test_a_model_that_computes_its_loss_is_rewound_and_replayed() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
            return {"loss": (self.net(x) - labels).square().mean()}

    trainer = make_trainer(ModelTrainer, model=Own(), keep_states=True)
    loader = [{"x": x, "labels": y} for x, y in make_loader(shuffle=False)]
    trainer.run(2, loader)
    assert trainer.replay(3).updates.keys() == {"net.0", "net.3"}
    assert _ends_again(trainer, loader, 7, 1)


def test_several_optimizers_are_rewound_and_replayed() -> None:
    class Two(MultiOptimizerTrainer):
        def train_step_first(self, batch: Any) -> dict[str, Any]:
            model: Any = self.model
            return {"loss": (model["first"](batch[0]) - batch[1]).square().mean()}

        def train_step_second(self, batch: Any) -> dict[str, Any]:
            model: Any = self.model
            return {"loss": (model["second"](batch[0]) - model["first"](batch[0]).detach()).square().mean()}

    model = nn.ModuleDict({"first": make_model(1), "second": make_model(2)})
    optimizers = {name: lambda params: torch.optim.Adam(params, lr=1e-2) for name in ("first", "second")}
    trainer: Any = Two(model, "cpu", optimizers=optimizers, log_bar=False, keep_states=True)
    loader = make_loader()
    trainer.run(2, loader)
    assert torch.equal(trainer.replay(8).batch[0], trainer.replay(8).batch[0])
    assert _ends_again(trainer, loader, 7, 1)


@pytest.mark.parametrize("keep_states", [True, False], ids=["in memory", "on disk"])
def test_schedule_of_a_factory_goes_on_after_a_rewind(tmp_path: Path, keep_states: bool) -> None:
    options: dict[str, Any] = {"scheduler": lambda optimizer, plan: LambdaLR(optimizer, lambda step: 1 / (1 + step)), "seed": 0}
    options |= {"save_path": tmp_path, "keep_states": keep_states}
    trainer = make_trainer(Regress.add_on(StateManagerAddon), **options)
    trainer.run(4, make_loader())
    expected = [row["lr"] for row in trainer.history.epochs], [value.clone() for value in trainer.model.state_dict().values()]
    trainer.rewind(epoch=2)
    trainer.run(2, make_loader())
    assert [row["lr"] for row in trainer.history.epochs] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.state_dict().values(), expected[1]))


class Writes(L.Callback):
    """Writes a line for each batch."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        with self.file.open("a") as file:
            file.write(f"{trainer.global_step}\n")


@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # of the second run
def test_a_rewind_into_an_epoch_saves_no_file_again_and_says_which_callbacks_it_calls(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(keep_states=True, lightning={"callbacks": [saves, LambdaCallback(), Writes(tmp_path / "lines")]})
    trainer.run(2, make_loader())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.ckpt")}
    end = [value.clone() for value in trainer.model.state_dict().values()]
    found = trainer.rewind(step=8)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.ckpt")} == before and len(before) == 10
    assert found.called == ("LambdaCallback", "Writes") and "written twice: LambdaCallback, Writes" in repr(found)
    trainer.run(1, make_loader())
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.state_dict().values(), end))
    assert trainer.rewind(epoch=0).called == ()


def test_an_evaluation_between_rewind_and_run_changes_nothing_of_the_training() -> None:
    found = []
    for evaluates in (False, True):
        trainer = make_trainer(keep_states=True)
        trainer.run(3, make_loader(), make_valid())
        trainer.rewind(step=7)
        origin = dict(vars(trainer.origin))
        if evaluates:
            trainer.evaluate(make_valid())
        assert vars(trainer.origin) == origin and origin["continues"]
        trainer.run(3, make_loader(), make_valid())
        state = trainer.train_state
        found.append((state.first_epoch, trainer.counts.epoch, trainer.origin.is_over, trainer.history.last["val_loss"]))
    assert found[0] == found[1]
