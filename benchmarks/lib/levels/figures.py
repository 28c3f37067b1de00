"""From the timings of levels.py to its figures. Pure: plain values in and out."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from lib import figures
from lib.figures import Spread, spread

Block = dict[str, Any]
"""What `harness.Team.block` returns."""


@dataclass(frozen=True)
class Work:
    """A level's work, done some times in a row.

    seconds: of each time. span_s: of all, with what is between them. cpu_s: of all nodes.
    """

    seconds: list[float]
    span_s: float
    cpu_s: float


@dataclass(frozen=True)
class Sample:
    """One visit to a level. Wall seconds of whole blocks are measured from outside.

    alone: while the training is idle; bare: the same bytes with nothing around them.
    compute_s: a block of the training alone; overall_s: a block and the work, begun at once, until
    both are over; bare_overall_s: a block and the bare bytes, where that is the limit. plain_s,
    beside_s: the timed steps of such blocks.
    """

    alone: Work
    bare: Work
    compute_s: float
    overall_s: float
    plain_s: float
    beside_s: float
    bare_overall_s: float | None = None

    @property
    def overlap(self) -> float:
        """Share of the work that is hidden behind computing."""
        return self._hidden(self.alone, self.overall_s)

    @property
    def bare_overlap(self) -> float | None:
        """The same of the bare bytes: what they cost the cores nobody can hide."""
        return None if self.bare_overall_s is None else self._hidden(self.bare, self.bare_overall_s)

    def _hidden(self, work: Work, overall_s: float) -> float:
        """As the OSU micro-benchmarks define the overlap of non-blocking collectives:
        1 - (overall - compute) / alone, and no less than 0. (No more than 1, either: a training
        that is faster beside the work is noise.)"""
        hidden = 1 - (overall_s - self.compute_s) / work.span_s
        return min(max(hidden, 0.0), 1.0)

    @property
    def slowdown(self) -> float:
        """Of the training while the level is at work, as a fraction."""
        return self.beside_s / self.plain_s - 1


@dataclass
class Row:
    """One level's figures. data_bytes: of all nodes' shards, once. Fractions, not percent.

    of_bare: bare time over ours, of each round.
    """

    name: str
    bare: str
    nodes: int
    data_bytes: int
    linked: bool
    target: float | None
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
        """Work them out."""
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
    """A training whose every `every`-th version goes through all levels.

    step_s: of a plain step. version_s: what such a version adds to the training. slowdown: that as
    a fraction of `every` plain steps. taken, due: versions that came to the end, and asked for.
    """

    every: int
    step_s: Spread | None = None
    version_s: Spread | None = None
    slowdown: Spread | None = None
    taken: int = 0
    due: int = 0
    visits: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def finish(self) -> None:
        """Work them out."""
        steps = [figures.plain_step(visit, block_seconds) for visit in self.visits]
        extra = [figures.extra_per_checkpoint(visit, block_seconds, 0) for visit in self.visits]
        self.step_s, self.version_s = spread(steps), spread(extra)
        pairs = zip(extra, steps, strict=True)
        self.slowdown = spread(more / (self.every * step) for more, step in pairs)
        merged = [each for visit in self.visits for each in figures.merge(visit["checkpoints"])]
        self.due, self.taken = len(merged), sum("durable" in each for each in merged)


def block_seconds(block: Block) -> float:
    """Wall time of a block's timed steps, over all ranks."""
    ranks = block["ranks"]
    return float(max(rank["ends"][-1] for rank in ranks) - min(rank["start"] for rank in ranks))
