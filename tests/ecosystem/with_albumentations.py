"""Augmentation with a seed: a run stopped in mid-epoch ends with the weights of an unbroken one"""

# dependencies = ["albumentations"]

import albumentations as A
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from nbtrain import StateManagerAddon, Trainer


class Blobs(Dataset):
    """A bright upper or lower half; the flip is left to right, which keeps the label."""

    def __init__(self):
        steps = [
            A.HorizontalFlip(p=0.5),
            A.RandomBrightnessContrast(p=0.5),
            A.GaussNoise(p=0.5),
            A.Normalize(mean=0.5, std=0.5),
            ToTensorV2(),
        ]
        self.augment = A.Compose(steps, seed=0)

    def __len__(self):
        return 48

    def __getitem__(self, i):
        image = np.full((16, 16, 3), 60, np.uint8)
        image[8 * (i % 2) : 8 * (i % 2) + 8] = 190
        return self.augment(image=image)["image"], i % 2


class Classify(Trainer):
    def train_step(self, batch):
        x, y = batch
        if self.progress_checker.get_step() == stop_at:
            self.stop()
        return {"loss": cross_entropy(self.model(x), y)}


def train(folder, stop=None):
    global stop_at
    stop_at = stop
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 49, 2))
    adam = lambda params: torch.optim.Adam(params, lr=1e-3)  # noqa: E731
    trainer = Classify.add_on(StateManagerAddon)(net, "cpu", optimizer=adam, save_path=folder, seed=0)
    trainer.run(3, DataLoader(Blobs(), batch_size=8, shuffle=True), resume="auto")
    return trainer


whole = train("whole")
train("cut", stop=10)
resumed = train("cut")
assert resumed.history.epochs[-1]["train_loss"] < 0.3
assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters()))
