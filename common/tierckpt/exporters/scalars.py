"""Scalars: curves over versions, for tools that log the training itself.

Between two exports a curve has one point: a counter's total, the newest value of a gauge, and the
largest observation of a histogram.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping

from tierckpt.callbacks import Job
from tierckpt.events import Event

from .exporter import Exporter, Ranks
from .metrics import Kind, Sample

Points = Mapping[str, tuple[int, float]]
"""Version and value of each curve's new point."""


class ScalarExporter(Exporter):
    """An exporter of curves. By default of rank 0 alone."""

    is_live_exported = False

    def __init__(self, every_seconds: float, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._every_seconds = every_seconds
        self._next_seconds = 0.0
        self._totals: dict[str, float] = {}
        self._points: dict[str, tuple[int, float]] = {}

    def begin(self, job: Job) -> None:
        """See `Exporter`."""
        self._totals, self._points = {}, {}
        self._next_seconds = time.monotonic() + self._every_seconds

    def record(self, sample: Sample, event: Event | None) -> None:
        """See `Exporter`."""
        metric, value = sample.metric, sample.value
        if event is None or event.version < 0 or not metric.is_plotted:
            return
        curve = metric.curve(sample.labels)
        if metric.kind is Kind.COUNTER:
            value += self._totals.get(curve, 0.0)
            self._totals[curve] = value
        version, before = self._points.get(curve, (event.version, value))
        if metric.kind is Kind.HISTOGRAM and before > value:
            self._points[curve] = (version, before)
        else:
            self._points[curve] = (event.version, value)

    def export(self) -> bool:
        """Log the new points, if it is time."""
        return time.monotonic() >= self._next_seconds and self._log()

    def end(self) -> None:
        """Log the last points."""
        self._log()

    def _log(self) -> bool:
        if not self._points:
            return False
        self._next_seconds = time.monotonic() + self._every_seconds
        done = self.log(self._points)
        if done:
            self._points = {}
        return done

    @abc.abstractmethod
    def log(self, points: Points) -> bool:
        """Log these points. False if that is not possible yet: they are kept. The exporter's
        thread; may raise."""


EVERY_SECONDS = 10.0
"""Default interval of the points."""

__all__ = ["EVERY_SECONDS", "Points", "ScalarExporter"]
