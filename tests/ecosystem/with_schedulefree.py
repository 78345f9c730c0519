"""An optimizer with modes: its weights for training in training, its averages in validation; an exact resume"""

# dependencies = ["schedulefree"]

import torch
from schedulefree import AdamWScheduleFree
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import StateManagerAddon, Trainer

torch.manual_seed(0)
x = torch.randn(160, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
modes = set()


class Regress(Trainer):
    def train_step(self, batch):
        inputs, target = batch
        modes.add(("train", self.optimizer.param_groups[0]["train_mode"]))
        return {"loss": (self.model(inputs) - target).square().mean()}

    def test_step(self, batch):
        inputs, target = batch
        modes.add(("test", self.optimizer.param_groups[0]["train_mode"]))
        return {"loss": (self.model(inputs) - target).square().mean()}


def make_trainer(folder):
    torch.manual_seed(0)
    adam = lambda params: AdamWScheduleFree(params, lr=0.2, warmup_steps=5)  # noqa: E731
    return Regress.add_on(StateManagerAddon)(torch.nn.Linear(4, 1), "cpu", optimizer=adam, save_path=folder, seed=0)


def train(trainer, n_epoch):
    return trainer.run(n_epoch, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=80), resume="auto")


whole = make_trainer("whole")
result = train(whole, 8)
assert modes == {("train", True), ("test", False)}, modes
assert result.last["val_loss"] < 0.01
train(make_trainer("cut"), 3)
resumed = make_trainer("cut")
train(resumed, 8)
assert torch.equal(resumed.model.weight, whole.model.weight)
