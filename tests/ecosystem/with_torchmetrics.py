"""Metrics of whole passes by name, the best epoch by one of them"""

# dependencies = ["torchmetrics"]

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from nbtrain import MetricsAddon, Trainer

torch.manual_seed(0)
x = torch.randn(200, 6)
y = x[:, :3].argmax(1)
train_loader = DataLoader(TensorDataset(x[:120], y[:120]), batch_size=32, shuffle=True)
valid_loader = DataLoader(TensorDataset(x[120:], y[120:]), batch_size=32)


class Classify(Trainer):
    def train_step(self, batch):
        inputs, label = batch
        logits = self.model(inputs)
        return {"loss": cross_entropy(logits, label), "output": logits, "label": label}

    def test_step(self, batch):
        return self.train_step(batch)


trainer = Classify.add_on(MetricsAddon)(
    torch.nn.Linear(6, 3),
    "cpu",
    optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
    metrics={"acc": MulticlassAccuracy(3, average="micro"), "f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3)},
    monitor="val_f1",
    monitor_mode="max",
)
result = trainer.run(8, train_loader, valid_loader)
predicted = trainer.predict(x[120:]).argmax(1)
assert abs(result.last["val_acc"] - (predicted == y[120:]).float().mean().item()) < 1e-6
assert result.best["val_f1"] == max(row["val_f1"] for row in trainer.history.epochs) > 0.8
