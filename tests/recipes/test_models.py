"""Models with special losses or with state beside the weights: sequences, graphs, teachers, queues, noise."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from side_by_side import batches, classes, equal, net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss, kl_div, mse_loss, normalize
from torch.optim import Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nbtrain import EMAAddon, Trainer


def trained(model: Any, loss_of: Any, data: Any, n_epoch: int = 2) -> None:
    """The plain loop."""
    optimizer = Adam(model.parameters(), lr=1e-2)
    for _ in range(n_epoch):
        for batch in data:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()


def by_loss(model: Any, loss_of: Any, data: Any, n_epoch: int = 2, **options: Any) -> Any:
    """nbtrain with a step that returns a loss."""
    kind = Trainer.from_steps(lambda self, batch: {"loss": loss_of(self.model, batch)})
    trainer = kind(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False, **options)
    trainer.run(n_epoch, data)
    return trainer


def test_truncated_backpropagation_through_time() -> None:
    """Windows of a long sequence: the hidden state is kept, its gradient is not."""
    sequence = torch.randn(4, 31, 3, generator=torch.Generator().manual_seed(2))
    windows = [(sequence[:, i : i + 5], sequence[:, i + 1 : i + 6], i == 0) for i in range(0, 30, 5)]  # with: does a sequence begin?

    def networks() -> nn.ModuleDict:
        return nn.ModuleDict({"rnn": nn.GRU(3, 8, batch_first=True), "head": nn.Linear(8, 3)})

    class Windows(Trainer):
        hidden: Tensor | None = None

        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y, begins = batch
            output, hidden = self.model["rnn"](x, None if begins else self.hidden)
            self.hidden = hidden.detach()
            return {"loss": mse_loss(self.model["head"](output), y)}

    def ours(model: Any) -> None:
        Windows(model, "cpu", optimizer=Adam(model.parameters()), log_bar=False).run(2, windows)

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters())
        hidden = None
        for _ in range(2):
            for x, y, begins in windows:
                output, hidden = model["rnn"](x, None if begins else hidden)
                hidden = hidden.detach()
                optimizer.zero_grad()
                mse_loss(model["head"](output), y).backward()
                optimizer.step()

    equal(ours, plain, networks)


@pytest.mark.long
def test_ctc() -> None:
    """Connectionist temporal classification: sequences of labels without an alignment, of several lengths."""
    generator = torch.Generator().manual_seed(4)
    data = [(torch.randn(12, 3, 8, generator=generator), torch.randint(1, 5, (3, 4), generator=generator), torch.tensor([4, 2, 3]))] * 4

    def loss_of(model: Any, batch: Any) -> Tensor:
        x, labels, lengths = batch
        return ctc_loss(model(x).log_softmax(2), labels, torch.full((3,), len(x)), lengths)

    def ours(model: Any) -> None:
        by_loss(model, loss_of, data, count_samples=lambda batch: 3)

    equal(ours, lambda model: trained(model, loss_of, data), lambda: net(n_out=5))


@pytest.mark.long
def test_contrastive_learning() -> None:
    """SimCLR: two random views of a sample find each other among all in the batch."""

    def loss_of(model: Any, batch: Any) -> Tensor:
        x = batch[0]
        views = torch.cat([x + 0.1 * torch.randn_like(x) for _ in range(2)])
        z = normalize(model(views), dim=1)
        alike = (z @ z.T / 0.1).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return cross_entropy(alike, torch.arange(len(z)).roll(len(x)))

    def ours(model: Any) -> None:
        by_loss(model, loss_of, batches())

    equal(ours, lambda model: trained(model, loss_of, batches()), lambda: net(n_out=4))


@pytest.mark.long
def test_queue_and_momentum_encoder() -> None:
    """MoCo: keys of a slowly moving copy of the encoder, with a queue of earlier keys as negatives. Both are in the checkpoints."""

    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = net(n_out=4)
            self.slow = deepcopy(self.encoder).requires_grad_(False)
            self.register_buffer("queue", normalize(torch.randn(30, 4), dim=1))

        def forward(self, x: Tensor) -> Tensor:
            q = normalize(self.encoder(x), dim=1)
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.encoder.parameters()):
                    slow.lerp_(fast, 0.01)
                k = normalize(self.slow(x + 0.1 * torch.randn_like(x)), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T.clone()], 1)
            self.queue.copy_(torch.cat([k, self.queue[: -len(k)]]))  # pyright: ignore[reportIndexIssue]
            return cross_entropy(logits / 0.1, torch.zeros(len(x), dtype=torch.long))

    def loss_of(model: Any, batch: Any) -> Tensor:
        return model(batch[0])

    def ours(model: Any) -> None:
        by_loss(model, loss_of, batches())

    equal(ours, lambda model: trained(model, loss_of, batches()), Moco)


def test_distillation() -> None:
    """A small student learns the outputs of a teacher, which is an attribute of the trainer, in evaluation mode."""

    def loss_of(student: Any, teacher: Any, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(1)
        logits = student(x)
        return cross_entropy(logits, y) + kl_div((logits / 2).log_softmax(1), soft, reduction="batchmean")

    def make_teacher() -> nn.Module:
        torch.manual_seed(9)
        return nn.Sequential(net(n_out=3, width=32), nn.Dropout(0.5)).eval()

    class Distill(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": loss_of(self.model, self.teacher, batch)}

    def ours(student: Any) -> None:
        trainer = Distill(student, "cpu", optimizer=Adam(student.parameters(), lr=1e-2), log_bar=False)
        trainer.teacher = make_teacher()
        trainer.run(2, classes())

    def plain(student: Any) -> None:
        teacher = make_teacher()
        trained(student, lambda model, batch: loss_of(model, teacher, batch), classes())

    equal(ours, plain, lambda: net(n_out=3))


@pytest.mark.long
def test_diffusion_with_averaged_weights() -> None:
    """A denoiser at random noise levels; an exponential moving average of its weights is what samples are drawn from."""

    def loss_of(model: Any, batch: Any) -> Tensor:
        x = batch[0]
        level, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return mse_loss(model(torch.cat([level.sqrt() * x + (1 - level).sqrt() * noise, level], 1)), noise)

    averages: list[dict[str, Tensor]] = []

    def ours(model: Any) -> None:
        kind: Any = Trainer.from_steps(lambda self, batch: {"loss": loss_of(self.model, batch)}).add_on(EMAAddon)
        trainer = kind(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), ema_decay=0.9, ema_warmup=False, log_bar=False)
        trainer.run(2, batches())
        averages.append({name: weight.clone() for name, weight in trainer[EMAAddon].weights(trainer).items()})

    def plain(model: Any) -> None:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = Adam(model.parameters(), lr=1e-2)
        for batch in batches() * 2:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            average.update_parameters(model)
        averages.append(dict(average.module.state_dict()))

    equal(ours, plain, lambda: net(9, 8))
    assert all(torch.equal(averages[0][name], weight) for name, weight in averages[1].items())


@pytest.mark.long
def test_full_batch_graph_network() -> None:
    """A graph convolution of all nodes at once: an epoch is one batch, the loss counts the labelled nodes."""
    x, y = (torch.cat(parts) for parts in zip(*classes()))
    edges = torch.rand(len(x), len(x), generator=torch.Generator().manual_seed(3)) < 0.1
    near = (edges | edges.T | torch.eye(len(x), dtype=torch.bool)).float()
    near, labelled = near / near.sum(1, keepdim=True), torch.arange(len(x)) < 20

    def loss_of(model: Any, batch: Any) -> Tensor:
        return cross_entropy((near @ model(near @ batch[0]))[labelled], batch[1][labelled])

    def ours(model: Any) -> None:
        by_loss(model, loss_of, [(x, y)], 10)

    equal(ours, lambda model: trained(model, loss_of, [(x, y)], 10), lambda: net(n_out=3))


@pytest.mark.long
def test_vae_with_annealing() -> None:
    """A variational autoencoder, in which the weight of the prior grows with the number of updates."""

    def loss_of(model: Any, x: Tensor, share: float) -> tuple[Tensor, Tensor]:
        mean, log_var = model["encoder"](x).chunk(2, 1)
        z = mean + (log_var / 2).exp() * torch.randn_like(mean)
        prior = (mean.square() + log_var.exp() - 1 - log_var).mean() / 2
        return mse_loss(model["decoder"](z), x) + share * prior, prior

    class VAE(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            loss, prior = loss_of(self.model, batch[0], min(1.0, self.counts.step / 10))
            return {"loss": loss, "prior": prior}

    def ours(model: Any) -> None:
        VAE(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False).run(3, batches())

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        for n, (x, _) in enumerate(batches() * 3):
            optimizer.zero_grad()
            loss_of(model, x, min(1.0, n / 10))[0].backward()
            optimizer.step()

    equal(ours, plain, lambda: nn.ModuleDict({"encoder": net(n_out=4), "decoder": net(2, 8)}))
