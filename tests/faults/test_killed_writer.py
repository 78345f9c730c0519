"""The lock of a run folder ends with the process that has it, however it ends."""

from __future__ import annotations

import os
import signal
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from children import CONTEXT
from samples import Regress, make_loader, make_trainer

from nbtrain import ConfigError, StateManagerAddon

Saving = Regress.add_on(StateManagerAddon)


class Waits(L.Callback):
    """Says that the second epoch is on, and waits in it for ever."""

    def __init__(self, answers: Connection) -> None:
        self.answers = answers

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 1:
            self.answers.send("on")
            signal.pause()


def run_for_ever(answers: Connection, folder: Path) -> None:
    warnings.simplefilter("ignore")
    loader = make_loader(num_workers=1)  # a worker has a copy of all that is open
    make_trainer(Saving, save_path=folder, lightning={"callbacks": [Waits(answers)]}).run(2, loader, resume="auto")


@pytest.mark.long
def test_a_run_of_another_process_keeps_its_folder_until_it_is_killed(tmp_path: Path) -> None:
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=run_for_ever, args=(theirs, tmp_path))
    process.start()
    theirs.close()
    assert ours.recv() == "on" and process.pid is not None
    with pytest.raises(ConfigError, match=rf"^run-001 is being written to by another run: of process {process.pid} on .*, since 20"):
        make_trainer(Saving, save_path=tmp_path).run(2, make_loader(), resume="auto")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    result = make_trainer(Saving, save_path=tmp_path).run(2, make_loader(), resume="auto")
    assert result.status == "completed" and result.run_dir == tmp_path / "run-001" and len(result.history.epochs) == 2
