"""Spans: activities of a rank with start and end. Pure; all times are microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tierckpt.errors import TierckptError


class TimelineError(TierckptError):
    """A file cannot be used for a timeline; the text names it, the reason and the remedy."""


@dataclass(frozen=True)
class Span:
    """An activity from `begin_us` to `end_us`, Unix time; an instant if the two are equal."""

    kind: str
    """A kind from the table in `tierckpt.tracing.recorder`, or Horovod's `negotiate`."""
    rank: int
    begin_us: int
    end_us: int
    name: str = ""
    row: str = "training"
    version: int = -1
    nbytes: int = 0
    layers: tuple[str, ...] = ()
    """Parameters concerned."""
    launched_us: int | None = None
    """The time at which the first rank requested an allreduce, if the span itself begins later."""

    @property
    def us(self) -> int:
        """The duration."""
        return self.end_us - self.begin_us

    @property
    def latency_us(self) -> int:
        """The time from the launch to the end."""
        return self.end_us - (self.begin_us if self.launched_us is None else self.launched_us)


@dataclass
class Timeline:
    """Spans of all ranks."""

    notes: list[str] = field(default_factory=list)
    """Notes for the reader about the origin of the timeline."""
    _spans: dict[tuple[int, str], list[Span]] = field(default_factory=dict)
    """By rank and kind, in order of their start."""

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans."""
        for span in spans:
            self._spans.setdefault((span.rank, span.kind), []).append(span)
        for members in self._spans.values():
            members.sort(key=_order)

    def of(
        self, *kinds: str, rank: int | None = None, version: int | None = None, from_us: int = 0
    ) -> list[Span]:
        """Spans of some kinds (default: all) in order of their start.

        Optionally of one rank or version only, and only those that start at `from_us` or later.
        """
        found = [
            span
            for (of_rank, kind), spans in self._spans.items()
            if rank in (None, of_rank) and (not kinds or kind in kinds)
            for span in spans
            if version in (None, span.version) and span.begin_us >= from_us
        ]
        return sorted(found, key=_order)

    def ranks(self) -> list[int]:
        """All ranks, in order."""
        return sorted({rank for rank, _ in self._spans})

    def communication(self, rank: int) -> list[Span]:
        """A rank's allreduces, each launched when this very rank requested it.

        Horovod's timeline is rank 0's, with the allreduces of all ranks: a rank without its own
        gets those. The time of a rank's request is in its own trace. Horovod's timeline has only
        the first rank's request, which may come before this rank has finished the step before.
        """
        with_any = [r for r, kind in self._spans if kind == "allreduce"]
        source = rank if rank in with_any else min(with_any, default=rank)
        requests: dict[str, list[int]] = {}
        for release in self.of("release", rank=rank):
            for layer in release.layers:
                requests.setdefault(layer, []).append(release.begin_us)
        return [_as_requested(span, requests) for span in self.of("allreduce", rank=source)]


def _as_requested(span: Span, requests: dict[str, list[int]]) -> Span:
    """The span with the last request before its end as its launch, at the latest at its own start:
    requests are noted after they were made, sometimes too late."""
    times = [t for layer in span.layers for t in requests.get(layer, ()) if t <= span.end_us]
    if span.launched_us is None or not times:
        return span
    return replace(span, launched_us=min(max(span.launched_us, max(times)), span.begin_us))


def _order(span: Span) -> tuple[int, int]:
    """Longer spans come first: they contain the others."""
    return (span.begin_us, -span.end_us)
