"""A U-Net with the Dice loss; the weights of a plain loop; intersection over union of whole passes from each batch's counts"""

# dependencies = ["segmentation-models-pytorch"]

import segmentation_models_pytorch as smp
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer

torch.manual_seed(0)
masks = torch.zeros(24, 1, 32, 32)
for i, mask in enumerate(masks):
    mask[:, i : i + 8, 4 : 4 + i % 5 + 8] = 1
images = masks + 0.3 * torch.randn(24, 3, 32, 32)
loss_of = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)


class Segment(Trainer):
    counts = ()

    def train_step(self, batch):
        x, y = batch
        return {"loss": loss_of(self.model(x), y)}

    def test_step(self, batch):
        x, y = batch
        logits = self.model(x)
        self.counts = (*self.counts, smp.metrics.get_stats(logits.sigmoid(), y.long(), mode="binary", threshold=0.5))
        return {"loss": loss_of(logits, y)}

    def metric_on_epoch_end(self):
        counts, self.counts = self.counts, ()
        if self.mode == "test":
            return {"iou": smp.metrics.iou_score(*map(torch.cat, zip(*counts)), reduction="micro").item()}
        return None


def make():
    torch.manual_seed(0)
    return smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(32, 16, 8), classes=1)


data = TensorDataset(images, masks)
loader, valid_loader = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)
plain, own = make().train(), make()
optimizer = torch.optim.Adam(plain.parameters(), lr=2e-3)
torch.manual_seed(1)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(plain(x), y).backward()
        optimizer.step()

torch.manual_seed(1)
trainer = Segment(own, "cpu", optimizer=lambda p: torch.optim.Adam(p, lr=2e-3), monitor="val_iou", monitor_mode="max")
trainer.run(2, loader, valid_loader)
assert all(torch.equal(value, plain.state_dict()[name]) for name, value in own.state_dict().items())
result = trainer.run(8, loader, valid_loader)
assert result.best["val_iou"] > 0.7, result.best
