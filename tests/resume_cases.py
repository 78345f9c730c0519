"""Kinds of models, optimizers, schedules, loaders and settings from which runs are drawn that are broken off and resumed.

Each kind is a factory by name, so that two processes make the same. To try another kind, add a line to its list: the nets draw
from the lists as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from damage import damage, places
from samples import DEVICE, Augmented, Breaks, Broken, make_data, make_loader, make_valid, without_times
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from nbtrain import (
    AccumulationAddon,
    EarlyStoppingAddon,
    EMAAddon,
    FreezeAddon,
    MetricsAddon,
    MultiOptimizerTrainer,
    SeededLoader,
    StateManagerAddon,
    TensorLoader,
    Trainer,
)
from nbtrain.checkpoint.files import progress_of
from nbtrain.optim.joint_optimizer import JointOptimizer


# -- models: a vector of 8 in, a number out
class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 1, dtype=dtype)

    def hidden(self, x: Tensor) -> Tensor:
        return self.body(x.to(self.body.weight.dtype)).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x)).to(x.dtype)  # a loss of two dtypes has no gradients in torch 2.9


class Scaled(Net):
    """Divides by a running maximum, which is in a buffer outside of the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.training:
            self.largest = torch.maximum(self.largest, h.detach().amax(0))
        return self.head(h / self.largest)


class Counting(Net):
    """Its output depends on a number, a flag, a list, a dict, a set and a tensor in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.n_calls, self.warm, self.recent, self.by_size, self.sizes = 0, False, [0.0], {"n": 0}, {0}
        self.memory = torch.zeros(1)
        self.start: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.n_calls += 1
            self.warm = self.n_calls > 3
            self.recent = [*self.recent, float(y.detach().mean())][-3:]
            self.by_size["n"] += len(x)
            self.sizes.add(len(x) % 7)
            self.memory = 0.9 * self.memory.to(y.device) + y.detach().mean()
            self.start = y.detach()[:1] if self.start is None else self.start
        shift = 0.01 * self.n_calls + self.warm + sum(self.recent) + 0.001 * self.by_size["n"] + len(self.sizes) + self.memory.to(y.device)
        return y + 0.1 * shift + (self.start if self.start is not None else 0)


class Tally:
    """An object of a small class."""

    def __init__(self) -> None:
        self.n, self.seen = 0, [torch.zeros(1)]


class Objects(Net):
    """Keeps its numbers in an object of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.tally.n += 1
            self.tally.seen[0] = self.tally.seen[0].to(x.device) * 0.5 + x.mean()
        return super().forward(x) * (1 + 0.1 * self.tally.n) + self.tally.seen[0].to(x.device)


class Extra(Net):
    """Has an extra state of any plain kind."""

    def __init__(self, wrap: Callable[[float], Any], unwrap: Callable[[Any], float]) -> None:
        super().__init__()
        self._scale, self.wrap, self.unwrap = {"": 1.0}, wrap, unwrap

    def get_extra_state(self) -> Any:
        return self.wrap(self._scale[""])

    def set_extra_state(self, state: Any) -> None:
        self._scale = {"": self.unwrap(state)}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._scale[""] *= 0.98
        return super().forward(x) * self._scale[""]


class Noisy(Net):
    """Draws from its generators, of three libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_noise, self.python_noise = torch.Generator().manual_seed(3), random.Random(3)
        self.numpy_noise, self.old_noise = np.random.default_rng(3), np.random.RandomState(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(len(x), 16, generator=self.torch_noise).to(x.device) + self.python_noise.random()
        return self.head(self.hidden(x) + 0.1 * (noise + self.numpy_noise.normal() + self.old_noise.rand()))


class Growing(Net):
    """Keeps all it has seen in a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        return super().forward(x) + (self.seen.mean() if len(self.seen) else 0)


class Observed(Net):
    """Quantisation-aware: observers change the shapes of their buffers when they load."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

        self.fake = FakeQuantize(
            observer=MovingAveragePerChannelMinMaxObserver,
            quant_min=0,
            quant_max=255,
            dtype=torch.quint8,
            qscheme=torch.per_channel_affine,
            ch_axis=1,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fake(self.hidden(x)))


class Metered(Net):
    """Scales by a metric of torchmetrics, which has no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.mean.update(y.detach().abs())
        return y / (1 + self.mean.compute()) if self.mean.update_called else y


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.hidden(x))))


class Recurrent(Net):
    """Carries its hidden state from batch to batch, with a graph; the LSTM keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.carried = nn.LSTM(16, 16, batch_first=True), None

    def forward(self, x: Tensor) -> Tensor:
        start = (
            None if self.carried is None else tuple(t.detach().mean(1, keepdim=True).expand(-1, 1, -1).contiguous() for t in self.carried)
        )
        h, carried = self.lstm(self.hidden(x).unsqueeze(0), start)
        if self.training:
            self.carried = carried
        return self.head(h[0])


class Encoder(nn.Module):
    """A transformer of Hugging Face with dropout, over the numbers of the vector."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        self.bert, self.head = BertModel(BertConfig(vocab_size=8, **sizes)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bert(inputs_embeds=x.unsqueeze(1)).pooler_output)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "compiled": lambda: torch.compile(Normed(), backend="eager"),  # pyright: ignore[reportReturnType]
    "transformers": Encoder,
    "batch norm and dropout": Normed,
    "bf16 weights": lambda: Net(torch.bfloat16),
    "a buffer that is not persistent": Scaled,
    "counters": Counting,
    "an object": Objects,
    "an extra state that is a dict": lambda: Extra(lambda v: {"scale": v}, lambda s: s["scale"]),
    "an extra state that is a number": lambda: Extra(float, float),
    "an extra state that is a tensor": lambda: Extra(lambda v: torch.tensor(v, dtype=torch.float64), float),
    "generators": Noisy,
    "a buffer that grows": Growing,
    "observers": Observed,
    "a metric": Metered,
    "a recurrent net": Recurrent,
}


# -- optimizers
class Wide(torch.optim.Optimizer):
    """Momentum in 32 bits and a count in integers for weights of any dtype, and a text."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(p, group["lr"])
        return loss

    def _update(self, p: Tensor, lr: float) -> None:
        state = self.state[p]
        if not state:
            state.update(
                mean=torch.zeros_like(p, dtype=torch.float32),
                n=torch.zeros((), dtype=torch.int64),
                kind="wide",
                parts=[torch.zeros(2).double()],
            )
        state["n"] += 1
        state["parts"][0] += 1 / 3
        assert p.grad is not None
        state["mean"].lerp_(p.grad.float(), 0.1)
        p.add_(-(lr + 1e-4 * float(state["n"]) + 1e-4 * float(state["parts"][0].sum()) + 1e-3 * (state["kind"] == "wide")) * state["mean"])


def _of(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: getattr(torch.optim, name)(params, **{"lr": 1e-2} | options)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": _of("SGD", momentum=0.9),
    "Adam": _of("Adam"),
    "AdamW": _of("AdamW", amsgrad=True),
    "NAdam": _of("NAdam"),
    "RAdam": _of("RAdam"),
    "ASGD": _of("ASGD", t0=2.0),
    "RMSprop": _of("RMSprop", momentum=0.5, centered=True),
    "Adagrad": _of("Adagrad"),
    "Adadelta": _of("Adadelta"),
    "Rprop": _of("Rprop"),
    "Adamax": _of("Adamax"),
    "states of other dtypes": Wide,
    "several": lambda params: several(list(params)),
}


def several(params: list[nn.Parameter]) -> JointOptimizer:
    """Two optimizers on one loss; of one parameter alone, one."""
    parts: dict[str, Optimizer] = {"sgd": torch.optim.SGD(params[:1], lr=0.02, momentum=0.9)}
    return JointOptimizer(parts | ({"adam": torch.optim.Adam(params[1:], lr=0.01)} if params[1:] else {}))


# -- schedules: options of the trainer
SCHEDULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "none": lambda optimizer: {},
    "an instance by epoch": lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.5)},
    "an instance by batch": lambda optimizer: {"scheduler": StepLR(optimizer, 2, 0.9), "scheduler_step_on_batch": True},
    "a cosine": lambda optimizer: {"scheduler": CosineAnnealingLR(optimizer, 3)},
    "a plateau": lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)},
    "a factory": lambda optimizer: {"scheduler": lambda optimizer, plan: LambdaLR(optimizer, lambda i: 1 / (1 + i / plan.total_steps))},
    "one cycle": lambda optimizer: {
        "scheduler": lambda optimizer, plan: OneCycleLR(optimizer, 0.02, total_steps=plan.total_steps, cycle_momentum=False)
    },
    "a function": lambda optimizer: {"scheduler": lambda step: 0.02 * 0.95**step},
}


# -- loaders
class Own(Sampler[int]):
    """An order drawn from the generator of the sampler."""

    def __init__(self, n: int) -> None:
        self.n, self.generator = n, torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.n, generator=self.generator).tolist()


class Stream(IterableDataset[Any]):
    """Five batches, without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from make_loader(own_generator=True)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": make_loader,
    "a generator of its own": lambda: make_loader(own_generator=True),
    "augmented": lambda: DataLoader(Augmented(), 16, shuffle=True),
    "in memory": lambda: TensorLoader(make_data(), batch_size=16, shuffle=True),
    "the sampler's own generator": lambda: DataLoader(make_data(), 16, sampler=Own(70)),
    "seeded samples": lambda: SeededLoader(Augmented(), 16),
    "a stream": lambda: DataLoader(Stream(), batch_size=None),
    "torchdata": lambda: StatefulDataLoader(Augmented(), 16, shuffle=True),
    "workers": lambda: DataLoader(Augmented(), 16, shuffle=True, num_workers=2),
    "workers of torchdata": lambda: StatefulDataLoader(Augmented(), 16, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(make_data(), 16, shuffle=True, num_workers=2, persistent_workers=True),
}
WITHOUT_LENGTH = {"a stream"}
SLOW = {"workers", "workers of torchdata", "workers that stay", "compiled", "transformers"}  # a tenth as often
VALID_LOADERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "in order": make_valid,
    "shuffled": lambda: make_loader(40),
}


# -- steps
class Steps(Trainer):
    """Predicts one number."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        output = self.model(x).float()
        return {"loss": mse_loss(output, y.float()), "output": output, "label": y}

    def test_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        output = self.model(x).float()
        return {"loss": mse_loss(output, y.float()), "output": output, "label": y}


class Counted(Steps):
    """Its loss depends on what the steps have left in the trainer."""

    n_seen = 0
    shared: list[int] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        self.n_early, self.noise = 0, torch.Generator().manual_seed(5)
        super().__init__(*args, **options)
        self.recent, self.mean, self.tally, self.width = [0.0], torch.zeros(()), Tally(), 3
        self.shared.clear()

    def train_step(self, batch: Any) -> dict[str, Any]:
        found = super().train_step(batch)
        self.n_seen += len(batch[0])
        self.n_early += 1
        self.mean = 0.5 * self.mean + found["loss"].detach()
        self.recent.append(float(self.mean))
        self.shared.append(1)
        self.tally.n += 1
        weight = 1 + self.n_seen / 100 + self.n_early + sum(self.recent[-2:]) + len(self.shared) + self.tally.n
        return found | {"loss": found["loss"] * weight + torch.rand((), generator=self.noise)}


class Logging(Steps):
    """Logs with Lightning's log, with four reductions, and not in each batch."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        found = super().train_step(batch)
        for name, options in (("a", {}), ("b", {"reduce_fx": "max"}), ("c", {"reduce_fx": "sum"}), ("d", {"on_step": True})):
            self.log(f"logged_{name}", found["output"].detach().mean(), on_epoch=True, **options)
        if len(batch[0]) < 16:
            self.log("seldom", found["loss"].detach(), on_epoch=True, on_step=False)
        return found


class Measured(Steps):
    """Updates metrics of torchmetrics in the steps, and reads them in the end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.errors = MetricCollection([MeanSquaredError(), MeanAbsoluteError()])

    def train_step(self, batch: Any) -> dict[str, Any]:
        found = super().train_step(batch)
        self.errors.update(found["output"].detach(), found["label"])
        return found

    def metric_on_epoch_end(self) -> dict[str, Any] | None:
        if self.mode == "test":
            return None
        found = {name: float(value) for name, value in self.errors.compute().items()}
        self.errors.reset()
        return found


class SteppingByHand(Steps):
    """Steps its optimizer in each second batch, on the gradients of both."""

    automatic_optimization = False
    n_waiting = 0

    def train_step(self, batch: Any) -> dict[str, Any]:
        found = super().train_step(batch)
        self.backward(found["loss"])
        self.n_waiting += 1
        if self.n_waiting == 2:
            self.optimizer.step()  # pyright: ignore[reportOptionalMemberAccess]
            self.optimizer.zero_grad()  # pyright: ignore[reportOptionalMemberAccess]
            self.n_waiting = 0
        return found


class InTurn(MultiOptimizerTrainer):
    """Two parts, each with its optimizer: the second predicts what the first one leaves."""

    def train_step_first(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"loss": mse_loss(self.model["first"](x).float(), y.float())}

    def train_step_second(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        rest = y.float() - self.model["first"](x).float()
        return {"loss": mse_loss(self.model["second"](x).float(), rest)}

    def test_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        output = self.model["first"](x).float() + self.model["second"](x).float()
        return {"loss": mse_loss(output, y.float()), "output": output, "label": y}


STEPS: dict[str, type[Trainer]] = {"plain": Steps, "counted": Counted, "logging": Logging, "measured": Measured}


# -- LightningModules, with what they configure and log
class Lit(L.LightningModule):
    """Logs metrics as objects, for the epoch."""

    n_optimizers = 1

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net, self.make_optimizer, self.configure = net, optimizer, configure
        self.train_error, self.val_error, self.errors = MeanSquaredError(), MeanAbsoluteError(), MetricCollection([MeanSquaredError()])

    def loss(self, batch: Any, error: Any) -> Tensor:
        output = self.net(batch[0]).float()
        error.update(output.detach(), batch[1].float())
        return mse_loss(output, batch[1].float())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, self.train_error)
        self.errors.update(batch[0][:, :1], batch[1])
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        self.log("mean", loss.detach(), on_epoch=True)
        self.log_dict(self.errors, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch, self.val_error)
        self.log("val_loss", loss)
        self.log("val_error", self.val_error)

    def configure_optimizers(self) -> Any:
        return self.configure(self.make_optimizer(self.net.parameters()))


class ByHand(Lit):
    """Steps two optimizers by hand, the second one in every other batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        loss = super().training_step(batch, batch_idx)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers() or ():  # pyright: ignore[reportGeneralTypeIssues]
            schedule.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.net.parameters())
        optimizers = [self.make_optimizer(parameters[:2]), self.make_optimizer(parameters[2:])]
        return optimizers, [StepLR(optimizers[0], 1, 0.5), CosineAnnealingLR(optimizers[1], 3)]


def _with(schedule: Callable[[Any], Any], **how: Any) -> Callable[[Any], Any]:
    return lambda optimizer: {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), **how}}


def _plateau(optimizer: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


CONFIGURED: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: optimizer,
    "by epoch": lambda optimizer: ([optimizer], [StepLR(optimizer, 1, 0.5)]),
    "by step": _with(lambda optimizer: StepLR(optimizer, 2, 0.9), interval="step"),
    "every second step": _with(lambda optimizer: StepLR(optimizer, 1, 0.9), interval="step", frequency=2),
    "every second epoch": _with(lambda optimizer: CosineAnnealingLR(optimizer, 3), frequency=2),
    "a plateau of the training": _with(_plateau, monitor="train_error"),
    "a plateau by step": _with(_plateau, monitor="mean_step", interval="step"),
    "two of them": lambda optimizer: (
        [optimizer],
        [StepLR(optimizer, 1, 0.5), {"scheduler": StepLR(optimizer, 2, 0.9), "interval": "step"}],
    ),
    "in sequence": lambda optimizer: ([optimizer], [SequentialLR(optimizer, [StepLR(optimizer, 1, 0.5), StepLR(optimizer, 1, 0.9)], [1])]),
}


# -- settings: addons, and options
def spread(y_true: Any, y_pred: Any) -> float:
    return float((y_true - y_pred).std())


def _metrics() -> list[Any]:
    return [spread, MeanSquaredError(), MetricCollection([MeanAbsoluteError(), MeanSquaredError()], prefix="all_")]


SETTINGS: dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]] = {
    "none": lambda: ([], {}),
    "accumulation": lambda: ([AccumulationAddon], {"accumulate": 2}),
    "accumulation by a dictionary": lambda: ([AccumulationAddon], {"accumulate": {0: 1, 3: 2, 6: 3}}),
    "metrics": lambda: ([MetricsAddon], {"metrics": _metrics(), "metrics_in_training": True}),
    "averages": lambda: ([EMAAddon], {"ema_decay": 0.9}),
    "frozen for an epoch": lambda: ([FreezeAddon], {"freeze": {"head": range(1, 2)}}),
    "the best restored, without a file of it": lambda: ([EarlyStoppingAddon], {"patience": 9, "restore_best": True, "save_best": False}),
    "clipping": lambda: ([], {"gradient_clip": 0.1}),
    "half precision": lambda: ([], {"precision": "bf16-true"}),
    "double precision": lambda: ([], {"precision": "64-true"}),
    "mixed precision": lambda: ([], {"precision": "bf16"}),
    "validation within the epoch": lambda: ([], {"lightning": {"val_check_interval": 2}}),
    "a folder without pickles": lambda: ([], {"save_format": "safetensor"}),
    "Lightning's own loops": lambda: ([], {"lean": False}),
    "averages and accumulation by a dictionary": lambda: (
        [EMAAddon, AccumulationAddon],
        {"ema_decay": 0.9, "accumulate": {0: 1, 3: 2, 6: 3}},
    ),
    "states in memory": lambda: ([], {"keep_states": True}),
    "what is trained alone": lambda: ([], {"save_weights": "trainable"}),
    "the best within the epoch, of what is trained": lambda: (
        [EarlyStoppingAddon],
        {"patience": 99, "restore_best": True, "save_weights": "trainable", "lightning": {"val_check_interval": 2}},
    ),
}
_WITHIN = ("validation within the epoch", "the best within the epoch, of what is trained")
_FROZEN = ("what is trained alone", "the best within the epoch, of what is trained")
# Those that need nothing of a step but its loss, and one optimizer: others train with them, too
FOR_ALL = (
    "none",
    "averages",
    "clipping",
    "validation within the epoch",
    "a folder without pickles",
    "Lightning's own loops",
    "states in memory",
)
WHO = ("Trainer", "Trainer by hand", "MultiOptimizerTrainer", "LightningModule", "LightningModule by hand")


@dataclass(frozen=True)
class Case:
    """A run, by the names of its kinds. `every`: updates between two saves. `breaks`: the batches after which it is broken off.

    `flips`: the seed of the bits that are flipped in the newest checkpoint before it is resumed, where there is an older one too.
    `rewinds`: the epoch to which the run goes back after its end, to be trained again; `branches`: by a branch that goes on from there.
    """

    model: str = "plain"
    optimizer: str = "Adam"
    schedule: str = "none"
    loader: str = "shuffled"
    valid: str = "none"
    steps: str = "plain"
    setting: str = "none"
    every: int = 1
    breaks: tuple[int, ...] = (7,)
    flips: int | None = None
    rewinds: int | None = None
    branches: bool = False
    who: str = "Trainer"

    def make(self, folder: Path, seed: int, callbacks: list[Any]) -> Any:
        """A new trainer, as another process would make it: with random numbers of `seed`, and the same weights."""
        torch.manual_seed(0)
        model = MODELS[self.model]()
        addons, options = SETTINGS[self.setting]()
        lean = options.pop("lean", True)
        lightning = {**options.pop("lightning", {}), "callbacks": callbacks}
        options = {
            "save_path": folder,
            "every_n_steps": self.every,
            "keep_source": False,
            "log_bar": False,
            "nonfinite": "ignore",
        } | options
        trainer = self.made(model, [StateManagerAddon, *addons], {**options, "lightning": lightning})
        trainer.short_way = lean
        if self.who == "Trainer by hand":
            trainer.n_waiting = 0  # in the instance, as after a run
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return trainer

    def made(self, model: nn.Module, addons: list[Any], options: dict[str, Any]) -> Any:
        """A trainer of this kind, with its optimizers and schedules."""
        kind: Any = {"MultiOptimizerTrainer": InTurn, "Trainer by hand": SteppingByHand}.get(self.who, STEPS[self.steps])
        kind = kind.add_on(*addons) if addons else kind
        make_optimizer = OPTIMIZERS[self.optimizer]
        if self.setting in _FROZEN:
            next(model.parameters()).requires_grad_(False)
        if self.who in ("Trainer", "Trainer by hand"):
            optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
            return kind(model, DEVICE, optimizer=optimizer, **SCHEDULES[self.schedule](optimizer), **options)
        if self.who == "MultiOptimizerTrainer":
            parts = nn.ModuleDict({"first": model, "second": Normed()})
            optimizers = {"first": make_optimizer(parts["first"].parameters()), "second": OPTIMIZERS["Adam"](parts["second"].parameters())}
            schedules = {"first": StepLR(optimizers["first"], 1, 0.5), "second": StepLR(optimizers["second"], 2, 0.9)}
            return kind(parts, DEVICE, optimizers=optimizers, schedulers=schedules if self.schedule != "none" else None, **options)
        module = (ByHand if "by hand" in self.who else Lit)(model, make_optimizer, CONFIGURED[self.schedule])
        return kind.from_lightning(module, device=DEVICE, **options)

    def run(self, trainer: Any, n_epoch: int = 3, **options: Any) -> Any:
        return trainer.run(n_epoch, LOADERS[self.loader](), VALID_LOADERS[self.valid](), **options)


def draw(chance: random.Random) -> Case:
    """A case of kinds that go together, for any kind of trainer, which nothing breaks off."""

    def one(kinds: Any) -> str:
        return chance.choice([name for name in kinds if name not in SLOW or chance.random() < 0.1])

    who = one(WHO)
    schedules = SCHEDULES if who in ("Trainer", "Trainer by hand") else CONFIGURED if who == "LightningModule" else ("none", "by epoch")
    case = Case(
        model=one(MODELS),
        optimizer=one(OPTIMIZERS),
        schedule=one(schedules),
        loader=one(LOADERS),
        valid=one(VALID_LOADERS),
        steps=one(STEPS if who == "Trainer" else ("plain",)),
        setting=one(SETTINGS if who == "Trainer" else FOR_ALL),
        every=chance.choice([1, 1, 2, 3]),
        breaks=(),
        who=who,
    )
    return case if fits(case) else draw(chance)


def fits(case: Case) -> bool:
    """Can these kinds be in one run?"""
    needs_length = case.schedule in ("a factory", "one cycle") or case.setting in _WITHIN
    one_dtype = case.setting not in ("half precision", "double precision") or case.model in ("plain", "batch norm and dropout", "counters")
    unchanged = case.setting != "frozen for an epoch" or case.schedule != "a plateau"
    return (
        not (needs_length and case.loader in WITHOUT_LENGTH)
        and not (case.who == "LightningModule by hand" and case.setting == "clipping")
        and one_dtype
        and unchanged
        and not (case.setting in _WITHIN and case.valid == "none")
    )


def outcome(trainer: Any) -> dict[str, Any]:
    """Everything that must be equal, as text: a NaN equals a NaN."""
    history = trainer.history
    own = {
        name: value for name, value in vars(trainer).items() if name not in trainer.own_names and name not in ("errors", "tally", "noise")
    }
    return {
        "weights": exact(trainer.model.state_dict()),
        "buffers": exact(dict(trainer.model.named_buffers())),
        "attributes": exact(own),
        "best weights": exact(trainer.best_weights),
        "optimizer": exact(trainer.optimizer_states()),
        "epochs": repr(without_times(history.epochs)),
        "best": repr(without_times([history.best] if history.best is not None else [])),
        "steps": repr({phase: {name: list(table[name]) for name in table.columns} for phase, table in history.steps.items()}),
        "counts": repr(trainer.counts),
        "metrics": repr((trainer.train_metrics, trainer.test_metrics)),
        "random": repr((torch.rand(3).tolist(), torch.rand(3, device=DEVICE).tolist(), random.random(), np.random.rand())),
    }


def exact(value: Any) -> Any:
    """`value` with tensors as text that shows dtype and all digits."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.detach().double().tolist() if value.is_floating_point() else value.tolist()}"
    if isinstance(value, dict):
        return {str(key): exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)


def differences(case: Case, folder: Path) -> list[str]:
    """Run the case twice, once broken off. Returns the parts that differ in the end."""
    whole = case.make(folder / "whole", seed=1, callbacks=[])
    case.run(whole)
    expected, found = outcome(whole), broken(case, folder / "broken")
    return [part for part in expected if found[part] != expected[part]]


def flip(case: Case, folder: Path) -> None:
    """Damage the newest checkpoint in `folder`, as the case says, once."""
    saved = sorted(folder.glob("run-*/checkpoints/epoch=*"), key=lambda path: progress_of(path.name) or (0, 0))
    done = folder / "damaged"
    if case.flips is not None and len(saved) > 1 and not (done.exists() and done.read_text() == saved[-1].name):
        done.write_text(saved[-1].name)
        chance = random.Random(case.flips)
        damage(chance.choice(places(saved[-1])), chance)


def broken(case: Case, folder: Path) -> dict[str, Any]:
    """Run to the end in several trainers. Each begins with other random numbers, unless nothing was saved before it."""
    for n, breaks in enumerate(case.breaks):
        saved = any(folder.glob("run-*/checkpoints/epoch=*"))
        trainer = case.make(folder, seed=7 + n if saved else 1, callbacks=[Breaks(breaks)])
        try:
            case.run(trainer, resume="auto")
            return outcome(trainer)
        except Broken:
            flip(case, folder)
    saved = any(folder.glob("run-*/checkpoints/epoch=*"))
    trainer = case.make(folder, seed=99 if saved else 1, callbacks=[])
    case.run(trainer, resume="auto")
    return outcome(trainer)
