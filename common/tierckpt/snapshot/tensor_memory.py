"""Tensor memory: whether many tensors, and the objects that hold them, are as they were.

torch's and Python's own methods take a call for each tensor and property, with several misses of
the caches: 60 ms for 80,000 tensors. Here a small C library compares the memory of torch's and
Python's objects with a record of it, in one call and some 50 nanoseconds a tensor.

Where each field is in these objects is found once in a process, by experiments with tensors of our
own; they also confirm where Python's headers have a dict's tag. If one of them has another result
than expected, `find` and `find_tag` return None, and `PlanCheck` uses the methods. Both see the
same changes; tests compare them.

A `Guard` compares tensors and the memory of other objects in a single call. Such memory is taken
only if it is as expected: the length of a dict, the class of an object, the members of a list.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from . import copy_engine

INTERFACE = 3
"""Number in the C file."""

_MAX_DIMENSIONS = 5
"""torch keeps shape and strides of more dimensions in other memory."""


class Record(NamedTuple):
    """Columns of a table of tensors, in the order of the C structure."""

    object: Any
    tensor: Any
    storage: Any
    data: Any
    nbytes: Any
    counter: Any
    kind: Any
    meta: Any
    trained: Any


class Offsets(NamedTuple):
    """Where the fields are, in bytes, in the order of the C structure."""

    tensor_in_object: int
    storage_in_tensor: int
    counter_in_tensor: int
    kind_in_tensor: int
    kind_bytes: int
    data_in_storage: int
    nbytes_in_storage: int
    value_in_counter: int
    meta_in_tensor: int
    flag_in_meta: int
    flag_bit: int


class Library:
    """The functions of the C library. Raises AttributeError or OSError without them."""

    def __init__(self, path: str) -> None:
        number, pointer = ctypes.c_uint64, ctypes.c_void_p
        held, free = ctypes.PyDLL(path), ctypes.CDLL(path)
        if held.tierckpt_tensor_memory_interface() != INTERFACE:
            raise OSError(f"{path} is of another version")
        self.first_changed = held.tierckpt_first_changed
        self.first_changed.argtypes = [pointer, pointer, number, pointer, pointer]
        self.first_moved = free.tierckpt_first_moved
        self.first_moved.argtypes = [pointer, pointer, number, pointer]
        self.first_changed.restype = self.first_moved.restype = number
        self.look, self.note = held.tierckpt_look, held.tierckpt_note
        self.look.argtypes, self.look.restype = [pointer], number
        self.note.argtypes, self.note.restype = [pointer, number], None
        self._words = held.tierckpt_words
        self._words.argtypes, self._words.restype = [pointer, number, number, pointer], None

    def words(self, addresses: np.ndarray) -> np.ndarray:
        """The 64-bit words there; the memory must be that of live objects."""
        return self.rows(addresses, 1).reshape(-1)

    def rows(self, addresses: np.ndarray, words: int) -> np.ndarray:
        """So many words from each address on, as rows."""
        found = np.empty((len(addresses), words), np.uint64)
        self._words(addresses.ctypes.data, len(addresses), words, found.ctypes.data)
        return found


class TensorRecords:
    """The memory of some tensors at one time: their storages, shapes, strides, types, whether they
    require a gradient, and version counters. Keeps the tensors."""

    def __init__(self, library: Library, at: Offsets, tensors: Sequence[torch.Tensor]) -> None:
        """Raises ValueError for a tensor without a storage, or with its shape in other memory."""
        self._library, self._tensors = library, [*tensors]
        self._at = np.array(at, np.uint64)
        words = library.words
        objects = addresses_of(self._tensors)
        impls = words(objects + np.uint64(at.tensor_in_object))
        storages = words(impls + np.uint64(at.storage_in_tensor))
        if not storages.all():
            raise ValueError("a tensor has no storage")
        counters = words(impls + np.uint64(at.counter_in_tensor))
        rows = library.rows(impls + np.uint64(at.kind_in_tensor), at.kind_bytes // 8)
        self._kinds, first, kinds = _numbered(rows)
        if not _have_shapes(tensors, first):
            raise ValueError("a tensor has too many dimensions")
        data = words(storages + np.uint64(at.data_in_storage))
        nbytes = words(storages + np.uint64(at.nbytes_in_storage))
        metas = words(impls + np.uint64(at.meta_in_tensor))
        self.trained = bytes(map(requires_grad, self._tensors))
        """1 for each tensor that requires a gradient, else 0."""
        flags = np.frombuffer(self.trained, np.uint8).astype(np.uint64)
        columns = Record(objects, impls, storages, data, nbytes, counters, kinds, metas, flags)
        self._records = np.stack(columns, axis=1)
        self._counted = bytearray(4 * len(self._tensors))
        self._counters = np.frombuffer(self._counted, np.uint32)

    def table(self) -> tuple[int, ...]:
        """The C structure of this name."""
        return (
            self._records.ctypes.data,
            len(self._records),
            self._kinds.ctypes.data,
            self._counters.ctypes.data,
        )

    def look(self) -> int | None:
        """The number of the first changed tensor; None without one. Training thread: holds the
        interpreter, so no tensor changes meanwhile."""
        found = self._library.first_changed(self._at.ctypes.data, *self.table())
        return None if found == len(self._records) else int(found)

    def counted(self) -> bytes:
        """The version counters that the last successful `look` read, here or of a `Guard`."""
        return bytes(self._counted)

    def counters(self) -> bytes | None:
        """The version counters now; None if a storage got other memory. Any thread; the caller
        keeps the storages and the counters alive, by aliases of the tensors."""
        now = np.zeros(len(self._records), np.uint32)
        moved = self._library.first_moved(
            self._at.ctypes.data, self._records.ctypes.data, len(now), now.ctypes.data
        )
        return now.tobytes() if moved == len(now) else None

    def addresses(self) -> tuple[int, int, int]:
        """Where the offsets and the records are, and the number of records."""
        return self._at.ctypes.data, self._records.ctypes.data, len(self._records)

    def moved(self) -> list[int]:
        """Numbers of the tensors with other memory now; as `counters`."""
        at, columns = Offsets(*self._at.tolist()), Record(*self._records.T)
        data = self._library.words(columns.storage + np.uint64(at.data_in_storage))
        nbytes = self._library.words(columns.storage + np.uint64(at.nbytes_in_storage))
        changed = (data != columns.data) | (nbytes != columns.nbytes)
        return np.flatnonzero(changed).tolist()


def addresses_of(objects: Sequence[object]) -> np.ndarray:
    """The addresses of Python objects."""
    return np.fromiter(map(id, objects), np.uint64, len(objects))


def _numbered(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different rows, where each is first, and the number of each row among them. One row for
    each tensor would not fit into a core's cache."""
    weights = np.arange(1, 2 * rows.shape[1], 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    _, first, numbers = np.unique(rows @ weights, return_index=True, return_inverse=True)
    kinds = rows[first]
    if not np.array_equal(kinds[numbers], rows):  # two kinds with one sum
        kinds, first, numbers = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return np.ascontiguousarray(kinds), first, numbers.reshape(-1).astype(np.uint64)


def _have_shapes(tensors: Sequence[torch.Tensor], first: np.ndarray) -> bool:
    """True if the rows of memory have the shapes of the tensors. The number of dimensions is in the
    rows, so the first tensor of each kind stands for the others."""
    return all(tensors[number].dim() <= _MAX_DIMENSIONS for number in first.tolist())


def records_of(tensors: Sequence[torch.Tensor]) -> TensorRecords | None:
    """A record of these tensors; None if some need torch's methods."""
    found = find()
    try:
        return TensorRecords(*found, tensors) if found is not None and tensors else None
    except ValueError:
        return None


# --- experiments ---------------------------------------------------------------------------------


@functools.cache
def library() -> Library | None:
    """The C library, which is a part of the copy engine's."""
    engine = copy_engine.find()
    try:
        return None if engine is None else Library(engine.path)
    except (AttributeError, OSError):
        return None


@functools.cache
def find() -> tuple[Library, Offsets] | None:
    """The library and the offsets, if they proved right in this process."""
    found = library()
    if found is None or sys.implementation.name != "cpython" or sys.byteorder != "little":
        return None
    try:
        at = _offsets()
        return (found, at) if at is not None and _proved(found, at) else None
    except Exception:  # this torch has other objects
        return None


def _memory(address: int) -> list[int]:
    """The words of an object on the heap."""
    size = ctypes.CDLL(None).malloc_usable_size
    size.argtypes, size.restype = [ctypes.c_void_p], ctypes.c_size_t
    return [*(ctypes.c_uint64 * (size(address) // 8)).from_address(address)]


def _impl(tensor: torch.Tensor) -> list[int]:
    return _memory(tensor._cdata)


def _offsets() -> Offsets | None:
    """Find the fields, each by two tensors that differ in it; None if one is not found."""
    one, other = torch.zeros(3, 5), torch.zeros(3, 5)
    alias = one.detach()  # has the same storage and the same counter
    objects = [
        {i for i, word in enumerate(_object(t)) if word == t._cdata}
        for t in (one, other, torch.nn.Parameter(other))
    ]
    storages = [
        {i for i, word in enumerate(_impl(t)) if word == t.untyped_storage()._cdata}
        for t in (one, other, alias)
    ]
    storage = _only(storages)
    pairs = zip(_impl(one), _impl(alias), _impl(other), strict=False)
    shared = {i for i, (a, b, c) in enumerate(pairs) if a == b != c and a % 8 == 0 and a > 4096}
    counter = _only([shared - {storage}])
    kind = _changed_words(storage)
    data, nbytes = _storage_fields()
    value = _value_in_counter(one, counter)
    meta, flag, bit = _flag()
    if min(kind) <= max(storage, counter):
        return None
    low, high = min(kind), max(kind) + 1
    return Offsets(
        tensor_in_object=8 * _only(objects),
        storage_in_tensor=8 * storage,
        counter_in_tensor=8 * counter,
        kind_in_tensor=8 * low,
        kind_bytes=8 * (high - low),
        data_in_storage=8 * data,
        nbytes_in_storage=8 * nbytes,
        value_in_counter=value,
        meta_in_tensor=8 * meta,
        flag_in_meta=flag,
        flag_bit=bit,
    )


def _object(tensor: torch.Tensor) -> list[int]:
    words = torch.Tensor.__basicsize__ // 8
    return [*(ctypes.c_uint64 * words).from_address(id(tensor))]


def _only(found: Sequence[set[int]]) -> int:
    """The one number in all sets. Raises ValueError if there is another number of them."""
    (number,) = set.intersection(*found)
    return number


def _changed_words(storage: int) -> set[int]:
    """The words of a tensor, except the one of its storage, that change with its kind."""
    found: set[int] = set()
    for change in KINDS.values():
        tensor = torch.zeros(4, 4)
        before = _impl(tensor)
        change(tensor)
        after = _impl(tensor)
        found |= {i for i, both in enumerate(zip(before, after, strict=False)) if len({*both}) > 1}
    return found - {storage}


def _storage_fields() -> tuple[int, int]:
    """Words of a storage: the address of its memory, and its size."""
    data, sizes = [], []
    shared = torch.zeros(1000).share_memory_()  # has its address once, unlike others
    for tensor in (torch.zeros(11), shared):
        storage = tensor.untyped_storage()
        words = _memory(storage._cdata)
        data.append({i for i, word in enumerate(words) if word == storage.data_ptr()})
        sizes.append({i for i, word in enumerate(words) if word == storage.nbytes()})
    return _only(data), _only(sizes)


def _value_in_counter(tensor: torch.Tensor, counter: int) -> int:
    """Offset of the value in a version counter."""
    found = []
    for _ in range(4):
        for _ in range(5):
            tensor.add_(1)
        words = _memory(_impl(tensor)[counter])
        raw = np.array(words, np.uint64).view(np.uint32)
        found.append({4 * i for i, half in enumerate(raw.tolist()) if half == tensor._version})
    return _only(found)


def _flag() -> tuple[int, int, int]:
    """The word of a tensor that refers to autograd's part of it; the byte there, and the bit in it,
    that says whether the tensor requires a gradient."""
    found, bits = [], []
    for _ in range(3):
        tensor = torch.zeros(3, 5)
        before = _impl(tensor)
        after = _impl(tensor.requires_grad_())
        pairs = zip(before, after, strict=False)
        found.append({i for i, (a, b) in enumerate(pairs) if a == 0 and b > 4096})
        with_it = np.array(_memory(after[_only(found)]), np.uint64).view(np.uint8)
        tensor.requires_grad_(False)
        without = np.array(_memory(after[_only(found)]), np.uint64).view(np.uint8)
        changed = with_it ^ without
        bits.append({(int(i), int(changed[i] & with_it[i])) for i in np.flatnonzero(changed)})
    (byte, bit) = next(iter(set.intersection(*bits)))
    if len(bits[0]) != 1 or bit.bit_count() != 1:
        raise ValueError("more than one bit changes")
    return _only(found), byte, bit


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


requires_grad = attrgetter("requires_grad")

KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda t: t.t_(),
    "transposed data": lambda t: _set_data(t, t.data.t()),
    "shape": lambda t: _set_data(t, t.data.view(2, 8)),
    "flat": lambda t: _set_data(t, t.data.view(-1)),
    "five dimensions": lambda t: _set_data(t, t.data.view(2, 2, 1, 2, 2)),
    "one more dimension": lambda t: _set_data(t, t.data[None]),
    "type": lambda t: _set_data(t, t.data.view(torch.int32)),
    "shorter": lambda t: _set_data(t, t.data[:2]),
    "offset": lambda t: _set_data(t, t.data[1:3]),
    "offset of the same length": lambda t: _set_data(t, t.data.view(-1)[1:5].view(2, 2)),
    "empty": lambda t: _set_data(t, t.data[:0]),
}
"""Changes of a tensor of 4 x 4 that keep its storage."""

MOVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "new data": lambda t: _set_data(t, torch.zeros(4, 4)),
    "set": lambda t: t.set_(torch.zeros(4, 4)),  # type: ignore[call-overload]
    "resized": lambda t: t.resize_(8, 8),
    "storage resized": lambda t: t.untyped_storage().resize_(4096),
    "storage freed": lambda t: t.untyped_storage().resize_(0),
    "shared": lambda t: t.share_memory_(),
    "swapped": lambda t: torch.utils.swap_tensors(t, torch.zeros(4, 4)),
}
"""Changes of the storage, of its memory, or of the object."""

SAME: dict[str, Callable[[torch.Tensor], Any]] = {
    "values": lambda t: t.data.add_(1),
    "gradient": lambda t: setattr(t, "grad", torch.zeros(4, 4)),
    "attribute": lambda t: setattr(t, "mine", 1),
    "view": lambda t: t.detach(),
}
"""No changes in this sense."""

FLAGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "trained": lambda t: t.requires_grad_(not t.requires_grad),
    "attribute": lambda t: setattr(t, "requires_grad", not t.requires_grad),
}
"""Changes of whether a tensor requires a gradient."""


def _proved(library: Library, at: Offsets) -> bool:
    """True if the library sees all changes of tensors, and only these."""

    def stays(change: Callable[[torch.Tensor], Any], wrap: Callable[..., torch.Tensor]) -> bool:
        tensors = [wrap(torch.zeros(4, 4)) for _ in range(3)]
        aliases = [t.detach() for t in tensors]
        records = TensorRecords(library, at, tensors)
        assert records.look() is None
        with torch.no_grad():
            change(tensors[1])
        del aliases
        return records.look() is None

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    changes = (*KINDS.values(), *MOVES.values(), *FLAGS.values())
    return (
        not any(stays(change, plain) for change in changes)
        and all(stays(change, plain) for change in SAME.values())
        and not stays(MOVES["new data"], torch.nn.Parameter)
        and not any(stays(change, torch.nn.Parameter) for change in FLAGS.values())
        and _counts(library, at)
    )


def _counts(library: Library, at: Offsets) -> bool:
    """True if the library reads the counters, and sees memory that moves."""
    tensor, other = torch.zeros(4, 4), torch.zeros(4, 4)
    records = TensorRecords(library, at, [other, tensor])
    for _ in range(7):
        tensor.add_(1)
    counted = np.array([other._version, tensor._version], np.uint32).tobytes()
    return (
        records.look() is None
        and records.counted() == records.counters() == counted
        and tensor.share_memory_() is tensor
        and records.counters() is None
    )


# --- dicts ---------------------------------------------------------------------------------------


class Tags:
    """The tags of some dicts: words that Python changes with every change of a dict. Keeps the
    dicts."""

    def __init__(self, library: Library, at: int, held: Sequence[dict[Any, Any]]) -> None:
        self._library, self._held = library, held
        self._addresses = addresses_of(held) + np.uint64(at)
        self._tags = self._now = library.words(self._addresses)

    def changed(self) -> list[int]:
        """Numbers of the dicts that may have changed since the last `accept`."""
        self._now = self._library.words(self._addresses)
        if np.array_equal(self._now, self._tags):
            return []
        return np.flatnonzero(self._now != self._tags).tolist()

    def accept(self) -> None:
        """Take the dicts as `changed` saw them last as unchanged."""
        self._tags = self._now


def tags_of(held: Sequence[dict[Any, Any]]) -> Tags | None:
    """The tags of these dicts; None if this Python has none, or for subclasses."""
    found, at = library(), find_tag()
    if found is None or at is None or not all(type(each) is dict for each in held):
        return None
    return Tags(found, at, held)


@functools.cache
def find_tag() -> int | None:
    """Offset of the tag in a dict; None if this Python has none."""
    if sys.implementation.name != "cpython":
        return None
    at = object.__basicsize__ + 8  # `ma_version_tag` of Python's headers, after `ma_used`
    for change in CHANGES:
        for size in (1, 3, 40):
            for _ in range(20):  # the interpreter has faster code for what it does often
                held: dict[Any, Any] = {n: [n] for n in range(size)}
                tag = ctypes.c_uint64.from_address(id(held) + at)
                before = tag.value
                change(held)
                if tag.value == before:
                    return None
    return at


def _replace(held: dict[Any, Any]) -> None:
    held[0] = []


def _add(held: dict[Any, Any]) -> None:
    held["new"] = []


def _remove(held: dict[Any, Any]) -> None:
    del held[0]


def _rename(held: dict[Any, Any]) -> None:
    held["new"] = held.pop(0)


def _put_last(held: dict[Any, Any]) -> None:
    held[0] = held.pop(0)


CHANGES: Iterable[Callable[[dict[Any, Any]], object]] = (
    _replace,
    _add,
    _remove,
    _rename,
    _put_last,
    lambda held: held.update({0: []}),
    lambda held: held.update(new=[]),
    lambda held: held.__init__({0: []}),  # type: ignore[misc]
    lambda held: held.__ior__({0: []}),
    lambda held: held.setdefault("new", []),
    lambda held: held.popitem(),
    lambda held: held.clear(),
)
"""All ways to change a dict with one list at the key 0."""


# --- objects -------------------------------------------------------------------------------------

_HEAD = object.__basicsize__
"""Of each object; its last word is the type. Then comes the length, in dicts and lists."""


class Memory:
    """Memory of Python's objects, in the order in which it may be read. Keeps the objects.

    Its methods raise ValueError for objects with other memory than expected.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._parts: list[tuple[np.ndarray, int]] = []
        """Addresses, and the bytes at each."""
        self.count = 0

    def add(self, addresses: Any, nbytes: int) -> None:
        """So many bytes at each of these addresses, of objects that stay alive."""
        found = np.array(addresses, np.uint64).reshape(-1)
        self._parts.append((found, nbytes))
        self.count += len(found)

    def blocks(self, blocks: Iterable[tuple[int, int]], kept: Sequence[object]) -> None:
        """Memory of objects, each block with its bytes."""
        self.kept += kept
        for address, nbytes in blocks:
            self.add(address, nbytes)

    def types(self, objects: Sequence[object]) -> None:
        """The objects' types."""
        self._words(objects, _HEAD - 8, list(map(id, map(type, objects))))

    def lengths(self, held: Sequence[dict[Any, Any]]) -> None:
        """The lengths of dicts; those of subclasses, too."""
        if not all(isinstance(each, dict) for each in held):
            raise ValueError("not a dict")
        self._words(held, _HEAD, list(map(len, held)))

    def tags(self, held: Sequence[dict[Any, Any]]) -> None:
        """The contents of dicts, see `Tags`."""
        at = find_tag()
        if at is None or not all(type(each) in _TAGGED for each in held):
            raise ValueError("a dict has no tag")
        self._words(held, at, None)

    def members(self, held: list[Any]) -> None:
        """The members of a list."""
        if type(held) is not list:
            raise ValueError("not a list")
        self._words([held], _HEAD, [len(held)])
        at = id(held) + _HEAD + 8
        self.add(at, 8)
        if held:
            items = ctypes.c_uint64.from_address(at).value
            if [*(ctypes.c_uint64 * len(held)).from_address(items)] != list(map(id, held)):
                raise ValueError("a list has other memory")
            self.add(items, 8 * len(held))
            self.kept += held

    def names(self, held: set[str]) -> None:
        """The members of a small set, which are in the object itself."""
        if type(held) is not set or set.__sizeof__(held) != set.__basicsize__:
            raise ValueError("a set has other memory")
        self.kept += [held, *held]
        self.add(id(held) + _HEAD, set.__basicsize__ - _HEAD)

    def _words(self, objects: Sequence[object], at: int, known: list[int] | None) -> None:
        places = addresses_of(objects) + np.uint64(at)
        found = library()
        if found is None or (known is not None and found.words(places).tolist() != known):
            raise ValueError("objects have other memory")
        self.kept += objects
        self.add(places, 8)

    def spans(self, library: Library) -> tuple[np.ndarray, np.ndarray]:
        """The C structures of this name, and the bytes there now, to which these refer."""
        sizes = np.repeat([n for _, n in self._parts], [len(a) for a, _ in self._parts])
        words = (sizes.astype(np.uint64) + np.uint64(7)) // np.uint64(8)
        ends = np.cumsum(words, dtype=np.uint64)
        known = np.zeros(int(words.sum()), np.uint64)
        starts = np.uint64(known.ctypes.data) + np.uint64(8) * (ends - words)
        places = np.concatenate([a for a, _ in self._parts] or [ends])
        found = np.stack([places, sizes.astype(np.uint64), starts], axis=1)
        library.note(found.ctypes.data, len(found))
        return found, known


_TAGGED = (dict, defaultdict)
"""Their contents and their order change only with the tag."""


class Guard:
    """Tensors, and memory of other objects, that are all compared in one call."""

    def __init__(self, records: Sequence[TensorRecords], fixed: Memory, followed: Memory) -> None:
        """As all is now. Raises ValueError without the library."""
        found = find()
        if found is None:
            raise ValueError("this torch has other objects")
        library, at = found
        offsets = np.array(at, np.uint64)
        tables = np.array([each.table() for each in records], np.uint64)
        changed = np.zeros(max(followed.count, 1), np.uint64)
        spans = fixed.spans(library), followed.spans(library)
        (fixed_spans, _), (followed_spans, _) = spans
        places = (offsets, tables, fixed_spans, followed_spans, changed)
        at_offsets, at_tables, at_fixed, at_followed, at_changed = (p.ctypes.data for p in places)
        parts = [at_tables, len(records), at_fixed, fixed.count, at_followed, followed.count]
        guard = np.array([at_offsets, *parts, at_changed], np.uint64)
        self._kept = records, fixed, followed, places, spans, guard
        self._changed, self._look, self._at = changed, library.look, guard.ctypes.data

    def look(self) -> list[int] | None:
        """Numbers of the followed parts that changed since the last call; None if a tensor or
        another part is not as it was. Training thread; as `TensorRecords.look`."""
        if not (count := self._look(self._at)):
            return _NONE
        return None if count > len(self._changed) else self._changed[:count].tolist()


_NONE: list[int] = []

__all__ = [
    "Guard",
    "Memory",
    "TensorRecords",
    "find",
    "find_tag",
    "records_of",
    "requires_grad",
    "tags_of",
]
