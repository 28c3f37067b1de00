"""A verified version, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tierckpt._text import in_words
from tierckpt.coordination.error_barrier import ErrorBarrier, raise_any
from tierckpt.core.restore_plan import RestorePlan
from tierckpt.errors import StateTornError
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_summary import VersionSummary
from tierckpt.restored import Restored

from .broadcast import ShardBroadcaster, Visit, Wants, all_of_it
from .progress import Progress
from .shard_image import ShardImage


@dataclass
class VerifiedVersion:
    """A verified version, ready to be loaded."""

    plan: RestorePlan
    broadcaster: ShardBroadcaster
    progress: Progress
    images: dict[int, ShardImage]
    """Images that this rank maps, fetched, or rebuilt."""
    contents: VersionSummary
    trouble: str = ""
    """What failed on this rank after the last byte, as text."""

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self.contents.nbytes

    def visit(self, visit: Visit, wants: Wants = all_of_it) -> None:
        """Show every shard to every rank once, except mapped parts it does not need. Memory used
        only for that is freed window by window; rebuilt shards that may have to be repaired are
        kept. Collective. `trouble` says why this rank did not see everything."""

        def visit_one(shard: int, offset: int, window: memoryview) -> None:
            visit(shard, offset, window)
            if shard in self.images and not self._to_mend(shard):
                self.images[shard].forget(offset, offset + len(window))
            self.progress.advance(len(window))

        def wants_one(shard: int, low: int, high: int) -> bool:
            wanted = wants(shard, low, high)
            self.progress.advance(0 if wanted else high - low)
            return wanted

        for source in self.plan.sources:
            shard = source.shard
            outline = self.contents.outlines[shard]
            self.broadcaster.show(source, outline, self.images.get(shard), visit_one, wants_one)
            try:
                if shard in self.images and not source.direct and not self._to_mend(shard):
                    self.images.pop(shard).close()
            except Exception as error:  # reported at the end: others wait for the next shard
                self.broadcaster.fail(shard, error)
        sent = any(not source.direct for source in self.plan.sources)
        self.trouble = self.broadcaster.trouble_of_any() if sent else self.broadcaster.trouble

    def _to_mend(self, shard: int) -> bool:
        """True for this rank's own shard, if it was rebuilt and the job has the same number of
        ranks as then."""
        rank, size = self.broadcaster.rank, self.broadcaster.size
        sources = self.plan.sources
        return shard == rank and len(sources) == size and sources[shard].rebuilt

    def report(self, manifest: Manifest) -> Restored:
        """The result of a restore from this version; `manifest` is this rank's."""
        result = Restored.of(manifest.facts)
        result.shard_levels = tuple(source.place.level for source in self.plan.sources)
        result.levels = self.plan.levels
        result.nbytes = self.nbytes
        return result

    def fail(self, error: Exception) -> None:
        """Record a failure after the last byte. `all_finished` reports it, as the other ranks wait
        there."""
        self.trouble = self.trouble or in_words(error)

    def incomplete(self, ranks: list[int], why: str) -> StateTornError:
        """The error of all ranks if one fails after the live state has changed."""
        return StateTornError(
            f"{self.plan.id} could not be loaded completely: rank {ranks[0]}: {why}"
        )

    def close(self) -> None:
        """Unmap everything."""
        for image in self.images.values():
            image.close()
        self.images.clear()


def all_finished(version: VerifiedVersion, group: ErrorBarrier) -> None:
    """Raise StateTornError on all ranks if any had trouble at the end of `load`: a rank that raised
    alone would leave the others to train without it. Call it when all records agree with the loaded
    version, so that a rank lost during the call leaves the others with a complete state."""
    raise_any(group.all_gather_object(version.trouble), version.incomplete, group.rank)


__all__ = ["VerifiedVersion", "all_finished"]
