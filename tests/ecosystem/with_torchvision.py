"""A detector on tuples of images and dicts of boxes: means over images; transforms v2"""

# dependencies = ["torchvision"]

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import ssdlite320_mobilenet_v3_large
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes, Image

from nbtrain import Trainer

augment = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])


class Squares(Dataset):
    """A bright square in each picture, and its box."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        x, y = 20 + 15 * i, 100 - 5 * i
        pixels = torch.zeros(3, 160, 200, dtype=torch.uint8)
        pixels[:, y : y + 40, x : x + 40] = 255
        boxes = BoundingBoxes([[x, y, x + 40, y + 40]], format="XYXY", canvas_size=(160, 200), dtype=torch.float32)
        return augment(Image(pixels), {"boxes": boxes, "labels": torch.ones(1, dtype=torch.int64)})


class Detect(Trainer):
    def train_step(self, batch):
        images, targets = batch
        losses = self.model(list(images), list(targets))
        return {"loss": sum(losses.values()), **losses, "n_seen": float(len(images))}


torch.manual_seed(0)
loader = DataLoader(Squares(), batch_size=4, shuffle=True, collate_fn=lambda samples: tuple(zip(*samples)))
model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2)
trainer = Detect(model, "cpu", optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9))
result = trainer.run(3, loader)
losses = [row["train_loss"] for row in trainer.history.epochs]
assert losses[-1] < losses[0]
assert abs(result.last["train_n_seen"] - (4 * 4 + 4 * 4 + 2 * 2) / 10) < 1e-6  # each image counts once, in the last, small batch too
