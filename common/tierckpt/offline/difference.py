"""The difference of two stored versions: tensor by tensor, in float64.

Tensors with equal digests are not read. Pure, except that the versions read on demand. Apart from
the versions, memory holds a few megabytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xxhash

from tierckpt.state import tree_codec
from tierckpt.storage.routed.source_file import PREFIX

from .entry_names import order
from .leaves import Leaf, bits_of, leaves_of, raw_bytes, shown
from .stored_version import StoredTensor, StoredVersion

CHUNK_ELEMENTS = 1 << 19
"""Number of elements compared at once: a few megabytes in float64."""


@dataclass
class Numbers:
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
    """The norm divided by the norm of a; None if that is 0."""
    norm_b: float | None = None
    """Euclidean norm of b."""
    nans: tuple[int, int] = (0, 0)
    """Numbers in a and in b."""
    infs: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Difference:
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
        values = asdict(self)
        values.update(values.pop("numbers") or {})
        return values


@dataclass
class Comparison:
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
        if PREFIX + name not in version.own:
            hasher = xxhash.xxh3_64()
            for window in shard.windows(low, high):
                hasher.update(window)
            found[PREFIX + name] = f"{high - low} bytes #{hasher.hexdigest()}"
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
            yield Difference(name, "only in A", ranks, shown(a[name]))
        elif name not in a:
            yield Difference(name, "only in B", ranks, shown(b[name]))
        elif bits_of(a[name]) != bits_of(b[name]):
            yield _leaf(name, a[name], b[name], ranks)


def _leaf(name: str, a: Leaf, b: Leaf, ranks: tuple[int, ...]) -> Difference:
    kinds, both = (bits_of(a)[0], bits_of(b)[0]), (a, b)
    tensors = [_as_tensor(each) for each in both]
    if kinds[0] != kinds[1] or tensors[0] is None or tensors[1] is None:
        return Difference(name, "values", ranks, shown(a), shown(b))
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
