"""Run a command as on a randomly slow machine: two of its processes at a time are stopped
for a moment, again and again. Tests that depend on the pace of a process fail.

    python -m tests.slow_machine pytest -n 2 tests/crash

The exit status is the command's. Moments are random, so a failure may not come again: its cause
must be found by reading.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

from tierckpt._process import process_stat

MARK = "SLOW_MACHINE"
"""The variable by which processes are found that the command has started, however deep."""
AT_ONCE = 2
PAUSE_SECONDS = 0.02
"""Between two stops of one thread."""


class SlowMachine:
    """Threads that stop processes and wake them, until `end`."""

    def __init__(self, mean_seconds: float, most_seconds: float) -> None:
        self.environment = {MARK: uuid.uuid4().hex}
        self._mean_seconds, self._most_seconds = mean_seconds, most_seconds
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(AT_ONCE)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop no other. After this, all are awake."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.wait(PAUSE_SECONDS):
            if found := self._awake():
                self._stop_for_a_moment(random.choice(found))

    def _stop_for_a_moment(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)  # no other process takes its number
            try:
                signal.pidfd_send_signal(process, signal.SIGSTOP)
                seconds = random.expovariate(1 / self._mean_seconds)
                self._over.wait(min(seconds, self._most_seconds))
                signal.pidfd_send_signal(process, signal.SIGCONT)
            finally:
                os.close(process)

    def _awake(self) -> list[int]:
        """Processes of the command, not stopped."""
        ((name, token),) = self.environment.items()
        mark, found = f"{name}={token}".encode(), []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if mark in environment and process_stat(pid)[0] not in "TZX":
                    found.append(int(pid))
        return found


def main() -> int:
    """Return the exit status of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.slow_machine", description=__doc__)
    parser.add_argument("--mean", type=float, default=0.5, help="mean seconds of a stop")
    parser.add_argument("--most", type=float, default=6.0, help="seconds of a stop at most")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    machine = SlowMachine(options.mean, options.most)
    try:
        environment = {**os.environ, **machine.environment}
        return subprocess.run(options.command, env=environment).returncode
    finally:
        machine.end()


if __name__ == "__main__":
    sys.exit(main())
