"""Segmentation with dictionary transforms, a U-Net, the Dice loss and metric, sliding-window inference"""

# dependencies = ["monai"]

import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import compute_dice
from monai.networks.nets import UNet
from monai.transforms import Compose, EnsureChannelFirstd, RandFlipd, RandSpatialCropd, ScaleIntensityd, ToTensord

from nbtrain import Trainer

rng = np.random.default_rng(0)


def make_case():
    image, mask = rng.normal(0, 0.1, (48, 48)).astype("float32"), np.zeros((48, 48), "float32")
    row, column = rng.integers(4, 28, 2)
    mask[row : row + 16, column : column + 16] = 1
    return {"image": image + mask, "mask": mask}


cases, keys = [make_case() for _ in range(24)], ["image", "mask"]
prepare = [EnsureChannelFirstd(keys, channel_dim="no_channel"), ScaleIntensityd("image")]
train_data = Dataset(
    cases[:16], Compose([*prepare, RandSpatialCropd(keys, 32, random_size=False), RandFlipd(keys, prob=0.5), ToTensord(keys)])
)
valid_data = Dataset(cases[16:], Compose([*prepare, ToTensord(keys)]))
dice_loss = DiceLoss(sigmoid=True)


class Segment(Trainer):
    def train_step(self, batch):
        return {"loss": dice_loss(self.model(batch["image"]), batch["mask"])}

    def test_step(self, batch):
        output = sliding_window_inference(batch["image"], (32, 32), 4, self.model)
        dice = compute_dice((output > 0).float(), batch["mask"])  # (B, 1)
        return {"loss": dice_loss(output, batch["mask"]), "dice": dice.mean(), "output": output}


torch.manual_seed(0)
model = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2), norm="batch")
trainer = Segment(model, "cpu", optimizer=lambda params: torch.optim.Adam(params, lr=1e-2), monitor="val_dice", monitor_mode="max")
result = trainer.run(10, DataLoader(train_data, batch_size=4, shuffle=True), DataLoader(valid_data, batch_size=4))
assert result.best["val_dice"] > 0.8, result.best
