"""Several checkpointers in a process: when one is closed, the others still hear signals."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.store.processes import end, python

PROGRAM = """
import os, signal, sys, time
from tierckpt.testing import TinyJob
path, shm_dir, *close = sys.argv[1:]
jobs = [
    TinyJob(f"{path}/{n}", shm_dir=shm_dir, agent="inline", halt_patience_seconds=0.2).run(2)
    for n in range(3)
]
for n in close:
    jobs[int(n)].checkpointer.close()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize("closed", ["", "0", "2", "01", "10", "02", "21"])
def test_a_process_that_hangs_ends_at_a_signal(closed: str, path: Path, shm_dir: Path) -> None:
    process = python(PROGRAM, path, shm_dir, *closed)
    try:
        assert process.wait(50) == 128 + signal.SIGTERM
    finally:
        end(process)
