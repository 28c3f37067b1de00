"""The ranks of a job of files, which all make the same calls."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from tierckpt.errors import ConfigError, TierckptError
from tierckpt.group import Group, Pending, SingleGroup

if TYPE_CHECKING:
    import torch

SAME = {"__exit__": "close"}
"""Calls that do the same as others."""


class SameCalls:
    """A group whose gathers find out that ranks make different calls, as with `if rank == 0:`
    around one of them. Otherwise each rank would take the others' values for something else. Is a
    `Group`; the methods are those of the group inside."""

    def __init__(self, inner: Group) -> None:
        """Takes ownership of `inner`."""
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    def all_gather_object(self, value: Any) -> list[Any]:
        """As in Group. Raises TierckptError, on these ranks, if they come from different calls."""
        seen: list[tuple[str, Any]] = self._inner.all_gather_object((_call(), value))
        ranks: dict[str, int] = {}
        for rank, (call, _) in enumerate(seen):
            ranks.setdefault(call, rank)
        if len(ranks) > 1:
            calls = ", ".join(f"{call} on rank {rank}" for call, rank in ranks.items())
            raise TierckptError(
                f"the ranks make different calls: {calls}. All ranks must make the same calls, in "
                "the same order: none of them alone in `if rank == 0:`"
            )
        return [theirs for _, theirs in seen]

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """As in Group."""
        self._inner.broadcast(buffer, source)

    def all_reduce_min(self, values: list[int]) -> Pending:
        """As in Group."""
        return self._inner.all_reduce_min(values)

    def barrier(self) -> None:
        """As in Group."""
        self._inner.barrier()

    def meet(self, timeout_seconds: float) -> bool:
        """As in Group."""
        return self._inner.meet(timeout_seconds)

    def close(self) -> None:
        """As in Group."""
        self._inner.close()


def _call() -> str:
    """The call of the program that this thread is in: the outermost function of this package."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tierckpt."):
        name, frame = frame.f_code.co_name, frame.f_back
    return f"{SAME.get(name, name)}()"


def group_of(given: Any) -> Group:
    """The group for the argument `group` of `Files`. Raises ConfigError for another object."""
    if given is None:
        return SingleGroup()
    if isinstance(given, Group):
        return given if isinstance(given, SameCalls) else SameCalls(given)
    if hasattr(given, "Get_rank") and hasattr(given, "Dup"):
        from tierckpt.mpi import MPIGroup

        return SameCalls(MPIGroup(given))
    raise ConfigError(
        f"group is a {type(given).__name__}; give a communicator of mpi4py (MPI.COMM_WORLD), a "
        "tierckpt.Group (ddp_ckpt.TorchGroup() in a job of torch), or None for one process"
    )


__all__ = ["SameCalls", "group_of"]
