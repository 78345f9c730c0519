"""TorchGeo's SemanticSegmentationTask, a LightningModule with its own loss, metrics and schedule"""

# It imports requests, which it does not ask for
# dependencies = ["torchgeo", "requests"]

import torch
from torch.utils.data import DataLoader, Dataset
from torchgeo.trainers import SemanticSegmentationTask

from nbtrain import StateManagerAddon, Trainer


class Fields(Dataset):
    """Four bands; the bright half is of class 1."""

    def __init__(self, n, noise):
        generator = torch.Generator().manual_seed(n)
        self.masks = torch.zeros(n, 32, 32, dtype=torch.long)
        self.masks[::2, :16] = 1
        self.masks[1::2, :, 16:] = 1
        self.images = self.masks.unsqueeze(1).float() + noise * torch.randn(n, 4, 32, 32, generator=generator)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, i):
        return {"image": self.images[i], "mask": self.masks[i]}


def make_trainer():
    torch.manual_seed(0)
    task = SemanticSegmentationTask(model="unet", backbone="resnet18", in_channels=4, num_classes=2, task="multiclass", lr=1e-3)
    return Trainer.add_on(StateManagerAddon).from_lightning(task, device="cpu", save_path="fields", seed=0)


train_loader = DataLoader(Fields(16, 0.2), batch_size=8, shuffle=True)
make_trainer().run(1, train_loader, DataLoader(Fields(8, 0.2), batch_size=4))
trainer = make_trainer()
result = trainer.run(4, train_loader, DataLoader(Fields(8, 0.2), batch_size=4), resume="auto")
losses = [row["train_loss"] for row in trainer.history.epochs]
assert len(losses) == 4 and losses[-1] < losses[0]
assert result.last["val_MulticlassAccuracy"] > 0.9
