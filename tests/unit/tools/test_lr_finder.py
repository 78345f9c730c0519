"""The range test finds a rate and leaves no trace: not in weights, optimizer, random numbers, loaders, history or files."""

from __future__ import annotations

from copy import deepcopy
from queue import SimpleQueue
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from nbtrain import ConfigError, SeededLoader, StateManagerAddon, StepError, TensorLoader
from nbtrain.rng import random_state
from nbtrain.tools.lr_finder import RangeTest
from tests.samples import (
    Regress,
    make_data,
    make_loader,
    make_model,
    make_trainer,
    make_valid,
    same_content,
    same_weights,
    some,
    without_times,
)


def make_normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


class Counting(nn.Linear):
    """Notes its calls, in an attribute and in a buffer that no state_dict has; it makes a new tensor for it each time."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.n_calls = 0
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        self.mean = 0.9 * self.mean + 0.1 * input.mean(0)
        return super().forward(input - self.mean)


def state(trainer: Any) -> dict[str, Any]:
    """All that a range test could change in a trainer, as a copy."""
    return deepcopy(
        {
            "model": dict(trainer.model.state_dict()),
            "gradients": [p.grad for p in trainer.model.parameters()],
            "training": [part.training for part in trainer.model.modules()],
            "optimizer": trainer.optimizer.state_dict(),
            "random": random_state()["torch"],
            "python": random_state()["python"],
            "counts": vars(trainer.counts),
            "rows": [dict(row) for row in trainer.history.epochs],
            "losses": trainer.loss_history_train,
            "log": dict(trainer.log_train),
            "mode": trainer.mode,
        }
    )


SCHEDULES: dict[str, Any] = {
    "none": lambda optimizer: None,
    "instance": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "function": lambda optimizer: lambda step: 0.01 / (1 + step),
}


@pytest.mark.parametrize("schedule", some(SCHEDULES, 2))
@pytest.mark.parametrize("own_generator", [False, True])
def test_a_range_test_between_two_runs_changes_nothing_of_them(schedule: str, own_generator: bool) -> None:
    results = []
    for find in (False, True):
        model = make_normed()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        trainer = make_trainer(model=model, optimizer=optimizer, scheduler=SCHEDULES[schedule](optimizer), gradient_clip=1.0)
        torch.manual_seed(5)
        loader = make_loader(own_generator=own_generator)
        trainer.run(1, loader, make_valid())
        if find:
            trainer.lr_find(loader, n_batches=30)
        trainer.run(1, loader, make_valid())
        results.append(trainer)
    plain, found = results
    assert same_weights(plain.model, found.model)
    assert without_times(plain.history.epochs) == without_times(found.history.epochs)
    assert same_content(plain.optimizer.state_dict(), found.optimizer.state_dict())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.Adam(params, lr=1e-2),
        lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2), foreach=False, capturable=False),
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
        lambda params: torch.optim.LBFGS(params, lr=1e-2, max_iter=2),
    ],
    ids=["adam", "rate in a tensor", "sgd", "lbfgs"],
)
def test_a_range_test_puts_every_kind_of_optimizer_back(optimizer: Any) -> None:
    trainer = make_trainer(model=make_normed(), optimizer=optimizer)
    trainer.run(1, make_loader())
    before = state(trainer)
    tensors = [id(value) for values in trainer.optimizer.state.values() for value in values.values()]
    trainer.lr_find(make_loader(), n_batches=20)
    assert same_content(before, state(trainer))
    assert tensors == [id(value) for values in trainer.optimizer.state.values() for value in values.values()]


@pytest.mark.parametrize("error", [ValueError("in a step"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
def test_an_error_in_a_range_test_puts_everything_back(error: BaseException) -> None:
    class Failing(Regress):
        n_left = -1

        def train_step(self, batch: Any) -> dict[str, Any]:
            self.n_left -= 1
            if self.n_left == 0:
                raise error
            return super().train_step(batch)

    trainer = make_trainer(Failing, model=make_normed())
    loader = make_loader(own_generator=True)
    trainer.run(1, loader)
    trainer.n_left = 7
    before, generator = state(trainer), loader.generator.get_state()
    with pytest.raises(type(error)):
        trainer.lr_find(loader)
    after = state(trainer)
    assert [key for key in before if not same_content(before[key], after[key])] == []
    assert torch.equal(generator, loader.generator.get_state())
    assert trainer.n_left == 7 and trainer.module is None
    trainer.n_left = -1
    assert trainer.run(1, loader).status == "completed"


def test_modules_that_note_something_note_nothing_of_a_range_test() -> None:
    model = Counting()
    trainer = make_trainer(model=model)
    trainer.run(1, make_loader())
    n_calls, mean = model.n_calls, model.mean
    value = mean.clone()
    trainer.lr_find(make_loader(), n_batches=20)
    assert model.n_calls == n_calls
    assert model.mean is mean and torch.equal(mean, value)


LOADERS: dict[str, Any] = {
    "list": lambda: list(make_loader(shuffle=False)),
    "own generator": lambda: make_loader(own_generator=True),
    "TensorLoader": lambda: TensorLoader(make_data(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "TensorLoader without": lambda: TensorLoader(make_data(), batch_size=16, shuffle=True),
    "SeededLoader": lambda: SeededLoader(make_data(), batch_size=16),
    "two workers": lambda: make_loader(num_workers=2, persistent_workers=True),
    "two at once": lambda: [make_loader(own_generator=True), make_loader(own_generator=True)],
}


def batches_of(loader: Any) -> list[Any]:
    torch.manual_seed(8)
    return [list(part) for part in loader] if isinstance(loader, list) and isinstance(loader[0], DataLoader) else list(loader)


@pytest.mark.parametrize("kind", some(LOADERS, 2))
def test_a_loader_gives_after_a_range_test_what_it_would_have_given(kind: str) -> None:
    class First(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch[0] if len(batch[0]) == 2 else batch)

    loader = LOADERS[kind]()
    make_trainer(First).lr_find(loader, n_batches=12)
    assert same_content(batches_of(loader), batches_of(LOADERS[kind]()))


def test_a_loader_that_was_to_go_on_in_the_middle_still_does() -> None:
    def make_resumed() -> TensorLoader:
        loader = TensorLoader(make_data(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(loader.state_dict())
        return loader

    loader = make_resumed()
    make_trainer().lr_find(loader, n_batches=12)
    assert len(batches := list(loader)) == 4
    assert same_content(batches, list(make_resumed()))


def test_a_range_test_writes_logs_and_calls_nothing(tmp_path: Any) -> None:
    called: list[str] = []

    class Listening(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            called.append("on_train_start")

    logger = CSVLogger(tmp_path / "log")
    lightning = {"callbacks": [Listening()], "logger": logger}
    trainer = make_trainer(Regress.add_on(StateManagerAddon), save_path=tmp_path / "run", lightning=lightning)
    trainer.lr_find(make_loader(), n_batches=10)
    assert called == []
    assert list(tmp_path.iterdir()) == []
    assert trainer.history.epochs == [] and trainer.result is None and trainer.train_state.run == 0


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = [10.0**i for i in range(-6, 2)]
    smoothed = [2.0, 2.0, 1.9, 1.0, 0.4, 0.5, 3.0, 0.1]
    assert RangeTest(rates, smoothed, smoothed[:7], diverged=True).suggestion == 1e-3


def test_a_loss_that_never_falls_gives_no_suggestion() -> None:
    test = RangeTest([1e-3, 1e-2, 1e-1], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], diverged=False)
    assert test.suggestion is None
    assert repr(test) == "RangeTest(suggestion: none, because the loss never fell out of its noise, 3 batches from 0.001 to 0.1)"
    assert test.plot().axes[0].get_xlabel() == "learning rate"


def test_noise_gives_no_suggestion() -> None:
    smoothed = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9]
    losses = [value + noise for value, noise in zip(smoothed, [0.1, -0.1] * 3)]
    assert RangeTest([10.0**i for i in range(-6, 0)], losses, smoothed, diverged=False).suggestion is None


def test_the_rates_grow_by_one_factor_from_start_to_end() -> None:
    test = make_trainer().lr_find(make_loader(), start=1e-6, end=1e-2, n_batches=9 + 4)
    assert test.rates == pytest.approx([10 ** (-6 + i / 3) for i in range(13)])
    assert len(test.losses) == len(test.smoothed) == 13 and not test.diverged


def test_the_first_loss_is_that_of_the_model_as_it_is() -> None:
    model, loader = nn.Linear(8, 1), list(make_loader())
    x, y = loader[0]
    test = make_trainer(model=model).lr_find(loader, n_batches=10)
    assert test.losses[0] == pytest.approx((model.cpu()(x) - y).square().mean().item())


def test_a_test_ends_where_the_loss_explodes() -> None:
    trainer = make_trainer(model=nn.Linear(8, 1), optimizer=lambda params: torch.optim.SGD(params, lr=1e-2))
    test = trainer.lr_find(make_loader(), end=1e4)
    assert test.diverged and len(test.rates) < 95
    assert repr(test).endswith(", where the loss diverged)")
    assert test.suggestion is not None and 1e-3 < test.suggestion < 1


def test_a_loss_that_is_no_number_ends_the_test_and_is_left_out() -> None:
    class Nan(Regress):
        n = 0

        def train_step(self, batch: Any) -> dict[str, Any]:
            self.n += 1
            output = super().train_step(batch)
            return output | {"loss": output["loss"] * float("nan" if self.n > 12 else 1)}

    test = make_trainer(Nan).lr_find(make_loader())
    assert test.diverged and len(test.losses) == 12


def test_further_groups_keep_their_ratio_to_the_first() -> None:
    class Noting(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            seen.put([group["lr"] for group in self.optimizer.param_groups])
            return super().train_step(batch)

    seen: SimpleQueue[list[float]] = SimpleQueue()  # a list would be restored
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[3].parameters(), "lr": 1e-3}]
    make_trainer(Noting, model=model, optimizer=torch.optim.SGD(groups)).lr_find(make_loader(), n_batches=10)
    ratios = [second / first for first, second in (seen.get() for _ in range(seen.qsize()))]
    assert ratios == pytest.approx([0.1] * 10)


def test_gradients_are_clipped_as_in_a_run() -> None:
    steep = [
        make_trainer(model=nn.Linear(8, 1), gradient_clip=clip, optimizer=lambda params: torch.optim.SGD(params, lr=1)).lr_find(
            make_loader(shuffle=False), end=100.0
        )
        for clip in (0.0, 1e-6)
    ]
    assert steep[0].diverged and not steep[1].diverged


def test_small_noisy_losses_are_not_taken_for_an_explosion() -> None:
    class Learnt(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            noise = float(torch.rand(()) ** 8)
            return {"loss": super().train_step(batch)["loss"] * 0 + 0.02 * noise + 0.01}

    assert not make_trainer(Learnt).lr_find(make_loader()).diverged


def test_a_notebook_shows_sentence_and_figure() -> None:
    page = make_trainer().lr_find(make_loader(), n_batches=10)._repr_html_()
    assert page.startswith("<div><code>RangeTest(suggestion: ")
    assert '<img alt="Loss by learning rate"' in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0.0}, "From start=0.0 to end=10.0 no learning rate grows.\n  Give 0 < start < end."),
        ({"start": 1.0, "end": 0.1}, "From start=1.0 to end=0.1 no learning rate grows.\n  Give 0 < start < end."),
        ({"n_batches": 3}, "n_batches=3 are too few to see a curve.\n  Give an integer from 10; 100 is usual."),
    ],
)
def test_numbers_that_make_no_test_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer().lr_find(make_loader(), **options)
    assert str(error.value) == message


def test_mode_test_has_no_rate_to_find() -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer(mode="test").lr_find(make_loader())
    assert str(error.value) == "In mode 'test' nothing is trained, so there is no learning rate to find.\n  Call toggle('train') first."


def test_a_trainer_without_optimizer_has_no_rate_to_find() -> None:
    trainer = make_trainer(mode="test", optimizer=None)
    trainer.toggle("train")
    with pytest.raises(ConfigError, match="Training needs an optimizer."):
        trainer.lr_find(make_loader())


@pytest.mark.parametrize("loader", [[], make_loader(n=3, batch_size=4, drop_last=True, shuffle=False)])
def test_an_empty_loader_is_refused(loader: Any) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer().lr_find(loader)
    assert str(error.value) == "The loader is empty: it has no batch.\n  Look at the dataset's length, and at drop_last=True."


def test_a_loader_without_length_that_gives_nothing_is_refused() -> None:
    class Nothing:
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(StepError, match="The loader gave no batch."):
        make_trainer().lr_find(Nothing())


def test_an_iterator_is_refused_before_a_batch_is_lost() -> None:
    batches = iter(list(make_loader()))
    with pytest.raises(ConfigError) as error:
        make_trainer().lr_find(batches)
    assert str(error.value) == "An iterator can't give its batches twice.\n  Give a DataLoader, a list, or an object with __iter__."
    assert len(list(batches)) == 5


def test_a_step_of_a_run_can_start_no_range_test() -> None:
    class Nested(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            self.lr_find(make_loader())
            return super().train_step(batch)

    with pytest.raises(ConfigError, match="A run of this trainer is on"):
        make_trainer(Nested).run(1, make_loader())
