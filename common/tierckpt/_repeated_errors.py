"""Complaints: what users' functions raise is shown once, and counted from then on.

They are called at every step: a mistake in one would fill the log with the same traceback.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable

logger = logging.getLogger("tierckpt")


class Complaints:
    """Of one caller. Its thread; never raises."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Hashable, type[Exception]]] = Counter()

    def log(self, whose: Hashable, text: str, error: Exception) -> None:
        """Say that a function failed, in the words of `text`: with a traceback when `whose` raises
        an error of this kind for the first time, then in a line for the 10th, 100th, ... time."""
        kind = (whose, type(error))
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            logger.error("%s", text, exc_info=error)
        elif str(count).strip("0") == "1":
            told = "%s. Such an error %d times so far; the last: %s: %s"
            logger.error(told, text, count, type(error).__name__, error)


__all__ = ["Complaints"]
