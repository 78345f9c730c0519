"""Hugging Face's Trainer beside nbtrain, with `check_port`: dropout, accumulation, clipping and its linear schedule, bit for bit"""

# dependencies = ["transformers[torch]"]

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer as HFTrainer
from transformers import TrainingArguments, default_data_collator, get_linear_schedule_with_warmup

from nbtrain import AccumulationAddon, ModelTrainer, check_port


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Ordered(HFTrainer):
    def get_train_dataloader(self):
        return loader


def train(model, loader):
    args = TrainingArguments(
        "hf", num_train_epochs=2, per_device_train_batch_size=16, gradient_accumulation_steps=2, learning_rate=1e-2, warmup_steps=2,
        max_grad_norm=1.0, optim="adamw_torch", weight_decay=0.0, seed=0, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Ordered(model, args, train_dataset=samples).train()


torch.manual_seed(0)
x = torch.randn(128, 8)
samples = [{"x": row, "labels": label} for row, label in zip(x, x[:, :3].argmax(1))]
loader = DataLoader(samples, batch_size=16, shuffle=True, collate_fn=default_data_collator)

trainer = ModelTrainer.add_on(AccumulationAddon)(
    Classifier(),
    "cpu",
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0),
    scheduler=lambda optimizer, plan: get_linear_schedule_with_warmup(optimizer, 2, plan.total_steps),
    gradient_clip=1.0,
    accumulate=2,
)
found = check_port(trainer, train, 2, loader)
assert found and found.steps == 8, found
