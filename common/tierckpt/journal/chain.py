"""Chain: the records that lead on from a version, found alike on all ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tierckpt.format.ids import NO_RUN, VersionId


class RecordKey(NamedTuple):
    """What one record has in common on all ranks."""

    after: VersionId
    id: VersionId
    run_id: str
    """See `VersionFacts.run_id`: two runs that did not see each other may make records of the same
    id, whose parts must not be mixed."""
    steps: int
    """Number of optimizer steps."""


class Link(NamedTuple):
    """One record of one shard, as all ranks know it."""

    after: VersionId
    id: VersionId
    run_id: str
    digest: int
    """See `FrameHead.digest`."""
    steps: tuple[int, ...]
    """Bytes of the image of each optimizer step's gradients."""

    @property
    def key(self) -> RecordKey:
        """What it has in common with those of other shards."""
        return RecordKey(self.after, self.id, self.run_id, len(self.steps))


def chain_from(
    base: VersionId, shards: Iterable[Iterable[RecordKey]], began: tuple[int, int] = NO_RUN
) -> list[RecordKey]:
    """Return the records that follow `base`, oldest first, as far as there is one of every shard.

    Where two runs went on from the same place, the newer one counts. `began`: the entry in the
    lineage of the last run that went back (see `Rollback`); records that it gave up do not count.
    """
    common = set.intersection(*map(set, shards))
    following: dict[VersionId, RecordKey] = {}
    for key in sorted(common):
        if key.id.generation >= began[0] or key.id.version <= began[1]:
            following[key.after] = key  # the newest comes last
    found: list[RecordKey] = []
    place = base
    while (follower := following.get(place)) is not None and follower.id > base:
        if follower in found:
            break
        found.append(follower)
        place = follower.id
    return found


def rebuildable(
    safe: VersionId | None, protected: VersionId | None, most_steps: int
) -> VersionId | None:
    """Return the version that a restart begins with after the loss of a node: the one that is
    `protected`. If that is more than `most_steps` older than the newest one on local, `safe`,
    nothing waits for the peer level any more, as the room on the disk is limited."""
    if safe is None or protected is None or safe.version - protected.version > most_steps:
        return safe
    return min(safe, protected)


def outdated(bases: Iterable[VersionId], safe: VersionId | None, keep: int) -> set[VersionId]:
    """Return the bases of journal files that no restart needs any more, once `safe` is the newest
    version that it may begin with: all but the newest `keep` up to `safe`, and later ones."""
    known = sorted(each for each in {*bases} if safe is not None and each <= safe)
    return {*known[: max(len(known) - keep, 0)]}


__all__ = ["Link", "RecordKey", "chain_from", "outdated", "rebuildable"]
