"""A dry run of a restore: a module's own state is loaded into a copy when a job attaches.

Otherwise a module that saves what it cannot load is found at the first restart. The copy has its
own tensors; large ones are without memory, on torch's device `meta`. Other objects in attributes
are shared: what is loaded into them is what they have.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch

from .custom_state import Entries, Place, mapped

LARGE_BYTES = 2**20
"""Limit of a tensor that is copied."""
_COPIED = (dict, collections.OrderedDict, list, tuple, set, collections.deque)
_VALUES = (torch.Tensor, torch.Generator, np.ndarray)
_CERTAIN = ("Unexpected key(s)", "Missing key(s)")
"""Complaints that large tensors without memory cannot cause."""


def complaint(
    model: torch.nn.Module, place: Place, records: Mapping[str, Mapping[str, Any]], live: Entries
) -> str:
    """Torch's complaint if these records are loaded into a copy of the module at `place`; empty if
    there is none, or no dry run is possible. Changes nothing."""
    try:
        memo = _copies(model, place.module)
    except Exception:
        return ""
    if memo is None:
        return ""
    there = live.replaced(lambda t: memo[id(t)] if id(t) in memo else _stand_in(t))
    cloned = {n: {**r, "given": mapped(r["given"], _clone)} for n, r in records.items()}
    stored = {id(memo[i]): name for i, name in live.stored.items() if i in memo}
    trial = Place(place.name, memo[id(place.module)], True, stored)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")
        said = trial.load(cloned, there)
    unsure = any(isinstance(each, torch.Tensor) and each.is_meta for each in memo.values())
    return "" if unsure and not any(text in said for text in _CERTAIN) else said


def _copies(model: torch.nn.Module, module: torch.nn.Module) -> dict[int, Any] | None:
    """By `id()` of each module and tensor inside `module`, its copy. None if a hook refers to the
    model by itself, so that it would change that."""
    memo: dict[int, Any] = {id(each): each for each in model.modules()}
    inside = [*module.modules()]
    for each in inside:
        memo[id(each)] = object.__new__(type(each))
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _stand_in(tensor)
    for each in inside:
        for kind in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
            hooks = [getattr(hook, "hook", hook) for hook in getattr(each, kind, {}).values()]
            if any(isinstance(hook, FunctionType) and hook.__closure__ for hook in hooks):
                return None
        vars(memo[id(each)]).update((k, _copy(v, memo)) for k, v in vars(each).items())
    return memo


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) in _COPIED or isinstance(value, _VALUES):
        return copy.deepcopy(value, memo)
    return memo.get(id(value), value)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    large = tensor.nbytes > LARGE_BYTES
    made = tensor.detach().to("meta") if large else tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


__all__ = ["complaint"]
