"""On a login node of SLURM, `srun` is there and the notebook's process is not a task."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import make_loader, make_trainer

from nbtrain.distributed.world import find_world


@pytest.mark.parametrize("variables", [{}, {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "interactive"}], ids=["login node", "interactive job"])
def test_a_run_is_alone_where_srun_is_there_and_warns_of_nothing(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_world().size == 1
    assert make_trainer().run(1, make_loader()).status == "completed"
