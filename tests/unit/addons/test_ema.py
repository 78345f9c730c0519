"""The moving average of the weights: what it is, who sees it, and that the training never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_model, make_trainer, make_valid, same_weights

from nbtrain import CheckpointError, ConfigError, EMAAddon, StateManagerAddon
from nbtrain.addons.ema import Average
from nbtrain.checkpoint.weights import read_weights

Averaging = Regress.add_on(EMAAddon)


@pytest.mark.parametrize("warmup", [False, True])
def test_average_is_that_of_the_formula(warmup: bool) -> None:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    average, expected = Average(0.8, warmup=warmup), 0.0
    for n in range(30):
        value = float(n * n)
        model.weight.data.fill_(value)
        average.add(model)
        decay = min(0.8, (1 + n) / (10 + n)) if warmup else 0.8
        expected = value if n == 0 else decay * expected + (1 - decay) * value
    assert average.values[0].item() == pytest.approx(expected, rel=1e-12)


def test_average_of_16_bit_weights_moves() -> None:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    average = Average(0.9999, warmup=False)
    for value in [1.0] + [2.0] * 100:
        model.weight.data.fill_(value)
        average.add(model)
    assert average.values[0].item() == pytest.approx(2 - 0.9999**100, abs=1e-5)
    assert average.by_name(model)["weight"].dtype == torch.bfloat16


def test_training_goes_as_without_it() -> None:
    plain, averaged = make_trainer(Regress), make_trainer(Averaging)
    for trainer in (plain, averaged):
        torch.manual_seed(3)
        trainer.run(3, make_loader(), make_valid())
    assert same_weights(plain.model, averaged.model)
    assert plain.history.last["train_loss"] == averaged.history.last["train_loss"]
    assert plain.history.last["val_loss"] != averaged.history.last["val_loss"]


def test_validation_best_weights_and_predictions_are_the_averages(tmp_path: Path) -> None:
    trainer = make_trainer(Averaging.add_on(StateManagerAddon), save_path=tmp_path, save_format="safetensor")
    trainer.run(2, make_loader(), make_valid())
    judged = make_trainer(Regress)
    judged.model.load_state_dict(trainer.best_weights)
    assert trainer.result.best["epoch"] == 2
    assert judged.evaluate(make_valid())["loss"] == trainer.history.last["val_loss"] == trainer.evaluate(make_valid())["loss"]
    x = torch.ones(3, 8)
    assert torch.equal(judged.predict(x), trainer.predict(x))
    assert all(torch.equal(value, trainer.best_weights[name]) for name, value in read_weights(trainer.result.best.path).items())
    trainer.apply_average()
    assert same_weights(trainer.model, judged.model)


def test_window_counts_as_one_update() -> None:
    trainer = make_trainer(Averaging, lightning={"accumulate_grad_batches": 2})
    trainer.run(1, make_loader())
    assert trainer[EMAAddon].average.n == trainer.counts.step == 3


def test_failed_validation_gives_the_weights_back() -> None:
    class Fails(Averaging):  # type: ignore[misc, valid-type]
        n_batches = 0

        def test_step(self, batch: Any) -> dict[str, Any]:
            self.n_batches += 1
            if self.n_batches == 2:  # the first is tried before the training
                raise RuntimeError("no")
            return super().test_step(batch)

    plain, trainer = make_trainer(Regress), make_trainer(Fails)
    torch.manual_seed(3)
    plain.run(1, make_loader())
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="no"):
        trainer.run(1, make_loader(), make_valid())
    assert same_weights(plain.model, trainer.model)


def test_state_that_is_saved_between_runs_has_both(tmp_path: Path) -> None:
    kind = Averaging.add_on(StateManagerAddon)
    trainer = make_trainer(kind, save_path=tmp_path)
    trainer.run(1, make_loader())
    trainer.model[0].bias.data.add_(1.0)
    path = trainer.save_state()
    again = make_trainer(kind, save_path=tmp_path, model=make_model(seed=5))
    again.load_state(path)
    assert same_weights(again.model, trainer.model)
    assert all(torch.equal(a, b) for a, b in zip(again[EMAAddon].average.values, trainer[EMAAddon].average.values))
    tester = make_trainer(kind, save_path=tmp_path, model=make_model(seed=5), mode="test")
    tester.load_state(path)
    assert torch.equal(tester.predict(torch.ones(1, 8)), trainer.predict(torch.ones(1, 8)))


def test_without_an_average_there_is_none_to_apply() -> None:
    with pytest.raises(CheckpointError, match="There is no average yet"):
        make_trainer(Averaging).apply_average()
    with pytest.raises(ConfigError, match="ema_decay=1.0 must be between 0 and 1"):
        make_trainer(Averaging, ema_decay=1.0)
