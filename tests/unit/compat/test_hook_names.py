"""The translation of nnScaler's and tlama's hook names: complete, without a name for a moment that does not exist."""

from __future__ import annotations

import re

from nbtrain.compat.hook_names import HOOK_NAMES, NNSCALER, OWN, TLAMA, names_at
from nbtrain.engine.callback import Callback
from nbtrain.engine.hooks import HOOKS

# As their documents list them
OF_NNSCALER = {
    "after_setup",
    "on_train_start",
    "on_train_end",
    "on_val_start",
    "on_val_end",
    "on_epoch_start",
    "on_epoch_end",
    "on_train_step_start",
    "on_train_step_end",
    "on_val_step_start",
    "on_val_step_end",
    "after_aggregate_train_step_outputs",
    "after_aggregate_val_step_outputs",
    "before_zero_grad",
    "after_zero_grad",
    "before_sync_grad",
    "after_sync_grad",
    "before_gnorm_clip",
    "after_gnorm_clip",
    "before_optimizer_step",
    "after_optimizer_step",
    "on_load_checkpoint",
    "on_save_checkpoint",
}
OF_TLAMA = {
    "on_init_end",
    "on_train_start",
    "on_train_end",
    "on_epoch_start",
    "on_epoch_end",
    "on_step_start",
    "on_step_end",
    "on_backward_start",
    "on_backward_end",
    "on_optimizer_step_start",
    "on_optimizer_step_end",
    "on_validate_start",
    "on_validate_end",
    "on_checkpoint_end",
}


def test_every_documented_name_is_translated() -> None:
    assert NNSCALER.keys() >= OF_NNSCALER and TLAMA.keys() == OF_TLAMA


def test_every_name_stands_for_a_moment_of_ours() -> None:
    moments = {point.name for point in HOOKS}
    assert {hook.moment for hook in (*HOOK_NAMES.values(), *TLAMA.values())} <= moments
    assert sorted(name for moment in moments for name in names_at(moment)) == sorted(HOOK_NAMES)


def test_our_own_names_are_those_of_the_callback() -> None:
    assert all(hook.moment == name and name in vars(Callback) for name, hook in OWN.items())


def test_the_core_has_no_name_of_another_system() -> None:
    foreign = set(HOOK_NAMES) - {point.method for point in HOOKS}
    assert not foreign & {word for point in HOOKS for word in re.findall(r"\w+", f"{point.name} {point.when}")}
