"""Which versions of the persistent level may go. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tierckpt.format.ids import Lineage, newest_first, newest_of_each, retired
from tierckpt.format.version_names import VersionName

from .best import best_of

METRIC = "metric"
"""What the user gave at the boundary is called so in the manifests."""


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep; a version stays if any of the rules wants it."""

    keep_last: int = 2
    """So many of the newest; at least one always stays."""
    keep_every: int = 0
    """Versions that are a multiple of this; 0: none."""
    keep_best: int = 0
    """So many of the best by `metric`; 0: none. Of equals the newer one is the better one."""
    metric: str = METRIC
    """Name of the value in the manifest. Versions without it are not best."""
    best_is_low: bool = True
    """False: the larger, the better."""


@dataclass(frozen=True)
class Held:
    """A version that exists."""

    name: VersionName
    job: str
    lineage: Lineage
    metrics: Mapping[str, float] = field(default_factory=dict)
    pinned: bool = False
    bases: tuple[VersionName, ...] = ()
    """Versions that it refers to, which stay while it does."""
    suspect: bool = False
    """Replicas differed when it was taken."""


def retirable(
    held: Iterable[Held], policy: RetentionPolicy, job: str, lineage: Lineage, life: str
) -> list[VersionName]:
    """Versions that no rule wants, and none that stays refers to, oldest first.

    `lineage` is that of `life`, which asks. The newest restorable version of the line is never
    among them, whatever the policy; nor anything newer, other jobs' versions, and lives that are
    no ancestors (see `naming.retired`, whose rules these extend).
    """
    held = list(held)
    mine = _of_line([h for h in held if h.job == job], lineage, life)
    newest = newest_first((h.name.id, h.lineage) for h in mine)
    safe = newest[0] if newest else None
    ids = {h.name.id for h in mine}
    gone = set(retired(ids, safe, lineage, policy.keep_last, policy.keep_every))
    each = newest_of_each(newest)
    scored = {h.name: h.metrics for h in mine if h.name.id in each}
    known = {name: m[policy.metric] for name, m in scored.items() if policy.metric in m}
    best = best_of(known, policy.keep_best, policy.best_is_low)
    # However many suspects follow, the newest version that is none stays.
    unsuspected = [h.name for h in mine if h.name.id in newest and not h.suspect]
    kept = {*best, *sorted(unsuspected)[-1:]}
    going = {h.name for h in mine if h.name.id in gone and h.name not in kept and not h.pinned}
    # A base refers to nothing itself, so one step is enough.
    needed = {base for h in held if h.name not in going for base in h.bases}
    return sorted(going - needed)


def _of_line(held: list[Held], lineage: Lineage, life: str) -> list[Held]:
    """The life's own versions, and its ancestors'.

    A lineage has no names of lives. Where several took one generation, because they never saw each
    other, it cannot be told which of them was the ancestor: all are left alone.
    """
    lives: dict[int, set[str]] = {}
    for h in held:
        lives.setdefault(h.name.id.generation, set()).add(h.name.life)
    if lineage:
        lives[lineage[-1][0]] = {life}
    ours = {generation for generation, _ in lineage}
    return [
        h
        for h in held
        if h.name.id.generation in ours and lives[h.name.id.generation] == {h.name.life}
    ]
