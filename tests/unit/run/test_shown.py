"""`trainer.show(name, value)`: what it takes, where it goes, and what a run that goes back does with it."""

from __future__ import annotations

import io
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from matplotlib.figure import Figure
from PIL import Image
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import ConfigError, StateManagerAddon, StepError, load_run, runs
from nbtrain.events import Event, Progress, Shown
from nbtrain.views.html import SHOWN_BYTES, shown_html
from nbtrain.views.shown import convert
from nbtrain.views.text import Board, record_text


class Steps(Regress):
    """Shows the number of the batch in each training step."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.show("step", f"{self.current_step}")
        return super().train_step(batch)


class Epochs(Regress):
    """Shows the epoch when it ends, by way of a hook."""

    def metric_on_epoch_end(self) -> None:
        if self.mode == "train":
            self.show("epoch", torch.full((1, 4, 4), self.current_epoch / 10))


def shown(trainer: Any) -> list[tuple[int, int, str]]:
    return [(one.epoch, one.step, one.content.get("text", one.name)) for one in trainer.history.shown]


def pixels(one: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(b64decode(one.content["image"].partition(",")[2]))).convert("RGB"))


# -- values
RED = np.zeros((4, 6, 3), np.uint8) + np.array([255, 0, 0], np.uint8)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(RED).permute(2, 0, 1),
        torch.tensor(RED / 255).permute(2, 0, 1).requires_grad_(),
        torch.tensor(RED / 255).permute(2, 0, 1)[None].bfloat16(),
        RED,
        (RED / 255)[None],
        Image.fromarray(RED),
        [Image.fromarray(RED)],
        [torch.tensor(RED).permute(2, 0, 1)],
    ],
    ids=["bytes", "floats", "batch", "array", "arrays", "pil", "list of pil", "list of tensors"],
)
def test_pictures_of_all_kinds_are_the_same_picture(value: Any) -> None:
    assert np.array_equal(pixels(convert("a", value)), RED)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(4, 28, 28), "x[:, None]"),
        (torch.zeros(16, 28, 28), "x[:, None]"),
        (torch.zeros(3, 5, 3), "may be first or last"),
        (torch.zeros(2, 5, 9, 9), "where no dimension is that of 1 or 3 channels"),
        (torch.zeros(2, 2) - 1, "(x + 1) / 2"),
        (torch.full((2, 2), 255.0), "x / 255"),
        (torch.full((2, 2), float("nan")), "nan_to_num"),
        (torch.zeros(2, 2, dtype=torch.int64), "mask / (n_classes - 1)"),
        (torch.zeros(9), 'kind="histogram"'),
        (torch.tensor(1.0), "return it from the step"),
        (torch.zeros(0, 3, 4, 4), "empty"),
        ({"a": 1}, "Give a matplotlib figure"),
        ([torch.zeros(2, 1, 4, 4)], "one batch (N, C, H, W)"),
    ],
)
def test_a_value_that_could_mean_two_things_or_none_is_an_error_that_says_what_to_write(value: Any, words: str) -> None:
    with pytest.raises(StepError, match=re.escape(words)):
        convert("a", value)
    with pytest.raises(StepError, match="got 2 captions for 1 picture"):
        convert("a", torch.zeros(2, 2), caption=["a", "b"])


def test_a_large_picture_a_long_text_and_many_values_are_small_in_the_record() -> None:
    noise = convert("a", np.random.default_rng(0).integers(0, 256, (2000, 3000, 3), np.uint8))
    assert len(noise.content["image"]) < 56_000 and len(noise.file) <= 512 * 1024
    assert convert("a", torch.zeros(100, 1, 2, 2)).content["n_all"] == 100
    text = convert("a", "x" * 5000)
    assert text.content["n_cut"] == 1000 and len(text.file) == 5000
    values = convert("a", torch.tensor([0.0, 1.0, float("nan"), float("inf")]).repeat(1000), "histogram").content
    assert (values["n"], values["n_not_finite"], values["mean"], len(values["counts"])) == (2000, 2000, 0.5, 64)
    figure = Figure(figsize=(6, 4))
    figure.subplots().plot([1, 2])
    assert convert("a", figure).content["width"] == 480  # 6 inches of 80 px


# -- where it goes
def test_a_run_keeps_what_its_steps_show_with_epoch_and_step(tmp_path: Path) -> None:
    trainer = make_trainer(Epochs, save_path=tmp_path)
    trainer.run(2, make_loader(), make_valid())
    assert shown(trainer) == [(1, 5, "epoch"), (2, 10, "epoch")]
    files = sorted(path.name for path in (trainer.run_dir / "shown").iterdir())
    assert files == ["0001-000005-epoch.png", "0002-000010-epoch.png"]
    assert load_run(tmp_path).shown == trainer.history.shown
    assert "shown: epoch 2 · files in shown/" in record_text(runs(tmp_path)[0].card.board)
    assert "data:image/png" in runs(tmp_path)._repr_html_()


def test_a_value_that_can_not_be_shown_ends_the_run() -> None:
    class Wrong(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            self.show("x", batch[0])
            return super().train_step(batch)

    trainer = make_trainer(Wrong)
    with pytest.raises(StepError, match=r"show\('x', ...\) got a picture with values from"):
        trainer.run(1, make_loader(), make_valid())
    assert not trainer.history.shown and not trainer.history.steps["train"]
    with pytest.raises(ConfigError, match="got no value"):
        trainer.show("x")


def test_the_limit_is_of_an_epoch_and_of_all_and_is_said_once(tmp_path: Path) -> None:
    class Few(Steps):
        show_limits = (2, 5)

    trainer = make_trainer(Few, save_path=tmp_path)
    trainer.run(4, make_loader())
    assert shown(trainer) == [(1, 0, "0"), (1, 1, "1"), (2, 5, "5"), (2, 6, "6"), (3, 10, "10")]
    notes = [json.loads(line)["data"]["text"] for line in open(trainer.run_dir / "events.jsonl") if '"kind":"note"' in line]
    assert notes == [
        "show: of each epoch the first 2 are kept, the others left out. Few.show_limits = (2, 5) is the limit.",
        "show: the first 5 of all are kept, the others left out. Few.show_limits = (2, 5) is the limit.",
    ]


def test_an_evaluation_shows_in_its_own_record_and_other_uses_of_a_step_below_the_cell_or_nowhere(capsys: Any) -> None:
    class Tested(Regress):
        def test_step(self, batch: Any) -> dict[str, Any]:
            self.show("found", "a text")
            return super().test_step(batch)

    trainer = make_trainer(Tested, log_bar=True)
    trainer.evaluate(make_valid())
    assert capsys.readouterr().out.count("found: a text") == 3 and len(trainer.history.shown) == 3
    trainer.validate(make_valid())
    trainer.show("mine", torch.zeros(2, 2))
    printed = capsys.readouterr().out
    assert printed.count("found: a text") == 3 and "mine: 1 picture" in printed and len(trainer.history.shown) == 3
    trainer.predict(make_valid())
    trainer.summary(next(iter(make_valid())))
    assert "a text" not in capsys.readouterr().out


def test_only_rank_0_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Steps):
        def train_step(self, batch: Any) -> dict[str, Any]:
            monkeypatch.setattr(rank_zero_only, "rank", 1)
            try:
                return super().train_step(batch)
            finally:
                monkeypatch.setattr(rank_zero_only, "rank", 0)

    trainer = make_trainer(Late)
    trainer.run(1, make_loader())
    assert not trainer.history.shown


def test_steps_under_the_users_own_lightning_trainer_show_in_the_history() -> None:
    trainer = make_trainer(Epochs)
    arguments = trainer.lightning_args() | {"max_epochs": 1, "enable_progress_bar": False}
    L.Trainer(**arguments).fit(trainer.as_lightning_module(), make_loader(), make_valid())
    assert shown(trainer) == [(1, 5, "epoch")]


# -- going back
def test_what_is_undone_goes_with_its_pictures(tmp_path: Path) -> None:
    trainer = make_trainer(Steps, save_path=tmp_path, keep_states=True)
    trainer.run(2, make_loader(own_generator=True))
    whole, files = shown(trainer), sorted((trainer.run_dir / "shown").iterdir())
    assert whole == [(i // 5 + 1, i, str(i)) for i in range(10)]
    trainer.rewind(step=7)
    assert shown(trainer) == whole[:7]
    trainer.rewind(epoch=1)
    assert shown(trainer) == whole[:5]
    other = trainer.branch(epoch=1)
    trainer.run(1, make_loader(own_generator=True))
    assert shown(trainer) == whole and sorted((trainer.run_dir / "shown").iterdir()) == files
    trainer.rewind(epoch=1)
    trainer.set(lr=0.5)
    trainer.show_limits = (1, 100)
    trainer.run(1, make_loader(own_generator=True))
    assert shown(trainer) == whole[:6] and len(list((trainer.run_dir / "shown").iterdir())) == 6
    other.run(1, make_loader(own_generator=True))
    assert [one.step for one in load_run(other.run_dir).shown] == list(range(10))  # its record begins with that of its parent


def test_a_resumed_run_keeps_those_of_its_past(tmp_path: Path) -> None:
    kind = Steps.add_on(StateManagerAddon)
    first = make_trainer(kind, save_path=tmp_path, every_n_steps=7)
    first.run(2, make_loader())
    whole, (checkpoint,) = shown(first), first.run_dir.glob("checkpoints/*step=7*")
    second = make_trainer(kind, save_path=tmp_path)
    second.run(2, make_loader(), resume=checkpoint)
    assert shown(second) == whole


# -- in a page
def test_a_page_stays_small_and_has_the_newest() -> None:
    picture = convert("a", np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)).content
    many = [Shown("a", "image", picture, epoch, epoch * 5, epoch * 5) for epoch in range(1, 201)]
    page = shown_html(many)
    assert len(page) < SHOWN_BYTES + 30_000 and "epoch 200, step 1000" in page and "of 200 here" in page
    assert shown_html(many, 1000).count("<img") == 0 and "200 in all" in shown_html(many, 1000)
    assert shown_html(many, newest=True).count("<img") == 1


def test_a_hostile_record_is_not_drawn() -> None:
    content = {"image": '" onerror="alert(1)', "width": 1, "scale": 1, "n": 1, "n_all": 1, "captions": []}
    good = {"image": "data:image/png;base64,AAAA", "width": 1, "scale": 1, "n": 1, "n_all": 1, "captions": ["<b>"]}
    for wrong in ({"content": content}, {"content": good | {"width": "1px"}}, {"step": -1}, {"kind": "video"}, {"more": 1}):
        data = vars(Shown("<i>", "image", good, 1, 2, 3)) | wrong
        with pytest.raises(ValueError, match="not an event"):
            Event.from_json(Event("show", Progress(), data=data).to_json())
    board = Board()
    board.update(Event.from_json(Event("show", Progress(), data=vars(Shown("<i>", "image", good, 1, 2, 3))).to_json()))
    assert "<i>" not in shown_html(board.shown) and "<b>" not in shown_html(board.shown)
