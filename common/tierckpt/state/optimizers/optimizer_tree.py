"""Optimizer tree: the optimizers' part of the rank tree.

It has all that they keep besides tensors by name: the options of every group, state other than
tensors, and the remainders of their own `state_dict()`s. Not thread-safe: for the training thread
only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import isfinite
from operator import is_
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch

from tierckpt.errors import UnsupportedStateError
from tierckpt.state import tree_codec
from tierckpt.state.validate import unstorable

from .extra_state import Taker, has_its_own, packed, without_parameter

GROUP_KEYS_NOT_STORED = ("params", "param_names")
CODE = (FunctionType, BuiltinFunctionType, type)
HEAVY_BYTES = 16 * 2**20
"""Limit of tensors copied at a boundary before a warning: some 3 ms."""
FEW = 1000
"""Limit of parameters of an optimizer for a `state_dict()` at every boundary."""
_PLAIN = (bool, int, str, NoneType)


class OptimizerTree:
    """Packs what the optimizers keep. Holds references; what it packs is copied to an arena."""

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        name_of: Callable[[torch.Tensor], str],
    ) -> None:
        """`optimizers`: those with stored state, by label. `name_of`: returns a parameter's name,
        and may call `look_again`."""
        self._optimizers, self._name_of = optimizers, name_of
        self.with_others: set[str] = set()
        """Optimizers with state under other keys than parameters."""
        self._unstored: set[tuple[str, int | str, str]] = set()
        """See `extra_state.Unstored`."""
        self._beside_bytes, self._heavy_reported = 0, False
        self._options: tuple[list[Any], list[Any], tree_codec.Packed] | None = None
        """All groups' keys (with their numbers) and values, and the node that they were packed
        to."""
        self._nothing_left: dict[str, int] = {}
        """Optimizers with a `state_dict()` of their own that had no remainder since the last
        `look_again`, and the number of boundaries since."""

    def look_again(self) -> None:
        """After a structural change: any optimizer may have a remainder."""
        self._nothing_left.clear()
        self.with_others = {n for n, o in self._optimizers.items() if without_parameter(o)}

    def leave(
        self, index: int, param: torch.Tensor, key: str, error: UnsupportedStateError
    ) -> None:
        """Mark a value that cannot be stored by name, since the optimizer's own `state_dict()` may
        have it in another form. Raises UnsupportedStateError if there is no such method."""
        label, optimizer = [*self._optimizers.items()][index]
        if not has_its_own(optimizer):
            where = f"state[{self._name_of(param)!r}][{key!r}]"
            raise unstorable(optimizer, where, error) from error
        self._unstored.add((label, id(param), key))

    # --- options of groups ----------------------------------------------------------------------

    def pack_groups(self, keep: tree_codec.KeepTensor) -> dict[str, Any] | tree_codec.Packed:
        """Options of every param group (learning rate, betas, ...)."""
        lists = [optimizer.param_groups for optimizer in self._optimizers.values()]
        groups = [*chain.from_iterable(lists)]
        keys = [*map(len, lists), *map(len, groups), *chain.from_iterable(groups)]
        values = [*chain.from_iterable(map(dict.values, groups))]
        if self._options is not None:
            then, its_values, packed = self._options
            if then == keys and all(map(is_, its_values, values)):
                return packed
        found = {
            label: [
                self._pack_group(label, number, group, keep)
                for number, group in enumerate(optimizer.param_groups)
            ]
            for label, optimizer in self._optimizers.items()
        }
        self._options = None
        items = chain.from_iterable(map(dict.items, groups))
        if not all(k in GROUP_KEYS_NOT_STORED or _is_constant(v) for k, v in items):
            return found
        self._options = keys, values, tree_codec.Packed(found)
        return self._options[2]

    def _pack_group(
        self, label: str, number: int, group: Mapping[str, Any], keep: tree_codec.KeepTensor
    ) -> dict[str, Any]:
        """Options of one group. Functions and classes are left out: they are code, not state."""
        found = {}
        for key, value in group.items():
            if type(value) in _PLAIN or (type(value) is float and isfinite(value)):
                found[key] = value
                continue
            if key in GROUP_KEYS_NOT_STORED or isinstance(value, CODE):
                continue
            try:
                found[key] = tree_codec.pack(
                    value, f"{label}.param_groups[{number}][{key!r}]", keep
                )
            except UnsupportedStateError as error:
                optimizer = self._optimizers[label]
                if not has_its_own(optimizer):
                    where = f"param_groups[{number}][{key!r}]"
                    raise unstorable(optimizer, where, error) from error
                self._unstored.add((label, str(number), key))
        return {tree_codec.TAG: "dict", "v": [*found.items()]} if tree_codec.TAG in found else found

    # --- remainders -----------------------------------------------------------------------------

    def pack_remainders(self, arena: tree_codec.Arena) -> dict[str, Any]:
        """Remainders of the optimizers' own `state_dict()`s, see `extra_state`.

        Most optimizers have none, and are not asked. One with thousands of parameters that had none
        is asked again after a change of structure, and after 1, 2, 4, ... boundaries.
        """
        remainders = self.remainders()
        if not remainders:
            self._beside_bytes = 0
            return {}
        before = arena.nbytes
        found = {label: packed(left, label, arena) for label, left in remainders.items()}
        self._beside_bytes = arena.nbytes - before
        return found

    def new_heavy(self) -> str:
        """Size of the remainders packed last, once it is large; returned only once, else empty."""
        if self._beside_bytes < HEAVY_BYTES or self._heavy_reported:
            return ""
        self._heavy_reported = True
        return f"{self._beside_bytes / 1e6:.0f} MB"

    def remainders(self) -> dict[str, dict[str, Any]]:
        """The remainders of all optimizers, with live tensors."""
        found = {}
        taker: Taker | None = None
        for label, optimizer in self._optimizers.items():
            marked = label in self.with_others or any(label == each for each, *_ in self._unstored)
            if not marked and not self._may_have_more(label, optimizer):
                continue
            taker = taker or Taker(self._optimizers, self._name_of, frozenset(self._unstored))
            if (left := taker.taken(label)) is not None:
                found[label] = left
                self._nothing_left.pop(label, None)
            else:
                self._nothing_left.setdefault(label, 0)
        return found

    def _may_have_more(self, label: str, optimizer: torch.optim.Optimizer) -> bool:
        if not has_its_own(optimizer):
            return False
        boundaries = self._nothing_left.get(label)
        if boundaries is None:
            return True
        self._nothing_left[label] = boundaries + 1
        few = sum(len(group["params"]) for group in optimizer.param_groups) <= FEW
        return few or not boundaries & (boundaries + 1)

    # --- a walk's state -------------------------------------------------------------------------

    def group_odd(
        self, odd: Sequence[tuple[torch.Tensor, int, str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """A walk's odd state by parameter: numbers, None, lists of tensors (LBFGS)."""
        labels = list(self._optimizers)
        grouped: dict[str, dict[str, Any]] = {}
        for param, index, key, node in odd:
            grouped.setdefault(f"{labels[index]}/{self._name_of(param)}", {})[key] = node
        return grouped

    def shared(
        self, state: Sequence[tuple[torch.Tensor, torch.Tensor, int, str]]
    ) -> list[list[Any]]:
        """Tensors that several parameters share in a walk's optimizer state (quantile maps): the
        optimizer's label, the key, and the parameters' names, or None for all parameters."""
        if len({id(tensor) for tensor, *_ in state}) == len(state):
            return []
        labels = list(self._optimizers)
        holders: dict[tuple[int, str, int], list[torch.Tensor]] = {}
        having: Counter[tuple[int, str]] = Counter()
        for tensor, param, index, key in state:
            holders.setdefault((index, key, id(tensor)), []).append(param)
            having[index, key] += 1
        found: list[list[Any]] = []
        for (index, key, _), params in holders.items():
            if len(params) > 1:
                every = len(params) == having[index, key]
                names = None if every else [self._name_of(param) for param in params]
                found.append([labels[index], key, names])
        return found


def _is_constant(value: Any) -> bool:
    """True for a value that cannot change in place."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in (*_PLAIN, float) or isinstance(value, CODE)


__all__ = ["GROUP_KEYS_NOT_STORED", "OptimizerTree"]
