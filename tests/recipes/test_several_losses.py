"""How weights are updated: several optimizers, several steps, other gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from side_by_side import batches, equal, net
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.optim import LBFGS, SGD, Adam, AdamW, Muon

from nbtrain import AccumulationAddon, Trainer


class Regress(Trainer):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}

    def test_step(self, batch: Any) -> dict[str, Any]:
        return self.train_step(batch)


def test_muon_and_adamw() -> None:
    """The matrices are trained by Muon, the rest by AdamW."""

    def optimizers(model: Any) -> list[Any]:
        parts = {two: [p for p in model.parameters() if (p.ndim == 2) is two] for two in (True, False)}
        return [Muon(parts[True], lr=0.02), AdamW(parts[False], lr=1e-2)]

    def ours(model: Any) -> None:
        Regress(model, "cpu", optimizer=optimizers(model), log_bar=False).run(2, batches())

    def plain(model: Any) -> None:
        made = optimizers(model)
        for x, y in batches() * 2:
            for optimizer in made:
                optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            for optimizer in made:
                optimizer.step()

    equal(ours, plain)


@pytest.mark.long
def test_gan_with_n_critic() -> None:
    """The discriminator steps in each batch, the generator in each third: manual optimization."""

    def networks() -> nn.ModuleDict:
        return nn.ModuleDict({"d": net(), "g": net(3, 8)})

    def optimizers(model: Any) -> dict[str, Any]:
        return {name: Adam(part.parameters(), lr=1e-2) for name, part in model.items()}

    def loss_d(model: Any, x: Tensor) -> Tensor:
        right, wrong = model["d"](x), model["d"](model["g"](torch.randn(len(x), 3)).detach())
        bce = binary_cross_entropy_with_logits
        return bce(right, torch.ones_like(right)) + bce(wrong, torch.zeros_like(wrong))

    def loss_g(model: Any, x: Tensor) -> Tensor:
        wrong = model["d"](model["g"](torch.randn(len(x), 3)))
        return binary_cross_entropy_with_logits(wrong, torch.ones_like(wrong))

    class GAN(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            steps = {"d": loss_d} | ({"g": loss_g} if (self.counts.step + 1) % 3 == 0 else {})
            for name, loss in steps.items():
                self.optimizers[name].zero_grad()
                self.backward(loss(self.model, batch[0]))
                self.optimizers[name].step()

    def ours(model: Any) -> None:
        GAN(model, "cpu", optimizer=optimizers(model), log_bar=False).run(2, batches())

    def plain(model: Any) -> None:
        made = optimizers(model)
        for n, (x, _) in enumerate(batches() * 2, 1):
            made["d"].zero_grad()
            loss_d(model, x).backward()
            made["d"].step()
            if n % 3 == 0:
                made["g"].zero_grad()
                loss_g(model, x).backward()
                made["g"].step()

    equal(ours, plain, networks)


@pytest.mark.long
def test_sam() -> None:
    """Sharpness-aware minimization: the gradient is that of a point uphill, in two backward passes."""

    def uphill(model: Any, sign: float, shifts: list[Tensor]) -> None:
        with torch.no_grad():
            for p, shift in zip(model.parameters(), shifts):
                p.add_(shift, alpha=sign)

    def shifts_of(model: Any) -> list[Tensor]:
        grads = [p.grad.clone() for p in model.parameters()]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        return [0.05 * grad / norm for grad in grads]

    class SAM(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            self.optimizers["sgd"].zero_grad()
            loss = mse_loss(self.model(x), y)
            self.backward(loss)
            shifts = shifts_of(self.model)
            uphill(self.model, 1, shifts)
            self.optimizers["sgd"].zero_grad()
            self.backward(mse_loss(self.model(x), y))
            uphill(self.model, -1, shifts)
            self.optimizers["sgd"].step()
            return {"loss": loss}

    def ours(model: Any) -> None:
        SAM(model, "cpu", optimizer=SGD(model.parameters(), lr=0.05), log_bar=False).run(2, batches())

    def plain(model: Any) -> None:
        optimizer = SGD(model.parameters(), lr=0.05)
        for x, y in batches() * 2:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            shifts = shifts_of(model)
            uphill(model, 1, shifts)
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            uphill(model, -1, shifts)
            optimizer.step()

    equal(ours, plain)


@pytest.mark.long
def test_pinn() -> None:
    """A physics-informed network for u' = -u, u(0) = 1: by Adam first, then by LBFGS."""
    points = torch.linspace(0, 2, 20)[:, None]

    def residual(model: Any, t: Tensor) -> Tensor:
        t = t.clone().requires_grad_()
        u = model(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return ((slope + u) ** 2).mean() + (model(torch.zeros(1, 1)) - 1).square().mean()

    class PINN(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": residual(self.model, batch)}

    def ours(model: Any) -> None:
        PINN(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False).run(10, [points])
        PINN(model, "cpu", optimizer=LBFGS(model.parameters()), log_bar=False).run(4, [points])

    def plain(model: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = residual(model, points)
            loss.backward()
            return loss

        for optimizer, n in ((Adam(model.parameters(), lr=1e-2), 10), (LBFGS(model.parameters()), 4)):
            for _ in range(n):
                optimizer.step(closure)

    equal(ours, plain, lambda: net(1))


def test_manual_after_automatic() -> None:
    """One model is trained automatically, then by a trainer that steps by hand: Polyak's step, as long as the loss."""

    class Polyak(Regress):
        automatic_optimization = False

        def train_step(self, batch: Any) -> dict[str, Any]:
            self.optimizers["sgd"].zero_grad()
            found = super().train_step(batch)
            self.backward(found["loss"])
            squares = sum(p.grad.square().sum() for p in self.model.parameters() if p.grad is not None)
            self.optimizers["sgd"].param_groups[0]["lr"] = float(found["loss"].detach() / squares / 4)
            self.optimizers["sgd"].step()
            return found

    def ours(model: Any) -> None:
        Regress(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False).run(1, batches())
        Polyak(model, "cpu", optimizer=SGD(model.parameters(), lr=1.0), log_bar=False).run(1, batches())

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        for x, y in batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        optimizer = SGD(model.parameters(), lr=1.0)
        for x, y in batches():
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            squares = sum(p.grad.square().sum() for p in model.parameters())
            optimizer.param_groups[0]["lr"] = float(loss.detach() / squares / 4)
            optimizer.step()

    equal(ours, plain)


@pytest.mark.long
def test_growing_batch_size() -> None:
    """From the second epoch on, a batch is three of the first: accumulated gradients by epoch."""

    def ours(model: Any) -> None:
        growing: Any = Regress.add_on(AccumulationAddon)
        optimizer = SGD(model.parameters(), lr=0.05)
        growing(model, "cpu", optimizer=optimizer, accumulate={0: 1, 6: 3}, log_bar=False).run(3, batches())

    def plain(model: Any) -> None:
        optimizer = SGD(model.parameters(), lr=0.05)
        for epoch in range(3):
            size = 1 if epoch == 0 else 3
            for n, (x, y) in enumerate(batches(), 1):
                (mse_loss(model(x), y) / size).backward()
                if n % size == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    equal(ours, plain)


@pytest.mark.long
def test_learned_task_weights() -> None:
    """The weights of two losses are parameters beside the model (Kendall et al.): one optimizer has both."""

    def networks() -> nn.ModuleDict:
        return nn.ModuleDict({"net": net(n_out=2), "weights": nn.ParameterDict({"log": nn.Parameter(torch.zeros(2))})})

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        errors = (model["net"](x) - torch.cat([y, y.abs()], 1)).square().mean(0)
        return (errors * (-model["weights"]["log"]).exp() + model["weights"]["log"]).sum()

    class Tasks(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": loss_of(self.model, *batch)}

    def ours(model: Any) -> None:
        Tasks(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False).run(2, batches())

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        for x, y in batches() * 2:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()

    equal(ours, plain, networks)


@pytest.mark.long
def test_gradient_surgery() -> None:
    """PCGrad: of two gradients that conflict, each loses its part along the other."""

    def surgery(model: Any, x: Tensor, y: Tensor) -> None:
        output, parameters = model(x), [*model.parameters()]
        losses = mse_loss(output, y), output.square().mean()
        a, b = (torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)]) for loss in losses)
        if (dot := a @ b) < 0:
            a, b = a - dot / (b @ b) * b, b - dot / (a @ a) * a
        for p, grad in zip(parameters, (a + b).split([p.numel() for p in parameters])):
            p.grad = grad.view_as(p)

    class Surgery(Trainer):
        automatic_optimization = False

        def train_step(self, batch: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            surgery(self.model, *batch)
            self.optimizers["adam"].step()

    def ours(model: Any) -> None:
        Surgery(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False).run(2, batches())

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        for x, y in batches() * 2:
            surgery(model, x, y)
            optimizer.step()

    equal(ours, plain)


def test_meta_learning() -> None:
    """MAML: a loss after one inner step of gradient descent, also in the validation, which needs gradients."""

    def adapted_loss(model: Any, x: Tensor, y: Tensor, create_graph: bool) -> Tensor:
        own = dict(model.named_parameters())
        inner = mse_loss(functional_call(model, own, (x[:5],)), y[:5])
        grads = torch.autograd.grad(inner, [*own.values()], create_graph=create_graph)
        fast = {name: p - 0.1 * grad for (name, p), grad in zip(own.items(), grads)}
        return mse_loss(functional_call(model, fast, (x[5:],)), y[5:])

    class MAML(Trainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": adapted_loss(self.model, *batch, create_graph=True)}

        @torch.enable_grad()
        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": adapted_loss(self.model, *batch, create_graph=False).detach()}

    validated: list[float] = []

    def ours(model: Any) -> None:
        trainer = MAML(model, "cpu", optimizer=Adam(model.parameters(), lr=1e-2), log_bar=False)
        trainer.run(2, batches(), batches(2))
        validated.append(trainer.history.last["val_loss"])

    def plain(model: Any) -> None:
        optimizer = Adam(model.parameters(), lr=1e-2)
        for x, y in batches() * 2:
            optimizer.zero_grad()
            adapted_loss(model, x, y, create_graph=True).backward()
            optimizer.step()
        losses = [adapted_loss(model, x, y, create_graph=False).item() for x, y in batches(2)]
        validated.append(sum(losses) / len(losses))

    equal(ours, plain)
    assert validated[0] == validated[1]
