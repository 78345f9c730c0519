"""Compilation, prefetching and CUDA graphs, on the CPU: backends that need no compiler, and a stand-in for CUDA's graphs."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from samples import DEVICE, Regress, make_data, make_loader, make_model, make_trainer, make_valid, same_weights, without_times
from torch import nn
from torch.nn.functional import mse_loss
from torchmetrics.regression import MeanSquaredError

from nbtrain import AddOnBase, ConfigError, MetricsAddon, OptionError, StateManagerAddon, StepError, Trainer
from nbtrain.addons.performance import (
    CompileAddon,
    CudaGraphAddon,
    CudaGraphs,
    Graphs,
    PrefetchAddon,
    _constants,
    compile_in_place,
    form_of,
)
from nbtrain.data.batch import tensors
from nbtrain.data.prefetch import Prefetcher


def train(*trainers: Any, n_epochs: int = 2, valid: Any = None) -> None:
    """Each with the same batches and random numbers."""
    for trainer in trainers:
        torch.manual_seed(5)
        trainer.run(n_epochs, make_loader(own_generator=True), valid)


# -- compilation
EAGER = {"backend": "eager"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_run_has_the_weights_of_the_plain_one(backend: str) -> None:
    plain, compiled = make_trainer(), make_trainer(compile={"backend": backend})
    train(plain, compiled, valid=make_valid())
    assert compiled.model._compiled_call_impl is not None and plain.model._compiled_call_impl is None
    assert same_weights(plain.model, compiled.model)
    assert without_times(plain.history.epochs) == without_times(compiled.history.epochs)


class Own(nn.Module):
    """A model with a `forward` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def counting(calls: list[str]) -> Callable[..., Any]:
    """A backend whose graphs tell `calls` that they run."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append("graph")
            return graph.forward(*args)

        return run

    return backend


@pytest.mark.parametrize("make", [Own, make_model])
def test_compiled_model_is_what_every_use_calls(make: Callable[[], nn.Module]) -> None:
    calls: list[str] = []
    trainer = make_trainer(model=make(), compile={"backend": counting(calls)})
    uses = [
        lambda: trainer.predict(torch.zeros(4, 8)),
        lambda: trainer.run(1, make_loader(), make_valid()),
        lambda: trainer.evaluate(make_valid()),
        lambda: trainer.inference(make_valid()),
    ]
    made = []
    for use in uses:
        use()
        made.append(len(calls))
        calls.clear()
    assert made == [1, 1 + 5 + 3, 3, 3]  # a run tries test_step once


def test_each_model_of_torchs_own_layers_has_its_own_limit_of_compilations() -> None:
    for depth in range(1, 9):  # the ninth compilation of one piece of code would be the last
        calls: list[str] = []
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)])
        compile_in_place(model, {"backend": counting(calls)})
        for training in (True, False):
            with torch.set_grad_enabled(training):
                model.train(training)(torch.zeros(4, 8))
        assert len(calls) == 2


def test_copies_and_pickles_of_a_compiled_trainer_are_compiled_again() -> None:
    trainer = make_trainer(CompiledRegress, compile=EAGER)
    trainer.run(1, make_loader())
    assert list(trainer.model.state_dict()) == list(make_model().state_dict())
    weights, trainer.optimizer = copy.deepcopy(trainer.model), None
    again = pickle.loads(pickle.dumps(trainer))
    assert weights._compiled_call_impl is None and again.model._compiled_call_impl is None
    assert torch.equal(again.predict(torch.ones(4, 8)), trainer.predict(torch.ones(4, 8)))
    assert again.model._compiled_call_impl is not None


class CompiledRegress(Regress.add_on(CompileAddon)):  # type: ignore[misc]
    """An own class, so that it is pickled by name."""


def test_lightning_checkpoint_goes_from_compiled_to_plain_and_back(tmp_path: Path) -> None:
    def trained(path: Path, **options: Any) -> Any:
        saver = L.pytorch.callbacks.ModelCheckpoint(path.parent, filename=path.stem)
        trainer = make_trainer(**options, lightning={"callbacks": [saver]})
        trainer.run(1, make_loader(own_generator=True))
        return trainer

    for name, options, others in (("compiled", {"compile": EAGER}, {}), ("plain", {}, {"compile": EAGER})):
        path = tmp_path / name / "last.ckpt"
        trainer = trained(path, **options)
        loaded = Regress.load_from_checkpoint(path, model=make_model(1), device=DEVICE, log_bar=False, **others)
        assert same_weights(loaded.model, trainer.model)
        assert torch.equal(loaded.predict(torch.ones(4, 8)), trainer.predict(torch.ones(4, 8)))


@pytest.mark.parametrize("make", [Own, make_model])
def test_summary_and_check_see_the_layers_of_a_compiled_model(make: Callable[[], nn.Module]) -> None:
    plain, compiled = make_trainer(model=make()), make_trainer(model=make(), compile=EAGER)
    loader = make_loader(64, shuffle=False)
    for trainer in (plain, compiled):
        trainer.run(1, loader, loader)
    batch = next(iter(loader))
    rows = compiled.summary(batch).rows
    compiled.check(batch)
    compiled.evaluate(loader)
    assert rows == plain.summary(batch).rows and len(rows) == 4


def test_model_that_is_compiled_already_stays_as_it_is() -> None:
    model = make_model()
    model.compile(backend="eager")
    own = model._compiled_call_impl
    make_trainer(model=model, compile={"backend": "aot_eager"}).run(1, make_loader())
    assert model._compiled_call_impl is own


def test_compile_false_switches_the_addon_off() -> None:
    trainer = make_trainer(Regress.add_on(CompileAddon), compile=False)
    trainer.run(1, make_loader())
    assert trainer.model._compiled_call_impl is None and make_trainer(Regress.add_on(CompileAddon))[CompileAddon].compile is True
    assert make_trainer(compile={})[CompileAddon].compile == {}


@pytest.mark.parametrize(
    ("compile", "kind", "text"),
    [
        ("max-autotun", ConfigError, "compile='max-autotun' is not a mode of torch.compile.\n  Did you mean 'max-autotune'?"),
        ({"mode": "defalt"}, ConfigError, "compile='defalt' is not a mode of torch.compile.\n  Did you mean 'default'?"),
        ({"fulgraph": True}, OptionError, "torch.compile takes no argument 'fulgraph'.\n  Did you mean 'fullgraph'?"),
        (3, ConfigError, "compile must be True, False, a string, a dict or None, got 3."),
    ],
)
def test_what_torch_compile_does_not_know_is_refused_at_once(compile: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        make_trainer(compile=compile)
    assert str(raised.value) == text


# -- prefetching
class Copies:
    """Stands for CudaCopies."""

    def __init__(self) -> None:
        self.started = 0

    def start(self, batch: Any) -> Any:
        self.started += 1
        return batch

    def finish(self, batch: Any) -> Any:
        return batch


def test_both_loaders_are_read_ahead_and_the_weights_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies()
    monkeypatch.setattr("nbtrain.addons.performance.prefetch", lambda loader, device: Prefetcher(loader, copies))
    plain, ahead = make_trainer(), make_trainer(Regress.add_on(PrefetchAddon))
    train(plain, ahead, valid=make_valid())
    ahead.evaluate(make_valid())
    assert copies.started == 2 * (5 + 3) + 3 and same_weights(plain.model, ahead.model)
    assert without_times(plain.history.epochs) == without_times(ahead.history.epochs)


def test_prefetching_leaves_alone_what_it_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, loader = make_trainer(Regress.add_on(PrefetchAddon), device="cpu"), make_loader()
    assert trainer._read_loader(loader, training=True) is loader
    monkeypatch.setattr("nbtrain.addons.performance.prefetch", lambda loader, device: "ahead")
    assert trainer._read_loader(loader, training=True) == "ahead" and trainer._read_loader([loader, loader], training=True) == [
        loader,
        loader,
    ]
    assert make_trainer(Regress.add_on(PrefetchAddon), prefetch=False)._read_loader(loader, training=True) is loader


def test_a_run_resumed_in_mid_epoch_is_exact_with_batches_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("nbtrain.addons.performance.prefetch", lambda loader, device: Prefetcher(loader, Copies()))
    kind = Regress.add_on(PrefetchAddon, StateManagerAddon)

    def trained(folder: str, **options: Any) -> Any:
        trainer = make_trainer(kind, save_path=tmp_path / folder, every_n_steps=2, keep_source=False)
        torch.manual_seed(5)
        trainer.run(2, make_loader(), **options)
        return trainer

    whole = trained("whole")
    saves = [path for path in (whole.run_dir / "checkpoints").glob("epoch=*") if not path.is_symlink()]
    assert len(saves) > 4 and all(same_weights(trained("again", resume=path).model, whole.model) for path in saves)


# -- CUDA graphs
class OnCpu:
    """Stands for CudaGraphs: a capture leaves no trace in weights, state and random numbers; a replay computes into the same tensors."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.trainer: Any = None

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        self.calls.append("warm up")
        yield

    def capture(self, step: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Callable[[], None]]:
        self.calls.append("capture")
        optimizer, parameters = self.trainer.optimizer, [p for p in self.trainer.model.parameters() if p.requires_grad]
        state = [value for values in optimizer.state.values() for value in values.values()]
        held = [*self.trainer.model.state_dict().values(), *state]
        before, random_state = [tensor.clone() for tensor in held], torch.get_rng_state()
        static = step()
        with torch.no_grad():
            for tensor, value in zip(held, before):
                tensor.copy_(value)
            for value in (*tensors(static), *(p.grad for p in parameters)):
                value.fill_(torch.nan)  # nothing has been computed yet
        torch.set_rng_state(random_state)
        gradients = [parameter.grad for parameter in parameters]

        def replay() -> None:
            self.calls.append("replay")
            seen = [parameter.grad for parameter in parameters]
            computed = step()
            for parameter, gradient, shown in zip(parameters, gradients, seen):
                gradient.copy_(parameter.grad)
                parameter.grad = shown  # a replay changes no attribute
            for old, new in zip(tensors(static), tensors(computed)):
                old.copy_(new)

        return static, replay


class OnDevice:
    """CUDA's graphs, which note their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.graphs: Any = None

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        self.calls.append("warm up")
        with self.graphs.warm_up():
            yield

    def capture(self, step: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Callable[[], None]]:
        self.calls.append("capture")
        static, replay = self.graphs.capture(step)
        return static, lambda: (self.calls.append("replay"), replay())[1]


class Graphed(CudaGraphAddon):
    """Notes the calls; has the stand-in where there is no device with CUDA's graphs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.used: Any = OnDevice() if DEVICE == "cuda" else OnCpu()

    def _graphs(self, device: torch.device) -> Graphs | None:
        if isinstance(self.used, OnDevice):
            self.used.graphs = super()._graphs(device)
        return self.used


def capturable(lr: Any = 1e-2) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, lr=lr, fused=True, capturable=True)


def graphed(kind: type[Trainer] = Regress, *others: type[AddOnBase], **options: Any) -> tuple[Any, list[str], list[str]]:
    """A trainer with the stand-in, the calls of it, and the notes of its runs."""
    options = {"optimizer": capturable()} | options
    trainer = make_trainer(kind.add_on(Graphed, *others), **options)
    trainer[Graphed].used.trainer = trainer
    return trainer, trainer[Graphed].used.calls, notes_of(trainer)


def notes_of(trainer: Any) -> list[str]:
    """A list to which its runs will add what they note."""
    notes: list[str] = []
    trainer.recorder.add(SimpleNamespace(update=lambda event: notes.append(event.data["text"]) if event.kind == "note" else None))
    return notes


def plain(kind: type[Trainer] = Regress, **options: Any) -> Any:
    return make_trainer(kind, **({"optimizer": capturable()} | options))


class Reads(Regress):
    """Keeps what its steps returned."""

    def metric_on_epoch_end(self) -> dict[str, Any]:
        log = self.log_train if self.mode == "train" else self.log_test
        return {"spread": torch.cat(log["output"]).std()}


@pytest.mark.parametrize("kind", [Regress, Reads])
def test_replayed_run_equals_the_plain_one_bit_for_bit(kind: type[Trainer]) -> None:
    ours, calls, notes = graphed(kind)
    theirs = plain(kind)
    train(ours, theirs, n_epochs=3, valid=make_valid())
    assert calls == ["warm up"] * 3 + ["capture"] + ["replay"] * 9 and notes == []  # 4 of 5 batches an epoch are of the captured form
    assert same_weights(ours.model, theirs.model)
    assert without_times(ours.history.epochs) == without_times(theirs.history.epochs)
    assert ours.loss_history_train == theirs.loss_history_train and ours.counts == theirs.counts


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # the callback keeps what a warm-up has computed
def test_hooks_counters_and_gradients_are_those_of_the_plain_run() -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []
            self.outputs: list[Any] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(("start", batch_idx, len(batch[0])))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
            counts = [vars(part).copy() for unit in (progress.step, progress.zero_grad) for part in (unit.total, unit.current)]
            gradients = [p.grad.clone() for p in pl_module.model.parameters()]
            self.seen.append((trainer.global_step, batch_idx, float(outputs["loss"]), outputs["loss"].requires_grad, counts, gradients))
            self.outputs.append(outputs)

    watches = Watch(), Watch()
    ours, calls, _ = graphed(lightning={"callbacks": [watches[0]]})
    theirs = plain(lightning={"callbacks": [watches[1]]})
    train(ours, theirs)
    assert calls.count("replay") == 5 and str(watches[0].seen) == str(watches[1].seen)
    for mine, other in zip(watches[0].outputs, watches[1].outputs):  # also what was kept from batch to batch
        assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


REPLAYED: dict[str, tuple[list[type[AddOnBase]], Callable[[], dict[str, Any]]]] = {  # addons beside the graph; options of both trainers
    "a schedule through a rate in a tensor": (
        [],
        lambda: {"optimizer": capturable(torch.tensor(1e-2, device=DEVICE)), "scheduler": lambda step: 1e-2 / (step + 1)},
    ),
    "mixed precision": ([], lambda: {"precision": "bf16"}),
    "compilation and prefetching": ([CompileAddon, PrefetchAddon], lambda: {"compile": EAGER}),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_what_goes_through_the_graph_is_as_through_the_loop(name: str) -> None:
    addons, options = REPLAYED[name]
    (ours, calls, notes), theirs = graphed(Regress, *addons, **options()), plain(**options())
    train(ours, theirs, valid=make_valid())
    assert calls.count("replay") == 5 and notes == [] and same_weights(ours.model, theirs.model)


def test_a_rate_that_changes_as_a_number_ends_the_replays() -> None:
    options = {"scheduler": lambda step: 1e-2 if step < 6 else 1e-3}
    (ours, calls, notes), theirs = graphed(**options), plain(**options)
    train(ours, theirs)
    assert calls.count("replay") == 2 and calls.count("capture") == 1 and same_weights(ours.model, theirs.model)
    reason = "an option of the optimizer has changed (a rate that changes must be a tensor on the device)"
    assert notes == [f"No CUDA graph: {reason}. The steps run eagerly."]


def test_a_rate_in_a_tensor_of_the_host_is_a_number_to_the_graph() -> None:
    def told(device: str) -> list[Any]:
        rate = torch.tensor(1e-2)
        optimizer = torch.optim.Adam([torch.zeros(2, device=device)], lr=rate)
        before = _constants(optimizer)
        rate.fill_(0.5)
        return [before == _constants(optimizer), _constants(optimizer)[0] == 0.5]

    assert told("cpu") == [True, False] and told("meta") == [False, True]


def test_tensors_in_lists_and_dicts_of_an_output_are_copied_too() -> None:
    class Rich(Reads):
        def train_step(self, batch: Any) -> dict[str, Any]:
            output = super().train_step(batch)
            return output | {"parts": {"x": [batch[0] * 2], "n": 3}, "share": 0.5}

        def metric_on_epoch_end(self) -> dict[str, Any]:
            self.kept = self.log_train["parts"]
            return {}

    (ours, calls, _), theirs = graphed(Rich), plain(Rich)
    train(ours, theirs)
    assert calls.count("replay") == 5
    assert all(torch.equal(a["x"][0], b["x"][0]) and a["n"] == b["n"] == 3 for a, b in zip(ours.kept, theirs.kept))


def test_layers_that_are_frozen_in_mid_run_make_a_new_graph() -> None:
    freeze = LambdaCallback(on_train_epoch_end=lambda trainer, module: module.model[0].requires_grad_(trainer.current_epoch != 1))
    options = {"lightning": {"callbacks": [freeze]}}
    (ours, calls, _), theirs = graphed(**options), plain(**options)
    train(ours, theirs, n_epochs=3)
    assert calls.count("capture") == 2 and calls.count("warm up") == 6 and same_weights(ours.model, theirs.model)


def test_batches_of_other_kinds_and_rare_forms_run_eagerly() -> None:
    class Nested(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch["pair"])

    x, y = make_data().tensors
    (nested, calls, notes), theirs = graphed(Nested), plain(Nested)
    batches = [{"pair": (x[i : i + 8], y[i : i + 8])} for i in range(0, 64, 8)]
    for trainer in (nested, theirs):
        torch.manual_seed(5)
        trainer.run(2, batches)
    rare = "no more than 3 batches had the same form (plain tensors, their shapes and dtypes)"
    assert calls == [] and notes == [f"No CUDA graph: {rare}. The steps run eagerly."] and same_weights(nested.model, theirs.model)


def test_batches_after_one_that_is_left_out_are_in_the_metrics() -> None:
    batches = [*make_loader(96)]
    batches.insert(4, None)

    class Answers(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            output = self.model(batch[0])
            return {"loss": mse_loss(output, batch[1]), "output": output, "label": batch[1]}

    kind, options = Answers.add_on(MetricsAddon), {"metrics": {"mse": MeanSquaredError()}, "metrics_in_training": True}
    (ours, calls, _), theirs = graphed(kind, **options), plain(kind, **options)
    for trainer in (theirs, ours):
        torch.manual_seed(5)
        trainer.run(1, batches)
    assert calls.count("replay") == 3 and ours.counts == theirs.counts
    assert without_times(ours.history.epochs) == without_times(theirs.history.epochs)


def test_form_tells_shapes_dtypes_names_and_containers_apart() -> None:
    x = torch.zeros(4, 2)
    same = [[x, x], [x + 1, x.t().clone().t()]]
    others = [(x, x), x, {"a": x}, {"b": x}, [x], [x, x[:2]], [x, x.double()], [x, x.to_sparse()]]
    forms = [form_of(batch) for batch in (same[0], *others)]
    assert form_of(same[0]) == form_of(same[1]) and all(a != b for i, a in enumerate(forms) for b in forms[:i])
    assert [form_of(batch) for batch in ([x, 1], {"a": [x]}, "a", None, [nn.Parameter(x)])] == [None] * 5


class Listens(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...


def with_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = capturable()(parameters)
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


REASONS: dict[str, dict[str, Any]] = {
    "a callback or the module overrides on_before_optimizer_step": {"gradient_clip": 0.5},
    "a callback or the module overrides on_after_backward": {"lightning": {"callbacks": [Listens()]}},
    "Adam is not capturable (make it with capturable=True)": {"optimizer": torch.optim.Adam},
    "SGD is not capturable (make it with capturable=True)": {"optimizer": torch.optim.SGD},
    "Adam has hooks": {"optimizer": with_hook},
    "gradients of 2 batches are accumulated": {"lightning": {"accumulate_grad_batches": 2}},
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_a_graph_can_not_do_is_said_once_and_runs_eagerly(reason: str, tmp_path: Path) -> None:
    options = copy.copy(REASONS[reason])
    (ours, calls, notes), theirs = graphed(**options), plain(**options)
    train(ours, theirs)
    train(ours, theirs, n_epochs=1)
    assert calls == [] and notes == [f"No CUDA graph: {reason}. The steps run eagerly."]
    assert same_weights(ours.model, theirs.model)


def test_the_whole_way_is_a_reason_too() -> None:
    ours, calls, notes = graphed()
    ours.short_way = False
    ours.run(1, make_loader())
    assert calls == [] and notes == [
        "No CUDA graph: each batch goes through Lightning's strategy, precision or clipping. The steps run eagerly."
    ]


def test_accumulation_that_begins_in_mid_run_is_not_replayed() -> None:
    def options() -> dict[str, Any]:
        return {"lightning": {"callbacks": [LambdaCallback(on_train_epoch_start=begin)]}}

    def begin(pl_trainer: Any, module: Any) -> None:
        pl_trainer.accumulate_grad_batches = 2 if pl_trainer.current_epoch >= 2 else 1

    (ours, calls, notes), theirs = graphed(**options()), plain(**options())
    train(ours, theirs, n_epochs=4)
    assert same_weights(ours.model, theirs.model)
    assert calls.count("replay") == 5 and notes == ["No CUDA graph: gradients of 2 batches are accumulated. The steps run eagerly."]


def test_without_cuda_it_says_so() -> None:
    trainer = make_trainer(Regress.add_on(CudaGraphAddon), device="cpu")
    notes = notes_of(trainer)
    trainer.run(1, make_loader())
    trainer.run_batch(next(iter(make_loader())))
    assert notes == ["No CUDA graph: the device is cpu. The steps run eagerly."]


def test_a_step_that_can_not_be_captured_is_named() -> None:
    class Waits(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            if "capture" in calls:
                raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
            return super().train_step(batch)

    trainer, calls, _ = graphed(Waits)
    with pytest.raises(StepError) as raised:
        trainer.run(1, make_loader())
    assert str(raised.value) == (
        "train_step can't be captured as a CUDA graph: operation not permitted when stream is capturing\n"
        "  Remove what waits for the device (.item(), .cpu(), a condition on a tensor), or leave CudaGraphAddon out."
    )


def test_too_few_warm_up_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="graph_warmup=0 must be a positive integer.\n  Give at least 1"):
        CudaGraphAddon(graph_warmup=0)


def test_cuda_is_called_in_the_order_that_pytorch_prescribes(monkeypatch: pytest.MonkeyPatch) -> None:
    diary: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Named) -> None:
            diary.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            diary.append(f"on {self.name}")

        def __exit__(self, *args: Any) -> None:
            diary.append(f"off {self.name}")

        def replay(self) -> None:
            diary.append("replay")

    def graph(graph: Any, stream: Any, capture_error_mode: str) -> Named:
        assert (graph.name, stream.name) == ("graph", "side")
        return Named(f"capture, errors {capture_error_mode}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Named("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Named("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Named("graph"))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    graphs = CudaGraphAddon()._graphs(torch.device("cuda"))
    assert isinstance(graphs, CudaGraphs)
    with graphs.warm_up():
        diary.append("step")
    warm = ["side waits for main", "on side", "step", "off side", "main waits for side"]
    output, replay = graphs.capture(lambda: {"at": list(diary)})
    replay()
    capture = ["on side", "on capture, errors thread_local"]
    assert output["at"] == [*warm, *capture]
    assert diary == [*warm, *capture, "off capture, errors thread_local", "off side", "replay"]


# -- the benchmark
@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there it measures, for minutes")
def test_benchmark_of_a_gpu_says_that_there_is_none() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "There is no CUDA device here: nothing was measured.\n")
