"""Lightly's SimCLR, as its tutorial has it: random views, its loss and projection head; the losses of `lightning.Trainer`"""

# dependencies = ["lightly"]

import logging
import warnings

import lightning as L
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18

from nbtrain import Trainer

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Views(Dataset):
    def __init__(self):
        pixels = torch.randint(0, 255, (24, 40, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.images = [Image.fromarray(one.numpy()) for one in pixels]
        self.transform = SimCLRTransform(input_size=32, gaussian_blur=0.0)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i]), i % 3, f"{i}.png"  # as LightlyDataset does


class SimCLR(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(*list(resnet18().children())[:-1])
        self.projection_head, self.criterion = SimCLRProjectionHead(512, 64, 16), NTXentLoss()

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch, batch_index):
        (x0, x1), _, _ = batch
        loss = self.criterion(self.forward(x0), self.forward(x1))
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class Losses(L.Callback):
    def on_train_epoch_end(self, trainer, module):
        losses.append(float(trainer.callback_metrics["train_loss"]))


losses, loader = [], DataLoader(Views(), batch_size=8, shuffle=True, drop_last=True)
L.seed_everything(0)
stock = SimCLR()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[Losses()], **quiet).fit(stock, loader)

L.seed_everything(0)
trainer = Trainer.from_lightning(SimCLR(), device="cpu")
trainer.run(2, loader)
assert [row["train_loss"] for row in trainer.history.epochs] == losses, losses
assert all(torch.equal(value, stock.state_dict()[name]) for name, value in trainer.model.state_dict().items())
