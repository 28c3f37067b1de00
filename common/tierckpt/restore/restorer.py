"""Restore: from bytes on some level back into the live model, optimizer and generators.

Order matters: find and plan, read and verify every byte, compare the structure, and only then
change anything, on any rank. So what is mapped is gone through twice, the second time in memory or
page cache; what is fetched stays in memory between, and every byte is read from storage once. A
damaged copy goes back into the plan as lost; a structural difference is an error on all ranks.

Beside the live state a rank holds its share of what had to be fetched or rebuilt, which it gives
back as it is loaded, a window of what others read, and an outline of each shard. Who fetches most
of the version alone takes memory for new optimizer state no sooner than the other is given back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.coordination.shown_once import said_by
from tierckpt.core.copies import Found, FoundParity, Location
from tierckpt.core.restore_plan import RestorePlan, Source, plan_restore
from tierckpt.errors import RestoreError, StateMismatchError, StateTornError
from tierckpt.format.ids import ParityKey, ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_file import ShardHeader, decode_header
from tierckpt.format.shard_summary import RankState, ShardSummary, VersionSummary, counts, lacking
from tierckpt.group import Group
from tierckpt.restored import Restored, TransferStats
from tierckpt.state import rng, tree_codec
from tierckpt.state.training_state import TrainingState

from .broadcast import ShardBroadcaster
from .loader import Loader
from .progress import Progress
from .rebuild import Parities
from .shard_image import OpenStore, Part, ShardImage, open_image, open_persistent
from .shard_reader import READERS, RUN_BYTES, Failure, FaultScope, Kept, Reads
from .tensor_fill import TensorPreallocator
from .verified_version import SpillPolicy, VerifiedVersion

__all__ = ["Restorer", "all_finished", "load"]


ENOUGH_IN_VAIN = 2
"""Ranks that asked an agent; one of them may be cut off from it alone."""

LookAgain = Callable[[str], tuple[Sequence[Sequence[Found]], Sequence[Sequence[FoundParity]]]]
"""Given what is missing, in words; returns inventories and parities."""


class Restorer:
    """Finds a version that is complete and sound. Every rank runs the same one."""

    def __init__(
        self,
        group: ErrorBarrier,
        inventories: Sequence[Sequence[Found]],
        on_reject: Callable[[str], None],
        parities: Sequence[Sequence[FoundParity]] = (),
        progress: Progress | None = None,
        open_store: OpenStore = open_persistent,
        new: TensorPreallocator | None = None,
        look_again: LookAgain | None = None,
        nodes: Sequence[str] = (),
        aside: SpillPolicy | None = None,
    ) -> None:
        """`new` is shown what this rank reads while threads read the rest, and what it sees of the
        others'; anew for each version that is tried. `look_again` takes stock anew, on all ranks.
        `nodes` names every rank's. `aside`: where to put what memory is not to hold twice."""
        self.group = group
        self.inventories = inventories
        self.parities = parities
        self.rejected: list[str] = []
        self.seconds = self.rebuild_seconds = 0.0
        """Of it all, and of rebuilding, which goes on while threads read."""
        self.volume = TransferStats()
        self._progress = progress or Progress(False)
        self._open_store, self._new = open_store, new
        self._look_again, self._nodes, self._aside = look_again, nodes, aside
        self._kept: Kept = {}
        self._readers: dict[tuple[ShardKey, Location], int] = {}
        """Who has what of all that was fetched at the last try."""
        self.bad: set[tuple[ShardKey, Location]] = set()
        """Copies that nobody is to read any more."""
        self._unreachable: set[tuple[ShardKey, Location, int]] = set()
        """With the rank that could not get at it."""
        self._silent: dict[str, set[int]] = {}
        """By the name of an agent's places: the ranks that got no answer from it."""
        self._undecodable: dict[VersionId, str] = {}
        """Versions that lack only a key or a module here, and which."""
        self._on_reject = on_reject

    def find(
        self, version: int | None = None, avoid: Container[VersionId] = ()
    ) -> VerifiedVersion | None:
        """The newest version that proves sound on all ranks, and is none of `avoid`; None when
        there is none. In a stretch that all ranks end alike (`ErrorBarrier`).

        Raises RestoreError, on all ranks, when a newer one is there and cannot be decoded for want
        of a key or a module: to go back behind it would be the beginning of its end; and when one
        rank has no memory or descriptors to read with, which is no reason to go back either.
        """
        begin = time.perf_counter()
        try:
            while True:
                plan = plan_restore(
                    self.inventories,
                    frozenset(self.bad),
                    version,
                    self.parities,
                    self._readers,
                    frozenset(self._unreachable),
                    self._nodes,
                    avoid,
                )
                if self._undecodable and (plan is None or plan.id not in self._undecodable):
                    raise _cannot_decode(self._undecodable)
                if plan is None:
                    return None
                attempt = self._try(plan)
                if attempt is not None:
                    return attempt
        finally:
            self._drop_kept()
            self.seconds += time.perf_counter() - begin

    def report(self, result: Restored) -> None:
        """Fill in what finding it took."""
        result.rejected = tuple(self.rejected)
        result.read_bytes = self.volume.read_bytes
        result.exchanged_bytes = self.volume.exchanged_bytes
        result.seconds["verify"] = self.seconds
        if self.rebuild_seconds:
            result.seconds["rebuild"] = self.rebuild_seconds

    def _try(self, plan: RestorePlan) -> VerifiedVersion | None:
        attempt = VerifiedVersion(plan, ShardBroadcaster(self.group, self.volume), self._progress)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(attempt.close)
            if not self._verify(attempt):
                return None
            on_failure.pop_all()
        return attempt

    def _verify(self, attempt: VerifiedVersion) -> bool:
        """Read and check this rank's share; False, with more known as bad, when any was bad."""
        plan = attempt.plan
        trouble: list[str] = []
        self._drop_kept(plan)
        mine = [s for s in plan.sources if s.reader == self.group.rank and not s.rebuilt]
        self._progress.begin(f"verifying v{plan.id.version}")
        headers, suspected, failures = self._read(attempt, mine, trouble)
        outlines: dict[int, ShardSummary] = {}
        small: dict[int, RankState] = {}
        with _noted(trouble):
            outlines, small = _told_here(attempt, headers)
        trouble += [
            f"{f.key} on node {f.node}: {f.why}" for f in failures if f.blame is FaultScope.RANK
        ]
        told = ("; ".join(trouble[:1]), failures, suspected, outlines, small)
        troubles, failed_of, suspected_of, outlines_of, small_of = zip(
            *self.group.all_gather_object(told), strict=True
        )
        _see_that_all_could_read(plan, troubles)
        # What is made of damaged bytes is wrong, too, and says nothing of those that are sound.
        failed = _with_ranks(failed_of) or _with_ranks(suspected_of)
        self._reject(self._still_found(failed))
        self._readers = _readers_of(plan)
        if failed:
            damaged = {f.key.shard for f in failures if not isinstance(f.key, ParityKey)}
            self._keep(attempt, mine, headers, damaged)
        else:
            outlines = {shard: o for each in outlines_of for shard, o in each.items()}
            small = {shard: o for each in small_of for shard, o in each.items()}
            own = small.get(attempt.own_shard) or _own_state(attempt, headers)
            attempt.contents = VersionSummary([outlines[s.shard] for s in plan.sources], own)
            if not attempt.contents.whole():
                held = counts(_headers_here(attempt, headers).values())
                everyones = self.group.all_gather_object(held)
                attempt.contents.missing = lacking(attempt.contents.specs, everyones)
        return not failed

    def _read(
        self, attempt: VerifiedVersion, mine: Sequence[Source], trouble: list[str]
    ) -> tuple[dict[int, ShardHeader], list[Failure], list[Failure]]:
        """Have this rank's share checked, and lost shards rebuilt; (headers, what may be damaged,
        what is). What is no copy's fault is added to `trouble`."""
        plan, images = attempt.plan, attempt.images
        fetches_most = _fetches_most(plan, mine)
        suspected: list[Failure] = []
        failures: list[Failure] = []
        with ThreadPoolExecutor(READERS, "tierckpt-restore") as pool:
            room = self._aside.make_room if self._aside and fetches_most else None
            reads = Reads(pool, images, self._on_read, self._open_store, self._kept, room)
            if self._new is not None:
                self._new.begin(wanted=not fetches_most)
                reads.on_open = self._new.foresee
            with _noted(trouble):
                reads.open(plan.id, len(plan.sources), plan.run_id, mine)
            if plan.rebuilds:
                suspected, failures = self._rebuild(attempt, pool, reads, trouble)
            failures += _map_others(attempt)
            if self._new is not None:
                with _noted(trouble):
                    _fill_ahead(attempt, reads, self._new)
            failures += reads.finish()
        return reads.headers, suspected, failures

    def _keep(
        self,
        attempt: VerifiedVersion,
        sources: Iterable[Source],
        headers: Mapping[int, ShardHeader],
        damaged: Container[int],
    ) -> None:
        """For the next attempt: what this rank fetched and found sound."""
        plan = attempt.plan
        for source in sources:
            shard = source.shard
            if shard in headers and shard not in damaged and not source.place.mappable:
                key = ShardKey(plan.id, shard, len(plan.sources))
                self._kept[key, source.place, plan.run_id] = (
                    attempt.images.pop(shard),
                    headers[shard],
                )

    def _drop_kept(self, plan: RestorePlan | None = None) -> None:
        """What this plan has no use for: another version's is never asked for again."""
        for key, place, run_id in list(self._kept):
            if plan is None or (key.id, run_id) != (plan.id, plan.run_id):
                image, _ = self._kept.pop((key, place, run_id))
                image.close()

    def _rebuild(
        self, attempt: VerifiedVersion, pool: ThreadPoolExecutor, reads: Reads, trouble: list[str]
    ) -> tuple[list[Failure], list[Failure]]:
        """Make the lost shards while threads still read; (what may be damaged, what is). Not where
        a rank has `trouble`, to which this one's is added."""
        begin = time.perf_counter()
        parities = Parities(
            attempt.plan, attempt.broadcaster, pool, self._open_store, self._on_read
        )
        with contextlib.closing(parities):
            parities.open()
            if not all(s.place.mappable for s in attempt.plan.sources):
                reads.finish()  # what is fetched is not there before
            ready = reads.opened() and parities.opened() and not trouble
            everyone = self.group.all_gather_object((ready, parities.records()))
            suspected = []
            if all(theirs for theirs, _ in everyone):
                records = dict(r for _, each in everyone for r in each)
                self._see_that_there_is_room(
                    attempt.plan, parities.make_room(records, attempt.images)
                )
                suspected = parities.rebuild(attempt.images, trouble)
            self.rebuild_seconds += time.perf_counter() - begin
            return suspected, parities.finish()

    def _see_that_there_is_room(self, plan: RestorePlan, trouble: str) -> None:
        """RestoreError on all ranks when one has no memory: alone, it would leave them waiting."""
        for rank, theirs in enumerate(self.group.all_gather_object(trouble)):
            if theirs:
                raise RestoreError(f"{plan.id} cannot be rebuilt: rank {rank} has {theirs}")

    def _on_read(self, nbytes: int) -> None:
        self.volume.read(nbytes)
        self._progress.advance(nbytes)

    def _still_found(self, failed: list[tuple[int, Failure]]) -> list[tuple[int, Failure]]:
        """Without copies that are no longer there when all look once more: an agent of the run
        before has retired them, for a newer version that the next plan is to know.

        That ends: what a look no longer finds was deleted, and what it finds is rejected here.
        """
        gone = [failure for _, failure in failed if failure.gone]
        if not gone or self._look_again is None:
            return failed
        places = dict.fromkeys(f"{each.key.id} in {each.place.where}" for each in gone)
        self.inventories, self.parities = self._look_again("; ".join(list(places)[:4]))
        found = {(f.key, f.place) for each in self.inventories for f in each}
        found |= {(p.key, p.place) for each in self.parities for p in each}
        return [(r, f) for r, f in failed if not f.gone or (f.key, f.place) in found]

    def _reject(self, failed: Iterable[tuple[int, Failure]]) -> None:
        """Never again: a damaged copy by anybody, one that a rank could not get at by that rank;
        and by anybody all that an agent has which does not answer."""
        for rank, each in sorted(failed, key=lambda f: f[1].blame is FaultScope.SIGHT):
            key, place = each.key, each.place
            if (key, place) in self.bad:
                continue
            if each.blame is FaultScope.SIGHT:
                self._unreachable.add((key, place, rank))
            else:
                self.bad.add((key, place))
            by = f" (as rank {rank} found, on node {each.node})" if self.group.size > 1 else ""
            text = f"{key} on level {place.level} ({place.where}): {each.why}{by}"
            if not each.silent:
                self._tell(text)
            elif place.where not in self._silent:  # once, whatever it has, and whoever asks
                self._tell(f"{each.why}{by}")
            if each.silent:
                self._silent.setdefault(place.where, set()).add(rank)
            if each.undecodable:
                self._undecodable.setdefault(key.id, text)
        self._leave_out_silent()

    def _tell(self, text: str) -> None:
        self.rejected.append(text)
        self._on_reject(text)

    @property
    def left_out(self) -> set[str]:
        """Agents that nobody is to ask any more, by the name of their places."""
        enough = min(ENOUGH_IN_VAIN, self.group.size)
        return {where for where, ranks in self._silent.items() if len(ranks) >= enough}

    def _leave_out_silent(self) -> None:
        """What their agents have is nowhere: each rank would wait for them anew."""
        if out := self.left_out:
            found, parities = self.inventories, self.parities
            self.inventories = [[f for f in each if f.place.where not in out] for each in found]
            self.parities = [[p for p in each if p.place.where not in out] for each in parities]


@contextlib.contextmanager
def _noted(trouble: list[str]) -> Iterator[None]:
    """An error, put into words and told in the exchange that follows: the others wait there."""
    try:
        yield
    except Exception as error:
        trouble.append(f"{type(error).__name__}: {error}")


def _see_that_all_could_read(plan: RestorePlan, troubles: Iterable[str]) -> None:
    """RestoreError on all ranks where one had trouble that is no copy's."""
    for rank, why in enumerate(troubles):
        if why:
            raise RestoreError(
                f"{plan.id} is there and rank {rank} could not read its share: {why}. Nothing was "
                "changed, and nothing older was taken in its place"
            )


def _with_ranks(everyones: Iterable[Iterable[Failure]]) -> list[tuple[int, Failure]]:
    return [(rank, failure) for rank, theirs in enumerate(everyones) for failure in theirs]


def _cannot_decode(versions: Mapping[VersionId, str]) -> RestoreError:
    newest = max(versions)
    return RestoreError(
        f"{newest} is there and cannot be decoded. {versions[newest]}. Nothing was changed, and "
        "nothing older was taken in its place",
        "Put that right and start again. If it is gone for good: restore(version=...) goes back "
        f"to an older version; another path, or moving away what is left of {newest}, starts "
        "without it",
    )


def _readers_of(plan: RestorePlan) -> dict[tuple[ShardKey, Location], int]:
    """Of what is fetched: none of it is fetched twice, whoever has less to read at the next try."""
    shards = len(plan.sources)
    return {
        (ShardKey(plan.id, s.shard, shards), s.place): s.reader
        for s in plan.sources
        if not (s.rebuilt or s.place.mappable)
    }


def _fetches_most(plan: RestorePlan, mine: Sequence[Source]) -> bool:
    """True where this rank holds more than half of the version in memory of its own."""
    return 2 * sum(not s.place.mappable for s in mine) > len(plan.sources)


def _map_others(attempt: VerifiedVersion) -> list[Failure]:
    """Map what others read and verify and this rank sees too."""
    failures: list[Failure] = []
    plan = attempt.plan
    for source in plan.sources:
        if source.direct and source.reader != attempt.broadcaster.rank:
            key = ShardKey(plan.id, source.shard, len(plan.sources))
            try:
                attempt.images[source.shard] = open_image(key, source.place, plan.run_id)
            except FileNotFoundError as error:  # its reader tells whether it is there
                failures.append(
                    replace(Failure.of(key, source.place, error), blame=FaultScope.SIGHT)
                )
            except Exception as error:
                failures.append(Failure.of(key, source.place, error))
    return failures


def _fill_ahead(attempt: VerifiedVersion, reads: Reads, new: TensorPreallocator) -> None:
    """What is not live, while this rank's threads and other ranks still read."""
    new.foreseen(touch=any(s.place.level != "memory" for s in attempt.plan.sources))
    with ThreadPoolExecutor(1, "tierckpt-fill") as beside:
        beside.submit(new.fill, _seen_of_others(attempt))
        new.fill(reads.sound())


def _seen_of_others(attempt: VerifiedVersion) -> Iterator[Part]:
    """What others read and this rank maps, in order. Whether it is sound they are to tell."""
    for source in attempt.plan.sources:
        image = attempt.images.get(source.shard)
        if image is None or not source.direct or source.reader == attempt.broadcaster.rank:
            continue
        low, high = 0, image.manifest.header_bytes
        while low < (end := image.manifest.image_bytes):
            image.touch(low, high)
            yield source.shard, low, image.view[low:high]
            low, high = high, min(high + RUN_BYTES, end)


def _headers_here(
    attempt: VerifiedVersion, read: Mapping[int, ShardHeader]
) -> dict[int, ShardHeader]:
    """Of the shards that this rank tells the others of: those it read or made."""
    found = dict(read)
    for source in attempt.plan.sources:
        if source.rebuilt and source.shard in attempt.images:
            found[source.shard] = decode_header(attempt.images[source.shard].view)
    return found


def _told_here(
    attempt: VerifiedVersion, read: Mapping[int, ShardHeader]
) -> tuple[dict[int, ShardSummary], dict[int, RankState]]:
    """What this rank tells of the shards it read: of each an outline; and the small state of those
    that a rank needs which cannot look at the shard itself."""
    sources = attempt.plan.sources
    ranks = range(attempt.broadcaster.size)
    wanted = {r % len(sources) for r in ranks if sources[r % len(sources)].reader != r}
    outlines, small = {}, {}
    for shard, header in _headers_here(attempt, read).items():
        outlines[shard] = ShardSummary.of(shard, header)
        if shard in wanted and not sources[shard].direct and shard in attempt.images:
            small[shard] = _own_of(attempt.images[shard], header)
    return outlines, small


def _own_state(attempt: VerifiedVersion, read: Mapping[int, ShardHeader]) -> RankState:
    """This rank's, from a shard that it maps or read."""
    shard = attempt.own_shard
    image = attempt.images[shard]
    return _own_of(image, read[shard] if shard in read else decode_header(image.view))


def _finish(loader: Loader, saved: dict[str, Any]) -> str:
    """What comes after the tensors; returns what went wrong, in words."""
    try:
        loader.finish(saved)
    except Exception as error:
        kind = "" if isinstance(error, StateTornError) else f"{type(error).__name__}: "
        return (
            f"{kind}{error}. Model and optimizer are of that version already. Give the objects "
            "that it was made with, or leave out the one that is named (and restore with "
            "strict=False), and start again"
        )
    return ""


def all_finished(attempt: VerifiedVersion, group: Group) -> None:
    """StateTornError on all ranks if any had trouble at the end of `load`: one that raised alone
    would leave the others to train without it. When all books agree with what was loaded: a rank
    that is lost meanwhile leaves the others with a state that is whole."""
    version = attempt.plan.id
    for rank, why in enumerate(group.all_gather_object(attempt.trouble)):
        if why:
            error = StateTornError(f"{version} could not be loaded to its end: rank {rank}: {why}")
            raise said_by(error, rank, group.rank)


def _own_of(image: ShardImage, header: ShardHeader) -> RankState:
    low = header.tree_offset
    tree_bytes = bytes(image.view[low : low + image.manifest.rank_state_bytes])
    return RankState.of(image.manifest.encode(), tree_bytes, header)


def load(
    state: TrainingState,
    attempt: VerifiedVersion,
    group: ErrorBarrier,
    strict: bool,
    new: TensorPreallocator,
) -> tuple[Manifest, Restored, list[str], Any]:
    """Load a verified version; returns this rank's manifest, what was loaded (see
    `VerifiedVersion.report`), notices, and the adapter's own.

    Raises StateMismatchError on all ranks, with nothing changed on any, if the structure of any
    rank's live state differs and `strict` is True; RestoreError on all if any rank has no memory
    for what it would have to create, or fails in some other way before the first change. What
    fails on a rank after that is its `attempt.trouble`, see `all_finished`. Whatever else comes
    out, a rank that is lost for one, leaves `state.torn` True if anything was changed.
    """
    with group:
        assert attempt.contents is not None
        own = attempt.contents.own
        manifest = Manifest.decode(own.manifest)
        saved = tree_codec.decode(own.tree)
        began = saved.get("began", {})
        loader = Loader(state, attempt.contents, group.rank, group.size, new, strict, began)
        differences = loader.differences() + loader.extra_differences(saved)
        loader.prepare()
        attempt.broadcaster.make_room(attempt.contents.outlines)
        grown = group.size > loader.shards
        told = (differences, rng.digests_of(saved["rng"]) if grown else {})
        everyone, digests = zip(*group.all_gather_object(told), strict=True)
        found: list[str] = next((theirs for theirs in everyone if theirs), [])
        if found and strict:
            raise StateMismatchError(f"Version {attempt.plan.id}", found)
        result = attempt.report(manifest)
        attempt.progress.begin(f"loading v{attempt.plan.id.version}", attempt.nbytes)
        notices = [f"accepted (strict=False): {d}" for d in differences]
        loader.choose_shards()
    state.torn = True
    with torch.no_grad():
        attempt.visit(loader.load_window, loader.wants)
        attempt.trouble = attempt.trouble or _finish(loader, saved)
    try:  # last: loading may have drawn
        notices += loader.notices + rng.take_up(
            saved["rng"],
            manifest.id.version,
            group.rank,
            digests[: loader.shards],
            state.cuda_device(),
        )
    except Exception as error:
        attempt.fail(error)
    state.torn = bool(attempt.trouble)
    return manifest, result, notices, saved.get("adapter")
