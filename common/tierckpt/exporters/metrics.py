"""Metrics: the names, kinds, units and labels of all exporters, and the events that change them.

Names follow the conventions of Prometheus: base units, a counter ends in `_total`. The labels have
few values (a level, a reason, a phase), whatever the events say and however large the job is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tierckpt.events import Event

PREFIX = "tierckpt"


class Kind(StrEnum):
    """Kind of a metric, as in Prometheus and OpenTelemetry."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One metric. Equal on all exporters."""

    name: str
    """Name without prefix, unit and `_total`."""
    kind: Kind
    help: str
    unit: str = ""
    """`seconds`, `bytes`, or empty."""
    labels: tuple[str, ...] = ()
    is_plotted: bool = False
    """It is a curve over versions, for tools that plot scalars."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""

    @property
    def full_name(self) -> str:
        """The name in Prometheus."""
        total = "total" if self.kind is Kind.COUNTER else ""
        return "_".join(filter(None, (PREFIX, self.name, self.unit, total)))

    def curve(self, labels: tuple[str, ...]) -> str:
        """The name of a curve: `tierckpt/store_seconds/local`."""
        name = "_".join(filter(None, (self.name, self.unit)))
        return "/".join((PREFIX, name, *labels))


@dataclass(frozen=True)
class Sample:
    """A change of a metric: what a counter grows by, a gauge's value, or an observation."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    """Values of the metric's labels."""


STALL_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 5)
STORE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)

LEVEL = ("level",)
COUNTER, GAUGE, HISTOGRAM = Kind

STORED = Metric("stored", COUNTER, "Versions stored on a level.", labels=LEVEL)
WRITTEN = Metric("written", COUNTER, "Bytes stored on a level.", "bytes", LEVEL)
SKIPPED = Metric(
    "skipped",
    COUNTER,
    "Versions that were due on a level, and left out: it was busy, or a newer version superseded "
    "them.",
    labels=("level", "reason"),
    is_plotted=True,
)
FAILED = Metric(
    "failed", COUNTER, "Versions that a level lost to an error.", labels=LEVEL, is_plotted=True
)
NEWEST = Metric("newest_version", GAUGE, "Newest version stored on a level.", labels=LEVEL)
NEWEST_TIME = Metric(
    "newest_version_timestamp",
    GAUGE,
    "Unix time at which a level got its newest version.",
    "seconds",
    LEVEL,
)
VERSION_BYTES = Metric(
    "version", GAUGE, "Size of the newest version on a level.", "bytes", LEVEL, is_plotted=True
)
STORE = Metric(
    "store",
    HISTOGRAM,
    "Time to store a version on a level: in memory from its boundary to its seal, else the write.",
    "seconds",
    LEVEL,
    is_plotted=True,
    buckets=STORE_BUCKETS,
)
STALL = Metric(
    "stall",
    HISTOGRAM,
    "Time that the training thread spent on a version.",
    "seconds",
    is_plotted=True,
    buckets=STALL_BUCKETS,
)
LIVE = Metric("live_version", GAUGE, "Version of the live state: completed optimizer steps.")
RESTORES = Metric("restores", COUNTER, "Restores that ended, with a version or without one.")
RESTORED = Metric("restored_version", GAUGE, "Version that the last restore loaded; 0: none.")
REWRITTEN = Metric(
    "restored", GAUGE, "Size of the version that the last restore loaded, on all ranks.", "bytes"
)
RESTORE = Metric(
    "restore", GAUGE, "Time of the last restore, by phase.", "seconds", ("phase",), is_plotted=True
)
REJECTED = Metric("rejected", COUNTER, "Reports of copies that were found and not trusted.")
DRIFTED = Metric("drifted", COUNTER, "Reports that replicas differ between ranks.", is_plotted=True)
NOTICES = Metric("notices", COUNTER, "Warnings and errors.", labels=("severity",))
RUNNING = Metric("running", GAUGE, "1 from the start of a job, 0 after its clean end.")
INTERRUPTED = Metric(
    "interrupted",
    GAUGE,
    "1 after an end by a signal, a notice of the cloud or the end of the allocation, else 0.",
)
RANKS = Metric("ranks", GAUGE, "Ranks of the job.")

METRICS = (
    *(STORED, WRITTEN, SKIPPED, FAILED, NEWEST, NEWEST_TIME, VERSION_BYTES, STORE, STALL),
    *(LIVE, RESTORES, RESTORED, REWRITTEN, RESTORE, REJECTED, DRIFTED, NOTICES, RUNNING),
    *(INTERRUPTED, RANKS),
)
"""All metrics."""
REASONS = ("busy", "superseded")
PHASES = ("inventory", "verify", "rebuild", "load", "total")
SEVERITIES = ("warning", "error")


def zeros(levels: tuple[str, ...]) -> Iterator[Sample]:
    """Counters at the start: a rate sees the first change only if the counter was there before."""
    for metric in (STORED, WRITTEN, FAILED):
        yield from (Sample(metric, 0, (level,)) for level in levels)
    yield from (Sample(SKIPPED, 0, (level, reason)) for level in levels for reason in REASONS)
    yield from (Sample(NOTICES, 0, (severity,)) for severity in SEVERITIES)
    yield from (Sample(metric, 0) for metric in (RESTORES, REJECTED, DRIFTED))


def samples(event: Event) -> Iterator[Sample]:
    """The changes that an event makes. Any thread."""
    seconds, level = event.seconds, (event.level,)
    match event.name:
        case "sealed":
            yield Sample(STALL, seconds["stall"])
            yield from _stored(event, seconds["sealed_after"])
        case "committed":
            yield from _stored(event, sum(seconds.values()))
        case "skipped":
            yield Sample(SKIPPED, 1, (event.level, event.reason))
        case "failed":
            yield Sample(FAILED, 1, level)
        case "restored":
            yield Sample(RESTORES, 1)
            yield Sample(RESTORED, event.version)
            yield Sample(REWRITTEN, event.nbytes)
            for phase in PHASES:
                if phase in seconds:
                    yield Sample(RESTORE, seconds[phase], (phase,))
        case "rejected":
            yield Sample(REJECTED, 1)
        case "drifted":
            yield Sample(DRIFTED, 1)
        case "closed":
            yield Sample(RUNNING, 0)
            yield Sample(INTERRUPTED, int(event.facts.get("interrupted", False)))
        case "notice" if event.severity >= logging.WARNING:
            severe = event.severity >= logging.ERROR
            yield Sample(NOTICES, 1, (SEVERITIES[severe],))


def _stored(event: Event, store_seconds: float) -> Iterator[Sample]:
    level = (event.level,)
    yield Sample(STORED, 1, level)
    yield Sample(WRITTEN, event.nbytes, level)
    yield Sample(NEWEST, event.version, level)
    yield Sample(NEWEST_TIME, event.time_seconds, level)
    yield Sample(VERSION_BYTES, event.nbytes, level)
    yield Sample(STORE, store_seconds, level)


__all__ = ["METRICS", "Kind", "Metric", "Sample", "samples", "zeros"]
