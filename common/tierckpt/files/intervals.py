"""Intervals: the levels where a version of files is due. One rank's; rank 0's decides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tierckpt.config import Config
from tierckpt.core.levels import INTERVALS, MEMORY, Level

if TYPE_CHECKING:
    from .job import FilesJob


class Intervals:
    """Steps and times since each level took a version. One thread."""

    def __init__(self, config: Config) -> None:
        """Start with no version on any level: the first one is due on all."""
        self._config = config
        self._steps = 0
        self._counted = False
        """The program has called `step` since the last version."""
        self._last_steps: dict[Level, int] = dict.fromkeys(INTERVALS, 0)
        self._last_seconds: dict[Level, float] = dict.fromkeys(INTERVALS, -math.inf)

    def go_on_from(self, job: FilesJob) -> None:
        """Start from a restored version: nothing is due before an interval has passed on levels
        that have it."""
        now = time.monotonic()
        for level in INTERVALS:
            if job.agreement.ledgers[level].safe is not None or level == MEMORY:
                self._last_seconds[level] = now

    def step(self) -> None:
        """Count a step."""
        self._steps += 1
        self._counted = True

    def due(self, uses: Callable[[str], bool]) -> set[Level]:
        """The levels in use where a version is due now."""
        now = time.monotonic()
        return {level for level in INTERVALS if uses(level) and self._is_due(level, now)}

    def _is_due(self, level: Level, now_seconds: float) -> bool:
        table = getattr(self._config, level)
        every, passed = table.every_steps, now_seconds - self._last_seconds[level]
        by_steps = every > 0 and self._steps // every > self._last_steps[level] // every
        return bool(by_steps or 0 < table.every_seconds <= passed)

    def completes(self) -> None:
        """A version ends: it counts as a step if the program counts none itself."""
        if not self._counted:
            self._steps += 1
        self._counted = False

    def taken(self, levels: Collection[Level]) -> None:
        """Record that these levels take the version."""
        now = time.monotonic()
        for level in levels:
            self._last_steps[level], self._last_seconds[level] = self._steps, now


__all__ = ["Intervals"]
