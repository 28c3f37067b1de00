"""Passes over data loaders, as a process begins them: where an epoch of the training ends.

Only in a job that proves something: the loaders' `__iter__` is replaced. A pass that is still under
way at a boundary is the training's; an evaluation's has begun and ended between two.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

_passes: list[tuple[int, weakref.ref[Any], Any]] = []
"""Number, iterator and length of those that may be under way."""
_begun = 0


def watch() -> None:
    """From now on see all that begin; may be called again."""
    for kind in kinds():
        original = vars(kind)["__iter__"]
        if not hasattr(original, "_tierckpt_sees"):
            kind.__iter__ = _seeing(original)


def kinds() -> list[Any]:
    """Classes of loaders that have a way of their own to begin a pass."""
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
    except TypeError:  # a list's, of a loader with a way of its own: its end cannot be seen
        return
    length = 0
    with contextlib.suppress(Exception):  # an iterable data set has none
        length = len(loader)
    _begun += 1
    # Workers that stay have one iterator, which begins again; a subclass calls its parent's.
    others = [each for each in _passes if each[1]() not in (None, iterator)]
    _passes[:] = [*others, (_begun, ref, length)]


def under_way() -> list[list[int]]:
    """Of each its number, the batches it has, and those that it has yielded (0: not known)."""
    found = [(number, ref(), length) for number, ref, length in _passes]
    return [
        [number, length, int(getattr(each, "_num_yielded", 0))]
        for number, each, length in found
        if each is not None
    ]


__all__ = ["kinds", "under_way", "watch"]
