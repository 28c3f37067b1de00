"""Spans: the time between two restores, divided into training, stalls and lost work. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from .records import Sample, Span


class Ending(Enum):
    """The end of a span."""

    CLOSED = "closed"
    FAILED = "failed"
    ROLLED_BACK = "rolled back"
    """A restore in the same process."""
    OPEN = "open"
    """The newest records of the job: it runs, or it failed and nobody has started it again."""


@dataclass
class Division:
    """Seconds by category, and steps."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    made: int = 0
    lost: int = 0


@dataclass(frozen=True)
class _Window:
    """Time between two boundaries with records."""

    seconds: float
    first: int
    last: int
    stall_seconds: float

    @property
    def steps(self) -> int:
        return self.last - self.first


class _Stalls:
    """The slowest rank's stalls up to a version, linear between its records."""

    def __init__(self, span: Span) -> None:
        known = {span.version: 0.0} | {s.version: s.stall_seconds for s in span.samples}
        self._versions, self._seconds = list(known), list(known.values())

    def until(self, version: int) -> float:
        i = bisect_left(self._versions, version)
        if i == len(self._versions):
            return self._seconds[-1]
        if i == 0 or self._versions[i] == version:
            return self._seconds[i]
        begin, end = self._versions[i - 1], self._versions[i]
        share = (version - begin) / (end - begin)
        return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])


def usual_step_seconds(span: Span) -> float | None:
    """Mean duration of a step without stalls, after the first record; None if that is unknown."""
    if len(span.samples) < 2 or span.samples[-1].version <= span.samples[0].version:
        return None
    first, last = span.samples[0], span.samples[-1]
    seconds = last.at - first.at - (last.stall_seconds - first.stall_seconds)
    return max(0.0, seconds) / (last.version - first.version)


def divide(
    span: Span,
    slowest: Span,
    end: float,
    newest: int,
    kept: float,
    ending: Ending,
    usual_seconds: float | None,
    least_exact_seconds: float,
) -> Division:
    """Divide the time from the span's begin to `end`.

    Args:
        slowest: the same span of the rank with the longest stalls.
        newest: the newest version that any rank reached.
        kept: steps up to this version count; later ones were made again.
        ending: why the span ended.
        usual_seconds: usual duration of a step.
        least_exact_seconds: period of the records, if the end is that of a killed process.
    """
    result = Division(made=newest - span.version)
    result.lost = max(0, newest - int(max(min(kept, newest), span.version)))
    if not span.samples and newest <= span.version:
        result.seconds["first_step"] += end - span.begin
        return result
    points = [Sample(span.begin, span.version, 0.0), *span.samples]
    if newest > points[-1].version:
        at = max(points[-1].at, min(span.end, end))
        points.append(Sample(at, newest, points[-1].stall_seconds))
    for number, window in enumerate(_windows(points, _Stalls(slowest))):
        warm_up = 0.0
        if number == 0 and usual_seconds is not None:
            steps = window.steps * usual_seconds
            warm_up = max(0.0, window.seconds - window.stall_seconds - steps)
        result.seconds["first_step"] += warm_up
        _share(result.seconds, window, window.seconds - warm_up, kept)
    tail = max(0.0, end - points[-1].at)
    rest = _tail(tail, newest, kept, ending, usual_seconds, least_exact_seconds)
    for category, seconds in rest.items():
        result.seconds[category] += seconds
    return result


def _windows(points: Sequence[Sample], stalls: _Stalls) -> list[_Window]:
    found = []
    for begin, end in pairwise(points):
        stall = end.stall_seconds - begin.stall_seconds
        if end.version > begin.version:
            stall = stalls.until(end.version) - stalls.until(begin.version)
        seconds = end.at - begin.at
        within = min(max(stall, 0.0), seconds)
        found.append(_Window(seconds, begin.version, end.version, within))
    return found


def _share(seconds: defaultdict[str, float], window: _Window, rest: float, kept: float) -> None:
    """Divide `rest` of a window between steps that count and lost ones. All that lost steps took is
    lost work, with their stalls."""
    if window.steps:
        share = min(max((kept - window.first) / window.steps, 0.0), 1.0)
    else:
        share = 1.0 if kept > window.last else 0.0
    stall = share * window.stall_seconds
    seconds["checkpoint"] += stall
    seconds["training"] += max(0.0, share * rest - stall)
    seconds["lost"] += (1 - share) * rest


def _tail(
    tail: float,
    newest: int,
    kept: float,
    ending: Ending,
    usual_seconds: float | None,
    least_exact_seconds: float,
) -> dict[str, float]:
    """The time after the last boundary with a record."""
    if ending in (Ending.CLOSED, Ending.OPEN):
        return {"training" if kept >= newest else "lost": tail}
    if ending is Ending.ROLLED_BACK or usual_seconds is None:
        return {"lost": tail}
    # A step that was interrupted, and those without a record; a longer silence is a failure that
    # nobody noticed.
    lost = min(tail, 2 * usual_seconds + least_exact_seconds)
    return {"lost": lost, "noticed": tail - lost}
