"""A window of small batches makes the update of one big batch, in float64 to twelve digits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from samples import DEVICE, Breaks, Broken, Regress, make_loader, make_trainer, make_valid, same_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nbtrain import AccumulationAddon, AggregatedOutputs, GradientClipAddon, StateManagerAddon, Trainer
from nbtrain.addons.accumulation import window_of_samples, window_of_tokens
from nbtrain.errors import ConfigError, StepError

N_IGNORED = -100


class Square(Trainer):
    """`reduce` says what its loss is: a mean or a sum over samples, or a sum over the tokens that count."""

    reduce = "mean"

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        errors = (self.model(x) - y).square()
        if self.reduce == "token":
            counts = (y != N_IGNORED).to(errors.dtype)
            return {"loss": (errors * counts).sum(), "n_tokens": counts.sum()}
        return {"loss": errors.mean() if self.reduce == "mean" else errors.sum()}

    test_step = train_step


class SumSquare(Square):
    reduce = "sum"


class TokenSquare(Square):
    reduce = "token"


def count_tokens(outputs: Sequence[Any], sync_group: Any) -> AggregatedOutputs:
    assert sync_group is None and all(not output["loss"].requires_grad for output in outputs)
    loss_sum, n_tokens = (sum(output[name] for output in outputs) for name in ("loss", "n_tokens"))
    return AggregatedOutputs(loss_sum=loss_sum, num_batches=len(outputs), num_tokens=n_tokens)


def make_data(n: int = 22) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (4, 3))
    y[torch.rand(n, 3, generator=generator) < 0.4] = N_IGNORED
    return x, y


def make_batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    x, y = make_data(sum(sizes))
    return list(zip(x.split(list(sizes)), y.split(list(sizes))))


def make_linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=torch.float64)


def make(kind: type[Trainer], *addons: Any, **options: Any) -> Any:
    options = {"model": make_linear(), "optimizer": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9)} | options
    return make_trainer(kind.add_on(AccumulationAddon, *addons), **options)


def by_hand(kind: type[Square], windows: Sequence[Sequence[tuple[Tensor, Tensor]]], clip: float = 0.0) -> nn.Module:
    """One step for each window, on all its samples as one batch."""
    model = make_linear().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for window in windows:
        x, y = (torch.cat(parts).to(DEVICE) for parts in zip(*window))
        errors = (model(x) - y).square()
        counts = (y != N_IGNORED).to(errors.dtype)
        loss = {"mean": errors.mean(), "sum": errors.sum(), "token": (errors * counts).sum() / counts.sum()}[kind.reduce]
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_equal(left: nn.Module, right: nn.Module) -> None:
    for a, b in zip(left.parameters(), right.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


WAYS: dict[str, tuple[type[Square], dict[str, Any]]] = {
    "mean": (Square, {"grad_reduction": "mean"}),
    "sum": (SumSquare, {"grad_reduction": "sum"}),
    "per-token-mean": (TokenSquare, {"grad_reduction": "per-token-mean", "aggregate_outputs_fn": count_tokens}),
}


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4, 4, 2), (4, 4, 4, 4), (1, 7, 2, 5), (3,)])  # the last window is short, or a batch of it
@pytest.mark.parametrize("way", WAYS)
def test_window_is_one_big_batch(way: str, sizes: tuple[int, ...], clip: float, lean: bool) -> None:
    kind, options = WAYS[way]
    batches = make_batches(*sizes)
    trainer = make(kind, *([GradientClipAddon] if clip else []), accumulate=4, gradient_clip=clip, **options)
    trainer.short_way = lean
    trainer.run(2, batches)
    assert_equal(trainer.model, by_hand(kind, [batches[i : i + 4] for i in range(0, len(batches), 4)] * 2, clip))


def test_full_windows_of_equal_batches_are_lightnings_to_the_bit() -> None:
    ours = make(Square, accumulate=2)
    plain = make_trainer(
        Square, model=make_linear(), lightning={"accumulate_grad_batches": 2}, optimizer=lambda p: torch.optim.SGD(p, 1e-3, 0.9)
    )
    del plain._addons[AccumulationAddon]  # Lightning alone
    for trainer in (ours, plain):
        trainer.run(2, make_batches(4, 4, 4, 4))
    assert same_weights(ours.model, plain.model)


@pytest.mark.parametrize("given", ["argument", "callback"])
@pytest.mark.parametrize("lean", [False, True])
def test_lightnings_own_way_is_right_in_the_last_window_too(lean: bool, given: str) -> None:
    batches = make_batches(4, 4, 4, 2, 4)
    options = {"argument": {"accumulate_grad_batches": 2}, "callback": {"callbacks": [GradientAccumulationScheduler({0: 2})]}}
    for kind in (Square.add_on(AccumulationAddon), Square):
        optimizer = lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9)  # noqa: E731
        trainer = make_trainer(kind, model=make_linear(), optimizer=optimizer, lightning=options[given])
        trainer.short_way = lean
        trainer.run(1, batches)
        assert_equal(trainer.model, by_hand(Square, [batches[:2], batches[2:4], batches[4:]]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "per-token-mean"])
def test_loss_of_each_update_is_recorded(reduction: str) -> None:
    batches = make_batches(4, 4, 2)
    kind = {"mean": Square, "sum": SumSquare, "per-token-mean": TokenSquare}[reduction]
    tokens = {"aggregate_outputs_fn": count_tokens} if reduction == "per-token-mean" else {}
    trainer = make(kind, accumulate=2, loss_reduction=reduction, optimizer=lambda params: torch.optim.SGD(params, lr=0.0), **tokens)
    trainer.run(1, batches)
    expected = []
    for window in (batches[:2], batches[2:]):
        x, y = (torch.cat(parts) for parts in zip(*window))
        errors = (make_linear()(x) - y).square().detach()
        kept = errors[y != N_IGNORED]
        expected.append(float({"mean": errors.mean(), "sum": errors.sum(), "per-token-mean": kept.mean()}[reduction]))
    found = [value for value in trainer.history.steps["train"]["train_window_loss"] if value == value]
    assert found == pytest.approx(expected, rel=1e-12)


def test_window_without_tokens_changes_nothing() -> None:
    x, y = make_data(4)
    trainer = make(TokenSquare, accumulate=2, grad_reduction="per-token-mean", aggregate_outputs_fn=count_tokens)
    trainer.run(1, [(x, torch.full_like(y, N_IGNORED))])
    assert same_weights(trainer.model, make_linear())


GROWS = {0: 1, 2: 3, 4: 2}


@pytest.mark.parametrize("schedule", [GROWS, {0: 2, 2: 4}, {0: 3, 1: 2}], ids=str)
@pytest.mark.parametrize("lean", [False, True])
def test_window_grows_with_the_updates(lean: bool, schedule: dict[int, int]) -> None:
    batches, seen = make_batches(*[2] * 11), list[int]()
    trainer = make(Square, accumulate=schedule, hooks={"on_train_step_start": lambda *args: seen.append(trainer.counts.processed)})
    trainer.short_way = lean
    trainer.run(2, batches)
    windows: list[list[Any]] = []
    starts: list[int] = []
    for epoch in range(2):
        left = list(batches)
        while left:
            n = schedule[max(update for update in schedule if update <= len(windows))]
            starts.append(11 * epoch + 11 - len(left))
            windows.append(left[:n])
            left = left[n:]
    assert_equal(trainer.model, by_hand(Square, windows))
    assert trainer.counts.step == len(windows) and seen == starts


@pytest.mark.long
@pytest.mark.parametrize("lean", [pytest.param(False, marks=pytest.mark.long), True])
def test_run_resumed_after_the_window_has_grown_is_an_unbroken_one(lean: bool, tmp_path: Path) -> None:
    def run(folder: Path, n_updates: int | None = None) -> Any:
        limits = {"lightning": {"max_steps": n_updates}} if n_updates else {}
        trainer = make(Square, StateManagerAddon, accumulate=GROWS, save_path=folder, **limits)
        trainer.short_way = lean
        trainer.run(2, make_batches(*[2] * 11), resume="auto")
        return trainer

    whole = run(tmp_path / "whole")
    for n_updates in (1, 2, 3, 4, 5, 7, 8):
        run(tmp_path / str(n_updates), n_updates)
        resumed = run(tmp_path / str(n_updates))
        assert same_weights(resumed.model, whole.model) and resumed.counts == whole.counts


@pytest.mark.parametrize("accumulate", [4, {0: 1, 1: 3}], ids=["4", "grows in the first epoch"])
def test_validation_within_a_window_changes_nothing(accumulate: Any) -> None:
    kind = Regress.add_on(AccumulationAddon)
    trainer, plain = (make_trainer(kind, accumulate=accumulate, lightning=options, seed=0) for options in ({"val_check_interval": 1}, None))
    trainer.run(2, make_loader(), make_valid())
    plain.run(2, make_loader())
    assert same_weights(trainer.model, plain.model)


def test_run_that_is_to_end_within_a_window_finishes_it_first() -> None:
    trainer = make(Square, accumulate=4)
    batches = make_batches(4, 4, 4, 4)

    def stop(*args: Any) -> None:
        if trainer.counts.processed == 1 and trainer.module is not None:
            trainer.module.trainer.should_stop = True

    trainer.recorder.add(type("Stop", (), {"update": staticmethod(stop)})())
    trainer.recorder.every_s = 0.0
    trainer.run(1, batches * 2)
    assert (trainer.counts.step, trainer.history.last["step"]) == (1, 1)
    assert_equal(trainer.model, by_hand(Square, [batches]))


def test_run_that_an_error_ends_within_a_window_leaves_nothing_for_the_next() -> None:
    trainer, batches = make(Square, accumulate=4, lightning={"callbacks": [Breaks(2)]}), make_batches(4, 4, 4, 4)
    with pytest.raises(Broken):
        trainer.run(1, batches)
    assert trainer.counts.step == 0
    trainer.run(1, batches)
    assert_equal(trainer.model, by_hand(Square, [batches]))


# -- how many
def test_window_follows_from_the_samples_and_the_loader() -> None:
    loader = DataLoader(TensorDataset(*make_data(16)), 4)
    trainer = make(Square, global_batch_size=8)
    trainer.run(1, loader)
    assert trainer.counts.step == 2
    with pytest.raises(ConfigError, match="micro_batch_size=2, but the batches of the loader have 4 samples"):
        make(Square, global_batch_size=8, micro_batch_size=2).run(1, loader)
    with pytest.raises(ConfigError, match="the loader has no batch_size"):
        make(Square, global_batch_size=8).run(1, make_batches(4, 4))
    trainer = make(Square, global_batch_size=8, micro_batch_size=4)
    trainer.run(1, make_batches(4, 4))
    assert trainer.counts.step == 1


def test_window_of_a_loader_without_a_length() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(*make_data(16))

    trainer = make(Square, global_batch_size=8)
    trainer.run(1, DataLoader(Stream(), 4))
    assert trainer.counts.step == 2


def test_samples_that_do_not_come_out_even_are_refused() -> None:
    assert window_of_samples(64, 4) == 16 and window_of_samples(64, 4, 2) == 8
    with pytest.raises(ConfigError, match="global_batch_size=10 is not a multiple of batches of 4 samples on each of 2 processes"):
        window_of_samples(10, 4, 2)
    with pytest.raises(ConfigError):
        window_of_samples(2, 4)


def test_tokens_are_rounded_down_with_the_exact_figure() -> None:
    note = "total_batch_size=1,000,000 tokens is 61.04 batches of 16,384: an update takes 61 of them, 999,424 tokens."
    assert window_of_tokens(1_000_000, 16_384) == (61, note)
    assert window_of_tokens(1_048_576, 16_384) == (64, "") and window_of_tokens(1_048_576, 16_384, 2) == (32, "")
    with pytest.raises(ConfigError, match="total_batch_size=1,000 tokens is less than one batch of 16,384"):
        window_of_tokens(1_000, 16_384)


def test_rounding_is_noted_in_the_record() -> None:
    notes: list[str] = []
    trainer = make(Square, total_batch_size=25, tokens_per_batch=12)
    trainer.recorder.add(SimpleNamespace(update=lambda event: notes.append(event.data["text"]) if event.kind == "note" else None))
    trainer.run(1, make_batches(4, 4, 4))
    assert trainer.counts.step == 2
    assert notes == ["total_batch_size=25 tokens is 2.08 batches of 12: an update takes 2 of them, 24 tokens."]


def test_tokens_of_a_batch_are_the_loaders_or_asked_for() -> None:
    loader: Any = DataLoader(TensorDataset(*make_data(16)), 4)
    with pytest.raises(ConfigError, match="the loader has no seq_len"):
        make(Square, total_batch_size=24).run(1, loader)
    loader.seq_len = 3
    trainer = make(Square, total_batch_size=24)
    trainer.run(1, loader)
    assert trainer.counts.step == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 2, "global_batch_size": 8}, "accumulate and global_batch_size are both given"),
        ({"accumulate": 0}, "accumulate=0 must be a positive integer"),
        ({"accumulate": {5: 2}}, "must have a key for update 0"),
        ({"accumulate": {0: 0}}, "accumulate=0 must be a positive integer"),
        ({"grad_reduction": "average"}, "grad_reduction must be .*, got 'average'"),
        ({"grad_reduction": "per-token-mean"}, "needs the number of tokens"),
        ({"loss_reduction": "per-token-mean"}, "needs the number of tokens"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(Square, **options)


def test_two_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradicts AccumulationAddon, which makes it 2"):
        make(Square, accumulate=2, lightning={"accumulate_grad_batches": 3}).run(1, make_batches(4))


def test_function_that_counts_no_tokens_is_named() -> None:
    options: dict[str, Any] = {"grad_reduction": "per-token-mean", "aggregate_outputs_fn": lambda outputs, group: AggregatedOutputs()}
    with pytest.raises(StepError, match="returned no num_tokens"):
        make(Square, accumulate=2, **options).run(1, make_batches(4))
