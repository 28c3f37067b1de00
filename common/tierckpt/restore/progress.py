"""The progress bar of a restore: rank 0's, on a terminal, when it takes long enough to be seen."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress

PATIENCE_SECONDS = 1.0
"""Shorter restores show no bar, and do not pay for importing one (0.2 s)."""


class Progress:
    """A bar on standard error, or nothing. Any thread may call `advance`, one thread the rest.

    Raises nothing: if the terminal is gone, the bar ends and the restore continues.
    """

    def __init__(self, shown: bool, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """If `shown` is False, every call does nothing."""
        self._shown = shown
        self._after = time.monotonic() + patience_seconds
        self._lock = threading.Lock()
        self._bar: rich.progress.Progress | None = None
        self._phase, self._done, self._total = "", 0, 0
        self._task: rich.progress.TaskID | None = None

    @staticmethod
    def wanted(rank: int, asked: bool | None) -> bool:
        """Whether this rank shows a bar: only rank 0, if `asked`, or if it is None and there is a
        terminal."""
        return rank == 0 and (_on_a_terminal() if asked is None else asked)

    @contextlib.contextmanager
    def _careful(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (Exception, SystemExit):  # the second error: an older console, for a broken pipe
                self._shown = False

    def start_phase(self, phase: str, total_bytes: int = 0) -> None:
        """Start a phase; 0 bytes: the total is unknown."""
        if self._shown:
            with self._careful():
                self._phase, self._done, self._total = phase, 0, total_bytes
                self._task = None
                self._show()

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` as done."""
        if self._shown:
            with self._careful():
                self._done += nbytes
                self._show()

    def close(self) -> None:
        """Remove the bar."""
        with self._careful():
            self._shown = False
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.stop()

    def _show(self) -> None:
        if self._bar is None:
            if time.monotonic() < self._after:
                return
            self._bar = _bar()
            self._bar.start()
        if self._task is None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task(self._phase, total=self._total or None)
        self._bar.update(self._task, completed=self._done)


def _on_a_terminal() -> bool:
    """True if standard error is a terminal; False also if it is closed or missing."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError, OSError):
        return False


def _bar() -> rich.progress.Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            """A console that does not close the script's standard output and end the script, as a
            command's console does."""
            raise BrokenPipeError

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Quiet(file=sys.stderr),
        transient=True,
        redirect_stdout=False,  # the streams belong to the script
        redirect_stderr=False,
    )
