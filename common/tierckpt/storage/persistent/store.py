"""The `persistent` level's store: whole versions on a parallel file system or an object store.

There is no coordinator and no collective call. Every writer (a node's agent) stores its own shards
and writes a record when they are durable. A writer that sees the records of a whole group writes
the group's record; a writer that sees all groups' records writes the version's manifest, which
alone makes the version exist. Two writers that see this at once write the same bytes. The last
writer sees everything, so if no writer dies the manifest is written; and if the last one dies, any
later `flush` of the same version, also without shards, finishes it.

A version under removal has a `.retired` mark from before its manifest is removed until its
folder is gone. A writer that made a manifest looks for the mark, and then for the folder. If there
is no mark, either the remover has finished, and the folder is gone; or it has not started, and will
remove the manifest itself. So no manifest outlives its shards (except that of a writer killed at
this very point: its readers find no shards, and try the next version). Pins and removers look for
each other in the same way, each after having set its own mark; and so do removers and versions that
refer to the version being removed; their mark is their manifest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from tierckpt.config import RetentionPolicy
from tierckpt.core.retention import HeldVersion, retirable_names
from tierckpt.errors import CorruptShardError, FlushCancelledError, FormatError, PersistentError
from tierckpt.format.ids import (
    GROUP,
    MANIFEST,
    PIN,
    RETIRED,
    SHARDS_PER_GROUP,
    SUSPECT,
    Groups,
    VersionId,
    VersionName,
    held_by_forks,
)
from tierckpt.format.manifest import Manifest
from tierckpt.format.records import (
    ShardRecord,
    VersionFacts,
    VersionManifest,
    decode_shards,
    encode_shards,
    fingerprint,
)

from .backend import WINDOW_BYTES, Backend, Clock, RetryingBackend, RetryPolicy, SystemClock
from .backends import open_backend
from .lease import Lease, LeaseRecord
from .shards import GroupFiles, ShardReader, Source, parts_of


class FlushResult(Struct, frozen=True):
    """Result of a flush."""

    committed: bool
    """The version exists now; False if other writers' shards are missing."""
    written_bytes: int
    reused_bytes: int
    """Bytes that an earlier, interrupted flush had already made durable."""
    seconds: float


class PersistentStore:
    """Store of one persistent path. One thread per instance; any number of instances, on any
    machine.

    `path` is a directory or a URL; its client receives `storage_options`. All writers of a job must
    give the same `shards_per_group`. `sleep` waits between attempts and may raise to give up.
    Errors are PersistentError; FileNotFoundError is raised for things that do not exist.
    """

    def __init__(
        self,
        path: str,
        shards_per_group: int = SHARDS_PER_GROUP,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
        on_retry: Callable[[str], None] = lambda text: None,
        **storage_options: Any,
    ) -> None:
        inner = open_backend(path, **storage_options)
        retry = retry or RetryPolicy()
        self.backend: Backend = RetryingBackend(inner, retry, sleep, on_retry=on_retry)
        self.shards_per_group = shards_per_group
        self._groups_read: dict[tuple[VersionName, int], dict[int, ShardRecord]] = {}
        self._bases_read: dict[VersionName, tuple[VersionName, ...]] = {}

    @property
    def url(self) -> str:
        """Address of the store, for messages."""
        return self.backend.url

    def create(self) -> None:
        """Create the directory; does nothing on an object store."""
        self.backend.create()

    def close(self) -> None:
        """Close connections."""
        self.backend.close()

    def lease(
        self, run_id: str, owner: str, clock: Clock | None = None, creates: bool = True
    ) -> Lease:
        """This run's lease on the place; see `Lease`."""
        return Lease(self.backend, run_id, owner, clock or SystemClock(), creates=creates)

    def take_over(self) -> str | None:
        """Free the path from the job that holds its lease; returns the owner, or None if there was
        none.

        For a job that hangs and cannot be ended. It loses no data: its versions stay.
        """
        taken = self._unowned_lease().take_away()
        return taken.owner if taken else None

    def lease_record(self) -> LeaseRecord | None:
        """The newest lease, which may have ended; None if there is none."""
        return self._unowned_lease().newest()

    def owner(self) -> str:
        """Job and node that hold the lease; empty if there is no lease. The job may be dead: known
        only after the lease's duration."""
        newest = self.lease_record()
        return newest.owner if newest and newest.run_id else ""

    def _unowned_lease(self) -> Lease:
        return Lease(self.backend, "", "nobody", SystemClock(), lease_seconds=0.0)

    # --- writing -------------------------------------------------------------------------------

    def flush(
        self,
        facts: VersionFacts,
        largest_bytes: int,
        sources: Sequence[Source],
        pacer: Callable[[int], None] = lambda nbytes: None,
    ) -> FlushResult:
        """Make this writer's shards durable, and the version, if they were the last ones.

        After an error or a kill, the next flush of the same version does not write durable shards
        again; nothing else was changed, and if the error came last, the version exists. `pacer` is
        called with the size of each window before it is read, and may wait or raise (see
        `pacer.FlushPacer`). Raises FlushCancelledError also if the version was retired meanwhile.
        Without `sources`, only unfinished work of other writers is finished.
        """
        start = time.perf_counter()
        name = facts.name
        if self.exists(name):
            return FlushResult(True, 0, sum(s.most_bytes for s in sources), 0.0)
        self._check_not_retired(name)
        groups = Groups(name.shards, self.shards_per_group)
        parts = parts_of(self.backend, name, groups, largest_bytes)
        written = reused = 0
        for run in parts.runs([s.shard for s in sources]):
            wanted = [s for s in sources if s.shard in run]
            stored = parts.stored(run)
            if _all_stored(stored, wanted):
                reused += sum(stored[s.shard].nbytes for s in wanted)
                continue
            written += parts.write(wanted, pacer)
            self._check_not_retired(name)
        touched = {groups.of(s.shard) for s in sources} or set(range(groups.count))
        closed = [self._close_group(name, parts, groups, g) for g in sorted(touched)]
        committed = all(closed) and self._commit(facts, largest_bytes, groups)
        return FlushResult(committed, written, reused, time.perf_counter() - start)

    def _close_group(
        self, name: VersionName, parts: GroupFiles, groups: Groups, group: int
    ) -> bool:
        """Write the group's record if the group is complete; False if it is not."""
        path = _group_path(name, groups, group)
        try:
            self.backend.size(path)
        except FileNotFoundError:
            records = parts.whole(group)
            if records is None:
                return False
            self.put(path, encode_shards("group", records.values()))
        return True

    def _commit(self, facts: VersionFacts, largest_bytes: int, groups: Groups) -> bool:
        """Write the manifest if every group has its record; False if not."""
        name = facts.name
        there = self.backend.sizes(name.stem)
        files = [f"{groups.label(g)}{GROUP}" for g in range(groups.count)]
        if not all(file in there for file in files):
            return False
        prints, total, stems = [], 0, set[str]()
        created_seconds: float | None = None
        for file in files:
            data = self.backend.read(f"{name.stem}/{file}")
            records = decode_shards("group", data).values()
            total += sum(r.nbytes for r in records)
            stems |= {r.base for r in records if r.base}
            created_seconds = created_seconds or _created_seconds(records)
            prints.append((file, fingerprint(data)))
        bases = tuple(sorted(b for b in map(VersionName.parse, stems) if b is not None))
        manifest = VersionManifest(
            facts,
            largest_bytes,
            groups.per_group,
            tuple(prints),
            total,
            bases,
            created_seconds,
        )
        self._check_not_retired(name)
        self.put(name.stem + MANIFEST, manifest.encode())
        # If anything fails from here on, the version exists, unless the check says that it must
        # not.
        why = self._why_void(name, set(files), bases)
        if why:
            self.backend.delete(name.stem + MANIFEST)
            raise FlushCancelledError(why)
        return True

    def _why_void(self, name: VersionName, files: set[str], bases: Sequence[VersionName]) -> str:
        """Why the new version must not exist: its remover may not have seen the manifest. The order
        of the checks matters, see the module's docstring."""
        if self._there(name.stem + RETIRED):
            return f"{name} was retired while it was being flushed"
        if not self.backend.sizes(name.stem).keys() >= files:
            return f"{name} was retired while it was being committed"
        for base in bases:
            if self._there(base.stem + RETIRED) or not self.exists(base):
                return f"{name} refers to {base}, which was retired"
        return ""

    def put(self, path: str, data: bytes) -> None:
        """Write a small file, in place of an earlier one."""
        self.backend.put(path, lambda: iter([memoryview(data)]), len(data))

    def exists(self, name: VersionName) -> bool:
        """True if the version's manifest exists."""
        return self._there(name.stem + MANIFEST)

    def _there(self, path: str) -> bool:
        try:
            self.backend.size(path)
        except FileNotFoundError:
            return False
        return True

    def _check_not_retired(self, name: VersionName) -> None:
        if self._there(name.stem + RETIRED):
            raise FlushCancelledError(f"{name} was retired while it was being flushed")

    # --- reading -------------------------------------------------------------------------------

    def versions(self) -> list[VersionName]:
        """Every version that exists, oldest first. One listing."""
        return self._with_suffix(MANIFEST)

    def obstructed(self) -> list[VersionName]:
        """Versions that may exist, as there is a folder with the name of the manifest. One listing.
        This package never makes such folders."""
        return self._with_suffix(f"{MANIFEST}/")

    def held(self) -> set[VersionId]:
        """Versions that forks need (see `storage.notes`): retention leaves them alone, too."""
        return held_by_forks(self.backend.sizes())

    def incomplete(self) -> list[VersionName]:
        """Versions with a started write or removal, that do not exist."""
        names = self.backend.sizes()
        stems = {n.rstrip("/") for n in names if n.endswith("/")}
        stems |= {n.removesuffix(RETIRED) for n in names if n.endswith(RETIRED)}
        there = {n.rstrip("/") for n in names}  # a folder is no manifest, but may hide one
        found = {VersionName.parse(s) for s in stems if s + MANIFEST not in there}
        return sorted(n for n in found if n is not None)

    def is_used(self) -> bool:
        """Whether any job has left anything here: a version, finished or not, or a lease."""
        versions = self.versions() or self.incomplete() or self.obstructed()
        return bool(versions or self._unowned_lease().numbers())

    def read_manifest(self, name: VersionName) -> VersionManifest:
        """The version's manifest, checked. Raises CorruptShardError or FormatError if the check
        fails."""
        manifest = VersionManifest.decode(self.backend.read(name.stem + MANIFEST))
        if manifest.name != name:
            raise FormatError(f"{self.url}: the manifest of {name} says it is {manifest.name}")
        return manifest

    def open_shard(self, name: VersionName, shard: int) -> ShardReader:
        """Open one shard for ranged reads. Reads the manifest, and the group's record if needed.

        Raises FileNotFoundError if there is no such version or shard, CorruptShardError and
        FormatError if the manifest or the record is damaged.
        """
        if not 0 <= shard < name.shards:
            raise FileNotFoundError(f"{name} has {name.shards} shards, and no shard {shard}")
        manifest = self.read_manifest(name)
        group = Groups(name.shards, manifest.per_group).of(shard)
        records = self._groups_read.get((name, group))
        if records is None:
            file, expected = manifest.groups[group]
            data = self.backend.read(f"{name.stem}/{file}")
            if fingerprint(data) != expected:
                raise CorruptShardError(f"{self.url}/{name.stem}/{file} differs from its checksum")
            if len({n for n, _ in self._groups_read} - {name}) > 1:
                self._groups_read.clear()  # of a version and its base: a restart needs no more
            records = self._groups_read[name, group] = decode_shards("group", data)
        return ShardReader(self.backend, f"{name.stem}/{records[shard].file}", records[shard])

    def _with_suffix(self, suffix: str) -> list[VersionName]:
        return _with_suffix(self.backend.sizes(), suffix)

    # --- removing ------------------------------------------------------------------------------

    def retire(self, name: VersionName) -> bool:
        """Remove a version, or prevent it from being completed; False if a pin, or a version that
        refers to it, came in between.

        The order is: mark, manifest, shards, mark. Readers with open files continue to read on a
        file system; on an object store they get FileNotFoundError. If a part of the folder cannot
        be removed yet (NFS), the mark stays, and the next retention tries again.
        """

        def stays() -> bool:
            pinned = self._there(name.stem + PIN) or name.id in self.held()
            return pinned or self._is_base(name)

        return self._retire(name, stays)

    def give_up(self, name: VersionName) -> bool:
        """As `retire`, for a version that will never be complete; False if it exists."""
        return self._retire(name, lambda: self.exists(name))

    def _retire(self, name: VersionName, stays: Callable[[], bool]) -> bool:
        self.put(name.stem + RETIRED, b"")
        if stays():  # checked after the mark is set: a process that pins looks for the mark
            self.backend.delete(name.stem + RETIRED)
            return False
        self.backend.delete(name.stem + MANIFEST, name.stem + SUSPECT)
        self.backend.delete_folder(name.stem)
        if f"{name.stem}/" not in self.backend.sizes():
            self.backend.delete(name.stem + RETIRED)
        return True

    def _is_base(self, name: VersionName) -> bool:
        """True if an existing version refers to this one. Manifests do not change: each is read
        once."""
        there = [n for n in self.versions() if n.run_id == name.run_id and n.id > name.id]
        for other in there:
            if other not in self._bases_read:
                try:
                    self._bases_read[other] = self.read_manifest(other).bases
                except (FileNotFoundError, CorruptShardError, FormatError):
                    continue  # gone meanwhile; or damaged, so nobody can read it
        self._bases_read = {n: b for n, b in self._bases_read.items() if n in there}
        return any(name in self._bases_read.get(other, ()) for other in there)

    def retain(
        self, policy: RetentionPolicy, name: VersionName, lease: Lease | None = None
    ) -> list[VersionName]:
        """Apply retention after `name`, a version of this run, was committed; returns the removed
        versions.

        Called by the writer that committed (`FlushResult.committed`); concurrent calls are
        harmless. Interrupted removals are finished, and unfinished versions are removed too: of
        this run those older than `name` (every writer flushes in order, so all have finished with
        them). Other runs' versions are removed only while `lease` shows that those runs have ended.
        Raises the first error, after everything was tried.
        """
        asking = self.read_manifest(name).facts
        dead = [n for n in self.incomplete() if n.id < name.id or n.run_id != name.run_id]
        return self._retain(policy, asking, dead, lease)

    def make_room(
        self, policy: RetentionPolicy, asking: VersionFacts, lease: Lease | None = None
    ) -> list[VersionName]:
        """Apply retention although the version `asking` could not be stored, as it will be after
        the newest stored version of its run; otherwise as `retain`. No unfinished version of this
        run is removed: other writers may still be writing it."""
        dead = [n for n in self.incomplete() if n.run_id != asking.run_id]
        return self._retain(policy, asking, dead, lease)

    def _retain(
        self,
        policy: RetentionPolicy,
        asking: VersionFacts,
        dead: list[VersionName],
        lease: Lease | None,
    ) -> list[VersionName]:
        names = self.backend.sizes()  # one listing: `retire` looks for new pins and holds again
        pins, suspects = (set(_with_suffix(names, suffix)) for suffix in (PIN, SUSPECT))
        kept, held = held_by_forks(names), []
        for found in _with_suffix(names, MANIFEST):
            try:
                manifest = self.read_manifest(found)
            except (FileNotFoundError, CorruptShardError, FormatError):
                continue  # gone meanwhile; or damaged: left for people to inspect
            suspect = found in suspects or bool(manifest.facts.suspect)
            pinned = found in pins or found.id in kept
            held.append(HeldVersion(manifest.facts, pinned, manifest.bases, suspect))
        gone = retirable_names(held, policy, asking)
        half = set(self.retired()) - set(self.versions())
        going = {*gone, *dead, *half}
        if lease is None or not lease.held():
            going = {n for n in going if n.run_id == asking.run_id}
        return self._retire_all(going)

    def _retire_all(self, going: set[VersionName]) -> list[VersionName]:
        went, failed = [], None
        # Newest first: a version is removed after those that refer to it, never before.
        for name in sorted(going, reverse=True):
            try:
                if self.retire(name):
                    went.append(name)
            except PersistentError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return sorted(went)

    def retired(self) -> list[VersionName]:
        """Versions with the mark: their removal is running, or was interrupted."""
        return self._with_suffix(RETIRED)

    def clean(self) -> None:
        """Remove unfinished writes of killed processes of this machine, in every version."""
        for folder in ("", *(f"{n.stem}/" for n in [*self.versions(), *self.incomplete()])):
            self.backend.discard(folder)


def _with_suffix(names: Iterable[str], suffix: str) -> list[VersionName]:
    """The versions that have a file of that suffix at the root, oldest first."""
    stems = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return sorted(found for found in map(VersionName.parse, stems) if found is not None)


def _group_path(name: VersionName, groups: Groups, group: int) -> str:
    return f"{name.stem}/{groups.label(group)}{GROUP}"


def _created_seconds(records: Iterable[ShardRecord]) -> float | None:
    """The time of shard 0, if it is among the records: the same for every writer."""
    with contextlib.suppress(CorruptShardError, FormatError):  # the store takes any manifest
        first = (Manifest.decode(r.manifest) for r in records if not r.shard)
        return next((manifest.created_seconds for manifest in first), None)
    return None


def _all_stored(stored: dict[int, ShardRecord], wanted: Sequence[Source]) -> bool:
    """True if the stored shards are the wanted ones, by the shards' own manifests."""
    return all(
        (record := stored.get(s.shard)) is not None and s.is_stored_as(record) for s in wanted
    )


__all__ = ["WINDOW_BYTES", "FlushResult", "PersistentStore"]
