"""The plain PyTorch loops of our pages end with the weights that the nbtrain code beside them has, bit for bit."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import plain_loop as judge
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import DEVICE, same_weights
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from nbtrain import check_port
from nbtrain.examples import digits

ROOT = Path(__file__).parent.parent.parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples read a few batches, and have one clip that matters."""
    make = digits.digits_loaders

    def few(*args: Any, **options: Any) -> Any:
        train, valid = make(*args, **options)
        part = DataLoader(Subset(train.dataset, range(100)), train.batch_size, shuffle=True, generator=train.generator)
        return part, DataLoader(Subset(valid.dataset, range(50)), 20)

    monkeypatch.setattr(digits, "digits_loaders", few)


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    exec(compile(code, "page", "exec"), names)
    return names


def test_plain_column_of_the_page_on_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    [ours], [plain] = blocks("docs/coming_from/pytorch.md", "python"), blocks("docs/coming_from/pytorch.md", "py")
    loader, valid_loader = digits.digits_loaders()
    given = {"SmallCNN": digits.SmallCNN, "device": DEVICE, "deepcopy": deepcopy, "loader": loader, "valid_loader": valid_loader}
    by_hand = run(plain, given | {"n_valid": 50})
    trainer = run(ours, {})["trainer"]
    assert same_weights(trainer.model, by_hand["model"])
    assert trainer.history.best["val_loss"] == pytest.approx(by_hand["best_loss"], rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")
@pytest.mark.parametrize(
    ("page", "equal", "reason"),
    [("pytorch", 8, ""), ("lightning", 4, "your loop validates without restoring the random numbers")],
)
def test_columns_of_a_page_are_equal_as_it_says(
    page: str, equal: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The left column is the old loop: it makes its model by `SmallCNN()`."""
    monkeypatch.chdir(tmp_path)
    [ours], [theirs] = (blocks(f"docs/coming_from/{page}.md", language) for language in ("python", "py"))
    names = run(ours.partition("result =")[0], {})
    given = {"device": DEVICE, "deepcopy": deepcopy, "n_valid": 50, "ModelCheckpoint": ModelCheckpoint, "Digits": names["Digits"]}

    def loop(model: torch.nn.Module, loader: Any, valid_loader: Any) -> None:
        run(theirs, given | {"SmallCNN": lambda: model, "loader": loader, "valid_loader": valid_loader})

    found = check_port(names["trainer"], loop, 2, names["loader"], names["valid_loader"])
    assert found.steps == equal and found.reason.startswith(reason) and bool(found) is not bool(reason)


def test_example_of_the_readme_and_a_plain_loop_that_restores_the_random_numbers() -> None:
    code = next(block for block in blocks("README.md", "python") if "trainer.run(5" in block)
    trainer = run(code.replace("trainer.run(5", "trainer.run(2"), {})["trainer"]

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0].to(DEVICE)), batch[1].to(DEVICE))

    def by_hand(**options: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        (train, valid), net = digits.digits_loaders(batch_size=32), digits.SmallCNN().to(DEVICE)
        list(judge.train(net, torch.optim.Adam(net.parameters(), lr=1e-3), loss_of, train, range(2), valid=valid, clip=1.0, **options))
        return net

    assert same_weights(trainer.model, by_hand(size_of=lambda batch: len(batch[0])))
    on_cpu = DEVICE == "cpu"  # a GPU's dropout draws numbers that a loader's seed is not among
    assert same_weights(trainer.model, by_hand(restore=False)) is not on_cpu  # which is why the page says it
