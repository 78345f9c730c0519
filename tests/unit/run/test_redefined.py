"""Steps that are written again while a trainer is in use: what is recorded of it, and where the best starts again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cells import cell
from samples import make_loader, make_trainer, make_valid, same_weights

from nbtrain import EarlyStoppingAddon, StateManagerAddon, Trainer
from nbtrain.code.redefined import read_code
from nbtrain.errors import CheckpointError
from nbtrain.history.run_folder import load_run, read_events
from nbtrain.views.html import record_html
from nbtrain.views.text import Board, record_text

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
    namespace: dict[str, Any] = {"Trainer": Trainer, "__name__": __name__}
    cell(text, namespace)
    return namespace["Steps"]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Executes cells of one notebook, and returns its namespace."""
    module = ModuleType("a_notebook")
    module.__file__ = __file__  # or it would not be the user's
    monkeypatch.setitem(sys.modules, "a_notebook", module)
    vars(module).update(Trainer=Trainer, torch=torch, nn=torch.nn)

    def run(text: str) -> dict[str, Any]:
        cell(text, vars(module))
        return vars(module)

    yield run


def steps_diff(before: type[Trainer], after: type[Trainer]) -> str:
    old, new = (read_code(make_trainer(kind)) for kind in (before, after))
    return new.diff(old)


def marks_of(trainer: Any) -> list[str]:
    return [text for _, text in trainer.history.marks]


def board_of(folder: Path) -> Board:
    board = Board()
    for event in read_events(folder):
        board.update(event)
    return board


def test_best_starts_again_where_the_steps_compute_anything_else(tmp_path: Path) -> None:
    trainer = make_trainer(written(STEPS), save_path=tmp_path)
    trainer.run(2, make_loader(), make_valid())
    best, kept = trainer.history.best["val_loss"], {name: value.clone() for name, value in trainer.best_weights.items()}
    assert trainer.history.best["epoch"] == 2
    trainer.use(written(TIMES_TEN))
    trainer.run(2, make_loader(), make_valid())
    history = trainer.history
    assert history.best is history.epochs[3] and history.best["val_loss"] > history.epochs[0]["val_loss"]
    assert marks_of(trainer) == [f"distance changed; best starts again, apply_weights(before=1) has val_loss {best:.4g}"]
    board, read = board_of(tmp_path / "run-001"), load_run(tmp_path / "run-001")
    assert board.best == dict(history.best) and read.best == history.best
    weights = trainer.train_state.best_weights
    assert same_weights(trainer.model, weights)
    row = next(line for line in record_text(board).splitlines() if line.endswith("★"))
    assert row.split()[0] == "4"
    assert history.best_before(1)["val_loss"] == best
    trainer.apply_weights(before=1)
    assert same_weights(trainer.model, kept)

    again = make_trainer(written(TIMES_TEN), save_path=tmp_path)
    again.train_state.history.load_state_dict(history.state_dict())
    again.origin.open(trainer.run_dir)
    again.apply_weights(before=1)  # in another process
    assert same_weights(again.model, kept)
    with pytest.raises(CheckpointError, match="before=2: no best weights"):
        trainer.apply_weights(before=2)


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
    assert trainer.history.best["epoch"] == 1 and trainer.history.marks == []


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


@pytest.mark.parametrize(("validates", "epochs"), [(False, [3]), (True, [2, 3])])
def test_epoch_with_both_losses_is_not_the_best_and_a_validation_after_the_change_counts(validates: bool, epochs: list[int]) -> None:
    model = Uses(at=8)  # in the second epoch
    trainer = make_trainer(written(STEPS), model=model)
    model.action = lambda: trainer.use(written(TIMES_TEN))
    trainer.run(3, make_loader(), make_valid() if validates else None)
    assert [row["epoch"] for row in trainer.history._candidates] == epochs and trainer.history.best["epoch"] in epochs


def test_old_best_returns_if_the_fix_of_a_fix_computes_the_same_again() -> None:
    def fail() -> None:
        raise ValueError("once")

    model = Uses(at=8)
    model.action = fail
    trainer = make_trainer(written(STEPS), model=model, on_error="pause")
    trainer.run(1, make_loader(), make_valid())
    best, weights = trainer.history.best, trainer.best_weights
    with pytest.raises(ValueError, match="once"):
        trainer.run(1, make_loader(), make_valid())
    with pytest.raises(ValueError, match="broken"):
        trainer.resume(written(TIMES_TEN.replace("x, y = batch", "x, y = batch\n        raise ValueError('broken')")))
    (mark,) = marks_of(trainer)
    value = f"{best['val_loss']:.4g}"
    assert mark == f"train_step, distance changed after ValueError; best starts again, apply_weights(before=1) has val_loss {value}"
    assert trainer.history.best is None and trainer.best_weights is None and trainer.history.best_before(1) is best
    trainer.use(written(STEPS))
    assert marks_of(trainer) == ["the code is as before after ValueError"]
    assert trainer.history.best is best and trainer.best_weights is weights
    trainer.stop()


def test_mark_has_the_diff_of_the_steps(tmp_path: Path) -> None:
    trainer = make_trainer(written(STEPS), save_path=tmp_path)
    trainer.run(1, make_loader(), make_valid())
    trainer.use(written(STEPS.replace(".mean()", ".mean() * (2 < 3)")))
    trainer.run(1, make_loader(), make_valid())
    (event,) = [event for event in read_events(tmp_path / "run-001") if event.kind == "mark"]
    diff = (
        "--- before\n+++ after\n@@ -1,2 +1,2 @@\n def distance(self, output, y):\n"
        "-    return (output - y).square().mean()\n+    return (output - y).square().mean() * (2 < 3)"
    )
    text = f"distance changed; best starts again, apply_weights(before=1) has val_loss {trainer.history.best_before(1)['val_loss']:.4g}"
    assert event.data == {"text": text, "diff": diff, "ranking": "restarts"}
    board = board_of(tmp_path / "run-001")
    assert f"<details><summary>① epoch 2, batch 1: {text} · show diff</summary>" in record_html(board)
    assert "* (2 &lt; 3)</pre></details>" in record_html(board) and "(2 < 3)" not in record_text(board)


def test_source_that_is_not_kept_is_in_no_mark(tmp_path: Path) -> None:
    trainer = make_trainer(written(STEPS), save_path=tmp_path, keep_source=False)
    trainer.use(written(TIMES_TEN))
    trainer.run(1, make_loader())
    (event,) = [event for event in read_events(tmp_path / "run-001") if event.kind == "mark"]
    assert event.data == {"text": "distance changed"}


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
    assert [row["epoch"] for row in again.history._candidates] == [3]


@pytest.mark.parametrize("new", [TIMES_TEN, COMMENTED])
def test_steps_that_were_changed_before_a_new_process_are_marked_where_it_continues(new: str, tmp_path: Path) -> None:
    Saved, Again = (written(text).add_on(StateManagerAddon) for text in (STEPS, new))
    make_trainer(Saved, save_path=tmp_path).run(2, make_loader(), make_valid())
    again = make_trainer(Again, save_path=tmp_path)
    again.run(3, make_loader(), make_valid(), resume="auto")
    best = f"{again.history.epochs[1]['val_loss']:.4g}"
    expected = [f"distance changed; best starts again, apply_weights(before=1) has val_loss {best}"] if new is TIMES_TEN else []
    assert marks_of(again) == expected == [text for _, text in load_run(again.run_dir).marks]
    assert again.history.best["epoch"] == 3


def test_steps_that_were_changed_after_the_epoch_that_a_run_goes_back_to_are_marked_there() -> None:
    trainer = make_trainer(written(STEPS), keep_states=True)
    trainer.run(2, make_loader(), make_valid())
    trainer.use(written(TIMES_TEN))
    trainer.run(1, make_loader(), make_valid())
    trainer.rewind(epoch=1)
    trainer.run(1, make_loader(), make_valid())
    assert [text[:36] for text in marks_of(trainer)[1:]] == ["distance changed; best starts again,"]
    assert trainer.history.best["epoch"] == 2


def test_early_stopping_forgets_the_best_of_the_old_steps() -> None:
    trainer = make_trainer(written(STEPS).add_on(EarlyStoppingAddon), patience=1, restore_best=True)
    trainer.run(2, make_loader(), make_valid())
    trainer.use(written(TIMES_TEN))
    assert trainer.run(2, make_loader(), make_valid()).status == "completed"
    assert trainer[EarlyStoppingAddon].best_value == trainer.history.best["val_loss"] == trainer.history.epochs[3]["val_loss"]


NOTEBOOK = """
class Noisy(Trainer):
    def train_step(self, batch):
        x, y = batch
        return {"loss": (self.model(x) - y).square().mean()}

    def test_step(self, batch):
        return self.train_step(batch)
"""


def test_run_and_evaluate_use_the_class_whose_cell_was_run_again(notebook: Any) -> None:
    trainer = make_trainer(notebook(NOTEBOOK)["Noisy"])
    trainer.run(1, make_loader(), make_valid())
    loss = trainer.evaluate(make_valid())["loss"]
    notebook(NOTEBOOK.replace(".mean()", ".mean() * 10"))
    assert trainer.evaluate(make_valid())["loss"] == pytest.approx(10 * loss)
    value = f"{trainer.history.best_before(1)['val_loss']:.4g}"
    assert marks_of(trainer) == [f"train_step changed; best starts again, apply_weights(before=1) has val_loss {value}"]
    kind = notebook(NOTEBOOK.replace("    def test", "    # a comment\n    def test"))["Noisy"]
    trainer.run(1, make_loader(), make_valid())
    assert type(trainer) is kind and marks_of(trainer)[1:] == ["train_step changed"]  # there is no best to start again


def test_class_that_derives_from_its_predecessor_is_the_newest(notebook: Any) -> None:
    trainer = make_trainer(notebook(NOTEBOOK)["Noisy"].add_on(EarlyStoppingAddon))
    trainer.run(1, make_loader(), make_valid())
    derived = "class Noisy(Noisy):\n    def train_step(self, batch):\n        return {'loss': 2 * super().train_step(batch)['loss']}\n"
    for n in (1, 2):
        kind = notebook(derived)["Noisy"]
        trainer.run(1, make_loader(), make_valid())
        assert trainer._written_steps is kind and len(marks_of(trainer)) == n


@pytest.mark.parametrize("addons", [(), (EarlyStoppingAddon,)])
def test_trainer_holds_an_older_class_that_it_is_given(notebook: Any, addons: Any) -> None:
    old = notebook(NOTEBOOK)["Noisy"].add_on(*addons)
    trainer = make_trainer(old)
    new = notebook(NOTEBOOK.replace(".mean()", ".mean() * 10"))["Noisy"].add_on(*addons)
    trainer.use(old)
    trainer.run(1, make_loader(), make_valid())
    assert type(trainer) is old and trainer.history.marks == []
    made = make_trainer(old)
    made.run(1, make_loader(), make_valid())
    assert type(made) is old
    trainer.use(new)
    newest = notebook(NOTEBOOK)["Noisy"]
    trainer.run(1, make_loader(), make_valid())
    assert trainer._written_steps is newest


def test_class_of_the_same_name_elsewhere_is_not_the_newest(notebook: Any) -> None:
    kind = notebook(NOTEBOOK)["Noisy"]
    trainer = make_trainer(kind)
    notebook("class Other(Trainer):\n    pass\nNoisy = Other")
    trainer.run(1, make_loader())
    notebook("def make():\n    class Noisy(Trainer):\n        pass\n    return Noisy\nNoisy = make()")
    trainer.run(1, make_loader())
    assert type(trainer) is kind and trainer.history.marks == []


HELPERS = """
GAMMA = 2

def focal(p):
    return p ** GAMMA

class Distance:
    def __call__(self, a, b):
        return (a - b).abs().mean()

    def draw(self):
        return 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 1))

    def forward(self, x):
        return self.inner(x)

class Steps(Trainer):
    n = 0

    def train_step(self, batch):
        x, y = batch
        self.n += 1
        return {"loss": focal(Distance()(self.model(x), y))}

    def test_step(self, batch):
        x, y = batch
        return {"loss": Distance()(self.model(x), y)}
"""
CHANGES = {
    "function": ("p ** GAMMA", "p ** GAMMA * 2", "focal changed", False),
    "constant": ("GAMMA = 2", "GAMMA = 3", "GAMMA changed", False),
    "helper class": (".abs()", ".square()", "Distance.__call__ changed; best starts again", True),
    "forward": ("return self.inner(x)", "return self.inner(x) * 2", "Net.forward changed; best starts again", True),
    "other function under a name": ("def focal(p):", "focal = torch.sqrt\n\ndef other(p):", "focal changed", False),
    "train_step": ("self.n += 1", "self.n += 2", "train_step changed", False),
    "method that no step calls": ("return 1", "return 2", "", False),
    "constructor of the model": ("nn.Linear(8, 1)", "nn.Linear(8, 1, bias=False)", "", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_the_steps_call_is_compared_and_best_goes_on_where_the_monitored_value_is_computed_as_before(
    notebook: Any, change: str
) -> None:
    old, new, mark, restarts = CHANGES[change]
    names = notebook(HELPERS)
    trainer = make_trainer(names["Steps"], model=names["Net"]())
    trainer.run(1, make_loader(), make_valid())
    notebook(HELPERS.replace(old, new))
    trainer.run(1, make_loader(), make_valid())
    assert [text.partition(", apply")[0] for text in marks_of(trainer)] == [mark] * bool(mark)
    assert bool(trainer.history.restarts.places) == restarts
    assert isinstance(trainer.model, names["Net"])


def test_repaired_run_shows_one_line_for_the_repair(notebook: Any, tmp_path: Path) -> None:
    trainer = make_trainer(notebook(NOTEBOOK)["Noisy"], on_error="pause", save_path=tmp_path)
    for line in ("{}[3]", "{}[4]"):
        notebook(NOTEBOOK.replace("        x, y = batch", f"        {line}\n        x, y = batch"))
        with pytest.raises(KeyError):
            trainer.run(1, make_loader()) if trainer.failure is None else trainer.resume()
    notebook(NOTEBOOK)
    trainer.resume()
    board = board_of(tmp_path / "run-001")
    assert [text for _, text in board.marks] == ["the code is as before after KeyError"] == marks_of(trainer) and board.notes == []


def test_what_a_step_imports_or_creates_late_is_no_change(notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_losses.py").write_text("def late(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    lazy = "from late_losses import late\n        self.model.register_forward_hook(lambda *given: None)\n        x, y = batch"
    trainer = make_trainer(notebook(NOTEBOOK.replace("x, y = batch", lazy))["Noisy"])
    for _ in range(2):
        trainer.run(1, make_loader(), make_valid())
    assert trainer.history.marks == [] and trainer.history.restarts.places == []
