"""Spans: what happened on some rank from when to when. Pure; all times are microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tierckpt.errors import TierckptError


class TimelineError(TierckptError):
    """A file cannot be used for a timeline; the text names it, and says why and what to do."""


@dataclass(frozen=True)
class Span:
    """From `begin_us` to `end_us`, Unix time; an instant when the two are equal."""

    kind: str
    """See the table in `tierckpt.tracing.recorder`; Horovod adds `negotiate`."""
    rank: int
    begin_us: int
    end_us: int
    name: str = ""
    row: str = "training"
    version: int = -1
    nbytes: int = 0
    layers: tuple[str, ...] = ()
    """Parameters that it is about."""
    launched_us: int | None = None
    """When the first rank asked for an allreduce, if the span itself begins later than that."""

    @property
    def us(self) -> int:
        """Duration."""
        return self.end_us - self.begin_us

    @property
    def latency_us(self) -> int:
        """From the launch to the end."""
        return self.end_us - (self.begin_us if self.launched_us is None else self.launched_us)


@dataclass
class Timeline:
    """Spans of all ranks."""

    notes: list[str] = field(default_factory=list)
    """What a reader should know about how it came about."""
    _spans: dict[tuple[int, str], list[Span]] = field(default_factory=dict)
    """By rank and kind, in the order in which they began."""

    def add(self, spans: Iterable[Span]) -> None:
        """Put more on the axis."""
        for span in spans:
            self._spans.setdefault((span.rank, span.kind), []).append(span)
        for known in self._spans.values():
            known.sort(key=_order)

    def of(
        self, *kinds: str, rank: int | None = None, version: int | None = None, from_us: int = 0
    ) -> list[Span]:
        """Those of some kinds (none given: of all), in the order in which they began.

        Of one rank or version only, if given, and only those that began at `from_us` or later.
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
        """The allreduces that a rank took part in, launched when this very rank asked for them.

        Horovod's timeline is rank 0's, whose allreduces are everybody's: a rank that has none of
        its own is given those. When a rank asked is in its own trace; in Horovod's there is only
        when the first of all did, which may be before this one had finished the step before.
        """
        with_any = [r for r, kind in self._spans if kind == "allreduce"]
        source = rank if rank in with_any else min(with_any, default=rank)
        asked: dict[str, list[int]] = {}
        for release in self.of("release", rank=rank):
            for layer in release.layers:
                asked.setdefault(layer, []).append(release.begin_us)
        return [_as_asked_by(span, asked) for span in self.of("allreduce", rank=source)]


def _as_asked_by(span: Span, asked: dict[str, list[int]]) -> Span:
    """Launched at the last asking before its end, but at its own beginning at the latest: asking is
    noted when it was done, at times too late."""
    times = [t for layer in span.layers for t in asked.get(layer, ()) if t <= span.end_us]
    if span.launched_us is None or not times:
        return span
    return replace(span, launched_us=min(max(span.launched_us, max(times)), span.begin_us))


def _order(span: Span) -> tuple[int, int]:
    """What lasts longer comes first: it is around the other."""
    return (span.begin_us, -span.end_us)
