"""Reach: what the objects lead to that are to be stored, as far as their own state may come from.

A scheduler inside a composed one, in a class of the user's own, or read by a function that somebody
gave as `state_dict`, is stored by what leads to it. Libraries, optimizers and checkpointers lead
to everything in a process, so nothing is followed through these.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

MOST_OBJECTS = 20_000
"""So many are looked at, the nearest ones first: a loader leads to its data set."""
MOST_MEMBERS = 1_000
"""A longer container is data."""
CHECKPOINTER = "tierckpt.checkpointer.Checkpointer"
_ENDS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, type, types.ModuleType),
    *(torch.Tensor, torch.Generator, np.ndarray, np.generic, torch.optim.Optimizer),
)


def reached(given: Iterable[Any], wanted: Iterable[Any]) -> set[int]:
    """`id()`s of those of `wanted` that any of `given` is, or leads to. Calls nothing of theirs."""
    looked_for = {id(each) for each in wanted}
    queue = deque(given)
    known = {id(each): each for each in queue}
    """Kept: another object may have the `id()` of one that is gone."""
    while queue and len(known) < MOST_OBJECTS and not looked_for <= known.keys():
        for each in _next(queue.popleft()):
            if id(each) not in known:
                known[id(each)] = each
                queue.append(each)
    return looked_for & known.keys()


def _next(each: Any) -> Iterator[Any]:
    if isinstance(each, _ENDS) or _is_checkpointer(type(each)):
        return
    if isinstance(each, (list, tuple, set, frozenset, deque)):
        yield from each if len(each) <= MOST_MEMBERS else ()
    elif isinstance(each, Mapping):
        yield from each.values() if isinstance(each, dict) and len(each) <= MOST_MEMBERS else ()
    elif isinstance(each, types.FunctionType):
        yield from _of_function(each)
    elif isinstance(each, types.MethodType):
        yield from (each.__self__, each.__func__)
    elif isinstance(each, functools.partial):
        yield from (each.func, *each.args, *each.keywords.values())
    elif isinstance(each, torch.nn.Module):  # hooks lead elsewhere
        yield from each._modules.values()
        yield from (value for name, value in vars(each).items() if not name.startswith("_"))
    else:
        yield from _of_instance(each)


def _of_instance(each: Any) -> Iterator[Any]:
    yield from getattr(each, "__dict__", {}).values()
    for kind in type(each).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(each, name, None)
    function = getattr(type(each), "state_dict", None)
    if isinstance(function, types.FunctionType):
        yield function


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    """What it closes over, its defaults, and globals that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if not f"{function.__module__}.".startswith(("torch.", "numpy.")):
        names = set(_names(function.__code__))
        yield from (function.__globals__[n] for n in names if n in function.__globals__)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_checkpointer(kind: type) -> bool:
    """A script's own object may hold it, and it leads to all that it looks for."""
    return any(f"{each.__module__}.{each.__name__}" == CHECKPOINTER for each in kind.__mro__)


__all__ = ["reached"]
