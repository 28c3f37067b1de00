"""Whether a folder answers: another process looks into it first.

A system call on a dead file system may never return, and then signals and even SIGKILL wait for
it. So each process that must not hang lets a child touch a folder before it does so itself. A
child that hangs is left alone; its end shows that the folder answers again. Clients of object
stores wait in no system call: a thread calls those. Any thread.

What is left: a file system that dies between a child's look and the call after it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from msgspec import Struct

from tierckpt._text import is_url

__all__ = ["PATIENCE_SECONDS", "NoAnswerError", "ask_by_threads", "ensure", "is_silent", "silent"]


Result = TypeVar("Result")

PATIENCE_SECONDS = 5.0
"""Time for an answer, where no setting says another one."""
START_SECONDS = 20.0
"""A start continues without a persistent level, and without places for events and traces, that do
not answer in this time."""
SAY_SECONDS = 3.0
"""A longer wait is reported."""
NAP_SECONDS = 0.02
PROBE = ".tierckpt-answers"
"""The name that a child asks for. No folder has it, so no cache of the kernel has the answer."""
_PYTHON = "import os, sys; [os.path.lexists(name) for name in sys.argv[1:]]"

_lock = threading.Lock()
_never = threading.Event()
"""For short pauses."""


class _Child:
    """A process that asks for one name."""

    def __init__(self, name: str) -> None:
        """Start it. Raises OSError."""
        nowhere = subprocess.DEVNULL
        command = [*_command(), name]
        self._process = subprocess.Popen(
            command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
        )

    def wait(self, seconds: float) -> None:
        """Return when it has ended. Raises TimeoutExpired. Any thread."""
        end, pause = time.monotonic() + seconds, 0.0005
        while self._process.poll() is None:
            left = end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self._process.args, seconds)
            pause = min(2 * pause, NAP_SECONDS, left)
            _never.wait(pause)


class _Helper:
    """A process that asks for names in one folder, one after the other. It was started in time: a
    child of a process with a file open in a dead file system may hang before it does anything."""

    def __init__(self) -> None:
        """Start it. Raises OSError."""
        ask = " ".join(map(shlex.quote, _command()))
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f'while IFS= read -r name; do {ask} "$name" >&2; echo; done'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)  # two threads may see one answer
        self._lock = threading.Lock()
        self._asked = self._answered = self._waiting = 0
        self._closed = self._ended = False

    def ask(self, name: str) -> _Question:
        """Ask for a name, after those before."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._asked += 1
            self._process.stdin.write(os.fsencode(name) + b"\n")
        return _Question(self, self._asked)

    def has_answered(self, number: int, seconds: float) -> bool:
        """Whether it has answered so many questions, or has ended; waits for that. Any thread."""
        assert self._process.stdout is not None
        end, answers = time.monotonic() + seconds, self._process.stdout
        with self._lock:
            self._waiting += 1
        try:
            while True:
                with self._lock:
                    if not self._closed and (found := answers.read(64)) is not None:
                        self._answered += len(found)
                        self._ended = not found
                    if self._closed or self._ended or self._answered >= number:
                        return True
                left = end - time.monotonic()
                if left <= 0:
                    return False
                # Another thread may read our answer.
                select.select([answers], [], [], min(left, NAP_SECONDS))
        finally:
            with self._lock:
                self._waiting -= 1
                if self._closed and not self._waiting:
                    self._close_pipes()

    def close(self) -> None:
        """End it: at once, even if it hangs, and while a thread waits for it."""
        self._process.kill()
        with self._lock:
            self._closed = True
            if not self._waiting:
                self._close_pipes()
        self._process.wait()  # the shell itself is in no call to the file system

    def _close_pipes(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


class _Question(Struct, frozen=True):
    """A question to a helper. `wait` as of a child."""

    helper: _Helper
    number: int

    def wait(self, seconds: float) -> None:
        if not self.helper.has_answered(self.number, seconds):
            raise subprocess.TimeoutExpired("helper", seconds)


class _Call(threading.Thread, Generic[Result]):
    """A call of a store's client. `wait` as of a child."""

    result: Result
    error: Exception | None = None

    def __init__(self, call: Callable[[], Result]) -> None:
        super().__init__(name="tierckpt-answers", daemon=True)
        self._call = call

    def run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # a client's own errors, too
            self.error = error

    def wait(self, seconds: float) -> None:
        self.join(seconds)
        if self.is_alive():
            raise subprocess.TimeoutExpired(self.name, seconds)


Asked = tuple[_Child | _Question | _Call[Any], float]
"""A child, a helper or a call, and the time of the question (monotonic)."""
_helpers: dict[str, _Helper] = {}
_asked: dict[str, Asked] = {}
"""Those that have not ended, by folder or URL."""


_by_threads = False


class NoAnswerError(TimeoutError):
    """A folder does not answer."""

    def __init__(self, folder: str, seconds: float | None = None) -> None:
        self.folder, self.seconds = folder, seconds
        super().__init__(errno.ETIMEDOUT, "does not answer", folder)

    def __str__(self) -> str:
        since = "" if self.seconds is None else f" within {self.seconds:g} s"
        return f"{self.folder}: it does not answer{since}: the file system or its server hangs"


def ask_by_threads(wanted: bool) -> None:
    """Let threads ask from now on, for a job that starts no process (`agent="inline"`). One that
    hangs may keep the process from its end."""
    global _by_threads
    _by_threads = wanted


def silent(folders: Iterable[str], seconds: float) -> list[str]:
    """The folders that do not answer within `seconds` after they were asked, perhaps by an earlier
    call. URLs are not asked here, see `within`."""
    wanted = [each for each in dict.fromkeys(folders) if each and not is_url(each)]
    asked = {each: _ask(each) for each in wanted}
    return [each for each, child in asked.items() if not _ended(each, child, seconds)]


def ensure(folder: str, seconds: float, say: Callable[[str], None] = lambda text: None) -> None:
    """Return once the folder answers. Raises NoAnswerError after `seconds`; `say` is called with a
    text when a wait takes long."""
    if not silent([folder], min(SAY_SECONDS, seconds)):
        return
    if seconds > SAY_SECONDS:
        say(f"{folder} does not answer: waiting for it, at most {seconds:g} s")
        if not silent([folder], seconds):
            return
    raise NoAnswerError(folder, seconds)


def within(
    place: str,
    seconds: float,
    call: Callable[[], Result],
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """The result of the first call to a store, in a thread. Raises its error, or NoAnswerError
    after `seconds`; for `say` see `ensure`."""
    made = _Call(call)
    asked = made, time.monotonic()
    with _lock:
        made.start()  # another thread may wait for it as soon as it is noted
        _asked[_key(place)] = asked
    if not _ended(place, asked, min(seconds, SAY_SECONDS)):
        if seconds > SAY_SECONDS:
            say(f"{place} does not answer: waiting for it, at most {seconds:g} s")
        if not _ended(place, asked, seconds):
            raise NoAnswerError(place, seconds)
    if made.error is not None:
        raise made.error
    return made.result


def keep(folders: Iterable[str]) -> list[str]:
    """Start a process for each folder that will be asked again and again, and at the end. Returns
    those that got one, for `drop`."""
    kept = []
    for folder in folders:
        key = _key(folder)
        with _lock, contextlib.suppress(OSError):
            if not (_by_threads or is_url(folder) or key in _helpers):
                _helpers[key] = _Helper()
                kept.append(folder)
    return kept


def drop(folders: Iterable[str]) -> None:
    """End these processes."""
    for folder in folders:
        with _lock:
            _asked.pop(_key(folder), None)
            helper = _helpers.pop(_key(folder))
        helper.close()


def is_silent(folder: str) -> bool:
    """True while an earlier look into the folder has not ended. Asks nothing; a look just started
    has `SAY_SECONDS` to end: others ask, too, and a busy machine is no dead one."""
    with _lock:
        asked = _asked.get(_key(folder))
    return asked is not None and not _ended(folder, asked, SAY_SECONDS)


def _key(place: str) -> str:
    return place if is_url(place) else os.path.abspath(place)


def _ask(folder: str) -> Asked | None:
    with _lock:
        asked = _asked.get(_key(folder))
        if asked is None:
            name = os.path.join(folder, f"{PROBE}-{time.monotonic_ns()}")
            if (helper := _helpers.get(_key(folder))) is not None:
                asked = _asked[_key(folder)] = helper.ask(name), time.monotonic()
                return asked
            with contextlib.suppress(OSError):  # no processes: as if it answered
                child = _Call(lambda: os.path.lexists(name)) if _by_threads else _Child(name)
                if isinstance(child, _Call):
                    child.start()
                asked = _asked[_key(folder)] = child, time.monotonic()
        return asked


def _command() -> list[str]:
    """A small program that asks for a name: a child takes 2 ms instead of Python's 15."""
    program = shutil.which("stat", path="/usr/bin:/bin")
    return [program] if program else [sys.executable, "-I", "-S", "-c", _PYTHON]


def _ended(folder: str, asked: Asked | None, seconds: float) -> bool:
    """Whether the answer came within `seconds` after the question, or by now."""
    if asked is None:
        return True
    child, since = asked
    try:
        child.wait(max(since + seconds - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return False
    with _lock:
        if _asked.get(_key(folder)) is asked:
            del _asked[_key(folder)]
    return True
