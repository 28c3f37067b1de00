"""Passes over data loaders in this process: they show where an epoch of the training ends.

Only for a job under test, since the loaders' `__iter__` is replaced. A pass in progress at a
boundary belongs to the training; an evaluation's pass starts and ends between two boundaries.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

_passes: list[tuple[int, weakref.ref[Any], Any]] = []
"""Number, iterator and length of the passes that may be in progress."""
_begun = 0


def watch() -> None:
    """Note every pass that starts from now on. May be called again."""
    for kind in kinds():
        original = vars(kind)["__iter__"]
        if not hasattr(original, "_tierckpt_sees"):
            kind.__iter__ = _seeing(original)


def kinds() -> list[Any]:
    """Loader classes that define their own `__iter__`."""
    found: list[Any] = [DataLoader]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if "__iter__" in vars(kind)]


def _seeing(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(original)
    def begins(loader: Any) -> Iterator[Any]:
        begun = original(loader)
        _note(begun, loader)
        return begun

    begins._tierckpt_sees = True  # type: ignore[attr-defined]
    return begins


def _note(iterator: Any, loader: Any) -> None:
    global _begun
    try:
        ref = weakref.ref(iterator)
    except TypeError:  # the iterator is a list's: its end cannot be seen
        return
    length = 0
    with contextlib.suppress(Exception):  # an iterable dataset has no length
        length = len(loader)
    _begun += 1
    # Persistent workers reuse one iterator; a subclass calls its parent's `__iter__`.
    others = [each for each in _passes if each[1]() not in (None, iterator)]
    _passes[:] = [*others, (_begun, ref, length)]


def under_way() -> list[list[int]]:
    """For each pass in progress its number, its batches, and the batches yielded (0: unknown)."""
    found = [(number, ref(), length) for number, ref, length in _passes]
    return [
        [number, length, int(getattr(each, "_num_yielded", 0))]
        for number, each, length in found
        if each is not None
    ]


__all__ = ["kinds", "under_way", "watch"]
