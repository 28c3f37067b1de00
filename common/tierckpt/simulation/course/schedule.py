"""Schedule: which versions exist at a moment, without an event for each. Pure.

A *position* is the wall time that an undisturbed job needs to get there from its start, stalls
included. Versions are taken at multiples of their level's interval, as in a job: so the position of
a version, and the newest version at a position, do not depend on the course of the job.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Rung:
    """The versions of one level."""

    name: str
    every_steps: int
    stall_seconds: float
    latency_seconds: float
    flush_seconds: float = 0.0
    """The last part of the latency, in which the shared store takes part."""


@dataclass(frozen=True)
class Schedule:
    """Versions of all levels."""

    step_seconds: float
    rungs: tuple[Rung, ...]

    @cached_property
    def pace_seconds(self) -> float:
        """Average duration of a step, with its share of the stalls."""
        stalls = (rung.stall_seconds / rung.every_steps for rung in self.rungs)
        return self.step_seconds + sum(stalls)

    @cached_property
    def _most_stall_seconds(self) -> float:
        return sum(rung.stall_seconds for rung in self.rungs)

    def stalls_seconds(self, version: int) -> float:
        """All stalls up to the version's own."""
        return sum(r.stall_seconds * (version // r.every_steps) for r in self.rungs)

    def position(self, version: int) -> float:
        """The moment at which the version's own stall is over."""
        return version * self.step_seconds + self.stalls_seconds(version)

    def newest(self, position: float, every_steps: int = 1) -> int:
        """The newest multiple of `every_steps` at this position; 0 if there is none."""
        if position <= 0:
            return 0
        # position(v) lies between v * pace - all stalls and v * pace.
        low = int(position / self.pace_seconds) // every_steps
        high = int((position + self._most_stall_seconds) / self.pace_seconds) // every_steps + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.position(middle * every_steps) <= position:
                low = middle
            else:
                high = middle
        while low > 0 and self.position(low * every_steps) > position:  # rounding
            low -= 1
        return low * every_steps
