"""Workers of a DataLoader, when everybody is signalled.

torchrun hands SIGTERM on to the whole process group of a rank, and Slurm signals every process of a
step. What `signals` hears in a trainer therefore comes to the workers of its DataLoader, too. They
would die of it, torch would raise that in the middle of the training loop, and the last checkpoint
would never be taken. The trainer ends the job, and its workers with it: so they ignore a signal,
unless it is meant for them. It is

- where their parent sent it: DataLoader and multiprocessing end workers so;
- where their parent is gone, or goes afterwards;
- where the worker's own code has come to handle it.

Handlers in Python are not told who sent a signal, and torch's in C take the place of others. So the
signals are blocked in a worker, and a thread waits for them. Programs that a worker starts would
inherit that, and could not be ended: before the first one, the thread that starts it blocks them no
more, and from then on the worker is as it would be without us.

Only workers that are forked can be reached. Where workers are made in another way they die, and
`Checkpointer` has the newest version in memory written to disk. And a thread in Python cannot run
beside a worker that never lets go of the interpreter's lock: such a one ends by SIGKILL only.
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
"""So often a worker that ignored a signal looks whether its parent is still there."""
WORK = "_worker_loop"
"""What workers run, those of torch as well as those of torchdata."""
LAUNCHES = frozenset(
    ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec")
)
"""Events, as `sys.addaudithook` has them, before which a mask is about to be inherited."""


def shield(numbers: Iterable[signal.Signals], parent: int) -> None:
    """Have this process ignore these, unless they are meant for it; if it is a DataLoader's worker.

    For a child that multiprocessing just forked, on its only thread. `parent` is who forked it, and
    hears them.
    """
    work = getattr(multiprocessing.current_process(), "_target", None)
    if getattr(work, "__name__", "") != WORK or os.getppid() != parent:
        return
    found = {number: signal.getsignal(number) for number in numbers}
    wanted = found.keys() - signal.pthread_sigmask(signal.SIG_BLOCK, found)
    if not wanted:  # another checkpointer's, or the script's own
        return
    found = {number: found[number] for number in wanted}
    waits = threading.Thread(
        target=_wait, args=(found, parent), name="tierckpt-signals", daemon=True
    )
    try:
        sys.addaudithook(lambda event, _: _unblock(wanted) if event in LAUNCHES else None)
        waits.start()
    except RuntimeError:  # no more threads
        _unblock(wanted)


def _unblock(numbers: Iterable[int]) -> None:
    """On this thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _wait(found: Mapping[signal.Signals, Any], parent: int) -> None:
    """The thread. `found`: the handlers that there were as the worker began."""
    waiting, ignored = set(found), None
    while waiting:
        if ignored is None:
            told = signal.sigwaitinfo(waiting)
        else:
            told = signal.sigtimedwait(waiting, LOOK_SECONDS) or ignored
        number = signal.Signals(told.si_signo)
        handled = signal.getsignal(number) != found[number]
        if told.si_pid == parent and number == signal.SIGTERM and not handled:
            os._exit(0)  # as torch's own handler does, which asks who sent it
        if told.si_pid == parent or os.getppid() != parent or handled:
            waiting.discard(number)
            ignored = None
            _unblock([number])
            os.kill(os.getpid(), number)
        else:
            ignored = told
