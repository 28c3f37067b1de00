"""Object reach: all objects that the given ones refer to, as far as their state may come from
there.

A scheduler inside another one, inside a user's class, or read by a function given as `state_dict`,
is stored by the object that refers to it. Libraries, optimizers and checkpointers refer to
everything in a process, so no reference is followed through these.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch

MOST_OBJECTS = 20_000
"""Limit of objects searched, the nearest first: a loader refers to its dataset."""
MOST_MEMBERS = 1_000
"""A longer container is taken as data."""
CHECKPOINTER = "tierckpt.checkpointer.checkpointer.Checkpointer"
_ENDS = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, type, types.ModuleType),
    *(torch.Tensor, torch.Generator, np.ndarray, np.generic, torch.optim.Optimizer),
)


def reached(given: Iterable[Any], wanted: Iterable[Any]) -> set[int]:
    """`id()`s of the objects in `wanted` that one of `given` is or refers to. Calls none of their
    methods."""
    looked_for = {id(each) for each in wanted}
    first = [*given]
    queue = deque(value for each in first for value in _stored_by(each))
    seen = {id(each): each for each in (*first, *queue)}
    """Keeps the objects alive: a new object could get the `id()` of a deleted one."""
    while queue and len(seen) < MOST_OBJECTS and not looked_for <= seen.keys():
        for each in _next(queue.popleft()):
            if id(each) not in seen:
                seen[id(each)] = each
                queue.append(each)
    return looked_for & seen.keys()


def _stored_by(given: Any) -> Iterator[Any]:
    """The objects that its `state_dict()` may read, as far as the code shows; else all
    references."""
    if issubclass(type(given), _ENDS):
        return
    function = getattr(type(given), "state_dict", None)
    names = attributes_read(type(given), function) if "state_dict" not in vars_of(given) else None
    if names is None:
        yield from _next(given)
        return
    yield function
    yield from (value for name, value in vars_of(given).items() if name in names)


def attributes_read(kind: type, function: Any) -> set[str] | None:
    """Names of the attributes of `self` that a method and its callees read. None: possibly all, as
    the method passes `self` on."""
    found: set[str] = set()
    left, seen = [function], list[Any]()
    while left:
        function = left.pop()
        if any(function is each for each in seen):
            continue
        seen.append(function)
        names = _attributes_in(function)
        if names is None or "__dict__" in names:
            return None
        found |= names
        members = (getattr(kind, name, None) for name in names)
        left += (m.fget if isinstance(m, property) else m for m in members if _is_code(m))
    return found


def _is_code(member: Any) -> bool:
    return isinstance(member, (types.FunctionType, property))


def _attributes_in(function: Any) -> set[str] | None:
    if not isinstance(function, types.FunctionType) or not function.__code__.co_argcount:
        return None
    code = function.__code__
    me, names = code.co_varnames[0], set[str]()
    if me in code.co_cellvars or "super" in code.co_names:
        return None
    for one, after in pairwise(dis.get_instructions(function)):
        if isinstance(one.argval, tuple) and me in one.argval:
            return None
        if one.argval != me or not one.opname.startswith("LOAD_FAST"):
            continue
        if after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.add(after.argval)
        elif after.opname != "STORE_ATTR":
            return None
    return names


def vars_of(each: Any) -> dict[str, Any]:
    """The object's attributes; empty if it has no dict."""
    found = getattr(each, "__dict__", None)
    return found if isinstance(found, dict) else {}


def _next(each: Any) -> Iterator[Any]:
    kind = type(each)  # not `__class__`: that of a lazy proxy would create the object
    if issubclass(kind, _ENDS) or _is_checkpointer(kind):
        return
    if issubclass(kind, (list, tuple, set, frozenset, deque, dict)):
        if len(each) <= MOST_MEMBERS:
            yield from each.values() if issubclass(kind, dict) else each
    elif issubclass(kind, types.FunctionType):
        yield from _of_function(each)
    elif issubclass(kind, types.MethodType):
        yield from (each.__self__, each.__func__)
    elif issubclass(kind, functools.partial):
        yield from (each.func, *each.args, *each.keywords.values())
    elif issubclass(kind, torch.nn.Module):  # hooks refer to other code
        yield from each._modules.values()
        yield from (value for name, value in vars(each).items() if not name.startswith("_"))
    else:
        yield from _of_instance(each)


def _of_instance(each: Any) -> Iterator[Any]:
    yield from vars_of(each).values()
    for kind in type(each).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(each, name, None)
    function = getattr(type(each), "state_dict", None)
    if isinstance(function, types.FunctionType):
        yield function


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    """Objects in its closure, its defaults, and the globals that it names."""
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
    """A script's object may refer to the checkpointer, which refers to all wanted objects."""
    return any(f"{each.__module__}.{each.__name__}" == CHECKPOINTER for each in kind.__mro__)


__all__ = ["attributes_read", "reached", "vars_of"]
