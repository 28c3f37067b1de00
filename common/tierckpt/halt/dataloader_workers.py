"""Workers of a DataLoader, when a signal goes to every process.

torchrun sends SIGTERM to the whole process group of a rank, and Slurm signals every process of a
step. A signal that `signals` handles in a trainer therefore reaches the workers of its DataLoader,
too. They would die, torch would raise that in the middle of the training loop, and the last
checkpoint would never be taken. The trainer ends the job, and its workers with it. So a worker
ignores a signal unless

- its parent sent it: DataLoader and multiprocessing end workers that way;
- its parent has gone, or goes later;
- the worker's own code has installed a handler.

A Python handler cannot see the sender of a signal, and torch's C handlers replace others. So the
signals are blocked in a worker, and a thread waits for them. Programs that a worker starts would
inherit the mask, and could not be ended. So before the first start, the starting thread unblocks
them, and from then on the worker behaves as without Tierckpt.

Only forked workers can be protected. Workers made in another way die, and `Checkpointer` then has
the newest version in memory written to disk. A worker that never releases the interpreter's lock
ends by SIGKILL only, as no Python thread can run beside it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

LOOK_SECONDS = 1.0
"""Interval at which a worker that ignored a signal checks whether its parent still exists."""
WORK = "_worker_loop"
"""The function that workers of torch and torchdata run."""
LAUNCHES = frozenset(
    ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec")
)
"""Audit events (`sys.addaudithook`) before which a child is about to inherit the mask."""


def shield(numbers: Iterable[signal.Signals], parent: int) -> None:
    """In a DataLoader's worker, ignore these signals unless they are meant for it.

    Called in a child that multiprocessing just forked, on its only thread. `parent` is the process
    that forked it and handles the signals.
    """
    work = getattr(multiprocessing.current_process(), "_target", None)
    if getattr(work, "__name__", "") != WORK or os.getppid() != parent:
        return
    found = {number: signal.getsignal(number) for number in numbers}
    wanted = found.keys() - signal.pthread_sigmask(signal.SIG_BLOCK, found)
    if not wanted:  # another checkpointer or the script blocks them
        return
    found = {number: found[number] for number in wanted}
    waiter = threading.Thread(
        target=_wait, args=(found, parent), name="tierckpt-signals", daemon=True
    )
    try:
        sys.addaudithook(lambda event, _: _unblock(wanted) if event in LAUNCHES else None)
        waiter.start()
    except RuntimeError:  # no more threads
        _unblock(wanted)


def _unblock(numbers: Iterable[int]) -> None:
    """Unblock signals on this thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _wait(found: Mapping[signal.Signals, Any], parent: int) -> None:
    """The thread's work. `found`: the handlers at the worker's start."""
    waiting, ignored = set(found), None
    while waiting:
        if ignored is None:
            info = signal.sigwaitinfo(waiting)
        else:
            info = signal.sigtimedwait(waiting, LOOK_SECONDS) or ignored
        number = signal.Signals(info.si_signo)
        handled = signal.getsignal(number) != found[number]
        if info.si_pid == parent and number == signal.SIGTERM and not handled:
            os._exit(0)  # as torch's own handler does, which checks the sender
        if info.si_pid == parent or os.getppid() != parent or handled:
            waiting.discard(number)
            ignored = None
            _unblock([number])
            os.kill(os.getpid(), number)
        else:
            ignored = info
