"""A job under a real launcher, killed and restarted: its start-up counts, too.

The job is torchrun with launched_rank.py, with or without `tierckpt run` between them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from lib.goodput.killed_job import (
    HANG_SECONDS,
    Course,
    Order,
    StuckError,
    journal_of,
    last_words,
    silent_seconds,
    when_ready,
)
from lib.goodput.methods import RESUMABLE, OursTorchrun
from lib.launchers import environment, torchrun
from lib.processes import MARK

SCRIPT = Path(__file__).resolve().with_name("launched_rank.py")
BENCHMARKS = SCRIPT.parents[2]
LOOK_SECONDS = 0.02
"""Between two tries to kill a starting rank."""


def run(order: Order, seconds: float, kills: Sequence[float], seed: int) -> Course:
    """Like `killed_job.run`, but the launcher restarts the job. If the rank of a failure is being
    started at its time, it is killed as soon as it runs."""
    order.folder.mkdir(parents=True, exist_ok=True)
    ahead, done = sorted(k for k in kills if k < seconds), []
    chance, launcher = random.Random(seed), _start(order)
    rank = chance.randrange(order.world)
    began = time.time()
    try:
        begin = when_ready(order, lambda wait: _wait(launcher, wait))
        while (now := time.monotonic() - begin) < seconds and launcher.poll() is None:
            if ahead and ahead[0] <= now and _kill(order, rank):
                done.append(begin + now)
                ahead.pop(0)
                rank = chance.randrange(order.world)
            _wait(launcher, max(LOOK_SECONDS, min([seconds, *ahead[:1]]) - now))
            if silent_seconds(order, since=began) > HANG_SECONDS:
                raise StuckError(last_words(order))
        end = time.monotonic()
        if launcher.poll() not in (None, 0):
            raise StuckError(last_words(order))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    return Course(end, list(journal_of(order)), done)


def _start(order: Order) -> subprocess.Popen[bytes]:
    method = RESUMABLE[order.method]
    assert issubclass(method, OursTorchrun)
    text = json.dumps({**asdict(order), "folder": str(order.folder), "memory": str(order.memory)})
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    with (order.folder / "log").open("ab") as log:
        return subprocess.Popen(
            [*torchrun(order.world, method.shim), str(SCRIPT), text],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment(order.folder), "PYTHONPATH": path},
            start_new_session=True,
        )


def _wait(launcher: subprocess.Popen[bytes], seconds: float) -> None:
    """Return when the launcher has ended, after `seconds` at most."""
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(seconds)


def _kill(order: Order, rank: int) -> bool:
    """SIGKILL to the process of a rank. False if it has none: the last one has ended."""
    path = order.folder / f"rank{rank}"
    try:
        pid = int(path.read_text())
        mine = f"{MARK}={os.environ[MARK]}".encode()
        if mine not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False  # another process has this number by now
        os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):
        return False
    path.unlink()
    return True
