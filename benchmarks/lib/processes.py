"""CPU seconds and memory of a family of processes, read from outside.

A family is every process with a mark in its environment: the ranks, their children, and daemons
that have detached. The processes need not cooperate.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

MARK = "STALL_FAMILY"
TOLERANCE_BYTES = 1 << 20
_TICKS = os.sysconf("SC_CLK_TCK")


class Family:
    """All processes that were started with `STALL_FAMILY=<token>` in their environment."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._needle = f"{MARK}={token}".encode()
        # Reading an environment is slow, so it is read once per process.
        self._known: dict[tuple[int, str], bool] = {}

    def pids(self) -> list[int]:
        return [pid for pid in _all_pids() if self._has(pid)]

    def _has(self, pid: int) -> bool:
        try:
            born = _stat_fields(pid)[19]
            key = (pid, born)
            if not self._known.get(key):
                # Before its exec a child shows the parent's environment, and during it an empty
                # one: "no" is checked again, "yes" is final.
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                self._known[key] = self._needle in environment.split(b"\0")
            return self._known[key]
        except (OSError, IndexError):
            return False  # gone, or not ours to read

    def cpu_seconds(self) -> float:
        """User and system time of all living members and of their reaped children."""
        return sum(cpu_seconds_of(pid) for pid in self.pids())

    def kill(self) -> None:
        """Kill every member."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class MemorySampler:
    """Peak memory of a family inside a `with` block, sampled by a thread.

    Sampling walks page tables and holds the lock of page faults, so timed blocks are never sampled.

    Processes are read one after the other. If one maps pages of another in between, these are
    counted too often or too rarely: an agent that reads slots of 200 MB looked like 45 MB. So the
    family is read twice, the second time in reverse order, and a sample counts only if both
    readings of shared memory agree.
    """

    def __init__(self, family: Family, interval_s: float = 0.02) -> None:
        self._family = family
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self.peak = {"Rss": 0, "Pss": 0}

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(self._interval_s):
            pids = self._family.pids()
            first, second = total_bytes(pids), total_bytes(pids[::-1])
            if abs(first["Pss_Shmem"] - second["Pss_Shmem"]) <= TOLERANCE_BYTES:
                for key in self.peak:
                    self.peak[key] = max(self.peak[key], first[key])


def total_bytes(pids: list[int]) -> dict[str, int]:
    """The sum of `memory_bytes` over processes."""
    totals: Counter[str] = Counter()
    for pid in pids:
        totals.update(memory_bytes(pid))
    return totals


def memory_bytes(pid: int) -> dict[str, int]:
    """Rss and Pss of one process in bytes, and the Pss of shared memory; empty if it is gone.

    Pss divides a page by the number of processes that map it, so its sum over a family is the used
    memory. The sum of Rss counts a shared buffer once for each process that has touched it.
    """
    sizes = {}
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return sizes
    for line in lines:
        key, _, rest = line.partition(":")
        if key in ("Rss", "Pss", "Pss_Shmem"):
            sizes[key] = int(rest.split()[0]) * 1024
    return sizes


def machine_busy_seconds() -> float:
    """CPU seconds of all cores since boot without idle time, with stolen time."""
    counts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = counts
    return (user + nice + system + irq + softirq + steal) / _TICKS


def cpu_seconds_of(pid: int) -> float:
    """CPU time of a living process, with all threads and its reaped children.

    utime and stime of /proc count in ticks of 10 ms, too coarse for one checkpoint. The CPU clock
    of a process counts nanoseconds; the arithmetic is that of clock_getcpuclockid(3).
    """
    try:
        own = time.clock_gettime((~pid << 3) | 2)
        fields = _stat_fields(pid)
        return own + (int(fields[13]) + int(fields[14])) / _TICKS
    except (OSError, IndexError):
        return 0.0


def _stat_fields(pid: int) -> list[str]:
    """/proc/<pid>/stat after the command name: [13] cutime, [14] cstime, [19] start time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
