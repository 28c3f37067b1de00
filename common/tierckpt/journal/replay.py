"""Replay: a restart makes the steps of the journal again, and proves that they are the same.

The state is that of a loaded version. For each record, every rank receives the stripes of all
ranks, sets the options and gradients that the step had, and calls the optimizer's own `step()`.
Then the digest of its stripes of parameters and optimizer state must be that of the record. After
the last record its small state is loaded, as from a version.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tierckpt.coordination.error_barrier import ErrorBarrier, by_rank
from tierckpt.coordination.reports import Reports
from tierckpt.format.ids import VersionId
from tierckpt.format.layout import Piece
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_file import decode_header
from tierckpt.format.shard_summary import RankState, ShardSummary, VersionSummary
from tierckpt.restore.loader import Loader
from tierckpt.restore.session import LoadedVersion
from tierckpt.restore.tensor_fill import PieceWriter, TensorPreallocator
from tierckpt.restored import Restored
from tierckpt.snapshot.copy_plan import CopyPlan
from tierckpt.state import rng, tree_codec
from tierckpt.state.optimizers.put_back import beside
from tierckpt.state.training_state import TrainingState

from .chain import Link, chain_from
from .digest import DigestPlan
from .images import GRADIENT
from .segments import FOLDER, Frame, JournalReader, Record
from .support import StepClass
from .unused import OTHER_RANKS, unused_journal
from .writer import MOST_WAITING

DIFFERS = (
    "the journal leads from v{base} to v{last}, and its steps could not be made again exactly: "
    "{why}. The job goes on from v{reached}, which is exact; {lost} iteration(s) after it are lost"
)
REPLICAS_DIFFER = "the ranks came to different parameters or optimizer state"
SHORTER = (
    "rank {rank} has the journal only up to v{last}, and others have {more} more record(s): the "
    "job goes on from v{last}"
)


class Replay:
    """The records that follow one version. Training thread, all ranks alike; `close` it."""

    def __init__(
        self,
        directory: str,
        state: TrainingState,
        barrier: ErrorBarrier,
        reports: Reports,
        base: VersionId,
        began: tuple[int, int],
        step_class: StepClass,
        most: int | None = None,
    ) -> None:
        """Read and verify this rank's journal, and find the records that follow the version `base`
        on all ranks. `began`: see `chain_from`; `step_class`: see `Adapter`; `most`: the number of
        records that another try found exact, None before that. Collective."""
        self.exact = 0
        """After `run` has failed: number of records whose steps can be made again exactly."""
        self.unrepeated = ""
        """The reason of that, in words; the same on all ranks."""
        self._most = most
        self._step_class = step_class
        self._state, self._barrier, self._reports, self._base = state, barrier, reports, base
        folder, rank, size = Path(directory) / FOLDER, barrier.rank, barrier.size
        self._reader = JournalReader(folder, rank, size)
        with barrier:
            links = [record.link for record in self._reader.records.values()]
            gathered: list[list[Link]] = barrier.all_gather_object(links)
        ids = chain_from(base, gathered, began)
        sound = [*itertools.repeat(0, size)]
        if ids:
            with barrier:
                good = self._reader.sound(pairwise([base, *ids]))
                sound = barrier.all_gather_object(good)
        self._ids = ids[: min(sound)][:most]
        self._pairs = [*pairwise([base, *self._ids])]
        known = [{link[:2]: link for link in theirs} for theirs in gathered]
        self._links = [[theirs[pair] for theirs in known] for pair in self._pairs]
        """For each record, every rank's link."""
        self._digest_plan: DigestPlan | None = None
        for text in self._reader.problems if most is None else ():
            reports.notice(f"a part of the journal is not used: {text}", logging.WARNING)
        if not rank and most is None:
            alone = [chain_from(base, [theirs], began) for theirs in gathered]
            # A newer run that only some ranks have a record of does not count.
            whole = [len(each) if each[: len(ids)] == ids else len(ids) for each in alone]
            ends = zip(whole, sound, strict=True)
            self._report_ends([n if n < len(ids) else there for there, n in ends])
            reached = self._ids[-1] if self._ids else base
            if text := unused_journal(directory, base, began, OTHER_RANKS, size, reached):
                reports.notice(text, logging.WARNING)

    def _report_ends(self, lengths: Sequence[int]) -> None:
        """Report ranks with fewer records than others, by the `lengths` of all."""
        least, most = min(lengths), max(lengths)
        last = self._ids[-1] if self._ids else self._base
        if most > least:
            usual = most - least <= MOST_WAITING + 1  # the ranks were killed while they wrote
            text = SHORTER.format(rank=lengths.index(least), last=last.version, more=most - least)
            self._reports.notice(text, logging.INFO if usual else logging.WARNING)

    def __len__(self) -> int:
        """Number of records."""
        return len(self._ids)

    def run(
        self, loaded: LoadedVersion, trouble: str, load_adapter: Callable[[Any], None]
    ) -> LoadedVersion | None:
        """Make all steps, and load the small state after them; `loaded` is what the live state
        equals, unless there was `trouble` on this rank. Returns the result of the restore. None,
        on all ranks and with a notice, if the state is not exactly that of the last record: it is
        torn then, and the version must be loaded again, for a try with the `exact` records.
        Collective."""
        begin = time.perf_counter()
        self._state.torn = True
        result: LoadedVersion | None = None
        troubles = [trouble]
        exact = 0
        for pair, links in zip(self._pairs, self._links, strict=True):
            troubles = self._repeat(self._reader.records[pair], links, trouble)
            if any(troubles):
                break
            exact += 1
        else:
            whole = 0
            try:
                last = self._reader.records[self._pairs[-1]]
                whole = self._whole_digest()
                result = self._load_small(last.small, loaded, load_adapter)
            except Exception as error:
                trouble = _in_words(self._ids[-1], error)
            troubles = self._gather(trouble)
            if not any(troubles) and len({*self._gather(whole)}) > 1:
                result = None
        if any(troubles) or result is None:
            self._give_up("; ".join(by_rank(troubles)) or REPLICAS_DIFFER, exact)
            return None
        self._state.torn = False
        result.result.seconds["replay"] = time.perf_counter() - begin
        return result

    def _give_up(self, why: str, exact: int) -> None:
        """Report that only so many records are exact. Only the digest of a record proves it: after
        the last one, or in another try, none are."""
        self.unrepeated = why
        self.exact = exact if exact < len(self._ids) and self._most is None else 0
        reached = [self._base, *self._ids][self.exact]
        words = {"base": self._base.version, "last": self._ids[-1].version, "why": why}
        lost = len(self._ids) - self.exact
        text = DIFFERS.format(**words, reached=reached.version, lost=lost)
        self._reports.notice(text, logging.DEBUG if self._barrier.rank else logging.ERROR)

    def close(self) -> None:
        """Unmap the journal."""
        self._reader.close()

    # --- a record -------------------------------------------------------------------------------

    def _gather(self, value: Any) -> list[Any]:
        with self._barrier:
            return self._barrier.all_gather_object(value)

    def _repeat(self, record: Record, links: Sequence[Link], trouble: str) -> list[str]:
        """Make the steps of one record; returns what failed, by rank. All ranks make a step, or
        none: hooks of the user may communicate in it. Collective, also with `trouble`."""
        for number, frame in enumerate(record.steps):
            gradients: dict[str, torch.Tensor] = {}
            filler = PieceWriter(functools.partial(_place, gradients))
            for source, link in enumerate(links):
                buffer = torch.empty(link.steps[number], dtype=torch.uint8)
                if source == self._barrier.rank:
                    buffer.numpy().data[:] = frame.image
                self._barrier.broadcast(buffer, source)
                try:
                    if not trouble:
                        filler.take(source, 0, buffer.numpy().data)
                except Exception as error:
                    trouble = _in_words(record.id, error)
            try:
                make_step = None if trouble else self._prepared_step(frame, gradients)
            except Exception as error:
                trouble, make_step = _in_words(record.id, error), None
            troubles = self._gather(trouble)
            if any(troubles) or make_step is None:
                return troubles
            try:
                make_step()
            except Exception as error:
                trouble = _in_words(record.id, error)
        try:
            if not trouble and self._digest() != record.small.head.digest:
                trouble = f"{record.id}: parameters or optimizer state differ from the killed run's"
        except Exception as error:
            trouble = _in_words(record.id, error)
        return self._gather(trouble)

    def _prepared_step(
        self, frame: Frame, gradients: dict[str, torch.Tensor]
    ) -> Callable[[], None]:
        """Set these gradients and the options of the frame; returns the step of that optimizer."""
        saved = tree_codec.decode(_tree_of(frame))
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

    def _load_small(
        self, frame: Frame, loaded: LoadedVersion, load_adapter: Callable[[Any], None]
    ) -> LoadedVersion:
        """Load buffers, random streams, options and objects of the last record."""
        state, rank, size = self._state, self._barrier.rank, self._barrier.size
        image = torch.empty(len(frame.image), dtype=torch.uint8)
        image.numpy().data[:] = frame.image
        header = decode_header(image.numpy().data)
        live = [(name, tensor) for name, tensor, _ in state.entries(state.walk())]
        specs = tuple(tree_codec.specs_of(live))
        lengths = header.header_bytes, header.data_bytes
        outlines = [ShardSummary(*lengths, specs, 0, header.structure)]
        outlines += [ShardSummary(*lengths, (), 0, None)] * (size - 1)
        own = RankState.of(frame.manifest.encode(), _tree_of(frame), header)
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
        notices = loader.notices + rng.take_up(saved["rng"], manifest.id.version, rank, ())
        for text in notices:
            self._reports.notice(text, logging.WARNING)
        load_adapter(saved.get("adapter"))
        return LoadedVersion(manifest, self._result(manifest, loaded.result), [], None)

    def _result(self, manifest: Manifest, before: Restored) -> Restored:
        result = Restored.of(manifest.facts)
        result.base, result.replayed = self._base, len(self._ids)
        result.levels, result.shard_levels = before.levels, before.shard_levels
        result.nbytes, result.seconds = before.nbytes, before.seconds
        return result


def _place(gradients: dict[str, torch.Tensor], _: int, piece: Piece) -> torch.Tensor:
    """The gradient that a piece belongs to; made with the first one."""
    name = piece.spec.name
    if name not in gradients:
        gradients[name] = tree_codec.empty(piece.spec, "cpu")
    return gradients[name]


def _tree_of(frame: Frame) -> bytes:
    offset = decode_header(frame.image).tree_offset
    return bytes(frame.image[offset : offset + frame.manifest.rank_state_bytes])


def _in_words(id_: VersionId, error: Exception) -> str:
    return f"{id_}: {type(error).__name__}: {error}"


__all__ = ["Replay"]
