"""What a cell shows of an error: the lines of the user, one line for the frames of libraries, and the message."""

from __future__ import annotations

import re
from typing import Any

import pytest

SETUP = """\
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from nbtrain import EMAAddon, MultiGPUAddon, Trainer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

class Digits(Trainer):
    def train_step(self, batch):
        return {"loss": self.model(batch).square().mean()}
    test_step = train_step

class Images(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        raise FileNotFoundError("No such file: x.png")

def make(kind=Digits, device="cpu", **options):
    optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    return kind(Net(), device=device, optimizer=optimizer, log_bar=False, on_error="raise", **options)

def last_frames():
    tb, names = sys.last_traceback, []
    while tb is not None:
        names.append(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    return names

class Slotted(Exception):
    __slots__ = ("text",)

good, bad = [torch.randn(8, 4)], [torch.randn(8, 5)]
trainer = make()
"""
DEEP = "".join(f"def step{i}(batch):\n    a = 1\n    b = 2\n    return step{i + 1}(batch)\n\n" for i in range(12)) + "def step12(batch):\n"
DEEP += "    return batch['x']\n\nclass Deep(Digits):\n    def train_step(self, batch):\n        return step0(batch)\n\n"
CELLS = {
    "setup": SETUP,
    "shapes": "trainer.run(1, bad)",
    "frames of shapes": "last_frames()",
    "whole": "trainer.traceback()",
    "key": "class Keys(Digits):\n    def train_step(self, batch):\n        return {'loss': batch['x']}\n"
    "make(Keys).run(1, [{'y': good[0]}])",
    "frames of key": "last_frames()",
    "no loss": "class NoLoss(Digits):\n    def train_step(self, batch):\n        return {'accuracy': 1.0}\nmake(NoLoss).run(1, good)",
    "frames of no loss": "last_frames()",
    "deep": DEEP + "make(Deep).run(1, [{'y': good[0]}])",
    "unknown argument": "Digits(Net(), modle=Net())",
    "unknown option": "Digits.add_on(EMAAddon)(Net(), ema_decy=0.9)",
    "option of an addon": "EMAAddon(ema_decy=0.9)",
    "no addon": "Digits.add_on(3)",
    "wrong type": "trainer.run('3', good)",
    "missing argument": "trainer.run()",
    "wrong live edit": "trainer.set(lrr=3)",
    "frames of wrong live edit": "last_frames()",
    "worker": "trainer.run(1, DataLoader(Images(), num_workers=1))",
    "worker of predict": "trainer.predict(DataLoader(Images(), num_workers=1))",
    "whole of worker": "trainer.traceback()",
    "background": "handle = trainer.run(1, bad, background=True)\nhandle.join()",
    "met": "trainer.traceback()",
    "wait": "handle.wait()",
    "wait again": "handle.wait()",
    "user's cause": "def read():\n    try:\n        return {}['x']\n    except KeyError as error:\n"
    "        raise ValueError('mine') from error\n\n"
    "class Chained(Digits):\n    def train_step(self, batch):\n        read()\nmake(Chained).run(1, good)",
    "cause of a wrong argument": "Digits(Net(), optimizer=lambda params: int('x'))",
    "without a trainer": "def hook(params):\n    raise OSError('disk')\nDigits(Net(), optimizer=hook)",
    "last": "import nbtrain\nnbtrain.tracebacks.print_last()",
    "in a step": "class Inside(Digits):\n    def train_step(self, batch):\n        self.toggle('tain')\nmake(Inside).run(1, good)",
    "slots": "class Slots(Digits):\n    def train_step(self, batch):\n        raise Slotted('no room')\nmake(Slots).run(1, good)",
    "caught": "import pickle\ntry:\n    trainer.run(1, bad)\nexcept RuntimeError as error:\n"
    "    again = pickle.loads(pickle.dumps(error))\nstr(again)",
    "ranks": "class OnRank(Digits):\n    def train_step(self, batch):\n        raise LookupError('no such row')\n"
    "ranks = make(OnRank.add_on(MultiGPUAddon), ['cpu', 'cpu'])\nranks.run(1, DataLoader(torch.randn(32, 4), 8))",
    "whole of ranks": "ranks.traceback()",
    "plain": "%xmode Plain\ntrainer.run(1, bad)",
}


@pytest.fixture(scope="module")
def outputs(execute: Any) -> dict[str, Any]:
    """What each of the cells has sent, by its name."""
    notebook = execute(*CELLS.values())
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells)}


def value(outputs: list[Any]) -> str:
    return outputs[-1].data["text/plain"]


HEAD = "-" * 75 + "\n"
NOT_BEGUN = "The run has not begun, no weight has changed: correct it, then run the cell again."
HIDDEN = "[N frames of {} hidden · trainer.traceback() shows them]\n"
SHAPES = (
    HEAD
    + """\
RuntimeError                              Traceback (most recent call last)
Cell, line 1
----> 1 trainer.run(1, bad)

Cell, line 16, in Digits.train_step(self, batch)
     15     def train_step(self, batch):
---> 16         return {"loss": self.model(batch).square().mean()}

Cell, line 12, in Net.forward(self, x)
     11     def forward(self, x):
---> 12         return self.layer(x)

"""
    + HIDDEN.format("nbtrain, Lightning and torch")
    + """\
RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x5 and 4x1)
Digits.train_step, epoch 1, batch 1: the batch is Tensor (8, 5) float32
"""
    + NOT_BEGUN
)


def test_bug_in_a_step_shows_the_lines_of_the_user_and_one_for_the_rest(shown: Any) -> None:
    assert shown("shapes") == SHAPES


@pytest.mark.parametrize(("name", "text"), [("key", "KeyError: 'x'"), ("no loss", "StepError: "), ("deep", "KeyError: 'x'")])
def test_bug_in_a_step_takes_30_lines_at_most(shown: Any, name: str, text: str) -> None:
    lines = shown(name).splitlines()
    assert len(lines) <= 30 and any(line.startswith(text) for line in lines)
    assert HIDDEN.format("nbtrain and Lightning").strip() in lines


def test_many_frames_of_the_user_lose_the_middle_ones(shown: Any) -> None:
    text = shown("deep")
    assert re.search(r"\[\d+ of your frames left out\]", text)
    assert "make(Deep).run(1" in text and "in step12(batch)" in text and "in step6(batch)" not in text


NAMES = ["unknown argument", "unknown option", "option of an addon", "no addon", "wrong type", "missing argument", "wrong live edit"]


@pytest.mark.parametrize("name", NAMES)
def test_wrong_argument_shows_the_line_of_the_caller_alone(shown: Any, name: str) -> None:
    text = shown(name)
    assert text.count("Cell, line") == 1 and "hidden" not in text and "File" not in text
    assert f"----> 1 {CELLS[name]}\n" in text and len(text.splitlines()) <= 12


def test_wrong_argument_as_a_whole(shown: Any) -> None:
    assert shown("unknown option") == HEAD + (
        "OptionError                               Traceback (most recent call last)\nCell, line 1\n"
        "----> 1 Digits.add_on(EMAAddon)(Net(), ema_decy=0.9)\n\n"
        "OptionError: Digits takes no argument 'ema_decy'.\n  Did you mean 'ema_decay'?"
    )


def test_debugger_begins_in_the_frame_of_the_user(outputs: dict[str, Any]) -> None:
    assert value(outputs["frames of shapes"]) == "['run_code', '<module>', 'train_step', 'forward']"
    assert value(outputs["frames of key"]) == "['run_code', '<module>', 'train_step']"
    assert value(outputs["frames of no loss"]) == value(outputs["frames of wrong live edit"]) == "['run_code', '<module>']"


def test_traceback_prints_all_frames(printed: Any) -> None:
    text = printed("whole")
    assert text.startswith("Traceback (most recent call last):\n") and "    trainer.run(1, bad)\n" in text
    for file in ("nbtrain/run/handle.py", "lightning/pytorch/trainer/trainer.py", "torch/nn/modules/linear.py"):
        assert file in text
    assert text.endswith(f"Digits.train_step, epoch 1, batch 1: the batch is Tensor (8, 5) float32\n{NOT_BEGUN}\n")


def test_error_of_a_loaders_worker_has_its_own_message_and_frames(shown: Any, printed: Any) -> None:
    frames = 'In DataLoader worker process 0:\n  Cell, line 23, in __getitem__\n    raise FileNotFoundError("No such file: x.png")\n\n'
    head = HEAD + "FileNotFoundError                         Traceback (most recent call last)\nCell, line 1\n----> 1 "
    hidden = (
        HIDDEN.format("nbtrain, Lightning and torch") + "FileNotFoundError: No such file: x.png\nnbtrain: epoch 1, batch 1\n" + NOT_BEGUN
    )
    assert shown("worker") == head + CELLS["worker"] + "\n\n" + frames + hidden
    assert shown("worker of predict").startswith(head + CELLS["worker of predict"] + "\n\n" + frames)
    assert shown("worker of predict").endswith("\nFileNotFoundError: No such file: x.png")
    whole = printed("whole of worker")
    assert "torch/utils/data/_utils/worker.py" in whole and whole.endswith("FileNotFoundError: No such file: x.png\n")


def test_error_of_a_background_run_is_met_before_it_is_raised(shown: Any, printed: Any) -> None:
    assert "torch/nn/modules/linear.py" in printed("met")
    expected = SHAPES.replace("trainer.run(1, bad)", "handle.wait()")
    assert shown("wait") == shown("wait again") == expected


def test_cause_is_shown_where_the_users_code_is_in_it(shown: Any) -> None:
    chained, argument = shown("user's cause"), shown("cause of a wrong argument")
    assert chained.count("The above exception was the direct cause of the following exception:") == 1
    assert "KeyError: 'x'\n" in chained and "ValueError: mine\n" in chained and len(chained.splitlines()) <= 30
    assert argument.count(f"----> 1 {CELLS['cause of a wrong argument']}\n") == 2 and "<lambda>" in argument and "hidden" not in argument


def test_print_last_is_for_errors_without_a_trainer(shown: Any, printed: Any) -> None:
    assert "[N frames of nbtrain hidden · nbtrain.tracebacks.print_last() shows them]\n" in shown("without a trainer")
    assert "nbtrain/base/arguments.py" in printed("last")


def test_public_method_in_a_step_hides_its_frames_too(shown: Any) -> None:
    text = shown("in a step")
    assert text.count("Cell, line") == 2 and "in Inside.train_step(self, batch)\n" in text
    assert "ConfigError: mode must be 'train', 'test' or None, got 'tain'.\n  Did you mean 'train'?" in text


def test_error_with_slots_is_shown_as_any_other(shown: Any) -> None:
    text = shown("slots")
    assert text.count("Cell, line") == 2 and "[N frames of nbtrain and Lightning hidden" in text and "\nSlotted: no room\n" in text


def test_error_can_be_pickled_still(outputs: dict[str, Any]) -> None:
    assert value(outputs["caught"]) == "'mat1 and mat2 shapes cannot be multiplied (8x5 and 4x1)'"


def test_error_of_a_rank_shows_the_frames_of_its_process(shown: Any, printed: Any) -> None:
    text = shown("ranks")
    assert "----> 5 ranks.run(1, DataLoader(torch.randn(32, 4), 8))\n\nIn rank 0:\n" in re.sub("rank 1", "rank 0", text)
    assert "  Cell, line 3, in train_step\n    raise LookupError('no such row')\n" in text and len(text.splitlines()) <= 30
    assert "\nLookupError: no such row\n" in text and "In rank" in text and "[N frames of nbtrain" in text
    whole = printed("whole of ranks")
    assert "nbtrain/distributed/worker.py" in whole and "nbtrain/distributed/worker_pool.py" in whole


def test_mode_of_the_shell_is_kept(shown: Any) -> None:
    text = shown("plain")
    assert text.startswith("Traceback (most recent call last):\n") and "linear.py" not in text and "[N frames of nbtrain" in text
