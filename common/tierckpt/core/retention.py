"""Retention: the versions of a level that may be removed. Pure.

The agent calls `retirable` for the local level, shard by shard. The persistent store calls
`retirable_names` for whole versions, which follows the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping

from msgspec import Struct

from tierckpt.config import RetentionPolicy
from tierckpt.format.ids import (
    Lineage,
    VersionId,
    VersionName,
    newest_first,
    newest_of_each,
    on_lineage,
)
from tierckpt.format.records import VersionFacts

KEEP_ALL = 1_000_000
"""As `keep_last`: all versions stay, also those that a run gave up."""


class Spared:
    """The versions of the local level that retention must keep: the newest one known to be equal on
    all ranks, and its successor, not yet compared. The same on all ranks. Training thread."""

    def __init__(self, active: bool = False) -> None:
        """Not `active`: replicas are not compared, and no version is kept."""
        self.version: VersionId | None = None
        """The newest version known to be equal on all ranks."""
        self._next: VersionId | None = None
        self._newest: VersionId | None = None
        self._active, self._drifted = active, False

    def restart(self, version: VersionId | None) -> None:
        """A run starts; `version` is the newest one not suspect. It is kept until another version
        is known to be equal: if ranks differ from the first step on, there is no other."""
        self.version = version if self._active else None
        self._next, self._drifted = None, False
        self._newest = None

    def whole(self, id_: VersionId) -> None:
        """A version is complete on all local disks."""
        if self._active and not self._drifted:
            self._newest, self._next = id_, self._next or id_

    def alike(self, generation: int, version: int) -> None:
        """All ranks were equal up to this version."""
        last = VersionId(generation, version)
        if self._newest is not None and self._newest <= last:
            self._next = self._newest
        if self._next is not None and self._next <= last:
            self.version, self._next = self._next, None
        self._drifted = False

    def drifted(self) -> None:
        """Replicas differ: the successor may be a mixture, and so may later versions, until all are
        equal."""
        self._newest = self._next = None
        self._drifted = True

    @property
    def versions(self) -> set[VersionId]:
        """The versions that retention must keep."""
        return {id_ for id_ in (self.version, self._next) if id_ is not None}


def milestones(versions: Iterable[int], every: int) -> set[int]:
    """The versions that stand for the multiples of `every`: the multiple itself, or without it the
    next version before the following multiple. A multiple may be missing, as the disk was busy, or
    as versions are taken by time. Empty if `every` is 0."""
    if not every:
        return set()
    first: dict[int, int] = {}
    for version in sorted(versions):
        first.setdefault(version // every, version)
    return {version for number, version in first.items() if number > 0 or version == 0}


def retirable(
    held: Iterable[VersionId],
    policy: RetentionPolicy,
    safe: VersionId | None,
    lineage: Lineage,
    keep: Container[VersionId] = (),
    void: Container[VersionId] = (),
) -> list[VersionId]:
    """Return the versions of `held` that may be removed, oldest first. Those in `keep` always stay.

    `safe` is the newest version known to be complete on all ranks. It and all newer versions stay,
    whatever the policy. Of older ones, the last `keep_last` and the `milestones` of `keep_every`
    stay; of several with one number, only the newest counts. A version that an ancestor run wrote
    after the version that this run started from is removed once `safe` is of this run (unless
    `keep_last` is KEEP_ALL). Versions of runs that are no ancestors (the job started from nothing
    in the same place) are never removed.

    `void` are versions that are not complete on all ranks. They do not count: otherwise a rank with
    its shard of one would remove a complete version for it. Those of this run are removed whatever
    is safe (while one rank's disk is full, the others must not fill up); those of ancestors once a
    newer version is safe.
    """
    there = set(held)
    worthless = {i for i in there if i in void}
    gone = {i for i in worthless if i.generation == lineage[-1][0] or (safe and i < safe)}
    if safe is not None:
        ours = {generation for generation, _ in lineage}
        whole = there - worthless
        past = sorted((i for i in whole if i <= safe and i.generation in ours), reverse=True)
        line = [i for i in past if on_lineage(i, lineage)]
        newest = newest_of_each(line)
        last = [i for i in line if i in newest][: max(policy.keep_last, 1)]
        points = milestones((i.version for i in newest), policy.keep_every)
        gone |= {*line} - {*last} - {i for i in newest if i.version in points}
        if safe.generation == lineage[-1][0] and policy.keep_last < KEEP_ALL:
            gone |= {*past} - {*line}
    return sorted(i for i in gone if i not in keep)


class HeldVersion(Struct, frozen=True):
    """A version on the persistent level."""

    facts: VersionFacts
    pinned: bool = False
    bases: tuple[VersionName, ...] = ()
    """Versions that it refers to, which stay as long as it does."""
    suspect: bool = False
    """Replicas differed when it was taken, by its facts or by a mark."""

    @property
    def name(self) -> VersionName:
        """The version's name."""
        return self.facts.name


def retirable_names(
    held: Iterable[HeldVersion], policy: RetentionPolicy, asking: VersionFacts
) -> list[VersionName]:
    """Return the versions that the run of `asking` may remove, oldest first.

    Versions that are pinned, best, or bases of others stay, and the newest one not suspect.
    Whatever the policy, the newest restorable version of the lineage stays, as do all newer ones,
    other jobs' versions, and those of runs that are no ancestors.
    """
    held = list(held)
    ours = [h for h in held if h.facts.job == asking.job]
    own = {h.facts.id: h for h in _of_line(ours, asking.lineage, asking.run_id)}
    line = newest_first((id_, h.facts.lineage) for id_, h in own.items())
    each = newest_of_each(line)
    metrics = {id_: m for id_ in each if (m := own[id_].facts.metric) is not None}
    keep = best_of(metrics, policy.keep_best, policy.best_is_low)
    keep |= {id_ for id_, h in own.items() if h.pinned}
    # However many suspects follow, the newest other version stays.
    keep.update([id_ for id_ in line if not own[id_].suspect][:1])
    gone = retirable(own, policy, line[0] if line else None, asking.lineage, keep)
    going = {own[id_].name for id_ in gone}
    # A base refers to nothing itself, so one step is enough.
    needed = {base for h in held if h.name not in going for base in h.bases}
    return sorted(going - needed)


def _of_line(held: list[HeldVersion], lineage: Lineage, run_id: str) -> list[HeldVersion]:
    """Return the versions of this run and of its ancestors.

    A lineage has no names of runs. Where several runs took one generation, because they never saw
    each other, it is unknown which of them was the ancestor: all are left alone.
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


def best_of(metrics: Mapping[VersionId, float], count: int, lowest: bool) -> set[VersionId]:
    """Return the `count` best versions; of two equal metrics the newer version is better. A metric
    must be finite to be best."""
    known = sorted((v for v, m in metrics.items() if math.isfinite(m)), reverse=True)
    sign = 1.0 if lowest else -1.0
    return set(sorted(known, key=lambda version: sign * metrics[version])[: max(count, 0)])


class Best:
    """The best complete versions of one level; equal on all ranks. One thread."""

    def __init__(self, count: int, lowest: bool) -> None:
        self._count, self._lowest = count, lowest
        self._metrics: dict[VersionId, float] = {}

    def restart(self, metrics: Mapping[VersionId, float]) -> None:
        """Start with the versions that an earlier run left."""
        self._metrics = dict(metrics)
        self._forget()

    def add(self, version: VersionId, metric: float | None) -> None:
        """Add a version complete on all ranks."""
        if metric is not None:
            self._metrics[version] = metric
            self._forget()

    @property
    def versions(self) -> set[VersionId]:
        """The versions that must stay."""
        return set(self._metrics)

    def _forget(self) -> None:
        """Drop versions that are not among the best; they can never be again."""
        each = newest_of_each(self._metrics)
        metrics = {v: m for v, m in self._metrics.items() if v in each}
        best = best_of(metrics, self._count, self._lowest)
        self._metrics = {version: self._metrics[version] for version in best}
