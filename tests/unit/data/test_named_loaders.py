"""Several loaders of a validation or test, by name."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from samples import Regress, make_data, make_loader, make_trainer, make_valid
from torch.utils.data import DataLoader

from nbtrain.errors import ConfigError
from nbtrain.history.run_folder import read_events


def make_hard() -> DataLoader[Any]:
    """Two batches, the second a short one: ten samples."""
    x, y = make_data(10, seed=5).tensors
    return DataLoader(torch.utils.data.TensorDataset(x, y + 2), 8)


class Named(Regress):
    """Writes down which loader each batch of the validation is from."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[str | None] = []

    def test_step(self, batch: Any) -> dict[str, Any]:
        if self.control.state != "idle":  # not when it is tried before the run
            self.seen.append(self.loader_name)
        self.log("seen", 1.0)
        return super().test_step(batch)


def val(row: Any) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("val_")}


def test_means_are_of_all_samples_and_of_each_loader() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader(), {"easy": make_valid(), "hard": make_hard()})
    row, easy, hard = trainer.history.epochs[-1], trainer.evaluate(make_valid()), trainer.evaluate(make_hard())
    for name in ("loss", "mae"):
        assert row[f"val_{name}/easy"] == pytest.approx(easy[name])
        assert row[f"val_{name}/hard"] == pytest.approx(hard[name])
        assert row[f"val_{name}"] == pytest.approx((40 * easy[name] + 10 * hard[name]) / 50)
    assert sorted(val(row)) == ["val_loss", "val_loss/easy", "val_loss/hard", "val_mae", "val_mae/easy", "val_mae/hard"]


def test_a_list_of_loaders_has_numbers_for_names() -> None:
    trainer = make_trainer()
    trainer.run(1, make_loader(), [make_valid(), make_hard()])
    assert sorted(val(trainer.history.epochs[-1])) == ["val_loss", "val_loss/0", "val_loss/1", "val_mae", "val_mae/0", "val_mae/1"]


def test_a_list_of_batches_is_one_loader() -> None:
    trainer, batches = make_trainer(), list(make_valid())
    trainer.run(1, make_loader(), batches)
    assert sorted(val(trainer.history.epochs[-1])) == ["val_loss", "val_mae"]
    assert sorted(trainer.evaluate(batches)) == ["loss", "mae"]


def test_training_is_the_same_with_one_loader_and_with_several() -> None:
    weights = []
    for valid in (make_valid(), {"easy": make_valid(), "hard": make_hard()}, None):
        trainer = make_trainer()
        torch.manual_seed(3)
        trainer.run(2, make_loader(), valid)
        weights.append(torch.cat([p.flatten() for p in trainer.model.parameters()]))
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


def test_a_step_knows_its_loader_and_what_it_logs_is_named_for_it() -> None:
    trainer = make_trainer(Named)
    trainer.run(1, make_loader(), {"easy": make_valid(), "hard": make_hard()})
    assert trainer.seen == ["easy"] * 3 + ["hard"] * 2
    assert trainer.loader_name is None
    row = trainer.history.epochs[-1]
    assert (row["seen/easy"], row["seen/hard"]) == (1.0, 1.0) and "seen" not in row


@pytest.mark.parametrize("mode", ["evaluate", "validate", "run"])
def test_evaluate_validate_and_test_name_their_loaders(mode: str) -> None:
    trainer, loaders = make_trainer(Named), {"easy": make_valid(), "hard": make_hard()}
    if mode == "run":
        trainer.toggle("test")
        found = {name.removeprefix("test_"): value for name, value in trainer.run(1, loaders).metrics.items() if name.startswith("test_")}
    else:
        found = getattr(trainer, mode)(loaders)
    easy, hard = make_trainer().evaluate(make_valid()), make_trainer().evaluate(make_hard())
    assert found["loss/easy"] == pytest.approx(easy["loss"]) and found["loss/hard"] == pytest.approx(hard["loss"])
    assert found["loss"] == pytest.approx((40 * easy["loss"] + 10 * hard["loss"]) / 50)


def test_a_run_that_is_on_is_evaluated_on_several_loaders() -> None:
    found: list[dict[str, float]] = []

    class Measures(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            found.append(trainer.evaluate({"easy": make_valid(), "hard": make_hard()}))

    trainer = make_trainer(lightning={"callbacks": [Measures()], "limit_train_batches": 1})
    trainer.run(1, make_loader())
    assert sorted(found[0]) == ["loss", "loss/easy", "loss/hard", "mae", "mae/easy", "mae/hard"] and not trainer.history.tests
    trainer.toggle("test")
    assert found[0] == pytest.approx(trainer.evaluate({"easy": make_valid(), "hard": make_hard()}))


def test_a_named_metric_is_monitored() -> None:
    trainer = make_trainer(monitor="val_loss/hard", lightning={"callbacks": [EarlyStopping("val_loss/hard", patience=1)]})
    assert trainer.monitor_mode == "min"
    trainer.run(3, make_loader(), {"easy": make_valid(), "hard": make_hard()})
    rows = trainer.history.epochs
    assert trainer.history.best["val_loss/hard"] == min(row["val_loss/hard"] for row in rows)


def test_named_metrics_reach_loggers_and_the_run_folder(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path / "csv")
    trainer = make_trainer(save_path=tmp_path / "runs", lightning={"logger": logger})
    trainer.run(1, make_loader(), {"easy": make_valid(), "hard": make_hard()})
    logger.save()
    head = (tmp_path / "csv/lightning_logs/version_0/metrics.csv").read_text().splitlines()[0]
    assert {"val_loss", "val_loss/easy", "val_loss/hard"} <= set(head.split(","))
    rows = [event.data["row"] for event in read_events(trainer.run_dir) if event.kind == "epoch"]
    assert rows[0]["val_loss/hard"] == trainer.history.epochs[0]["val_loss/hard"]


BY_NAME = "valid_loader must be a dict of loaders by name, but"
GIVE = 'Give loaders: valid_loader={"easy": loader}. For a batch, give a list: valid_loader=[batch].'
MISTAKES = {
    "a batch": ({"x": torch.zeros(4, 8), "y": torch.zeros(4, 1)}, f"{BY_NAME} 'x' is Tensor (4, 8) float32.\n  {GIVE}"),
    "texts": ({"text": ["a", "b"]}, f"{BY_NAME} 'text' is list of 2 ([0]: str, [1]: str).\n  {GIVE}"),
    "no name": ({" ": [1]}, "valid_loader has a loader named ' '.\n  Use strings as names: {\"easy\": loader}."),
    "nothing": ({}, "valid_loader is an empty dict.\n  Give loaders by name, or leave it out."),
    "an empty one": ({"a": []}, "The valid_loader 'a' is empty: it has no batch.\n  Look at the dataset's length, and at drop_last=True."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_loader_by_name_is_refused(name: str) -> None:
    given, text = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        make_trainer().run(1, make_loader(), given)
    assert str(caught.value) == text


def test_a_list_of_loaders_and_batches_is_refused_with_both_spellings() -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer().run(1, make_loader(), [make_valid(), next(iter(make_valid()))])
    assert str(caught.value) == (
        "valid_loader mixes loaders with something else: list of 2 ([0]: Tensor (16, 8) float32, [1]: Tensor (16, 1) float32).\n"
        '  Give several loaders by name: valid_loader={"a": loader, "b": other}; or batches alone: valid_loader=[batch, batch].'
    )
