"""Stored versions beside each other: the difference of two, and chosen tensors of many.

`compare` compares tensor by tensor, in float64. Tensors with equal digests are not read. It is
pure, except that the versions read on demand. Apart from the versions, memory holds a few
megabytes.

`history` is `tierckpt.history`: chosen tensors of many versions, one version after the other.
`choose` finds the wanted versions of a path, and what may be missing among them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, SupportsIndex

import numpy as np
import torch
import xxhash
from msgspec import Struct, field, to_builtins
from msgspec.structs import asdict, replace

from tierckpt._text import some
from tierckpt.core.restore_plan import Problem
from tierckpt.core.retention import milestones
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.format.ids import VersionId
from tierckpt.state import tree_codec
from tierckpt.storage.routed import FILE_PREFIX

from .catalog import complete_versions
from .entry_names import Names, fits, in_order, order, patterns_of, shown, without_entry
from .leaves import Leaf, bits_of, leaves_of, raw_bytes, shown_leaf
from .stored_version import (
    LostShardError,
    OnRead,
    StoredTensor,
    StoredVersion,
    leave_out_memory,
    open_version,
    text_of,
)
from .survey import Survey, Where, hints_of, survey
from .verify import is_there

__all__ = ["Choice", "Chosen", "History", "SavedVersion", "choose", "chosen", "history"]


CHUNK_ELEMENTS = 1 << 19
"""Number of elements compared at once: a few megabytes in float64."""


class Numbers(Struct):
    """The difference of two tensors of one shape and dtype. Floating-point and complex values are
    compared where both are finite; other types are only counted."""

    elements: int = 0
    differing: int = 0
    """Number of elements that are not equal bit for bit."""
    max_absolute: float | None = None
    max_relative: float | None = None
    """The largest |b - a| / max(|a|, |b|)."""
    norm: float | None = None
    """Euclidean norm of b - a."""
    norm_relative: float | None = None
    """The norm divided by the norm of a; None if it is 0."""
    norm_b: float | None = None
    """Euclidean norm of b."""
    nans: tuple[int, int] = (0, 0)
    """Numbers in a and in b."""
    infs: tuple[int, int] = (0, 0)


class Difference(Struct, frozen=True):
    """One value that differs between A and B."""

    name: str
    what: str
    """`values`, `shape`, `dtype`, `only in A`, `only in B`, `ranks`."""
    ranks: tuple[int, ...] = ()
    """Ranks with the difference, for state that each rank has for itself; empty: all common
    ranks."""
    a: str = ""
    b: str = ""
    """Both values, if they are short."""
    numbers: Numbers | None = None

    def as_json(self) -> dict[str, Any]:
        """The difference for other programs."""
        values: dict[str, Any] = to_builtins(self)
        values.update(values.pop("numbers") or {})
        return values


class Comparison(Struct):
    """The comparison of two versions."""

    differences: list[Difference] = field(default_factory=list)
    tensors: int = 0
    """Number of tensors compared, by name."""

    @property
    def equal(self) -> bool:
        """Whether the versions are equal bit for bit."""
        return not self.differences


def compare(a: StoredVersion, b: StoredVersion) -> Comparison:
    """Compare everything. Raises CorruptShardError and OSError if differing data cannot be read."""
    found = Comparison()
    common = range(min(len(a.shards), len(b.shards)))
    # In the order of the shards: neighbours are in the same blocks.
    tensors = dict.fromkeys((*a.striped, *a.own, *b.striped, *b.own))
    found.tensors = len(tensors)
    rows: list[Difference] = []
    for name in tensors:
        rows += _one_name(name, a, b, common)
    for rank in common:
        if a.tree_covering(rank) == b.tree_covering(rank):
            continue
        ours, theirs = (leaves_of(each.tree(rank)) | _files(each, rank) for each in (a, b))
        rows += _leaves(ours, theirs, (rank,))
    rows += _structures(a.structure, b.structure)
    found.differences = sorted(_merged(rows, len(common)), key=lambda each: order(each.name))
    for side, more, fewer in (("A", a, b), ("B", b, a)):
        if extra := range(len(fewer.shards), len(more.shards)):
            text = f"{len(more.shards)} ranks there, {len(fewer.shards)} in the other"
            what = f"only in {side}"
            found.differences.append(
                Difference("each rank's own state", what, tuple(extra), a=text)
            )
    return found


def _files(version: StoredVersion, rank: int) -> dict[str, Leaf]:
    """Files in a rank's tree as leaves: of each its size and a digest. (Others are entries.)"""
    shard, found = version.shards[rank], dict[str, Leaf]()
    for name, (low, high) in version.files(rank).items():
        if FILE_PREFIX + name not in version.own:
            hasher = xxhash.xxh3_64()
            for window in shard.windows(low, high):
                hasher.update(window)
            found[FILE_PREFIX + name] = f"{high - low} bytes #{hasher.hexdigest()}"
    return found


def _one_name(
    name: str, a: StoredVersion, b: StoredVersion, common: Iterable[int]
) -> Iterator[Difference]:
    own = name in a.own or name in b.own
    for rank in common if own else (0,):
        one = compare_tensors(name, a.tensor(name, rank), b.tensor(name, rank))
        if one is not None:
            yield replace(one, ranks=(rank,)) if own else one


def compare_tensors(name: str, a: StoredTensor | None, b: StoredTensor | None) -> Difference | None:
    """The difference of two tensors; None if they are equal bit for bit."""
    if a is None or b is None:
        there = a or b
        if there is None:
            return None
        text = f"{there.spec.dtype}{list(there.spec.shape)}"
        return Difference(name, "only in B" if a is None else "only in A", a=text)
    for what in ("shape", "dtype"):
        one, other = getattr(a.spec, what), getattr(b.spec, what)
        if one != other:
            texts = [str(list(v) if what == "shape" else v) for v in (one, other)]
            return Difference(name, what, a=texts[0], b=texts[1])
    if a.spec.stride == b.spec.stride and a.covering() == b.covering():
        return None
    numbers = _numbers(a, b)
    return Difference(name, "values", numbers=numbers) if numbers.differing else None


def _numbers(a: StoredTensor, b: StoredTensor) -> Numbers:
    dtype, count = tree_codec.dtype_of(a.spec.dtype), a.spec.numel
    sums = _Sums(dtype)
    if a.spec.stride == b.spec.stride:
        for low in range(0, count, CHUNK_ELEMENTS):
            high = min(low + CHUNK_ELEMENTS, count)
            sums.add(a.read(low, high), b.read(low, high))
    else:
        sums.add(_row_major(a), _row_major(b))
    return sums.numbers()


def _row_major(tensor: StoredTensor) -> np.ndarray:
    target = tree_codec.empty(tensor.spec, "cpu")
    if tensor.spec.numel:
        data = tensor.read(0, tensor.spec.numel)
        tree_codec.flat(target).view(torch.uint8).numpy()[:] = data
    return np.frombuffer(raw_bytes(target), np.uint8)


class _Sums:
    """Sums over chunks of two tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._found = dtype, Numbers()
        self._is_number = dtype.is_floating_point or dtype.is_complex
        self._squares = self._base = self._after = 0.0

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Add the bytes of a chunk of both tensors, with the same number of elements."""
        self._found.elements += len(a) // self._dtype.itemsize
        self._found.differing += _differing(a, b, self._dtype.itemsize)
        if self._is_number:
            wide = torch.complex128 if self._dtype.is_complex else torch.float64
            self._add_numbers(*(_wide(each, self._dtype, wide) for each in (a, b)))

    def _add_numbers(self, x: torch.Tensor, y: torch.Tensor) -> None:
        found = self._found
        finite = torch.isfinite(x) & torch.isfinite(y)
        if not bool(finite.all()):
            for name, odd in (("nans", torch.isnan), ("infs", torch.isinf)):
                before, now = getattr(found, name), (int(odd(x).sum()), int(odd(y).sum()))
                setattr(found, name, (before[0] + now[0], before[1] + now[1]))
            x, y = x[finite], y[finite]
        if not x.numel():
            return
        change, size, after = (y - x).abs(), x.abs(), y.abs()
        self._squares += float(change.dot(change))
        self._base += float(size.dot(size))
        self._after += float(after.dot(after))
        relative = change / torch.maximum(size, after)  # NaN for 0 and 0
        found.max_absolute = max(found.max_absolute or 0.0, float(change.max()))
        found.max_relative = max(found.max_relative or 0.0, float(relative.nan_to_num_().max()))

    def numbers(self) -> Numbers:
        """The result for all chunks."""
        if self._found.max_absolute is not None:
            self._found.norm = math.sqrt(self._squares)
            self._found.norm_b = math.sqrt(self._after)
            if self._base > 0:
                self._found.norm_relative = math.sqrt(self._squares / self._base)
        return self._found


def _differing(a: np.ndarray, b: np.ndarray, size: int) -> int:
    """Number of elements of `size` bytes that differ."""
    word = min(size, 8)
    words = a.view(f"u{word}") != b.view(f"u{word}")
    return int(np.count_nonzero(words if word == size else words.reshape(-1, size // word).any(1)))


def _wide(data: np.ndarray, dtype: torch.dtype, wide: torch.dtype) -> torch.Tensor:
    raw = torch.from_numpy(data if data.flags.writeable else data.copy())
    return raw.view(dtype).to(wide)


# --- values other than tensors of model or optimizer ---------------------------------------------


def _leaves(
    a: Mapping[str, Leaf], b: Mapping[str, Leaf], ranks: tuple[int, ...]
) -> Iterator[Difference]:
    for name in a.keys() | b.keys():
        if name not in b:
            yield Difference(name, "only in A", ranks, shown_leaf(a[name]))
        elif name not in a:
            yield Difference(name, "only in B", ranks, shown_leaf(b[name]))
        elif bits_of(a[name]) != bits_of(b[name]):
            yield _leaf(name, a[name], b[name], ranks)


def _leaf(name: str, a: Leaf, b: Leaf, ranks: tuple[int, ...]) -> Difference:
    kinds, both = (bits_of(a)[0], bits_of(b)[0]), (a, b)
    tensors = [_as_tensor(each) for each in both]
    if kinds[0] != kinds[1] or tensors[0] is None or tensors[1] is None:
        return Difference(name, "values", ranks, shown_leaf(a), shown_leaf(b))
    sums = _Sums(tensors[0].dtype)
    sums.add(*(np.frombuffer(raw_bytes(each), np.uint8) for each in tensors if each is not None))
    return Difference(name, "values", ranks, numbers=sums.numbers())


def _as_tensor(leaf: Leaf) -> torch.Tensor | None:
    if isinstance(leaf, torch.Tensor):
        return leaf
    try:
        return torch.from_numpy(leaf.copy()) if isinstance(leaf, np.ndarray) else None
    except TypeError:  # numpy has types that torch lacks
        return None


def _structures(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Compare the optimizers' classes, and the parameters in their groups."""
    for label in a.keys() | b.keys():
        one, other = a.get(label), b.get(label)
        if one is None or other is None:
            there = (one or other or {}).get("class", "")
            side = "only in B" if one is None else "only in A"
            yield Difference(f"options/{label}", side, a=there)
        elif one["class"] != other["class"]:
            yield Difference(f"options/{label}", "values", a=one["class"], b=other["class"])
        elif one["groups"] != other["groups"]:
            sizes = [str([len(names) for names in each["groups"]]) for each in (one, other)]
            yield Difference(f"options/{label}/parameters", "values", a=sizes[0], b=sizes[1])


# --- order ---------------------------------------------------------------------------------------


def _merged(rows: Iterable[Difference], ranks: int) -> Iterator[Difference]:
    """Merge equal rows of several ranks into one."""
    same: dict[Any, list[int]] = {}
    kept: dict[Any, Difference] = {}
    for row in rows:
        key = repr(replace(row, ranks=()))
        same.setdefault(key, []).extend(row.ranks)
        kept[key] = row
    for key, row in kept.items():
        found = tuple(sorted(same[key]))
        yield replace(row, ranks=() if len(found) == ranks else found)


MAX_SHOWN = 4


class Choice(Struct, frozen=True):
    """The wanted versions."""

    every: int | None = None
    first: int | None = None
    last: int | None = None
    run: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for what is no whole number, and for an `every` of no steps."""
        for name, value in asdict(self).items():
            if value is not None and not isinstance(value, SupportsIndex):
                raise ConfigError(f"{name}={value!r}: give a whole number")
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every={self.every}: give a number of steps, 1 or more")

    def among(self, versions: Iterable[int]) -> set[int]:
        """The versions that are chosen among these, which are all that there are."""
        points = versions if self.every is None else milestones(versions, self.every)
        return {
            version
            for version in points
            if (self.first is None or version >= self.first)
            and (self.last is None or version <= self.last)
        }

    def __str__(self) -> str:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return ", ".join(f"{name}={value}" for name, value in given.items())


class Chosen(Struct, frozen=True):
    """The versions that were chosen, and those that may be missing among them."""

    parts: dict[VersionId, Survey]
    """Each version's own copies, oldest first."""
    gaps: tuple[str, ...]
    """Sentences about chosen versions that exist and cannot be read."""
    others: tuple[int, ...]
    """Versions that can be read and were not chosen."""
    parts_only: bool
    """There are shards, but no complete version."""
    hint: str = ""
    """Where the checkpoints may be, if none are here."""

    def texts(self, choice: Choice) -> Iterator[str]:
        """What to tell whoever chose, if anything."""
        if not self.parts and self.others:
            there = some([f"v{version}" for version in self.others], 6)
            yield f"no version for {choice}; there is {there}"
        elif self.parts_only:
            yield "no version is complete here; give the places of all nodes, or the persistent one"
        elif not self.parts:
            yield f"no checkpoints here; {self.hint}" if self.hint else "no checkpoints here"
        if self.gaps:
            yield f"versions may be missing: {some(self.gaps, MAX_SHOWN, '; ')}"


def choose(path: Where | Sequence[Where], choice: Choice) -> Chosen:
    """The versions of a path that can be read and were chosen. Raises as `history`."""
    there = survey(path)
    troubles = [*there.unseen, *there.problems]
    leave_out_memory(there)
    every = complete_versions(there, text_of(path), choice.run)
    gaps = _gaps(troubles, choice, every)
    if gaps and not every:
        raise RestoreError(f"{text_of(path)}: nothing can be read: {some(gaps, MAX_SHOWN, '; ')}")
    if not every:
        # Memory was left out: that of a running job changes.
        gaps = _gaps([*there.unseen, *there.problems], choice, every)
    chosen = choice.among(id_.version for id_ in every)
    parts = {id_: part for id_, part in every.items() if id_.version in chosen}
    others = tuple(id_.version for id_ in every if id_ not in parts)
    partly = bool(there.copies) and not every
    return Chosen(parts, gaps, others, partly, hints_of(path, there))


def _gaps(
    troubles: Iterable[Problem], choice: Choice, readable: Iterable[VersionId]
) -> tuple[str, ...]:
    """What cannot be read, without what only concerns versions that were not chosen, and would not
    be if they could be read."""
    there = {id_.version for id_ in readable}
    found: dict[str, None] = {}
    for each in troubles:
        lost = {key.id.version for key in each.keys}
        if not lost or lost & choice.among(there | lost):
            found[f"{each.place.where}: {each.why}"] = None
    return tuple(found)


THREADS = 8
"""Blocks that come from a store at the same time."""


def history(
    path: Where | Sequence[Where],
    *,
    names: Names = "*",
    every: int | None = None,
    first: int | None = None,
    last: int | None = None,
    run: int | None = None,
) -> History:
    """The stored versions of a job, oldest first, for studies of how its weights evolve::

        for saved in tierckpt.history("s3://bucket/run7", every=1000, names="layer4.*"):
            print(saved.version, saved.tensors["layer4.0.conv1.weight"].norm())

    A tensor is read when it is looked up, and nothing else is: of each shard the header, and the
    blocks that contain the tensor, each compared with its checksum before use. This holds for every
    level, a store included, and needs neither the job nor a GPU. The versions are the complete ones
    of the lineage that a restart continues; `Checkpointer.pin` and the settings `local_keep` and
    `persistent_keep` decide which exist.

    A warning names what was asked for and is not there: versions that exist and cannot be read,
    patterns without a tensor in the first version, and the versions that there are if none is
    chosen.

    Args:
        path: as for `tierckpt.load`; of one job.
        names: one pattern or several, as in a shell: `"layer4.*"` for parameters and buffers by
            their names in `model.state_dict()`, and with a slash for tensors of an optimizer,
            `"optimizer/layer4.*/exp_avg"`.
        every: only multiples of this; where one is missing, the next version before the following
            multiple, which is what `every` in `local_keep` and `persistent_keep` keeps.
        first, last: only versions from `first` to `last`, both included.
        run: a run's number in `tierckpt log`: its versions and those that it came from, also if the
            job went back to an older version since.

    Raises ConfigError for an invalid path or argument, and for places of two jobs; RestoreError if
    there are versions, or places, and none can be read.
    """
    return History(path, names, Choice(every, first, last, run))


class History:
    """The versions that `tierckpt.history` found. `len` is their number.

    Each iteration starts at the oldest one. It closes a version before it opens the next one, so
    memory holds the tensors of one version, if the caller keeps no others. A version that the job
    retires in the meantime is skipped. One thread.
    """

    def __init__(
        self,
        path: Where | Sequence[Where],
        names: Names = "*",
        choice: Choice | None = None,
        on_read: OnRead = lambda nbytes: None,
    ) -> None:
        choice = choice or Choice()
        self._path, self._on_read = path, on_read
        self._patterns = patterns_of(names)
        found = choose(path, choice)
        self._parts = found.parts
        for text in found.texts(choice):
            warnings.warn(f"{text_of(path)}: {text}", stacklevel=3)

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions, oldest first."""
        return [id_.version for id_ in self._parts]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[SavedVersion]:
        told = False
        for id_, part in self._parts.items():
            saved = SavedVersion(self._path, id_, self._patterns, part, self._on_read)
            try:
                found = saved.open()
            except RestoreError:
                if saved.is_retired():
                    continue
                raise
            try:
                if not told and (missed := without_entry(self._patterns, saved.tensors)):
                    here = some([*chosen(found, ("*", "*/*"))], 6)
                    text = f"{id_} has no tensor named {some(missed)}, but {here}"
                    warnings.warn(text, stacklevel=2)
                told = True
                yield saved
            finally:
                saved.close()

    def __repr__(self) -> str:
        return f"History({text_of(self._path)}: {some([f'v{v}' for v in self.versions], 6)})"


class SavedVersion:
    """One version of a `History`. It may be used after the iteration as well: it is opened again
    when a tensor is looked up, until `close`."""

    version: int
    """Completed optimizer steps."""
    iteration: int
    """The number that `restore()` would return."""
    metric: float | None
    """The metric of this version, see `Checkpointer.step`."""
    created_seconds: float
    """Unix time of the seal."""
    ranks: int
    """Number of ranks that took it."""
    levels: dict[str, int]
    """Number of shards by the level that they are read from."""
    suspect: str
    """The known or possible difference of replicas when it was taken; empty if none is known."""
    tensors: Mapping[str, torch.Tensor]
    """The tensors that were asked for, by name. Each is read when it is looked up, and belongs to
    the caller; a second look reads it again. Buffers are rank 0's. Raises RestoreError, with the
    names of version and tensor, if no sound copy is left."""

    def __init__(
        self,
        path: Where | Sequence[Where],
        id_: VersionId,
        patterns: Sequence[str],
        part: Survey,
        on_read: OnRead,
    ) -> None:
        self._id, self.version = id_, id_.version
        self._path, self._patterns, self._on_read = path, patterns, on_read
        self._there = self._left = part
        """The copies of this version, and those of them that did not prove damaged."""
        self._why: list[str] = []
        self._opened: StoredVersion | None = None
        self._pool: ThreadPoolExecutor | None = None

    def open(self) -> StoredVersion:
        """Open the shards and read their headers. Raises RestoreError."""
        if self._opened is None:
            found = open_version(self._path, self.version, self._on_read, self._left)
            self._opened = found
            self._pool = ThreadPoolExecutor(THREADS, "tierckpt-history")
            facts = found.manifest.facts
            self.iteration, self.metric = facts.iteration, facts.metric
            self.created_seconds = found.manifest.created_seconds
            self.ranks, self.levels = len(found.shards), dict(found.levels)
            self.suspect = found.suspect
            self.tensors = _Tensors(self, chosen(found, self._patterns))
        return self._opened

    def close(self) -> None:
        """Unmap the shards; tensors that were read stay."""
        if self._opened is not None and self._pool is not None:
            self._pool.shutdown()
            self._opened.close()
            self._opened = self._pool = None

    def is_retired(self) -> bool:
        """Whether the job has removed the version, or a part, since it was listed."""
        rest = [each for each in self._there.found if is_there(each, self._there)]
        return replace(self._there, found=rest).plan(self.version, abandoned=True) is None

    def read(self, name: str, entry: str) -> torch.Tensor:
        """Read a tensor. If a copy of a shard is damaged, another one is used."""
        try:
            while True:
                stored = self.open().tensor(entry, 0)
                if stored is None or self._pool is None:
                    raise KeyError(name)
                try:
                    return _read(stored, self._pool)
                except LostShardError as error:
                    self._leave_out(error)
        except RestoreError as error:
            raise self._lost(name, error) from error

    def _leave_out(self, error: LostShardError) -> None:
        if error.place is None:
            raise RestoreError(f"the rebuilt {error.key} is lost: {error}") from error
        self._why.append(f"{error.place.where}: {error}")
        self._left = error.others(self._left)
        self.close()

    def _lost(self, name: str, error: Exception) -> RestoreError:
        why = "; ".join(dict.fromkeys([*self._why[-4:], str(error)]))
        where = f"{text_of(self._path)}: v{self.version}, {name}"
        if self.is_retired():
            return RestoreError(
                f"{where}: the job retired the version while it was read",
                "Pin versions before you read them (tierckpt pin), or let the job keep them: "
                'persistent_keep="2, every 1000"',
            )
        return RestoreError(f"{where}: no sound copy of the tensor is left: {why}")

    def __repr__(self) -> str:
        return f"SavedVersion(v{self.version}, {len(self.tensors)} tensors)"


class _Tensors(Mapping[str, torch.Tensor]):
    """The tensors of a version; reads on each look."""

    def __init__(self, saved: SavedVersion, entries: Mapping[str, str]) -> None:
        self._saved, self._entries = saved, entries

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._entries:
            here = some([*self._entries], 4) if self._entries else "none: no name matches"
            raise KeyError(f"{name!r} is not among the tensors of v{self._saved.version} ({here})")
        return self._saved.read(name, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of v{self._saved.version}: {some([*self._entries], 4)}>"


def chosen(version: StoredVersion, patterns: Sequence[str]) -> dict[str, str]:
    """The entries that the patterns select, by their shown names: those in the shards, without the
    `model/` and `buffer/` of a model's. Tied weights are there under all their names. State of
    other ranks than rank 0 alone is left out."""
    here = (name for name in version.names() if version.tensor(name, 0) is not None)
    entries = {shown(name): name for name in in_order(here)}
    for shard in version.shards[:1]:
        for more, entry in shard.header.tied.items():
            if entry in entries.values():
                entries[shown(more)] = entry
    return {
        name: entry for name, entry in entries.items() if any(fits(name, each) for each in patterns)
    }


def _read(stored: StoredTensor, pool: ThreadPoolExecutor) -> torch.Tensor:
    target = tree_codec.empty(stored.spec, "cpu")
    stored.read_all(tree_codec.as_bytes(tree_codec.flat(target)).numpy(), pool)
    return target
