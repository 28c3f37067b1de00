"""Which versions of the persistent level may go. Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import Lineage, VersionId, newest_first, newest_of_each, on_lineage

if TYPE_CHECKING:
    from tierckpt.format.version_names import VersionName


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep; a version stays if any of the rules wants it."""

    keep_last: int = 2
    """So many of the newest; at least one always stays."""
    keep_every: int = 0
    """Versions that are a multiple of this; 0: none."""
    keep_best: int = 0
    """So many of the best by their metric; 0: none. Of equals the newer one is the better one;
    versions without a metric are not best."""
    best_is_low: bool = True
    """False: the larger, the better."""


@dataclass(frozen=True)
class HeldVersion:
    """A version that exists."""

    facts: VersionFacts
    pinned: bool = False
    bases: tuple[VersionName, ...] = ()
    """Versions that it refers to, which stay while it does."""
    suspect: bool = False
    """Replicas differed when it was taken, by its facts or by a mark."""

    @property
    def name(self) -> VersionName:
        """The version's name."""
        return self.facts.name


def retirable(
    held: Iterable[HeldVersion], policy: RetentionPolicy, asking: VersionFacts
) -> list[VersionName]:
    """Versions that no rule wants, and none that stays refers to, oldest first.

    The run of `asking` asks. The newest restorable version of the line is never among them,
    whatever the policy; nor anything newer, other jobs' versions, and runs that are no ancestors
    (see `retired`, whose rules these extend).
    """
    held, lineage = list(held), asking.lineage
    mine = _of_line([h for h in held if h.facts.job == asking.job], lineage, asking.run_id)
    newest = newest_first((h.facts.id, h.facts.lineage) for h in mine)
    safe = newest[0] if newest else None
    ids = {h.name.id for h in mine}
    gone = set(retired(ids, safe, lineage, policy.keep_last, policy.keep_every))
    each = newest_of_each(newest)
    scored = {h.name: h.facts.metric for h in mine if h.name.id in each}
    known = {name: metric for name, metric in scored.items() if metric is not None}
    best = best_of(known, policy.keep_best, policy.best_is_low)
    # However many suspects follow, the newest version that is none stays.
    unsuspected = [h.name for h in mine if h.name.id in newest and not h.suspect]
    kept = {*best, *sorted(unsuspected)[-1:]}
    going = {h.name for h in mine if h.name.id in gone and h.name not in kept and not h.pinned}
    # A base refers to nothing itself, so one step is enough.
    needed = {base for h in held if h.name not in going for base in h.bases}
    return sorted(going - needed)


def _of_line(held: list[HeldVersion], lineage: Lineage, run_id: str) -> list[HeldVersion]:
    """The run's own versions, and its ancestors'.

    A lineage has no names of runs. Where several took one generation, because they never saw each
    other, it cannot be told which of them was the ancestor: all are left alone.
    """
    runs: dict[int, set[str]] = {}
    for h in held:
        runs.setdefault(h.name.id.generation, set()).add(h.name.run_id)
    if lineage:
        runs[lineage[-1][0]] = {run_id}
    ours = {generation for generation, _ in lineage}
    return [
        h
        for h in held
        if h.name.id.generation in ours and runs[h.name.id.generation] == {h.name.run_id}
    ]


Version = TypeVar("Version", VersionId, "VersionName")


def best_of(metrics: Mapping[Version, float], count: int, lowest: bool) -> set[Version]:
    """The `count` best; of equals the newer one is the better one. What is no number is not best.

    Pure.
    """
    known = sorted((v for v, m in metrics.items() if math.isfinite(m)), reverse=True)
    sign = 1.0 if lowest else -1.0
    return set(sorted(known, key=lambda version: sign * metrics[version])[: max(count, 0)])


class Best:
    """The best complete versions of one level; alike on all ranks. One thread."""

    def __init__(self, count: int, lowest: bool) -> None:
        self._count, self._lowest = count, lowest
        self._metrics: dict[VersionId, float] = {}

    def restart(self, metrics: Mapping[VersionId, float]) -> None:
        """Begin with the versions that an earlier run left."""
        self._metrics = dict(metrics)
        self._forget()

    def add(self, version: VersionId, metric: float | None) -> None:
        """A version is complete on all ranks."""
        if metric is not None:
            self._metrics[version] = metric
            self._forget()

    @property
    def versions(self) -> set[VersionId]:
        """Those that must stay."""
        return set(self._metrics)

    def _forget(self) -> None:
        """What is not among the best now never will be."""
        each = newest_of_each(self._metrics)
        metrics = {v: m for v, m in self._metrics.items() if v in each}
        best = best_of(metrics, self._count, self._lowest)
        self._metrics = {version: self._metrics[version] for version in best}


def retired(
    held: Iterable[VersionId],
    safe: VersionId | None,
    lineage: Lineage,
    keep_last: int,
    keep_every: int,
    void: Container[VersionId] = (),
) -> list[VersionId]:
    """Retention: which of the versions that are held may go.

    `safe` is the newest version known to be complete on all ranks. It and everything newer stays,
    whatever the policy; of what is not newer, the last `keep_last` and every multiple of
    `keep_every` (0: none), but of those of one number the newest alone. What an ancestor wrote
    after the version this run started from goes once `safe` is of this run. Lives that are no
    ancestors (somebody started afresh in the same place) are never touched: nobody asked for their
    end.

    `void` are versions that are not complete on all ranks: they count for nothing, or a rank that
    has its shard of one would give up a complete version for it. This run's go whatever is safe
    (while one rank's disk is full, those of the others must not fill up); ancestors' go once
    something newer is safe.
    """
    there = set(held)
    worthless = {i for i in there if i in void}
    gone = [i for i in worthless if i.generation == lineage[-1][0] or (safe and i < safe)]
    if safe is None:
        return sorted(gone)
    ours = {generation for generation, _ in lineage}
    whole = there - worthless
    past = sorted((i for i in whole if i <= safe and i.generation in ours), reverse=True)
    line = [i for i in past if on_lineage(i, lineage)]
    newest = newest_of_each(line)
    gone += [i for i in line if i not in newest]
    line = [i for i in line if i in newest]
    gone += [
        i for i in line[max(keep_last, 1) :] if not (keep_every and i.version % keep_every == 0)
    ]
    if safe.generation == lineage[-1][0]:
        gone += [i for i in past if not on_lineage(i, lineage)]
    return sorted(gone)
