"""Switches of torch that change the bits of a result, and belong to the process: a version has
them, and a restore names those that differ. It does not set them, as the script decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import tree_codec

RARELY = 64
"""One boundary in so many looks at them."""
_ANY: dict[str, Callable[[], Any]] = {
    "torch.get_default_dtype()": lambda: str(torch.get_default_dtype()),
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
}
_CPU: dict[str, Callable[[], Any]] = {
    "torch.get_num_threads()": torch.get_num_threads,
}
_CUDA: dict[str, Callable[[], Any]] = {
    "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic,
    "torch.backends.cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "torch.backends.cudnn.allow_tf32": torch._C._get_cudnn_allow_tf32,
    "torch.backends.cuda.matmul.allow_tf32": torch._C._get_cublas_allow_tf32,
}


def read(cuda: bool) -> dict[str, Any]:
    """The switches that matter on this kind of device, by the names that users know."""
    found = {}
    for name, get in {**_ANY, **(_CUDA if cuda else _CPU)}.items():
        try:
            found[name] = get()
        except RuntimeError:  # torch refuses a mixture of its old and new settings
            continue
    return found


class Switches:
    """The switches of this process, packed. Training thread."""

    def __init__(self) -> None:
        self._looks, self._found = 0, dict[str, Any]()
        self._packed = tree_codec.Packed({})

    def packed(self, cuda: bool) -> tree_codec.Packed:
        """At a boundary: what `differing` takes. The same object while nothing changes."""
        if self._looks % RARELY == 0 and (found := read(cuda)) != self._found:
            self._found, self._packed = found, tree_codec.Packed(found)
        self._looks += 1
        return self._packed


def differing(saved: Mapping[str, Any], cuda: bool) -> list[str]:
    """A warning if switches of a version were others than those here."""
    now = read(cuda)
    names = [
        f"{name} was {saved[name]} and is {now[name]}"
        for name in saved.keys() & now.keys()
        if saved[name] != now[name]
    ]
    if not names:
        return []
    return [
        f"{'; '.join(sorted(names))}: results may be rounded differently from "
        "the undisturbed run's. Set it as before the restart"
    ]


__all__ = ["Switches", "differing", "read"]
