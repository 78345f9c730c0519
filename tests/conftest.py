"""One thread for each process: two test workers, kernels and commands share the cores, and OpenMP's waiting threads would starve them.

And a headless Chromium, for the tests that look at what people see, and kernels that start at once, for those that care for other things.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import simulated_gpu
from chromium import CHROMIUM, chromium
from programs import by_commit, script

LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")  # how processes find each other

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell lets its background jobs ignore Ctrl-C, and what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.get("NBTRAIN_TEST_DEVICE", "").startswith("simulated"):
    simulated_gpu.load()  # before anything imports torch
sys.path.append(str(Path(sys.prefix) / "transformers"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""


class _Groups:
    """The threads of process groups, and for how many tests they were tried to be freed."""

    tried: ClassVar[dict[str, int]] = {}

    @classmethod
    def free(cls) -> None:
        found = [thread.parent.name for thread in Path("/proc/self/task").glob("*/comm") if _read(thread).startswith("pt_gloo")]
        cls.tried = {name: cls.tried.get(name, 0) + 1 for name in found}
        if any(n <= 3 for n in cls.tried.values()):  # the test itself holds one a little longer, and some are held for good
            gc.collect()


# -- of many cases `make test` takes some
EVERY, MANY = 5, 5
DRAWN = (
    "test_random_jobs",
    "test_random_configurations",
    "test_resume_across",
    "test_time_travel_draws",
    "test_drawn_logs",
)  # as many as they name
WHOLE = "NBTRAIN_WHOLE_SUITE"  # set where no path is given; the workers read it


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[WHOLE] = str(int(config.args_source is not pytest.Config.ArgsSource.ARGS))
    if os.environ.get("NBTRAIN_TEST_DEVICE"):
        config.addinivalue_line("filterwarnings", "ignore:GPU available but not used")  # of Lightning, where a test uses it on the CPU


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a unit test with five cases or more, `make test` runs each fifth one, `make faults` the others; all where its path is given."""
    if os.environ[WHOLE] == "0":
        return
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "unit" in item.path.parts and item.path.stem not in DRAWN and item.get_closest_marker("long") is None:
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    first = by_commit(EVERY)
    for cases in families.values():
        for i, item in enumerate(cases if len(cases) >= MANY else ()):
            if i % EVERY != first:
                item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """What is imported by now stays: a garbage collection, of which Lightning's callbacks make many, need not look at it again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Free the process groups that a test has destroyed: a forked worker that frees one waits for its threads, has none, and crashes."""
    result = yield
    _Groups.free()
    return result


# -- what tests write is in temporary folders
ROOT = Path(__file__).parent.parent


def _untracked() -> set[str]:
    """The files below the root that git neither has nor ignores; none where this is no repository."""
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines())


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEFORE] = _untracked()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a test has left a file in the repository, which could be committed by mistake."""
    left = sorted(_untracked() - session.config.stash[BEFORE])
    if left and not hasattr(session.config, "workerinput"):  # a worker ends before the others do
        session.config.stash[LEFT] = left
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, []):
        terminalreporter.section("files that tests have left in the repository")
        terminalreporter.line(f"{', '.join(left)}\nA test writes to `tmp_path`: monkeypatch.chdir(tmp_path).")


BEFORE, LEFT = pytest.StashKey[set[str]](), pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def no_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test finds the modules that another one has written and imported, nor the deterministic algorithms that Lightning leaves on.

    Variables of a launcher must not be left: the next test that starts ranks would meet at an address that it has not chosen.
    """
    written = str(tmp_path_factory.getbasetemp())
    before, known = {name: os.environ.get(name) for name in LAUNCHED}, set(sys.modules)
    yield
    after = {name: os.environ.get(name) for name in LAUNCHED}
    for name in sys.modules.keys() - known:  # to ask each of thousands would take a sixth of the time of all tests
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]
    if (torch := sys.modules.get("torch")) is not None:
        torch.use_deterministic_algorithms(False)
    assert after == before


@pytest.fixture
def ranked_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The locks that nbtrain makes in this test are taken in one order by all threads."""
    from importlib import import_module

    import ranked_locks

    for rank, name in enumerate(ranked_locks.ORDER):
        ranked_locks.rank_locks(import_module(f"nbtrain.{name}"), rank, monkeypatch.setattr)
    yield
    found, ranked_locks.wrong = ranked_locks.wrong, []
    assert not found, found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("CI must have chromium: .ci/run installs it")
        pytest.skip("no chromium here: apt-get install chromium")
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="session")
def warm_kernel() -> Iterator[Any]:
    """Makes managers whose kernels start in a tenth of a second."""
    with script("execute").warm_kernels() as make_manager:
        yield make_manager
