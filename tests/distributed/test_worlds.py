"""One script under torchrun on two "machines", and under SLURM's variables: it ends as one process does, disturbed or not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank import train
from samples import without_times
from torch.distributed import TCPStore

from nbtrain import load_run
from nbtrain.base.launcher import World
from nbtrain.checkpoint.files import newest_valid, read_counts

TESTS = Path(__file__).parent.parent
RANK = Path(__file__).with_name("rank.py")
WAIT_S = 120


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def start(command: list[Any], **variables: str) -> subprocess.Popen[str]:
    """A process in a session of its own, so that all it starts can be ended."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS))), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=WAIT_S)


def node(port: int, folder: Path, *arguments: Any, host: bool) -> subprocess.Popen[str]:
    """One of two machines. The first one, where they meet, is not the one that is killed."""
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # pytorch#135712: a machine that comes back does not find the shared one
    meeting = f"is_host={int(host)},keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=1,join_timeout={WAIT_S}"
    return start(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 2,
         "--monitor-interval", 0.1, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
         "--rdzv-conf", meeting, RANK, folder, *arguments],
        **own_store,
    )  # fmt: skip


def torchrun(folder: Path, *arguments: Any, restarts: int = 0) -> subprocess.Popen[str]:
    """A job of two ranks on one machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", restarts]
    return start([*command, RANK, folder, *arguments])


def task(number: int, port: int, folder: Path, *arguments: Any) -> subprocess.Popen[str]:
    """One of two tasks as srun starts them."""
    variables = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": str(number), "LOCALID": str(number), "NODEID": "0", "JOB_ID": "7"}
    slurm = {f"SLURM_{name}": value for name, value in variables.items()} | {"SLURM_JOB_NAME": "train"}
    return start([sys.executable, RANK, folder, *arguments], MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **slurm)


def finish(*processes: subprocess.Popen[str]) -> list[int]:
    with ended(*processes):
        outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert set(codes) <= {0, 128 + signal.SIGTERM, 128 + signal.SIGINT}, "\n".join(outputs)
    return codes


def end_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "end.pt")


def same_end(a: Path, b: Path) -> bool:
    """Weights bit for bit, and all that was measured."""
    left, right = end_of(a), end_of(b)
    assert without_times(left["rows"]) == without_times(right["rows"]) and left["evaluated"] == right["evaluated"]
    return all(torch.equal(left["weights"][name], right["weights"][name]) for name in left["weights"])


def two(folder: Path, *arguments: Any) -> list[int]:
    """The exit codes of two tasks."""
    port = free_port()
    return finish(*(task(number, port, folder, *arguments) for number in range(2)))


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run with dropout that nothing has disturbed, and the arguments that it had."""
    folder, options = tmp_path_factory.mktemp("undisturbed"), ["--dropout", 0.3, "--strategy", request.param]
    assert two(folder, *options) == [0, 0]
    return folder, options


def assert_near(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert max(float((a["weights"][name] - b["weights"][name]).abs().max()) for name in a["weights"]) < 1e-5
    assert a["evaluated"] == pytest.approx(b["evaluated"], rel=1e-5)
    assert [row["val_loss"] for row in a["rows"]] == pytest.approx([row["val_loss"] for row in b["rows"]], rel=1e-5)


@pytest.mark.long
def test_two_machines_do_what_one_process_does_with_twice_the_batch(tmp_path: Path) -> None:
    (one := tmp_path / "one").mkdir()
    (both := tmp_path / "both").mkdir()
    port = free_port()
    assert finish(*(node(port, both, host=host) for host in (True, False))) == [0, 0]
    train(one, batch_size=16)
    assert_near(end_of(one), end_of(both))
    assert len(list((both / "runs").iterdir())) == 1  # one run folder, of both


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["auto", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp2", "fsdp2 in parts", "tp"))])
def test_split_model_of_two_tasks_is_whole_in_each_and_does_what_one_process_does(strategy: str, tmp_path: Path) -> None:
    (one := tmp_path / "one").mkdir()
    (both := tmp_path / "both").mkdir()
    assert two(both, "--strategy", strategy, *(["--batch_size", 16] if strategy == "tp" else [])) == [0, 0]
    train(one, batch_size=16)
    assert_near(end_of(one), end_of(both))
    assert end_of(both)["n_updates"] == 12 and len(end_of(both)["rows"]) == 3
    assert len(list((both / "runs").iterdir())) == 1


@pytest.mark.long
def test_step_of_a_split_model_that_fails_in_all_tasks_leaves_what_was_reached(tmp_path: Path) -> None:
    (one := tmp_path / "one").mkdir()
    (both := tmp_path / "both").mkdir()
    options: dict[str, Any] = {"fault": "error", "at": 6}
    assert two(both, "--strategy", "fsdp2", "--fault", "error", "--at", 6) == [0, 0]
    train(one, batch_size=16, **options)
    assert_near(end_of(one), end_of(both))
    assert end_of(one)["n_updates"] == end_of(both)["n_updates"] == 6


@pytest.mark.long
def test_machine_that_was_killed_and_started_again_ends_as_if_nothing_had_happened(
    undisturbed: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """In the middle of an epoch, with dropout: the random numbers of both ranks go on."""
    expected, options = undisturbed
    port = free_port()
    first = node(port, tmp_path, *options, host=True)
    killed = node(port, tmp_path, *options, "--fault", "SIGKILL", "--at", 7, host=False)
    with ended(first, killed):
        assert killed.wait(WAIT_S) == -signal.SIGKILL
        again = node(port, tmp_path, *options, host=False)
        assert finish(first, again) == [0, 0]
    assert same_end(expected, tmp_path)
    names = {path.name for path in tmp_path.glob("runs/run-001/checkpoints/*")}
    assert "epoch=1-step=6.ckpt" in names and len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_ends_all_after_the_same_batch_and_the_next_start_goes_on(
    undisturbed: tuple[Path, list[Any]], tmp_path: Path, signum: signal.Signals
) -> None:
    expected, options = undisturbed
    port = free_port()
    codes = finish(task(0, port, tmp_path, *options), task(1, port, tmp_path, *options, "--fault", signum.name, "--at", 5))
    assert codes == [128 + signum] * 2 and not (tmp_path / "end.pt").exists()
    assert two(tmp_path, *options) == [0, 0]
    assert same_end(expected, tmp_path)


def test_each_start_by_torchrun_has_its_own_names_in_the_store_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    world = World(number=0, size=2, local=0, n_local=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    world._store().set("address of rank 1", "gone")
    assert world._store().check(["address of rank 1"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not world._store().check(["address of rank 1"])


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_torchrun_starts_a_killed_rank_again_and_the_run_ends_as_if_nothing_had_happened(
    killed: int, tmp_path: Path, undisturbed: tuple[Path, list[Any]]
) -> None:
    whole, options = undisturbed
    assert finish(torchrun(tmp_path, *options, "--fault", f"rank {killed}", "--at", 7, restarts=3)) == [0]
    assert (tmp_path / "faulted").exists() and same_end(whole, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("to", ["torchrun", "all"])
def test_a_job_that_is_to_end_saves_and_its_next_start_ends_as_if_nothing_had_happened(
    to: str, undisturbed: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Kubernetes sends SIGTERM to torchrun, which passes it on to the ranks and the workers of their loaders; SLURM sends it to all."""
    whole, options = undisturbed
    options = [*options, "--n_workers", 1]
    ended_job = torchrun(tmp_path, *options, "--fault", f"SIGTERM to {to}", "--at", 5)
    with ended(ended_job):
        output, _ = ended_job.communicate(timeout=WAIT_S)
    assert ended_job.returncode == 1 and "got signal: 15" in output  # torchrun itself; its ranks have ended with 143
    end = json.loads((tmp_path / "runs" / "run-001" / "events.jsonl").read_text().splitlines()[-1])
    assert end["kind"] == "end" and end["data"]["reason"].startswith("SIGTERM at epoch "), end
    counts = read_counts(newest_valid(tmp_path / "runs" / "run-001" / "checkpoints").path)
    assert counts is not None and 5 < counts["step"] == end["progress"]["step"] < 12
    assert finish(torchrun(tmp_path, *options)) == [0]
    assert same_end(whole, tmp_path) and len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.long
def test_two_agents_start_their_ranks_again_after_one_was_killed_and_the_run_ends_as_if_nothing_had_happened(
    undisturbed: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    whole, options = undisturbed
    port = free_port()
    agents = [node(port, tmp_path, *options, "--fault", "rank 1", "--at", 7, host=host) for host in (True, False)]
    assert finish(*agents) == [0, 0]
    assert (tmp_path / "faulted").exists() and same_end(whole, tmp_path)


@contextlib.contextmanager
def held(folder: Path, *arguments: Any, at: int) -> Iterator[subprocess.Popen[str]]:
    """A job that waits before the update `at`. It goes on at the end of the context, and ends well."""
    os.mkfifo(folder / "hold")
    job = torchrun(folder, *arguments, "--fault", "hold", "--at", at)
    with ended(job):
        assert job.stdout is not None and any("held" in line for line in job.stdout)
        with open(folder / "hold", "w"):
            yield job
        assert finish(job) == [0]


@pytest.mark.long
def test_a_second_job_or_process_on_a_run_folder_is_refused_on_all_its_ranks_and_the_first_is_not_disturbed(
    undisturbed: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    whole, options = undisturbed
    with held(tmp_path, *options, at=7):
        for n_ranks, second in ((2, torchrun(tmp_path, *options)), (1, start([sys.executable, RANK, tmp_path, *options]))):
            with ended(second):
                output, _ = second.communicate(timeout=WAIT_S)
            assert second.returncode == 1
            assert output.count("ConfigError: run-001 is being written to by another run: of process ") == n_ranks, output
    assert same_end(whole, tmp_path) and len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.long
def test_a_second_job_that_starts_before_the_first_has_saved_has_its_own_run_folder(
    undisturbed: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    whole, options = undisturbed
    with held(tmp_path, *options, at=1):
        assert finish(torchrun(tmp_path, *options)) == [0] and same_end(whole, tmp_path)
    assert same_end(whole, tmp_path)
    assert [load_run(tmp_path / "runs" / name).last["epoch"] for name in ("run-001", "run-002")] == [3, 3]
