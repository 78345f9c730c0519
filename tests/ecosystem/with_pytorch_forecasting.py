"""PyTorch Forecasting's TemporalFusionTransformer with its own loaders, loss and optimizer; the weights of `lightning.Trainer`"""

# dependencies = ["pytorch-forecasting"]

import lightning as L
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


def make():
    torch.manual_seed(0)
    model = TemporalFusionTransformer.from_dataset(training, hidden_size=8, learning_rate=0.03, loss=QuantileLoss(), optimizer="adam")
    torch.manual_seed(1)
    return model


loaders = training.to_dataloader(train=True, batch_size=16), validation.to_dataloader(train=False, batch_size=16)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
stock = make()
L.Trainer(max_epochs=4, accelerator="cpu", gradient_clip_val=0.1, num_sanity_val_steps=0, **quiet).fit(stock, *loaders)

model = make()
trainer = Trainer.from_lightning(model, device="cpu", gradient_clip=0.1, lightning={"num_sanity_val_steps": 0})
trainer.run(4, *loaders)
assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())
losses = [row["val_loss"] for row in trainer.history.epochs]
assert losses[-1] < 0.6 * losses[0], losses
