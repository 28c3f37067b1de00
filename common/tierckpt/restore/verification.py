"""Steps of a restore, up to a version that all ranks know to be sound: plan, read, verify.

Every byte is read and checked before anything live is changed, on any rank. What is mapped is gone
through twice, the second time in memory or page cache; what is fetched stays in memory between, so
every byte is read from storage once. A damaged copy goes back into the plan as lost.

Beside the live state a rank holds its share of what had to be fetched or rebuilt, which it gives
back as it is loaded, a window of what others read, and an outline of each shard. A rank that
fetches most of the version alone takes memory for new optimizer state when it gives back the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tierckpt.coordination.error_barrier import ErrorBarrier, gather_or_raise, raise_any
from tierckpt.core.restore_plan import RestorePlan, Source
from tierckpt.errors import RestoreError
from tierckpt.format.ids import ParityKey, ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_file import ShardHeader, decode_header
from tierckpt.format.shard_summary import RankState, ShardSummary, VersionSummary, counts, lacking
from tierckpt.restored import Restored, TransferStats

from .broadcast import ShardBroadcaster
from .candidates import Candidates, RankFailures
from .progress import Progress
from .rebuild import Parities
from .shard_image import (
    OpenStore,
    Part,
    ShardImage,
    in_file,
    in_memory,
    open_image,
    open_persistent,
)
from .shard_reader import READERS, RUN_BYTES, Failure, FaultScope, Kept, Reads
from .tensor_fill import TensorPreallocator
from .verified_version import VerifiedVersion


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
class RestoreContext:
    """Means and measures of one restore on this rank; every step has it. Training thread, but for
    `on_read`."""

    group: ErrorBarrier
    progress: Progress = field(default_factory=lambda: Progress(False))
    open_store: OpenStore = open_persistent
    new: TensorPreallocator | None = None
    """Is shown what this rank reads while threads read the rest, and what it sees of the others'
    shards; anew for each version that is tried."""
    spill: SpillPolicy | None = None
    kept: Kept = field(default_factory=dict)
    """What this rank fetched for a try that failed elsewhere."""
    volume: TransferStats = field(default_factory=TransferStats)
    seconds: float = 0.0
    """Of all tries."""
    rebuild_seconds: float = 0.0
    """Of rebuilding, which goes on while threads read."""

    def on_read(self, nbytes: int) -> None:
        """Bytes came from a level. Any thread."""
        self.volume.read(nbytes)
        self.progress.advance(nbytes)

    def drop_kept(self, plan: RestorePlan | None = None) -> None:
        """Close what this plan has no use for: another version's is never asked for again."""
        for key, place, run_id in list(self.kept):
            if plan is None or (key.id, run_id) != (plan.id, plan.run_id):
                image, _ = self.kept.pop((key, place, run_id))
                image.close()

    def report(self, result: Restored) -> None:
        """Fill in what the way to a sound version took."""
        result.read_bytes = self.volume.read_bytes
        result.exchanged_bytes = self.volume.exchanged_bytes
        result.seconds["verify"] = self.seconds
        if self.rebuild_seconds:
            result.seconds["rebuild"] = self.rebuild_seconds


def find(
    context: RestoreContext,
    candidates: Candidates,
    version: int | None = None,
    avoid: Container[VersionId] = (),
    still_found: Callable[[RankFailures], RankFailures] = lambda failures: failures,
) -> VerifiedVersion | None:
    """The newest version that proves sound on all ranks, and is none of `avoid`; None when there is
    none. The caller closes it. Collective, in a stretch that all ranks end alike (`ErrorBarrier`).

    `still_found` leaves out failures of copies that were retired since stock was taken. Raises
    RestoreError, on all ranks, where `Candidates.plan` does, and when one rank has no memory or
    descriptors to read with, which is no reason to take an older version either.
    """
    begin = time.perf_counter()
    try:
        while (plan := candidates.plan(version, avoid)) is not None:
            verified, failures = verify(context, read(context, plan))
            if verified is not None:
                return verified
            candidates.reject(still_found(failures))
            candidates.keep_readers(plan)
        return None
    finally:
        context.drop_kept()
        context.seconds += time.perf_counter() - begin


@dataclass
class ShareRead:
    """What one rank has read, and made, of a plan."""

    plan: RestorePlan
    broadcaster: ShardBroadcaster
    images: dict[int, ShardImage] = field(default_factory=dict)
    """What this rank maps, fetched, or made; its owner closes them."""
    headers: dict[int, ShardHeader] = field(default_factory=dict)
    """Of the shards that it read."""
    suspected: list[Failure] = field(default_factory=list)
    """Parity of groups of which something was made that is wrong."""
    failures: list[Failure] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    """What is no copy's fault, in words."""

    @contextlib.contextmanager
    def noting_trouble(self) -> Iterator[None]:
        """An error becomes this rank's trouble: the others wait in the exchange that follows."""
        try:
            yield
        except Exception as error:
            self.trouble.append(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Unmap everything."""
        for image in self.images.values():
            image.close()
        self.images.clear()


def read(context: RestoreContext, plan: RestorePlan) -> ShareRead:
    """Have this rank's share brought and checked, and lost shards rebuilt. Collective."""
    share = ShareRead(plan, ShardBroadcaster(context.group, context.volume))
    context.drop_kept(plan)
    context.progress.begin(f"verifying v{plan.id.version}")
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(share.close)
        mine = _read_here(plan, context.group.rank)
        # A rank that holds more than half of the version in memory of its own.
        fetches_most = 2 * sum(not s.place.mappable for s in mine) > len(plan.sources)
        with ThreadPoolExecutor(READERS, "tierckpt-restore") as pool:
            room = context.spill.make_room if context.spill and fetches_most else None
            reads = Reads(
                pool, share.images, context.on_read, context.open_store, context.kept, room
            )
            if context.new is not None:
                context.new.begin(wanted=not fetches_most)
                reads.on_open = context.new.foresee
            with share.noting_trouble():
                reads.open(plan.id, len(plan.sources), plan.run_id, mine)
            if plan.rebuilds:
                _rebuild(context, share, pool, reads)
            share.failures += _map_others(share)
            if context.new is not None:
                with share.noting_trouble():
                    _fill_ahead(share, reads, context.new)
            share.failures += reads.finish()
        share.headers = reads.headers
        on_failure.pop_all()
    return share


def verify(
    context: RestoreContext, share: ShareRead
) -> tuple[VerifiedVersion | None, RankFailures]:
    """A version of which all ranks have read their shares and found them sound; or None, and why:
    what is fetched and sound is kept then. Collective. `share` is used up."""
    plan, group = share.plan, context.group
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(share.close)
        outlines: dict[int, ShardSummary] = {}
        small: dict[int, RankState] = {}
        with share.noting_trouble():
            outlines, small = _told_here(share)
        share.trouble += [
            f"{f.key} on node {f.node}: {f.why}"
            for f in share.failures
            if f.blame is FaultScope.RANK
        ]
        told = ("; ".join(share.trouble[:1]), share.failures, share.suspected, outlines, small)
        troubles, failed_of, suspected_of, outlines_of, small_of = zip(
            *group.all_gather_object(told), strict=True
        )
        raise_any(troubles, lambda ranks, why: _could_not_read(plan, ranks, why), group.rank)
        # What is made of damaged bytes is wrong, too, and says nothing of those that are sound.
        if failures := _with_ranks(failed_of) or _with_ranks(suspected_of):
            _keep(context, share)
            return None, failures
        outlines = {shard: o for each in outlines_of for shard, o in each.items()}
        small = {shard: o for each in small_of for shard, o in each.items()}
        own_shard = group.rank % len(plan.sources)
        own = small.get(own_shard) or _own_state(share, own_shard)
        contents = VersionSummary([outlines[s.shard] for s in plan.sources], own)
        if not contents.whole():
            everyones = group.all_gather_object(counts(_headers_here(share).values()))
            contents.missing = lacking(contents.specs, everyones)
        on_failure.pop_all()
    broadcaster, progress = share.broadcaster, context.progress
    return VerifiedVersion(plan, broadcaster, progress, share.images, contents), []


def _read_here(plan: RestorePlan, rank: int) -> list[Source]:
    return [s for s in plan.sources if s.reader == rank and not s.rebuilt]


def _could_not_read(plan: RestorePlan, ranks: list[int], why: str) -> RestoreError:
    return RestoreError(
        f"{plan.id} is there and rank {ranks[0]} could not read its share: {why}. Nothing was "
        "changed, and nothing older was taken in its place"
    )


def _with_ranks(everyones: tuple[list[Failure], ...]) -> RankFailures:
    return [(rank, failure) for rank, theirs in enumerate(everyones) for failure in theirs]


def _keep(context: RestoreContext, share: ShareRead) -> None:
    """For the next try: what this rank fetched and found sound."""
    plan = share.plan
    damaged = {f.key.shard for f in share.failures if not isinstance(f.key, ParityKey)}
    for source in _read_here(plan, context.group.rank):
        shard = source.shard
        if shard in share.headers and shard not in damaged and not source.place.mappable:
            key = ShardKey(plan.id, shard, len(plan.sources))
            there = share.images.pop(shard), share.headers[shard]
            context.kept[key, source.place, plan.run_id] = there


def _rebuild(
    context: RestoreContext, share: ShareRead, pool: ThreadPoolExecutor, reads: Reads
) -> None:
    """Make the lost shards while threads still read. Not where a rank has trouble."""
    begin, plan = time.perf_counter(), share.plan
    parities = Parities(plan, share.broadcaster, pool, context.open_store, context.on_read)
    with contextlib.closing(parities):
        parities.open()
        if not all(s.place.mappable for s in plan.sources):
            reads.finish()  # what is fetched is not there before
        ready = reads.opened() and parities.opened() and not share.trouble
        everyone = context.group.all_gather_object((ready, parities.records()))
        if all(theirs for theirs, _ in everyone):
            records = dict(r for _, each in everyone for r in each)
            gather_or_raise(  # a rank without memory would leave the others waiting
                context.group,
                lambda: parities.make_room(records, share.images),
                lambda ranks, why: RestoreError(
                    f"{plan.id} cannot be rebuilt: rank {ranks[0]} has {why}"
                ),
            )
            share.suspected = parities.rebuild(share.images, share.trouble)
        context.rebuild_seconds += time.perf_counter() - begin
        share.failures += parities.finish()


def _map_others(share: ShareRead) -> list[Failure]:
    """Map what others read and verify and this rank sees too."""
    failures: list[Failure] = []
    plan = share.plan
    for source in plan.sources:
        if source.direct and source.reader != share.broadcaster.rank:
            key = ShardKey(plan.id, source.shard, len(plan.sources))
            try:
                share.images[source.shard] = open_image(key, source.place, plan.run_id)
            except FileNotFoundError as error:  # its reader reports whether it is there
                failures.append(
                    replace(Failure.of(key, source.place, error), blame=FaultScope.SIGHT)
                )
            except Exception as error:
                failures.append(Failure.of(key, source.place, error))
    return failures


def _fill_ahead(share: ShareRead, reads: Reads, new: TensorPreallocator) -> None:
    """What is not live, while this rank's threads and other ranks still read."""
    new.foreseen(touch=any(s.place.level != "memory" for s in share.plan.sources))
    with ThreadPoolExecutor(1, "tierckpt-fill") as beside:
        beside.submit(new.fill, _seen_of_others(share))
        new.fill(reads.sound())


def _seen_of_others(share: ShareRead) -> Iterator[Part]:
    """What others read and this rank maps, in order. They report whether it is sound."""
    for source in share.plan.sources:
        image = share.images.get(source.shard)
        if image is None or not source.direct or source.reader == share.broadcaster.rank:
            continue
        low, high = 0, image.manifest.header_bytes
        while low < (end := image.manifest.image_bytes):
            image.touch(low, high)
            yield source.shard, low, image.view[low:high]
            low, high = high, min(high + RUN_BYTES, end)


def _headers_here(share: ShareRead) -> dict[int, ShardHeader]:
    """Of the shards that this rank tells the others of: those it read or made."""
    found = dict(share.headers)
    for source in share.plan.sources:
        if source.rebuilt and source.shard in share.images:
            found[source.shard] = decode_header(share.images[source.shard].view)
    return found


def _told_here(share: ShareRead) -> tuple[dict[int, ShardSummary], dict[int, RankState]]:
    """What this rank reports of the shards it read: an outline of each; and the small state of
    those that a rank needs which cannot look at the shard itself."""
    sources = share.plan.sources
    ranks = range(share.broadcaster.size)
    wanted = {r % len(sources) for r in ranks if sources[r % len(sources)].reader != r}
    outlines, small = {}, {}
    for shard, header in _headers_here(share).items():
        outlines[shard] = ShardSummary.of(shard, header)
        if shard in wanted and not sources[shard].direct and shard in share.images:
            small[shard] = _own_of(share.images[shard], header)
    return outlines, small


def _own_state(share: ShareRead, shard: int) -> RankState:
    """This rank's, from a shard that it maps or read."""
    image = share.images[shard]
    return _own_of(image, share.headers.get(shard) or decode_header(image.view))


def _own_of(image: ShardImage, header: ShardHeader) -> RankState:
    low = header.tree_offset
    tree_bytes = bytes(image.view[low : low + image.manifest.rank_state_bytes])
    return RankState.of(image.manifest.encode(), tree_bytes, header)


__all__ = ["RestoreContext", "ShareRead", "SpillPolicy", "find", "read", "verify"]
