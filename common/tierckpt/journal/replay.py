"""Replay: a restart makes the steps of the journal again, and proves that they are the same.

The state is that of a loaded version. For each record, every rank receives the stripes of all
ranks, sets the options and gradients that the step had, and calls the optimizer's own `step()`.
Then the digest of its stripes of parameters and optimizer state must be that of the record. After
the last record its small state is loaded, as from a version.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from tierckpt._text import in_words
from tierckpt.coordination.error_barrier import ErrorBarrier, by_rank
from tierckpt.coordination.reports import Reports
from tierckpt.format.ids import VersionId
from tierckpt.format.layout import Piece
from tierckpt.format.manifest import Manifest
from tierckpt.format.shard_file import decode_header
from tierckpt.format.shard_summary import RankState, ShardSummary, VersionSummary
from tierckpt.group import Node
from tierckpt.restore.loader import Loader
from tierckpt.restore.session import LoadedVersion
from tierckpt.restore.tensor_fill import PieceWriter, TensorPreallocator
from tierckpt.restored import Restored
from tierckpt.snapshot.copy_plan import CopyPlan
from tierckpt.state import rng, tree_codec
from tierckpt.state.optimizers.put_back import beside
from tierckpt.state.training_state import TrainingState

from .chain import RecordKey
from .digest import DigestPlan
from .images import GRADIENT
from .search import JournalSearch
from .support import StepClass

DIFFERS = (
    "the journal leads from v{base} to v{last}, and its steps could not be made again exactly: "
    "{why}. The job goes on from v{reached}, which is exact; {lost} iteration(s) after it are lost"
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
        began: tuple[int, int],
        step_class: StepClass,
        most: int | None = None,
    ) -> None:
        """Read and verify the journals on this rank's `node`, and find the records that follow the
        version `base`. `began`: see `chain_from`; `step_class`: see `Adapter`; `most`: the number
        of records that another try found exact, None before that. Collective."""
        self.exact = 0
        """After `run` has failed: number of records whose steps can be made again exactly."""
        self.unrepeated = ""
        """The reason of that, in words; the same on all ranks."""
        self._most = most
        self._step_class = step_class
        self._state, self._barrier, self._reports, self._base = state, barrier, reports, base
        self._search = JournalSearch(directory, node, barrier, reports, base, began, most)
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
        begin = time.perf_counter()
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
                trouble = f"{self._keys[-1].id}: {in_words(error)}"
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
                    trouble = f"{key.id}: {in_words(error)}"
            try:
                make_step = None if trouble else self._prepared_step(tree, gradients)
            except Exception as error:
                trouble, make_step = f"{key.id}: {in_words(error)}", None
            troubles = self._gather(trouble)
            if any(troubles) or make_step is None:
                return troubles
            try:
                make_step()
            except Exception as error:
                trouble = f"{key.id}: {in_words(error)}"
        try:
            if not trouble and self._digest() != search.link(rank, key).digest:
                trouble = f"{key.id}: parameters or optimizer state differ from the killed run's"
        except Exception as error:
            trouble = f"{key.id}: {in_words(error)}"
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
        """The small state of this rank in the last record: manifest and image. A rank whose journal
        is gone receives them. Collective."""
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
        notices = loader.notices + rng.take_up(saved["rng"], manifest.id.version, rank, ())
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


__all__ = ["Replay"]
