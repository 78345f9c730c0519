"""scvi-tools' training plan of a variational autoencoder for counts of cells, with its annealed loss and its data splitter"""

# dependencies = ["scvi-tools"]

import anndata
import numpy as np
import scvi
from scvi.dataloaders import DataSplitter
from scvi.model import SCVI
from scvi.train import TrainingPlan

from nbtrain import Trainer

rng = np.random.default_rng(0)
rates = np.repeat(rng.gamma(1.0, 3.0, (2, 30)), 64, axis=0)  # two kinds of cells, 30 genes
cells = anndata.AnnData(rng.poisson(rates).astype("float32"))
scvi.settings.seed = 0
SCVI.setup_anndata(cells)
model = SCVI(cells, n_hidden=16, n_latent=2)
plan = TrainingPlan(model.module, lr=5e-3)
trainer = Trainer.from_lightning(plan, device="cpu")
result = trainer.run(8, DataSplitter(model.adata_manager, train_size=0.8, batch_size=32))
losses = [row["train_loss"] for row in trainer.history.epochs]
assert losses[-1] < losses[0], losses
