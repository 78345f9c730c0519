"""Memory and cores are those that a container and `ulimit` leave, in files of both versions of control groups and under a real limit.

In a real control group of 1.5 GB, where too much ends in a kill, and under a real `ulimit -v`, a run with states in memory ends as usual.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain.resources import free_memory, n_cores

GB = 10**9


def system(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
        "proc/meminfo": "MemAvailable: 60000000 kB",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


NEW = "30 25 0:26 / /cg rw - cgroup2 cgroup2 rw"
OLD = "30 25 0:26 {} /cg/memory rw - cgroup cgroup rw,memory\n31 25 0:27 {} /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct"


def test_a_group_of_version_2_and_those_around_it(tmp_path: Path) -> None:
    files = {"cg/a/memory.max": f"{3 * GB}", "cg/a/memory.current": f"{GB}", "cg/a/memory.stat": f"anon 1\ninactive_file {GB // 2}"}
    files |= {"cg/a/b/memory.max": "max", "cg/a/b/memory.current": f"{GB}", "cg/a/b/cpu.max": "50000 100000", "cg/a/cpu.max": "max 100000"}
    root = system(tmp_path, "0::/a/b", NEW, files)
    assert free_memory(root) == 3 * GB - GB + GB // 2
    assert n_cores(root) == 1


@pytest.mark.parametrize("inside", ["/", "/docker/1"])
def test_a_group_of_version_1_whose_folder_is_that_of_the_container_or_not(tmp_path: Path, inside: str) -> None:
    below = "" if inside != "/" else "docker/1/"
    files = {f"cg/memory/{below}memory.limit_in_bytes": f"{2 * GB}", f"cg/memory/{below}memory.usage_in_bytes": f"{GB}"}
    files |= {f"cg/cpu/{below}cpu.cfs_quota_us": "100000", f"cg/cpu/{below}cpu.cfs_period_us": "100000"}
    root = system(tmp_path, "4:memory:/docker/1\n1:cpu,cpuacct:/docker/1", OLD.format(inside, inside), files)
    assert free_memory(root) == GB and n_cores(root) == 1


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    files = {
        "cg/memory/memory.limit_in_bytes": "9223372036854771712",
        "cg/memory/memory.usage_in_bytes": "1",
        "cg/cpu/cpu.cfs_quota_us": "-1",
    }
    root = system(tmp_path, "4:memory:/\n1:cpu:/", OLD.format("/", "/"), files)
    assert free_memory(root) == 60_000_000 * 1024
    assert n_cores(root) == len(os.sched_getaffinity(0))
    assert free_memory(tmp_path / "nowhere") > 0 and n_cores(tmp_path / "nowhere") == len(os.sched_getaffinity(0))


TRAINS = """
import resource, sys
import torch
from torch import nn
from torch.nn.functional import mse_loss
from nbtrain import Trainer

class Wide(Trainer):
    def train_step(self, batch):
        return {"loss": mse_loss(self.model(batch[0]), batch[1])}

    def test_step(self, batch):
        return self.train_step(batch)

model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1))  # 17 M parameters
trainer = Wide(model=model, device="cpu", optimizer=torch.optim.Adam(model.parameters()), keep_states=True, log_bar=False)
loader = [(torch.randn(4, 64), torch.randn(4, 1)) for _ in range(2)]
if len(sys.argv) > 1:
    used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
print(trainer.run(8, loader, loader).status, trainer.states.memory)
"""


def run_limited(*arguments: object, group: Path | None = None) -> str:
    join = None if group is None else lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    command = [sys.executable, "-c", TRAINS, *map(str, arguments)]
    process = subprocess.run(command, preexec_fn=join, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, (process.returncode, process.stdout, process.stderr)
    return process.stdout


def test_a_run_with_states_in_memory_ends_under_a_real_limit_of_addresses() -> None:
    output = run_limited(10**9)  # model, gradients and optimizer take 270 MB, and best weights 68
    assert output.startswith("completed KeptStates(") and "at the steps" in output


def test_a_run_with_states_in_memory_ends_in_a_real_control_group() -> None:
    new, old = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    root = old if old.is_dir() else new
    group, name = root / f"nbtrain-{os.getpid()}", "memory.limit_in_bytes" if root == old else "memory.max"
    try:
        group.mkdir()
        (group / name).write_text(f"{1_500_000_000}")
    except OSError as error:
        pytest.skip(f"no control group can be made here ({error}): the files of one and `ulimit -v` stand for it above")
    try:
        output = run_limited(group=group)
    finally:
        group.rmdir()
    assert output.startswith("completed KeptStates(") and "at the steps" in output
