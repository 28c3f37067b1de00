"""Tensors that a restore has to make, and their memory taken in time.

A freshly started optimizer has no state yet, so most of what is loaded goes into new memory, and
the kernel clears each page of it when it is touched first: that takes longer than to copy into it.
What a rank's own headers name is known as soon as they are read, and its thread has nothing to do
until the rest is. Shards are striped: almost every large tensor is named in each of them.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import torch

from . import tree
from .copyplan import as_bytes
from .layout import TensorSpec
from .modulenames import FIXED, path_of
from .shardfile import ShardHeader
from .state import TrainingState

LARGE_BYTES = 256 * 1024
"""Below it memory comes out of the allocator's heap, and most of that was touched before."""


class NewTensors:
    """Makes optimizer state that is not in the live optimizer. One thread calls."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._made: dict[str, tuple[TensorSpec, torch.Tensor]] = {}

    def foresee(self, headers: Iterable[ShardHeader]) -> None:
        """Make the large ones on the host that these shards have pieces of, and touch them.

        Guesses: what is not asked for later goes with this object. It never raises, as its rank
        would be alone with that: what is wrong here is met, and told, by the loading.
        """
        with contextlib.suppress(Exception):
            live = {name: tensor for name, tensor, _ in self._state.entries(self._state.walk())}
            for spec in (piece.spec for header in headers for piece in header.pieces):
                if self._wanted(spec, live):
                    tensor = tree.empty(spec, "cpu")
                    as_bytes(tree.flat(tensor))[:: mmap.PAGESIZE].zero_()
                    self._made[spec.name] = spec, tensor

    def _wanted(self, spec: TensorSpec, live: dict[str, torch.Tensor]) -> bool:
        if spec.nbytes < LARGE_BYTES or spec.name.startswith(FIXED):
            return False
        param = live.get(f"model/{path_of(spec.name)[0]}")
        return (
            spec.name not in live
            and param is not None
            and param.device.type == spec.device == "cpu"
            and self._made.get(spec.name, (None,))[0] != spec
        )

    def make(self, spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
        """An uninitialised tensor; the caller's."""
        foreseen, tensor = self._made.pop(spec.name, (None, None))
        if tensor is not None and foreseen == spec and tensor.device == torch.device(device):
            return tensor
        return tree.empty(spec, device)
