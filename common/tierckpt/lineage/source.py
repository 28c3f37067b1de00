"""A version of another job: found on all levels by all ranks together, read and verified.

The other job, the source, may be running. So its memory is copied before it is used, and checked
again, since the next version may be written to the same place at any moment; versions on other
levels are held (see `fork`) while they are read.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tierckpt._text import is_url, some
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.former_nodes import UNKNOWN
from tierckpt.coordination.inventory_exchange import gather_inventories
from tierckpt.coordination.reports import Reports
from tierckpt.core.copies import EVERYWHERE, Found, FoundParity, Inventory, Location, distinct
from tierckpt.core.fork import ForkSource
from tierckpt.core.levels import LOCAL, MEMORY, PERSISTENT
from tierckpt.core.rollback import nearest
from tierckpt.errors import CorruptShardError, RestoreError
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import NO_RUN, VersionId
from tierckpt.format.manifest import digest, digest_at
from tierckpt.group import Group
from tierckpt.offline.folders import MissingPathError
from tierckpt.offline.jobs import refuse_several_jobs
from tierckpt.offline.survey import Survey, survey
from tierckpt.restore.candidates import Candidates
from tierckpt.restore.progress import Progress
from tierckpt.restore.shard_image import ShardImage, in_memory
from tierckpt.restore.shard_reader import check_header, runs_of
from tierckpt.restore.verification import RestoreContext, find
from tierckpt.restore.verified_version import VerifiedVersion
from tierckpt.storage.forks import is_kept

TRIES = 5
"""Attempts to read a version from the memory of a job that goes on writing."""


@dataclass(frozen=True)
class Wanted:
    """A version of another job, as this job asks for it."""

    path: str
    version: int | None = None
    """None: the newest."""
    exactly: VersionId | None = None
    """Of several versions with that number, the one that a record names."""
    run_id: str = ""
    """The run that wrote that one: a job that is trained again under the same path has others."""
    cancel: str = ""
    """The commands that take that record back, for messages."""
    kept: tuple[str, ...] = ()
    """Folders of this node with second names of its files, see `storage.forks.KeptFiles`."""

    @property
    def name(self) -> str:
        """The version as people name it; without a number, the path."""
        return str(ForkSource(self.path, self.version))


@dataclass
class SourceLook:
    """What all ranks see of the source. The same on all ranks, except `here`."""

    candidates: Candidates
    here: Survey
    """What this rank sees."""
    facts: dict[VersionId, VersionFacts] = field(default_factory=dict)
    suspects: dict[VersionId, str] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    """Places that could not be read, and data of a newer format, in words."""

    def choose(self, wanted: Wanted, clean: bool) -> VersionId:
        """The version that is wanted: without a number, the newest that is complete, with `clean`
        the newest that is not suspect, if there is one. Raises RestoreError without it."""
        avoid = self.suspects.keys() if clean and wanted.version is None else ()
        if (exactly := wanted.exactly) is not None:
            others = self.facts.keys() - {exactly}
            if exactly in self.facts and self.candidates.plan(exactly.version, others):
                return exactly
            raise RestoreError(
                f"{exactly} of {wanted.path} is not there any more, and this job is to begin from "
                "it. Nothing was changed",
                f"To begin from another version: {wanted.cancel}",
            )
        plan = self.candidates.plan(wanted.version, avoid) or self.candidates.plan(wanted.version)
        if self.unseen and (plan is None or wanted.version is None):
            raise RestoreError(
                f"the versions of {wanted.path} are not all readable: {some(self.unseen)}. Nothing "
                "was changed",
                f"Make them readable, or name the version: {wanted.path}@VERSION",
            )
        if plan is not None:
            return plan.id
        there = {id_.version for id_ in self.facts}
        whole = [v for v in sorted(there) if self.candidates.plan(v) is not None]
        what = "complete version" if wanted.version is None else f"complete v{wanted.version}"
        near = nearest(wanted.version or 0, whole)
        names = ", ".join(f"v{each}" for each in near) or "none"
        raise RestoreError(
            f"there is no {what} in {wanted.path}. Nothing was changed",
            f"The nearest complete ones there are {names}. If other nodes have the rest: the "
            "source's path must lead to theirs, too",
        )


class SourceReader:
    """Reads versions of other jobs. Training thread; all ranks make the same calls."""

    def __init__(self, config: Config, group: Group, host: str, reports: Reports) -> None:
        """`host`: the id of this rank's node."""
        self._config, self._group, self._host, self._reports = config, group, host, reports

    def template(self, path: str) -> str:
        """A path for all nodes: absolute and without links, with `{node}` if it has that; a URL as
        it is."""
        return path if is_url(path) else os.path.realpath(path)

    def place(self, path: str) -> str:
        """A path on this node, absolute and without links; a URL as it is."""
        return path if is_url(path) else os.path.realpath(path.replace("{node}", self._config.here))

    def survey(self, path: str, kept: Sequence[str] = ()) -> Survey:
        """What this process sees of another job, whose memory is where this job's is. With
        `{node}`, it sees the folders of all nodes that are here: those of the source may have other
        names than this job's. Raises MissingPathError if neither `path` nor `kept` is there."""
        config = replace(self._config, job_id="")
        try:
            return survey([self.template(path), *kept], config)
        except MissingPathError:
            if not kept:
                raise
            return survey(kept, config)

    def look(self, wanted: Wanted, barrier: ErrorBarrier) -> SourceLook:
        """Take the inventory of another job's levels. Collective, inside `barrier`. Raises
        RestoreError if it is this job, or if no rank finds anything there."""
        path = wanted.path
        place = self.place(path)
        own = (self._config.directory, self._config.persistent.path)
        if place in (each if is_url(each) else os.path.realpath(each) for each in own if each):
            raise RestoreError(
                f"{path} is this job's own place, and no other job's",
                "To go back to an older version of this job: restore(version=...), or tierckpt "
                "rollback",
            )
        here, missing = Survey(), ""
        try:
            here = self.survey(path, wanted.kept)
            if not wanted.run_id:
                refuse_several_jobs(here, path)
        except MissingPathError as error:  # a node that the source had not
            missing = str(error)
        if all(nowhere := barrier.all_gather_object(missing)):
            raise _nothing_there(wanted, nowhere[0])
        inventories, _ = gather_inventories(barrier, self._inventory(here, wanted), UNKNOWN)
        different: list[Inventory] = distinct(inventories)
        rejected = self._rejected if self._group.rank == 0 else lambda text: None
        look = SourceLook(
            Candidates(
                [i.found for i in inventories],
                [i.parities for i in inventories],
                [i.host for i in inventories],
                rejected,
                max((each.entry for i in different for each in i.rollbacks), default=NO_RUN),
                abandoned=True,  # a version that was given up is a good start of another job
            ),
            here,
        )
        for each in different:
            look.suspects |= dict(each.suspects)
            copies: tuple[Found | FoundParity, ...] = (*each.found, *each.parities)
            look.facts |= {copy.key.id: copy.facts for copy in copies}
            newer = [problem for problem in each.problems if problem.newer]
            look.unseen += [f"{p.place.where}: {p.why}" for p in (*each.unseen, *newer)]
        look.suspects |= {i: f.suspect for i, f in look.facts.items() if f.suspect}
        look.unseen = [*dict.fromkeys(look.unseen)]
        return look

    def _rejected(self, text: str) -> None:
        self._reports.emit("rejected", message=text, severity=logging.WARNING)

    def _inventory(self, here: Survey, wanted: Wanted) -> Inventory:
        """This rank's part: only rank 0 offers what all ranks can read."""
        far = self._group.rank == 0

        def mine(copy: Found | FoundParity) -> Location | None:
            place = copy.place
            if wanted.run_id not in ("", copy.facts.run_id):
                return None
            if place.host == EVERYWHERE:
                return place if far else None
            return None if here.is_elsewhere(place) else replace(place, host=self._host)

        found = tuple(replace(f, place=place) for f in here.found if (place := mine(f)) is not None)
        parities = tuple(
            replace(p, place=place) for p in here.parities if (place := mine(p)) is not None
        )
        return Inventory(
            found,
            tuple(here.problems),
            tuple(here.unseen),
            here.generation,
            self._host,
            secrets.token_hex(24),
            parities,
            suspects=tuple(here.suspects.items()),
            rollbacks=tuple(here.rollbacks),
        )

    def read(
        self,
        wanted: Wanted,
        look: SourceLook,
        id_: VersionId,
        bar: Progress,
        barrier: ErrorBarrier,
    ) -> VerifiedVersion:
        """Read and verify a version; the caller closes it. Collective, inside `barrier`. Raises
        RestoreError if no copy of it is sound, or if the source's memory is written all the
        time."""
        for _ in range(TRIES):
            # Nothing is filled ahead: the source may write to its memory after the check.
            context = RestoreContext(barrier, bar, look.here.open_far)
            others = look.facts.keys() - {id_}
            found = find(context, look.candidates, id_.version, others)
            if found is None:
                break
            if self._detach(found, barrier):
                return found
            found.close()
            look = self.look(wanted, barrier)
        raise _not_read(id_, wanted, look)

    def _detach(self, found: VerifiedVersion, barrier: ErrorBarrier) -> bool:
        """Replace images in the source's memory by copies. False, on all ranks, if the source has
        written to one of them. Collective."""
        sound = True
        for source in found.plan.sources:
            if source.place.level == MEMORY and source.shard in found.images and sound:
                image = found.images[source.shard]
                try:
                    found.images[source.shard] = _copied(image)
                except CorruptShardError:
                    sound = False
                else:
                    image.close()
        return all(barrier.all_gather_object(sound))


def _not_read(id_: VersionId, wanted: Wanted, look: SourceLook) -> RestoreError:
    bad = look.candidates.rejected
    what = f"{id_} of {wanted.path} could not be read"
    if not bad:
        return RestoreError(
            f"{what}: its source went on writing. Nothing was changed",
            "Repeat it, or choose a version that is on disk (tierckpt list)",
        )
    plan = look.candidates.plan(avoid={id_})
    other = f"{wanted.path}@v{plan.id.version} is complete" if plan else "none is complete there"
    first = f". First: {wanted.cancel}" if wanted.cancel else ""
    return RestoreError(
        f"{what}: {some(bad)}. Nothing was changed", f"Begin from another version: {other}{first}"
    )


def _nothing_there(wanted: Wanted, missing: str) -> RestoreError:
    if wanted.cancel:
        return RestoreError(
            f"this job is to begin from {wanted.name}, and {missing}. Nothing was changed",
            f"Bring it back; or, to begin from another version: {wanted.cancel}",
        )
    number = "After the last @ comes the number of a version" if "@" in wanted.path else ""
    return RestoreError(f"there is nothing to begin from: {missing}. Nothing was changed", number)


def _copied(image: ShardImage) -> ShardImage:
    """A copy in this process. Raises CorruptShardError if it is not the version any more."""
    copy = in_memory(image.manifest)
    try:
        nbytes = image.manifest.image_bytes
        copy.view[:nbytes] = image.view[:nbytes]
        header = check_header(copy)
        for run in runs_of(header):
            low = run.low
            for number, count in enumerate(run.block_bytes, run.first):
                block = copy.view[low : low + count]
                if digest(block) != digest_at(image.manifest.digests, number):
                    raise CorruptShardError("the source wrote to it")
                low += count
    except BaseException:
        copy.close()
        raise
    return copy


def places_of(here: Survey, id_: VersionId) -> dict[str, list[str]]:
    """Places where retention may remove a version of the source, as this process sees them, by
    level: directories of the local level, and addresses of the persistent level."""
    found = dict[str, set[str]]()
    for place in (copy.place for copy in here.copies if copy.key.id == id_):
        if place.level in (LOCAL, PERSISTENT) and not is_kept(place.where):
            found.setdefault(place.level, set()).add(place.where)
    return {level: sorted(where) for level, where in found.items()}


def encoded_in(here: Survey, id_: VersionId, place: str) -> bool:
    """Whether shards of the version at a place need those of other versions, or may need them."""
    return any(f.place.encoded for f in here.found if f.key.id == id_ and f.place.where == place)


__all__ = ["SourceLook", "SourceReader", "Wanted", "encoded_in", "places_of"]
