"""Pages of forked processes."""

from __future__ import annotations

import mmap
import os
import resource
import signal

from tierckpt.run import copy_as

PAGES = 400


def write(memory: mmap.mmap, value: bytes) -> int:
    """Write to the first half of the pages; returns the number of page faults."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for page in range(PAGES // 2):
        memory[page * mmap.PAGESIZE] = value[0]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def forked(memory: mmap.mmap, sibling: int | None) -> tuple[int, int]:
    """A forked process that has written to the memory: its id, and the number of its faults. It
    copies first what its sibling has written."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        if sibling is not None:
            copy_as(sibling)
        same = memory[0] == memory[mmap.PAGESIZE * (PAGES - 1)] == 7
        os.write(writing, str(write(memory, b"\x08") if same else -1).encode())
        signal.pause()
    found = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    return pid, found


def test_what_a_sibling_has_written_is_copied_before_it_is_needed() -> None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for page in range(PAGES):
            memory[page * mmap.PAGESIZE] = 7
        first, faults = forked(memory, None)
        other, fewer = forked(memory, first)
        for pid in (first, other):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert faults >= PAGES // 2
    assert 0 <= fewer < PAGES // 8
