"""GPyTorch's exact Gaussian process, and a variational one on mini-batches: the hyperparameters of a plain loop, bit for bit"""

# dependencies = ["gpytorch"]

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer

x = torch.linspace(0, 1, 40)
y = torch.sin(6 * x) + 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(0))


class Exact(gpytorch.models.ExactGP):
    def __init__(self):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return MultivariateNormal(self.mean(x), self.kernel(x))


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self):
        inducing = x[::4].unsqueeze(1)
        strategy = VariationalStrategy(self, inducing, CholeskyVariationalDistribution(len(inducing)))
        super().__init__(strategy)
        self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, x):
        return MultivariateNormal(self.mean(x), self.kernel(x))


def marginal_of(model):
    if isinstance(model, Exact):
        return gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    return gpytorch.mlls.VariationalELBO(model.likelihood, model, num_data=len(x))


class Fit(Trainer):
    def train_step(self, batch):
        inputs, targets = batch
        return {"loss": -marginal_of(self.model)(self.model(inputs), targets)}

    def test_step(self, batch):
        inputs, targets = batch
        return {"error": (self.model.likelihood(self.model(inputs)).mean - targets).abs().mean()}


def train_plain(model, loader, n_epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    for _ in range(n_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            (-marginal_of(model)(model(inputs), targets)).backward()
            optimizer.step()


batches = DataLoader(TensorDataset(x.unsqueeze(1), y), batch_size=20, shuffle=True)
for kind, loader, n_epochs in ((Exact, [(x, y)], 40), (Sparse, batches, 60)):
    plain, own = kind(), kind()
    torch.manual_seed(0)
    train_plain(plain, loader, n_epochs)
    torch.manual_seed(0)
    trainer = Fit(own, "cpu", optimizer=lambda params: torch.optim.Adam(params, lr=0.1), monitor="train_loss")
    trainer.run(n_epochs, loader)
    assert all(torch.equal(value, own.state_dict()[name]) for name, value in plain.state_dict().items()), kind
    between = x[:-1] + 0.01
    assert trainer.evaluate([(between if kind is Exact else between.unsqueeze(1), torch.sin(6 * between))])["error"] < 0.2
