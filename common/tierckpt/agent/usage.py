"""Usage: the cores that a node's trainers and its agent use, every 50 ms: `tierckpt report`.

Off unless `trace_dir` is set. The agent samples, so that no trainer spends time on it: it reads the
CPU clock of each trainer's process, with all its threads. Processes that a trainer has started,
such as a loader's workers, are not counted.

A line of `<trace_dir>/usage-r<lowest rank of the node>.jsonl` is a JSON array: the Unix time of the
sample, the seconds since the last one, and the cores in use since then, by rank and for `agent`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_SECONDS = 0.05
MOST_SAMPLES = 12_000
"""Limit of the samples of one run: ten minutes, 1 MB."""
AGENT = "agent"
OWN_CLOCK = time.CLOCK_PROCESS_CPUTIME_ID


def file_name(rank: int) -> str:
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
        key, path = (rank, pid), Path(folder, file_name(min(ranks, default=rank)))
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
        begin, left = time.monotonic(), MOST_SAMPLES
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a", buffering=1))
            while clocks := self._named_clocks():
                now, seconds = time.monotonic(), _read(clocks)
                cores = {
                    name: round((spent - before[name]) / (now - begin), 3)
                    for name, spent in seconds.items()
                    if name in before and left > 0
                }
                if cores:
                    line = [round(time.time(), 4), round(now - begin, 4), cores]
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
                    left -= 1
                begin, before = now, seconds
                time.sleep(PERIOD_SECONDS if left else 1.0)
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
            return {**found, AGENT: OWN_CLOCK}


def _clock_of(pid: int) -> int:
    """The CPU clock of another process, as `clock_getcpuclockid` makes it."""
    return ~pid << 3 | OWN_CLOCK


def _read(clocks: dict[str, int]) -> dict[str, float]:
    """Seconds by name, without those of processes that have ended."""
    found = {}
    for name, clock in clocks.items():
        with contextlib.suppress(OSError):
            found[name] = time.clock_gettime(clock)
    return found


__all__ = ["UsageSampler", "file_name"]
