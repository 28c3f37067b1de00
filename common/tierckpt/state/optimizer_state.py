"""What optimizers keep besides tensors by name: the optimizers' part of the rank tree.

It has the options of every group, state other than tensors, and the remainders of their own
`state_dict()`s.

A `state_dict()` may hold more than each parameter's state and the options of its groups, which are
stored by name: a warm-up counter, an addition of a hook, state under another key than a parameter,
the whole state of an optimizer inside it. These are the remainder. It is taken at the boundary,
like an `extra` object, and is loaded through the optimizer's own `load_state_dict()`.

A `state_dict()` is taken apart here: a reference (`Entry`) replaces each value stored by name, so
the remainder is small. With its references resolved, it is exactly the original dict.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol

import torch

from tierckpt._text import error_text
from tierckpt.errors import UnsupportedStateError
from tierckpt.state import tree_codec
from tierckpt.state.optimizers import unstorable
from tierckpt.state.tree_codec import Entry

from .optimizers import class_name

__all__ = [
    "GROUP_KEYS_NOT_STORED",
    "STATE_DICT_HOOKS",
    "Member",
    "OptimizerTree",
    "Stored",
    "Taker",
    "has_its_own",
    "indices",
    "loads_its_own",
    "packed",
    "put_together",
    "same",
    "without_parameter",
]


Optimizers = Mapping[str, torch.optim.Optimizer]
Unstored = frozenset[tuple[str, int | str, str]]
"""Values that cannot be stored by name, although a `state_dict()` has another form of them. In a
parameter's state: (label, `id()` of the parameter, key). In a group's options: (label, number of
the group in digits, key)."""
_TORCHS = torch.optim.Optimizer.state_dict
_NO_OPTIONS = ("params",)
BARE = "~all"
"""The only key of the remainder if `state_dict()` returns no dict."""


_POST_HOOKS, _PRE_HOOKS = "_optimizer_state_dict_post_hooks", "_optimizer_state_dict_pre_hooks"
STATE_DICT_HOOKS = (_POST_HOOKS, _PRE_HOOKS)


def has_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """True if `state_dict()` may return more than torch's: it is overridden, or has hooks."""
    held = vars(optimizer)
    return (
        type(optimizer).state_dict is not _TORCHS
        or "state_dict" in held
        or bool(held.get(_POST_HOOKS))
        or bool(held.get(_PRE_HOOKS))
    )


def loads_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """True if `load_state_dict()` may do more than torch's: it may also set values that are in no
    `state_dict()`, because they follow from the state."""
    base, held = torch.optim.Optimizer, vars(optimizer)
    theirs = [kind for kind in type(optimizer).__mro__ if not kind.__module__.startswith("torch.")]
    return (
        "load_state_dict" in held
        or any("load_state_dict" in vars(k) or "__setstate__" in vars(k) for k in theirs)
        or type(optimizer).load_state_dict is not base.load_state_dict
        or bool(held.get("_optimizer_load_state_dict_pre_hooks"))
        or bool(held.get("_optimizer_load_state_dict_post_hooks"))
    )


def without_parameter(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Keys of its state other than tensors."""
    state: dict[Any, Any] = optimizer.state
    return [key for key in state if not isinstance(key, torch.Tensor)]


def indices(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The number of each parameter in torch's state_dict(), group by group."""
    known: dict[int, int] = {}
    found, start = [], 0
    for group in optimizer.param_groups:
        for number, param in enumerate(group["params"], start):
            known.setdefault(id(param), number)
        start += len(group["params"])
        found.append([known[id(param)] for param in group["params"]])
    return found


class Member:
    """One optimizer as it is now, in the form of its `state_dict()`."""

    def __init__(self, label: str, optimizer: torch.optim.Optimizer) -> None:
        self.label, self.optimizer = label, optimizer
        self.indices = indices(optimizer)
        self.states: dict[int, Any] = {}
        """The live dicts by index."""
        self.params: dict[int, torch.Tensor] = {}
        for numbers, group in zip(self.indices, optimizer.param_groups, strict=True):
            for number, param in zip(numbers, group["params"], strict=True):
                self.params[number] = param
                if param in optimizer.state:
                    self.states[number] = optimizer.state[param]


class Taker:
    """Takes `state_dict()`s apart, at one boundary."""

    def __init__(
        self,
        optimizers: Optimizers,
        name_of: Callable[[torch.Tensor], str],
        unstored: Unstored = frozenset(),
    ) -> None:
        """`unstored`: values that cannot be stored by name."""
        self._optimizers, self._name_of, self._unstored = optimizers, name_of, unstored
        self._members: dict[str, Member] = {}
        self._known: dict[int, Entry] | None = None
        self._parts: list[dict[str, Any]] = []
        self._moved: list[torch.Tensor] = []
        self._own = ""

    def taken(self, label: str) -> dict[str, Any] | None:
        """The remainder of one optimizer, with tensors in it; None if there is none.

        Raises UnsupportedStateError if its state_dict() fails.
        """
        optimizer = self._optimizers[label]
        self._own = label
        self._parts, self._moved = [], []
        given = _asked(label, optimizer)
        shown = self._dict(given)
        if given.keys() == {"state", "param_groups"} and all(
            isinstance(each, Entry) and self._plain(each) for each in shown.values() if each
        ):
            return None
        return {
            "shown": shown,
            "parts": self._parts,
            "moved": self._moved,
            "through": self._through(),
        }

    def _through(self) -> dict[str, list[Any]]:
        """Values of all optimizers not stored by name, so only in such a dict."""
        found: dict[str, list[Any]] = {"groups": [], "state": []}
        for label, where, key in self._unstored:
            if isinstance(where, str):
                found["groups"].append([label, int(where), key])
                continue
            params = self._member(label).params.values()
            found["state"] += [[label, self._name_of(p), key] for p in params if id(p) == where]
        return found

    def _plain(self, entry: Entry) -> bool:
        """True for a reference to all stored state of this optimizer, and nothing else."""
        kind, _, number = entry.key.partition(" ")
        part = self._parts[int(number)] if kind == "part" else {}
        return part.get("of") == self._own and not (part["more"] or part["without"])

    def _member(self, label: str) -> Member:
        if label not in self._members:
            self._members[label] = Member(label, self._optimizers[label])
        return self._members[label]

    def _all_members(self) -> Iterator[Member]:
        yield self._member(self._own)
        yield from (self._member(label) for label in self._optimizers if label != self._own)

    # --- one value -----------------------------------------------------------------------------

    def _show(self, value: Any) -> Any:
        """`value` with references in the place of values stored by name."""
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind in (dict, OrderedDict):
            return self._dict(value)
        if kind is list and (part := self._groups(value)):
            return part
        if kind in (list, tuple):
            return kind(map(self._show, value))
        return value

    def _tensor(self, value: torch.Tensor) -> Any:
        if known := self._find().get(id(value)):
            return known
        if value.device.type == "cpu":
            return value
        self._moved.append(value)
        return Entry(f"moved {len(self._moved) - 1}")

    def _dict(self, value: dict[Any, Any]) -> Any:
        for member in self._all_members():
            if part := self._states(value, member):
                return part
        return type(value)((self._key(k), self._show(v)) for k, v in value.items())

    def _key(self, key: Any) -> Any:
        """The key; a reference if it is a parameter."""
        known = self._find().get(id(key)) if isinstance(key, torch.Tensor) else None
        return key if known is None else known

    def _find(self) -> dict[int, Entry]:
        """Entries of all tensors stored by name, by `id()`. Made when first needed, since it visits
        all tensors; a mere counter never needs it."""
        if self._known is None:
            self._known = found = {}
            for label in self._optimizers:
                member = self._member(label)
                for number, param in member.params.items():
                    name = self._name_of(param)
                    found[id(param)] = Entry(f"param {name}")
                    for key, each in _items(member.states.get(number)):
                        stored = isinstance(key, str) and "/" not in key
                        if stored and isinstance(each, torch.Tensor):
                            found[id(each)] = Entry(f"value {label}/{name}/{key}")
        return self._known

    def _left_out(self, label: str, param: torch.Tensor, key: Any) -> bool:
        return bool(self._unstored) and (label, id(param), key) in self._unstored

    # --- the parts of torch's own state_dict() -------------------------------------------------

    def _states(self, value: dict[Any, Any], member: Member) -> Entry | None:
        """A reference, if these are the states of an optimizer's parameters by index."""
        live = member.states
        same = {k for k, v in value.items() if type(k) is int and live.get(k, value) is v}
        if self._unstored:
            kept = [(k, live[k], member.params[k]) for k in same]
            same -= {k for k, v, p in kept if any(self._left_out(member.label, p, n) for n in v)}
        if not same:
            return None
        more = {self._key(k): self._show(v) for k, v in value.items() if k not in same}
        return self._part("states", member, more, [k for k in live if k not in value])

    def _groups(self, value: list[Any]) -> Entry | None:
        """A reference, if these are an optimizer's groups."""
        if not all(type(each) is dict and "params" in each for each in value):
            return None
        for member in self._all_members():
            groups = member.optimizer.param_groups
            if len(groups) != len(value) or not groups:
                continue
            if any(v["params"] != n for v, n in zip(value, member.indices, strict=True)):
                continue
            more: dict[Any, Any] = {}
            without: list[Any] = []
            for number, (given, group) in enumerate(zip(value, groups, strict=True)):
                lost = {
                    k for owner, n, k in self._unstored if (owner, n) == (member.label, str(number))
                }
                other = {
                    k: v
                    for k, v in given.items()
                    if k != "params" and (k in lost or not _same(group, k, v))
                }
                if other:
                    more[number] = {k: self._show(v) for k, v in other.items()}
                without += [[number, key] for key in group if key not in given]
            return self._part("groups", member, more, without)
        return None

    def _part(self, kind: str, member: Member, more: dict[Any, Any], without: list[Any]) -> Entry:
        self._parts.append({"kind": kind, "of": member.label, "more": more, "without": without})
        return Entry(f"part {len(self._parts) - 1}")


def _asked(label: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    name = f"optimizer {label!r}, a {class_name(optimizer)}"
    if not has_its_own(optimizer):  # torch's own state_dict() would return this
        member = Member(label, optimizer)
        others = {key: optimizer.state[key] for key in without_parameter(optimizer)}
        groups: list[dict[str, Any]] = [
            {**{k: v for k, v in group.items() if k not in _NO_OPTIONS}, "params": numbers}
            for numbers, group in zip(member.indices, optimizer.param_groups, strict=True)
        ]
        return {"state": {**member.states, **others}, "param_groups": groups}
    try:
        given = optimizer.state_dict()
    except Exception as error:
        raise UnsupportedStateError(
            f"{name}: its state_dict() raised {error_text(error)}. Without it, a "
            "checkpoint may lack parts of the state"
        ) from error
    whole: dict[str, Any] = given if type(given) in (dict, OrderedDict) else {BARE: given}
    return whole


def _items(values: Any) -> Any:
    return values.items() if isinstance(values, Mapping) else ()


def _same(group: Mapping[str, Any], key: str, value: Any) -> bool:
    """True if a group's option equals the stored one."""
    if key not in group:
        return False
    live = group[key]
    if live is value:
        return True
    plain = (bool, int, float, str, types.NoneType)
    return type(live) in plain and type(live) is type(value) and live == value


# --- and back ------------------------------------------------------------------------------------


class Stored(Protocol):
    """Values stored by name, for the code that puts a state_dict() together again."""

    def states(self, label: str) -> dict[int, dict[str, Any]]:
        """States of an optimizer's parameters, by index."""

    def groups(self, label: str) -> list[dict[str, Any]]:
        """Options of its groups, with the parameters' numbers as `params`."""

    def value(self, label: str, name: str, key: str) -> Any:
        """One value of its state of a parameter."""

    def param(self, name: str) -> Any:
        """A parameter."""


def packed(found: dict[str, Any], label: str, arena: tree_codec.Arena) -> Any:
    """Pack the result of `taken` for the rank tree. Raises UnsupportedStateError, with the path and
    with advice, for a value that cannot be stored."""
    try:
        return tree_codec.pack(found, f"optimizer {label!r}: state_dict()", arena.keep)
    except UnsupportedStateError as error:
        text = str(error).replace("state_dict()['shown']", "state_dict()")
        raise UnsupportedStateError(text) from error


def put_together(node: dict[str, Any], stored: Stored) -> Any:
    """The `state_dict()` from which a decoded remainder was taken; not always a dict."""

    def resolve(entry: Entry) -> Any:
        kind, _, rest = entry.key.partition(" ")
        if kind == "part":
            return part(node["parts"][int(rest)])
        if kind == "moved":
            return node["moved"][int(rest)]
        if kind == "param":
            return stored.param(rest)
        label, name = rest.split("/", 1)
        return stored.value(label, *name.rsplit("/", 1))

    def part(each: dict[str, Any]) -> Any:
        more = tree_codec.map_entries(each["more"], resolve)
        if each["kind"] == "states":
            states: dict[Any, Any] = {**stored.states(each["of"]), **more}
            return {k: v for k, v in states.items() if k not in each["without"]}
        groups = stored.groups(each["of"])
        for number, group in enumerate(groups):
            group.update(more.get(number, {}))
        for number, key in each["without"]:
            groups[number].pop(key, None)
        return groups

    found = tree_codec.map_entries(node["shown"], resolve)
    return found[BARE] if found.keys() == {BARE} else found


def same(one: Any, other: Any) -> bool:
    """True for two values of the same types, equal bit for bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return _same_tensors(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(repr(one) == repr(other))


def _same_tensors(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b = (each.detach().cpu().contiguous().view(-1) for each in (one, other))
    return not a.numel() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


GROUP_KEYS_NOT_STORED = ("params", "param_names")
CODE = (FunctionType, BuiltinFunctionType, type)
HEAVY_BYTES = 16 * 2**20
"""Limit of tensors copied at a boundary before a warning: some 3 ms."""
FEW = 1000
"""Limit of parameters of an optimizer for a `state_dict()` at every boundary."""
_CONSTANT = tree_codec.AS_THEY_ARE | {float}


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
        """See `Unstored`."""
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
        for key, value in chain.from_iterable(map(dict.items, groups)):
            known = type(value) in _CONSTANT or key in GROUP_KEYS_NOT_STORED
            if not (known or _is_constant(value)):
                return found
        self._options = keys, values, tree_codec.Packed(found)
        return self._options[2]

    def _pack_group(
        self, label: str, number: int, group: Mapping[str, Any], keep: tree_codec.KeepTensor
    ) -> dict[str, Any]:
        """Options of one group. Functions and classes are left out: they are code, not state."""
        found = {}
        for key, value in group.items():
            if type(value) in tree_codec.AS_THEY_ARE or (type(value) is float and isfinite(value)):
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
        """Remainders of the optimizers' own `state_dict()`s, see above.

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

    def has_no_more(self) -> bool:
        """True if no optimizer can have a remainder, until its attributes or its class change."""
        marked = self.with_others or self._unstored
        return not marked and not any(map(has_its_own, self._optimizers.values()))

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
    return type(value) in _CONSTANT or isinstance(value, CODE)
