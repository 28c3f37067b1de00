"""Forks ranks: torch is imported once for all of them, and a run of a job takes about a second.

Sound because there is nothing to lose in a fork: one thread, no process group, no agent, checked
before every fork. (`OMP_NUM_THREADS=1` sees to it that numpy and torch start none.)

Reads one JSON line per rank from standard input, `{"environment": {...}, "log": path}`, and answers
with the process id. Ends, and its ranks with it, at the end of the input.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def threads() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Threads:")[2].split()[0])


def serve() -> None:
    from tests.support.crash import job

    gc.freeze()  # or each rank would look through all that was imported, and so copy it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how they ended
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if threads() != 1:
            print(f"cannot fork: {threads()} threads", flush=True)
            return
        pid = os.fork()
        if pid == 0:
            become(order["environment"], order["log"])
            job.run(os.environ)
        print(pid, flush=True)
    os._exit(0)  # nothing to clean up


def become(environment: dict[str, str], log: str) -> None:
    """In the child: cut every tie to the zygote but its run."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(out)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve()
