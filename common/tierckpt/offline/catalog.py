"""The catalog: a survey by version and level, the rows of `tierckpt list`.

Also here: what damage means (`outlook`: whether a version that lost shards can still be restored,
and from where), and the version that a restart takes, found without a model (`tierckpt.latest`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from tierckpt._text import some
from tierckpt.coordination.proof_order import order_here
from tierckpt.core.levels import RANK
from tierckpt.core.restore_plan import Found, FoundParity, Location, Problem, Source
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.format.ids import (
    Lineage,
    ParityKey,
    ShardKey,
    VersionId,
    newest_first,
    newest_lineage,
    on_lineage,
)
from tierckpt.format.manifest import Manifest
from tierckpt.storage.local import LocalStore
from tierckpt.storage.persistent import VersionName
from tierckpt.storage.slots import read_seal

from .survey import Copy, MissingPathError, Survey, Where, job_of, refuse_several_jobs, survey

__all__ = ["Latest", "latest", "outlook"]


Group = tuple[VersionId, str, int, str]
"""Version, run, number of shards, and level."""


class Row(Struct):
    """The copies of one version of one run on one level."""

    version: int
    generation: int
    run_id: str
    level: str
    shards: int
    """Number of shards of the whole version."""
    there: set[int] = field(default_factory=set)
    """Numbers of the shards seen."""
    parities: int = 0
    """Number of shards with parity seen."""
    places: list[str] = field(default_factory=list)
    nbytes: int = 0
    """Stored bytes of the shards seen, each counted once."""
    created_seconds: float | None = None
    """Unix time of the seal; unknown for versions of the persistent level without it."""
    iteration: int | None = None
    metric: float | None = None
    encoded: bool = False
    refers_to: list[int] = field(default_factory=list)
    """Whole versions that it needs: it is stored as differences or references to them."""
    needed_by: list[int] = field(default_factory=list)
    """Versions that refer to it."""
    pinned: bool = False
    held_for: list[str] = field(default_factory=list)
    """Paths of forks that keep it, as they have no durable version of their own yet."""
    suspect: str = ""
    """The known or possible difference of replicas when it was taken."""
    is_past: bool = True
    """False if a later run restarted from an older version: no restart takes this one by itself."""
    restartable: bool = False
    """True if a restart that sees the same files can take this version."""
    elsewhere: str = ""
    """The job's id, for memory that no restart from these places sees."""
    next: bool = False
    """True if a restart that sees the same files takes this version from this level."""

    @property
    def missing(self) -> list[int]:
        """Shards that were not seen on this level."""
        return [shard for shard in range(self.shards) if shard not in self.there]

    def as_json(self) -> dict[str, Any]:
        """The row for other programs."""
        values = asdict(self)
        values["missing"] = self.missing
        values["there"] = len(self.there)
        return values


def rows_of(there: Survey) -> list[Row]:
    """The rows, oldest version first, and each version's levels cheapest first.

    A shard with only a manifest counts as missing, and is added to the problems.
    """
    there = without_bare(there)
    own = [copy for copy in there.copies if not there.is_elsewhere(copy.place)]
    lineages = {copy.key.id: copy.facts.lineage for copy in own}
    past = newest_lineage(lineages, there.next_run)
    taken = there.plan()
    rows = dict(_counted(there))
    for (id_, run_id, _, level), row in rows.items():
        row.is_past = on_lineage(id_, past)
        row.suspect = there.suspicion(id_)
        row.pinned = (level, id_.generation, id_.version) in there.pinned
        row.held_for = _forks_that_need(there, id_, level)
        if taken is not None and (taken.id, taken.run_id) == (id_, run_id) and not row.elsewhere:
            row.next = level in taken.levels or (level == "local" and "peer" in taken.levels)
    _mark_restorable(there, rows.values())
    _add_details(there, rows)
    _mark_bases(rows)
    return list(rows.values())


def by_version(there: Survey) -> dict[VersionId, Survey]:
    """The survey's copies of each version, newest generation last; without memory that no restart
    sees. To plan one version of thousands takes only its own copies."""
    found: dict[VersionId, list[Found]] = {}
    parities: dict[VersionId, list[FoundParity]] = {}
    for each in there.found:
        if not there.is_elsewhere(each.place):
            found.setdefault(each.key.id, []).append(each)
    for parity in there.parities:
        parities.setdefault(parity.key.id, []).append(parity)
    return {
        id_: replace(there, found=found.get(id_, []), parities=parities.get(id_, []))
        for id_ in sorted({*found, *parities})
    }


def complete_versions(there: Survey, path: str, run: int | None = None) -> dict[VersionId, Survey]:
    """The versions that can be read from here, oldest first, each with its own copies.

    They are those that the newest run came from, or the run with this number, and its own; of
    several with one number the newest. Raises ConfigError for a run that left nothing, and for
    places of two jobs.
    """
    refuse_several_jobs(there, path)
    parts = by_version(without_bare(there))
    lineages = {id_: part.copies[0].facts.lineage for id_, part in parts.items()}
    past = newest_lineage(lineages, there.next_run)
    if run is not None:
        past = _lineage_of(run, lineages.values(), path)
    newest = there.generation if run is None else run
    found: dict[int, tuple[VersionId, Survey]] = {}
    for id_, part in parts.items():  # newest generation last
        is_past = id_.generation <= newest and on_lineage(id_, past)
        if is_past and part.plan(id_.version, abandoned=True) is not None:
            found[id_.version] = id_, part
    return dict(found[version] for version in sorted(found))


def _lineage_of(run: int, lineages: Iterable[Lineage], path: str) -> Lineage:
    known: dict[int, Lineage] = {}
    for lineage in lineages:
        known |= {lineage[i][0]: lineage[: i + 1] for i in range(len(lineage))}
    if run not in known:
        runs = some(sorted(known), 6) or "none"
        raise ConfigError(
            f"{path}: nothing is left of run {run}; runs with versions: {runs} (tierckpt log shows "
            "all)"
        )
    return known[run]


def _forks_that_need(there: Survey, id_: VersionId, level: str) -> list[str]:
    """Paths of the forks that keep a version on a level."""
    marks = (child for at, child in there.children if at == level and child.held)
    return sorted({child.path or "unknown" for child in marks if child.id == id_})


def without_bare(there: Survey) -> Survey:
    """The survey without shards that have only a manifest; these are added to the problems."""
    bare = [
        each
        for each in there.found
        if each.place.level == "local" and LocalStore(each.place.where).is_bare(each.key)
    ]
    for each in bare:
        where = replace(each.place, where=f"{each.place.where}/{each.key.stem}")
        why = f"the data file of {each.key} is missing, only its manifest exists"
        there.problems.append(Problem(where, why, keys=(each.key,)))
    return replace(there, found=[each for each in there.found if each not in bare])


def _counted(there: Survey) -> Iterator[tuple[Group, Row]]:
    """The rows in order; a row of the local level also counts its parity."""
    found: dict[Group, list[Found]] = {}
    parities: dict[Group, list[FoundParity]] = {}
    for each in there.found:
        group = (each.key.id, each.facts.run_id, each.key.shards, each.place.level)
        found.setdefault(group, []).append(each)
    for parity in there.parities:
        group = (parity.key.id, parity.facts.run_id, parity.key.shards, "local")
        parities.setdefault(group, []).append(parity)
    for group in sorted({*found, *parities}, key=lambda g: (*g[:3], RANK[g[3]])):
        id_, run_id, shards, level = group
        here: list[Copy] = [*found.get(group, ()), *parities.get(group, ())]
        row = Row(id_.version, id_.generation, run_id, level, shards)
        row.there = {each.key.shard for each in found.get(group, ())}
        row.parities = len({each.key.shard for each in parities.get(group, ())})
        row.places = sorted({each.place.where for each in here})
        row.encoded = any(each.place.encoded for each in here)
        if all(there.is_elsewhere(each.place) for each in here):
            row.elsewhere = job_of(here[0].place)
        yield group, row


def _mark_restorable(there: Survey, rows: Iterable[Row]) -> None:
    parts = by_version(there)
    plans: dict[int, tuple[VersionId, str]] = {}
    for id_ in newest_first((id_, part.copies[0].facts.lineage) for id_, part in parts.items()):
        if id_.version not in plans and (plan := parts[id_].plan(id_.version, abandoned=True)):
            plans[id_.version] = plan.id, plan.run_id
    for row in rows:
        id_ = VersionId(row.generation, row.version)
        row.restartable = plans.get(row.version) == (id_, row.run_id)


def _add_details(there: Survey, rows: Mapping[Group, Row]) -> None:
    """Add facts from manifests. A manifest that has been removed adds nothing."""
    seen: set[tuple[Group, int]] = set()
    for each in there.found:
        group = (each.key.id, each.facts.run_id, each.key.shards, each.place.level)
        if each.place.level == "persistent" or (group, each.key.shard) in seen:
            continue
        seen.add((group, each.key.shard))
        if (manifest := manifest_at(each.key, each.place)) is not None:
            row = rows[group]
            row.nbytes += manifest.image_bytes
            row.created_seconds = max(row.created_seconds or 0.0, manifest.created_seconds)
            row.iteration = manifest.facts.iteration
            row.metric = manifest.facts.metric if row.metric is None else row.metric
            row.encoded |= manifest.encoding is not None
            if manifest.encoding is not None and manifest.encoding.base is not None:
                _refer(row, manifest.encoding.base)
    for (id_, run_id, shards, level), row in rows.items():
        if level == "persistent":
            _add_persistent(row, VersionName(id_, shards, run_id), there)


def _refer(row: Row, base: VersionId) -> None:
    row.refers_to = sorted({*row.refers_to, base.version})


def _mark_bases(rows: Mapping[Group, Row]) -> None:
    """Mark the versions that others refer to: those of the same run, on the same level."""
    for (id_, run_id, shards, level), row in rows.items():
        for version in row.refers_to:
            base = rows.get((VersionId(id_.generation, version), run_id, shards, level))
            if base is not None:
                base.needed_by.append(row.version)


def manifest_at(key: ShardKey, place: Location) -> Manifest | None:
    """The manifest of one copy in memory or on a disk; None if it is gone or damaged."""
    with suppress(Exception):
        if place.level == "memory":
            manifest = read_seal(Path(place.where))
        else:
            manifest = Manifest.decode(LocalStore(place.where).read_manifest(key))
        return manifest if manifest is not None and manifest.key == key else None
    return None


def _add_persistent(row: Row, name: VersionName, there: Survey) -> None:
    manifest = there.manifests.get((row.places[0], name))
    if manifest is not None:
        row.nbytes, row.iteration = manifest.nbytes, manifest.facts.iteration
        row.created_seconds = manifest.created_seconds
        row.metric = manifest.facts.metric
        for base in manifest.bases:
            row.encoded = True
            _refer(row, base.id)


MAX_SHARDS = 8


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
        f"{id_} cannot be restored from what is here: no usable copy of "
        f"{_shard_names(missing)} is left, "
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
        yield f"{_shard_names(theirs)} {'are' if theirs[1:] else 'is'} {way}"


def _shard_names(shards: Sequence[int]) -> str:
    return f"{'shards' if shards[1:] else 'shard'} {some(shards, MAX_SHARDS)}"


class Latest(Struct, frozen=True):
    """A version as its manifests describe it. As an index it is `iteration`."""

    version: int
    """Completed optimizer steps."""
    iteration: int
    """The number that `restore()` would return."""
    metric: float | None
    """The metric of this version, see `Checkpointer.step`."""
    ranks: int
    """Number of ranks that took it, one shard each."""
    levels: tuple[str, ...]
    """The levels that a restart would read, cheapest first."""

    def __index__(self) -> int:
        return self.iteration

    __int__ = __index__


def latest(path: Where | Sequence[Where]) -> Latest | None:
    """The newest complete version that a restart from here finds; None if there is none, so that a
    job would start from scratch.

    For a script that must know the version before it makes model and optimizer: the stage of a
    curriculum, the size of a grown model, the position in a data stream. Only manifests are read.
    If `restore()` then finds damage, it uses an older version: compare its result. Not collective.
    Each process sees the files that its node sees: if each node has its own disk, call this after
    `restore()`, or add the `persistent_path`.

    Args:
        path: as for `tierckpt.load`.

    Raises RestoreError if there are files that no restart from here can take, or that cannot be
    read: this is not a fresh start; ConfigError for places of several jobs.
    """
    given = [path] if isinstance(path, str | os.PathLike) else path
    order = order_here()
    places = [order.place_of(str(each)) if order else each for each in given]
    try:
        there = survey(places)
    except MissingPathError:
        if not (found := [each for each in places if _is_there(each)]):
            return None
        there = survey(found)
    shown = some([*map(str, given)])
    _refuse_unseen(there, shown)
    refuse_several_jobs(there, shown)
    taken = [row for row in rows_of(there) if row.next]
    if not taken:
        if not there.copies:
            return None
        versions = some([f"v{v}" for v in sorted({c.key.id.version for c in there.copies})[-8:]])
        raise RestoreError(
            f"{shown}: there are shards of {versions}, but no version is complete here",
            "A restart needs the other nodes or levels. Add their paths, or call restore()",
        )
    iteration = next((row.iteration for row in taken if row.iteration is not None), None)
    if iteration is None:
        raise RestoreError(f"{shown}: v{taken[0].version} was retired while it was read")
    return Latest(
        version=taken[0].version,
        iteration=iteration,
        metric=next((row.metric for row in taken if row.metric is not None), None),
        ranks=taken[0].shards,
        levels=tuple(row.level for row in taken),
    )


def _is_there(place: Where) -> bool:
    """False for a directory that does not exist yet, if its job has nothing in memory."""
    try:
        survey(place)
    except MissingPathError:
        return False
    return True


def _refuse_unseen(there: Survey, shown: str) -> None:
    newer = [each for each in there.problems if each.newer]
    if newer:
        raise RestoreError(
            f"{shown}: a newer release of tierckpt wrote {newer[0].place.where}: {newer[0].why}",
            "Use that release, or another path",
        )
    if there.unseen:
        why = some([f"{each.place.where}: {each.why}" for each in there.unseen], 4)
        text = f"{shown}: not all places could be read: {why}"
        raise RestoreError(text, "Make them readable, and try again")
