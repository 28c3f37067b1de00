"""The result of `state_dict()` for a module with hooks, but no other code of its own.

Such hooks see the entries of all modules inside (torch's checkpoint wrappers rename them), so most
of a model. Their input is known: it is made here from views kept between calls, and no
module inside is queried.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch


class HookedState:
    """State of one module; valid while the modules inside it are the same."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        slots: Sequence[tuple[str, dict[str, Any], str]],
        extras: Mapping[str, torch.nn.Module],
        versions: Mapping[str, int],
    ) -> None:
        """All names are torch's. `slots`: the name of each tensor, the dict that holds it, and its
        key there. `extras`: modules with extra state. `versions`: format version of all modules."""
        self._name, self._module, self._extras = name, module, extras
        self._keys = [key for key, *_ in slots]
        self._slots = [(held, key) for _, held, key in slots]
        self._versions = {n: v for n, v in versions.items() if v != 1 or n == name}
        self._live: list[torch.Tensor | None] = []
        self._views: list[torch.Tensor | None] = []

    def ask(self) -> Any:
        """The result of the module's `state_dict()`, without metadata that has only version 1. A
        value that no hook has touched is the same object as in the last call while the live tensor
        is the same. Raises the errors of hooks."""
        prefix = f"{self._name}." if self._name else ""
        for before in self._module._state_dict_pre_hooks.values():
            before(self._module, prefix, False)
        self._look()
        pairs = zip(self._keys, self._views, strict=True)
        into: Any = collections.OrderedDict((k, view) for k, view in pairs if view is not None)
        into.update((key, module.get_extra_state()) for key, module in self._extras.items())
        into._metadata = collections.OrderedDict(
            (name, {"version": version}) for name, version in self._versions.items()
        )
        now, metadata = into, into._metadata[self._name]
        for hook in self._module._state_dict_hooks.values():
            result = hook(self._module, now, prefix, metadata)
            if result is not None and getattr(hook, "_from_public_api", False):
                raise RuntimeError("state_dict post-hook must return None")
            now = now if result is None else result
        return into if self._name else now  # torch uses a hook's return value only at the root

    def _look(self) -> None:
        live = [held.get(key) for held, key in self._slots]
        if len(live) == len(self._live) and all(map(is_, live, self._live)):
            both = zip(self._views, live, strict=True)
            if all(
                view is None or tensor is None or view.is_set_to(tensor) for view, tensor in both
            ):
                return
        self._live = live
        self._views = [None if tensor is None else tensor.detach() for tensor in live]


__all__ = ["HookedState"]
