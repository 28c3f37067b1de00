"""A restart from files: the search for the newest sound version, and its files on this rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tierckpt._text import counted
from tierckpt.checkpointer.levels.repair import repair
from tierckpt.coordination.error_barrier import ErrorBarrier, gather_or_raise
from tierckpt.coordination.rollback_records import keep_record
from tierckpt.core.restore_plan import Source
from tierckpt.errors import RestoreError, TierckptError
from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_file import decode_header
from tierckpt.restore.progress import Progress
from tierckpt.restore.search import VersionSearch
from tierckpt.restore.verified_version import VerifiedVersion
from tierckpt.restored import Restored

from .job import FilesJob
from .restored_files import RestoredFiles
from .shard import decode_state, entries_of


class Restart:
    """One restart: `find`, then `load` and `go_on` if there is a version. All collective."""

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
        and the job starts from the beginning. Raises RestoreError as `Checkpointer.restore`."""
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

    def go_on(self, rejected: bool) -> None:
        """Begin the run from the version that was loaded, and make it redundant again. `rejected`:
        the program refused a newer one, which no later run is to take."""
        found, job = self.found, self._job
        assert found is not None
        manifest = Manifest.decode(found.contents.own.manifest)
        result = found.report(manifest)
        with self._error_barrier:
            job.levels.go_on_from(manifest.facts.lineage, result, self._error_barrier)
            job.version = self.number
            if rejected:
                job.history.went_back(())
                keep_record(job.config, job.group.rank, job.history, job.reports)
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
            begin, stop = max(low, offset), min(high, end)
            if begin < stop:
                _write(self._fd(name), window[begin - offset : stop - offset], begin - low)
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


__all__ = ["Restart"]
