"""Restore a version's state of the optimizers.

An optimizer with a remainder (see `optimizer_state`), or with a `load_state_dict()` that does more
than torch's, gets its whole state through that method, as after `torch.load`. The method may cast,
copy or drop values. So afterwards state and options are set to the version's, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from tierckpt._text import error_text
from tierckpt.errors import StateTornError, UnsupportedStateError
from tierckpt.state.training_state import TrainingState, optimizer_class
from tierckpt.state.tree_codec import cloned, is_made_of_tensors, same_type

from .optimizer_state import (
    Taker,
    has_its_own,
    indices,
    loads_its_own,
    put_together,
    same,
    without_parameter,
)
from .optimizers import Aliases

__all__ = ["OptimizerRestore", "Values", "beside"]


Values = dict[str, dict[str, Any]]
"""An optimizer's state by the parameter's name and key."""


class OptimizerRestore:
    """The optimizers of one version. Training thread; only `put` changes the live optimizers."""

    def __init__(
        self,
        state: TrainingState,
        saved: Mapping[str, Any],
        values: Mapping[str, Values],
        whole: bool = True,
    ) -> None:
        """`saved` is the decoded rank tree; `values`, by optimizer, the state stored by name. Only
        these optimizers are restored. Not `whole`: the version has another structure, and only the
        matching parts are restored."""
        self._whole = whole
        self._state, self._saved, self._values = state, saved, values
        self._nodes: Mapping[str, Any] = saved.get("remainders", {})
        self.notices: list[str] = []

    @functools.cached_property
    def _params(self) -> dict[str, torch.Tensor]:
        return self._state.params_by_name()

    def put(self) -> None:
        """Restore everything. Raises StateTornError when an optimizer does not take its state."""
        truth = dict(self._values)
        aliases = [Aliases(given) for given in self._state.given.values()]
        # An inner optimizer comes after the outer one in the state, and before it here.
        for label in reversed([label for label in self._state.optimizers if label in truth]):
            optimizer = self._state.optimizers[label]
            if has_its_own(optimizer) or loads_its_own(optimizer):
                truth[label] = cloned(truth[label])  # load_state_dict() may change its argument
                self._load(label, optimizer)
        for each in aliases:
            each.mend()
        for label, values in truth.items():
            self._replace(label, self._state.optimizers[label], values)
        for label in truth:
            self._check(label, self._state.optimizers[label])

    def _load(self, label: str, optimizer: torch.optim.Optimizer) -> None:
        """Load through its own `load_state_dict()`."""
        node = self._nodes.get(label)
        if node is None and has_its_own(optimizer) and "remainders" not in self._saved:
            return  # of an older tierckpt: `_check` reports the missing parts
        plain = {"state": self.states(label), "param_groups": self.groups(label)}
        held = _Held(optimizer)
        try:
            optimizer.load_state_dict(plain if node is None else put_together(node, self))
        except Exception as error:
            it = f"optimizer {label!r}, a {optimizer_class(optimizer)}"
            why = error_text(error)
            if node is not None and self._whole:
                raise StateTornError(f"{it}, did not take its state ({why})") from error
            self.notices.append(
                f"{it}: its load_state_dict() failed ({why}). Its state and options were set "
                "directly; any other value that this method sets is unchanged"
            )
        held.put_back()

    def _replace(self, label: str, optimizer: torch.optim.Optimizer, values: Values) -> None:
        node = self._nodes.get(label)
        # State in another optimizer's state_dict() was loaded with that one.
        through = [t for each in self._nodes.values() for t in each["through"]["state"]]
        kept = {(name, key) for owner, name, key in through if owner == label}
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = self._state.name_of(param)
                leave = {key for owner, key in kept if owner == name}
                _replace_state(optimizer, param, values.get(name, {}), leave)
        self._join(label, optimizer)
        self._replace_others(label, optimizer, node)
        self._replace_options(label, optimizer)

    def _join(self, label: str, optimizer: torch.optim.Optimizer) -> None:
        """Make tensors that parameters shared shared again."""
        shared = [each for each in self._saved.get("shared", ()) if each[0] == label]
        for _, key, names in shared:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            kept = [
                optimizer.state[p]
                for p in params
                if key in optimizer.state.get(p, ())
                and (names is None or self._state.name_of(p) in names)
            ]
            for each in kept[1:]:
                each[key] = kept[0][key]

    def _replace_others(self, label: str, optimizer: torch.optim.Optimizer, node: Any) -> None:
        """Restore the state under other keys than parameters."""
        others: dict[Any, Any] = optimizer.state
        if node is not None and (has_its_own(optimizer) or loads_its_own(optimizer)):
            return  # already loaded
        before = {key: others.pop(key) for key in without_parameter(optimizer)}
        if node is None:
            return
        known = {number for numbers in indices(optimizer) for number in numbers}
        for key, value in put_together(node, self)["state"].items():
            if key not in known:
                others[key] = beside(before.get(key), value)

    def _replace_options(self, label: str, optimizer: torch.optim.Optimizer) -> None:
        first = self._state.first_options[label]
        through = [t for each in self._nodes.values() for t in each["through"]["groups"]]
        kept = {(number, key) for owner, number, key in through if owner == label}
        groups = zip(optimizer.param_groups, self._saved["groups"][label], strict=False)
        for number, (group, options) in enumerate(groups):
            for key in group.keys() - options.keys() - first:
                if (number, key) not in kept:
                    del group[key]
            for key, value in options.items():
                if (number, key) not in kept:
                    group[key] = beside(group.get(key), value)

    def _check(self, label: str, optimizer: torch.optim.Optimizer) -> None:
        """Add a notice for values that were not restored."""
        if not (has_its_own(optimizer) or label in self._nodes):
            return
        it = f"optimizer {label!r}, a {optimizer_class(optimizer)}"
        try:
            taker = Taker(self._state.optimizers, self._state.name_of)
            now = taker.taken(label) or {}
        except UnsupportedStateError as error:
            self.notices.append(str(error))
            return
        then = self._nodes.get(label) or {}
        lost = _lost(then.get("shown", {}), now.get("shown", {}))
        if not lost and not same(then.get("parts", []), now.get("parts", [])):
            lost = ["state", "param_groups"]
        if not lost:
            return
        names = ", ".join(map(repr, lost))
        if "remainders" not in self._saved:
            why = "the version was written by an older tierckpt, which did not store it"
        else:
            why = "its load_state_dict() did not restore it"
        self.notices.append(f"{it}: {names} of its state_dict() differs from the saved one: {why}")

    # --- for `put_together` --------------------------------------------------------------------

    def states(self, label: str) -> dict[int, dict[str, Any]]:
        """States of the parameters, see `Stored`."""
        optimizer, values = self._state.optimizers[label], self._values.get(label, {})
        found = {}
        for numbers, group in zip(indices(optimizer), optimizer.param_groups, strict=True):
            for number, param in zip(numbers, group["params"], strict=True):
                if (name := self._state.name_of(param)) in values:
                    found[number] = dict(values[name])
        return found

    def groups(self, label: str) -> list[dict[str, Any]]:
        """Options of the groups, see `Stored`."""
        numbers = indices(self._state.optimizers[label])
        pairs = zip(self._saved["groups"][label], numbers, strict=False)
        return [{**options, "params": each} for options, each in pairs]

    def value(self, label: str, name: str, key: str) -> Any:
        """One value of a state, see `Stored`."""
        return self._values[label][name][key]

    def param(self, name: str) -> torch.Tensor:
        """A parameter, see `Stored`."""
        return self._params[name]


class _Held:
    """The dicts of an optimizer's groups, their list, and its state, all of which torch's
    `load_state_dict()` replaces. A scheduler made for the optimizer inside Horovod's holds these
    very dicts, and would continue with outdated options."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._held = optimizer, vars(optimizer)
        self._list, self._state = optimizer.param_groups, optimizer.state
        self._groups = list(self._list)

    def put_back(self) -> None:
        """Put the original objects back, with the new contents."""
        now: list[dict[str, Any]] = self._optimizer.param_groups
        if len(now) != len(self._groups):
            return
        for was, group in zip(self._groups, now, strict=True):
            _become(was, group)
        if "param_groups" in self._held:  # else the list belongs to another optimizer
            self._list[:] = self._groups
            self._optimizer.param_groups = self._list
        if "state" in self._held and type(self._optimizer.state) is type(self._state):
            _become(self._state, self._optimizer.state)
            self._optimizer.state = self._state


def _become(was: dict[Any, Any], now: dict[Any, Any]) -> None:
    if was is not now:
        values = dict(now)
        was.clear()
        was.update(values)


def _lost(then: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """Keys, other than torch's own, with different values, or in only one of the two."""
    keys = [key for key in {**then, **now} if key not in ("state", "param_groups")]
    return [k for k in keys if k not in then or k not in now or not same(then[k], now[k])]


def _replace_state(
    optimizer: torch.optim.Optimizer,
    param: torch.Tensor,
    values: dict[str, Any],
    leave: set[str],
) -> None:
    """Make `values` all of the parameter's state, except for the keys in `leave`."""
    if not values and not leave:
        optimizer.state.pop(param, None)
        return
    kept = optimizer.state.setdefault(param, {})
    for key in set(kept) - set(values) - leave:
        del kept[key]
    for key, value in values.items():
        kept[key] = _placed(kept.get(key), value, param)


def _placed(live: Any, value: Any, param: torch.Tensor) -> Any:
    """The value to keep: the live tensor if it can hold it, as other code may refer to that."""
    if isinstance(value, torch.Tensor):
        return _into(live, value)
    return _on_device(value, param)


def _into(live: Any, value: torch.Tensor) -> torch.Tensor:
    if live is value or not isinstance(live, torch.Tensor) or type(live) is not type(value):
        return value
    if is_made_of_tensors(value):
        return value
    then, now = ((t.shape, t.dtype, t.stride(), t.device) for t in (value, live))
    if then != now or live.requires_grad:
        return value
    live.copy_(value)
    return live


def beside(live: Any, value: Any) -> Any:
    """A value that came from the host, moved to the device of its predecessor."""
    if not (isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)):
        return value
    if (live.shape, live.dtype) != (value.shape, value.dtype):
        return value.to(live.device)
    live.copy_(value)
    return live


def _on_device(value: Any, param: torch.Tensor) -> Any:
    """Move tensors in lists to the parameter's device; plain tensors are there already."""
    if isinstance(value, (list, tuple)):
        moved = (
            v.to(param.device) if isinstance(v, torch.Tensor) else _on_device(v, param)
            for v in value
        )
        return same_type(value, moved)
    return value
