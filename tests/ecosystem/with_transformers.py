"""A GPT-2 with `ModelTrainer`: its loss, its collator, its schedule; `generate` afterwards"""

# dependencies = ["transformers"]

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_cosine_schedule_with_warmup

from nbtrain import ModelTrainer

torch.manual_seed(0)
text = torch.arange(8).repeat(40)  # 0 1 2 … 7 0 1 2 …
samples = [{"input_ids": text[i : i + 16], "labels": text[i : i + 16]} for i in range(64)]
loader = DataLoader(samples, batch_size=16, shuffle=True, collate_fn=default_data_collator)

config = GPT2Config(vocab_size=8, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None, pad_token_id=0)
trainer = ModelTrainer(
    GPT2LMHeadModel(config),
    "cpu",
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    scheduler=lambda optimizer, plan: get_cosine_schedule_with_warmup(optimizer, 4, plan.total_steps),
    gradient_clip=1.0,
)
result = trainer.run(10, loader)
assert result.last["train_loss"] < 0.1

written = trainer.model.eval().generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, do_sample=False)
assert written.tolist() == [[3, 4, 5, 6, 7, 0, 1, 2]]
