"""Windows: the newest values of something noisy, as many as are alike, and what they tell.

Noise goes down with the number of values, so the window is long. Where its newest values differ
from the older ones by more than noise does, the older ones are dropped: what really changes is
followed as fast as by a short one. The idea is ADWIN's (A. Bifet and R. Gavaldà, SDM 2007).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import median

MEDIAN_ERROR = 1.2533
"""Standard error of a median by that of a mean."""
CERTAIN = 4.0
"""A difference of so many standard errors is none of chance."""


class RollingStats:
    """At most `most` values; `fresh` of them are enough to say that all has changed."""

    def __init__(self, most: int, fresh: int) -> None:
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._most, self._fresh = most, fresh
        self._unchecked = 0

    def __len__(self) -> int:
        return len(self._values)

    def append(self, value: float) -> None:
        """Add the newest."""
        if len(self._values) == self._most:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)
        self._unchecked += 1
        if self._unchecked >= self._fresh:
            self._unchecked = 0
            self._forget_others()

    def _forget_others(self) -> None:
        """Few values show a great change, more of them a smaller one."""
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
        """0 without any."""
        n = len(self._sorted)
        return (self._sorted[(n - 1) // 2] + self._sorted[n // 2]) / 2 if n else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation, if they are normal; from quartiles, which outliers spare."""
        return _spread(self._sorted)

    def error(self, spread: float = 0.0) -> float:
        """Standard error of the median, if values spread at least like that."""
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
    """An estimate that stays what it is until noise no longer explains the difference.

    Upwards it follows sooner: what costs more than was thought goes beyond a budget.
    """

    UP, DOWN = 1.5, 2.5
    """Standard errors."""

    def __init__(self) -> None:
        self.value = 0.0
        self._known = False

    def follow(self, estimate: float, error: float) -> float:
        """Returns the value, given what is estimated now."""
        up, down = self.value + self.UP * error, self.value - self.DOWN * error
        if not self._known or not down <= estimate <= up:
            self.value, self._known = estimate, True
        return self.value
