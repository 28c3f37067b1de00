"""A stored version without the job that made it: loaded whole, or read block by block.

`load` is `tierckpt.load`: the tensors of a version and its structure. `open_version` opens a
version for reading; only requested blocks are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack, closing
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.core.restore_plan import Location, Problem, RestorePlan
from tierckpt.errors import CorruptShardError, RestoreError
from tierckpt.format.ids import ShardKey, VersionName
from tierckpt.format.layout import PER_RANK, Piece, TensorSpec
from tierckpt.format.manifest import Manifest, digest, digest_at
from tierckpt.format.shard_file import ShardHeader
from tierckpt.group import SingleGroup
from tierckpt.restore.loader import PieceWriter
from tierckpt.restore.progress import Progress
from tierckpt.restore.shards import (
    LOST,
    FarStore,
    ShardImage,
    Stored,
    already_there,
    check_header,
    open_image,
)
from tierckpt.restore.verification import Candidates, RestoreContext, VerifiedVersion, find
from tierckpt.state import tree_codec
from tierckpt.state import tree_codec as tree
from tierckpt.state.extras import EXTRA_STATES
from tierckpt.state.module_states import MODULE_STATES, into_model
from tierckpt.state.names import FIXED, path_of
from tierckpt.state.optimizer_state import put_together
from tierckpt.state.training_state import NAMELESS
from tierckpt.storage.routed import FILE_PREFIX, Range, end_without, files_at_end

from .catalog import manifest_at
from .leaves import refuse_unknown
from .survey import Survey, Where, hints_of, job_of, refuse_several_jobs, survey, why_elsewhere

__all__ = [
    "LostShardError",
    "Saved",
    "Shard",
    "StoredTensor",
    "StoredVersion",
    "load",
    "load_and_survey",
    "open_version",
]


TRIES = 5
"""A running job may retire a version while it is read; then there is a newer one."""


class Saved(Struct):
    """One version in host memory. Everything belongs to the caller."""

    version: int
    """Completed optimizer steps."""
    iteration: int
    """The number that `restore()` would return."""
    metric: float | None
    """The metric of this version, see `Checkpointer.step`."""
    model: dict[str, Any]
    """For `model.load_state_dict`: the result of `model.state_dict()`, also for modules with a save
    format of their own; names have no wrapper (DDP, `torch.compile`). Buffers are rank 0's. Tied
    weights are one tensor under all their names."""
    optimizers: dict[str, dict[str, Any]]
    """For each optimizer's `load_state_dict`; a single one is called `optimizer`. An inner one (its
    attribute `base_optimizer`) is called `optimizer.base_optimizer`, unless the outer
    `state_dict()` contains its state. Empty with `model_only`."""
    extra: dict[str, Any]
    """The states of the `extra` objects, as `state_dict()` returned them."""
    extra_per_rank: dict[str, Any]
    """The states of rank 0's own objects."""
    parameters: dict[str, list[str]]
    """For each optimizer, the names of its parameters, in the order of their numbers."""
    levels: dict[str, int]
    """Number of shards by level."""
    rejected: tuple[str, ...]
    """Copies that were damaged, unreadable or left out, with the reasons."""
    suspect: str = ""
    """The known or possible difference of replicas when it was taken: it may be the state of no
    rank."""
    unseen: bool = False
    """True if some places could not be read: there may be a newer version."""


def load(
    path: Where | Sequence[Where],
    version: int | None = None,
    *,
    model_only: bool = False,
    as_parts: bool = False,
    progress: bool | None = None,
) -> Saved:
    """Read a checkpoint without a job: to evaluate it, to start from its weights, to inspect it.

    The default is the version that a restart takes: the newest complete and sound one.
    Nothing is changed, and no pickle is read. One process; any number of ranks may have made it.

    Args:
        path: a job's `path`, its `persistent_path` (or URL), or several of them: for a job on
            several nodes with a disk each, all of those that can be seen from here. Files that a
            killed job left in this machine's memory are found, too.
        version: read this version, and no other.
        model_only: leave out the optimizers' state, and save its memory.
        as_parts: if the class of a value (a member of an Enum, a named tuple, a tensor made of
            tensors) is not imported here, put a `tierckpt.state.tree_codec.ForeignValue` in its
            place, with the name of the class and the parts of the value.
        progress: show a bar on standard error; None: on a terminal.

    Raises RestoreError if there is no such version, complete and sound, or, without `as_parts`, if
    it has values of classes that are not imported here; ConfigError for an invalid path.
    """
    saved, _ = load_and_survey(path, version, model_only, as_parts, progress)
    return saved


def load_and_survey(
    path: Where | Sequence[Where],
    version: int | None,
    model_only: bool = False,
    as_parts: bool = False,
    progress: bool | None = None,
) -> tuple[Saved, Survey]:
    """Read a version as `load` does, with the same errors. Returns with it the survey in which it
    was found, without memory that cannot be read from here."""
    with closing(Progress(Progress.wanted(0, progress))) as bar:
        for _ in range(TRIES):
            if (found := _load(path, version, model_only, bar)) is not None:
                saved, _ = found
                if not as_parts:
                    names = ("model", "optimizers", "extra", "extra_per_rank")
                    parts = {name: getattr(saved, name) for name in names}
                    refuse_unknown(parts, f"{text_of(path)}: v{saved.version}")
                return found
    raise RestoreError(
        f"{text_of(path)}: a running job retired the version that was being read, {TRIES} times",
        "Pin a version (tierckpt pin), and read that one",
    )


def _load(
    path: Where | Sequence[Where], version: int | None, model_only: bool, bar: Progress
) -> tuple[Saved, Survey] | None:
    """Load a version; returns None if its files changed while they were read."""
    there = survey(path)
    refuse_several_jobs(there, text_of(path))
    unseen = bool(there.unseen)
    version = version_to_read(there, version)
    candidates = candidates_of(there)
    context = RestoreContext(ErrorBarrier(SingleGroup()), bar, there.open_far)
    attempt = find(context, candidates, version)
    if attempt is None:
        raise RestoreError(nothing(path, version, there, candidates.rejected))
    with closing(attempt):
        mapped = {s: image for s, image in attempt.images.items() if _is_mapped(attempt, s)}
        saved = _Reading(attempt, model_only).saved()
        saved.rejected = (*there.troubles, *candidates.rejected)
        saved.suspect = there.suspicion(attempt.plan.id)
        saved.unseen = unseen
        return (saved, there) if _unchanged(attempt, mapped) else None


def version_to_read(there: Survey, version: int | None) -> int | None:
    """Leave out what cannot be read from here. Return the version asked for, by `version`
    or else by a request to go back; None for the newest. Raises RestoreError as `refuse_newer`."""
    leave_out_memory(there)
    if version is not None:
        return version
    refuse_newer(there)
    return there.request.version if there.request else None


def candidates_of(there: Survey) -> Candidates:
    """Return the copies of a survey, for `find`. A version that was given up counts, too."""
    return Candidates([there.found], [there.parities], rollback=there.rollback_run, abandoned=True)


def refuse_newer(there: Survey) -> None:
    """Raise RestoreError if the newest version may be one that this release cannot read."""
    newer = [each for each in there.problems if each.newer]
    if newer:
        raise RestoreError(
            f"a newer release of tierckpt wrote {newer[0].place.where}: {newer[0].why}"
        )


def leave_out_memory(there: Survey) -> None:
    """Remove memory that a restart would not take, or that a running job changes; and record
    that."""
    for job in sorted(there.living | there.elsewhere):
        of_job = [each for each in there.found if job_of(each.place) == job]
        if not of_job:
            continue
        there.found = [each for each in there.found if each not in of_job]
        newest = max(of_job, key=lambda each: each.key.id)
        running = "its job is running, and changes its memory at any moment"
        why = running if job in there.living else why_elsewhere(job)
        there.unseen.append(Problem(newest.place, f"{newest.key.id} is left out: {why}"))


def _is_mapped(attempt: VerifiedVersion, shard: int) -> bool:
    source = attempt.plan.sources[shard]
    return source.place.mappable and not source.rebuilt


def _unchanged(attempt: VerifiedVersion, mapped: Mapping[int, ShardImage]) -> bool:
    """Whether the manifests of mapped shards are unchanged. A writer removes a manifest before it
    changes the first byte (FORMAT.md), so the copied bytes are the verified ones."""
    return all(
        manifest_at(image.manifest.key, attempt.plan.sources[shard].place) == image.manifest
        for shard, image in mapped.items()
    )


def nothing(
    path: Where | Sequence[Where], version: int | None, there: Survey, rejected: Iterable[str]
) -> str:
    """The reason why there is no such version."""
    wanted = "no version" if version is None else f"no v{version}"
    versions = sorted({each.key.id.version for each in there.found})
    shards = ", ".join(f"v{v}" for v in versions[-8:])
    seen = f"; there are shards of {shards}" if versions else ""
    why = "; ".join([*there.troubles, *rejected][:4])
    text = f"{text_of(path)}: {wanted} is complete and sound{seen}{'. ' if why else ''}{why}"
    hint = hints_of(path, there)
    return f"{text}; {hint}" if hint else text


def text_of(path: Where | Sequence[Where]) -> str:
    """The places, as text."""
    if isinstance(path, str) or not isinstance(path, Sequence):
        return str(path)
    return ", ".join(map(str, path))


class _Reading:
    """One verified version, being loaded into new tensors."""

    def __init__(self, attempt: VerifiedVersion, model_only: bool) -> None:
        self._attempt, self._model_only = attempt, model_only
        self._contents = contents = attempt.contents
        self._manifest = Manifest.decode(contents.own.manifest)
        self._tree = tree_codec.decode(contents.own.tree, cut=True)
        own = {spec.name: spec for spec in contents.own.specs}
        specs = {n: s for n, s in {**contents.specs, **own}.items() if self._wanted(n)}
        self._tensors = {name: tree_codec.empty(spec, "cpu") for name, spec in specs.items()}
        self._filler = PieceWriter(self._place_of)
        self._tied: dict[str, str] = {}

    def saved(self) -> Saved:
        """Read the version."""
        attempt, contents = self._attempt, self._contents
        if contents.missing:
            raise RestoreError(
                f"{attempt.plan.id} is incomplete: {'; '.join(contents.missing[:4])}"
            )
        attempt.broadcaster.make_room(contents.outlines)
        attempt.progress.start_phase(f"loading v{attempt.plan.id.version}", attempt.nbytes)
        attempt.visit(self._take, self._filler.wants)
        if attempt.trouble:
            raise RestoreError(f"{attempt.plan.id} could not be read completely: {attempt.trouble}")
        if "name" in (self._tree.get("files") or {}):
            raise RestoreError(
                f"v{attempt.plan.id.version} is a version of files, not the state of a training. "
                "`tierckpt export PATH FOLDER --format files` writes them"
            )
        structure = {} if self._model_only else contents.structure
        extra = dict(self._tree["extra"])
        return Saved(
            version=attempt.plan.id.version,
            iteration=self._manifest.facts.iteration,
            metric=self._manifest.facts.metric,
            model=self._model(extra),
            optimizers=_Optimizers(self._tensors, self._tree, structure).all(),
            extra=extra,
            extra_per_rank=dict(self._tree["extra_per_rank"]),
            parameters={
                label: [name for names in each["groups"] for name in names]
                for label, each in structure.items()
            },
            levels=attempt.plan.levels,
            rejected=(),
        )

    def _wanted(self, name: str) -> bool:
        return name.startswith(FIXED) or not self._model_only

    def _take(self, shard: int, offset: int, window: memoryview) -> None:
        self._filler.take(shard, offset, window)
        if offset == 0 and self._filler.header is not None:
            self._tied |= self._filler.header.tied

    def _place_of(self, shard: int, piece: Piece) -> torch.Tensor | None:
        if piece.placement is PER_RANK and shard != 0:
            return None
        return self._tensors.get(piece.spec.name)

    def _model(self, extra: dict[str, Any]) -> dict[str, Any]:
        """The model's entries, with its modules' extra states (`get_extra_state`), taken from
        `extra`."""
        found: dict[str, Any] = {
            name.split("/", 1)[1]: tensor
            for name, tensor in self._tensors.items()
            if name.startswith(FIXED)
        }
        found |= {name: found[first] for name, first in self._tied.items() if first in found}
        suffix = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
        for module, state in dict(extra.pop(EXTRA_STATES, {})).items():
            found[f"{module}.{suffix}" if module else suffix] = state
        record = extra.pop(MODULE_STATES, None)
        return into_model(record, found, self._tensors) if record else found


class _Optimizers:
    """The result of each optimizer's `state_dict()`."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        tree: Mapping[str, Any],
        structure: Mapping[str, Any],
    ) -> None:
        self._tensors, self._tree, self._structure = tensors, tree, structure
        self._kept = {label: self._kept_by(label) for label in structure}

    def all(self) -> dict[str, Any]:
        """The state dicts by label, without optimizers that are inside another one."""
        nodes = self._tree.get("remainders", {})
        parts = [(label, part) for label, node in nodes.items() for part in node["parts"]]
        within = {part["of"] for label, part in parts if part["of"] != label}
        return {
            label: put_together(nodes[label], self) if label in nodes else self._plain(label)
            for label in self._structure
            if label not in within
        }

    def _kept_by(self, label: str) -> dict[str, dict[str, Any]]:
        """Optimizer state by parameter."""
        kept: dict[str, dict[str, Any]] = {}
        for name, tensor in self._tensors.items():
            if name.startswith(f"{label}/") and not name.startswith(FIXED):
                path, key = path_of(name)
                kept.setdefault(path, {})[key] = tensor
        for full, values in self._tree["odd"].items():
            if full.startswith(f"{label}/"):
                entries = kept.setdefault(full.split("/", 1)[1], {})
                entries.update({k: tree_codec.with_entries(v, entries) for k, v in values.items()})
                entries.update(entries.pop(NAMELESS, {}))
        return kept

    def _plain(self, label: str) -> dict[str, Any]:
        return {"state": self.states(label), "param_groups": self.groups(label)}

    def _numbered(self, label: str) -> list[list[tuple[int, str]]]:
        """Parameters in torch's form: numbers, in the order of the groups."""
        found, numbered = [], 0
        for names in self._structure[label]["groups"]:
            found.append([*enumerate(names, numbered)])
            numbered += len(names)
        return found

    def states(self, label: str) -> dict[int, dict[str, Any]]:
        """As in `Stored`."""
        kept = self._kept[label]
        pairs = (pair for group in self._numbered(label) for pair in group)
        return {number: dict(kept[name]) for number, name in pairs if name in kept}

    def groups(self, label: str) -> list[dict[str, Any]]:
        """As in `Stored`."""
        both = zip(self._numbered(label), self._tree["groups"][label], strict=True)
        return [{**options, "params": [n for n, _ in group]} for group, options in both]

    def value(self, label: str, name: str, key: str) -> Any:
        """As in `Stored`."""
        return self._kept[label][name][key]

    def param(self, name: str) -> Any:
        """As in `Stored`."""
        return self._tensors[f"model/{name}"]


KEPT_BLOCKS = 64
"""Limit for all shards of a version, at half a megabyte each: small tensors share blocks. Each
shard keeps two at least."""
WINDOW_BYTES = 8 * 1024 * 1024
"""Bytes that are read at once of a long range."""
BLOCKS_AT_ONCE = 16
"""Blocks that are fetched side by side."""
OnRead = Callable[[int], None]
Covering = tuple[int, int, tuple[int, ...], tuple[bytes, ...]]
"""A part of a tensor: its first element and the end of its last, the lengths of its blocks (the
first without the bytes before the part), and their digests. Equal parts have equal values if they
are aligned the same way."""


class Shard:
    """One shard; no byte is used before it is compared with its digest."""

    def __init__(
        self,
        image: ShardImage,
        on_read: OnRead,
        place: Location | None = None,
        kept_blocks: int = KEPT_BLOCKS,
    ) -> None:
        """Takes ownership of `image`. `place` is that of the copy; None if it was rebuilt. Raises
        the errors in `restore.shards.LOST`."""
        self.image, self._on_read, self.place = image, on_read, place
        self._most_kept = kept_blocks
        self.manifest: Manifest = image.manifest
        self.header: ShardHeader = check_header(image)
        start = self.header.header_bytes
        self._offsets = list(accumulate(self.header.block_bytes, initial=start))
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def block(self, number: int) -> bytes:
        """The block of this number, not counting the header. Raises CorruptShardError, OSError."""
        data = self.kept(number)
        if data is None:
            self.bring(number)
            data = self.brought(number)
            self.forget(number)
        return data

    def kept(self, number: int) -> bytes | None:
        """The block, if it was read lately."""
        if number in self._kept:
            self._kept.move_to_end(number)
        return self._kept.get(number)

    def bring(self, number: int) -> None:
        """Fetch a block's bytes. Any thread. Raises the errors in `restore.shards.LOST`."""
        self.image.bring(*self._offsets[number : number + 2])

    def brought(self, number: int) -> bytes:
        """The block that `bring` fetched, checked. Raises CorruptShardError, OSError."""
        low, high = self._offsets[number : number + 2]
        self.image.touch(low, high)
        data = bytes(self.image.view[low:high])
        if digest(data) != digest_at(self.manifest.digests, number + 1):
            raise CorruptShardError(
                f"{self.manifest.key}: bytes {low} to {high} differ from their checksum"
            )
        self._on_read(len(data))
        self._kept[number] = data
        if len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)
        return data

    def forget(self, number: int) -> None:
        """Return the memory of a block that `bring` fetched. Blocks share pages: those beside it
        must have been copied."""
        self.image.forget(*self._offsets[number : number + 2])

    def all_bytes(self) -> Iterator[tuple[int, bytes]]:
        """Header and blocks in order, each with its offset. Raises CorruptShardError, OSError."""
        yield 0, bytes(self.image.view[: self.header.header_bytes])
        for number in range(len(self.header.block_bytes)):
            yield self._offsets[number], self.block(number)

    def read(self, low: int, into: np.ndarray) -> None:
        """Read bytes of the shard from `low` on. Raises CorruptShardError, OSError."""
        for number in self.blocks(low, low + len(into)):
            self.copy(number, low, into, self.block(number))

    def copy(self, number: int, low: int, into: np.ndarray, block: bytes) -> None:
        """Put the part of a block into `into`, which starts at the shard's byte `low`."""
        start = max(low, self._offsets[number])
        end = min(low + len(into), self._offsets[number + 1])
        part = np.frombuffer(block, np.uint8, end - start, start - self._offsets[number])
        into[start - low : end - low] = part

    def blocks(self, low: int, high: int) -> range:
        """The blocks that contain these bytes."""
        if low >= high:
            return range(0)
        first = bisect_right(self._offsets, low) - 1
        return range(first, bisect_right(self._offsets, high - 1))

    def covering(self, low: int, high: int) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
        """Lengths and digests of the blocks that contain these bytes; see `Covering`."""
        blocks = self.blocks(low, high)
        lengths = [self._offsets[n + 1] - self._offsets[n] for n in blocks]
        before = [low - self._offsets[blocks[0]]] if blocks else []
        digests = tuple(digest_at(self.manifest.digests, n + 1) for n in blocks)
        return (*before, *lengths), digests

    def windows(self, low: int, high: int) -> Iterator[bytes]:
        """These bytes in order, in parts. Raises CorruptShardError, OSError."""
        for start in range(low, high, WINDOW_BYTES):
            part = np.empty(min(WINDOW_BYTES, high - start), np.uint8)
            self.read(start, part)
            yield part.tobytes()

    def tree_part(self, low: int, high: int) -> bytes:
        """A range of the encoded rank tree. Raises CorruptShardError, OSError."""
        base, _ = self.tree_range()
        return b"".join(self.windows(base + low, base + high))

    def tree_range(self) -> tuple[int, int]:
        """The byte range of the encoded rank tree."""
        low = self.header.tree_offset
        return low, low + self.manifest.rank_state_bytes


class Part(Struct, frozen=True):
    """A piece of a tensor, and the shard that contains it."""

    shard: Shard
    piece: Piece

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        """Bytes of the shard with elements `[start, stop)` of the tensor."""
        size = self.piece.spec.itemsize_bytes
        low = self.shard.header.header_bytes + self.piece.offset
        low -= self.piece.start * size
        return low + start * size, low + stop * size

    def covering(self) -> Covering:
        """The `Covering` of this part."""
        start, stop = self.piece.start, self.piece.stop
        return (start, stop, *self.shard.covering(*self.range_of(start, stop)))


class StoredTensor(Struct, frozen=True):
    """One tensor of a version, in consecutive parts."""

    spec: TensorSpec
    parts: tuple[Part, ...]

    def covering(self) -> list[Covering]:
        """For equal `spec`, tensors with equal values here are equal. Nothing is read."""
        return [part.covering() for part in self.parts]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes of elements `[start, stop)` in memory order. Raises CorruptShardError, OSError."""
        found = np.empty((stop - start) * self.spec.itemsize_bytes, np.uint8)
        for part, low, into in self._reads(start, stop, found):
            part.shard.read(low, into)
        return found

    def read_all(self, into: np.ndarray, pool: Executor) -> None:
        """Read all bytes in memory order, a few blocks side by side. Raises LostShardError."""
        wanted = [
            (part.shard, number, low, view)
            for part, low, view in self._reads(0, self.spec.numel, into)
            for number in part.shard.blocks(low, low + len(view))
        ]
        for first in range(0, len(wanted), BLOCKS_AT_ONCE):
            group = wanted[first : first + BLOCKS_AT_ONCE]
            coming: dict[int, Future[None]] = {}
            for i, (shard, number, low, view) in enumerate(group):
                data = shard.kept(number)
                if data is None:
                    coming[i] = pool.submit(shard.bring, number)
                else:
                    shard.copy(number, low, view, data)
            wait(coming.values())
            for i, came in coming.items():
                shard, number, low, view = group[i]
                try:
                    came.result()
                    shard.copy(number, low, view, shard.brought(number))
                except LOST as error:
                    raise LostShardError(shard.manifest.key, shard.place, error) from error
            for i in coming:
                group[i][0].forget(group[i][1])

    def _reads(
        self, start: int, stop: int, into: np.ndarray
    ) -> Iterator[tuple[Part, int, np.ndarray]]:
        """The parts with these elements, their first bytes in their shards, and their places in
        `into`."""
        size = self.spec.itemsize_bytes
        for part in self.parts:
            low, high = max(start, part.piece.start), min(stop, part.piece.stop)
            if low < high:
                view = into[(low - start) * size : (high - start) * size]
                yield part, part.range_of(low, high)[0], view


class LostShardError(Exception):
    """A copy of a shard cannot be read, or is damaged: its cause says why. `place` is None if it
    was rebuilt."""

    def __init__(self, key: ShardKey, place: Location | None, why: Exception) -> None:
        super().__init__(str(why))
        self.key, self.place = key, place

    def others(self, there: Survey) -> Survey:
        """The survey without this copy."""
        rest = [each for each in there.found if (each.key, each.place) != (self.key, self.place)]
        return replace(there, found=rest)


class StoredVersion:
    """All shards of one version. The caller closes it."""

    def __init__(self, path: str, shards: Sequence[Shard], levels: Mapping[str, int]) -> None:
        """Raises RestoreError if elements are missing."""
        self.path, self.shards, self.levels = path, shards, levels
        self.stores: list[FarStore] = []
        """Stores that the shards are fetched from; closed with the version."""
        self.manifest = shards[0].manifest
        self.suspect = ""
        """The known or possible difference of replicas when it was taken."""
        self.structure = shards[0].header.structure
        self.striped: dict[str, StoredTensor] = {}
        self.own: dict[str, dict[int, StoredTensor]] = {}
        """By name and rank."""
        striped: dict[str, list[Part]] = {}
        for rank, shard in enumerate(shards):
            for piece in shard.header.pieces:
                part = Part(shard, piece)
                if piece.placement is PER_RANK:
                    held = self.own.setdefault(piece.spec.name, {})
                    held[rank] = StoredTensor(piece.spec, (part,))
                else:
                    striped.setdefault(piece.spec.name, []).append(part)
        for each, parts in striped.items():
            parts.sort(key=lambda part: part.piece.start)
            spec = parts[0].piece.spec
            ends = [0, *(part.piece.stop for part in parts)]
            if [part.piece.start for part in parts] != ends[:-1] or ends[-1] != spec.numel:
                raise RestoreError(f"{path} {self.manifest.id}: {each} is incomplete")
            self.striped[each] = StoredTensor(spec, tuple(parts))

    def names(self) -> set[str]:
        """Names of all tensors of model and optimizers."""
        return self.striped.keys() | self.own.keys()

    def tensor(self, name: str, rank: int) -> StoredTensor | None:
        """The tensor as that rank has it."""
        return self.striped.get(name) or self.own.get(name, {}).get(rank)

    def tree(self, rank: int) -> dict[str, Any]:
        """A rank's small state, decoded. Files in it are not read: see `storage.routed`."""
        read = self.shards[rank].tree_part
        end = end_without(self.shards[rank].manifest.rank_state_bytes, self._files_at_end(rank))
        found: dict[str, Any] = tree.decode(read(0, end), cut=True)
        return found

    def files(self, rank: int) -> dict[str, Range]:
        """A rank's routed files, entries or parts of its tree: the range of each in the shard, by
        name."""
        base, _ = self.shards[rank].tree_range()
        entries = {
            name.removeprefix(FILE_PREFIX): held[rank].parts[0].range_of(0, held[rank].spec.numel)
            for name, held in self.own.items()
            if name.startswith(FILE_PREFIX) and rank in held
        }
        beside = self._files_at_end(rank).items()
        return entries | {name: (base + low, base + high) for name, (low, high) in beside}

    def _files_at_end(self, rank: int) -> dict[str, Range]:
        shard = self.shards[rank]
        return files_at_end(shard.manifest.rank_state_bytes, shard.tree_part)

    def tree_covering(self, rank: int) -> object:
        """A value, equal for equal trees."""
        shard = self.shards[rank]
        return shard.manifest.rank_state_bytes, shard.covering(*shard.tree_range())[1]

    def text(self) -> str:
        """The version, as text."""
        ranks = f"{len(self.shards)} rank{'s' if self.shards[1:] else ''}"
        where = " and ".join(self.levels)
        at = f"v{self.manifest.id.version}, iteration {self.manifest.facts.iteration}"
        suspect = f"; suspect, as replicas differed: {self.suspect}" if self.suspect else ""
        return f"{self.path} {at}, {ranks}, from {where}{suspect}"

    def close(self) -> None:
        """Unmap all shards, and close their stores."""
        for shard in self.shards:
            shard.image.close()
        for store in self.stores:
            store.close()


def open_version(
    path: Where | Sequence[Where],
    version: int | None,
    on_read: OnRead,
    there: Survey | None = None,
    verify: bool = False,
) -> StoredVersion:
    """Open the version that a restart takes, or this version alone. `there`: an existing survey of
    `path`.

    Shards are opened and their headers read, from another copy where one cannot be opened; other
    data is read on demand. With `verify`, or if a shard must be rebuilt, everything is read and
    verified now, and damaged copies are skipped. Raises RestoreError if there is no such version,
    complete and sound; ConfigError for an invalid path.
    """
    there = survey(path) if there is None else there
    refuse_several_jobs(there, text_of(path))
    version = version_to_read(there, version)
    plan = there.plan(version, abandoned=True)
    if plan is None:
        raise RestoreError(nothing(path, version, there, ()))
    found = None if verify else _from_any_copy(path, plan, there, on_read)
    found = found or _verified(path, version, there, on_read)
    found.suspect = there.suspicion(found.manifest.id)
    return found


def _from_any_copy(
    path: Where | Sequence[Where], plan: RestorePlan, there: Survey, on_read: OnRead
) -> StoredVersion | None:
    """The version of the plan, opened; None if no copy of a shard can be."""
    left: RestorePlan | None = plan
    while left is not None and left.id == plan.id and not any(s.rebuilt for s in left.sources):
        try:
            return _lazily(text_of(path), left, there, on_read)
        except LostShardError as error:
            there = error.others(there)
            left = there.plan(plan.id.version, abandoned=True)
    return None


def _lazily(path: str, plan: RestorePlan, there: Survey, on_read: OnRead) -> StoredVersion:
    kept_blocks = max(2, KEPT_BLOCKS // len(plan.sources))
    stores: dict[Location, _OpenStore] = {}

    def open_far(place: Location) -> _OpenStore:
        if place not in stores:
            stores[place] = _OpenStore(there.open_far(place))
            undo.callback(stores[place].store.close)
        return stores[place]

    with ExitStack() as undo:
        shards = []
        for source in plan.sources:
            key = ShardKey(plan.id, source.shard, len(plan.sources))
            try:
                image = open_image(key, source.place, plan.run_id, open_far)
                undo.callback(image.close)
                shards.append(Shard(image, on_read, source.place, kept_blocks))
            except LOST as error:
                raise LostShardError(key, source.place, error) from error
        found = StoredVersion(path, shards, plan.levels)
        found.stores = [each.store for each in stores.values()]
        undo.pop_all()
    return found


class _OpenStore(Struct, frozen=True):
    """A store that several shards share; it is closed with the version."""

    store: FarStore

    def open_shard(self, name: VersionName, shard: int) -> Stored:
        """See `FarStore`."""
        return self.store.open_shard(name, shard)

    def exists(self, name: VersionName) -> bool:
        """See `FarStore`."""
        return self.store.exists(name)

    def close(self) -> None:
        """Leave it open."""


def _verified(
    path: Where | Sequence[Where], version: int | None, there: Survey, on_read: OnRead
) -> StoredVersion:
    candidates = candidates_of(there)
    context = RestoreContext(ErrorBarrier(SingleGroup()), open_store=there.open_far)
    attempt = find(context, candidates, version)
    if attempt is None:
        raise RestoreError(nothing(path, version, there, candidates.rejected))
    with ExitStack() as undo:
        undo.callback(attempt.close)
        images = [attempt.images[source.shard] for source in attempt.plan.sources]
        for image in images:  # they are complete: nothing is read again
            image.bring, image.forget = already_there, image.rest
        shards = [Shard(image, on_read) for image in images]
        opened = StoredVersion(text_of(path), shards, attempt.plan.levels)
        undo.pop_all()
    return opened
