"""Versions of files: the shard of one rank's files, its way to the levels, and a restart from it.

An entry `file/<name>` is a tensor of bytes that each rank stores for itself (FORMAT.md, "Shard");
a small state has the modes of the files. So levels, redundancy, flushes and commands treat a
version of files as any other.

Saving makes a version of files a sealed slot on each rank, and it goes its way from there. A
restart searches the newest sound version, and puts its files on this rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from tierckpt import _faults
from tierckpt._text import counted, error_text
from tierckpt.checkpointer.levels import repair
from tierckpt.checkpointer.shutdown import Shutdown, WaitProgress
from tierckpt.coordination.error_barrier import ErrorBarrier, gather_or_raise
from tierckpt.coordination.job_history import keep_rollback_record
from tierckpt.core.levels import DONE, INTERVALS, LOCAL, MEMORY, PERSISTENT, Level
from tierckpt.core.restore_plan import Source
from tierckpt.errors import RestoreError, TierckptError
from tierckpt.format.ids import VersionId
from tierckpt.format.layout import Layout, TensorSpec, plan_layout
from tierckpt.format.manifest import Manifest, digest
from tierckpt.format.records import VersionFacts
from tierckpt.format.shard_file import ShardHeader, decode_header, encode_header, rank_state_blocks
from tierckpt.restore.progress import Progress
from tierckpt.restore.search import VersionSearch
from tierckpt.restore.verification import VerifiedVersion
from tierckpt.restored import Restored
from tierckpt.storage.routed import FILE_PREFIX, SourceFile, VersionFiles, checked_name
from tierckpt.storage.slot_pool import NoSlotError
from tierckpt.storage.slots import Slot, seal_area_bytes

from .job import FilesJob, Intervals

__all__ = [
    "FilesShard",
    "Restart",
    "RestoredFiles",
    "Saving",
    "decode_state",
    "encode_state",
    "entries_of",
]


class FilesShard(Struct, frozen=True):
    """One rank's shard before it is copied: pure bookkeeping."""

    files: tuple[SourceFile, ...]
    layout: Layout
    header: bytes
    data_bytes: int
    tree: bytes

    @staticmethod
    def of(files: Sequence[SourceFile], rank: int, ranks: int, about: dict[str, Any]) -> FilesShard:
        """Plan the shard. `about` is stored with it; values of JSON only."""
        specs = [TensorSpec(FILE_PREFIX + f.name, "uint8", (f.nbytes,), None, 1) for f in files]
        layout = plan_layout([], specs, rank, ranks)
        modes = {f.name: f.mode for f in files}
        tree = encode_state({**about, "modes": modes})
        header, data_bytes = encode_header(layout, len(tree), {})
        return FilesShard(tuple(files), layout, header, data_bytes, tree)

    @property
    def image_bytes(self) -> int:
        """Size of the shard."""
        return len(self.header) + self.data_bytes

    @property
    def blocks(self) -> int:
        """Number of blocks with a checksum, without the header."""
        return len(self.layout.blocks) + len(self._state_blocks)

    @property
    def _state_blocks(self) -> list[int]:
        return rank_state_blocks(self.data_bytes - self.layout.nbytes)

    def fill(self, image: memoryview, remove: bool = True) -> bytes:
        """Copy the files into `image`; returns the digests of the header and all blocks. Each block
        is hashed while it is in the core's cache. With `remove`, each file is removed as soon as it
        is copied. Raises TierckptError if a file changes meanwhile, and OSError."""
        base = len(self.header)
        image[:base] = self.header
        digests = [digest(image[:base])]
        with _OpenFiles(self.files, self.layout, remove) as opened:
            for block in self.layout.blocks:
                for index, start, stop in block.parts:
                    low = base + self.layout.pieces[index].offset
                    opened.read(index, start, image[low + start : low + stop])
                low = base + block.offset
                digests.append(digest(image[low : low + block.nbytes]))
        low, high = base + self.layout.nbytes, self.image_bytes
        image[low:high] = self.tree.ljust(high - low, b"\0")
        for nbytes in self._state_blocks:
            digests.append(digest(image[low : low + nbytes]))
            low += nbytes
        return b"".join(digests)


class _OpenFiles:
    """The files in the order of a layout's pieces, one open at a time."""

    def __init__(self, files: Sequence[SourceFile], layout: Layout, remove: bool) -> None:
        by_name = {FILE_PREFIX + f.name: f for f in files}
        self._files = [by_name[piece.spec.name] for piece in layout.pieces]
        self._remove = remove
        self._index, self._fd = -1, -1

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def read(self, index: int, offset: int, into: memoryview) -> None:
        if index != self._index:
            self._close()
            self._fd, self._index = os.open(self._files[index].path, os.O_RDONLY), index
        while into:
            count = os.preadv(self._fd, [into], offset)
            if not count:
                raise self._changed(self._files[index])
            into, offset = into[count:], offset + count

    def _close(self) -> None:
        if self._fd < 0:
            return
        file, size = self._files[self._index], os.fstat(self._fd).st_size
        os.close(self._fd)
        self._fd = -1
        if size != file.nbytes:
            raise self._changed(file)
        if self._remove:
            os.unlink(file.path)

    def _changed(self, file: SourceFile) -> TierckptError:
        return TierckptError(
            f"{file.name!r} changed while it was stored: close each file before the version ends"
        )


def encode_state(files: dict[str, Any]) -> bytes:
    """An encoded tree (FORMAT.md, "Encoded tree") with this object as `files`, and nothing else."""
    empty: dict[str, Any] = {"groups": {}, "odd": {}, "extra": {}, "extra_per_rank": {}}
    text = json.dumps({"tree": {**empty, "files": files}, "tensors": []}, separators=(",", ":"))
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


def decode_state(data: bytes) -> dict[str, Any] | None:
    """The object `files` of an encoded tree; None if the version has no files of its own."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, Any] | None = json.loads(data[8 : 8 + length])["tree"].get("files")
    return found


def entries_of(header: ShardHeader) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each file in the shard with this header. Raises TierckptError
    for a name that would leave the folder."""
    for piece in header.pieces:
        if piece.spec.name.startswith(FILE_PREFIX):
            low = header.header_bytes + piece.offset
            yield checked_name(piece.spec.name.removeprefix(FILE_PREFIX)), low, low + piece.nbytes


class RestoredFiles(Mapping[str, str]):
    """A mapping from the names of files to paths, where a program can read them.

    The files stay until the next version starts, or until `Files.close`. They are copies: a program
    may open them for writing as well.
    """

    def __init__(self, number: int, name: str, by_rank: Mapping[int, Mapping[str, str]]) -> None:
        self.number = number
        """Number of the version."""
        self.name = name
        """Name of the version; its number as text if none was given."""
        self.by_rank = by_rank
        """The same mapping for each wanted rank of the former run."""
        self.levels: dict[str, int] = {}
        """Number of ranks' shares by the level that they were read from."""

    def _find(self, name: str) -> str:
        found = {rank: files[name] for rank, files in self.by_rank.items() if name in files}
        if not found:
            raise KeyError(name)
        if len(found) > 1:
            raise TierckptError(
                f"ranks {', '.join(map(str, found))} of the former run each have a file {name!r}: "
                "use by_rank[rank][name]"
            )
        return next(iter(found.values()))

    def __getitem__(self, name: str) -> str:
        """The path of a file. Raises KeyError if there is none of that name, TierckptError if
        several ranks have one."""
        return self._find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for files in self.by_rank.values() for name in files))

    def __len__(self) -> int:
        return len({name for files in self.by_rank.values() for name in files})

    def __bool__(self) -> bool:
        """True: something was restored, even if this rank has no file in it."""
        return True

    def __repr__(self) -> str:
        return f"RestoredFiles({self.name!r}, {dict(self.by_rank)!r})"


SLOT_PATIENCE_SECONDS = 600.0
"""Longest wait for a slot that the agent still reads."""


class Saving:
    """One rank's part in saving versions. One thread; all methods are collective."""

    def __init__(self, job: FilesJob, intervals: Intervals) -> None:
        self._job, self._intervals = job, intervals
        self._largest_bytes = 0

    def save(self, files: VersionFiles, trouble: str) -> bool:
        """Take the version to memory, and on its way to the levels where it is due. Returns True on
        all ranks if all have it in memory."""
        job, shard = self._job, None
        self._intervals.completes()
        if not trouble:
            try:
                shard = self._plan(files)
            except (TierckptError, OSError) as error:
                trouble = str(error)
        job.collect()
        due = tuple(level for level in INTERVALS if level in self._intervals.due(job.config.uses))
        about = (files.number, files.name)
        gathered = job.group.all_gather_object((trouble, due, job.agent.busy() > 0, about))
        job.version = files.number
        if why := _why_not([theirs for theirs, *_ in gathered], [each for *_, each in gathered]):
            job.reports.lost(files.number, why, shown_elsewhere=job.group.rank > 0)
            self._clear()
            return False
        assert shard is not None
        levels = self._levels(gathered[0][1], any(busy for _, _, busy, _ in gathered))
        self._intervals.taken(levels)
        complete = self._take(files.number, shard, levels)
        self._clear()
        return complete

    def _plan(self, files: VersionFiles) -> FilesShard:
        sources = files.sources(lambda text: self._job.reports.notice(text, logging.WARNING))
        rank, size = self._job.group.rank, self._job.group.size
        return FilesShard.of(sources, rank, size, {"name": files.name})

    def _levels(self, due: tuple[Level, ...], busy: bool) -> tuple[Level, ...]:
        """The levels that take the version: those where it is due on rank 0, with memory, and local
        for the persistent level. A busy disk skips the version, or is waited for."""
        job = self._job
        levels = {MEMORY, *due, *(level.source or level for level in due)}
        if LOCAL in levels and busy:
            if job.config.when_busy == "wait":
                job.wait(None)
                job.turn()
            else:
                job.reports.skipped(LOCAL, LOCAL.facts.busy, again=False)
                levels = {MEMORY}
        return tuple(level for level in INTERVALS if level in levels)

    def _take(self, number: int, shard: FilesShard, levels: tuple[Level, ...]) -> bool:
        job = self._job
        id_ = VersionId(job.history.generation, number)
        facts = VersionFacts(
            job=job.resources.job.job,
            run_id=job.history.name,
            id=id_,
            shards=job.group.size,
            lineage=job.history.lineage,
            iteration=number,
            iteration_counts="calls",
            complete=job.agreement.local.safe,
        )
        version = job.agreement.open(id_, levels)
        if PERSISTENT in levels:
            version.flush = facts
        try:
            slot, manifest = self._seal(facts, shard)
        except (OSError, TierckptError, NoSlotError) as error:
            job.levels.slot_handoff.broken(version)
            job.reports.lose(version, error_text(error))
        else:
            if LOCAL in levels:
                job.levels.slot_handoff.commit_sealed(version, slot)
            version.tell(MEMORY, DONE)
            self._largest_bytes = max(self._largest_bytes, manifest.image_bytes)
        job.turn()
        if job.agreement.memory.safe == id_:
            return True
        job.pool.void(id_)
        return False

    def _seal(self, facts: VersionFacts, shard: FilesShard) -> tuple[Slot, Manifest]:
        """Copy the files into a slot and seal it. Raises NoSlotError, OSError, TierckptError."""
        start = time.perf_counter()
        slot = self._slot(facts, shard)
        sealed = None
        try:
            _faults.point("files.fill", rank=self._job.group.rank, version=facts.id.version)
            with slot.image() as image:
                digests = shard.fill(image[: shard.image_bytes])
            manifest = Manifest(
                facts,
                self._job.group.rank,
                shard.image_bytes,
                len(shard.header),
                len(shard.tree),
                digests,
                time.time(),
            )
            _faults.point("files.seal", rank=self._job.group.rank, version=facts.id.version)
            slot.seal(manifest.encode())
            sealed = facts.id
        finally:
            self._job.pool.filled(slot, sealed)
        self._job.reports.emit(
            "sealed",
            version=facts.id.version,
            level=MEMORY,
            nbytes=manifest.image_bytes,
            seconds={"copy": time.perf_counter() - start},
            severity=logging.DEBUG,
        )
        return slot, manifest

    def _slot(self, facts: VersionFacts, shard: FilesShard) -> Slot:
        """A free slot; waits for the agent if it still reads the only one."""
        job, deadline = self._job, time.monotonic() + SLOT_PATIENCE_SECONDS
        seal_bytes = seal_area_bytes(shard.blocks, len(facts.lineage))
        while True:
            protected = job.agreement.protected(facts.id)
            try:
                return job.pool.choose(protected, job.agent.pinned(), seal_bytes, shard.image_bytes)
            except NoSlotError:
                if time.monotonic() > deadline:
                    raise
            job.wait(0.05)

    def _clear(self) -> None:
        self._job.folders.clear()

    # --- the end --------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Make the newest version durable and wait for all levels. Returns True on all ranks if
        memory may be freed."""
        job = self._job
        start, durable, answers = time.perf_counter(), False, False
        try:
            durable = self._make_durable()
            answers = True
        except Exception as error:
            job.reports.notice(
                f"the newest version is not durable: {error_text(error)}", logging.ERROR
            )
        outcomes = job.group.all_gather_object((durable, answers))
        durable = all(safe for safe, _ in outcomes)
        if not durable and any(job.resources.job.sealed()):
            where = f"the versions in memory stay for a restart ({job.resources.job.path})"
            job.warn(f"v{job.version} is not on the disks of all ranks; {where}")
        job.group.barrier()
        if durable and job.history.lineage:
            job.agreement.settle()
            job.levels.promotion.retire()
        seconds = {"close": time.perf_counter() - start}
        job.reports.emit("closed", message="the program's end", seconds=seconds)
        return durable

    def _make_durable(self) -> bool:
        job, newest = self._job, self._job.agreement.memory.safe
        nbytes = self._largest_bytes * len(job.node.ranks)
        end = Shutdown(job.config, job.agent, job.reports, job.halt, nbytes)
        if newest is not None and job.config.uses(LOCAL):
            self._promote(newest)
        if end.disk_has_all(job.wait):
            job.agreement.settle()
            job.levels.promotion.backlog.flush_last()
        first = job.node.first == job.group.rank
        progress = WaitProgress(job.config, job.agent, job.reports, job.group.rank, first)
        if end.disk_answers:
            end.await_others(job.collect, progress)
        progress.close()
        safe_here = not any(job.resources.job.sealed()) if newest is None else True
        return safe_here and (newest is None or job.agreement.local.safe == newest)

    def _promote(self, newest: VersionId) -> None:
        """Send the newest version to the levels that it was not due on, as the last one of the
        job."""
        job, promotion = self._job, self._job.levels.promotion
        slot = job.pool.find(newest)
        manifest = slot.manifest() if slot is not None else None
        wants = job.config.uses(PERSISTENT) and newest != promotion.ordered
        on_local = newest == job.agreement.local.safe
        version = job.agreement.versions.open(newest, ())
        if manifest is not None and wants and job.history.is_own(newest.generation):
            version.flush = manifest.facts
        if not on_local:
            job.sealed.commit_as_it_is(newest)
        elif version.flush is not None:
            job.sealed.settle(newest)


def _why_not(troubles: list[str], named: list[tuple[int, str]]) -> str:
    """The reason why a version is not taken, from what all ranks say; empty if it is."""
    for rank, trouble in enumerate(troubles):
        if trouble:
            return f"rank {rank} could not complete it: {trouble}"
    for rank, theirs in enumerate(named):
        if theirs != named[0]:
            return (
                f"rank {rank} calls it {theirs[1]!r} (v{theirs[0]}), and rank 0 {named[0][1]!r} "
                f"(v{named[0][0]}): all ranks must give a version the same name"
            )
    return ""


class Restart:
    """One restart: `find`, then `load` and `start_run` if there is a version. All collective."""

    def __init__(self, job: FilesJob) -> None:
        """Take the inventory of all levels."""
        self._job = job
        self._bar = Progress(Progress.wanted(job.group.rank, None))
        self._error_barrier = ErrorBarrier(job.group)
        with self._error_barrier:
            self.search = VersionSearch(
                job.config,
                self._error_barrier,
                job.history,
                job.reports,
                self._bar,
                time.perf_counter(),
                job.resources.left_elsewhere,
            )
        self.found: VerifiedVersion | None = None
        self.number, self.name = 0, ""

    def find(self, version: int | None = None) -> bool:
        """Find the newest sound version, or this one; read and verify it. False if there is none
        and the job starts from nothing. Raises RestoreError as `Checkpointer.restore`."""
        self.found = self.search.find(version, self._job.version)
        if self.found is None:
            with self._error_barrier:
                self._job.levels.meet(self._error_barrier)
                self.search.report(Restored(0))
            self._bar.close()
            return False
        manifest = Manifest.decode(self.found.contents.own.manifest)
        state = self._state_of(manifest)
        self.number = manifest.id.version
        self.name = str(state.get("name") or self.number)
        return True

    def _state_of(self, manifest: Manifest) -> Mapping[str, Any]:
        assert self.found is not None
        state = decode_state(self.found.contents.own.tree)
        if state is None:
            self.close()
            raise RestoreError(
                f"{manifest.id} in {self._job.config.path} is the state of a training, not a "
                "version of files. Nothing was changed",
                "Restore it with the Checkpointer that took it, or give these files another path",
            )
        return state

    def load(self, ranks: Sequence[int] | None) -> RestoredFiles:
        """Write the files of this rank, or of these ranks of the former run, into a folder. Raises
        RestoreError on all ranks if one cannot."""
        found, job = self.found, self._job
        assert found is not None
        shards = len(found.plan.sources)
        wanted = gather_or_raise(
            job.group,
            lambda: self._wanted(ranks, shards),
            partial(_refused, job.group.size),
        )
        folder = job.folders
        writers = {shard: _Writer(folder.restored(shard)) for shard in wanted[job.group.rank]}
        with contextlib.ExitStack() as closing:
            for writer in writers.values():
                closing.callback(writer.close)
            for source in found.plan.sources:
                of = [rank for rank, theirs in enumerate(wanted) if source.shard in theirs]
                self._show(source, of, writers.get(source.shard))
        trouble = found.broadcaster.trouble_of_any()
        if trouble:
            raise RestoreError(
                f"{found.plan.id} could not be written to {folder.path}: {trouble}",
                "Give the program another files_dir, with room for its files, and restart",
            )
        by_rank = {shard: writer.finish() for shard, writer in sorted(writers.items())}
        restored = RestoredFiles(self.number, self.name, by_rank)
        restored.levels = dict(found.plan.levels)
        return restored

    def _wanted(self, ranks: Sequence[int] | None, shards: int) -> tuple[int, ...]:
        group = self._job.group
        if ranks is None:
            if shards != group.size:
                raise TierckptError(
                    f"version {self.name} has files of {counted(shards, 'rank')}, and this job has "
                    f"{group.size}. restore(ranks=[...]) returns the files of the ranks that you "
                    "name, on each rank its own choice"
                )
            return (group.rank,)
        chosen = tuple(dict.fromkeys(int(rank) for rank in ranks))
        if wrong := [rank for rank in chosen if not 0 <= rank < shards]:
            raise TierckptError(
                f"ranks={[*chosen]}: version {self.name} has files of ranks 0 to {shards - 1}, and "
                f"none of rank {wrong[0]}"
            )
        return chosen

    def _show(self, source: Source, of: Collection[int], writer: _Writer | None) -> None:
        """Write a shard on the ranks that want it: from this rank's own image where it has one,
        else from the reader's by broadcasts."""
        found = self.found
        assert found is not None
        broadcaster, image = found.broadcaster, found.images.get(source.shard)
        if not of:
            return
        shown = writer or _Writer(None)
        outline = found.contents.outlines[source.shard]
        if source.direct or set(of) == {source.reader}:
            if writer is None or broadcaster.trouble:
                return
            try:
                assert image is not None
                low = 0
                while low < outline.nbytes:
                    high = min(max(low + WINDOW_BYTES, outline.header_bytes), outline.nbytes)
                    image.touch(low, high)
                    shown.visit(source.shard, low, image.view[low:high])
                    low = high
            except Exception as error:
                broadcaster.fail(source.shard, error)
            return
        broadcaster.show(source, outline, image, shown.visit)

    def start_run(self, rejected: bool) -> None:
        """Start the run from the loaded version, and make it redundant again. `rejected`:
        the program refused a newer one, which no later run is to take."""
        found, job = self.found, self._job
        assert found is not None
        manifest = Manifest.decode(found.contents.own.manifest)
        result = found.report(manifest)
        with self._error_barrier:
            job.levels.continue_from(manifest.facts.lineage, result, self._error_barrier)
            job.version = self.number
            if rejected:
                job.history.went_back(())
                keep_rollback_record(job.config, job.group.rank, job.history, job.reports)
            else:
                self.search.settle_rollback(found)
            if job.config.uses("local"):
                repair(found, job.group, job.levels)
            self.search.report(result)

    def refuse(self) -> None:
        """Give up the version that was found, which the program could not use, so that the next
        `find` returns an older one. Collective: all ranks do."""
        self.search.exclude(self.id)
        assert self.found is not None
        self.found.close()
        self.found = None
        self._job.folders.drop_restored()

    @property
    def id(self) -> VersionId:
        """The version that was found."""
        assert self.found is not None
        return self.found.plan.id

    def close(self) -> None:
        """Release the version's bytes. Not collective."""
        self._bar.close()
        if self.found is not None:
            self.found.close()
            self.found = None


WINDOW_BYTES = 8 * 1024 * 1024
"""Bytes of a mapped shard that are written at once."""


def _refused(size: int, ranks: list[int], theirs: TierckptError) -> RestoreError:
    return RestoreError(str(theirs) if len(ranks) == size else f"rank {ranks[0]}: {theirs}")


class _Writer:
    """Writes the files of one shard from its windows, which come in order. Without a folder it
    only receives them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._entries: list[tuple[str, int, int]] = []
        self._tree = bytearray()
        self._tree_low = 0
        self._fds: dict[str, int] = {}

    def visit(self, shard: int, offset: int, window: memoryview) -> None:
        """Write the parts of files in this window."""
        if self._folder is None:
            return
        if offset == 0:
            self._open(window)
        end = offset + len(window)
        for name, low, high in self._entries:
            start, stop = max(low, offset), min(high, end)
            if start < stop:
                _write(self._fd(name), window[start - offset : stop - offset], start - low)
            if high <= end and name in self._fds:
                os.close(self._fds.pop(name))
        if end > self._tree_low:
            self._tree += window[max(self._tree_low - offset, 0) :]

    def _open(self, window: memoryview) -> None:
        header = decode_header(window)
        self._entries, self._tree_low = list(entries_of(header)), header.tree_offset
        assert self._folder is not None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, _, _ in self._entries:
            path = self._folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("wb"):  # an empty file has no bytes in any window
                pass

    def _fd(self, name: str) -> int:
        """The open file; each is closed with its last byte, so one at most is open."""
        assert self._folder is not None
        if name not in self._fds:
            self._fds[name] = os.open(self._folder / name, os.O_WRONLY)
        return self._fds[name]

    def finish(self) -> dict[str, str]:
        """The paths of all files by name, with the permissions that they had."""
        assert self._folder is not None
        modes = (decode_state(bytes(self._tree)) or {}).get("modes", {})
        for name, mode in modes.items():
            os.chmod(self._folder / name, mode)
        return {name: str(self._folder / name) for name, _, _ in self._entries}

    def close(self) -> None:
        """Close all files."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
