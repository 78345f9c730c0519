"""The faster step through DDP ends where Lightning's own does, and is not taken where something would be missed on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from samples import make_loader, make_valid
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from nbtrain import Trainer
from nbtrain.loops import ddp_step
from nbtrain.loops.ddp_step import DDPStep, find_ddp_step
from nbtrain.loops.own_loops import use_own_loops

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_rank")]  # of the process group, on torch's side


@pytest.fixture
def one_rank() -> Iterator[None]:
    with patch.dict("os.environ"):  # which also removes what Lightning sets
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The batches that took the faster step."""
    steps: list[str] = []
    run = DDPStep.run

    def counted(step: Any, *args: Any) -> Any:
        steps.append(step.step.__name__)
        return run(step, *args)

    monkeypatch.setattr(DDPStep, "run", counted)
    return steps


class Steps(Trainer):
    """With buffers that rank 0 gives to the others, and a layer that is used in every other batch."""

    seen: list[Any]

    def train_step(self, batch: Any) -> dict[str, Any]:
        assert isinstance(self.model, nn.ModuleDict) and self.module is not None
        x, y = batch
        out = self.model["net"](x)
        pl_trainer = self.module.trainer
        if "other" in self.model and pl_trainer.fit_loop.epoch_loop.batch_idx % 2:
            out = out + self.model["other"](x)
        loss = mse_loss(out, y)
        self.seen.append((loss.item(), DistributedDataParallel._get_active_ddp_module() is pl_trainer.strategy.model))
        return {"loss": loss, "out": out.detach()}

    def test_step(self, batch: Any) -> dict[str, Any]:
        assert isinstance(self.model, nn.ModuleDict)
        loss = mse_loss(self.model["net"](batch[0]), batch[1])
        self.seen.append(loss.item())
        return {"loss": loss}


def make(*, unused: bool = False) -> Steps:
    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {"net": nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))}
    parts |= {"other": nn.Linear(8, 1)} if unused else {}
    model = nn.ModuleDict(parts)
    steps = Steps(model, "cpu", optimizer=torch.optim.Adam(model.parameters(), 1e-2), log_bar=False)
    steps.seen = []
    return steps


def fit(steps: Steps, strategy: Any = "ddp", *, own: bool = True, **options: Any) -> None:
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = L.Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, strategy=strategy, max_epochs=2, **quiet, **options)
    if own:
        use_own_loops(trainer)
    trainer.fit(steps.as_lightning_module(), make_loader(), make_valid())


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of DDP and of the run
    "plain": ({}, {}),
    "windows": ({}, {"accumulate_grad_batches": 2}),
    "unused parameters": ({"find_unused_parameters": True}, {}),
    "unused parameters in windows": ({"find_unused_parameters": True}, {"accumulate_grad_batches": 2}),
    "a static graph": ({"static_graph": True}, {}),
    "views of buckets": ({"gradient_as_bucket_view": True}, {}),
    "local buffers": ({"broadcast_buffers": False}, {}),
    "bf16": ({}, {"precision": "bf16-mixed"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_step_through_ddp_is_that_of_lightning(case: str, taken: list[str]) -> None:
    of_ddp, of_run = CASES[case]
    fast, slow = (make(unused=case.startswith("unused")) for _ in range(2))
    fit(fast, DDPStrategy(**of_ddp), **of_run)
    n_batches = len(make_loader()), len(make_valid())
    assert [taken.count(name) for name in ("training_step", "validation_step")] == [2 * n for n in n_batches]
    fit(slow, DDPStrategy(**of_ddp), own=False, **of_run)
    assert fast.seen == slow.seen and len(taken) == len(fast.seen)
    states = fast.model.state_dict(), slow.model.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_hook_of_the_exchange_is_called_in_each_batch(taken: list[str]) -> None:
    exchanged: list[Any] = []

    def exchange(state, bucket):  # type: ignore[no-untyped-def]  # torch wants its own types or none
        exchanged.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    class Registers(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.model.register_comm_hook(None, exchange)

    fit(make(), callbacks=[Registers()])
    assert len(exchanged) == taken.count("training_step") == 2 * len(make_loader())


def make_strategy(module: L.LightningModule, **options: Any) -> Any:
    strategy: Any = DDPStrategy(**options)
    strategy.connect(module)
    strategy.model = DistributedDataParallel(module)
    return strategy


class Sums(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.active: list[Any] = []

    def training_step(self, batch: Any) -> Any:
        self.active.append(DistributedDataParallel._get_active_ddp_module())
        if batch is None:
            raise ValueError
        return self.net(batch).sum()


def test_model_of_the_step_is_the_active_one_until_its_end() -> None:
    step: Any = find_ddp_step(make_strategy(Sums()), "training_step")
    with pytest.raises(ValueError):
        step(None)
    step(torch.ones(1, 2)).backward()
    assert type(step) is DDPStep and step.module.active == [step.wrapper] * 2
    assert DistributedDataParallel._get_active_ddp_module() is None


KINDS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["module", "wrapper", "everywhere"])
def test_hook_on_a_module_in_ddp_is_called_from_the_next_batch_on(place: str, kind: str, taken: list[str]) -> None:
    step: Any = find_ddp_step(make_strategy(Sums()), "training_step")
    batch, called = torch.ones(1, 2, requires_grad=True), []
    step(batch).backward()
    name = f"register_module_{kind}_hook" if place == "everywhere" else f"register_{kind}_hook"
    register = getattr(torch_module if place == "everywhere" else getattr(step, place), name)
    handle = register(lambda hooked, *args: called.append(hooked))
    step(batch).backward()
    handle.remove()
    assert (getattr(step, place) if place != "everywhere" else step.wrapper) in called and len(taken) == 1
    step(batch).backward()
    assert len(taken) == 2


def test_label_of_ddp_is_there_where_a_profiler_reads_it(taken: list[str]) -> None:
    step = find_ddp_step(make_strategy(Sums()), "training_step")
    with torch.profiler.profile() as profile:
        step(torch.ones(1, 2))
    assert "DistributedDataParallel.forward" in {event.key for event in profile.key_averages()} and not taken


def test_module_that_was_compiled_in_place_is_called_itself(taken: list[str]) -> None:
    strategy, calls = make_strategy(Sums()), []
    step: Any = find_ddp_step(strategy, "training_step")
    strategy.lightning_module._compiled_call_impl = lambda *args: calls.append(args) or strategy.lightning_module.forward(*args)
    step(torch.ones(1, 2))
    assert len(calls) == 1 and not taken


def own(*args: Any, **kwargs: Any) -> Any: ...


class OwnDDP(DistributedDataParallel): ...


ASIDE: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "own step of the strategy": lambda strategy, patches: setattr(strategy, "training_step", own),
    "replaced step of strategies": lambda strategy, patches: patches.setattr(Strategy, "training_step", own),
    "own redirection": lambda strategy, patches: setattr(strategy, "_forward_redirection", _ForwardRedirection()),
    "own forward of the model": lambda strategy, patches: setattr(strategy.model, "forward", own),
    "replaced forward of DDP": lambda strategy, patches: patches.setattr(DistributedDataParallel, "forward", own),
    "replaced call of modules": lambda strategy, patches: patches.setattr(nn.Module, "__call__", own),
    "own class of DDP": lambda strategy, patches: setattr(strategy.model, "__class__", OwnDDP),
    "another forward": lambda strategy, patches: patches.setitem(ddp_step.KNOWN_FORWARD, "_run_ddp_forward", "module"),
    "python reducer": lambda strategy, patches: setattr(strategy.model, "_use_python_reducer", True),
    "delayed exchange": lambda strategy, patches: setattr(strategy.model, "_delay_all_reduce_all_params", True),
    "a module between": lambda strategy, patches: setattr(strategy, "model", DistributedDataParallel(nn.Sequential(strategy.model.module))),
}  # fmt: skip


@pytest.mark.parametrize("case", ASIDE)
def test_step_through_ddp_is_the_strategys_own_where_something_else_may_be_meant(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = make_strategy(Sums())
    assert type(find_ddp_step(strategy, "training_step")) is DDPStep
    ASIDE[case](strategy, monkeypatch)
    found = find_ddp_step(strategy, "training_step")
    assert found == strategy.training_step


def test_step_that_is_replaced_between_epochs_is_called_in_the_next(taken: list[str]) -> None:
    calls: list[Any] = []

    class Replaces(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            step = trainer.strategy.training_step
            trainer.strategy.training_step = lambda *args: calls.append(args) or step(*args)

    fit(make(), callbacks=[Replaces()])
    assert len(calls) == taken.count("training_step") == len(make_loader())
