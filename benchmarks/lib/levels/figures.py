"""From the timings of levels.py to its figures. Pure: plain values in and out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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
    """One level. data_bytes: size of the shards of all nodes."""

    name: str
    nodes: int
    data_bytes: int
    linked: bool
    samples: list[Sample] = field(default_factory=list)

    def figures(self) -> dict[str, Spread | None]:
        """The figures of the samples, as fractions and seconds. of_bare: bare time over ours, one
        sample a round."""
        each = self.samples
        return {
            "seconds": spread(s for sample in each for s in sample.alone.seconds),
            "bare_seconds": spread(s for sample in each for s in sample.bare.seconds),
            "of_bare": spread(mean(s.bare.seconds) / mean(s.alone.seconds) for s in each),
            "cpu_s": spread(s.alone.cpu_s / len(s.alone.seconds) for s in each),
            "bare_cpu_s": spread(s.bare.cpu_s / len(s.bare.seconds) for s in each),
            "overlap": spread(s.overlap for s in each),
            "bare_overlap": spread(s.bare_overlap for s in each if s.bare_overlap is not None),
            "slowdown": spread(s.slowdown for s in each),
        }


def all_levels(visits: list[dict[str, Any]], every: int) -> dict[str, Any]:
    """The figures of a training that takes a version to all levels every `every` steps.

    step_s: time of a plain step. version_s: time that such a version adds to the training.
    slowdown: the same as a fraction of `every` plain steps. taken, due: versions that reached all
    levels, and requested versions.
    """
    steps = [figures.plain_step(visit, wall_seconds) for visit in visits]
    extra = [figures.extra_per_checkpoint(visit, wall_seconds, 0) for visit in visits]
    merged = [each for visit in visits for each in figures.merge(visit["checkpoints"])]
    shares = (more / (every * step) for more, step in zip(extra, steps, strict=True))
    return {
        "every": every,
        "step_s": asdict(spread(steps)),
        "version_s": asdict(spread(extra)),
        "slowdown": asdict(spread(shares)),
        "taken": sum("durable" in each for each in merged),
        "due": len(merged),
    }
