"""How long a run still takes, told from how long its parts took so far."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Pace:
    """Parts have names and come again and again; the newest duration of each is believed."""

    def __init__(self, ahead: Iterable[str]) -> None:
        """ahead: the name of every part that is still to come, as often as it comes."""
        self._ahead = Counter(ahead)
        self._took: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around one part, failed or not."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._took[name] = time.perf_counter() - begin
            self._ahead[name] -= 1

    def drop(self, name: str) -> None:
        """This part will not come any more."""
        del self._ahead[name]

    def left_seconds(self) -> float | None:
        """Of what is ahead; parts not seen yet count as the mean of the others. None: no idea."""
        if not self._took:
            return None
        mean = sum(self._took.values()) / len(self._took)
        return sum(times * self._took.get(name, mean) for name, times in self._ahead.items())

    def text(self) -> str:
        """For a progress line."""
        left = self.left_seconds()
        if left is None:
            return "no idea yet how long it takes"
        return f"about {left:.0f} s to go" if left < 100 else f"about {left / 60:.0f} min to go"
