"""A run whose model, optimizer and epochs are configured by Hydra, with overrides"""

# dependencies = ["hydra-core"]

from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer

Path("conf").mkdir()
Path("conf/train.yaml").write_text("""
epochs: 3
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
optimizer: {_target_: torch.optim.SGD, _partial_: true, lr: 0.01}
trainer: {device: cpu, gradient_clip: 1.0, seed: 0}
""")


class Regress(Trainer):
    def train_step(self, batch):
        x, y = batch
        return {"loss": (self.model(x) - y).square().mean()}


with initialize_config_dir(str(Path("conf").resolve()), version_base=None):
    config = compose("train", overrides=["optimizer.lr=0.1", "epochs=10"])

torch.manual_seed(0)
x = torch.randn(128, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
trainer = Regress(instantiate(config.model), optimizer=instantiate(config.optimizer), **config.trainer)
result = trainer.run(config.epochs, loader)
assert len(trainer.history.epochs) == 10 and trainer.optimizer.param_groups[0]["lr"] == 0.1
assert result.last["train_loss"] < 1e-3
