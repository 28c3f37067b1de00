"""Group: the few collectives the core needs, and the single-process one.

An adapter hands the core a Group over its own communication library. Every method is called by
the training thread, by all ranks in the same order; nothing here may be called from another
thread, except `Pending.wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


class Pending(Protocol):
    """An all-reduce under way."""

    def wait(self) -> list[int]:
        """The result, waiting for it. Any thread; may be called again."""
        ...

    def done(self) -> bool:
        """True when `wait` returns, or raises, at once. Any thread, also while another waits."""
        ...


@runtime_checkable
class Group(Protocol):
    """All ranks of the job."""

    rank: int
    size: int

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. For start and restart, not for steps."""
        ...

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Make every rank's `buffer` (uint8, 1-d, CPU, contiguous) equal to `source`'s."""
        ...

    def all_reduce_min(self, values: list[int]) -> Pending:
        """Launch an element-wise minimum over all ranks; returns at once."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...

    def meet(self, timeout_seconds: float) -> bool:
        """True when all ranks call it in time; never hangs or raises. For the end of a process.

        After a False the group may be good for nothing but `close`.
        """
        ...

    def close(self) -> None:
        """Give up what the group holds."""
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
        """See Group."""
        return [value]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """See Group."""

    def all_reduce_min(self, values: list[int]) -> Pending:
        """See Group."""
        return _Done(list(values))

    def barrier(self) -> None:
        """See Group."""

    def meet(self, timeout_seconds: float) -> bool:
        """See Group."""
        return True

    def close(self) -> None:
        """See Group."""


@dataclass(frozen=True)
class Node:
    """A rank's node among those of the job."""

    index: int
    """Nodes are numbered in the order of their first ranks."""
    count: int
    ranks: tuple[int, ...]
    """Of the job, that run here."""

    @property
    def first(self) -> int:
        """The rank that does what is done once a node."""
        return self.ranks[0]

    @staticmethod
    def of(host: str, hosts: Sequence[str]) -> Node:
        """`hosts` names every rank's node."""
        nodes = list(dict.fromkeys(hosts))
        ranks = tuple(rank for rank, other in enumerate(hosts) if other == host)
        return Node(nodes.index(host), len(nodes), ranks)
