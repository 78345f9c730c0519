"""Worker processes: what they tell, which faults are named and how, and that nothing of them is left."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from samples import Regress, make_loader, make_trainer

from nbtrain import MultiGPUAddon, WorkerError
from nbtrain.distributed.worker import Agreement, LateReduce, Rank
from nbtrain.distributed.worker_pool import Launch, Pool, pack
from nbtrain.distributed.world import StopTogether


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def launch(pool: Pool, payload: Any, n: int = 2) -> list[Any]:
    with Launch(payload, n, pool=pool) as running:
        return running.wait()


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pids: list[int], timeout_s: float) -> None:
    """Wait until these processes, which are no children, have ended."""
    until = time.monotonic() + timeout_s
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([descriptor], [], [], max(0, until - time.monotonic()))
        os.close(descriptor)


def add_up(rank: Rank) -> int:
    number = torch.tensor(rank.number + 1)
    dist.all_reduce(number)
    rank.channel.emit(os.getpid())
    print("printed by rank", rank.number)
    return int(number)


def test_ranks_meet_and_tell(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    told: dict[int, int] = {}
    with Launch(add_up, 2, pool=pool) as running:
        assert running.wait(lambda rank, message: told.update({rank: message})) == [3, 3]
    assert sorted(told) == [0, 1] and capfd.readouterr().out == "printed by rank 0\n"
    assert all(map(is_alive, told.values()))


def listening(_: object = None) -> list[str]:
    """The addresses at which this process listens, as the kernel writes them: 0100007F is 127.0.0.1, in bytes of this machine's order."""
    sockets = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listen_in_a_new_group(rank: Rank) -> list[str]:
    dist.new_group(backend="gloo")
    dist.barrier()
    rank.channel.emit(None)
    found = [*listening(), *(["elsewhere"] if not os.environ["GLOO_SOCKET_IFNAME"].startswith("lo") else [])]
    dist.barrier()
    return found


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's tables of sockets")
@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost"])
def test_processes_of_one_machine_listen_on_loopback_alone(pool: Pool, host: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # as a cluster sets it
    before, ours = sorted(listening()), []
    address = None if host is None else (host, 0)
    with Launch(listen_in_a_new_group, 2, pool=pool, address=address) as running:
        theirs = running.wait(lambda rank, message: ours.append(sorted(listening())))
    assert {address for found in theirs for address in found} <= LOOPBACK
    opened = [address for address in ours[0] if address not in before or ours[0].count(address) > before.count(address)]
    assert set(opened) <= LOOPBACK if host else ours[0] == before


@pytest.mark.long
def test_meeting_file_is_private_and_goes_with_the_launch(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Launch(add_up, 2, pool=pool) as running:
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        running.wait()
    assert list(tmp_path.iterdir()) == []


def test_second_launch_is_warm(pool: Pool) -> None:
    pids: list[list[int]] = [[], []]
    for found in pids:
        with Launch(add_up, 2, pool=pool) as running:
            running.wait(lambda rank, pid, found=found: found.append(pid))
    assert len(set(pids[0])) == 2 and set(pids[0]) == set(pids[1])  # the processes that have imported everything


def obey(rank: Rank) -> list[tuple[int, str]]:
    """Goes through batches until it is told to stop; the ranks hear of it at different moments."""
    agreement, found = Agreement(rank.channel), []
    for batch in range(100_000):
        dist.all_reduce(torch.ones(1))
        found += [(batch, command) for command in agreement.due()]
        if batch == 3:
            rank.channel.emit("on the way")
        if any(command == "stop" for _, command in found):
            return found
    return found


def test_commands_are_due_at_the_same_batch_on_every_rank(pool: Pool) -> None:
    with Launch(obey, 2, pool=pool) as running:

        def command(rank: int, message: str) -> None:
            running.send(f"save {rank}")
            if rank == 1:
                running.send("stop")

        first, second = running.wait(command)
    assert first == second and {"save 1", "stop"} <= {command for _, command in first}


def count_reductions(rank: Rank) -> list[int]:
    """How often the ranks reduce in 320 calls at 1 ms, in 5 at 1 s that were announced, and in 64 at 1 s that were not."""
    now_s = float(rank.number)
    n_reductions, counts = 0, []

    class Counted(LateReduce):
        def _start(self, number: int) -> None:
            nonlocal n_reductions
            n_reductions += 1
            super()._start(number)

    reduce = Counted(dist.ReduceOp.MAX, lambda: now_s)
    for n, call_s, is_announced in ((320, 1e-3, False), (5, 1.0, True), (320, 1e-3, False), (64, 1.0, False)):
        n_reductions = 0
        if is_announced:
            reduce.soon()
        for _ in range(n):
            now_s += call_s
            reduce(0)
        counts.append(n_reductions)
    reduce.forget()
    return counts


def test_ranks_reduce_less_often_where_calls_come_fast(pool: Pool) -> None:
    first, second = launch(pool, count_reductions)
    fast, announced, _, slow = first
    assert first == second
    assert 10 <= fast <= 15 and announced == 5 and slow >= 64 - 32


def request_late(rank: Rank) -> list[int | None]:
    """Rank 1 receives a signal after the last batch; the next run has ten batches."""
    stop, found = StopTogether(), list[int | None]()
    for _ in range(100):
        stop.due(found.append)
    if rank.number == 1:
        stop.request(signal.SIGTERM)
    stop.settle(found.append)
    for _ in range(10):
        stop.due(found.append)
    stop.settle(found.append)
    return found


def test_a_signal_at_the_end_of_a_run_is_heard_by_all_in_this_run(pool: Pool) -> None:
    assert launch(pool, request_late) == [[signal.SIGTERM], [signal.SIGTERM]]


def test_interrupt_ends_the_waiting_and_not_the_work(pool: Pool) -> None:
    with Launch(obey, 2, pool=pool) as running:
        with pytest.raises(KeyboardInterrupt):
            running.wait(lambda rank, message: os.kill(os.getpid(), signal.SIGINT))
        running.send("stop")
        assert len(running.wait()) == 2


class Odd(Exception):
    """Comes out of a pickle as nothing: its constructor takes more than its text."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)


def fail(kind: str, rank: Rank) -> None:
    if rank.number == 1:
        if kind == "raise":
            raise LookupError("nothing there")
        if kind == "odd":
            raise Odd("it is", 3)
        if kind == "exit":
            os._exit(3)
        print("the last words")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


class Failing:
    """A payload that fails in rank 1 while rank 0 waits for it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, rank: Rank) -> None:
        fail(self.kind, rank)


def test_error_of_a_rank_is_raised_here_with_its_frames(pool: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(LookupError, match="nothing there") as raised:
        launch(pool, Failing("raise"))
    told = str(raised.value.__cause__)
    assert told.startswith("Rank 1 raised LookupError: nothing there\n") and told.endswith('raise LookupError("nothing there")')
    assert "worker.py" not in told and time.monotonic() - began < 200


@pytest.mark.long
def test_error_that_no_pickle_holds_keeps_its_class_and_text(pool: Pool) -> None:
    with pytest.raises(Odd, match="^it is\nnbtrain: raised in rank 1$") as raised:
        launch(pool, Failing("odd"))
    assert str(raised.value) == "it is" and str(raised.value.__cause__).startswith("Rank 1 raised Odd: it is\n")


KILLED = "Rank 1 was killed by SIGKILL (out of memory?).\n  the last words\n"


@pytest.mark.parametrize(
    ("kind", "text"), [("kill", KILLED), pytest.param("exit", "Rank 1 ended with exit code 3.", marks=pytest.mark.long)]
)
def test_dead_rank_is_named_and_not_who_waited_for_it(pool: Pool, kind: str, text: str) -> None:
    with pytest.raises(WorkerError) as raised:
        launch(pool, Failing(kind))
    assert str(raised.value).startswith(text)


LOCK = {"guards": [Lock()]}


def test_what_can_not_travel_is_named() -> None:
    def locked(rank: Rank) -> None:
        with LOCK["guards"][0]:
            pass

    with pytest.raises(WorkerError) as raised:
        pack(locked)
    assert "LOCK['guards'][0] (lock) can't be sent to the worker processes: cannot pickle '_thread.lock' object." in str(raised.value)


class Keeps:
    """Keeps what it is given."""

    def __init__(self, value: Any) -> None:
        self.kept = value


def unsendable(name: str, trainer: Any, dataset: Any) -> None:
    """Puts a lock where `name` says."""
    if name == "trainer.my_lock":
        trainer.my_lock = Lock()
    elif name == "trainer.options['guards'][1]":
        trainer.options = {"guards": [1, Lock()]}
    elif name == "trainer.made.kept":
        trainer.made = type("Local", (Keeps,), {})(Lock())
    elif name == "trainer.model.guard":
        trainer.model.guard = Lock()
    elif name == "trainer.lightning['callbacks'][0].kept":
        trainer.lightning["callbacks"] = [type("Local", (L.Callback,), {"kept": None})()]
        trainer.lightning["callbacks"][0].kept = Lock()
    else:
        dataset.guard = Lock()


@pytest.mark.parametrize(
    "name",
    ["trainer.my_lock", "trainer.options['guards'][1]", "trainer.made.kept", "trainer.model.guard", "loader.dataset.guard"]
    + ["trainer.lightning['callbacks'][0].kept"],
)
def test_what_can_not_travel_has_the_name_that_the_user_knows(name: str) -> None:
    trainer, loader = make_trainer(Regress.add_on(MultiGPUAddon), device=["cpu", "cpu"]), make_loader()
    unsendable(name, trainer, loader.dataset)
    with pytest.raises(WorkerError) as raised:
        trainer.run(1, loader)
    told = f"{name} (lock) can't be sent to the worker processes: cannot pickle '_thread.lock' object."
    assert str(raised.value).splitlines()[0] == told


def test_much_data_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="114 MB of model and data are sent to the worker processes. Let the dataset open"):
        pack(torch.zeros(30_000_000))


@pytest.mark.long
def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    environment, pids = dict(os.environ), {}
    pool = Pool()
    with Launch(add_up, 2, pool=pool, address=("127.0.0.1", 0)) as running:
        port = int(running._meeting.place[1])
        running.wait(lambda rank, message: pids.update({message: rank}))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    pool.close()
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)  # a zombie would be there
    assert dict(os.environ) == environment and list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_threads_of_a_task_such_as_a_late_loggers_are_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(rank: Rank) -> None:
        def write() -> None:
            threading.main_thread().join()  # a guard of a logger waits so
            print("waiting")
            (tmp_path / f"{rank.number}").write_text("late")

        threading.Thread(target=write).start()
        dist.barrier()

    pool = Pool()
    with Launch(work, 2, pool=pool) as running:
        running.wait()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # needs other workers
    with Launch(add_up, 1, pool=pool) as running:
        running.wait()
    assert list(tmp_path.iterdir()) == []
    pool.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert capsys.readouterr().err == "waiting\nwaiting\n"


PARENT = """
import sys, time
from nbtrain.distributed.worker_pool import Launch, Pool

def work(rank):
    import os, subprocess, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    rank.channel.emit([os.getpid(), child.pid])
    time.sleep(60)

with Launch(work, 2, pool=Pool()) as running:
    running.wait(lambda rank, pids: print(*pids, flush=True))
"""


def test_workers_and_their_children_do_not_outlive_their_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in parent.stdout.readline().split()]
    assert len(pids) == 4 and all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for_end(pids, 5)
    assert not any(map(is_alive, pids))
