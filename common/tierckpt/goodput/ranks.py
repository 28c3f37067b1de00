"""Runs of a job: the records of all ranks that belong together. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .records import RankRun, Span


@dataclass(frozen=True)
class Run:
    """One run of the job, on all ranks with records of it."""

    ranks: dict[int, RankRun]

    @cached_property
    def reference(self) -> RankRun:
        """The lowest rank: its clock is the job's, in this run."""
        return self.ranks[min(self.ranks)]

    @property
    def wait_seconds(self) -> float:
        """Time for which the reference waited in its attach for ranks that came later: all ranks
        end an attach together."""
        return self.reference.attach_seconds - self.ranks[self.last_to_attach].attach_seconds

    @property
    def last_to_attach(self) -> int:
        """The rank with the shortest attach: all others waited for it."""
        done = {rank: run for rank, run in self.ranks.items() if run.attached is not None}
        return min(
            done, key=lambda rank: (done[rank].attach_seconds, rank), default=min(self.ranks)
        )

    def spans_of(self, number: int) -> dict[int, Span]:
        """The span of this number on every rank that has it."""
        return {r: run.spans[number] for r, run in self.ranks.items() if number < len(run.spans)}

    def slowest(self, number: int) -> tuple[int, Span]:
        """The rank that waited longest for checkpoints in this span, and its span."""
        spans = self.spans_of(number)

        def stall(rank: int) -> tuple[float, int]:
            samples = spans[rank].samples
            return (samples[-1].stall_seconds if samples else 0.0, -rank)

        rank = max(spans, key=stall)
        return rank, spans[rank]

    def newest(self, number: int) -> int:
        """The newest version that some rank reached in this span."""
        return max(span.newest for span in self.spans_of(number).values())


def runs_of(found: Sequence[RankRun]) -> list[Run]:
    """The runs in order of time.

    A run gets its name at its first boundary. Those that failed before count if the lowest rank
    recorded them: its records alone give the time of all others."""
    lowest = min(run.rank for run in found)
    named: dict[str, dict[int, RankRun]] = defaultdict(dict)
    nameless = []
    for run in found:
        if run.run:
            named[run.run][run.rank] = run
        elif run.rank == lowest:
            nameless.append({run.rank: run})
    runs = [Run(ranks) for ranks in (*named.values(), *nameless)]
    return sorted(runs, key=lambda run: run.reference.attach)
