"""Frozen parts, and groups of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_model, make_trainer, same_weights
from torch import nn

from nbtrain import ConfigError, FreezeAddon, MultiGPUAddon, param_groups

Freezing = Regress.add_on(FreezeAddon)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def changed_in(trainer: Any, n_epoch: int) -> set[str]:
    before = {name: value.clone() for name, value in trainer.model.to(trainer.device).state_dict().items()}
    trainer.run(n_epoch, make_loader(64))
    return {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}


def test_frozen_part_stands_still_in_its_epochs_and_moves_in_the_others() -> None:
    decay = {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.5)}
    trainer = make_trainer(Freezing, model=make_net(), freeze={"0": range(1, 3), "1": range(2, 3)}, **decay)
    everything = set(trainer.model.state_dict())
    assert changed_in(trainer, 1) == everything
    assert changed_in(trainer, 1) == everything - {"0.weight", "0.bias"}
    assert changed_in(trainer, 1) == {"3.weight", "3.bias"}
    assert changed_in(trainer, 1) == everything
    assert all(p.requires_grad for p in trainer.model.parameters())


def test_names_are_those_of_the_model_that_torch_has_compiled() -> None:
    net = make_net()
    trainer = make_trainer(Freezing, model=torch.compile(net, backend="eager"), freeze=["0", "1"])
    assert {name.removeprefix("_orig_mod.") for name in changed_in(trainer, 1)} == {"3.weight", "3.bias"}
    assert len(param_groups(trainer.model, 1e-3, lr_factors={"3": 0.1})) == 4


def test_what_a_user_has_frozen_stays_frozen() -> None:
    trainer = make_trainer(Freezing, model=make_net(), freeze={"3.bias": 1})
    trainer.model[0].weight.requires_grad = False
    assert changed_in(trainer, 2) >= {"3.bias"} and not trainer.model[0].weight.requires_grad
    assert "0.weight" not in changed_in(trainer, 1)


def test_equals_a_loop_with_a_frozen_part_by_hand() -> None:
    by_hand, trainer = make_trainer(model=make_model()), make_trainer(Freezing, model=make_model(), freeze="0")
    by_hand.model[0].requires_grad_(False)
    for one in (by_hand, trainer):
        torch.manual_seed(2)
        one.run(2, make_loader())
    assert same_weights(by_hand.model, trainer.model)


def test_patterns_that_fit_nothing_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'3.wieght' fits no parameter of Sequential.\n  Did you mean '3.weight'?"):
        make_trainer(Freezing, freeze=["3.wieght"]).run(1, make_loader())
    with pytest.raises(ConfigError, match="fits no parameter"):
        param_groups(make_net(), 1e-3, lr_factors={"body": 0.1})


def test_nothing_left_to_train_is_an_error() -> None:
    with pytest.raises(ConfigError, match="In epoch 1 all parameters are frozen"):
        make_trainer(Freezing, freeze={"*": 1}).run(1, make_loader())
    with pytest.raises(ConfigError, match=r"freeze\['0'\] must be an integer, a range or None, got 1.5"):
        make_trainer(Freezing, freeze={"0": 1.5})


@pytest.mark.parametrize("freeze", [{"0": 1}, "0"], ids=str)
def test_two_processes_freeze_where_they_do_not_wait_for_its_gradients(freeze: Any) -> None:
    def trained(strategy: str, n_epoch: int = 1) -> tuple[Any, set[str]]:
        trainer = make_trainer(Freezing.add_on(MultiGPUAddon), model=make_net(), device=["cpu", "cpu"], strategy=strategy, freeze=freeze)
        return trainer, changed_in(trainer, n_epoch)

    with pytest.raises(ConfigError, match='does not work with strategy="ddp", .*\n  Give strategy="ddp_find_unused_parameters_true"'):
        trained("ddp")
    trainer, changed = trained("ddp_find_unused_parameters_true")
    frozen = {"0.weight", "0.bias"}
    assert changed == set(trainer.model.state_dict()) - frozen
    assert (changed_in(trainer, 1) >= frozen) == isinstance(freeze, dict)
    assert trainer.run(1, make_loader(64)).status == "completed"


def test_groups_hold_every_parameter_once_with_its_rate_and_decay() -> None:
    net = make_net()
    groups = param_groups(net, 1.0, weight_decay=0.5, lr_factors={"0": 0.1, "*.bias": 2.0}, no_decay=["3.weight"])
    names = {id(p): name for name, p in net.named_parameters()}
    found = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert found == {
        "0.weight": (0.1, 0.5),
        "0.bias": (0.1, 0.0),
        "1.weight": (1.0, 0.0),
        "1.bias": (2.0, 0.0),
        "3.weight": (1.0, 0.0),
        "3.bias": (2.0, 0.0),
    }
    assert sum(len(group["params"]) for group in groups) == len(names)
    assert torch.optim.AdamW(groups).param_groups[0]["weight_decay"] == 0.5
