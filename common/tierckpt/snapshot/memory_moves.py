"""Memory moves: torch's operations that give a storage other memory and free what it had.

A copy in progress reads the memory that tensors had at the boundary. Aliases keep their storages,
so `tensor.data = ...`, `tensor.set_()` and `module.to()` are safe: they give the tensor another
storage. A few operations free the memory within a storage, such as `share_memory_()`, which
`multiprocessing` calls for every tensor that it sends, or `resize_()`. Here these wait for the copy
first, as an optimizer's step does, so the version is exact and nothing reads freed memory.

The wrappers stay in torch's classes, and call torch at once while nothing is copied. Extensions
that free memory without these methods are seen at the seal: see `PlanCheck.counters`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .copy_plan import CopyPlan

OF_STORAGES = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")
OF_TENSORS = ("resize_", "resize_as_")
MOVED = (
    "their memory was moved or freed between the boundary and the optimizer's step, by a way that "
    "Tierckpt could not wait for (an extension, or an operation with out=). Do that before the "
    "boundary, i.e. before step() of the checkpointer"
)


class Reader(Protocol):
    """A snapshot, or other work that reads the sources of a plan."""

    @property
    def plan(self) -> CopyPlan: ...

    @property
    def over(self) -> bool: ...

    @property
    def slot(self) -> object | None: ...

    def barrier(self) -> None: ...

    def wait_done(self) -> bool: ...


_copying: weakref.WeakValueDictionary[int, Reader] = weakref.WeakValueDictionary()
"""Snapshots that may be copying, by `id()`; those that are over go with the next one."""


def guard(snapshot: Reader) -> None:
    """Let the memory of this snapshot's sources stay until it is copied. Training thread, before
    the first block may be copied."""
    _install()
    for key, each in [*_copying.items()]:
        if each.over:
            _copying.pop(key, None)
    _copying[id(snapshot)] = snapshot


def _before_move(storage: torch.UntypedStorage) -> None:
    """Wait for the copies that read this storage. Any thread; raises nothing but an interrupt."""
    for snapshot in [*_copying.values()]:
        if not snapshot.over and snapshot.plan.reads(storage):
            snapshot.barrier()
            if snapshot.slot is not None:  # else no block was begun
                snapshot.wait_done()  # the barrier does not wait for the threads of a failed one


@functools.cache
def _install() -> None:
    os.register_at_fork(after_in_child=_copying.clear)  # the parent's threads copy
    for name in OF_STORAGES:
        _wrap(torch.UntypedStorage, name, lambda storage: storage)
    for name in OF_TENSORS:
        _wrap(torch.Tensor, name, torch.Tensor.untyped_storage)


def _wrap(kind: type, name: str, storage_of: Callable[[Any], torch.UntypedStorage]) -> None:
    moves = getattr(kind, name, None)
    if moves is None:  # this torch has no such method
        return

    @functools.wraps(moves)
    def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _copying:
            with contextlib.suppress(NotImplementedError):  # a sparse tensor has no storage
                _before_move(storage_of(self))
        return moves(self, *args, **kwargs)

    setattr(kind, name, waits)


__all__ = ["MOVED", "guard"]
