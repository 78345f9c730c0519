"""Chemprop's message-passing MPNN on molecules, with its own loaders, Noam schedule and metrics; the weights of `lightning.Trainer`"""

# dependencies = ["chemprop"]

import lightning as L
import numpy as np
import torch
from chemprop import data, models, nn

from nbtrain import Trainer

molecules = [chain + end for chain in ("C", "CC", "CCC", "CCCC", "CCCCC", "CCCCCC") for end in ("", "O", "N", "CO", "C(C)C", "c1ccccc1")]
n_heavy = np.array([[float(sum(c.isalpha() for c in smiles))] for smiles in molecules])  # what is learned: the number of heavy atoms
points = [data.MoleculeDatapoint.from_smi(smiles, y) for smiles, y in zip(molecules, n_heavy)]
train_set, valid_set = data.MoleculeDataset(points[::2]), data.MoleculeDataset(points[1::2])
scaler = train_set.normalize_targets()
valid_set.normalize_targets(scaler)


def make():
    torch.manual_seed(0)
    unscale = nn.UnscaleTransform.from_standard_scaler(scaler)
    model = models.MPNN(nn.BondMessagePassing(d_h=32), nn.SumAggregation(), nn.RegressionFFN(input_dim=32, output_transform=unscale))
    loaders = data.build_dataloader(train_set, batch_size=6, seed=0), data.build_dataloader(valid_set, batch_size=6, shuffle=False)
    torch.manual_seed(1)
    return model, loaders


quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
stock, loaders = make()
L.Trainer(max_epochs=30, accelerator="cpu", **quiet).fit(stock, *loaders)

model, loaders = make()
trainer = Trainer.from_lightning(model, device="cpu")
trainer.run(30, *loaders)
assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())
first, last = trainer.history.epochs[0], trainer.history.epochs[-1]
assert last["val_loss"] < 0.3 * first["val_loss"], (first, last)
