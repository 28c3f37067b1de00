"""From the timings of levels.py to its figures. Pure: plain values in and out."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from lib import figures
from lib.figures import Spread, spread, wall_seconds

Block = dict[str, Any]
"""The result of `lib.training.teams.Team.block`."""


@dataclass(frozen=True)
class Work:
    """The work of a level, repeated.

    seconds: each repetition. span_s: all repetitions, with the pauses. cpu_s: all nodes.
    """

    seconds: list[float]
    span_s: float
    cpu_s: float


@dataclass(frozen=True)
class Sample:
    """One visit to a level. Wall seconds of whole blocks are measured from outside.

    alone: the work while the training is idle. bare: a bare transfer of the same bytes. compute_s:
    a block of the training alone. overall_s: a block and the work, started together, until both
    are done. bare_overall_s: the same with the bare bytes, where these are the limit. plain_s,
    beside_s: the timed steps of these blocks. others: cores that other processes took beside the
    plain blocks.
    """

    alone: Work
    bare: Work
    compute_s: float
    overall_s: float
    plain_s: float
    beside_s: float
    bare_overall_s: float | None = None
    others: float | None = None

    @property
    def overlap(self) -> float:
        """The share of the work that computing hides."""
        return self._hidden(self.alone, self.overall_s)

    @property
    def bare_overlap(self) -> float | None:
        """The overlap of the bare bytes, which is the limit for the level."""
        return None if self.bare_overall_s is None else self._hidden(self.bare, self.bare_overall_s)

    def _hidden(self, work: Work, overall_s: float) -> float:
        """The overlap as the OSU micro-benchmarks define it for non-blocking collectives,
        1 - (overall - compute) / alone, but without their limits: below 0 and above 1 is noise,
        and shows how much there is."""
        return 1 - (overall_s - self.compute_s) / work.span_s

    @property
    def slowdown(self) -> float:
        """Slowdown of the training while the level works, as a fraction."""
        return self.beside_s / self.plain_s - 1


@dataclass
class Row:
    """The figures of one level, as fractions.

    data_bytes: size of the shards of all nodes. of_bare: bare time over ours, one sample a round.
    """

    name: str
    nodes: int
    data_bytes: int
    linked: bool
    seconds: Spread | None = None
    bare_seconds: Spread | None = None
    of_bare: Spread | None = None
    cpu_s: Spread | None = None
    bare_cpu_s: Spread | None = None
    overlap: Spread | None = None
    bare_overlap: Spread | None = None
    slowdown: Spread | None = None
    samples: list[Sample] = field(default_factory=list, repr=False)

    def finish(self) -> None:
        """Compute the figures from the samples."""
        each = self.samples
        self.seconds = spread(s for sample in each for s in sample.alone.seconds)
        self.bare_seconds = spread(s for sample in each for s in sample.bare.seconds)
        self.of_bare = spread(mean(s.bare.seconds) / mean(s.alone.seconds) for s in each)
        self.cpu_s = spread(s.alone.cpu_s / len(s.alone.seconds) for s in each)
        self.bare_cpu_s = spread(s.bare.cpu_s / len(s.bare.seconds) for s in each)
        self.overlap = spread(s.overlap for s in each)
        bare_overlap = [s.bare_overlap for s in each if s.bare_overlap is not None]
        self.bare_overlap = spread(bare_overlap) if bare_overlap else None
        self.slowdown = spread(s.slowdown for s in each)


@dataclass
class AllLevels:
    """A training that takes a version to all levels every `every` steps.

    step_s: time of a plain step. version_s: time that such a version adds to the training.
    slowdown: the same as a fraction of `every` plain steps. taken, due: versions that reached all
    levels, and requested versions.
    """

    every: int
    step_s: Spread | None = None
    version_s: Spread | None = None
    slowdown: Spread | None = None
    taken: int = 0
    due: int = 0
    visits: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def finish(self) -> None:
        """Compute the figures from the samples."""
        steps = [figures.plain_step(visit, wall_seconds) for visit in self.visits]
        extra = [figures.extra_per_checkpoint(visit, wall_seconds, 0) for visit in self.visits]
        self.step_s, self.version_s = spread(steps), spread(extra)
        pairs = zip(extra, steps, strict=True)
        self.slowdown = spread(more / (self.every * step) for more, step in pairs)
        merged = [each for visit in self.visits for each in figures.merge(visit["checkpoints"])]
        self.due, self.taken = len(merged), sum("durable" in each for each in merged)
