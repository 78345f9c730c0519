"""At a spike HealAddon restores what a run without the batches since would have, also when it is resumed, and on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import make_trainer, same_weights
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from nbtrain import ConfigError, HealAddon, MultiGPUAddon, StateManagerAddon, StepError, Trainer

SPIKE = 13  # the place of the batch that is ruined
OPTIONS = {"heal_steps": 4, "heal_window": 5}


class Line(Trainer):
    """A batch is x, and by how much the gradient of the bias is wrong, which the loss does not show."""

    stop_at = -1

    def train_step(self, batch: Any) -> dict[str, Any]:
        if self.counts.step == self.stop_at:
            self.stop()
        x, wrong = batch
        bias = self.model.bias
        return {"loss": mse_loss(self.model(x), 2 * x) + (wrong * (bias - bias.detach())).mean()}


def data(loss: float = 1.0, gradient: float = 0.0, n: int = 20) -> list[tuple[Tensor, Tensor]]:
    """`n` batches, one of which makes a spike of the loss or of the gradient."""
    batches = [(x, torch.zeros(1)) for x in torch.randn(n, 8, 1, generator=torch.Generator().manual_seed(0))]
    batches[SPIKE] = batches[SPIKE][0] * loss, torch.full((1,), gradient)
    return batches


def made(*addons: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    optimizer = lambda params: torch.optim.Adam(params, lr=0.05)  # noqa: E731
    return make_trainer(Line.add_on(*addons), model=nn.Linear(1, 1), optimizer=optimizer, **options)


@pytest.mark.parametrize("ruined", [{"loss": 1e4}, {"loss": float("nan")}, {"gradient": 1e4}], ids=["loss", "nan", "gradient"])
def test_healed_run_is_one_without_the_batches_since(ruined: dict[str, float]) -> None:
    trainer, plain = made(HealAddon, **OPTIONS), made()
    assert trainer.run(1, data(**ruined)).status == "completed"
    batches = data()
    plain.run(1, batches[:8] + batches[SPIKE + 1 :])  # copies are taken at the steps 0, 4, 8 and 12: that of 8 is older than 4 steps
    assert same_weights(trainer.model, plain.model)
    assert [torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(trainer.optimizer.state.values(), plain.optimizer.state.values())]
    what = "the gradient norm is" if "gradient" in ruined else "the loss is"
    ((_, text),) = trainer.history.marks
    assert text.startswith(f"healed: in step 14 {what}") and "the weights are those of step 8, and the batches since are left out" in text
    assert trainer[HealAddon].n_heals == 1


def test_run_without_a_spike_is_as_without_the_addon() -> None:
    trainer, plain = made(HealAddon, **OPTIONS), made()
    for one in (trainer, plain):
        one.run(2, data())
    assert same_weights(trainer.model, plain.model) and trainer[HealAddon].n_heals == 0 and not trainer.history.marks


@pytest.mark.parametrize("stop_at", [12, 15])
def test_resumed_run_goes_back_to_the_same_weights(stop_at: int, tmp_path: Path) -> None:
    def trained(folder: str, at: int = -1, **options: Any) -> Any:
        trainer = made(HealAddon, StateManagerAddon, save_path=tmp_path / folder, **OPTIONS)
        trainer.stop_at = at
        trainer.run(1, data(loss=1e4), **options)
        return trainer

    whole = trained("whole")
    trained("parts", stop_at)
    resumed = trained("parts", resume="auto")
    assert same_weights(whole.model, resumed.model) and resumed[HealAddon].n_heals == 1
    assert [text for _, text in whole.history.marks] == [text for _, text in resumed.history.marks]


def test_too_many_spikes_are_an_error_that_says_what_to_do() -> None:
    batches = data(loss=float("inf"), n=40)
    batches[30] = batches[30][0] * torch.inf, torch.zeros(1)
    with pytest.raises(StepError, match=r"the loss is (nan|inf), and the run was healed 1 times before\.\n  Lower the learning rate"):
        made(HealAddon, **OPTIONS, max_heals=1).run(1, batches)


@pytest.mark.parametrize("name", ["heal_steps", "heal_factor", "heal_window", "max_heals"])
def test_options_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 must be a positive number"):
        HealAddon(**{name: 0})


def test_all_ranks_go_back_if_one_has_a_spike() -> None:
    trainer = made(HealAddon, MultiGPUAddon, device=["cpu", "cpu"], **OPTIONS)
    assert trainer.run(1, data(loss=1e4, n=40)).status == "completed"  # 20 rounds of two batches
    assert trainer[HealAddon].n_heals == 1 and len(trainer.history.marks) == 1
    assert all(parameter.isfinite().all() and parameter.abs().max() < 10 for parameter in trainer.model.parameters())
