"""`nonfinite="skip"` where the device decides, because the optimizer is fused: as where the host does, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from samples import Breaks, Broken, Regress, make_data, make_trainer, same_weights, without_times
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from nbtrain import EMAAddon, MultiOptimizerTrainer, NonFiniteAddon, StateManagerAddon, StepError
from nbtrain.addons import non_finite

Make = Callable[..., Any]
FUSED: dict[str, Make] = {
    "SGD": partial(SGD, lr=0.1, fused=True),
    "SGD with momentum": partial(SGD, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "Adam": partial(Adam, lr=0.01, fused=True),
    "AdamW": partial(AdamW, lr=0.01, amsgrad=True, fused=True),
}


def loader(*bad: int, n: int = 10, value: float = math.nan) -> Any:
    """Batches of which those at `bad` have a label that is not finite."""
    batches = list(DataLoader(make_data(8 * n), 8))
    for i in bad:
        batches[i][1][0] = value
    return batches


class Loss(Regress):
    """Also counts the rows of its log."""

    def metric_on_epoch_end(self) -> dict[str, Any]:
        return {"rows": len(self.log_train["loss"]), "outputs": len(self.log_train["output"])}


class Pair(MultiOptimizerTrainer):
    """Two steps a batch, each with its optimizer."""

    def train_step_a(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model["b"](self.model["a"](batch[0])), batch[1])}

    def train_step_b(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model["b"](self.model["a"](batch[0].abs())), batch[1])}


@pytest.fixture
def as_the_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function where the host decides, as it does for other optimizers."""

    def call(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(non_finite, "_FUSED", ())
            return function()

    return call


def make(optimizer: Make, *addons: Any, kind: Any = Loss, every_s: float = math.inf, **options: Any) -> Any:
    trainer = make_trainer(kind.add_on(NonFiniteAddon, *addons), nonfinite="skip", optimizer=optimizer, **options)
    trainer.recorder.every_s = every_s
    return trainer


def columns(trainer: Any) -> str:
    """What was recorded of each step, as text, in which NaN is NaN."""
    return repr(list(trainer.history.steps["train"]))


def assert_same(one: Any, other: Any) -> None:
    """Weights, the optimizer's state, and all that is recorded."""
    assert same_weights(one.model, other.model)
    states = [[part for values in trainer.optimizer.state.values() for part in values.values()] for trainer in (one, other)]
    assert len(states[0]) == len(states[1]) and all(torch.equal(a, b) for a, b in zip(*states))
    assert without_times(one.history.epochs) == without_times(other.history.epochs)
    assert columns(one) == columns(other)
    assert one[NonFiniteAddon].n_skipped == other[NonFiniteAddon].n_skipped
    assert not any(hasattr(trainer.optimizer, "found_inf") for trainer in (one, other))


def trained(bad: tuple[int, ...], lean: bool, *given: Any, value: float = math.nan, **options: Any) -> Any:
    trainer = make(*given, **options)
    trainer.short_way = lean
    trainer.run(2, loader(*bad, value=value), loader(n=2))
    return trainer


@pytest.mark.parametrize("every_s", [0.0, math.inf])  # each batch is read at once, or all of them when the epoch ends
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("bad", [(), (0, 1, 5), (4, 9)], ids=str)
@pytest.mark.parametrize("name", ["SGD with momentum", "Adam", *(pytest.param(name, marks=pytest.mark.long) for name in ("SGD", "AdamW"))])
def test_it_trains_as_where_the_host_decides(
    name: str, bad: tuple[int, ...], accumulate: int, lean: bool, every_s: float, as_the_host: Any
) -> None:
    options = {"every_s": every_s, "lightning": {"accumulate_grad_batches": accumulate}, "value": -math.inf if lean else math.nan}
    ways = partial(trained, bad, lean, FUSED[name], EMAAddon, ema_decay=0.5, scheduler=lambda o, _: ExponentialLR(o, 0.9), **options)
    host, device = as_the_host(ways), ways()
    assert_same(host, device)
    assert all(map(torch.equal, host[EMAAddon].average.values, device[EMAAddon].average.values))
    assert device.history.last["train_skipped"] == len({i // accumulate for i in bad}) / math.ceil(10 / accumulate)


@pytest.mark.parametrize("every_s", [0.0, math.inf])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_each_of_several_optimizers_skips_its_update(names: str, every_s: float, as_the_host: Any) -> None:
    def ended() -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(4, 1)}).to("cuda")
        optimizers = {name: FUSED["Adam"](model[name].parameters()) for name in names}
        trainer: Any = Pair.add_on(NonFiniteAddon)(model, "cuda", optimizers=optimizers, nonfinite="skip", log_bar=False)
        trainer.recorder.every_s = every_s
        trainer.run(2, loader(0, 3, 4))
        return trainer

    host, device = as_the_host(ended), ended()
    assert same_weights(host.model, device.model) and device[NonFiniteAddon].n_skipped == host[NonFiniteAddon].n_skipped == 12
    assert without_times(host.history.epochs) == without_times(device.history.epochs)
    assert columns(host) == columns(device)


def test_a_run_that_is_broken_off_is_resumed_as_where_the_host_decides(as_the_host: Any, tmp_path: Path) -> None:
    def ended(cut: int = 0) -> Any:
        def new(**options: Any) -> Any:
            folder = tmp_path / str(cut)
            return make(FUSED["AdamW"], StateManagerAddon, save_path=folder, every_n_steps=1, max_skipped=2, **options)

        if cut:
            with pytest.raises(Broken):
                new(lightning={"callbacks": [Breaks(cut)]}).run(2, loader(2, 4, 5))
        trainer = new()
        trainer.run(2, loader(2, 4, 5), resume="auto" if cut else None)
        return trainer

    whole = as_the_host(ended)
    for cut in (4, 5, 13):
        assert_same(whole, ended(cut))


def test_time_travel_over_skipped_updates(as_the_host: Any) -> None:
    def ended() -> Any:
        trainer = make(FUSED["Adam"], keep_states=True)
        trainer.run(2, loader(2, 4, 5))
        trainer.rewind(step=14)
        trainer.run(1, loader(2, 4, 5))
        return trainer

    assert_same(as_the_host(ended), ended())


class Groups(Regress):
    """Its layers join the training one after the other."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.model[-1].requires_grad_(self.current_step > 3)
        return super().train_step(batch)


def test_a_layer_that_joins_later_begins_as_where_the_host_decides(as_the_host: Any) -> None:
    ways = partial(trained, (2, 3, 4, 5), True, FUSED["Adam"], kind=Groups)
    assert_same(as_the_host(ways), ways())


@pytest.mark.parametrize("n", [3, 5])
def test_too_many_in_a_row_are_found_when_the_values_are_read(n: int) -> None:
    trainer = make(FUSED["Adam"], max_skipped=2)
    with pytest.raises(StepError, match=f"The gradients of {n} updates in a row are not finite"):
        trainer.run(1, loader(*range(2, 2 + n)))
    assert trainer[NonFiniteAddon].n_skipped == n and all(p.isfinite().all() for p in trainer.model.parameters())
    assert trainer.run(1, loader(0, 1, 3, 4)).status == "completed"


class Fails(Loss):
    """A step that reads what was recorded, and fails once."""

    has_failed = False

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.current_step == 4 and not type(self).has_failed:
            type(self).has_failed = True
            self.recorder.flush()
            raise ValueError("once")
        return super().train_step(batch)


def test_an_update_is_counted_once_where_a_step_is_repeated() -> None:
    trainer = make(FUSED["Adam"], kind=Fails, on_error="pause", max_skipped=3)
    with pytest.raises(ValueError, match="once"):
        trainer.run(1, loader(2, 3, 4))
    assert trainer.resume().status == "completed"
    assert trainer[NonFiniteAddon].n_skipped == 3 and trainer.history.last["train_skipped"] == 0.3


class Late(L.Callback):
    """Raises in a step's update."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        if trainer.global_step == 4:
            raise ValueError("late")


def test_nothing_is_left_on_the_optimizer_where_a_run_fails() -> None:
    trainer = make(FUSED["SGD"], lightning={"callbacks": [Late()]})
    with pytest.raises(ValueError, match="late"):
        trainer.run(1, loader(1))
    assert not hasattr(trainer.optimizer, "found_inf") and not hasattr(trainer.optimizer, "grad_scale")


def values_of(gradients: list[Tensor]) -> list[float]:
    return [float(non_finite.flag_nonfinite(gradients))]


@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16", "float32"), ("float16",)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e4])
def test_the_flag_is_that_of_any_value(value: float, dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.full((3, 2), 7.0, device="cuda", dtype=getattr(torch, dtype)) for dtype in dtypes]
    gradients += [torch.zeros(0, device="cuda")]
    assert values_of(gradients) == [0.0]
    gradients[0][1, 1] = value
    expected, before = [float(not math.isfinite(value))], [gradient.clone() for gradient in gradients]
    assert values_of(gradients) == expected
    assert all(torch.equal(a.nan_to_num(5.0), b.nan_to_num(5.0)) for a, b in zip(gradients, before))
    monkeypatch.setattr("nbtrain.private.torch_parts._flag_and_scale", None)
    assert values_of(gradients) == expected
