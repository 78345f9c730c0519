"""MixUp and CutMix."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from nbtrain import StepError, cutmix, mixup


@pytest.mark.parametrize("mix", [mixup, cutmix])
def test_inputs_and_labels_are_mixed_with_one_share(mix: object) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        x = torch.arange(6.0)[:, None, None, None].expand(6, 2, 5, 7)
        mixed, labels = mix((x, torch.arange(6)), n_classes=6)  # type: ignore[operator]
        assert torch.allclose(mixed.mean((1, 2, 3)), labels @ torch.arange(6.0), atol=1e-5)
        assert torch.allclose(labels.sum(1), torch.ones(6)) and mixed.shape == x.shape
        assert torch.equal(x[:, 0, 0, 0], torch.arange(6.0))


def test_loss_is_the_weighted_sum_of_both_labels_losses() -> None:
    torch.manual_seed(1)
    logits, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    torch.manual_seed(2)
    share, partner = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(4)
    torch.manual_seed(2)
    _, labels = mixup((torch.zeros(4, 1), y), 0.4, n_classes=3)
    expected = share * cross_entropy(logits, y) + (1 - share) * cross_entropy(logits, y[partner])
    assert torch.allclose(cross_entropy(logits, labels), expected)


def test_float_labels_are_mixed_as_they_are() -> None:
    x, y = mixup((torch.arange(4.0)[:, None], torch.arange(4.0) * 2))
    assert torch.allclose(y, 2 * x[:, 0])


def test_what_cannot_be_mixed_is_an_error() -> None:
    with pytest.raises(StepError, match="Class numbers can't be mixed"):
        mixup((torch.zeros(2, 1), torch.tensor([0, 1])))
    with pytest.raises(StepError, match="alpha must be positive, got 0"):
        mixup((torch.zeros(2, 1), torch.zeros(2)), 0)
