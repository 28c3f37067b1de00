"""The steps of a restore up to a version that all ranks know to be sound: plan, read, verify.

Every byte is read and checked before any live state changes on any rank. Mapped shards are read
twice, the second time from memory or page cache; fetched shards stay in memory in between, so
every byte is read from storage once. A damaged copy counts as lost in the next plan.

Besides the live state a rank holds: its share of fetched or rebuilt shards, which is freed as it
is loaded; a window of other ranks' shards; and a summary of each shard. A rank that fetches most
of the version alone allocates memory for new optimizer state only as it frees that share.

Candidates are the copies that a restore may still use. The plan made from them is pure, and the
same on all ranks: every rank knows all found and all rejected copies.

A verified version, the same on all ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt._text import error_text
from tierckpt.coordination.error_barrier import ErrorBarrier, gather_or_raise, raise_any
from tierckpt.core.restore_plan import (
    Found,
    FoundParity,
    Location,
    RestorePlan,
    Source,
    distinct,
    plan_restore,
)
from tierckpt.errors import RestoreError, StateTornError
from tierckpt.format.ids import NO_RUN, ParityKey, ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_file import (
    RankState,
    ShardHeader,
    ShardSummary,
    VersionSummary,
    counts,
    decode_header,
    lacking,
)
from tierckpt.restored import Restored, TransferStats
from tierckpt.storage.routed import end_without, files_at_end

from .progress import Progress
from .rebuild import Parities, ShardBroadcaster, Visit, Wants, all_of_it
from .shards import (
    READERS,
    RUN_BYTES,
    Failure,
    FaultScope,
    Kept,
    OpenStore,
    Part,
    Reads,
    ShardImage,
    in_file,
    in_memory,
    open_image,
    open_persistent,
)

if TYPE_CHECKING:
    from .loader import TensorPreallocator

__all__ = [
    "Candidates",
    "RankFailures",
    "RestoreContext",
    "ShareRead",
    "SpillPolicy",
    "VerifiedVersion",
    "all_finished",
    "find",
    "read",
    "verify",
]


MIN_FAILED_RANKS = 2
"""Number of ranks that must fail to reach an agent before no rank asks it. A single rank may be cut
off by itself."""

C = TypeVar("C", Found, FoundParity)
RankFailures = list[tuple[int, Failure]]
"""Failures, each with the rank that had it."""


class Candidates:
    """Copies by rank, without those that proved bad. One thread."""

    def __init__(
        self,
        found: Sequence[Sequence[Found]],
        parities: Sequence[Sequence[FoundParity]] = (),
        nodes: Sequence[str] = (),
        on_reject: Callable[[str], None] = lambda text: None,
        rollback: tuple[int, int] = NO_RUN,
        abandoned: bool = False,
    ) -> None:
        """`found` and `parities` are those of every rank. `nodes` has the node name of every rank;
        without it each rank counts as a node of its own. `on_reject` receives the reason for each
        rejected copy. `rollback` and `abandoned`: see `plan_restore`."""
        self._rollback, self._abandoned = rollback, abandoned
        self.found, self.parities, self._nodes = found, parities, nodes
        self._on_reject = on_reject
        self.rejected: list[str] = []
        """Descriptions of the copies that exist and cannot be used, with the reason."""
        self.bad: set[tuple[ShardKey, Location]] = set()
        """Copies that no rank may read any more."""
        self._unreachable: set[tuple[ShardKey, Location, int]] = set()
        """Copies that one rank could not reach, with that rank."""
        self._silent: dict[str, set[int]] = {}
        """By the name of an agent's location: the ranks that got no answer from the agent."""
        self._undecodable: dict[VersionId, str] = {}
        """Versions that cannot be decoded only because a key or a codec is missing here, with the
        reason."""
        self._readers: dict[tuple[ShardKey, Location], int] = {}
        """The rank that holds each copy fetched in the last attempt."""

    def plan(
        self, version: int | None = None, avoid: Container[VersionId] = ()
    ) -> RestorePlan | None:
        """Plan for the newest version, or for `version`, not in `avoid`: see `plan_restore`.

        Raises RestoreError if a newer version exists that cannot be decoded only because a key or a
        codec is missing: going back to an older version would let retention remove the newer one.
        """
        plan = plan_restore(
            self.found,
            frozenset(self.bad),
            version,
            self.parities,
            self._readers,
            frozenset(self._unreachable),
            self._nodes,
            avoid,
            self._rollback,
            self._abandoned,
        )
        if self._undecodable and (plan is None or plan.id not in self._undecodable):
            newest = max(self._undecodable)
            raise RestoreError(
                f"{newest} exists and cannot be decoded. {self._undecodable[newest]}. Nothing "
                "was changed, and no older version was taken instead",
                "Correct this and restart. If it is lost for good: restore(version=...) goes "
                f"back to an older version; another path, or moving away what is left of {newest}, "
                "starts without it",
            )
        return plan

    def look(
        self, found: Sequence[Sequence[Found]], parities: Sequence[Sequence[FoundParity]]
    ) -> None:
        """Replace the inventory; rejected copies stay rejected."""
        self.found, self.parities = found, parities

    def still_there(self, failures: RankFailures) -> RankFailures:
        """The failures without those of copies that had disappeared and are also not in the last
        inventory."""
        there = {(f.key, f.place) for each in distinct(self.found) for f in each}
        there |= {(p.key, p.place) for each in distinct(self.parities) for p in each}
        return [(r, f) for r, f in failures if not f.gone or (f.key, f.place) in there]

    def keep_readers(self, plan: RestorePlan) -> None:
        """Keep the readers of fetched copies for the next plan, so that nothing is fetched twice,
        even if another rank then has less to read."""
        shards = len(plan.sources)
        self._readers = {
            (ShardKey(plan.id, s.shard, shards), s.place): s.reader
            for s in plan.sources
            if not (s.rebuilt or s.place.mappable)
        }

    def reject(self, failures: RankFailures) -> None:
        """Exclude failed copies from later plans: a damaged copy on all ranks, an unreachable copy
        on the rank that could not reach it, and everything an agent has if the agent does not
        answer."""
        for rank, each in sorted(failures, key=lambda f: f[1].blame is FaultScope.SIGHT):
            key, place = each.key, each.place
            if (key, place) in self.bad:
                continue
            if each.blame is FaultScope.SIGHT:
                self._unreachable.add((key, place, rank))
            else:
                self.bad.add((key, place))
            by = f" (as rank {rank} found, on node {each.node})" if len(self.found) > 1 else ""
            text = f"{key} on level {place.level} ({place.where}): {each.why}{by}"
            if not each.silent:
                self.note(text)
            elif place.where not in self._silent:  # once for each agent
                self.note(f"{each.why}{by}")
            if each.silent:
                self._silent.setdefault(place.where, set()).add(rank)
            if each.undecodable:
                self._undecodable.setdefault(key.id, text)
        if out := self.left_out:  # otherwise every rank would wait for them again
            self.look(_without(self.found, out), _without(self.parities, out))

    def note(self, text: str) -> None:
        """Record that a copy, or something else that was found, was rejected."""
        self.rejected.append(text)
        self._on_reject(text)

    @property
    def left_out(self) -> set[str]:
        """Agents that no rank asks any more, by the name of their locations."""
        enough = min(MIN_FAILED_RANKS, len(self.found))
        return {where for where, ranks in self._silent.items() if len(ranks) >= enough}


def _without(copies: Sequence[Sequence[C]], out: Container[str]) -> list[list[C]]:
    left = {
        id(each): [copy for copy in each if copy.place.where not in out]
        for each in distinct(copies)
    }
    return [left[id(each)] for each in copies]


class VerifiedVersion(Struct):
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
        for nothing else is freed window by window; rebuilt shards that may have to be repaired are
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
        self.trouble = self.trouble or error_text(error)

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


class SpillPolicy(Struct, frozen=True):
    """Where a rank that fetches most of a version stores it, if most of the version is already
    live. Otherwise the rank would hold two copies, as the live one changes only after all of the
    fetched one is sound."""

    folder: Path
    """Folder on the local disk."""
    live_bytes: int
    """Bytes of the version's tensors that this rank already holds in memory."""

    def make_room(self, manifest: Manifest, then: Callable[[], None]) -> ShardImage:
        """An image for a fetched shard: in a file; in memory if no file can be made, or little is
        live."""
        if 2 * self.live_bytes > manifest.image_bytes * manifest.facts.shards:
            with contextlib.suppress(OSError):
                return in_file(manifest, self.folder, then)
        return in_memory(manifest, then)


class RestoreContext(Struct):
    """Resources and measurements of one restore on this rank, passed to every step. Training
    thread, except `on_read`."""

    group: ErrorBarrier
    progress: Progress = field(default_factory=lambda: Progress(False))
    open_store: OpenStore = open_persistent
    new: TensorPreallocator | None = None
    """Preallocates new tensors, and fills them while threads still read; starts again for each
    version tried."""
    spill: SpillPolicy | None = None
    kept: Kept = field(default_factory=dict)
    """Sound shards that this rank fetched for an attempt that failed on another rank."""
    volume: TransferStats = field(default_factory=TransferStats)
    """Bytes read and exchanged in all attempts."""
    seconds: float = 0.0
    """Time spent in `find`: planning, reading and verifying, in all attempts."""
    rebuild_seconds: float = 0.0
    """Time spent on rebuilding, which overlaps with reading."""

    def on_read(self, nbytes: int) -> None:
        """Count bytes read from a level. Any thread."""
        self.volume.read(nbytes)
        self.progress.advance(nbytes)

    def drop_kept(self, plan: RestorePlan | None = None) -> None:
        """Close kept shards that this plan does not use: another version's are never used again."""
        for key, place, run_id in list(self.kept):
            if plan is None or (key.id, run_id) != (plan.id, plan.run_id):
                image, _ = self.kept.pop((key, place, run_id))
                image.close()

    def report(self, result: Restored) -> None:
        """Add the transfer measurements to the result."""
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
    """The newest version that proves sound on all ranks and is not in `avoid`; None if there is
    none. The caller closes it. Collective, in an `ErrorBarrier`: all ranks end it with the same
    result.

    `still_found` filters out failures of copies that were retired since the inventory. Raises
    RestoreError on all ranks if `Candidates.plan` does, and if one rank has no memory or
    descriptors to read with, which is no reason to take an older version.
    """
    start = time.perf_counter()
    try:
        while (plan := candidates.plan(version, avoid)) is not None:
            share = read(context, plan)
            with contextlib.ExitStack() as on_failure:  # also if `verify` cannot start
                on_failure.callback(share.close)
                verified, failures = verify(context, share)
                on_failure.pop_all()
            if verified is not None:
                return verified
            candidates.reject(still_found(failures))
            candidates.keep_readers(plan)
        return None
    finally:
        context.drop_kept()
        context.seconds += time.perf_counter() - start


class ShareRead(Struct):
    """The part of a plan that one rank has read and rebuilt."""

    plan: RestorePlan
    broadcaster: ShardBroadcaster
    images: dict[int, ShardImage] = field(default_factory=dict)
    """Images that this rank maps, fetched, or rebuilt; the owner of this object closes them."""
    headers: dict[int, ShardHeader] = field(default_factory=dict)
    """Headers of the shards that this rank read."""
    suspected: list[Failure] = field(default_factory=list)
    """Parities of groups with a wrong rebuild."""
    failures: list[Failure] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    """Failures that are no copy's fault, as text."""

    @contextlib.contextmanager
    def noting_trouble(self) -> Iterator[None]:
        """Turn an error into this rank's trouble: the others wait in the following exchange."""
        try:
            yield
        except Exception as error:
            self.trouble.append(error_text(error))

    def close(self) -> None:
        """Unmap everything."""
        for image in self.images.values():
            image.close()
        self.images.clear()


def read(context: RestoreContext, plan: RestorePlan) -> ShareRead:
    """Read and check this rank's share, and rebuild lost shards. Collective."""
    share = ShareRead(plan, ShardBroadcaster(context.group, context.volume))
    context.drop_kept(plan)
    context.progress.start_phase(f"verifying v{plan.id.version}")
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(share.close)
        own_sources = _read_here(plan, context.group.rank)
        # A rank that holds more than half of the version in memory of its own.
        fetches_most = 2 * sum(not s.place.mappable for s in own_sources) > len(plan.sources)
        with ThreadPoolExecutor(READERS, "tierckpt-restore") as pool:
            room = context.spill.make_room if context.spill and fetches_most else None
            reads = Reads(
                pool, share.images, context.on_read, context.open_store, context.kept, room
            )
            if context.new is not None:
                context.new.start(wanted=not fetches_most)
                reads.on_open = context.new.foresee
            with share.noting_trouble():
                reads.open(plan.id, len(plan.sources), plan.run_id, own_sources)
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
    """The version, if all ranks have read their shares and found them sound; or None and the
    failures, and then sound fetched shards are kept. Collective. Takes ownership of `share`."""
    plan, group = share.plan, context.group
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(share.close)
        outlines: dict[int, ShardSummary] = {}
        small: dict[int, RankState] = {}
        with share.noting_trouble():
            outlines, small = _report_of_this_rank(share)
        share.trouble += [
            f"{f.key} on node {f.node}: {f.why}"
            for f in share.failures
            if f.blame is FaultScope.RANK
        ]
        report = ("; ".join(share.trouble[:1]), share.failures, share.suspected, outlines, small)
        troubles, failed_of, suspected_of, outlines_of, small_of = zip(
            *group.all_gather_object(report), strict=True
        )
        raise_any(troubles, lambda ranks, why: _could_not_read(plan, ranks, why), group.rank)
        # A rebuild from damaged bytes is wrong as well, which does not make its other sources
        # suspect.
        if failures := _with_ranks(failed_of) or _with_ranks(suspected_of):
            _keep(context, share)
            return None, failures
        outlines = {shard: o for each in outlines_of for shard, o in each.items()}
        small = {shard: o for each in small_of for shard, o in each.items()}
        own_shard = group.rank % len(plan.sources)
        own = small.get(own_shard) or _own_state(share, own_shard)
        contents = VersionSummary([outlines[s.shard] for s in plan.sources], own)
        if not contents.whole():
            all_counts = group.all_gather_object(counts(_headers_here(share).values()))
            contents.missing = lacking(contents.specs, all_counts)
        on_failure.pop_all()
    broadcaster, progress = share.broadcaster, context.progress
    return VerifiedVersion(plan, broadcaster, progress, share.images, contents), []


def _read_here(plan: RestorePlan, rank: int) -> list[Source]:
    return [s for s in plan.sources if s.reader == rank and not s.rebuilt]


def _could_not_read(plan: RestorePlan, ranks: list[int], why: str) -> RestoreError:
    return RestoreError(
        f"{plan.id} exists, but rank {ranks[0]} could not read its share: {why}. Nothing was "
        "changed, and no older version was taken instead"
    )


def _with_ranks(failed_of: tuple[list[Failure], ...]) -> RankFailures:
    return [(rank, failure) for rank, failures in enumerate(failed_of) for failure in failures]


def _keep(context: RestoreContext, share: ShareRead) -> None:
    """Keep the sound fetched shards of this rank for the next attempt."""
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
    """Rebuild the lost shards while threads still read; not if a rank has trouble."""
    start, plan = time.perf_counter(), share.plan
    parities = Parities(plan, share.broadcaster, pool, context.open_store, context.on_read)
    with contextlib.closing(parities):
        parities.open()
        if not all(s.place.mappable for s in plan.sources):
            reads.finish()  # fetched shards are complete only then
        ready = reads.opened() and parities.opened() and not share.trouble
        all_ready = context.group.all_gather_object((ready, parities.records()))
        if all(rank_ready for rank_ready, _ in all_ready):
            records = dict(r for _, each in all_ready for r in each)
            gather_or_raise(  # a rank without memory would leave the others waiting
                context.group,
                lambda: parities.make_room(records, share.images),
                lambda ranks, why: RestoreError(
                    f"{plan.id} cannot be rebuilt: rank {ranks[0]} has {why}"
                ),
            )
            share.suspected = parities.rebuild(share.images, share.trouble)
        context.rebuild_seconds += time.perf_counter() - start
        share.failures += parities.finish()


def _map_others(share: ShareRead) -> list[Failure]:
    """Map the shards that other ranks read and verify and this rank sees too."""
    failures: list[Failure] = []
    plan = share.plan
    for source in plan.sources:
        if source.direct and source.reader != share.broadcaster.rank:
            key = ShardKey(plan.id, source.shard, len(plan.sources))
            try:
                share.images[source.shard] = open_image(key, source.place, plan.run_id)
            except FileNotFoundError as error:  # its reader reports whether it exists
                failures.append(
                    replace(Failure.of(key, source.place, error), blame=FaultScope.SIGHT)
                )
            except Exception as error:
                failures.append(Failure.of(key, source.place, error))
    return failures


def _fill_ahead(share: ShareRead, reads: Reads, new: TensorPreallocator) -> None:
    """Fill new tensors, while this rank's threads and other ranks still read."""
    new.foreseen(touch=any(s.place.level != "memory" for s in share.plan.sources))
    with ThreadPoolExecutor(1, "tierckpt-fill") as beside:
        beside.submit(new.fill, _seen_of_others(share))
        new.fill(reads.sound())


def _seen_of_others(share: ShareRead) -> Iterator[Part]:
    """Parts of the shards that others read and this rank maps, in order. The readers report whether
    they are sound."""
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
    """Headers of the shards that this rank reports to the others: those it read or rebuilt."""
    found = dict(share.headers)
    for source in share.plan.sources:
        if source.rebuilt and source.shard in share.images:
            found[source.shard] = decode_header(share.images[source.shard].view)
    return found


def _report_of_this_rank(share: ShareRead) -> tuple[dict[int, ShardSummary], dict[int, RankState]]:
    """This rank's report on the shards it read: a summary of each, and the small state of each
    shard that some rank needs and cannot map."""
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
    """This rank's small state, from a shard that it maps or read."""
    image = share.images[shard]
    return _own_of(image, share.headers.get(shard) or decode_header(image.view))


def _own_of(image: ShardImage, header: ShardHeader) -> RankState:
    nbytes, base = image.manifest.rank_state_bytes, header.tree_offset

    def read(low: int, high: int) -> bytes:
        return bytes(image.view[base + low : base + high])

    files = files_at_end(nbytes, read)
    tree = read(0, end_without(nbytes, files))
    return RankState.of(image.manifest.encode(), tree, header, files)
