"""Whatever one rank alone requests or raises, at any moment of a run: all ranks end at the same batch, or with the error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hung_rank import run as run_hung
from moment_rank import run
from test_worlds import WAIT_S, ended, free_port, start

from nbtrain import ConfigError, WorkerError
from nbtrain.distributed.worker import MOMENTS
from nbtrain.history.run_folder import read_events

PROGRAM = Path(__file__).with_name("moment_rank.py")
# After which update the run ends: requests between two epochs are settled before the next one, and those of a batch after it
STEPS = dict.fromkeys(MOMENTS, 8) | {"on_fit_start": 0, "on_train_start": 0, "on_train_epoch_start": 0, "on_train_end": 24}
WITHIN = ("train_step", "on_train_batch_end")  # where short batches exchange every 50 ms


def under_torchrun(*arguments: Any, program: Path = PROGRAM) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    process = start([*torchrun, program, *arguments])
    with ended(process):
        return process.communicate(timeout=WAIT_S)[0]


def check(moment: str, status: str, step: int) -> None:
    assert status == ("completed" if moment == "on_train_end" else "stopped"), moment
    assert 1 <= step <= 8 if moment in WITHIN else step == STEPS[moment], (moment, step)


def test_a_stop_of_one_rank_stops_all_in_a_cell() -> None:
    for moment in MOMENTS:
        check(moment, *run(moment, "stop", ["cpu", "cpu"]))


def test_a_stop_of_one_rank_stops_all_under_torchrun() -> None:
    lines = [line.split() for line in under_torchrun("stop", *MOMENTS).splitlines() if line.startswith(MOMENTS)]
    assert len(lines) == 2 * len(MOMENTS) and lines[::2] == lines[1::2]
    for moment, status, step in lines[::2]:
        check(moment, status, int(step))


SOME = ("on_validation_epoch_end",)
MOST = [moment if moment in SOME else pytest.param(moment, marks=pytest.mark.long) for moment in MOMENTS]


@pytest.mark.parametrize("moment", MOST)
def test_an_error_of_one_rank_ends_the_run_in_a_cell(moment: str) -> None:
    with pytest.raises(ValueError, match=f"boom in {moment}"):
        run(moment, "raise", ["cpu", "cpu"])


@pytest.mark.parametrize("moment", MOST)
def test_an_error_of_one_rank_ends_the_run_under_torchrun(moment: str) -> None:
    output = under_torchrun("raise", moment)
    assert f"[rank1]: ValueError: boom in {moment}" in output and "rank      : 1" in output


def test_a_pause_that_one_rank_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"in all of them; run\(.*pause\(\) in a cell pauses all of them\.(?s:.*)raised in rank 1"):
        run("on_train_epoch_end", "pause", ["cpu", "cpu"])
    output = under_torchrun("pause", "on_train_epoch_end")
    assert 'stop() ends it in all of them; run(..., resume="auto") continues it. pause() in a cell' in output


SLOW = "Process 1 is slow: the others have waited for it for 4 s, at epoch 1, batch 4."
HUNG = "WorkerError: Process 1 has not answered for 8 s."


def notes_in(folder: Path) -> list[str]:
    return [event.data["text"] for event in read_events(folder / "run-001") if event.kind == "note"]


@pytest.mark.long
def test_a_rank_that_hangs_is_named_slow_and_after_the_timeout_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=rf"{HUNG[13:]}\n  epoch 1, batch 4\n  Look there for what it waits for"):
        run_hung(tmp_path, ["cpu", "cpu"])
    assert notes_in(tmp_path).count(SLOW) == 1


@pytest.mark.long
def test_a_rank_that_hangs_is_named_under_torchrun(tmp_path: Path) -> None:
    output = under_torchrun(tmp_path, program=Path(run_hung.__code__.co_filename))
    assert HUNG in output and "exitcode  : 1" in output
    assert notes_in(tmp_path).count(SLOW) == 1
