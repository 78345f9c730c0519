"""Comet's client by name, offline: every epoch's loss is in the file that `comet upload` sends"""

# dependencies = ["comet-ml"]

import json
import zipfile

import torch
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import LoggersAddon, Trainer

torch.manual_seed(0)
x = torch.randn(64, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))


class Regress(Trainer):
    def train_step(self, batch):
        inputs, target = batch
        return {"loss": (self.model(inputs) - target).square().mean()}


sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
trainer = Regress.add_on(LoggersAddon)(torch.nn.Linear(4, 1), "cpu", optimizer=sgd, save_path="runs", loggers=["comet"])
result = trainer.run(2, DataLoader(data, batch_size=16))
trainer.run(1, DataLoader(data, batch_size=16))
values, keys = [], set()
for path in sorted(result.run_dir.glob("*.zip"), key=lambda path: path.stat().st_mtime):
    archive = zipfile.ZipFile(path)
    keys.add(json.loads(archive.read("experiment.json"))["offline_id"])
    lines = [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
    found = [line["metric"] for line in lines if "metric" in line]
    values += [(m["step"], m["metricValue"]) for m in found if m["metricName"] == "train/loss"]
assert [step for step, _ in values] == [3, 7, 11]
assert [round(value, 5) for _, value in values] == [round(row["train_loss"], 5) for row in trainer.history.epochs]
assert len(keys) == 1 and any(line.get("param", {}).get("paramName") == "n_params" for line in lines)
