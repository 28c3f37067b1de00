"""The core's Group over torch.distributed, on a gloo process group of its own.

The DDP modules of a model, at any depth, have one common process group.
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tierckpt
from tierckpt import SingleGroup
from tierckpt.group import Group, Pending
from tierckpt.state.names import named_modules

__all__ = ["common_group", "find_ddps", "reduced_by"]


BROADCAST_COST_BYTES = 1 << 20
"""Bytes that a gathering carries in the time that one broadcast takes: both have to pass all
ranks."""
HEAD_BYTES, SIZE_BYTES = 1024, 8
"""What the first gathering of an object carries; its start is the object's size."""


class _PendingReduce:
    def __init__(self, buffer: torch.Tensor, work: dist.Work) -> None:
        self._buffer = buffer
        self._work = work

    def wait(self) -> list[int]:
        self._work.wait()
        return [int(v) for v in self._buffer.tolist()]

    def done(self) -> bool:
        return bool(self._work.is_completed())


def gathered_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of every rank's object to gather, for objects of `sizes`: ranks with more
    broadcast the rest, one after the other. The choice that takes the least time."""
    longest_first = sorted(sizes, reverse=True)
    costs = (
        len(sizes) * nbytes + broadcasts * BROADCAST_COST_BYTES
        for broadcasts, nbytes in enumerate(longest_first)
    )
    return longest_first[min(enumerate(costs), key=lambda cost: cost[1])[0]]


class TorchGroup:
    """All ranks of a process group (default: all of the job), over gloo and CPU memory.

    Makes its own process group: gloo matches collectives of one group only by their order, and DDP
    launches its collectives from the autograd thread, so a shared group would deadlock. Creating
    one is collective.
    """

    is_ring = True
    """gloo passes the messages of a reduction around all ranks, one after the other."""

    def __init__(self, members: dist.ProcessGroup | None = None) -> None:
        if not dist.is_gloo_available():
            raise RuntimeError("this torch has no gloo, which ranks need to agree on versions")
        self.rank = dist.get_rank(members)
        self.size = dist.get_world_size(members)
        self._ranks = dist.get_process_group_ranks(members)
        # If the group is a part of the job, only its members call this.
        part = self.size < dist.get_world_size()
        self._group: Any = dist.new_group(
            self._ranks, _patience(members), backend="gloo", use_local_synchronization=part
        )
        self._minimum = dist.AllreduceOptions()
        self._minimum.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Group."""
        packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([packed.numel()], device="cpu").view(torch.uint8)
        gathered = self._all_gather(_padded(torch.cat([size, packed]), HEAD_BYTES))
        sizes = [int(each[:SIZE_BYTES].view(torch.int64)) for each in gathered]
        heads = [each[SIZE_BYTES:] for each in gathered]
        # gloo gathers equal sizes. If one rank has a much larger object, padding all to its size
        # would gather `size` times as much; so that rank broadcasts the rest of its object.
        width = gathered_bytes(sizes)
        if width > heads[0].numel():
            heads = self._all_gather(_padded(packed, width))
        return [
            pickle.loads(self._whole(rank, packed, head, size).numpy().tobytes())
            for rank, (head, size) in enumerate(zip(heads, sizes, strict=True))
        ]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered

    def _whole(
        self, rank: int, packed: torch.Tensor, head: torch.Tensor, size: int
    ) -> torch.Tensor:
        """The whole object of `rank`, from its first bytes; collective if they are not all.
        `packed`: this rank's own object."""
        if size <= head.numel():
            return head[:size]
        rest = packed[head.numel() :] if rank == self.rank else head.new_empty(size - head.numel())
        self.broadcast(rest, rank)
        return torch.cat([head, rest])

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """See Group."""
        dist.broadcast(buffer, src=self._ranks[source], group=self._group)

    def all_reduce_min(self, values: list[int]) -> Pending:
        """See Group."""
        # Call the process group directly: the checks of dist.all_reduce cost as much as the launch.
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


def _padded(value: torch.Tensor, width: int) -> torch.Tensor:
    """The first bytes of a value, followed by zeros if it has fewer than `width`."""
    padded = torch.zeros(width, dtype=torch.uint8, device="cpu")
    padded[: value.numel()] = value[:width]
    return padded


def _patience(members: dist.ProcessGroup | None) -> datetime.timedelta:
    """The timeout of collectives: that of `members`, if it is longer than torch's default. A vote
    is launched at the boundary, and a rank may join it only after a long evaluation, for which the
    training's own collectives have a long enough timeout."""
    group = members or dist.group.WORLD
    assert group is not None
    found = [dist.default_pg_timeout]
    for device in ("cpu", "cuda"):
        # The group may have no such backend, or one without options.
        with contextlib.suppress(RuntimeError, AttributeError):
            found.append(group._get_backend(torch.device(device)).options._timeout)
    return max(found)


def current_group(members: dist.ProcessGroup | None = None) -> Group:
    """A TorchGroup of `members` (default: the job) if there are several ranks, else a
    SingleGroup."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(members) > 1:
        return TorchGroup(members)
    return SingleGroup()


def find_ddps(model: torch.nn.Module) -> dict[str, DistributedDataParallel]:
    """Return the outermost DDP modules by name; the name is empty if it is the model itself."""
    ddps = {n: m for n, m in named_modules(model) if isinstance(m, DistributedDataParallel)}
    inside = {id(m) for ddp in ddps.values() for m in ddp.module.modules()}
    return {name: ddp for name, ddp in ddps.items() if id(ddp) not in inside}


def common_group(ddps: Mapping[str, DistributedDataParallel]) -> dist.ProcessGroup | None:
    """The process group of the modules; None if there are no modules.

    Raises ConfigError if their groups have different ranks.
    """
    names = list(ddps)
    groups = [ddp.process_group for ddp in ddps.values()]
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    for name, theirs in zip(names, ranks, strict=True):
        if theirs != ranks[0]:
            raise tierckpt.ConfigError(
                f"the DDP modules {names[0]!r} and {name!r} have process groups of different "
                f"ranks, {ranks[0]} and {theirs}, but a checkpoint has one group of ranks; make a "
                "Checkpointer for each, with a path of its own"
            )
    return groups[0] if groups else None


def reduced_by(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that this module makes and keeps equal on all ranks: their gradients are
    reduced, or they have none."""
    ignored = ddp.parameters_to_ignore
    return [param for name, param in ddp.module.named_parameters() if name not in ignored]
