"""Untouched tensors: restored ones that still have the restored bytes.

A script with checkpoints of its own may load one after the restore, on one rank, and broadcast it.
Then the loaded values win on all ranks; otherwise each rank keeps its restored values, because
BatchNorm statistics differ between ranks. Torch's version counters are not enough: a write through
`.data` does not change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from horovod_ckpt.elastic.state_broadcast import as_bytes
from tierckpt.format.layout import PER_RANK
from tierckpt.state.names import named_buffers, named_parameters

from .checkpointer import Checkpointer

Named = dict[str, torch.Tensor]


class Untouched:
    """The tensors that one checkpointer has restored. Training thread."""

    def __init__(self, checkpointer: Checkpointer, optimizer: Any) -> None:
        """Take the digests; call it right after the restore, if there was one."""
        self._checkpointer, self._optimizer = checkpointer, optimizer
        self._digests = _digests(self._tensors()) if self.counts() else {}

    def counts(self) -> bool:
        """True after a restore, until the first step. Equal on all ranks."""
        ckpt = self._checkpointer
        made_none = ckpt.adapter.handle.steps_made == ckpt.restored.version
        return bool(ckpt.restored.levels) and made_none and not ckpt.closed

    def among(self, places: set[int]) -> list[torch.Tensor]:
        """The tensors with memory in `places` that have the restored bytes on all ranks.
        Collective. Reports the others in a warning."""
        given = {n: t for n, t in self._tensors().items() if place(t) in places}
        changed = [n for n, digest in _digests(given).items() if digest != self._digests.get(n)]
        by_rank = dict(enumerate(self._checkpointer.group.all_gather_object(changed)))
        anywhere = {name for names in by_rank.values() for name in names}
        if anywhere:
            self._checkpointer.adapter.report_overwritten(
                {r: names for r, names in by_rank.items() if names}
            )
        return [tensor for name, tensor in given.items() if name not in anywhere]

    def _tensors(self) -> Named:
        """Parameters, buffers, and optimizer state that is each rank's own, by name."""
        state = self._checkpointer.adapter.handle.state
        found: Named = dict(named_parameters(state.model) + named_buffers(state.model))
        known = {id(tensor) for tensor in found.values()}
        loose = (p for p in self._optimizer._parameter_names if id(p) not in known)
        found.update((f"optimizer's parameter {n}", p) for n, p in enumerate(loose))
        walk = state.walk()
        for label, each in state.optimizers.items():
            for number, (param, kept) in enumerate(each.state.items()):
                if walk.placement(param) is PER_RANK:
                    found.update(_tensors_in(kept, f"{label}/{number}"))
        return found


def place(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory: a parameter and its entry in a state_dict share it."""
    return tensor.untyped_storage().data_ptr()


def _tensors_in(kept: Mapping[str, Any], prefix: str) -> Named:
    return {f"{prefix}/{k}": value for k, value in kept.items() if torch.is_tensor(value)}


def _digests(named: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    flat = {name: as_bytes(tensor).cpu().numpy() for name, tensor in named.items()}
    return {name: xxhash.xxh3_128_digest(part.data) for name, part in flat.items()}


__all__ = ["Untouched", "place"]
