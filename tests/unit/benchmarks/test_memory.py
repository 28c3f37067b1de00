"""What the stall benchmark takes for memory: read from outside, while processes run."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.conftest import BENCHMARKS

MIB = 1 << 20
PAGES = 64 * MIB


@pytest.fixture
def processes(benchmark_module: Callable[[str], Any]) -> Any:
    """The benchmark's module."""
    return benchmark_module("lib.processes")


def test_shared_memory_counts_once_and_a_dead_process_not_at_all(processes: Any) -> None:
    before = processes.total_bytes([os.getpid()])
    with mmap.mmap(-1, PAGES) as shared:  # anonymous and shared: the kernel's shared memory
        shared.write(bytes(PAGES))
        child = os.fork()
        if child == 0:
            memoryview(shared)[::4096].tobytes()
            os.kill(os.getpid(), 19)  # SIGSTOP: it has touched every page
            os._exit(0)
        os.waitpid(child, os.WUNTRACED)
        both = processes.total_bytes([os.getpid(), child])
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert PAGES <= both["Pss_Shmem"] - before["Pss_Shmem"] < PAGES + 4 * MIB
    assert both["Rss"] - before["Rss"] > 2 * PAGES
    assert processes.memory_bytes(child) == {}


def test_a_family_mapping_while_it_is_read_is_no_sample(
    processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes share a buffer: what the first had alone, it shares by the time the second is
    read, so a sum over both has part of it twice."""
    reads: list[int] = []
    sampled = threading.Semaphore(0)

    def drifting(pid: int) -> dict[str, int]:
        reads.append(pid)
        shared = 150 * MIB if pid == 1 and len(reads) == 1 else 50 * MIB
        if pid == 2:
            shared += 50 * MIB
        if len(reads) % 4 == 0:
            sampled.release()
        return {"Rss": shared, "Pss": shared, "Pss_Shmem": shared}

    class Two:
        def pids(self) -> list[int]:
            return [1, 2]

    monkeypatch.setattr(processes, "memory_bytes", drifting)
    with processes.MemorySampler(Two(), interval_s=0.001) as sampler:
        for _ in range(3):
            assert sampled.acquire(timeout=120)
    assert reads[:4] == [1, 2, 2, 1]
    assert sampler.peak["Pss"] == 150 * MIB


def test_freed_memory_goes_back_to_the_system() -> None:
    """In a process of its own: the setting is for good."""
    code = """
import os, sys
sys.path.insert(0, sys.argv[1])
from lib.processes import memory_bytes
from lib.training.trainer import keep_freed
import torch

keep_freed(False)
large = torch.ones(16 << 20, dtype=torch.uint8)
del large  # from now on malloc would keep what is smaller
before = memory_bytes(os.getpid())["Pss"]
tensors = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(16)]
last = torch.ones(4096, dtype=torch.uint8)
del tensors
print(memory_bytes(os.getpid())["Pss"] - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(BENCHMARKS)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 8 * MIB
