"""The short ways through torch end where torch's own do, and are not taken where something would be missed on them."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_trainer, same_weights, without_times
from torch import Tensor, nn
from torch.autograd import graph
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from nbtrain import Trainer
from nbtrain.loops import fast_step
from nbtrain.loops.fast_step import backward, find_backward, find_step, find_zero_grad, steps_alone, unknown_torch
from nbtrain.optim.joint_optimizer import JointOptimizer


@pytest.fixture
def engine_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each loss that took the short way."""
    calls: list[Any] = []
    run = graph._engine_run_backward

    def counted(losses: Any, *args: Any, **kwargs: Any) -> Any:
        calls.extend(losses)
        return run(losses, *args, **kwargs)

    monkeypatch.setattr(graph, "_engine_run_backward", counted)
    return calls


def counting(function: Any, calls: list[Any]) -> Any:
    """`function`, as one who wraps it leaves it; each call is noted in `calls`."""

    @functools.wraps(function)
    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return own


def weights(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, 7, dtype=dtype).requires_grad_()


# -- backward
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_are_those_of_torch(dtype: torch.dtype, engine_calls: list[Any]) -> None:
    short, long = weights(dtype), weights(dtype)
    for _ in range(2):  # they add up
        backward((short.sin() * short).mean())
        (long.sin() * long).mean().backward()
    assert short.grad is not None and long.grad is not None
    assert torch.equal(short.grad, long.grad) and short.grad.dtype == dtype
    assert len(engine_calls) == 2


def test_a_leaf_gets_a_gradient_of_its_own(engine_calls: list[Any]) -> None:
    leaf = torch.ones((), requires_grad=True)
    backward(leaf)
    backward(leaf)
    assert leaf.grad is not None and leaf.grad.item() == 2 and len(engine_calls) == 2


def test_hooks_of_tensors_are_called() -> None:
    seen: list[float] = []
    w = weights()
    loss = w.square().sum()
    loss.register_hook(lambda gradient: seen.append(gradient.item()) or gradient * 3)
    w.register_post_accumulate_grad_hook(lambda parameter: seen.append(-1.0))
    backward(loss)
    assert seen == [1.0, -1.0]
    assert w.grad is not None and torch.equal(w.grad, 6 * w.detach())


UNUSUAL = {
    "several elements": lambda w: w.square(),
    "complex": lambda w: w.sum() * 1j,
    "without a gradient": lambda w: w.detach().sum(),
    "done already": lambda w: _done(w.square().sum()),
}


def _done(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_torch_refuses_is_refused_in_its_words(case: str) -> None:
    words = []
    for function in (backward, Tensor.backward):
        with pytest.raises(RuntimeError) as caught:
            function(UNUSUAL[case](weights()))
        words.append(str(caught.value))
    assert words[0] == words[1]


def test_one_element_in_another_shape_takes_torchs_way(engine_calls: list[Any]) -> None:
    w = weights()
    backward(w.square().sum().reshape(1))
    assert w.grad is not None and torch.equal(w.grad, 2 * w.detach()) and engine_calls == []


class Own(Tensor):
    """A tensor that sees what is done to it."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Sees(TorchFunctionMode):
    """A mode that sees what is done to all tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_who_overrides_torchs_functions_sees_the_backward_pass() -> None:
    backward(weights().as_subclass(Own).sum())
    assert "backward" in Own.seen
    loss = weights().sum()
    with Sees() as mode:
        backward(loss)
    assert "backward" in mode.seen


@pytest.mark.parametrize("holder", [Tensor, torch.autograd])
def test_a_replaced_function_is_called(holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_backward() is backward
    calls: list[Any] = []
    monkeypatch.setattr(holder, "backward", counting(holder.backward, calls))
    find_backward()(weights().sum())
    assert calls == [1]


def test_autograds_own_log_is_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, graph.log.name):
        graph.log.addHandler(caplog.handler)
        backward(weights().sum())
        graph.log.removeHandler(caplog.handler)
    assert "SumBackward0" in caplog.text


def twice(optimizer: Any) -> None:
    for _ in range(2):
        type(optimizer).step.__wrapped__.__wrapped__(optimizer)


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "other bits": lambda patches: patches.setattr(fast_step, "backward", lambda loss: (loss * 1.001).backward()),
    "a name that is missing": lambda patches: patches.delattr(graph, "_engine_run_backward"),
    "a step that steps twice": lambda patches: patches.setattr(torch.optim.Adam.step, "__wrapped__", twice),
    "a function that raises": lambda patches: patches.setattr(fast_step, "is_profiling", lambda: 1 / 0),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_fast_function_that_does_something_else_gives_way(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_step, "_verdict", [])
    assert unknown_torch() == "" and find_backward() is backward
    monkeypatch.setattr(fast_step, "_verdict", [])
    BROKEN[what](monkeypatch)
    assert unknown_torch() == torch.__version__ and find_backward() is Tensor.backward


def test_an_unknown_torch_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_step, "_verdict", ["9.9"])
    assert find_backward() is Tensor.backward
    optimizer = torch.optim.SGD([weights()], lr=0.1)
    assert labels(find_step(optimizer), no_closure) == ["Optimizer.step#SGD.step"]
    assert not steps_alone(optimizer) and find_zero_grad(optimizer) == optimizer.zero_grad


# -- the optimizer
PLAIN = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{name: functools.partial(getattr(torch.optim, name), lr=0.1) for name in PLAIN},
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
}


def no_closure() -> None:
    """The gradients are there already."""


def labels(function: Callable[..., Any], *args: Any) -> list[str]:
    """What `function` writes for torch's profiler."""
    profile: Any
    with torch.autograd.profiler.profile() as profile:
        function(*args)
    return [event.name for event in profile.function_events if event.name.startswith("Optimizer.")]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, scheduled: bool) -> None:
    ends = []
    for short in (True, False):
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, 0.3)
        nn.init.constant_(model.bias, -0.1)
        optimizer = OPTIMIZERS[name](model.parameters())
        schedule = ExponentialLR(optimizer, 0.5) if scheduled else None
        assert steps_alone(optimizer) or unknown_torch()
        step, zero_grad = (find_step(optimizer), find_zero_grad(optimizer)) if short else (optimizer.step, optimizer.zero_grad)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that of a scheduler which missed the optimizer's step
            for i in range(5):
                model(torch.arange(6.0).reshape(2, 3) - i).square().sum().backward()
                step(no_closure)
                if schedule is not None:
                    schedule.step()
                zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        ends.append((copy.deepcopy(model.state_dict()), optimizer.state_dict()))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)
    assert torch.is_grad_enabled()


def make_adam() -> torch.optim.Optimizer:
    w = weights()
    w.grad = torch.ones_like(w)
    return torch.optim.Adam([w], lr=0.1)


def test_a_step_writes_its_label_where_somebody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make_adam()
    step, zero_grad = find_step(optimizer), find_zero_grad(optimizer)
    assert labels(step, no_closure) == ["Optimizer.step#Adam.step"]
    assert labels(zero_grad) == ["Optimizer.zero_grad#Adam.zero_grad"]
    monkeypatch.setattr(fast_step, "is_profiling", lambda: False)  # now it thinks that nobody does
    assert labels(step, no_closure) == labels(zero_grad) == []


HOOKS: dict[str, Callable[..., Any]] = {
    "before its step": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "after its step": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    "before every step": lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
    "after every step": lambda optimizer, hook: register_optimizer_step_post_hook(hook),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_that_come_later_are_called(register: Callable[..., Any]) -> None:
    optimizer, calls = make_adam(), []
    step = find_step(optimizer)
    step(no_closure)
    handle = register(optimizer, lambda *args: calls.append(1))
    step(no_closure)
    handle.remove()
    step(no_closure)
    assert calls == [1]


def test_a_scheduler_that_comes_later_sees_the_steps() -> None:
    optimizer = make_adam()
    step = find_step(optimizer)
    schedule = ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(no_closure)
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_only_torchs_own_unchanged_step_goes_without_a_closure() -> None:
    changed: Any = make_adam()
    changed.step = counting(changed.step, [])
    own = type("Own", (torch.optim.Adam,), {"__module__": "mine"})([weights()], lr=0.1)
    for optimizer in (changed, own, torch.optim.LBFGS([weights()])):
        assert not steps_alone(optimizer)
    scheduled = make_adam()
    ExponentialLR(scheduled, 0.5)
    assert steps_alone(make_adam()) and steps_alone(scheduled)
    wrapped_twice: Any = make_adam()
    wrapped_twice.step = counting(torch.optim.Adam.step, []).__get__(wrapped_twice)
    ExponentialLR(wrapped_twice, 0.5)
    assert not steps_alone(wrapped_twice)


def test_a_step_replaced_for_all_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, calls = make_adam(), []
    monkeypatch.setattr(torch.optim.Adam, "step", counting(torch.optim.Adam.step, calls))
    find_step(optimizer)(no_closure)
    assert calls == [1]


def test_an_own_zero_grad_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    kind = type("Own", (torch.optim.Adam,), {"zero_grad": lambda self: calls.append("class")})
    find_zero_grad(kind([weights()], lr=0.1))()
    optimizer = make_adam()
    optimizer.zero_grad = lambda: calls.append("instance")  # pyright: ignore[reportAttributeAccessIssue]
    find_zero_grad(optimizer)()
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self: calls.append("all"))
    find_zero_grad(make_adam())()
    assert calls == ["class", "instance", "all"]


CHANGED: dict[str, Callable[[JointOptimizer, list[str]], Any]] = {
    "nothing": lambda joint, called: None,
    "a hook before one": lambda joint, called: joint.optimizers["adam"].register_step_pre_hook(lambda *args: called.append("before")),
    "a hook after one": lambda joint, called: joint.optimizers["sgd"].register_step_post_hook(lambda *args: called.append("after")),
    "a hook after all": lambda joint, called: joint.register_step_post_hook(lambda *args: called.append("after")),
    "no step of one": lambda joint, called: setattr(joint.optimizers["adam"], "step", lambda closure=None: called.append("no step")),
    "no gradients of one are cleared": lambda joint, called: setattr(joint.optimizers["sgd"], "zero_grad", lambda *args: None),
}


def four_steps(what: str, *, is_late: bool, short: bool) -> Any:
    called = list[str]()
    first, second = (nn.Parameter(torch.tensor([0.3, -0.2])) for _ in range(2))
    joint = JointOptimizer({"adam": torch.optim.Adam([first], lr=0.1), "sgd": torch.optim.SGD([second], lr=0.1, momentum=0.9)})
    if not is_late:
        CHANGED[what](joint, called)
    step, zero_grad = (find_step(joint), find_zero_grad(joint)) if short else (joint.step, joint.zero_grad)

    def closure() -> None:
        zero_grad()
        (first * second).sum().backward()

    for i in range(4):
        if is_late and i == 2:
            CHANGED[what](joint, called)
        step(closure)
    return first.tolist(), second.tolist(), called, repr(joint.state_dict())


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "meanwhile"])
@pytest.mark.parametrize("what", CHANGED)
def test_steps_of_several_optimizers_are_those_of_torch(what: str, is_late: bool) -> None:
    assert four_steps(what, is_late=is_late, short=True) == four_steps(what, is_late=is_late, short=False)


# -- in a run
@pytest.mark.parametrize("lean", [False, True])
def test_a_run_takes_the_short_ways_on_the_lean_loop_alone(lean: bool, engine_calls: list[Any]) -> None:
    trainer: Any = make_trainer(Regress)
    trainer.short_way = lean
    trainer.run(1, make_loader())
    assert bool(engine_calls) is lean


def test_a_run_ends_the_same_with_an_unknown_torch(engine_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> Trainer:
        trainer = make_trainer(Regress, scheduler=lambda step: 0.01 / (step + 1))
        trainer.run(2, make_loader())
        return trainer

    short = trained()
    assert len(engine_calls) == short.counts.step > 0
    monkeypatch.setattr(fast_step, "_verdict", ["9.9"])
    public = trained()
    assert len(engine_calls) == short.counts.step
    assert same_weights(short.model, public.model)
    assert without_times(short.history.epochs) == without_times(public.history.epochs)


def test_who_profiles_a_run_finds_the_labels() -> None:
    trainer = make_trainer(Regress)
    loader = make_loader()
    found = labels(lambda: trainer.run(1, loader))
    assert len(found) == 2 * len(loader) and len(set(found)) == 2
