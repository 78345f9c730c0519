"""Lightning UQ Box's mean and variance estimation, with its data module and its optimizer as a factory"""

# dependencies = ["lightning-uq-box"]

from functools import partial

import torch
from lightning_uq_box.datamodules import ToyHeteroscedasticDatamodule
from lightning_uq_box.models import MLP
from lightning_uq_box.uq_methods import MVERegression

from nbtrain import Trainer

torch.manual_seed(0)
data = ToyHeteroscedasticDatamodule(batch_size=50)
net = MLP(n_inputs=1, n_hidden=[32, 32], n_outputs=2, activation_fn=torch.nn.Tanh())
trainer = Trainer.from_lightning(MVERegression(net, optimizer=partial(torch.optim.Adam, lr=3e-3), burnin_epochs=5), device="cpu")
result = trainer.run(30, data)
losses = [row["train_loss"] for row in trainer.history.epochs]
assert losses[-1] < losses[6], losses
