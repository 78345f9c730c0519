"""Opacus' PrivacyEngine: Poisson batches, clipped and noised gradients; the weights and the epsilon of a plain loop, also after a resume"""

# dependencies = ["opacus"]

import warnings

import torch
from opacus import PrivacyEngine
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import StateManagerAddon, Trainer

warnings.filterwarnings("ignore", module="opacus|torch")
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())


def private():
    """A private model with its optimizer and loader, and the engine that counts what they cost."""
    torch.manual_seed(0)
    model, engine = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)), PrivacyEngine()
    parts = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "data_loader": DataLoader(data, 8)}
    return *engine.make_private(module=model, noise_multiplier=0.8, max_grad_norm=1.0, **parts), engine


class Classify(Trainer):
    def train_step(self, batch):
        x, y = batch
        return {"loss": cross_entropy(self.model(x), y)}


model, optimizer, loader, engine = private()
torch.manual_seed(1)
for _ in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
weights, epsilon = model.state_dict(), engine.get_epsilon(1e-3)

own_model, own_optimizer, own_loader, own_engine = private()
torch.manual_seed(1)
Classify(own_model, "cpu", optimizer=own_optimizer).run(4, own_loader)
assert all(torch.equal(value, weights[name]) for name, value in own_model.state_dict().items())
assert own_engine.get_epsilon(1e-3) == epsilon

for n_epochs in (2, 4):  # another day begins between them
    again_model, again_optimizer, again_loader, again_engine = private()
    torch.manual_seed(1)
    trainer = Classify.add_on(StateManagerAddon)(again_model, "cpu", optimizer=again_optimizer, save_path="private")
    trainer.run(n_epochs, again_loader, resume="auto")
assert all(torch.equal(value, weights[name]) for name, value in again_model.state_dict().items())
