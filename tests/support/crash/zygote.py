"""A process that forks ranks: torch is imported once for all, and a run takes about a second.

The fork is safe because the process has one thread, no process group and no agent, which is checked
before every fork. (`OMP_NUM_THREADS=1` keeps numpy and torch from starting threads.)

The process reads one JSON line per rank from standard input, `{"environment": {...}, "log": path}`,
and answers with the process id. At the end of the input it ends, and its ranks with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def threads() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Threads:")[2].split()[0])


def serve(module: str, *others: str) -> None:
    """`module` has a function `run(environment)`, which is the program of the ranks. `others` are
    modules that some ranks import."""
    job = importlib.import_module(module)
    for name in others:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    gc.freeze()  # otherwise each rank's collector would visit, and so copy, all imported objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their exit status is not needed
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
    """In the child: cut every tie to the zygote; the child still dies with it."""
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
    serve(*sys.argv[1:])
