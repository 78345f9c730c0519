"""One function for each tool: one job of training, written as the tool's documentation shows it, with loss and accuracy tracked.

A tool is imported where it is used, so that a process holds only the tool that it measures.

- `plain` sums its two metrics as tensors and reads them once an epoch, as a loop must that is not to wait for a GPU in each step. One
  with `.item()` in each step, about as fast on a CPU, is in the table too, and one that tracks nothing.
- Lightning keeps its progress bar, checkpoint and summary, and logs step and epoch values on the bar as its chapter on logging does.
  It gets the tqdm bar and no logger: with `rich` or `tensorboard` installed its own choice would be slower.
- The HF Trainer clips gradients and schedules the rate by default; here the rate is constant, and it clips.
- Peers that draw their own order or initial weights can't end with the plain loop's weights; the table says which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workload import BATCH_SIZE, LR, N_FEATURES, Job, Trained, adam


@dataclass(frozen=True)
class Work:
    """What a run does besides training; the plain loop and nbtrain do the same."""

    valid: bool = False
    clip: float = 0.0
    accumulate: int = 1
    schedule: Callable[[int], float] | None = None
    fused: bool = False
    several: bool = False  # Muon for the matrices, AdamW for the rest
    # Made anew for each run, by the plain loop
    on_batch: Callable[[], Callable[[Tensor], Any]] | None = None  # takes the loss after each batch
    on_epoch: Callable[[], Callable[[nn.Module, Any, float], bool]] | None = None  # takes model, optimizer, mean loss; True to stop
    # and by nbtrain
    callbacks: Callable[[], list[Any]] = list  # Lightning callbacks
    addons: Callable[[], list[Any]] = list  # addon classes
    on_error: str | None = None
    keep_states: bool = False


def optimizers(params: Any, work: Work) -> list[torch.optim.Optimizer]:
    """The optimizer of a job, or two."""
    if not work.several:
        return [torch.optim.Adam(params, lr=LR, fused=work.fused)]
    params = list(params)
    matrices, vectors = ([p for p in params if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
    return [torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(vectors, lr=LR)]


def plain(job: Job, work: Work = Work()) -> Trained:
    """What everybody writes by hand."""
    model = job.model()
    optimizer, *others = optimizers(model.parameters(), work)
    loader, valid_loader = job.loader(), job.ordered_loader(job.n_valid) if work.valid else None
    on_batch, on_epoch = work.on_batch and work.on_batch(), work.on_epoch and work.on_epoch()
    n_update, n_batches = 0, len(loader)
    loss_mean = accuracy = 0.0
    for _ in range(job.n_epochs):
        model.train()
        loss_sum, n_right, n = torch.zeros(()), torch.zeros((), dtype=torch.long), 0
        for i, (x, y) in enumerate(loader, 1):
            logits = model(x)
            loss = cross_entropy(logits, y)
            (loss / work.accumulate if work.accumulate > 1 else loss).backward()
            if i % work.accumulate == 0 or i == n_batches:
                if work.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), work.clip)
                if work.schedule:
                    optimizer.param_groups[0]["lr"] = work.schedule(n_update)
                for one in (optimizer, *others):
                    one.step()
                    one.zero_grad()
                n_update += 1
            loss_sum += loss.detach() * len(y)
            n_right += (logits.argmax(1) == y).sum()
            n += len(y)
            if on_batch:
                on_batch(loss)
        loss_mean, accuracy = loss_sum.item() / n, n_right.item() / n
        if valid_loader is not None:
            plain_evaluation(model, valid_loader)
        if on_epoch and on_epoch(model, optimizer, loss_mean):
            break
    return Trained(model, loss_mean, accuracy)


def plain_evaluation(model: nn.Module, loader: Any) -> Trained:
    """The same by hand for an evaluation."""
    model.eval()
    loss_sum, n_right, n = 0.0, 0, 0
    with torch.no_grad():
        for x, y in loader:
            logits = model(x)
            loss_sum += cross_entropy(logits, y).item() * len(y)
            n_right += (logits.argmax(1) == y).sum().item()
            n += len(y)
    return Trained(model, loss_sum / n, n_right / n)


def by_hand(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    show: Callable[..., Any] | None = None,
) -> Trained:
    """The plain loop, but it reads both metrics in each step; other tools may have wrapped its parts, or `show` the metrics."""
    loss_sum, n_right, n = 0.0, 0, 0
    for x, y in loader:
        logits = model(x)
        loss = cross_entropy(logits, y)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        loss_sum += loss.item() * len(y)
        n_right += (logits.argmax(1) == y).sum().item()
        n += len(y)
        if show is not None:
            show(loss=loss_sum / n, acc=n_right / n)
    return Trained(model, loss_sum / n, n_right / n)


def plain_item(job: Job) -> Trained:
    """The plain loop with `.item()` in each step."""
    model = job.model()
    return by_hand(model, adam(model.parameters()), job.loader())


def plain_untracked(job: Job) -> Trained:
    """The plain loop, blind."""
    model = job.model()
    optimizer = adam(model.parameters())
    for x, y in job.loader():
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained(model, float("nan"), float("nan"))


def plain_tqdm(job: Job) -> Trained:
    """The plain loop with tqdm's bar, which shows the metrics."""
    from tqdm.autonotebook import tqdm  # tqdm.auto calls iter(loader) once too often, which shuffles once more

    model, bar = job.model(), tqdm(job.loader())
    return by_hand(model, adam(model.parameters()), bar, show=bar.set_postfix)


def make_ours(job: Job, work: Work = Work(), **options: Any) -> Any:
    """nbtrain's trainer for `job`, with its defaults."""
    from nbtrain import Trainer

    class Classify(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            logits = self.model(x)
            return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}

        def test_step(self, batch: Any) -> dict[str, Any]:
            return self.train_step(batch)

    kind = Classify.add_on(*work.addons())
    own = {"scheduler": work.schedule, "gradient_clip": work.clip, "on_error": work.on_error, "save_path": job.folder / "runs"}
    own["keep_states"] = work.keep_states
    lightning = {"callbacks": work.callbacks(), "accumulate_grad_batches": work.accumulate}
    return kind(job.model(), "cpu", optimizer=partial(optimizers, work=work), lightning=lightning, **own | options)


def ours(job: Job, work: Work = Work()) -> Trained:
    """nbtrain with its defaults: progress, history, events in a run folder, a copy of the best weights."""
    trainer = make_ours(job, work)
    metrics = trainer.run(job.n_epochs, job.loader(), job.ordered_loader(job.n_valid) if work.valid else None).metrics
    return Trained(trainer.model, metrics["train_loss"], metrics["train_acc"])


def ours_in_memory(job: Job, work: Work = Work()) -> Trained:
    """nbtrain with the loader for tensors in memory."""
    from nbtrain.data.tensor_loader import TensorLoader

    trainer = make_ours(job, work)
    loader = TensorLoader(*job.data(), batch_size=BATCH_SIZE, shuffle=True, generator=job.generator())
    metrics = trainer.run(job.n_epochs, loader).metrics
    return Trained(trainer.model, metrics["train_loss"], metrics["train_acc"])


def make_lightning(job: Job) -> Any:
    """A LightningModule as the chapter on logging writes it."""
    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classify(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.model(x)
            loss, accuracy = cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("acc", accuracy, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def test_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            logits = self.model(x)
            self.log("loss", cross_entropy(logits, y))
            self.log("acc", (logits.argmax(1) == y).float().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.parameters())

    return Classify()


def lightning_trainer(job: Job) -> Any:
    """Lightning's Trainer with its defaults, but for those that depend on what else is installed."""
    import lightning as L
    from lightning.pytorch.callbacks import TQDMProgressBar

    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "default_root_dir": job.folder}
    return L.Trainer(max_epochs=job.n_epochs, callbacks=[TQDMProgressBar()], **options)


def lightning(job: Job) -> Trained:
    """Lightning as its documentation shows."""
    module, trainer = make_lightning(job), lightning_trainer(job)
    trainer.fit(module, job.loader())
    metrics = trainer.callback_metrics
    return Trained(module.model, metrics["loss_epoch"].item(), metrics["acc_epoch"].item())


def fabric(job: Job) -> Trained:
    """Lightning Fabric: the plain loop with its setup."""
    from lightning import Fabric

    tool = Fabric(accelerator="cpu", devices=1)
    model = job.model()
    wrapped, optimizer = tool.setup(model, adam(model.parameters()))
    trained = by_hand(wrapped, optimizer, tool.setup_dataloaders(job.loader()), tool.backward)
    return replace(trained, model=model)


def accelerate(job: Job) -> Trained:
    """HF accelerate: the plain loop with its `prepare`."""
    from accelerate import Accelerator

    tool = Accelerator(cpu=True)
    model = job.model()
    wrapped, optimizer, loader = tool.prepare(model, adam(model.parameters()), job.loader())
    return replace(by_hand(wrapped, optimizer, loader, tool.backward), model=model)


def hf_trainer(job: Job) -> Trained:
    """HF Trainer with its bar; accuracy by `compute_loss`, where its documentation puts what is done with outputs."""
    from transformers import Trainer, TrainingArguments

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = job.model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.mlp(x)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    class Tracking(Trainer):
        n_right = 0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
            outputs = model(**inputs)
            self.n_right += (outputs["logits"].argmax(1) == inputs["labels"]).sum().item()
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    model = Classifier()
    optimizer = adam(model.parameters())
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    options: dict[str, Any] = {"num_train_epochs": job.n_epochs, "per_device_train_batch_size": BATCH_SIZE, "report_to": "none"}
    options |= {"output_dir": str(job.folder), "use_cpu": True, "save_strategy": "no"}
    rows = [{"x": x, "labels": y} for x, y in zip(*job.data())]
    trainer = Tracking(model, TrainingArguments(**options), train_dataset=rows, optimizers=(optimizer, constant))  # type: ignore[arg-type]
    result = trainer.train()
    return Trained(model.mlp, result.training_loss, trainer.n_right / len(rows))


def fastai(job: Job) -> Trained:
    """fastai's Learner, which also records training metrics."""
    import fastai.callback.progress  # noqa: F401  the bar
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.metrics import accuracy
    from fastai.optimizer import OptimWrapper

    model = job.model()
    learner = Learner(
        DataLoaders(job.loader(), job.ordered_loader(1)),
        model,
        loss_func=nn.CrossEntropyLoss(),
        opt_func=partial(OptimWrapper, opt=torch.optim.Adam),
        lr=LR,
        metrics=accuracy,
        train_bn=False,
    )
    learner.recorder.train_metrics = True
    learner.fit(job.n_epochs, LR)
    loss_mean, accuracy_mean = learner.recorder.values[-1][:2]
    return Trained(model, loss_mean, accuracy_mean)


def ignite(job: Job) -> Trained:
    """ignite's supervised trainer with two metrics and its bar."""
    from ignite.engine import create_supervised_trainer
    from ignite.handlers import ProgressBar
    from ignite.metrics import Accuracy, Average

    model = job.model()
    trainer = create_supervised_trainer(
        model, adam(model.parameters()), cross_entropy, output_transform=lambda x, y, y_pred, loss: (loss.item(), y_pred, y)
    )
    Average(output_transform=lambda output: output[0]).attach(trainer, "loss")
    Accuracy(output_transform=lambda output: output[1:]).attach(trainer, "acc")
    ProgressBar().attach(trainer, output_transform=lambda output: {"loss": output[0]})
    metrics = trainer.run(job.loader(), max_epochs=job.n_epochs).metrics
    return Trained(model, metrics["loss"], metrics["acc"])


def skorch(job: Job) -> Trained:
    """skorch's classifier, with the accuracy scored batch by batch."""
    from skorch import NeuralNetClassifier
    from skorch.callbacks import BatchScoring

    x, y = job.data()
    score = BatchScoring("accuracy", name="train_acc", on_train=True, lower_is_better=False)
    net = NeuralNetClassifier(
        job.model(),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=LR,
        max_epochs=job.n_epochs,
        batch_size=BATCH_SIZE,
        train_split=None,
        iterator_train__shuffle=True,
        callbacks=[("train_acc", score)],
    )
    net.fit(x, y)
    return Trained(net.module_, net.history[-1, "train_loss"], net.history[-1, "train_acc"])


def keras(job: Job) -> Trained:
    """Keras 3 on torch, with `compile` and `fit`."""
    import os

    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    class Tick(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            job.clock.tick()
            return x

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((N_FEATURES,)), Tick(), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(LR), loss=loss, metrics=["accuracy"])
    job.clock.start()  # the model was called while it was built
    history = model.fit(job.loader(), epochs=job.n_epochs).history
    return Trained(None, history["loss"][-1], history["accuracy"][-1])


def ours_evaluation(job: Job) -> Trained:
    """`evaluate` of nbtrain's trainer."""
    trainer = make_ours(job)
    metrics = trainer.evaluate(job.ordered_loader(job.n_steps))
    return Trained(trainer.model, metrics["loss"], metrics["acc"])


def lightning_evaluation(job: Job) -> Trained:
    """Lightning's `test`."""
    module = make_lightning(job)
    (metrics,) = lightning_trainer(job).test(module, job.ordered_loader(job.n_steps), verbose=False)
    return Trained(module.model, metrics["loss"], metrics["acc"])


def by_hand_evaluation(job: Job) -> Trained:
    """The plain evaluation of an untrained model."""
    return plain_evaluation(job.model(), job.ordered_loader(job.n_steps))
