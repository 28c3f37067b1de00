"""Chain: the records that lead on from a version, found alike on all ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tierckpt.format.ids import NO_RUN, VersionId


class Link(NamedTuple):
    """One record on one rank, as the other ranks know it."""

    after: VersionId
    id: VersionId
    steps: tuple[int, ...]
    """Bytes of the image of each optimizer step's gradients."""


def chain_from(
    base: VersionId, ranks: Sequence[Iterable[Link]], began: tuple[int, int] = NO_RUN
) -> list[VersionId]:
    """Return the ids of the records that follow `base`, oldest first, as far as every rank has each
    of them, with the same number of optimizer steps.

    Where two runs went on from the same place, the newer one counts. `began`: the entry in the
    lineage of the last run that went back (see `Rollback`); records that it gave up do not count.
    """
    common: set[tuple[VersionId, VersionId, int]] | None = None
    for links in ranks:
        theirs = {(each.after, each.id, len(each.steps)) for each in links}
        common = theirs if common is None else common & theirs
    following: dict[VersionId, VersionId] = {}
    for after, id_, _ in sorted(common or ()):
        if id_.generation >= began[0] or id_.version <= began[1]:
            following[after] = max(id_, following.get(after, id_))
    found: list[VersionId] = []
    place = base
    while (place := following.get(place, base)) > base and place not in found:
        found.append(place)
    return found


def outdated(bases: Iterable[VersionId], safe: VersionId | None, keep: int) -> set[VersionId]:
    """Return the bases of journal files that no restart needs any more, once `safe` is the newest
    version that is complete on local: all but the newest `keep` up to `safe`, and later ones."""
    known = sorted(each for each in {*bases} if safe is not None and each <= safe)
    return {*known[: max(len(known) - keep, 0)]}


__all__ = ["Link", "chain_from", "outdated"]
