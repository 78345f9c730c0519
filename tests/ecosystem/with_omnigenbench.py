"""OmniGenBench's Trainer beside nbtrain, with `check_port`: accumulation, clipping, evaluation before training and after each epoch"""

# dependencies = ["findfile", "autocuda", "tqdm", "transformers"]
# no-deps = ["omnigenbench"]

import sys
import types
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import BatchEncoding, default_data_collator

from nbtrain import AccumulationAddon, LimitsAddon, MetricsAddon, ModelTrainer, check_port

spec = find_spec("omnigenbench")
for name in ("omnigenbench", "omnigenbench.src", "omnigenbench.src.misc", "omnigenbench.src.trainer", "ViennaRNA"):
    sys.modules[name] = types.ModuleType(name)  # they import ViennaRNA, which folds RNA, and all models
    sys.modules[name].__path__ = [f"{spec.submodule_search_locations[0]}{name.removeprefix('omnigenbench').replace('.', '/')}"]
sys.modules["omnigenbench"].__version__ = "0.4"
from omnigenbench.src.trainer.trainer import Trainer as OmniTrainer  # noqa: E402


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}

    def predict(self, batch):
        return {"predictions": self.net(batch["x"]).argmax(1)}


class Kept(OmniTrainer):
    def evaluate(self):
        state = torch.get_rng_state()
        try:
            return super().evaluate()
        finally:
            torch.set_rng_state(state)


def accuracy(y_true, y_pred):
    return {"accuracy": float((y_true == (y_pred.argmax(1) if y_pred.ndim > 1 else y_pred)).mean())}


def train(model, loader, valid_loader):
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    loaders = {"train_loader": loader, "eval_loader": valid_loader}
    options = {"gradient_accumulation_steps": 2, "compute_metrics": accuracy, "autocast": "fp32", "seed": 0, "device": "cpu"}
    Kept(model, epochs=2, optimizer=adam, **loaders, **options).train()


torch.manual_seed(0)
x = torch.randn(128, 8)
samples = [{"x": row, "labels": label} for row, label in zip(x, x[:, :3].argmax(1))]
collate = lambda rows: BatchEncoding(default_data_collator(rows))  # noqa: E731
loader, valid_loader = DataLoader(samples, 16, shuffle=True, collate_fn=collate), DataLoader(samples, 64, collate_fn=collate)
trainer = ModelTrainer.add_on(AccumulationAddon, LimitsAddon, MetricsAddon)(
    Classifier(),
    "cpu",
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    accumulate=2, gradient_clip=1.0, val_first=True, metrics=accuracy, monitor="val_accuracy", monitor_mode="max",
)  # fmt: skip
found = check_port(trainer, train, 2, loader, valid_loader)
assert found and found.steps == 8, found
