"""LoRA on a GPT-2: a state holds the adapters alone, is resumed with the weights of a plain loop, and merges"""

# dependencies = ["peft", "transformers"]

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator

from nbtrain import ModelTrainer, StateManagerAddon
from nbtrain.rng import seed_all

text = torch.arange(8).repeat(40)
samples = [{"input_ids": text[i : i + 16], "labels": text[i : i + 16]} for i in range(64)]
loader = DataLoader(samples, batch_size=16, shuffle=True, collate_fn=default_data_collator)


def make_model():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=32, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=None)
    lora = LoraConfig(r=8, target_modules=["c_attn"], modules_to_save=["lm_head"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(GPT2LMHeadModel(config), lora)


def make_trainer():
    return ModelTrainer.add_on(StateManagerAddon)(
        make_model(),
        "cpu",
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        save_path="lora",
        save_weights="trainable",
        seed=0,
    )


trainer = make_trainer()
trainer.run(2, loader)
again = make_trainer()
result = again.run(6, loader, resume="auto")
assert len(again.history.epochs) == 6 and result.last["train_loss"] < 0.2

plain = make_model().train()
optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
seed_all(0)
for _ in range(6):
    for batch in loader:
        optimizer.zero_grad()
        plain(**batch).loss.backward()
        optimizer.step()
trained = dict(again.model.named_parameters())
assert all(torch.equal(value, trained[name]) for name, value in plain.named_parameters())

n_adapters = sum(p.numel() for p in again.model.parameters() if p.requires_grad)
n_all = sum(p.numel() for p in again.model.parameters())
n_bytes = max(file.stat().st_size for file in Path("lora").rglob("*") if file.is_file())
assert n_bytes < 4 * n_all, f"{n_bytes:,} bytes for {n_adapters:,} of {n_all:,} parameters"

merged = again.model.merge_and_unload()
assert merged.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False).tolist() == [[3, 4, 5, 6, 7, 0]]
