"""What a step asks of a GPU, beside a plain PyTorch loop that does the same: `python tests/benchmarks/gpu_calls.py`.

Kernels that are launched, copies, and times at which the host waits for the device, as CUDA's profiler counts them: they don't depend on
the machine. A small MLP with dropout and Adam on batches that are on the device. What an epoch asks once is not counted: the figures are
the difference of two epochs, by the batches that one has more. Without CUDA it says so and counts nothing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import proofs
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile
from torchmetrics.classification import MulticlassAccuracy

from nbtrain import AccumulationAddon, EMAAddon, GradientClipAddon, MetricsAddon, NonFiniteAddon, Trainer

SHORT, LONG = 24, 72  # batches
KINDS = {"launches": ("cudaLaunchKernel", "cuLaunchKernel"), "copies": ("cudaMemcpy", "cudaMemset"), "waits": ("Synchronize",)}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to("cuda")


def make_batches(n: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")) for _ in range(n)]


def counted(work: Callable[[], Any]) -> Counter[str]:
    """The calls of CUDA's runtime in `work`, by kind."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
    found: Counter[str] = Counter()
    for event in seen.events():
        for kind, names in KINDS.items():
            found[kind] += any(name in event.name for name in names) and event.name.startswith("cu")
    return found


def by_step(epoch: Callable[[list[Any]], Any]) -> dict[str, float]:
    """The calls of one batch of `epoch`."""
    short, long = make_batches(SHORT), make_batches(LONG)
    epoch(short)  # what is done once
    few, many = (counted(lambda batches=batches: epoch(batches)) for batches in (short, long))
    return {kind: (many[kind] - few[kind]) / (LONG - SHORT) for kind in KINDS}


def make_optimizer(what: str, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3, fused=what.endswith(", fused") or None)


def plain(what: str, wrap: Callable[[nn.Module], Any] = lambda model: model) -> Callable[[list[Any]], None]:
    """An epoch of a plain loop, whose model `wrap` may give to DistributedDataParallel."""
    model: Any = wrap(make_model())
    optimizer = make_optimizer(what, model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)) if what == "EMA" else None
    accuracy = MulticlassAccuracy(10, average="micro").to("cuda")

    def epoch(batches: list[Any]) -> None:
        losses: list[Tensor] = []
        if what == "evaluation":
            model.eval()
            with torch.no_grad():
                torch.stack([cross_entropy(model(x), y) for x, y in batches]).tolist()
            return
        model.train()
        for i, (x, y) in enumerate(batches):
            is_open = what == "accumulation" and i % 2 == 0
            with model.no_sync() if is_open and hasattr(model, "no_sync") else contextlib.nullcontext():
                with torch.autocast("cuda", torch.bfloat16) if what == "bf16" else contextlib.nullcontext():
                    output = model(x)
                    loss = cross_entropy(output, y)
                (loss / 2 if what == "accumulation" else loss).backward()
            losses.append(loss.detach())
            if what == "metrics":
                accuracy.update(output.detach(), y)
            if what == "clipping":
                clip_grad_norm_(model.parameters(), 1.0)
            if not is_open:
                optimizer.step()
                optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model)
        torch.stack(losses).tolist()

    return epoch


class Classify(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        output = self.model(x)
        return {"loss": cross_entropy(output, y), "output": output, "label": y}

    test_step = train_step


WAYS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": ([], {}),
    "clipping": ([GradientClipAddon], {"gradient_clip": 1.0}),
    "accumulation": ([AccumulationAddon], {"accumulate": 2}),
    "bf16": ([], {"precision": "bf16"}),
    "EMA": ([EMAAddon], {}),
    "metrics": ([MetricsAddon], {"metrics": lambda: {"accuracy": MulticlassAccuracy(10, average="micro")}, "metrics_in_training": True}),
    'nonfinite="skip"': ([NonFiniteAddon], {"nonfinite": "skip"}),
    'nonfinite="skip", fused': ([NonFiniteAddon], {"nonfinite": "skip"}),
    "states in memory": ([], {"keep_states": True}),
    "evaluation": ([], {}),
}


def ours(what: str, every_s: float | None = None, more: Sequence[Any] = ()) -> Callable[[list[Any]], None]:
    """An epoch of nbtrain with `more` addons, whose recorder reads the values of its steps every `every_s` seconds."""
    addons, options = WAYS[what]
    addons = [*addons, *more]
    options = {name: value() if callable(value) else value for name, value in options.items()}
    kind = Classify.add_on(*addons) if addons else Classify
    trainer = kind(make_model(), device="cuda", optimizer=partial(make_optimizer, what), log_bar=False, **options)
    trainer.recorder.every_s = trainer.recorder.every_s if every_s is None else every_s

    def epoch(batches: list[Any]) -> None:
        trainer.evaluate(batches) if what == "evaluation" else trainer.run(1, batches)

    return epoch


def rows() -> Iterator[str]:
    yield "| what | plain loop: launches, copies, waits | nbtrain: launches, copies, waits | launches more |"
    yield "| --- | --- | --- | --- |"
    for what in WAYS:
        theirs, found = by_step(plain(what)), by_step(ours(what))
        columns = (", ".join(f"{value:.2f}" for value in each.values()) for each in (theirs, found))
        yield f"| {what} | {' | '.join(columns)} | {found['launches'] - theirs['launches']:.2f} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}; calls of CUDA a batch.\n\n{proofs.line('gpu', proofs.source())}\n"
        )
        for row in rows():
            print(row, flush=True)
    else:
        print("There is no CUDA device here: nothing was counted.")
