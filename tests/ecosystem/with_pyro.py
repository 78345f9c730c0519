"""Pyro's stochastic variational inference with an AutoNormal guide; the guide that pyro.infer.SVI learns, and a run that is resumed"""

# dependencies = ["pyro-ppl"]

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import StateManagerAddon, Trainer

x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
y = x @ torch.tensor([1.0, -2.0]) + 0.5
loader = DataLoader(TensorDataset(x, y), batch_size=20)


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.weight = PyroSample(dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        self.bias = PyroSample(dist.Normal(0.0, 3.0))

    def forward(self, x, y=None):
        mean = x @ self.weight + self.bias
        with pyro.plate("data", 60, len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.1), obs=y)


def make():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = Regression()
    guide = AutoNormal(model)
    guide(x, y)  # which makes its parameters
    return model, guide


class Infer(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(*batch)}


def trained(n_epochs, kind=Infer, **options):
    model, guide = make()
    elbo = Trace_ELBO()(model, guide)  # a module that has the parameters of both
    pyro.set_rng_seed(1)
    trainer = kind(elbo, "cpu", optimizer=lambda params: torch.optim.Adam(params, lr=0.05), **options)
    trainer.run(n_epochs, loader, resume="auto" if options else None)
    return guide


model, guide = make()
pyro.set_rng_seed(1)
svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
for _ in range(60):
    for batch in loader:
        svi.step(*batch)
plain = {name: value.clone() for name, value in guide.state_dict().items()}

own = trained(60).state_dict()
assert own.keys() == plain.keys() and all(torch.equal(value, plain[name]) for name, value in own.items())
for n_epochs in (20, 60):  # another day begins between them
    again = trained(n_epochs, Infer.add_on(StateManagerAddon), save_path="runs").state_dict()
assert all(torch.equal(value, plain[name]) for name, value in again.items())
assert (guide.median()["weight"] - torch.tensor([1.0, -2.0])).abs().max() < 0.1
