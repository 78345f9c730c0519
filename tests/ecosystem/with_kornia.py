"""Augmentation of whole batches on the device, within the step"""

# dependencies = ["kornia"]

import kornia.augmentation as K
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer

torch.manual_seed(0)
labels = torch.arange(120) % 2  # bright above or below
images = 0.2 * torch.rand(120, 1, 16, 16)
images[labels == 0, :, :8] += 0.6
images[labels == 1, :, 8:] += 0.6
data = TensorDataset(images, labels)
augment = K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomAffine(10, translate=(0.1, 0.1)), K.RandomErasing(p=0.5))


class Classify(Trainer):
    def train_step(self, batch):
        x, y = batch
        return self.measure(augment(x), y)

    def test_step(self, batch):
        return self.measure(*batch)

    def measure(self, x, y):
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}


net = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 5, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 2))
trainer = Classify(net, "cpu", optimizer=lambda params: torch.optim.Adam(params, lr=3e-3))
result = trainer.run(4, DataLoader(data, batch_size=20, shuffle=True), DataLoader(data, batch_size=40))
assert result.last["val_acc"] > 0.95
