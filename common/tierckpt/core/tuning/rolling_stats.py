"""Rolling statistics: the newest values of a noisy quantity, as long as they do not change.

Noise falls with the number of values, so the window is long. Where its newest values differ from
the older ones by more than noise, the older ones are dropped: a real change is followed as fast as
with a short window. The idea is ADWIN's (A. Bifet and R. Gavaldà, SDM 2007).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import median

MEDIAN_ERROR = 1.2533
"""Ratio of the standard error of a median to that of a mean."""
CERTAIN = 4.0
"""A difference of this many standard errors is not chance."""


class RollingStats:
    """At most `most` values; `fresh` new ones are enough to show a change."""

    def __init__(self, most: int, fresh: int) -> None:
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._most, self._fresh = most, fresh
        self._unchecked = 0

    def __len__(self) -> int:
        return len(self._values)

    def append(self, value: float) -> None:
        """Add the newest value."""
        if len(self._values) == self._most:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)
        self._unchecked += 1
        if self._unchecked >= self._fresh:
            self._unchecked = 0
            self._forget_others()

    def _forget_others(self) -> None:
        """Drop older values that differ. Few values show a great change, more a smaller one."""
        values = list(self._values)
        newest = self._fresh
        while len(values) >= 3 * newest:
            if _differ(values[:-newest], values[-newest:]):
                self._values = deque(values[-newest:])
                self._sorted = sorted(self._values)
                return
            newest *= 2

    @property
    def median(self) -> float:
        """The median; 0 without values."""
        n = len(self._sorted)
        return (self._sorted[(n - 1) // 2] + self._sorted[n // 2]) / 2 if n else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation of normal values; from quartiles, which ignore outliers."""
        return _spread(self._sorted)

    def error(self, spread: float = 0.0) -> float:
        """Return the standard error of the median; `spread` is the least spread to assume."""
        n = len(self._sorted)
        return MEDIAN_ERROR * max(spread, self.spread) / math.sqrt(n) if n else 0.0


def _spread(values: Sequence[float]) -> float:
    n = len(values)
    return (values[-1 - n // 4] - values[n // 4]) / 1.349 if n else 0.0


def _differ(older: Sequence[float], newer: Sequence[float]) -> bool:
    spread = _spread(sorted(older))
    error = MEDIAN_ERROR * spread * math.sqrt(1 / len(newer) + 1 / len(older))
    return abs(median(newer) - median(older)) > CERTAIN * error


class Hysteresis:
    """An estimate that stays constant as long as noise explains the difference.

    Upwards it follows sooner: a cost that was underestimated exceeds the user's budget.
    """

    UP, DOWN = 1.5, 2.5
    """Standard errors."""

    def __init__(self) -> None:
        self.value = 0.0
        self._known = False

    def follow(self, estimate: float, error: float) -> float:
        """Return the value after the new `estimate`."""
        up, down = self.value + self.UP * error, self.value - self.DOWN * error
        if not self._known or not down <= estimate <= up:
            self.value, self._known = estimate, True
        return self.value
