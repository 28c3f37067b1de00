"""Estimate of the time left, from the durations of the parts so far."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Pace:
    """Parts have names and repeat; the newest duration of each is the estimate for the next."""

    def __init__(self, ahead: Iterable[str]) -> None:
        """ahead: the names of all parts to come, each as often as it comes."""
        self._ahead = Counter(ahead)
        self._took: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part, whether it fails or not."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._took[name] = time.perf_counter() - begin
            self._ahead[name] -= 1

    def drop(self, name: str) -> None:
        """Expect this part no more."""
        del self._ahead[name]

    def left_seconds(self) -> float | None:
        """Estimated seconds. New parts count as the mean of the others; None: no part was timed."""
        if not self._took:
            return None
        mean = sum(self._took.values()) / len(self._took)
        return sum(times * self._took.get(name, mean) for name, times in self._ahead.items())

    def text(self) -> str:
        """The estimate as words for a progress line."""
        left = self.left_seconds()
        if left is None:
            return "time left unknown"
        return f"about {left:.0f} s to go" if left < 100 else f"about {left / 60:.0f} min to go"
