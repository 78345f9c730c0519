"""An image model, layer-wise learning rates, timm's cosine schedule by epochs"""

# dependencies = ["timm"]

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer

torch.manual_seed(0)
labels = torch.arange(96) % 3  # the channel that is bright
images = 0.3 * torch.rand(96, 3, 32, 32)
images[torch.arange(96), labels] += 0.5
loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)


class Classify(Trainer):
    def train_step(self, batch):
        x, y = batch
        logits = self.model(x)
        return {"loss": cross_entropy(logits, y), "acc": (logits.argmax(1) == y).float().mean()}


model = timm.create_model("resnet10t", num_classes=3)
trainer = Classify(
    model,
    "cpu",
    optimizer=create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05, layer_decay=0.7),
    scheduler=lambda optimizer, plan: CosineLRScheduler(optimizer, t_initial=plan.n_epochs, lr_min=1e-5, warmup_t=1, warmup_lr_init=1e-4),
)
result = trainer.run(4, loader)
rates = [row["lr"] for row in trainer.history.epochs]
assert result.last["train_acc"] > 0.9
assert rates[0] < rates[1] > rates[2] > rates[3]
