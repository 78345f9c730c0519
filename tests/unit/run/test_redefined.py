"""Steps that are written again while a trainer is in use: what is recorded of it, and where the best starts again."""

from __future__ import annotations

import linecache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import Regress, make_loader, make_trainer, make_valid

from nbtrain import EarlyStoppingAddon, StateManagerAddon, Trainer
from nbtrain.history.run_folder import load_run, read_events
from nbtrain.source.step_changes import changes_steps, steps_diff
from nbtrain.views.html import record_html
from nbtrain.views.text import Board, record_text

_CELLS = count(1)
STEPS = """
class Steps(Trainer):
    def train_step(self, batch):
        x, y = batch
        return {"loss": self.distance(self.model(x), y)}

    def test_step(self, batch):
        return self.train_step(batch)

    def distance(self, output, y):
        return (output - y).square().mean()
"""
TIMES_TEN = STEPS.replace(".mean()", ".mean() * 10")
COMMENTED = STEPS.replace("    def distance", "    # How far\n\n    def distance").replace(
    "        x, y = batch", '        """The loss."""\n        x, y  =  batch'
)


def written(text: str) -> type[Trainer]:
    """The class `Steps` of a cell."""
    name = f"<ipython-input-{next(_CELLS)}-test>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"Trainer": Trainer, "__name__": __name__}
    exec(compile(text, name, "exec"), namespace)
    return namespace["Steps"]


def board_of(folder: Path) -> Board:
    board = Board()
    for event in read_events(folder):
        board.update(event)
    return board


def test_comments_docstrings_and_spaces_change_no_step() -> None:
    assert not changes_steps(written(STEPS), written(COMMENTED))
    assert not changes_steps(written(STEPS), written(STEPS + "\n    def draw(self):\n        pass\n"))


@pytest.mark.parametrize("text", [TIMES_TEN, STEPS.replace('"loss"', '"los"'), STEPS.replace("square", "abs")])
def test_other_code_of_a_step_or_of_what_it_calls_is_a_change(text: str) -> None:
    assert changes_steps(written(STEPS), written(text)) and changes_steps(written(text), written(STEPS))


def test_best_starts_again_where_the_steps_compute_anything_else(tmp_path: Path) -> None:
    trainer = make_trainer(written(STEPS), save_path=tmp_path)
    trainer.run(2, make_loader(), make_valid())
    assert trainer.history.best["epoch"] == 2
    trainer.use(written(TIMES_TEN))
    trainer.run(2, make_loader(), make_valid())
    history = trainer.history
    assert history.best is history.epochs[3] and history.best["val_loss"] > history.epochs[0]["val_loss"]
    assert history.marks[0][1] == "the steps are those of a new Steps; best starts again"
    board, read = board_of(tmp_path / "run-001"), load_run(tmp_path / "run-001")
    assert board.best == dict(history.best) and read.best == history.best
    weights = trainer.train_state.best_weights
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    row = next(line for line in record_text(board).splitlines() if line.endswith("★"))
    assert row.split()[0] == "4"


def test_checkpoint_called_best_is_that_of_the_new_steps(tmp_path: Path) -> None:
    trainer = make_trainer(written(STEPS).add_on(StateManagerAddon), save_path=tmp_path)
    trainer.run(2, make_loader(), make_valid())
    checkpoints = tmp_path / "run-001" / "checkpoints"
    before = (checkpoints / "best.ckpt").resolve()
    trainer.use(written(TIMES_TEN).add_on(StateManagerAddon))
    trainer.run(2, make_loader(), make_valid())
    best = trainer.history.best
    assert best["epoch"] > 2 and (checkpoints / "best.ckpt").resolve() == best.path.resolve() != before
    other = make_trainer(written(TIMES_TEN).add_on(StateManagerAddon), save_path=tmp_path)
    other.load_state(checkpoints / "best.ckpt")
    assert other.history.best["epoch"] == best["epoch"] and other.history.marks == trainer.history.marks


def test_best_goes_on_where_only_a_comment_has_changed() -> None:
    trainer = make_trainer(written(STEPS), optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    trainer.run(1, make_loader(), make_valid())
    trainer.use(written(COMMENTED))
    trainer.run(1, make_loader(), make_valid())
    assert trainer.history.best["epoch"] == 1 and trainer.history.marks[0][1] == "the steps are those of a new Steps"


class Uses(torch.nn.Module):
    """Calls `action` on its `at`th call in the training."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.inner, self.at, self.n, self.action = torch.nn.Linear(8, 1), at, 0, lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += self.training
        if self.training and self.n == self.at:
            self.action()
        return self.inner(x)


def test_epoch_with_both_losses_is_not_the_best() -> None:
    model = Uses(at=8)
    trainer = make_trainer(written(STEPS), model=model)
    model.action = lambda: trainer.use(written(TIMES_TEN))
    trainer.run(3, make_loader())
    assert [row["epoch"] for row in trainer.history.candidates] == [3] and trainer.history.best["epoch"] == 3


def test_validation_after_the_change_counts_within_its_epoch() -> None:
    model = Uses(at=8)
    trainer = make_trainer(written(STEPS), model=model)
    model.action = lambda: trainer.use(written(TIMES_TEN))
    trainer.run(3, make_loader(), make_valid())
    assert [row["epoch"] for row in trainer.history.candidates] == [2, 3]


def test_old_best_returns_with_the_old_steps() -> None:
    model = Uses(at=8)
    trainer = make_trainer(written(STEPS), model=model, on_error="pause")
    broken = written(STEPS.replace("x, y = batch", "x, y = batch\n        raise ValueError('broken')"))
    trainer.run(1, make_loader(), make_valid())
    best, weights = trainer.history.best, trainer.train_state.best_weights

    def fail() -> None:
        raise ValueError("once")

    model.action = fail
    with pytest.raises(ValueError, match="once"):
        trainer.run(1, make_loader(), make_valid())
    with pytest.raises(ValueError, match="broken"):
        trainer.resume(broken)
    assert [text for _, text in trainer.history.marks] == [
        "the steps are those of a new Steps; best starts again",
        "the new definitions have failed, so the old ones stay",
    ]
    assert trainer.history.best is best and trainer.train_state.best_weights is weights
    trainer.stop()


def test_mark_has_the_diff_of_the_steps(tmp_path: Path) -> None:
    trainer = make_trainer(written(STEPS), save_path=tmp_path)
    trainer.run(1, make_loader(), make_valid())
    trainer.use(written(STEPS.replace(".mean()", ".mean() * (2 < 3)")))
    trainer.run(1, make_loader(), make_valid())
    (event,) = [event for event in read_events(tmp_path / "run-001") if event.kind == "mark"]
    diff = (
        "--- before\n+++ after\n@@ -7,3 +7,3 @@\n \n def distance(self, output, y):\n"
        "-    return (output - y).square().mean()\n+    return (output - y).square().mean() * (2 < 3)"
    )
    assert event.data == {"text": "the steps are those of a new Steps; best starts again", "diff": diff, "ranking": "restarts"}
    board = board_of(tmp_path / "run-001")
    assert "<details><summary>① epoch 2, batch 1: the steps are those of a new Steps; best starts again</summary>" in record_html(board)
    assert "* (2 &lt; 3)</pre></details>" in record_html(board) and "(2 < 3)" not in record_text(board)


@pytest.mark.parametrize("keep_source", [False, "names"])
def test_source_that_is_not_kept_is_in_no_mark(tmp_path: Path, keep_source: Any) -> None:
    trainer = make_trainer(written(STEPS), save_path=tmp_path, keep_source=keep_source)
    trainer.use(written(TIMES_TEN))
    trainer.run(1, make_loader())
    (event,) = [event for event in read_events(tmp_path / "run-001") if event.kind == "mark"]
    assert event.data == {"text": "the steps are those of a new Steps"}


def test_diff_has_sixty_lines_at_most_and_no_secrets() -> None:
    many = "".join(f"        self.x{i} = {i}\n" for i in range(100))
    diff = steps_diff(written(STEPS), written(STEPS.replace("        x, y = batch\n", "        x, y = batch\n" + many)))
    assert len(diff.splitlines()) == 60 and diff.splitlines()[-1].endswith(" more lines")
    secret = steps_diff(written(STEPS), written(STEPS.replace("x, y = batch", "x, y = batch; api_key = 'sk-abcdefghij0123456789'")))
    assert "sk-abcdefghij" not in secret and secret


def test_resumed_run_keeps_where_the_best_started_again(tmp_path: Path) -> None:
    def make(kind: type[Trainer]) -> Any:
        return make_trainer(kind.add_on(StateManagerAddon), save_path=tmp_path)

    trainer = make(written(STEPS))
    trainer.run(2, make_loader(), make_valid())
    trainer.use(written(TIMES_TEN))
    trainer.run(1, make_loader(), make_valid())
    again = make(written(TIMES_TEN))
    again.load_state()
    assert again.history.best == trainer.history.best and again.history.best["epoch"] == 3
    assert [row["epoch"] for row in again.history.candidates] == [3]


def test_early_stopping_forgets_the_best_of_the_old_steps() -> None:
    trainer = make_trainer(written(STEPS).add_on(EarlyStoppingAddon), patience=1, restore_best=True)
    trainer.run(2, make_loader(), make_valid())
    trainer.use(written(TIMES_TEN))
    assert trainer.run(2, make_loader(), make_valid()).status == "completed"
    assert trainer[EarlyStoppingAddon].best_value == trainer.history.best["val_loss"] == trainer.history.epochs[3]["val_loss"]


def test_steps_of_files_have_no_diff_after_an_edit() -> None:
    class Edited(Regress):
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch) | {"more": 1.0}

    first = Edited

    class Edited(Regress):  # type: ignore[no-redef]  # noqa: F811
        def train_step(self, batch: Any) -> dict[str, Any]:
            return super().train_step(batch) | {"more": 2.0}

    assert changes_steps(first, Edited) and steps_diff(first, Edited) == ""
