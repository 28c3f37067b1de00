"""Processes of a shim: forks, signals, ends of whole trees, and an end like that of the script.

Signals in the shim are recorded, and passed on to the script's process exactly once.

Launchers signal a process, its group, its children or all of a job's processes. The script's
process is in the shim's group, as Ctrl-C and `stdin` of a terminal need, and receives all but the
first by itself. A *witness* shows the difference: an idle process in the same group, which every
signal to more than the shim ends, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from math import inf
from pathlib import Path
from typing import NoReturn, Protocol

from tierckpt._children import end_with_parent
from tierckpt._process import process_stat
from tierckpt._text import error_text

__all__ = [
    "FORWARDED",
    "Signals",
    "adopt_orphans",
    "children",
    "copy_as",
    "end_like",
    "ends_by_sigterm",
    "fork",
    "fork_helper",
    "kill_one",
    "kill_tree",
    "pass_on",
    "reap",
]


PR_SET_CHILD_SUBREAPER = 36
MADV_POPULATE_WRITE = 23
"""Linux, include/uapi/asm-generic/mman-common.h; fails before Linux 5.14."""
PAGE = os.sysconf("SC_PAGE_SIZE")
OWN = 1 << 63 | 1 << 56
"""Marks of a page in /proc/PID/pagemap: it is in memory, and no other process has it."""
SHELL_STATUS = 128
"""A shell's status for a signal, less its number."""


class Handlers(Protocol):
    """The part of `Signals` that a fork needs."""

    def blocked(self) -> AbstractContextManager[None]:
        """Hold signals back."""

    def leave_shim(self) -> None:
        """In a forked process: signals do not reach the shim, and are only recorded."""

    def restore(self, since: float = inf) -> None:
        """Put the handlers of a fresh process back, for the signals from `since` on, too."""


def adopt_orphans() -> None:
    """Become the parent of the script's processes when it ends before them, so that they can be
    ended, too."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def fork(handlers: Handlers, in_child: Callable[[], None]) -> int:
    """Fork; returns the process id, and 0 in the child.

    The kernel kills the child when this process ends. `in_child` is called in the child before any
    signal can arrive; signals have no effect until it, or a later call, restores their handlers."""
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
            handlers.leave_shim()
            in_child()
    return pid


def fork_helper(
    handlers: Handlers, work: Callable[[], None], prepare: Callable[[], None] = lambda: None
) -> int:
    """Fork a process that does `work` and ends; returns its id. `prepare` is called in it before
    any signal can arrive."""

    def in_child() -> None:
        handlers.restore()
        prepare()

    pid = fork(handlers, in_child)
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except Exception as error:
            print(f"tierckpt run: {error_text(error)}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return pid


def copy_as(sibling: int) -> None:
    """In a forked process: copy the pages that a sibling has written to, before they are needed.
    It takes no more memory than the sibling's own copies, and their contents stay."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with contextlib.suppress(OSError), open(f"/proc/{sibling}/pagemap", "rb") as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, access, _, _, inode, *name = line.split()
            if not access.startswith("rw") or inode != "0" or name == ["[stack]"]:
                continue
            at, end = (int(each, 16) // PAGE for each in place.split("-"))
            pagemap.seek(8 * at)
            marks = array("Q", pagemap.read(8 * (end - at)))
            for is_own, run in groupby(mark & OWN == OWN for mark in marks):
                count = len(list(run))
                if is_own:
                    madvise(at * PAGE, count * PAGE, MADV_POPULATE_WRITE)
                at += count


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


FORWARDED = frozenset(
    {
        *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1),
        *(signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM),
        *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
    }
)
"""Signals that the shim passes on. Stops and continues keep their effect on each process."""
SETTLE_SECONDS = 0.02
"""The time in which a signal to a group reaches all of it, or to a tree of processes."""
FRESH_SECONDS = 1.0
"""The witness may die of a signal before the shim has received its own."""
_SCAN = ("SigPnd:", "ShdPnd:")
_EXITING = 0x4
"""PF_EXITING among the flags in /proc/PID/stat (Linux, include/linux/sched.h)."""


class Signals:
    """Handlers of one shim. Main thread; `wake` is called with a byte for every signal."""

    def __init__(self, wake_fd: int) -> None:
        """Install the handlers, except for signals that are ignored (nohup)."""
        self.received: list[int] = []
        self._arrived: dict[int, float] = {}
        """When each signal was received last (monotonic clock)."""
        self._before: dict[int, object] = {}
        self._witness: int | None = None
        self._to_all: dict[int, float] = {}
        """The signal that ended the last witness, and when (monotonic clock)."""
        self.mask: set[int] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD):
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                self._before[number] = signal.signal(number, self._record)

    def _record(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self.received.append(number)
            self._arrived[number] = time.monotonic()

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Hold all of these signals back during the block."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._before)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def leave_shim(self) -> None:
        """In a forked process: signals do not reach the shim, and are only recorded."""
        signal.set_wakeup_fd(-1)
        self._arrived.clear()

    def restore(self, since: float = inf) -> None:
        """In a forked process: put the handlers back that this process had before the shim's, and
        send it again what it has received since this moment (monotonic clock)."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        for number, at in self._arrived.items():
            if at >= since:
                os.kill(os.getpid(), number)

    # --- the witness ----------------------------------------------------------------------------

    def place_witness(self) -> None:
        """Start the witness, unless it is there."""
        if self._witness is None:
            self._witness = fork_helper(self, _stay, prepare=_end_by_signals)

    @property
    def witness(self) -> int | None:
        """The witness's process id."""
        return self._witness

    def remove_witness(self) -> None:
        """End the witness."""
        pid, self._witness = self._witness, None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def end_of_witness(self, or_comes: bool = False) -> int | None:
        """The signal that has just ended the witness; None if it is there. `or_comes`: wait for
        the end if a signal is on its way."""
        if self._witness is None:
            return None
        options = 0 if or_comes and _has_signal(self._witness) else os.WNOHANG
        pid, status = os.waitpid(self._witness, options)
        if pid == 0:
            return None
        self._witness = None
        self._to_all = {os.WTERMSIG(status): time.monotonic()}
        return os.WTERMSIG(status)

    def was_for_all(self, number: int) -> bool:
        """True if a signal that the shim has received went to the witness, too, which is gone
        then."""
        if self._was_witnessed(number):
            return True
        if self._witness is None:
            return False
        time.sleep(SETTLE_SECONDS)
        if self._was_witnessed(number):
            return True
        return self._is_dying()

    def _was_witnessed(self, number: int) -> bool:
        """True if this signal has ended the witness; its death counts once."""
        self.end_of_witness()
        return time.monotonic() - self._to_all.pop(number, -inf) < FRESH_SECONDS

    def _is_dying(self) -> bool:
        """True if a signal ends the witness, which may not have run since, or not be gone yet;
        waits for that end."""
        if self._witness is None or not _has_signal(self._witness):
            return False
        os.waitpid(self._witness, 0)
        self._witness = None
        return True


def _has_signal(process_id: int) -> bool:
    """True if the process has a pending signal, or is ending: to give back the memory of a large
    process takes a while."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
        if any(line.startswith(_SCAN) and int(line.split()[1], 16) for line in lines):
            return True
        return bool(int(process_stat(str(process_id))[6]) & _EXITING)
    return False


def _end_by_signals() -> None:
    """Give every signal not ignored (nohup) its default effect, the end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _stay() -> None:
    """The witness's work."""
    while True:
        signal.pause()


def pass_on(pid: int, numbers: list[int], was_for_all: Callable[[int], bool]) -> None:
    """Send the signals to the process that it has not received by itself."""
    for number in numbers:
        if not was_for_all(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
