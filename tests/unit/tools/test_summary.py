"""The summary counts every parameter once: its rows sum to the total, wherever a model keeps its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import make_trainer
from torch import Tensor, nn

from nbtrain import Trainer
from nbtrain.tools.summary import Summary


class Forward(Trainer):
    """The mean of what the model returns is the loss."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        output = self.model(batch)
        return {"loss": (output[0] if isinstance(output, tuple) else output).float().mean()}

    test_step = train_step


class Tied(nn.Module):
    """A language model whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.embedding(ids))


class Prompted(nn.Module):
    """A parameter at the root, beside a layer that is called twice and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(1, 6))
        self.layer, self.spare = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x + self.prompt))


def summary_of(model: nn.Module, batch: Tensor) -> Summary:
    return make_trainer(Forward, model=model).summary(batch)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)


MODELS = {
    "a transformer": (encoder, torch.zeros(2, 3, 8)),
    "attention alone": (lambda: nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16)), torch.zeros(2, 3, 8)),
    "an LSTM": (lambda: nn.LSTM(8, 4, num_layers=2, bidirectional=True), torch.zeros(2, 3, 8)),
    "tied weights": (Tied, torch.zeros(2, 3, dtype=torch.long)),
    "a parameter at the root": (Prompted, torch.zeros(2, 6)),
    "a normalised weight": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))), torch.zeros(2, 8)),
    "one layer at two places": (lambda: nn.Sequential(*[nn.Linear(8, 8)] * 3), torch.zeros(2, 8)),
}


@pytest.mark.parametrize(("make", "batch"), MODELS.values(), ids=MODELS)
def test_rows_sum_to_the_total(make: Any, batch: Tensor) -> None:
    model = make()
    summary = summary_of(model, batch)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert summary.n_params == total == sum(row["params"] for row in summary.rows)


def test_weights_of_an_attention_are_in_its_row() -> None:
    assert repr(summary_of(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(2, 3, 8))) == (
        "             layer                             type  output  params\n"
        "         self_attn               MultiheadAttention   tuple     216\n"
        "self_attn.out_proj  NonDynamicallyQuantizableLinear       –      72\n"
        "          dropout1                          Dropout   2×3×8       0\n"
        "             norm1                        LayerNorm   2×3×8      16\n"
        "           linear1                           Linear  2×3×16     144\n"
        "           dropout                          Dropout  2×3×16       0\n"
        "           linear2                           Linear   2×3×8     136\n"
        "          dropout2                          Dropout   2×3×8       0\n"
        "             norm2                        LayerNorm   2×3×8      16\n"
        "600 params, 600 of them trained"
    )


def test_a_shared_parameter_is_counted_once_and_named() -> None:
    summary = summary_of(Tied(), torch.zeros(2, 3, dtype=torch.long))
    assert repr(summary) == (
        "    layer       type  output  params\n"
        "embedding  Embedding   2×3×6      66\n"
        "  decoder     Linear  2×3×11       0\n"
        "66 params, 66 of them trained\n"
        "decoder.weight is embedding.weight, counted once"
    )
    assert summary._repr_html_().endswith("<div>decoder.weight is embedding.weight, counted once</div>")


def test_a_parameter_at_the_root_a_second_call_and_a_layer_that_is_not_called() -> None:
    assert repr(summary_of(Prompted(), torch.zeros(2, 6))) == (
        "  layer      type  output  params\n"
        "  layer    Linear     2×6      42\n"
        "  layer    Linear     2×6       0\n"
        "(model)  Prompted     2×6       6\n"
        "  spare    Linear       –      14\n"
        "62 params, 62 of them trained"
    )


def test_rows_of_a_transformers_model_sum_to_the_total() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, max_position_embeddings=12))

    class Masked(Forward):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.model(input_ids=batch).logits.mean()}

        test_step = train_step

    summary = make_trainer(Masked, model=model).summary(torch.zeros(2, 5, dtype=torch.long))
    assert summary.n_params == sum(row["params"] for row in summary.rows) == sum(p.numel() for p in model.parameters())
    assert any(line.startswith("cls.predictions.decoder.weight is bert.embeddings.word_embeddings.weight") for line in summary.shared)
