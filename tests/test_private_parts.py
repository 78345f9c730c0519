"""Private names of other packages: each is listed with a test, each is still there; and the tests of those that no other test holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import private_parts
import pytest
import renamed_names
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from programs import by_commit
from samples import Regress, make_data, make_loader, make_model, make_trainer, make_valid, some
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from nbtrain import RunPaused, Trainer
from nbtrain.addons.performance import GraphedTraining
from nbtrain.data.resumable_loader import borrowed
from nbtrain.engine import pass_module
from nbtrain.engine.logged import KnownMetrics
from nbtrain.engine.meter import snapshot
from nbtrain.loggers.background import Delivery
from nbtrain.loops.batch_ways import is_plain
from nbtrain.loops.evaluation import OwnEvaluationLoop
from nbtrain.loops.fast_step import find_step
from nbtrain.loops.own_loops import use_own_loops
from nbtrain.loops.training import OwnEpochLoop
from nbtrain.optim.optimizer_state import move_with_optimizer
from nbtrain.private.lightning_loops import NEEDED
from nbtrain.private.lightning_parts import logged_step, stand_at
from nbtrain.run.lightning_trainer import _bring_back

N_PARTS = 42  # of two names
OPTIONAL = {"_forward_redirection", "_last_val_time"}  # asked for with a default, and set for Lightning alone


def test_every_private_name_is_listed_and_no_other() -> None:
    uses, entries = private_parts.uses(), private_parts.entries()
    unlisted = {use for use in uses if sum(entry.covers(use) for entry in entries) != 1}
    assert not unlisted, "each needs one entry in docs/private_parts.yaml"
    assert not [entry.path for entry in entries if not any(map(entry.covers, uses))], "no longer used: out of docs/private_parts.yaml"


def test_every_private_name_has_one_test() -> None:
    assert not {entry.test for entry in private_parts.entries() if len(private_parts.tests().get(entry.test, [])) != 1}


def test_private_names_are_still_there() -> None:
    assert not [entry.path for entry in private_parts.entries() if not private_parts.is_there(entry.path)]


def test_private_names_stand_in_one_room_and_in_the_loops_that_it_tries() -> None:
    others = {
        use for use in private_parts.uses() if not use.module.startswith(private_parts.ROOM) and use.module not in private_parts.WITHIN
    }
    assert {use.name for use in others} == private_parts.OF_PYTHON, "ask for it in nbtrain.private"


def test_names_that_the_short_loops_need_are_all_tried() -> None:
    """Those of torch are tried by what they do; a name that is only asked for with a default needs no trial."""
    tried = {word for path, names in NEEDED.items() for word in (path.rpartition(".")[2], *names.split())}
    used = {use for use in private_parts.uses() if use.module in private_parts.WITHIN}
    lightnings = [entry for entry in private_parts.entries() if not entry.path.startswith("torch.") and any(map(entry.covers, used))]
    assert {entry.name for entry in lightnings} - tried == OPTIONAL


SAID = ("about 1 ms a batch slower", "about 50 µs slower", "in this epoch are those of its rest")


@pytest.mark.parametrize("part", some(range(N_PARTS), every=N_PARTS, first=by_commit(N_PARTS)))
def test_a_renamed_name_changes_no_number(part: int) -> None:
    """A release that gives a private name another name: runs end at the same bits, and say so where they take longer."""
    names = [name for name in renamed_names.private_names()[part::N_PARTS] if renamed_names.is_defined_in_python(name)]
    usual, *renamed = renamed_names.found_with_each(names)
    for found in renamed:
        new = [note for note in found["notes"] if note not in usual["notes"]]
        assert found["digests"] == usual["digests"], found["name"]
        assert all(any(words in note for words in SAID) for note in new), found["name"]


@pytest.fixture(scope="module")
def others() -> list[dict[str, Any]]:
    """The jobs as usual, with a torch that keeps parts in other objects than dicts, and without a class of Lightning."""
    return renamed_names.found_with_each([renamed_names.HELD_OTHERWISE, "_TrainingEpochLoop"])


def test_parts_of_modules_that_torch_keeps_otherwise_change_no_number(others: list[dict[str, Any]]) -> None:
    usual, found, _ = others
    assert found["digests"] == usual["digests"] and found["notes"] == usual["notes"]


def test_a_renamed_name_is_gone(others: list[dict[str, Any]]) -> None:
    found = others[-1]
    assert [note for note in found["notes"] if "which has no _TrainingEpochLoop: runs take Lightning's own loops" in note]


def test_a_name_that_is_gone_is_noticed() -> None:
    assert not private_parts.is_there("torch.nn.Module._no_such_name") and not private_parts.is_there("torch._no_such_module.name")
    assert private_parts.is_there("torch.utils.data.DataLoader._iterator")  # only objects have it


def test_uses_are_told_from_nbtrains_own_names() -> None:
    finder = private_parts._Finder("nbtrain")
    code = (
        "class A:\n    def _own(self): self._mine = other._mine = x._theirs + y['_by_text'] + z._own\nfrom torch import _private\nf'{a}_b'"
    )
    finder.visit(private_parts.ast.parse(code))
    assert [tuple(use) for use in private_parts._foreign(finder, finder.own)] == [
        ("_private", "nbtrain", ""),
        ("_theirs", "nbtrain", "x"),
        ("_by_text", "nbtrain", ""),
    ]


# -- Lightning's loops
ADVICE = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*validation_step.*val_dataloader.*", "ignore:.*dataloader_iter.*"
)


class Steps(Trainer):
    """Steps that see the form of each batch."""

    forms: set[type]  # of the first thing in each batch

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.forms.add(type(batch[0] if isinstance(batch, list) else batch))
        x, y = batch["a"] if isinstance(batch, dict) else batch[0] if isinstance(batch[0], list) else batch
        return {"loss": mse_loss(self.model(x), y)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return {"seen": 1.0}


def fit(loader: Any, valid: Any = None, **options: Any) -> tuple[L.Trainer, Steps]:
    """One epoch on nbtrain's loops."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, num_sanity_val_steps=0, **(quiet | options))
    use_own_loops(trainer)
    model = make_model()
    steps = Steps(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), 1e-2), log_bar=False)
    steps.forms = set()
    trainer.fit(steps.as_lightning_module(), loader, valid)
    return trainer, steps


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that Lightning's fetchers fetch."""
    seen: list[Any] = []
    fetch = _DataFetcher.__next__

    def counted(fetcher: Any) -> Any:
        seen.append(fetcher)
        return fetch(fetcher)

    monkeypatch.setattr(_DataFetcher, "__next__", counted)
    return seen


@ADVICE
def test_a_single_loader_is_read_without_lightnings_fetcher(fetched: list[Any]) -> None:
    _, steps = fit(make_loader(), make_valid())
    assert not fetched and steps.forms == {torch.Tensor}


@ADVICE
def test_a_loader_in_a_list_gives_lists(fetched: list[Any]) -> None:
    _, steps = fit([make_loader()])
    assert not fetched and steps.forms == {list}


@ADVICE
def test_fetches_have_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[Any] = []
    for name in ("_on_before_fetch", "_on_after_fetch"):
        monkeypatch.setattr(OwnEpochLoop, name, labels.append)
        monkeypatch.setattr(OwnEvaluationLoop, name, labels.append)
    fit({"a": make_loader(), "b": make_loader()}, CombinedLoader([make_valid()], "max_size"))
    assert not labels


@ADVICE
def test_monitor_that_no_validation_logs_is_an_error(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="nothing")
    with pytest.raises(MisconfigurationException, match="could not find the monitored key"):
        fit(make_loader(), make_valid(), enable_checkpointing=True, callbacks=[keeper])


class Logs(L.Callback):
    """Logs the same in every batch, and reads it at once."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("both", batch_idx + 0.5, on_step=True, on_epoch=True)
        pl_module.log("step", torch.tensor(batch_idx * 2.0), on_step=True, on_epoch=False)
        pl_module.log("epoch", float(batch_idx), on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        tables: Any = trainer._results
        updated = {name: metric for name, metric in tables.items() if metric.meta.on_epoch and metric.update_called}
        means = [(name, metric.update_count, metric.compute().item()) for name, metric in updated.items()]
        self.seen.append((means, {name: float(value) for name, value in trainer.callback_metrics.items()}))


def logged(monkeypatch: pytest.MonkeyPatch, *, short: bool) -> tuple[list[Any], int]:
    """What the callback has seen in two epochs, and how many `log` calls took nbtrain's short way, where they may."""
    added: list[bool] = []
    add = KnownMetrics.add

    def counted(known: Any, module: Any, name: str, *rest: Any) -> bool:
        was_added = short and add(known, module, name, *rest)
        if name in ("both", "step", "epoch"):  # nbtrain logs too
            added.append(was_added)
        return was_added

    logs = Logs()
    with monkeypatch.context() as patch:
        patch.setattr(KnownMetrics, "add", counted)
        make_trainer(lightning={"callbacks": [logs]}).run(2, make_loader())
    return logs.seen, added.count(True)


def test_plain_log_is_that_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, n_short = logged(monkeypatch, short=True)
    expected, none = logged(monkeypatch, short=False)
    assert seen == expected and len(seen) == 10
    assert (n_short, none) == (2 * 4 * 3, 0)  # not in the first batch of an epoch


def by_lightning(module: L.LightningModule, metrics: dict[str, float], *, logger: bool) -> None:
    module.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1, logger=logger)


def test_very_many_metrics_are_logged_as_lightning_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Many(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            found = super().train_step(batch)
            return found | {f"m{i}": found["loss"].item() * i for i in range(30)}

        def test_step(self, batch: Any) -> dict[str, Any]:
            return self.train_step(batch)

    class Reads(L.Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, float]] = []

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    seen = []
    for log in (pass_module.log_means, by_lightning):
        monkeypatch.setattr(pass_module, "log_means", log)
        callback = Reads()
        make_trainer(Many, lightning={"callbacks": [callback]}).run(3, make_loader(), make_valid())
        seen.append(callback.seen)
    assert seen[0] == seen[1] and len(seen[0]) == 3 and {"train_m7", "val_m29"} < seen[0][0].keys()


def loop_attributes(loop: Any, at: str = "fit_loop") -> dict[str, str]:
    """All that a loop of Lightning and the loops in it have, as text."""
    found: dict[str, str] = {}
    for name, value in vars(loop).items():
        if hasattr(value, "load_state_dict") and hasattr(value, "trainer"):
            found |= loop_attributes(value, f"{at}.{name}")
        elif name != "trainer" and " object at " not in repr(value):
            found[f"{at}.{name}"] = repr(value)
    return found


def test_new_trainer_stands_where_one_does_that_has_loaded_a_checkpoint() -> None:
    ours, loaded = (L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False) for _ in range(2))
    stand_at(ours, epoch=3, step=12)
    loaded.fit_loop.load_state_dict(ours.fit_loop.state_dict())
    loaded.fit_loop.restarting = False
    assert loop_attributes(ours.fit_loop) == loop_attributes(loaded.fit_loop)
    assert (ours.current_epoch, ours.global_step, logged_step(ours)) == (3, 12, 12)


@pytest.mark.parametrize("more", [{}, {"prog_bar": True}], ids=["same options", "others"])
@pytest.mark.parametrize("first_epoch", [0, 1])
def test_log_of_a_metric_of_the_pass_is_as_with_lightning_alone(
    first_epoch: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same hook it is a mean of both, or refused for its other options, whoever has logged it first."""

    class LogsToo(L.Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, float]] = []

        def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch >= first_epoch and not trainer.sanity_checking:
                pl_module.log("val_loss", 7.0, batch_size=1, logger=False, **more)

        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def outcome(log_means: Callable[..., None]) -> Any:
        monkeypatch.setattr(pass_module, "log_means", log_means)
        callback = LogsToo()
        try:
            make_trainer(lightning={"callbacks": [callback]}).run(3, make_loader(), make_valid())
        except MisconfigurationException as error:
            return str(error), callback.seen
        return callback.seen

    assert outcome(pass_module.log_means) == outcome(by_lightning)


def test_requests_are_answered_in_an_evaluation() -> None:
    class Pauses(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            self.pause()
            return super().test_step(batch)

    trainer = make_trainer(Pauses, lightning={"num_sanity_val_steps": 0})
    handle = trainer.run(1, make_loader(), make_valid(), background=True)
    with pytest.raises(RunPaused, match="paused at epoch 1, validation batch 2"):
        handle.wait()
    trainer.stop()
    handle.wait()


# -- one rank of DistributedDataParallel
@pytest.fixture
def one_rank() -> Iterable[None]:
    with patch.dict("os.environ", {"MASTER_ADDR": "127.0.0.1"}):  # which also removes what Lightning sets
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of the process group, on torch's side
@pytest.mark.usefixtures("one_rank")
def test_ranks_exchange_no_gradients_where_lightning_blocks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: list[Any] = []
    no_sync = DistributedDataParallel.no_sync

    def counted(model: Any) -> Any:
        blocked.append(model)
        return no_sync(model)

    monkeypatch.setattr(DistributedDataParallel, "no_sync", counted)
    fit(make_loader(), accumulate_grad_batches=2, strategy="ddp")
    assert len(blocked) == 2  # batches 1 and 3 of five; the last one ends its window


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_rank")
def test_models_are_averaged_by_the_strategy() -> None:
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=8)
    strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=4)
    trainer, _ = fit(make_loader(), strategy=strategy)
    assert not is_plain(trainer) and trainer.global_step == len(make_loader())


# -- optimizers, tensors, loaders
@pytest.mark.parametrize(
    "move", [lambda owner: _bring_back(owner), lambda owner: move_with_optimizer(owner.model, owner.optimizer, owner.device)]
)
def test_the_state_of_an_optimizer_follows_its_model(move: Callable[[Any], None]) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    move(SimpleNamespace(model=model, optimizer=optimizer, device=torch.device("meta")))
    moved = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert len(moved) == 4 and all(value.is_meta for value in moved)


def test_client_that_is_not_reached_is_one_that_takes_every_call() -> None:
    def connect(note: Callable[[str], None]) -> Any:
        raise OSError("no route")

    delivery = Delivery("service", connect, lambda text: None)
    client = delivery.experiment
    delivery.finalize("failed")
    client["metrics"].append(1.0)
    client.log({"loss": 1.0}, step=1)


def test_short_step_counts_for_a_schedule_that_was_there_before() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    find_step(optimizer)(lambda: None)
    schedule.step()  # a warning where it knows of no step
    assert optimizer.param_groups[0]["lr"] == 0.05


class Marked(torch.Tensor):
    """A tensor whose value is not read at once, as on a GPU."""


def test_tensors_that_change_later_are_copied() -> None:
    weight = torch.zeros(2).as_subclass(Marked).requires_grad_()
    part = snapshot(weight[0])
    with torch.no_grad():
        weight.fill_(1.0)
    assert float(part) == 0.0


def test_a_borrowed_loader_has_workers_of_its_own() -> None:
    loader = DataLoader(make_data(), batch_size=16, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    first = [next(batches), next(batches)]
    with borrowed(loader) as spare:
        pass_of_copy = iter(spare)
        next(pass_of_copy)
    assert not any(worker.is_alive() for worker in pass_of_copy._workers)  # in a cycle, they would hold up whoever collects the garbage
    rest = list(batches)
    assert [len(x) for x, _ in (*first, *rest)] == [16, 16, 16, 16, 6]
    torch.testing.assert_close(torch.cat([x for x, _ in (*first, *rest)]), make_data().tensors[0])


def test_steps_before_a_capture_bring_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        name = "_accelerator_graph_capture_health_check"  # of newer ones than torch 2.9, in which it is CUDA's alone
        check = getattr(optimizer, name, None) or optimizer._cuda_graph_capture_health_check
        for place, name, value in ((torch.backends.cuda, "is_built", True), (torch.cuda, "is_available", True)):
            monkeypatch.setattr(place, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda: SimpleNamespace(is_capturing=lambda: False))
        check()
        monkeypatch.undo()

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = copy.deepcopy(torch.optim.SGD([parameter]))
    optimizer.param_groups[0]["capturable"] = True
    other = copy.deepcopy(optimizer)
    trainer: Any = SimpleNamespace(optimizers=[optimizer], precision_plugin=None)
    GraphedTraining(Any, trainer, Any, 1)  # type: ignore[arg-type]
    step()
    optimizer = other
    with pytest.warns(UserWarning, match="capturable=True"):
        step()
