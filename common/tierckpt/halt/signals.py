"""Signals: a launcher's or scheduler's request to end this process, kept until a boundary.

A signal handled here does not end the process. It is recorded in `received`, and the previous
handler is called, too. The process ends at once, as it would without Tierckpt, if

- it has passed no boundary yet, so there is nothing to save, and the script has no handler of its
  own, which may want the process to continue;
- the same signal arrives again, later than REPEATED_SECONDS after the first;
- SIGTERM arrived, and no boundary is passed for `patience_seconds`: the process hangs in a
  collective with a dead peer. A Python handler would never run then, so a thread checks this. The
  interpreter's own C handler wakes it through a pipe (`signal.set_wakeup_fd`). A launcher that ends
  the survivors of a failure does not wait for its grace period. Other signals do not come from a
  launcher, and leave time for work between two boundaries (an evaluation). There is also time once
  the ranks have agreed to end.

*Workers of a DataLoader.* torchrun sends SIGTERM to the whole process group of a rank, and Slurm
signals every process of a step. A signal handled in a trainer therefore reaches the
workers of its DataLoader, too. They would die, torch would raise that in the middle of the
training loop, and the last checkpoint would never be taken. The trainer ends the job, and its
workers with it. So a worker ignores a signal unless

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

import atexit
import contextlib
import logging
import math
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import util
from types import FrameType
from typing import Any

LOOK_SECONDS = 1.0
"""Interval at which a worker that ignored a signal checks whether its parent still exists."""
WORK = "_worker_loop"
"""The function that workers of torch and torchdata run."""
LAUNCHES = frozenset(
    ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec")
)
"""Audit events (`sys.addaudithook`) before which a child is about to inherit the mask."""


def shield_worker(numbers: Iterable[signal.Signals], parent: int) -> None:
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
        target=_wait_in_worker, args=(found, parent), name="tierckpt-signals", daemon=True
    )
    try:
        sys.addaudithook(lambda event, _: _unblock_in_worker(wanted) if event in LAUNCHES else None)
        waiter.start()
    except RuntimeError:  # no more threads
        _unblock_in_worker(wanted)


def _unblock_in_worker(numbers: Iterable[int]) -> None:
    """Unblock signals on this thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def _wait_in_worker(found: Mapping[signal.Signals, Any], parent: int) -> None:
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
            _unblock_in_worker([number])
            os.kill(os.getpid(), number)
        else:
            ignored = info


logger = logging.getLogger("tierckpt")

REPEATED_SECONDS = 5.0
"""The same signal within this time is the same request: a scheduler may signal every process of a
job, and a launcher among them forwards the signal."""
STARTING_SECONDS = 1.0
"""The patience before the first boundary."""
END = b"\0"
"""The byte that ends the thread; no signal has this number."""
_watching: weakref.WeakSet[Signals] = weakref.WeakSet()
"""The objects with a pipe; the interpreter's C handler writes to one of the pipes."""


class Signals:
    """The handlers of one process, as the module describes. Created, used and closed on the main
    thread; on another thread it handles no signals.

    `close()` restores the previous handlers.
    """

    def __init__(
        self,
        wanted: Iterable[signal.Signals],
        patience_seconds: float = 10.0,
        grace_seconds: float = math.inf,
    ) -> None:
        """`patience_seconds`: a process that received SIGTERM may be without a boundary for this
        time, or for twice its longest iteration if longer. `grace_seconds`: time from a
        signal until its sender ends the process."""
        self.received: signal.Signals | None = None
        """The first signal that arrived."""
        self.on_received: Callable[[], None] = lambda: None
        """Called in the handler, after `received` is set."""
        self.unhandled: dict[signal.Signals, str] = {}
        """Signals that are not handled, with the reasons."""
        self._previous: dict[signal.Signals, Any] = {}
        self._first_seconds: dict[signal.Signals, float] = {}
        self._patience_seconds = patience_seconds
        self._pid = os.getpid()
        self._boundary_seconds = 0.0
        """The time of the last boundary; 0 before the first."""
        self._longest_seconds = self._last_seconds = 0.0
        self._grace_seconds = grace_seconds
        self._disarmed = self._over = False
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        wanted = tuple(wanted)
        if threading.current_thread() is not threading.main_thread():
            self.unhandled = dict.fromkeys(wanted, "only the main thread can handle signals")
            return
        for number in wanted:
            self._install(number)
        if self._previous:
            self._start_watching()
        weak = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _release_in_child(weak()))
        util.register_after_fork(self, _shield_worker)  # runs after the previous one

    @property
    def received_seconds(self) -> float | None:
        """The time of the first signal by `time.monotonic()`; None if none arrived."""
        return None if self.received is None else self._first_seconds[self.received]

    # --- calls from the training ---------------------------------------------------------------

    def passed_boundary(self) -> None:
        """Record that an iteration has ended."""
        now = time.monotonic()
        if self._boundary_seconds:
            passed = self._last_seconds = now - self._boundary_seconds
            self._longest_seconds = max(self._longest_seconds, passed)
        self._boundary_seconds = now

    def disarm(self) -> None:
        """Stop the deadline: the end has started, and no further boundary is expected."""
        self._disarmed = True

    def close(self) -> None:
        """Restore the previous handlers.

        If a signal arrived, the handlers stay: the process is about to end, and the same request
        sent again must not turn a clean end into a death by signal. See also `_ignore_after_exit`.
        """
        self.disarm()
        if self._pipe is not None:
            self._stop_watching(*self._pipe)
            self._pipe = None
        self._over = True
        if self.received is None:
            self._restore_handlers()

    def redeliver(self) -> None:
        """Let a received signal do what it would have done without Tierckpt. A handler of the
        script was called when the signal arrived, and is not called again."""
        if self.received is None or self._over:
            return
        previous = _live_handler(self._previous[self.received], self.received)
        if previous is signal.default_int_handler or not callable(previous):
            _deliver(self.received, previous)

    # --- handlers ------------------------------------------------------------------------------

    def _install(self, number: signal.Signals) -> None:
        found = signal.getsignal(number)
        if found is signal.SIG_IGN:
            self.unhandled[number] = "this process ignores it"
        elif found is None or (found is signal.SIG_DFL and _caught(number)):
            self.unhandled[number] = "a handler outside Python is installed (faulthandler's?)"
        else:
            self._previous[number] = _live_handler(found, number)
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the signal. Runs on the main thread, between any two instructions."""
        which = signal.Signals(number)
        now = time.monotonic()
        first = self._first_seconds.setdefault(which, now)
        previous = _live_handler(self._previous[which], number)
        handled = callable(previous) and previous is not signal.default_int_handler
        starting = not self._boundary_seconds and not self._disarmed and not handled
        if starting or now - first > REPEATED_SECONDS or os.getpid() != self._pid:
            _deliver(which, previous)
            return
        self.received = self.received or which
        self.on_received()
        if handled:
            previous(number, frame)

    def _restore_handlers(self) -> None:
        for number, previous in self._previous.items():
            # A handler that was chained to this one stays in place.
            if signal.getsignal(number) == self._on_signal:
                # closed on another thread than the one that made it
                with contextlib.suppress(ValueError):
                    signal.signal(number, _live_handler(previous, number))

    # --- the thread ----------------------------------------------------------------------------

    def _start_watching(self) -> None:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        others = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if others != -1:  # perhaps an event loop's, which needs it more
            signal.set_wakeup_fd(others)
        self._thread = threading.Thread(
            target=self._watch, args=(self._pipe[0],), name="tierckpt-signals", daemon=True
        )
        self._thread.start()
        _watching.add(self)

    def _stop_watching(self, read_fd: int, write_fd: int) -> None:
        _watching.discard(self)
        ours = True
        with contextlib.suppress(ValueError):
            current = signal.set_wakeup_fd(-1)
            ours = False
            if current != write_fd:
                signal.set_wakeup_fd(current)
            elif heir := next((s._pipe for s in _watching if s._pipe is not None), None):
                signal.set_wakeup_fd(heir[1], warn_on_full_buffer=False)
        os.write(write_fd, END)
        if self._thread is not None:
            self._thread.join()
        os.close(read_fd)
        if ours:
            # Only the main thread can change the wakeup descriptor, so signals are still written to
            # this number; the next file with this number would receive them.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), write_fd)
        else:
            os.close(write_fd)

    def _watch(self, read_fd: int) -> None:
        """Sleep until SIGTERM arrives; then end the process if it passes no boundary in time."""
        since, said = 0.0, False
        while True:
            wait = max(self._deadline(since) - time.monotonic(), 0.05) if since else None
            if select.select([read_fd], [], [], wait)[0]:
                numbers = os.read(read_fd, 64)
                if END in numbers:
                    return
                if not (said or self._disarmed) and not self._previous.keys().isdisjoint(numbers):
                    said = True
                    if text := too_long(self._last_seconds, self._grace_seconds):
                        logger.warning("this process received a signal; %s", text)
                if signal.SIGTERM in numbers and signal.SIGTERM in self._previous and not since:
                    since = time.monotonic()
            if since and not self._disarmed and time.monotonic() > self._deadline(since):
                # Except if the script has since installed a handler that does not call this one.
                if self.received is None and _owner(signal.getsignal(signal.SIGTERM)) is None:
                    since = 0.0
                    continue
                self._end(signal.SIGTERM)

    def _deadline(self, since: float) -> float:
        if not self._boundary_seconds:
            # The script's own handler ran, so it does not hang; its start may take long.
            handled = signal.SIGTERM in self._first_seconds
            return (time.monotonic() if handled else since) + STARTING_SECONDS
        patience = max(self._patience_seconds, 2 * self._longest_seconds)
        return max(since, self._boundary_seconds) + patience

    def _end(self, number: signal.Signals) -> None:
        logger.error(
            "%s came, and no boundary is passed: this process ends without a last checkpoint; "
            "versions in memory and on disk stay",
            number.name,
        )
        # Only the main thread can restore handlers, and it hangs.
        os._exit(128 + number)


def too_long(iteration_seconds: float, grace_seconds: float) -> str:
    """The consequence if two iterations do not fit into a signal's grace period, with the remedy;
    empty if they do."""
    if 2 * iteration_seconds <= grace_seconds:
        return ""
    return (
        f"an iteration takes {iteration_seconds:.3g} s, and a last checkpoint comes up to two "
        f"iterations after a signal: it may not be complete within halt_grace_seconds "
        f"({grace_seconds:g} s), and then a restart takes an older version. Send the signal "
        "earlier (Slurm: --signal=TERM@SECONDS), or set halt_grace_seconds and the sender's own "
        "limit to more (torchrun: TORCH_ELASTIC_SHUTDOWN_TIMEOUT)"
    )


def _deliver(number: signal.Signals, handler: Any) -> None:
    """Let a signal do what this handler does with it. Main thread."""
    signal.signal(number, handler)
    os.kill(os.getpid(), number)
    if os.getpid() == 1 and handler is signal.SIG_DFL:  # no signal ends a container's first process
        os._exit(128 + number)


def _owner(handler: Any) -> Signals | None:
    """The object that a handler belongs to, if it is one of ours."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Signals) else None


def _live_handler(handler: Any, number: int) -> Any:
    """The handler itself; for one of a closed object, the handler before it."""
    while (owner := _owner(handler)) is not None and owner._over:
        handler = owner._previous[signal.Signals(number)]
    return handler


@atexit.register
def _ignore_after_exit() -> None:
    """At exit, Python removes its handlers. Ignore the signals of handlers kept by `Signals.close`
    from here on, in the kernel."""
    for number in signal.valid_signals():
        owner = _owner(signal.getsignal(number))
        if owner is not None and owner.received is not None and owner._pid == os.getpid():
            with contextlib.suppress(ValueError):  # not on the main thread
                signal.signal(number, signal.SIG_IGN)


def _caught(number: signal.Signals) -> bool:
    """True if the process has a handler for it, installed by any code."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _release_in_child(signals: Signals | None) -> None:
    """In a forked child: restore the handlers, and do not write to the parent's pipe."""
    if signals is not None and signals._pipe is not None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        for fd in signals._pipe:
            os.close(fd)
        signals._pipe = None
        signals._restore_handlers()


def _shield_worker(signals: Signals) -> None:
    """In a child of multiprocessing, perhaps a DataLoader's worker."""
    if signals.received is not None or not signals._over:
        shield_worker(signals._previous, signals._pid)
