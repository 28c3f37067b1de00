"""Placement: which ranks have which elements of a parameter, and of its optimizer state.

One place decides it. A layout, a replica check and a restore ask `Walk.placement`; an adapter says
what it reduces. A placement for a tensor of which each rank has a part (a shard) has its place
here, and in `format.layout`.

Not thread-safe: for the training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from tierckpt.errors import ConfigError
from tierckpt.format.layout import PER_RANK, Placement


class Placements:
    """The facts that decide where the elements of each parameter are."""

    def __init__(
        self, reduced: Sequence[torch.Tensor] | None, untrained: Sequence[torch.Tensor]
    ) -> None:
        """`reduced`, `untrained`: see the methods of `Adapter`."""
        self._reduced = None if reduced is None else {id(p): p for p in reduced}
        self._untrained = {id(p) for p in untrained}
        self._forward_changes: tuple[str, ...] = ()

    def forward_changes(self, patterns: str, names: Iterable[str]) -> None:
        """Set the parameters that the forward pass changes, see `Config.forward_changes`; `names`
        are all that there are. Raises ConfigError for a pattern that matches none."""
        known = list(names)
        self._forward_changes = tuple(filter(None, map(str.strip, patterns.split(","))))
        for pattern in self._forward_changes:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ConfigError(
                    f"forward_changes: no parameter has the name {pattern!r}; names are "
                    f"{', '.join(known[:5])}, ..."
                )

    def assumed_replicated(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `params` that nobody trains, and so nobody reduces: they count as replicated,
        until `keep_apart`."""
        return [p for p in params if id(p) in self._untrained]

    def keep_apart(self, params: Iterable[torch.Tensor]) -> None:
        """These are every rank's own from now on; for a new layout."""
        for param in params:
            if self._reduced is not None:
                self._reduced.pop(id(param), None)
            self._untrained.discard(id(param))

    def of(
        self,
        params: Collection[torch.Tensor],
        modules: Sequence[torch.nn.Module],
        name_of: Callable[[torch.Tensor], str],
    ) -> dict[int, Placement]:
        """By `id()`, the placement of each parameter that is not replicated."""
        own, reduced, patterns = _renormed(modules), self._reduced, self._forward_changes
        if reduced is not None:
            own += [p for p in params if id(p) not in reduced]
        if patterns:
            own += [p for p in params if any(fnmatchcase(name_of(p), each) for each in patterns)]
        return dict.fromkeys(map(id, own), PER_RANK)


def _renormed(modules: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Weights that the forward pass changes in place: rows longer than `max_norm` are scaled.

    Each rank looks up its own rows, so these weights differ between ranks; with a weight decay, so
    does their optimizer state.
    """
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    found = [m for m in modules if isinstance(m, kinds) and m.max_norm is not None]
    return [w for m in found if (w := m._parameters.get("weight")) is not None]


__all__ = ["Placements"]
