"""zae-engine's Trainer beside nbtrain, with `check_port`: the same steps, dropout, shuffling, clipping and schedule, bit for bit"""

# dependencies = ["tqdm"]
# no-deps = ["zae-engine"]

import sys
import types
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer, check_port

package = types.ModuleType("zae_engine")  # its __init__ imports all of its models, and packages that it does not ask for
package.__path__ = find_spec("zae_engine").submodule_search_locations
sys.modules["zae_engine"] = package
from zae_engine.trainer import Trainer as ZaeTrainer  # noqa: E402


class Steps:
    def train_step(self, batch):
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}

    def test_step(self, batch):
        return self.train_step(batch)


class Theirs(Steps, ZaeTrainer):
    pass


class Ours(Steps, Trainer):
    pass


def train(model, loader):
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    Theirs(model, torch.device("cpu"), "train", adam, StepLR(adam, 1, 0.5), gradient_clip=0.5).run(3, loader)


torch.manual_seed(0)
x = torch.randn(128, 8)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), 16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
trainer = Ours(model, torch.device("cpu"), "train", adam, StepLR(adam, 1, 0.5), gradient_clip=0.5)
found = check_port(trainer, train, 3, loader)
assert found and found.steps == 24, found
