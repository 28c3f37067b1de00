"""Ranks under a launcher end with the test process, in whatever way it ends, also paused ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.rank_pool import HOROVODRUN, ROOT, RankPool
from tests.support.waiting import is_seen

PATIENCE_SECONDS = 120.0


def who_are_you() -> int:
    return os.getpid()


def start_and_tell(folder: str) -> None:
    """Replaces the test process."""
    pool = RankPool(2, Path(folder), kind=HOROVODRUN)
    pids = pool.run(who_are_you)
    pool.pause()
    print(*pids, *(p.pid for p in pool._started), flush=True)
    time.sleep(1000)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except (FileNotFoundError, ProcessLookupError):  # it may end between two calls
        return True
    return state.startswith("Z")


def test_nobody_outlives_the_test_process(launchable: Any, tmp_path: Path) -> None:
    launchable(HOROVODRUN)
    code = "import sys; from tests.dist.horovod.test_ranks import *; start_and_tell(*sys.argv[1:])"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'common'}"},
        text=True,
    )
    try:
        assert holder.stdout is not None
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(set(pids)) == 3
        assert not any(gone(pid) for pid in pids)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    gone_at_last = is_seen(lambda: all(gone(pid) for pid in pids), PATIENCE_SECONDS)
    assert gone_at_last, "ranks or their launcher live on"
