"""What damage means: whether a version that lost shards can still be restored, and from where."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from tierckpt._text import some
from tierckpt.core.copies import Location
from tierckpt.core.restore_plan import Source
from tierckpt.format.ids import ParityKey, ShardKey, VersionId

from .survey import Survey

MOST_SHARDS = 8


def outlook(
    there: Survey, lost: Iterable[ShardKey], bad: Collection[tuple[ShardKey, Location]] = ()
) -> list[str]:
    """A sentence for each version of which shards in `lost` have no sound copy at some place,
    newest first. `bad` are copies, of shards and parity, that no restart can use."""
    left = replace(
        there,
        found=[each for each in there.found if (each.key, each.place) not in bad],
        parities=[each for each in there.parities if (each.key, each.place) not in bad],
    )
    shards: dict[VersionId, set[int]] = {}
    for key in lost:
        if not isinstance(key, ParityKey):
            shards.setdefault(key.id, set()).add(key.shard)
    return [
        _of_version(there, left, id_, sorted(shards[id_])) for id_ in sorted(shards, reverse=True)
    ]


def _of_version(there: Survey, left: Survey, id_: VersionId, shards: list[int]) -> str:
    plan = left.plan(id_.version)
    if plan is not None and plan.id == id_ and shards[-1] < len(plan.sources):
        ways = "; ".join(_ways([plan.sources[shard] for shard in shards]))
        return f"{id_} can still be restored: {ways}"
    several = [copy.key.shards for copy in there.copies if copy.key.id == id_]
    shards_in_all = max(several, default=shards[-1] + 1)  # none where all manifests are damaged
    usable = {found.key.shard for found in left.found if found.key.id == id_}
    missing = [shard for shard in range(shards_in_all) if shard not in usable]
    newest, it = left.plan(), "them" if missing[1:] else "it"
    instead = f"a restart takes {newest.id}" if newest else "no other version is complete here"
    parities = any(parity.key.id == id_ for parity in left.parities)
    parity = "the parity here does not" if parities else "there is no parity to"
    return (
        f"{id_} cannot be restored from what is here: no usable copy of {_names(missing)} is left, "
        f"and {parity} rebuild {it}; {instead}. If other nodes or a persistent_path may have "
        f"{it}, give their paths, too"
    )


def _ways(sources: Sequence[Source]) -> Iterator[str]:
    """By where they come from."""
    shards: dict[str, list[int]] = {}
    for source in sources:
        place = source.place
        way = (
            "rebuilt from parity" if source.rebuilt else f"read from {place.level} ({place.where})"
        )
        shards.setdefault(way, []).append(source.shard)
    for way, theirs in shards.items():
        yield f"{_names(theirs)} {'are' if theirs[1:] else 'is'} {way}"


def _names(shards: Sequence[int]) -> str:
    return f"{'shards' if shards[1:] else 'shard'} {some(shards, MOST_SHARDS)}"


__all__ = ["outlook"]
