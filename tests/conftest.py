"""The tier of a test is the directory it is in: tests/unit, tests/store, ...

After every test of any tier, none of its resources may remain: no thread, no file descriptor, no
process, no shared memory.

`make test` distributes the files of tests over workers (pytest-xdist), a file to a worker, in the
order of the tiers. Each worker has its own ranks, agents, folders and shared memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.forgotten_ends import Forgotten
from tests.support.warm_python import servers
from tierckpt.storage import mount_of

# Cheapest first: findings of unit tests come early.
TIERS = ("unit", "store", "dist", "crash", "gpu")

ROOT = Path(__file__).resolve().parents[1]
# Processes that tests start find the packages from any folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "common"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# A run starts hundreds of processes: they share compiled bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A test that kills a trainer does not wait for an agent that waits for the successor.
os.environ["TIERCKPT_AGENT_LINGER_SECONDS"] = "0"

# Tests wait for agents: at a lower priority these get hardly any time beside other tests.
os.environ["TIERCKPT_TEST_NICE"] = "0"

# One thread of torch in each of several processes that share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Milliseconds between two rounds of messages of Horovod's ranks, which they also send when there is
# nothing to say: with its default, 1, three of them keep a core busy.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "10")

# Folders of tests are on a disk: in memory, a level's files would be the slots'.
if mount_of(Path(tempfile.gettempdir())).kind == "tmpfs":
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/var/tmp")

pytest.register_assert_rewrite("tierckpt.testing", "tests.support.frameworks.killed_job")

# No deadline: the machine may be busy. The same examples every time: a red run can be repeated.
settings.register_profile("tests", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("tests")


def tier_of(item: pytest.Item) -> str:
    tier = item.path.relative_to(Path(__file__).parent).parts[0]
    if tier not in TIERS:
        raise pytest.UsageError(f"{item.path} is in none of the tiers {', '.join(TIERS)}")
    return tier


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(tier_of(item))
    items.sort(key=lambda item: TIERS.index(tier_of(item)))


def pytest_configure() -> None:
    """A shell has SIGINT ignored in what it starts in the background, and nohup SIGHUP. Children
    would inherit that, and tests send both."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Tests collect garbage, and checkpointers look through all objects for schedulers: not through
    the hundreds of thousands of the modules, too."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files, in order, to free workers; in the crash tier, where a test takes as long as a
    file elsewhere, give single tests; give the whole GPU tier to one worker."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/gpu/"):
                return "tests/gpu"
            return nodeid if nodeid.startswith("tests/crash/") else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


# --- shared memory of our own --------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def shm_root() -> Iterator[Path]:
    """Nothing here touches the shared memory of real jobs, not even a test that forgets shm_dir."""
    parent = Path("/dev/shm")
    for left in parent.glob("tierckpt-test-*"):  # by runs that were killed
        number = left.name.rpartition("-")[2]
        if number.isdecimal() and not Path("/proc", number).exists():
            shutil.rmtree(left, ignore_errors=True)
    root = parent / f"tierckpt-test-{os.getpid()}"
    root.mkdir()
    before = os.environ.get("TIERCKPT_SHM_DIR")
    os.environ["TIERCKPT_SHM_DIR"] = str(root)
    yield root
    shutil.rmtree(root, ignore_errors=True)
    if before is None:
        del os.environ["TIERCKPT_SHM_DIR"]
    else:
        os.environ["TIERCKPT_SHM_DIR"] = before


@pytest.fixture(autouse=True)
def restarts_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests play a job and its restarts in one process: what it has finished is not remembered,
    except in tests that ask for the fixture `one_process`."""
    if (module := sys.modules.get("tierckpt.checkpointer.shutdown")) is not None:
        monkeypatch.setattr(module, "_ends", Forgotten())


@pytest.fixture
def one_process(restarts_in_one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All jobs of the test are one process's, as they are."""
    monkeypatch.setattr(sys.modules["tierckpt.checkpointer.shutdown"], "_ends", {})


@pytest.fixture
def shm_dir(shm_root: Path) -> Iterator[Path]:
    """A folder in shared memory for this test alone; remaining files are removed."""
    folder = shm_root / uuid.uuid4().hex[:8]
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def warm_python() -> Iterator[None]:
    """Processes that tests start by `tests.support.warm_python` have torch imported already."""
    with servers.warm_python():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Started before the workers, these processes are for all of them."""
    if getattr(session.config.option, "numprocesses", None):
        stack = contextlib.ExitStack()
        stack.enter_context(servers.warm_python())
        session.config.add_cleanup(stack.close)


# --- leaks ---------------------------------------------------------------------------------------

# Whatever this run starts, however deep, has this in its environment.
RUN_MARK = f"PYTEST_TIERCKPT_RUN={uuid.uuid4().hex}"
os.environ.update([RUN_MARK.split("=")])

# An agent finishes its work before it ends, and the machine may be busy.
PATIENCE_SECONDS = 60.0
# Started by multiprocessing for the whole run.
HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
# Fixtures of the session that start processes when a test first asks: such tests are not checked.
SHARED = {"ranks"}

failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[failed] = item.stash.get(failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, shm_root: Path) -> Iterator[None]:
    """Fail a test that leaks a thread, a descriptor, a process or shared memory. Its own `shm_dir`
    is not checked: tests about it check it themselves."""
    pids = {*os.listdir("/proc")}
    before = belongings(shm_root, pids)
    yield
    if SHARED & set(request.fixturenames):
        return
    if request.node.stash.get(failed, False):
        return  # its traceback keeps objects alive that it would have closed
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause_seconds = 0.005
    while left := belongings(shm_root, pids) - before:
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n" + "\n".join(sorted(left)))
        time.sleep(pause_seconds)  # polling takes CPU time that the agent needs to end
        pause_seconds = min(2 * pause_seconds, 0.1)


def belongings(shm_root: Path, pids: set[str]) -> set[str]:
    """What this run has, but for the processes in `pids`, which it had before."""
    return {*_threads(), *_descriptors(), *_processes(pids), *_segments(shm_root)}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        yield f"thread {thread.name} ({thread.ident})"


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.startswith(("/proc/", "/dev/nvidia")):
                yield f"descriptor {fd} of {target}"


def _processes(before: set[str]) -> Iterator[str]:
    mark = RUN_MARK.encode()
    for pid in filter(str.isdigit, {*os.listdir("/proc")} - before):
        with contextlib.suppress(OSError):
            if int(pid) == os.getpid() or mark not in _read(f"/proc/{pid}/environ"):
                continue
            command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
            if not any(helper in command for helper in HELPERS):
                yield f"process {pid}: {command[:300]}"


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def _segments(shm_root: Path) -> Iterator[str]:
    for path in shm_root.rglob("*"):
        yield f"shared memory {path}"
