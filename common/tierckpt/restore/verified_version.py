"""Verified version: one version whose shards were opened and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tierckpt.core.restore_plan import RestorePlan
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_summary import VersionSummary
from tierckpt.restored import Restored

from .broadcast import ShardBroadcaster, Visit, Wants, all_of_it
from .progress import Progress
from .shard_image import ShardImage, in_file, in_memory


@dataclass(frozen=True)
class SpillPolicy:
    """Where a rank that fetches most of a version puts it, when most of that is live already: what
    is live and what was fetched would be two copies, and the first is changed when all of the
    second is sound."""

    folder: Path
    """On the local disk."""
    live_bytes: int
    """In this rank's memory, of what a version has."""

    def make_room(self, manifest: Manifest, then: Callable[[], None]) -> ShardImage:
        """For a fetched shard: a file; memory where there can be none, or little is live."""
        if 2 * self.live_bytes > manifest.image_bytes * manifest.facts.shards:
            with contextlib.suppress(OSError):
                return in_file(manifest, self.folder, then)
        return in_memory(manifest, then)


@dataclass
class VerifiedVersion:
    """A verified version, ready to be loaded."""

    plan: RestorePlan
    broadcaster: ShardBroadcaster
    progress: Progress
    images: dict[int, ShardImage] = field(default_factory=dict)
    """What this rank maps, fetched, or made."""
    contents: VersionSummary | None = None
    """When all of it is verified."""
    trouble: str = ""
    """What went wrong here behind the last byte, in words."""

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self.contents.nbytes if self.contents else 0

    @property
    def own_shard(self) -> int:
        """The shard that this rank takes its small state from."""
        return self.broadcaster.rank % len(self.plan.sources)

    def visit(self, visit: Visit, wants: Wants = all_of_it) -> None:
        """Show every rank every shard, once, but for what it maps and does not want. What is in
        memory for that alone goes meanwhile, window by window; what was rebuilt and may have to be
        mended stays. Collective. `trouble` says why it did not get all to see."""

        def visit_one(shard: int, offset: int, window: memoryview) -> None:
            visit(shard, offset, window)
            if shard in self.images and not self._to_mend(shard):
                self.images[shard].forget(offset, offset + len(window))
            self.progress.advance(len(window))

        def wants_one(shard: int, low: int, high: int) -> bool:
            wanted = wants(shard, low, high)
            self.progress.advance(0 if wanted else high - low)
            return wanted

        assert self.contents is not None
        for source in self.plan.sources:
            shard = source.shard
            outline = self.contents.outlines[shard]
            self.broadcaster.show(source, outline, self.images.get(shard), visit_one, wants_one)
            try:
                if shard in self.images and not source.direct and not self._to_mend(shard):
                    self.images.pop(shard).close()
            except Exception as error:  # told at the end: others wait for the next shard
                self.broadcaster.fail(shard, error)
        sent = any(not source.direct for source in self.plan.sources)
        self.trouble = self.broadcaster.trouble_of_any() if sent else self.broadcaster.trouble

    def _to_mend(self, shard: int) -> bool:
        """True of this rank's own, if it was rebuilt and the job has as many ranks as then."""
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
        """Behind the last byte: `all_finished` is told, as the other ranks wait there."""
        self.trouble = self.trouble or f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Unmap everything."""
        for image in self.images.values():
            image.close()
        self.images.clear()


__all__ = ["VerifiedVersion"]
