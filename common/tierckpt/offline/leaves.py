"""The leaves of a decoded rank tree by path: learning rates, generators, objects' states.

Loaded values with classes that are not imported here are refused. Without its class a value would
be a different state: no member of an Enum `is` it, and an optimizer behaves differently. Nothing
is imported because a checkpoint names it.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from msgspec import Struct

from tierckpt._text import error_text, some
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.format.manifest import digest
from tierckpt.state.tree_codec import (
    Entry,
    ForeignValue,
    Parts,
    foreign_values,
    is_made_of_tensors,
    name_of,
    taken_apart,
)

__all__ = [
    "Leaf",
    "bits_of",
    "fingerprint",
    "import_named",
    "leaves_of",
    "raw_bytes",
    "refuse_unknown",
    "shown_leaf",
]


SHOWN_LETTERS = 40
Leaf = Any
"""A tensor, an array, or a plain value."""


class Kind(Struct, frozen=True):
    """A leaf: the class of a value, not torch's. Its contents are leaves, too."""

    name: str
    size: tuple[int, ...] | None = None
    """The size of a tensor."""


def leaves_of(tree: Mapping[str, Any]) -> dict[str, Leaf]:
    """Leaves of a rank tree from `tree_codec.decode`. Optimizer options are `options/...`;
    other optimizer state is named like the optimizer's tensors; a generator is one leaf."""
    found: dict[str, Leaf] = {}
    for kind, state in tree.get("rng", {}).items():
        named = {f"rng/cuda[{i}]": each for i, each in enumerate(state)} if kind == "cuda" else {}
        found |= named if kind == "cuda" else {f"rng/{kind}": state}
    for label, groups in tree.get("groups", {}).items():
        for number, options in enumerate(groups):
            found.update(_flat(options, f"options/{label}[{number}]"))
    for name, values in tree.get("odd", {}).items():
        found.update(_flat(values, name))
    for part in ("extra", "extra_per_rank", "adapter"):
        found.update(_flat(tree.get(part), part))
    return found


def _flat(value: Any, path: str) -> Iterator[tuple[str, Leaf]]:
    """Flatten a value. An empty container is a leaf, too, and so is the type of an unusual one."""
    if isinstance(value, torch.Tensor) and is_made_of_tensors(value):
        value = taken_apart(value)
    if isinstance(value, Parts):
        yield path, Kind(value.kind, value.size)
        yield from _inner(value.inner, path)
        if value.context:
            yield from _flat(value.context, f"{path}.context")
    elif isinstance(value, ForeignValue):
        yield path, Kind(value.kind)
        inner = value.parts if isinstance(value.parts, Mapping) else {"value": value.parts}
        yield from _inner(inner, path)
    elif isinstance(value, torch.Tensor) and value.is_quantized:
        yield path, value.int_repr()
        yield f"{path}.scheme", _scheme_of(value)
    elif isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(each, f"{path}/{key if isinstance(key, str) else _text(key)}")
    elif isinstance(value, list | tuple | deque) and value and not isinstance(value, torch.Size):
        for number, each in enumerate(value):
            yield from _flat(each, f"{path}[{number}]")
    elif not isinstance(value, Entry) and not (value is None and path in ("adapter", "extra")):
        yield path, value


def _inner(parts: Mapping[str, Any], path: str) -> Iterator[tuple[str, Leaf]]:
    for name, each in parts.items():
        yield from _flat(each, f"{path}.{name}")


def _scheme_of(value: torch.Tensor) -> str:
    """The quantization scheme, with exact digits."""
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{value.dtype} {value.q_scale()!r} {value.q_zero_point()}"
    scales, points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    numbers = (scales.tolist(), points.tolist(), value.q_per_channel_axis())
    return f"{value.dtype} {numbers!r}"


def bits_of(leaf: Leaf) -> tuple[str, bytes]:
    """Kind and bytes of a leaf; they are equal if the leaves are, bit for bit."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}", raw_bytes(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return f"{leaf.dtype!r}{list(leaf.shape)}", leaf.tobytes()
    return type(leaf).__name__, _text(leaf).encode(errors="surrogatepass")


def _text(value: Any) -> str:
    """`repr`, but the same in every process: the order of a set's members differs between
    processes."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if isinstance(value, enum.Enum):
        return f"{name_of(type(value))}.{value.name} {_text(value.value)}"
    return repr(value)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes in row-major order, whatever the tensor's own order is."""
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def shown_leaf(leaf: Leaf) -> str:
    """The leaf for people; empty for unreadable content (a generator's state)."""
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return bits_of(leaf)[0].removeprefix("torch.")
    if isinstance(leaf, Kind):
        return leaf.name.rpartition(":")[2] + ("" if leaf.size is None else str(list(leaf.size)))
    text = repr(leaf)
    return text if len(text) <= SHOWN_LETTERS else ""


def fingerprint(leaf: Leaf) -> str:
    """A short text, equal only for equal leaves; a plain value is shown itself."""
    kind, data = bits_of(leaf)
    plain = isinstance(leaf, bool | int | float | str | None)
    text = shown_leaf(leaf) if plain else ""
    return f"{kind} {text}" if text else f"{kind} #{digest(data).hex()}"


def refuse_unknown(parts: Mapping[str, Any], where: str) -> None:
    """Raise RestoreError if a value in `parts` is a `tree_codec.ForeignValue`."""
    found = [*foreign_values(parts)]
    if not found:
        return
    names = some([f"{path} is a {kind.replace(':', '.')}" for path, kind in found], 3)
    raise RestoreError(
        f"{where}: {names}; the class is not imported, and a checkpoint's names are never imported "
        "by themselves",
        f"{_way_out(kind.partition(':')[0] for _, kind in found)}. Or get the parts of such values "
        "with the names of their classes: tierckpt.load(..., as_parts=True). `tierckpt export` to "
        "a .safetensors file takes only the model",
    )


def _way_out(modules: Iterable[str]) -> str:
    names = [*dict.fromkeys(modules)]
    if "__main__" in names:
        return "Its script defines it: load it in a script with the same definition"
    if old := [name for name in names if name in sys.modules]:
        return (
            f"{some(old)} is imported but does not define it any more: use the release that wrote "
            "it"
        )
    flags = " ".join(f"--import {name}" for name in names)
    return f"First: import {', '.join(names)} (`tierckpt export ... {flags}`)"


def import_named(modules: Iterable[str]) -> None:
    """Import the modules that the user named. Raises ConfigError."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module may raise anything on import
            why = error_text(error)
            raise ConfigError(
                f"--import {name}: {why}. Add the folders of your own modules to PYTHONPATH"
            ) from error
