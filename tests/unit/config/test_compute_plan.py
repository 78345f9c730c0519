"""Devices, windows and lengths that a configuration asks for: the whole tables, and the whole text of what can't be."""

from __future__ import annotations

from math import lcm
from typing import Any

import pytest

from nbtrain.config.compute_plan import NEVER, accumulation, device_batches, limits, n_epochs, plan_compute
from nbtrain.config.document import Problems
from nbtrain.config.schema import ComputeConfig, Settings


def told(problems: Problems) -> list[str]:
    return [f"{problem.what} {problem.remedy}" for problem in problems.found]


@pytest.mark.parametrize(
    ("policy", "compute", "plan"),
    [
        ("autodist", {}, "1 device"),
        ("autodist", {"runtime_ngpus": 4}, "4 devices, 4 batches at a time, strategy='ddp'"),
        ("autodist", {"runtime_ngpus": 4, "use_zero": True}, "4 devices, 4 batches at a time, strategy='fsdp2'"),
        (
            "autodist",
            {"runtime_ngpus": 4, "plan_ngpus": 2},
            "4 devices, 2 batches at a time, each divided among 2 devices, strategy='auto'",
        ),
        ("dp", {"runtime_ngpus": 2}, "2 devices, 2 batches at a time, strategy='ddp'"),
        ("data", {"runtime_ngpus": 2, "use_zero": True}, "2 devices, 2 batches at a time, strategy='fsdp2'"),
        (
            "data",
            {"runtime_ngpus": 4, "plan_ngpus": 2},
            "4 devices, 2 batches at a time, each divided among 2 devices, strategy='ddp'",
        ),
        ("dp", {"runtime_ngpus": 4, "use_zero": True, "zero_ngroups": 2}, "4 devices, 4 batches at a time, strategy='fsdp2', shard_size=2"),
        ("tp", {"runtime_ngpus": 4, "plan_ngpus": 2}, "4 devices, 2 batches at a time, strategy='tp', tensor_parallel_size=2"),
        ("tp", {"runtime_ngpus": 4, "plan_ngpus": 4}, "4 devices, 1 batch at a time, strategy='tp', tensor_parallel_size=4"),
        ("tp", {"runtime_ngpus": 8}, "8 devices, 8 batches at a time, strategy='ddp'"),
    ],
)
def test_devices_are_planned(policy: str, compute: dict[str, Any], plan: str) -> None:
    problems = Problems()
    assert str(plan_compute(Settings(ComputeConfig(**compute), pas_policy=policy), 8, problems)) == plan
    assert told(problems) == []


@pytest.mark.parametrize(
    ("policy", "compute", "text"),
    [
        (
            "tp",
            {"runtime_ngpus": 4, "plan_ngpus": 3},
            "compute_config.runtime_ngpus is 4, and must be a multiple of plan_ngpus 3. Give a multiple, or plan_ngpus 1.",
        ),
        (
            "dp",
            {"runtime_ngpus": 9},
            "compute_config.runtime_ngpus is 9, and this machine has 8 devices. "
            "Request fewer: --compute_config.plan_ngpus 1 --compute_config.runtime_ngpus 1.",
        ),
        ("pp", {}, "pas_policy is 'pp', which is unknown here. Pipelines have no counterpart here: use tp, or dp."),
        (
            "fsdp",
            {"runtime_ngpus": 2},
            "pas_policy is 'fsdp', which is unknown here. "
            "Give dp and compute_config.use_zero: true, which shards the weights as FSDP does.",
        ),
        ("dta", {}, "pas_policy is 'dta', which is unknown here. Did you mean 'data'?"),
        (
            "dp",
            {"runtime_ngpus": 4, "plan_ngpus": 2},
            "pas_policy is 'dp', and compute_config.plan_ngpus 2: it does not split a model. Use tp or data, or plan_ngpus 1.",
        ),
        (
            "dp",
            {"runtime_ngpus": 4, "use_zero": True, "zero_ngroups": 3},
            "compute_config.zero_ngroups is 3, and must be a divisor of runtime_ngpus 4. Give a divisor, or leave it out.",
        ),
    ],
)
def test_devices_that_can_not_be_are_refused(policy: str, compute: dict[str, Any], text: str) -> None:
    problems = Problems()
    plan_compute(Settings(ComputeConfig(**compute), pas_policy=policy), 8, problems)
    assert told(problems) == [text]


@pytest.mark.parametrize(
    ("micro", "steps", "whole", "found", "text"),
    [
        (2, None, None, 1, ""),
        (2, 3, None, 3, ""),
        (2, None, 16, 4, ""),
        (2, 4, 16, 4, ""),
        (
            2,
            3,
            16,
            4,
            "micro_batch_size 2 × 2 copies of the model × grad_accumulation_steps 3 = 12, and global_batch_size is 16. "
            "Leave one of them out.",
        ),
        (2, None, 10, 2, "micro_batch_size 2 × 2 copies of the model = 4, and global_batch_size 10 must be a multiple of it. Give 8."),
        (2, None, 3, 1, "micro_batch_size 2 × 2 copies of the model = 4, and global_batch_size 3 must be a multiple of it. Give 4."),
    ],
)
def test_windows_of_two_copies(micro: int, steps: int | None, whole: int | None, found: int, text: str) -> None:
    problems = Problems()
    settings = Settings(micro_batch_size=micro, grad_accumulation_steps=steps, global_batch_size=whole)
    assert accumulation(settings, 2, problems) == found
    assert told(problems) == ([text] if text else [])


@pytest.mark.parametrize("policy", ["autodist", "tp", "dp"])
@pytest.mark.parametrize(("n", "shards"), [(2, 2), (4, 2), (4, 4), (8, 1), (1, 1)])
@pytest.mark.parametrize("micro", [1, 2, 4, 6])
@pytest.mark.parametrize("steps", [None, 1, 2, 3, 8])
def test_an_update_has_as_many_samples_as_nnscalers(policy: str, n: int, shards: int, micro: int, steps: int | None) -> None:
    compute = ComputeConfig(runtime_ngpus=n, plan_ngpus=shards)
    settings, problems = Settings(compute, pas_policy=policy, micro_batch_size=micro, grad_accumulation_steps=steps), Problems()
    plan = plan_compute(settings, 8, problems)
    size, window = device_batches(settings, plan, problems)
    n_readers = n // shards if plan.strategy == "tp" else n  # of different batches
    if policy == "dp" and shards > 1:
        assert "it does not split a model" in told(problems)[0]
    elif steps and micro * steps % shards and policy == "autodist":
        assert "which share them" in told(problems)[0]
    else:
        of_a_copy = micro * steps if steps else lcm(micro, shards if policy == "autodist" else 1)  # a sample for each that shares it
        assert not problems.found and size <= micro
        assert n_readers * size * window == of_a_copy * (n // shards)


def test_one_copy_is_called_so() -> None:
    problems = Problems()
    accumulation(Settings(micro_batch_size=2, global_batch_size=3), 1, problems)
    assert told(problems) == ["micro_batch_size 2 × 1 copy of the model = 2, and global_batch_size 3 must be a multiple of it. Give 2."]


@pytest.mark.parametrize(
    ("settings", "accumulate", "found"),
    [
        ({}, 1, {}),
        ({}, 4, {"accumulate_grad_batches": 4}),
        ({"max_train_steps": 9}, 1, {"max_steps": 9}),
        ({"max_val_steps": 3}, 4, {"accumulate_grad_batches": 4, "limit_val_batches": 12}),
        ({"val_every_n_epochs": 2}, 1, {"check_val_every_n_epoch": 2}),
        ({"val_every_n_epochs": None}, 1, {"check_val_every_n_epoch": NEVER}),
        (
            {"val_every_n_train_steps": 5},
            4,
            {"accumulate_grad_batches": 4, "val_check_interval": 5, "check_val_every_n_epoch": None},
        ),
        ({"val_every_n_train_steps": 5, "val_every_n_epochs": 2}, 1, {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    ],
)
def test_lengths_go_to_lightning(settings: dict[str, Any], accumulate: int, found: dict[str, Any]) -> None:
    assert limits(Settings(**settings), accumulate) == found


@pytest.mark.parametrize(
    ("max_epochs", "max_train_steps", "n_batches", "accumulate", "found"),
    [
        (4, None, 50, 1, 4),
        (None, 100, 50, 1, 2),
        (None, 101, 50, 1, 3),
        (None, 26, 50, 4, 2),  # 13 updates an epoch
        (None, 27, 50, 4, 3),
        (4, 10, 50, 4, 1),
        (1, 1000, 50, 1, 1),
        (None, 10, None, 1, NEVER),  # nobody knows how long an epoch is
        (3, 10, None, 1, 3),
    ],
)
def test_epochs_are_counted(
    max_epochs: int | None, max_train_steps: int | None, n_batches: int | None, accumulate: int, found: int
) -> None:
    assert n_epochs(Settings(max_epochs=max_epochs, max_train_steps=max_train_steps), n_batches, accumulate) == found
