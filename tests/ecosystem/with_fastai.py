"""fastai's Learner beside nbtrain, with `check_port`: its loop on the same model and batches, dropout and validation, bit for bit"""

# dependencies = ["fastcore", "fastprogress", "fastdownload", "fasttransform", "pandas", "requests", "scikit-learn"]
# no-deps = ["fastai"]

from functools import partial

import fastai.callback.progress  # noqa: F401  the bar
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from nbtrain import Trainer, check_port


class Steps(Trainer):
    def train_step(self, batch):
        x, y = batch
        return {"loss": cross_entropy(self.model(x), y)}

    test_step = train_step


class Hand(Callback):
    def __init__(self, record):
        self.record = record

    def after_backward(self):
        self.record(self.loss)


class Keep(Callback):
    def before_validate(self):
        self.state = torch.get_rng_state()

    def after_validate(self):
        torch.set_rng_state(self.state)


def train(model, loader, valid_loader, record, cbs=()):
    adam = partial(OptimWrapper, opt=torch.optim.Adam)
    data = DataLoaders(loader, valid_loader)
    learn = Learner(data, model, loss_func=cross_entropy, opt_func=adam, lr=1e-2, cbs=[Hand(record), *cbs])
    with learn.no_bar(), learn.no_logging():
        learn.fit(2)


torch.manual_seed(0)
x = torch.randn(128, 8)
data = TensorDataset(x, x[:, :3].argmax(1))
loader, valid_loader = DataLoader(data, 16, shuffle=True), DataLoader(data, 64)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
trainer = Steps(model, "cpu", optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))

assert check_port(trainer, partial(train, cbs=[Keep()]), 2, loader, valid_loader).steps == 16
found = check_port(trainer, train, 2, loader, valid_loader)
assert found.step == 9 and found.what == "random numbers", found
