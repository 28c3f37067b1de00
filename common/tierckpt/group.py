"""Group: the few collectives that the core needs, and a group of one process.

An adapter gives the core a Group over its own communication library. All ranks call every method on
the training thread, in the same order. Only `Pending.wait` and `Pending.done` may be called on
another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct

if TYPE_CHECKING:
    import torch


class Pending(Protocol):
    """An all-reduce in progress."""

    def wait(self) -> list[int]:
        """Wait for the result and return it. Any thread; may be called again."""
        ...

    def done(self) -> bool:
        """True if `wait` would return or raise at once. Any thread, also while another one
        waits."""
        ...


@runtime_checkable
class Group(Protocol):
    """All ranks of the job."""

    rank: int
    size: int

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value` in rank order. Used at start and restart, not for steps."""
        ...

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Copy `source`'s `buffer` (uint8, 1-d, CPU, contiguous) to all ranks.

        In a process that has not imported torch the buffer is a numpy array."""
        ...

    def all_reduce_min(self, values: list[int]) -> Pending:
        """Launch an element-wise minimum over all ranks; returns at once."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def meet(self, timeout_seconds: float) -> bool:
        """True if all ranks call it in time; never hangs or raises. For the end of a process.

        After a False the group may be usable only for `close`.
        """
        ...

    def close(self) -> None:
        """Release the group's resources."""
        ...


class _Done:
    def __init__(self, values: list[int]) -> None:
        self._values = values

    def wait(self) -> list[int]:
        return self._values

    def done(self) -> bool:
        return True


class SingleGroup:
    """A job of one process."""

    rank = 0
    size = 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """As in Group."""
        return [value]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """As in Group."""

    def all_reduce_min(self, values: list[int]) -> Pending:
        """As in Group."""
        return _Done(list(values))

    def barrier(self) -> None:
        """As in Group."""

    def meet(self, timeout_seconds: float) -> bool:
        """As in Group."""
        return True

    def close(self) -> None:
        """As in Group."""


class Node(Struct, frozen=True):
    """A rank's node among those of the job."""

    index: int
    """Index of the node; nodes are numbered in the order of their first ranks."""
    count: int
    ranks: tuple[int, ...]
    """The job's ranks on this node."""

    @property
    def first(self) -> int:
        """The rank that does the work needed once per node."""
        return self.ranks[0]

    @staticmethod
    def of(host: str, hosts: Sequence[str]) -> Node:
        """The node `host`; `hosts` names every rank's node."""
        nodes = list(dict.fromkeys(hosts))
        ranks = tuple(rank for rank, other in enumerate(hosts) if other == host)
        return Node(nodes.index(host), len(nodes), ranks)
