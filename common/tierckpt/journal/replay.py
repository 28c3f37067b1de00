"""Replay: a restart makes the steps of the journal again, and proves that they are the same.

The state is that of a loaded version. For each record, every rank receives the stripes of all
ranks, sets the options and gradients that the step had, and calls the optimizer's own `step()`.
Then the digest of its stripes of parameters and optimizer state must be that of the record. After
the last record its small state is loaded, as from a version.

The search finds the records that follow the version, and the rank that reads each of them. A
rank's journal is on its node, and a copy of it may be on another node (see `copies`). Ranks may
have moved to other nodes since, so any node may have any rank's files.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from tierckpt._text import error_text, some
from tierckpt.coordination.error_barrier import ErrorBarrier, by_rank
from tierckpt.coordination.versions import Reports
from tierckpt.format.ids import VersionId
from tierckpt.format.layout import Piece
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_file import RankState, ShardSummary, VersionSummary, decode_header
from tierckpt.group import Node
from tierckpt.restore.loader import Loader, PieceWriter, TensorPreallocator
from tierckpt.restore.session import LoadedVersion
from tierckpt.restored import Restored
from tierckpt.snapshot.copy_plan import CopyPlan
from tierckpt.state import process_state, tree_codec
from tierckpt.state.optimizer_restore import beside
from tierckpt.state.training_state import TrainingState

from .segments import (
    FOLDER,
    OTHER_RANKS,
    JournalReader,
    Link,
    RecordKey,
    SegmentName,
    chain_from,
    names_in,
    unused_journal,
)
from .steps import GRADIENT, DigestPlan, StepClass
from .writer import MAX_WAITING

__all__ = ["JournalSearch", "Replay"]


SHORTER = (
    "rank {rank} has the journal only up to v{last}, and others have {more} more record(s): the "
    "job continues from v{last}"
)
ELSEWHERE = "the journal of rank {ranks} comes from a copy on another rank's node"
Held = tuple[int, RecordKey]
"""A shard, and a record of it."""


class JournalSearch:
    """The records that follow one version, alike on all ranks, each sound on some rank. Training
    thread; `close` it."""

    def __init__(
        self,
        directory: str,
        node: Node,
        barrier: ErrorBarrier,
        reports: Reports,
        base: VersionId,
        rollback: tuple[int, int],
        most: int | None,
    ) -> None:
        """Read and verify the journals on this rank's `node`. `rollback`: see `chain_from`;
        `most`: limit of the records, in a try after the first one, which has reported all problems.
        Collective."""
        self._barrier, self._reports, self._base = barrier, reports, base
        self._shards = range(barrier.size)
        folder = Path(directory) / FOLDER
        with barrier:
            there = [n for n in names_in(folder) if n.base.shards == barrier.size]
            names = self._mine(node, there)
            self.reader = JournalReader(folder, names)
            gathered: list[list[tuple[int, Link]]] = barrier.all_gather_object(self.reader.links)
        self._links = [{(s, link.key): link for s, link in theirs} for theirs in gathered]
        """By rank."""
        self._holders = self._holders_of()
        whole = chain_from(base, self._keys(), rollback)[:most]
        self.keys = whole
        """The records, oldest first."""
        self._verify()
        if most is None:
            self._report(directory, whole, rollback)

    def source(self, shard: int, key: RecordKey) -> int:
        """The rank that has the record of a shard."""
        return self._holders[shard, key][0]

    def link(self, shard: int, key: RecordKey) -> Link:
        """The record of a shard, as its source has it."""
        return self._links[self.source(shard, key)][shard, key]

    def close(self) -> None:
        """Unmap the journals."""
        self.reader.close()

    def _mine(self, node: Node, names: Sequence[SegmentName]) -> list[SegmentName]:
        """The files that this rank reads: its own, and as the node's first rank those of ranks of
        other nodes, unless these ranks see the same files. Collective."""
        rank = self._barrier.rank
        own = {n for n in names if n.base.shard == rank}
        seen: list[set[SegmentName]] = self._barrier.all_gather_object(own)
        if rank != node.first:
            return sorted(own)
        others = (n for n in names if n.base.shard in self._shards)
        return sorted(own | {n for n in others if n not in seen[n.base.shard]})

    def _holders_of(self) -> dict[Held, list[int]]:
        """By record, the ranks that have it: first the rank of the shard, then in their order."""
        holders: dict[Held, list[int]] = {}
        for rank, theirs in enumerate(self._links):
            for held in theirs:
                holders.setdefault(held, []).append(rank)
        for (shard, _), ranks in holders.items():
            ranks.sort(key=lambda rank: (rank != shard, rank))
        return holders

    def _keys(self) -> list[set[RecordKey]]:
        """By shard, the records that some rank has."""
        found: list[set[RecordKey]] = [set() for _ in self._shards]
        for (shard, key), ranks in self._holders.items():
            if ranks:
                found[shard].add(key)
        return found

    def _verify(self) -> None:
        """Verify the records on their sources, in order; a damaged one has another source, or none
        and ends the journal. Collective."""
        sound: set[Held] = set()
        damaged: list[list[Held]] = []
        while self.keys and (not damaged or any(damaged)):
            with self._barrier:
                damaged = self._barrier.all_gather_object(self._first_damaged(sound))
            for rank, theirs in enumerate(damaged):
                for held in theirs:
                    self._holders[held].remove(rank)
            self.keys = self.keys[: min(self._lengths(self.keys))]

    def _first_damaged(self, sound: set[Held]) -> list[Held]:
        """Verify the records of this rank's source; returns the first damaged one of each
        shard, and adds to `sound` those before it."""
        found = []
        for shard in self._shards:
            for key in self.keys:
                held = (shard, key)
                if held in sound or self.source(*held) != self._barrier.rank:
                    continue
                if not self.reader.is_sound(*held):
                    found.append(held)
                    break
                sound.add(held)
        return found

    def _lengths(self, keys: Sequence[RecordKey]) -> list[int]:
        """By shard, the number of these records up to the first that no rank has."""
        held = ((self._holders[shard, key] for key in keys) for shard in self._shards)
        return [len([*takewhile(bool, each)]) for each in held]

    def _report(self, directory: str, keys: Sequence[RecordKey], rollback: tuple[int, int]) -> None:
        for text in self.reader.problems:
            self._reports.notice(f"a part of the journal is not used: {text}", logging.WARNING)
        if self._barrier.rank:
            return
        self._report_ends(keys, rollback)
        reached = self.keys[-1].id if self.keys else self._base
        size = self._barrier.size
        if text := unused_journal(directory, self._base, rollback, OTHER_RANKS, size, reached):
            self._reports.notice(text, logging.WARNING)
        apart = sorted({s for s in self._shards for key in self.keys if self.source(s, key) != s})
        if apart:
            self._reports.notice(ELSEWHERE.format(ranks=some(apart)), logging.INFO)

    def _report_ends(self, whole: Sequence[RecordKey], rollback: tuple[int, int]) -> None:
        """Report ranks with fewer records than others."""
        most = len(whole)
        lengths = self._lengths(whole)
        for shard, keys in enumerate(self._keys()):
            alone = chain_from(self._base, [keys], rollback)
            # A newer run that only some ranks have a record of does not count.
            if lengths[shard] == most and [*whole] == alone[:most]:
                lengths[shard] = len(alone)
        least, last = min(lengths), self.keys[-1].id if self.keys else self._base
        if (more := max(lengths) - least) > 0:
            usual = more <= MAX_WAITING + 1  # the ranks were killed while they wrote
            text = SHORTER.format(rank=lengths.index(least), last=last.version, more=more)
            self._reports.notice(text, logging.INFO if usual else logging.WARNING)


DIFFERS = (
    "the journal leads from v{base} to v{last}, and its steps could not be made again exactly: "
    "{why}. The job continues from v{reached}, which is exact; {lost} later iteration(s) are lost"
)
REPLICAS_DIFFER = "the ranks came to different parameters or optimizer state"


class Replay:
    """The records that follow one version. Training thread, all ranks alike; `close` it."""

    def __init__(
        self,
        directory: str,
        node: Node,
        state: TrainingState,
        barrier: ErrorBarrier,
        reports: Reports,
        base: VersionId,
        rollback: tuple[int, int],
        step_class: StepClass,
        most: int | None = None,
    ) -> None:
        """Read and verify the journals on this rank's `node`, and find the records that follow the
        version `base`. `rollback`: see `chain_from`; `step_class`: see `Adapter`; `most`: the
        number of records that another try found exact, None before that. Collective."""
        self.exact = 0
        """After `run` has failed: number of records that can be repeated exactly."""
        self.unrepeated = ""
        """The reason, as text; the same on all ranks."""
        self._most = most
        self._step_class = step_class
        self._state, self._barrier, self._reports, self._base = state, barrier, reports, base
        self._search = JournalSearch(directory, node, barrier, reports, base, rollback, most)
        self._keys = self._search.keys
        self._digest_plan: DigestPlan | None = None

    def __len__(self) -> int:
        """Number of records."""
        return len(self._keys)

    def run(
        self, loaded: LoadedVersion, trouble: str, load_adapter: Callable[[Any], None]
    ) -> LoadedVersion | None:
        """Make all steps, and load the small state after them; `loaded` is what the live state
        equals, unless there was `trouble` on this rank. Returns the result of the restore. None,
        on all ranks and with a notice, if the state is not exactly that of the last record: it is
        torn then, and the version must be loaded again, for a try with the `exact` records.
        Collective."""
        start = time.perf_counter()
        self._state.torn = True
        result: LoadedVersion | None = None
        troubles = [trouble]
        exact = 0
        for key in self._keys:
            troubles = self._repeat(key, trouble)
            if any(troubles):
                break
            exact += 1
        else:
            whole, small = 0, self._last_small()
            try:
                whole = self._whole_digest()
                result = self._load_small(*small, loaded, load_adapter)
            except Exception as error:
                trouble = f"{self._keys[-1].id}: {error_text(error)}"
            troubles = self._gather(trouble)
            if not any(troubles) and len({*self._gather(whole)}) > 1:
                result = None
        if any(troubles) or result is None:
            self._give_up("; ".join(by_rank(troubles)) or REPLICAS_DIFFER, exact)
            return None
        self._state.torn = False
        result.result.seconds["replay"] = time.perf_counter() - start
        return result

    def _give_up(self, why: str, exact: int) -> None:
        """Report that only so many records are exact. Only the digest of a record proves it: after
        the last one, or in another try, none are."""
        self.unrepeated = why
        ids = [key.id for key in self._keys]
        self.exact = exact if exact < len(ids) and self._most is None else 0
        reached = [self._base, *ids][self.exact]
        words = {"base": self._base.version, "last": ids[-1].version, "why": why}
        lost = len(ids) - self.exact
        text = DIFFERS.format(**words, reached=reached.version, lost=lost)
        self._reports.notice_of_all(text, logging.ERROR)

    def close(self) -> None:
        """Unmap the journals."""
        self._search.close()

    # --- a record -------------------------------------------------------------------------------

    def _gather(self, value: Any) -> list[Any]:
        with self._barrier:
            return self._barrier.all_gather_object(value)

    def _repeat(self, key: RecordKey, trouble: str) -> list[str]:
        """Make the steps of one record; returns what failed, by rank. All ranks make a step, or
        none: hooks of the user may communicate in it. Collective, also with `trouble`."""
        search, rank = self._search, self._barrier.rank
        for number in range(key.steps):
            gradients: dict[str, torch.Tensor] = {}
            filler = PieceWriter(functools.partial(_place, gradients))
            tree = b""
            for shard in range(self._barrier.size):
                nbytes = search.link(shard, key).steps[number]
                buffer = torch.empty(nbytes, dtype=torch.uint8)
                image, source = buffer.numpy().data, search.source(shard, key)
                if source == rank:
                    image[:] = search.reader.records[shard, key].steps[number].image
                self._barrier.broadcast(buffer, source)
                try:
                    if shard == rank:
                        tree = bytes(image[decode_header(image).tree_offset :])
                    if not trouble:
                        filler.take(shard, 0, image)
                except Exception as error:
                    trouble = f"{key.id}: {error_text(error)}"
            try:
                make_step = None if trouble else self._prepared_step(tree, gradients)
            except Exception as error:
                trouble, make_step = f"{key.id}: {error_text(error)}", None
            troubles = self._gather(trouble)
            if any(troubles) or make_step is None:
                return troubles
            try:
                make_step()
            except Exception as error:
                trouble = f"{key.id}: {error_text(error)}"
        try:
            if not trouble and self._digest() != search.link(rank, key).digest:
                trouble = f"{key.id}: parameters or optimizer state differ from the killed run's"
        except Exception as error:
            trouble = f"{key.id}: {error_text(error)}"
        return self._gather(trouble)

    def _prepared_step(self, tree: bytes, gradients: dict[str, torch.Tensor]) -> Callable[[], None]:
        """Set these gradients and the options in `tree`; returns the step of that optimizer."""
        saved = tree_codec.decode(tree)
        optimizer, state = self._state.given[saved["label"]], self._state
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if len(params) != saved["params"]:
            had, now = saved["params"], len(params)
            raise ValueError(f"{saved['label']} had {had} parameters, not {now}")
        for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
            for key, value in options.items():
                group[key] = beside(group.get(key), value)
        for param in params:
            param.grad = gradients.pop(GRADIENT + state.name_of(param), None)
        if gradients:
            raise ValueError(f"gradients of unknown parameters: {', '.join(gradients)}")

        def make_step() -> None:
            # Horovod's own step would reduce the gradients.
            self._step_class(optimizer).step(optimizer)
            for param in params:
                param.grad = None

        return make_step

    def _whole_digest(self) -> int:
        """The digest of all stripes. A record proves each stripe on one rank only: equal replicas
        prove the other copies."""
        return DigestPlan(CopyPlan(self._state, self._state.walk(), 0, 1)).compute()

    def _digest(self) -> int:
        state, barrier = self._state, self._barrier
        if self._digest_plan is None or not self._digest_plan.plan.fits(state):
            plan = CopyPlan(state, state.walk(), barrier.rank, barrier.size)
            self._digest_plan = DigestPlan(plan)
        return self._digest_plan.compute()

    def _last_small(self) -> tuple[bytes, torch.Tensor]:
        """The small state of this rank in the last record: manifest and image. A rank without a
        journal receives them. Collective."""
        key, rank, search = self._keys[-1], self._barrier.rank, self._search
        apart = [s for s in range(self._barrier.size) if search.source(s, key) != s]
        here = [s for s in {rank, *apart} if search.source(s, key) == rank]
        found = {shard: search.reader.records[shard, key].small for shard in here}
        texts = {shard: small.manifest.encode() for shard, small in found.items()}
        lengths = {shard: (len(texts[shard]), len(found[shard].image)) for shard in here}
        known = {s: theirs[s] for theirs in self._gather(lengths) for s in theirs}
        own = b"", torch.empty(0)
        for shard in sorted({rank, *apart}):
            manifest, image = (torch.empty(nbytes, dtype=torch.uint8) for nbytes in known[shard])
            if shard in found:
                manifest.numpy().data[:] = texts[shard]
                image.numpy().data[:] = found[shard].image
            if shard in apart:
                for buffer in (manifest, image):
                    self._barrier.broadcast(buffer, search.source(shard, key))
            if shard == rank:
                own = bytes(manifest.numpy().data), image
        return own

    def _load_small(
        self,
        text: bytes,
        image: torch.Tensor,
        loaded: LoadedVersion,
        load_adapter: Callable[[Any], None],
    ) -> LoadedVersion:
        """Load buffers, random streams, options and objects of the last record."""
        state, rank, size = self._state, self._barrier.rank, self._barrier.size
        header = decode_header(image.numpy().data)
        live = [(name, tensor) for name, tensor, _ in state.entries(state.walk())]
        specs = tuple(tree_codec.specs_of(live))
        lengths = header.header_bytes, header.data_bytes
        outlines = [ShardSummary(*lengths, specs, 0, header.structure)]
        outlines += [ShardSummary(*lengths, (), 0, None)] * (size - 1)
        nbytes = Manifest.decode(text).rank_state_bytes
        tree = image.numpy().data[header.tree_offset :][:nbytes]
        own = RankState.of(text, bytes(tree), header)
        contents = VersionSummary(outlines, own)
        loader = Loader(state, contents, rank, size, TensorPreallocator(state))
        if differences := loader.differences():
            raise ValueError("; ".join(differences))
        loader.prepare()
        loader.choose_shards()
        with torch.no_grad():
            loader.load_window(rank, 0, image.numpy().data)
            loader.finish()
        manifest, saved = loader.manifest, loader.saved
        notices = loader.notices + process_state.take_up(
            saved["rng"], manifest.id.version, rank, ()
        )
        for notice in notices:
            self._reports.notice(notice, logging.WARNING)
        load_adapter(saved.get("adapter"))
        return LoadedVersion(manifest, self._result(manifest, loaded.result), [], None)

    def _result(self, manifest: Manifest, before: Restored) -> Restored:
        result = Restored.of(manifest.facts)
        result.base, result.replayed = self._base, len(self._keys)
        result.levels, result.shard_levels = before.levels, before.shard_levels
        result.nbytes, result.seconds = before.nbytes, before.seconds
        return result


def _place(gradients: dict[str, torch.Tensor], _: int, piece: Piece) -> torch.Tensor:
    """The gradient that a piece belongs to; made with the first one."""
    name = piece.spec.name
    if name not in gradients:
        gradients[name] = tree_codec.empty(piece.spec, "cpu")
    return gradients[name]
