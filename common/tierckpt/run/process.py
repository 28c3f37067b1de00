"""Processes of a shim: forks, ends of whole trees, and an end like that of the script."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn, Protocol

from tierckpt._children import end_with_parent
from tierckpt._host import process_stat
from tierckpt._text import in_words

PR_SET_CHILD_SUBREAPER = 36
SHELL_STATUS = 128
"""A shell's status for a signal, less its number."""


class Handlers(Protocol):
    """The part of `signals.Signals` that a fork needs."""

    def blocked(self) -> AbstractContextManager[None]:
        """Hold signals back."""

    def restore(self) -> None:
        """Put the handlers of a fresh process back."""


def adopt_orphans() -> None:
    """Become the parent of the script's processes when it ends before them, so that they can be
    ended, too."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def fork(handlers: Handlers, in_child: Callable[[], None]) -> int:
    """Fork; returns the process id, and 0 in the child.

    The kernel kills the child when this process ends. `in_child` is called in the child before any
    signal can arrive."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    parent = os.getpid()
    with handlers.blocked():
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            handlers.restore()
            in_child()
    return pid


def fork_helper(
    handlers: Handlers, work: Callable[[], None], prepare: Callable[[], None] = lambda: None
) -> int:
    """Fork a process that does `work` and ends; returns its id. `prepare` is called in it before
    any signal can arrive."""
    pid = fork(handlers, prepare)
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except Exception as error:
            print(f"tierckpt run: {in_words(error)}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return pid


def kill_tree(pid: int | None, spared: Collection[int]) -> None:
    """Kill a child and its descendants, and wait until they are gone. `spared`: other children.

    Descendants with a session of their own stay, as with launchers, which kill process groups: the
    node's agent has one. This process must have called `adopt_orphans`."""
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    session = os.getsid(0)
    while True:
        found = [child for child in children() if child not in spared and _in(child, session)]
        if not found:
            return
        for child in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def kill_one(pid: int) -> None:
    """Kill a child, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def reap(spared: Collection[int]) -> None:
    """Reap adopted children that have ended."""
    for child in children():
        if child not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def children() -> list[int]:
    """Ids of this process's children."""
    try:
        return list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_ours(name)]


def _is_ours(name: str) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return int(process_stat(name)[1]) == os.getpid()
    return False


def _in(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return False


@contextlib.contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the first process of a container during the block, too: without a handler the
    kernel drops a signal to it. Main thread."""
    if os.getpid() != 1:
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: os._exit(SHELL_STATUS + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_like(status: int) -> NoReturn:
    """End this process as the script has ended; `status` as from `os.waitpid`.

    No signal ends the first process of a container: that one ends with the status that a shell
    gives for a signal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # The script has written a core already.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        if os.getpid() == 1:
            os._exit(SHELL_STATUS + number)
        os.kill(os.getpid(), number)
        signal.pause()
    os._exit(os.WEXITSTATUS(status))


__all__ = [
    "adopt_orphans",
    "children",
    "end_like",
    "ends_by_sigterm",
    "fork",
    "fork_helper",
    "kill_one",
    "kill_tree",
    "reap",
]
