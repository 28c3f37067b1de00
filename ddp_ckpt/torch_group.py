"""The core's Group over torch.distributed, on a gloo process group of its own."""

from __future__ import annotations

import contextlib
import datetime
import pickle
from typing import Any

import torch
import torch.distributed as dist

from tierckpt import SingleGroup
from tierckpt.group import Group, Pending

GATHER_BYTES = 1024
"""Of every rank's object at least so much is gathered at once."""


class _PendingReduce:
    def __init__(self, buffer: torch.Tensor, work: dist.Work) -> None:
        self._buffer = buffer
        self._work = work

    def wait(self) -> list[int]:
        self._work.wait()
        return [int(v) for v in self._buffer.tolist()]

    def done(self) -> bool:
        return bool(self._work.is_completed())


class TorchGroup:
    """All ranks of a process group (default: all of the job), over gloo and CPU memory.

    A group of its own: collectives of two users on one gloo group match by order only, and DDP
    launches its from the autograd thread (sharing the default group deadlocks). Creating one is
    collective.
    """

    def __init__(self, members: dist.ProcessGroup | None = None) -> None:
        if not dist.is_gloo_available():
            raise RuntimeError(
                "this torch has no gloo, which checkpoints need to agree on versions"
            )
        self.rank = dist.get_rank(members)
        self.size = dist.get_world_size(members)
        self._ranks = dist.get_process_group_ranks(members)
        # Only the members of a part of the job come here, so only they may be needed.
        part = self.size < dist.get_world_size()
        self._group: Any = dist.new_group(
            self._ranks, _patience(members), backend="gloo", use_local_synchronization=part
        )
        self._minimum = dist.AllreduceOptions()
        self._minimum.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Group."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.cat(self._all_gather(torch.tensor([mine.numel()], device="cpu"))).tolist()
        # gloo gathers equal sizes, and one rank may have much more to say than all others: what
        # all say, padded to that, would be ranks times as much. So that rank broadcasts the rest.
        width = min(max(sizes), max(GATHER_BYTES, 2 * sum(sizes) // self.size))
        padded = torch.zeros(width, dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine[:width]
        beginnings = self._all_gather(padded)
        return [
            pickle.loads(self._whole(rank, mine, begun, size).numpy().tobytes())
            for rank, (begun, size) in enumerate(zip(beginnings, sizes, strict=True))
        ]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def _whole(self, rank: int, mine: torch.Tensor, begun: torch.Tensor, size: int) -> torch.Tensor:
        """What `rank` says, of which the beginning is here; collective where that is not all."""
        if size <= begun.numel():
            return begun[:size]
        rest = mine[begun.numel() :] if rank == self.rank else begun.new_empty(size - begun.numel())
        self.broadcast(rest, rank)
        return torch.cat([begun, rest])

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """See Group."""
        dist.broadcast(buffer, src=self._ranks[source], group=self._group)

    def all_reduce_min(self, values: list[int]) -> Pending:
        """See Group."""
        # Straight to the process group: dist.all_reduce's checks cost as much as the launch.
        buffer = torch.tensor(values, dtype=torch.int64, device="cpu")
        return _PendingReduce(buffer, self._group.allreduce([buffer], self._minimum))

    def barrier(self) -> None:
        """See Group."""
        dist.barrier(group=self._group)

    def meet(self, timeout_seconds: float) -> bool:
        """See Group."""
        if self._group is None or not dist.is_initialized():
            return False
        try:
            patience = datetime.timedelta(seconds=timeout_seconds)
            dist.monitored_barrier(self._group, timeout=patience)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """See Group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _patience(members: dist.ProcessGroup | None) -> datetime.timedelta:
    """How long collectives wait: as long as those of `members`, if that is longer than torch's
    default. A vote is launched at the boundary, and a rank may come to it after a long evaluation
    that the training's own collectives have the patience for."""
    group = members or dist.group.WORLD
    assert group is not None
    found = [dist.default_pg_timeout]
    for device in ("cpu", "cuda"):
        # No such backend here, or one without options.
        with contextlib.suppress(RuntimeError, AttributeError):
            found.append(group._get_backend(torch.device(device)).options._timeout)
    return max(found)


def current_group(members: dist.ProcessGroup | None = None) -> Group:
    """A TorchGroup of `members` (default: the job) if they are several, else a SingleGroup."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(members) > 1:
        return TorchGroup(members)
    return SingleGroup()
