"""Processor: the agent yields the processor and the disk to training, and records who uses the
cores.

`UsageSampler` records the cores that a node's trainers and its agent use, every 50 ms, for
`tierckpt report`. It is off unless `trace_dir` is set. The agent samples, so that no trainer
spends time on it: it reads the CPU clock of each trainer's process, with all its threads.
Processes that a trainer has started, such as a loader's workers, are not counted.

A line of `<trace_dir>/usage-r<lowest rank of the node>.jsonl` is a JSON array: the Unix time of
the sample, the seconds since the last one, and the cores in use since then, by rank and for
`agent`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["UsageSampler", "lower_priority", "shorten_slices", "usage_file_name"]


SHORTEST_SLICE_NANOSECONDS = 100_000
"""The kernel gives no less."""
TRIES = 5
NICE = 0 if os.environ.get("TIERCKPT_TEST_NICE") == "0" else 10
"""Niceness of an agent, relative to its trainers. The variable is for tests, which wait for agents
beside each other."""


def lower_priority(by: int = NICE) -> None:
    """Lower the priority of this process, which has one thread, below its starter's, for CPU and
    disk. A refusal of the system is ignored. `by`: the niceness to add."""
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + by, 19)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    with contextlib.suppress(OSError):
        _lower_session(nice)
    number = {"x86_64": 251, "aarch64": 30}.get(platform.machine())
    if number is not None:
        best_effort_lowest = 2 << 13 | 7
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, best_effort_lowest)


def shorten_slices() -> None:
    """Let the calling thread run soon after it wakes up, for a short time, at the same share of the
    processor. For a thread that mostly waits for a device: with long slices it would have to wait
    for those of all others after each wait. Linux 6.12 and newer; ignored elsewhere."""
    number = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
    if number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        asked = _SchedAttr(ctypes.sizeof(_SchedAttr), nice=nice, runtime=SHORTEST_SLICE_NANOSECONDS)
        ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.byref(asked), 0)


class _SchedAttr(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2). For ordinary threads, `runtime` is the slice."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def _lower_session(nice: int) -> None:
    """Lower the priority of this process's session, if the process leads it. Raises OSError.

    Where Linux groups processes by session (sched(7), autogroup), niceness counts only within a
    session, and one process alone in its session gets as much CPU as all trainers in theirs. The
    machine allows ten such changes a second.
    """
    if os.getsid(0) != os.getpid():
        return
    for _ in range(TRIES):
        with contextlib.suppress(BlockingIOError):
            Path("/proc/self/autogroup").write_text(str(nice))
            return
        time.sleep(0.1)


USAGE_PERIOD_SECONDS = 0.05
MAX_SAMPLES = 12_000
"""Limit of the samples of one run: ten minutes, 1 MB."""
USAGE_OF_AGENT = "agent"
OWN_CLOCK = time.CLOCK_PROCESS_CPUTIME_ID


def usage_file_name(rank: int) -> str:
    """The name of the file of the node with this lowest rank."""
    return f"usage-r{rank:05d}.jsonl"


class UsageSampler:
    """Samples while trainers are connected that ask for it, on a thread of its own."""

    def __init__(self) -> None:
        """No trainer yet."""
        self._lock = threading.Lock()
        self._clocks: dict[tuple[int, int], int] = {}
        """CPU clocks by rank and process: a killed trainer's session may end after the start of its
        successor."""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def sampling(self, folder: str, ranks: tuple[int, ...], rank: int, pid: int) -> Iterator[None]:
        """Context of the session of a trainer, the process `pid`. `ranks`: those of the node.
        Nothing is sampled without a folder, or in the trainer's own process. Raises nothing."""
        if not folder or pid in (0, os.getpid()):
            yield
            return
        key, path = (rank, pid), Path(folder, usage_file_name(min(ranks, default=rank)))
        with self._lock:
            self._clocks[key] = _clock_of(pid)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._sample, args=(path,), name="tierckpt-usage", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # the limit of threads
                    thread.start()
                    self._thread = thread
        try:
            yield
        finally:
            with self._lock:
                del self._clocks[key]

    def _sample(self, path: Path) -> None:
        before: dict[str, float] = {}
        start, left = time.monotonic(), MAX_SAMPLES
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a", buffering=1))
            while clocks := self._named_clocks():
                now, seconds = time.monotonic(), _read_usage(clocks)
                cores = {
                    name: round((spent - before[name]) / (now - start), 3)
                    for name, spent in seconds.items()
                    if name in before and left > 0
                }
                if cores:
                    line = [round(time.time(), 4), round(now - start, 4), cores]
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
                    left -= 1
                start, before = now, seconds
                time.sleep(USAGE_PERIOD_SECONDS if left else 1.0)
            return
        with self._lock:  # the file cannot be written: the next run tries again
            self._thread = None

    def _named_clocks(self) -> dict[str, int]:
        """The clocks to read; none, and the thread ends, when no trainer is left."""
        with self._lock:
            if not self._clocks:
                self._thread = None
                return {}
            found = {str(rank): clock for (rank, _), clock in self._clocks.items()}
            return {**found, USAGE_OF_AGENT: OWN_CLOCK}


def _clock_of(pid: int) -> int:
    """The CPU clock of another process, as `clock_getcpuclockid` makes it."""
    return ~pid << 3 | OWN_CLOCK


def _read_usage(clocks: dict[str, int]) -> dict[str, float]:
    """Seconds by name, without those of processes that have ended."""
    found = {}
    for name, clock in clocks.items():
        with contextlib.suppress(OSError):
            found[name] = time.clock_gettime(clock)
    return found
