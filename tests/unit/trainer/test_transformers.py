"""Models of transformers are trained, saved and read again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from samples import DEVICE, same_weights, without_times
from torch.nn.functional import cross_entropy

from nbtrain import ModelTrainer

TEXT = (transformers.__doc__ or "") + (re.__doc__ or "") + (torch.optim.Adam.__doc__ or "")


def blocks(length: int = 32) -> list[dict[str, torch.Tensor]]:
    codes = torch.tensor(list(TEXT.encode()))
    return [{"input_ids": block, "labels": block} for block in codes[: len(codes) // length * length].view(-1, length)]


def tiny(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **options
    )
    return transformers.GPT2LMHeadModel(config)


def language(model: Any, **options: Any) -> Any:
    data = blocks()
    options = {"train_dataset": data[:-8], "eval_dataset": data[-8:], "learning_rate": 3e-3, "seed": 0} | options
    return ModelTrainer(model, device=DEVICE, log_bar=False, **options)


def test_a_model_made_from_its_config_learns_to_read(tmp_path: Path) -> None:
    trainer = language(tiny(), perplexity=True, batch_size=16)
    result = trainer.run(2)
    assert result.last["val_perplexity"] < 60 < 256
    assert trainer.save_pretrained(tmp_path / "model") == tmp_path / "model"
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert same_weights(again, trainer.model)


def test_gradient_checkpointing_changes_memory_and_no_number() -> None:
    plain, thrifty = language(tiny()), language(tiny(), gradient_checkpointing=True)
    found = [any(getattr(part, "gradient_checkpointing", False) for part in t.model.modules()) for t in (plain, thrifty)]
    assert found == [False, True]
    for trainer in (plain, thrifty):
        torch.manual_seed(5)
        trainer.run(1)
    assert without_times(plain.history.epochs) == without_times(thrifty.history.epochs)


def test_a_model_of_transformers_with_its_own_loss_can_have_another() -> None:
    class Smoothed(ModelTrainer):
        def train_step(self, batch: Any) -> dict[str, Any]:
            logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
            return {"loss": cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)}

    trainer = Smoothed(tiny(), device=DEVICE, log_bar=False, mode="test", eval_dataset=blocks()[:8])
    assert trainer.evaluate()["loss"] > 0
