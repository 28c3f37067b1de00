"""A file that a child appends to, so that a dead file system stops the child alone.

The child is `cat`, with the open file as its output. This process writes to a pipe and never waits:
what the pipe does not take is kept in memory. A killed process loses nothing, as the child still
writes what is in the pipe. `storage.answers` has the same idea for questions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import subprocess
import time
import weakref
from typing import BinaryIO

MAX_KEPT_BYTES = 1 << 22
"""More than this is not kept for a file system that does not answer."""
NO_ANSWER = "the file system does not answer"
END_SECONDS = 2.0
"""The end waits so long for the child."""


_appenders: weakref.WeakSet[Appender] = weakref.WeakSet()


class Appender:
    """Writes to the end of a file. One thread at a time."""

    def __init__(self, file: BinaryIO, by_child: bool) -> None:
        """Take over a file that was opened to append, unbuffered. Without `by_child`, or where no
        child can be started, this process writes."""
        self.name = str(file.name)
        self.nbytes = os.fstat(file.fileno()).st_size
        """Length of the file, with what is on its way."""
        self._kept = bytearray()
        self._file: BinaryIO | None = file
        self._child: subprocess.Popen[bytes] | None = None
        cat = shutil.which("cat", path="/usr/bin:/bin") if by_child else None
        if cat is not None:
            with contextlib.suppress(OSError):
                self._start(cat, file)

    def _start(self, cat: str, file: BinaryIO) -> None:
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            [cat], stdin=pipe, stdout=file, stderr=pipe, bufsize=0, start_new_session=True
        )
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        _appenders.add(self)
        self._file = None
        file.close()

    @property
    def is_late(self) -> bool:
        """True while the file system does not take what was written."""
        return bool(self._kept)

    def write(self, data: bytes) -> None:
        """Append, now or as soon as the file system answers. Raises OSError if it refused this or
        something before, and nothing can be appended any more."""
        self.nbytes += len(data)
        if self._child is None:
            self._write_here(data)
            return
        self._kept += data
        if not self._push():
            raise OSError(self._end() or "the process that writes it was ended")
        if len(self._kept) > MAX_KEPT_BYTES:
            raise OSError(errno.ETIMEDOUT, NO_ANSWER)

    def _push(self) -> bool:
        """Give the child what it takes now. False if it has ended."""
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            while self._kept:
                del self._kept[: os.write(self._child.stdin.fileno(), self._kept)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return False
        return True

    def _write_here(self, data: bytes) -> None:
        assert self._file is not None
        written = self._file.write(data)
        if written != len(data):
            with contextlib.suppress(OSError):  # the next line must start on a new one
                self._file.truncate(self._file.tell() - written)
            raise OSError("not everything could be written")

    def close(self) -> None:
        """End the child, and wait a moment for that. Raises OSError if something that `write` took
        is not in the file."""
        if self._file is not None:
            self._file.close()
        if self._child is None:
            return
        assert self._child.stdin is not None
        give_up = time.monotonic() + END_SECONDS
        while self._push() and self._kept and (left := give_up - time.monotonic()) > 0:
            select.select([], [self._child.stdin], [], left)
        reason = self._end()
        if reason or self._kept:
            raise OSError(reason or NO_ANSWER)

    def _end(self) -> str:
        """End the child. Returns the reason of a failure; empty without one. A hanging child is
        left alone."""
        child, self._child = self._child, None
        assert child is not None
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.close()
        with child.stderr:
            try:
                status = child.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                child.returncode = 0
                return NO_ANSWER
            said = child.stderr.read().decode(errors="replace").strip()
            return said.rpartition(": ")[2] or f"exit status {status}" if status else ""


def _close_in_fork() -> None:
    """A forked process, as a loader's worker, must not keep the child from its end."""
    for each in _appenders:
        if each._child is not None and each._child.stdin is not None:
            each._child.stdin.close()
            each._child = None


os.register_at_fork(after_in_child=_close_in_fork)

__all__ = ["Appender"]
