"""Saving: a version of files becomes a sealed slot on each rank, and goes its way from there."""

from __future__ import annotations

import logging
import time

from tierckpt import _faults
from tierckpt._text import in_words
from tierckpt.checkpointer.shutdown import Shutdown, WaitProgress
from tierckpt.core.ledger import DONE
from tierckpt.core.levels import INTERVALS, LOCAL, MEMORY, PERSISTENT, Level
from tierckpt.errors import TierckptError
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.storage.memory.slot_pool import NoSlotError
from tierckpt.storage.memory.slots import Slot, seal_area_bytes
from tierckpt.storage.routed.version_files import VersionFiles

from .intervals import Intervals
from .job import FilesJob
from .shard import FilesShard

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
        job.agreement.open(id_, levels)
        job.levels.promotion.taken(facts, levels)
        try:
            slot, manifest = self._seal(facts, shard)
        except (OSError, TierckptError, NoSlotError) as error:
            job.levels.slot_handoff.broken(id_)
            job.reports.lost(number, in_words(error))
        else:
            if LOCAL in levels:
                job.levels.slot_handoff.commit_sealed(id_, slot)
            job.agreement.tell(MEMORY, id_, DONE)
            self._largest_bytes = max(self._largest_bytes, manifest.image_bytes)
        job.turn()
        if job.agreement.memory.safe == id_:
            return True
        job.pool.void(id_)
        return False

    def _seal(self, facts: VersionFacts, shard: FilesShard) -> tuple[Slot, Manifest]:
        """Copy the files into a slot and seal it. Raises NoSlotError, OSError, TierckptError."""
        begin = time.perf_counter()
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
            seconds={"copy": time.perf_counter() - begin},
            severity=logging.DEBUG,
        )
        return slot, manifest

    def _slot(self, facts: VersionFacts, shard: FilesShard) -> Slot:
        """A free slot; waits for the agent if it still reads the only one."""
        job, deadline = self._job, time.monotonic() + SLOT_PATIENCE_SECONDS
        seal_bytes = seal_area_bytes(shard.blocks, len(facts.lineage))
        while True:
            protected = job.agreement.memory.protected() - {facts.id}
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
        begin, durable, answers = time.perf_counter(), False, False
        try:
            durable = self._make_durable()
            answers = True
        except Exception as error:
            job.reports.notice(
                f"the newest version is not durable: {in_words(error)}", logging.ERROR
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
        seconds = {"close": time.perf_counter() - begin}
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
        if manifest is not None and wants and job.history.is_own(newest.generation):
            promotion.flush_when_safe(manifest.facts)
        if not on_local:
            job.sealed.commit_as_it_is(newest)
        elif promotion.awaits(newest):
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


__all__ = ["Saving"]
