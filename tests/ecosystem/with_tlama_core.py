"""tlama-core's Trainer beside nbtrain, with `check_port`: updates by tokens, decay of matrices alone, clipping, schedule, bit for bit"""

# dependencies = ["rich"]
# no-deps = ["tlama-core"]

import sys
import types
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from nbtrain import AccumulationAddon, TensorLoader, Trainer, check_port, get_lr_scheduler, param_groups

spec = find_spec("tlamacore")
for name in ("tlamacore", "tlamacore.utils"):  # they import Triton and ask for a GPU
    sys.modules[name] = types.ModuleType(name)
sys.modules["tlamacore"].__path__ = spec.submodule_search_locations
sys.modules["tlamacore.utils"].print_first_message = lambda **options: None
from tlamacore.training import Trainer as TlamaTrainer  # noqa: E402
from tlamacore.training import get_lr_scheduler as their_schedule  # noqa: E402


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 7))

    def forward(self, tokens, start_pos=0, targets=None):
        logits = self.net(tokens)
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


class Next(Trainer):
    def train_step(self, batch):
        tokens, targets = batch  # (8, 16)
        return {"loss": self.model(tokens, targets=targets)[1]}


class Batches:
    """As tlama-core reads them: batch after batch, over the ends of epochs."""

    batch_size, seq_len = 8, 16

    def __init__(self, loader):
        self.batches = (batch for _ in range(2) for batch in loader)

    def next_batch(self):
        return next(self.batches)


def train(model, loader):
    schedule = their_schedule(**rates)
    options = {"learning_rate": 6e-2, "weight_decay": 0.1, "seed": 0, "verbose": False, "log_steps": 100}
    TlamaTrainer(model, Batches(loader), scheduler=schedule, total_batch_size=256, epochs=2, steps=4, **options).train()


torch.manual_seed(0)
rates = {"max_lr": 6e-2, "min_lr": 6e-3, "warmup_steps": 2, "max_steps": 8}
text = torch.arange(64 * 16 + 1) % 7 % 5
loader = TensorLoader(text[:-1].unflatten(0, (-1, 16)), text[1:].unflatten(0, (-1, 16)), batch_size=8, shuffle=True)
model = Model()
adamw = torch.optim.AdamW(param_groups(model, lr=6e-2, weight_decay=0.1), betas=(0.9, 0.95), eps=1e-8)
schedule = get_lr_scheduler(**rates, decay_type="cosine")
options = {"gradient_clip": 1.0, "total_batch_size": 256, "tokens_per_batch": 128}
trainer = Next.add_on(AccumulationAddon)(model, "cpu", optimizer=adamw, scheduler=schedule, **options)
found = check_port(trainer, train, 2, loader)
assert found and found.steps == 8, found
