"""Signals: the word of a launcher or a scheduler that this process is to end, kept for a boundary.

A signal that is heard here does not end the process: it is remembered in `came`, and what was there
to handle it is called, too. The process ends at once, as it would have without us, when

- it has not passed a boundary yet, so there is nothing to save, and the script has no handler of
  its own, which may want it to go on;
- the same signal comes again, later than REPEATED_SECONDS after the first;
- SIGTERM came, and no boundary is passed for `patience_seconds`: it hangs in a collective whose
  other side is gone. A handler in Python would never be run then, so a thread sees to that, which
  the interpreter's own C handler wakes through a pipe (`signal.set_wakeup_fd`). A launcher that
  ends the survivors of a failure does not wait for its grace period to pass. Other signals are no
  launcher's, and leave time for what is between two boundaries (an evaluation). Once the ranks
  have agreed to end, there is time, too.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from multiprocessing import util
from types import FrameType
from typing import Any

from . import dataloader_workers

logger = logging.getLogger("tierckpt")

REPEATED_SECONDS = 5.0
"""The same signal within so long is the same request: a scheduler may signal every process of a
job, and a launcher among them hands on what it got."""
STARTING_SECONDS = 1.0
"""The same before the first boundary."""
END = b"\0"
"""What the thread reads when it is to end; there is no such signal."""
_watching: weakref.WeakSet[Signals] = weakref.WeakSet()
"""Those with a pipe, of which the interpreter's C handler writes to one."""


class Signals:
    """See the module's text. Made, told and closed on the main thread; elsewhere it hears nothing.

    `close()` puts everything back.
    """

    def __init__(self, wanted: Iterable[signal.Signals], patience_seconds: float = 10.0) -> None:
        """`patience_seconds`: so long, or twice the longest iteration if that is more, a process
        that SIGTERM came to may be without a boundary."""
        self.came: signal.Signals | None = None
        """The first one that came."""
        self.left_alone: dict[signal.Signals, str] = {}
        """What is not heard, and why."""
        self._previous: dict[signal.Signals, Any] = {}
        self._first_seconds: dict[signal.Signals, float] = {}
        self._patience_seconds = patience_seconds
        self._pid = os.getpid()
        self._boundary_seconds = 0.0
        """When the last boundary was passed; 0 before the first."""
        self._longest_seconds = 0.0
        self._calm = self._over = False
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        wanted = tuple(wanted)
        if threading.current_thread() is not threading.main_thread():
            self.left_alone = dict.fromkeys(wanted, "only the main thread can ask for signals")
            return
        for number in wanted:
            self._install(number)
        if self._previous:
            self._start_watching()
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go_in_child(mine()))
        util.register_after_fork(self, _shield_worker)  # comes after the above

    @property
    def came_seconds(self) -> float | None:
        """When the first one came, by `time.monotonic()`; None while none has."""
        return None if self.came is None else self._first_seconds[self.came]

    # --- what the training tells ---------------------------------------------------------------

    def passed_boundary(self) -> None:
        """An iteration has ended."""
        now = time.monotonic()
        if self._boundary_seconds:
            passed = now - self._boundary_seconds
            self._longest_seconds = max(self._longest_seconds, passed)
        self._boundary_seconds = now

    def be_calm(self) -> None:
        """The end has begun: no further boundary is expected."""
        self._calm = True

    def close(self) -> None:
        """Put back what was there before.

        But where a signal came, the process is about to end: until it does, the same request sent
        once more must not turn a clean end into a death by signal. See `_outlast_python`, too.
        """
        self.be_calm()
        if self._pipe is not None:
            self._stop_watching(*self._pipe)
            self._pipe = None
        self._over = True
        if self.came is None:
            self._restore_handlers()

    def hand_on(self) -> None:
        """Have the signal that came, if one did, do what it would have done without us. A handler
        of the script's was called when it came, and is not called again."""
        if self.came is None or self._over:
            return
        previous = _behind_the_ended(self._previous[self.came], self.came)
        if previous is signal.default_int_handler or not callable(previous):
            signal.signal(self.came, previous)
            os.kill(os.getpid(), self.came)

    # --- handlers ------------------------------------------------------------------------------

    def _install(self, number: signal.Signals) -> None:
        found = signal.getsignal(number)
        if found is signal.SIG_IGN:
            self.left_alone[number] = "this process was told to ignore it"
        elif found is None or (found is signal.SIG_DFL and _caught(number)):
            self.left_alone[number] = "a handler that is not Python's is there (faulthandler's?)"
        else:
            self._previous[number] = _behind_the_ended(found, number)
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Main thread, between two instructions of anything: it only remembers."""
        which = signal.Signals(number)
        now = time.monotonic()
        first = self._first_seconds.setdefault(which, now)
        previous = _behind_the_ended(self._previous[which], number)
        handled = callable(previous) and previous is not signal.default_int_handler
        starting = not self._boundary_seconds and not self._calm and not handled
        if starting or now - first > REPEATED_SECONDS or os.getpid() != self._pid:
            signal.signal(which, previous)
            os.kill(os.getpid(), which)
            return
        self.came = self.came or which
        if handled:
            previous(number, frame)

    def _restore_handlers(self) -> None:
        for number, previous in self._previous.items():
            # Somebody who chained to us stays where they are.
            if signal.getsignal(number) == self._on_signal:
                with contextlib.suppress(ValueError):  # closed on another thread than made
                    signal.signal(number, _behind_the_ended(previous, number))

    # --- the thread ----------------------------------------------------------------------------

    def _start_watching(self) -> None:
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        others = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if others != -1:  # an event loop's, perhaps; it needs it more
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
            # Only the main thread may say otherwise, so signals are written to this number still,
            # and whoever got it next would have them in a file.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), write_fd)
        else:
            os.close(write_fd)

    def _watch(self, read_fd: int) -> None:
        """Sleep until SIGTERM comes; then see to it that the process gets to a boundary."""
        since = 0.0
        while True:
            wait = max(self._deadline(since) - time.monotonic(), 0.05) if since else None
            if select.select([read_fd], [], [], wait)[0]:
                numbers = os.read(read_fd, 64)
                if END in numbers:
                    return
                if signal.SIGTERM in numbers and signal.SIGTERM in self._previous and not since:
                    since = time.monotonic()
            if since and not self._calm and time.monotonic() > self._deadline(since):
                # Unless the script has a handler of its own by now, which does not call ours.
                if self.came is None and _owner(signal.getsignal(signal.SIGTERM)) is None:
                    since = 0.0
                    continue
                self._end(signal.SIGTERM)

    def _deadline(self, since: float) -> float:
        if not self._boundary_seconds:
            # The script's own handler was called, so it doesn't hang: it may be long in starting.
            handled = signal.SIGTERM in self._first_seconds
            return (time.monotonic() if handled else since) + STARTING_SECONDS
        patience = max(self._patience_seconds, 2 * self._longest_seconds)
        return max(since, self._boundary_seconds) + patience

    def _end(self, number: signal.Signals) -> None:
        logger.error(
            "%s came, and no boundary is being passed: this process ends without a last "
            "checkpoint; what is in memory and on disk stays",
            number.name,
        )
        # Handlers can only be put back by the main thread, which does not come.
        os._exit(128 + number)


def _owner(handler: Any) -> Signals | None:
    """Whose handler it is, of ours."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, Signals) else None


def _behind_the_ended(handler: Any, number: int) -> Any:
    """Itself; or what was there before, where it is one of ours that is closed."""
    while (owner := _owner(handler)) is not None and owner._over:
        handler = owner._previous[signal.Signals(number)]
    return handler


@atexit.register
def _outlast_python() -> None:
    """Python is about to end, and to take its handlers away: where those of ours are still there as
    a signal came (see `Signals.close`), it is ignored from here on, by the system itself."""
    for number in signal.valid_signals():
        owner = _owner(signal.getsignal(number))
        if owner is not None and owner.came is not None and owner._pid == os.getpid():
            with contextlib.suppress(ValueError):  # not on the main thread
                signal.signal(number, signal.SIG_IGN)


def _caught(number: signal.Signals) -> bool:
    """True when the process has a handler for it, whoever installed it."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _let_go_in_child(signals: Signals | None) -> None:
    """A forked child ends when told to, and must not write to our pipe."""
    if signals is not None and signals._pipe is not None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        for fd in signals._pipe:
            os.close(fd)
        signals._pipe = None
        signals._restore_handlers()


def _shield_worker(signals: Signals) -> None:
    """The child is multiprocessing's, perhaps a DataLoader's worker; see `dataloader_workers`."""
    if signals.came is not None or not signals._over:
        dataloader_workers.shield(signals._previous, signals._pid)
