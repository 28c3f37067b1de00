"""Trees: nested Python values with tensors in them, as JSON and tensors, and back. No pickle.

The `state_dict()` of a scheduler, scaler, sampler or metric is such a tree, and so is the state of
the random number generators. Exact: NaN, infinities, big integers, tuples, dicts with any scalar
keys, bytes and arrays are restored as they were. Any other value is refused, with its path, since
code found in a checkpoint is never run.

Values of foreign classes in a tree: classes other than Python's, numpy's and torch's own.

Members of an `enum.Enum`, named tuples, and tensor subclasses that consist of plain tensors (as
torchao's 8-bit state does) are stored as the name of their class and their parts. To make them
again, nothing is imported and no constructor is called: the class is looked up among the modules
that the script has imported. If it is not there, as for `tierckpt.load`, a `ForeignValue` stands
for the value.
"""

from __future__ import annotations

import ast
import base64
import collections
import enum
import functools
import json
import math
import sys
import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from tierckpt.errors import FormatError, UnsupportedStateError
from tierckpt.format.layout import TensorSpec

__all__ = [
    "FACTORIES",
    "ForeignValue",
    "Parts",
    "cloned",
    "find_class",
    "foreign_values",
    "is_made_of_tensors",
    "is_named_tuple",
    "made_default",
    "made_member",
    "made_tensor",
    "made_tuple",
    "name_of",
    "same_type",
    "taken_apart",
]


FACTORIES: dict[str, Any] = {each.__name__: each for each in (dict, list, set, int, float, str)}
"""Factories of default dicts that can be stored."""


def name_of(kind: type) -> str:
    """Name of a class, for `find`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str, base: type) -> Any:
    """The class of that name, a subclass of `base`, if its module is imported; else None."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, base) else None


class ForeignValue(Struct):
    """Stands for a value of a class without an import here."""

    kind: str
    """Module and name of the class."""
    parts: Any
    """An Enum's value, a tuple's members by name, or a tensor's inner tensors."""

    def __hash__(self) -> int:
        """Hash of the class name: members of sets, and keys, must be hashable."""
        return hash(self.kind)


class Parts(Struct):
    """Parts of a tensor subclass, while some of its tensors are still `tree_codec.Entry`s."""

    kind: str
    inner: dict[str, Any]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def made(self) -> Any:
        """Make the tensor, once all its parts are tensors."""
        return made_tensor(self)


def is_named_tuple(value: Any) -> bool:
    """True for a value of `collections.namedtuple` or `typing.NamedTuple`."""
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple)


def is_made_of_tensors(value: Any) -> bool:
    """True for a tensor subclass that lists its inner tensors, except for a DTensor."""
    kind = type(value)
    plain = (torch.Tensor, torch.nn.Parameter)
    return (
        isinstance(value, torch.Tensor)
        and kind not in plain
        and kind.__name__ != "DTensor"
        and find_class(name_of(kind), torch.Tensor) is kind
        and callable(getattr(kind, "__tensor_flatten__", None))
        and callable(getattr(kind, "__tensor_unflatten__", None))
    )


def taken_apart(value: torch.Tensor) -> Parts:
    """The inverse of `made_tensor`; inner tensors are the live ones."""
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(value, name) for name in names}
    size, stride = tuple(value.size()), tuple(value.stride())
    return Parts(name_of(type(value)), inner, context, size, stride)


def made_tensor(parts: Parts) -> Any:
    """A tensor subclass, made from its inner tensors."""
    kind = find_class(parts.kind, torch.Tensor)
    if kind is None or not callable(getattr(kind, "__tensor_unflatten__", None)):
        return ForeignValue(parts.kind, {**parts.inner, "context": parts.context})
    size, stride = torch.Size(parts.size), parts.stride
    return kind.__tensor_unflatten__(parts.inner, parts.context, size, stride)


def cloned(value: Any) -> Any:
    """A copy of a tree with clones of its tensors and new containers."""
    if isinstance(value, torch.Tensor):
        if not is_made_of_tensors(value):
            return value.detach().clone()
        parts = taken_apart(value)
        return made_tensor(replace(parts, inner=cloned(parts.inner)))
    if type(value) is dict:
        return {key: cloned(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(cloned, value))
    return value if isinstance(value, (int, float, str, bytes, NoneType)) else deepcopy(value)


def made_member(name: str, value: Any) -> Any:
    """The member of an Enum with that value."""
    kind = find_class(name, enum.Enum)
    if kind is None:
        return ForeignValue(name, value)
    try:
        return kind(value)
    except ValueError:  # the script's Enum has no such member any more
        return ForeignValue(name, value)


def made_tuple(name: str, fields: list[str], values: list[Any]) -> Any:
    """A named tuple."""
    kind = find_class(name, tuple)
    if kind is None or list(getattr(kind, "_fields", ())) != fields:
        return ForeignValue(name, dict(zip(fields, values, strict=True)))
    return tuple.__new__(kind, values)


def made_default(factory: str | None, items: list[tuple[Any, Any]]) -> Any:
    """A defaultdict."""
    return defaultdict(FACTORIES[factory] if factory else None, items)


def foreign_values(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The path to each `ForeignValue` in a decoded tree, and its class, as `name_of` names it."""
    if isinstance(value, ForeignValue) or (
        isinstance(value, Parts) and find_class(value.kind, torch.Tensor) is None
    ):
        yield path, value.kind
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from foreign_values(key, f"a key of {path}")
            yield from foreign_values(each, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(value, (list, tuple, deque)):
        for number, each in enumerate(value):
            yield from foreign_values(each, f"{path}[{number}]")
    elif isinstance(value, (set, frozenset)):
        for each in value:
            yield from foreign_values(each, f"a member of {path}")


def same_type(value: Any, members: Iterator[Any]) -> Any:
    """A list, tuple or set of these members, of the type of `value`."""
    if is_named_tuple(value):
        return tuple.__new__(type(value), members)
    make: Callable[[Iterator[Any]], Any] = type(value)
    return make(members)


TAG = "~"
"""Key of a dict that represents a value without a form in JSON."""

INLINE_BYTES = 16 * 1024
"""Arrays up to this size go into the JSON itself."""

SHORT_BYTES = 256
"""Bytes up to this length go into the JSON, too."""

SMALL_BYTES = 64 * 1024
"""Tensors up to this size are joined, when a tree is encoded, instead of being copied alone."""

_JSON = json.JSONEncoder(separators=(",", ":"))

AS_THEY_ARE = frozenset((bool, int, str, NoneType))
"""Types with values that are their own nodes. Those of `float` are, too, if they are finite."""

KeepTensor = Callable[[torch.Tensor, str], dict[str, Any]]
"""Called with a tensor and its path; keeps it somewhere and returns a node in its place."""


def pack(value: Any, path: str, keep: KeepTensor) -> Any:
    """`value` as JSON nodes; shares nothing mutable with it. Raises UnsupportedStateError."""
    kind = type(value)
    if kind in AS_THEY_ARE:
        return value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if isinstance(value, torch.Tensor):
        if _is_quantized(value):
            return _pack_quantized(value, path, keep)
        return _pack_subclass(value, path, keep) if is_made_of_tensors(value) else keep(value, path)
    if kind is list:
        return _packed_items(enumerate(value), path, keep)
    if kind is dict and {*map(type, value)} <= _TEXT and TAG not in value:
        return dict(zip(value, _packed_items(value.items(), path, keep), strict=True))
    packer = _PACKERS.get(kind)
    if packer is not None:
        return packer(value, path, keep)
    if isinstance(value, np.generic):
        node = _pack_array(np.asarray(value), path, keep)
        return {**node, TAG: "scalar"}
    if isinstance(value, enum.Enum) and find_class(name_of(kind), enum.Enum) is kind:
        return {TAG: "enum", "kind": name_of(kind), "v": pack(value.value, path, keep)}
    if is_named_tuple(value) and find_class(name_of(kind), tuple) is kind:
        fields, members = list(value._fields), _sequence(value, path, keep)
        return {TAG: "namedtuple", "kind": name_of(kind), "fields": fields, "v": members}
    raise UnsupportedStateError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored without "
        "pickle. Let state_dict() return numbers, strings, tensors, arrays and containers of "
        "them, or leave the object out and rebuild it at start."
    )


_TEXT = {str}


def _packed_items(items: Iterable[tuple[Any, Any]], path: str, keep: KeepTensor) -> list[Any]:
    """The nodes of the members of a list or dict. Most are plain values, at every step."""
    found = []
    for key, value in items:
        kind = type(value)
        if kind not in AS_THEY_ARE and not (kind is float and math.isfinite(value)):
            value = pack(value, f"{path}[{key!r}]", keep)
        found.append(value)
    return found


def unpack(node: Any, tensor: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    """The inverse of `pack`; `tensor` turns the nodes that `keep` returned into tensors."""
    if isinstance(node, list):
        return [unpack(v, tensor) for v in node]
    if not isinstance(node, dict):
        return node
    if TAG not in node:
        return {k: unpack(v, tensor) for k, v in node.items()}
    kind = node[TAG]
    if kind == "entry":
        return Entry(node["v"])
    if kind in ("tensor", "item"):
        value = tensor(node)
        return value.item() if kind == "item" else value
    if kind == "raw":
        return bytes(tensor(node).numpy().data)
    unpacker = _UNPACKERS.get(kind)
    if unpacker is None:
        raise FormatError(f"a tree holds a node of unknown kind {kind!r}")
    return unpacker(node, tensor)


class Entry(Struct, frozen=True):
    """Stands in a decoded tree for an entry of the shards, a tensor, under this key."""

    key: str


class Entries:
    """A `KeepTensor` that keeps (path, tensor) in `found`, to be stored as entries. Paths have no
    slash, as they become the last part of an entry's name. Arrays never become entries, whatever
    their size: they go into the JSON."""

    def __init__(self) -> None:
        self.found: list[tuple[str, torch.Tensor]] = []

    def __call__(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        """Keep a tensor, see `KeepTensor`."""
        path = path.replace("/", r"\x2f")  # an escape of repr, so no other key has this path
        self.found.append((path, tensor))
        return {TAG: "entry", "v": path}


def map_entries(value: Any, change: Callable[[Entry], Any]) -> Any:
    """A copy of an unpacked `value`, with `change(entry)` in the place of each `Entry`."""
    if isinstance(value, Entry):
        return change(value)
    if isinstance(value, Parts):
        inner = map_entries(value.inner, change)
        return replace(value, inner=inner, context=map_entries(value.context, change)).made()
    if isinstance(value, collections.defaultdict):
        pairs = ((map_entries(k, change), map_entries(v, change)) for k, v in value.items())
        return collections.defaultdict(value.default_factory, pairs)
    if isinstance(value, dict):
        items = {map_entries(k, change): map_entries(v, change) for k, v in value.items()}
        return type(value)(items)
    if isinstance(value, collections.deque):
        return collections.deque((map_entries(v, change) for v in value), value.maxlen)
    if isinstance(value, (list, tuple, set, frozenset)):
        return same_type(value, (map_entries(v, change) for v in value))
    return value


def with_entries(value: Any, tensors: dict[str, Any]) -> Any:
    """A copy with the tensors in the places of their entries; removes them from `tensors`."""
    return map_entries(value, lambda entry: tensors.pop(entry.key))


def is_empty(node: Any) -> bool:
    """Whether a packed value is an empty container."""
    return node == {} or (type(node) is dict and TAG in node and node.get("v") == [])


class Packed:
    """A node of a packed tree that stays for many versions, with its JSON, which is made once. The
    node must not change. Any thread."""

    def __init__(self, node: Any) -> None:
        """The values of a dict may be `Packed` themselves."""
        self.node = node
        self.text = _text_of(node)
        self.rows: tuple[str, ...] | None = None
        """The table of tensors of the tree that was encoded last with this node, and its head."""
        self.head = b""
        self.of_bytes: tuple[tuple[int, ...], bytes] = ((), b"")
        """Lengths of bytes, and the head of a tree with nothing else."""


def _text_of(node: Any) -> str:
    if type(node) is not dict:
        return _JSON.encode(node)
    parts = [
        f"{_JSON.encode(key)}:{each.text if type(each) is Packed else _JSON.encode(each)}"
        for key, each in node.items()
    ]
    return f"{{{','.join(parts)}}}"


class Arena:
    """Keeps clones of the tensors of a tree, on their own devices: no tensor is read back here.
    Keeps long bytes as they are."""

    def __init__(self, *tensors: torch.Tensor | bytes) -> None:
        self.tensors: list[torch.Tensor | bytes] = [*tensors]

    @property
    def nbytes(self) -> int:
        """Size of all of them."""
        return sum(len(t) if isinstance(t, bytes) else t.nbytes for t in self.tensors)

    def keep(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        """Clone `tensor`; see `KeepTensor`."""
        refuse_tensor(tensor, path)
        self.tensors.append(tensor.detach().clone())
        return {TAG: "tensor", "v": len(self.tensors) - 1}

    def keep_bytes(self, value: bytes) -> dict[str, Any]:
        """Keep bytes; returns a node in their place."""
        self.tensors.append(value)
        return {TAG: "raw", "v": len(self.tensors) - 1}

    def keep_item(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Like `keep`, for a tensor of one element, to be stored as its value (`.item()`)."""
        self.tensors.append(tensor.detach().clone())
        return {TAG: "item", "v": len(self.tensors) - 1}


ONLY_BYTES = {bytes}


class EncodedTree:
    """A packed tree and its arena's tensors as bytes: 8 bytes of length, JSON, raw tensor data.

    This is the safetensors arrangement, with the tree in place of its header. `copy` writes the
    bytes straight to their destination. The arena's tensors are in memory once, and each only until
    all of it was copied. Any thread may copy, several at a time.
    """

    def __init__(self, node: Any, arena: Arena) -> None:
        """Takes the tensors out of `arena`. The node, and values of a dict, may be `Packed`."""
        tensors, arena.tensors = arena.tensors, []
        node = node if isinstance(node, Packed) else Packed(node)
        small: list[Any] = [_head_of(node, tensors)]
        parts: list[torch.Tensor | bytes] = []
        for tensor in tensors:
            if isinstance(tensor, bytes):
                small.append(tensor)
                continue
            raw = flat(tensor).view(torch.uint8)
            if raw.numel() > SMALL_BYTES or raw.device.type != "cpu":
                parts += [b"".join(small), raw] if small else [raw]
                small = []
            elif raw.numel():
                small.append(raw.numpy())
        parts += [b"".join(small)] if small else []
        self._parts = dict(enumerate(parts))
        """Parts with bytes that were not copied yet."""
        self._left = [len(p) if isinstance(p, bytes) else p.numel() for p in parts]
        self._bounds = list(accumulate(self._left, initial=0))
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Length of the encoded tree."""
        return self._bounds[-1]

    @property
    def whole(self) -> bytes | None:
        """All bytes, if they are in one piece: no tensor is large, and none is on a device."""
        part = self._parts.get(0) if len(self._bounds) == 2 else None
        return part if isinstance(part, bytes) else None

    def copy(self, low: int, target: torch.Tensor) -> None:
        """Fill `target` with the bytes from `low` on, and with zeros after the last one.

        Each byte may be copied once. Holds the interpreter only while it looks up the bytes.
        """
        there, high = target.numpy().data, low + target.numel()
        index = bisect_right(self._bounds, low) - 1
        while index < len(self._left) and (start := self._bounds[index]) < high:
            first, end = max(low, start), min(high, self._bounds[index + 1])
            if first < end:
                part = self._parts[index]
                if isinstance(part, bytes):
                    there[first - low : end - low] = memoryview(part)[first - start : end - start]
                else:
                    target[first - low : end - low].copy_(part[first - start : end - start])
                del part
                self._free_copied(index, end - first)
            index += 1
        if high > self.nbytes:
            end = max(0, self.nbytes - low)
            there[end:] = bytes(len(there) - end)

    def _free_copied(self, index: int, copied_bytes: int) -> None:
        with self._lock:
            self._left[index] -= copied_bytes
            if not self._left[index]:
                del self._parts[index]


def encoded_bytes(node: Any, tensors: Sequence[torch.Tensor | bytes]) -> bytes | None:
    """All bytes of the tree of a node and these bytes; None if there is a tensor among them."""
    if not isinstance(node, Packed) or set(map(type, tensors)) != ONLY_BYTES:
        return None
    lengths, head = node.of_bytes
    if lengths != (now := tuple(map(len, tensors))):
        head = _head_of(node, tensors)
        node.of_bytes = now, head
    return head + b"".join(tensors)  # type: ignore[arg-type]


def _head_of(node: Packed, tensors: Sequence[torch.Tensor | bytes]) -> bytes:
    """The length and the JSON of a tree with these tensors."""
    rows = tuple(map(_row_of, tensors))
    if rows != node.rows:
        text = f'{{"tree":{node.text},"tensors":[{",".join(rows)}]}}'.encode()
        node.rows, node.head = rows, len(text).to_bytes(8, "little") + text
    return node.head


def _row_of(tensor: torch.Tensor | bytes) -> str:
    """The tensor's row in the table, as JSON."""
    if isinstance(tensor, bytes):
        return f'["uint8",[{len(tensor)}],null,"cpu"]'
    spec = spec_of(tensor, "")
    return _JSON.encode([spec.dtype, spec.shape, spec.stride, spec.device])


def decode(data: bytes | memoryview, cut: bool = False) -> Any:
    """The inverse of `EncodedTree`, with all tensors on the CPU. `cut`: the end is not in `data`,
    and tensors there are not filled. Raises FormatError."""
    try:
        length = int.from_bytes(bytes(data[:8]), "little")
        header = json.loads(bytes(data[8 : 8 + length]))
        tensors = []
        offset = 8 + length
        for dtype, shape, stride, device in header["tensors"]:
            spec = TensorSpec(
                "", dtype, tuple(shape), stride and tuple(stride), dtype_of(dtype).itemsize, device
            )
            target = empty(spec, "cpu")
            if spec.nbytes and not (cut and offset >= len(data)):
                raw = np.frombuffer(data, np.uint8, spec.nbytes, offset)
                flat(target).view(torch.uint8).numpy()[:] = raw
            tensors.append(target)
            offset += spec.nbytes
        return unpack(header["tree"], lambda n: tensors[n["v"]])
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise FormatError(f"not an encoded tree: {error!r}") from error


# --- tensors as specs and flat memory ------------------------------------------------------------


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name. Raises FormatError for a name this torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def spec_of(tensor: torch.Tensor, name: str) -> TensorSpec:
    """Shape, dtype and memory order of `tensor`."""
    return TensorSpec(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=None if tensor.is_contiguous() or not is_dense(tensor) else tensor.stride(),
        itemsize_bytes=tensor.element_size(),
        device=tensor.device.type,
    )


def specs_of(named: Collection[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """As `spec_of`, for many tensors of few kinds."""
    names, tensors = zip(*named, strict=True) if named else ((), ())
    known: dict[Any, tuple[Any, ...]] = {}
    found = []
    kinds = zip(*(map(each, tensors) for each in _KIND), strict=True)
    for name, tensor, kind in zip(names, tensors, kinds, strict=True):
        rest = known.get(kind)
        if rest is None:
            known[kind] = rest = spec_of(tensor, name)[1:]
        found.append(TensorSpec(name, *rest))
    return found


_KIND = (
    attrgetter("shape"),
    torch.Tensor.stride,
    attrgetter("dtype"),
    attrgetter("device"),
)


def is_dense(tensor: torch.Tensor) -> bool:
    """True when the elements fill one gapless range of memory, each once, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(_strides(tensor)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """1-d view in memory order; a row-major *copy* when the tensor is not dense."""
    tensor = tensor.detach()
    if tensor.is_contiguous() or not is_dense(tensor):
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A 1-d tensor's memory as uint8, shared."""
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def row_major(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """A 1-d copy of elements `[low, high)`, in row-major order, of a tensor with gaps.

    Copies the rows of these elements and at most two more, not the whole tensor.
    """
    tensor = tensor.detach()
    while tensor.dim() > 1:
        row = tensor[0].numel()
        first, last = low // row, (high - 1) // row
        low, high = low - first * row, high - first * row
        if first != last:
            return tensor[first : last + 1].reshape(-1)[low:high].contiguous()
        tensor = tensor[first]
    return tensor[low:high].contiguous()


def empty(spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
    """An uninitialised tensor with the shape, dtype and strides of `spec`."""
    dtype = dtype_of(spec.dtype)
    if spec.stride is None:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)


def _strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(tensor.stride(), tensor.shape, strict=True))


PLAIN = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """True for most tensors that `refuse_tensor` accepts. A tensor for which this is true can be
    refused only for its memory layout."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_quantized


def refuse_tensor(tensor: torch.Tensor, path: str) -> None:
    """Raise UnsupportedStateError for tensors that cannot be stored as their bytes."""
    reason = ""
    if type(tensor) not in PLAIN:
        kind = type(tensor)
        if kind.__name__ == "DTensor":
            reason = "a DTensor (a shard of a tensor). Use torch.distributed.checkpoint for FSDP "
            reason += "and tensor-parallel models; this package is for replicated ones"
        elif "Uninitialized" in kind.__name__:
            reason = "not initialised yet. Run one forward pass before attaching"
        else:
            reason = f"a {kind.__module__}.{kind.__qualname__}, a tensor subclass with its own "
            reason += "storage. Store its plain tensors through a state_dict of your own (extra=)"
    elif tensor.layout is not torch.strided:
        reason = f"of layout {tensor.layout}. Keep it dense, or in an extra state_dict as the "
        reason += "dense tensors it is made of"
    elif tensor.is_nested:
        reason = "nested (several tensors in one). Store its parts (unbind())"
    elif tensor.is_meta:
        reason = "on the meta device and has no data. Materialise the model before attaching"
    elif any(stride == 0 and size > 1 for stride, size in _strides(tensor)):
        reason = "expanded (several elements share memory); make it a real tensor with .clone()"
    elif tensor.is_quantized:
        reason = "quantized. Store int_repr(), scales and zero points as plain tensors"
    if reason:
        raise UnsupportedStateError(f"{path} is {reason}.")


def refuse_any_in_place(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """As `refuse_in_place`, for many tensors: most have only usual properties."""
    tensors = [tensor for _, tensor in named]
    usual = (
        set(map(type, tensors)) <= {*PLAIN}
        and set(map(attrgetter("layout"), tensors)) <= {torch.strided}
        and not any(any(map(attrgetter(name), tensors)) for name in _UNUSUAL)
        and not any(map(torch.Tensor.is_conj, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
    )
    if not usual:
        for name, tensor in named:
            refuse_in_place(tensor, name)


_UNUSUAL = ("is_quantized", "is_nested", "is_meta")


def refuse_in_place(tensor: torch.Tensor, path: str) -> None:
    """Check as `refuse_tensor`, also for copies from and to the tensor's own memory."""
    if (
        is_plain(tensor)
        and not (tensor.is_nested or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    ):
        return  # almost all are of this kind
    refuse_tensor(tensor, path)
    for lazy, way_out in ((tensor.is_conj(), "resolve_conj"), (tensor.is_neg(), "resolve_neg")):
        if lazy:
            raise UnsupportedStateError(
                f"{path} is a view, and its memory holds other values than its own (torch delays "
                f"a conjugation or negation); make it a real tensor with .{way_out}()."
            )


# --- values without a form in JSON ---------------------------------------------------------------


def _items(value: Any, path: str, keep: KeepTensor) -> list[Any]:
    return [
        [pack(k, f"{path} key", keep), pack(v, f"{path}[{k!r}]", keep)] for k, v in value.items()
    ]


def _sequence(value: Any, path: str, keep: KeepTensor) -> list[Any]:
    return _packed_items(enumerate(value), path, keep)


def _ordered_set(value: Any, path: str, keep: KeepTensor) -> list[Any]:
    # Sorted by repr: members need not be comparable with each other.
    return _sequence(sorted(value, key=lambda v: (type(v).__name__, repr(v))), path, keep)


def _pack_array(value: np.ndarray, path: str, keep: KeepTensor) -> dict[str, Any]:
    if value.dtype.hasobject:
        raise UnsupportedStateError(f"{path} is a numpy array of Python objects; convert it first")
    text = _dtype_text(value.dtype)
    if _dtype_of_text(text) != value.dtype:
        raise UnsupportedStateError(
            f"{path} is a numpy array of type {value.dtype!r}, which has no name of its own in "
            "numpy; convert it first"
        )
    node = {TAG: "array", "dtype": text, "shape": list(value.shape)}
    if value.nbytes <= INLINE_BYTES or isinstance(keep, Entries):
        return {**node, "b": base64.b64encode(value.tobytes()).decode()}
    # As bytes: numpy has types that torch lacks (strings, dates, structures, long doubles).
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return {**node, "v": keep(torch.from_numpy(raw if raw.flags.writeable else raw.copy()), path)}


def _unpack_array(node: dict[str, Any], tensor: Callable[..., torch.Tensor]) -> np.ndarray:
    raw = base64.b64decode(node["b"]) if "b" in node else tensor(node["v"]).numpy()
    return np.frombuffer(raw, dtype=_dtype_of_text(node["dtype"])).reshape(node["shape"]).copy()


def _pack_bytes(value: bytes, keep: KeepTensor) -> dict[str, Any]:
    arena = getattr(keep, "__self__", None)
    if isinstance(arena, Arena) and len(value) > SHORT_BYTES:
        return arena.keep_bytes(value)
    return {TAG: "bytes", "v": base64.b64encode(value).decode()}


_WHOLE_BYTES = (torch.qint8, torch.quint8, torch.qint32)


def _is_quantized(value: torch.Tensor) -> bool:
    return type(value) in PLAIN and value.is_quantized and value.dtype in _WHOLE_BYTES


def _pack_quantized(value: torch.Tensor, path: str, keep: KeepTensor) -> dict[str, Any]:
    node = {TAG: "quantized", "v": keep(value.int_repr(), path)}
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {**node, "scale": repr(value.q_scale()), "zero_point": value.q_zero_point()}
    return {
        **node,
        "scale": keep(value.q_per_channel_scales(), path),
        "zero_point": keep(value.q_per_channel_zero_points(), path),
        "axis": value.q_per_channel_axis(),
    }


def _unpack_quantized(node: dict[str, Any], tensor: Callable[..., torch.Tensor]) -> torch.Tensor:
    if "axis" not in node:
        return torch._make_per_tensor_quantized_tensor(
            tensor(node["v"]), float(node["scale"]), node["zero_point"]
        )
    ints, scales, zero_points = (tensor(node[key]) for key in ("v", "scale", "zero_point"))
    return torch._make_per_channel_quantized_tensor(ints, scales, zero_points, node["axis"])


def _pack_subclass(value: torch.Tensor, path: str, keep: KeepTensor) -> dict[str, Any]:
    """Store a tensor subclass as its inner tensors."""
    parts = taken_apart(value)
    return {
        TAG: "subclass",
        "kind": parts.kind,
        "inner": {name: pack(each, f"{path}.{name}", keep) for name, each in parts.inner.items()},
        "context": pack(parts.context, f"the context of {path}", keep),
        "size": list(parts.size),
        "stride": list(parts.stride),
    }


def _unpack_subclass(node: dict[str, Any], tensor: Callable[..., torch.Tensor]) -> Any:
    inner = {name: unpack(each, tensor) for name, each in node["inner"].items()}
    context = unpack(node["context"], tensor)
    parts = Parts(node["kind"], inner, context, tuple(node["size"]), tuple(node["stride"]))
    waits = any(isinstance(each, (Entry, Parts)) for each in inner.values())
    return parts if waits else parts.made()


def _pack_default(value: Any, path: str, keep: KeepTensor) -> dict[str, Any]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and FACTORIES.get(name) is not factory:
        raise UnsupportedStateError(
            f"{path} is a defaultdict of {factory!r}, which is code; convert it to a dict first"
        )
    return {TAG: "defaultdict", "factory": name, "v": _items(value, path, keep)}


def _dtype_text(dtype: np.dtype) -> str:
    """The dtype as in the header of an .npy file; numpy's short name lacks a structure's fields."""
    return dtype.str if dtype.names is None else repr(np.lib.format.dtype_to_descr(dtype))


def _dtype_of_text(text: str) -> np.dtype:
    descr: Any = ast.literal_eval(text) if text.startswith("[") else text
    return np.lib.format.descr_to_dtype(descr)


def _unpack_items(node: dict[str, Any], tensor: Callable[..., torch.Tensor]) -> list[Any]:
    return [(unpack(k, tensor), unpack(v, tensor)) for k, v in node["v"]]


_PACKERS: dict[type, Callable[[Any, str, KeepTensor], dict[str, Any]]] = {
    dict: lambda v, p, k: {TAG: "dict", "v": _items(v, p, k)},
    collections.OrderedDict: lambda v, p, k: {TAG: "odict", "v": _items(v, p, k)},
    collections.Counter: lambda v, p, k: {TAG: "counter", "v": _items(v, p, k)},
    collections.deque: lambda v, p, k: {
        TAG: "deque",
        "v": _sequence(v, p, k),
        "maxlen": v.maxlen,
    },
    tuple: lambda v, p, k: {TAG: "tuple", "v": _sequence(v, p, k)},
    set: lambda v, p, k: {TAG: "set", "v": _ordered_set(v, p, k)},
    frozenset: lambda v, p, k: {TAG: "frozenset", "v": _ordered_set(v, p, k)},
    torch.Size: lambda v, _p, _k: {TAG: "size", "v": list(v)},
    torch.dtype: lambda v, _p, _k: {TAG: "dtype", "v": str(v).removeprefix("torch.")},
    torch.device: lambda v, _p, _k: {TAG: "device", "v": str(v)},
    complex: lambda v, _p, _k: {TAG: "complex", "v": [repr(v.real), repr(v.imag)]},
    bytes: lambda v, _p, k: _pack_bytes(v, k),
    bytearray: lambda v, _p, _k: {TAG: "bytearray", "v": base64.b64encode(v).decode()},
    np.ndarray: _pack_array,
    collections.defaultdict: _pack_default,
    Entry: lambda v, _p, _k: {TAG: "entry", "v": v.key},
}

_UNPACKERS: dict[str, Callable[[dict[str, Any], Callable[..., torch.Tensor]], Any]] = {
    "float": lambda n, _t: float(n["v"]),
    "dict": lambda n, t: dict(_unpack_items(n, t)),
    "odict": lambda n, t: collections.OrderedDict(_unpack_items(n, t)),
    "counter": lambda n, t: collections.Counter(dict(_unpack_items(n, t))),
    "deque": lambda n, t: collections.deque(unpack(n["v"], t), n["maxlen"]),
    "tuple": lambda n, t: tuple(unpack(n["v"], t)),
    "set": lambda n, t: set(unpack(n["v"], t)),
    "frozenset": lambda n, t: frozenset(unpack(n["v"], t)),
    "size": lambda n, _t: torch.Size(n["v"]),
    "dtype": lambda n, _t: dtype_of(n["v"]),
    "device": lambda n, _t: torch.device(n["v"]),
    "complex": lambda n, _t: complex(float(n["v"][0]), float(n["v"][1])),
    "bytes": lambda n, _t: base64.b64decode(n["v"]),
    "bytearray": lambda n, _t: bytearray(base64.b64decode(n["v"])),
    "array": _unpack_array,
    "quantized": _unpack_quantized,
    "scalar": lambda n, t: _unpack_array(n, t)[()],
    "enum": lambda n, t: made_member(n["kind"], unpack(n["v"], t)),
    "namedtuple": lambda n, t: made_tuple(n["kind"], n["fields"], [unpack(v, t) for v in n["v"]]),
    "defaultdict": lambda n, t: made_default(n["factory"], _unpack_items(n, t)),
    "subclass": _unpack_subclass,
}
