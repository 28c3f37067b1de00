"""The witness: a fingerprint of the newest batch, by which a restart knows its data again.

A version of a loader holds it. The resumed loader loads this batch once more, and compares: another
batch means that the data, their order or their augmentation are not those of the undisturbed run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from msgspec import Struct, field
from msgspec.structs import asdict

from tierckpt._text import some

WHOLE_BYTES = 64 * 1024
"""Tensors and arrays up to this size count with all their bytes."""
PLACES, PLACE_BYTES = 128, 64
"""Places in a larger one that count, evenly spread, and the bytes of each: a line of a cache, as
its first byte costs a read of the memory. On a device: of any, as they are kept."""
MAX_MEMBERS, NESTED = 128, 8
"""Numbers and strings of a field, no tensor, that count, evenly spread; a container or tensor
among them counts as so many."""
MAX_FIELDS, MAX_DEPTH = 16, 6
"""Fields of a batch with a fingerprint of their own; the depth of containers."""


class Fingerprint(Struct):
    """Of a batch: for each field its path, its kind and shape, and a digest."""

    rows: list[list[str]] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)
    """Samples of the fields on a device, in order; nothing waits for the device before they are
    stored or compared. The digest of such a row is ON_DEVICE."""

    def with_indices(self, indices: Any) -> Fingerprint:
        """Add the indices of the samples, which tell other samples from another augmentation."""
        few = list(islice(indices, SHOWN_INDICES)) if isinstance(indices, Sequence) else indices
        more = ", ..." if few is not indices and len(indices) > len(few) else ""
        if isinstance(indices, list) and len(indices) > MAX_MEMBERS:
            indices = [len(indices), *indices[:: len(indices) // MAX_MEMBERS]]
        digest = xxhash.xxh3_64_hexdigest(repr(indices).encode())
        self.rows.append([INDICES, f"{str(few).strip('[]')}{more}", digest])
        return self

    def packed(self) -> dict[str, Any]:
        """The fingerprint for `state_dict`: one string, and the samples."""
        return {"rows": json.dumps(self.rows), "on_device": self.on_device}

    @staticmethod
    def unpacked(value: Mapping[str, Any]) -> Fingerprint:
        """The inverse of `packed`."""
        return Fingerprint(json.loads(value["rows"]), list(value["on_device"]))

    def settled(self) -> dict[str, tuple[str, str]]:
        """Kind and digest of each field; waits for the device."""
        samples = iter(self.on_device)
        return {
            path: (kind, digest if digest != ON_DEVICE else _of_device(next(samples)))
            for path, kind, digest in self.rows
        }


INDICES = "indices"
"""Path of the indices of the samples; those of fields start with another character."""
SHOWN_INDICES = 4
ON_DEVICE = "device"


def fingerprint(batch: Any) -> Fingerprint:
    """The fingerprint of a batch: nested containers of tensors, arrays, strings, bytes and numbers.
    Of any other object only the type counts, and of an absolute path only the last part: a restart
    may have its data elsewhere. Calls no method of unknown objects; raises nothing."""
    found = Fingerprint()
    _add(found, "", batch, 0)
    return found


def _add(found: Fingerprint, path: str, value: Any, depth: int) -> None:
    count = len(found.on_device)
    try:
        _add_kind(found, path, value, depth)
    except Exception as error:  # a batch of a strange kind must not end the training
        del found.on_device[count:]
        found.rows[:] = [row for row in found.rows if not row[0].startswith(path)]
        found.rows.append([path, f"unreadable: {type(error).__name__}", ""])


def _add_kind(found: Fingerprint, path: str, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.rows.append([path, *_of_tensor(value, found.on_device)])
    elif isinstance(value, np.ndarray):
        found.rows.append([path, *_of_array(value)])
    elif (members := _fields(value, depth)) is not None and len(found.rows) < MAX_FIELDS:
        found.rows.append([path, f"{type(value).__name__}[{len(members)}]", ""])
        for name, member in members.items():
            _add(found, f"{path}{name}", member, depth + 1)
    else:
        shape, content = xxhash.xxh3_64(), xxhash.xxh3_64()
        _feed(shape, content, value, MAX_MEMBERS, depth)
        size = f"[{len(value)}]" if isinstance(value, str | bytes | Sequence | Set) else ""
        kind = f"{type(value).__name__}{size}#{shape.hexdigest()[:8]}"
        found.rows.append([path, kind, content.hexdigest()])


def _fields(value: Any, depth: int) -> dict[str, Any] | None:
    """The members of a container that has few of them, by their part of the path; None for any
    other object, and for lists of numbers or strings."""
    members = _members(value)
    if members is None or len(members) > MAX_FIELDS or depth >= MAX_DEPTH:
        return None
    if isinstance(value, Sequence) and all(_is_plain(each) for each in value):
        return None
    return members


def _members(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return {f"[{key!r}]": member for key, member in islice(value.items(), MAX_FIELDS + 1)}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | range):
        names = getattr(value, "_fields", None)
        if isinstance(names, tuple) and len(names) == len(value):
            return {f".{name}": member for name, member in zip(names, value, strict=True)}
        return {f"[{i}]": member for i, member in enumerate(islice(value, MAX_FIELDS + 1))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = getattr(value, "__dict__", {})
        names = [each.name for each in dataclasses.fields(value)]
        return {f".{name}": own[name] for name in names if name in own}
    data = getattr(value, "__dict__", {}).get("data")
    return _members(data) if isinstance(data, dict) else None


_PLAIN = (int, float, str, bytes, complex, type(None))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _feed(shape: Any, content: Any, value: Any, most: int, depth: int) -> None:
    """Add a value to the hashes of shapes and of contents, with at most so many members."""
    if isinstance(value, torch.Tensor | np.ndarray):
        kind, digest = _of_array(value) if isinstance(value, np.ndarray) else _of_tensor(value, [])
        shape.update(kind.encode())
        content.update(digest.encode())  # on a device the content does not count here
        return
    shape.update(f"{type(value).__name__};".encode())
    if _is_plain(value):
        content.update(_text_of(value))
    elif isinstance(value, Set):
        shape.update(f"{len(value)};".encode())
    elif depth < MAX_DEPTH:
        if isinstance(value, Sequence):
            members = value
        else:
            named = _members(value) or {}
            shape.update("".join(named).encode())
            members = list(named.values())
        shape.update(f"{len(members)};".encode())
        plain = bool(members) and _is_plain(members[0])
        shown = min(len(members), max(most if plain else most // NESTED, 2))
        for member in members[:: -(-len(members) // shown)] if members else ():
            if _is_plain(member):
                content.update(_text_of(member))
            else:
                _feed(shape, content, member, max(most // shown, 2), depth + 1)


def _text_of(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value + b";"
    if isinstance(value, str) and value.startswith("/"):
        value = os.path.basename(value)
    return f"{value!r};".encode()


# --- tensors and arrays --------------------------------------------------------------------------


def _of_tensor(value: torch.Tensor, samples: list[torch.Tensor]) -> tuple[str, str]:
    """Kind and digest of a tensor, of any class; the sample of one on a device goes to
    `samples`."""
    plain = value.detach()
    if plain.is_nested:
        return f"nested {plain.dtype}", ""
    if plain.is_sparse:
        parts = [_of_tensor(each, samples) for each in (plain._indices(), plain._values())]
        return f"sparse {list(plain.shape)}", " ".join(digest for _, digest in parts)
    if type(plain) is not torch.Tensor and plain.layout is torch.strided:
        plain = plain.as_subclass(torch.Tensor)
    kind = f"{str(plain.dtype)[6:]}{list(plain.shape)}"
    if plain.layout is not torch.strided or plain.is_quantized or plain.is_meta:
        return f"{kind} {plain.layout}", ""
    if plain.device.type != "cpu":
        samples.append(_few_of(plain).clone())
        return kind, ON_DEVICE
    try:
        array = plain.numpy()
    except (TypeError, RuntimeError):  # of a type that numpy lacks
        array = plain.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
    return kind, _digest_of(array)


def _few_of(value: Any) -> Any:
    """The places of a tensor or array that count, without a copy of anything large."""
    per = max(PLACE_BYTES // value.itemsize, 1)
    most = PLACES * per
    sizes = tuple(value.shape)
    count = math.prod(sizes)
    is_tensor = isinstance(value, torch.Tensor)
    if value.is_contiguous() if is_tensor else value.flags.c_contiguous:
        places = count // per
        if places <= PLACES:
            return value.reshape(-1)
        return value.reshape(-1)[: places * per].reshape(places, per)[:: _stride(places)]
    for dim in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        if count > most:  # some members of this dimension
            step = min(-(-count // most), -(-sizes[dim] // 4))
            value = value[(slice(None),) * dim + (slice(None, None, step),)]
            count = math.prod(value.shape)
    return value


def _of_device(sample: torch.Tensor) -> str:
    return f"{ON_DEVICE} {_digest_of(sample.reshape(-1).view(torch.uint8).cpu().numpy())}"


def _stride(count: int) -> int:
    """The step between the sampled ones of `count` places. It has no divisor in common with their
    number, if possible: with one, all samples might come from the same column."""
    first = stride = max(count // PLACES, 1)
    while stride > first // 2 and math.gcd(stride, count) > 1:
        stride -= 1
    return stride if math.gcd(stride, count) == 1 else first


def _of_array(value: np.ndarray) -> tuple[str, str]:
    kind = f"{value.dtype}{list(value.shape)}"
    return kind, "" if value.dtype.hasobject else _digest_of(value)


def _digest_of(value: np.ndarray) -> str:
    few = _few_of(value) if value.nbytes > WHOLE_BYTES else value
    return xxhash.xxh3_64_hexdigest(few.tobytes())


# --- the comparison ------------------------------------------------------------------------------


def difference(saved: Fingerprint, now: Fingerprint) -> str:
    """What differs, as text; empty if nothing does."""
    had, has = saved.settled(), now.settled()
    for path in [*had, *(path for path in has if path not in had)]:
        old, new = had.get(path, ("absent", ""))[0], has.get(path, ("absent", ""))[0]
        if old != new and path != INDICES:
            old, new = (each.partition("#")[0] for each in (old, new))
            inner = "with other sizes inside than before" if old == new else f"and was {old}"
            return f"other samples or shapes: {_named(path)} is {new}, {inner}"
    content = {path: pair[1] for path, pair in had.items() if pair[1] and path in has}
    # A saved sample of a device does not compare with all the bytes of a tensor of the CPU.
    known = [p for p in content if content[p].split()[:-1] == has[p][1].split()[:-1]]
    other = [path for path in known if content[path] != has[path][1]]
    if not other:
        return ""
    if INDICES in other:
        return f"other samples: the batch had the indices {had[INDICES][0]}, now {has[INDICES][0]}"
    names = some([_named(path) for path in other])
    verb = "differs" if len(other) == 1 else "differ"
    if INDICES in known:
        return f"other augmentation: the samples have the same indices, and {names} {verb}"
    if same := [_named(path) for path in known if path not in other]:
        be = "is" if len(same) == 1 else "are"
        return (
            f"other augmentation, or other samples: {names} {verb}, and {some(same)} {be} the same"
        )
    return f"other samples, or another augmentation of the same: {names} {verb}"


def _named(path: str) -> str:
    return f"batch{path}" if path else "the batch"


class Ways(Struct, frozen=True):
    """How a script does what a remedy says. The loops of frameworks have ways of their own."""

    give: str = "ResumableLoader(loader, generators=[...])"
    """A generator that was not found."""
    set_epoch: str = "call data.set_epoch(epoch), and set_epoch() of the data set, before each pass"
    count: str = "set its count from data.epoch before the pass"
    start: str = "start the next epoch, which may have other data: data.set_epoch({next})"


OWN_GENERATOR = (
    "the data set, the sampler or the collate function draws from a generator that Tierckpt did "
    "not find, or a worker from one of its own: give it, {give}, and draw with workers from "
    "torch's global one"
)
EPOCH = (
    "the number of the epoch is set only where an epoch starts, which a resumed one leaves out: "
    "{set_epoch}"
)
COUNTS = "the loader or the data set counts its passes by itself: {count}"
CHANGED = (
    "the data set, its order, or the library or kind of processor that decodes it has changed: "
    "make it as it was, or {start}"
)
LIVES_ON = "workers live on from epoch to epoch: set persistent_workers=False"


class Comparison(Struct):
    """The comparison of a resumed loader's data with those of its version. Training thread."""

    waits: bool = False
    """The resumed pass has not started since the restore."""
    batches: int = 0
    """Newest batches that were compared."""
    differences: list[str] = field(default_factory=list)
    """What differs, as text, each a reason not to continue."""
    epoch: int = 0
    """The resumed epoch."""
    ways: Ways = Ways()
    collects: bool = False
    """The witness looks here before the next step. If not, the loader itself calls `late`."""
    late: Callable[[str], None] | None = None
    """Reports the differences of a pass that started after this look, or raises them; None: the
    loader raises them."""

    def text(self) -> str:
        """What differs, and the usual causes in order of likelihood."""
        what = "; ".join(self.differences)
        if "another length" in what or "another sampler" in what:
            causes = [CHANGED]
        elif "augmentation" in what and "other samples" not in what:
            causes = [OWN_GENERATOR, EPOCH, LIVES_ON, CHANGED, COUNTS]
        else:
            causes = [CHANGED, EPOCH, COUNTS, OWN_GENERATOR, LIVES_ON]
        ways, next_epoch = asdict(self.ways), str(self.epoch + 1)
        causes = [each.format(**ways).replace("{next}", next_epoch) for each in causes]
        listed = "; ".join(f"({i}) {each}" for i, each in enumerate(causes, 1))
        why = "Usual causes, the likeliest first: " + listed if causes[1:] else "So " + causes[0]
        return f"{what}. {why}"


__all__ = ["Comparison", "Fingerprint", "Ways", "difference", "fingerprint"]
