"""ClearML's client by name, offline: every epoch's loss and the hyper-parameters are in the session that is imported later"""

# dependencies = ["clearml"]

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
trainer = Regress.add_on(LoggersAddon)(torch.nn.Linear(4, 1), "cpu", optimizer=sgd, save_path="runs", loggers=["clearml"])
result = trainer.run(2, DataLoader(data, batch_size=16))
(path,) = result.run_dir.glob("clearml-offline-*.zip")
archive = zipfile.ZipFile(path)
values = [value for line in archive.read("metrics.jsonl").splitlines() for value in json.loads(line)]
losses = [(value["iter"], round(value["value"], 5)) for value in values if (value["metric"], value["variant"]) == ("loss", "train")]
assert losses == [(4 * row["epoch"] - 1, round(row["train_loss"], 5)) for row in trainer.history.epochs]
assert json.loads(archive.read("task.json"))["hyperparams"]["General"]["n_params"]["value"] == "5"
