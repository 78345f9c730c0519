"""Batches that are TensorDicts, and a model of TensorDictModules"""

# dependencies = ["tensordict"]

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch.utils.data import DataLoader

from nbtrain import Trainer

torch.manual_seed(0)
x = torch.randn(70, 4)
data = TensorDict({"x": x, "y": x.sum(1, keepdim=True)}, batch_size=[70])
loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=lambda rows: rows)

model = TensorDictSequential(
    TensorDictModule(torch.nn.Linear(4, 8), in_keys=["x"], out_keys=["hidden"]),
    TensorDictModule(torch.nn.Linear(8, 1), in_keys=["hidden"], out_keys=["prediction"]),
)


class Regress(Trainer):
    def train_step(self, batch):
        batch = self.model(batch)
        return {"loss": (batch["prediction"] - batch["y"]).square().mean(), "n_rows": float(len(batch))}


trainer = Regress(model, "cpu", optimizer=lambda params: torch.optim.Adam(params, lr=0.03))
result = trainer.run(20, loader)
assert result.last["train_loss"] < 0.01
assert abs(result.last["train_n_rows"] - (4 * 16 * 16 + 6 * 6) / 70) < 1e-5  # the mean of all rows, with a short last batch
