"""A decoded rank tree as leaves by path: learning rates, generators, what objects returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..manifest import digest
from ..tree import Entry

SHOWN_LETTERS = 40
Leaf = Any
"""A tensor, an array, or a plain value."""


def leaves_of(tree: Mapping[str, Any]) -> dict[str, Leaf]:
    """Of a rank tree as `tree.decode` returns it. Options of optimizers are `options/...`; what
    optimizers keep and is no tensor has names as its tensors have; a generator is one leaf."""
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
    """An empty container is a leaf, too, and so is what came in an unusual one."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(each, f"{path}/{key if isinstance(key, str) else repr(key)}")
    elif isinstance(value, list | tuple) and value and not isinstance(value, torch.Size):
        for number, each in enumerate(value):
            yield from _flat(each, f"{path}[{number}]")
    elif not isinstance(value, Entry) and not (value is None and path in ("adapter", "extra")):
        yield path, value


def bits_of(leaf: Leaf) -> tuple[str, bytes]:
    """Kind and bytes: equal where leaves are, bit for bit."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}", raw_bytes(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return f"{leaf.dtype!r}{list(leaf.shape)}", leaf.tobytes()
    return type(leaf).__name__, repr(leaf).encode(errors="surrogatepass")


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """In row-major order, whatever its own is."""
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def shown(leaf: Leaf) -> str:
    """For people; empty for what nobody reads (a generator's state)."""
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return bits_of(leaf)[0].removeprefix("torch.")
    text = repr(leaf)
    return text if len(text) <= SHOWN_LETTERS else ""


def fingerprint(leaf: Leaf) -> str:
    """Short, and equal for equal leaves alone; a plain value is shown as it is."""
    kind, data = bits_of(leaf)
    plain = isinstance(leaf, bool | int | float | str | None)
    text = shown(leaf) if plain else ""
    return f"{kind} {text}" if text else f"{kind} #{digest(data).hex()}"


__all__ = ["Leaf", "bits_of", "fingerprint", "leaves_of", "raw_bytes", "shown"]
