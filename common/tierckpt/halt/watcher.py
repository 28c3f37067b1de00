"""A thread that looks for requests to end the job, again and again."""

from __future__ import annotations

import threading

JOIN_SECONDS = 1.0
"""The longest wait for the thread at the end; it may hang in a look."""


class Watcher:
    """Calls `_look`, which must not raise, at once and then periodically. A subclass writes plain
    attributes in `_look`, and the training thread reads them."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def _begin(self, name: str, every_seconds: float) -> None:
        """Start the thread."""
        self._thread = threading.Thread(
            target=self._work, args=(every_seconds,), name=name, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _work(self, every_seconds: float) -> None:
        self._look()
        while not self._over.wait(every_seconds):
            self._look()

    def _look(self) -> None:
        raise NotImplementedError


__all__ = ["Watcher"]
