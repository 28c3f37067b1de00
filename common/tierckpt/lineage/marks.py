"""The marks of a fork at its source, and the record of the origin beside its own versions.

`fork` has the order of the steps, and what a kill between them leaves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from tierckpt import _faults as faults
from tierckpt._text import directory_of, is_url, some
from tierckpt.config import Config
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.proof_order import order_here
from tierckpt.coordination.reports import Reports
from tierckpt.core.fork import SETTING, Child, Origin, name_of, source_of
from tierckpt.core.levels import LOCAL, MEMORY, PERSISTENT
from tierckpt.errors import CorruptShardError, FormatError, RestoreError
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import VersionId
from tierckpt.group import Group, Node
from tierckpt.offline.folders import MissingPathError
from tierckpt.offline.survey import Survey
from tierckpt.storage.forks import ForkMarks, KeptFiles, OriginFile, is_kept
from tierckpt.storage.memory.job_directory import job_directory
from tierckpt.storage.notes import Place
from tierckpt.storage.persistent import PersistentStore, RetryPolicy

from .source import SourceLook, SourceReader, encoded_in, places_of

IN_MEMORY = "it is in memory alone, where its job overwrites it"
"""The reason why a version cannot be held, of those for which there is a remedy of its own."""
CLOSE_SECONDS = 10.0
"""Time that the end of the job waits for a hold that is being ended."""


def new_origin(source: str, facts: VersionFacts, path: str, parts: tuple[str, ...] = ()) -> Origin:
    """The origin of a job with that path, which begins from a version of `source`."""
    name = name_of(socket.gethostname(), path, source, facts.id, facts.run_id)
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
        """The origin whose version is held for this job."""
        self.recorded: dict[str, Origin] = {}
        """The records that `orders` found, by place."""
        self._held_at: list[str] = []
        """Places where this process has set a hold."""
        self._unheld = False
        """The version that this process begins from cannot be held: it is in memory alone."""
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
            trouble = f"the version that this job is to begin from is unknown: {error}"
        except Exception as error:  # a client's own errors, too
            trouble = f"the record of this job's origin cannot be read: {error}"
        seen = self._group.all_gather_object((found, text, trouble))
        if troubles := [why for *_, why in seen if why]:
            place = shlex.quote(self._config.path)
            raise RestoreError(
                troubles[0],
                f"To begin without it: tierckpt fork --cancel {place}; then order the fork again, "
                "if there is to be one",
            )
        if len({text for _, text, _ in seen}) > 1:
            texts = some([repr(text) for _, text, _ in seen])
            raise RestoreError(f"the ranks are to begin from different versions: {texts}")
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
        """Directories of this job that this node has."""
        found = [str(self._config.directory)] if self._config.uses(LOCAL) else []
        far = self._config.persistent.path if self._config.uses(PERSISTENT) else ""
        return found + ([directory_of(far)] if far and not is_url(far) else [])

    def let_go(self, origin: Origin) -> None:
        """Remove the marks of a fork that did not begin. Not collective; raises nothing."""
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
        whether the job began where the setting says. Not collective."""
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
                f"{SETTING}={text!r} has no effect: this job has versions of its own in "
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
    """Directories of a job whose version is in memory alone; if it has none, its folder there."""
    used = {copy.place.where for copy in here.copies if copy.place.level == LOCAL}
    found = sorted(used - {*filter(is_kept, used)}) or [*map(str, here.directories)]
    in_memory = (c.place for c in here.copies if c.key.id == id_ and c.place.level == MEMORY)
    return found or sorted({os.path.dirname(place.where) for place in in_memory})


__all__ = ["OwnMarks", "child_of", "new_origin"]
