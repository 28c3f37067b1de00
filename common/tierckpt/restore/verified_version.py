"""A version whose shards were opened and checked on all ranks, and the step that loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tierckpt.coordination.error_barrier import ErrorBarrier, raise_any
from tierckpt.core.restore_plan import RestorePlan
from tierckpt.errors import StateMismatchError, StateTornError
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_summary import VersionSummary
from tierckpt.group import Group
from tierckpt.restored import Restored
from tierckpt.state import rng
from tierckpt.state.training_state import TrainingState

from .broadcast import ShardBroadcaster, Visit, Wants, all_of_it
from .loader import Loader
from .progress import Progress
from .shard_image import ShardImage
from .tensor_fill import TensorPreallocator


@dataclass
class VerifiedVersion:
    """A verified version, ready to be loaded."""

    plan: RestorePlan
    broadcaster: ShardBroadcaster
    progress: Progress
    images: dict[int, ShardImage]
    """What this rank maps, fetched, or made."""
    contents: VersionSummary
    trouble: str = ""
    """What went wrong here behind the last byte, in words."""

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self.contents.nbytes

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


@dataclass(frozen=True)
class LoadedVersion:
    """What was loaded, on this rank."""

    manifest: Manifest
    """This rank's."""
    result: Restored
    notices: list[str]
    adapter: Any
    """What the adapter had packed."""


def load(
    state: TrainingState,
    version: VerifiedVersion,
    group: ErrorBarrier,
    strict: bool,
    new: TensorPreallocator,
) -> LoadedVersion:
    """Load a verified version into the live state. Collective.

    Raises StateMismatchError on all ranks, with nothing changed on any, if the structure of any
    rank's live state differs and `strict` is True; RestoreError on all if any rank has no memory
    for what it would have to create, or fails in some other way before the first change. What
    fails on a rank after that is its `version.trouble`, see `all_finished`. Whatever else comes
    out, a rank that is lost for one, leaves `state.torn` True if anything was changed.
    """
    with group:
        loader = Loader(state, version.contents, group.rank, group.size, new, strict)
        differences = loader.differences()
        loader.prepare()
        version.broadcaster.make_room(version.contents.outlines)
        saved = loader.saved
        grown = group.size > loader.shards
        told = (differences, rng.digests_of(saved["rng"]) if grown else {})
        everyone, digests = zip(*group.all_gather_object(told), strict=True)
        found: list[str] = next((theirs for theirs in everyone if theirs), [])
        if found and strict:
            raise StateMismatchError(f"Version {version.plan.id}", found)
        result = version.report(loader.manifest)
        version.progress.begin(f"loading v{version.plan.id.version}", version.nbytes)
        notices = [f"accepted (strict=False): {d}" for d in differences]
        loader.choose_shards()
    state.torn = True
    with torch.no_grad():
        version.visit(loader.load_window, loader.wants)
        version.trouble = version.trouble or _finish(loader)
    try:  # last: loading may have drawn
        notices += loader.notices + rng.take_up(
            saved["rng"],
            loader.manifest.id.version,
            group.rank,
            digests[: loader.shards],
            state.cuda_device(),
        )
    except Exception as error:
        version.fail(error)
    state.torn = bool(version.trouble)
    return LoadedVersion(loader.manifest, result, notices, saved.get("adapter"))


def _finish(loader: Loader) -> str:
    """What comes after the tensors; returns what went wrong, in words."""
    try:
        loader.finish()
    except Exception as error:
        kind = "" if isinstance(error, StateTornError) else f"{type(error).__name__}: "
        return (
            f"{kind}{error}. Model and optimizer are of that version already. Give the objects "
            "that it was made with, or leave out the one that is named (and restore with "
            "strict=False), and start again"
        )
    return ""


def all_finished(version: VerifiedVersion, group: Group) -> None:
    """StateTornError on all ranks if any had trouble at the end of `load`: one that raised alone
    would leave the others to train without it. When all books agree with what was loaded: a rank
    that is lost meanwhile leaves the others with a state that is whole."""
    id_ = version.plan.id
    raise_any(
        group.all_gather_object(version.trouble),
        lambda ranks, why: StateTornError(
            f"{id_} could not be loaded to its end: rank {ranks[0]}: {why}"
        ),
        group.rank,
    )


__all__ = ["LoadedVersion", "VerifiedVersion", "all_finished", "load"]
