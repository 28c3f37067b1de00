"""The `persistent` level's store: whole versions on a parallel file system or an object store.

There is no coordinator and no collective. Every writer (a node's agent) stores its own shards;
each leaves a record when it is durable. Who then sees the records of a whole group writes the
group's record; who then sees all groups' writes the version's manifest, which alone makes the
version exist. Two that see it at once write the same bytes. Whoever writes last sees everything,
so if nobody dies the manifest comes; and if the last one dies, any later `flush` of the same
version, also with no shards, finishes it.

A version that is being removed has a `.retired` mark from before its manifest goes until after its
folder has. A writer that made a manifest looks for the mark, and then for the folder. Without a
mark there the remover is through, and the folder is gone, or has not begun, and will remove the
manifest itself. So no manifest outlives its shards (but that of a writer killed at this very point:
its readers find no shards, and go on to the next version). Pins and removers look for each other in
the same way, each after having set its own mark; and so do removers and versions that refer to what
is being removed, whose mark is their manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tierckpt.core.retention import HeldVersion, RetentionPolicy, retirable_names
from tierckpt.errors import CorruptShardError, FlushCancelledError, FormatError, PersistentError
from tierckpt.format.facts import VersionFacts
from tierckpt.format.version_names import (
    GROUP,
    MANIFEST,
    PIN,
    RETIRED,
    SHARDS_PER_GROUP,
    SUSPECT,
    Groups,
    VersionName,
)
from tierckpt.format.version_records import (
    ShardRecord,
    VersionManifest,
    decode_shards,
    encode_shards,
    fingerprint,
)

from .backend import WINDOW_BYTES, Backend
from .backends import open_backend
from .clock import Clock, SystemClock
from .lease import Lease
from .retry import RetryingBackend, RetryPolicy
from .shard_groups import GroupFiles, Source, parts_of
from .shard_reader import ShardReader


@dataclass(frozen=True)
class FlushResult:
    """What a flush did."""

    committed: bool
    """The version exists now; False while other writers' shards are missing."""
    written_bytes: int
    reused_bytes: int
    """Durable already, by an earlier flush that was cut short."""
    seconds: float


class PersistentStore:
    """See the module's text. One thread per instance; any number of instances, anywhere.

    `path` is a directory or any URL that fsspec knows; `storage_options` go there. All writers of
    a job must give the same `shards_per_group`. `sleep` waits between tries and may raise to give
    up. Errors are PersistentError; FileNotFoundError is the answer for what does not exist.
    """

    def __init__(
        self,
        path: str,
        shards_per_group: int = SHARDS_PER_GROUP,
        read_back: bool = False,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
        on_retry: Callable[[str], None] = lambda text: None,
        **storage_options: Any,
    ) -> None:
        inner = open_backend(path, **storage_options)
        retry = retry or RetryPolicy()
        self.backend: Backend = RetryingBackend(inner, retry, sleep, on_retry=on_retry)
        self.shards_per_group, self.read_back = shards_per_group, read_back
        self._groups_read: dict[tuple[VersionName, int], dict[int, ShardRecord]] = {}
        self._bases_read: dict[VersionName, tuple[VersionName, ...]] = {}

    @property
    def url(self) -> str:
        """The place, for messages."""
        return self.backend.url

    def create(self) -> None:
        """Make the directory; on an object store nothing."""
        self.backend.create()

    def close(self) -> None:
        """Let connections go."""
        self.backend.close()

    def lease(
        self, run_id: str, owner: str, clock: Clock | None = None, begins: bool = True
    ) -> Lease:
        """This run's lease on the place; see `Lease`."""
        return Lease(self.backend, run_id, owner, clock or SystemClock(), begins=begins)

    def take_over(self) -> str | None:
        """Free the place from the job that holds it, and tell who that was; None when nobody did.

        For one that hangs and cannot be ended. It loses nothing: what it has there stays.
        """
        taken = self._nobody().take_away()
        return taken.owner if taken else None

    def owner(self) -> str:
        """Which job has the place's lease, and where that is; empty when none does. It may be dead:
        that takes the lease's time to be seen."""
        newest = self._nobody().newest()
        return newest.owner if newest and newest.run_id else ""

    def _nobody(self) -> Lease:
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

        After an error or a kill: what is durable is not written again by the next flush of the
        same version; nothing else was changed, and if the error came last, the version exists.
        `pacer` is called with the size of each window before it is read, and may wait or raise (see
        `pacer.FlushPacer`); FlushCancelledError is also raised when somebody has retired the
        version. Without `sources`, only what others left to be finished is.
        """
        begin = time.perf_counter()
        name = facts.name
        if self.exists(name):
            return FlushResult(True, 0, sum(s.most_bytes for s in sources), 0.0)
        self._check_not_retired(name)
        groups = Groups(name.shards, self.shards_per_group)
        parts = parts_of(self.backend, name, groups, largest_bytes, self.read_back)
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
        return FlushResult(committed, written, reused, time.perf_counter() - begin)

    def _close_group(
        self, name: VersionName, parts: GroupFiles, groups: Groups, group: int
    ) -> bool:
        """Write the group's record if the group is whole; False if it is not."""
        path = _group_path(name, groups, group)
        try:
            self.backend.size(path)
        except FileNotFoundError:
            records = parts.whole(group)
            if records is None:
                return False
            self._put(path, encode_shards("group", records.values()))
        return True

    def _commit(self, facts: VersionFacts, largest_bytes: int, groups: Groups) -> bool:
        """Write the manifest if every group has its record; False if not."""
        name = facts.name
        there = self.backend.sizes(name.stem)
        files = [f"{groups.label(g)}{GROUP}" for g in range(groups.count)]
        if not all(file in there for file in files):
            return False
        prints, total, stems = [], 0, set[str]()
        for file in files:
            data = self.backend.read(f"{name.stem}/{file}")
            records = decode_shards("group", data).values()
            total += sum(r.nbytes for r in records)
            stems |= {r.base for r in records if r.base}
            prints.append((file, fingerprint(data)))
        bases = tuple(sorted(b for b in map(VersionName.parse, stems) if b is not None))
        manifest = VersionManifest(
            facts, largest_bytes, groups.per_group, tuple(prints), total, bases
        )
        self._check_not_retired(name)
        self._put(name.stem + MANIFEST, manifest.encode())
        # Whatever fails from here on, the version exists, unless this says that it must not.
        why = self._why_void(name, set(files), bases)
        if why:
            self.backend.delete(name.stem + MANIFEST)
            raise FlushCancelledError(why)
        return True

    def _why_void(self, name: VersionName, files: set[str], bases: Sequence[VersionName]) -> str:
        """Who removes it may not have seen the manifest; in this order, see the module's text."""
        if self._there(name.stem + RETIRED):
            return f"{name} was retired while it was being flushed"
        if not self.backend.sizes(name.stem).keys() >= files:
            return f"{name} was retired while it was being committed"
        for base in bases:
            if self._there(base.stem + RETIRED) or not self.exists(base):
                return f"{name} refers to {base}, which was retired"
        return ""

    def _put(self, path: str, data: bytes) -> None:
        self.backend.put(path, lambda: iter([memoryview(data)]), len(data))

    def exists(self, name: VersionName) -> bool:
        """True when the version's manifest is there."""
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
        """Versions that may exist, as there is a folder where the manifest would be. One listing.
        None is made by us."""
        return self._with_suffix(f"{MANIFEST}/")

    def pinned(self) -> list[VersionName]:
        """Versions that retention leaves alone."""
        return self._with_suffix(PIN)

    def suspects(self) -> list[VersionName]:
        """Versions with a mark that says that replicas differed."""
        return self._with_suffix(SUSPECT)

    def suspicion(self, name: VersionName) -> bytes:
        """What the mark says; FileNotFoundError without one."""
        return self.backend.read(name.stem + SUSPECT)

    def mark_suspect(self, name: VersionName, text: bytes) -> None:
        """Mark a version, be it there yet or not."""
        self._put(name.stem + SUSPECT, text)

    def incomplete(self) -> list[VersionName]:
        """Versions that somebody began to write or to remove and that do not exist."""
        names = self.backend.sizes()
        stems = {n.rstrip("/") for n in names if n.endswith("/")}
        stems |= {n.removesuffix(RETIRED) for n in names if n.endswith(RETIRED)}
        there = {n.rstrip("/") for n in names}  # a folder is no manifest, but may hide one
        found = {VersionName.parse(s) for s in stems if s + MANIFEST not in there}
        return sorted(n for n in found if n is not None)

    def is_used(self) -> bool:
        """Whether any job has left anything here: a version, finished or not, or a lease."""
        versions = self.versions() or self.incomplete() or self.obstructed()
        return bool(versions or self._nobody().numbers())

    def read_manifest(self, name: VersionName) -> VersionManifest:
        """The version's manifest, checked. Raises CorruptShardError or FormatError if it isn't."""
        manifest = VersionManifest.decode(self.backend.read(name.stem + MANIFEST))
        if manifest.name != name:
            raise FormatError(f"{self.url}: the manifest of {name} says it is {manifest.name}")
        return manifest

    def open_shard(self, name: VersionName, shard: int) -> ShardReader:
        """Ranged reads of one shard. Reads the manifest and the group's record when needed first.

        Raises FileNotFoundError when there is no such version or shard, CorruptShardError and
        FormatError when what says where it is is damaged.
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
            if any(n != name for n, _ in self._groups_read):
                self._groups_read.clear()  # of one version at a time: that is all a restart needs
            records = self._groups_read[name, group] = decode_shards("group", data)
        return ShardReader(self.backend, f"{name.stem}/{records[shard].file}", records[shard])

    def _with_suffix(self, suffix: str) -> list[VersionName]:
        names = [n.removesuffix(suffix) for n in self.backend.sizes() if n.endswith(suffix)]
        return sorted(n for n in map(VersionName.parse, names) if n is not None)

    # --- removing ------------------------------------------------------------------------------

    def pin(self, name: VersionName) -> None:
        """Keep a version for good. FileNotFoundError when it is not there, or about to go."""
        self._put(name.stem + PIN, b"")
        if not self.exists(name) or self._there(name.stem + RETIRED):
            self.unpin(name)
            raise FileNotFoundError(f"{self.url}: {name} does not exist, or is being removed")

    def unpin(self, name: VersionName) -> None:
        """The inverse of `pin`."""
        self.backend.delete(name.stem + PIN)

    def retire(self, name: VersionName) -> bool:
        """Make a version not exist, or never come to exist; False when a pin, or a version that
        refers to it, came in between.

        Mark, manifest, shards, mark: in this order. Readers that have its files open read on from
        a file system; on an object store they get FileNotFoundError. Where something of the folder
        cannot go yet (NFS), the mark stays, and the next retention tries again.
        """
        return self._retire(name, lambda: self._there(name.stem + PIN) or self._is_base(name))

    def give_up(self, name: VersionName) -> bool:
        """The same for a version of which a part will never come; False when it exists."""
        return self._retire(name, lambda: self.exists(name))

    def _retire(self, name: VersionName, stays: Callable[[], bool]) -> bool:
        self._put(name.stem + RETIRED, b"")
        if stays():  # asked with the mark there: who makes it stay looks for that
            self.backend.delete(name.stem + RETIRED)
            return False
        self.backend.delete(name.stem + MANIFEST, name.stem + SUSPECT)
        self.backend.delete_folder(name.stem)
        if f"{name.stem}/" not in self.backend.sizes():
            self.backend.delete(name.stem + RETIRED)
        return True

    def _is_base(self, name: VersionName) -> bool:
        """True when a version that exists refers to this one. Manifests do not change: each is read
        once."""
        there = [n for n in self.versions() if n.run_id == name.run_id and n.id > name.id]
        for other in there:
            if other not in self._bases_read:
                try:
                    self._bases_read[other] = self.read_manifest(other).bases
                except (FileNotFoundError, CorruptShardError, FormatError):
                    continue  # gone meanwhile; or damaged, so that nobody can read it anyway
        self._bases_read = {n: b for n, b in self._bases_read.items() if n in there}
        return any(name in self._bases_read.get(other, ()) for other in there)

    def retain(
        self, policy: RetentionPolicy, name: VersionName, lease: Lease | None = None
    ) -> list[VersionName]:
        """Apply retention after `name`, of the asking life, was committed; returns what went.

        Called by the writer whose flush committed (`FlushResult.committed`); several at once are
        harmless. Removals that were cut short are finished, and what was begun and never completed
        goes too: of this run what is older than `name` (every writer flushes in order, so all are
        through with it). What other runs have goes only while `lease` says that they are no more.
        Raises the first error, after all was tried.
        """
        asking = self.read_manifest(name).facts
        dead = [n for n in self.incomplete() if n.id < name.id or n.run_id != name.run_id]
        return self._retain(policy, asking, dead, lease)

    def make_room(
        self, policy: RetentionPolicy, asking: VersionFacts, lease: Lease | None = None
    ) -> list[VersionName]:
        """Apply retention although the version `asking` could not be stored, as it is after the
        newest one of its run that could; otherwise as `retain`. Of what this run has begun nothing
        goes: other writers may still be at it.
        """
        dead = [n for n in self.incomplete() if n.run_id != asking.run_id]
        return self._retain(policy, asking, dead, lease)

    def _retain(
        self,
        policy: RetentionPolicy,
        asking: VersionFacts,
        dead: list[VersionName],
        lease: Lease | None,
    ) -> list[VersionName]:
        pins, suspects = set(self.pinned()), set(self.suspects())
        held = []
        for found in self.versions():
            try:
                manifest = self.read_manifest(found)
            except (FileNotFoundError, CorruptShardError, FormatError):
                continue  # gone meanwhile; or damaged: that is for people to look at
            suspect = found in suspects or bool(manifest.facts.suspect)
            held.append(HeldVersion(manifest.facts, found in pins, manifest.bases, suspect))
        gone = retirable_names(held, policy, asking)
        half = set(self.retired()) - set(self.versions())
        going = {*gone, *dead, *half}
        if lease is None or not lease.held():
            going = {n for n in going if n.run_id == asking.run_id}
        return self._retire_all(going)

    def _retire_all(self, going: set[VersionName]) -> list[VersionName]:
        went, failed = [], None
        # The newest first: what another refers to goes after that one, never before it.
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
        """Versions with the mark: they are being removed, or somebody was killed at it."""
        return self._with_suffix(RETIRED)

    def clean(self) -> None:
        """Remove what killed processes of this machine left half-written, in every version."""
        for folder in ("", *(f"{n.stem}/" for n in [*self.versions(), *self.incomplete()])):
            self.backend.discard(folder)


def _group_path(name: VersionName, groups: Groups, group: int) -> str:
    return f"{name.stem}/{groups.label(group)}{GROUP}"


def _all_stored(stored: dict[int, ShardRecord], wanted: Sequence[Source]) -> bool:
    """True when what is stored is what is wanted, by the shards' own manifests."""
    return all(
        (record := stored.get(s.shard)) is not None and s.is_stored_as(record) for s in wanted
    )


__all__ = ["WINDOW_BYTES", "FlushResult", "PersistentStore"]
