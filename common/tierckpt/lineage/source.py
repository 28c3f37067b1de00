"""A version of another job: found on all levels by all ranks together, read and verified.

The other job, the source, may be running. So its memory is copied before it is used, and checked
again, since the next version may be written to the same place at any moment; versions on other
levels are held (see `fork`) while they are read.

A job without a fork reads no other one: it does not import what lists levels.

The marks of a fork at its source, and the record of the origin beside its own versions, are here,
too. `fork` has the order of the steps, and what a kill between them leaves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt import _faults as faults
from tierckpt._text import directory_of, is_url, some
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.job_history import gather_inventories
from tierckpt.coordination.peers import UNKNOWN
from tierckpt.coordination.proof_order import order_here
from tierckpt.coordination.versions import Reports
from tierckpt.core.branches import (
    FORK_SETTING,
    Child,
    ForkSource,
    Origin,
    fork_name,
    nearest_version,
    source_of,
)
from tierckpt.core.levels import LOCAL, MEMORY, PERSISTENT
from tierckpt.core.restore_plan import EVERYWHERE, Found, FoundParity, Inventory, Location, distinct
from tierckpt.errors import CorruptShardError, FormatError, RestoreError
from tierckpt.format.ids import NO_RUN, VersionId
from tierckpt.format.manifest import digest, digest_at
from tierckpt.format.records import VersionFacts
from tierckpt.group import Group, Node
from tierckpt.restore.progress import Progress
from tierckpt.restore.shards import ShardImage, check_header, in_memory, runs_of
from tierckpt.restore.verification import Candidates, RestoreContext, VerifiedVersion, find
from tierckpt.storage.job_directory import job_directory
from tierckpt.storage.notes import ForkMarks, KeptFiles, OriginFile, Place, is_kept
from tierckpt.storage.persistent import PersistentStore, RetryPolicy

if TYPE_CHECKING:
    from tierckpt.offline.survey import Survey

__all__ = [
    "OwnMarks",
    "SourceLook",
    "SourceReader",
    "Wanted",
    "child_of",
    "encoded_in",
    "new_origin",
    "places_of",
]


TRIES = 5
"""Attempts to read a version from the memory of a running job."""


class Wanted(Struct, frozen=True):
    """A version of another job, as this job asks for it."""

    path: str
    version: int | None = None
    """None: the newest."""
    exactly: VersionId | None = None
    """Of several versions with that number, the one that a record names."""
    run_id: str = ""
    """The run that wrote that one: a job trained again under the same path has others."""
    cancel: str = ""
    """The commands that take that record back, for messages."""
    kept: tuple[str, ...] = ()
    """Folders of this node with second names of its files, see `storage.notes.KeptFiles`."""

    @property
    def name(self) -> str:
        """The version as people name it; without a number, the path."""
        return str(ForkSource(self.path, self.version))


class SourceLook(Struct):
    """What all ranks see of the source. The same on all ranks, except `here`."""

    candidates: Candidates
    here: Survey
    """What this rank sees."""
    facts: dict[VersionId, VersionFacts] = field(default_factory=dict)
    suspects: dict[VersionId, str] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    """Places that could not be read, and data of a newer format, as text."""

    def choose(self, wanted: Wanted, clean: bool) -> VersionId:
        """The wanted version: without a number, the newest complete one, with `clean` the newest
        one not suspect, if any. Raises RestoreError without it."""
        avoid = self.suspects.keys() if clean and wanted.version is None else ()
        if (exactly := wanted.exactly) is not None:
            others = self.facts.keys() - {exactly}
            if exactly in self.facts and self.candidates.plan(exactly.version, others):
                return exactly
            raise RestoreError(
                f"{exactly} of {wanted.path} is not there any more, and this job is to start from "
                "it. Nothing was changed",
                f"To start from another version: {wanted.cancel}",
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
        near = nearest_version(wanted.version or 0, whole)
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
        """What this process sees of another job, with its memory where this job's is. With
        `{node}`, it sees the folders of all nodes that are here: those of the source may have other
        names than this job's. Raises MissingPathError if neither `path` nor `kept` is there."""
        from tierckpt.offline.survey import MissingPathError, survey

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
        from tierckpt.offline.survey import MissingPathError, Survey, refuse_several_jobs

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
            f"{what}: its source continued to write. Nothing was changed",
            "Repeat it, or choose a version on disk (tierckpt list)",
        )
    plan = look.candidates.plan(avoid={id_})
    other = f"{wanted.path}@v{plan.id.version} is complete" if plan else "none is complete there"
    first = f". First: {wanted.cancel}" if wanted.cancel else ""
    return RestoreError(
        f"{what}: {some(bad)}. Nothing was changed", f"Start from another version: {other}{first}"
    )


def _nothing_there(wanted: Wanted, missing: str) -> RestoreError:
    if wanted.cancel:
        return RestoreError(
            f"this job is to start from {wanted.name}, and {missing}. Nothing was changed",
            f"Bring it back; or, to start from another version: {wanted.cancel}",
        )
    number = "After the last @ comes the number of a version" if "@" in wanted.path else ""
    return RestoreError(f"there is nothing to start from: {missing}. Nothing was changed", number)


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


IN_MEMORY = "it is in memory alone, where its job overwrites it"
"""The reason why a version cannot be held, of those for which there is a remedy of its own."""
CLOSE_SECONDS = 10.0
"""Time that the end of the job waits for the end of a hold."""


def new_origin(source: str, facts: VersionFacts, path: str, parts: tuple[str, ...] = ()) -> Origin:
    """The origin of a job with that path, which starts from a version of `source`."""
    name = fork_name(socket.gethostname(), path, source, facts.id, facts.run_id)
    return Origin(source, facts.id, facts.run_id, facts.job, name, parts, time.time())


def child_of(origin: Origin, path: str) -> Child:
    """The mark at the source, of the fork with that path."""
    return Child(origin.id, origin.name, path, socket.gethostname(), origin.since_seconds)


class OwnMarks:
    """The marks and records of this job, if it is a fork. Training thread."""

    def __init__(
        self, config: Config, group: Group, node: Node, reader: SourceReader, reports: Reports
    ) -> None:
        """Nothing is read or written yet."""
        self._config, self._group, self._reports = config, group, reports
        self._reader, self._is_first = reader, node.first == group.rank
        self._nodes = node.count
        self._allowed = order_here() is None
        """False in `tierckpt prove`, which changes nothing of the user's."""
        self.needs: Origin | None = None
        """The origin with its version held for this job."""
        self.recorded: dict[str, Origin] = {}
        """The records that `orders` found, by place."""
        self._held_at: list[str] = []
        """Places where this process has set a hold."""
        self._unheld = False
        """The version that this process starts from cannot be held: it is in memory alone."""
        self._noted_at: list[str] = []
        """Directories where this process is to note the fork, as there was nothing to hold."""
        self._thread: threading.Thread | None = None

    def orders(self, text: str) -> tuple[Origin | None, str]:
        """The record of an earlier start or of `tierckpt fork`, and `text`: what the script or the
        setting says. RestoreError on all ranks if ranks differ, or a record cannot be read.
        Collective."""
        found: dict[str, Origin] = {}
        trouble = ""
        try:
            for place in dict.fromkeys((self._config.directory, self._own_place)):
                if (origin := OriginFile(place).read()) is not None:
                    found[self._config.path] = origin
            if self._group.rank == 0 and (far := self._config.persistent.path):
                with self._store(far) as store:
                    if (origin := OriginFile(store).read()) is not None:
                        found[far] = origin
        except FileNotFoundError:
            pass
        except (CorruptShardError, FormatError) as error:
            trouble = f"the version that this job is to start from is unknown: {error}"
        except Exception as error:  # a client's own errors, too
            trouble = f"the record of this job's origin cannot be read: {error}"
        seen = self._group.all_gather_object((found, text, trouble))
        if troubles := [why for *_, why in seen if why]:
            place = shlex.quote(self._config.path)
            raise RestoreError(
                troubles[0],
                f"To start without it: tierckpt fork --cancel {place}; then order the fork again, "
                "if there is to be one",
            )
        if len({text for _, text, _ in seen}) > 1:
            texts = some([repr(text) for _, text, _ in seen])
            raise RestoreError(f"the ranks are to start from different versions: {texts}")
        self.recorded = {place: each for theirs, *_ in seen for place, each in theirs.items()}
        return next(iter(self.recorded.values()), None), text

    @property
    def cancel_commands(self) -> str:
        """The commands that remove the records which `orders` found."""
        commands = [f"tierckpt fork --cancel {shlex.quote(place)}" for place in self.recorded]
        return ", ".join(commands) + (" (on every node)" if commands and self._nodes > 1 else "")

    def kept(self, origin: Origin) -> tuple[str, ...]:
        """Folders of this node that keep files of the origin's version. Not collective."""
        folders = (KeptFiles(place, origin.name).folder for place in self._own_folders())
        return tuple(str(each) for each in folders if each.is_dir())

    def hold(self, origin: Origin, look: SourceLook, barrier: ErrorBarrier) -> str:
        """Have the source keep the version, and keep its files here where they can have second
        names. Returns why the source cannot, or an empty text. Collective, inside `barrier`."""
        trouble = ""
        if self._allowed:
            try:
                self._mark(origin, look.here)
            except Exception as error:  # a client's own errors, too
                trouble = str(error)
        faults.point("fork", op="hold")
        stays = bool(self._held_at or self.kept(origin))
        seen = barrier.all_gather_object((trouble, stays))
        if self._allowed and not any(stays for _, stays in seen):
            self._unheld = True
            return IN_MEMORY
        return next((text for text, _ in seen if text), "")

    def _mark(self, origin: Origin, here: Survey) -> None:
        child = self._child(origin)
        places = places_of(here, origin.id)
        self._noted_at = [] if places or not self._is_first else _folders_of(here, origin.id)
        for place in places.get(LOCAL, ()) if self._is_first else ():
            ForkMarks(place).add(child)
            self._held_at.append(place)
            if not encoded_in(here, origin.id, place):
                self._link(place, origin)
        for place in places.get(PERSISTENT, ()) if self._group.rank == 0 else ():
            with self._store(place) as store:
                ForkMarks(store).add(child)
            self._held_at.append(directory_of(place))
            if not is_url(place):
                self._link(directory_of(place), origin)

    def _child(self, origin: Origin) -> Child:
        return child_of(origin, self._reader.template(self._config.path))

    def _link(self, place: str, origin: Origin) -> None:
        """Keep the files of a place, if a directory of this job is on the same file system."""
        for folder in self._own_folders():
            with contextlib.suppress(OSError):
                KeptFiles(folder, origin.name).link(place, origin.id)
                return

    def _own_folders(self) -> list[str]:
        """Directories of this job that this node has. `tierckpt fork` does not know the settings:
        it keeps files beside a level that this job may not use."""
        here, found = str(self._config.directory), list[str]()
        if self._config.uses(LOCAL) or KeptFiles.all_in(here):
            found = [here]
        far = self._config.persistent.path if self._config.uses(PERSISTENT) else ""
        return found + ([directory_of(far)] if far and not is_url(far) else [])

    def end_hold(self, origin: Origin) -> None:
        """Remove the marks of a fork that did not start. Not collective; raises nothing."""
        with contextlib.suppress(Exception):
            for place in self._held_at:
                with self._opened(place) as opened:
                    ForkMarks(opened).remove(origin.id, origin.name)
            self._forget_files()
        self._held_at = []

    def _forget_files(self) -> None:
        for folder in self._own_folders() if self._is_first else ():
            KeptFiles.remove_all(folder)

    def note(self, origin: Origin, now: bool = True) -> None:
        """Write the record, now or with the end of the hold; a failure is reported, and costs no
        training. Not collective."""
        self.needs = origin
        if not now:
            return
        try:
            self._write(origin)
        except Exception as error:  # a client's own errors, too
            self._reports.notice(
                f"the origin of this job, {origin}, could not be noted: {error}. If it is killed "
                "before it has a version on disk, its next start chooses a version again",
                logging.WARNING,
            )

    def _write(self, origin: Origin) -> None:
        """Write the record at all places of this rank. Raises OSError and PersistentError."""
        for place in self._own_places():
            OriginFile(place).write(origin)
        if self._group.rank == 0 and self._config.uses(PERSISTENT) and self._allowed:
            with self._store(self._config.persistent.path) as store:
                store.create()
                OriginFile(store).write(origin)

    @property
    def _own_place(self) -> str:
        """The directory of this job on this node; without a local level its folder in memory."""
        if self._config.uses(LOCAL):
            return self._config.directory
        return str(job_directory(self._config).path)

    def _own_places(self) -> list[Place]:
        return [self._own_place] * self._is_first

    @contextlib.contextmanager
    def _store(self, place: str) -> Iterator[PersistentStore]:
        own = self._config.persistent
        there = own if place == own.path else own.at(place)
        few = RetryPolicy(tries=3)
        made = PersistentStore(there.path, retry=few, **there.options())
        with contextlib.closing(made) as store:
            yield store

    # --- the end of the hold -------------------------------------------------------------------

    def has_versions(self) -> None:
        """This start found versions of the job: look whether an earlier one left a hold, and
        whether the job started where the setting says. Not collective."""
        with contextlib.suppress(Exception):
            for place in self._own_places():
                origin = OriginFile(place).read() or self._from_afar(OriginFile(place))
                self.needs = origin if origin is not None and origin.held else None
                self._compare(origin)

    def _from_afar(self, here: OriginFile) -> Origin | None:
        """The record of the persistent level, written here, too: this node is a new one."""
        far = self._config.persistent.path if self._config.uses(PERSISTENT) else ""
        if self._group.rank or not (far and self._config.fork_from and self._allowed):
            return None
        with self._store(far) as store:
            origin = OriginFile(store).read()
        if origin is not None:
            here.write(origin)
        return origin

    def _compare(self, origin: Origin | None) -> None:
        text = self._config.fork_from
        if not text or self._group.rank != 0 or not self._allowed:
            return
        if origin is None or origin.source != self._reader.template(source_of(text).path):
            self._reports.notice(
                f"{FORK_SETTING}={text!r} has no effect: this job has versions of its own in "
                f"{self._config.path}. For a new job give another path (a path in the script wins "
                "over TIERCKPT_PATH)",
                logging.WARNING,
            )

    def settle(self, on_disk: VersionId | None, in_memory: VersionId | None) -> None:
        """End the hold if this job has a version on all ranks' disks; if it has no disk and the
        source's version cannot be held, note the fork once all ranks have one in memory. A thread
        does it, as no step waits for the source's store. Not collective; a failure is reported, and
        the next start tries again."""
        memory_counts = self._unheld and not self._config.uses(LOCAL)
        origin = self.needs
        if origin is None or (in_memory if memory_counts else on_disk) is None:
            return
        self.needs = None
        if not self._allowed:
            return
        thread = threading.Thread(
            target=self._settle, args=(origin,), name="tierckpt-fork-mark", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # the limit of threads: the next start tries again
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Wait a little for the end of the hold."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _settle(self, origin: Origin) -> None:
        faults.point("fork", op="own")
        try:
            for place in self._places_of_marks(origin):
                with self._opened(place) as opened:
                    ForkMarks(opened).release(origin.id, origin.name)
            for place in self._noted_at:
                with contextlib.suppress(OSError):  # it is for the history alone
                    ForkMarks(place).add(replace(self._child(origin), held=False))
            self._forget_files()
            faults.point("fork", op="settled")
            self._write(replace(origin, held=False))
        except Exception as error:  # a client's own errors, too
            self._reports.notice_later(
                f"{origin} is still held for this job, which does not need it any more: {error}. "
                f"The next start tries again; or: tierckpt unpin {origin.source} "
                f"{origin.id.version} --forks",
                logging.WARNING,
            )

    def _places_of_marks(self, origin: Origin) -> list[str]:
        if self._held_at or not (self._is_first or self._group.rank == 0):
            return self._held_at
        from tierckpt.offline.survey import MissingPathError

        try:
            here = self._reader.survey(origin.source)
        except MissingPathError:  # the source was deleted, with its marks
            return []
        marks = {child.where for _, child in here.children if child.name == origin.name}
        places = {directory_of(each) for each in marks}
        return sorted(p for p in places if (not self._group.rank if is_url(p) else self._is_first))

    @contextlib.contextmanager
    def _opened(self, place: str) -> Iterator[Place]:
        if not is_url(place):
            yield place
            return
        with self._store(place) as store:
            yield store


def _folders_of(here: Survey, id_: VersionId) -> list[str]:
    """Directories of a job with a version in memory alone; if it has none, its folder there."""
    used = {copy.place.where for copy in here.copies if copy.place.level == LOCAL}
    found = sorted(used - {*filter(is_kept, used)}) or [*map(str, here.directories)]
    in_memory = (c.place for c in here.copies if c.key.id == id_ and c.place.level == MEMORY)
    return found or sorted({os.path.dirname(place.where) for place in in_memory})
