"""PyTorch Forecasting's TemporalFusionTransformer on a TimeSeriesDataSet with its own loaders, loss and optimizer"""

# dependencies = ["pytorch-forecasting"]

import numpy as np
import pandas as pd
import torch
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

from nbtrain import Trainer

time = np.arange(60)
series = [pd.DataFrame({"time": time, "group": name, "value": np.sin(time / 4 + shift)}) for name, shift in (("a", 0.0), ("b", 1.5))]
frame = pd.concat(series, ignore_index=True)
training = TimeSeriesDataSet(
    frame[frame.time < 50],
    time_idx="time",
    target="value",
    group_ids=["group"],
    max_encoder_length=16,
    max_prediction_length=4,
    time_varying_unknown_reals=["value"],
)
validation = TimeSeriesDataSet.from_dataset(training, frame, min_prediction_idx=50)

torch.manual_seed(0)
model = TemporalFusionTransformer.from_dataset(training, hidden_size=8, learning_rate=0.03, loss=QuantileLoss(), optimizer="adam")
trainer = Trainer.from_lightning(model, device="cpu", gradient_clip=0.1)
loaders = training.to_dataloader(train=True, batch_size=16), validation.to_dataloader(train=False, batch_size=16)
result = trainer.run(4, *loaders)
losses = [row["val_loss"] for row in trainer.history.epochs]
assert losses[-1] < 0.6 * losses[0], losses
