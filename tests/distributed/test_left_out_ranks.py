"""Two processes leave batches out, one of them or both: they agree on it, and none waits for the other."""

from __future__ import annotations

import sys
from pathlib import Path

from test_worlds import WAIT_S, ended, free_port, start


def test_ranks_agree_on_a_batch_that_is_left_out() -> None:
    program = Path(__file__).with_name("left_out_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port(), program]
    process = start(command)
    with ended(process):
        output, _ = process.communicate(timeout=WAIT_S)
    assert output.count("done") == 2, output
